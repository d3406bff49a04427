#!/bin/bash
# Measures build roots: how soon a command runs in one, and how fast its files are beside plain memory.
#
#   bench/roots.sh [--smoke] [--rounds N] [--starts N] [--builds N] [--out DIR] [--scratch DIR]
#
#   --smoke        seconds: small layers, a fiftieth of the tree, one round; the figures mean nothing
#   --rounds N     rounds of the workload (default 3)
#   --starts N     how often each kind of root is started (default 40)
#   --builds N     how often a real program is built in each kind of root (default 5; 0: not at all, as with --smoke)
#   --out DIR      where the results go (default bench/target/runs/DATE-roots)
#   --scratch DIR  a local disk for the large layer and the store: 3 GB (default $TMPDIR, else /var/tmp)
#
# Starts: a root on a small layer, on one of 100,000 files and 2 GB, and on that with a memory bound.
# Files: hayloft-bench's workload `tree` inside one root, in turn on tmpfs and on an overlay whose layers are both on
# tmpfs (made outside and bound), on the root itself, whose lower layer is on a Hayloft mount, and on a --scratch
# folder of it.
# Builds: configure and make of GNU hello in a Debian root with a compiler: a copy of the root on tmpfs, entered with
# chroot(1), and hayloft run over the same root as a layer on a Hayloft mount. Made from the archives that this machine
# uses; each has one round before the first that counts. What is written to the disks in the same time without a build is
# told beside it.
# Needs root. Whatever was started or mounted is gone at the end, also after Ctrl-C.
set -euo pipefail
export LC_ALL=C

here=$(cd "$(dirname "$0")" && pwd)
hayloft=${HAYLOFT:-$here/../target/release/hayloft}
smoke= rounds=3 starts=40 builds=5 out= scratch=${TMPDIR:-/var/tmp}

usage() {
    sed -n '2,/^set /{/^set /d;s/^# \?//;p}' "$0"
}

fail() {
    echo "roots.sh: $*" >&2
    exit 1
}

while [[ $# -gt 0 ]]; do
    case $1 in
        --smoke) smoke=1 rounds=1 starts=5 builds=0 ;;
        --rounds | --starts | --builds | --out | --scratch)
            [[ $# -gt 1 ]] || { usage >&2; exit 2; }
            declare "${1#--}=$2"
            shift
            ;;
        -h | --help) usage; exit ;;
        *) echo "roots.sh: not understood: $1" >&2; usage >&2; exit 2 ;;
    esac
    shift
done
[[ $(id -u) == 0 ]] || fail "mounting needs root"
[[ -x $hayloft ]] || fail "no $hayloft: build it (cargo build --release) or set HAYLOFT"
hayloft=$(readlink -f "$hayloft")

