#!/usr/bin/env bash
# GNU hello (with --large coreutils) built by `hayloft make -j` on two agents, compared with plain make on the local disk at the same path: all
# products have the same hash, recipes ran on the farm, a second make has nothing to do; then once
# more while an agent and the broker are killed.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
PACKAGE=hello
if [ "${1:-}" = --large ]; then PACKAGE=coreutils; fi
farm_hosts 3
export FORCE_UNSAFE_CONFIGURE=1 LC_ALL=C HAYLOFT_CONFIG=/dev/null
unset MAKEFLAGS
PORT=${FARM_PORT:-17990}
export HAYLOFT_BROKER=nats://127.0.0.1:$PORT
TREE=$WORK/tree
AGENTS=()
mkdir "$WORK/local" "$TREE"
farm_namespace "$WORK/local" "$TREE"
farm_namespace "${MNTS[0]}" "$TREE"

broker() { nats-server -a 127.0.0.1 -p "$PORT" >> "$WORK/nats.log" 2>&1 & BROKER=$!; }
agent() { # NUMBER
    setsid "$HAYLOFT" farm agent --slots 4 --name "h$1" --mount "${MNTS[$1]}" --allow-root --lease 4 >> "$WORK/agent$1.log" 2>&1 &
    AGENTS[$1]=$!
}
end_farm() {
    local pid
    kill "$BROKER" "${AGENTS[@]}" 2>/dev/null
    for pid in "$BROKER" "${AGENTS[@]}"; do wait "$pid" 2>/dev/null; done
}
trap 'end_farm; farm_stop' EXIT

fetch() { bash "$ROOT/bench/fetch-source.sh" "$PACKAGE" "$ROOT/target/sources" > "$WORK/sources" && DSC=$(sed -n 1p "$WORK/sources"); }
# shellcheck disable=SC2016
prepare() {
    (cd "$WORK/local" && dpkg-source --extract --no-check "$DSC" source) > "$WORK/unpack.log" 2>&1 &&
        on_host 0 sh -euc 'cd "$1/source" && ./configure --disable-nls CFLAGS="-O0 -g"' sh "$TREE" > "$WORK/configure.log" 2>&1 &&
        cp -a "$WORK/local/source" "${MNTS[0]}/source"
}
start_farm() {
    broker
    sleep 0.5
    agent 1
    agent 2
    local tries
    for tries in $(seq 100); do
        [ "$("$HAYLOFT" farm status --json 2>/dev/null | grep -c '"host"')" = 2 ] && return 0
        sleep 0.1
    done
    return 1
}
# shellcheck disable=SC2016
here() { on_host 0 sh -euc 'cd "$1/source"; shift; exec make "$@"' sh "$TREE" "$@"; }
# shellcheck disable=SC2016
there() { on_host 1 sh -euc 'cd "$1/source"; shift; exec "$@"' sh "$TREE" "$HAYLOFT" make --summary "$@"; }
build_here() { here -j2 > "$WORK/make.local" 2>&1 || { tail -n 20 "$WORK/make.local"; return 1; }; }
build_there() {
    there -j "$@" > "$WORK/make.log" 2>&1 || { tail -n 20 "$WORK/make.log"; return 1; }
    grep '^hayloft make:' "$WORK/make.log" | sed 's/^/   /'
    test "$(sed -n 's/^hayloft make: \([0-9]*\) recipes on the farm.*/\1/p' "$WORK/make.log")" -gt 10
}
products() {
    (cd "$1" && find . -type f ! -name config.log ! -name config.status ! -name .hayloft-history -print0 | sort -z | xargs -0 sha256sum)
}
same() {
    products "$WORK/local/source" > "$WORK/products.local"
    products "${MNTS[2]}/source" | diff "$WORK/products.local" - | head -n 10
    test "${PIPESTATUS[1]}" = 0
}
nothing_to_do() { there -j > "$WORK/again.log" 2>&1 && ! grep -E '^ +(CC|CCLD|AR) ' "$WORK/again.log"; }
# One agent is killed and started again while it builds, and then the broker.
with_kills() {
    there -j clean > "$WORK/clean.log" 2>&1 && here clean > /dev/null 2>&1 && build_here || return 1
    rm -f "${MNTS[0]}/source/.hayloft-history"
    there -j > "$WORK/make.log" 2>&1 &
    local make=$!
    sleep 0.2
    kill -9 "${AGENTS[1]}"
    wait "${AGENTS[1]}" 2>/dev/null
    agent 1
    sleep 0.1
    kill -9 "$BROKER"
    wait "$BROKER" 2>/dev/null
    broker
    wait "$make" || { tail -n 20 "$WORK/make.log"; return 1; }
    grep '^hayloft make:' "$WORK/make.log" | sed 's/^/   /'
}

check "fetch the source of $PACKAGE" fetch
check "unpack and configure" prepare
check "start a farm of two hosts" start_farm
[ "$FAILED" = 0 ] || { report; exit 1; }
check "make locally" build_here
check "hayloft make" build_there
check "the same products" same
check "a second make has nothing to do" nothing_to_do
check "once more, while an agent and the broker are killed" with_kills
check "the same products again" same
report
