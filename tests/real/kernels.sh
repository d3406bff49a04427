#!/usr/bin/env bash
# What works on other kernels, and what the rest says: each kernel is started in QEMU (without KVM), with this build and
# busybox, and makes a volume, mounts it and makes build roots.
#   tests/real/kernels.sh linux-image-6.1.0-*-cloud-amd64_*.deb ...        (apt-get download)
# A kernel that comes in parts is named by all of them with commas between: linux-binary-7.3*.deb,linux-modules-7.3*.deb
# Needs qemu-system-x86, busybox-static and cpio. Where no kernel is named nothing is tried.
set -euo pipefail
ROOT=$(cd "$(dirname "$0")/../.." && pwd)
HAYLOFT=${HAYLOFT:-$ROOT/target/release/hayloft}
[ "${1-}" != --large ] || shift
[ $# -gt 0 ] || { sed -n '2,6s/^# *//p' "$0"; exit 0; }
for program in qemu-system-x86_64 busybox cpio dpkg-deb; do
    command -v $program >/dev/null || { echo "kernels.sh: install $program" >&2; exit 2; }
done
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT

# What the guest runs. It says a line for each thing that was tried: the name, the exit code, what was said.
guest() {
    cat <<'GUEST'
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
# Names that another host makes and removes, which this kernel has looked for before and may keep as they were.
names() {
    mkdir /other /mnt/e && hayloft mount 127.0.0.1:7440/v /other && touch /mnt/e/x && ls -l /other/e >/dev/null && sleep 2 || return 1
    for name in a b c; do
        for look in 1 2 3; do [ ! -e /other/e/$name ] || return 2; sleep 1; done
        touch /mnt/e/$name
        [ -e /other/e/$name ] || { echo "$name is there, and not seen"; return 3; }
        for look in 1 2 3; do [ -e /other/e/$name ] || return 4; sleep 1; done
        mv /mnt/e/$name /mnt/e/moved
        [ ! -e /other/e/$name ] || { echo "$name is gone, and seen"; return 5; }
    done
    hayloft umount /other && echo seen as they are
}
[ "${1-}" != names ] || { names; exit; }
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmp /tmp; mount -t cgroup2 cgroup /sys/fs/cgroup
for module in /modules/*.ko; do insmod "$module"; done
ip link set lo up
try() {
    name=$1; shift
    said=$(timeout 300 "$@" 2>&1 </dev/null); code=$?
    echo "RESULT $name $code $(echo "$said" | tr '\n' ' ')"
}
mkdir -p /store /mnt /layer/bin /layer/proc /layer/sys /layer/dev /layer/tmp /layer/run /layer/etc
cp /bin/busybox /layer/bin/; ln -s busybox /layer/bin/sh
export HAYLOFT_CONFIG=/dev/null HOME=/tmp
hayloft serve --store file:///store >/tmp/serve 2>&1 &
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do grep -q serving /tmp/serve && break; sleep 1; done
try volume hayloft volume create v
try mount hayloft mount 127.0.0.1:7440/v /mnt
try files sh -c 'grep -q "/mnt fuse.hayloft" /proc/mounts && mkdir /mnt/d && echo kept >/mnt/d/f && sync /mnt/d/f && cat /mnt/d/f'
try names sh /try names
try umount hayloft umount /mnt
try root hayloft run --root /layer -- /bin/sh -c 'echo in the root'
try memory hayloft run --root /layer --memory 32M -- /bin/sh -c 'echo bounded'
try processes hayloft run --root /layer --processes 8 -- /bin/sh -c 'for i in 1 2 3 4 5 6 7 8 9; do /bin/busybox sleep 9 & done'
try retries sh -c 'dmesg | grep -c "unrecognized mount option"'
try swapmax sh -c 'mkdir /sys/fs/cgroup/x; ls /sys/fs/cgroup/x/memory.swap.max'
poweroff -f
GUEST
}

# An archive for the kernel to begin with: a first program that moves into a file system of its own, since a root cannot
# be made from what the kernel begins with (pivot_root(2)).
image() {
    local tree=$WORK/tree modules=$1
    rm -rf "$tree"
    mkdir -p "$tree"/{bin,proc,sys,dev,tmp,run,new,modules,lib64}
    cp "$(command -v busybox)" "$tree/bin/busybox"
    cp "$HAYLOFT" "$tree/bin/hayloft"
    for library in $(ldd "$HAYLOFT" | grep -o '/[^ ]*'); do cp -L --parents "$library" "$tree"; done
    find "$modules" \( -name 'overlay.ko*' -o -name 'fuse.ko*' \) -exec cp {} "$tree/modules/" \;
    # Newer packages have them compressed.
    find "$tree/modules" -name '*.xz' -exec xz -d {} +
    guest >"$tree/try"
    cat >"$tree/init" <<'INIT'
#!/bin/busybox sh
/bin/busybox mount -t tmpfs -o size=1500m new /new
for name in bin lib lib64 usr modules try; do [ -e /$name ] && /bin/busybox cp -a /$name /new/; done
/bin/busybox mkdir -p /new/proc /new/sys /new/dev /new/tmp /new/run
exec /bin/busybox switch_root /new /try
INIT
    chmod 755 "$tree/init" "$tree/try"
    (cd "$tree" && find . | cpio -o -H newc --quiet) | gzip -1 >"$WORK/initrd"
}

failed=0
# expect NAME CODE PATTERN: what the guest has to have said.
expect() {
    local line
    line=$(grep -ao "RESULT $1 .*" "$WORK/said" | tr -d "\r" || true)
    if [[ $line =~ ^RESULT\ $1\ $2\ .*$3 ]]; then
        echo "  ok      $1"
    else
        echo "  FAILED  $1: wanted $2 and /$3/, got: ${line:-nothing}"
        failed=1
    fi
}

for package in "$@"; do
    rm -rf "$WORK/kernel"
    for part in ${package//,/ }; do dpkg-deb -x "$part" "$WORK/kernel"; done
    # Newer packages have them in /usr, and from 7.3 on the kernel as well.
    modules=$WORK/kernel/lib/modules
    [ -d "$modules" ] || modules=$WORK/kernel/usr/lib/modules
    release=$(ls "$modules")
    kernel=$WORK/kernel/boot/vmlinuz-$release
    [ -f "$kernel" ] || kernel=$modules/$release/vmlinuz
    image "$modules"
    # Without accounting of swap there is no memory.swap.max, on the kernels that have the switch.
    timeout 900 qemu-system-x86_64 -accel tcg,thread=multi -cpu max -smp 2 -m 3072 -nographic -no-reboot -nic none \
        -kernel "$kernel" -initrd "$WORK/initrd" -append "console=ttyS0 panic=-1 quiet swapaccount=0" >"$WORK/said" 2>&1 || true
    echo "Linux $release"
    [ -z "${VERBOSE:-}" ] || grep -a RESULT "$WORK/said"
    expect volume 0 ""
    expect mount 0 ""
    expect files 0 "kept"
    expect names 0 "seen as they are"
    expect umount 0 ""
    IFS=. read -r major minor _ <<<"$release"
    if [ $((major * 1000 + minor)) -lt 5012 ]; then
        for what in root memory processes; do
            expect $what 125 "this kernel is too old for roots: they need Linux 5\.12 or newer, and this is $release"
        done
    else
        expect root 0 "in the root"
        expect memory 0 "bounded"
        expect processes "[0-9]*" "all the 8 processes and threads that it may have"
        expect retries 1 "0"
    fi
done
exit $failed
