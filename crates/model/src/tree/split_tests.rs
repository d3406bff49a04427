//! Split directories at the client.

use super::*;
use crate::grants::Object;
use crate::tree::{AttributeChange, FIRST_COOKIE, NewNode, RenameFlags};
use crate::{InoRange, Record, Sequence, Usage};

const DIR: Ino = Ino(20);

fn time(secs: i64) -> Timestamp {
    Timestamp { secs, nanos: 0 }
}

fn name(name: &str) -> Name {
    Name::new(name.as_bytes())
}

fn missing<T: std::fmt::Debug>(result: Result<T, TreeError>) -> Missing {
    match result {
        Err(TreeError::Missing(missing)) => missing,
        other => panic!("{other:?}"),
    }
}

fn new_file() -> NewNode {
    NewNode { mode: FileKind::Regular.bits() | 0o644, ..NewNode::default() }
}

/// A tree with a split directory.
fn tree() -> Tree {
    let mut tree = Tree::new(Usage::default(), Usage::default());
    tree.share();
    tree.add_inode(Ino::ROOT, InodeRow::new(FileKind::Directory.bits() | 0o755, 3, Ino::ROOT));
    tree.add_split(DIR, InodeRow::new(FileKind::Directory.bits() | 0o755, 2, Ino::ROOT));
    tree.add_numbers(InoRange { next: 100, end: 1000 });
    tree
}

/// The same, with the slot of some names owned.
fn owning(stems: &[&str]) -> Tree {
    let mut tree = tree();
    for stem in stems {
        let slot = DIR.slot(stem.as_bytes(), Width::Few);
        tree.add_names(slot, stem.as_bytes(), []);
        tree.own(slot);
    }
    tree
}

#[test]
fn names_are_looked_for_by_stems() {
    let mut tree = tree();
    let slot = DIR.slot(b"foo.o", Width::Few);
    assert_eq!(missing(tree.lookup(DIR, b"foo.o")), Missing::Names(slot));
    assert_eq!(tree.wanted_stem(slot), Some(name("foo")));
    let dentry = Dentry { ino: Ino(50), kind: FileKind::Regular, cookie: FIRST_COOKIE };
    tree.add_names(slot, b"foo", [(name("foo.c"), dentry, None)]);
    assert_eq!(tree.lookup(DIR, b"foo.o"), Ok(None));
    assert_eq!(tree.lookup(DIR, b"foo.c"), Ok(Some(dentry)));
    let created = tree.create(DIR, b"foo.o", new_file(), time(2));
    assert_eq!(missing(created), Missing::Own(Object::Directory(slot)));
    assert_eq!(missing(tree.entries(DIR, 0).map(|_| ())), Missing::Listing(DIR));
}

#[test]
fn what_is_made_renamed_and_removed_leaves_nothing_to_ship() {
    let mut tree = owning(&["foo"]);
    let ino = tree.create(DIR, b"foo.Tpo", new_file(), time(2)).unwrap();
    assert!(tree.owns(ino));
    tree.rename((DIR, b"foo.Tpo"), (DIR, b"foo.Po"), RenameFlags::default(), time(3)).unwrap();
    assert_eq!(tree.unlink(DIR, b"foo.Po", time(4)), Ok(ino));
    let batch = tree.cut(Sequence(1), false).batch;
    assert_eq!((batch.records, batch.usage.inodes), (vec![], 0));
}

#[test]
fn what_is_made_is_shipped_without_the_row_of_the_directory() {
    let mut tree = owning(&["foo"]);
    let ino = tree.create(DIR, b"foo.Tpo", new_file(), time(2)).unwrap();
    tree.rename((DIR, b"foo.Tpo"), (DIR, b"foo.Po"), RenameFlags::default(), time(3)).unwrap();
    let cut = tree.cut(Sequence(1), false);
    assert!(matches!(&cut.batch.records[..],
        [Record::PutInode(of, row), Record::PutDentry(DIR, at, dentry)]
            if *of == ino && row.parent == DIR && *at == name("foo.Po") && dentry.ino == ino));
    tree.undo_cut(cut);
    assert_eq!(tree.cut(Sequence(1), false).batch.records.len(), 2, "it comes again");
    assert_eq!(tree.owned().len(), 2, "the slot, and the file by itself");
}

