//! What sharing costs, counted: messages to the server and requests from the kernel, never times.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::Value;

use crate::setup::calls;
use crate::setup::farm::{Farm, Mount, number, rounds, run, sh, wait_until};
use crate::sharing::caching::{PASS, lookups, tree};

/// Messages to the server about the tree: no keep-alives, no acknowledgements of what others did, and no questions of
/// statfs, whose answer others have changed.
pub(crate) fn messages(stats: &Value) -> u64 {
    let unasked = ["total", "PING", "ACK", "STATUS"];
    let kinds = stats["server"]["requests"].as_object().unwrap();
    kinds
        .iter()
        .filter(|(kind, _)| !unasked.contains(&kind.as_str()))
        .map(|(_, count)| count.as_u64().unwrap())
        .sum()
}

fn all(mounts: &[Mount]) -> Vec<Value> {
    mounts.iter().map(Mount::stats).collect()
}

/// Fails unless each mount has sent so many messages at most.
fn sent_at_most(most: u64, before: &[Value], after: &[Value]) {
    for (before, after) in before.iter().zip(after) {
        let sent = messages(after) - messages(before);
        assert!(sent <= most, "{sent} messages: {} became {}", before["server"], after["server"]);
    }
}

fn pass_on(mounts: &[Mount]) {
    std::thread::scope(|scope| {
        for mount in mounts {
            scope.spawn(|| run(sh(PASS).current_dir(mount.path())));
        }
    });
}

#[test]
fn what_is_made_in_a_shared_directory_leaves_memory() {
    const FILES: usize = 1200;
    let path = |n: usize, file: usize| format!("dir-{}/{n}-{file}", file % 40);
    let (farm, mounts) = Farm::shared_with(2, "inodes=1000,commit=1", &[]);
    for dir in 0..40 {
        fs::create_dir(mounts[0].join(&format!("dir-{dir}"))).unwrap();
        fs::read_dir(mounts[1].join(&format!("dir-{dir}"))).unwrap().count();
    }
    std::thread::scope(|scope| {
        for (n, mount) in mounts.iter().enumerate() {
            scope.spawn(move || {
                for file in 0..FILES {
                    fs::write(mount.join(&path(n, file)), format!("{n} {file}")).unwrap();
                }
            });
        }
    });
    for mount in &mounts {
        wait_until("few rows are in memory", Duration::from_secs(60), || {
            mount.sync();
            number(&mount.stats(), "cache.inodes") <= 1000
        });
    }
    let owned = farm.clients("v").iter().map(|client| client["own_files"].as_u64().unwrap()).max();
    assert!(owned <= Some(1000), "files owned by themselves: {owned:?}");
    for mount in &mounts {
        for n in 0..mounts.len() {
            for file in 0..FILES {
                let held = fs::read_to_string(mount.join(&path(n, file))).unwrap();
                assert_eq!(held, format!("{n} {file}"));
            }
        }
    }
}

#[test]
fn a_second_pass_sends_nothing_on_any_mount_of_a_shared_tree() {
    let (_farm, mounts) = Farm::shared(rounds(8, 30));
    tree(mounts[0].path(), 1200);
    mounts[0].sync();
    pass_on(&mounts);
    // The kernel is told again to keep names of what was changed by request some time after that.
    for keeps_names in [false, true] {
        let before = all(&mounts);
        pass_on(&mounts);
        let after = all(&mounts);
        sent_at_most(0, &before, &after);
        for (before, after) in before.iter().zip(&after) {
            if keeps_names {
                assert_eq!(lookups(after), lookups(before), "{} became {}", before["fuse"], after["fuse"]);
            }
            let acks = |stats: &Value| number(stats, "server.requests.ACK");
            assert_eq!(acks(after), acks(before), "an unchanged tree has no events");
        }
        std::thread::sleep(Duration::from_millis(1500));
        pass_on(&mounts);
    }
}

#[test]
fn a_tree_is_unchanged_for_the_others_while_one_changes_another() {
    let (_farm, mounts) = Farm::shared(8);
    tree(mounts[0].path(), 400);
    pass_on(&mounts);
    let before = all(&mounts[1..]);
    fs::create_dir(mounts[0].join("part-0/new")).unwrap();
    tree(&mounts[0].join("part-0/new"), 400);
    mounts[0].sync();
    for mount in &mounts[1..] {
        run(sh("find part-0/sub-* -type f -exec cat {} + > /dev/null").current_dir(mount.path()));
    }
    let after = all(&mounts[1..]);
    // Who lists the directory that has got another one asks, once, whether all have heard of that.
    sent_at_most(1, &before, &after);
    for (before, after) in before.iter().zip(&after) {
        let more = |name: &str| number(after, name) - number(before, name);
        let hears = more("server.requests.HEAR");
        assert_eq!(messages(after) - messages(before), hears);
        let (sent, questions) = (work(before, after, "read").1, more("server.requests.STATUS"));
        assert!(sent <= questions + hears, "{sent} messages: {}", after["sharing"]);
    }
}

