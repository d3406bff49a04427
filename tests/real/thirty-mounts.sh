#!/usr/bin/env bash
# 30 mounts of one volume on this machine. Each unpacks, "compiles" and deletes a tree of its own at the same time as
# all others: in a folder of its own, and in one that all of them share. Prints what it cost; afterwards nothing may
# have grown. With --large more and larger trees.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
COUNT=30
PARTS=2 ROUNDS=1
if [ "${1:-}" = --large ]; then PARTS=12 ROUNDS=3; fi
farm_hosts "$COUNT" dirty=64M,cache=64M

make_tarball() {
    mkdir "$WORK/source" && cd "$WORK/source" || return 1
    python3 - "$PARTS" <<'PY'
import os, sys
for part in range(int(sys.argv[1])):
    os.makedirs(f"part{part}/sub")
    for at in range(12):
        with open(f"part{part}/{'sub/' if at % 3 == 0 else ''}file{at}.c", "w") as file:
            file.write(f"int part_{part}_{at}(void) {{ return {at}; }}\n" * (1 + (part * 12 + at) * 97 % 300))
os.mkdir("include")
for at in range(4):
    with open(f"include/head{at}.h", "w") as file:
        file.write(f"int head_{at};\n" * (at + 1) * 40)
PY
    tar -cf "$WORK/source.tar" .
}

# Figures of all mounts together: NAME VALUE lines.
totals() {
    [ -z "${PLAIN:-}" ] || { echo "messages 0"; echo "acknowledgements 0"; echo "requests 0"; echo "resident_kib 0"; return; }
    local mnt
    for mnt in "${MNTS[@]}"; do "$HAYLOFT" stats "$mnt" --json || return 1; done | python3 -c '
import json, sys
decoder, text, stats = json.JSONDecoder(), sys.stdin.read().strip(), []
while text:
    one, end = decoder.raw_decode(text)
    stats.append(one)
    text = text[end:].strip()
kinds = {}
for one in stats:
    for kind, count in one["server"]["requests"].items():
        kinds[kind] = kinds.get(kind, 0) + count
acks = kinds.pop("ACK", 0)
for kind in ["total", "PING"]:
    kinds.pop(kind, 0)
resident = lambda pid: int(next(line.split()[1] for line in open(f"/proc/{pid}/status") if line.startswith("VmRSS")))
print("messages", sum(kinds.values()))
print("acknowledgements", acks)
print("requests", sum(one["fuse"]["requests"]["total"] for one in stats))
print("resident_kib", max(resident(one["mount"]["pid"]) for one in stats))
for kind, count in sorted(kinds.items()):
    print(f"kind_{kind}", count)
'
}
figure() { awk -v name="$1" '$1 == name { print $2 }' "$2"; }
server_kib() { if [ -n "$SERVER" ]; then awk '/^VmRSS/ { print $2 }' "/proc/$SERVER/status"; else echo 0; fi; }

# FOLDER: all mounts at once, each in FOLDER/tree-N of its own mount. FOLDER may hold %N for the mount's number.
churn() {
    local at workers=() failed=0 start=$SECONDS worker changes
    totals > "$WORK/before" || return 1
    for at in "${!MNTS[@]}"; do
        mkdir -p "${MNTS[$at]}/${1//%N/$at}"
        python3 "$ROOT/tests/lib/churn.py" "$WORK/source.tar" "${MNTS[$at]}/${1//%N/$at}/tree-$at" "$ROUNDS" > "$WORK/changes-$at" &
        workers+=($!)
    done
    for worker in "${workers[@]}"; do wait "$worker" || failed=$((failed + 1)); done
    [ "$failed" = 0 ] || { echo "   $failed of $COUNT failed"; return 1; }
    [ -n "${PLAIN:-}" ] || for at in "${MNTS[@]}"; do "$HAYLOFT" sync "$at" || return 1; done
    totals > "$WORK/after" || return 1
    changes=$(cat "$WORK"/changes-* | awk '{ sum += $1 } END { print sum }')
    python3 - "$WORK/before" "$WORK/after" "$changes" "$((SECONDS - start))" "$(server_kib)" <<'PY'
import sys
before, after = (dict(line.split() for line in open(name)) for name in sys.argv[1:3])
changes, seconds, server = map(int, sys.argv[3:])
grown = {name: int(after[name]) - int(before.get(name, 0)) for name in after}
print(f"   {changes} changes in {seconds} s; messages to the server: {grown['messages']} ({grown['messages'] / changes:.3f} a change), "
      f"acknowledgements: {grown['acknowledgements']} ({grown['acknowledgements'] / changes:.3f}), requests from the kernel: {grown['requests']}")
print("   " + ", ".join(f"{name[5:]} {count}" for name, count in grown.items() if name.startswith("kind_") and count))
print(f"   resident: server {server >> 10} MiB, largest client {int(after['resident_kib']) >> 10} MiB")
PY
}

empty_everywhere() {
    local mnt
    for mnt in "${MNTS[@]}"; do
        test -z "$(find "$mnt" -name 'tree-*')" && test "$(ls "$mnt" | wc -l)" = $((COUNT + 1)) || { ls "$mnt"; return 1; }
    done
}

again() { churn own-%N && churn shared; }
# After everything has been done once, doing it again takes no more memory, but for what allocators keep.
no_growth() {
    local server client round
    again > "$WORK/settled" && server=$(server_kib) && client=$(figure resident_kib "$WORK/after") || return 1
    for round in 1 2 3; do again > "$WORK/grown" || return 1; done
    tail -n 1 "$WORK/settled" "$WORK/grown" | grep resident
    test "$(server_kib)" -le $((server * 5 / 4 + (32 << 10))) &&
        test "$(figure resident_kib "$WORK/after")" -le $((client * 5 / 4 + (32 << 10)))
}
sound() { [ -n "${PLAIN:-}" ] || "$HAYLOFT" volume check "$VOLUME" --server "$ADDRESS" --content --config /dev/null | grep 'is sound'; }

check "a tree of sources" make_tarball
check "$COUNT mounts, each in a folder of its own" churn own-%N
check "$COUNT mounts in one folder" churn shared
check "all is gone on all mounts" empty_everywhere
check "nothing has grown after the same again and again" no_growth
check "all is gone on all mounts" empty_everywhere
check "the volume is sound" sound
report
