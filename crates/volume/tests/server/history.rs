//! Random histories against the reference rows, with crashes, restarts and sweeps in between.

use std::collections::{BTreeMap, BTreeSet};

use crate::common::*;
use bytes::Bytes;
use hayloft_model::grants::Object;
use hayloft_model::{BlockRef, Content, ContentHash, FileKind, Ino, InodeRow, Name, Record, Rows};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{CheckVolume, Claim, FetchInode, FetchPages, Hello, SweepVolume, encode_blocks};

/// A seeded source of small numbers.
pub(crate) struct Dice(pub(crate) u64);

impl Dice {
    pub(crate) fn roll(&mut self, sides: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % sides
    }

    fn one_of<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        (!from.is_empty()).then(|| from[self.roll(from.len() as u64) as usize])
    }
}

/// A client that makes, overwrites and deletes files and directories at random.
struct World {
    dice: Dice,
    rows: Rows,
    contents: BTreeMap<ContentHash, Bytes>,
    next_ino: u64,
    sequence: u64,
}

#[derive(Default)]
struct Changes {
    inodes: BTreeMap<Ino, Option<hayloft_model::InodeRow>>,
    records: Vec<Record>,
    usage: (i64, i64),
}

impl World {
    fn new(seed: u64) -> World {
        let mut rows = Rows::default();
        rows.inodes.insert(Ino(1), directory(1, 0, 3));
        let dice = Dice(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        World { dice, rows, contents: BTreeMap::new(), next_ino: 16, sequence: 0 }
    }

    fn directories(&self) -> Vec<Ino> {
        let is_directory = |row: &hayloft_model::InodeRow| row.kind() == FileKind::Directory;
        self.rows.inodes.iter().filter(|(_, row)| is_directory(row)).map(|(ino, _)| *ino).collect()
    }

    fn inode(&self, changes: &Changes, ino: Ino) -> hayloft_model::InodeRow {
        changes.inodes.get(&ino).cloned().flatten().unwrap_or_else(|| self.rows.inodes[&ino].clone())
    }

    /// A block: new, or one that was used before, uploaded again unless it is in use now.
    fn block(&mut self, client: &mut Client) -> BlockRef {
        let in_use: BTreeSet<ContentHash> = live(&self.rows);
        let old: Vec<ContentHash> = self.contents.keys().copied().collect();
        if self.dice.roll(4) == 0
            && let Some(hash) = self.dice.one_of(&old)
        {
            let raw = self.contents[&hash].clone();
            if !in_use.contains(&hash) || self.dice.roll(2) == 0 {
                client.content(&raw);
            }
            return BlockRef { hash, len: raw.len() as u32 };
        }
        let len = 5000 + self.dice.roll(60000) as usize;
        let raw = noise(self.dice.roll(u64::MAX), len);
        let block = client.content(&raw);
        self.contents.insert(block.hash, raw.into());
        block
    }

    fn make_file(&mut self, client: &mut Client, changes: &mut Changes, dir: Ino, ino: Ino) {
        if let Some(old) = self.rows.inodes.get(&ino) {
            changes.usage.0 -= old.allocated as i64;
        }
        let row = match self.dice.roll(5) {
            0 | 1 => {
                let len = self.dice.roll(4000);
                let seed = self.dice.roll(1000);
                file(Content::Inline(noise(seed, len as usize).into()), len)
            }
            2 | 3 => {
                let count = 1 + self.dice.roll(4);
                let blocks: Vec<_> =
                    (0..count).map(|_| (self.dice.roll(5) > 0).then(|| self.block(client))).collect();
                file(Content::Blocks(blocks), count * 65536)
            }
            _ => {
                let blocks = vec![Some(self.block(client)); 64];
                let page = vec![Some(self.block(client))];
                changes.records.push(Record::PutPage(ino, 1, page));
                file(Content::Blocks(blocks), 65 * 65536)
            }
        };
        if row.size <= 64 * 65536 && self.rows.pages.contains_key(&(ino, 1)) {
            changes.records.push(Record::DeletePages(ino, 1));
        }
        changes.usage.0 += row.allocated as i64;
        let row = InodeRow { parent: dir, ..row };
        changes.inodes.insert(ino, Some(row));
    }

    /// One change of a name or of a file.
    fn change(&mut self, client: &mut Client, changes: &mut Changes) {
        let touched = |ino: &Ino, changes: &Changes| changes.inodes.contains_key(ino);
        let dirs: Vec<Ino> = self
            .directories()
            .into_iter()
            .filter(|dir| !matches!(changes.inodes.get(dir), Some(None)))
            .collect();
        let Some(dir) = self.dice.one_of(&dirs) else { return };
        let names: Vec<Name> = self.rows.listing(dir).into_iter().map(|(name, _)| name).collect();
        match (self.dice.roll(10), self.dice.one_of(&[0; 1]).and(pick(&mut self.dice, &names))) {
            (0..=5, _) => {
                let ino = Ino(self.next_ino);
                self.next_ino += 1;
                let kind = if self.dice.roll(4) == 0 { FileKind::Directory } else { FileKind::Regular };
                let mut parent = self.inode(changes, dir);
                let name = format!("n{}", ino.0);
                changes.records.push(link(dir.0, &name, ino.0, kind, parent.next_cookie));
                parent.next_cookie += 1;
                parent.nlink += u32::from(kind == FileKind::Directory);
                changes.inodes.insert(dir, Some(parent));
                changes.usage.1 += 1;
                match kind {
                    FileKind::Directory => {
                        changes.inodes.insert(ino, Some(directory(dir.0, 0, 3)));
                    }
                    _ => self.make_file(client, changes, dir, ino),
                }
            }
            (_, None) => {}
            (6 | 7, Some(name)) => {
                let dentry = self.rows.dentries[&(dir, name)];
                if dentry.kind == FileKind::Regular && !touched(&dentry.ino, changes) {
                    self.make_file(client, changes, dir, dentry.ino);
                }
            }
            (_, Some(name)) => {
                let dentry = self.rows.dentries[&(dir, name.clone())];
                let empty = self.rows.listing(dentry.ino).is_empty();
                if touched(&dentry.ino, changes) || !empty {
                    return;
                }
                changes.usage.0 -= self.rows.inodes[&dentry.ino].allocated as i64;
                changes.usage.1 -= 1;
                changes.inodes.insert(dentry.ino, None);
                changes.records.push(Record::DeleteDentry(dir, name));
                let mut parent = self.inode(changes, dir);
                parent.nlink -= u32::from(dentry.kind == FileKind::Directory);
                changes.inodes.insert(dir, Some(parent));
            }
        }
    }

    fn batch(&mut self, client: &mut Client) {
        let mut changes = Changes::default();
        for _ in 0..1 + self.dice.roll(12) {
            self.change(client, &mut changes);
        }
        let Changes { inodes, mut records, usage } = changes;
        records.extend(inodes.into_iter().map(|(ino, row)| match row {
            Some(row) => put(ino.0, row),
            None => Record::DeleteInode(ino),
        }));
        self.sequence += 1;
        assert_eq!(client.commit(self.sequence, &records, usage).unwrap(), self.sequence);
        records.iter().for_each(|record| self.rows.apply(record));
    }

    /// Everything that is reachable is there, and is what it was.
    fn verify(&self, client: &mut Client) {
        compare_tree(client, &self.rows);
        let hashes: Vec<ContentHash> = live(&self.rows).into_iter().collect();
        for hashes in hashes.chunks(100) {
            for (content, hash) in client.fetch(hashes).unwrap().iter().zip(hashes) {
                assert_eq!(content, &self.contents[hash]);
            }
        }
        for ino in 16..self.next_ino {
            let found = client.ask(Ask::FetchInode(FetchInode { ino }));
            assert_eq!(found.is_ok(), self.rows.inodes.contains_key(&Ino(ino)), "inode {ino}");
        }
        for ((ino, page), blocks) in &self.rows.pages {
            let Ok(Answer::Pages(pages)) = client.ask(Ask::FetchPages(FetchPages { ino: ino.0 })) else {
                panic!()
            };
            assert_eq!((pages.pages[0].page, &pages.pages[0].blocks), (*page, &encode_blocks(blocks)));
        }
    }
}

fn pick(dice: &mut Dice, names: &[Name]) -> Option<Name> {
    (!names.is_empty()).then(|| names[dice.roll(names.len() as u64) as usize].clone())
}

fn live(rows: &Rows) -> BTreeSet<ContentHash> {
    let in_rows = rows.inodes.values().filter_map(|row| match &row.content {
        Content::Blocks(blocks) => Some(blocks),
        _ => None,
    });
    in_rows.chain(rows.pages.values()).flatten().flatten().map(|block| block.hash).collect()
}

fn sweep(address: std::net::SocketAddr) -> hayloft_wire::Swept {
    match Client::connect(address).ask(Ask::SweepVolume(SweepVolume { name: "vol".into() })).unwrap() {
        Answer::Swept(swept) => swept,
        other => panic!("{other:?}"),
    }
}

fn history(seed: u64, rounds: u64) {
    let folder = tempfile::tempdir().unwrap();
    let mut running = Running::start(config(folder.path()));
    Client::create(running.address, 0);
    let (mut client, _) = Client::open(running.address, hello(seed)).unwrap();
    let mut world = World::new(seed);
    for round in 0..rounds {
        let address = running.address;
        // Sweeps run while batches come in.
        let sweeper = (round % 2 == 1).then(|| std::thread::spawn(move || sweep(address)));
        for _ in 0..6 {
            world.batch(&mut client);
        }
        if let Some(sweeper) = sweeper {
            sweeper.join().unwrap();
        }
        world.verify(&mut client);
        let check = CheckVolume { name: "vol".into(), content: true, ..CheckVolume::default() };
        let Ok(Answer::Checked(checked)) = Client::connect(address).ask(Ask::CheckVolume(check)) else {
            panic!()
        };
        assert_eq!(checked.problems, [""; 0], "seed {seed}, round {round}");
        if round % 3 == 2 {
            if world.dice.roll(2) == 0 {
                running.crash();
            } else {
                running.shutdown();
            }
            running = Running::start(config(folder.path()));
            let resume = Hello { resume: true, ..hello(seed) };
            let own = world.directories().into_iter().map(|dir| Object::Directory(dir).into()).collect();
            let claim = Claim { own, ..Claim::default() };
            let (again, welcome) = Client::open_with(running.address, resume, claim).unwrap();
            assert_eq!(welcome.last_sequence, world.sequence);
            client = again;
        }
    }
    // All gone: a sweep gives all of the content's room back.
    sweep(running.address);
    let kept: u64 = pack_bytes(folder.path());
    let live_bytes: usize = live(&world.rows).iter().map(|hash| world.contents[hash].len()).sum();
    assert!(kept < 2 * live_bytes as u64 + (2 << 20), "{kept} bytes of packs for {live_bytes} live ones");
    running.shutdown();
}

fn pack_bytes(folder: &std::path::Path) -> u64 {
    let Ok(volumes) = std::fs::read_dir(folder.join("packs")) else { return 0 };
    volumes
        .flat_map(|volume| std::fs::read_dir(volume.unwrap().path()).unwrap())
        .map(|pack| pack.unwrap().metadata().unwrap().len())
        .sum()
}

#[test]
fn random_histories_read_back_as_the_reference_says() {
    for seed in 1..=6 {
        history(seed, 12);
    }
}
