//! Sharing at the client. Each of these was found by the simulator.

use super::*;
use crate::tree::{AttributeChange, FIRST_COOKIE, NewNode};
use crate::{InoRange, Rows, Timestamp, Usage};

const DIR: Ino = Ino(20);
const FILE: Ino = Ino(21);

fn time(secs: i64) -> Timestamp {
    Timestamp { secs, nanos: 0 }
}

fn row(mode: u32, nlink: u32, parent: Ino) -> InodeRow {
    let (atime, mtime, ctime, btime) = (time(1), time(1), time(1), time(1));
    let next_cookie = FIRST_COOKIE + 5;
    InodeRow { atime, mtime, ctime, btime, next_cookie, ..InodeRow::new(mode, nlink, parent) }
}

fn file(nlink: u32, parent: Ino) -> InodeRow {
    row(0o100644, nlink, parent)
}

/// A shared tree with the root, a directory, and a file in it.
fn tree() -> Tree {
    let mut tree = Tree::new(Usage::default(), Usage::default());
    tree.share();
    tree.add_inode(Ino::ROOT, row(0o040755, 3, Ino::ROOT));
    tree.add_inode(DIR, row(0o040755, 2, Ino::ROOT));
    tree.add_inode(FILE, file(1, DIR));
    tree.add_listing(Ino::ROOT, [(Name::new(b"dir"), entry(DIR, FileKind::Directory), None)]);
    tree.add_listing(DIR, [(Name::new(b"file"), entry(FILE, FileKind::Regular), None)]);
    tree.add_numbers(InoRange { next: 100, end: 200 });
    tree
}

fn entry(ino: Ino, kind: FileKind) -> Dentry {
    Dentry { ino, kind, cookie: FIRST_COOKIE }
}

fn put(ino: Ino, row: InodeRow) -> Record {
    Record::PutInode(ino, Box::new(row))
}

fn stray(ino: Ino) -> Object {
    Object::File { ino, home: STRAY }
}

#[test]
fn usage_is_counted_however_little_is_known_of_it() {
    let mut tree = tree();
    tree.own(DIR);
    tree.unlink(DIR, b"file", time(2)).unwrap();
    let cut = tree.cut(Sequence(1), false);
    assert_eq!(cut.batch.usage.inodes, -1, "others have made it, after the usage was told");
    tree.undo_cut(cut);
    assert_eq!(tree.cut(Sequence(1), false).batch.usage.inodes, -1);
}

#[test]
fn a_file_without_a_name_stays_with_whoever_is_given_it() {
    let mut tree = tree();
    tree.remember(FILE);
    let stale = tree.apply(&[put(FILE, file(0, STRAY))], &[stray(FILE)], &[]);
    assert_eq!(stale.in_use, []);
    assert!(tree.owns(FILE) && tree.has_inode(FILE));
    tree.wrote(FILE, 1, 1, false, time(2)).unwrap();
}

#[test]
fn a_file_without_a_name_that_is_given_too_late_is_deleted() {
    let mut tree = tree();
    tree.apply(&[put(FILE, file(0, STRAY))], &[stray(FILE)], &[]);
    assert_eq!(tree.cut(Sequence(1), false).batch.records, [Record::DeleteInode(FILE)]);
}

/// Found by the simulator: its owner had ended, and it was given to the host that had asked for its row.
#[test]
fn a_directory_without_a_name_that_comes_owned_ends_with_its_user() {
    for is_used in [false, true] {
        let mut tree = tree();
        let gone = Ino(30);
        tree.add_inode(gone, row(0o040755, 0, Ino::ROOT));
        if is_used {
            tree.remember(gone);
        }
        tree.own(gone);
        assert_eq!(tree.has_inode(gone), is_used);
        if is_used {
            tree.forget(gone, 1);
        }
        assert_eq!(tree.owned(), [Object::Directory(gone)], "until that is durable");
        assert_eq!(tree.cut(Sequence(1), false).batch.records, [Record::DeleteInode(gone)]);
        tree.shipped(Sequence(1));
        assert_eq!(tree.owned(), []);
    }
}

#[test]
fn what_is_owned_is_newer_than_what_is_told() {
    let mut tree = tree();
    tree.own(DIR);
    tree.create(DIR, b"new", NewNode { mode: 0o100644, ..NewNode::default() }, time(9)).unwrap();
    tree.cut(Sequence(1), false);
    // It was asked for twice, and granted twice; the batch is on its way.
    tree.apply(&[put(DIR, row(0o040755, 2, Ino::ROOT))], &[Object::Directory(DIR)], &[]);
    assert_eq!(tree.inode(DIR).unwrap().mtime, time(9));
}