undo=()
cleanup() {
    local status=$? n
    trap '' INT TERM HUP
    trap - EXIT
    for ((n = ${#undo[@]} - 1; n >= 0; n--)); do
        eval "${undo[n]}" || echo "roots.sh: could not: ${undo[n]}" >&2
    done
    exit "$status"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

cargo build -q --release --manifest-path "$here/Cargo.toml" || fail "cargo build failed"
bench=$(readlink -f "${CARGO_TARGET_DIR:-$here/target}/release/hayloft-bench")
out=${out:-$here/target/runs/$(date -u +%Y-%m-%dT%H%M%SZ)-roots}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d "$scratch/hayloft-roots.XXXXXX")
undo+=("rm -rf --one-file-system $work")
state=$(mktemp -d /run/hayloft-bench.XXXXXX)
undo+=("rm -rf --one-file-system $state")
export HAYLOFT_STATE_DIR=$state HAYLOFT_CONFIG=/dev/null

# A layer that /usr of this host is bound to.
skeleton() {
    mkdir -p "$1/usr" "$1/etc"
    for name in bin lib lib64 sbin; do ln -s "usr/$name" "$1/$name"; done
    echo root:x:0:0::/root:/bin/sh >"$1/etc/passwd"
}

skeleton "$work/small"
skeleton "$work/large"
if [[ -z $smoke ]]; then folders=1000; else folders=10; fi
head -c 20480 /dev/urandom >"$work/content"
for ((folder = 0; folder < folders; folder++)); do
    mkdir -p "$work/large/part-$((folder / 50))/folder-$folder"
    tee "$work/large/part-$((folder / 50))/folder-$folder/"file-{0..99} <"$work/content" >/dev/null
done

# The median and the largest of start_ms, and of the whole run, over many starts.
starts() {
    local name=$1 n
    shift
    for ((n = 0; n < starts; n++)); do
        local begun=${EPOCHREALTIME/./}
        "$hayloft" run --json "$work/report.json" "$@" --bind /usr:/usr -- /usr/bin/true
        local ended=${EPOCHREALTIME/./}
        echo "$(sed -n 's/.*"start_ms": \([0-9.]*\),*/\1/p' "$work/report.json") $((ended - begun))"
    done >"$work/starts"
    local middle=$(((starts + 1) / 2))
    printf '%-24s %12s ms %12s ms %12s ms\n' "$name" \
        "$(cut -d' ' -f1 "$work/starts" | sort -n | sed -n "${middle}p")" \
        "$(cut -d' ' -f1 "$work/starts" | sort -n | tail -n 1)" \
        "$(cut -d' ' -f2 "$work/starts" | sort -n | sed -n "${middle}p" | awk '{ printf "%.1f", $1 / 1000 }')"
}

{
    printf '%-24s %15s %15s %15s\n' "$starts starts on" "until it runs" "at most" "start to end"
    starts "a small layer" --root "$work/small"
    starts "$((folders * 100)) files" --root "$work/large"
    starts "the same, --memory 1G" --root "$work/large" --memory 1G
    starts "the same, host network" --root "$work/large" --network host
} | tee "$out/starts.txt"

mkdir "$work/tmpfs" "$work/layers" "$work/volume"
mount -t tmpfs -o size=4G hayloft-bench "$work/tmpfs"
undo+=("umount $work/tmpfs")
mount -t tmpfs -o size=4G hayloft-bench "$work/layers"
undo+=("umount $work/layers")
mkdir "$work/layers/lower" "$work/layers/upper" "$work/layers/work" "$work/overlay"
mount -t overlay -o "lowerdir=$work/layers/lower,upperdir=$work/layers/upper,workdir=$work/layers/work" \
    hayloft-bench "$work/overlay"
undo+=("umount $work/overlay")

setsid "$hayloft" serve --store "file://$work/store" --listen 127.0.0.1:0 >"$work/serve.log" 2>&1 </dev/null &
server=$!
undo+=("kill -TERM $server; wait $server || true")
for ((n = 0; n < 100; n++)); do
    grep -qs "^serving " "$work/serve.log" && break
    sleep 0.1
done
address=$(sed -n 's/^serving .* on \([^ ]*:[0-9]*\).*/\1/p' "$work/serve.log" | head -n 1)
[[ -n $address ]] || fail "the server did not start: $(tail -n 3 "$work/serve.log")"
"$hayloft" volume create bench --server "$address" >/dev/null
"$hayloft" mount "$address/bench" "$work/volume" --log-dir "$work" --cache-dir "$work/cache" >/dev/null
undo+=("timeout 60 '$hayloft' umount '$work/volume' >/dev/null")
skeleton "$work/volume/layer"

options=(--rounds "$rounds" --json /out/roots-tree.json)
[[ -z $smoke ]] || options+=(--scale 0.02)
"$hayloft" run --root "$work/volume/layer" --bind /usr:/usr --bind "$bench:/hayloft-bench" --bind "$out:/out:rw" \
    --bind "$work/tmpfs:/tmpfs:rw" --bind "$work/overlay:/overlay:rw" --scratch /scratch -- \
    sh -c 'mkdir /build; exec /hayloft-bench tree "$@"' sh "${options[@]}" \
    tmpfs=/tmpfs overlay=/overlay root=/build scratch=/scratch | tee "$out/roots-tree.txt"

# What the disks have been sent so far, in sectors of 512 bytes: loop devices and memory are none.
sectors_written() {
    local disk
    for disk in /sys/block/*; do
        [[ ${disk##*/} =~ ^(loop|ram|zram|dm-) ]] || cat "$disk/stat"
    done | awk '{ sum += $7 } END { print sum + 0 }'
}

