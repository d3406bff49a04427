//! Directories in which several hosts make files: their names are granted by slots (docs/sharing.md, "Split directories").

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::setup::calls;
use crate::setup::farm::{Farm, Mount, number, run, sh, wait_until};

/// So many files are made by each host.
const FILES: usize = 300;

fn splits(farm: &Farm) -> u64 {
    number(&farm.stats(), "volumes.v.directories_split")
}

pub(crate) fn dirs(mounts: &[Mount]) -> Vec<PathBuf> {
    let dirs: Vec<PathBuf> = mounts.iter().map(|mount| mount.path().join("dir")).collect();
    fs::create_dir(&dirs[0]).unwrap();
    dirs.iter().for_each(|dir| assert!(dir.is_dir()));
    dirs
}

/// What a compiler with libtool does: a temporary file, and then its name.
fn compile(dir: &Path, name: &str) {
    let (temporary, object) = (dir.join(format!("{name}.Tpo")), dir.join(format!("{name}.Po")));
    fs::write(&temporary, name).unwrap();
    fs::rename(&temporary, &object).unwrap();
    assert_eq!(fs::read_to_string(&object).unwrap(), name);
}

/// All hosts make files at the same time.
fn all_compile(dirs: &[PathBuf], files: usize) -> BTreeSet<String> {
    std::thread::scope(|scope| {
        for (host, dir) in dirs.iter().enumerate() {
            scope.spawn(move || (0..files).for_each(|n| compile(dir, &format!("h{host}-{n}"))));
        }
    });
    let names = |host| (0..files).map(move |n| format!("h{host}-{n}.Po"));
    (0..dirs.len()).flat_map(names).collect()
}

