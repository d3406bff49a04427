#!/usr/bin/env bash
# The source of a Debian package: unpack, configure, make, make check, install, all on a volume. Another one is
# unpacked by dpkg-deb. With --large also the whole kernel source, in a client of 512 MiB.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
farm_start

fetch() {
    bash "$ROOT/bench/fetch-source.sh" hello "$ROOT/target/sources" > "$WORK/sources" &&
        DSC=$(sed -n 1p "$WORK/sources")
}
unpack() { cd "$MNT" && dpkg-source --extract --no-check "$DSC" hello && test -x hello/configure; }
configure() { cd "$MNT/hello" && ./configure --prefix="$MNT/usr" > "$WORK/configure.log" 2>&1; }
build() { make -C "$MNT/hello" -j2 > "$WORK/make.log" 2>&1 && "$MNT/hello/hello" | grep -q 'Hello, world!'; }
tests() { make -C "$MNT/hello" check > "$WORK/check.log" 2>&1 && grep -q '# FAIL:  0' "$WORK/check.log"; }
install_it() { make -C "$MNT/hello" install > "$WORK/install.log" 2>&1 && test -x "$MNT/usr/bin/hello"; }
nothing_to_do() { ! make -C "$MNT/hello" | grep -E ' (CC|CCLD|AR|GEN) |gcc|cc '; }

deb() {
    mkdir -p "$WORK/pkg/DEBIAN" "$WORK/pkg/usr/share/sample" && cd "$WORK" || return 1
    printf 'Package: sample\nVersion: 1\nArchitecture: all\nMaintainer: test <test@localhost>\nDescription: test\n' > pkg/DEBIAN/control
    for at in $(seq 300); do echo "$at" > "pkg/usr/share/sample/$at"; done
    ln -s 1 pkg/usr/share/sample/link
    chmod 2755 pkg/usr/share/sample
    touch -d '2001-02-03 04:05:06' pkg/usr/share/sample/*
    dpkg-deb --root-owner-group -b pkg sample.deb > /dev/null &&
        dpkg-deb -x sample.deb "$WORK/plain" && dpkg-deb -x sample.deb "$MNT/deb" &&
        diff <(python3 "$ROOT/tests/lib/digest.py" "$WORK/plain") <(python3 "$ROOT/tests/lib/digest.py" "$MNT/deb")
}

kernel() {
    local limit=$((512 << 20)) client tarball peak
    apt-get install -y -qq --download-only --reinstall -o Dir::Cache::archives="$WORK" linux-source > /dev/null 2>&1
    (cd "$WORK" && apt-get download "$(apt-cache depends linux-source | sed -n 's/.*Depends: //p')" > /dev/null) || return 1
    dpkg-deb -x "$WORK"/linux-source-*.deb "$WORK/linux" || return 1
    tarball=$(echo "$WORK"/linux/usr/src/*.tar.xz)
    farm_remount "dirty=128M,cache=128M" || return 1
    tar -xf "$tarball" -C "$MNT" || return 1
    client=$("$HAYLOFT" stats "$MNT" --json | python3 -c 'import json, sys; print(json.load(sys.stdin)["mount"]["pid"])')
    peak=$(($(awk '/VmHWM/ { print $2 }' "/proc/$client/status") << 10))
    echo "   the client took $((peak >> 20)) MiB"
    # 512 MiB beside the caches that it was allowed.
    test "$peak" -le $((limit + (256 << 20)))
}

check "fetch a source package" fetch
check "unpack it" unpack
check "configure" configure
check "make" build
check "make check" tests
check "make install" install_it
check "remount" farm_remount
check "make has nothing to do after a remount" nothing_to_do
check "dpkg-deb" deb
if [ "${1:-}" = --large ]; then check "unpack the source of the kernel" kernel; fi
report
