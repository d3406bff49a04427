#!/usr/bin/env bash
# Prepares a Debian 12 or 13 machine that has git and a Rust toolchain: installs system packages and builds
# the release binary. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf '\n== %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null; then sudo "$@"
    else die "system packages need root: run this as root, or install sudo"
    fi
}

# What building, mounting, comparing and testing need.
packages=(
    build-essential pkg-config git ca-certificates curl
    fuse3 bindfs util-linux procps e2fsprogs
    iproute2 attr acl libacl1-dev rsync sqlite3 python3 python3-venv tar xz-utils bzip2 dpkg-dev
    uidmap faketime openssh-client postgresql stress-ng
    nats-server cmake ninja-build
    mmdebstrap dnf createrepo-c erofs-utils squashfs-tools
)

missing() {
    local package
    for package in "${packages[@]}"; do
        dpkg-query -W -f '${Status}\n' "$package" 2>/dev/null | grep -q '^install ok installed' || echo "$package"
    done
}

command -v apt-get >/dev/null || die "this script knows Debian only; install by hand: ${packages[*]}"
mapfile -t wanted < <(missing)
if [ "${#wanted[@]}" -gt 0 ]; then
    say "Installing ${#wanted[@]} system packages: ${wanted[*]}"
    as_root apt-get update -qq
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null
fi

command -v cargo >/dev/null || [ ! -f "$HOME/.cargo/env" ] || . "$HOME/.cargo/env"
command -v cargo >/dev/null || die "no cargo: install a Rust toolchain (rustup, or apt-get install rustup), then run this again"
wanted_rust=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
have_rust=$(rustc --version | cut -d' ' -f2)
printf '%s\n%s\n' "$wanted_rust" "$have_rust" | sort -V -C ||
    die "Rust $wanted_rust or newer is needed, $have_rust is here: rustup update stable"

if [ ! -e /dev/fuse ]; then
    as_root modprobe fuse || true
    [ -e /dev/fuse ] || die "no /dev/fuse: load the kernel module fuse, or give the container that device"
fi
uring=/sys/module/fuse/parameters/enable_uring
if [ -e "$uring" ] && [ "$(cat "$uring")" = N ]; then
    if as_root sh -c "echo Y > $uring" 2>/dev/null; then
        say "Allowed FUSE over io_uring until the next boot (mounts are faster; docs/operations.md: how to keep it)"
    fi
fi

say "Building (release)"
cargo build --release --workspace
say "Ready: target/release/hayloft"
