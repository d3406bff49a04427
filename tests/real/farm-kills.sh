#!/usr/bin/env bash
# GNU hello built again and again by `hayloft make -j` while agents and the broker are killed at random, 5 times (with --large 100):
# each build ends well, and all that it makes is the same as on the local disk.
#
#   HAYLOFT_TEST_SEED=N tests/real/farm-kills.sh     other random choices
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
. "$(dirname "$0")/../lib/task-farm.sh"
KILLS=5
if [ "${1:-}" = --large ]; then KILLS=100; fi
RANDOM=${HAYLOFT_TEST_SEED:-1}
export FORCE_UNSAFE_CONFIGURE=1
task_farm "${FARM_PORT:-17994}"

prepare() {
    bash "$ROOT/bench/fetch-source.sh" hello "$ROOT/target/sources" >"$WORK/sources" &&
        (cd "$WORK/local" && dpkg-source --extract --no-check "$(sed -n 1p "$WORK/sources")" source) >"$WORK/unpack.log" 2>&1 &&
        on_local sh -euc 'cd source && ./configure --disable-nls CFLAGS="-O0 -g"' >"$WORK/configure.log" 2>&1 &&
        cp -a "$WORK/local/source" "${MNTS[0]}/source" && on_local make -C source -j2 >"$WORK/make.local" 2>&1
}
kill_one() {
    local at=$((RANDOM % 3))
    if [ "$at" = 0 ]; then
        kill -9 "$BROKER"
        wait "$BROKER" 2>/dev/null
        sleep "0.$((RANDOM % 10))"
        farm_broker
    else
        kill -9 "${AGENTS[$at]}"
        wait "${AGENTS[$at]}" 2>/dev/null
        sleep "0.$((RANDOM % 10))"
        farm_agent "$at"
    fi
}
build_all() {
    local killed=0 builds=0 make
    while [ "$killed" -lt "$KILLS" ]; do
        # Recipes that are known to be cheap would run here.
        rm -f "${MNTS[0]}/.hayloft-history"
        on_volume make -C source clean >"$WORK/clean.log" 2>&1 || return 1
        on_volume "$HAYLOFT" make --summary -C source -j8 >"$WORK/make.log" 2>&1 &
        make=$!
        while [ "$killed" -lt "$KILLS" ] && kill -0 "$make" 2>/dev/null; do
            sleep "0.$((RANDOM % 10))"
            kill -0 "$make" 2>/dev/null || break
            kill_one
            killed=$((killed + 1))
        done
        wait "$make" || { tail -n 20 "$WORK/make.log"; return 1; }
        # An `ar` that is killed leaves the file that it was writing, wherever it runs.
        same_products source ! -name config.log ! -name config.status ! -name 'st??????' || return 1
        builds=$((builds + 1))
    done
    printf '   %s kills, %s builds\n' "$killed" "$builds"
}

check "GNU hello, built locally" prepare
check "start a farm of two hosts" farm_begin
[ "$FAILED" = 0 ] || { report; exit 1; }
check "built while agents and the broker are killed, always with the same products" build_all
report
