//! The protocol as it is spoken, recorded: every field of every message, as bytes, with what they mean. Whoever changes one of them breaks
//! what other versions of hayloft say, and has to give the protocol a new number; whoever adds one records it.
//!
//! `recorded/protocol-N` has a line for each field: the bytes of a message in which it alone is set, and how that is read.
//! `HAYLOFT_RECORD=1 cargo test -p hayloft-wire --test recorded what_is_spoken` adds lines to the file of the present protocol; it never
//! changes one.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::path::PathBuf;

use hayloft_model::{Dentry, FileKind, Ino};
use hayloft_wire::frame::{self, Opener, Sealer};
use hayloft_wire::{
    BatchCheck, ClientMessage, Commit, FEATURES, Hello, PROTOCOL, PROTOCOL_OLDEST, RecordMessage,
    ServerMessage, client_message, record_message,
};
use prost::Message;

/// The first protocol that is recorded. Each one after it is spoken together with the one before.
const FIRST: u32 = 8;

/// Fields have numbers below.
const TAGS: u32 = 64;
/// Messages lie in each other at most so deep.
const DEPTH: usize = 8;

fn varint(mut value: u64, to: &mut Vec<u8>) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

/// A field: its key and its value.
fn field(tag: u32, kind: u32, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    varint(u64::from(tag << 3 | kind), &mut bytes);
    if kind == 2 {
        varint(value.len() as u64, &mut bytes);
    }
    bytes.extend_from_slice(value);
    bytes
}

/// The message, if it has all that the bytes say: what is not known is passed over when they are read.
fn known<M: Message + Default>(bytes: &[u8]) -> Option<M> {
    M::decode(bytes).ok().filter(|message| message.encoded_len() == bytes.len())
}

/// The lines of `with` that `without` has not.
fn news(with: &impl Debug, without: &impl Debug) -> String {
    let mut known: BTreeMap<String, usize> = BTreeMap::new();
    format!("{without:#?}").lines().for_each(|line| *known.entry(line.trim().to_owned()).or_default() += 1);
    let with = format!("{with:#?}");
    let lines = with.lines().map(str::trim).filter(|line| match known.get_mut(*line) {
        Some(left @ 1..) => {
            *left -= 1;
            false
        }
        _ => true,
    });
    lines.collect::<Vec<_>>().join(" ")
}

/// Adds the fields of the message that `wrap` puts into one of type `M`.
fn probe<M: Message + Default + Debug>(
    wrap: &dyn Fn(&[u8]) -> Vec<u8>,
    depth: usize,
    found: &mut BTreeMap<String, String>,
) {
    let Some(around) = known::<M>(&wrap(b"")) else { return };
    let mut note = |bytes: Vec<u8>| {
        let read = known::<M>(&bytes).map(|message| news(&message, &around));
        // Of a message what it is: it may have more fields some day.
        let read = read.map(|read| read.split('{').next().unwrap_or_default().trim().to_owned());
        read.map(|read| found.insert(hex(&bytes), read)).is_some()
    };
    let mut inner = Vec::new();
    for tag in 1..TAGS {
        let numbers: [(u32, &[u8]); 3] =
            [(0, b"\x03"), (1, b"\x01\x02\x03\x04\x05\x06\x07\x08"), (5, b"\x01\x02\x03\x04")];
        for (kind, value) in numbers {
            note(wrap(&field(tag, kind, value)));
        }
        // Text, bytes, or packed numbers; a message of these bytes there is not.
        let texts: [&[u8]; 2] = [b"A", b"AAAAAAAA"];
        let is_text = texts.iter().any(|text| note(wrap(&field(tag, 2, text))));
        if !is_text && note(wrap(&field(tag, 2, b""))) {
            inner.push(tag);
        }
    }
    for tag in inner.into_iter().filter(|_| depth > 0) {
        probe::<M>(&|bytes| wrap(&field(tag, 2, bytes)), depth - 1, found);
    }
}

fn as_spoken() -> BTreeMap<String, String> {
    let mut lines = BTreeMap::new();
    for (side, found) in [("client", probed::<ClientMessage>()), ("server", probed::<ServerMessage>())] {
        lines.extend(found.into_iter().map(|(bytes, read)| (format!("{side} {bytes}"), read)));
    }
    lines.insert("frames".to_owned(), hex(&frames()));
    lines.insert("check of a batch".to_owned(), format!("{:08x}", check()));
    lines.insert("entry of a listing".to_owned(), hex(&entry()));
    lines
}

