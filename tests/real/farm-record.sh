#!/usr/bin/env bash
# GNU hello built by `hayloft make --record` on two agents: nothing is told of it as it is. Then with three mistakes planted: a header that is made by a rule that
# nobody names, a file that two rules write, one that is written outside of the volume. Just these are told, in a second build as well, whose caches are warm.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
. "$(dirname "$0")/../lib/task-farm.sh"
export FORCE_UNSAFE_CONFIGURE=1
task_farm "${FARM_PORT:-17991}"
OUTSIDE=$WORK/outside

fetch() { bash "$ROOT/bench/fetch-source.sh" hello "$ROOT/target/sources" > "$WORK/sources" && DSC=$(sed -n 1p "$WORK/sources"); }
prepare() {
    (cd "$WORK/local" && dpkg-source --extract --no-check "$DSC" source) > "$WORK/unpack.log" 2>&1 &&
        on_local sh -euc 'cd source && ./configure --disable-nls CFLAGS="-O0 -g"' > "$WORK/configure.log" 2>&1 &&
        cp -a "$WORK/local/source" "${MNTS[0]}/source"
}
build() { # MAKE ARGUMENTS
    on_volume "$HAYLOFT" make --record-to report.json -C source -j "$@" > "$WORK/make.log" 2>&1 || { tail -n 20 "$WORK/make.log"; return 1; }
    sed -n '/^hayloft make:/,$p' "$WORK/make.log" | head -n 8 | sed 's/^/   /'
}
# EXPRESSION of Python about the report, r.
tells() {
    on_volume python3 -c 'import json, sys; r = json.load(open("report.json")); sys.exit(0 if eval(sys.argv[1]) else [r["undeclared"], r["written_twice"], r["outside_written"]])' "$1"
}
nothing_wrong() {
    tells 'r["rules_known"] and r["recipes"] > 30 and not r["undeclared"] and not r["written_twice"] and r["lost"] == 0 and len(r["outside_read"]) > 30'
}
plant() {
    local source=${MNTS[0]}/source
    echo '#define PLANTED 1' > "$source/planted.h"
    sed -i '1i #include "planted.h"' "$source/src/hello.c"
    # It was there before, so that the build does not fail without it.
    printf '%s\n' 'all-am: planted.h two' 'planted.h: FORCE-IT' '	@test -d . && echo "#define PLANTED 1" > $@' 'FORCE-IT:' 'two: one' \
        'one two:' "	@test -d . && echo \$@ >> both && echo > $OUTSIDE && echo > \$@" >> "$source/Makefile"
}
mistakes() {
    tells '[(u["file"].rsplit("/", 1)[1], u["read_by"].rsplit("/", 1)[1], u["written_by"].rsplit("/", 1)[1]) for u in r["undeclared"]] == [("planted.h", "hello.o", "planted.h")]' &&
        tells '[w["file"].rsplit("/", 1)[1] for w in r["written_twice"]] == ["both"]' &&
        tells "list(r['outside_written']) == ['$OUTSIDE']"
}
forget() { on_volume sh -euc 'cd source && rm -f one two src/hello.o && find . -path "*.deps/*hello.Po" -exec sh -c "echo \"# dummy\" > \$1" sh {} \;'; }

check "fetch the source of hello" fetch
check "unpack and configure" prepare
check "start a farm of two hosts" farm_begin
[ "$FAILED" = 0 ] || { report; exit 1; }
check "hayloft make --record" build
check "nothing is wrong with it" nothing_wrong
plant
forget
check "with three mistakes" build
check "all of them are told, and nothing else" mistakes
forget
check "once more, with warm caches" build
check "all of them are told again" mistakes
report
