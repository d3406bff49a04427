"""Runs a build and prints how long it took, and who has used the processors of this machine.

    measure.py NAME TASKS MEAN_MS SLOTS JSON COMMAND...

Processes are told apart by what they are called with. Tasks are counted elsewhere: the kernel tells so short times of those that
have ended only in whole hundredths, to each of the processes that have waited for them.
"""
import json
import os
import resource
import subprocess
import sys
import time

name, path, command = sys.argv[1], sys.argv[5], sys.argv[6:]
tasks, mean, slots = (int(number) for number in sys.argv[2:5])
KINDS = {"serve": "server", "agent": "agents", "farm-spawner": "agents", "make": "submitter"}
HERTZ = os.sysconf("SC_CLK_TCK")


def kind(argv):
    program, verbs = os.path.basename(argv[0]), argv[1:3]
    if program == "nats-server":
        return "broker"
    if not program.startswith("hayloft") and program != "exe":
        return "make" if program == "make" else None
    for verb, of in KINDS.items():
        if verb in verbs:
            return of
    return "mounts" if any("mount" in verb or "keeper" in verb for verb in verbs) else None


def stat(pid):
    """Seconds: user, system."""
    with open(f"/proc/{pid}/stat") as file:
        return [int(field) / HERTZ for field in file.read().rsplit(")", 1)[1].split()[11:13]]


def times():
    """Seconds by kind, user and system, of what was there before the build and goes on after it."""
    sums = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                argv = file.read().split("\0")
            of = kind(argv)
            if of is None or not is_ours(pid):
                continue
            user, system = stat(pid)
        except OSError:
            continue
        add(sums, of, user, system)
    return sums


def of_build(pid):
    """The same of the processes that end with the build: hayloft make and make, or make alone."""
    seen = {"submitter": (0, 0), "make": (0, 0)}
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            first = file.read().split()[:1]
        names = {pid: None, **dict.fromkeys(first)}
        for one in names:
            with open(f"/proc/{one}/cmdline") as file:
                of = kind(file.read().split("\0"))
            if of in seen:
                seen[of] = tuple(stat(one))
    except OSError:
        pass
    return seen


def add(sums, of, user, system):
    before = sums.get(of, (0, 0))
    sums[of] = (before[0] + user, before[1] + system)


def is_ours(pid):
    """Whether it is in this farm: others may run on this machine."""
    return os.readlink(f"/proc/{pid}/ns/net") in NETWORKS


def busy():
    """Seconds that processors were busy, and were not."""
    with open("/proc/stat") as file:
        user, nice, system, idle, wait, *rest = (int(field) / HERTZ for field in file.readline().split()[1:])
    return user + nice + system + sum(rest[:3]), idle + wait


def most(into, seen):
    for of, (user, system) in seen.items():
        before = into.get(of, (0, 0))
        into[of] = (max(before[0], user), max(before[1], system))


NETWORKS = os.environ["FARM_NETWORKS"].split()
before, (busy_before, idle_before) = times(), busy()
begun = time.monotonic()
build = subprocess.Popen(command, stdin=subprocess.DEVNULL)
# What ends with the build is counted shortly before its end, and as a whole by who waits for it.
last = {}
while True:
    try:
        build.wait(0.5)
        break
    except subprocess.TimeoutExpired:
        most(last, of_build(build.pid))
wall = time.monotonic() - begun
busy_after, idle_after = busy()
after = times()
used = {of: tuple(max(0, now - was) for now, was in zip(after[of], before.get(of, (0, 0)))) for of in after}
used.update(last)
whole = resource.getrusage(resource.RUSAGE_CHILDREN)
here = [used.get(of, (0, 0)) for of in ("submitter", "make")]
used["recipes here"] = (whole.ru_utime - sum(one[0] for one in here), whole.ru_stime - sum(one[1] for one in here))
ideal = tasks * mean / 1000 / slots
print(f"   {name}: {wall:.1f} s, ideal {ideal:.1f} s, {tasks / wall:.0f} tasks a second, status {build.returncode}")
all_busy, cores = busy_after - busy_before, os.cpu_count()
print(f"   processors: {all_busy / (all_busy + idle_after - idle_before):.0%} of {cores} busy, {all_busy / tasks * 1e3:.1f} ms a task")
lines = sorted(used.items(), key=lambda one: -sum(one[1]))
for of, (user, system) in lines:
    print(f"   {of:14} {user:7.1f} s user {system:7.1f} s system {(user + system) / tasks * 1e3:6.2f} ms a task")
other = all_busy - sum(sum(one) for one in used.values())
print(f"   {'all else':14} {other:23.1f} s        {other / tasks * 1e3:6.2f} ms a task: tasks, the kernel's own, other programs")
if path:
    with open(path, "a") as file:
        figures = {"name": name, "seconds": wall, "ideal": ideal, "tasks": tasks, "busy": all_busy, "by": used, "other": other}
        file.write(json.dumps(figures) + "\n")
sys.exit(build.returncode)
