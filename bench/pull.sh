#!/bin/bash
# What comes over the link when a large file has changed and `hayloft pull` brings the next snapshot, and how long that takes. As root.
#   bench/pull.sh [--smoke] [--rounds N] [--rtt MS] [--megabytes N]      (default: 3 rounds, no delay, a file of 100 MB; needs `cargo build --release` in bench/)
# HAYLOFT names the program on both sides, FAR another one at the far side. A line for each change: bytes that came and went, of the
# file's size, and the time; medians.
set -euo pipefail
cd "$(dirname "$0")/.."
rounds=3 rtt=0 megabytes=100
while (($#)); do
    case $1 in
        --smoke) rounds=1 megabytes=4; shift; continue ;;
        --rounds) rounds=$2 ;;
        --rtt) rtt=$2 ;;
        --megabytes) megabytes=$2 ;;
        *) sed -n '2,5s/^# \?//p' "$0" >&2; exit 2 ;;
    esac
    shift 2
done
hayloft=${HAYLOFT:-$PWD/target/release/hayloft} far=${FAR:-${HAYLOFT:-$PWD/target/release/hayloft}}
bench=${BENCH:-$PWD/bench/target/release/hayloft-bench}
work=$(mktemp -d "${TMPDIR:-/var/tmp}/hayloft-pull-XXXXXX")
mkdir "$work/tmp" "$work/point"
export HAYLOFT_CONFIG=/dev/null TMPDIR="$work/tmp"
mounted= here= there= link=
over() {
    [[ -z $mounted ]] || "$far" umount --force "$mounted" >/dev/null 2>&1 || true
    for pid in $link $here $there; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true; done
    rm -rf "$work"
}
trap over EXIT
"$hayloft" serve --store "file://$work/here" --listen "unix:$work/socket" >"$work/here-log" 2>&1 &
here=$!
"$far" serve --store "file://$work/there" --listen 127.0.0.1:0 >"$work/there-log" 2>&1 &
there=$!
while ! grep -q serving "$work/here-log" || ! grep -q serving "$work/there-log"; do sleep 0.05; done
address=$(sed -n 's/^serving .* on //p' "$work/there-log")
"$bench" delay --rtt "$rtt" --count "$work/count" "$address" >"$work/link" 2>&1 &
link=$!
while ! grep -q delaying "$work/link"; do sleep 0.05; done
linked=$(sed -n 's/^delaying .* on //p' "$work/link")
"$far" volume create v --server "$address" >/dev/null
"$far" mount "$address/v" "$work/point" --log-dir "$work/logs" >/dev/null
mounted=$work/point
# change WHAT FILE: a file as another program would write it anew, with random bytes.
change() {
    python3 - "$1" "$2" "$megabytes" <<'PY'
import os, random, sys
what, path, size = sys.argv[1], sys.argv[2], int(sys.argv[3]) * 1000000
if what == "new":
    with open(path, "wb") as file:
        for _ in range(size // 1000000):
            file.write(os.urandom(1000000))
elif what == "inserted":
    with open(path, "rb") as file:
        content = file.read()
    with open(path + ".new", "wb") as file:
        file.write(content[: size // 2] + os.urandom(1) + content[size // 2 :])
    os.replace(path + ".new", path)
else:
    with open(path, "r+b") as file:
        for part in range(64):
            file.seek((size // 64) * part + random.randrange(size // 128))
            file.write(os.urandom(size // 6400))
PY
}
# pulled WHAT NAME
pulled() {
    local come gone now begun took
    sleep 0.3
    read -r come gone <"$work/count" || true
    begun=$(date +%s%N)
    "$hayloft" pull "$linked/v@$2" --server "unix:$work/socket" --cache "$work/cache" >/dev/null
    took=$(($(date +%s%N) - begun))
    sleep 0.3
    now=$(<"$work/count")
    echo "$1 $((${now% *} - ${come:-0})) $((${now#* } - ${gone:-0})) $took" >>"$work/raw"
}
echo "$rounds rounds, $(nproc) processors, a file of $megabytes MB, round-trip time $rtt ms; medians"
: >"$work/count"
for ((n = 1; n <= rounds; n++)); do
    for what in new inserted in-place; do
        change "$what" "$work/point/large"
        "$far" snapshot create "v@$what-$n" --server "$address" >/dev/null
        pulled "$what" "$what-$n"
        cmp <("$far" verify "v@$what-$n" --server "$address" | head -1) <("$hayloft" verify "v@$what-$n" --server "unix:$work/socket" | head -1)
    done
done
for what in new inserted in-place; do
    for column in 2 3 4; do grep "^$what " "$work/raw" | cut -d' ' -f$column | sort -n | awk '{ v[NR] = $1 } END { print v[int((NR + 1) / 2)] }'; done |
        paste -s | awk -v what="$what" -v size="$megabytes" '{ printf "%-10s %11d B came (%.4f of the file) %9d B went %8.2f s\n", what, $1, $1 / size / 1e6, $2, $3 / 1e9 }'
done
