//! Many processes on several mounts that change one directory, or append to one file, at the same time.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::setup::farm::{Farm, Mount, number, python, rounds, run, seed, sh};
use crate::setup::model::Random;

/// Makes, links, renames and removes names of its own, moves tokens that all move, and makes and removes names
/// that all do. Prints what is left of its own and how often it made and removed each of the common ones.
const CHANGER: &str = r#"
import json, os, random, sys
top, me, rounds, seed, tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
random.seed(seed)
os.chdir(top)
own, dirs, serial = {}, set(), 0
common = [[0, 0] for _ in range(5)]

def new(kind):
    global serial
    serial += 1
    return f"{kind}-{me}-{serial}"

def make(name, text):
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    os.write(fd, text.encode())
    os.close(fd)

def tried(call, *args):
    try:
        call(*args)
        return True
    except (FileNotFoundError, FileExistsError):
        return False

for at in range(rounds):
    choice = random.randrange(12)
    name = random.choice(list(own)) if own else None
    if choice <= 2 or name is None:
        to = new("f")
        make(to, to)
        own[to] = to
    elif choice == 3:
        os.unlink(name)
        del own[name]
        assert not os.path.lexists(name), name
    elif choice == 4:
        to = new("r")
        os.rename(name, to)
        own[to] = own.pop(name)
        assert not os.path.lexists(name) and open(to).read() == own[to], to
    elif choice == 5 and len(own) > 1:
        over = random.choice([other for other in own if other != name])
        same = os.stat(name).st_ino == os.stat(over).st_ino
        os.rename(name, over)
        if not same:
            own[over] = own.pop(name)
    elif choice == 6:
        to = new("l")
        os.link(name, to)
        own[to] = own[name]
    elif choice == 7:
        if dirs and random.random() < 0.5:
            os.rmdir(dirs.pop())
        else:
            dirs.add(new("d"))
            os.mkdir(f"d-{me}-{serial}")
    elif choice == 8 and tokens:
        token = random.choice([found for found in os.listdir(".") if found.startswith("token-")] or ["none"])
        tried(os.rename, token, f"{token.split('.')[0]}.{new('t')}")
    elif choice == 9:
        which = random.randrange(len(common))
        common[which][0] += tried(make, f"common-{which}", me)
    elif choice == 10:
        which = random.randrange(len(common))
        common[which][1] += tried(os.unlink, f"common-{which}")
    else:
        # Names that others move meanwhile may come twice or not at all, as on every file system.
        mine = [found for found in os.listdir(".") if f"-{me}-" in found and not found.startswith("token-")]
        assert sorted(mine) == sorted(list(own) + list(dirs)), set(mine) ^ (set(own) | dirs) or "twice"
print(json.dumps({"own": own, "dirs": sorted(dirs), "common": common}))
"#;

const TOKENS: usize = 6;

/// The processes that change one directory of a volume.
pub(crate) struct Changers {
    dir: String,
    children: Vec<Child>,
}

impl Changers {
    /// So many for each mount, each with so many changes.
    pub(crate) fn start(mounts: &[Mount], dir: &str, each: usize, changes: usize) -> Changers {
        fs::create_dir(mounts[0].join(dir)).unwrap();
        for token in 0..TOKENS {
            fs::write(mounts[0].join(&format!("{dir}/token-{token}.start")), format!("{token}")).unwrap();
        }
        let start = |at: usize| {
            let mut command = python(CHANGER);
            command.arg(mounts[at % mounts.len()].join(dir)).arg(format!("p{at}")).arg(changes.to_string());
            command.arg((seed() * 1000 + at as u64).to_string()).arg(TOKENS.to_string());
            command.stdout(Stdio::piped()).spawn().unwrap()
        };
        Changers { dir: dir.to_owned(), children: (0..each * mounts.len()).map(start).collect() }
    }

    pub(crate) fn are_over(&mut self) -> bool {
        self.children.iter_mut().all(|child| child.try_wait().unwrap().is_some())
    }

