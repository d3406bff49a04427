//! The tree: random histories, and cases by themselves.

mod histories;

use std::collections::HashMap;

use super::*;
use crate::{Record, Timestamp};

fn file(mode: u32) -> NewNode {
    NewNode { mode: 0o100000 | mode, ..NewNode::default() }
}

fn now() -> Timestamp {
    Timestamp { secs: 1, nanos: 0 }
}

fn fresh() -> Tree {
    let mut tree = Tree::new(Usage::default(), Usage::default());
    tree.add_inode(Ino::ROOT, histories::root_row());
    tree.add_listing(Ino::ROOT, []);
    tree.add_numbers(InoRange { next: 16, end: 1000 });
    tree
}

#[test]
fn what_is_made_and_removed_between_two_cuts_is_never_sent() {
    let mut tree = fresh();
    tree.cut(Sequence(1), false);
    for name in [b"x", b"y"] {
        let ino = tree.create(Ino::ROOT, name, file(0o644), now()).unwrap();
        tree.remember(ino);
        tree.unlink(Ino::ROOT, name, now()).unwrap();
        tree.forget(ino, 1);
    }
    let records = tree.cut(Sequence(2), false).batch.records;
    assert!(
        matches!(records[..], [Record::PutInode(Ino::ROOT, _)]),
        "only the directory's times: {records:?}"
    );
}

#[test]
fn an_open_file_without_a_name_stays_until_it_is_forgotten() {
    let mut tree = fresh();
    let ino = tree.create(Ino::ROOT, b"x", file(0o644), now()).unwrap();
    tree.remember(ino);
    tree.cut(Sequence(1), false);
    tree.unlink(Ino::ROOT, b"x", now()).unwrap();
    let batch = tree.cut(Sequence(2), false).batch;
    assert_eq!(batch.orphans, [ino]);
    assert_eq!(batch.usage.inodes, -1);
    assert_eq!(tree.inode(ino).unwrap().nlink, 0);
    assert_eq!(tree.link(ino, Ino::ROOT, b"again", now()), Err(TreeError::NotFound));
    assert!(tree.forget(ino, 1));
    assert_eq!(tree.cut(Sequence(3), false).batch.records, [Record::DeleteInode(ino)]);
}

#[test]
fn a_name_that_is_replaced_stays_where_listings_find_it() {
    let mut tree = fresh();
    for name in [b"a", b"b", b"c"] {
        tree.create(Ino::ROOT, name, file(0o644), now()).unwrap();
    }
    let place = |tree: &mut Tree, name: &[u8]| tree.lookup(Ino::ROOT, name).unwrap().unwrap().cookie;
    let before = place(&mut tree, b"a");
    tree.rename((Ino::ROOT, b"c"), (Ino::ROOT, b"a"), RenameFlags::default(), now()).unwrap();
    assert_eq!(place(&mut tree, b"a"), before);
    let before = place(&mut tree, b"b");
    let whiteout = RenameFlags { whiteout: true, ..RenameFlags::default() };
    tree.rename((Ino::ROOT, b"b"), (Ino::ROOT, b"d"), whiteout, now()).unwrap();
    assert_eq!(place(&mut tree, b"b"), before);
}

#[test]
fn unnamed_files_go_to_the_server_only_when_asked() {
    let mut tree = fresh();
    let ino = tree.create_unnamed(Ino::ROOT, file(0o600), now()).unwrap();
    tree.remember(ino);
    assert!(tree.cut(Sequence(1), false).batch.records.is_empty());
    assert_eq!(tree.cut(Sequence(2), true).batch.orphans, [ino]);
    tree.link(ino, Ino::ROOT, b"named", now()).unwrap();
    assert_eq!(tree.cut(Sequence(3), false).batch.usage.inodes, 1);
    // It has had its name: without one it goes.
    tree.unlink(Ino::ROOT, b"named", now()).unwrap();
    assert_eq!(tree.link(ino, Ino::ROOT, b"again", now()), Err(TreeError::NotFound));
}

#[test]
fn quotas_hold() {
    let mut tree = Tree::new(Usage::default(), Usage { bytes: 1000, inodes: 1 });
    tree.add_inode(Ino::ROOT, histories::root_row());
    tree.add_listing(Ino::ROOT, []);
    tree.add_numbers(InoRange { next: 16, end: 1000 });
    let ino = tree.create(Ino::ROOT, b"x", file(0o644), now()).unwrap();
    assert_eq!(tree.create(Ino::ROOT, b"y", file(0o644), now()), Err(TreeError::NoSpace));
    tree.wrote(ino, 900, 900, false, now()).unwrap();
    assert_eq!(tree.check_room(101), Err(TreeError::NoSpace));
    tree.unlink(Ino::ROOT, b"x", now()).unwrap();
    assert_eq!(tree.usage(), Usage::default());
}

#[test]
fn a_setgid_directory_hands_down_its_group() {
    let mut tree = fresh();
    let dir = NewNode { mode: 0o042775, gid: 50, ..NewNode::default() };
    let dir = tree.create(Ino::ROOT, b"d", dir, now()).unwrap();
    let sub =
        tree.create(dir, b"s", NewNode { mode: 0o040755, gid: 7, ..NewNode::default() }, now()).unwrap();
    let leaf = tree.create(dir, b"f", NewNode { gid: 7, ..file(0o644) }, now()).unwrap();
    assert_eq!((tree.inode(sub).unwrap().gid, tree.inode(sub).unwrap().mode), (50, 0o042755));
    assert_eq!((tree.inode(leaf).unwrap().gid, tree.inode(leaf).unwrap().mode), (50, 0o100644));
}

