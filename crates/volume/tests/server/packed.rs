//! Packed listings: whatever is done, a walk that finds them tells what the rows say.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

use crate::common::*;
use bytes::Bytes;
use hayloft_model::{Content, Dentry, FileKind, Ino, Name, Record, Rows};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{CheckVolume, Checked, Enter, Goodbye, Hello, StatsRequest, SweepVolume};
use prost::Message;

/// Longer than a directory has to be quiet to be packed, and to be written.
const QUIET: Duration = Duration::from_millis(1600);

/// What a volume should hold, and random changes to it.
struct World {
    rows: Rows,
    next: u64,
    seed: u64,
}

impl World {
    fn new() -> World {
        let mut rows = Rows::default();
        rows.inodes.insert(Ino(1), directory(1, 0, 3));
        World { rows, next: 100, seed: 7 }
    }

    fn below(&mut self, most: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 33) % most
    }

    fn pick(&mut self, kind: FileKind) -> Option<Ino> {
        let all: Vec<Ino> =
            self.rows.inodes.iter().filter(|(_, row)| row.kind() == kind).map(|(ino, _)| *ino).collect();
        (!all.is_empty()).then(|| all[self.below(all.len() as u64) as usize])
    }

    fn number(&mut self) -> Ino {
        self.next += 1;
        Ino(self.next)
    }

    fn name(&mut self, dir: Ino, name: &str, ino: Ino) {
        let parent = self.rows.inodes.get_mut(&dir).unwrap();
        let cookie = parent.next_cookie;
        parent.next_cookie += 1;
        let kind = self.rows.inodes[&ino].kind();
        self.rows.dentries.insert((dir, Name::new(name.as_bytes())), Dentry { ino, kind, cookie });
    }

    fn content(&mut self) -> (Content, u64) {
        let len = [3, 200, 300, 4000][self.below(4) as usize];
        (Content::Inline(noise(self.seed, len).into()), len as u64)
    }

    fn make_file(&mut self, dir: Ino) {
        let ino = self.number();
        let (content, size) = self.content();
        self.rows.inodes.insert(ino, file_in(dir.0, content, size));
        self.name(dir, &format!("f{}", ino.0), ino);
    }

    fn make_directory(&mut self, files: u64) {
        let parent = self.pick(FileKind::Directory).unwrap();
        let ino = self.number();
        self.rows.inodes.insert(ino, directory(parent.0, 0, 3));
        self.rows.inodes.get_mut(&parent).unwrap().nlink += 1;
        self.name(parent, &format!("d{}", ino.0), ino);
        (0..files).for_each(|_| self.make_file(ino));
    }

    fn names_of(&self, ino: Ino) -> Vec<(Ino, Name)> {
        let names = self.rows.dentries.iter().filter(|(_, dentry)| dentry.ino == ino);
        names.map(|(key, _)| key.clone()).collect()
    }

    /// Links and home as the names say.
    fn settle(&mut self, ino: Ino) {
        let names = self.names_of(ino);
        if names.is_empty() {
            self.rows.inodes.remove(&ino);
            return;
        }
        let homes: BTreeSet<Ino> = names.iter().map(|(dir, _)| *dir).collect();
        let row = self.rows.inodes.get_mut(&ino).unwrap();
        row.nlink = names.len() as u32;
        row.parent = if homes.len() == 1 { *homes.first().unwrap() } else { Ino(0) };
    }

    fn step(&mut self) {
        let what = self.below(16);
        if what < 2 {
            let files = self.below(30);
            return self.make_directory(files);
        }
        let dir = self.pick(FileKind::Directory).unwrap();
        let Some(file) = self.pick(FileKind::Regular).filter(|_| what > 4) else {
            return self.make_file(dir);
        };
        let names = self.names_of(file);
        let name = names[self.below(names.len() as u64) as usize].clone();
        match what {
            5..=6 => {
                self.rows.dentries.remove(&name);
                self.settle(file);
            }
            7..=8 => {
                self.rows.dentries.remove(&name);
                let to = format!("moved{}", self.next + self.below(1 << 20));
                self.name(dir, &to, file);
                self.settle(file);
            }
            9..=11 => {
                let to = format!("link{}", self.next + self.below(1 << 20));
                self.name(dir, &to, file);
                self.settle(file);
            }
            12..=13 => {
                let (content, size) = self.content();
                let row = self.rows.inodes.get_mut(&file).unwrap();
                (row.content, row.size, row.allocated) = (content, size, size);
            }
            14 => self.rows.inodes.get_mut(&file).unwrap().mode ^= 0o111,
            _ => self.rows.inodes.get_mut(&dir).unwrap().mode ^= 0o022,
        }
    }

    /// The records that lead here from `before`, and what they do to the usage.
    fn since(&self, before: &Rows) -> (Vec<Record>, (i64, i64)) {
        let mut records = Vec::new();
        let changed = |ino: &Ino| before.inodes.get(ino) != self.rows.inodes.get(ino);
        // Whoever changes a file owns its home, and brings the row of that to begin with; and of directories of which names go.
        let mut homes: BTreeSet<Ino> =
            self.rows.inodes.iter().filter(|(ino, _)| changed(ino)).map(|(_, row)| row.parent).collect();
        homes.extend(
            before.dentries.keys().filter(|key| !self.rows.dentries.contains_key(*key)).map(|key| key.0),
        );
        for (ino, row) in self.rows.inodes.iter().filter(|(ino, _)| changed(ino) || homes.contains(ino)) {
            records.push(Record::PutInode(*ino, Box::new(row.clone())));
        }
        for (key, dentry) in &self.rows.dentries {
            if before.dentries.get(key) != Some(dentry) {
                records.push(Record::PutDentry(key.0, key.1.clone(), *dentry));
            }
        }
        for key in before.dentries.keys().filter(|key| !self.rows.dentries.contains_key(*key)) {
            records.push(Record::DeleteDentry(key.0, key.1.clone()));
        }
        for ino in before.inodes.keys().filter(|ino| !self.rows.inodes.contains_key(*ino)) {
            records.push(Record::DeleteInode(*ino));
        }
        let usage = |rows: &Rows| {
            let bytes: u64 = rows.inodes.values().map(|row| row.allocated).sum();
            (bytes as i64, rows.inodes.len() as i64)
        };
        let (now, then) = (usage(&self.rows), usage(before));
        (records, (now.0 - then.0, now.1 - then.1))
    }
}

