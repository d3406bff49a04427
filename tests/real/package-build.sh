#!/usr/bin/env bash
# Debian and RPM packages are built in build roots: the root is made from the Debian archive, build dependencies are
# installed in it and kept as a layer, the build runs as an ordinary user without network, and the packages are published
# to a volume. With --large (or --compare) also a table: the same build, dependencies installed from files, in a copy
# of the root on ext4, over it with overlayfs on ext4, in a copy on tmpfs, and with hayloft run.
#
#   PACKAGE=hello tests/real/package-build.sh [--compare [RUNS]]
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
PACKAGE=${PACKAGE:-hello}
SUITE=bookworm
farm_start
# What the comparison mounts goes first.
trap 'status=$?; leave_all; (exit "$status"); farm_stop' EXIT

run() { timeout 1200 "$HAYLOFT" run --config /dev/null --layers-dir "$WORK/layers" "$@"; }
root() { timeout 1200 "$HAYLOFT" root "$@"; }

fetch() {
    bash "$ROOT/bench/fetch-source.sh" "$PACKAGE" "$ROOT/target/sources" >"$WORK/sources" || return 1
    DSC=$(sed -n 1p "$WORK/sources")
    TARBALL=$(sed -n 2p "$WORK/sources")
    SOURCES=$(dirname "$DSC")
}

make_layer() {
    root create "$SUITE" --from "debian:$SUITE,build-essential" --layers-dir "$WORK/layers" --config /dev/null &&
        test -x "$WORK/layers/$SUITE/tree/usr/bin/gcc" &&
        test ! -e "$WORK/layers/.$SUITE.hayloft-new"
}

# The packages are kept for the comparison in memory that no layer has, hence not in what is published.
install_dependencies() {
    cat >"$WORK/deps.sh" <<'SCRIPT'
set -eu
export DEBIAN_FRONTEND=noninteractive
apt-get -qq update
apt-get -qq -y build-dep --no-install-recommends --download-only "$1" >/dev/null
cp /var/cache/apt/archives/*.deb /debs/
apt-get -qq -y build-dep --no-install-recommends "$1" >/var/tmp/log 2>&1 || { tail /var/tmp/log; exit 1; }
apt-get clean
rm -rf /var/lib/apt/lists/* /var/tmp/log
useradd --create-home builder
install -d -o builder -g builder /build
SCRIPT
    run --root "$SUITE" --network host --bind "$SOURCES:/src" --bind "$WORK/deps.sh:/deps.sh" --scratch /debs \
        --publish "$WORK:dependencies" --as-layer --collect '/debs/*.deb' --output "$WORK/debs" \
        -- sh /deps.sh "/src/$(basename "$DSC")" || return 1
    test -x "$WORK/dependencies/usr/bin/dh" && test -z "$(ls "$WORK/dependencies/debs" 2>/dev/null)"
}

build_script() {
    cat >"$WORK/build.sh" <<'SCRIPT'
set -eu
test "$(id -u)" != 0
# The network is a loopback interface that is alone.
test "$(tail -n +3 /proc/net/dev | grep -vc ' lo:')" = 0
cd /build
dpkg-source --no-check -x "$1" source >/dev/null
cd source
DEB_BUILD_OPTIONS=parallel=$(nproc) dpkg-buildpackage --no-sign --build=binary >/build/log 2>&1 || { tail /build/log; exit 1; }
SCRIPT
}

build() {
    build_script
    run --root "$WORK/dependencies" --root "$SUITE" --bind "$SOURCES:/src" --bind "$WORK/build.sh:/build.sh" \
        --user builder --network none --memory 4G --name "deb-$$" --json "$WORK/build.json" \
        --collect '/build/*.deb' --output "$WORK/out" \
        --publish "$MNT:packages" --only "/build" -- sh /build.sh "/src/$(basename "$DSC")" || return 1
    ls "$WORK/out/${PACKAGE}"_*.deb >/dev/null || return 1
    python3 -c '
import json, sys
got = json.load(open(sys.argv[1]))
assert got["exit_code"] == 0 and got["published"]["written"] > 0, got
print("   {:.0f} s, {:.0f} MiB of memory at most, {} bytes spilled".format(
    got["wall_ms"] / 1e3, (got["memory_peak_bytes"] or 0) / 2**20, got["spilled_bytes"]))' "$WORK/build.json"
}

published() {
    cmp "$WORK/out/${PACKAGE}"_*.deb "$MNT/packages/build/${PACKAGE}"_*.deb && farm_remount &&
        cmp "$WORK/out/${PACKAGE}"_*.deb "$MNT/packages/build/${PACKAGE}"_*.deb &&
        dpkg-deb --info "$MNT/packages/build/${PACKAGE}"_*.deb >/dev/null &&
        test "$(stat -c %U "$MNT/packages/build/source")" != root
}

works() {
    run --root "$SUITE" --bind "$WORK/out:/out" -- sh -euc "dpkg -i /out/${PACKAGE}_*.deb >/dev/null; dpkg -V $PACKAGE"
}

failing_publishes_nothing() {
    ! run --root "$WORK/dependencies" --root "$SUITE" --publish "$MNT:failed" --user builder --name "bad-$$" --keep \
        -- sh -c 'echo half >/build/half; exit 7' || return 1
    test ! -e "$MNT/failed" || return 1
    root diff "bad-$$" | grep -q '^added    /build/half$' && root rm "bad-$$"
}

layers_unchanged() {
    test ! -e "$WORK/layers/$SUITE/tree/build" && test -z "$(ls -A "$WORK/dependencies/build")" &&
        ! root list | grep -qE -- "-$$ "
}

rpm_layer() {
    run --root "$SUITE" --network host --publish "$WORK:rpm" --as-layer -- sh -euc '
        export DEBIAN_FRONTEND=noninteractive
        apt-get -qq update
        apt-get -qq -y install --no-install-recommends rpm >/dev/null 2>&1
        apt-get clean
        rm -rf /var/lib/apt/lists/*
        useradd --create-home builder
        install -d -o builder -g builder /build'
}

# From the same upstream source. Nothing is required of other RPM packages: there are none here.
rpm_build() {
    local version
    version=$(basename "$DSC" | sed -E 's/^[^_]*_([^-]*).*/\1/')
    cat >"$WORK/package.spec" <<SPEC
Name: $PACKAGE
Version: $version
Release: 1
Summary: $PACKAGE
License: see its source
Source0: $(basename "$TARBALL")
AutoReqProv: no
%global debug_package %{nil}
%description
Built in a Hayloft root.
%prep
%setup -q
%build
./configure --prefix=/usr
make %{?_smp_mflags}
%install
make install DESTDIR=%{buildroot}
find %{buildroot} ! -type d -printf '/%%P\n' | sed -e 's/\.gz\$/*/' > files
%files -f files
SPEC
    run --root "$WORK/rpm" --root "$SUITE" --bind "$SOURCES:/src" --bind "$WORK/package.spec:/package.spec" \
        --user builder --network none --memory 4G --collect '/build/RPMS/*/*.rpm' --output "$WORK/rpms" \
        -- sh -c 'rpmbuild -bb --define "_topdir /build" --define "_sourcedir /src" /package.spec >/build/log 2>&1 ||
            { tail /build/log; exit 1; }' || return 1
    run --root "$WORK/rpm" --root "$SUITE" --bind "$WORK/rpms:/rpms" -- \
        sh -euc "rpm --query --list --package /rpms/*.rpm | grep -q /usr/bin/$PACKAGE; mkdir /new; rpm --root /new -i /rpms/*.rpm; /new/usr/bin/$PACKAGE --version >/dev/null"
}

