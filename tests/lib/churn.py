#!/usr/bin/env python3
"""A build in a tree of its own: unpacks sources, compiles them as a compiler uses a file system, links, checks
everything, and deletes it all.

    churn.py TARBALL FOLDER ROUNDS

FOLDER is made, and gone at the end. Prints how many calls it made that change something.
"""

import os
import shutil
import subprocess
import sys
import zlib


def compile_one(source, headers):
    """Reads a source and its headers, writes an object in pieces and out of order, renames it into place."""
    text = open(source, "rb").read()
    for header in headers:
        text += open(header, "rb").read()
        # An include path: names that are not there come first.
        assert not os.path.exists(os.path.join(os.path.dirname(source), os.path.basename(header)))
    product = source[:-2] + ".o"
    temporary = product + ".tmp"
    with open(temporary, "wb") as file:
        file.truncate(len(text))
        half = len(text) // 2
        file.seek(half)
        file.write(text[half:])
        file.seek(0)
        file.write(text[:half])
    os.chmod(temporary, 0o755)
    os.rename(temporary, product)
    with open(source[:-2] + ".d", "w") as file:
        file.write(f"{product}: {source} {' '.join(headers)}\n")
    # Open, truncate, two writes, chmod, rename; open, write.
    return 8, product, zlib.crc32(text)


def build(tarball, top):
    subprocess.run(["tar", "-xf", tarball, "-C", top], check=True)
    found = sorted(os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names)
    headers = [path for path in found if path.endswith(".h")]
    products, changes = {}, 3 * len(found)
    for source in [path for path in found if path.endswith(".c")]:
        count, product, crc = compile_one(source, headers)
        changes += count
        products[product] = crc
    with open(f"{top}/program", "wb") as program:
        for product in products:
            program.write(open(product, "rb").read())
    for product, crc in products.items():
        assert zlib.crc32(open(product, "rb").read()) == crc, product
        assert os.stat(product).st_mtime_ns >= os.stat(product[:-2] + ".c").st_mtime_ns, product
    there = sorted(os.path.join(folder, name) for folder, _, names in os.walk(top) for name in names)
    expected = sorted(found + [f"{top}/program"] + list(products) + [path[:-2] + ".d" for path in products])
    assert there == expected, set(there) ^ set(expected)
    return changes + len(there)


def main(tarball, top, rounds):
    changes = 0
    for _ in range(int(rounds)):
        os.mkdir(top)
        changes += build(tarball, top)
        shutil.rmtree(top)
        assert not os.path.exists(top)
    print(changes)


main(*sys.argv[1:])
