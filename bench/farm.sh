#!/usr/bin/env bash
# What a farm adds to `true`: one host's broker, server, mounts and two agents, tasks that do nothing.
#
#   bench/farm.sh [--rounds N] [--json FILE]
#
# Prints medians in milliseconds and ratios taken in one run: `true` by itself, as a task here, as a task through the
# broker, by `hayloft task` and by the small program; so many of these at once, with the processor time that whoever
# takes part uses for one; and a make of 400 recipes that do nothing, plain and with `hayloft make`.
set -uo pipefail
. "$(dirname "$0")/../tests/lib/farm.sh"
. "$(dirname "$0")/../tests/lib/task-farm.sh"
ROUNDS=200 JSON=''
while [ $# -gt 1 ]; do
    case $1 in --rounds) ROUNDS=$2 ;; --json) JSON=$(realpath -m "$2") ;; esac
    shift 2
done
task_farm "${FARM_PORT:-17992}"
farm_begin || { echo "the farm did not begin"; exit 1; }

cat >"$WORK/measure.py" <<'PYTHON'
import json, os, resource, statistics, subprocess, sys, time

hayloft, rounds, file, broker, *agents = sys.argv[1:]
rounds = int(rounds)
small = os.path.join(os.path.dirname(hayloft), "hayloft-task")
found = {}

def once(command, **how):
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, **how)
    return (time.perf_counter() - begun) * 1e3

ways = {
    "true": ["true"],
    "hayloft task --here -- true": [hayloft, "task", "--here", "--", "true"],
    "hayloft task --farm -- true": [hayloft, "task", "--farm", "--", "true"],
}
if os.path.exists(small):
    ways["hayloft-task --farm -- true"] = [small, "--farm", "--", "true"]
took = {name: [] for name in ways}
for name, command in ways.items():
    once(command)
for _ in range(rounds):
    for name, command in ways.items():
        took[name].append(once(command))
base = statistics.median(took["true"])
for name, all in took.items():
    all.sort()
    median = statistics.median(all)
    found[name] = {"median_ms": median, "most_ms": all[len(all) * 9 // 10], "more_ms": median - base}
    print(f"{name:40} median {median:7.2f} ms, 90 % {all[len(all) * 9 // 10]:7.2f}, more than true {median - base:6.2f}")

# Milliseconds of a processor that these processes have used; those that have gone are left out.
def used(pids):
    found = {}
    for pid in pids:
        try:
            found[pid] = sum(int(open(f"/proc/{pid}/task/{task}/schedstat").read().split()[0]) / 1e6 for task in os.listdir(f"/proc/{pid}/task"))
        except (OSError, IndexError):
            pass
    return found

def children(pid):
    return [int(child) for child in open(f"/proc/{pid}/task/{pid}/children").read().split()]

def relays():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = open(f"/proc/{pid}/cmdline").read()
            if line.endswith("farm-relay\0") and f"HAYLOFT_BROKER={os.environ['HAYLOFT_BROKER']}\0" in open(f"/proc/{pid}/environ").read():
                yield int(pid)
        except OSError:
            pass

# The same of the children that each of these has waited for: the commands of tasks.
def of_children(pids):
    found = {}
    for pid in pids:
        with open(f"/proc/{pid}/stat") as stat:
            found[pid] = sum(map(int, stat.read().rsplit(") ", 1)[1].split()[13:15])) * 1e3 / os.sysconf("SC_CLK_TCK")
    return found

def of_own_children():
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (usage.ru_utime + usage.ru_stime) * 1e3

def busy():
    with open("/proc/stat") as stat:
        user, nice, system, _, _, irq, soft = map(int, stat.readline().split()[1:8])
    return (user + nice + system + irq + soft) * 10

# Started by xargs, which costs least of what starts many at a time. What all that takes part has used says how many there could be on these
# processors, also when others use them as well.
cores = os.cpu_count()
for name, command in list(ways.items())[2:]:
    count = rounds * 20
    lines = "".join("x\n" for _ in range(count)).encode()
    many = lambda lines: subprocess.run(["xargs", "-P", "16", "-I{}", *command], input=lines, check=True)
    # So that all that is kept from task to task is there.
    many(lines[: 2 * 64])
    spawners = [child for agent in agents for child in children(agent)]
    firsts = [child for spawner in spawners for child in children(spawner)]
    who = {"broker": [broker], "agents": agents, "start of tasks": spawners + firsts, "submitter": list(relays())}
    before, commands, own = {name: used(pids) for name, pids in who.items()}, of_children(firsts), of_own_children()
    all_before, begun = busy(), time.perf_counter()
    many(lines)
    seconds, whole = time.perf_counter() - begun, (busy() - all_before) / count
    parts = {name: sum(ms - before[name][pid] for pid, ms in used(before[name]).items()) / count for name in who}
    parts["its command"] = sum(ms - commands[pid] for pid, ms in of_children(firsts).items()) / count
    parts["its own process, with xargs"] = (of_own_children() - own) / count
    sum_ms = sum(parts.values())
    found[name] |= {"a_second": count / seconds, "processors_ms": whole, "parts_ms": parts, "at_most_a_second": cores * 1e3 / sum_ms}
    told = ", ".join(f"{part} {ms:.2f}" for part, ms in parts.items())
    print(f"{name:40} 16 at a time on 8 slots: {count / seconds:.0f} a second; {sum_ms:.2f} ms of a processor each: {told}; "
          f"so {cores} processors could do {cores * 1e3 / sum_ms:.0f}; of all that they did {whole:.2f} ms a task")
own = of_own_children()
begun = time.perf_counter()
subprocess.run(["xargs", "-P", "16", "-I{}", "sh", "-c", "true"], input=lines, check=True)
seconds, own = time.perf_counter() - begun, (of_own_children() - own) / count
print(f"{'sh -c true':40} the same way, without a farm: {count / seconds:.0f} a second; {own:.2f} ms of a processor each")

targets = " ".join(f"t{at}" for at in range(400))
with open("Makefile", "w") as makefile:
    makefile.write(f"all: {targets}\n{targets}:\n\t@: $@\n.PHONY: all {targets}\n")
if os.path.exists(".hayloft-history"):
    os.remove(".hayloft-history")
plain, with_it = [], []
for _ in range(3):
    plain.append(once(["make", "-j8"]))
    with_it.append(once([hayloft, "make", "-j8"]))
found["make"] = {"plain_ms": min(plain), "ms": min(with_it)}
print(f"make of 400 recipes: plain {min(plain):.0f} ms, hayloft make -j8 {min(with_it):.0f} ms, ratio {min(with_it) / min(plain):.2f}")
if file:
    json.dump(found, open(file, "w"), indent=1)
PYTHON
on_volume python3 "$WORK/measure.py" "$HAYLOFT" "$ROUNDS" "$JSON" "$BROKER" "${AGENTS[1]}" "${AGENTS[2]}"
