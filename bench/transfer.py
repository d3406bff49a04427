"""Data and a web server for transfer.sh: `index|root|source OLD NEW SIZE` makes two states of a tree; `serve DIR` serves DIR:
it prints its port, then at each SIGUSR1 how many bytes of bodies and how many requests there were."""
import os
import random
import re
import shutil
import signal
import socketserver
import subprocess
import sys

rng = random.Random(7)


def hexadecimal(digits):
    return f"{rng.getrandbits(4 * digits):0{digits}x}"


def renewed(stanza):
    # What a new build of a package changes in its stanza.
    stanza = re.sub(r"(?m)^(Version: .*?)(\+b\d+)?$", lambda it: f"{it[1]}+b{rng.randrange(1, 10)}", stanza, count=1)
    stanza = re.sub(r"(?m)^(Size: ).*$", lambda it: f"{it[1]}{rng.randrange(1000, 9999999)}", stanza)
    return re.sub(r"(?m)^((?:MD5sum|SHA256): )(.+)$", lambda it: it[1] + hexadecimal(len(it[2])), stanza)


def stanzas():
    helper, lists = "/usr/lib/apt/apt-helper", "/var/lib/apt/lists"
    found = [f"{lists}/{name}" for name in os.listdir(lists) if "_Packages" in name] if os.path.exists(helper) else []
    if found:
        command = [helper, "cat-file", max(found, key=os.path.getsize)]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip().split("\n\n")
    words = [hexadecimal(rng.randrange(2, 10)) for _ in range(5000)]
    text = "Package: p{0}\nVersion: 1.{0}-1\nSize: 1\nSHA256: {1}\nDescription: {2}"
    return [text.format(n, hexadecimal(64), " ".join(rng.choices(words, k=60))) for n in range(60000)]


