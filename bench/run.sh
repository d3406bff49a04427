#!/bin/bash
# Measures Hayloft beside a memory, a disk and a plain FUSE file system, all on this machine.
#
#   bench/run.sh [--smoke] [--rounds N] [--workloads LIST] [--only LIST] [--rtt LIST] [--store-delay MS]
#                [--mounts N] [--parts LIST] [--cflags FLAGS] [--out DIR] [--scratch DIR] [NAME=DIR[,DIR...]...]
#
#   --smoke           seconds: a fiftieth of the tree and toy packages, one round; the figures mean nothing
#   --rounds N        rounds of each workload (default 3)
#   --workloads LIST  of tree,cold,build,shared,make,many (default tree,build); cold drops all that this machine's kernel caches
#   --only LIST       which of tmpfs,ext4,bindfs,hayloft to prepare (default all; hayloft if it has been built)
#   --rtt LIST        hayloft over slow links: a target for each of these round-trip times, in milliseconds; the first is
#                     the baseline, and (without --only) nothing else is prepared
#   --store-delay MS  beside each target hayloft one whose server has a store on which each write takes so much longer
#   --mounts N        mounts of a volume for the workload shared (default 4)
#   --parts LIST      of the workload shared only these parts: depend,easy,durable,hard,watch,pass,hand,crowd (default all)
#   --cflags FLAGS    what the workload make compiles with (default "-O0 -g": much file system beside little compiling)
#   --out DIR         where tables and raw results go (default bench/target/runs/DATE)
#   --scratch DIR     where the ext4 image goes: 12 GB on a local disk (default $TMPDIR, else /var/tmp)
#   NAME=DIR,...      a directory to measure as well, or instead of the prepared one of that name; several: as seen
#                     through several mounts, for the workloads shared and make
#
# Prepared are: tmpfs, a fresh tmpfs mount and the baseline; ext4, a fresh image in a loop file; bindfs, a
# pass-through FUSE file system on a tmpfs; hayloft, a volume of a server on this machine, its store on the ext4
# image. Whatever was started or mounted is gone at the end, also after Ctrl-C. Mounting needs root.
#
# Examples:
#   bench/run.sh --smoke
#   bench/run.sh --rounds 5 --only tmpfs,ext4,hayloft
#   bench/run.sh --workloads cold --only ext4,hayloft
#   bench/run.sh --workloads tree nfs=/mnt/nfs
#   bench/run.sh --workloads tree,build,shared,make --rtt 0,1,10
#   bench/run.sh --workloads shared --only hayloft --store-delay 30
#   bench/run.sh --workloads shared --only hayloft --mounts 100 --parts crowd
set -euo pipefail
export LC_ALL=C

here=$(cd "$(dirname "$0")" && pwd)
# What is mounted here is seen by nobody else: a copy of it in a namespace that somebody makes meanwhile would keep it after it was taken away.
if [[ $(id -u) == 0 && -z ${BENCH_ALONE:-} ]]; then
    BENCH_ALONE=1 exec unshare --mount "$0" "$@"
