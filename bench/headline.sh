#!/usr/bin/env bash
# One build on many hosts: network namespaces of this machine, each with a mount and an agent of its own. Everything is
# real but the compiler, which reads a source and 30 headers, waits, and writes an object and a dependency file beside the source.
#
#   bench/headline.sh [--smoke] [--hosts N] [--slots N] [--tasks N] [--mean-ms N] [--compare] [--builds N] [--json FILE]
#
#   --smoke      seconds: 3 hosts, 60 tasks; the figures mean nothing
#   --hosts N    hosts (default 30), with --slots N each (default 25)
#   --tasks N    how many things there are to compile (default 6000), which take --mean-ms N in the mean (default 6000)
#   --compare    afterwards the same with plain make, whose recipes a wrapper sends to the hosts in turn (nsenter)
#   --builds N   instead of one build so many at once, of forks of the same volume, each mounted on all hosts; --tasks is for each
#   --json FILE  writes the figures there
#
# Prints how long it took beside the ideal (all slots busy all the time), and who has used this machine's processors meanwhile. What was
# built is what a local make makes of the same sources. Needs root; it runs in namespaces that end with it.
set -uo pipefail
HERE=$(cd "$(dirname "$0")" && pwd)
if [ -z "${HEADLINE_INSIDE:-}" ]; then
    cargo build -q --release --manifest-path "$HERE/Cargo.toml" || exit 1
    export HEADLINE_INSIDE=1
    exec unshare --net --mount --propagation private "$0" "$@"
fi
COUNT=30 SLOTS=25 TASKS=6000 MEAN=6000 COMPARE='' JSON='' BUILDS=''
while [ $# -gt 0 ]; do
    case $1 in
        --smoke) COUNT=3 SLOTS=4 TASKS=60 MEAN=300 ;;
        --compare) COMPARE=1 ;;
        --hosts | --slots | --tasks | --mean-ms | --json | --builds)
            [ $# -gt 1 ] || { sed -n '2,/^set /{/^set /d;s/^# \?//;p}' "$0" >&2; exit 2; }
            case $1 in --hosts) COUNT=$2 ;; --slots) SLOTS=$2 ;; --tasks) TASKS=$2 ;; --mean-ms) MEAN=$2 ;; --json) JSON=$2 ;; --builds) BUILDS=$2 ;; esac
            shift
            ;;
        *) sed -n '2,/^set /{/^set /d;s/^# \?//;p}' "$0"; exit 2 ;;
    esac
    shift
done
COMPILER=$HERE/target/release/pretend-cc
JSON=${JSON:+$(realpath -m "$JSON")}

# Everything is in a network of its own: this namespace is its switch, with server and broker on it.
LISTEN=10.77.0.1
ip link set lo up && ip link add farm type bridge && ip addr add "$LISTEN/16" dev farm && ip link set farm up || exit 1
CONFIG=$(mktemp) && echo "insecure = true" >"$CONFIG" || exit 1
. "$HERE/../tests/lib/farm.sh"
export LC_ALL=C HAYLOFT_CONFIG=$CONFIG HAYLOFT_BROKER=nats://$LISTEN:4222
unset MAKEFLAGS
AGENTS=() BROKER='' FORKS=()
farm_serve
trap 'headline_end; rm -f "$CONFIG"; farm_stop' EXIT
TREE=$WORK/tree
mkdir "$TREE" "$WORK/log"

headline_end() {
    local pid at tree
    end_agents
    for pid in $BROKER; do kill "$pid" 2>/dev/null && wait "$pid" 2>/dev/null; done
    for at in "${!HOSTS[@]}"; do
        for tree in "$TREE" "${FORKS[@]}"; do on "$at" timeout 60 "$HAYLOFT" umount "$tree" >/dev/null 2>&1; done
    done
}

on() { # HOST COMMAND...
    local host=$1
    shift
    nsenter --mount="/proc/${HOSTS[$host]}/ns/mnt" --net="/proc/${HOSTS[$host]}/ns/net" "$@"
}

host() { # NUMBER: one more, with a cable to the switch and a mount
    local tries
    unshare --net --mount --propagation private sleep infinity &
    HOSTS+=($!)
    for tries in $(seq 200); do
        [ "$(cat "/proc/$!/comm")" != sleep ] || break
        sleep 0.02
    done
    ip link add "h$1" type veth peer name eth0 netns $! && ip link set "h$1" master farm up || return 1
    on "$1" sh -euc 'ip link set lo up; ip addr add "$1" dev eth0; ip link set eth0 up' sh "10.77.1.$(($1 + 1))/16" &&
        on "$1" "$HAYLOFT" mount "$ADDRESS/$VOLUME" "$TREE"  --log-dir "$WORK/log" -o cache=64M,dirty=64M >/dev/null
}

# What it and all that it has started have used is in times.N when it has ended.
agent() { # NUMBER
    local of=/proc/${HOSTS[$1]}/ns
    (
        nsenter --mount="$of/mnt" --net="$of/net" setsid "$HAYLOFT" farm agent --slots "$SLOTS" --name "h$1" --allow-root \
            >>"$WORK/agent$1.log" 2>&1
        times >"$WORK/times.$1"
    ) &
    AGENTS+=($!)
}

end_agents() {
    local pid
    # shellcheck disable=SC2046
    for pid in "${AGENTS[@]}"; do kill $(cat "/proc/$pid/task/$pid/children"); done
    for pid in "${AGENTS[@]}"; do wait "$pid" 2>/dev/null; done
    AGENTS=()
}

