use super::*;
use crate::protocol::abi::fixed_size;

/// Lays out a message field by field, as the kernel does.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    fn u32(mut self, value: u32) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }

    fn u64(mut self, value: u64) -> Self {
        self.0.extend(value.to_ne_bytes());
        self
    }
}

fn header(opcode: u32) -> InHeader {
    InHeader { len: 0, opcode, unique: 7, nodeid: 9, uid: 1, gid: 2, pid: 3, extensions: 0 }
}

fn parse<'a>(opcode: u32, fixed: &'a [u8], rest: &'a [u8]) -> Result<Operation<'a>, Malformed> {
    Request::parse(&header(opcode), fixed, rest, true).map(|request| request.op)
}

#[test]
fn the_header_is_read_at_the_kernels_offsets() {
    let bytes: Vec<u8> = (0..40).collect();
    let header = InHeader::parse(&bytes).unwrap();
    assert_eq!(header.len, u32::from_ne_bytes([0, 1, 2, 3]));
    assert_eq!(header.opcode, u32::from_ne_bytes([4, 5, 6, 7]));
    assert_eq!(header.unique, u64::from_ne_bytes([8, 9, 10, 11, 12, 13, 14, 15]));
    assert_eq!(header.nodeid, u64::from_ne_bytes([16, 17, 18, 19, 20, 21, 22, 23]));
    assert_eq!(header.uid, u32::from_ne_bytes([24, 25, 26, 27]));
    assert_eq!(header.gid, u32::from_ne_bytes([28, 29, 30, 31]));
    assert_eq!(header.pid, u32::from_ne_bytes([32, 33, 34, 35]));
    assert_eq!(header.extensions, u16::from_ne_bytes([36, 37]));
    assert!(InHeader::parse(&bytes[..30]).is_err());
}

#[test]
fn names_end_at_their_nul() {
    assert!(matches!(parse(1, &[], b"file\0").unwrap(), Operation::Lookup { name: b"file" }));
    assert!(parse(1, &[], b"file").is_err());
    let fixed = Message::default().u64(44).u32(2).u32(0).0;
    let op = parse(45, &fixed, b"from\0to\0").unwrap();
    assert!(matches!(op, Operation::Rename { name: b"from", new_parent: 44, new_name: b"to", flags: 2 }));
    let op = parse(12, &fixed[..8], b"from\0to\0").unwrap();
    assert!(matches!(op, Operation::Rename { flags: 0, new_parent: 44, .. }));
    assert!(parse(45, &fixed, b"from\0to").is_err());
    assert!(matches!(parse(6, &[], b"n\0t\0").unwrap(), Operation::Symlink { name: b"n", target: b"t" }));
}

#[test]
fn extensions_are_not_taken_for_names() {
    let mut header = header(1);
    header.extensions = 1;
    assert!(Request::parse(&header, &[], b"nameEXTENSION", true).is_err());
    assert!(Request::parse(&header, &[], b"short", true).is_err());
}

#[test]
fn a_write_borrows_its_data() {
    let fixed = Message::default().u64(5).u64(4096).u32(3).u32(2 | 4).u64(77).u32(0o1).u32(0).0;
    let rest = b"abc";
    let Operation::Write { fh: 5, offset: 4096, data, write_flags: 6, flags: 1, lock_owner: Some(77) } =
        parse(16, &fixed, rest).unwrap()
    else {
        panic!("not the write")
    };
    assert_eq!(data.as_ptr(), rest.as_ptr());
    assert!(parse(16, &fixed, b"ab").is_err());
    assert!(parse(16, &fixed[..20], b"abc").is_err());
}

#[test]
fn setattr_takes_only_what_is_valid() {
    let message = |valid| {
        let mut m = Message::default().u32(valid).u32(0).u64(11).u64(22).u64(33);
        m = m.u64(100).u64(200).u64((-5i64) as u64).u32(1).u32(2).u32(3);
        m.u32(0o644).u32(0).u32(1000).u32(1001).u32(0).0
    };
    assert_eq!(message(0).len(), fixed_size(4));
    assert!(matches!(parse(4, &message(0), &[]).unwrap(), Operation::Setattr(s) if s == SetAttr::default()));
    let Operation::Setattr(all) = parse(4, &message(0xf7f), &[]).unwrap() else { panic!("not setattr") };
    let expected = SetAttr {
        mode: Some(0o644),
        uid: Some(1000),
        gid: Some(1001),
        size: Some(22),
        atime: Some(TimeOrNow::Time(Timestamp { seconds: 100, nanos: 1 })),
        mtime: Some(TimeOrNow::Now),
        ctime: Some(Timestamp { seconds: -5, nanos: 3 }),
        fh: Some(11),
        lock_owner: Some(33),
        kill_suidgid: true,
    };
    assert_eq!(all, expected);
}

#[test]
fn setxattr_is_read_in_both_lengths() {
    let fixed = Message::default().u32(2).u32(1).u32(1).u32(0).0;
    let op = parse(21, &fixed, b"user.a\0xy").unwrap();
    assert!(matches!(op, Operation::Setxattr { name: b"user.a", value: b"xy", flags: 1, setxattr_flags: 1 }));
    let short = Request::parse(&header(21), &fixed[..8], b"user.a\0xy", false).unwrap();
    assert!(matches!(short.op, Operation::Setxattr { value: b"xy", setxattr_flags: 0, .. }));
}

#[test]
fn the_fixed_sizes_hold_all_fields() {
    let zeroes = [0u8; 128];
    for opcode in (1..=53).filter(|opcode| ![2, 26, 36, 38, 41, 42].contains(opcode)) {
        let size = fixed_size(opcode);
        assert!(parse(opcode, &zeroes[..size], b"\0\0").is_ok(), "opcode {opcode}");
        if size > 0 && !matches!(opcode, 37 | 50) {
            assert!(parse(opcode, &zeroes[..2], b"\0\0").is_err(), "opcode {opcode}");
        }
    }
    assert!(matches!(parse(99, &[], &[]).unwrap(), Operation::Unknown(99)));
}

/// A kernel that is broken, or another program at the device, ends no process: what it says is parsed or refused.
#[test]
fn whatever_is_said_is_parsed_or_refused() {
    use proptest::prelude::*;
    use proptest::test_runner::{FileFailurePersistence, TestRunner};

    let config = ProptestConfig {
        cases: 20_000,
        source_file: Some(file!()),
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("corpus"))),
        ..ProptestConfig::default()
    };
    let rest = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..200),
        prop::collection::vec(prop_oneof![Just(0_u8), Just(b'a')], 0..40),
    ];
    let said = (0..60_u32, prop::collection::vec(any::<u8>(), 128), rest, 0..3_u16, any::<bool>());
    TestRunner::new(config)
        .run(&said, |(opcode, fixed, rest, extensions, setxattr_ext)| {
            let header = InHeader { extensions, ..header(opcode) };
            let _ = Request::parse(&header, &fixed[..fixed_size(opcode)], &rest, setxattr_ext);
            let _ = InHeader::parse(&rest);
            Ok(())
        })
        .unwrap();
}