fn take_over(running: &Running, session: u64) -> Client {
    let hello = Hello { takes_over: session - 1, ..hello(session) };
    Client::open(running.address, hello).unwrap().0
}

/// All listings of the tree, without the data of files.
fn names(client: &mut Client) -> BTreeMap<(Ino, Name), ListedEntry> {
    let (mut all, mut waiting, mut seen) = (BTreeMap::new(), vec![1], HashSet::new());
    while let Some(dir) = waiting.pop() {
        if seen.contains(&dir) {
            continue;
        }
        let enter = Enter { dir, budget_bytes: 1 << 20, names_only: true, ..Enter::default() };
        let asked = client.send(Ask::Enter(enter));
        for listing in client.listings(asked).unwrap().dirs {
            seen.insert(listing.dir);
            for entry in listing.entries {
                waiting.extend(Some(entry.dentry.ino.0).filter(|_| entry.dentry.kind == FileKind::Directory));
                all.insert((Ino(listing.dir), entry.name.clone()), entry);
            }
        }
    }
    all
}

fn assert_names(client: &mut Client, rows: &Rows) {
    let listed = names(client);
    assert!(listed.keys().eq(rows.dentries.keys()));
    for (key, dentry) in &rows.dentries {
        let entry = &listed[key];
        let mut row = rows.inodes[&dentry.ino].clone();
        if matches!(row.content, Content::Inline(_)) {
            row.content = Content::LeftOut;
        }
        assert_eq!((entry.dentry, entry.inode.as_ref()), (*dentry, Some(&row)), "{key:?}");
    }
}

fn check(running: &Running) -> Checked {
    let check = CheckVolume { name: "vol".into(), content: true, ..CheckVolume::default() };
    match Client::connect(running.address).ask(Ask::CheckVolume(check)).unwrap() {
        Answer::Checked(checked) => checked,
        other => panic!("{other:?}"),
    }
}

/// Directories that walks have found packed, and that they have not.
fn found(running: &Running) -> (u64, u64) {
    let answer = Client::connect(running.address).ask(Ask::Stats(StatsRequest {})).unwrap();
    let Answer::Stats(stats) = answer else { panic!("{answer:?}") };
    let stats: serde_json::Value = serde_json::from_str(&stats.json).unwrap();
    let listings = &stats["volumes"]["vol"]["listings"];
    (listings["found"].as_u64().unwrap(), listings["missed"].as_u64().unwrap())
}

fn sweep(running: &Running) {
    let swept = Client::connect(running.address).ask(Ask::SweepVolume(SweepVolume { name: "vol".into() }));
    assert!(matches!(swept, Ok(Answer::Swept(_))));
}

