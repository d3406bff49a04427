//! The changes that `coherence` makes, each with what must be seen of it afterwards.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use crate::setup::calls;
use crate::setup::farm::noise;
use crate::sharing::coherence::{Content, Seen};

/// What the names were, and are.
type Look<'a> = &'a [Option<&'a Seen>];

/// A change in a directory that was empty.
pub(crate) struct Kind {
    pub name: &'static str,
    /// The names that are looked at; "a" may be open meanwhile.
    pub names: &'static [&'static str],
    pub prepare: fn(&Path),
    /// May give a file that stays open until all have looked.
    pub change: fn(&Path) -> Option<File>,
    pub is_so: fn(Look, Look) -> bool,
}

const KEEP_SIZE: i32 = 1;
const PUNCH_HOLE: i32 = 2;
const EXCHANGE: u32 = 2;

fn put(dir: &Path, name: &str, content: &[u8]) {
    fs::write(dir.join(name), content).unwrap();
}

fn done<T>(result: std::io::Result<T>) -> Option<File> {
    result.unwrap();
    None
}

fn edit(dir: &Path) -> File {
    File::options().read(true).write(true).open(dir.join("a")).unwrap()
}

/// There, with these bytes.
fn holds(seen: Option<&Seen>, content: &[u8]) -> bool {
    seen.is_some_and(|seen| seen.content == Content::bytes(content) && seen.size == content.len() as u64)
}

fn same_inode(one: Option<&Seen>, other: Option<&Seen>) -> bool {
    matches!((one, other), (Some(one), Some(other)) if one.ino == other.ino)
}

fn is(seen: Option<&Seen>, test: impl Fn(&Seen) -> bool) -> bool {
    seen.is_some_and(test)
}

fn one_file(dir: &Path) {
    put(dir, "a", b"old content");
}

fn two_files(dir: &Path) {
    put(dir, "a", b"this is a");
    put(dir, "b", b"and b");
}

fn two_dirs(dir: &Path) {
    ["d", "e"].iter().for_each(|name| fs::create_dir(dir.join(name)).unwrap());
    put(dir, "d/a", b"deep");
}

fn nothing(_: &Path) {}

fn paths(dir: &Path) -> (PathBuf, PathBuf) {
    (dir.join("a"), dir.join("b"))
}

const AB: &[&str] = &["a", "b"];
const TREE: &[&str] = &["d", "e", "d/a", "e/a", "e/d", "e/d/a"];

