"""Makes and changes trees for versions.sh: `tree DIR FILES` and `change DIR COUNT TEXT`."""
import os
import sys


def tree(top, files):
    # A hundred files a folder, 500 to 4,500 bytes each, as objects and sources are.
    text = os.urandom(4500)
    for number in range(files):
        folder = f"{top}/{number // 10000}/{number // 100 % 100}"
        if number % 100 == 0:
            os.makedirs(folder, exist_ok=True)
        file = os.open(f"{folder}/{number}.c", os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(file, str(number).encode() + text[: 500 + number * 7919 % 4000])
        os.close(file)


def change(top, count, text):
    # Spread over the whole tree.
    folders = [f"{top}/{a}/{b}" for a in os.listdir(top) if a.isdigit() for b in os.listdir(f"{top}/{a}")]
    for number in range(count):
        folder = folders[number * len(folders) // count]
        name = sorted(os.listdir(folder))[0]
        with open(f"{folder}/{name}", "w") as file:
            file.write(f"{text} {number}\n")


if sys.argv[1] == "tree":
    tree(sys.argv[2], int(sys.argv[3]))
else:
    change(sys.argv[2], int(sys.argv[3]), sys.argv[4])