in_memory() {
    unshare --mount --pid --ipc --uts --net --fork chroot "$work/whole" sh -c 'mount -t proc none /proc && exec sh /build.sh'
}

in_root() {
    "$hayloft" run --root "$work/layers-mount/base" --bind "$work/build.sh:/build.sh" --bind "$tarball:/source.tar" -- \
        sh /build.sh
}

# As long as the build before it: what the rest of the machine writes meanwhile.
asleep() {
    sleep "$((took / 1000000))"
    echo "$took"
}

if [[ $builds -gt 0 ]]; then
    tarball=$("$here/fetch-source.sh" hello "$here/target/sources" | sed -n 2p)
    mkdir -p "$work/whole" "$work/layers-mount" "$work/volume/base"
    "$hayloft" root create base --from debian:bookworm,build-essential --layers-dir "$work/layers-dir" >/dev/null
    mount -t tmpfs -o size=4G hayloft-bench "$work/whole"
    undo+=("umount '$work/whole'")
    cp -a "$work/layers-dir/base/tree/." "$work/whole/"
    cp -a "$work/layers-dir/base/tree/." "$work/volume/base/"
    "$hayloft" sync "$work/volume" >/dev/null
    "$hayloft" mount -o ro "$address/bench" "$work/layers-mount" --log-dir "$work" --cache-dir "$work/cache" >/dev/null
    undo+=("timeout 60 '$hayloft' umount '$work/layers-mount' >/dev/null")
    cat >"$work/build.sh" <<'SCRIPT'
set -eu
rm -rf /build && mkdir /build && cd /build
tar --strip-components=1 -xf /source.tar
begun=$(date +%s%N)
{ ./configure && make -j2; } >/build.log 2>&1 || { tail /build.log >&2; exit 1; }
echo "$((($(date +%s%N) - begun) / 1000))"
SCRIPT
    cp "$work/build.sh" "$work/whole/build.sh"
    cp "$tarball" "$work/whole/source.tar"
    mknod -m 666 "$work/whole/dev/null" c 1 3 2>/dev/null || true
    sync
    for ((round = 0; round <= builds; round++)); do
        for kind in in_memory in_root asleep; do
            before=$(sectors_written)
            took=$("$kind")
            [[ $round == 0 ]] || echo "$took $((($(sectors_written) - before) / 2))" >>"$state/builds.$kind"
        done
    done
    median() { cut -d' ' -f"$2" "$state/builds.$1" | sort -n | sed -n "$(((builds + 1) / 2))p"; }
    {
        printf '%-24s %18s %18s %22s\n' "$builds builds of hello" "configure, make" "to tmpfs" "written to disks, KiB"
        for kind in in_memory in_root asleep; do
            case $kind in in_memory) name="tmpfs, chroot" ;; in_root) name="hayloft run" ;; asleep) name="nothing, as long" ;; esac
            awk -v name="$name" -v took="$(median "$kind" 1)" -v base="$(median in_memory 1)" -v kib="$(median "$kind" 2)" \
                'BEGIN { printf "%-24s %16.2f s %18.3f %22d\n", name, took / 1e6, took / base, kib }'
        done
    } | tee "$out/roots-builds.txt"
fi
echo "roots.sh: results are in $out" >&2
