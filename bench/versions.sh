#!/bin/bash
# What snapshots, forks, differences, names by content and the way back cost, on a tree of so many files, against a copy of it by cp -a on the local disk. As root.
#   bench/versions.sh [--smoke] [--files N] [--snapshots N] [--forks N] [--exchanges N]      (defaults: 100,000 files, 100 snapshots, 20 forks, 3 ways back)
# Prints a line for each: milliseconds in the median and at most, and the ratio of the median to the copy.
set -euo pipefail
cd "$(dirname "$0")/.."
files=100000 snapshots=100 forks=20 exchanges=3 patience=12
while (($#)); do
    case $1 in
        --smoke) files=2000 snapshots=10 forks=3 exchanges=1 patience=0; shift; continue ;;
        --files) files=$2 ;;
        --snapshots) snapshots=$2 ;;
        --forks) forks=$2 ;;
        --exchanges) exchanges=$2 ;;
        *) sed -n '2,4s/^# \?//p' "$0" >&2; exit 2 ;;
    esac
    shift 2
done
hayloft=${HAYLOFT:-$PWD/target/release/hayloft}
here=$PWD/bench
work=$(mktemp -d "${TMPDIR:-/var/tmp}/hayloft-versions-XXXXXX")
export HAYLOFT_CONFIG=/dev/null HAYLOFT_SERVER="unix:$work/socket"
mounts=() server=
over() {
    for point in "${mounts[@]}"; do "$hayloft" umount --force "$point" >/dev/null 2>&1 || true; done
    [[ -z $server ]] || { kill "$server" 2>/dev/null && wait "$server" 2>/dev/null; } || true
    rm -rf "$work"
}
trap over EXIT
"$hayloft" serve --store "file://$work/store" --listen "$HAYLOFT_SERVER" >"$work/log" 2>&1 &
server=$!
while ! grep -q serving "$work/log"; do sleep 0.05; done
mounted() {
    mkdir -p "$work/$2"
    "$hayloft" mount "$HAYLOFT_SERVER/$1" "$work/$2" --log-dir "$work/logs" >/dev/null
    mounts+=("$work/$2")
}
now() { date +%s%N; }
times=()
timed() {
    local begun
    begun=$(now)
    "$@" >/dev/null
    times+=($(($(now) - begun)))
}
copy=0
# line WHAT: the times that were taken since the last one.
line() {
    printf '%s\n' "${times[@]}" | sort -n | awk -v what="$1" -v copy="$copy" \
        '{ ms[NR] = $1 / 1e6 } END { half = ms[int((NR + 1) / 2)]; printf "%-44s %5d  p50 %10.1f ms  max %10.1f ms", what, NR, half, ms[NR]; \
           if (copy > 0) printf "  x %.5f of cp -a", half / copy; print "" }'
    times=()
}
"$hayloft" volume create base >/dev/null
mounted base a
mounted base b
echo "$files files, $(nproc) processors"
timed python3 "$here/versions.py" tree "$work/a" "$files"
timed "$hayloft" sync "$work/a"
times=($((times[0] + times[1])))
line "the tree is made and durable"
mkdir "$work/local"
python3 "$here/versions.py" tree "$work/local" "$files"
sync -f "$work"
timed cp -a "$work/local" "$work/copied"
timed sync -f "$work"
times=($((times[0] + times[1])))
copy=$(awk -v ns="${times[0]}" 'BEGIN { print ns / 1e6 }')
line "cp -a on the local disk, durable"
rm -rf "$work/copied"
times=()
# live WHEN: what the live tree costs: files made and durable, found and read by the other host, changed and durable, removed and durable.
create() { python3 -c 'import sys
for n in range(1000): open(f"{sys.argv[1]}/{n}", "w").write(str(n) * 50)' "$1"; sync -f "$work/a"; }
again() { python3 -c 'import sys
for n in range(1000): open(f"{sys.argv[1]}/{n}", "w").write(str(n) * 60)' "$1"; sync -f "$work/a"; }
live() {
    local n what
    for what in create cat again rm; do
        for n in 1 2 3 4 5; do
            case $what in
                create) mkdir "$work/a/$1-$n"; timed create "$work/a/$1-$n" ;;
                cat) timed cat -- "$work/b/$1-$n/"* ;;
                again) timed again "$work/a/$1-$n" ;;
                rm) timed rm -r "$work/a/$1-$n" ;;
            esac
        done
        line "$1: 1,000 files, $what"
    done
}
# What the server does when nobody asks for anything: first it tidies up behind what was done, for a minute at most; the short form does not wait for that.
ticks() { awk '{ print $14 + $15 }' "/proc/$server/stat"; }
rest() {
    local before tries
    for ((tries = 0; tries < patience; tries++)); do
        before=$(ticks)
        sleep 5
        ((($(ticks) - before) * 10 > 100)) || break
    done
    before=$(ticks)
    sleep 5
    echo "$1: the server uses $(((($(ticks) - before) * 10 + 2) / 5)) ms of processor time a second"
}
rest few
live few
for n in 1 2 3 4 5; do timed "$hayloft" snapshot create "base@first-$n"; done
line "snapshot, nothing unshipped"
for n in 1 2 3 4 5; do
    python3 "$here/versions.py" change "$work/a" 20 "a $n"
    python3 "$here/versions.py" change "$work/b" 20 "b $n"
    timed "$hayloft" snapshot create "base@changed-$n"