begin() {
    local at tries
    nats-server -a "$LISTEN" -p 4222 >"$WORK/nats.log" 2>&1 &
    BROKER=$!
    # The last one has no slots: the build is started there.
    for at in $(seq 0 "$COUNT"); do host "$at" || return 1; done
    for at in $(seq 0 $((COUNT - 1))); do agent "$at"; done
    for tries in $(seq 300); do
        [ "$(on "$COUNT" "$HAYLOFT" farm status --json 2>/dev/null | grep -c '"host"')" != "$COUNT" ] || return 0
        sleep 0.2
    done
    return 1
}

project() {
    python3 "$HERE/headline/project.py" "$WORK/local" "$TASKS" $((TASKS / 100 + 1)) 300 "$MEAN" "$COMPILER" &&
        on "$COUNT" sh -euc 'cp -a "$1" "$2/project"; "$3" sync "$2"' sh "$WORK/local" "$TREE" "$HAYLOFT"
}

# shellcheck disable=SC2016
build() { # NAME COMMAND...
    local name=$1
    shift
    local pid
    FARM_NETWORKS=$(for pid in self "${HOSTS[@]}"; do readlink "/proc/$pid/ns/net"; done | tr '\n' ' ')
    export FARM_NETWORKS
    on "$COUNT" sh -euc 'cd "$1/project"; shift; exec "$@"' sh "$TREE" \
        python3 "$HERE/headline/measure.py" "$name" "$TASKS" "$MEAN" $((COUNT * SLOTS)) "$JSON" "$@" 2>"$WORK/build.log" ||
        { tail -n 20 "$WORK/build.log"; return 1; }
}

# What the hosts have asked of the server, and their kernels of them.
counted() {
    local at
    for at in "${!HOSTS[@]}"; do on "$at" "$HAYLOFT" stats "$TREE" --json || return 1; done
}
asked() { counted >"$WORK/after" && python3 "$HERE/headline/asked.py" "$TASKS" "$WORK/before" "$WORK/after"; }

# As another host sees it.
same() {
    (cd "$WORK/local" && PRETEND_AT_ONCE=1 make -s -j2 >"$WORK/local.log" 2>&1) || { tail "$WORK/local.log"; return 1; }
    on 0 diff -rq --exclude=.hayloft-history "$WORK/local" "$TREE/project" | head
    test "${PIPESTATUS[0]}" = 0
}
# Agents have nothing else to do: what they and their tasks have used was used for the build, or by being there.
agents_used() {
    end_agents
    cat "$WORK"/times.* | python3 -c '
import re, sys
used = [line for line in sys.stdin.read().splitlines()][1::2]
seconds = sum(60 * int(minutes) + float(rest) for line in used for minutes, rest in re.findall(r"(\d+)m([\d.]+)s", line))
print(f"   agents and all tasks, from beginning to end: {seconds:.1f} s, {seconds / int(sys.argv[1]) * 1e3:.2f} ms a task")' "$TASKS"
}
clean() { on "$COUNT" sh -euc 'cd "$1/project"; rm -f part*/*.o part*/*.d .hayloft-history' sh "$TREE"; }
round_robin() {
    build "plain make, recipes in turn" env ROUND_ROBIN="${HOSTS[*]:0:$COUNT}" ROUND_ROBIN_LOG="$WORK/turns" \
        make -s -j$((COUNT * SLOTS)) SHELL="$ROOT/tests/lib/round-robin.sh"
}

forks() {
    local at host
    for at in $(seq "$BUILDS"); do
        "$HAYLOFT" fork "$VOLUME" "fork$at" --server "$ADDRESS" >/dev/null && mkdir "$WORK/fork$at" || return 1
        FORKS+=("$WORK/fork$at")
        for host in "${!HOSTS[@]}"; do
            on "$host" "$HAYLOFT" mount "$ADDRESS/fork$at" "$WORK/fork$at" --log-dir "$WORK/log" -o cache=16M,dirty=16M >/dev/null || return 1
        done
    done
    # Agents look at what is mounted every four seconds.
    local tries
    for tries in $(seq 100); do
        [ "$(on "$COUNT" "$HAYLOFT" farm status --json | grep -c '"volume=')" != $((COUNT * (BUILDS + 1))) ] || return 0
        sleep 0.2
    done
    return 1
}
builds() {
    on "$COUNT" python3 "$HERE/headline/builds.py" "$TASKS" "$MEAN" $((COUNT * SLOTS)) "$JSON" "$HAYLOFT" "$TREE/project" "${FORKS[@]/%//project}" \
        2>"$WORK/build.log" || { tail -n 20 "$WORK/build.log"; return 1; }
}
same_forks() {
    local tree
    (cd "$WORK/local" && PRETEND_AT_ONCE=1 make -s -j2 >"$WORK/local.log" 2>&1) || { tail "$WORK/local.log"; return 1; }
    for tree in "${FORKS[@]}"; do on 0 diff -rq --exclude=.hayloft-history "$WORK/local" "$tree/project" || return 1; done
}

check "$COUNT hosts of $SLOTS slots" begin
[ "$FAILED" = 0 ] || { report; exit 1; }
check "$TASKS sources" project
if [ -n "$BUILDS" ]; then
    check "$BUILDS forks, on all hosts" forks
    check "all built at once" builds
    check "the products of each are those of a local make" same_forks
    report
    exit
fi
counted >"$WORK/before"
check "one build on all hosts" build "hayloft make" "$HAYLOFT" make --summary -s -j -- all
tail -n 1 "$WORK/build.log"
check "what was asked of the server" asked
check "what agents and tasks have used" agents_used
check "its products are those of a local make" same
if [ -n "$COMPARE" ]; then
    check "clean" clean
    check "the same with recipes in turn" round_robin
    check "its products are those of a local make" same
fi
report
