#!/usr/bin/env bash
# Two versions of hayloft: an older one against this one, in both directions, on a real mount and on a store that the older one wrote.
# Each combination works, or says in words why it does not, and nothing is lost. As root.
#   tests/real/upgrades.sh              this version against itself: what every version has to pass
#   tests/real/upgrades.sh --large      the newest revision of git with another protocol, which is built first (some minutes)
#   tests/real/upgrades.sh REVISION     another revision
#   OLD=PATH tests/real/upgrades.sh     a program that is there already
# OLD_TARGET keeps what is built, for the next time. TWO_AGES: how many seconds mounts of both versions work in one directory.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
NEW=$HAYLOFT
REVISION=${1:-}
TWO_AGES=${TWO_AGES:-8} # seconds
WORK=$(mktemp -d "${TMPDIR:-/var/tmp}/hayloft-test-XXXXXX")
MNT=$WORK/mnt
mkdir "$MNT"
SERVER=
over() {
    local status=$?
    local mnt
    for mnt in "$MNT" "$WORK/other"; do
        mountpoint -q "$mnt" && { umount "$mnt" || umount -l "$mnt"; }
    done
    stop_server
    if [ "$FAILED" != 0 ]; then tail -n 20 "$WORK"/*.log; fi
    rm -rf "$WORK"
    exit "$status"
}
trap over EXIT

protocol_of() { git -C "$ROOT" show "$1:crates/wire/src/lib.rs" 2>/dev/null | sed -n 's/^pub const PROTOCOL: u32 = \([0-9]*\);/\1/p'; }

# The newest revision that speaks another protocol than this tree.
revision_before() {
    local now revision
    now=$(sed -n 's/^pub const PROTOCOL: u32 = \([0-9]*\);/\1/p' "$ROOT/crates/wire/src/lib.rs")
    for revision in $(git -C "$ROOT" log --format=%h -- crates/wire/src/lib.rs); do
        [ "$(protocol_of "$revision")" = "$now" ] || { echo "$revision"; return; }
    done
}

build() {
    local revision=$1 target=${OLD_TARGET:-$WORK/target}
    mkdir "$WORK/source"
    git -C "$ROOT" archive "$revision" | tar x -C "$WORK/source" || return 1
    echo "builds hayloft of $revision (protocol $(protocol_of "$revision"))"
    (cd "$WORK/source" && CARGO_TARGET_DIR=$target nice cargo build --quiet --package hayloft) || return 1
    cp "$target/debug/hayloft" "$WORK/old"
}

# serve PROGRAM STORE: starts a server; its words are in serve.log.
serve() {
    : >"$WORK/serve.out"
    setsid "$1" serve --config /dev/null --store "file://$2" --listen 127.0.0.1:0 >"$WORK/serve.out" 2>"$WORK/serve.log" &
    SERVER=$!
    until [ -s "$WORK/serve.out" ]; do
        kill -0 $SERVER 2>/dev/null || return 1
        sleep 0.05
    done
    ADDRESS=$(awk '{ print $NF }' "$WORK/serve.out")
}

stop_server() {
    [ -n "$SERVER" ] || return 0
    kill -TERM "$SERVER" 2>/dev/null
    wait "$SERVER" 2>/dev/null
    SERVER=
}

# mount_with PROGRAM: its words are in mount.out.
mount_with() { timeout 60 "$1" mount "$ADDRESS/v" "$MNT" --config /dev/null --log-dir "$WORK" >"$WORK/mount.out" 2>&1; }

leave() { timeout 60 "$1" umount "$MNT"; }

# One sentence for people: it names hayloft, a format or a protocol, and there is no trace of a crash.
says_why() {
    cat "$1"
    ! grep -q 'panicked\|Backtrace' "$1" && grep -qi 'older\|newer\|format\|protocol\|install\|earlier\|version' "$1"
}

write_tree() {
    mkdir -p "$MNT/dir" && head -c 300000 /dev/urandom >"$MNT/dir/large" && echo small >"$MNT/dir/small" && ln "$MNT/dir/small" "$MNT/second" &&
        (cd "$MNT" && find . -type f -exec sha256sum {} + | sort -k 2) >"$WORK/sums"
}

tree_is_there() { (cd "$MNT" && sha256sum --quiet -c "$WORK/sums"); }

# SERVER CLIENT: a mount works, or says why.
works_or_says_why() {
    if mount_with "$2"; then
        echo "works" && { [ -e "$WORK/sums" ] && tree_is_there || write_tree; } && echo more >"$MNT/more" && leave "$2"
    else
        says_why "$WORK/mount.out"
    fi
}

# serve_again PROGRAM STORE: as serve, at the address that there was.
serve_again() {
    setsid "$1" serve --config /dev/null --store "file://$2" --listen "$ADDRESS" >"$WORK/serve.out" 2>"$WORK/serve.log" &
    SERVER=$!
}

goes_on() { timeout 60 sh -c "echo after >'$MNT/after' && sync '$MNT/after' && cat '$MNT/before'"; }

# A mount runs while its server is exchanged for one of the other version: it goes on, or says in its log why it waits, and goes on when the
# server is set back.
outlives_exchange() {
    local from=$1 to=$2 status
    rm -f "$WORK"/mount-*.log
    serve "$from" "$WORK/exchanged" || return 1
    "$from" volume create v --server "$ADDRESS" --config /dev/null >/dev/null
    mount_with "$from" || return 1
    echo before >"$MNT/before"
    sync "$MNT/before"
    stop_server
    cp -a "$WORK/exchanged" "$WORK/copy"
    serve_again "$to" "$WORK/exchanged"
    goes_on
    status=$?
    if [ $status != 0 ]; then
        cat "$WORK"/mount-*.log >"$WORK/waits.out"
        stop_server
        serve_again "$from" "$WORK/copy"
        says_why "$WORK/waits.out" && goes_on
        status=$?
    fi
    leave "$from" || status=1
    stop_server
    rm -rf "$WORK/exchanged" "$WORK/copy"
    return $status
}

# Hosts of both versions in one directory, which is split meanwhile (docs/sharing.md): each sees what the other one has done.
split_so_far() {
    "$NEW" stats "$ADDRESS" --json --config /dev/null | grep -o '"directories_split": *[0-9]*' | grep -o '[0-9]*$' | sort -n | tail -n 1
}
two_ages() {
    local server=$1 status=0
    serve "$server" "$WORK/ages" || return 1
    "$server" volume create v --server "$ADDRESS" --config /dev/null >/dev/null || return 1
    mkdir -p "$WORK/other"
    if ! timeout 60 "$OLD" mount "$ADDRESS/v" "$WORK/other" --config /dev/null --log-dir "$WORK" >"$WORK/mount.out" 2>&1; then
        says_why "$WORK/mount.out" && stop_server
        return
    fi
    if mount_with "$NEW"; then
        mkdir "$MNT/dir" && timeout $((TWO_AGES + 120)) python3 "$ROOT/tests/lib/two-ages.py" "$MNT/dir" "$WORK/other/dir" "$TWO_AGES" || status=1
        echo "split $(split_so_far) times"
        [ "$(split_so_far)" != 0 ] || status=1
        leave "$NEW" || status=1
    else
        says_why "$WORK/mount.out" || status=1
    fi
    timeout 60 "$OLD" umount "$WORK/other" || status=1
    "$server" volume check v --content --server "$ADDRESS" --config /dev/null || status=1
    stop_server
    rm -rf "$WORK/ages"
    return $status
}

case $REVISION in
    '') cp "${OLD:-$NEW}" "$WORK/old" ;;
    --large) build "$(revision_before)" || exit 1 ;;
    *) build "$REVISION" || exit 1 ;;
esac
OLD=$WORK/old

serve "$OLD" "$WORK/store" || { cat "$WORK/serve.log"; exit 1; }
"$OLD" volume create v --server "$ADDRESS" --config /dev/null >/dev/null || exit 1
check "older server, older mount" works_or_says_why "$OLD" "$OLD"
check "older server, newer mount" works_or_says_why "$OLD" "$NEW"
"$NEW" volume list --server "$ADDRESS" --config /dev/null >"$WORK/list.out" 2>&1 && listed=0 || listed=$?
newer_administers() { [ "$listed" = 0 ] || says_why "$WORK/list.out"; }
check "older server, newer administration" newer_administers
stop_server

cp -a "$WORK/store" "$WORK/kept"
newer_opens() {
    serve "$NEW" "$WORK/store" || { says_why "$WORK/serve.log"; return; }
    works_or_says_why "$NEW" "$NEW" && "$NEW" volume check v --content --server "$ADDRESS" --config /dev/null
}
check "the older one's store, newer server and mount" newer_opens
check "newer server, older mount" works_or_says_why "$NEW" "$OLD"
stop_server

# The way back: refused in words, and left alone; or it works.
older_opens() {
    cp -a "$WORK/store" "$WORK/back"
    serve "$OLD" "$WORK/back" || { says_why "$WORK/serve.log"; return; }
    # A version from before there were formats takes what is newer for damaged, and leaves it alone.
    if mount_with "$OLD"; then tree_is_there && leave "$OLD"; else says_why "$WORK/mount.out" || grep -qi damaged "$WORK/mount.out"; fi
}
check "the newer one's store, older server" older_opens
stop_server
newer_opens_again() {
    serve "$NEW" "$WORK/back" && mount_with "$NEW" && tree_is_there && leave "$NEW"
}
check "after that, newer server again" newer_opens_again
stop_server
kept_is_kept() { serve "$OLD" "$WORK/kept" && mount_with "$OLD" && tree_is_there && leave "$OLD"; }
check "the copy that was kept, older server" kept_is_kept
stop_server

check "an older mount outlives the exchange of its server" outlives_exchange "$OLD" "$NEW"
check "a newer mount outlives the exchange of its server" outlives_exchange "$NEW" "$OLD"
check "a newer server, an older and a newer mount in one directory" two_ages "$NEW"
check "an older server, an older and a newer mount in one directory" two_ages "$OLD"
report