#[test]
fn who_gives_back_a_file_without_a_name_says_that_it_is_in_use() {
    let mut tree = tree();
    tree.remember(FILE);
    tree.apply(&[put(FILE, file(0, STRAY))], &[stray(FILE)], &[]);
    tree.disown(FILE);
    assert_eq!(tree.in_use().collect::<Vec<_>>(), [FILE]);
    tree.forget(FILE, 1);
    assert_eq!(tree.take_released(), [FILE]);
    assert!(!tree.is_dirty(), "it is the server's to delete");
}

#[test]
fn an_uncovered_directory_reports_files_whose_rows_are_elsewhere() {
    for evict in [false, true] {
        let mut tree = tree();
        tree.remember(FILE);
        if evict {
            tree.touch(Ino::ROOT);
            tree.evict(0, Sequence(0), |_| false);
            assert!(!tree.is_listed(DIR) && !tree.has_inode(FILE));
        } else {
            // Somebody else owns it.
            tree.drop_rows(&[FILE]);
        }
        let stale = tree.uncover(Object::Directory(DIR));
        assert_eq!(stale.in_use, [FILE]);
        assert!(stale.attributes.contains(&FILE), "the kernel may have its attributes");
    }
}

#[test]
fn a_stray_in_an_uncovered_directory_stays_and_is_in_use() {
    let mut tree = tree();
    tree.apply(&[put(FILE, file(2, STRAY))], &[], &[]);
    tree.remember(FILE);
    let stale = tree.uncover(Object::Directory(DIR));
    assert_eq!(stale.in_use, [FILE]);
    assert!(tree.has_inode(FILE));
}

#[test]
fn a_new_connection_reports_all_that_the_kernel_knows() {
    let mut tree = tree();
    tree.remember(FILE);
    tree.touch(Ino::ROOT);
    tree.evict(0, Sequence(0), |_| false);
    let stale = tree.uncover_all();
    assert!(stale.in_use.contains(&FILE) && stale.attributes.contains(&FILE));
}

#[test]
fn what_moves_out_of_sight_is_in_use() {
    let mut tree = tree();
    tree.remember(FILE);
    let stale = tree.apply(&[Record::DeleteDentry(DIR, Name::new(b"file"))], &[], &[FILE]);
    assert_eq!(stale.in_use, [FILE]);
}

#[test]
fn what_was_deleted_is_owned_until_that_is_durable() {
    let mut tree = tree();
    tree.own(Ino::ROOT);
    tree.own(DIR);
    tree.unlink(DIR, b"file", time(2)).unwrap();
    tree.rmdir(Ino::ROOT, b"dir", time(2)).unwrap();
    let owned = |tree: &Tree| -> Vec<Object> {
        let mut owned = tree.owned();
        owned.sort_unstable();
        owned
    };
    let all = [Object::Directory(Ino::ROOT), Object::Directory(DIR), stray(FILE)];
    assert_eq!(owned(&tree), all);
    tree.shipped(Sequence(0));
    tree.cut(Sequence(1), false);
    assert_eq!(owned(&tree), all, "it is on its way");
    tree.shipped(Sequence(1));
    assert_eq!(owned(&tree), [Object::Directory(Ino::ROOT)]);
}

#[test]
fn what_was_deleted_and_is_recalled_ends_all_the_same() {
    let mut tree = tree();
    tree.own(DIR);
    tree.own(FILE);
    tree.unlink(DIR, b"file", time(2)).unwrap();
    tree.disown(FILE);
    tree.cut(Sequence(1), false);
    // The connection is lost: what was not given back is its own.
    tree.own(FILE);
    assert_eq!(tree.owned().len(), 2, "others might be given what is about to go");
    assert!(tree.owned().contains(&stray(FILE)));
    tree.shipped(Sequence(1));
    assert_eq!(tree.owned(), [Object::Directory(DIR)]);
}

#[test]
fn what_was_deleted_for_good_while_it_is_recalled_is_told() {
    let mut tree = tree();
    tree.own(Ino::ROOT);
    tree.own(DIR);
    tree.unlink(DIR, b"file", time(2)).unwrap();
    tree.rmdir(Ino::ROOT, b"dir", time(2)).unwrap();
    tree.disown(DIR);
    tree.cut(Sequence(1), false);
    assert_eq!(tree.shipped(Sequence(0)), []);
    let mut gone = tree.shipped(Sequence(1));
    gone.sort_unstable();
    assert_eq!(gone, [DIR, FILE], "owned again, it would be claimed for ever");
}