    /// Waits for them, and finds on every mount what they say they have left there.
    pub(crate) fn check(self, mounts: &[Mount]) {
        let outputs: Vec<_> =
            self.children.into_iter().map(|child| child.wait_with_output().unwrap()).collect();
        assert!(outputs.iter().all(|output| output.status.success()), "a process has failed, see above");
        let reports: Vec<Value> =
            outputs.iter().map(|output| serde_json::from_slice(&output.stdout).unwrap()).collect();
        // Names, with contents where they are known; directories have none.
        let mut expected: BTreeMap<String, Option<String>> = BTreeMap::new();
        let mut common = [0; 5];
        for report in &reports {
            for (name, text) in report["own"].as_object().unwrap() {
                expected.insert(name.clone(), Some(text.as_str().unwrap().to_owned()));
            }
            for dir in report["dirs"].as_array().unwrap() {
                expected.insert(dir.as_str().unwrap().to_owned(), None);
            }
            for (at, counts) in report["common"].as_array().unwrap().iter().enumerate() {
                common[at] += counts[0].as_i64().unwrap() - counts[1].as_i64().unwrap();
            }
        }
        assert!(common.iter().all(|left| [0, 1].contains(left)), "made more often than removed: {common:?}");
        let left = common.iter().enumerate().filter(|(_, left)| **left == 1);
        let common: Vec<String> = left.map(|(at, _)| format!("common-{at}")).collect();
        for mount in mounts {
            let dir = mount.join(&self.dir);
            let mut found: BTreeMap<String, Option<String>> = fs::read_dir(&dir)
                .unwrap()
                .map(|entry| entry.unwrap())
                .map(|entry| {
                    (entry.file_name().into_string().unwrap(), fs::read_to_string(entry.path()).ok())
                })
                .collect();
            let mut tokens = Vec::new();
            let mut found_common = Vec::new();
            found.retain(|name, text| {
                if name.starts_with("token-") {
                    tokens.push(text.clone().unwrap());
                } else if name.starts_with("common-") {
                    found_common.push(name.clone());
                } else {
                    return true;
                }
                false
            });
            tokens.sort();
            assert_eq!(
                tokens,
                (0..TOKENS).map(|token| token.to_string()).collect::<Vec<_>>(),
                "{}",
                dir.display()
            );
            assert_eq!(found_common, common, "{}", dir.display());
            assert_eq!(found, expected, "{}", dir.display());
            let links =
                |name: &String| std::os::unix::fs::MetadataExt::nlink(&fs::metadata(dir.join(name)).unwrap());
            let dirs = expected.values().filter(|text| text.is_none()).count() as u64;
            assert_eq!(links(&String::from(".")), 2 + dirs, "{}", dir.display());
        }
    }
}

fn one_directory(count: usize, each: usize, changes: usize) {
    let (_farm, mounts) = Farm::shared(count);
    Changers::start(&mounts, "dir", each, changes).check(&mounts);
}

#[test]
fn names_are_dropped_one_by_one_while_hosts_contend() {
    let (_farm, mounts) = Farm::shared(3);
    Changers::start(&mounts, "dir", 4, rounds(200, 1500)).check(&mounts);
    for mount in &mounts {
        // All at once only in the moment when several hosts begin to change what they all have looked at.
        let epochs = number(&mount.stats(), "server.epochs");
        assert!(epochs <= 2, "all names of the mount were dropped {epochs} times");
    }
}

#[test]
fn names_are_dropped_one_by_one_while_others_wait_for_what_one_host_makes() {
    const OBJECTS: usize = 200;
    let (_farm, mounts) = Farm::shared(3);
    let dirs: Vec<PathBuf> = mounts.iter().map(|mount| mount.path().join("dir")).collect();
    fs::create_dir(&dirs[0]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..OBJECTS {
                let made = dirs[0].join("made");
                fs::write(&made, [n as u8; 20_000]).unwrap();
                fs::rename(&made, dirs[0].join(format!("o{n}"))).unwrap();
            }
        });
        for reader in 0..4 {
            let dir = &dirs[1 + reader % 2];
            scope.spawn(move || {
                for n in 0..OBJECTS {
                    let path = dir.join(format!("o{n}"));
                    while !path.exists() {
                        std::thread::sleep(Duration::from_micros(200));
                    }
                    assert_eq!(fs::read(&path).unwrap(), [n as u8; 20_000]);
                }
            });
        }
    });
    for mount in &mounts {
        let epochs = number(&mount.stats(), "server.epochs");
        assert!(epochs <= 1, "all names of the mount were dropped {epochs} times");
    }
}

