#!/usr/bin/env bash
# A real Debian bookworm as base, its compilers as streams of a module from a catalogue in a volume: made, switched, live in a root that runs,
# and back; made again, to the same tree. With --large also a play of Ansible as a hook, and packages by dnf.
#
#   tests/real/modules.sh [--large]
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
farm_start
LARGE=${1:-}
export HAYLOFT_LAYERS=$WORK/layers HAYLOFT_STATE_DIR=$WORK/state HAYLOFT_MODULES=$MNT HAYLOFT_CONFIG=/dev/null

root() { timeout 1200 "$HAYLOFT" root "$@"; }
run() { timeout 600 "$HAYLOFT" run "$@"; }

write_catalogue() {
    mkdir -p "$MNT/modules" &&
        cat >"$MNT/modules/gcc.toml" <<'TOML' &&
description = "The GNU C compiler"
default = "12"
[stream.11]
packages = ["gcc-11"]
hooks = ["links.sh"]
[stream.12]
packages = ["gcc-12"]
hooks = ["links.sh"]
[stream.12.profile.full]
packages = ["g++-12"]
TOML
        cat >"$MNT/modules/links.sh" <<'SCRIPT' &&
#!/bin/sh
exec ln -sf "gcc-$HAYLOFT_STREAM" /usr/bin/gcc
SCRIPT
        cat >"$MNT/modules/greeting.toml" <<'TOML' &&
description = "A file that Ansible writes"
[stream.1]
packages = ["ansible-core"]
hooks = [{ ansible = "greeting.yml" }]
[stream.2]
hooks = [{ ansible = "greeting.yml" }]
TOML
        cat >"$MNT/modules/greeting.yml" <<'YAML'
- hosts: all
  gather_facts: false
  tasks:
    - copy: { dest: /etc/greeting, content: "hello from a play\n", mode: "0640" }
YAML
}

make_base() {
    root create base --from debian:bookworm --enable gcc:12/full && run --root base -- g++-12 --version | grep -q ' 12\.'
}

compiles() {
    printf 'int main(void) { return 42; }\n' >"$WORK/x.c"
    run --root base --bind "$WORK/x.c:/x.c" -- sh -c "gcc --version | grep -q ' $1\\.' && gcc /x.c -o /tmp/x && /tmp/x"
    test $? = 42
}

live() {
    run --root base --keep --name live -- true &&
        root switch base gcc:11 --live &&
        root enter live -- gcc --version | grep -q ' 11\.' &&
        ! root enter live -- test -e /usr/bin/g++-12 &&
        root rollback base --live &&
        root enter live -- g++-12 --version | grep -q ' 12\.' &&
        root rm live
}

upon_it() {
    root layer tools --on base install strace && run --root tools -- strace -V | grep -q strace &&
        ! run --root base -- test -e /usr/bin/strace &&
        run --root tools -- sh -c 'dpkg --audit; dpkg-query -W strace g++-12' >/dev/null
}

again() { root rebuild base && root rebuild tools; }

by_ansible() {
    root create greeted --on base --enable greeting:1 && test "$(run --root greeted -- cat /etc/greeting)" = "hello from a play" &&
        root rebuild greeted &&
        { root create lacking --on base --enable greeting:2 2>"$WORK/said"; test $? = 7; } && grep -q ansible-core "$WORK/said"
}

# A base whose packages are rpm's: this Debian with dnf, and its own record of packages gone.
by_dnf() {
    mkdir -p "$WORK/rpms" && cat >"$WORK/x.spec" <<'SPEC' &&
Name: hayloft-try
Version: 1
Release: 1
Summary: x
License: x
BuildArch: noarch
%description
x
%install
mkdir -p %{buildroot}/usr/share
echo one >%{buildroot}/usr/share/tried
%files
/usr/share/tried
SPEC
        root layer with-dnf --on base install dnf rpm &&
        run --root with-dnf --bind "$WORK/x.spec:/x.spec" --collect '/build/RPMS/noarch/*.rpm' --output "$WORK/rpms" -- \
            rpmbuild -bb --define '_topdir /build' /x.spec >"$WORK/rpmbuild.log" 2>&1 &&
        createrepo_c -q "$WORK/rpms" &&
        run --root with-dnf --publish "$WORK:fedora-like" --as-layer -- sh -c \
            "rm /var/lib/dpkg/status; mkdir -p /etc/yum.repos.d; printf '[try]\nname=try\nbaseurl=file://$WORK/rpms\ngpgcheck=0\n' >/etc/yum.repos.d/try.repo" &&
        root create rpm-base --on with-dnf --modules "$WORK/rpm-modules" --enable base:1 &&
        root layer tried --on rpm-base install hayloft-try --repository "$WORK/rpms" &&
        test "$(run --root tried -- cat /usr/share/tried)" = one &&
        root history tried --json | grep -q '"name": "hayloft-try"' &&
        root rebuild tried &&
        { root layer tried install hayloft-none 2>"$WORK/said"; test $? = 4; } && grep -q hayloft-none "$WORK/said"
}
mkdir -p "$WORK/rpm-modules"
printf 'description = "x"\n[stream.1]\nlayers = ["%s"]\n' "$WORK/fedora-like" >"$WORK/rpm-modules/base.toml"

check "a catalogue in a volume" write_catalogue
check "a base with gcc:12/full" make_base
check "its compiler works" compiles 12
check "another stream, live in a root that runs, and back" live
check "packages upon it" upon_it
check "made again to the same tree" again
if [ "$LARGE" = --large ]; then
    check "a play of Ansible as a hook" by_ansible
    check "packages by dnf" by_dnf
fi
report
