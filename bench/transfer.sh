#!/bin/bash
# What it costs to send a tree to a mirror and to receive the next version of it from a web server, against desync and casync. As root.
#   bench/transfer.sh [--smoke] [--rounds N] [--sets LIST]      (default: 3 rounds of index, root and source; DESYNC and CASYNC name the other programs, HAYLOFT this one; needs 15 GB for a while)
# Prints a line for each set of data and program: medians, of times also the longest, and how many times what the other one needs is ours.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=3 sets=index,root,source index=100000000 root=20000 source=20000
while (($#)); do
    case $1 in
        --smoke) rounds=1 index=2000000 root=300 source=300; shift; continue ;;
        --rounds) rounds=$2 ;;
        --sets) sets=$2 ;;
        *) sed -n '2,4s/^# \?//p' "$0" >&2; exit 2 ;;
    esac
    shift 2
done
hayloft=${HAYLOFT:-$PWD/target/release/hayloft} desync=${DESYNC:-desync} casync=${CASYNC:-casync}
here=$PWD/bench
work=$(mktemp -d "${TMPDIR:-/var/tmp}/hayloft-transfer-XXXXXX")
mkdir "$work/tmp" "$work/web" "$work/done"
export HAYLOFT_CONFIG=/dev/null HAYLOFT_SERVER="unix:$work/socket" TMPDIR="$work/tmp"
mounted= server= web=
over() {
    [[ -z $mounted ]] || "$hayloft" umount --force "$mounted" >/dev/null 2>&1 || true
    for pid in $server $web; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true; done
    rm -rf "$work"
}
trap over EXIT
# desync cuts at 64 KiB on average, as casync does, and hayloft at 16 KiB: desync-16k is desync told to do so.
senders=(hayloft) receivers=(hayloft hayloft-volume)
if command -v "$desync" >/dev/null; then senders+=(desync desync-16k) receivers+=(desync desync-16k); else echo "no desync: not compared (DESYNC names it)" >&2; fi
if command -v "$casync" >/dev/null; then senders+=(casync) receivers+=(casync); else echo "no casync: not compared (CASYNC names it)" >&2; fi
"$hayloft" serve --store "file://$work/store" --listen "$HAYLOFT_SERVER" >"$work/log" 2>&1 &
server=$!
python3 "$here/transfer.py" serve "$work/web" >"$work/sent" 2>"$work/web-log" &
web=$!
while ! grep -q serving "$work/log" || [[ ! -s $work/sent ]]; do sleep 0.05; done
url=http://127.0.0.1:$(head -1 "$work/sent")
record() { echo "$set $1 $2 $3" >>"$work/raw"; }
# timed PROGRAM WHAT COMMAND...: until what it has written is durable; what others had to write before is none of it.
timed() {
    local begun
    sync -f "$work"
    begun=$(date +%s%N)
    "${@:3}" >"$work/said" 2>&1 || { cat "$work/said" >&2; echo "$set: $1 failed: $2" >&2; exit 1; }
    sync -f "$work"
    record "$1" "$2" $(($(date +%s%N) - begun))
}
# What the web server has sent up to now: bytes and requests.
sent() {
    local lines
    lines=$(wc -l <"$work/sent")
    kill -USR1 "$web"
    while (($(wc -l <"$work/sent") == lines)); do sleep 0.02; done
    tail -1 "$work/sent"
}
size() { find "$1" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum + 0 }'; }
# send PROGRAM STATE: a single file is sent as a file by those that tell files and trees apart.
send() {
    local what=$data/$2 mirror=$work/web/$1 kind=caidx make=tar index=-i options=()
    [[ $set != index ]] || what=$what/Packages kind=caibx make=make index=
    [[ $1 != *-16k ]] || options=(-m 4:16:64)
    case $1 in
        hayloft) "$hayloft" send "$data/$2" --as "$set@$2" --to "$mirror" --cache "$work/sender" --json ;;
        desync*) "$desync" "$make" $index "${options[@]}" -s "$mirror/store" "$mirror/$2.$kind" "$what" ;;
        casync) "$casync" make --store="$mirror/store" "$mirror/$2.$kind" "$what" ;;
    esac
}
# prepare PROGRAM: the receiver gets the old state as it would have got it before: hayloft by receiving it, the others as files in $data/old. For untar, desync
# has no seed, so it has the old chunks in a store of its own (--cache), which it keeps besides the tree: nothing is cut again when it
# receives. A file it takes from the old file and its index (--seed).
prepare() {
    case $1 in
        hayloft) HAYLOFT_SERVER="unix:$work/none" "$hayloft" receive "$url/hayloft" "$set@old" --into "$work/old-hayloft" --cache "$work/has-hayloft" --json >/dev/null ;;
        hayloft-volume) "$hayloft" receive "$url/hayloft" "$set@old" --volume "$volume" --cache "$work/has-$1" --json >/dev/null ;;
        desync*) mkdir "$work/has-$1" && cp -r "$work/web/$1/." "$work/has-$1" ;;
    esac
}
receive() {
    local from=$url/$1 has=$work/has-$1 none="unix:$work/none"
    case $1-$set in
        hayloft-volume-*) "$hayloft" receive "$url/hayloft" "$set@new" --volume "$volume" --cache "$has" --json ;;
        hayloft-*) HAYLOFT_SERVER=$none "$hayloft" receive "$from" "$set@new" --into "$work/out" --seed "$work/old-hayloft" --cache "$has" --json ;;
        desync*-index) "$desync" extract -s "$from/store" --seed "$has/old.caibx:$data/old/Packages" "$from/new.caibx" "$work/out/Packages" ;;
        desync*) "$desync" untar -i -s "$from/store" -c "$has/store" "$from/new.caidx" "$work/out" ;;
        casync-index) "$casync" extract --store="$from/store" --seed="$data/old/Packages" "$from/new.caibx" "$work/out/Packages" ;;
        casync-*) "$casync" extract --store="$from/store" --seed="$data/old" "$from/new.caidx" "$work/out" ;;
    esac
}
same() {
    local out=$work/out
    if [[ $1 == hayloft-volume ]]; then
        mkdir -p "$work/point"
        "$hayloft" mount "$HAYLOFT_SERVER/$volume" "$work/point" --log-dir "$work/logs" >/dev/null
        mounted=$work/point out=$work/point
    fi
    diff -r --no-dereference "$data/new" "$out" >"$work/differs" || { head "$work/differs" >&2; echo "$set: what $1 received is not what was sent" >&2; exit 1; }
    [[ -z $mounted ]] || "$hayloft" umount "$mounted" >/dev/null
    mounted=
}
round() {
    local program before bytes requests bytes_before requests_before
    volume=$set-$1
    for program in "${senders[@]}"; do
        mkdir -p "$work/web/$program"
        [[ $program == hayloft ]] || mkdir "$work/web/$program/store"
        timed "$program" send-old send "$program" old
    done
    for program in "${receivers[@]}"; do prepare "$program"; done
    for program in "${senders[@]}"; do
        before=$(size "$work/web/$program")
        timed "$program" send-new send "$program" new
        record "$program" added $(($(size "$work/web/$program") - before))
        record "$program" files "$(find "$work/web/$program" -type f | wc -l)"
    done
    for program in "${receivers[@]}"; do
        mkdir "$work/out"
        read -r bytes_before requests_before < <(sent)
        timed "$program" receive receive "$program"
        read -r bytes requests < <(sent)
        record "$program" came $((bytes - bytes_before))
        record "$program" requests $((requests - requests_before))
        same "$program"
        mv "$work/out" "$work/done/$volume-$program"
    done
    # Nothing is deleted before the end: ext4 looks for inodes that were not freed lately, and that would be part of the times.
    mkdir "$work/done/$volume"
    mv "$work"/web/* "$work"/has-* "$work/old-hayloft" "$work/sender" "$work/done/$volume"
}
# The medians of a set of data, a line for each program. A peer's ratios are to hayloft: sending, bytes added, receiving (into a folder; into
# a volume), bytes that came.
lines() {
    sort -k2,3 -k4n "$work/raw" | awk -v set="$set" -v programs="${receivers[*]}" '
        function half(program, what, at) { at = program SUBSEP what; return value[at, int((count[at] + 1) / 2)] }
        function most(program, what, at) { at = program SUBSEP what; return value[at, count[at]] }
        function seconds(program, what) { return (program, what) in count ? sprintf("%8.2f s (%6.2f)", half(program, what) / 1e9, most(program, what) / 1e9) : sprintf("%19s", "") }
        function ratio(what, program, ours) { return sprintf("%.2f", half(ours ? ours : "hayloft", what) / half(program, what)) }
        $1 == set { value[$2, $3, ++count[$2, $3]] = $4 }
        END {
            for (n = 1; n <= split(programs, program, " "); n++) {
                p = program[n]
                printf "%-7s %-15s %s %s  ", set, p, seconds(p, "send-old"), seconds(p, "send-new")
                if ((p, "added") in count) printf "%11d B %6d files", half(p, "added"), half(p, "files"); else printf "%26s", ""
                printf "  %s %11d B in %5d requests", seconds(p, "receive"), half(p, "came"), half(p, "requests")
                if (p !~ /^hayloft/) printf "  hayloft is x %s %s, %s of bytes; x %s (%s), %s of bytes", ratio("send-old", p), ratio("send-new", p), ratio("added", p), ratio("receive", p), ratio("receive", p, "hayloft-volume"), ratio("came", p)
                print ""
            }
        }'
}
echo "$rounds rounds, $(nproc) processors; medians, the longest in brackets"
printf '%-7s %-15s %19s %19s  %26s  %19s %s\n' set program "send old" "send new" "new has added, all files" "receive new" "     web server sent"
for set in ${sets//,/ }; do
    data=$work/data-$set
    mkdir "$data"
    python3 "$here/transfer.py" "$set" "$data/old" "$data/new" "${!set}"
    echo "$set: $(find "$data/new" -type f | wc -l) files, $(size "$data/new") bytes; $({ diff -rq --no-dereference "$data/old" "$data/new" || true; } | wc -l) paths differ"
    for ((n = 1; n <= rounds; n++)); do round "$n"; done
    lines
done
ps -o rss=,cputime= -p "$server" | awk '{ printf "hayloft serve: %d MiB, %s of processor time\n", $1 / 1024, $2 }'
