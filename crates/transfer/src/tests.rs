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

/// Any change, from and to anything, seeds or none.
#[test]
fn a_folder_becomes_what_was_sent_whatever_it_was() {
    type Change = fn(&Path);
    let changes: [Change; 12] = [
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

#[test]
fn a_stream_has_what_the_other_side_lacks() {
    let [from, to, mirror, spool] = [(); 4].map(|()| tempdir().unwrap());
    make(from.path());
    let (first, _) = send_folder(from.path(), mirror.path(), "one");
    let (_dir, cache) = cache();
    receive_into(&source(mirror.path()), "one", to.path(), &[], &cache);
    fs::write(from.path().join("new"), noise(5000, 100_000)).unwrap();
    let second = read(from.path());
    let mut stream = Vec::new();
    send(
        &version(&second, from.path(), "two"),
        Some(&first),
        &mut Tar::new(&mut stream).unwrap(),
        &|_, _| {},
    )
    .unwrap();
    assert!(stream.len() < 200_000, "{}", stream.len());
    let record = Folder::new(spool.path()).unwrap().unpack(stream.as_slice()).unwrap();
    assert_eq!(record.snapshot, "two");
    let source = source(spool.path());
    // Whoever lacks the version that it builds on is told.
    let wanted = manifest(&mut Packs::new(&source, &record), &record, &cache, &[]).unwrap();
    let error =
        fetch(&mut Packs::new(&source, &record), &record, wanted, &[], &cache, &|_, _| {}).err().unwrap();
    assert!(error.to_string().contains("--since"), "{error}");
    let copy = tempdir().unwrap();
    assert!(
        std::process::Command::new("cp")
            .arg("-aT")
            .arg(to.path())
            .arg(copy.path())
            .status()
            .unwrap()
            .success()
    );
    let seeds = [Tree { manifest: read(copy.path()), folder: copy.path().to_owned() }];
    receive_into(&source, "two", to.path(), &seeds, &cache);
    // Cut anywhere, or changed, it is refused.
    // The last KiB only says that nothing follows.
    for len in (0..stream.len() - 2048).step_by(stream.len() / 37) {
        let spool = tempdir().unwrap();
        Folder::new(spool.path()).unwrap().unpack(&stream[..len]).unwrap_err();
    }
}

/// However many versions behind, a receiver asks for few indexes: the newest packs are looked at first.
#[test]
fn who_has_missed_versions_does_not_read_all_indexes() {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    fs::write(from.path().join("large"), noise(1, 40_000_000)).unwrap();
    let (first, _) = send_folder(from.path(), mirror.path(), "v0");
    let old = copy(from.path());
    for version in 1..5 {
        fs::write(from.path().join("small"), format!("{version}")).unwrap();
        send_folder(from.path(), mirror.path(), &format!("v{version}"));
    }
    let server = serve(mirror.path().to_owned(), true);
    let (_dir, cache) = cache();
    let source = Source::new(&server.at);
    let seeds = [Tree { manifest: first, folder: old.path().to_owned() }];
    let to = tempdir().unwrap();
    receive_into(&source, "v4", to.path(), &seeds, &cache);
    assert!(source.received() < 50_000, "{}", source.received());
}

/// A web server that knows ranges or not, and cuts connections once it has sent so many bytes.
struct Server {
    at: String,
    sent: Arc<AtomicU64>,
    most: Arc<AtomicU64>,
}

fn serve(folder: PathBuf, ranges: bool) -> Server {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = format!("http://{}/", listener.local_addr().unwrap());
    let (sent, most) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(u64::MAX)));
    let server = Server { at, sent: Arc::clone(&sent), most: Arc::clone(&most) };
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (folder, sent, most) = (folder.clone(), Arc::clone(&sent), Arc::clone(&most));
            std::thread::spawn(move || answer(stream.unwrap(), &folder, ranges, &sent, &most));
        }
    });
    server
}

