#!/usr/bin/env bash
# The quick start of docs/farm.md, word by word, on three fresh hosts: namespaces of this machine, each with a network, processes, a name and a
# file system of its own, where nothing of Hayloft is but its programs. Its blocks are run one after the other, where the text says.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
if [ -z "${QUICKSTART_INSIDE:-}" ]; then
    export QUICKSTART_INSIDE=1
    exec unshare --net --mount --propagation private "$0" "$@"
fi
WORK=$(mktemp -d "${TMPDIR:-/var/tmp}/hayloft-test-XXXXXX")
DOC=$ROOT/docs/farm.md
HOSTS=()
cd / || exit 1
end() {
    local pid
    # With its first process all of a host ends.
    for pid in "${HOSTS[@]}"; do kill -9 "$pid" 2>/dev/null; done
    for pid in $(jobs -p); do wait "$pid" 2>/dev/null; done
    rm -rf "$WORK"
}
trap end EXIT
ip link set lo up && ip link add quick type bridge && ip addr add 10.78.0.254/24 dev quick && ip link set quick up || exit 1

# NUMBER: host farmN, whose disk begins as this machine's and forgets all.
host() {
    local dir=$WORK/h$1 tries
    mkdir "$dir"
    # shellcheck disable=SC2016
    unshare --net --mount --uts --pid --fork --kill-child --propagation private bash -euc '
        dir=$1 name=$2
        mount -t tmpfs tmpfs "$dir" && mkdir "$dir/changed" "$dir/work" "$dir/root"
        mount -t overlay overlay -o "lowerdir=/,upperdir=$dir/changed,workdir=$dir/work" "$dir/root"
        cd "$dir/root"
        mount --rbind /dev dev && mount -t sysfs sysfs sys && mount -t proc proc proc
        for at in run tmp var/tmp mnt srv home; do mkdir -p "$at" && mount -t tmpfs tmpfs "$at" && chmod 1777 "$at"; done
        rm -rf etc/hayloft var/lib/hayloft var/log/hayloft root/.config/hayloft
        for program in hayloft hayloft-task; do [ ! -e "$3/$program" ] || install "$3/$program" usr/local/bin; done
        hostname "$name"
        printf "127.0.0.1 localhost\n10.78.0.1 farm1\n10.78.0.2 farm2\n10.78.0.3 farm3\n" >etc/hosts
        echo "builder:x:4242:4242::/home/builder:/bin/sh" >>etc/passwd && echo "builder:x:4242:" >>etc/group
        mkdir home/builder && chown 4242:4242 home/builder
        ip link set lo up
        exec chroot . sh -c "touch /run/ready; exec sleep infinity"' sh "$dir" "farm$1" "${HAYLOFT%/*}" 2>>"$WORK/hosts.log" &
    for tries in $(seq 100); do
        HOSTS[$1]=$(cat "/proc/$!/task/$!/children" 2>/dev/null | tr -d ' ')
        [ -z "${HOSTS[$1]}" ] || [ ! -e "/proc/${HOSTS[$1]}/root/run/ready" ] || break
        sleep 0.1
    done
    ip link add "q$1" type veth peer name eth0 netns "${HOSTS[$1]}" && ip link set "q$1" master quick up &&
        on "$1" sh -euc "ip addr add 10.78.0.$1/24 dev eth0 && ip link set eth0 up"
}
on() { # NUMBER COMMAND...
    local at=${HOSTS[$1]}
    shift
    env -i PATH="/usr/local/bin:$PATH" HOME=/root TERM=dumb nsenter --target "$at" --mount --uts --net --pid --root --wd=/ "$@"
}
# NUMBER: a block of shell of the quick start.
block() {
    awk -v wanted="$1" '/^## /{within = /three fresh hosts/} within && /^```sh/{count++; inside = 1; next} /^```/{inside = 0} inside && count == wanted' "$DOC"
}
# HOST BLOCK USER: what it starts goes on.
run_block() {
    block "$2" >"$WORK/block$2" && [ -s "$WORK/block$2" ] || return 1
    on "$1" runuser -u "$3" -- sh -euc "cd ~$3; $(cat "$WORK/block$2")" >"$WORK/said.$1.$2" 2>&1 </dev/null ||
        { cat "$WORK/block$2" "$WORK/said.$1.$2"; return 1; }
}
source_tree() {
    # shellcheck disable=SC2016
    on 2 runuser -u builder -- sh -euc 'cd; mkdir src; cd src
        printf "%s\n" "OBJECTS := \$(addsuffix .o,\$(shell seq 1 12))" "all: program" "program: \$(OBJECTS)" "	cc -o \$@ \$^" \
            "%.o: %.c" "	hostname > \$*.host; sleep 0.3; cc -c -o \$@ \$<" >Makefile
        for at in $(seq 2 12); do echo "int f$at(void) { return $at; }" >$at.c; done
        echo "int f2(void); int main(void) { return f2(); }" >1.c'
}
agents_are_there() {
    local tries
    for tries in $(seq 100); do
        [ "$(on 2 hayloft farm status --broker nats://farm1:4222 --json 2>/dev/null | grep -c '"host"')" = 3 ] && return 0
        sleep 0.1
    done
    cat "$WORK"/said.*
    return 1
}
built() {
    grep -q '^farm3 ' "$WORK/said.2.3" || { cat "$WORK/said.2.3"; return 1; }
    on 3 sh -euc '/mnt/builds/src/program' || [ $? = 2 ] || return 1
    on 3 sh -c 'cat /mnt/builds/src/*.host' | sort | uniq -c | sed 's/^/  /'
    [ "$(on 1 sh -c 'cat /mnt/builds/src/*.host' | sort -u | wc -l)" -ge 2 ]
}
hosts() { host 1 && host 2 && host 3; }
everywhere() { run_block 1 2 root && run_block 2 2 root && run_block 3 2 root; }
lines() { [ "$(cat "$WORK"/block* | grep -c .)" -le 14 ]; }

check "three fresh hosts" hosts
check "a project of an ordinary user" source_tree
check "farm1: broker, server and volume" run_block 1 1 root
check "all three: mount and agent" everywhere
check "all agents are there" agents_are_there
check "an ordinary user builds" run_block 2 3 builder
check "on several hosts, and the program runs" built
check "it is that short" lines
report
