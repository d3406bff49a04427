#!/usr/bin/env bash
# Commands of every kind, plain and as tasks by both programs that stand for one: exit codes, signals, and all that they write and read must be
# the same.
#
#   tests/real/farm-tasks.sh [--large]     --large: 1 GB of output, and 2,000 tasks 64 at a time
set -uo pipefail
. "$(dirname "$0")/../lib/farm.sh"
. "$(dirname "$0")/../lib/task-farm.sh"
task_farm "${FARM_PORT:-17996}"
farm_begin || { echo "the farm did not begin"; exit 1; }

cat >"$WORK/tasks.py" <<'PYTHON'
import os, signal, subprocess, sys, time

hayloft, size = sys.argv[1], sys.argv[2]
small = os.path.join(os.path.dirname(hayloft), "hayloft-task")
ways = {"hayloft task": [hayloft, "task", "--farm", "--"]}
if os.path.exists(small):
    ways["hayloft-task"] = [small, "--farm", "--"]
environment, failed = dict(os.environ), 0

def tell(name, is_right, *what):
    global failed
    failed += not is_right
    print("ok     " if is_right else "FAILED ", name, *([] if is_right else what), flush=True)

def same(name, command, plain=None, data=None, env=environment, **how):
    how |= {"input": data} if data is not None else {"stdin": subprocess.DEVNULL}
    run = lambda command: subprocess.run(command, capture_output=True, timeout=120, env=env, **how)
    wanted = run(plain or command)
    for way, before in ways.items():
        # Twice: the second one looks nothing up.
        for _ in range(2):
            found = run(before + command)
            is_same = (found.returncode, found.stdout, found.stderr) == (wanted.returncode, wanted.stdout, wanted.stderr)
            tell(f"{name}, {way}", is_same, wanted.returncode, wanted.stdout[-200:], wanted.stderr[-200:], "but", found.returncode, found.stdout[-200:], found.stderr[-200:])

def ends(name, command, code):
    for way, before in ways.items():
        found = subprocess.run(before + command, capture_output=True, stdin=subprocess.DEVNULL, timeout=60)
        tell(f"{name}, {way}", found.returncode == code and not found.stdout, found)

def write(name, text, mode):
    with open(name, "w") as file:
        file.write(text)
    os.chmod(name, mode)

for code in (0, 1, 7, 125, 126, 127, 255):
    same(f"exit code {code}", ["sh", "-c", f"exit {code}"])
for name in ("KILL", "TERM", "SEGV", "ABRT", "INT", "HUP", "PIPE", "QUIT", "USR1"):
    same(f"ends by {name}", ["sh", "-c", f"kill -{name} $$"])
