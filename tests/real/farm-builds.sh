#!/usr/bin/env bash
# Builds that do not come from `make` at a prompt, with their compilers on a farm of two hosts: a Debian source package, a
# project of cmake and ninja, and cargo. All that they make is the same as built with the same tools on the local disk, at
# the same path. With --large real ones: GNU hello as a package (needs debhelper and texinfo), fmtlib with cmake, crates from crates.io.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
. "$(dirname "$0")/../lib/task-farm.sh"
LARGE=
if [ "${1:-}" = --large ]; then LARGE=1; fi
unset CARGO_TARGET_DIR RUSTFLAGS RUSTC_WRAPPER
# Incremental compilation gives its files random names.
export CARGO_INCREMENTAL=0
task_farm "${FARM_PORT:-17991}"

source_of() { # PACKAGE: unpacked in both trees
    bash "$ROOT/bench/fetch-source.sh" "$1" "$ROOT/target/sources" >"$WORK/sources" &&
        (cd "$WORK/local" && dpkg-source --extract --no-check "$(sed -n 1p "$WORK/sources")" "$1") >"$WORK/unpack.log" 2>&1
}
# A launcher that notes which mount it runs on, and so which host, and does nothing else: both trees are built with it.
# shellcheck disable=SC2016
noted() {
    rm -f "$WORK"/where.*
    printf '#!/bin/sh\necho >>"%s/where.$(stat -c %%d "$0")"\nexec "$@"\n' "$WORK" >"$WORK/local/noted" &&
        chmod +x "$WORK/local/noted" && cp -a "$WORK/local/noted" "${MNTS[0]}/noted"
}
# Of a large project so little may be built that one host has it all.
ran_there() {
    local at hosts=0
    for at in 1 2; do
        [ ! -s "$WORK/where.$(stat -c %d "${MNTS[$at]}")" ] || hosts=$((hosts + 1))
    done
    printf '   on %s hosts\n' "$hosts" && test "$hosts" -ge "$([ -n "$LARGE" ] && echo 1 || echo 2)"
}

package_small() {
    mkdir -p "$WORK/local/package/debian/source" && cd "$WORK/local/package" || return 1
    for part in $(seq 12); do
        printf '#include <stdio.h>\nvoid part%s(void) { puts("part %s, " __FILE__); }\n' "$part" "$part" >"part$part.c"
    done
    {
        for part in $(seq 12); do echo "void part$part(void);"; done
        echo "int main(void) {"
        for part in $(seq 12); do echo "part$part();"; done
        echo "}"
    } >main.c
    cat >Makefile <<'MAKE'
OBJECTS := $(patsubst %.c,%.o,$(wildcard *.c))
sample: $(OBJECTS)
	$(CC) $(LDFLAGS) -o $@ $^
%.o: %.c
	$(CC) $(CFLAGS) -c -o $@ $<
clean:
	rm -f *.o sample
MAKE
    cat >debian/rules <<'MAKE'
#!/usr/bin/make -f
include /usr/share/dpkg/buildflags.mk
jobs := $(patsubst parallel=%,-j%,$(filter parallel=%,$(DEB_BUILD_OPTIONS)))
top := debian/sample
build build-arch build-indep:
	$(MAKE) $(jobs) CFLAGS="$(CFLAGS) $(CPPFLAGS)" LDFLAGS="$(LDFLAGS)"
clean:
	$(MAKE) clean
	rm -rf $(top) debian/files debian/*.substvars
binary-indep:
binary binary-arch: build
	install -D sample $(top)/usr/bin/sample
	mkdir $(top)/DEBIAN
	dpkg-shlibdeps -Tdebian/sample.substvars $(top)/usr/bin/sample
	dpkg-gencontrol -Tdebian/sample.substvars -P$(top)
	dpkg-deb --root-owner-group --build $(top) ..
.PHONY: build build-arch build-indep clean binary binary-arch binary-indep
MAKE
    chmod +x debian/rules
    echo "3.0 (native)" >debian/source/format
    cat >debian/control <<'CONTROL'
Source: sample
Section: misc
Priority: optional
Maintainer: Nobody <nobody@localhost>
Standards-Version: 4.6.2
Rules-Requires-Root: no

Package: sample
Architecture: any
Depends: ${shlibs:Depends}
Description: a sample
 With a few files.
CONTROL
    printf 'sample (1.0) unstable; urgency=low\n\n  * First.\n\n -- Nobody <nobody@localhost>  Thu, 01 Jan 2026 00:00:00 +0000\n' >debian/changelog
}
package_large() { source_of hello && mv "$WORK/local/hello" "$WORK/local/package"; }
package_source() {
    if [ -n "$LARGE" ]; then package_large; else package_small; fi && cp -a "$WORK/local/package" "${MNTS[0]}/package"
}
# Each call of debian/rules is one of `hayloft make`: without -j, so what it starts itself stays here; the make below it has one.
# shellcheck disable=SC2016
package_build() { # local|volume RULES
    on_"$1" sh -euc 'cd package; export DEB_BUILD_OPTIONS="parallel=6 nocheck"
        dpkg-buildpackage --no-sign --no-check-builddeps --build=binary --rules-file="$1"' sh "$2" >"$WORK/package.$1" 2>&1 ||
        { tail -n 20 "$WORK/package.$1"; return 1; }
}
package_recipes() {
    local count
    count=$(sed -n 's/^hayloft make: \([0-9]*\) recipes on the farm.*/\1/p' "$WORK/package.volume" | sort -n | tail -n 1)
    printf '   %s recipes on the farm\n' "$count" && test "$count" -gt 10
}
# What is built beside it says how it was built.
package_same() {
    same_products . -maxdepth 1 -name '*.deb' &&
        same_products package ! -path './debian/*' ! -path './autom4te.cache/*' ! -name config.log ! -name config.status
}

