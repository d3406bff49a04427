#!/usr/bin/env bash
# The POSIX suite pjdfstest (crates.io) on a mount. A failure fails, unless tests/pjdfstest-exceptions.txt names the
# case with a reason; an exception that passes fails as well, so that the list stays true.
#
#   tests/pjdfstest.sh [PATTERN...]     only cases whose names match
set -uo pipefail
. "$(dirname "$0")/lib/farm.sh"
VERSION=0.2.2
TOOLS=$ROOT/target/tools
EXCEPTIONS=$ROOT/tests/pjdfstest-exceptions.txt

if ! "$TOOLS/bin/pjdfstest" --version 2>/dev/null | grep -q "$VERSION"; then
    cargo install --quiet --locked pjdfstest --version "=$VERSION" --root "$TOOLS" --target-dir "$ROOT/target" || exit 1
fi

farm_start
# Users that every Debian has, so that none must be created.
settings() { # ALLOW_REMOUNT
    cat <<TOML
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}

[settings]
naptime = 0.02
allow_remount = $1

[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
TOML
}
mkdir "$WORK/second" && mount -t tmpfs none "$WORK/second" || exit 1
chmod 755 "$WORK"

suite() { # ALLOW_REMOUNT [PATTERN...]
    settings "$1" > "$WORK/pjdfstest.toml"
    shift
    (cd "$MNT" && "$TOOLS/bin/pjdfstest" -c "$WORK/pjdfstest.toml" -p "$MNT" -s "$WORK/second" "$@") 2>&1
}

# Has mount(8) find our helper for remount, as docs/operations.md has it linked, without a trace on the machine.
with_helper() {
    printf '#!/bin/bash\nexec -a mount.fuse.hayloft "%s" "$@"\n' "$HAYLOFT" > "$WORK/helper"
    chmod 755 "$WORK/helper"
    unshare --mount "$BASH" -c 'mount --bind "$1" "$(realpath /sbin/mount.fuse)" && suite true erofs' - "$WORK/helper"
}

remounts=
suite false "$@" > "$WORK/output"
# The cases of read-only file systems need a process of their own, on any file system: other cases leave files open, with
# which remount says EBUSY. A plain folder's file system is not ours to remount.
if [ $# = 0 ] && [ -z "${PLAIN:-}" ]; then
    remounts=yes
    export -f suite settings
    export WORK MNT TOOLS
    with_helper >> "$WORK/output"
fi
umount "$WORK/second"

failed_cases() { sed -nE 's/^([a-z0-9_:]+)[[:space:]]+FAILED.*/\1/p' "$WORK/output" | sort -u; }
excepted_cases() { sed -E '/^#/d; /^[[:space:]]*$/d; s/[[:space:]].*//' "$EXCEPTIONS" | sort -u; }
# What is skipped in one run may be done in the other. Where remounts are made, their cases must not be skipped.
not_done() { comm -23 <(ran_cases) <(sed -nE 's/^([a-z0-9_:]+)[[:space:]]+(FAILED|ok).*/\1/p' "$WORK/output" | sort -u); }
ran_cases() { sed -nE 's/^([a-z0-9_:]+)[[:space:]]+(FAILED|ok|skipped).*/\1/p' "$WORK/output" | sort -u; }
missed_cases() { [ -z "$remounts" ] || not_done | grep erofs; }
skipped_cases() { comm -23 <(not_done) <(missed_cases); }

cat "$WORK/output"
ran=$(ran_cases | wc -l)
skipped=$(skipped_cases | wc -l)
bad=$(comm -23 <(failed_cases) <(excepted_cases))
stale=$(comm -12 <(comm -23 <(excepted_cases) <(failed_cases)) <(ran_cases))
for name in $bad; do echo "fails, and is no exception: $name"; done
for name in $(missed_cases); do echo "skipped, though the mount can be remounted: $name"; done
for name in $stale; do echo "an exception that does not fail any more: $name"; done
FAILED=$(printf '%s\n%s\n%s\n' "$bad" "$stale" "$(missed_cases)" | grep -c .)
PASSED=$((ran - skipped - FAILED))
echo "$skipped skipped by the suite; tests/pjdfstest-exceptions.txt says why"
[ "$ran" -gt 0 ] || { echo "no case ran"; FAILED=1; PASSED=0; }
report
