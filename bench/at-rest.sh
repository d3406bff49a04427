#!/bin/bash
# What encryption at rest costs: two servers, one with a key file, and a mount of each, in turn. As root.
# Prints the workload `build` of hayloft-bench, and the throughput of a file of 512 MiB that is written, synced, and read from a fresh mount of a
# server that has just been started.
#   bench/at-rest.sh [ROUNDS]
set -euo pipefail
cd "$(dirname "$0")/.."
. bench/throughput.sh
rounds=${1:-5}
hayloft=$PWD/target/release/hayloft
bench=$PWD/bench/target/release/hayloft-bench
work=$(mktemp -d "${TMPDIR:-/var/tmp}/hayloft-at-rest-XXXXXX")
export HAYLOFT_CONFIG=/dev/null
declare -A server
over() {
    for kind in plain sealed; do
        "$hayloft" umount --force "$work/$kind" >/dev/null 2>&1 || true
        kill "${server[$kind]}" 2>/dev/null && wait "${server[$kind]}" 2>/dev/null || true
    done
    rm -rf "$work"
}
trap over EXIT
(umask 077 && head -c 32 /dev/urandom >"$work/key")
declare -A with=([plain]="" [sealed]="--key-file $work/key")
serve() {
    : >"$work/$1.log"
    # shellcheck disable=SC2086
    setsid "$hayloft" serve --store "file://$work/store-$1" --audit-log "$work/audit-$1" --listen "unix:$work/socket-$1" ${with[$1]} \
        >"$work/$1.log" 2>&1 &
    server[$1]=$!
    while ! grep -q serving "$work/$1.log"; do sleep 0.05; done
}
mounted() { "$hayloft" mount "unix:$work/socket-$1/v" "$work/$1" --log-dir "$work/log" >/dev/null; }
for kind in plain sealed; do
    mkdir "$work/$kind"
    serve $kind
    "$hayloft" volume --server "unix:$work/socket-$kind" create v >/dev/null
    mounted $kind
done
"$bench" build --rounds "$rounds" plain="$work/plain" sealed="$work/sealed"
mount_anew() {
    "$hayloft" umount "$work/$1"
    kill "${server[$1]}"
    wait "${server[$1]}" || true
    serve "$1"
    mounted "$1"
}
throughput "$rounds" plain sealed
