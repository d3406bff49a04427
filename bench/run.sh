#!/bin/bash
# Measures Hayloft beside a memory, a disk and a plain FUSE file system, all on this machine.
#
#   bench/run.sh [--smoke] [--rounds N] [--workloads LIST] [--only LIST] [--out DIR] [--scratch DIR] [NAME=DIR...]
#
#   --smoke           seconds: a fiftieth of the tree and a toy package, one round; the figures mean nothing
#   --rounds N        rounds of each workload (default 3)
#   --workloads LIST  of tree,build,shared (default tree,build)
#   --only LIST       which of tmpfs,ext4,bindfs,hayloft to prepare (default all; hayloft if it has been built)
#   --out DIR         where tables and raw results go (default bench/target/runs/DATE)
#   --scratch DIR     where the ext4 image goes: 12 GB on a local disk (default $TMPDIR, else /var/tmp)
#   NAME=DIR          a directory to measure as well, or instead of the prepared one of that name
#
# Prepared are: tmpfs, a fresh tmpfs mount and the baseline; ext4, a fresh image in a loop file; bindfs, a
# pass-through FUSE file system on a tmpfs; hayloft, a volume of a server on this machine, its store on the ext4
# image. Whatever was started or mounted is gone at the end, also after Ctrl-C. Mounting needs root.
#
# Examples:
#   bench/run.sh --smoke
#   bench/run.sh --rounds 5 --only tmpfs,ext4,hayloft
#   bench/run.sh --workloads tree nfs=/mnt/nfs
set -euo pipefail
export LC_ALL=C

here=$(cd "$(dirname "$0")" && pwd)
hayloft=${HAYLOFT:-$here/../target/release/hayloft}
smoke= rounds=3 workloads=tree,build only= out= scratch=${TMPDIR:-/var/tmp}
hosts=4
declare -A given=() prepared=() mounts=()
order=()

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \?//;p}' "$0"
}

fail() {
    echo "run.sh: $*" >&2
    exit 1
}

note() {
    echo "run.sh: $*" >&2
}

while [[ $# -gt 0 ]]; do
    case $1 in
        --smoke) smoke=1 rounds=1 ;;
        --rounds | --workloads | --only | --out | --scratch)
            [[ $# -gt 1 ]] || { usage >&2; exit 2; }
            declare "${1#--}=$2"
            shift
            ;;
        -h | --help) usage; exit ;;
        ?*=?*)
            given[${1%%=*}]=${1#*=}
            order+=("${1%%=*}")
            ;;
        *) echo "run.sh: not understood: $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done
