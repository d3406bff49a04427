use super::*;

fn row(content: Content) -> InodeRow {
    InodeRow {
        mode: 0o104755,
        uid: 1000,
        gid: 100,
        nlink: 3,
        rdev: 0,
        size: 123_456,
        allocated: 65_536,
        atime: Timestamp { secs: -5, nanos: 999_999_999 },
        mtime: Timestamp { secs: 1 << 40, nanos: 1 },
        ctime: Timestamp { secs: 7, nanos: 0 },
        btime: Timestamp::default(),
        parent: Ino(0),
        next_cookie: 9,
        unnamed: true,
        xattrs: [(Bytes::from_static(b"user.a"), Bytes::from_static(b"\0\xff"))].into_iter().collect(),
        content,
    }
}

fn block(byte: u8) -> Option<BlockRef> {
    Some(BlockRef { hash: ContentHash([byte; 32]), len: 65_536 })
}

#[test]
fn a_batch_comes_back_as_it_went() {
    let contents = [
        Content::None,
        Content::Inline(Bytes::from_static(b"")),
        Content::Inline(Bytes::from_static(b"small")),
        Content::Blocks(vec![block(1), None, block(2)]),
        Content::Target(Bytes::from_static(b"../elsewhere")),
    ];
    let mut records: Vec<Record> =
        contents.into_iter().map(|content| Record::PutInode(Ino(77), Box::new(row(content)))).collect();
    let dentry = Dentry { ino: Ino(77), kind: FileKind::Fifo, cookie: 3 };
    records.extend([
        Record::DeleteInode(Ino(5)),
        Record::PutDentry(Ino(1), Name::new(b"n\xff"), dentry),
        Record::DeleteDentry(Ino(1), Name::new(b"gone")),
        Record::PutPage(Ino(77), 1, vec![None, block(3)]),
        Record::DeletePages(Ino(77), 2),
    ]);
    let batch = Batch {
        sequence: Sequence(4),
        records,
        usage: UsageDelta { bytes: -1, inodes: 2 },
        orphans: vec![Ino(78)],
    };
    assert_eq!(Batch::try_from(&Commit::from(&batch)).unwrap(), batch);
}

#[test]
fn names_that_no_file_may_have_are_refused() {
    for name in [&b""[..], b"a/b", b"a\0b", &[b'x'; 256]] {
        assert!(name_from(name).is_err(), "{name:?}");
    }
}

#[test]
fn broken_rows_are_refused() {
    let good = InodeRowMessage::from_row(Ino(5), &row(Content::None));
    let breakages: [fn(&mut InodeRowMessage); 5] = [
        |row| row.mode = 0o644,
        |row| row.times = vec![0; 7],
        |row| row.times[1] = 1_000_000_000,
        |row| row.blocks = Some(Bytes::from_static(&[1; 35])),
        |row| {
            row.inline = Some(Bytes::new());
            row.target = Some(Bytes::new());
        },
    ];
    assert!(InodeRow::try_from(&good).is_ok());
    for breakage in breakages {
        let mut bad = good.clone();
        breakage(&mut bad);
        assert!(InodeRow::try_from(&bad).is_err());
    }
}

#[test]
fn nobody_can_say_where_a_server_keeps_content() {
    let mut message = InodeRowMessage::from_row(Ino(77), &row(Content::None));
    InodeRow::try_from(&message).unwrap();
    message.placed = Some(Bytes::from_static(b"somewhere"));
    InodeRow::try_from(&message).unwrap_err();
}
