#!/usr/bin/env bash
# PostgreSQL on a volume, with fsync on: a server whose processes signal each other all the time, and end themselves when
# a call is interrupted. Then a crash of it, and a remount. For 10 s; with --large for a minute.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
SECONDS_EACH=10
if [ "${1:-}" = --large ]; then SECONDS_EACH=60; fi
farm_start
BIN=$(ls -d /usr/lib/postgresql/*/bin | tail -n 1)
RUN=$WORK/run

# It does not run as root.
as_postgres() { (cd / && setpriv --reuid=postgres --regid=postgres --clear-groups "$@"); }
sql() { as_postgres "$BIN/psql" -h "$RUN" -v ON_ERROR_STOP=1 -qAt "$@" postgres; }

# A short time until it looks for deadlocks means many timers, which go off in the middle of other calls.
make_cluster() {
    chmod 755 "$WORK"
    install -d -o postgres "$RUN" "$MNT/pg" && chmod 700 "$MNT/pg" &&
        as_postgres "$BIN/initdb" -D "$MNT/pg" -A trust > "$RUN/initdb.out" || { cat "$RUN/initdb.out"; return 1; }
    cat >> "$MNT/pg/postgresql.conf" << END
listen_addresses = ''
unix_socket_directories = '$RUN'
fsync = on
checkpoint_timeout = 30s
max_wal_size = 64MB
deadlock_timeout = 2ms
wal_writer_delay = 1ms
END
}
start() { as_postgres "$BIN/pg_ctl" -D "$MNT/pg" -w -t 60 -l "$RUN/postgres.out" start > /dev/null; }
stop() { as_postgres "$BIN/pg_ctl" -D "$MNT/pg" -w -m "$1" stop > /dev/null; }
transactions() {
    as_postgres "$BIN/pgbench" -h "$RUN" -i -q -s 2 postgres 2> /dev/null &&
        as_postgres "$BIN/pgbench" -h "$RUN" -n -c 8 -j 2 -T "$SECONDS_EACH" postgres | grep -E 'processed|failed|latency'
}
# What each client has booked is there in all tables, and nothing was reported that the server could not bear.
balanced() {
    local sums
    sums=$(sql -c 'SELECT (SELECT sum(abalance) FROM pgbench_accounts), (SELECT sum(bbalance) FROM pgbench_branches),
        (SELECT sum(tbalance) FROM pgbench_tellers), (SELECT sum(delta) FROM pgbench_history)') || return 1
    [ "$(tr '|' '\n' <<< "$sums" | sort -u | wc -l)" = 1 ] || { echo "$sums"; return 1; }
    [ -s "$RUN/postgres.out" ] && ! grep -E 'PANIC|Interrupted system call|could not fsync|could not fdatasync' "$RUN/postgres.out"
}
crash_and_recover() { stop immediate && start && balanced; }
remount_and_start() { stop fast && farm_remount && start && balanced; }

check "a new database cluster" make_cluster
check "start" start
check "$SECONDS_EACH s of transactions by eight clients" transactions
check "the books are balanced" balanced
check "checkpoint and vacuum" sql -c 'CHECKPOINT' -c 'VACUUM FULL pgbench_accounts'
check "recovery after a crash" crash_and_recover
check "after a remount" remount_and_start
check "stop" stop fast
report
