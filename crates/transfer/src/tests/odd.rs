//! Trees that few people have.

use rustix::fs::{Mode, OFlags, mkdirat};

use super::*;

/// On a disk, where a file may have 16 TiB at most.
const HUGE: u64 = 9 << 40;

#[test]
fn files_that_are_mostly_holes_are_sent_and_received_in_time() {
    let [from, to, mirror] = [(); 3].map(|()| tempdir().unwrap());
    let huge = File::create(from.path().join("huge")).unwrap();
    huge.set_len(HUGE + 5).unwrap();
    for at in [0, (3 << 40) - 1000, HUGE - 7] {
        huge.write_all_at(&noise(at, 100_000), at).unwrap();
    }
    File::create(from.path().join("nothing")).unwrap().set_len(HUGE).unwrap();
    let (manifest, sent) = send_folder(from.path(), mirror.path(), "one");
    assert!(sent.bytes < 2_000_000, "{}", sent.bytes);
    let (_dir, cache) = cache();
    receive_into(&source(mirror.path()), "one", to.path(), &[], &cache);
    let blocks = |name: &str| fs::metadata(to.path().join(name)).unwrap().blocks();
    assert!(blocks("huge") * 512 < 2_000_000 && blocks("nothing") == 0, "{}", blocks("huge"));
    for at in [0, (3 << 40) - 1000, HUGE - 7] {
        let mut bytes = vec![0; 100_000];
        File::open(to.path().join("huge")).unwrap().read_exact_at(&mut bytes, at).unwrap();
        assert!(bytes == noise(at, 100_000), "at {at}");
    }
    // Where others look on: the tree is named by what is read.
    assert_eq!(hayloft_tree::walk(to.path(), &Progress::default()).unwrap().name, manifest.tree);
    // A little more of it, in what was a hole.
    huge.write_all_at(b"more", 5 << 40).unwrap();
    let seeds = [Tree { manifest: read(to.path()), folder: to.path().to_owned() }];
    let (_, sent) = send_folder(from.path(), mirror.path(), "two");
    assert!(sent.bytes < 100_000, "{}", sent.bytes);
    let next = tempdir().unwrap();
    receive_into(&source(mirror.path()), "two", next.path(), &seeds, &cache);
}

#[test]
fn folders_may_lie_deeper_than_a_path_is_long() {
    let [from, to, mirror] = [(); 3].map(|()| tempdir().unwrap());
    let mut dir = std::os::fd::OwnedFd::from(File::open(from.path()).unwrap());
    let mut path = Vec::new();
    for level in 0..600 {
        let name = format!("level-{level:06}");
        mkdirat(&dir, name.as_str(), Mode::RWXU).unwrap();
        path.extend_from_slice(format!("{}{name}", if level > 0 { "/" } else { "" }).as_bytes());
        dir = hayloft_tree::open_below(&dir, name.as_bytes(), OFlags::RDONLY | OFlags::DIRECTORY).unwrap();
    }
    let flags = OFlags::CREATE | OFlags::WRONLY;
    let file = rustix::fs::openat(&dir, "file", flags, Mode::RWXU).unwrap();
    File::from(file).write_all(b"far below").unwrap();
    send_folder(from.path(), mirror.path(), "one");
    let (_dir, cache) = cache();
    receive_into(&source(mirror.path()), "one", to.path(), &[], &cache);
    let top = File::open(to.path()).unwrap();
    path.extend_from_slice(b"/file");
    let mut text = String::new();
    File::from(hayloft_tree::open_below(&top, &path, OFlags::RDONLY).unwrap())
        .read_to_string(&mut text)
        .unwrap();
    assert_eq!(text, "far below");
}

#[test]
fn holes_that_do_not_fit_are_refused() {
    let [from, to] = [(); 2].map(|()| tempdir().unwrap());
    File::create(from.path().join("huge")).unwrap().set_len(1 << 30).unwrap();
    let manifest = read(from.path());
    let entry = &manifest.entries[1];
    assert_eq!(entry.holes, [0, 1 << 30]);
    let chunk = read_one_chunk(to.path());
    for (holes, has_chunk) in [
        (vec![0, 1 << 29], false),
        (vec![0, 1 << 31], false),
        (vec![1, (1 << 30) - 1], false),
        (vec![0, 1 << 30], true),
        (vec![0, 1 << 29, 1 << 28, 1 << 29], false),
        (vec![0], false),
        (vec![u64::MAX - 65535, 1 << 30], false),
        (vec![1 << 16, u64::MAX], false),
        (Vec::new(), false),
    ] {
        let mut wrong = manifest.clone();
        wrong.entries[1].holes.clone_from(&holes);
        if has_chunk {
            (wrong.entries[1].chunks, wrong.entries[1].lengths) = chunk.clone();
        }
        Manifest::from_bytes(&wrong.to_bytes()).expect_err(&format!("{holes:?}"));
    }
    Manifest::from_bytes(&manifest.to_bytes()).unwrap();
}

/// The chunk of a file that has one.
fn read_one_chunk(folder: &Path) -> (Vec<u8>, Vec<u32>) {
    fs::write(folder.join("x"), vec![7; 65536]).unwrap();
    let manifest = read(folder);
    (manifest.entries[1].chunks.clone(), manifest.entries[1].lengths.clone())
}