fn restarted(running: Running, folder: &Path, by_crash: bool) -> Running {
    if by_crash {
        running.crash()
    } else {
        running.shutdown()
    }
    Running::start(config(folder))
}

#[test]
fn whatever_is_done_packed_listings_say_what_the_rows_say() {
    let folder = tempfile::tempdir().unwrap();
    let (mut running, mut client) = opened(config(folder.path()));
    let mut world = World::new();
    let (mut packed, mut session) = (0, 1);
    for round in 0..20 {
        let (before, mut sequence) = (world.rows.clone(), 1);
        // Enough for a pack in some rounds.
        (0..=world.below(if round % 5 == 0 { 150 } else { 12 })).for_each(|_| world.step());
        let (records, usage) = world.since(&before);
        client.commit(sequence, &records, usage).unwrap();
        // One that changes what it has just brought.
        let before = world.rows.clone();
        world.step();
        let (records, usage) = world.since(&before);
        sequence += 1;
        client.commit(sequence, &records, usage).unwrap();

        session += 1;
        client = take_over(&running, session);
        assert_names(&mut client, &world.rows);
        if round % 10 == 3 {
            sleep(QUIET);
        }
        if round % 12 == 7 {
            sweep(&running);
        }
        if round % 7 == 4 {
            drop(client);
            running = restarted(running, folder.path(), round % 2 == 0);
        }
        let checked = check(&running);
        assert_eq!(checked.problems, [""; 0], "round {round}");
        packed = packed.max(checked.packed);
        session += 1;
        client = take_over(&running, session);
        // It owns now what it has looked at, and makes the next changes.
        compare_tree(&mut client, &world.rows);
    }
    assert!(packed > 3, "at most {packed} directories were packed");
    assert!(found(&running).0 > 0);
    running.shutdown();
}

/// A volume whose root has twelve files; it is packed, or not.
pub(crate) fn twelve(together: bool) -> (tempfile::TempDir, Running, Client, Rows) {
    let folder = tempfile::tempdir().unwrap();
    let (running, mut client) = opened(config(folder.path()));
    let mut world = World::new();
    for sequence in 1..=if together { 1 } else { 2 } {
        let before = world.rows.clone();
        (0..if together { 12 } else { 6 }).for_each(|_| world.make_file(Ino(1)));
        let (records, usage) = world.since(&before);
        client.commit(sequence, &records, usage).unwrap();
    }
    (folder, running, client, world.rows)
}

#[test]
fn what_arrives_whole_is_packed_at_once_and_what_does_not_when_it_was_walked_through() {
    for together in [true, false] {
        let (folder, running, _client, rows) = twelve(together);
        assert_eq!(check(&running).packed, u64::from(together));
        let mut client = take_over(&running, 2);
        assert_names(&mut client, &rows);
        sleep(QUIET);
        assert_eq!(check(&running).packed, 1);
        // Also by the next server.
        let running = restarted(running, folder.path(), false);
        let mut client = take_over(&running, 3);
        assert_names(&mut client, &rows);
        assert_eq!(found(&running), (1, 0));
        running.shutdown();
    }
}

#[test]
fn a_directory_that_has_just_changed_is_not_packed_as_it_was() {
    let (_folder, running, _client, mut rows) = twelve(false);
    let mut client = take_over(&running, 2);
    assert_names(&mut client, &rows);
    // Before it was quiet for long enough.
    let ino = *rows.inodes.keys().next_back().unwrap();
    rows.inodes.get_mut(&ino).unwrap().mode ^= 0o111;
    let changed = [Ino(1), ino].map(|ino| Record::PutInode(ino, Box::new(rows.inodes[&ino].clone())));
    let mut client = take_over(&running, 3);
    client.enter(1, 0).unwrap();
    client.commit(1, &changed, (0, 0)).unwrap();
    sleep(QUIET);
    assert_eq!((check(&running).packed, check(&running).problems), (0, Vec::new()));
    let mut client = take_over(&running, 4);
    assert_names(&mut client, &rows);
    running.shutdown();
}

