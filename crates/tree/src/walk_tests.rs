//! Trees that are read.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::PIECE;

fn name(top: &Path) -> TreeName {
    walk(top, &Progress::default()).unwrap().name
}

fn make(top: &Path) {
    fs::create_dir_all(top.join("a/b")).unwrap();
    for at in 0..200 {
        fs::write(top.join(format!("a/{at}")), vec![at as u8; at * 1000]).unwrap();
    }
    fs::write(top.join("a-file"), "").unwrap();
    symlink("a/7", top.join("link")).unwrap();
    fs::hard_link(top.join("a/9"), top.join("a/b/nine")).unwrap();
}

#[test]
fn the_same_tree_has_the_same_name_and_any_change_another_one() {
    let [one, two] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    make(one.path());
    make(two.path());
    // As if it had been made on another file system, with its own ideas of links and times.
    fs::remove_file(two.path().join("a/b/nine")).unwrap();
    fs::copy(two.path().join("a/9"), two.path().join("a/b/nine")).unwrap();
    let first = name(one.path());
    assert_eq!(first, name(two.path()));
    let top = one.path();
    let back = fs::read(top.join("a/150")).unwrap();
    let mut changed = back.clone();
    changed[149_999] ^= 1;
    type Change<'a> = (&'a dyn Fn(), &'a dyn Fn());
    let mode = |mode| fs::set_permissions(top.join("a/b"), fs::Permissions::from_mode(mode)).unwrap();
    let changes: [Change<'_>; 5] = [
        (&|| fs::write(top.join("a/150"), &changed).unwrap(), &|| {
            fs::write(top.join("a/150"), &back).unwrap()
        }),
        (&|| mode(0o700), &|| mode(0o755)),
        (&|| fs::write(top.join("a/b/new"), "").unwrap(), &|| fs::remove_file(top.join("a/b/new")).unwrap()),
        (&|| fs::rename(top.join("a-file"), top.join("b-file")).unwrap(), &|| {
            fs::rename(top.join("b-file"), top.join("a-file")).unwrap()
        }),
        (&|| fs::create_dir(top.join("a/b/c")).unwrap(), &|| fs::remove_dir(top.join("a/b/c")).unwrap()),
    ];
    for (at, (there, back)) in changes.iter().enumerate() {
        there();
        assert_ne!(name(top), first, "change {at}");
        back();
        assert_eq!(name(top), first, "change {at} taken back");
    }
}

#[test]
fn holes_are_read_as_zeros() {
    let [one, two] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    File::create(one.path().join("f")).unwrap().set_len(3 * PIECE + 5).unwrap();
    fs::write(two.path().join("f"), vec![0; 3 * PIECE as usize + 5]).unwrap();
    assert_eq!(name(one.path()), name(two.path()));
}

#[test]
fn what_is_no_folder_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = walk(&dir.path().join("nothing"), &Progress::default()).unwrap_err();
    assert!(missing.to_string().contains("nothing"), "{missing}");
}

#[test]
fn some_paths_are_read_and_nothing_else() {
    let top = tempfile::tempdir().unwrap();
    make(top.path());
    symlink("a", top.path().join("to-a")).unwrap();
    let paths: [&[u8]; 8] = [b"", b"a", b"a/7", b"a/b/nine", b"link", b"none", b"none/deep", b"to-a/7"];
    let mut found = read(top.path(), paths, &Whole, &Progress::default()).unwrap();
    found.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    let whole = walk(top.path(), &Progress::default()).unwrap();
    let plain = |entry: &Entry| Entry { node: [0; 32], ..entry.clone() };
    let wanted = whole.entries.iter().filter(|entry| paths.contains(&entry.path.as_slice()));
    assert_eq!(found.iter().map(plain).collect::<Vec<_>>(), wanted.map(plain).collect::<Vec<_>>());
    assert_eq!(found.len(), 5);
    assert_eq!(found[3].links, 2);
}
