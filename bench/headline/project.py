"""A C project that takes as long as it is told: sources that include headers, and a makefile.

    project.py FOLDER TASKS FOLDERS HEADERS MEAN_MS COMPILER

Each source includes 30 of the headers. How long its compiler takes is said in it: from half of the mean to one and a half,
so that tasks end one by one and not in waves.
"""
import os
import random
import sys

folder, compiler = sys.argv[1], sys.argv[6]
tasks, folders, headers, mean = (int(number) for number in sys.argv[2:6])
chance = random.Random(14)
os.makedirs(f"{folder}/include")
for at in range(headers):
    with open(f"{folder}/include/h{at}.h", "w") as file:
        file.write(f"extern int value_{at};\n" * chance.randrange(40, 600))
objects = []
for at in range(tasks):
    part = f"part{at % folders}"
    os.makedirs(f"{folder}/{part}", exist_ok=True)
    with open(f"{folder}/{part}/s{at}.c", "w") as file:
        file.write(f"// takes {chance.randrange(mean // 2, mean * 3 // 2 + 1)} ms\n")
        for header in chance.sample(range(headers), min(30, headers)):
            file.write(f'#include "include/h{header}.h"\n')
        file.write(f"int of_{at}(void) {{ return {at}; }}\n" * chance.randrange(20, 400))
    objects.append(f"{part}/s{at}.o")
with open(f"{folder}/Makefile", "w") as file:
    file.write(f"all: {' '.join(objects)}\n%.o: %.c\n\t{compiler} $@ $<\n")
