//! Trees that two have changed.

use super::*;

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