fn names(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// Lets hosts work until the directory is split.
pub(crate) fn until_split(farm: &Farm, dirs: &[PathBuf]) {
    let before = splits(farm);
    let mut round = 0;
    wait_until("the directory is split", Duration::from_secs(60), || {
        for (host, dir) in dirs.iter().enumerate() {
            compile(dir, &format!("until-{host}-{round}"));
        }
        round += 1;
        splits(farm) > before
    });
}

#[test]
fn what_all_hosts_make_at_once_is_there_on_all_of_them() {
    let (farm, mounts) = Farm::shared(4);
    let dirs = dirs(&mounts);
    let made = all_compile(&dirs, FILES);
    assert!(splits(&farm) > 0);
    for dir in &dirs {
        assert_eq!(names(dir), made);
        for name in made.iter().step_by(7) {
            assert_eq!(fs::read_to_string(dir.join(name)).unwrap(), name.trim_end_matches(".Po"));
        }
    }
    run(sh("rm *").current_dir(&dirs[1]));
    dirs.iter().for_each(|dir| assert_eq!(names(dir), BTreeSet::new()));
    mounts.into_iter().for_each(Mount::unmount);
    assert!(run(&mut farm.volume(["check", "v", "--content"])).contains("is sound"));
}

#[test]
fn one_message_is_enough_for_a_file_that_is_made_renamed_and_removed() {
    let (farm, mounts) = Farm::shared(3);
    let dirs = dirs(&mounts);
    until_split(&farm, &dirs);
    let asked = || number(&mounts[0].stats(), "server.requests.total");
    let others =
        || -> u64 { mounts[1..].iter().map(|mount| number(&mount.stats(), "server.events_applied")).sum() };
    let (before, told) = (asked(), others());
    for n in 0..200 {
        let (one, other) = (dirs[0].join(format!("short-{n}.tmp")), dirs[0].join(format!("short-{n}.o")));
        fs::write(&one, b"for a moment").unwrap();
        fs::rename(&one, &other).unwrap();
        fs::remove_file(&other).unwrap();
    }
    // Besides, what was made before is shipped, and keep-alives go on.
    let sent = asked() - before;
    assert!(sent <= 240, "{sent} messages for 200 files");
    assert_eq!(others() - told, 0, "nobody else hears of it");
}

#[test]
fn names_are_seen_by_others_when_the_call_has_returned() {
    let (farm, mounts) = Farm::shared(3);
    let dirs = dirs(&mounts);
    until_split(&farm, &dirs);
    for n in 0..60 {
        let name = format!("seen-{n}.o");
        let [maker, looker, other] = [n % 3, (n + 1) % 3, (n + 2) % 3].map(|host| dirs[host].join(&name));
        assert!(!looker.exists() && !other.exists());
        fs::write(&maker, &name).unwrap();
        assert_eq!(fs::read_to_string(&looker).unwrap(), name);
        fs::write(&other, "more").unwrap();
        assert_eq!(fs::read_to_string(&maker).unwrap(), "more");
        let moved = dirs[n % 2].join(format!("moved-{n}"));
        fs::rename(dirs[n % 2].join(&name), &moved).unwrap();
        assert!(!looker.exists() && dirs[2].join(format!("moved-{n}")).exists());
        assert!(fs::File::create_new(dirs[2].join(format!("moved-{n}"))).is_err());
        fs::remove_file(dirs[2].join(format!("moved-{n}"))).unwrap();
        assert!(!moved.exists());
    }
}

#[test]
fn what_is_more_than_files_is_done_as_in_any_directory() {
    let (farm, mounts) = Farm::shared(2);
    let dirs = dirs(&mounts);
    type Step<'a> = &'a dyn Fn(&Path, &Path);
    let steps: [Step<'_>; 8] = [
        &|one, other| {
            fs::create_dir(one.join("below")).unwrap();
            fs::write(other.join("below/file"), b"1").unwrap();
        },
        &|one, other| {
            fs::set_permissions(one, fs::Permissions::from_mode(0o750)).unwrap();
            assert_eq!(fs::metadata(other).unwrap().mode() & 0o777, 0o750);
        },
        &|one, other| {
            fs::write(one.join("linked"), b"2").unwrap();
            fs::hard_link(one.join("linked"), one.join("again")).unwrap();
            assert_eq!(fs::metadata(other.join("linked")).unwrap().nlink(), 2);
        },
        &|one, other| {
            fs::write(one.join("leaves"), b"3").unwrap();
            fs::rename(one.join("leaves"), one.with_file_name("arrived")).unwrap();
            assert_eq!(fs::read(other.with_file_name("arrived")).unwrap(), b"3");
            assert!(!other.join("leaves").exists());
        },
        &|one, other| {
            fs::rename(one.join("below"), one.join("renamed")).unwrap();
            assert_eq!(fs::read(other.join("renamed/file")).unwrap(), b"1");
        },
        &|one, other| {
            fs::remove_dir_all(one.join("renamed")).unwrap();
            assert!(!other.join("renamed").exists());
        },
        &|one, other| {
            std::os::unix::fs::symlink("linked", one.join("soft")).unwrap();
            assert_eq!(fs::read(other.join("soft")).unwrap(), b"2");
        },
        &|one, other| {
            let open = fs::File::open(one.join("linked")).unwrap();
            fs::remove_file(other.join("linked")).unwrap();
            fs::remove_file(other.join("again")).unwrap();
            assert_eq!(open.metadata().unwrap().nlink(), 0);
        },
    ];
    for (at, step) in steps.into_iter().enumerate() {
        if at < 4 {
            until_split(&farm, &dirs);
        }
        step(&dirs[at % 2], &dirs[(at + 1) % 2]);
    }
    mounts.into_iter().for_each(Mount::unmount);
    assert!(run(&mut farm.volume(["check", "v", "--content"])).contains("is sound"));
}

#[test]
fn a_split_directory_is_for_programs_of_32_bits_too() {
    let (farm, mounts) = Farm::shared(2);
    let dirs = dirs(&mounts);
    until_split(&farm, &dirs);
    all_compile(&dirs, 50);
    let before = names(&dirs[0]);
    for dir in &dirs {
        let places = calls::places(dir);
        // Programs that were not built for large files end a listing at a larger one (EOVERFLOW).
        assert!(places.iter().all(|place| (1..=i64::from(i32::MAX)).contains(place)), "{places:?}");
        assert_eq!(places.iter().collect::<BTreeSet<_>>().len(), before.len() + 2);
        let numbers = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().ino());
        assert!(numbers.into_iter().all(|ino| ino < 1 << 32));
    }
    // Whatever part is read at a time, each name comes once.
    for bytes in [200, 1000, 30_000] {
        let listed = calls::list(&fs::File::open(&dirs[1]).unwrap(), bytes);
        let listed: Vec<String> = listed.into_iter().map(|name| String::from_utf8(name).unwrap()).collect();
        assert_eq!(listed.len(), before.len() + 2);
        assert!(before.iter().all(|name| listed.contains(name)));
    }
}

