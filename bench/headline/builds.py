"""Runs builds of the same tree at once, and prints how long all of them took and who had how much of the farm.

    builds.py TASKS MEAN_MS SLOTS JSON HAYLOFT DIR...

Each has as many jobs as three times its share. Shares are looked at while all of them have tasks that wait.
"""
import json
import os
import statistics
import subprocess
import sys
import time

tasks, mean, slots = (int(number) for number in sys.argv[1:4])
path, hayloft, trees = sys.argv[4], sys.argv[5], sys.argv[6:]
jobs = 3 * slots // len(trees) + 1
ideal = len(trees) * tasks * mean / 1e3 / slots


def start(at, tree):
    environment = dict(os.environ, HAYLOFT_BUILD=f"build{at}")
    return subprocess.Popen([hayloft, "make", "-s", f"-j{jobs}", "--", "all"], cwd=tree, env=environment)


begun = time.monotonic()
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
            looks.append({row["build"]: row["slots"] / row["share"] for row in rows})
    time.sleep(0.2)
if failed:
    sys.exit(f"builds failed: {failed}")
wall = max(ended.values())
print(f"   {len(trees)} builds of {tasks} tasks: {wall:.1f} s, {wall / ideal:.2f} of the ideal ({ideal:.1f} s: all slots busy all the time); "
      f"the first was done after {min(ended.values()):.1f} s")
result = {"builds": len(trees), "tasks": tasks, "mean_ms": mean, "slots": slots, "wall_s": wall, "ideal_s": ideal, "ended_s": list(ended.values())}
if looks:
    means = [statistics.mean(look[f"build{at}"] for look in looks) for at in range(len(trees))]
    result |= {"share_least": min(means), "share_most": max(means), "looks": len(looks)}
    print(f"   of its fair share each had {min(means):.3f} to {max(means):.3f} in the mean of {len(looks)} looks while all had tasks waiting")
if path:
    with open(path, "w") as file:
        json.dump(result, file, indent=1)
