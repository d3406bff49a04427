#!/usr/bin/env bash
# SQLite databases on a volume, through rollback journals and write-ahead logs, by several processes at once.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
farm_start

# MODE: four processes add 200 rows each, one transaction a row.
load() {
    local db=$MNT/$1.db worker
    sqlite3 "$db" "PRAGMA journal_mode=$1; CREATE TABLE t (worker INT, n INT, pad BLOB);" > /dev/null || return 1
    for worker in 1 2 3 4; do
        (
            for n in $(seq 200); do
                echo ".timeout 60000"
                echo "INSERT INTO t VALUES ($worker, $n, randomblob(500));"
            done | sqlite3 -bail "$db" > /dev/null || touch "$WORK/failed-$1"
        ) &
        workers+=($!)
    done
    wait "${workers[@]}"
    test ! -e "$WORK/failed-$1" && sound "$1"
}
sound() {
    test "$(sqlite3 "$MNT/$1.db" 'PRAGMA integrity_check;')" = ok &&
        test "$(sqlite3 "$MNT/$1.db" 'SELECT count(*), count(DISTINCT worker * 1000 + n) FROM t;')" = "800|800"
}
rolled_back() {
    sqlite3 "$MNT/$1.db" 'BEGIN; DELETE FROM t; ROLLBACK;' && sound "$1"
}
vacuum() { sqlite3 "$MNT/$1.db" 'DELETE FROM t WHERE n > 100; VACUUM;' && test "$(sqlite3 "$MNT/$1.db" 'SELECT count(*) FROM t;')" = 400; }

for mode in delete truncate persist wal; do
    workers=()
    check "journal mode $mode: four writers" load "$mode"
    check "journal mode $mode: rollback" rolled_back "$mode"
done
check "remount" farm_remount
for mode in delete truncate persist wal; do
    check "journal mode $mode: sound after a remount" sound "$mode"
    check "journal mode $mode: vacuum" vacuum "$mode"
done
report
