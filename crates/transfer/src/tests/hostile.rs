//! What is damaged, forged, or has other names.

use super::*;

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
    assert_eq!(progress.bytes.load(Relaxed), 3, "more than what has changed was read");
    // What is beside the content is not overlooked.
    rustix::fs::setxattr(from.path().join("dir/4"), "user.note", b"new", rustix::fs::XattrFlags::empty())
        .unwrap();
    fs::set_permissions(from.path().join("dir/5"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::hard_link(from.path().join("dir/6"), from.path().join("six")).unwrap();
    let third = Manifest::of_folder(from.path(), Some(&second), &progress).unwrap();
    assert_eq!(third.to_bytes(), read(from.path()).to_bytes());
    let mut kept = Vec::new();
    File::open(from.path().join("dir/3")).unwrap().read_to_end(&mut kept).unwrap();
    assert_eq!(kept, b"new");
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
