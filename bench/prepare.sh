# For sourcing by run.sh: prepares what is measured, and removes it at the end.
#
# Each prepare_KIND adds targets to $names, with their directories in $dirs (the mounts of one file system, separated by
# commas) and the processes that serve them in $pids (a server, then one for each mount).

# What has to be undone, the last first. Everything runs in the background and is waited for: bash would
# otherwise hold a signal back until the command in the foreground ends.
undo=() running=
# How each mount of Hayloft was mounted.
declare -A mounted=()
cleanup() {
    local status=$? n
    trap '' INT TERM HUP
    trap - EXIT
    if [[ -n $running ]]; then
        kill -TERM "$running" 2>/dev/null || true
        wait "$running" 2>/dev/null || true
    fi
    for ((n = ${#undo[@]} - 1; n >= 0; n--)); do
        eval "${undo[n]}" || note "could not: ${undo[n]}"
    done
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

# Waits for "$@" in a way that a signal can end.
run() {
    "$@" &
    running=$!
    local status=0
    wait "$running" || status=$?
    running=
    return "$status"
}

# Starts a daemon that a Ctrl-C in the terminal does not reach, and leaves its process id in $daemon.
start() {
    local log=$1
    shift
    setsid "$@" >"$log" 2>&1 </dev/null &
    daemon=$!
}

stop() {
    local pid=$1 n
    kill -TERM "$pid" 2>/dev/null || return 0
    for ((n = 0; n < 100; n++)); do
        kill -0 "$pid" 2>/dev/null || { wait "$pid" 2>/dev/null || true; return 0; }
        sleep 0.1
    done
    kill -KILL "$pid" 2>/dev/null || true
}

# A mount may be busy for a moment after its last user has ended.
unmount() {
    local n
    for ((n = 0; n < 20; n++)); do
        mountpoint -q "$1" || return 0
        umount "$1" 2>/dev/null && return 0
        sleep 0.2
    done
    umount -l "$1"
}

# Waits until "$@" succeeds, for 20 seconds, as long as the daemon $1 lives; shows its log $2 if not.
wait_for() {
    local pid=$1 log=$2 n
    shift 2
    for ((n = 0; n < 200; n++)); do
        if "$@"; then return 0; fi
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
    done
    tail -n 5 "$log" >&2
    fail "not ready: $*"
}

mount_tmpfs() {
    mkdir "$work/$1"
    mount -t tmpfs -o size=4G,mode=0755 hayloft-bench "$work/$1"
    undo+=("unmount $work/$1")
}

# The image is made and mounted once; the ext4 target and the store are two folders in it.
mount_ext4() {
    mountpoint -q "$work/image" && return
    command -v mkfs.ext4 >/dev/null || fail "mkfs.ext4 is not here (e2fsprogs)"
    local size=$((12 << 30))
    [[ -z $smoke ]] || size=$((1 << 30))
    # With its blocks reserved: growing the image would be timed otherwise.
    fallocate -l "$size" "$work/image.ext4" || fail "no room for an image of $((size >> 30)) GiB in $scratch"
    # Everything initialised now rather than by the kernel while we measure.
    mkfs.ext4 -q -i 8192 -E lazy_itable_init=0,lazy_journal_init=0 "$work/image.ext4"
    mkdir "$work/image"
    mount -o loop "$work/image.ext4" "$work/image"
    undo+=("unmount $work/image")
}

add_target() {
    names+=("$1")
    dirs[$1]=$2
}

prepare_tmpfs() {
    mount_tmpfs tmpfs
    add_target tmpfs "$work/tmpfs"
}

prepare_ext4() {
    mount_ext4
    mkdir "$work/image/ext4"
    add_target ext4 "$work/image/ext4"
}

prepare_bindfs() {
    if ! command -v bindfs >/dev/null; then
        command -v apt-get >/dev/null || fail "bindfs is not here; install it, or leave it out with --only"
        note "installing bindfs"
        apt-get install -q -y --no-install-recommends bindfs >"$work/apt.log" 2>&1 ||
            { tail -n 3 "$work/apt.log" >&2; fail "could not install bindfs (apt-get update?)"; }
    fi
    mount_tmpfs bindfs-source
    mkdir "$work/bindfs"
    start "$work/bindfs.log" bindfs -f "$work/bindfs-source" "$work/bindfs"
    undo+=("stop $daemon" "unmount $work/bindfs")
    wait_for "$daemon" "$work/bindfs.log" mountpoint -q "$work/bindfs"
    add_target bindfs "$work/bindfs"
    pids[bindfs]=$daemon
}

# A server for each kind of store, and below it a volume for each link: targets share nothing but the machine.
prepare_hayloft() {
    [[ -x $hayloft ]] || fail "no $hayloft: build it (cargo build --release) or set HAYLOFT"
    mount_ext4
    serve_hayloft hayloft
    [[ -n $store_delay ]] || return 0
    serve_hayloft hayloft-slow "STORE_DELAY_MS=$store_delay" "LD_PRELOAD=$store_delay_library"
    grep -qF "$store_delay_library" "/proc/$serving/maps" ||
        fail "cannot delay the store: $hayloft loads no libraries (is it linked statically?)"
}

serve_hayloft() { # NAME [VARIABLE=VALUE...]
    local name=$1 log=$work/$1-serve.log server ms
    shift
    mkdir "$work/image/$name"
    start "$log" env "$@" "$hayloft" serve --store "file://$work/image/$name" --listen 127.0.0.1:0
    serving=$daemon
    undo+=("stop $serving")
    wait_for "$serving" "$log" grep -qs "^serving " "$log"
    server=$(sed -n 's/^serving .* on \([^ ]*:[0-9]*\).*/\1/p' "$log" | head -n 1)
    if [[ -z $rtt ]]; then mount_volume "$name" "$server" "$server"; fi
    for ms in ${rtt//,/ }; do
        log=$work/$name-rtt$ms-delay.log
        start "$log" "$bench" delay --rtt "$ms" "$server"
        undo+=("stop $daemon")
        wait_for "$daemon" "$log" grep -qs "^delaying " "$log"
        mount_volume "$name-rtt$ms" "$server" "$(sed -n 's/^delaying .* on //p' "$log")"
    done
}

mount_volume() { # NAME SERVER LINK
    local volume=bench${#names[@]} n all=()
    "$hayloft" volume create "$volume" --server "$2" >/dev/null
    pids[$1]=$serving
    for ((n = 1; n <= hosts; n++)); do
        mount_hayloft "$3/$volume" "$1-$n"
        pids[$1]+=,$daemon
        all+=("$work/$1-$n")
    done
    add_target "$1" "$(IFS=, && echo "${all[*]}")"
}

mount_hayloft() { # WHAT NAME
    mkdir -p "$work/$2" "$work/image/client/$2" "$work/log/$2"
    start "$work/$2.log" "$hayloft" mount "$1" "$work/$2" --foreground \
        --cache-dir "$work/image/client/$2" --log-dir "$work/log/$2"
    undo+=("stop $daemon" "leave_hayloft $work/$2")
    wait_for "$daemon" "$work/$2.log" mountpoint -q "$work/$2"
    mounted[$work/$2]="$1 $work/$2 --cache-dir $work/image/client/$2 --log-dir $work/log/$2"
}

# A script that makes $BENCH_NAME cold, or says how many requests it has sent since then. The server keeps what it has in memory, as
# one that has many hosts would; its store, on the image, is as cold as the image.
mounted_anew() {
    local name dir drop='sync; echo 3 >/proc/sys/vm/drop_caches'
    echo "set -euo pipefail"
    echo "case \$1:\$BENCH_NAME in"
    for name in "${names[@]}"; do
        dir=${dirs[$name]%%,*}
        [[ -n ${mounted[$dir]:-} ]] || continue
        echo "cold:$name) $hayloft umount $dir >&2; $drop; $hayloft mount ${mounted[$dir]} >&2 ;;"
        echo "requests:$name) $hayloft stats $dir --json | sed -n '/^  \"server\"/,/^  }/s/.*\"total\": *\([0-9]*\).*/\1/p' ;;"
    done
    echo "cold:*) $drop ;;"
    echo "esac"
}

# What was mounted anew is served by other processes.
served_anew() {
    local name dir of
    for name in "${names[@]}"; do
        dir=${dirs[$name]%%,*}
        [[ -n ${mounted[$dir]:-} ]] || continue
        IFS=, read -ra of <<<"${pids[$name]}"
        of[1]=$("$hayloft" stats "$dir" --json | sed -n '/^  "mount"/,/^  }/s/.*"pid": *\([0-9]*\).*/\1/p')
        pids[$name]=$(IFS=, && echo "${of[*]}")
    done
}

leave_hayloft() {
    mountpoint -q "$1" || return 0
    timeout 120 "$hayloft" umount "$1" >&2 || unmount "$1"
}

