//! Hosts of which each connection breaks before it is of use, or is slow: others do not wait for them for ever, nor for what they do not need.

use std::fs;
use std::path::Path;
use std::time::Duration;

use crate::setup::farm::{Farm, Mount, number, run, seed, sh, wait_until};
use crate::setup::mangler::Mangler;
use crate::setup::model::Random;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(120);
/// What is said on a connection that only begins.
const A_BEGINNING: u64 = 20_000;
/// Files whose contents are far more than that.
const FILES: usize = 100;

/// A server and two mounts; the second one's way can be harmed.
fn hosts() -> (Farm, Mangler, Mount, Mount) {
    let farm = Farm::with(None, &["--lease", "2"]);
    farm.create("v");
    let mangler = Mangler::before(&farm.address, seed());
    let (one, two) = (farm.mount("v", ""), farm.mount_through(&mangler.address, "v", "mnt-2"));
    (farm, mangler, one, two)
}

/// Names in a folder, from a process of its own that does not wait for ever.
fn names(dir: &Path) -> Vec<String> {
    let names = run(sh("timeout 120 ls").current_dir(dir));
    names.lines().map(str::to_owned).collect()
}

/// Makes files that others are not told of yet.
fn make_files(dir: &Path) -> Vec<Vec<u8>> {
    let mut random = Random::new(seed());
    let contents: Vec<Vec<u8>> = (0..FILES).map(|_| random.bytes(3000)).collect();
    for (at, content) in contents.iter().enumerate() {
        fs::write(dir.join(format!("file-{at}")), content).unwrap();
    }
    contents
}

#[test]
fn who_loses_each_connection_before_it_has_shipped_is_not_waited_for_for_ever() {
    let (_farm, mangler, one, two) = hosts();
    fs::create_dir(two.join("dir")).unwrap();
    two.sync();
    mangler.cut_behind(A_BEGINNING);
    let contents = make_files(&two.join("dir"));
    // What the other host has not shipped is not there, and all else goes on.
    assert_eq!(names(&one.join("dir")), Vec::<String>::new());
    assert!(number(&two.stats(), "server.reconnects") > 1, "{}", two.log());
    mangler.cut_behind(u64::MAX);
    // Nobody has changed anything meanwhile: nothing is lost.
    wait_until("what was not shipped", PATIENCE, || names(&one.join("dir")).len() == FILES);
    for (at, content) in contents.iter().enumerate() {
        assert_eq!(fs::read(one.join(&format!("dir/file-{at}"))).unwrap(), *content, "file {at}");
    }
    assert!(two.unsent().is_empty());
}

#[test]
fn a_directory_is_changed_while_a_large_file_in_it_is_on_its_way() {
    const LARGE: usize = 64 << 20;
    // More than make a host the directory's owner.
    const MADE: usize = 10;
    let farm = Farm::new();
    farm.create("v");
    let mangler = Mangler::before(&farm.address, seed());
    let [one, three] = ["one", "three"].map(|name| farm.mount_as("v", name, "", None));
    let slow = farm.mount_through(&mangler.address, "v", "slow");
    fs::create_dir(one.join("dir")).unwrap();
    fs::write(one.join("dir/first"), b"first").unwrap();
    for mount in [&slow, &three] {
        assert_eq!(names(&mount.join("dir")), ["first"]);
    }
    mangler.slow_down(4 << 20);
    let of_slow = |key: &str| number(&slow.stats(), key);
    let sent = of_slow("server.bytes_sent");
    let content = Random::new(seed()).bytes(LARGE);
    fs::write(slow.join("dir/large"), &content).unwrap();
    let recalls = of_slow("server.recalls");
    std::thread::scope(|scope| {
        let read = scope.spawn(|| fs::read(one.join("dir/large")).unwrap());
        wait_until("it is on its way", PATIENCE, || of_slow("server.recalls") > recalls);
        for at in 0..MADE {
            fs::write(three.join(&format!("dir/made-{at}")), b"made").unwrap();
        }
        let sent = of_slow("server.bytes_sent") - sent;
        assert!(sent < LARGE as u64, "{MADE} files were made when all of the large one had come");
        assert!(read.join().unwrap() == content, "the large file is another one");
    });
}