fi
hayloft=${HAYLOFT:-$here/../target/release/hayloft}
smoke= rounds=3 workloads=tree,build only= rtt= store_delay= parts= cflags= out= scratch=${TMPDIR:-/var/tmp}
mounts=4 make_hosts=8
declare -A given=() dirs=() pids=()
order=() names=()
export HAYLOFT_CONFIG=/dev/null

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
        --rounds | --workloads | --only | --rtt | --store-delay | --mounts | --parts | --cflags | --out | --scratch)
            [[ $# -gt 1 ]] || { usage >&2; exit 2; }
            option=${1#--}
            declare "${option//-/_}=$2"
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
    [[ $workload =~ ^(tree|cold|build|shared|make|many)$ ]] || fail "no such workload: $workload"
done
[[ $rtt =~ ^([0-9.]+(,[0-9.]+)*)?$ ]] || fail "--rtt: not milliseconds: $rtt"
[[ $mounts =~ ^[1-9][0-9]*$ ]] || fail "--mounts: not a number: $mounts"
[[ $store_delay =~ ^[0-9.]*$ ]] || fail "--store-delay: not milliseconds: $store_delay"
kinds=(tmpfs ext4 bindfs hayloft)
if [[ -n $rtt ]]; then
    only=${only:-hayloft}
    kinds=(hayloft tmpfs ext4 bindfs)
elif [[ -z $only ]]; then
    only=tmpfs,ext4,bindfs
    if [[ -x $hayloft ]]; then only+=,hayloft; else note "no $hayloft: measuring without it"; fi
fi
[[ -z $rtt$store_delay || ,$only, == *,hayloft,* && -z ${given[hayloft]:-} ]] ||
    fail "--rtt and --store-delay need a hayloft that is prepared here"
# How many mounts each Hayloft volume has.
hosts=1
[[ ,$workloads, != *,shared,* ]] || hosts=$mounts
[[ -z $smoke ]] || make_hosts=3
[[ ,$workloads, != *,make,* || $make_hosts -le $hosts ]] || hosts=$make_hosts

. "$here/prepare.sh"

# A target as seen through at most so many mounts.
through() { # NAME COUNT
    echo "$1=$(cut -d, -f "-$2" <<<"${dirs[$1]}")"
}

# Several mounts of one volume, first with a worker each and then with two (a crowd has its own number). A local file system takes the places of all
# four: what one kernel can do.
run_shared() {
    local workers name targets=() seconds=5 server=()
    # Of the last of the targets, if that is it.
    [[ ${names[-1]} != hayloft* ]] || server=(--server-pid "${pids[${names[-1]}]%%,*}")
    [[ -z $smoke ]] || seconds=0.1
    for name in "${names[@]}"; do targets+=("$(through "$name" "$mounts")"); done
    for workers in $mounts $((2 * mounts)); do
        measure "shared-$workers" shared --workers "$workers" --seconds "$seconds" ${parts:+--parts "$parts"} "${server[@]}" "${targets[@]}"
    done
}

# What each of very many files costs the two processes of Hayloft.
run_many() {
    local options=()
    if [[ -z ${pids[hayloft]:-} ]]; then
        note "workload many looks at the processes of a Hayloft that is prepared here: left out"
        return
    fi
    [[ -z $smoke ]] || options+=(--files 2000 --portion 1000 --rest 0)
    note "workload many"
    run "$bench" many --server-pid "$(cut -d, -f 1 <<<"${pids[hayloft]}")" --json "$out/many.json" \
        --client-pid "$(cut -d, -f 2 <<<"${pids[hayloft]}")" "${options[@]}" "${dirs[hayloft]%%,*}" >"$out/many.txt" ||
        fail "workload many failed; results so far are in $out"
    cat "$out/many.txt"
}

# As usual on one mount of each, and with recipes sent in turn to all mounts of each that has several. To a local disk they are
# sent as well: what sending costs.
run_make() {
    local name targets=() count disk
    for name in "${names[@]}"; do
        targets+=("$(through "$name" 1)")
        [[ -z ${pids[$name]:-} ]] || targets+=(--processes "$name=$(cut -d, -f -2 <<<"${pids[$name]}")")
        if [[ ${dirs[$name]} == *,* ]]; then
            count=$(tr ',' '\n' <<<"${dirs[$name]}" | wc -l)
            targets+=("$name-x$count=${dirs[$name]}")
            [[ -z ${pids[$name]:-} ]] || targets+=(--processes "$name-x$count=${pids[$name]}")
        elif [[ $name == ext4 ]]; then
            disk=$(printf ",%.0s${dirs[ext4]}" $(seq "$make_hosts"))
            targets+=("ext4-x$make_hosts=${disk#,}")
        fi
    done
    if [[ -n $smoke ]]; then toy_package "$work/objects" 12; else unpack_package coreutils "$work/objects"; fi
    measure make make --source "$work/objects" ${cflags:+--cflags "$cflags"} "${targets[@]}"
}

run_tree() {
    local name targets=() options=(--sync)
    for name in "${names[@]}"; do targets+=("$(through "$name" 1)"); done
    [[ -z $smoke ]] || options+=(--scale 0.02)
    measure tree tree "${options[@]}" "${targets[@]}"
}

# What is in memory cannot be made cold.
run_cold() {
    local name targets=() options=() cold=$work/cold.sh
    for name in "${names[@]}"; do
        [[ $(findmnt -n -o FSTYPE -T "${dirs[$name]%%,*}") == tmpfs || $name == bindfs ]] || targets+=("$(through "$name" 1)")
    done
    if [[ ${#targets[@]} -eq 0 ]]; then
        note "workload cold is for what lies on a disk: left out"
        return
    fi
    mounted_anew >"$cold"
    [[ -z $smoke ]] || options+=(--scale 0.02)
    measure cold cold --cold "bash $cold cold" --requests "bash $cold requests" "${options[@]}" "${targets[@]}"
    served_anew
}

run_build() {
    local name targets=()
    for name in "${names[@]}"; do targets+=("$(through "$name" 1)"); done
    if [[ -n $smoke ]]; then toy_package "$work/package" 2; else unpack_package hello "$work/package"; fi
    measure build build --source "$work/package" "${targets[@]}"
}

measure() { # RESULTS WORKLOAD ARGUMENTS...
    local results=$1
    shift
    note "workload $1: ${names[*]}"
    run "$bench" "$1" --rounds "$rounds" --json "$out/$results.json" "${@:2}" >"$out/$results.txt" ||
        fail "workload $1 failed; results so far are in $out"
    cat "$out/$results.txt"
}

# A package that needs no network and a second to build: a program of so many objects.
toy_package() { # DIR COUNT
    local n
    mkdir "$1"
    printf '#!/bin/sh\ncc --version >config.log && echo "int f(int);" >config.h\n' >"$1/configure"
    chmod +x "$1/configure"
    printf '#include "config.h"\nint main(void) { return f(0); }\n' >"$1/main.c"
    printf '#include "config.h"\nint f(int n) { return n; }\n' >"$1/f.c"
    for ((n = 2; n < $2; n++)); do printf '#include "config.h"\nint f%d;\n' "$n" >"$1/f$n.c"; done
    printf 'objects := $(patsubst %%.c,%%.o,$(sort $(wildcard *.c)))\ntoy: $(objects)\n\tcc -o $@ $^\n$(objects): config.h\n' >"$1/Makefile"
}

# A package of Debian, as a directory: bindfs 1.14 drops the modification times that tar sets (alone, without access times),
# and make would then want to run automake. cp sets both.
unpack_package() { # PACKAGE DIR
    local paths
    paths=$("$here/fetch-source.sh" "$1" "${XDG_CACHE_HOME:-$HOME/.cache}/hayloft-bench") ||
        fail "cannot fetch the source of $1; leave the workload out with --workloads"
    mkdir "$2"
    tar -C "$2" --strip-components=1 -xf "$(tail -n 1 <<<"$paths")"
}

note "building hayloft-bench"
run cargo build -q --release --manifest-path "$here/Cargo.toml" || fail "cargo build failed"
built=$(cd "${CARGO_TARGET_DIR:-$here/target}/release" && pwd)
bench=$built/hayloft-bench store_delay_library=$built/libstore_delay.so

out=${out:-$here/target/runs/$(date -u +%Y-%m-%dT%H%M%SZ)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d "$scratch/hayloft-bench.XXXXXX")
undo+=("rm -rf --one-file-system $work")

for kind in "${kinds[@]}"; do
    if [[ -n ${given[$kind]:-} ]]; then
        add_target "$kind" "${given[$kind]}"
    elif [[ ,$only, == *,$kind,* ]]; then
        [[ $(id -u) == 0 ]] || fail "mounting $kind needs root; give $kind=DIR, or leave it out with --only"
        note "preparing $kind"
        "prepare_$kind"
    fi
done
for name in "${order[@]}"; do
    [[ " ${kinds[*]} " == *" $name "* ]] || add_target "$name" "${given[$name]}"
done
[[ ${#names[@]} -gt 0 ]] || fail "nothing to measure"

{
    uname -sr
    [[ -z ${serving:-} ]] || "$hayloft" --version
    [[ -z ${pids[bindfs]:-} ]] || bindfs --version
    for name in "${names[@]}"; do
        echo "$name: $(findmnt -n -o FSTYPE,OPTIONS -T "${dirs[$name]%%,*}")"
    done
    [[ -z $store_delay ]] || echo "hayloft-slow: each write to the store takes $store_delay ms longer"
    [[ -z $rtt ]] || echo "all of hayloft: through a proxy, with round-trip times of $rtt ms"
} >"$out/setup.txt"

for workload in ${workloads//,/ }; do "run_$workload"; done
note "results are in $out"