#[test]
fn a_name_has_a_place_in_listings_that_no_other_has() {
    let mut tree = owning(&["a", "b"]);
    let flags = RenameFlags::default();
    tree.create(DIR, b"a", new_file(), time(2)).unwrap();
    tree.create(DIR, b"b", new_file(), time(2)).unwrap();
    let first = tree.lookup(DIR, b"a").unwrap().unwrap().cookie;
    let replaced = tree.lookup(DIR, b"b").unwrap().unwrap().cookie;
    assert_ne!(first, replaced);
    tree.rename((DIR, b"a"), (DIR, b"b"), flags, time(3)).unwrap();
    assert_eq!(tree.lookup(DIR, b"b").unwrap().unwrap().cookie, replaced, "it is there all the time");
    tree.rename((DIR, b"b"), (DIR, b"b.x"), flags, time(4)).unwrap();
    let moved = tree.lookup(DIR, b"b.x").unwrap().unwrap().cookie;
    assert!(![first, replaced].contains(&moved));
}

#[test]
fn what_is_more_than_files_is_the_server_s_to_do() {
    let mut tree = owning(&["a", "b"]);
    let new = NewNode { mode: FileKind::Directory.bits() | 0o755, ..NewNode::default() };
    assert_eq!(missing(tree.create(DIR, b"a", new, time(2))), Missing::Executor);
    let ino = tree.create(DIR, b"a", new_file(), time(2)).unwrap();
    assert_eq!(missing(tree.link(ino, DIR, b"b", time(3))), Missing::Executor);
    let exchange = RenameFlags { exchange: true, ..RenameFlags::default() };
    tree.create(DIR, b"b", new_file(), time(3)).unwrap();
    assert_eq!(missing(tree.rename((DIR, b"a"), (DIR, b"b"), exchange, time(4))), Missing::Executor);
    let change = AttributeChange { mode: Some(0o700), ..AttributeChange::default() };
    assert_eq!(
        missing(tree.set_attributes(DIR, change, time(5))),
        Missing::Own(Object::Directory(DIR)),
        "its row is nobody's"
    );
}

#[test]
fn times_of_the_directory_run_with_the_clock() {
    let mut tree = tree();
    assert!(tree.run_clock(DIR, time(9)) && tree.run_clock(DIR, time(7)));
    assert_eq!(tree.inode(DIR).unwrap().mtime, time(9));
    assert!(!tree.run_clock(Ino::ROOT, time(9)));
    assert!(!tree.is_dirty());
}

#[test]
fn a_slot_is_given_back_with_what_the_kernel_knows_of_it() {
    let mut tree = owning(&["foo"]);
    let ino = tree.create(DIR, b"foo", new_file(), time(2)).unwrap();
    tree.remember(ino);
    tree.cut(Sequence(1), false);
    tree.shipped(Sequence(1));
    tree.disown(ino);
    assert_eq!(tree.in_use().collect::<Vec<_>>(), [ino], "its name may go without a word");
    let slot = DIR.slot(b"foo", Width::Few);
    tree.disown(slot);
    let stale = tree.uncover(Object::Directory(slot));
    assert_eq!(stale.names, [(DIR, name("foo"))]);
    assert_eq!(missing(tree.lookup(DIR, b"foo")), Missing::Names(slot));
    let stale = tree.uncover(Object::Directory(DIR));
    assert!(stale.attributes.contains(&DIR) && !tree.is_split(DIR));
}

#[test]
fn names_that_are_not_shipped_are_found_after_the_directory_was_forgotten() {
    let mut tree = owning(&["foo"]);
    tree.create(DIR, b"foo", new_file(), time(2)).unwrap();
    tree.uncover_all();
    assert!(!tree.has_inode(DIR) && tree.is_split(DIR));
    assert_eq!(tree.cut(Sequence(1), false).batch.records.len(), 2);
}

#[test]
fn who_only_looks_wants_the_listing() {
    let mut tree = tree();
    let looks = (0..).position(|at: u32| {
        let at = at.to_string();
        match missing(tree.lookup(DIR, at.as_bytes())) {
            Missing::Names(slot) => tree.add_names(slot, at.as_bytes(), []),
            wanted => return wanted == Missing::Listing(DIR),
        }
        false
    });
    assert_eq!(looks, Some(LOOKS_MAX as usize));
}

#[test]
fn a_recalled_directory_is_given_back_with_its_slots() {
    let mut tree = owning(&["foo", "bar"]);
    let mut slots = [DIR.slot(b"foo", Width::Few), DIR.slot(b"bar", Width::Few)];
    slots.sort_unstable();
    let owned_of = |tree: &Tree, of, keep_read| {
        let mut owned = tree.owned_of(Object::Directory(of), keep_read);
        owned.sort_unstable();
        owned
    };
    assert_eq!(owned_of(&tree, DIR, false), slots);
    assert_eq!(owned_of(&tree, DIR, true), [], "it may be read still, by slots as well");
    assert_eq!(owned_of(&tree, slots[0], false), slots[..1]);
    tree.disown(slots[0]);
    assert_eq!(owned_of(&tree, DIR, false), slots[1..]);
    tree.disown_all();
    assert_eq!(owned_of(&tree, DIR, false), []);
}
