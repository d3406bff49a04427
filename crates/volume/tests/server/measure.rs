//! Figures, printed: `cargo test --release -p hayloft-volume --test server measure -- --ignored --nocapture`.
//! `HAYLOFT_MEASURE_DIR` is where the store lies; a fresh folder below the system's by default.

use std::time::{Duration, Instant};

use crate::common::*;
use hayloft_model::{BlockRef, Content, FileKind, Record};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;

fn started() -> (tempfile::TempDir, Running, Client) {
    let folder = match std::env::var_os("HAYLOFT_MEASURE_DIR") {
        Some(dir) => tempfile::tempdir_in(dir).unwrap(),
        None => tempfile::tempdir().unwrap(),
    };
    let (running, client) = opened(config(folder.path()));
    (folder, running, client)
}

fn show(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize];
    println!("{what}: p50 {:?}, p90 {:?}, p99 {:?}", at(0.5), at(0.9), at(0.99));
}

#[test]
#[ignore = "prints figures"]
fn small_commits() {
    for (what, raw) in [
        ("row of 3,000 B", 0),
        ("with a chunk of 20,000 B", 20_000),
        ("with 60 KiB", 60 << 10),
        ("with 120 KiB", 120 << 10),
        ("with 130 KiB", 130 << 10),
        ("with 240 KiB", 240 << 10),
        ("with 1 MiB", 1 << 20),
    ] {
        let (_folder, running, mut client) = started();
        let mut times = Vec::new();
        for n in 0..200u64 {
            let parts: Vec<Vec<u8>> = (0..(raw as usize).div_ceil(61440))
                .map(|at| noise(n * 100 + at as u64, 61440.min(raw as usize)))
                .collect();
            let begun = Instant::now();
            let content = match raw {
                0 => Content::Inline(noise(n, 3000).into()),
                _ => Content::Blocks(parts.iter().map(|part| Some(client.content(part))).collect()),
            };
            let records = [
                put(1, directory(1, 0, 4 + n)),
                link(1, &format!("f{n}"), 100 + n, FileKind::Regular, 3 + n),
                put(100 + n, file(content, 3000)),
            ];
            client.commit(n + 1, &records, (0, 0)).unwrap();
            times.push(begun.elapsed());
        }
        show(&format!("commit of one file, {what}"), times);
        running.shutdown();
    }
}

#[test]
#[ignore = "prints figures"]
fn twenty_thousand_small_files() {
    let (_folder, running, mut client) = started();
    let batches: Vec<Vec<Record>> = (0..20u64)
        .map(|part| {
            let mut records: Vec<Record> = (0..1000)
                .flat_map(|n| {
                    let ino = 100 + part * 1000 + n;
                    let raw = b"static int value = 42; /* hay */\n".repeat(90);
                    [
                        link(1, &format!("file-{ino}"), ino, FileKind::Regular, ino),
                        put(ino, file(Content::Inline(raw.into()), 2970)),
                    ]
                })
                .collect();
            records.push(put(1, directory(1, 0, 100 + (part + 1) * 1000)));
            records
        })
        .collect();
    let begun = Instant::now();
    let asked: Vec<u64> = batches
        .iter()
        .enumerate()
        .map(|(at, records)| client.send(Ask::Commit(commit(at as u64 + 1, records, (0, 0)))))
        .collect();
    for request in asked {
        assert!(matches!(client.receive(request), Answer::Committed(_)));
    }
    let took = begun.elapsed();
    println!("20,000 files of 3 kB in 20 batches: {took:?}, {:.0} files/s", 20_000.0 / took.as_secs_f64());
    running.shutdown();
}

