//! Entering large trees: how many requests a cold walk takes, and very large directories.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use crate::common::*;
use hayloft_model::{Content, ContentHash, FileKind, Ino, InodeRow, Record};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{AllocateInos, Enter, FailureCode, FetchInode, Goodbye, Hello, MANY_SLOTS};

const FILES: u64 = 16;

/// 1,250 directories with 16 files each: 10 x (1 + 4 x (1 + 30 directories)) and some.
fn tree(client: &mut Client) -> (u64, u64) {
    client.take_numbers(1 << 16).unwrap();
    let mut next = 16;
    let mut sequence = 0;
    let (mut files, mut dirs) = (0, 0);
    let mut waiting = vec![(1, 1, 0)];
    let mut records = Vec::new();
    while let Some((dir, parent, depth)) = waiting.pop() {
        let below = [10, 4, 30, 0][depth];
        let mut cookie = 3;
        for n in 0..FILES {
            let (ino, len) = (next, [900, 3000, 7000, 20000][(n % 4) as usize]);
            next += 1;
            files += 1;
            let raw = noise(ino, len);
            let content = match len {
                ..=4096 => Content::Inline(raw.into()),
                _ => Content::Blocks(vec![Some(client.content(&raw))]),
            };
            records.push(link(dir, &format!("file{n}"), ino, FileKind::Regular, cookie));
            records.push(put(ino, file(content, len as u64)));
            cookie += 1;
        }
        for n in 0..below {
            records.push(link(dir, &format!("dir{n}"), next, FileKind::Directory, cookie));
            // Its names may come in a later batch; no name leads nowhere meanwhile.
            records.push(put(next, directory(dir, 0, 3)));
            waiting.push((next, dir, depth + 1));
            next += 1;
            cookie += 1;
        }
        dirs += 1;
        records.push(put(dir, directory(parent, below as u32, cookie)));
        if records.len() > 2000 {
            sequence += 1;
            client.commit(sequence, &std::mem::take(&mut records), (0, 0)).unwrap();
        }
    }
    client.commit(sequence + 1, &records, (0, 0)).unwrap();
    (files, dirs)
}

/// What `tar` does with a cold client in front of the server.
struct Tar {
    listed: HashMap<u64, Vec<ListedEntry>>,
    contents: HashSet<ContentHash>,
    files: u64,
    budget: u64,
}

impl Tar {
    fn walk(&mut self, client: &mut Client, dir: u64) {
        if !self.listed.contains_key(&dir) {
            let listings = client.enter(dir, self.budget).unwrap();
            assert_eq!(listings.dirs[0].dir, dir);
            self.listed.extend(listings.dirs.into_iter().map(|listing| (listing.dir, listing.entries)));
            let hash = |bytes: &[u8]| ContentHash(bytes.try_into().unwrap());
            self.contents.extend(listings.contents.iter().map(|chunk| hash(&chunk.hash)));
        }
        let entries = self.listed[&dir].clone();
        let missing: Vec<ContentHash> = entries
            .iter()
            .filter_map(|entry| match entry.inode.clone().unwrap().content {
                Content::Blocks(blocks) => blocks[0].map(|block| block.hash),
                _ => None,
            })
            .filter(|hash| !self.contents.contains(hash))
            .collect();
        if !missing.is_empty() {
            client.fetch(&missing).unwrap();
            self.contents.extend(missing);
        }
        for entry in entries {
            match entry.dentry.kind {
                FileKind::Directory => self.walk(client, entry.dentry.ino.0),
                _ => self.files += 1,
            }
        }
    }
}

#[test]
fn a_cold_tar_takes_less_than_a_request_for_twenty_files() {
    let folder = tempfile::tempdir().unwrap();
    let (running, mut client) = opened(config(folder.path()));
    let (files, dirs) = tree(&mut client);
    client.send(Ask::Goodbye(Goodbye {}));
    drop(client);
    for (session, budget) in [(2, 2 << 20), (3, 4 << 20)] {
        std::thread::sleep(std::time::Duration::from_millis(700));
        let (mut client, _) = Client::open(running.address, hello(session)).unwrap();
        client.requests = 0;
        let mut tar = Tar { listed: HashMap::new(), contents: HashSet::new(), files: 0, budget };
        let started = Instant::now();
        tar.walk(&mut client, 1);
        let took = started.elapsed();
        println!(
            "budget {budget}: {} requests for {files} files in {dirs} directories, {took:?}",
            client.requests
        );
        assert_eq!(tar.files, files);
        assert!(client.requests * 20 < files, "{} requests", client.requests);
    }
    running.shutdown();
}

