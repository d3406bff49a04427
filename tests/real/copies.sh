#!/usr/bin/env bash
# Copies that keep everything: rsync there and back, tar, cp; compared by names, modes, owners, times, links,
# extended attributes and contents.
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
farm_start

digest() { python3 "$ROOT/tests/lib/digest.py" "$1"; }
same() { diff <(digest "$1") <(digest "$2") | head -n 10; test "${PIPESTATUS[0]}" = 0; }

make_tree() {
    mkdir "$WORK/tree" && cd "$WORK/tree" || return 1
    python3 - <<'PY'
import os, random, stat
random.seed(7)
for at in range(1500):
    folder = f"d{at // 100}/e{at // 10 % 10}"
    os.makedirs(folder, exist_ok=True)
    path = f"{folder}/f{at}"
    with open(path, "wb") as file:
        file.write(random.randbytes(random.choice([0, 1, 100, 4095, 4096, 4097, 20000, 300000 if at % 100 == 0 else 50])))
    os.chmod(path, random.choice([0o644, 0o755, 0o600, 0o444, 0o4755, 0o2755]))
    os.chown(path, random.choice([0, 1000, 65534]), random.choice([0, 100, 2000]))
    if at % 50 == 0:
        os.link(path, f"d{at // 100}/hard{at}")
    if at % 40 == 0:
        os.symlink(f"f{at}", f"{folder}/soft{at}")
    if at % 30 == 0:
        os.setxattr(path, "user.comment", b"value %d" % at)
        os.setxattr(path, "trusted.mark", bytes(range(at % 200)))
    os.utime(path, ns=(at * 10**9 + 5, (at * 977 + 10**9) * 10**9 + at), follow_symlinks=False)
os.mkfifo("fifo")
os.mknod("device", stat.S_IFCHR | 0o600, os.makedev(1, 5))
with open("sparse", "wb") as file:
    file.seek(50 << 20)
    file.write(b"end")
os.symlink("nowhere", "dangling")
os.chmod("d3", 0o2775)
os.chmod("d4", 0o1777)
# rsync takes what is no regular file for unchanged when its time differs by less than a second.
for at, (folder, _, names) in enumerate(os.walk(".", topdown=False)):
    for name in names:
        path = os.path.join(folder, name)
        if not os.path.isfile(path) or os.path.islink(path):
            os.utime(path, ns=(1, (at + 500) * 10**9 + 7), follow_symlinks=False)
    os.utime(folder, ns=(1, (at + 1000) * 10**9 + 123456789))
PY
}

there() { rsync -aHAX --numeric-ids "$WORK/tree/" "$MNT/tree/"; }
back() { rsync -aHAX --numeric-ids "$MNT/tree/" "$WORK/back/"; }
nothing_to_do() { test -z "$(rsync -aHAX --numeric-ids --itemize-changes --dry-run --checksum "$WORK/tree/" "$MNT/tree/")"; }
tar_there() { mkdir "$MNT/tar" && tar -C "$WORK/tree" --xattrs --xattrs-include='*' -cf - . | tar -C "$MNT/tar" --xattrs --xattrs-include='*' -xpf -; }
tar_back() { mkdir "$WORK/tar" && tar -C "$MNT/tree" --xattrs --xattrs-include='*' -cf - . | tar -C "$WORK/tar" --xattrs --xattrs-include='*' -xpf -; }
inside() { cp -a "$MNT/tree" "$MNT/copy"; }
sparse() { test "$(stat -c %b "$MNT/tree/sparse")" -lt 4096 || [ -n "${PLAIN:-}" ]; }

check "a tree of everything" make_tree
check "rsync there" there
check "remount" farm_remount
check "the same there" same "$WORK/tree" "$MNT/tree"
check "rsync back" back
check "the same back" same "$WORK/tree" "$WORK/back"
check "rsync finds nothing to do" nothing_to_do
check "tar with hard links there" tar_there
check "the same by tar" same "$WORK/tree" "$MNT/tar"
check "tar back" tar_back
check "the same by tar back" same "$WORK/tree" "$WORK/tar"
check "cp -a inside" inside
check "remount" farm_remount
check "the same by cp" same "$WORK/tree" "$MNT/copy"
report
