//! Batches in parts, and what becomes of those that are given up or refused.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::common::*;
use hayloft_model::{Content, FileKind, InodeRow, Record};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{FailureCode, FetchInode, FetchPages, RecordMessage, Records, SetQuota, StatsRequest};

const MIB: u64 = 1 << 20;

fn small_file(n: u64) -> [Record; 2] {
    [link(1, &format!("f{n}"), 100 + n, FileKind::Regular, 3 + n), put(100 + n, file(Content::None, 0))]
}

fn packs(folder: &Path) -> usize {
    std::fs::read_dir(folder.join("packs"))
        .map(|volumes| volumes.flat_map(|volume| std::fs::read_dir(volume.unwrap().path()).unwrap()).count())
        .unwrap_or(0)
}

fn expect_packs(folder: &Path, expected: usize) {
    let started = Instant::now();
    while packs(folder) != expected {
        assert!(started.elapsed() < Duration::from_secs(10), "{} packs, not {expected}", packs(folder));
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn send_content(client: &mut Client, seed: u64, mib: u64) {
    for n in 0..mib * 16 {
        client.content(&noise(seed + n, 65536));
    }
}

fn started(change: impl FnOnce(&mut hayloft_volume::Config)) -> (tempfile::TempDir, Running, Client) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    change(&mut config);
    let (running, client) = opened(config);
    (folder, running, client)
}

#[test]
fn records_in_parts_are_applied_with_their_commit_and_a_new_begin_forgets_them() {
    let (folder, running, mut client) = started(|_| {});
    // Given up: neither its records nor its content leave anything.
    client.begin(1, (1, 1));
    send_content(&mut client, 1000, 20);
    client.records(&small_file(50));
    client.begin(1, (0, 5));
    client.records(&small_file(1));
    client.records(&[small_file(2), small_file(3)].concat());
    client.records(&small_file(4));
    client.commit(1, &small_file(5), (0, 5)).unwrap();
    let names: Vec<_> = client.enter(1, 0).unwrap().dirs[0].entries.iter().map(ListedEntry::name).collect();
    assert_eq!(names, ["f1", "f2", "f3", "f4", "f5"]);
    assert!(client.ask(Ask::FetchInode(FetchInode { ino: 150 })).is_err());
    expect_packs(folder.path(), 0);
    // Nothing of a batch is left for the next one, which need not be begun.
    client.commit(2, &small_file(6), (0, 1)).unwrap();
    client.begin(4, (0, 1));
    let mixed = client.commit(3, &small_file(7), (0, 1)).unwrap_err();
    assert_eq!(code(&mixed), FailureCode::Invalid);
    client.commit(3, &small_file(7), (0, 1)).unwrap();
    let mut admin = Client::connect(running.address);
    let Ok(Answer::Stats(stats)) = admin.ask(Ask::Stats(StatsRequest {})) else { panic!() };
    assert!(stats.json.contains("\"BEGIN_BATCH\":3"), "{}", stats.json);
    assert!(stats.json.contains("\"RECORDS\":4"), "{}", stats.json);
    running.shutdown();
}

#[test]
fn a_batch_of_too_many_records_is_refused_at_its_commit() {
    let (_folder, running, mut client) = started(|config| config.batch_records_bytes = 10_000);
    client.begin(1, (0, 100));
    (0..100).for_each(|n| client.records(&small_file(n)));
    let refused = client.commit(1, &small_file(100), (0, 101)).unwrap_err();
    assert_eq!(code(&refused), FailureCode::Invalid, "{}", refused.message);
    client.begin(1, (0, 1));
    client.records(&small_file(1));
    client.commit(1, &[], (0, 1)).unwrap();
    assert_eq!(client.enter(1, 0).unwrap().dirs[0].entries.len(), 1);
    // Those without anything in them take memory as well.
    client.begin(2, (0, 0));
    client.send(Ask::Records(Records { records: vec![RecordMessage::default(); 1000] }));
    let refused = client.commit(2, &[], (0, 0)).unwrap_err();
    assert!(refused.message.contains("too many records"), "{}", refused.message);
    running.shutdown();
}

#[test]
fn packs_of_a_refused_batch_or_a_broken_connection_go_at_once() {
    let (folder, running, mut client) = started(|_| {});
    let quota = SetQuota { name: "vol".into(), quota_bytes: 1000, quota_inodes: 0 };
    Client::connect(running.address).ask(Ask::SetQuota(quota)).unwrap();
    send_content(&mut client, 0, 20);
    let refused = client.commit(1, &small_file(1), (5000, 1)).unwrap_err();
    assert_eq!(code(&refused), FailureCode::NoSpace);
    expect_packs(folder.path(), 0);
    // Applied: they stay. Sent once more: the copies go.
    let batch = |client: &mut Client| {
        let blocks: Vec<_> = (0..20 * 16).map(|n| Some(client.content(&noise(n, 65536)))).collect();
        let mut records = small_file(1).to_vec();
        records[1] = put(101, file(Content::Blocks(blocks[..64].to_vec()), 320 * 65536));
        let pages = blocks.chunks(64).enumerate().skip(1);
        records
            .extend(pages.map(|(page, blocks)| {
                Record::PutPage(hayloft_model::Ino(101), page as u64, blocks.to_vec())
            }));
        client.commit(1, &records, (500, 1)).unwrap();
    };
    batch(&mut client);
    let stored = packs(folder.path());
    assert!(stored > 0);
    batch(&mut client);
    expect_packs(folder.path(), stored);
    send_content(&mut client, 5000, 20);
    drop(client);
    std::thread::sleep(Duration::from_millis(500));
    expect_packs(folder.path(), stored);
    running.shutdown();
}

#[test]
fn listings_of_rows_with_large_attributes_come_in_parts() {
    let (_folder, running, mut client) = started(|_| {});
    let count = 700;
    for n in 0..count {
        let attribute =
            |name: &'static str, seed| (bytes::Bytes::from(name), bytes::Bytes::from(noise(seed, 60_000)));
        let xattrs = [attribute("user.x", n), attribute("user.y", n + 1000)].into_iter().collect();
        let row = InodeRow { xattrs, ..file(Content::None, 0) };
        client.records(&[link(1, &format!("f{n}"), 100 + n, FileKind::Regular, 3 + n), put(100 + n, row)]);
    }
    client.commit(1, &[], (0, count as i64)).unwrap();
    let listings = client.enter(1, MIB).unwrap();
    assert_eq!(listings.dirs[0].entries.len(), count as usize);
    running.shutdown();
}

#[test]
fn pages_that_fit_into_no_frame_are_refused_with_a_reason() {
    let (_folder, running, mut client) = started(|_| {});
    client.begin(1, (0, 1));
    let block = Some(client.content(&noise(1, 65536)));
    let blocks = vec![block; 64];
    let pages = 30_000;
    client.records(&[
        link(1, "huge", 100, FileKind::Regular, 3),
        put(100, file(Content::Blocks(blocks.clone()), (pages + 1) * 64 * 65536)),
    ]);
    let records: Vec<Record> =
        (1..=pages).map(|page| Record::PutPage(hayloft_model::Ino(100), page, blocks.clone())).collect();
    records.chunks(1000).for_each(|records| client.records(records));
    client.commit(1, &[], (0, 1)).unwrap();
    let refused = client.ask(Ask::FetchPages(FetchPages { ino: 100 })).unwrap_err();
    assert_eq!(code(&refused), FailureCode::Invalid);
    assert!(refused.message.contains("pages"), "{}", refused.message);
    running.shutdown();
}