pub(crate) const KINDS: &[Kind] = &[
    Kind {
        name: "create",
        names: AB,
        prepare: nothing,
        change: |dir| done(calls::open(&dir.join("a"), libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY, 0o640)),
        is_so: |was, is_| was[0].is_none() && holds(is_[0], b"") && is(is_[0], |a| a.mode & 0o777 == 0o640),
    },
    Kind {
        name: "create and write",
        names: AB,
        prepare: nothing,
        change: |dir| done(fs::write(dir.join("b"), b"content")),
        is_so: |_, is_| is_[0].is_none() && holds(is_[1], b"content"),
    },
    Kind {
        name: "create with much content",
        names: AB,
        prepare: nothing,
        change: |dir| done(fs::write(dir.join("a"), noise(3, 300_000))),
        is_so: |_, is_| holds(is_[0], &noise(3, 300_000)),
    },
    Kind {
        name: "unlink",
        names: AB,
        prepare: two_files,
        change: |dir| done(fs::remove_file(dir.join("a"))),
        is_so: |_, is_| is_[0].is_none() && is_[1].is_some(),
    },
    Kind {
        name: "unlink and create again",
        names: AB,
        prepare: one_file,
        change: |dir| {
            fs::remove_file(dir.join("a")).unwrap();
            done(fs::write(dir.join("a"), b"another"))
        },
        is_so: |was, is_| holds(is_[0], b"another") && !same_inode(was[0], is_[0]),
    },
    Kind {
        name: "rename",
        names: AB,
        prepare: one_file,
        change: |dir| done(fs::rename(dir.join("a"), dir.join("b"))),
        is_so: |was, is_| is_[0].is_none() && same_inode(was[0], is_[1]) && holds(is_[1], b"old content"),
    },
    Kind {
        name: "rename over a file",
        names: AB,
        prepare: two_files,
        change: |dir| done(fs::rename(dir.join("b"), dir.join("a"))),
        is_so: |was, is_| is_[1].is_none() && same_inode(was[1], is_[0]) && holds(is_[0], b"and b"),
    },
    Kind {
        name: "write a temporary file and rename it over",
        names: AB,
        prepare: one_file,
        change: |dir| {
            put(dir, "b", b"replaced");
            done(fs::rename(dir.join("b"), dir.join("a")))
        },
        is_so: |was, is_| holds(is_[0], b"replaced") && !same_inode(was[0], is_[0]) && is_[1].is_none(),
    },
    Kind {
        name: "exchange",
        names: AB,
        prepare: two_files,
        change: |dir| done(calls::rename(&dir.join("a"), &dir.join("b"), EXCHANGE)),
        is_so: |was, is_| same_inode(was[0], is_[1]) && same_inode(was[1], is_[0]),
    },
    Kind {
        name: "chmod",
        names: AB,
        prepare: one_file,
        change: |dir| {
            calls::chmod(&dir.join("a"), 0o511);
            None
        },
        is_so: |_, is_| is(is_[0], |a| a.mode & 0o7777 == 0o511),
    },
    Kind {
        name: "chown",
        names: AB,
        prepare: one_file,
        change: |dir| {
            calls::chown(&dir.join("a"), 12, 34);
            None
        },
        is_so: |_, is_| is(is_[0], |a| a.owner == (12, 34)),
    },
    Kind {
        name: "utimensat",
        names: AB,
        prepare: one_file,
        change: |dir| done(calls::set_times(&dir.join("a"), [(5, 6), (1_000_000_007, 123_456_789)])),
        is_so: |_, is_| is(is_[0], |a| a.mtime == (1_000_000_007, 123_456_789)),
    },
    Kind {
        name: "truncate",
        names: AB,
        prepare: one_file,
        change: |dir| done(edit(dir).set_len(3)),
        is_so: |_, is_| holds(is_[0], b"old"),
    },
    Kind {
        name: "extend",
        names: AB,
        prepare: one_file,
        change: |dir| done(edit(dir).set_len(9000)),
        is_so: |_, is_| is(is_[0], |a| a.size == 9000),
    },
    Kind {
        name: "O_TRUNC",
        names: AB,
        prepare: one_file,
        change: |dir| done(fs::write(dir.join("a"), b"new")),
        is_so: |was, is_| holds(is_[0], b"new") && same_inode(was[0], is_[0]),
    },
    Kind {
        name: "O_TRUNC of an empty file",
        names: AB,
        prepare: |dir| {
            put(dir, "a", b"");
            calls::set_times(&dir.join("a"), [(1, 1), (1, 1)]).unwrap();
        },
        change: |dir| done(File::create(dir.join("a"))),
        is_so: |was, is_| is(was[0], |a| a.mtime == (1, 1)) && is(is_[0], |a| a.mtime.0 > 1),
    },
    Kind {
        name: "write in place and close",
        names: AB,
        prepare: one_file,
        change: |dir| done(edit(dir).write_all_at(b"OLD", 0)),
        is_so: |_, is_| holds(is_[0], b"OLD content"),
    },
    Kind {
        name: "write far out and close",
        names: AB,
        prepare: |dir| put(dir, "a", &noise(4, 200_000)),
        change: |dir| done(edit(dir).write_all_at(b"far", 150_000)),
        is_so: |_, is_| {
            let mut expected = noise(4, 200_000);
            expected[150_000..150_003].copy_from_slice(b"far");
            holds(is_[0], &expected)
        },
    },
    Kind {
        name: "write and fsync",
        names: AB,
        prepare: one_file,
        change: |dir| {
            let file = edit(dir);
            file.write_all_at(b"OLD", 0).unwrap();
            file.sync_all().unwrap();
            Some(file)
        },
        is_so: |_, is_| holds(is_[0], b"OLD content"),
    },
    Kind {
        name: "write, and still open",
        names: AB,
        prepare: one_file,
        change: |dir| {
            let file = edit(dir);
            file.write_all_at(b"OLD", 0).unwrap();
            Some(file)
        },
        is_so: |_, is_| holds(is_[0], b"OLD content"),
    },
    Kind {
        name: "append",
        names: AB,
        prepare: one_file,
        change: |dir| done(File::options().append(true).open(dir.join("a")).unwrap().write_all(b" and more")),
        is_so: |_, is_| holds(is_[0], b"old content and more"),
    },
    Kind {
        name: "punch a hole",
        names: AB,
        prepare: |dir| put(dir, "a", &[7; 20_000]),
        change: |dir| done(calls::fallocate(&edit(dir), PUNCH_HOLE | KEEP_SIZE, 0, 8192)),
        is_so: |_, is_| holds(is_[0], &[vec![0; 8192], vec![7; 20_000 - 8192]].concat()),
    },
    Kind {
        name: "mmap and msync",
        names: AB,
        prepare: |dir| put(dir, "a", &[b'.'; 5000]),
        change: |dir| {
            let file = edit(dir);
            let mut map = calls::Map::new(&file, 5000, libc::MAP_SHARED);
            map.bytes()[4500] = b'M';
            map.sync();
            Some(file)
        },
        is_so: |_, is_| holds(is_[0], &[vec![b'.'; 4500], vec![b'M'], vec![b'.'; 499]].concat()),
    },
    Kind {
        name: "mmap and close",
        names: AB,
        prepare: |dir| put(dir, "a", &[b'.'; 5000]),
        change: |dir| {
            let file = edit(dir);
            calls::Map::new(&file, 5000, libc::MAP_SHARED).bytes()[0] = b'M';
            drop(file);
            None
        },
        is_so: |_, is_| holds(is_[0], &[vec![b'M'], vec![b'.'; 4999]].concat()),
    },
    Kind {
        name: "link",
        names: AB,
        prepare: one_file,
        change: |dir| done(fs::hard_link(dir.join("a"), dir.join("b"))),
        is_so: |_, is_| same_inode(is_[0], is_[1]) && is(is_[0], |a| a.nlink == 2),
    },
    Kind {
        name: "unlink one of two links",
        names: AB,
        prepare: |dir| {
            let (a, b) = paths(dir);
            put(dir, "a", b"both");
            fs::hard_link(a, b).unwrap();
        },
        change: |dir| done(fs::remove_file(dir.join("a"))),
        is_so: |_, is_| is_[0].is_none() && holds(is_[1], b"both") && is(is_[1], |b| b.nlink == 1),
    },
    Kind {
        name: "link into another directory",
        names: TREE,
        prepare: two_dirs,
        change: |dir| done(fs::hard_link(dir.join("d/a"), dir.join("e/a"))),
        is_so: |_, is_| same_inode(is_[2], is_[3]) && is(is_[2], |a| a.nlink == 2),
    },
    Kind {
        name: "write a file with links in two directories",
        names: TREE,
        prepare: |dir| {
            two_dirs(dir);
            fs::hard_link(dir.join("d/a"), dir.join("e/a")).unwrap();
        },
        change: |dir| done(fs::write(dir.join("d/a"), b"seen by both")),
        is_so: |_, is_| holds(is_[2], b"seen by both") && holds(is_[3], b"seen by both"),
    },
    Kind {
        name: "name a temporary file",
        names: AB,
        prepare: nothing,
        change: |dir| {
            let file = calls::open(dir, libc::O_TMPFILE | libc::O_RDWR, 0o600).unwrap();
            file.write_all_at(b"named late", 0).unwrap();
            done(calls::link_fd(&file, &dir.join("a")))
        },
        is_so: |_, is_| holds(is_[0], b"named late") && is(is_[0], |a| a.nlink == 1),
    },
    Kind {
        name: "symlink",
        names: AB,
        prepare: one_file,
        change: |dir| done(symlink("a", dir.join("b"))),
        is_so: |_, is_| is(is_[1], |b| b.content == Content::Target("a".into())),
    },
    Kind {
        name: "point a symlink elsewhere",
        names: AB,
        prepare: |dir| symlink("old", dir.join("a")).unwrap(),
        change: |dir| {
            symlink("new", dir.join("b")).unwrap();
            done(fs::rename(dir.join("b"), dir.join("a")))
        },
        is_so: |_, is_| is(is_[0], |a| a.content == Content::Target("new".into())) && is_[1].is_none(),
    },
    Kind {
        name: "mkdir",
        names: &["d", "d/a"],
        prepare: nothing,
        change: |dir| done(fs::create_dir(dir.join("d"))),
        is_so: |was, is_| was[0].is_none() && is(is_[0], |d| d.content == Content::Names(Vec::new())),
    },
    Kind {
        name: "mkdir with something in it",
        names: &["d", "d/a", "d/b"],
        prepare: nothing,
        change: |dir| {
            fs::create_dir(dir.join("d")).unwrap();
            done(fs::write(dir.join("d/a"), b"deep"))
        },
        is_so: |_, is_| holds(is_[1], b"deep") && is_[2].is_none(),
    },
    Kind {
        name: "rmdir",
        names: &["d", "e", "d/a"],
        prepare: two_dirs,
        change: |dir| done(fs::remove_dir(dir.join("e"))),
        is_so: |was, is_| was[1].is_some() && is_[1].is_none() && is_[0].is_some(),
    },
    Kind {
        name: "remove a directory with what is in it",
        names: TREE,
        prepare: two_dirs,
        change: |dir| done(fs::remove_dir_all(dir.join("d"))),
        is_so: |_, is_| is_[0].is_none() && is_[2].is_none() && is_[1].is_some(),
    },
    Kind {
        name: "a directory in the place of a file",
        names: AB,
        prepare: one_file,
        change: |dir| {
            fs::remove_file(dir.join("a")).unwrap();
            done(fs::create_dir(dir.join("a")))
        },
        is_so: |_, is_| is(is_[0], |a| a.content == Content::Names(Vec::new())),
    },
    Kind {
        name: "move a file into another directory",
        names: TREE,
        prepare: two_dirs,
        change: |dir| done(fs::rename(dir.join("d/a"), dir.join("e/a"))),
        is_so: |was, is_| is_[2].is_none() && same_inode(was[2], is_[3]),
    },
    Kind {
        name: "move a directory into another",
        names: TREE,
        prepare: two_dirs,
        change: |dir| done(fs::rename(dir.join("d"), dir.join("e/d"))),
        is_so: |was, is_| is_[0].is_none() && same_inode(was[0], is_[4]) && holds(is_[5], b"deep"),
    },
    Kind {
        name: "rename a directory over an empty one",
        names: TREE,
        prepare: two_dirs,
        change: |dir| done(fs::rename(dir.join("d"), dir.join("e"))),
        is_so: |was, is_| is_[0].is_none() && same_inode(was[0], is_[1]) && holds(is_[3], b"deep"),
    },
    Kind {
        name: "chmod of a directory",
        names: &["d", "d/a"],
        prepare: two_dirs,
        change: |dir| {
            calls::chmod(&dir.join("d"), 0o2711);
            None
        },
        is_so: |_, is_| is(is_[0], |d| d.mode & 0o7777 == 0o2711),
    },
    Kind {
        name: "set an extended attribute",
        names: AB,
        prepare: one_file,
        change: |dir| done(calls::set_xattr(&dir.join("a"), "user.colour", b"red", 0)),
        is_so: |_, is_| is(is_[0], |a| a.xattrs == [("user.colour".to_owned(), b"red".to_vec())]),
    },
    Kind {
        name: "change and remove extended attributes",
        names: AB,
        prepare: |dir| {
            one_file(dir);
            ["user.one", "user.two"]
                .iter()
                .for_each(|name| calls::set_xattr(&dir.join("a"), name, b"1", 0).unwrap());
        },
        change: |dir| {
            calls::set_xattr(&dir.join("a"), "user.one", b"longer than before", 0).unwrap();
            done(calls::remove_xattr(&dir.join("a"), "user.two"))
        },
        is_so: |_, is_| is(is_[0], |a| a.xattrs == [("user.one".to_owned(), b"longer than before".to_vec())]),
    },
    Kind {
        name: "many names at once",
        names: AB,
        prepare: |dir| (0..40).for_each(|at| put(dir, &format!("old-{at}"), b"")),
        change: |dir| {
            (0..40).step_by(2).for_each(|at| fs::remove_file(dir.join(format!("old-{at}"))).unwrap());
            (0..20).for_each(|at| put(dir, &format!("new-{at}"), b"n"));
            done(fs::write(dir.join("b"), b"last"))
        },
        is_so: |_, is_| holds(is_[1], b"last"),
    },
];