done
line "snapshot, two hosts with 20 changes each"
for ((n = 0; n < forks; n++)); do timed "$hayloft" fork base@first-1 "fork-$n"; done
line "fork of a snapshot"
timed "$hayloft" fork base fork-now
line "fork of the volume as it is"
mounted fork-now f
timed find "$work/f" -name 7.c
line "first find in a fork, $files names"
python3 "$here/versions.py" change "$work/a" 100 later
for n in 1 2 3; do timed "$hayloft" diff base@changed-5 base; done
line "diff, 100 files changed"
read -r told rows < <("$hayloft" diff base@changed-5 base --json | python3 -c 'import json, sys; it = json.load(sys.stdin); print(len(it["differences"]), it["rows_read"])')
echo "  $told differences, $rows rows read"
# Names by content, against a program that hashes every file of the same tree on the local disk.
hashed() { find "$work/local" -type f -print0 | xargs -0 -P "$(nproc)" -n 500 sha256sum; }
timed hashed
line "sha256sum of all files on the local disk"
"$hayloft" snapshot create base@named-1 >/dev/null
timed "$hayloft" verify base@named-1
line "the first name by content"
python3 "$here/versions.py" change "$work/a" 100 named
"$hayloft" snapshot create base@named-2 >/dev/null
timed "$hayloft" verify base@named-2
line "the next name, 100 files changed"
timed "$hayloft" verify base@named-2
line "the same from all rows"
timed "$hayloft" verify "$work/local"
line "the name of the local disk's tree, read"
timed "$hayloft" verify base@named-2 --deep
line "from all rows, and all read through a mount"
rm -rf "$work/local"
# A fork with 100 changed files, merged while the volume has changes of its own and both hosts know all names; then the way back, both knowing all again.
for ((n = 0; n < exchanges; n++)); do
    "$hayloft" snapshot create "base@begun-$n" >/dev/null
    "$hayloft" fork "base@begun-$n" "side-$n" >/dev/null
    mounted "side-$n" "side-$n"
    python3 "$here/versions.py" change "$work/side-$n" 100 "side $n"
    "$hayloft" umount "$work/side-$n" >/dev/null
    mkdir "$work/a/ours-$n"
    for host in a b; do find "$work/$host" -ls >/dev/null; done
    timed "$hayloft" merge "side-$n" --cache "$work/cache"
done
line "merge of a fork, 100 files changed in it"
for ((n = 0; n < exchanges; n++)); do
    for host in a b; do find "$work/$host" -ls >/dev/null; done
    timed "$hayloft" rollback "base@begun-$n"
done
line "rollback, two hosts know all names"
for ((n = 0; n < exchanges; n++)); do timed "$hayloft" rollback "base@changed-$((n % 3 + 1))"; done
line "rollback, two hosts have it mounted"
for ((n = 0; n < snapshots; n++)); do timed "$hayloft" snapshot create "base@many-$n"; done
line "snapshot after snapshot"
rest many
live many
timed "$hayloft" snapshot list base
line "the list of all"
ps -o rss=,cputime= -p "$server" | awk '{ printf "server: %d MiB, %s of processor time\n", $1 / 1024, $2 }'
du -sm "$work/store" | awk '{ print "store: " $1 " MiB" }'
for ((n = 0; n < snapshots; n++)); do timed "$hayloft" snapshot delete "base@many-$n"; done
line "snapshot deleted"
