"""Throughput of a file of 512 MiB by two ways: throughput.py FILE BASE OTHER

Each line of FILE is ROUND KIND WRITE READ, times in nanoseconds. Prints the medians, all figures, and OTHER's ratio to BASE.
"""
import statistics
import sys

path, *kinds = sys.argv[1:]
rates = {}
for line in open(path):
    _, kind, write, read = line.split()
    for what, took in (("write", write), ("read", read)):
        rates.setdefault((what, kind), []).append(512 * 1.048576 / (int(took) / 1e9))
for what in ("write", "read"):
    base, other = (statistics.median(rates[what, kind]) for kind in kinds)
    shown = [f"{kind} {statistics.median(of):.0f} MB/s ({' '.join(f'{rate:.0f}' for rate in sorted(of))})"
             for kind in kinds for of in [rates[what, kind]]]
    print(f"{what}: {', '.join(shown)}, {kinds[1]} / {kinds[0]} {other / base:.2f}")
