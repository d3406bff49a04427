use super::*;

fn time(seconds: i64, nanos: u32) -> Timestamp {
    Timestamp { seconds, nanos }
}

fn attr() -> Attr {
    Attr {
        ino: 1,
        size: 2,
        blocks: 3,
        atime: time(4, 7),
        mtime: time(5, 8),
        ctime: time(6, 9),
        mode: 10,
        nlink: 11,
        uid: 12,
        gid: 13,
        rdev: 14,
        blksize: 15,
        flags: 16,
    }
}

fn entry() -> Entry {
    let (entry_valid, attr_valid) =
        (Validity::new(Duration::new(23, 25)), Validity::new(Duration::new(24, 26)));
    Entry { nodeid: 21, generation: 22, entry_valid, attr_valid, attr: attr() }
}

fn answer(opcode: u32, capacity: usize, fill: impl FnOnce(&mut Reply<'_>)) -> Vec<u8> {
    let mut memory = vec![0xee; capacity + 64];
    let mut reply = Reply::new(opcode, capacity, Area::Shared(&mut memory));
    fill(&mut reply);
    let (scratch, area) = reply.parts();
    let bytes = [scratch, area].concat();
    if capacity > 0 {
        let len = reply.join();
        assert_eq!(memory[..len], bytes);
    }
    bytes
}

fn words(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

fn halves(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_ne_bytes()).collect()
}

/// `fuse_attr`: six words from offset 0, ten half words from offset 48; 88 bytes.
fn attr_bytes() -> Vec<u8> {
    [words(&[1, 2, 3, 4, 5, 6]), halves(&[7, 8, 9, 10, 11, 12, 13, 14, 15, 16])].concat()
}

fn entry_bytes() -> Vec<u8> {
    [words(&[21, 22, 23, 24]), halves(&[25, 26]), attr_bytes()].concat()
}

#[test]
fn entry_attr_open_and_create_match_the_kernels_layout() {
    assert_eq!(attr_bytes().len(), 88);
    assert_eq!(entry_bytes().len(), ENTRY_SIZE);
    assert_eq!(answer(1, 0, |r| r.entry(&entry())), entry_bytes());
    let expected = [words(&[24]), halves(&[26, 0]), attr_bytes()].concat();
    assert_eq!(answer(3, 0, |r| r.attr(&attr(), entry().attr_valid)), expected);
    let open = [words(&[31]), halves(&[2, 0])].concat();
    assert_eq!(answer(14, 0, |r| r.open(31, open_flags::KEEP_CACHE)), open);
    assert_eq!(answer(35, 0, |r| r.create(&entry(), 31, 2)), [entry_bytes(), open].concat());
}

#[test]
fn small_answers_match_the_kernels_layout() {
    assert_eq!(answer(16, 0, |r| r.written(5)), halves(&[5, 0]));
    assert_eq!(answer(47, 0, |r| r.copied(5)), halves(&[5, 0]));
    assert_eq!(answer(53, 0, |r| r.copied(1 << 40)), words(&[1 << 40]));
    assert_eq!(answer(22, 0, |r| r.xattr_size(9)), halves(&[9, 0]));
    assert_eq!(answer(46, 0, |r| r.lseek(77)), words(&[77]));
    assert_eq!(answer(40, 0, |r| r.poll(5)), halves(&[5, 0]));
    let lock = Lock { start: 1, end: 2, kind: 1, pid: 4 };
    assert_eq!(answer(31, 0, |r| r.lock(&lock)), [words(&[1, 2]), halves(&[1, 4])].concat());
    let statfs =
        Statfs { blocks: 1, bfree: 2, bavail: 3, files: 4, ffree: 5, bsize: 6, namelen: 7, frsize: 8 };
    let expected = [words(&[1, 2, 3, 4, 5]), halves(&[6, 7, 8, 0, 0, 0, 0, 0, 0, 0])].concat();
    assert_eq!(answer(17, 0, |r| r.statfs(&statfs)), expected);
    assert_eq!(expected.len(), 80);
}

#[test]
fn statx_matches_the_kernels_layout() {
    let bytes = answer(52, 0, |r| r.statx(&attr(), Some(time(99, 98)), Validity::ZERO));
    assert_eq!(bytes.len(), 288);
    let at32 = |offset: usize| u32::from_ne_bytes(bytes[offset..offset + 4].try_into().unwrap());
    let at64 = |offset: usize| u64::from_ne_bytes(bytes[offset..offset + 8].try_into().unwrap());
    // `struct statx` begins at 32; its own offsets are in linux/stat.h.
    assert_eq!((at32(32), at32(36)), (0xfff, 15));
    assert_eq!((at32(32 + 0x10), at32(32 + 0x14), at32(32 + 0x18)), (11, 12, 13));
    assert_eq!(u16::from_ne_bytes([bytes[32 + 0x1c], bytes[32 + 0x1d]]), 10);
    assert_eq!((at64(32 + 0x20), at64(32 + 0x28), at64(32 + 0x30)), (1, 2, 3));
    assert_eq!((at64(32 + 0x40), at64(32 + 0x50), at32(32 + 0x58)), (4, 99, 98));
    assert_eq!((at64(32 + 0x60), at64(32 + 0x70)), (6, 5));
    assert_eq!((at32(32 + 0x80), at32(32 + 0x84)), (0, 14));
}

#[test]
fn content_is_cut_at_the_size_asked() {
    assert_eq!(answer(15, 4, |r| r.data(b"abcdef")), b"abcd");
    let bytes = answer(15, 4, |r| {
        assert_eq!(r.buffer().len(), 4);
        r.buffer()[..2].copy_from_slice(b"xy");
        r.filled(2);
    });
    assert_eq!(bytes, b"xy");
    assert_eq!(answer(15, 4, |r| r.filled(100)).len(), 4);
    let ioctl = [halves(&[3, 0, 0, 0]), b"ab".to_vec()].concat();
    assert_eq!(answer(39, 2, |r| r.ioctl(3, b"abc")), ioctl);
}

#[test]
fn the_last_answer_counts() {
    assert!(
        answer(15, 8, |r| {
            r.data(b"abc");
            r.empty();
        })
        .is_empty()
    );
    let bytes = answer(15, 8, |r| {
        r.data(b"abc");
        r.written(1);
    });
    assert_eq!(bytes, halves(&[1, 0]));
}

#[test]
fn pool_threads_answer_from_memory_of_their_own() {
    let mut reply = Reply::new(15, 6, Area::Owned(Vec::new()));
    assert!(reply.parts().1.is_empty());
    reply.data(b"abcdefgh");
    assert_eq!(reply.parts(), (&b""[..], &b"abcdef"[..]));
}

#[test]
fn directories_stop_when_full() {
    let bytes = answer(28, 24 + 8 + 24 + 16, |r| {
        let mut directory = r.directory();
        assert!(directory.add(5, 1, 8, b"abc"));
        assert!(directory.add(6, 2, 4, b"123456789"));
        assert!(!directory.add(7, 3, 8, b"x"));
    });
    let first = [words(&[5, 1]), halves(&[3, 8]), b"abc\0\0\0\0\0".to_vec()].concat();
    let second = [words(&[6, 2]), halves(&[9, 4]), b"123456789\0\0\0\0\0\0\0".to_vec()].concat();
    assert_eq!(bytes, [first, second].concat());

    let bytes = answer(44, 128 + 24 + 8 + 100, |r| {
        let mut directory = r.directory();
        assert!(directory.add_plus(&entry(), 1, 8, b"abcdefgh"));
        assert!(!directory.add_plus(&entry(), 2, 8, b"a"));
    });
    let expected = [entry_bytes(), words(&[1, 1]), halves(&[8, 8]), b"abcdefgh".to_vec()].concat();
    assert_eq!(bytes, expected);
}

#[test]
fn validity_is_bounded() {
    assert_eq!(Validity::new(Duration::MAX), Validity::FOREVER);
    assert!(Validity::new(Duration::from_nanos(1)) > Validity::ZERO);
}