cmake_small() {
    mkdir "$WORK/local/cmake" && cd "$WORK/local/cmake" || return 1
    for part in $(seq 12); do
        printf '#include "all.h"\nint part%s(void) { return %s + (int)sizeof(__FILE__); }\n' "$part" "$part" >"part$part.c"
    done
    for part in $(seq 12); do echo "int part$part(void);"; done >all.h
    printf '#include "all.h"\n#include <stdio.h>\nint main(void) { printf("%%d\\n", part1() + part12()); }\n' >main.c
    cat >CMakeLists.txt <<'CMAKE'
cmake_minimum_required(VERSION 3.13)
project(sample C)
file(GLOB parts part*.c)
add_library(parts STATIC ${parts})
add_executable(sample main.c)
target_link_libraries(sample parts)
add_custom_command(OUTPUT made.h COMMAND ${CMAKE_COMMAND} -E sha256sum all.h > ${CMAKE_BINARY_DIR}/made.h
    WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} DEPENDS all.h)
add_custom_target(made ALL DEPENDS made.h)
CMAKE
}
cmake_large() { source_of fmtlib && mv "$WORK/local/fmtlib" "$WORK/local/cmake"; }
cmake_source() {
    if [ -n "$LARGE" ]; then cmake_large; else cmake_small; fi && cp -a "$WORK/local/cmake" "${MNTS[0]}/cmake"
}
# The project is not changed: cmake reads a file of ours before it.
# shellcheck disable=SC2016
cmake_build() { # local|volume LAUNCHER
    for kind in COMPILE LINK CUSTOM; do
        echo "set_property(GLOBAL PROPERTY RULE_LAUNCH_$kind \"$2 $TREE/noted\")"
    done >"$WORK/launch.$1"
    on_"$1" sh -euc 'cmake -S cmake -B cmake-build -G Ninja -DCMAKE_BUILD_TYPE=Release -DFMT_TEST=OFF -DFMT_DOC=OFF -DCMAKE_PROJECT_INCLUDE="$1"
        ninja -C cmake-build -j 8' sh "$WORK/launch.$1" >"$WORK/cmake.$1" 2>&1 ||
        { tail -n 20 "$WORK/cmake.$1"; return 1; }
}
# Ninja's notes have times, and cmake's own the name of the launcher.
cmake_same() { same_products cmake-build ! -name '.ninja*' ! -name build.ninja ! -name CMakeCache.txt ! -path '*/CMakeFiles/3.*' ! -name '*.log' ! -name 'rules.ninja'; }
cmake_again() {
    on_volume ninja -C cmake-build -n 2>&1 | grep -q 'no work to do'
}

