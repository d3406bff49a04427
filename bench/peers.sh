#!/usr/bin/env bash
# The same C project built by plain make, by the farm, by distcc and by icecream, with two hosts of this machine (network and mount
# namespaces): what each adds to the compiler's own work. Ratios to plain make with as many jobs. Packages distcc and icecc are installed.
#
#   bench/peers.sh [--rounds N] [--files N]
#
# Figures of a machine that is busy otherwise say nothing: processors are divided by session, of which the farm's tasks have their own.
set -uo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
if [ -z "${PEERS_INSIDE:-}" ]; then
    command -v icecc >/dev/null && command -v distcc >/dev/null ||
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends icecc distcc >/dev/null || exit 1
    export PEERS_INSIDE=1
    exec unshare --net --mount --propagation private "$0" "$@"
fi
ROUNDS=3 FILES=120
while [ $# -gt 0 ]; do
    case $1:$# in --rounds:1 | --files:1) exit 2 ;; --rounds:*) ROUNDS=$2 ;; --files:*) FILES=$2 ;; *) sed -n '2,/^set /{/^set /d;s/^# \?//;p}' "$0"; exit 2 ;; esac
    shift 2
done
ip link set lo up && ip link add farm type bridge && ip addr add 10.79.0.1/24 dev farm && ip link set farm up || exit 1
export LISTEN=10.79.0.1
CONFIG=$(mktemp) && echo "insecure = true" >"$CONFIG" || exit 1
. "$HERE/../tests/lib/farm.sh"
export LC_ALL=C HAYLOFT_CONFIG=$CONFIG HAYLOFT_BROKER=nats://10.79.0.1:4222
unset MAKEFLAGS
farm_serve
DAEMONS=()
trap 'peers_end; rm -f "$CONFIG"; farm_stop' EXIT
TREE=$WORK/tree
mkdir "$TREE" "$WORK/distcc"

peers_end() {
    local at pid
    for pid in "${DAEMONS[@]}"; do kill "$pid" 2>/dev/null; done
    for pid in "${DAEMONS[@]}"; do wait "$pid" 2>/dev/null; done
    for at in "${!HOSTS[@]}"; do on "$at" timeout 60 "$HAYLOFT" umount "$TREE" >/dev/null 2>&1; done
}
on() { # HOST COMMAND...
    local host=$1
    shift
    nsenter --mount="/proc/${HOSTS[$host]}/ns/mnt" --net="/proc/${HOSTS[$host]}/ns/net" "$@"
}
# HOST COMMAND...: a daemon there.
daemon() {
    local host=$1
    shift
    # Not by a function: its process is the one that is to be ended.
    nsenter --mount="/proc/${HOSTS[$host]}/ns/mnt" --net="/proc/${HOSTS[$host]}/ns/net" "$@" >>"$WORK/daemons.log" 2>&1 &
    DAEMONS+=($!)
}
host() { # NUMBER: 0 builds, the others help
    local tries
    unshare --net --mount --propagation private sleep infinity &
    HOSTS+=($!)
    for tries in $(seq 200); do [ "$(cat "/proc/$!/comm")" != sleep ] || break; sleep 0.02; done
    ip link add "p$1" type veth peer name eth0 netns $! && ip link set "p$1" master farm up || return 1
    on "$1" sh -euc 'ip link set lo up; ip addr add "$1" dev eth0; ip link set eth0 up; mount -t tmpfs tmpfs /run' sh "10.79.0.$(($1 + 10))/24" &&
        on "$1" "$HAYLOFT" mount "$ADDRESS/$VOLUME" "$TREE" --log-dir "$WORK" >/dev/null
}
nats-server -a 10.79.0.1 -p 4222 >"$WORK/nats.log" 2>&1 &
DAEMONS+=($!)
for at in 0 1 2; do host "$at" || exit 1; done
icecc-scheduler -n peers >>"$WORK/daemons.log" 2>&1 &
DAEMONS+=($!)
for at in 0 1 2; do
    on "$at" install -d -o icecc /run/icecc /run/icecc/environments
    jobs=4
    [ "$at" != 0 ] || jobs=1
    daemon "$at" iceccd -n peers -s 10.79.0.1 -m "$jobs" -N "h$at" -b /run/icecc/environments $([ "$at" = 0 ] && echo --no-remote)
    [ "$at" = 0 ] || daemon "$at" distccd --no-detach --daemon --allow 10.79.0.0/24 --jobs 4 --enable-tcp-insecure --user distccd
    [ "$at" = 0 ] || daemon "$at" "$HAYLOFT" farm agent --slots 4 --name "h$at" --allow-root
done
python3 - "$WORK/project" "$FILES" <<'PYTHON'
import os, sys
folder, files = sys.argv[1], int(sys.argv[2])
os.makedirs(folder)
for at in range(20):
    with open(f"{folder}/h{at}.h", "w") as header:
        header.writelines(f"static inline int f{at}_{n}(int x) {{ return x * {n} + {at}; }}\n" for n in range(60))
for at in range(files):
    with open(f"{folder}/s{at}.c", "w") as source:
        source.write("#include <stdio.h>\n#include <stdlib.h>\n#include <string.h>\n" + "".join(f'#include "h{n}.h"\n' for n in range(20)))
        source.writelines(f"int g{at}_{n}(int x) {{ int s = 0; for (int i = 0; i < x; i++) s += f{n % 20}_{n % 60}(i) ^ (int)strlen(\"x\"); return s; }}\n" for n in range(60))
with open(f"{folder}/Makefile", "w") as makefile:
    makefile.write("all: " + " ".join(f"s{at}.o" for at in range(files)) + "\n%.o: %.c\n\t$(CC) -O2 -c -o $@ $<\n")
PYTHON
on 0 cp -a "$WORK/project" "$TREE/project" && "$HAYLOFT" --version >/dev/null
for tries in $(seq 100); do
    [ "$(on 0 "$HAYLOFT" farm status --json 2>/dev/null | grep -c '"host"')" = 2 ] && break
    sleep 0.1
done
# NAME FOLDER COMMAND...
once() {
    local name=$1 folder=$2 begun
    shift 2
    rm -f "$WORK"/project/*.o
    on 0 sh -c "rm -f $TREE/project/*.o $TREE/project/.hayloft-history"
    begun=$(date +%s%N)
    # shellcheck disable=SC2016
    on 0 sh -euc 'cd "$1"; shift; exec "$@"' sh "$folder" "$@" >"$WORK/make.log" 2>&1 || { echo "$name failed"; tail -n 5 "$WORK/make.log"; return 1; }
    echo "$name $((($(date +%s%N) - begun) / 1000000))" >>"$WORK/figures"
}
# icecream packs the compiler before it first sends something.
once "warm" "$WORK/project" make -s -j8 CC="icecc gcc" && sed -i '/^warm/d' "$WORK/figures"
for round in $(seq "$ROUNDS"); do
    once "make,-local-disk" "$WORK/project" make -s -j8 CC=gcc
    once "make,-volume" "$TREE/project" make -s -j8 CC=gcc
    once "hayloft-make" "$TREE/project" "$HAYLOFT" make -s -j8 CC=gcc
    once "distcc" "$WORK/project" env DISTCC_HOSTS="10.79.0.11/4 10.79.0.12/4" DISTCC_FALLBACK=0 DISTCC_DIR="$WORK/distcc" make -s -j8 CC="distcc gcc"
    once "distcc,-volume" "$TREE/project" env DISTCC_HOSTS="10.79.0.11/4 10.79.0.12/4" DISTCC_FALLBACK=0 DISTCC_DIR="$WORK/distcc" make -s -j8 CC="distcc gcc"
    once "icecc" "$WORK/project" env ICECC_DEBUG=debug ICECC_LOGFILE="$WORK/icecc.log" make -s -j8 CC="icecc gcc"
    once "icecc,-volume" "$TREE/project" make -s -j8 CC="icecc gcc"
done
echo "of $((FILES * ROUNDS)) files icecc had $(grep -c 'Have to use host 10.79.0.1[12]' "$WORK/icecc.log") compiled elsewhere"
python3 - "$WORK/figures" <<'PYTHON'
import statistics, sys
figures = {}
for line in open(sys.argv[1]):
    name, ms = line.split()
    figures.setdefault(name.replace(",-", " on "), []).append(int(ms))
base = statistics.median(figures["make on local-disk"])
for name, all in figures.items():
    print(f"{name:22} median {statistics.median(all):6.0f} ms ({min(all)} to {max(all)}), {statistics.median(all) / base:.2f} of plain make")
PYTHON
