//! Batches that no honest client sends: they delete what has names still.

use crate::common::*;
use hayloft_model::{Content, FileKind, Ino, Name, Record};
use hayloft_wire::FailureCode;

fn take(dir: u64, name: &str) -> Record {
    Record::DeleteDentry(Ino(dir), Name::new(name.as_bytes()))
}

fn end(ino: u64) -> Record {
    Record::DeleteInode(Ino(ino))
}

/// A file with two names, one with a name, and a directory with forty.
fn tree() -> Vec<Record> {
    let mut records = vec![
        put(1, directory(1, 1, 10)),
        link(1, "one", 100, FileKind::Regular, 3),
        link(1, "two", 100, FileKind::Regular, 4),
        put(100, hayloft_model::InodeRow { nlink: 2, ..file_in(1, Content::None, 0) }),
        link(1, "three", 101, FileKind::Regular, 5),
        put(101, file_in(1, Content::None, 0)),
        link(1, "dir", 102, FileKind::Directory, 6),
        put(102, directory(1, 0, 50)),
    ];
    for n in 0..40 {
        records.push(link(102, &format!("f{n}"), 200 + n, FileKind::Regular, 3 + n));
        records.push(put(200 + n, file_in(102, Content::None, 0)));
    }
    records
}

fn empty_dir(but: u64) -> Vec<Record> {
    let files = (0..40).filter(|n| *n != but).flat_map(|n| [take(102, &format!("f{n}")), end(200 + n)]);
    let mut records: Vec<Record> = files.collect();
    records.extend([put(1, directory(1, 0, 10)), take(1, "dir"), end(102)]);
    records
}

#[test]
fn a_batch_that_deletes_what_has_names_still_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (running, mut client) = opened(config(folder.path()));
    client.commit(1, &tree(), (0, 43)).unwrap();
    let root = |subdirectories| put(1, directory(1, subdirectories, 10));
    let unlinked = || put(101, row(FileKind::Regular, 0));
    let bad: Vec<(Vec<Record>, i64)> = vec![
        (vec![end(101)], -1),
        (vec![unlinked()], -1),
        (vec![root(1), take(1, "one"), end(100)], -1),
        (vec![root(1), take(1, "one"), end(101)], -1),
        (vec![root(1), take(1, "three"), link(1, "x", 101, FileKind::Regular, 9), end(101)], -1),
        (vec![root(0), take(1, "dir"), end(102)], -1),
        (empty_dir(7), -40),
        (vec![put(1, hayloft_model::InodeRow { nlink: 0, ..directory(1, 1, 10) })], 0),
    ];
    for (records, inodes) in bad {
        let refused = client.commit(2, &records, (0, inodes)).unwrap_err();
        assert_eq!(code(&refused), FailureCode::Invalid, "{records:?}: {}", refused.message);
        assert_eq!(running.problems(), [""; 0], "{records:?}");
    }
    // As honest clients do.
    client.commit(2, &[root(1), take(1, "one"), take(1, "two"), end(100)], (0, -1)).unwrap();
    client
        .commit(
            3,
            &[
                root(1),
                link(1, "three", 103, FileKind::Regular, 5),
                put(103, file_in(1, Content::None, 0)),
                end(101),
            ],
            (0, 0),
        )
        .unwrap();
    client.commit(4, &empty_dir(u64::MAX), (0, -41)).unwrap();
    assert_eq!(client.enter(1, 0).unwrap().dirs[0].entries.len(), 1);
    // Two that are empty, with one between them that is not.
    let dir = |n: u64, next: u64| {
        [link(1, &format!("d{n}"), n, FileKind::Directory, n), put(n, directory(1, 0, next))]
    };
    let mut records = [dir(300, 3), dir(301, 9), dir(302, 3)].concat();
    records.extend((0..6).flat_map(|n| {
        [
            link(301, &format!("f{n}"), 310 + n, FileKind::Regular, 3 + n),
            put(310 + n, file_in(301, Content::None, 0)),
        ]
    }));
    records.push(put(1, directory(1, 3, 400)));
    client.commit(5, &records, (0, 9)).unwrap();
    let ended = [take(1, "d300"), take(1, "d302"), end(300), end(302), put(1, directory(1, 1, 400))];
    client.commit(6, &ended, (0, -2)).unwrap();
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}
