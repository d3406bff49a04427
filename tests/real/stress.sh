#!/usr/bin/env bash
# stress-ng's checks of a file system on a volume; its timers send signals with handlers all the time. Each for 5 s; with
# --large for a minute.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
SECONDS_EACH=5
if [ "${1:-}" = --large ]; then SECONDS_EACH=60; fi
farm_start

# With what it reads back compared (--verify).
stress() {
    stress-ng --quiet --verify --temp-path "$MNT" --timeout "$SECONDS_EACH" "$@" 2> "$WORK/stress.out"
    local status=$?
    # 3: not enough room, or not possible here.
    [ "$status" = 0 ] || { cat "$WORK/stress.out"; return 1; }
}

for kind in msync sync-file hdd fallocate; do
    check "stress-ng --$kind" stress "--$kind" 2
done
report
