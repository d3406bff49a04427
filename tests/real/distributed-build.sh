#!/usr/bin/env bash
# GNU coreutils (Debian's source, 420 objects) built by make -jN whose recipes run in turn on four mounts of one
# volume, as on four hosts that have it at the same path: in the source tree, with objects beside sources. Compared
# with a build on the local disk at that path: every product has the same hash, a second make has nothing to do, and
# a header that is touched has the same made anew. With --large on 8 mounts, configured there, and out of the source
# tree as well.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
COUNT=4
LARGE=
# Most of the sources have the one, a hundred the other.
HEADER=die.h
if [ "${1:-}" = --large ]; then COUNT=8 LARGE=1 HEADER=system.h; fi
farm_hosts "$COUNT"
export FORCE_UNSAFE_CONFIGURE=1 LC_ALL=C
unset MAKEFLAGS

# Everywhere the tree is at $TREE: on the hosts the volume, on the last "host" a local folder.
TREE=$WORK/tree
mkdir "$WORK/local"
farm_namespaces "$TREE"
export ROUND_ROBIN="${HOSTS[*]}" ROUND_ROBIN_LOG=$WORK/recipes
LOCAL=$COUNT
farm_namespace "$WORK/local" "$TREE"

# HOST DIR ARGUMENTS...: make in a folder of the tree; on any host but the local one its recipes go round.
run_make() {
    local host=$1 dir=$2 shell=()
    shift 2
    [ "$host" = "$LOCAL" ] || shell=(SHELL="$ROOT/tests/lib/round-robin.sh")
    # shellcheck disable=SC2016
    on_host "$host" sh -euc 'cd "$1"; shift; exec make "$@"' sh "$TREE/$dir" "${shell[@]}" "$@"
}

fetch() {
    bash "$ROOT/bench/fetch-source.sh" coreutils "$ROOT/target/sources" > "$WORK/sources" && DSC=$(sed -n 1p "$WORK/sources")
}
# Configured on the local disk; the volume gets a copy with all its times.
prepare() {
    (cd "$WORK/local" && dpkg-source --extract --no-check "$DSC" coreutils && cp -a coreutils pristine) > "$WORK/unpack.log" 2>&1 &&
        configure "$LOCAL" coreutils . > "$WORK/configure.log" 2>&1 &&
        mkdir "$WORK/local/out" && { [ -n "$LARGE" ] || return 0; } &&
        configure "$LOCAL" out ../pristine > "$WORK/configure-out.log" 2>&1
}
configure() { # HOST DIR SOURCE
    # shellcheck disable=SC2016
    on_host "$1" sh -euc 'cd "$1"; exec "$2/configure" --disable-nls --cache-file="$3" CFLAGS="-O0 -g"' \
        sh "$TREE/$2" "$3" "$WORK/config.cache"
}
copy() {
    if [ -n "$LARGE" ]; then
        # Unpacked on one host and configured on two others.
        cp -a "$WORK/local/pristine" "${MNTS[0]}/pristine" && cp -a "$WORK/local/pristine" "${MNTS[0]}/coreutils" &&
            configure 1 coreutils . > "$WORK/configure-there.log" 2>&1 &&
            mkdir "${MNTS[0]}/out" && configure 2 out ../pristine > "$WORK/configure-out-there.log" 2>&1
    else
        cp -a "$WORK/local/." "${MNTS[0]}"
    fi
}

build_here() { run_make "$LOCAL" "$1" -j"$(nproc)" > "$WORK/make-$1.local" 2>&1 || { tail -n 20 "$WORK/make-$1.local"; return 1; }; }
build_there() {
    local start=$SECONDS
    : > "$ROUND_ROBIN_LOG"
    run_make 0 "$1" -j"$COUNT" > "$WORK/make-$1.log" 2>&1 || { tail -n 20 "$WORK/make-$1.log"; return 1; }
    printf '   %s recipes, on the hosts %s, in %s s\n' "$(wc -l < "$ROUND_ROBIN_LOG")" \
        "$(sort -n "$ROUND_ROBIN_LOG" | uniq -c | awk '{ printf "%s%s: %s", sep, $2, $1; sep = ", " }')" $((SECONDS - start))
    grep -o 'modification time .* in the future' "$WORK/make-$1.log" | sed 's/^/   make says: /'
    test "$(sort -u "$ROUND_ROBIN_LOG" | wc -l)" = "$COUNT"
}