#[test]
fn two_mounts_change_one_directory() {
    one_directory(2, 6, rounds(150, 5000));
}

#[test]
fn four_mounts_change_one_directory() {
    one_directory(4, 4, rounds(100, 4000));
}

/// Where the directories below `top` are, as far as they stay where they are while one looks.
fn directories(top: &Path) -> BTreeMap<String, PathBuf> {
    let (mut found, mut todo) = (BTreeMap::new(), vec![top.to_owned()]);
    while let Some(dir) = todo.pop() {
        let entries = match fs::read_dir(&dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                panic!("{}: {error}", dir.display())
            }
            entries => entries.into_iter().flatten(),
        };
        for entry in entries.flatten() {
            todo.push(entry.path());
            found.insert(entry.file_name().into_string().unwrap(), entry.path());
        }
    }
    found
}

#[test]
fn directories_moved_into_each_other_by_all_stay_one_tree() {
    let (farm, mounts) = Farm::shared(4);
    let names: Vec<String> = (0..7).map(|at| format!("d{at}")).collect();
    names.iter().for_each(|name| fs::create_dir(mounts[0].join(name)).unwrap());
    let moved: usize = std::thread::scope(|scope| {
        let movers: Vec<_> = mounts
            .iter()
            .enumerate()
            .map(|(at, mount)| {
                let names = &names;
                scope.spawn(move || {
                    let mut random = Random::new(seed() * 100 + at as u64);
                    let mut moved = 0;
                    for _ in 0..rounds(60, 3000) {
                        let found = directories(mount.path());
                        let which = &names[random.below(7) as usize];
                        let into =
                            found.get(&names[random.below(7) as usize]).filter(|_| random.below(4) > 0);
                        let to = into.map_or(mount.path(), PathBuf::as_path).join(which);
                        let Some(from) = found.get(which) else { continue };
                        match fs::rename(from, to).map_err(|error| error.raw_os_error()) {
                            Ok(()) => moved += 1,
                            // It has been moved meanwhile, or it would be below itself.
                            Err(Some(libc::ENOENT | libc::EINVAL)) => {}
                            Err(error) => panic!("{error:?}"),
                        }
                    }
                    moved
                })
            })
            .collect();
        movers.into_iter().map(|mover| mover.join().unwrap()).sum()
    });
    assert!(moved > 40, "{moved} moves only");
    let below = |mount: &Mount| -> Vec<PathBuf> {
        let found = directories(mount.path()).into_values();
        found.map(|path| path.strip_prefix(mount.path()).unwrap().to_owned()).collect()
    };
    for mount in &mounts {
        assert_eq!(below(mount), below(&mounts[0]));
        assert_eq!(below(mount).len(), names.len(), "one is in no other: {:?}", below(mount));
    }
    mounts.into_iter().for_each(Mount::unmount);
    let said = run(&mut farm.volume(["check", "v"]));
    assert!(said.contains("is sound"), "{said}");
}

/// Half of the processes keep the file open, half open it for each line.
const APPENDER: &str = r#"
import os, sys
path, me, lines = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
fd = os.open(path, flags, 0o644)
for at in range(lines):
    line = f"{me} {at} {'x' * (at * 37 % 190)} {me} {at}\n".encode()
    if me % 2:
        os.close(fd)
        fd = os.open(path, flags, 0o644)
    assert os.write(fd, line) == len(line)
"#;

