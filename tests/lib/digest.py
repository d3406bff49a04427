#!/usr/bin/env python3
"""Prints one line for each file below a folder: everything about it that a copy has to keep.

Names, types, modes, owners, modification times in nanoseconds, link groups, device numbers, link targets,
extended attributes, and a hash of the contents. Two trees are the same when their digests are.
"""

import hashlib
import os
import stat
import sys


def attributes(path):
    names = sorted(os.listxattr(path, follow_symlinks=False))
    return [(name, os.getxattr(path, name, follow_symlinks=False).hex()) for name in names]


def content(path, info):
    if stat.S_ISLNK(info.st_mode):
        return os.readlink(path)
    if stat.S_ISREG(info.st_mode):
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") \
                else hashlib.sha256(file.read()).hexdigest()
    if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
        return f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
    return ""


def walk(top):
    for folder, folders, files in os.walk(top):
        folders.sort()
        for name in sorted(folders + files):
            yield os.path.join(folder, name)


def main(top):
    os.chdir(top)
    first_name = {}
    for path in sorted(walk(".")):
        info = os.lstat(path)
        directory = stat.S_ISDIR(info.st_mode)
        group = first_name.setdefault((info.st_dev, info.st_ino), path)
        print(
            path, oct(info.st_mode), info.st_uid, info.st_gid, info.st_mtime_ns,
            "" if directory else info.st_size, 0 if directory else info.st_nlink, group,
            attributes(path), content(path, info),
        )


main(sys.argv[1])