def index(old, new, size):
    known, out, length = stanzas(), [], 0
    while length < size:
        # The second time round they are other packages: no two stanzas are alike.
        stanza = known[len(out) % len(known)]
        out.append(stanza if len(out) < len(known) else renewed(stanza).replace("Package: ", "Package: next-", 1))
        length += len(out[-1].encode()) + 2
    write(old + "/Packages", "\n\n".join(out).encode())
    for at in rng.sample(range(len(out)), len(out) // 100):
        out[at] = renewed(out[at])
    for _ in range(max(2, len(out) // 5000)):
        del out[rng.randrange(len(out))]
        out.insert(rng.randrange(len(out)), renewed(rng.choice(out)).replace("Package: ", "Package: new-", 1))
    write(new + "/Packages", "\n\n".join(out).encode())


def write(path, content):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "wb") as file:
        file.write(content)


def edited(content):
    if b"\0" not in content:
        lines = content.split(b"\n")
        for _ in range(rng.randrange(1, 5)):
            lines.insert(rng.randrange(len(lines)), b"/* " + hexadecimal(40).encode() + b" */")
        return b"\n".join(lines)
    # As a program that is linked anew: code is inserted, and addresses differ all over.
    changed, cut = bytearray(content), len(content) // 3
    for at in range(0, len(changed) - 4, 1500):
        changed[at + rng.randrange(4)] = rng.randrange(256)
    return bytes(changed[:cut]) + rng.randbytes(200) + bytes(changed[cut:])


def files_below(tops, seen, largest=16 << 20):
    for top in tops:
        for folder, folders, names in os.walk(top):
            folders.sort()
            for path in (os.path.join(folder, name) for name in sorted(names)):
                stat = os.lstat(path)
                # A hard link would be a second file in the copy.
                if (os.path.isfile(path) or os.path.islink(path)) and stat.st_size <= largest and stat.st_ino not in seen:
                    seen.add(stat.st_ino)
                    yield path, stat.st_size


def place(path, top, below=""):
    to = top + "/" + path[len(below):].lstrip("/")
    os.makedirs(os.path.dirname(to), exist_ok=True)
    shutil.copy2(path, to, follow_symlinks=False)


def tree(tops, old, new, most, share, bytes_left=800_000_000):
    later, found = most // 200, []
    for path, size in files_below(tops, set()):
        if size <= bytes_left and len(found) < most + later:
            found.append(path)
            bytes_left -= size
    for path in found[:-later]:
        place(path, old)
    subprocess.run(["cp", "-a", old, new], check=True)
    plain = [path for path in found[:-later] if not os.path.islink(path)]
    chosen = rng.sample(plain, int(len(plain) * share) + later)
    for path in chosen[later:]:
        with open(path, "rb") as file:
            write(new + path, edited(file.read()))
    for path in chosen[:later]:
        os.unlink(new + path)
    for path in found[-later:]:
        place(path, new)


def source(old, new, most):
    # What cargo update does to a vendor folder: crates that the registry has in two versions of the same series.
    registry, crates, count = os.path.expanduser("~/.cargo/registry/src"), {}, 0
    for at in sorted(os.listdir(registry)) if os.path.isdir(registry) else []:
        for it in filter(None, (re.fullmatch(r"(.+?)-(\d+)\.(\d+)\.(\d+)", name) for name in os.listdir(f"{registry}/{at}"))):
            numbers = tuple(map(int, it.group(2, 3, 4)))
            crates.setdefault((it[1], numbers[0] or numbers[1] / 1e6), []).append((numbers, f"{registry}/{at}/{it[0]}"))
    pairs = {crate: sorted(versions) for crate, versions in crates.items() if len(versions) > 1}
    if len(pairs) < 10:
        return tree(["/usr/include", "/usr/share"], old, new, most, 0.2)
    for crate, versions in sorted(pairs.items()):
        for which, top in ((versions[0][1], old), (versions[-1][1], new)):
            for path, _ in files_below([which], set()) if count < most else ():
                place(path, f"{top}/{crate[0]}-{crate[1]}", which)
                count += which == versions[-1][1]


class Handler(socketserver.StreamRequestHandler):
    """HTTP/1.1 with ranges. It does little else, so that it is not what is measured."""
    disable_nagle_algorithm, sent = True, []

    def handle(self):
        while len(line := self.rfile.readline().split()) == 3:
            span = None
            while header := self.rfile.readline().strip():
                span = re.fullmatch(rb"(?i)range: *bytes=(\d+)-(\d*)", header) or span
            path = os.path.normpath(line[1].decode()).lstrip("/")
            status, head, body = "404 Not Found", "", b""
            if ".." not in path and os.path.isfile(path):
                size = os.path.getsize(path)
                begin, end = (int(span[1]), min(int(span[2] or size), size - 1) + 1) if span else (0, size)
                status = "206 Partial Content" if span else "200 OK"
                head = f"Content-Range: bytes {begin}-{end - 1}/{size}\r\n" if span else ""
                with open(path, "rb") as file:
                    file.seek(begin)
                    body = file.read(end - begin)
            head = f"HTTP/1.1 {status}\r\n{head}Accept-Ranges: bytes\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            body = body if line[0] == b"GET" else b""
            Handler.sent.append(len(body))
            self.request.sendall(head + body)


def serve(folder):
    socketserver.ThreadingTCPServer.daemon_threads, socketserver.ThreadingTCPServer.request_queue_size = True, 128
    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    signal.signal(signal.SIGUSR1, lambda *_: print(sum(Handler.sent), len(Handler.sent), flush=True))
    os.chdir(folder)
    print(server.server_address[1], flush=True)
    server.serve_forever()


PARTS = [f"/usr/{folder}" for folder in ("include", "lib/gcc", "lib/x86_64-linux-gnu", "lib/python3", "lib/python3.11", "share", "lib")]
if sys.argv[1] == "serve":
    serve(sys.argv[2])
elif sys.argv[1] == "root":
    tree(PARTS, sys.argv[2], sys.argv[3], int(sys.argv[4]), 0.04)
else:
    {"index": index, "source": source}[sys.argv[1]](sys.argv[2], sys.argv[3], int(sys.argv[4]))
