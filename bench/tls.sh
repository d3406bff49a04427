#!/bin/bash
# What TLS costs: a server and a client in two network namespaces, joined by a pair of veth, in the clear and by TLS, in turn. As root.
# Prints the workload `build` of hayloft-bench, and the throughput of a file of 512 MiB that is written, synced, and read from a fresh mount.
#   bench/tls.sh [ROUNDS]
set -euo pipefail
cd "$(dirname "$0")/.."
. bench/throughput.sh
rounds=${1:-5}
hayloft=$PWD/target/release/hayloft
bench=$PWD/bench/target/release/hayloft-bench
work=$(mktemp -d "${TMPDIR:-/var/tmp}/hayloft-tls-XXXXXX")
name=hltls$$
export HAYLOFT_CONFIG=/dev/null
servers=()
over() {
    for kind in plain tls; do "$hayloft" umount --force "$work/$kind" >/dev/null 2>&1 || true; done
    for pid in "${servers[@]}"; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true; done
    ip netns del "$name-s" || true
    ip netns del "$name-c" || true
    rm -rf "$work"
}
trap over EXIT
ip netns add "$name-s"
ip netns add "$name-c"
ip -n "$name-s" link add name s type veth peer name c netns "$name-c"
ip -n "$name-s" address add 10.98.0.1/24 dev s
ip -n "$name-c" address add 10.98.0.2/24 dev c
for of in s c; do
    ip -n "$name-$of" link set lo up
    ip -n "$name-$of" link set "$of" up
done
server() { nsenter --net="/run/netns/$name-s" "$hayloft" "$@"; }
client() { nsenter --net="/run/netns/$name-c" "$hayloft" "$@"; }
server --cert "$work/s" cert --ca "$work/ca" init --host 10.98.0.1 >/dev/null
server cert --ca "$work/ca" issue build1 | client --cert "$work/c" cert install >/dev/null
declare -A with=([plain]="--insecure" [tls]="--cert $work/s") as=([plain]="--insecure" [tls]="--cert $work/c")
declare -A port=([plain]=18101 [tls]=18102)
for kind in plain tls; do
    mkdir "$work/$kind"
    # shellcheck disable=SC2086
    nsenter --net="/run/netns/$name-s" setsid "$hayloft" ${with[$kind]} serve --store "file://$work/store-$kind" \
        --audit-log "$work/audit-$kind" --listen "10.98.0.1:${port[$kind]}" >"$work/$kind.log" 2>&1 &
    servers+=($!)
done
sleep 2
mounted() {
    # shellcheck disable=SC2086
    client ${as[$1]} mount "10.98.0.1:${port[$1]}/v" "$work/$1" --log-dir "$work/log" >/dev/null
}
for kind in plain tls; do
    # shellcheck disable=SC2086
    server ${with[$kind]} volume create v --server "10.98.0.1:${port[$kind]}" --grant cert:build1=write >/dev/null
    mounted $kind
done
"$bench" build --rounds "$rounds" plain="$work/plain" tls="$work/tls"
mount_anew() {
    "$hayloft" umount "$work/$1"
    mounted "$1"
}
throughput "$rounds" plain tls
