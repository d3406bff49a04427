#!/usr/bin/env bash
# A real Debian bookworm as base, two of its editors as streams of a module from a catalogue in a volume: made, switched, live in a root that
# runs, and back; made again, to the same tree. With --large two of its compilers, the base made again, too, a play of Ansible as a hook, and
# packages by dnf.
#
#   tests/real/modules.sh [--large]
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
farm_start
LARGE=${1:-}
export HAYLOFT_LAYERS=$WORK/layers HAYLOFT_STATE_DIR=$WORK/state HAYLOFT_MODULES=$MNT HAYLOFT_CONFIG=/dev/null

root() { timeout 1200 "$HAYLOFT" root "$@"; }
run() { timeout 600 "$HAYLOFT" run "$@"; }

if [ "$LARGE" = --large ]; then
    MODULE=gcc OLD=11 NEW=12 OLD_PACKAGE=gcc-11 NEW_PACKAGE=gcc-12 MORE=g++-12
else
    MODULE=editor OLD=ed NEW=nano OLD_PACKAGE=ed NEW_PACKAGE=nano MORE=tree
fi

write_catalogue() {
    mkdir -p "$MNT/modules" &&
        cat >"$MNT/modules/$MODULE.toml" <<TOML &&
description = "A program that there are two of"
default = "$NEW"
[stream.$OLD]
packages = ["$OLD_PACKAGE"]
hooks = ["links.sh"]
[stream.$NEW]
packages = ["$NEW_PACKAGE"]
hooks = ["links.sh"]
[stream.$NEW.profile.full]
packages = ["$MORE"]
TOML
        cat >"$MNT/modules/links.sh" <<'SCRIPT' &&
#!/bin/sh
for name in "$HAYLOFT_MODULE-$HAYLOFT_STREAM" "$HAYLOFT_STREAM"; do
    if test -x "/usr/bin/$name" || test -x "/bin/$name"; then exec ln -sf "$name" "/usr/bin/$HAYLOFT_MODULE"; fi
done
exit 1
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

# STREAM [ROOT]: whether the module's program is the one of this stream.
is_stream() { "${@:2}" "$MODULE" --version | head -1 | grep -qw "$1"; }

make_base() {
    root create base --from debian:bookworm --enable "$MODULE:$NEW/full" && run --root base -- "$MORE" --version >/dev/null
}

works() {
    is_stream "$1" run --root base -- || return 1
    [ "$MODULE" = gcc ] || return 0
    printf 'int main(void) { return 42; }\n' >"$WORK/x.c"
    run --root base --bind "$WORK/x.c:/x.c" -- sh -c "gcc /x.c -o /tmp/x && /tmp/x"
    test $? = 42
}

live() {
    run --root base --keep --name live -- true &&
        root switch base "$MODULE:$OLD" --live &&
        is_stream "$OLD" root enter live -- &&
        ! root enter live -- test -e "/usr/bin/$MORE" &&
        root rollback base --live &&
        is_stream "$NEW" root enter live -- &&
        root enter live -- "$MORE" --version >/dev/null &&
        root rm live
}

upon_it() {
    root layer tools --on base install strace && run --root tools -- strace -V | grep -q strace &&
        ! run --root base -- test -e /usr/bin/strace &&
        run --root tools -- sh -c "dpkg --audit; dpkg-query -W strace $MORE" >/dev/null
}

again() { { [ "$LARGE" != --large ] || root rebuild base; } && root rebuild tools; }

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
check "a base with $MODULE:$NEW/full" make_base
check "its program works" works "$NEW"
check "another stream, live in a root that runs, and back" live
check "packages upon it" upon_it
check "made again to the same tree" again
if [ "$LARGE" = --large ]; then
    check "a play of Ansible as a hook" by_ansible
    check "packages by dnf" by_dnf
fi
report