#[test]
fn lines_appended_on_eight_mounts_are_there_once_and_whole() {
    let (_farm, mounts) = Farm::shared(8);
    let (workers, lines) = (24, rounds(40, 1000));
    let start = |at: usize| {
        let mut command = python(APPENDER);
        command.arg(mounts[at % 8].join("log")).arg(at.to_string()).arg(lines.to_string()).spawn().unwrap()
    };
    let children: Vec<Child> = (0..workers).map(start).collect();
    for mut child in children {
        assert!(child.wait().unwrap().success(), "a process has failed, see above");
    }
    let line = |me, at| format!("{me} {at} {} {me} {at}", "x".repeat(at * 37 % 190));
    let mut expected: Vec<String> =
        (0..workers).flat_map(|me| (0..lines).map(move |at| line(me, at))).collect();
    expected.sort();
    let texts: Vec<String> =
        mounts.iter().map(|mount| fs::read_to_string(mount.join("log")).unwrap()).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "the mounts differ");
    let mut found: Vec<&str> = texts[0].lines().collect();
    found.sort_unstable();
    let difference = found.iter().zip(&expected).find(|(found, expected)| *found != expected);
    assert!(found.len() == expected.len() && difference.is_none(), "{} lines, {difference:?}", found.len());
    // Each process's own lines are in the order in which it wrote them.
    let mut next = vec![0; workers];
    for line in texts[0].lines() {
        let mut numbers = line.split(' ').map(|word| word.parse::<usize>().unwrap_or(0));
        let (me, at) = (numbers.next().unwrap(), numbers.next().unwrap());
        assert_eq!(next[me], at, "{line}");
        next[me] += 1;
    }
}

/// A control group in which processes get 2 ms of processor time, and then none for half a second.
struct SlowGroup(PathBuf);

impl SlowGroup {
    fn new() -> Option<SlowGroup> {
        let name = format!("hayloft-test-{}", std::process::id());
        let v1 = Path::new("/sys/fs/cgroup/cpu").join(&name);
        let v2 = Path::new("/sys/fs/cgroup").join(&name);
        if fs::create_dir(&v1).is_ok() {
            fs::write(v1.join("cpu.cfs_period_us"), "500000").unwrap();
            fs::write(v1.join("cpu.cfs_quota_us"), "2000").unwrap();
            return Some(SlowGroup(v1));
        }
        let _ = fs::write("/sys/fs/cgroup/cgroup.subtree_control", "+cpu");
        fs::create_dir(&v2).ok()?;
        let group = SlowGroup(v2);
        fs::write(group.0.join("cpu.max"), "2000 500000").ok().map(|()| group)
    }

    fn add(&self, pid: u32) {
        fs::write(self.0.join("cgroup.procs"), pid.to_string()).unwrap();
    }
}

impl Drop for SlowGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