# What make made, with hashes: not what configure wrote, which names its process and the time.
products() { (cd "$1" && find . -type f ! -name 'config.log' ! -name 'config.status' -print0 | sort -z | xargs -0 sha256sum); }
objects() { (cd "$1" && find . -name '*.o' | wc -l); }
same_products() {
    products "$WORK/local/$1" > "$WORK/products.local"
    local mnt
    for mnt in "${MNTS[@]}"; do
        products "$mnt/$1" | diff "$WORK/products.local" - | head -n 10
        test "${PIPESTATUS[1]}" = 0 || return 1
    done
    printf '   %s files, %s objects\n' "$(wc -l < "$WORK/products.local")" "$(objects "$WORK/local/$1")"
    test "$(objects "$WORK/local/$1")" -gt 400
}
works() { test "$(on_host 1 "$TREE/$1/src/echo" hello)" = hello && test "$(on_host 2 "$TREE/$1/src/expr" 6 '*' 7)" = 42; }

# What a make compiles or makes, one name a line; with nothing to do none.
made() { grep -oE '^ +(CC|CCLD|AR|GEN) +.*' "$1" | sort; }
nothing_to_do() {
    local host
    for host in 0 $((COUNT - 1)); do
        run_make "$host" "$1" -j"$COUNT" > "$WORK/again.log" 2>&1 || return 1
        test -z "$(made "$WORK/again.log")" || { made "$WORK/again.log" | head; return 1; }
    done
}
# Touched on one host, made from another.
incremental() { # DIR HEADER
    touch "$WORK/local/$2" "${MNTS[3]}/$2"
    run_make "$LOCAL" "$1" -j"$(nproc)" > "$WORK/touched.local" 2>&1 && run_make 1 "$1" -j"$COUNT" > "$WORK/touched.log" 2>&1 || return 1
    printf '   %s made anew\n' "$(made "$WORK/touched.local" | wc -l)"
    test -n "$(made "$WORK/touched.local")" && diff <(made "$WORK/touched.local") <(made "$WORK/touched.log") | head -n 10
    test "${PIPESTATUS[0]}" = 0
}
clean() {
    run_make "$LOCAL" "$1" -s clean > /dev/null 2>&1 && run_make 2 "$1" -s -j"$COUNT" clean > "$WORK/clean.log" 2>&1 &&
        test "$(objects "${MNTS[0]}/$1")" = 0 &&
        diff <(cd "$WORK/local/$1" && find . | sort) <(cd "${MNTS[1]}/$1" && find . | sort) | head -n 10
    test "${PIPESTATUS[0]}" = 0
}

check "fetch the source of coreutils" fetch
check "unpack, and configure in the tree and out of it" prepare
check "the same on the volume" copy
[ "$FAILED" = 0 ] || { report; exit 1; }
for dir in coreutils ${LARGE:+out}; do
    case $dir in coreutils) where="in the tree" header=coreutils/src/$HEADER ;; *) where="out of the tree" header=pristine/src/system.h ;; esac
    check "make locally, $where" build_here "$dir"
    check "make on $COUNT hosts, $where" build_there "$dir"
    check "the same products on all mounts, $where" same_products "$dir"
    check "the programs run, $where" works "$dir"
    check "a second make has nothing to do, $where" nothing_to_do "$dir"
    check "a touched header has the same made anew, $where" incremental "$dir" "$header"
    check "the same products again, $where" same_products "$dir"
    check "make clean, $where" clean "$dir"
done
report
