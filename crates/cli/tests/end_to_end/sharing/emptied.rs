//! Directories whose last names other hosts have just removed: for rmdir(2), and for what replaces them, they are empty.

use std::fs;
use std::path::Path;

use crate::setup::farm::{Farm, Mount};

const ROUNDS: usize = 5;

/// Two hosts make files in a new directory in turn, until it is split. Then each removes its own.
fn make_and_empty(mounts: &[Mount], dir: &str) {
    fs::create_dir(mounts[0].join(dir)).unwrap();
    let files = || (0..40).map(|n| mounts[n % 2].join(dir).join(format!("f{n}")));
    files().for_each(|file| fs::write(file, b"").unwrap());
    files().for_each(|file| fs::remove_file(file).unwrap());
}

/// The second host comes to own a directory of the first one, and empties it.
fn empty_elsewhere(mounts: &[Mount], dir: &str) {
    let here = |mount: &Mount, name: &str| mount.join(dir).join(name);
    fs::create_dir(mounts[0].join(dir)).unwrap();
    fs::write(here(&mounts[0], "theirs"), b"").unwrap();
    for n in 0..20 {
        fs::write(here(&mounts[1], &format!("own-{n}")), b"").unwrap();
    }
    mounts[1].sync();
    for entry in fs::read_dir(mounts[1].join(dir)).unwrap() {
        fs::remove_file(entry.unwrap().path()).unwrap();
    }
}

fn assert_gone(mounts: &[Mount], path: impl AsRef<Path>) {
    mounts.iter().for_each(|mount| assert!(!mount.path().join(&path).exists(), "{:?}", path.as_ref()));
}

/// The first host moves a new directory to where an old one is, which has just been emptied.
fn replace(mounts: &[Mount], new: &str, old: &str, empty: impl Fn(&[Mount], &str)) {
    fs::create_dir(mounts[0].join(new)).unwrap();
    empty(mounts, old);
    fs::rename(mounts[0].join(new), mounts[0].join(old)).unwrap_or_else(|error| panic!("{new}: {error}"));
    assert_gone(mounts, new);
}

#[test]
fn a_split_directory_that_its_hosts_have_emptied_is_removed() {
    let (_farm, mounts) = Farm::shared(3);
    for round in 0..ROUNDS {
        for remover in &mounts {
            let dir = format!("dir-{round}");
            make_and_empty(&mounts, &dir);
            fs::remove_dir(remover.join(&dir)).unwrap_or_else(|error| panic!("round {round}: {error}"));
            assert_gone(&mounts, &dir);
        }
    }
}

#[test]
fn a_split_directory_that_its_hosts_have_emptied_is_replaced() {
    let (_farm, mounts) = Farm::shared(2);
    for round in 0..ROUNDS {
        replace(&mounts, &format!("new-{round}"), &format!("old-{round}"), make_and_empty);
    }
}

#[test]
fn a_directory_that_another_host_has_emptied_is_replaced_from_another_directory() {
    let (_farm, mounts) = Farm::shared(2);
    for name in ["from", "to"] {
        fs::create_dir(mounts[0].join(name)).unwrap();
    }
    for round in 0..ROUNDS {
        replace(&mounts, &format!("from/{round}"), &format!("to/{round}"), empty_elsewhere);
    }
}

#[test]
fn a_directory_that_another_host_has_emptied_is_removed_from_a_split_one() {
    let (_farm, mounts) = Farm::shared(2);
    fs::create_dir(mounts[0].join("split")).unwrap();
    for round in 0..ROUNDS {
        let dir = format!("split/dir-{round}");
        empty_elsewhere(&mounts, &dir);
        for n in 0..40 {
            fs::write(mounts[n % 2].join(&format!("split/f{round}-{n}")), b"").unwrap();
        }
        fs::remove_dir(mounts[0].join(&dir)).unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert_gone(&mounts, &dir);
    }
}

#[test]
fn what_is_not_empty_is_refused_and_stays() {
    let (_farm, mounts) = Farm::shared(2);
    for round in 0..ROUNDS {
        let dir = format!("dir-{round}");
        make_and_empty(&mounts, &dir);
        fs::write(mounts[1].join(&dir).join("f1"), b"left").unwrap();
        let refused = fs::remove_dir(mounts[0].join(&dir)).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ENOTEMPTY), "round {round}");
        assert_eq!(fs::read(mounts[0].join(&dir).join("f1")).unwrap(), b"left");
    }
}