#[test]
fn an_append_is_whole_however_long_its_process_is_kept_from_going_on() {
    let Some(slow) = SlowGroup::new() else {
        return println!("skipped: no control group for processor time can be made here");
    };
    let (_farm, mounts) = Farm::shared(2);
    let script = r#"
import os, sys, time
path, me, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
print("ready", flush=True)
sys.stdin.readline()
end = time.monotonic() + 12
while time.monotonic() < end:
    # Most of them reach into another page.
    assert os.write(fd, me.encode() * 2999 + b"\n") == 3000
    time.sleep(pause)
"#;
    let start = |mount: &Mount, me: &str, pause: &str| {
        let mut command = python(script);
        command.arg(mount.join("log")).args([me, pause]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut writer = command.spawn().unwrap();
        BufReader::new(writer.stdout.take().unwrap()).read_line(&mut String::new()).unwrap();
        writer
    };
    let mut writers = [start(&mounts[0], "a", "0"), start(&mounts[1], "b", "0.002")];
    slow.add(writers[0].id());
    for writer in &mut writers {
        drop(writer.stdin.take());
    }
    for writer in &mut writers {
        assert!(writer.wait().unwrap().success(), "a process has failed, see above");
    }
    let text = fs::read_to_string(mounts[1].join("log")).unwrap();
    let torn = text.lines().find(|line| *line != "a".repeat(2999) && *line != "b".repeat(2999));
    assert!(
        torn.is_none(),
        "a line of {} bytes with {} of a",
        torn.unwrap().len(),
        torn.unwrap().matches('a').count()
    );
    let of_slow = text.lines().filter(|line| line.starts_with('a')).count();
    assert!(of_slow > 20, "{of_slow} lines of the slow one");
}

/// Claims jobs by renaming each to the same new name, as build queues do; prints which it has got.
const CLAIMS: &str = r#"
import os, sys
top, way, jobs = sys.argv[1], sys.argv[2], int(sys.argv[3])
os.chdir(top)
for job in range(jobs):
    if way == "files": old, new = f"jobs/{job}", f"jobs/{job}.taken"
    if way == "moved": old, new = f"jobs/{job}", f"taken/{job}"
    if way == "directories": old, new = f"jobs/dir-{job}", f"jobs/dir-{job}.taken"
    try: os.rename(old, new)
    except FileNotFoundError: continue
    print(job)
"#;

fn claimed_once(way: &str) {
    let (_farm, mounts) = Farm::shared(4);
    let jobs = rounds(150, 3000);
    run(&mut sh(&format!(
        "cd '{}'; mkdir jobs taken; cd jobs; for job in $(seq 0 {}); do {}; done",
        mounts[0].path().display(),
        jobs - 1,
        if way == "directories" { "mkdir dir-$job" } else { "echo $job > $job" }
    )));
    let start = |at: usize| {
        let mut claims = python(CLAIMS);
        claims.arg(mounts[at % 4].path()).arg(way).arg(jobs.to_string());
        claims.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let workers: Vec<_> = (0..8).map(start).collect();
    let mut claimed: Vec<usize> = Vec::new();
    for worker in workers {
        let output = worker.wait_with_output().unwrap();
        assert!(output.status.success(), "a process has failed, see above");
        let lines = String::from_utf8(output.stdout).unwrap();
        claimed.extend(lines.lines().map(|line| line.parse::<usize>().unwrap()));
    }
    claimed.sort_unstable();
    assert_eq!(claimed, (0..jobs).collect::<Vec<_>>(), "each is claimed once");
    for mount in &mounts {
        let there = run(sh("ls jobs taken | grep -c -e taken$ -e '^[0-9][0-9]*$'").current_dir(mount.path()));
        assert_eq!(there.trim(), jobs.to_string());
    }
}

#[test]
fn what_hosts_rename_one_after_the_other_is_found_by_each() {
    let (_farm, mounts) = Farm::shared(2);
    run(sh("mkdir -p a b a/dir-0 && touch a/file-0 a/dir-0/inner && ln -s dir-0 a/link-0")
        .current_dir(mounts[0].path()));
    for round in 0..rounds(40, 1000) {
        // Each takes it from where the other host has just put it, and goes through the directory that was just moved.
        let mount = &mounts[round % 2];
        let (from, to) = if round % 3 == 0 { ("a", "b") } else { ("a", "a") };
        for kind in ["file", "dir", "link"] {
            let (old, new) = (format!("{from}/{kind}-{round}"), format!("{to}/{kind}-{}", round + 1));
            fs::rename(mount.join(&old), mount.join(&new)).unwrap_or_else(|error| panic!("{old}: {error}"));
        }
        let dir = mounts[(round + 1) % 2].join(&format!("{to}/dir-{}", round + 1));
        fs::rename(dir.join("inner"), dir.join("other")).unwrap();
        fs::rename(dir.join("other"), dir.join("inner")).unwrap();
        for kind in ["file", "dir", "link"].into_iter().filter(|_| to == "b") {
            let name = format!("{kind}-{}", round + 1);
            fs::rename(mount.join(&format!("b/{name}")), mount.join(&format!("a/{name}"))).unwrap();
        }
    }
}

#[test]
fn a_file_that_all_rename_to_the_same_name_is_claimed_by_one() {
    claimed_once("files");
}

#[test]
fn a_file_that_all_move_to_the_same_name_is_claimed_by_one() {
    claimed_once("moved");
}

#[test]
fn a_directory_that_all_rename_to_the_same_name_is_claimed_by_one() {
    claimed_once("directories");
}