#[test]
fn work_in_directories_of_its_own_sends_less_than_a_message_for_50_operations() {
    let (_farm, mounts) = Farm::shared(4);
    for mount in &mounts {
        fs::read_dir(mount.path()).unwrap().count();
    }
    let before = all(&mounts);
    let mut operations = 0;
    for (at, mount) in mounts.iter().enumerate() {
        let dir = mount.join(&format!("own-{at}"));
        fs::create_dir(&dir).unwrap();
        for file in 0..500 {
            let (temporary, path) = (dir.join(format!("temporary-{file}")), dir.join(format!("file-{file}")));
            // Open, write and close are one; looking is free anyway.
            fs::write(&temporary, vec![b'x'; 300]).unwrap();
            calls::chmod(&temporary, 0o640);
            fs::rename(&temporary, &path).unwrap();
            calls::set_times(&path, [(1, 1), (file, 1)]).unwrap();
            if file % 2 == 0 {
                fs::remove_file(&path).unwrap();
            }
        }
        operations = 500 * 4 + 250;
    }
    mounts.iter().for_each(Mount::sync);
    let after = all(&mounts);
    sent_at_most(operations / 50, &before, &after);
    for (before, after) in before.iter().zip(&after) {
        let (done, sent) = work(before, after, "owned");
        assert!(done >= operations, "{done} of {operations} operations");
        assert!(sent <= operations / 50, "{sent} messages: {}", after["sharing"]);
    }
}

/// Operations in directories that a mount holds in this way, and messages for them.
fn work(before: &Value, after: &Value, hold: &str) -> (u64, u64) {
    let of = |figure: &str| {
        let key = format!("sharing.{hold}.{figure}");
        number(after, &key) - number(before, &key)
    };
    (of("operations"), of("messages"))
}

#[test]
fn what_others_have_made_is_read_and_removed_without_asking_them() {
    const FILES: usize = 200;
    let (farm, mounts) = Farm::shared_with(5, "commit=1", &[]);
    let other = &mounts[4];
    fs::create_dir(mounts[0].join("dir")).unwrap();
    let path = |file: usize| format!("dir/{file}");
    for file in 0..FILES {
        fs::write(mounts[file % 4].join(&path(file)), format!("{file}")).unwrap();
        // A directory that is listed is not split.
        assert_eq!(fs::read_dir(mounts[0].join("dir")).unwrap().count(), file + 1);
    }
    wait_until("nobody owns them", Duration::from_secs(60), || {
        farm.clients("v").iter().all(|client| client["own_files"] == 0)
    });
    let before = all(&mounts);
    for file in 0..FILES {
        assert_eq!(fs::read_to_string(other.join(&path(file))).unwrap(), format!("{file}"));
    }
    fs::remove_dir_all(other.join("dir")).unwrap();
    let after = all(&mounts);
    // All rows come with the directory.
    sent_at_most(FILES as u64 / 4, &before, &after);
    let recalls = |stats: &[Value]| stats.iter().map(|stats| number(stats, "server.recalls")).sum::<u64>();
    assert!(recalls(&after) - recalls(&before) <= 8, "{} and {}", recalls(&before), recalls(&after));
    for mount in &mounts {
        assert!(!mount.join("dir").exists());
    }
}

#[test]
fn directories_of_another_host_are_removed_without_waiting_for_oneself() {
    let (_farm, mounts) = Farm::shared(2);
    let (one, other) = (&mounts[0], &mounts[1]);
    fs::create_dir(one.join("dir")).unwrap();
    for at in 0..60 {
        fs::create_dir(one.join(&format!("dir/{at}"))).unwrap();
        fs::write(one.join(&format!("dir/{at}/file")), "x").unwrap();
    }
    // The server recalls for that what this host has just acquired, which must not be kept for the call that waits for it.
    fs::remove_dir_all(other.join("dir")).unwrap();
    let kept = all(&mounts).iter().map(|stats| number(stats, "server.recalls_kept")).sum::<u64>();
    assert!(kept <= 3, "{kept}");
    assert!(!one.join("dir").exists());
}