#[test]
fn files_that_could_leave_memory_but_for_being_owned_can_be_given_back() {
    let mut tree = tree();
    tree.own(FILE);
    tree.remember(FILE);
    let releasable = |tree: &Tree, count| tree.releasable(count, Sequence(0), |_| false);
    assert_eq!(releasable(&tree, 9), [FILE]);
    assert_eq!(releasable(&tree, 0), []);
    assert_eq!(tree.releasable(9, Sequence(0), |ino| ino == FILE), []);
    tree.set_attributes(FILE, AttributeChange { mode: Some(0o600), ..AttributeChange::default() }, time(2))
        .unwrap();
    assert_eq!(releasable(&tree, 9), [], "it is not shipped");
    tree.cut(Sequence(1), false);
    assert_eq!(releasable(&tree, 9), [], "it is on its way");
    assert_eq!(tree.releasable(9, Sequence(1), |_| false), [FILE]);
    // While its home is owned as well that is enough.
    tree.own(DIR);
    assert_eq!(tree.releasable(9, Sequence(1), |_| false), []);
    tree.touch(Ino::ROOT);
    assert!(tree.evict(0, Sequence(1), |_| false).contains(&FILE));
    assert_eq!(tree.owned(), [Object::Directory(DIR)]);
}

#[test]
fn rows_of_files_that_are_owned_by_themselves_are_not_evicted() {
    let mut tree = tree();
    tree.own(FILE);
    tree.touch(Ino::ROOT);
    tree.evict(0, Sequence(0), |_| false);
    assert_eq!(tree.owned(), [Object::File { ino: FILE, home: DIR }]);
}

#[test]
fn a_link_that_leaves_its_home_makes_a_stray() {
    let mut tree = tree();
    tree.own(Ino::ROOT);
    tree.own(DIR);
    tree.link(FILE, DIR, b"second", time(2)).unwrap();
    tree.rename((DIR, b"second"), (Ino::ROOT, b"third"), Default::default(), time(2)).unwrap();
    assert_eq!(tree.object(FILE), Ok(stray(FILE)));
    assert!(tree.owned().contains(&stray(FILE)));
}

#[test]
fn what_is_on_its_way_is_newer_than_what_is_told() {
    let mut tree = tree();
    tree.own(DIR);
    tree.wrote(FILE, 5, 5, false, time(9)).unwrap();
    tree.cut(Sequence(1), false);
    // The directory is recalled, and the file asked for by itself before the batch has arrived.
    tree.disown(DIR);
    tree.apply(&[put(FILE, file(1, DIR))], &[Object::File { ino: FILE, home: DIR }], &[]);
    assert_eq!(tree.inode(FILE).unwrap().size, 5);
}

#[test]
fn a_file_that_gets_its_first_name_is_owned_by_itself_if_the_server_knows_it() {
    let own = |tree: &mut Tree| {
        tree.own(DIR);
        tree.add_numbers(InoRange { next: 50, end: 60 });
    };
    let new = || NewNode { mode: 0o100644, ..NewNode::default() };
    // It was granted, or the server was told that it has no name.
    for granted in [true, false] {
        let mut tree = tree();
        own(&mut tree);
        let ino = if granted {
            tree.remember(FILE);
            tree.apply(&[put(FILE, InodeRow { unnamed: true, ..file(0, STRAY) })], &[stray(FILE)], &[]);
            FILE
        } else {
            let ino = tree.create_unnamed(DIR, new(), time(2)).unwrap();
            tree.remember(ino);
            tree.cut(Sequence(1), true);
            ino
        };
        tree.link(ino, DIR, b"named", time(2)).unwrap();
        assert!(tree.owned().contains(&Object::File { ino, home: DIR }));
    }
    // The server never knows, or not yet.
    for refused in [true, false] {
        let mut tree = tree();
        own(&mut tree);
        let ino = tree.create_unnamed(DIR, new(), time(2)).unwrap();
        tree.remember(ino);
        if refused {
            let cut = tree.cut(Sequence(1), true);
            tree.link(ino, DIR, b"named", time(2)).unwrap();
            tree.undo_cut(cut);
        } else {
            tree.link(ino, DIR, b"named", time(2)).unwrap();
        }
        assert_eq!(tree.owned(), [Object::Directory(DIR)]);
    }
}

