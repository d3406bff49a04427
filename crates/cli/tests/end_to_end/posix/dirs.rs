//! Names and directories.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::{FileTypeExt, MetadataExt, symlink};
use std::path::Path;

use crate::setup::calls::{self, errno};
use crate::setup::farm::Place;

fn names(dir: &Path) -> BTreeSet<String> {
    let name = |entry: std::io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    fs::read_dir(dir).unwrap().map(name).collect()
}

#[test]
fn rename_flags() {
    let mut place = Place::new();
    let (a, b, c) = (place.join("a"), place.join("b"), place.join("c"));
    fs::write(&a, b"A").unwrap();
    fs::write(&b, b"B").unwrap();
    assert_eq!(errno(calls::rename(&a, &b, libc::RENAME_NOREPLACE)), libc::EEXIST);
    calls::rename(&a, &b, libc::RENAME_EXCHANGE).unwrap();
    assert_eq!((fs::read(&a).unwrap(), fs::read(&b).unwrap()), (b"B".to_vec(), b"A".to_vec()));
    assert_eq!(errno(calls::rename(&a, &c, libc::RENAME_EXCHANGE)), libc::ENOENT);
    calls::rename(&a, &c, libc::RENAME_NOREPLACE).unwrap();
    calls::rename(&c, &a, libc::RENAME_WHITEOUT).unwrap();
    let whiteout = fs::metadata(&c).unwrap();
    assert!(whiteout.file_type().is_char_device() && whiteout.rdev() == 0);
    place.remount();
    assert_eq!((fs::read(&a).unwrap(), fs::read(&b).unwrap()), (b"B".to_vec(), b"A".to_vec()));
    assert!(fs::metadata(&c).unwrap().file_type().is_char_device());
}

#[test]
fn rename_replaces() {
    let mut place = Place::new();
    let (one, two) = (place.join("one"), place.join("two"));
    fs::create_dir(&one).unwrap();
    fs::create_dir(&two).unwrap();
    fs::write(one.join("x"), b"from one").unwrap();
    fs::rename(&one, &two).unwrap();
    assert_eq!(names(place.path()), BTreeSet::from(["two".to_owned()]));
    fs::create_dir(&one).unwrap();
    assert_eq!(errno(fs::rename(&one, &two)), libc::ENOTEMPTY);
    assert_eq!(errno(fs::rename(&two, two.join("below"))), libc::EINVAL);
    fs::write(place.join("file"), b"").unwrap();
    assert_eq!(errno(fs::rename(&one, place.join("file"))), libc::ENOTDIR);
    assert_eq!(errno(fs::rename(place.join("file"), &one)), libc::EISDIR);
    assert_eq!(fs::metadata(place.path()).unwrap().nlink(), 4);
    fs::rename(&one, two.join("one")).unwrap();
    assert_eq!(fs::metadata(place.path()).unwrap().nlink(), 3);
    place.remount();
    assert_eq!(fs::read(two.join("x")).unwrap(), b"from one");
    assert_eq!(fs::metadata(&two).unwrap().nlink(), 3);
}

#[test]
fn links_and_special_files() {
    let mut place = Place::new();
    let file = place.join("file");
    fs::write(&file, b"linked").unwrap();
    fs::create_dir(place.join("dir")).unwrap();
    fs::hard_link(&file, place.join("dir/second")).unwrap();
    symlink("dir/second", place.join("link")).unwrap();
    calls::mknod(&place.join("fifo"), libc::S_IFIFO | 0o644, 0).unwrap();
    calls::mknod(&place.join("null"), libc::S_IFCHR | 0o666, libc::makedev(1, 3)).unwrap();
    drop(std::os::unix::net::UnixListener::bind(place.join("socket")).unwrap());
    assert_eq!(errno(fs::hard_link(place.join("dir"), place.join("dir2"))), libc::EPERM);
    for _ in 0..2 {
        let (first, second) = (fs::metadata(&file).unwrap(), fs::metadata(place.join("dir/second")).unwrap());
        assert_eq!((first.ino(), first.nlink(), second.nlink()), (second.ino(), 2, 2));
        assert_eq!(fs::read_link(place.join("link")).unwrap(), Path::new("dir/second"));
        assert_eq!(fs::read(place.join("link")).unwrap(), b"linked");
        assert!(fs::metadata(place.join("fifo")).unwrap().file_type().is_fifo());
        assert!(fs::metadata(place.join("socket")).unwrap().file_type().is_socket());
        let null = fs::metadata(place.join("null")).unwrap();
        assert_eq!((null.file_type().is_char_device(), null.rdev()), (true, libc::makedev(1, 3)));
        place.remount();
    }
    fs::remove_file(&file).unwrap();
    place.remount();
    assert_eq!(fs::metadata(place.join("dir/second")).unwrap().nlink(), 1);
    assert_eq!(fs::read(place.join("dir/second")).unwrap(), b"linked");
}