#[test]
fn a_file_that_another_host_writes_without_pause_is_read() {
    const SIZE: u64 = 100_000;
    const WRITES_MAX: u64 = 20_000;
    let (_farm, mounts) = Farm::shared(2);
    let (one, other) = (&mounts[0], &mounts[1]);
    let file = File::create(one.join("log")).unwrap();
    file.set_len(SIZE).unwrap();
    let (looks, written) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for at in 0..WRITES_MAX {
                file.write_all_at(&at.to_le_bytes(), at % (SIZE / 8) * 8).unwrap();
                written.store(at + 1, Ordering::Release);
                if looks.load(Ordering::Acquire) >= 20 {
                    break;
                }
            }
        });
        while looks.load(Ordering::Relaxed) < 20 {
            let before = written.load(Ordering::Acquire);
            let bytes = fs::read(other.join("log")).unwrap();
            assert_eq!(bytes.len() as u64, SIZE);
            // What had been written before it was looked at is there, or something later.
            if let Some(last) = before.checked_sub(1) {
                let at = (last % (SIZE / 8) * 8) as usize;
                assert!(u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) >= last);
            }
            looks.fetch_add(1, Ordering::Release);
        }
    });
    let written = written.load(Ordering::Acquire);
    assert!(written < WRITES_MAX, "the other one got to see it when nobody wrote any more");
}

#[test]
fn a_create_in_a_directory_that_eight_mounts_change_is_one_request() {
    let (_farm, mounts) = Farm::shared_with(8, "commit=3600", &[]);
    fs::create_dir(mounts[0].join("dir")).unwrap();
    let create = |mount: &Mount, name: String| {
        let path = mount.join("dir").join(name);
        calls::open(&path, libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY, 0o644).unwrap();
    };
    let in_turn = |times: usize, prefix: &str| {
        (0..times).for_each(|time| {
            mounts.iter().enumerate().for_each(|(at, mount)| create(mount, format!("{prefix}-{time}-{at}")));
        });
    };
    // Afterwards all of them change it, and none owns it.
    in_turn(5, "first");
    mounts.iter().for_each(Mount::sync);
    let before = all(&mounts);
    // Of these names no two are in one slot.
    in_turn(20, "later");
    let after = all(&mounts);
    // And files that are quiet are given back, twice at most.
    sent_at_most(22, &before, &after);
    for (before, after) in before.iter().zip(&after) {
        let asked = |stats: &Value, kind: &str| number(stats, &format!("server.requests.{kind}"));
        let asked = |kind: &str| asked(after, kind) - asked(before, kind);
        assert_eq!((asked("ENTER"), asked("CHANGE")), (20, 0), "the directory is split: {}", after["server"]);
        let given_back = asked("RELEASE");
        assert!(messages(after) - messages(before) - given_back <= 20, "{}", after["server"]);
    }
    for mount in &mounts {
        assert_eq!(fs::read_dir(mount.join("dir")).unwrap().count(), 8 * 25);
    }
}

#[test]
fn an_object_is_handed_over_in_three_requests_that_wait_for_no_store() {
    const OBJECTS: usize = 20;
    let mut farm = Farm::with(None, &["--window", "60000"]);
    farm.create("v");
    farm.stop_server();
    let faults = farm.dir().join("faults");
    fs::write(&faults, "").unwrap();
    farm.set_env(&[("HAYLOFT_STORE_FAULTS", faults.display().to_string())]);
    farm.start_server();
    let [maker, reader] = [0, 1].map(|at| farm.mount_as("v", &format!("mnt-{at}"), "commit=3600", None));
    fs::create_dir(maker.join("dir")).unwrap();
    let hand_over = |n: usize| {
        let content = vec![n as u8; 20_000];
        fs::write(maker.join("dir/made"), &content).unwrap();
        fs::rename(maker.join("dir/made"), maker.join(&format!("dir/o{n}"))).unwrap();
        let before = messages(&reader.stats());
        assert_eq!(fs::read(reader.join(&format!("dir/o{n}"))).unwrap(), content);
        messages(&reader.stats()) - before
    };
    // From then on the reader knows the directory.
    for n in 0..OBJECTS {
        hand_over(n);
    }
    maker.sync();
    // What is written takes a quarter of a second each time, and what is not durable is in the server's memory alone.
    fs::write(&faults, "slow 1000\n").unwrap();
    std::thread::sleep(Duration::from_millis(200));
    let mut early = 0;
    for n in OBJECTS..2 * OBJECTS {
        let asked = hand_over(n);
        assert!(asked <= 3, "{asked} requests: {}", reader.stats()["server"]);
        early += usize::from(number(&farm.stats(), "volumes.v.undurable.entries") > 0);
    }
    assert!(early > OBJECTS / 2, "{early} of {OBJECTS} were read before they were durable");
    fs::write(&faults, "").unwrap();
    maker.sync();
}