#[test]
fn what_others_have_removed_gets_no_name_here() {
    let mut tree = tree();
    tree.remember(FILE);
    tree.apply(&[put(FILE, file(0, STRAY))], &[stray(FILE)], &[]);
    tree.own(DIR);
    assert_eq!(tree.link(FILE, DIR, b"again", time(2)), Err(TreeError::NotFound));
}

#[test]
fn changes_of_a_file_that_was_given_back_are_shipped_though_it_is_forgotten() {
    let mut tree = tree();
    tree.remember(FILE);
    tree.apply(&[put(FILE, file(0, STRAY))], &[stray(FILE)], &[]);
    tree.wrote(FILE, 5, 5, false, time(2)).unwrap();
    tree.disown(FILE);
    tree.forget(FILE, 1);
    assert_eq!(tree.take_released(), [], "the batch will say that it is in use");
    let cut = tree.cut(Sequence(1), false);
    assert!(matches!(cut.batch.records[..], [Record::PutInode(FILE, _)]));
    tree.undo_cut(cut);
    assert!(matches!(tree.cut(Sequence(1), false).batch.records[..], [Record::PutInode(FILE, _)]));
    tree.shipped(Sequence(1));
    assert_eq!(tree.take_released(), [FILE]);
    assert!(!tree.has_inode(FILE));
}

/// `/a/x/c` and `/b/y/d`, all directories, as a host has them that owns these, or as one that knows no sharing.
fn crossing(owned: Option<[Ino; 3]>) -> (Tree, Rows) {
    let [a, b, x, y, c, d] = [2, 3, 4, 5, 6, 7].map(Ino);
    let mut tree = Tree::new(Usage::default(), Usage::default());
    if let Some(owned) = owned {
        tree.share();
        owned.into_iter().for_each(|dir| tree.own(dir));
    }
    let mut rows = Rows::default();
    for (dir, parent, below) in [
        (Ino::ROOT, Ino::ROOT, vec![("a", a), ("b", b)]),
        (a, Ino::ROOT, vec![("x", x)]),
        (b, Ino::ROOT, vec![("y", y)]),
        (x, a, vec![("c", c)]),
        (y, b, vec![("d", d)]),
        (c, x, vec![]),
        (d, y, vec![]),
    ] {
        let row = row(0o040755, 2 + below.len() as u32, parent);
        rows.apply(&put(dir, row.clone()));
        tree.add_inode(dir, row);
        let named =
            |(name, ino): &(&str, Ino)| (Name::new(name.as_bytes()), entry(*ino, FileKind::Directory));
        for (name, dentry) in below.iter().map(named) {
            rows.apply(&Record::PutDentry(dir, name, dentry));
        }
        tree.add_listing(dir, below.iter().map(named).map(|(name, dentry)| (name, dentry, None)));
    }
    (tree, rows)
}

#[test]
fn owners_do_not_move_directories_themselves_since_two_would_build_a_cycle() {
    let [a, b, x, y, c, d] = [2, 3, 4, 5, 6, 7].map(Ino);
    let (_, mut rows) = crossing(None);
    for (name, from, to, moved) in [(b"x", a, d, x), (b"y", b, c, y)] {
        let (from, to) = ((from, &name[..]), (to, &name[..]));
        let (mut owner, _) = crossing(Some([from.0, to.0, moved]));
        let refused = owner.rename(from, to, Default::default(), time(2));
        assert_eq!(refused, Err(TreeError::Missing(Missing::Executor)));
        // Without the rule each does what is right in its own tree.
        let (mut careless, _) = crossing(None);
        careless.rename(from, to, Default::default(), time(2)).unwrap();
        careless.cut(Sequence(1), false).batch.records.iter().for_each(|record| rows.apply(record));
    }
    let (mut reached, mut todo) = (Vec::new(), vec![Ino::ROOT]);
    while let Some(dir) = todo.pop() {
        todo.extend(rows.listing(dir).into_iter().map(|(_, dentry)| dentry.ino));
        reached.push(dir);
    }
    reached.sort_unstable();
    assert_eq!(reached, [Ino::ROOT, a, b], "each of the others is below the other");
}

/// A shared tree that owns the root and the directory.
fn owned_tree() -> Tree {
    let mut tree = tree();
    tree.apply(&[], &[Object::Directory(Ino::ROOT), Object::Directory(DIR)], &[]);
    tree
}