crate() { # NAME DEPENDENCY...
    local name=$1 other
    mkdir -p "$name/src"
    shift
    {
        printf '[package]\nname = "%s"\nversion = "0.1.0"\nedition = "2021"\n[dependencies]\n' "$name"
        for other in "$@"; do echo "$other = { path = \"../$other\" }"; done
    } >"$name/Cargo.toml"
}
cargo_small() {
    mkdir "$WORK/local/cargo" && cd "$WORK/local/cargo" || return 1
    local part parts=""
    for part in $(seq 8); do
        crate "part$part" && echo "pub fn part() -> u32 { $part }" >"part$part/src/lib.rs"
        parts="$parts part$part"
    done
    printf '[workspace]\nresolver = "2"\nmembers = ["top"]\n' >Cargo.toml
    crate left && echo 'pub fn left() -> u32 { include!(concat!(env!("OUT_DIR"), "/number.rs")) }' >left/src/lib.rs &&
        cat >left/build.rs <<'RS'
fn main() {
    let out = std::env::var("OUT_DIR").unwrap();
    std::fs::write(format!("{out}/number.rs"), "40").unwrap();
    println!("cargo::rerun-if-changed=build.rs");
}
RS
    # shellcheck disable=SC2086
    crate top left $parts && echo 'fn main() { println!("{}", left::left() + part2::part()); }' >top/src/main.rs
}
cargo_large() {
    mkdir -p "$WORK/local/cargo/src" && cd "$WORK/local/cargo" || return 1
    cat >Cargo.toml <<'TOML'
[package]
name = "top"
version = "0.1.0"
edition = "2021"
[dependencies]
serde = { version = "1", features = ["derive"] }
serde_json = "1"
TOML
    cat >src/main.rs <<'RS'
#[derive(serde::Serialize)]
struct Sum {
    sum: u32,
}
fn main() {
    println!("{}", serde_json::to_string(&Sum { sum: 42 }).unwrap());
}
RS
    mkdir .cargo && cargo vendor vendor >.cargo/config.toml 2>"$WORK/vendor.log" || { tail -n 5 "$WORK/vendor.log"; return 1; }
}
cargo_source() {
    if [ -n "$LARGE" ]; then cargo_large; else cargo_small; fi && cp -a "$WORK/local/cargo" "${MNTS[0]}/cargo"
}
# shellcheck disable=SC2016
cargo_build() { # local|volume LAUNCHER
    printf '#!/bin/sh\nexec %s %s/noted "$@"\n' "$2" "$TREE" >"$WORK/wrapper.$1"
    chmod +x "$WORK/wrapper.$1"
    on_"$1" sh -euc 'cd cargo; RUSTC_WRAPPER=$1 cargo build --offline -j 8; target/debug/top | grep 42' sh "$WORK/wrapper.$1" \
        >"$WORK/cargo.$1" 2>&1 || { tail -n 20 "$WORK/cargo.$1"; return 1; }
    # A job server that is not there would be told of each crate.
    ! grep -i jobserver "$WORK/cargo.$1"
}
# Not cargo's own notes of what it has done when, and with what.
cargo_same() { same_products cargo/target/debug ! -path '*/.fingerprint/*' ! -path '*/incremental/*' ! -name .cargo-lock ! -name output ! -name invoked.timestamp; }
cargo_again() { on_volume sh -euc 'cd cargo; RUSTC_WRAPPER=$1 cargo build --offline' sh "$WORK/wrapper.volume" 2>&1 | grep -q Finished; }

check "start a farm of two hosts" farm_begin
[ "$FAILED" = 0 ] || { report; exit 1; }
check "a Debian source package" package_source
check "dpkg-buildpackage locally" package_build local debian/rules
check "dpkg-buildpackage with hayloft make" package_build volume "$HAYLOFT make --summary -f debian/rules"
check "its recipes ran on the farm" package_recipes
check "the same package, and all that led to it" package_same
check "a project of cmake" cmake_source
noted
check "cmake and ninja locally" cmake_build local env
check "cmake and ninja with hayloft task" cmake_build volume "$HAYLOFT task --farm --"
check "it ran on the farm" ran_there
check "the same products" cmake_same
check "a second ninja has nothing to do" cmake_again
check "crates" cargo_source
noted
check "cargo locally" cargo_build local env
check "cargo with hayloft task" cargo_build volume "$HAYLOFT task --"
check "it ran on the farm" ran_there
check "the same products" cargo_same
check "a second cargo has nothing to do" cargo_again
report