for workload in ${workloads//,/ }; do
    [[ $workload =~ ^(tree|build|shared)$ ]] || fail "no such workload: $workload"
done
if [[ -z $only ]]; then
    only=tmpfs,ext4,bindfs
    if [[ -x $hayloft ]]; then only+=,hayloft; else note "no $hayloft: measuring without it"; fi
fi

# What has to be undone, the last first. Everything runs in the background and is waited for: bash would
# otherwise hold a signal back until the command in the foreground ends.
undo=() running=
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

wanted() {
    [[ ,$only, == *,$1,* && -z ${given[$1]:-} ]]
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
    mkfs.ext4 -q -E lazy_itable_init=0,lazy_journal_init=0 "$work/image.ext4"
    mkdir "$work/image"
    mount -o loop "$work/image.ext4" "$work/image"
    undo+=("unmount $work/image")
}

prepare_tmpfs() {
    mount_tmpfs tmpfs
    prepared[tmpfs]=$work/tmpfs
}

prepare_ext4() {
    mount_ext4
    mkdir "$work/image/ext4"
    prepared[ext4]=$work/image/ext4
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
    prepared[bindfs]=$work/bindfs
}

prepare_hayloft() {
    [[ -x $hayloft ]] || fail "no $hayloft: build it (cargo build --release) or set HAYLOFT"
    mount_ext4
    mkdir "$work/image/store"
    start "$work/serve.log" "$hayloft" serve --store "file://$work/image/store" --listen 127.0.0.1:0
    undo+=("stop $daemon")
    wait_for "$daemon" "$work/serve.log" grep -qs "^serving " "$work/serve.log"
    local server
    server=$(sed -n 's/^serving .* on \([^ ]*:[0-9]*\).*/\1/p' "$work/serve.log" | head -n 1)
    "$hayloft" volume create bench --server "$server" >/dev/null
    mount_hayloft hayloft
    prepared[hayloft]=$work/hayloft
    mounts[hayloft]=$work/hayloft
    [[ ,$workloads, == *,shared,* ]] || return 0
    local n
    for ((n = 2; n <= hosts; n++)); do
        mount_hayloft "hayloft$n"
        mounts[hayloft]+=" $work/hayloft$n"
    done
}

mount_hayloft() {
    mkdir -p "$work/$1" "$work/image/client/$1" "$work/log/$1"
    start "$work/$1.log" "$hayloft" mount "$server/bench" "$work/$1" --foreground \
        --cache-dir "$work/image/client/$1" --log-dir "$work/log/$1"
    undo+=("stop $daemon" "leave_hayloft $work/$1")
    wait_for "$daemon" "$work/$1.log" mountpoint -q "$work/$1"
}

leave_hayloft() {
    mountpoint -q "$1" || return 0
    timeout 120 "$hayloft" umount "$1" >&2 || unmount "$1"
}

# Four mounts of one volume, first with a worker each and then with two. A local file system takes the places of all
# four: what one kernel can do.
run_shared() {
    local name workers n seconds=5
    [[ -z $smoke ]] || seconds=0.3
    for name in tmpfs ext4 bindfs hayloft; do
        [[ -n ${prepared[$name]:-} ]] || continue
        local dirs=(${mounts[$name]:-})
        for ((n = ${#dirs[@]}; n < hosts; n++)); do dirs+=("${prepared[$name]}"); done
        for workers in $hosts $((2 * hosts)); do
            note "workload shared: $name, $workers workers"
            echo "$name"
            run "$bench" shared --workers "$workers" --seconds "$seconds" \
                --json "$out/shared-$name-$workers.json" "${dirs[@]}" ||
                fail "workload shared failed; results so far are in $out"
        done
    done | tee "$out/shared.txt"
}

# A package that needs no network and a second to build.
toy_package() {
    mkdir "$1"
    printf '#!/bin/sh\ncc --version >config.log && echo "int f(int);" >config.h\n' >"$1/configure"
    chmod +x "$1/configure"
    printf '#include "config.h"\nint main(void) { return f(0); }\n' >"$1/main.c"
    printf '#include "config.h"\nint f(int n) { return n; }\n' >"$1/f.c"
    printf 'toy: main.o f.o\n\tcc -o $@ main.o f.o\nmain.o f.o: config.h\n' >"$1/Makefile"
}

# GNU hello, as a directory: bindfs 1.14 drops the modification times that tar sets (alone, without access times),
# and make would then want to run automake. cp sets both.
hello_package() {
    local paths
    paths=$("$here/fetch-source.sh" hello "${XDG_CACHE_HOME:-$HOME/.cache}/hayloft-bench") ||
        fail "cannot fetch the source of hello; leave the workload out with --workloads tree"
    mkdir "$1"
    tar -C "$1" --strip-components=1 -xf "$(tail -n 1 <<<"$paths")"
}

note "building hayloft-bench"
run cargo build -q --release --manifest-path "$here/Cargo.toml" || fail "cargo build failed"
bench=${CARGO_TARGET_DIR:-$here/target}/release/hayloft-bench

out=${out:-$here/target/runs/$(date -u +%Y-%m-%dT%H%M%SZ)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d "$scratch/hayloft-bench.XXXXXX")
undo+=("rm -rf --one-file-system $work")

for name in tmpfs ext4 bindfs hayloft; do
    wanted "$name" || continue
    [[ $(id -u) == 0 ]] || fail "mounting $name needs root; give $name=DIR, or leave it out with --only"
    note "preparing $name"
    "prepare_$name"
done
targets=()
for name in tmpfs ext4 bindfs hayloft; do
    dir=${given[$name]:-${prepared[$name]:-}}
    [[ -z $dir ]] || targets+=("$name=$dir")
done
for name in "${order[@]}"; do
    [[ $name =~ ^(tmpfs|ext4|bindfs|hayloft)$ ]] || targets+=("$name=${given[$name]}")
done
[[ ${#targets[@]} -gt 0 ]] || fail "nothing to measure"

{
    uname -sr
    [[ -z ${prepared[hayloft]:-} ]] || "$hayloft" --version
    [[ -z ${prepared[bindfs]:-} ]] || bindfs --version
    for target in "${targets[@]}"; do
        echo "${target%%=*}: $(findmnt -n -o FSTYPE,OPTIONS -T "${target#*=}")"
    done
} >"$out/setup.txt"

for workload in ${workloads//,/ }; do
    if [[ $workload == shared ]]; then
        run_shared
        continue
    fi
    options=(--rounds "$rounds" --json "$out/$workload.json")
    if [[ $workload == tree ]]; then
        options+=(--sync)
        [[ -z $smoke ]] || options+=(--scale 0.02)
    else
        if [[ -n $smoke ]]; then package=toy; else package=hello; fi
        "${package}_package" "$work/$package"
        options+=(--source "$work/$package")
    fi
    note "workload $workload: ${targets[*]%%=*}"
    run "$bench" "$workload" "${options[@]}" "${targets[@]}" >"$out/$workload.txt" ||
        fail "workload $workload failed; results so far are in $out"
    cat "$out/$workload.txt"
done
note "results are in $out"
