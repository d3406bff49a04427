# For sourcing: a server and a mount of one's own, gone when the script ends.
#
#   . tests/lib/farm.sh
#   farm_start [MOUNT OPTIONS]   sets $MNT (the mount), $WORK (a folder on the local disk), $ADDRESS, $VOLUME
#   farm_hosts COUNT [OPTIONS]   instead of farm_start: one volume on so many mounts, $WORK/mnt0 and on; sets $MNTS
#   farm_namespaces PATH         the same as so many hosts that have it all at PATH: mount namespaces, whose
#                                processes are in $HOSTS; on_host N COMMAND... runs something there
#   farm_remount [MOUNT OPTIONS] leaves the mount and mounts again: nothing of it is cached
#   check NAME COMMAND...        runs it and counts; finish with: report
#
# LISTEN is the address of the server (127.0.0.1 if it is not set), CONFIG the configuration (none).
#
# With PLAIN=DIR there is no server: $MNT is a folder there, to test the tests; so are all mounts of farm_hosts.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CONFIG=${CONFIG:-/dev/null}
HAYLOFT=${HAYLOFT:-$ROOT/target/release/hayloft}
unset "${!HAYLOFT_@}"
PASSED=0
FAILED=0
SERVER=
MNT=
MNTS=()
HOSTS=()

farm_start() {
    farm_serve
    [ -z "${PLAIN:-}" ] || return 0
    mkdir "$WORK/mnt"
    MNT=$WORK/mnt
    farm_mount "$@"
}

farm_hosts() {
    local count=$1 at
    farm_serve
    for at in $(seq 0 $((count - 1))); do
        mkdir "$WORK/mnt$at"
        MNTS+=("$WORK/mnt$at")
        if [ -n "${PLAIN:-}" ]; then mount --bind "$MNT" "$WORK/mnt$at"; else farm_mount_on "$WORK/mnt$at" "${2:-}"; fi
    done
}

farm_namespaces() {
    local path=$1 mnt
    mkdir -p "$path"
    for mnt in "${MNTS[@]}"; do farm_namespace "$mnt" "$path"; done
}

# SOURCE PATH: one more host, on which PATH is SOURCE.
farm_namespace() {
    # shellcheck disable=SC2016
    unshare --mount --propagation private sh -euc 'mount --bind "$1" "$2"; exec sleep infinity' sh "$1" "$2" &
    HOSTS+=($!)
    until grep -q sleep "/proc/$!/comm"; do
        kill -0 $! || exit 1
        sleep 0.02
    done
}

on_host() {
    local host=$1
    shift
    nsenter --mount="/proc/${HOSTS[$host]}/ns/mnt" "$@"
}

farm_serve() {
    WORK=$(mktemp -d "${TMPDIR:-/var/tmp}/hayloft-test-XXXXXX")
    trap farm_stop EXIT
    trap 'exit 130' INT TERM
    if [ -n "${PLAIN:-}" ]; then
        MNT=$(mktemp -d "$PLAIN/hayloft-test-XXXXXX")
        return
    fi
    VOLUME=test
    # As a service manager does, in a session of its own (docs/operations.md, "Sessions").
    setsid "$HAYLOFT" serve --config "$CONFIG" --store "file://$WORK/store" --listen "${LISTEN:-127.0.0.1}:0" \
        >"$WORK/serve.out" 2>"$WORK/serve.log" &
    SERVER=$!
    local tries
    for tries in $(seq 200); do
        [ -s "$WORK/serve.out" ] && break
        kill -0 "$SERVER" 2>/dev/null || { cat "$WORK/serve.log" >&2; exit 1; }
        sleep 0.05
    done
    ADDRESS=$(awk '{ print $NF }' "$WORK/serve.out")
    "$HAYLOFT" volume create "$VOLUME" --server "$ADDRESS" --config "$CONFIG" >/dev/null || exit 1
}

farm_mount() { farm_mount_on "$MNT" "$@"; }

farm_mount_on() {
    local dir=$1
    shift
    "$HAYLOFT" mount "$ADDRESS/$VOLUME" "$dir" --config "$CONFIG" --log-dir "$WORK" ${1:+-o "$1"} >/dev/null || exit 1
}

farm_remount() {
    [ -z "${PLAIN:-}" ] || return 0
    cd "$WORK" && "$HAYLOFT" umount "$MNT" && farm_mount "$@"
}

farm_stop() {
    local status=$?
    cd /
    local pid mnt
    for pid in "${HOSTS[@]}"; do
        kill "$pid"
        wait "$pid" 2>/dev/null
    done
    if [ -n "${PLAIN:-}" ]; then
        for mnt in "${MNTS[@]}"; do umount "$mnt"; done
        rm -rf "$MNT" "$WORK"
        exit "$status"
    fi
    for mnt in "${MNTS[@]}" ${MNT:+"$MNT"}; do
        mountpoint -q "$mnt" || continue
        timeout 60 "$HAYLOFT" umount "$mnt" || "$HAYLOFT" umount --force "$mnt"
    done
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
