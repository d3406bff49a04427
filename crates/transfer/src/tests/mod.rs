mod combinations;
mod far;
mod hostile;
mod lying;
mod merging;
mod mirrors;
mod odd;
mod slow;

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hayloft_tree::Progress;
use tempfile::{TempDir, tempdir};

use crate::*;

/// Bytes that do not compress, and are others for each seed.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

fn make(top: &Path) {
    fs::create_dir_all(top.join("dir/deep")).unwrap();
    fs::create_dir(top.join("empty")).unwrap();
    for at in 0..150 {
        fs::write(top.join(format!("dir/{at}")), noise(at, at as usize * 37)).unwrap();
    }
    fs::write(top.join("large"), noise(1000, 3_000_000)).unwrap();
    fs::write(top.join("no bytes"), "").unwrap();
    File::create(top.join("holes")).unwrap().set_len(5_000_000).unwrap();
    symlink("dir/7", top.join("link")).unwrap();
    fs::hard_link(top.join("dir/9"), top.join("dir/deep/nine")).unwrap();
    fs::set_permissions(top.join("dir/8"), fs::Permissions::from_mode(0o4755)).unwrap();
    fs::set_permissions(top.join("empty"), fs::Permissions::from_mode(0o1777)).unwrap();
}

fn read(top: &Path) -> Manifest {
    Manifest::of_folder(top, None, &Progress::default()).unwrap()
}

fn version<'a>(manifest: &'a Manifest, folder: &'a Path, snapshot: &'a str) -> Version<'a> {
    Version { volume: "v", snapshot, created_nanos: 1, note: "", signatures: &[], manifest, folder }
}

fn send_folder(folder: &Path, mirror: &Path, snapshot: &str) -> (Manifest, Sent) {
    let manifest = read(folder);
    let mut sink = Folder::new(mirror).unwrap();
    let sent = send(&version(&manifest, folder, snapshot), None, &mut sink, &|_, _| {}).unwrap();
    (manifest, sent)
}

/// Receives a version into a folder that is what `is` says, and checks that it is what was sent then.
fn receive_into(source: &Source, snapshot: &str, folder: &Path, seeds: &[Tree], cache: &Cache) -> Received {
    let record = source.record("v", snapshot).unwrap();
    let like: Vec<&Manifest> = seeds.iter().map(|seed| &seed.manifest).collect();
    let wanted = manifest(&mut Packs::new(source, &record), &record, cache, &like).unwrap();
    let received =
        fetch(&mut Packs::new(source, &record), &record, wanted, seeds, cache, &|_, _| {}).unwrap();
    let is = (fs::read_dir(folder).unwrap().count() > 0).then(|| read(folder));
    received.apply(folder, is.as_ref(), seeds, &|_, _| {}).unwrap();
    assert_eq!(read(folder).to_bytes(), received.manifest.to_bytes(), "{snapshot}");
    assert_eq!(received.copy(folder, |copy| copy.tree).unwrap(), received.manifest.tree);
    assert_eq!(record.tree, received.manifest.tree.to_string());
    received
}

fn cache() -> (TempDir, Cache) {
    let dir = tempdir().unwrap();
    let cache = Cache::new(&dir.path().join("cache")).unwrap();
    (dir, cache)
}

fn source(path: &Path) -> Source {
    Source::new(path.to_str().unwrap())
}

fn copy(from: &Path) -> TempDir {
    let to = tempdir().unwrap();
    assert!(std::process::Command::new("cp").arg("-aT").arg(from).arg(to.path()).status().unwrap().success());
    to
}

#[test]
fn a_tree_comes_back_with_all_that_it_has() {
    let [from, to, mirror] = [(); 3].map(|()| tempdir().unwrap());
    make(from.path());
    send_folder(from.path(), mirror.path(), "one");
    let (_dir, cache) = cache();
    receive_into(&source(mirror.path()), "one", to.path(), &[], &cache);
    let stat = |top: &Path, name: &str| fs::metadata(top.join(name)).unwrap();
    assert_eq!(stat(to.path(), "dir/9").ino(), stat(to.path(), "dir/deep/nine").ino());
    assert_eq!(stat(to.path(), "dir").mtime_nsec(), stat(from.path(), "dir").mtime_nsec());
    assert_eq!(stat(to.path(), "dir/8").mode() & 0o7777, 0o4755);
    assert!(stat(to.path(), "holes").blocks() < 100, "holes have been filled");
}

