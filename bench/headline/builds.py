"""Runs builds of the same tree at once, and prints how long all of them took and who had how much of the farm.

    builds.py TASKS MEAN_MS SLOTS JSON HAYLOFT SMALL DIR...

In SMALL, a tree like the others, a small build comes beside them when they are all under way, of as many tasks as two shares have slots; and once more when they have ended, with as many jobs
as a share has slots. Before that, single tasks of builds of their own: how long until a build that has just come has its first task done.

Each has as many jobs as three times its share. Shares are looked at while all of them have tasks that wait: from when they all do, and from when, after that,
tasks have ended that were begun before it. Slots are not taken away from tasks that run, so whoever came first has more until then.
"""
import json
import os
import statistics
import subprocess
import sys
import threading
import time

tasks, mean, slots = (int(number) for number in sys.argv[1:4])
path, hayloft, small, trees = sys.argv[4], sys.argv[5], sys.argv[6], sys.argv[7:]
jobs = 3 * slots // len(trees) + 1
ideal = len(trees) * tasks * mean / 1e3 / slots


def start(at, tree):
    environment = dict(os.environ, HAYLOFT_BUILD=f"build{at}")
    return subprocess.Popen([hayloft, "make", "-s", f"-j{jobs}", "--", "all"], cwd=tree, env=environment)


def timed(name, command):
    since = time.monotonic()
    subprocess.run(command, cwd=small, env=dict(os.environ, HAYLOFT_BUILD=name), check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - since


share = max(1, slots // (len(trees) + 1))
targets = [f"part{at % (tasks // 100 + 1)}/s{at}.o" for at in range(min(2 * share, tasks))]
firsts, beside = [], []


def come_late():
    time.sleep(2 * mean / 1e3)
    firsts.extend(timed(f"first{at}", [hayloft, "task", "--farm", "--", "true"]) for at in range(20))
    # -j of all slots: that of a user who does not know what others do.
    beside.append(timed("small", [hayloft, "make", "-s", f"-j{slots}", "--", *targets]))


begun = time.monotonic()
late = threading.Thread(target=come_late)
late.start()
builds = {at: start(at, tree) for at, tree in enumerate(trees)}
ended, looks, failed = {}, [], []
while builds:
    for at, build in list(builds.items()):
        code = build.poll()
        if code is not None:
            ended[at] = time.monotonic() - begun
            failed += [at] * (code != 0)
            del builds[at]
    status = subprocess.run([hayloft, "farm", "status", "--json"], capture_output=True, text=True, check=False)
    if status.returncode == 0:
        rows = [row for row in json.loads(status.stdout)["builds"] if row["build"].startswith("build")]
        if len(rows) == len(trees) and all(row["waiting"] for row in rows):
            now = time.monotonic() - begun
            looks.append((now, {row["build"]: row["slots"] / row["share"] for row in rows}))
    time.sleep(0.2)
late.join()
if failed or not beside:
    sys.exit(f"builds failed: {failed}")
wall = max(ended.values())
print(f"   {len(trees)} builds of {tasks} tasks: {wall:.1f} s, {wall / ideal:.2f} of the ideal ({ideal:.1f} s: all slots busy all the time); "
      f"the first was done after {min(ended.values()):.1f} s")
result = {"builds": len(trees), "tasks": tasks, "mean_ms": mean, "slots": slots, "wall_s": wall, "ideal_s": ideal, "ended_s": list(ended.values())}


def shares(name, since):
    those = [look for at, look in looks if at >= since]
    if not those:
        return
    means = [statistics.mean(look[f"build{at}"] for look in those) for at in range(len(trees))]
    jain = sum(means) ** 2 / (len(means) * sum(mean * mean for mean in means))
    result[name] = {"since_s": since, "looks": len(those), "least": min(means), "most": max(means), "jain": jain, "each": means}
    print(f"   of its fair share each had {min(means):.3f} to {max(means):.3f} (Jain {jain:.4f}) in the mean of {len(those)} looks {name}")


if looks:
    shares("while all had tasks waiting", looks[0][0])
    # A task takes half as long as the mean to one and a half times as long (project.py).
    shares("from the longest task's time after that", looks[0][0] + 1.5 * mean / 1e3)
for target in targets:
    os.remove(f"{small}/{target}")
os.remove(f"{small}/.hayloft-history")
alone = timed("alone", [hayloft, "make", "-s", f"-j{share}", "--", *targets])
result |= {"first_ms": sorted(first * 1e3 for first in firsts), "small_beside_s": beside[0], "small_alone_s": alone}
print(f"   a build that has just come has its first task done after {statistics.median(firsts) * 1e3:.0f} ms in the median of 20, {max(firsts) * 1e3:.0f} at most; "
      f"a small one of {len(targets)} tasks took {beside[0]:.1f} s, alone with its share ({share} slots) {alone:.1f}: {beside[0] / alone:.2f}")
if path:
    with open(path, "w") as file:
        json.dump(result, file, indent=1)
