# For sourcing: a server and a mount of one's own, gone when the script ends.
#
#   . tests/lib/farm.sh
#   farm_start [MOUNT OPTIONS]   sets $MNT (the mount), $WORK (a folder on the local disk), $ADDRESS, $VOLUME
#   farm_remount [MOUNT OPTIONS] leaves the mount and mounts again: nothing of it is cached
#   check NAME COMMAND...        runs it and counts; finish with: report
#
# With PLAIN=DIR there is no server: $MNT is a folder there, to test the tests.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
HAYLOFT=${HAYLOFT:-$ROOT/target/release/hayloft}
unset "${!HAYLOFT_@}"
PASSED=0
FAILED=0
SERVER=
MNT=

farm_start() {
    WORK=$(mktemp -d "${TMPDIR:-/var/tmp}/hayloft-test-XXXXXX")
    trap farm_stop EXIT
    trap 'exit 130' INT TERM
    if [ -n "${PLAIN:-}" ]; then
        MNT=$(mktemp -d "$PLAIN/hayloft-test-XXXXXX")
        return
    fi
    VOLUME=test
    "$HAYLOFT" serve --config /dev/null --store "file://$WORK/store" --listen 127.0.0.1:0 \
        >"$WORK/serve.out" 2>"$WORK/serve.log" &
    SERVER=$!
    local tries
    for tries in $(seq 200); do
        [ -s "$WORK/serve.out" ] && break
        kill -0 "$SERVER" 2>/dev/null || { cat "$WORK/serve.log" >&2; exit 1; }
        sleep 0.05
    done
    ADDRESS=$(awk '{ print $NF }' "$WORK/serve.out")
    "$HAYLOFT" volume create "$VOLUME" --server "$ADDRESS" --config /dev/null >/dev/null || exit 1
    mkdir "$WORK/mnt"
    MNT=$WORK/mnt
    farm_mount "$@"
}

farm_mount() {
    "$HAYLOFT" mount "$ADDRESS/$VOLUME" "$MNT" --config /dev/null --log-dir "$WORK" ${1:+-o "$1"} >/dev/null || exit 1
}

farm_remount() {
    [ -z "${PLAIN:-}" ] || return 0
    cd "$WORK" && "$HAYLOFT" umount "$MNT" && farm_mount "$@"
}

farm_stop() {
    local status=$?
    cd /
    if [ -n "${PLAIN:-}" ]; then
        rm -rf "$MNT" "$WORK"
        exit "$status"
    fi
    if [ -n "$MNT" ] && mountpoint -q "$MNT"; then
        timeout 60 "$HAYLOFT" umount "$MNT" || "$HAYLOFT" umount --force "$MNT"
    fi
    if [ -n "$SERVER" ]; then
        kill -TERM "$SERVER" 2>/dev/null
        wait "$SERVER" 2>/dev/null
    fi
    if [ "$FAILED" != 0 ]; then tail -n 20 "$WORK"/*.log; fi
    rm -rf "$WORK"
    exit "$status"
}

check() {
    local name=$1
    shift
    printf -- '-- %s\n' "$name"
    if "$@"; then
        PASSED=$((PASSED + 1))
        printf '   ok\n'
    else
        FAILED=$((FAILED + 1))
        printf '   FAILED\n'
    fi
}

report() {
    printf '%s passed, %s failed\n' "$PASSED" "$FAILED"
    [ "$FAILED" = 0 ]
}