#[test]
fn writing_without_the_right_drops_privileges() {
    let mut tree = fresh();
    let ino = tree.create(Ino::ROOT, b"x", file(0o6755), now()).unwrap();
    tree.set_xattr(ino, b"security.capability", b"c", (false, false), now()).unwrap();
    tree.wrote(ino, 1, 1, false, now()).unwrap();
    assert_eq!(tree.inode(ino).unwrap().mode & 0o7777, 0o6755);
    tree.wrote(ino, 1, 1, true, now()).unwrap();
    assert_eq!(tree.inode(ino).unwrap().mode & 0o7777, 0o755);
    assert_eq!(tree.xattr(ino, b"security.capability"), Err(TreeError::NoAttribute));
}

#[test]
fn paths_lead_to_what_is_listed() {
    let mut tree = fresh();
    let dir = NewNode { mode: 0o040755, ..NewNode::default() };
    let outer = tree.create(Ino::ROOT, b"outer", dir.clone(), now()).unwrap();
    let inner = tree.create(outer, b"inner", dir, now()).unwrap();
    let leaf = tree.create(inner, b"leaf", file(0o644), now()).unwrap();
    let paths = tree.paths(&HashMap::new(), |_| true);
    assert_eq!(paths[&leaf], b"outer/inner/leaf");
    assert_eq!(paths[&Ino::ROOT], b"");
}

#[test]
fn a_directory_that_the_server_does_not_know_stays() {
    let mut tree = fresh();
    let new = NewNode { mode: 0o040755, ..NewNode::default() };
    let made = [b"a", b"b", b"c"].map(|name| tree.create(Ino::ROOT, name, new.clone(), now()).unwrap());
    tree.remember(made[1]);
    tree.rmdir(Ino::ROOT, b"b", now()).unwrap();
    tree.evict(0, Sequence(0), |_| false);
    assert!(made.iter().all(|dir| tree.is_listed(*dir)), "nobody could list them");
    tree.cut(Sequence(1), false);
    tree.evict(0, Sequence(0), |_| false);
    assert!(made.iter().all(|dir| tree.is_listed(*dir)), "the cut is under way");
    tree.evict(0, Sequence(1), |_| false);
    assert!(!tree.is_listed(made[0]));
    assert!(tree.is_listed(made[1]), "it never gets there");
}

#[test]
fn an_answer_from_before_a_removal_brings_nothing_back() {
    let mut tree = Tree::new(Usage::default(), Usage::default());
    tree.share();
    tree.add_inode(Ino::ROOT, histories::root_row());
    tree.own(Ino::ROOT);
    tree.add_listing(Ino::ROOT, []);
    tree.add_numbers(InoRange { next: 16, end: 1000 });
    let new = NewNode { mode: 0o040755, ..NewNode::default() };
    let outer = tree.create(Ino::ROOT, b"outer", new.clone(), now()).unwrap();
    let inner = tree.create(outer, b"inner", new, now()).unwrap();
    tree.cut(Sequence(1), false);
    tree.shipped(Sequence(1));
    let listing = |tree: &mut Tree, dir| -> Vec<_> {
        let entries: Vec<_> =
            tree.entries(dir, 0).unwrap().map(|(name, dentry)| (name.clone(), *dentry)).collect();
        entries
            .into_iter()
            .map(|(name, dentry)| (name, dentry, tree.inode(dentry.ino).ok().cloned()))
            .collect()
    };
    let answer: Vec<_> = [Ino::ROOT, outer, inner].map(|dir| (dir, listing(&mut tree, dir))).into();
    tree.rmdir(outer, b"inner", now()).unwrap();
    tree.rmdir(Ino::ROOT, b"outer", now()).unwrap();
    answer.into_iter().for_each(|(dir, entries)| tree.add_listing(dir, entries));
    assert!(!tree.has_inode(outer) && !tree.is_listed(outer) && !tree.has_inode(inner));
    let records = tree.cut(Sequence(2), false).batch.records;
    assert!(records.contains(&Record::DeleteDentry(outer, Name::new(b"inner"))), "{records:?}");
    assert!(!records.iter().any(|record| matches!(record, Record::PutDentry(..))), "{records:?}");
}

#[test]
fn the_directory_just_entered_stays_and_lone_rows_go() {
    let mut tree = Tree::new(Usage::default(), Usage::default());
    tree.add_inode(Ino::ROOT, histories::root_row());
    for ino in 100..2100 {
        tree.add_inode(Ino(ino), InodeRow { mode: 0o100644, nlink: 1, ..histories::root_row() });
    }
    tree.evict(900, Sequence(0), |_| false);
    assert!(tree.in_memory().0 <= 900, "rows without a listing go as well");
    let entry = |ino: u64| {
        let name = Name::new(format!("f{ino}").as_bytes());
        let row = InodeRow { mode: 0o100644, nlink: 1, ..histories::root_row() };
        (name, Dentry { ino: Ino(ino), kind: FileKind::Regular, cookie: ino }, Some(row))
    };
    tree.add_listing(Ino::ROOT, (5000..7000).map(entry));
    tree.touch(Ino::ROOT);
    tree.evict(900, Sequence(0), |_| false);
    assert!(tree.is_listed(Ino::ROOT), "or it would be fetched for ever");
}
