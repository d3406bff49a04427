//! Damage at rest under a real mount: an object of each kind is lost, emptied, cut or changed while the server is away. Then every file
//! is read as it was, or the mount, the read or the check fails within seconds, in words that name the volume, and the object or the
//! file. `HAYLOFT_TEST_LONG` tries more objects of each kind, after a stop in order as well as after a kill.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use crate::setup::farm::{Farm, noise, rounds, run};

/// Far more than any of it takes: only what hangs takes longer.
const SECONDS: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, PartialEq, Debug)]
enum Harm {
    Deleted,
    Emptied,
    Truncated,
    Zeroed,
    Flipped,
}

impl Harm {
    fn to(self, path: &Path) {
        let mut content = fs::read(path).unwrap();
        let half = content.len() / 2;
        match self {
            Harm::Deleted => return fs::remove_file(path).unwrap(),
            Harm::Emptied => content.clear(),
            Harm::Truncated => content.truncate(half),
            Harm::Zeroed => content.fill(0),
            Harm::Flipped => content[half] ^= 4,
        }
        fs::write(path, content).unwrap();
    }
}

/// Files with their content: some in rows, some in packs with others, some in blocks.
fn files() -> BTreeMap<String, Vec<u8>> {
    let small = (0..20).map(|n| (format!("small-{n}"), noise(n + 1, 100)));
    let packed = (0..100).map(|n| (format!("packed-{n}"), noise(n + 100, 3000)));
    let large = (0..4).map(|n| (format!("large-{n}"), noise(n + 500, 200_000)));
    small.chain(packed).chain(large).collect()
}

/// Fills the volume of a server, which is ended in order or not.
fn filled(in_order: bool) -> Farm {
    let mut farm = Farm::new();
    farm.create("vol");
    let mount = farm.mount("vol", "");
    let all: Vec<_> = files().into_iter().collect();
    for part in all.chunks(40) {
        for (name, content) in part {
            fs::write(mount.join(name), content).unwrap();
        }
        mount.sync();
    }
    mount.unmount();
    if in_order {
        farm.stop_server()
    } else {
        farm.kill_server()
    }
    farm
}

/// The objects of a store by kind: the last one, or some.
fn objects(store: &Path) -> Vec<PathBuf> {
    fn visit(folder: &Path, found: &mut BTreeMap<PathBuf, Vec<PathBuf>>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                visit(&path, found);
            } else if fs::metadata(&path).unwrap().len() > 0 {
                found.entry(folder.to_owned()).or_default().push(path);
            }
        }
    }
    let mut kinds = BTreeMap::new();
    visit(store, &mut kinds);
    assert!(kinds.len() >= 6, "{kinds:?}");
    let chosen = |mut paths: Vec<PathBuf>| {
        paths.sort();
        let last = paths.len() - 1;
        let mut some = match rounds(0, 1) {
            0 => vec![paths[last].clone()],
            _ => vec![paths[0].clone(), paths[last / 2].clone(), paths[last].clone()],
        };
        some.dedup();
        some
    };
    kinds.into_values().flat_map(chosen).collect()
}

/// What came of it.
#[derive(PartialEq, Debug)]
enum Outcome {
    Harmless,
    Told,
}

/// Mounts, and reads everything.
fn tried(farm: &Farm, object: &str) -> Result<Outcome, String> {
    let file = object.rsplit('/').next().unwrap();
    let names_it = |text: &str| text.contains("vol") && text.contains(file);
    let check = || farm.volume(["check", "vol", "--content"]).output().unwrap();
    let mount = match farm.try_mount("vol", "mnt") {
        Ok(mount) => mount,
        Err(said) if names_it(&said) => return Ok(Outcome::Told),
        Err(said) => return Err(format!("mounting says: {said}")),
    };
    let mut unread = Vec::new();
    for (name, content) in files() {
        match fs::read(mount.join(&name)) {
            Ok(found) if found == content => {}
            Ok(found) => return Err(format!("{name} has other content, {} bytes", found.len())),
            Err(error) if error.raw_os_error() == Some(libc::EIO) => unread.push(name),
            Err(error) => return Err(format!("{name}: {error}: lost without a word")),
        }
    }
    let log = farm.server_log();
    if unread.is_empty() {
        mount.unmount()
    } else {
        mount.kill()
    }
    let checked = check();
    let said = String::from_utf8_lossy(&[checked.stdout, checked.stderr].concat()).into_owned();
    match (unread.is_empty(), checked.status.code()) {
        (true, Some(0)) => Ok(Outcome::Harmless),
        // Nobody needed it yet.
        (true, Some(10)) if said.contains(file) || names_a_file(&said) => Ok(Outcome::Told),
        (false, Some(10)) if said.contains(file) || unread.iter().all(|name| said.contains(name)) => {
            assert!(log.contains("vol"), "the server's log does not name the volume: {log}");
            Ok(Outcome::Told)
        }
        (_, code) => Err(format!("{unread:?} cannot be read; the check ends with {code:?} and says: {said}")),
    }
}