#[test]
fn what_is_brought_back_unpacks_what_it_changes() {
    // The batch is answered before it is durable; the server dies, and its client brings it back.
    let (folder, running, _client, mut rows) = twelve(true);
    let mut client = take_over(&running, 2);
    client.enter(1, 0).unwrap();
    let ino = *rows.inodes.keys().next_back().unwrap();
    rows.inodes.get_mut(&ino).unwrap().mode ^= 0o111;
    let changed = [Ino(1), ino].map(|ino| Record::PutInode(ino, Box::new(rows.inodes[&ino].clone())));
    let asked = hayloft_wire::Commit { durable: false, ..commit(1, &changed, (0, 0)) };
    assert!(matches!(client.ask(Ask::Commit(asked)), Ok(Answer::Committed(_))));
    let entries = std::mem::take(&mut client.kept);
    let running = restarted(running, folder.path(), true);
    let claim = hayloft_wire::Claim { entries, ..hayloft_wire::Claim::default() };
    let (_client, _) = Client::open_with(running.address, hello(2), claim).unwrap();
    assert_eq!(check(&running).problems, [""; 0]);
    let mut client = take_over(&running, 3);
    assert_names(&mut client, &rows);
    running.shutdown();
}

/// The row that says which listings count.
#[derive(Clone, PartialEq, prost::Message)]
struct Generation {
    #[prost(uint64, tag = "1")]
    epoch: u64,
    #[prost(fixed64, tag = "2")]
    generation: u64,
}

/// Changes rows of a volume that no server has open, as a server that knows nothing of listings; or as one that does.
pub(crate) fn change_rows(folder: &Path, knows: bool, change: impl Fn(&[u8], Bytes) -> Option<Bytes>) {
    let volume = std::fs::read_dir(folder.join("volumes")).unwrap().next().unwrap().unwrap().file_name();
    let path = format!("volumes/{}/db", volume.to_str().unwrap());
    let store = object_store::local::LocalFileSystem::new_with_prefix(folder).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let db = slatedb::Db::builder(path, std::sync::Arc::new(store)).build().await.unwrap();
        let mut rows = db.scan(..).await.unwrap();
        while let Some(row) = rows.next().await.unwrap() {
            if let Some(changed) = change(&row.key, row.value) {
                db.put(&row.key, &changed).await.unwrap();
            }
        }
        if knows {
            let row = Generation::decode(db.get(b"G").await.unwrap().unwrap()).unwrap();
            let epoch = db.manifest().writer_epoch();
            db.put(b"G", Generation { epoch, ..row }.encode_to_vec()).await.unwrap();
        }
        db.close().await.unwrap();
    });
}

#[test]
fn listings_are_not_believed_after_a_server_that_does_not_know_of_them() {
    let (folder, running, _client, mut rows) = twelve(true);
    assert_eq!(check(&running).packed, 1);
    running.shutdown();
    let ino = *rows.inodes.keys().next_back().unwrap();
    rows.inodes.get_mut(&ino).unwrap().mode ^= 0o111;
    let key = [b"I", &ino.0.to_be_bytes()[..]].concat();
    let changed = hayloft_wire::InodeRowMessage::from_row(ino, &rows.inodes[&ino]).encode_to_vec();
    change_rows(folder.path(), false, |row, _| (row == key).then(|| changed.clone().into()));
    let running = Running::start(config(folder.path()));
    let mut client = take_over(&running, 2);
    assert_names(&mut client, &rows);
    assert_eq!((check(&running).packed, check(&running).problems), (0, Vec::new()));
    running.shutdown();
}

#[test]
fn the_check_finds_a_listing_that_is_wrong_and_a_repair_drops_it() {
    let (folder, running, client, rows) = twelve(true);
    drop(client);
    drop(take_over(&running, 2));
    running.shutdown();
    change_rows(folder.path(), true, |key, row| {
        let mut row = Some(row).filter(|_| key[0] == b'L')?.to_vec();
        // A byte of a name.
        row[9] ^= 1;
        Some(row.into())
    });
    let running = Running::start(config(folder.path()));
    let wrong = check(&running).problems;
    assert_eq!(wrong, ["/ (inode 1): its packed listing is not what its rows say"]);
    let running = restarted(running, folder.path(), false);
    Client::open(running.address, hello(2)).unwrap().0.send(Ask::Goodbye(Goodbye {}));
    sleep(Duration::from_millis(200));
    let asked = CheckVolume { name: "vol".into(), repair: true, ..CheckVolume::default() };
    let Ok(Answer::Checked(left)) = Client::connect(running.address).ask(Ask::CheckVolume(asked)) else {
        panic!()
    };
    assert_eq!((left.problems, left.mended.len(), left.packed), (Vec::new(), 1, 0));
    let (mut client, _) = Client::open(running.address, hello(3)).unwrap();
    assert_names(&mut client, &rows);
    running.shutdown();
}