fn answer(stream: TcpStream, folder: &Path, ranges: bool, sent: &AtomicU64, most: &AtomicU64) {
    let mut read = BufReader::new(stream.try_clone().unwrap());
    let (mut line, mut range) = (String::new(), None);
    read.read_line(&mut line).unwrap();
    let path = line.split(' ').nth(1).unwrap().trim_start_matches('/').to_owned();
    loop {
        line.clear();
        if read.read_line(&mut line).unwrap() == 0 || line.trim().is_empty() {
            break;
        }
        if let Some(asked) = line.to_lowercase().strip_prefix("range: bytes=").filter(|_| ranges) {
            let (begin, end) = asked.trim().split_once('-').unwrap();
            range = Some((begin.parse::<usize>().unwrap(), end.parse::<usize>().unwrap() + 1));
        }
    }
    let mut stream = stream;
    let Ok(bytes) = fs::read(folder.join(path)) else {
        let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        return;
    };
    let (status, body) = match range {
        Some((begin, end)) => ("206 Partial Content", &bytes[begin..end]),
        None => ("200 OK", &bytes[..]),
    };
    let head = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
    let left = most.load(Relaxed);
    let some = body.len().min(usize::try_from(left).unwrap_or(usize::MAX));
    most.store(left - some as u64, Relaxed);
    let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(&body[..some]));
    sent.fetch_add(some as u64, Relaxed);
}

#[test]
fn a_web_server_is_a_mirror_with_ranges_or_without() {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    make(from.path());
    let (_, sent) = send_folder(from.path(), mirror.path(), "one");
    for ranges in [true, false] {
        let server = serve(mirror.path().to_owned(), ranges);
        let to = tempdir().unwrap();
        let (_dir, cache) = cache();
        let source = Source::new(&server.at);
        receive_into(&source, "one", to.path(), &[], &cache).forget();
        // Each pack comes once, or one more time until it shows that there are no ranges.
        let most = sent.bytes * if ranges { 1 } else { 2 } + 50_000;
        assert!(source.received() < most, "{} of {}", source.received(), sent.bytes);
        let error = source.record("v", "other").unwrap_err();
        assert!(error.to_string().contains("has no version v@other"), "{error}");
    }
}

#[test]
fn what_has_come_before_a_cut_does_not_come_again() {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    fs::write(from.path().join("f"), noise(1, 20_000_000)).unwrap();
    send_folder(from.path(), mirror.path(), "one");
    let server = serve(mirror.path().to_owned(), true);
    let (_dir, cache) = cache();
    let source = Source::new(&server.at);
    let record = source.record("v", "one").unwrap();
    let wanted = manifest(&mut Packs::new(&source, &record), &record, &cache, &[]).unwrap();
    server.most.store(15_000_000, Relaxed);
    let error = fetch(&mut Packs::new(&source, &record), &record, wanted.clone(), &[], &cache, &|_, _| {})
        .err()
        .unwrap();
    assert!(error.to_string().contains("packs/"), "{error}");
    server.most.store(u64::MAX, Relaxed);
    let before = server.sent.load(Relaxed);
    let to = tempdir().unwrap();
    let received =
        fetch(&mut Packs::new(&source, &record), &record, wanted, &[], &cache, &|_, _| {}).unwrap();
    let again = server.sent.load(Relaxed) - before;
    received.apply(to.path(), None, &[], &|_, _| {}).unwrap();
    assert_eq!(read(to.path()).tree, read(from.path()).tree);
    assert!((5_000_000..9_000_000).contains(&again), "{again}");
}

#[test]
fn manifests_that_lead_elsewhere_are_refused() {
    let from = tempdir().unwrap();
    make(from.path());
    let good = read(from.path());
    Manifest::from_bytes(&good.to_bytes()).unwrap();
    type Harm = fn(&mut crate::manifest::Entry);
    let harms: [(&str, Harm); 9] = [
        ("no name", |entry| entry.path = b"zz/..".to_vec()),
        ("no directory", |entry| entry.path = b"zz/x".to_vec()),
        ("no directory", |entry| entry.path = b"zlink/x".to_vec()),
        ("no name", |entry| entry.path = b"zlink/".to_vec()),
        ("order", |entry| entry.path = b"/etc/passwd".to_vec()),
        ("not have its size", |entry| entry.size = 5),
        ("do not agree", |entry| entry.chunks = vec![0; 31]),
        ("not there", |entry| entry.same_as = b"nothing".to_vec()),
        ("not have its size", |entry| {
            entry.chunks = vec![0; 32];
            entry.lengths = vec![u32::MAX];
            entry.size = u64::from(u32::MAX);
        }),
    ];
    for (what, harm) in harms {
        let mut bad = good.clone();
        let mut link = bad.entries.last().unwrap().clone();
        link.path = b"zlink".to_vec();
        link.mode = 0o120_777;
        link.target = b"/etc".to_vec();
        let mut entry = bad.entries.iter().find(|entry| entry.path == b"no bytes").unwrap().clone();
        entry.path = b"zzz".to_vec();
        bad.entries.extend([link, entry]);
        Manifest::from_bytes(&bad.to_bytes()).unwrap();
        harm(bad.entries.last_mut().unwrap());
        let error = Manifest::from_bytes(&bad.to_bytes()).unwrap_err().to_string();
        assert!(error.contains(what), "{what}: {error}");
    }
}