#[test]
fn a_directory_of_a_hundred_thousand_names_comes_whole() {
    let folder = tempfile::tempdir().unwrap();
    let (running, mut client) = opened(config(folder.path()));
    const NAMES: u64 = 100_000;
    let numbers = AllocateInos { count: NAMES };
    assert!(matches!(client.ask(Ask::AllocateInos(numbers)), Ok(Answer::Inos(_))));
    for (part, inos) in (100..100 + NAMES).collect::<Vec<_>>().chunks(5000).enumerate() {
        let mut records: Vec<Record> = inos
            .iter()
            .flat_map(|ino| {
                let inline = Content::Inline(ino.to_string().into());
                [
                    link(1, &format!("name-{ino}"), *ino, FileKind::Regular, ino - 97),
                    put(*ino, file_in(1, inline, ino.to_string().len() as u64)),
                ]
            })
            .collect();
        records.push(put(1, directory(1, 0, inos.last().unwrap() - 96)));
        client.commit(part as u64 + 1, &records, (0, 0)).unwrap();
    }
    let started = Instant::now();
    let listings = client.enter(1, 0).unwrap();
    println!("{NAMES} names entered in {:?}", started.elapsed());
    assert_eq!(listings.dirs.len(), 1);
    assert_eq!(listings.dirs[0].entries.len() as u64, NAMES);
    for (entry, ino) in listings.dirs[0].entries.iter().zip(100..) {
        let inode = entry.inode.as_ref().unwrap();
        assert_eq!((entry.dentry.ino, &inode.content), (Ino(ino), &Content::Inline(ino.to_string().into())));
    }
    running.shutdown();
}

/// The listings of the whole tree, asked for as a walk does.
fn walk(client: &mut Client, budget_bytes: u64) -> (HashMap<u64, Vec<ListedEntry>>, u64) {
    let (mut listed, mut waiting, mut requests) = (HashMap::new(), vec![1], 0);
    while let Some(dir) = waiting.pop() {
        if !listed.contains_key(&dir) {
            let enter = Enter { dir, budget_bytes, names_only: true, ..Enter::default() };
            let asked = client.send(Ask::Enter(enter));
            let entered = client.listings(asked).unwrap();
            assert!(entered.contents.is_empty());
            listed.extend(entered.dirs.into_iter().map(|listed| (listed.dir, listed.entries)));
            requests += 1;
        }
        let is_dir = |entry: &&ListedEntry| entry.dentry.kind == FileKind::Directory;
        waiting.extend(listed[&dir].iter().filter(is_dir).map(|entry| entry.dentry.ino.0).rev());
    }
    (listed, requests)
}

#[test]
fn names_come_without_the_data_of_files_and_many_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let (running, mut client) = opened(config(folder.path()));
    let (files, dirs) = tree(&mut client);
    client.send(Ask::Goodbye(Goodbye {}));
    drop(client);
    for (session, budget, most) in [(2, 1 << 20, 10), (3, 100_000, 60)] {
        let (mut reader, _) = Client::open(running.address, hello(session)).unwrap();
        let (listed, requests) = walk(&mut reader, budget);
        let entries = || listed.values().flatten();
        assert_eq!((listed.len() as u64, entries().count() as u64), (dirs, files + dirs - 1));
        assert!(requests <= most, "{requests} requests");
        for entry in entries() {
            let row = entry.inode.as_ref().unwrap();
            let is_left_out = row.content == Content::LeftOut;
            assert_eq!(is_left_out, row.kind() == FileKind::Regular && row.size <= 4096, "{row:?}");
        }
        reader.send(Ask::Goodbye(Goodbye {}));
    }
    running.shutdown();
}

/// Sends a request that waits until another session has given something back; counts what that was told.
fn ask_owner(reader: &mut Client, owner: &mut Client, recalls: &mut u64, ask: Ask) -> u64 {
    let asked = reader.send(ask);
    while !reader.is_answered(asked) {
        *recalls += owner.ack_all();
    }
    asked
}

