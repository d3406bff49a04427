#!/usr/bin/env python3
"""Two hosts make, rename, list and remove names in one directory, and look at each other's work all the time.

    two-ages.py FOLDER FOLDER SECONDS [SEED]

The folders are one directory as two mounts have it. Four processes work in it, two on each. What one has done when the call has
returned, it looks for by the other mount: its own names, their contents, and listings. Names that all want are taken by one at a
time. In the end both mounts have to show the same, and nothing that nobody made. Ends with 0 if all of that was so.
"""
import os
import random
import sys
import time
from multiprocessing import Process, Queue

WANTED = 40
# Seconds: what is listed all the time is not split.
LISTED_EVERY = 3


def work(number, own, other, until, seed, done):
    try:
        done.put((number, *Worker(number, own, other, seed).run(until), None))
    except Exception as error:  # whatever it is, the test has failed
        done.put((number, {}, 0, f"{type(error).__name__}: {error}"))


class Worker:
    def __init__(self, number, own, other, seed):
        self.number, self.own, self.other = number, own, other
        self.random = random.Random(seed * 1000 + number)
        self.mine = {}  # name -> content
        self.made = 0

    def run(self, until):
        steps, listed = 0, time.monotonic()
        while time.monotonic() < until:
            if time.monotonic() > listed + LISTED_EVERY:
                self.list()
                listed = time.monotonic()
            pick = self.random.random()
            if pick < 0.45 or not self.mine:
                self.make()
            elif pick < 0.70:
                self.rename()
            elif pick < 0.90:
                self.remove()
            else:
                self.want()
            steps += 1
        self.list()
        return self.mine, steps

    def fresh(self):
        self.made += 1
        return f"w{self.number}-{self.made}"

    def make(self):
        name, content = self.fresh(), f"{self.number} {self.made} {self.random.random()}"
        assert not os.path.exists(f"{self.other}/{name}")
        with open(f"{self.own}/{name}", "x") as file:
            file.write(content)
        self.mine[name] = content
        self.look(name)

    def rename(self):
        old, new = self.random.choice(list(self.mine)), self.fresh()
        side = self.random.choice((self.own, self.other))
        os.rename(f"{side}/{old}", f"{side}/{new}")
        self.mine[new] = self.mine.pop(old)
        self.look(new)
        self.is_gone(old)

    def remove(self):
        name = self.random.choice(list(self.mine))
        os.unlink(f"{self.random.choice((self.own, self.other))}/{name}")
        del self.mine[name]
        self.is_gone(name)

    def want(self):
        """A name that all want: who makes it has it, until he removes it."""
        name = f"wanted-{self.random.randrange(WANTED)}"
        try:
            handle = os.open(f"{self.own}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(handle, str(self.number).encode())
        os.close(handle)
        with open(f"{self.other}/{name}") as file:
            found = file.read()
        assert found == str(self.number), f"{name} is {found!r} where {self.number} has made it"
        os.unlink(f"{self.own}/{name}")

    def look(self, name):
        with open(f"{self.other}/{name}") as file:
            found = file.read()
        assert found == self.mine[name], f"{name} is {found!r}, not {self.mine[name]!r}"

    def is_gone(self, name):
        for side in (self.own, self.other):
            assert not os.path.exists(f"{side}/{name}"), f"{name} is there still in {side}"

    def list(self):
        for side in (self.own, self.other):
            found = [name for name in os.listdir(side) if name.startswith(f"w{self.number}-")]
            assert sorted(found) == sorted(self.mine), f"{side} lists {set(found) ^ set(self.mine)} wrongly"


def content(path):
    with open(path) as file:
        return file.read()


def main():
    one, two, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
    seed = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    done, until = Queue(), time.monotonic() + seconds
    sides = [(one, two), (two, one), (one, two), (two, one)]
    workers = [Process(target=work, args=(at, *side, until, seed, done)) for at, side in enumerate(sides)]
    for worker in workers:
        worker.start()
    ended = [done.get() for _ in workers]
    for worker in workers:
        worker.join()
    wrong = [f"worker {number}: {said}" for number, _, _, said in ended if said]
    wanted = {name: content for _, mine, _, _ in ended for name, content in mine.items()}
    for side in (one, two):
        found = {name: content(f"{side}/{name}") for name in os.listdir(side)}
        if not wrong and found != wanted:
            wrong.append(f"{side} shows {sorted(set(found.items()) ^ set(wanted.items()))[:5]} wrongly")
    print(f"{sum(steps for _, _, steps, _ in ended)} steps, {len(wanted)} names in the end")
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