#[test]
fn a_version_that_is_there_costs_nothing_and_an_inserted_byte_a_few_chunks() {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    make(from.path());
    let (_, first) = send_folder(from.path(), mirror.path(), "one");
    let (_, again) = send_folder(from.path(), mirror.path(), "again");
    assert_eq!((again.packs, again.new_chunks), (0, 0));
    let mut bytes = fs::read(from.path().join("large")).unwrap();
    bytes.insert(1_500_000, 1);
    fs::write(from.path().join("large"), bytes).unwrap();
    let (_, second) = send_folder(from.path(), mirror.path(), "two");
    assert!((1..=2).contains(&second.new_chunks), "{second:?}");
    assert!(second.bytes < first.bytes / 20, "{second:?} after {first:?}");
    assert_eq!(source(mirror.path()).record("v", LATEST).unwrap().snapshot, "two");
}

/// Gives a program the capability CAP_NET_BIND_SERVICE (`VFS_CAP_REVISION_2`, effective).
fn may_bind_low_ports(program: &Path) {
    let mut value = [0_u8; 20];
    value[..4].copy_from_slice(&0x0200_0001_u32.to_le_bytes());
    value[4..8].copy_from_slice(&(1_u32 << 10).to_le_bytes());
    rustix::fs::setxattr(program, "security.capability", &value, rustix::fs::XattrFlags::empty()).unwrap();
}

/// Any change, from and to anything, seeds or none.
#[test]
fn a_folder_becomes_what_was_sent_whatever_it_was() {
    type Change = fn(&Path);
    let changes: [Change; 14] = [
        |top| fs::remove_dir_all(top.join("dir/deep")).unwrap(),
        |top| fs::rename(top.join("dir"), top.join("renamed")).unwrap(),
        |top| {
            fs::remove_file(top.join("link")).unwrap();
            fs::create_dir(top.join("link")).unwrap();
            fs::write(top.join("link/in"), "x").unwrap();
        },
        |top| {
            fs::remove_dir(top.join("empty")).unwrap();
            symlink("/", top.join("empty")).unwrap();
        },
        |top| fs::write(top.join("renamed/9"), "two names have it").unwrap(),
        |top| fs::hard_link(top.join("renamed/9"), top.join("nine")).unwrap(),
        |top| {
            // Another file under the name, with the same bytes.
            fs::copy(top.join("renamed/9"), top.join("copy")).unwrap();
            fs::rename(top.join("copy"), top.join("nine")).unwrap();
        },
        |top| fs::set_permissions(top.join("renamed/10"), fs::Permissions::from_mode(0o600)).unwrap(),
        |top| {
            let file = File::options().write(true).open(top.join("large")).unwrap();
            file.write_all_at(b"middle", 1_000_000).unwrap();
            file.set_len(2_000_000).unwrap();
        },
        |top| fs::remove_dir_all(top.join("link")).unwrap(),
        |top| symlink("elsewhere", top.join("link")).unwrap(),
        |top| fs::set_permissions(top, fs::Permissions::from_mode(0o711)).unwrap(),
        |top| may_bind_low_ports(&top.join("renamed/11")),
        |top| {
            // chown(2) takes the capability away.
            std::os::unix::fs::chown(top.join("renamed/11"), Some(1234), Some(99)).unwrap();
            may_bind_low_ports(&top.join("renamed/11"));
        },
    ];
    let [from, to, mirror, copies] = [(); 4].map(|()| tempdir().unwrap());
    make(from.path());
    send_folder(from.path(), mirror.path(), "v0");
    let (_dir, cache) = cache();
    let source = source(mirror.path());
    receive_into(&source, "v0", to.path(), &[], &cache);
    for (at, change) in changes.iter().enumerate() {
        change(from.path());
        let name = format!("v{}", at + 1);
        send_folder(from.path(), mirror.path(), &name);
        // What the folder was, as a snapshot has it.
        let copy = copies.path().join(&name);
        let done = std::process::Command::new("cp").arg("-a").arg(to.path()).arg(&copy).status().unwrap();
        assert!(done.success());
        let seeds = [Tree { manifest: read(&copy), folder: copy }];
        let received = receive_into(&source, &name, to.path(), &seeds, &cache);
        assert!(received.lacked < 100_000, "{name}: {} bytes", received.lacked);
    }
    // All the way back at once, and from the first to the last.
    for (begin, end) in [("v12", "v0"), ("v0", "v12"), ("v5", "v3"), ("v2", "v9")] {
        let there = tempdir().unwrap();
        receive_into(&source, begin, there.path(), &[], &cache);
        receive_into(&source, end, there.path(), &[], &cache);
    }
}
