//! Many processes on several mounts that change one directory, or append to one file, at the same time.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::setup::farm::{Farm, Mount, number, python, rounds, run, seed};
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

#[test]
fn hosts_that_take_lock_files_seldom_have_all_names_looked_up_anew() {
    const LOCKS: u32 = 60;
    const LOCKERS: usize = 3;
    let (_farm, mounts) = Farm::shared(2);
    fs::create_dir(mounts[0].join("locks")).unwrap();
    fs::write(mounts[0].join("locks/count"), "").unwrap();
    let taken: Vec<u32> = std::thread::scope(|scope| {
        let lockers: Vec<_> = mounts
            .iter()
            .flat_map(|mount| [mount; LOCKERS])
            .map(|mount| {
                scope.spawn(move || {
                    let (lock, count) = (mount.join("locks/lock"), mount.join("locks/count"));
                    let mut taken = 0;
                    while taken < LOCKS {
                        match File::create_new(&lock) {
                            Ok(_) => {
                                // Nobody else does it meanwhile.
                                let before = fs::read_to_string(&count).unwrap().len();
                                fs::write(&count, "x".repeat(before + 1)).unwrap();
                                fs::remove_file(&lock).unwrap();
                                taken += 1;
                            }
                            Err(error) => assert_eq!(error.kind(), io::ErrorKind::AlreadyExists),
                        }
                    }
                    taken
                })
            })
            .collect();
        lockers.into_iter().map(|locker| locker.join().unwrap()).collect()
    });
    let all: u32 = taken.iter().sum();
    for mount in &mounts {
        assert_eq!(fs::read_to_string(mount.join("locks/count")).unwrap().len(), all as usize);
        // It was some thirty times for as many locks.
        let epochs = number(&mount.stats(), "server.epochs");
        assert!(epochs <= 3, "{epochs} times");
    }
}