fn probed<M: Message + Default + Debug>() -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    probe::<M>(&<[u8]>::to_vec, DEPTH, &mut found);
    found
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn hello() -> ClientMessage {
    let hello = Hello { protocol: 8, volume: "vol".to_owned(), session: 7, oldest: 8, ..Hello::default() };
    ClientMessage { request: 1, body: Some(client_message::Body::Hello(hello)) }
}

/// Two frames, one after the other.
fn frames() -> Vec<u8> {
    let mut bytes = Vec::new();
    (0..2).for_each(|_| frame::encode(&hello(), &mut bytes));
    Sealer::default().seal(&mut bytes);
    bytes
}

fn check() -> u32 {
    let records = [1, 300].map(|ino| RecordMessage { body: Some(record_message::Body::DeleteInode(ino)) });
    let mut check = BatchCheck::default();
    check.add(&records);
    check.of(&Commit { sequence: 3, bytes: -5, inodes: -2, orphans: vec![9], ..Commit::default() })
}

fn entry() -> Vec<u8> {
    let dentry = Dentry { ino: Ino(20), kind: FileKind::Regular, cookie: 5 };
    let mut packed = Vec::new();
    let dentry = hayloft_wire::DentryRow::from(&dentry).encode_to_vec();
    hayloft_wire::listing::pack(&mut packed, b"name", &dentry, None, false);
    packed
}

fn file(protocol: u32) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/recorded/protocol-{protocol}"))
}

fn recorded(protocol: u32) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(file(protocol)).unwrap_or_default();
    text.lines()
        .filter_map(|line| line.split_once(": "))
        .map(|(at, read)| (at.to_owned(), read.to_owned()))
        .collect()
}

#[test]
fn what_is_spoken_is_what_is_recorded() {
    let spoken = as_spoken();
    // What an older version says is read as it was meant.
    for protocol in PROTOCOL_OLDEST.max(FIRST)..=PROTOCOL {
        for (at, read) in recorded(protocol) {
            assert_eq!(
                spoken.get(&at),
                Some(&read),
                "{at} of protocol {protocol} is read otherwise than before: other versions of hayloft send it so. Leave it as it is, and add \
                 a field with a number of its own, or give the protocol a new number"
            );
        }
    }
    if std::env::var_os("HAYLOFT_RECORD").is_some() {
        let lines: String = spoken.iter().map(|(at, read)| format!("{at}: {read}\n")).collect();
        std::fs::write(file(PROTOCOL), lines).unwrap();
    }
    let recorded = recorded(PROTOCOL);
    let news: Vec<_> = spoken.iter().filter(|(at, _)| !recorded.contains_key(*at)).collect();
    assert!(
        news.is_empty(),
        "not recorded yet: {news:#?}\nOlder versions pass over what they do not know: it may be said only to who has the feature \
         that it belongs to (FEATURES, ADR 26). Then record it: HAYLOFT_RECORD=1"
    );
    assert!(recorded.len() > 300, "{} lines", recorded.len());
}

#[test]
fn the_protocol_before_is_spoken_as_well() {
    assert!(
        PROTOCOL_OLDEST <= PROTOCOL.saturating_sub(1).max(FIRST),
        "protocol {PROTOCOL} does not speak the one before it: a farm would have to be stopped to be upgraded (ADR 26)"
    );
    for protocol in FIRST..=PROTOCOL {
        assert!(file(protocol).exists(), "{} is not recorded", file(protocol).display());
    }
    // Features are said from 1 on; those of who knows more are not had.
    assert_eq!(FEATURES & (FEATURES + 1), 0, "features are numbered one after the other");
}

#[test]
fn a_change_of_a_field_is_noticed() {
    #[derive(Clone, PartialEq, Message)]
    struct Before {
        #[prost(uint64, tag = "1")]
        number: u64,
        #[prost(string, tag = "2")]
        name: String,
    }
    #[derive(Clone, PartialEq, Message)]
    struct After {
        #[prost(sint64, tag = "1")]
        number: i64,
        #[prost(string, tag = "3")]
        name: String,
    }
    let (before, after) = (probed::<Before>(), probed::<After>());
    assert_eq!(before["0803"], "number: 3,");
    assert_eq!(after["0803"], "number: -2,");
    assert_eq!(before["120141"], "name: \"A\",");
    assert!(!after.contains_key("120141") && after.contains_key("1a0141"));
}

#[test]
fn frames_that_were_recorded_are_read() {
    let recorded = recorded(PROTOCOL);
    let bytes: Vec<u8> = recorded["frames"]
        .as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect();
    let (mut buffer, mut opener) = (bytes::BytesMut::from(&bytes[..]), Opener::default());
    for _ in 0..2 {
        assert_eq!(opener.take::<ClientMessage>(&mut buffer).unwrap(), Some(hello()));
    }
    assert!(buffer.is_empty());
}
