#!/usr/bin/env bash
# A make that finds nothing to do, plain and with `hayloft make`: GNU coreutils, built before, on a volume, with a farm of two hosts.
#
#   bench/nothing-to-do.sh [--rounds N] [--package NAME] [--tree DIR]
#
#   --tree DIR   an earlier run's folder, with the package built in it, or where it is to be kept
#
# Prints medians in milliseconds and their ratio, each command in turn.
set -uo pipefail
. "$(dirname "$0")/../tests/lib/farm.sh"
. "$(dirname "$0")/../tests/lib/task-farm.sh"
ROUNDS=15 PACKAGE=coreutils KEPT=''
while [ $# -gt 1 ]; do
    case $1 in --rounds) ROUNDS=$2 ;; --package) PACKAGE=$2 ;; --tree) KEPT=$(realpath -m "$2") ;; esac
    shift 2
done
export FORCE_UNSAFE_CONFIGURE=1
task_farm "${FARM_PORT:-17994}"
KEPT=${KEPT:-$WORK/kept}

# Makefiles know where they were made: it is built at the path at which the volume is seen afterwards.
build() {
    [ ! -e "$KEPT/built" ] || return 0
    # What an earlier run has left half done.
    rm -rf "$KEPT/source"
    mkdir -p "$KEPT" && bash "$ROOT/bench/fetch-source.sh" "$PACKAGE" "$ROOT/target/sources" >"$WORK/sources" &&
        (cd "$KEPT" && dpkg-source --extract --no-check "$(sed -n 1p "$WORK/sources")" source) >"$WORK/unpack.log" 2>&1 &&
        (cd "$KEPT/source" && ./configure --disable-nls CFLAGS=-O0 && make -j2) >"$WORK/build.log" 2>&1 && touch "$KEPT/built" ||
        { tail "$WORK"/*.log; return 1; }
}
build || exit 1
cp -a "$KEPT/source" "${MNTS[0]}/source" || exit 1
# As the makefiles have it.
farm_namespace "${MNTS[0]}" "$KEPT"
farm_begin || { echo "the farm did not begin"; exit 1; }
cat >"$WORK/measure.py" <<'PYTHON'
import statistics, subprocess, sys, time

hayloft, rounds = sys.argv[1], int(sys.argv[2])
ways = {"make -j8": ["make", "-j8"], "hayloft make -j8": [hayloft, "make", "-j8"]}
took = {name: [] for name in ways}
for round in range(rounds + 2):
    for name, command in ways.items():
        begun = time.perf_counter()
        said = subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True).stdout
        # Until it has seen all of it once, and all that is made anew each time.
        if round >= 2:
            took[name].append((time.perf_counter() - begun) * 1e3)
        if " CC " in said and round >= 2:
            sys.exit(f"there was something to do: {said[-500:]}")
plain, with_it = (statistics.median(all) for all in took.values())
for name, all in took.items():
    print(f"{name:20} median {statistics.median(all):7.1f} ms, least {min(all):7.1f}")
print(f"ratio of the medians {with_it / plain:.2f}")
PYTHON
on_host 2 sh -euc 'cd "$1"; shift; exec "$@"' sh "$KEPT/source" python3 "$WORK/measure.py" "$HAYLOFT" "$ROUNDS"