const HOUR: i64 = 3600;

#[test]
fn a_time_that_is_far_ahead_stays_where_it_is() {
    let mut tree = owned_tree();
    let mut ahead = file(1, DIR);
    ahead.ctime = time(100 + HOUR);
    tree.apply(&[put(FILE, ahead)], &[], &[]);
    tree.add_inode(Ino(50), InodeRow { ctime: time(100 + HOUR), ..file(1, DIR) });
    tree.create(Ino::ROOT, b"elsewhere", NewNode { mode: 0o100644, ..NewNode::default() }, time(100))
        .unwrap();
    assert_eq!(tree.inode(Ino::ROOT).unwrap().mtime, time(100));
    let made =
        tree.create(DIR, b"here", NewNode { mode: 0o100644, ..NewNode::default() }, time(100)).unwrap();
    assert!(tree.inode(made).unwrap().mtime > time(100 + HOUR));
    // What is at home here is written later than it, and has a later time; elsewhere it is the clock's still.
    tree.wrote(FILE, 1, 1, false, time(101)).unwrap();
    assert!(tree.inode(FILE).unwrap().mtime > tree.inode(made).unwrap().mtime);
    tree.create(Ino::ROOT, b"later", NewNode { mode: 0o100644, ..NewNode::default() }, time(101)).unwrap();
    assert_eq!(tree.inode(Ino::ROOT).unwrap().mtime, time(101));
}

#[test]
fn a_time_that_is_a_little_ahead_is_waited_for_everywhere() {
    let mut tree = owned_tree();
    tree.add_inode(Ino(50), InodeRow { ctime: time(104), ..file(1, Ino(60)) });
    tree.create(Ino::ROOT, b"elsewhere", NewNode { mode: 0o100644, ..NewNode::default() }, time(100))
        .unwrap();
    assert_eq!(tree.inode(Ino::ROOT).unwrap().mtime, time(104));
}

#[test]
fn the_present_time_is_that_of_the_change() {
    let mut tree = owned_tree();
    tree.add_inode(Ino(50), InodeRow { ctime: time(100 + HOUR), ..file(1, DIR) });
    tree.apply(&[put(FILE, file(1, DIR))], &[Object::File { ino: FILE, home: DIR }], &[]);
    let now = AttributeChange { mtime: Some(time(100)), atime: Some(time(7)), ..AttributeChange::default() };
    tree.set_attributes(FILE, now, time(100)).unwrap();
    let row = tree.inode(FILE).unwrap();
    assert!(row.mtime > time(100 + HOUR) && row.mtime == row.ctime && row.atime == time(7), "{row:?}");
}

proptest::proptest! {
    #[test]
    fn times_grow_with_every_change_of_a_directory(
        steps in proptest::collection::vec((0..4u8, 0..2usize, -2 * HOUR..2 * HOUR), 1..60),
    ) {
        let mut tree = owned_tree();
        tree.add_numbers(InoRange { next: 1000, end: 2000 });
        let (dirs, mut last, mut made) = ([Ino::ROOT, DIR], [time(1); 2], [Vec::new(), Vec::new()]);
        let mut clock = 10 * HOUR;
        for (at, (what, which, step)) in steps.into_iter().enumerate() {
            // Now and then the clock is set.
            clock += if at % 5 == 0 { step } else { 0 };
            let (dir, now) = (dirs[which], time(clock));
            let file: Option<Ino> = made[which].last().map(|(_, ino)| *ino);
            let changed = match (what, file) {
                (1, Some(ino)) => {
                    tree.wrote(ino, 1, 1, false, now).unwrap();
                    ino
                }
                (2, Some(ino)) => {
                    let change = AttributeChange { mtime: Some(now), ..AttributeChange::default() };
                    tree.set_attributes(ino, change, now).unwrap();
                    ino
                }
                (3, Some(_)) => {
                    let (name, _): (Vec<u8>, Ino) = made[which].pop().unwrap();
                    tree.unlink(dir, &name, now).unwrap();
                    dir
                }
                _ => {
                    let name = format!("file-{at}").into_bytes();
                    let new = NewNode { mode: 0o100644, ..NewNode::default() };
                    made[which].push((name.clone(), tree.create(dir, &name, new, now).unwrap()));
                    dir
                }
            };
            let mtime = tree.inode(changed).unwrap().mtime;
            proptest::prop_assert!(mtime > last[which], "{mtime:?} after {:?}", last[which]);
            last[which] = mtime;
        }
    }
}
