#!/usr/bin/env bash
# git on a volume: clone a repository of thousands of files, find it clean, change it, pack it.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
farm_start

make_origin() {
    git init -q "$WORK/origin" && cd "$WORK/origin" || return 1
    python3 - <<'PY'
import os
for at in range(4000):
    folder = f"src/part{at // 100}/sub{at // 20 % 5}"
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/file{at}.c", "w") as file:
        file.write(f"int number_{at}(void) {{ return {at}; }}\n" * (1 + at * 31 % 120))
PY
    git add . && git -c user.name=test -c user.email=test@localhost commit -qm first
}

clean() { test -z "$(git -C "$MNT/clone" status --porcelain)"; }

clone() { git clone -q --no-hardlinks "$WORK/origin" "$MNT/clone" && test "$(git -C "$MNT/clone" ls-files | wc -l)" = 4000; }

commits() {
    cd "$MNT/clone" || return 1
    for round in 1 2 3; do
        for at in 1 40 700 2500; do echo "/* $round */" >> "$(git ls-files | sed -n "${at}p")"; done
        git -c user.name=test -c user.email=test@localhost commit -qam "round $round" || return 1
    done
    git checkout -q HEAD~2 && git checkout -q - && git log --oneline | wc -l | grep -qx 4
}

pack() { git -C "$MNT/clone" gc -q --aggressive --prune=now && git -C "$MNT/clone" fsck --full --strict; }

worktree() { git -C "$MNT/clone" worktree add -q "$MNT/second" HEAD~1 && test -z "$(git -C "$MNT/second" status --porcelain)"; }

check "a repository of 4,000 files" make_origin
check "clone" clone
check "status is clean" clean
check "commits and checkouts" commits
check "gc and fsck" pack
check "a second work tree" worktree
check "remount" farm_remount
check "status is clean after a remount" clean
check "fsck after a remount" git -C "$MNT/clone" fsck --full
report
