"""What the mounts of all hosts have counted between two moments, for each task.

    asked.py TASKS BEFORE AFTER        files with the output of `hayloft stats --json` of each mount
"""
import json
import sys

tasks, server, kernel = int(sys.argv[1]), {}, {}
for path, sign in ((sys.argv[2], -1), (sys.argv[3], 1)):
    with open(path) as file:
        text = file.read().strip()
    while text:
        stats, end = json.JSONDecoder().raw_decode(text)
        text = text[end:].strip()
        for sums, counted in ((server, stats["server"]["requests"]), (kernel, stats["fuse"]["requests"])):
            for kind, count in counted.items():
                sums[kind] = sums.get(kind, 0) + sign * count
for name, sums in (("messages to the server", server), ("requests of the kernel", kernel)):
    total = sums.pop("total", 0)
    parts = sorted(((count / tasks, kind) for kind, count in sums.items() if count * 20 >= tasks), reverse=True)
    print(f"   {name}: {total / tasks:.1f} a task: " + ", ".join(f"{kind} {count:.2f}" for count, kind in parts))
