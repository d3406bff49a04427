#!/usr/bin/env bash
# What a farm adds to a task: one host's broker, server, mounts and two agents, tasks that do nothing.
#
#   bench/farm.sh [--rounds N]
#
# Prints medians in milliseconds and ratios taken in one run: `true` by itself, as a task here, as a task through the
# broker, so many of these at once, and a make of 400 recipes that do nothing, plain and with `hayloft make`, when its
# recipes are new to it and when it knows them.
set -uo pipefail
. "$(dirname "$0")/../tests/lib/farm.sh"
. "$(dirname "$0")/../tests/lib/task-farm.sh"
ROUNDS=200
if [ "${1:-}" = --rounds ]; then ROUNDS=$2; fi
task_farm "${FARM_PORT:-17992}"
farm_begin || { echo "the farm did not begin"; exit 1; }

cat >"$WORK/measure.py" <<'PYTHON'
import concurrent.futures, os, statistics, subprocess, sys, time

hayloft, rounds = sys.argv[1], int(sys.argv[2])

def once(command):
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    return (time.perf_counter() - begun) * 1e3

ways = {
    "true": ["true"],
    "hayloft task --here -- true": [hayloft, "task", "--here", "--", "true"],
    "hayloft task --farm -- true": [hayloft, "task", "--farm", "--", "true"],
}
took = {name: [] for name in ways}
for _ in range(rounds):
    for name, command in ways.items():
        took[name].append(once(command))
base = statistics.median(took["true"])
for name, all in took.items():
    all.sort()
    median = statistics.median(all)
    print(f"{name:40} median {median:7.2f} ms, 90 % {all[len(all) * 9 // 10]:7.2f}, more than true {median - base:6.2f}")
count = rounds * 4
begun = time.perf_counter()
with concurrent.futures.ThreadPoolExecutor(16) as pool:
    list(pool.map(lambda _: once(ways["hayloft task --farm -- true"]), range(count)))
print(f"16 at a time on 8 slots: {count / (time.perf_counter() - begun):.0f} tasks a second")

targets = " ".join(f"t{at}" for at in range(400))
with open("Makefile", "w") as makefile:
    makefile.write(f"all: {targets}\n{targets}:\n\t@: $@\n.PHONY: all {targets}\n")
def make(command):
    return min(once(command) for _ in range(3))
if os.path.exists(".hayloft-history"):
    os.remove(".hayloft-history")
plain = make(["make", "-j8"])
for name, command in {"hayloft make -j8": [hayloft, "make", "-j8"]}.items():
    with_it = make(command)
    print(f"make of 400 recipes: plain {plain:.0f} ms, {name} {with_it:.0f} ms, ratio {with_it / plain:.2f}")
PYTHON
on_volume python3 "$WORK/measure.py" "$HAYLOFT" "$ROUNDS"
