#!/usr/bin/env bash
# GNU hello (with --large coreutils) built by `hayloft make -j` on two agents, compared with plain make on the local disk at the same path: all
# products have the same hash, recipes ran on the farm, a second make has nothing to do; then once
# more while an agent and the broker are killed.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
. "$(dirname "$0")/../lib/task-farm.sh"
PACKAGE=hello
if [ "${1:-}" = --large ]; then PACKAGE=coreutils; fi
export FORCE_UNSAFE_CONFIGURE=1
task_farm "${FARM_PORT:-17990}"

fetch() { bash "$ROOT/bench/fetch-source.sh" "$PACKAGE" "$ROOT/target/sources" > "$WORK/sources" && DSC=$(sed -n 1p "$WORK/sources"); }
prepare() {
    (cd "$WORK/local" && dpkg-source --extract --no-check "$DSC" source) > "$WORK/unpack.log" 2>&1 &&
        on_local sh -euc 'cd source && ./configure --disable-nls CFLAGS="-O0 -g"' > "$WORK/configure.log" 2>&1 &&
        cp -a "$WORK/local/source" "${MNTS[0]}/source"
}
here() { on_local make -C source "$@"; }
there() { on_volume "$HAYLOFT" make --summary -C source "$@"; }
build_here() { here -j2 > "$WORK/make.local" 2>&1 || { tail -n 20 "$WORK/make.local"; return 1; }; }
build_there() {
    there -j "$@" > "$WORK/make.log" 2>&1 || { tail -n 20 "$WORK/make.log"; return 1; }
    grep '^hayloft make:' "$WORK/make.log" | sed 's/^/   /'
    test "$(sed -n 's/^hayloft make: \([0-9]*\) recipes on the farm.*/\1/p' "$WORK/make.log")" -gt 10
}
same() { same_products source ! -name config.log ! -name config.status; }
nothing_to_do() { there -j > "$WORK/again.log" 2>&1 && ! grep -E '^ +(CC|CCLD|AR) ' "$WORK/again.log"; }
# One agent is killed and started again while it builds, and then the broker.
with_kills() {
    there -j clean > "$WORK/clean.log" 2>&1 && here clean > /dev/null 2>&1 && build_here || return 1
    rm -f "${MNTS[0]}/.hayloft-history"
    there -j > "$WORK/make.log" 2>&1 &
    local make=$!
    sleep 0.2
    kill -9 "${AGENTS[1]}"
    wait "${AGENTS[1]}" 2>/dev/null
    farm_agent 1
    sleep 0.1
    kill -9 "$BROKER"
    wait "$BROKER" 2>/dev/null
    farm_broker
    wait "$make" || { tail -n 20 "$WORK/make.log"; return 1; }
    grep '^hayloft make:' "$WORK/make.log" | sed 's/^/   /'
}

check "fetch the source of $PACKAGE" fetch
check "unpack and configure" prepare
check "start a farm of two hosts" farm_begin
[ "$FAILED" = 0 ] || { report; exit 1; }
check "make locally" build_here
check "hayloft make" build_there
check "the same products" same
check "a second make has nothing to do" nothing_to_do
check "once more, while an agent and the broker are killed" with_kills
check "the same products again" same
report
