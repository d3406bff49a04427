//! Whatever bytes another one sends, decoding them gives a message or an error. Inputs that once failed are kept in
//! `decoders.corpus`, and are tried first.

use bytes::{Bytes, BytesMut};
use hayloft_model::grants::Object;
use hayloft_model::{Batch, Dentry, InoRange, InodeRow, Record};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::event::Body as EventBody;
use hayloft_wire::frame::{self, Opener};
use hayloft_wire::listing::{Row, dentry_from, pack, row_from, unpack};
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::*;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::FileFailurePersistence;
use prost::Message;

/// What is done to good bytes: at a place some are taken away, and others put there.
type Edit = (Index, usize, Vec<u8>);

fn edits() -> impl Strategy<Value = Vec<Edit>> {
    let bytes = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..6),
        Just(vec![0xff; 10]),
        Just(vec![0; 9]),
        Just(vec![0xff, 0xff, 0xff, 0xff, 0x0f]),
    ];
    prop::collection::vec((any::<Index>(), 0..9_usize, bytes), 0..5)
}

fn edited(mut bytes: Vec<u8>, edits: &[Edit]) -> Vec<u8> {
    for (at, taken, put) in edits {
        let at = at.index(bytes.len() + 1);
        let end = (at + taken).min(bytes.len());
        bytes.splice(at..end, put.iter().copied());
    }
    bytes
}

fn inode_row() -> InodeRowMessage {
    InodeRowMessage {
        ino: 70,
        mode: 0o100644,
        nlink: 1,
        size: 5,
        allocated: 5,
        times: vec![1, 2, 3, 4, 5, 6, 7, 8],
        parent: 1,
        xattrs: vec![Xattr { name: Bytes::from_static(b"user.a"), value: Bytes::from_static(b"b") }],
        inline: Some(Bytes::from_static(b"hello")),
        ..InodeRowMessage::default()
    }
}

fn records() -> Vec<RecordMessage> {
    use record_message::Body as Is;
    let name = Bytes::from_static(b"name");
    let dentry = Some(DentryRow { ino: 70, kind: 0o100000, cookie: 9 });
    let records = [
        Is::PutInode(inode_row()),
        Is::DeleteInode(71),
        Is::PutDentry(PutDentry { parent: 1, name: name.clone(), dentry }),
        Is::DeleteDentry(DeleteDentry { parent: 1, name }),
        Is::PutPage(PutPage { ino: 70, page: 1, blocks: vec![7; 72].into() }),
        Is::DeletePages(DeletePages { ino: 70, from: 2 }),
    ];
    records.map(|body| RecordMessage { body: Some(body) }).into()
}

fn asks() -> Vec<ClientMessage> {
    use change_request::Operation;
    let place = || Some(PlaceMessage { dir: 1, name: Bytes::from_static(b"name") });
    let object = ObjectMessage { ino: 70, directory: false, home: 1 };
    let change =
        |operation| Ask::Change(ChangeRequest { forget_below: 3, execute: true, operation: Some(operation) });
    let create = CreateChange { place: place(), mode: 0o100644, ..CreateChange::default() };
    let rename = RenameChange { from: place(), to: place(), ..RenameChange::default() };
    let attributes = SetAttributesChange { ino: 70, atime: vec![1, 2], ..SetAttributesChange::default() };
    let asks = [
        Ask::Hello(Hello { protocol: PROTOCOL, volume: "v".into(), session: 7, ..Hello::default() }),
        Ask::Commit(Commit { sequence: 1, records: records(), orphans: vec![70, 71], ..Commit::default() }),
        Ask::Records(Records { records: records() }),
        Ask::Claim(Claim { own: vec![object; 3], in_use: vec![70, 71], ..Claim::default() }),
        Ask::Content(Chunk { hash: vec![1; 32].into(), len: 3, codec: 0, payload: vec![1, 2, 3].into() }),
        Ask::Ack(Ack { events: vec![1, 2], in_use: vec![70] }),
        change(Operation::Create(create)),
        change(Operation::Rename(rename)),
        change(Operation::SetAttributes(attributes)),
        Ask::Acquire(Acquire { object: Some(object) }),
    ];
    asks.map(|body| ClientMessage { request: 5, body: Some(body) }).into()
}

fn answers() -> Vec<ServerMessage> {
    let apply = Apply { records: records(), own: Vec::new(), forget: vec![9], asked: true, change: 4 };
    let listing = Listing { dir: 1, packed: packed().into(), complete: true, ..Listing::default() };
    let answers = [
        Answer::Welcome(Welcome { root: Some(inode_row()), ..Welcome::default() }),
        Answer::Listings(Listings { dirs: vec![listing], ..Listings::default() }),
        Answer::Inode(InodeAnswer { inode: Some(inode_row()), own: true, split: false, unheard: vec![3] }),
        Answer::Event(Event { number: 4, body: Some(EventBody::Apply(apply)) }),
        Answer::Changed(Changed { error: 2, ..Changed::default() }),
        Answer::Pages(Pages { pages: vec![PageRow { page: 1, blocks: vec![3; 36].into() }] }),
    ];
    answers
        .map(|body| ServerMessage {
            request: 5,
            body: Some(body),
            mark: 8,
            entries: Vec::new(),
            heard: vec![7],
        })
        .into()
}