#[test]
#[ignore = "prints figures"]
fn large_content() {
    const BLOCKS: u64 = 4096;
    let (_folder, running, mut client) = started();
    let raw: Vec<Vec<u8>> = (0..BLOCKS).map(|n| noise(n, 65536)).collect();
    let begun = Instant::now();
    let chunks: Vec<_> = raw.iter().map(|raw| hayloft_store::encode_chunk(raw)).collect();
    println!("encoding 256 MiB of noise: {:?}", begun.elapsed());
    let text = b"static int value = 42; /* hay */\n".repeat(1986);
    let begun = Instant::now();
    let encoded: usize = (0..BLOCKS).map(|_| hayloft_store::encode_chunk(&text[..65536]).payload.len()).sum();
    println!("encoding 256 MiB of text: {:?}, {encoded} bytes", begun.elapsed());
    drop(chunks);
    let begun = Instant::now();
    let blocks: Vec<BlockRef> = raw.iter().map(|raw| client.content(raw)).collect();
    let mut records = vec![
        put(1, directory(1, 0, 4)),
        link(1, "large", 100, FileKind::Regular, 3),
        put(100, file(Content::Blocks(blocks[..64].iter().copied().map(Some).collect()), BLOCKS * 65536)),
    ];
    for (page, blocks) in blocks.chunks(64).enumerate().skip(1) {
        let blocks = blocks.iter().copied().map(Some).collect();
        records.push(Record::PutPage(hayloft_model::Ino(100), page as u64, blocks));
    }
    client.commit(1, &records, ((BLOCKS * 65536) as i64, 1)).unwrap();
    let took = begun.elapsed();
    println!("256 MiB of content, encoded and committed: {took:?}, {:.0} MiB/s", 256.0 / took.as_secs_f64());
    let begun = Instant::now();
    let hashes: Vec<_> = blocks.iter().map(|block| block.hash).collect();
    for hashes in hashes.chunks(128) {
        client.fetch(hashes).unwrap();
    }
    let took = begun.elapsed();
    println!("and fetched, 8 MiB a request, verified: {took:?}, {:.0} MiB/s", 256.0 / took.as_secs_f64());
    running.shutdown();
}

fn size_of(folder: &std::path::Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.file_type() {
            Ok(kind) if kind.is_dir() => size_of(&entry.path()),
            _ => entry.metadata().map_or(0, |found| found.len()),
        })
        .sum()
}

#[test]
#[ignore = "takes five minutes and prints figures"]
fn room_of_deleted_files_comes_back() {
    let (folder, running, mut client) = started();
    println!("a fresh volume: {} bytes", size_of(folder.path()));
    for part in 0..40u64 {
        let inos = part * 1000 + 100..(part + 1) * 1000 + 100;
        let mut records: Vec<Record> = inos
            .flat_map(|ino| {
                let inline = Content::Inline(noise(ino, 3000).into());
                [link(1, &format!("f{ino}"), ino, FileKind::Regular, ino), put(ino, file(inline, 3000))]
            })
            .collect();
        records.push(put(1, directory(1, 0, (part + 1) * 1000 + 100)));
        client.commit(part + 1, &records, (3_000_000, 1000)).unwrap();
    }
    println!("40,000 files of 3,000 B: {} MiB", size_of(folder.path()) >> 20);
    for part in 0..40u64 {
        let records: Vec<Record> = (part * 1000 + 100..(part + 1) * 1000 + 100)
            .flat_map(|ino| {
                let name = hayloft_model::Name::new(format!("f{ino}").as_bytes());
                let (root, ino) = (hayloft_model::Ino(1), hayloft_model::Ino(ino));
                [Record::DeleteDentry(root, name), Record::DeleteInode(ino)]
            })
            .collect();
        client.commit(part + 41, &records, (-3_000_000, -1000)).unwrap();
    }
    let sweep = hayloft_wire::SweepVolume { name: "vol".into() };
    Client::connect(running.address).ask(Ask::SweepVolume(sweep)).unwrap();
    for after in 0..16 {
        println!("{} s after the sweep: {} MiB", after * 20, size_of(folder.path()) >> 20);
        std::thread::sleep(Duration::from_secs(20));
    }
    running.shutdown();
}

/// What it costs to look whether rows can be.
#[test]
#[ignore = "prints figures"]
fn sound_rows() {
    let inline = Content::Inline(noise(1, 2970).into());
    let mut records: Vec<Record> = (0..1000)
        .flat_map(|n| {
            let ino = 100 + n;
            let name = link(1, &format!("file-{ino}"), ino, FileKind::Regular, ino);
            [name, put(ino, file(inline.clone(), 2970))]
        })
        .collect();
    records.push(put(1, directory(1, 0, 2000)));
    let cpu = || {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        time.tv_sec * 1_000_000_000 + time.tv_nsec
    };
    let before = cpu();
    for _ in 0..100 {
        let mut batch = hayloft_model::sound::Batch::new(hayloft_model::sound::NUMBERS);
        records.iter().for_each(|record| batch.add(record).unwrap());
        assert_eq!(batch.unknown(), Ok(None));
    }
    println!("{} ns of processor time a file made", (cpu() - before) / 100_000);
}