#[test]
fn a_walk_through_what_another_session_has_made_and_owns_takes_few_requests() {
    let folder = tempfile::tempdir().unwrap();
    let (running, mut writer) = opened(config(folder.path()));
    let (files, dirs) = tree(&mut writer);
    // Who knows of fewer slots than a directory may have claims each by itself.
    let hello = Hello { features: MANY_SLOTS, ..hello(2) };
    let (mut reader, _) = Client::open(running.address, hello).unwrap();
    let (mut listed, mut rows) = (HashMap::new(), HashSet::new());
    let (mut waiting, mut requests, mut recalls) = (vec![1], 0, 0);
    while let Some(dir) = waiting.pop() {
        if rows.insert(dir) {
            let ask = Ask::FetchInode(FetchInode { ino: dir });
            let asked = ask_owner(&mut reader, &mut writer, &mut recalls, ask);
            assert!(matches!(reader.receive(asked), Answer::Inode(row) if row.inode.is_some()));
            requests += 1;
        }
        if !listed.contains_key(&dir) {
            let enter = Enter { dir, budget_bytes: 1 << 20, names_only: true, ..Enter::default() };
            let asked = ask_owner(&mut reader, &mut writer, &mut recalls, Ask::Enter(enter));
            let entered = reader.listings(asked).unwrap();
            rows.extend(entered.files.iter().map(|(ino, _)| ino.0));
            listed.extend(entered.dirs.into_iter().map(|listed| (listed.dir, listed.entries)));
            requests += 1;
        }
        let below = listed[&dir].iter().filter(|entry| entry.dentry.kind == FileKind::Directory);
        let below: Vec<&ListedEntry> = below.collect();
        rows.extend(below.iter().filter(|entry| entry.inode.is_some()).map(|entry| entry.dentry.ino.0));
        waiting.extend(below.iter().map(|entry| entry.dentry.ino.0).rev());
    }
    assert_eq!(listed.len() as u64, dirs);
    assert_eq!(listed.values().flatten().count() as u64, files + dirs - 1);
    assert!(recalls > dirs / 2, "{recalls} recalls: nobody owned them");
    assert!(requests <= 100, "{requests} requests for {dirs} directories");
    running.shutdown();
}

#[test]
fn data_that_was_left_out_is_asked_for_by_file() {
    let folder = tempfile::tempdir().unwrap();
    let (running, mut client) = opened(config(folder.path()));
    let records = [
        put(1, directory(1, 1, 6)),
        link(1, "small", 100, FileKind::Regular, 3),
        put(100, file_in(1, Content::Inline(b"hay".to_vec().into()), 3)),
        link(1, "dir", 101, FileKind::Directory, 4),
        put(101, directory(1, 0, 4)),
        link(101, "below", 102, FileKind::Regular, 3),
        put(102, file_in(101, Content::Inline(b"straw".to_vec().into()), 5)),
    ];
    client.commit(1, &records, (8, 3)).unwrap();
    let mut files = |files: &[u64], homes: &[u64], budget_bytes| {
        let (files, homes) = (files.to_vec(), homes.to_vec());
        let enter = Enter { dir: 1, budget_bytes, files, homes, ..Enter::default() };
        let asked = client.send(Ask::Enter(enter));
        let entered = client.listings(asked).unwrap();
        assert!(entered.dirs.is_empty());
        entered.files.into_iter().map(|(ino, row)| (ino.0, row.content)).collect::<Vec<_>>()
    };
    let [small, below] =
        [(100, "hay"), (102, "straw")].map(|(ino, data)| (ino, Content::Inline(data.into())));
    assert_eq!(files(&[100, 102], &[1, 101], 1 << 20), [small.clone(), below]);
    // What is elsewhere, is no file or does not exist is left out; one comes however small the budget is.
    assert_eq!(files(&[102, 101, 103, 100], &[1, 1, 1, 1], 1 << 20), std::slice::from_ref(&small));
    assert_eq!(files(&[100, 102], &[1, 101], 0), [small]);
    running.shutdown();
}

#[test]
fn a_row_without_its_data_leaves_the_data_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let (running, mut client) = opened(config(folder.path()));
    let hay = Content::Inline(b"hay".to_vec().into());
    let records = [
        put(1, directory(1, 0, 4)),
        link(1, "small", 100, FileKind::Regular, 3),
        put(100, file_in(1, hay.clone(), 3)),
    ];
    client.commit(1, &records, (3, 1)).unwrap();
    let changed = InodeRow { mode: 0o100600, ..file_in(1, Content::LeftOut, 3) };
    client.commit(2, &[put(100, changed.clone())], (0, 0)).unwrap();
    let listed = client.enter(1, 0).unwrap();
    assert_eq!(listed.dirs[0].entries[0].inode, Some(InodeRow { content: hay, ..changed.clone() }));
    let refused = client.commit(3, &[put(101, changed)], (0, 0)).unwrap_err();
    assert_eq!(code(&refused), FailureCode::Invalid);
    running.shutdown();
}