#[test]
fn damage_anywhere_in_a_mirror_is_found_before_anything_is_done() {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    make(from.path());
    let (_, sent) = send_folder(from.path(), mirror.path(), "one");
    assert_eq!(sent.packs, 1);
    let pack = fs::read_dir(mirror.path().join("packs")).unwrap().next().unwrap().unwrap().path();
    let good = fs::read(&pack).unwrap();
    let source = source(mirror.path());
    for at in (16..good.len()).step_by(good.len() / 101) {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        fs::write(&pack, &bad).unwrap();
        let to = tempdir().unwrap();
        let (_dir, cache) = cache();
        let done = source.record("v", "one").and_then(|record| {
            let wanted = manifest(&mut Packs::new(&source, &record), &record, &cache, &[])?;
            fetch(&mut Packs::new(&source, &record), &record, wanted, &[], &cache, &|_, _| {})?.apply(
                to.path(),
                None,
                &[],
                &|_, _| {},
            )
        });
        // A bit that means nothing to the decompressor may be another one.
        if done.is_ok() {
            assert_eq!(read(to.path()).tree, read(from.path()).tree, "at {at}");
        }
    }
}

#[test]
fn what_has_not_changed_is_not_read_again() {
    let from = tempdir().unwrap();
    make(from.path());
    let first = read(from.path());
    fs::write(from.path().join("dir/3"), "new").unwrap();
    let progress = Progress::default();
    let second = Manifest::of_folder(from.path(), Some(&first), &progress).unwrap();
    assert_eq!(second.to_bytes(), read(from.path()).to_bytes());
    assert_ne!(first.tree, second.tree);
    let mut kept = Vec::new();
    File::open(from.path().join("dir/3")).unwrap().read_to_end(&mut kept).unwrap();
    assert_eq!(kept, b"new");
}

fn copy(from: &Path) -> TempDir {
    let to = tempdir().unwrap();
    assert!(std::process::Command::new("cp").arg("-aT").arg(from).arg(to.path()).status().unwrap().success());
    to
}

