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
cat > "$WORK/pjdfstest.toml" <<'TOML'
[features]
posix_fallocate = {}
rename_ctime = {}
utime_now = {}
utimensat = {}

[settings]
naptime = 0.02
allow_remount = false

[dummy_auth]
entries = [["nobody", "nogroup"], ["daemon", "daemon"]]
TOML
mkdir "$WORK/second" && mount -t tmpfs none "$WORK/second" || exit 1
chmod 755 "$WORK"
(cd "$MNT" && "$TOOLS/bin/pjdfstest" -c "$WORK/pjdfstest.toml" -p "$MNT" -s "$WORK/second" "$@") > "$WORK/output" 2>&1
umount "$WORK/second"

failed_cases() { sed -nE 's/^([a-z0-9_:]+)[[:space:]]+FAILED.*/\1/p' "$WORK/output" | sort -u; }
excepted_cases() { sed -E '/^#/d; /^[[:space:]]*$/d; s/[[:space:]].*//' "$EXCEPTIONS" | sort -u; }
ran_cases() { sed -nE 's/^([a-z0-9_:]+)[[:space:]]+(FAILED|ok|skipped).*/\1/p' "$WORK/output" | sort -u; }

cat "$WORK/output"
ran=$(ran_cases | wc -l)
bad=$(comm -23 <(failed_cases) <(excepted_cases))
stale=$(comm -12 <(comm -23 <(excepted_cases) <(failed_cases)) <(ran_cases))
for name in $bad; do echo "fails, and is no exception: $name"; done
for name in $stale; do echo "an exception that does not fail any more: $name"; done
FAILED=$(printf '%s\n%s\n' "$bad" "$stale" | grep -c .)
PASSED=$((ran - FAILED))
[ "$ran" -gt 0 ] || { echo "no case ran"; FAILED=1; PASSED=0; }
report