write("not-executable", "#!/bin/sh\n", 0o644)
write("script", "echo $0 $#\n", 0o755)
write("no-interpreter", "#!/no/such/program\n", 0o755)
os.mkdir("folder")
ends("no such program", ["no-such-program"], 127)
ends("no such file", ["./no-such-file"], 127)
ends("not executable", ["./not-executable"], 126)
ends("a folder", ["./folder"], 126)
ends("no such interpreter", ["./no-interpreter"], 127)
ends("an empty name", [""], 127)
same("a script that names no interpreter", ["./script", "a", "b"], plain=["sh", "./script", "a", "b"])
same("a relative path", ["folder/../script"], plain=["sh", "folder/../script"])
same("closes its outputs and goes on", ["sh", "-c", "echo a; exec >&- 2>&-; sleep 0.3; exit 3"])
same("closes one", ["sh", "-c", "exec >&-; echo error >&2; exit 4"])
same("both outputs, 200,000 lines", ["sh", "-c", "seq 100000; seq 100000 >&2"])
same("10 MB in a line", ["sh", "-c", "head -c 10000000 /dev/zero | tr '\\0' x"])
same("input", ["sha256sum"], data=os.urandom(5_000_000))
same("input that nobody reads", ["true"], data=bytes(1_000_000))
same("input of which the beginning is read", ["head", "-c", "10"], data=bytes(3_000_000))
same("empty input", ["cat"], data=b"")
show = ["sh", "-c", "env | grep -a VARIABLE | sort | od -c | sha256sum"]
same("900 KB of environment", show, env=environment | {f"VARIABLE_{at}": "v" * 1000 for at in range(900)})
same("1.8 MB of environment", show, env=environment | {f"VARIABLE_{at}": "v" * 130_000 for at in range(14)})
same("odd variables", show, env=environment | {"VARIABLE_1": "a\nb", "VARIABLE_2": "", "VARIABLE_3": "\udcff\udcfe="})
same("no PATH", ["/bin/sh", "-c", "command -v ls"], env={name: value for name, value in environment.items() if name != "PATH"})
print_all = ["sh", "-c", "echo $#; printf '%s|' \"$@\" | sha256sum", "sh"]
same("800 KB of arguments", print_all + [f"a{at:06}" for at in range(100_000)])
same("odd arguments", print_all + ["", "a b", "\n", "\udcff*", "'\"", "--"])
for mask in (0o000, 0o077):
    same(f"umask {mask:o}", ["sh", "-c", "umask; rm -f made; touch made; stat -c %a made"], umask=mask)

for name in ("INT", "TERM", "HUP", "QUIT", "USR1"):
    for way, before in ways.items():
        task = subprocess.Popen(before + ["sh", "-c", "echo; exec sleep 60"], stdout=subprocess.PIPE)
        task.stdout.readline()
        begun = time.monotonic()
        task.send_signal(getattr(signal, f"SIG{name}"))
        task.wait(30)
        tell(f"ended by {name}, {way}", task.returncode == -getattr(signal, f"SIG{name}"), task.returncode)
for way, before in ways.items():
    trap = ["sh", "-c", "trap 'echo trapped; exit 9' TERM; echo; while :; do sleep 0.1; done"]
    task = subprocess.Popen(before + trap, stdout=subprocess.PIPE)
    task.stdout.readline()
    task.terminate()
    said = task.communicate(timeout=30)[0]
    tell(f"a signal that is caught, {way}", (task.returncode, said) == (9, b"trapped\n"), task.returncode, said)
    task = subprocess.Popen(before + ["sh", "-c", "sleep 1; echo after"], stdout=subprocess.PIPE)
    time.sleep(0.3)
    task.send_signal(signal.SIGTSTP)
    time.sleep(0.5)
    task.send_signal(signal.SIGCONT)
    said = task.communicate(timeout=30)[0]
    tell(f"stopped, and goes on, {way}", (task.returncode, said) == (0, b"after\n"), task.returncode, said)
    first = subprocess.Popen(before + ["yes"], stdout=subprocess.PIPE)
    first.stdout.readline()
    first.stdout.close()
    tell(f"output that nobody reads any more, {way}", first.wait(30) != 0, first.returncode)

if size == "--large":
    for way, before in ways.items():
        task = subprocess.Popen(before + ["head", "-c", "1000000000", "/dev/zero"], stdout=subprocess.PIPE)
        length = sum(len(part) for part in iter(lambda: task.stdout.read(1 << 20), b""))
        tell(f"1 GB, {way}", (task.wait(), length) == (0, 1_000_000_000), length)
    lines = "".join(f"{at}\n" for at in range(2000))
    for way, before in ways.items():
        many = subprocess.run(["xargs", "-P", "64", "-n", "1", *before, "echo"], input=lines, capture_output=True, text=True)
        numbers = sorted(map(int, many.stdout.split()))
        tell(f"2,000 tasks, 64 at a time, {way}", (many.returncode, numbers) == (0, list(range(2000))), many.returncode, many.stderr[-300:])
print("failed:", failed)
sys.exit(failed != 0)
PYTHON
on_volume python3 "$WORK/tasks.py" "$HAYLOFT" "${1:-}"