#[test]
fn what_two_have_changed_in_different_paths_is_put_together() {
    let base = tempdir().unwrap();
    make(base.path());
    let [ours, theirs] = [copy(base.path()), copy(base.path())];
    let (top, far) = (ours.path(), theirs.path());
    fs::write(top.join("dir/1"), "ours").unwrap();
    fs::remove_file(top.join("dir/2")).unwrap();
    fs::write(top.join("dir/new of ours"), "x").unwrap();
    fs::set_permissions(top.join("dir/deep"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::write(far.join("dir/3"), "theirs").unwrap();
    fs::remove_dir(far.join("empty")).unwrap();
    fs::rename(far.join("large"), far.join("dir/large")).unwrap();
    fs::create_dir(far.join("folder")).unwrap();
    fs::hard_link(far.join("dir/4"), far.join("folder/four")).unwrap();
    // Both have done the same here.
    for top in [top, far] {
        fs::write(top.join("same"), "both").unwrap();
        fs::remove_file(top.join("dir/5")).unwrap();
    }
    let [one, two, three] = [base.path(), top, far].map(read);
    let merged = merge(&one, &two, &three).unwrap();
    let trees = |folders: [&Path; 2]| {
        folders.map(|folder| Tree { manifest: read(folder), folder: folder.to_owned() })
    };
    let made = copy(top);
    make_of(&made, &two, &merged, &trees([top, far]));
    let has = |name: &str| fs::read_to_string(made.path().join(name)).unwrap_or_default();
    assert_eq!(
        (has("dir/1").as_str(), has("dir/3").as_str(), has("same").as_str()),
        ("ours", "theirs", "both")
    );
    for gone in ["dir/2", "dir/5", "empty", "large"] {
        assert!(!made.path().join(gone).exists(), "{gone}");
    }
    assert_eq!(fs::read(made.path().join("dir/large")).unwrap(), noise(1000, 3_000_000));
    let inode = |name: &str| fs::metadata(made.path().join(name)).unwrap().ino();
    assert_eq!(inode("dir/4"), inode("folder/four"));
    // Whose work is called ours does not matter, nothing new changes nothing, and what is merged stays merged.
    assert_eq!(merge(&one, &three, &two).unwrap().tree, merged.tree);
    assert_eq!(merge(&one, &two, &one).unwrap().tree, two.tree);
    assert_eq!(merge(&one, &one, &two).unwrap().tree, two.tree);
    assert_eq!(merge(&one, &merged, &three).unwrap().tree, merged.tree);
}

fn make_of(folder: &TempDir, is: &Manifest, wanted: &Manifest, seeds: &[Tree]) {
    crate::make(folder.path(), is, wanted, seeds, &|_, _| {}).unwrap();
    let found = read(folder.path());
    assert_eq!(found.tree, wanted.tree);
}

#[test]
fn what_both_have_changed_is_named() {
    type Change = fn(&Path);
    let cases: [(&str, &str, Change, Change); 7] = [
        (
            "dir/1",
            "changed here and there",
            |top| fs::write(top.join("dir/1"), "a").unwrap(),
            |top| {
                fs::write(top.join("dir/1"), "b").unwrap();
            },
        ),
        (
            "dir/1",
            "removed here",
            |top| fs::remove_file(top.join("dir/1")).unwrap(),
            |top| {
                fs::write(top.join("dir/1"), "b").unwrap();
            },
        ),
        (
            "dir/1",
            "removed there",
            |top| fs::write(top.join("dir/1"), "b").unwrap(),
            |top| {
                fs::remove_file(top.join("dir/1")).unwrap();
            },
        ),
        (
            "new",
            "changed here and there",
            |top| fs::write(top.join("new"), "a").unwrap(),
            |top| {
                fs::create_dir(top.join("new")).unwrap();
            },
        ),
        (
            "empty/new",
            "its folder was removed",
            |top| fs::remove_dir(top.join("empty")).unwrap(),
            |top| {
                fs::write(top.join("empty/new"), "a").unwrap();
            },
        ),
        (
            "nine",
            "another name",
            |top| fs::write(top.join("dir/10"), "a").unwrap(),
            |top| {
                fs::hard_link(top.join("dir/10"), top.join("nine")).unwrap();
            },
        ),
        (
            "dir/1",
            "changed here and there",
            |top| {
                fs::set_permissions(top.join("dir/1"), fs::Permissions::from_mode(0o600)).unwrap();
            },
            |top| {
                fs::set_permissions(top.join("dir/1"), fs::Permissions::from_mode(0o755)).unwrap();
            },
        ),
    ];
    let base = tempdir().unwrap();
    make(base.path());
    let before = read(base.path());
    for (path, why, here, there) in cases {
        let [ours, theirs] = [copy(base.path()), copy(base.path())];
        here(ours.path());
        there(theirs.path());
        let conflicts = merge(&before, &read(ours.path()), &read(theirs.path())).unwrap_err();
        let [conflict] = conflicts.as_slice() else { panic!("{path}: {conflicts:?}") };
        assert_eq!(conflict.path, path.as_bytes());
        assert!(conflict.why.contains(why), "{path}: {}", conflict.why);
    }
}

/// Random changes by two, each below a folder of its own or of both: what one side alone has done is done, or a conflict is told.
#[test]
fn nothing_is_lost_by_a_merge() {
    let mut random = 88_172_645_463_325_252_u64;
    let mut next = |below: u64| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % below
    };
    let (mut merged_count, mut refused) = (0, 0);
    for round in 0..60 {
        let base = tempdir().unwrap();
        for dir in 0..4 {
            fs::create_dir(base.path().join(format!("{dir}"))).unwrap();
            for file in 0..6 {
                fs::write(base.path().join(format!("{dir}/{file}")), format!("{dir}{file}")).unwrap();
            }
        }
        let sides = [copy(base.path()), copy(base.path())];
        for (which, side) in sides.iter().enumerate() {
            for step in 0..1 + next(5) {
                // Mostly in folders of its own.
                let dir = if next(8) == 0 { next(4) } else { which as u64 * 2 + next(2) };
                let file = side.path().join(format!("{dir}/{}", next(8)));
                let other = side.path().join(format!("{dir}/{}", next(8)));
                let _ = match next(5) {
                    0 => fs::remove_file(&file),
                    1 => fs::rename(&file, &other),
                    2 => fs::hard_link(&file, &other),
                    _ => fs::write(&file, format!("{which} {step}")),
                };
            }
        }
        let [one, two, three] = [base.path(), sides[0].path(), sides[1].path()].map(read);
        let Ok(merged) = merge(&one, &two, &three) else {
            refused += 1;
            continue;
        };
        merged_count += 1;
        let made = copy(sides[0].path());
        let seeds = [(&two, sides[0].path()), (&three, sides[1].path())]
            .map(|(manifest, folder)| Tree { manifest: manifest.clone(), folder: folder.to_owned() });
        make_of(&made, &two, &merged, &seeds);
        for dir in 0..4 {
            for file in 0..8 {
                let path = format!("{dir}/{file}");
                let of = |top: &Path| fs::read(top.join(&path)).ok();
                let (was, here, there, is) =
                    (of(base.path()), of(sides[0].path()), of(sides[1].path()), of(made.path()));
                let wanted = if here == was { there } else { here };
                assert_eq!(is, wanted, "round {round}: {path}");
            }
        }
    }
    assert!(merged_count > 20 && refused > 2, "{merged_count} merged, {refused} refused");
}

/// A mirror of one version of a folder, whose manifest and record a stranger may change.
fn forged(forge: impl FnOnce(&mut Manifest, &mut Record)) -> (TempDir, Record) {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    make(from.path());
    let (good, _) = send_folder(from.path(), mirror.path(), "one");
    let mut record = source(mirror.path()).record("v", "one").unwrap();
    let mut bad = good.clone();
    forge(&mut bad, &mut record);
    if bad != good {
        // Its chunks are in the mirror; the manifest's get a pack.
        let mut sink = Folder::new(mirror.path()).unwrap();
        send(&version(&bad, from.path(), "bad"), None, &mut sink, &|_, _| {}).unwrap();
        let sent = source(mirror.path()).record("v", "bad").unwrap();
        (record.manifest, record.packs) = (sent.manifest, sent.packs);
    }
    for name in ["one", LATEST] {
        let path = mirror.path().join(format!("versions/v/{name}.json"));
        fs::write(path, serde_json::to_vec(&record).unwrap()).unwrap();
    }
    (mirror, record)
}

#[test]
fn files_with_other_chunks_than_their_name_says_are_refused() {
    let (mirror, honest) = forged(|manifest, _| {
        let at = |manifest: &Manifest, path: &[u8]| {
            manifest.entries.iter().position(|entry| entry.path == path).unwrap()
        };
        let (one, large) = (at(manifest, b"dir/100"), at(manifest, b"large"));
        // What the tree's name is computed from stays; chunks of the same lengths are others.
        let entry = &mut manifest.entries[large];
        let first = entry.chunks[..32].to_vec();
        let same = entry.lengths.iter().skip(1).position(|len| *len == entry.lengths[0]);
        assert!(same.is_none() && entry.lengths.len() > 2);
        let (len, last) = (entry.lengths.len(), entry.chunks.len() - 32);
        let moved = entry.chunks[last..].to_vec();
        entry.chunks.splice(..32, moved);
        entry.chunks.splice(last.., first);
        entry.lengths.swap(0, len - 1);
        let content = manifest.entries[one].content_hash();
        manifest.entries[one].content = content.to_vec();
    });
    let source = source(mirror.path());
    let (_dir, cache) = cache();
    let to = tempdir().unwrap();
    let record = source.record("v", "one").unwrap();
    assert_eq!(record.tree, honest.tree);
    let mut packs = Packs::new(&source, &record);
    let wanted = manifest(&mut packs, &record, &cache, &[]).unwrap();
    let received = fetch(&mut packs, &record, wanted, &[], &cache, &|_, _| {}).unwrap();
    let error = received.apply(to.path(), None, &[], &|_, _| {}).unwrap_err();
    assert!(error.to_string().contains("other chunks than its name"), "{error}");
}

#[test]
fn records_that_no_honest_sender_writes_are_refused() {
    type Forge = fn(&mut Record);
    let forges: [Forge; 9] = [
        |record| record.volume = "production".to_owned(),
        |record| record.snapshot = "two".to_owned(),
        |record| record.volume = "../v".to_owned(),
        |record| record.note = "x".repeat(3_000_000),
        |record| record.note = "\x1b[2J\nv@forged".to_owned(),
        |record| record.signatures = vec!["x".repeat(100_000)],
        |record| record.packs[0].index = 1 << 46,
        |record| (record.packs[0].size, record.packs[0].index) = (1 << 63, 1 << 63),
        |record| record.packs[0].index = 0,
    ];
    for (at, forge) in forges.into_iter().enumerate() {
        let (mirror, _) = forged(|_, record| forge(record));
        source(mirror.path()).record("v", "one").map(drop).expect_err(&format!("forgery {at}"));
    }
    // The same chunk, again and again, is no manifest.
    let (mirror, record) = forged(|_, record| record.manifest = vec![record.manifest[0]; 100_000]);
    let source = source(mirror.path());
    let (_dir, cache) = cache();
    manifest(&mut Packs::new(&source, &record), &record, &cache, &[]).unwrap_err();
}

#[test]
fn a_name_stands_for_one_tree_and_latest_for_none() {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    fs::write(from.path().join("a"), "1").unwrap();
    send_folder(from.path(), mirror.path(), "one");
    send_folder(from.path(), mirror.path(), "one");
    fs::write(from.path().join("a"), "2").unwrap();
    let changed = read(from.path());
    for (name, what) in [("one", "another tree as v@one"), (LATEST, "choose another name")] {
        let mut sink = Folder::new(mirror.path()).unwrap();
        let error = send(&version(&changed, from.path(), name), None, &mut sink, &|_, _| {}).unwrap_err();
        assert!(error.to_string().contains(what), "{error}");
    }
}

/// Of the newest version there is one record, which gets the version's name when another one follows.
#[test]
fn a_mirror_has_a_record_for_each_version_and_no_more() {
    let [from, mirror] = [(); 2].map(|()| tempdir().unwrap());
    let records = || {
        let found = fs::read_dir(mirror.path().join("versions/v")).unwrap();
        let mut names: Vec<_> =
            found.map(|found| found.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names.join(" ")
    };
    for (at, name) in ["one", "two", "three"].into_iter().enumerate() {
        fs::write(from.path().join("a"), name).unwrap();
        send_folder(from.path(), mirror.path(), name);
        let source = source(mirror.path());
        let trees: Vec<_> = ["one", "two", "three"][..=at]
            .iter()
            .map(|name| source.record("v", name).unwrap().tree)
            .collect();
        assert_eq!(trees.iter().collect::<std::collections::HashSet<_>>().len(), at + 1);
        assert_eq!(source.record("v", LATEST).unwrap().snapshot, name);
    }
    assert_eq!(records(), "latest.json one.json two.json");
    // An older one that is sent again is the latest, and both are found under their names.
    fs::write(from.path().join("a"), "one").unwrap();
    send_folder(from.path(), mirror.path(), "one");
    assert_eq!(records(), "latest.json one.json three.json two.json");
    let source = source(mirror.path());
    assert_eq!(source.record("v", LATEST).unwrap(), source.record("v", "one").unwrap());
    assert_eq!(source.record("v", "three").unwrap().snapshot, "three");
    let error = source.record("v", "four").unwrap_err();
    assert!(error.to_string().contains("has no version v@four"), "{error}");
}

/// A default access control list would be given to each file, and none of them is in the tree's name.
#[test]
fn what_a_folder_gives_to_new_files_does_not_matter() {
    let [from, to, mirror] = [(); 3].map(|()| tempdir().unwrap());
    make(from.path());
    send_folder(from.path(), mirror.path(), "one");
    let set = std::process::Command::new("setfattr")
        .args([
            "-n",
            "system.posix_acl_default",
            "-v",
            "0x0200000001000700ffffffff02000700fffe000004000500ffffffff10000700ffffffff20000500ffffffff",
        ])
        .arg(to.path())
        .status();
    assert!(set.unwrap().success());
    let (_dir, cache) = cache();
    receive_into(&source(mirror.path()), "one", to.path(), &[], &cache);
}