/// A listing as it travels.
fn packed() -> Vec<u8> {
    let row = inode_row().encode_to_vec();
    let dentry = DentryRow { ino: 70, kind: 0o100000, cookie: 9 }.encode_to_vec();
    let mut packed = Vec::new();
    let of = Row::of(&row).unwrap();
    pack(&mut packed, b"name", &dentry, Some((&row, &of)), false);
    pack(&mut packed, b"other", &dentry, None, false);
    packed
}

fn use_records(records: &[RecordMessage]) {
    for record in records {
        let _ = Record::try_from(record).map(|record| hayloft_model::sound::record(&record, 1 << 40));
    }
}

/// All that is done with a client's message before anything is looked up.
fn use_ask(message: ClientMessage) {
    match message.body {
        Some(Ask::Commit(commit)) => {
            use_records(&commit.records);
            let _ = Batch::try_from(&commit);
        }
        Some(Ask::Records(records)) => use_records(&records.records),
        Some(Ask::Claim(claim)) => claim.own.iter().for_each(|object| drop(Object::try_from(object))),
        Some(Ask::Change(change)) => drop(change.change()),
        Some(Ask::Acquire(acquire)) => drop(acquire.object.as_ref().map(Object::try_from)),
        _ => {}
    }
}

/// All that is done with a server's message before it is believed.
fn use_answer(message: ServerMessage) {
    match message.body {
        Some(Answer::Welcome(welcome)) => {
            let _ = welcome.root.as_ref().map(InodeRow::try_from);
            let _ = welcome.inos.as_ref().map(InoRange::try_from);
        }
        Some(Answer::Listings(listings)) => {
            listings.dirs.iter().for_each(|listing| unpack(&listing.packed).for_each(drop));
            listings.files.iter().for_each(|row| drop(row_from(row)));
        }
        Some(Answer::Inode(answer)) => drop(answer.inode.as_ref().map(InodeRow::try_from)),
        Some(Answer::Event(event)) => {
            if let Some(EventBody::Apply(apply)) = event.body {
                use_records(&apply.records);
            }
        }
        Some(Answer::Pages(pages)) => {
            pages.pages.iter().for_each(|page| drop(decode_blocks(&page.blocks)));
        }
        Some(Answer::Changed(changed)) => drop(error_of(changed.error)),
        _ => {}
    }
}

fn config() -> ProptestConfig {
    ProptestConfig {
        cases: 2000,
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("corpus"))),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn messages_of_clients(which in any::<Index>(), edits in edits()) {
        let asks = asks();
        let bytes = edited(asks[which.index(asks.len())].encode_to_vec(), &edits);
        let fits = weight::check(&bytes).is_ok();
        if let Ok(message) = ClientMessage::decode(&bytes[..]) {
            prop_assert!(fits);
            use_ask(message);
        }
    }

    #[test]
    fn messages_of_servers(which in any::<Index>(), edits in edits()) {
        let answers = answers();
        let bytes = edited(answers[which.index(answers.len())].encode_to_vec(), &edits);
        let _ = ServerMessage::decode(&bytes[..]).map(use_answer);
    }

    #[test]
    fn rows_and_listings(edits in edits()) {
        let row = edited(inode_row().encode_to_vec(), &edits);
        let _ = Row::of(&row).map(|row| (row.is_directory(), row.is_placed(), row.has_data()));
        let _ = row_from(&row);
        let _ = InodeRowMessage::decode(&row[..]).map(|message| InodeRow::try_from(&message));
        let dentry = edited(DentryRow { ino: 70, kind: 0o40000, cookie: 9 }.encode_to_vec(), &edits);
        let _ = dentry_from(&dentry);
        let _ = DentryRow::decode(&dentry[..]).map(|message| Dentry::try_from(&message));
        unpack(&edited(packed(), &edits)).for_each(drop);
        let _ = decode_blocks(&edited(vec![3; 72], &edits));
        let _ = WrittenEntry::decode(&row[..]);
        let _ = NotedRow::decode(&row[..]);
    }

    #[test]
    fn any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = weight::check(&bytes);
        let _ = ClientMessage::decode(&bytes[..]).map(use_ask);
        let _ = ServerMessage::decode(&bytes[..]).map(use_answer);
        let _ = Opener::default().take::<ClientMessage>(&mut BytesMut::from(&bytes[..]));
        let _ = frame::take_plain::<ClientMessage>(&mut BytesMut::from(&bytes[..]), 200);
        unpack(&bytes).for_each(drop);
        let _ = row_from(&bytes);
    }
}