/// Whether a check names a file of the volume.
fn names_a_file(said: &str) -> bool {
    files().keys().any(|name| said.contains(&format!("/{name}")))
}

fn table(in_order: bool) {
    let mut farm = filled(in_order);
    let (store, whole) = (farm.dir().join("store"), farm.dir().join("whole"));
    fs::rename(&store, &whole).unwrap();
    let copy = |from: &Path, to: &Path| run(std::process::Command::new("cp").arg("-a").arg(from).arg(to));
    let (mut told, mut harmless, mut failures) = (0, 0, Vec::new());
    for path in objects(&whole) {
        for harm in [Harm::Deleted, Harm::Emptied, Harm::Truncated, Harm::Zeroed, Harm::Flipped] {
            copy(&whole, &store);
            let object = path.strip_prefix(&whole).unwrap().to_str().unwrap();
            harm.to(&store.join(object));
            let what = format!("{object} {harm:?}, stopped in order: {in_order}");
            farm.start_server();
            let outcome = std::thread::scope(|scope| {
                let (done, outcome) = mpsc::channel();
                let farm = &farm;
                scope.spawn(move || done.send(tried(farm, object)));
                outcome.recv_timeout(SECONDS).unwrap_or_else(|_| {
                    // Whoever hangs gets an error then, and the test ends.
                    crate::setup::farm::kill(farm.server_pid(), libc::SIGKILL);
                    let _ = run_umount(&farm.dir().join("mnt"));
                    Err(format!("nothing within {SECONDS:?}"))
                })
            });
            match outcome {
                Ok(Outcome::Told) => told += 1,
                Ok(Outcome::Harmless) => harmless += 1,
                Err(wrong) => failures.push(format!("{what}: {wrong}")),
            }
            farm.kill_server();
            fs::remove_dir_all(&store).unwrap();
        }
    }
    println!("stopped in order: {in_order}: {told} told, {harmless} harmless");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(told >= 8 && harmless >= 2, "{told} told, {harmless} harmless");
}

fn run_umount(dir: &Path) -> std::process::Output {
    crate::setup::farm::hayloft(["umount", "--force"]).arg(dir).output().unwrap()
}

#[test]
fn a_volume_whose_entries_in_the_registry_are_lost_says_so_and_comes_back() {
    let mut farm = filled(false);
    for folder in ["registry", "registry-copy"] {
        fs::remove_dir_all(farm.dir().join("store").join(folder)).unwrap();
    }
    farm.start_server();
    let words = "hayloft volume check vol --repair";
    let said = farm.try_mount("vol", "mnt").err().expect("no mount");
    assert!(said.contains(words), "{said}");
    let listed = farm.volume(["list"]).output().unwrap();
    let shown = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.status.code() == Some(10) && shown.contains(words), "{shown}");
    let checked = farm.volume(["check", "vol"]).output().unwrap();
    assert!(checked.status.code() == Some(10) && String::from_utf8_lossy(&checked.stderr).contains(words));
    let mended = run(&mut farm.volume(["check", "vol", "--repair"]));
    assert!(mended.contains("registry/vol and registry-copy/vol were lost"), "{mended}");
    let mount = farm.try_mount("vol", "mnt").unwrap();
    for (name, content) in files() {
        assert!(fs::read(mount.join(&name)).unwrap() == content, "{name}");
    }
    mount.unmount();
    run(&mut farm.volume(["list"]));
}

#[test]
fn damage_while_the_server_was_stopped_is_told_or_harms_nothing() {
    table(true);
}

#[test]
fn damage_after_a_server_was_killed_is_told_or_harms_nothing() {
    table(false);
}