#[test]
fn names_of_255_bytes() {
    let mut place = Place::new();
    let longest = "ä".repeat(127) + "x";
    fs::write(place.join(&longest), b"long").unwrap();
    assert_eq!(errno(fs::write(place.join(&"y".repeat(256)), b"")), libc::ENAMETOOLONG);
    let target = "t".repeat(4095);
    symlink(&target, place.join("link")).unwrap();
    fs::write(place.join("new\nline and \\ \u{1f33e}"), b"").unwrap();
    place.remount();
    assert_eq!(fs::read(place.join(&longest)).unwrap(), b"long");
    assert_eq!(fs::read_link(place.join("link")).unwrap().as_os_str().len(), 4095);
    assert_eq!(names(place.path()).len(), 3);
}

#[test]
fn a_directory_of_100_000_entries() {
    let mut place = Place::new();
    let dir = place.join("dir");
    fs::create_dir(&dir).unwrap();
    (0..100_000).for_each(|at| drop(File::create(dir.join(format!("entry-{at}"))).unwrap()));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 100_000);
    place.remount();
    assert_eq!(names(&dir).len(), 100_000);
    assert!(dir.join("entry-99999").exists() && !dir.join("entry-100000").exists());
    (0..100_000).for_each(|at| fs::remove_file(dir.join(format!("entry-{at}"))).unwrap());
    fs::remove_dir(&dir).unwrap();
    place.remount();
    assert_eq!(names(place.path()).len(), 0);
}

#[test]
fn readdir_is_stable_under_change() {
    let place = Place::new();
    let dir = place.join("dir");
    fs::create_dir(&dir).unwrap();
    (0..5000).for_each(|at| drop(File::create(dir.join(format!("stays-{at}"))).unwrap()));
    (0..5000).for_each(|at| drop(File::create(dir.join(format!("goes-{at}"))).unwrap()));
    let mut seen: HashMap<String, u32> = HashMap::new();
    for (at, entry) in fs::read_dir(&dir).unwrap().enumerate() {
        *seen.entry(entry.unwrap().file_name().into_string().unwrap()).or_default() += 1;
        if at < 5000 {
            fs::remove_file(dir.join(format!("goes-{at}"))).unwrap();
            File::create(dir.join(format!("comes-{at}"))).unwrap();
        }
    }
    // What was there all the time is seen exactly once; nothing is seen twice.
    assert!((0..5000).all(|at| seen.get(&format!("stays-{at}")) == Some(&1)));
    assert!(seen.values().all(|times| *times == 1));
}

#[test]
fn inode_numbers_stay() {
    let mut place = Place::new();
    fs::create_dir(place.join("dir")).unwrap();
    (0..50).for_each(|at| fs::write(place.join(&format!("dir/{at}")), b"x").unwrap());
    let numbers = |place: &Place| -> Vec<u64> {
        let of = |name: String| fs::symlink_metadata(place.join(&name)).unwrap().ino();
        (0..50).map(|at| of(format!("dir/{at}"))).chain([of("dir".to_owned()), of(".".to_owned())]).collect()
    };
    let before = numbers(&place);
    assert_eq!(before.iter().collect::<BTreeSet<_>>().len(), 52);
    place.remount();
    assert_eq!(numbers(&place), before);
    let listed: BTreeSet<u64> = fs::read_dir(place.join("dir"))
        .unwrap()
        .map(|entry| std::os::unix::fs::DirEntryExt::ino(&entry.unwrap()))
        .collect();
    assert_eq!(listed, before[..50].iter().copied().collect());
}

#[test]
fn a_working_directory_may_be_removed() {
    let place = Place::new();
    let dir = place.join("dir");
    fs::create_dir(&dir).unwrap();
    let open = File::open(&dir).unwrap();
    fs::remove_dir(&dir).unwrap();
    let inside =
        std::path::PathBuf::from(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open)));
    assert_eq!(fs::read_dir(&inside).unwrap().count(), 0);
    assert_eq!(errno(File::create(inside.join("x"))), libc::ENOENT);
}