# No registry of a distribution of RPM packages is at hand here: a repository of the package just built.
rpm_root() {
    if ! command -v dnf >/dev/null || ! command -v createrepo_c >/dev/null; then
        echo "   skipped: needs dnf and createrepo_c"
        return 0
    fi
    createrepo_c --quiet "$WORK/rpms" &&
        root create from-rpm --from "rpm:file://$WORK/rpms,$PACKAGE" --layers-dir "$WORK/layers" --config /dev/null \
            2>"$WORK/dnf.log" && test -x "$WORK/layers/from-rpm/tree/usr/bin/$PACKAGE" &&
        run --root from-rpm --root "$SUITE" -- "$PACKAGE" --version >/dev/null
}

no_network() {
    run --root "$SUITE" --network none -- sh -c '! perl -MIO::Socket::INET -e "exit !IO::Socket::INET->new(PeerAddr => q(192.0.2.1:80), Timeout => 2)"'
}

# The whole of a package build: a root, its build dependencies from files, the build; then what the device was sent.
# EXT is an ext4 file system in a file, used for nothing else: what is written there is what this writes.
compare() {
    local rounds=$1 round way
    truncate -s 8G "$WORK/image" && mkfs.ext4 -q -F "$WORK/image" && mkdir "$WORK/ext4" &&
        mount -o loop "$WORK/image" "$WORK/ext4" || return 1
    EXT=$WORK/ext4
    DEVICE=$(basename "$(findmnt -no SOURCE "$EXT")")
    LOWER=$EXT/lower
    cat >"$WORK/all.sh" <<'SCRIPT'
set -eu
export DEBIAN_FRONTEND=noninteractive PATH=/usr/sbin:/usr/bin:/sbin:/bin
dpkg --install /debs/*.deb >/tmp/dpkg.log 2>&1 || { tail /tmp/dpkg.log; exit 1; }
useradd --create-home builder
install -d -o builder -g builder /build
exec runuser -u builder -- sh /build.sh "$1"
SCRIPT
    cp -a "$WORK/layers/$SUITE/tree" "$LOWER"
    : >"$WORK/table"
    for round in $(seq "$rounds"); do
        for way in copy overlay tmpfs hayloft; do
            measure "$way" >>"$WORK/table" || return 1
        done
    done
    leave_all
    python3 - "$WORK/table" "$PACKAGE" "$rounds" <<'PYTHON'
import statistics, sys
rows = {}
for line in open(sys.argv[1]):
    way, *figures = line.split()
    rows.setdefault(way, []).append([float(figure) for figure in figures])
names = {"copy": "copy of the root on ext4", "overlay": "overlay, upper on ext4", "tmpfs": "copy of the root on tmpfs",
         "hayloft": "hayloft run"}
print(f"   package {sys.argv[2]}, medians of {sys.argv[3]}, ext4 in a file on the local disk")
print(f"   {'':28}{'set up':>10}{'build':>10}{'remove':>10}{'in all':>10}{'written':>14}{'vs copy':>10}")
whole = {}
for way, runs in rows.items():
    setup, build, remove, written = (statistics.median(column) for column in zip(*runs))
    whole[way] = setup + build + remove
    print(f"   {names[way]:28}{setup:8.2f} s{build:8.1f} s{remove:8.2f} s{whole[way]:8.1f} s"
          f"{written / 2**20:10.1f} MiB{whole[way] / whole['copy']:10.2f}")
PYTHON
}

# WAY, seconds to set up, to build and to remove, bytes written.
measure() {
    local way=$1 top=$EXT/$1 before start ready built removed after
    local dsc
    dsc=/src/$(basename "$DSC")
    mkdir "$top"
    sync -f "$EXT"
    before=$(written)
    start=$(now)
    case $way in
        copy) cp -a "$LOWER" "$top/root" ;;
        overlay)
            mkdir "$top/upper" "$top/work" "$top/root"
            mount -t overlay overlay "$top/root" -o "lowerdir=$LOWER,upperdir=$top/upper,workdir=$top/work"
            ;;
        tmpfs) mount -t tmpfs -o size=16G tmpfs "$top" && cp -a "$LOWER" "$top/root" ;;
    esac || return 1
    ready=$(now)
    case $way in
        hayloft)
            run --root "$LOWER" --bind "$SOURCES:/src" --bind "$WORK/debs:/debs" --bind "$WORK/all.sh:/all.sh" \
                --bind "$WORK/build.sh:/build.sh" --collect '/build/*.deb' --output "$WORK/compared" \
                -- sh /all.sh "$dsc" >&2 ;;
        *) in_chroot "$top/root" sh /all.sh "$dsc" >&2 && cp "$top"/root/build/*.deb "$WORK/out" ;;
    esac || { echo "   $way failed" >&2; leave "$top/root"; leave "$top"; return 1; }
    built=$(now)
    case $way in
        overlay) umount "$top/root" ;;
        tmpfs) umount "$top" ;;
    esac
    # What is written late is written all the same.
    sync -f "$EXT"
    after=$(written)
    local synced
    synced=$(now)
    rm -rf --one-file-system "$top"
    removed=$(now)
    awk -v w="$way" -v a="$start" -v b="$ready" -v c="$built" -v d="$synced" -v e="$removed" -v n=$((after - before)) \
        'BEGIN { printf "%s %.3f %.3f %.3f %d\n", w, b - a, c - b, e - d, n }'
}

now() { date +%s.%N; }
written() { awk '{ printf "%.0f", $7 * 512 }' "/sys/block/$DEVICE/stat"; }
leave() { if mountpoint -q "$1"; then umount "$1" || umount -l "$1"; fi; }

leave_all() {
    cd /
    for way in overlay/root tmpfs; do leave "$WORK/ext4/$way"; done
    leave "$WORK/ext4"
}

# The namespaces of a build root, made with util-linux.
in_chroot() {
    local dir=$1
    shift
    mkdir -p "$dir/src" "$dir/debs"
    touch "$dir/all.sh" "$dir/build.sh"
    unshare --mount --pid --fork --kill-child --ipc --uts --net sh -euc '
        top=$1 sources=$2 work=$3
        shift 3
        mount -t proc proc "$top/proc"
        mount --rbind /dev "$top/dev"
        mount --bind "$sources" "$top/src"
        mount --bind "$work/debs" "$top/debs"
        for script in all.sh build.sh; do mount --bind "$work/$script" "$top/$script"; done
        exec chroot "$top" "$@"' sh "$dir" "$SOURCES" "$WORK" "$@"
}

check "fetch a source package" fetch
check "make a Debian root with build-essential" make_layer
check "install its build dependencies, kept as a layer" install_dependencies
check "build it: ordinary user, no network" build
check "the network is not there" no_network
check "what was published is there, also after a remount" published
check "the package can be installed in a fresh root" works
check "a build that fails publishes nothing, and can be looked at" failing_publishes_nothing
check "layers are as they were, and no root is left" layers_unchanged
check "a root with rpm, as a layer" rpm_layer
check "build an RPM package from the same source" rpm_build
check "make a root from a repository of RPM packages" rpm_root
case ${1:-} in
    --compare | --large) check "compare with ext4, overlay on ext4, and tmpfs" compare "${2:-1}" ;;
esac
report