#[test]
fn times_are_never_ahead_of_the_clock_of_the_host() {
    // make(1) says "Clock skew detected" of what is, if only by a few microseconds.
    let (farm, mounts) = Farm::shared(6);
    let dirs = dirs(&mounts);
    until_split(&farm, &dirs);
    let ahead = |path: &Path| {
        let modified = fs::metadata(path).unwrap().modified().unwrap();
        modified > SystemTime::now()
    };
    for n in 0..500 {
        let file = dirs[n % 6].join(format!("timed-{n}"));
        fs::write(&file, b"x").unwrap();
        assert!(!ahead(&file), "a file's time, at {n}");
        assert!(!dirs.iter().any(|dir| ahead(dir)), "a directory's time, at {n}");
    }
}

#[test]
fn times_of_a_split_directory_are_of_now_and_stay_when_it_is_whole() {
    let (farm, mounts) = Farm::shared(2);
    let dirs = dirs(&mounts);
    until_split(&farm, &dirs);
    let modified = |dir: &Path| fs::metadata(dir).unwrap().modified().unwrap();
    for n in 0..50 {
        let file = dirs[n % 2].join(format!("timed-{n}"));
        fs::write(&file, b"").unwrap();
        let made = fs::metadata(&file).unwrap().modified().unwrap();
        assert!(modified(&dirs[n % 2]) >= made);
    }
    // Nobody lists it, and nothing is done: so they stand still as well.
    let mut last = modified(&dirs[0]);
    wait_until("its times stand still", Duration::from_secs(20), || {
        std::thread::sleep(Duration::from_millis(20));
        let before = std::mem::replace(&mut last, modified(&dirs[0]));
        last == before
    });
    assert_eq!(modified(&dirs[1]), last);
    until_split(&farm, &dirs);
    let shown = modified(&dirs[0]);
    names(&dirs[1]);
    let whole = modified(&dirs[0]);
    // Clocks of two hosts are never quite the same.
    assert!(
        whole + Duration::from_millis(50) >= shown && whole <= SystemTime::now() + Duration::from_millis(50)
    );
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!((modified(&dirs[0]), modified(&dirs[1])), (whole, whole), "nothing changes any more");
}

#[test]
fn a_server_that_is_killed_under_hosts_that_make_files_loses_none() {
    let (mut farm, mounts) = Farm::shared(3);
    let dirs = dirs(&mounts);
    until_split(&farm, &dirs);
    std::thread::scope(|scope| {
        for (host, dir) in dirs.iter().enumerate() {
            scope.spawn(move || (0..FILES).for_each(|n| compile(dir, &format!("killed-{host}-{n}"))));
        }
        for _ in 0..3 {
            std::thread::sleep(Duration::from_millis(150));
            farm.kill_server();
            farm.start_server();
        }
    });
    for host in 0..3 {
        for n in 0..FILES {
            let name = format!("killed-{host}-{n}");
            let path = dirs[(host + 1) % 3].join(format!("{name}.Po"));
            assert_eq!(fs::read_to_string(&path).unwrap(), name);
        }
    }
    mounts.into_iter().for_each(Mount::unmount);
    assert!(run(&mut farm.volume(["check", "v", "--content"])).contains("is sound"));
}
