//! Damage at rest: every kind of object of the store, lost or changed in every way, after a stop in order and after a
//! crash. Either nothing is lost, or it is told within seconds, with volume and object.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hayloft_model::{Content, FileKind};
use hayloft_store::{Codec, StoreKey, decode_chunk};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{CheckVolume, Failed, FailureCode, FetchContent, Hello};

use crate::common::*;

/// Far more than any of it takes: only what hangs takes longer.
const SECONDS: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Harm {
    Deleted,
    Emptied,
    /// A folder is in its place.
    Folder,
    Truncated,
    /// As long as it was, and nothing is in it: what a file system leaves of a file whose blocks it had not written.
    Zeroed,
    /// With more behind it.
    Grown,
    /// Another one of its folder is in its place, where there is one.
    Exchanged,
    /// A bit, so far into the object, in sixteenths.
    Flipped(u64),
}

const HARMS: [Harm; 11] = [
    Harm::Deleted,
    Harm::Emptied,
    Harm::Folder,
    Harm::Truncated,
    Harm::Zeroed,
    Harm::Grown,
    Harm::Exchanged,
    Harm::Flipped(0),
    Harm::Flipped(7),
    Harm::Flipped(12),
    Harm::Flipped(15),
];

impl Harm {
    pub(crate) fn to(self, path: &Path) {
        match self {
            Harm::Deleted => fs::remove_file(path).unwrap(),
            Harm::Emptied => fs::write(path, b"").unwrap(),
            Harm::Folder => {
                fs::remove_file(path).unwrap();
                fs::create_dir(path).unwrap();
            }
            Harm::Truncated => {
                let content = fs::read(path).unwrap();
                fs::write(path, &content[..content.len() / 2]).unwrap();
            }
            Harm::Zeroed => {
                let len = fs::metadata(path).unwrap().len();
                fs::write(path, vec![0; len as usize]).unwrap();
            }
            Harm::Grown => {
                let content = fs::read(path).unwrap();
                fs::write(path, [&content[..], &content].concat()).unwrap();
            }
            Harm::Exchanged => {
                let folder = fs::read_dir(path.parent().unwrap()).unwrap();
                let others = folder.map(|entry| entry.unwrap().path());
                if let Some(other) = others.filter(|other| other != path && other.is_file()).max() {
                    fs::copy(other, path).unwrap();
                }
            }
            Harm::Flipped(place) => {
                let mut content = fs::read(path).unwrap();
                let at = content.len() as u64 * place / 16;
                content[at as usize] ^= 4;
                fs::write(path, content).unwrap();
            }
        }
    }
}

/// Files with their content, by name: some in rows, some in packs with others, some in blocks.
pub(crate) fn files() -> BTreeMap<String, Vec<u8>> {
    let small = (0..60).map(|n| (format!("small-{n}"), noise(n + 1, 100)));
    let packed = (0..100).map(|n| (format!("packed-{n}"), noise(n + 100, 3000)));
    let large = (0..4).map(|n| (format!("large-{n}"), noise(n + 500, 60_000)));
    small.chain(packed).chain(large).collect()
}

fn numbers() -> impl Iterator<Item = (u64, (String, Vec<u8>))> {
    (0..).zip(files())
}

/// Writes them in batches, each of which is durable when it is answered.
fn write(client: &mut Client) {
    let all: Vec<_> = numbers().collect();
    for (sequence, part) in (1..).zip(all.chunks(41)) {
        let mut records = vec![put(1, directory(1, 0, 3 + all.len() as u64))];
        let mut bytes = 0;
        for (n, (name, content)) in part {
            let size = content.len() as u64;
            let stored = match size > 4096 {
                true => Content::Blocks(vec![Some(client.content(content))]),
                false => Content::Inline(Bytes::from(content.clone())),
            };
            records.push(link(1, name, 100 + n, FileKind::Regular, 3 + n));
            records.push(put(100 + n, file_in(1, stored, size)));
            bytes += size as i64;
        }
        client.commit(sequence, &records, (bytes, part.len() as i64)).unwrap();
    }
}

/// Whether everything is there, byte for byte; else what was told.
pub(crate) fn read(running: &Running) -> Result<(), Failed> {
    let hello = Hello { takes_over: 1, ..hello(2) };
    let (mut client, _) = Client::open(running.address, hello)?;
    let listings = client.enter(1, 1 << 20)?;
    let entries: BTreeMap<String, _> = listings.dirs[0]
        .entries
        .iter()
        .map(|entry| (entry.name(), entry.inode.clone().expect("a row")))
        .collect();
    for (_, (name, expected)) in numbers() {
        let row = entries.get(&name).unwrap_or_else(|| panic!("{name} is lost without a word"));
        let content = match &row.content {
            Content::Inline(content) => content.clone(),
            Content::Blocks(blocks) => {
                let hash = blocks[0].unwrap().hash;
                let fetch = FetchContent { hashes: Bytes::copy_from_slice(&hash.0) };
                let Answer::Contents(mut got) = client.ask(Ask::FetchContent(fetch))? else {
                    panic!("{name}")
                };
                let chunk = got.chunks.remove(0);
                // As a mount does, which answers EIO then.
                let decoded =
                    decode_chunk(hash, chunk.len, Codec::try_from(chunk.codec).unwrap(), chunk.payload);
                decoded.map_err(|error| Failed { message: error.to_string(), ..Failed::default() })?
            }
            other => panic!("{name}: {other:?}"),
        };
        assert!(content == expected, "{name} has other content");
    }
    Ok(())
}

pub(crate) fn check(running: &Running, content: bool) -> Result<Vec<String>, Failed> {
    let check = CheckVolume { name: "vol".into(), content, ..CheckVolume::default() };
    match Client::connect(running.address).ask(Ask::CheckVolume(check))? {
        Answer::Checked(checked) => Ok(checked.problems),
        other => panic!("{other:?}"),
    }
}

/// The objects of a store by kind: of many like each other the first and the last.
pub(crate) fn objects(store: &Path) -> BTreeMap<String, Vec<PathBuf>> {
    fn visit(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { visit(&path, found) } else { found.push(path) }
        }
    }
    let mut found = Vec::new();
    visit(store, &mut found);
    found.sort();
    let mut kinds = BTreeMap::<String, Vec<PathBuf>>::new();
    for path in found {
        let folder = path.parent().unwrap().strip_prefix(store).unwrap();
        let kind: Vec<_> = folder.iter().map(|part| part.to_string_lossy().into_owned()).collect();
        let kind = kind.into_iter().filter(|part| part.len() < 32).collect::<Vec<_>>().join("/");
        // What is empty cannot be emptied: a mark of an opening in the log.
        if fs::metadata(&path).unwrap().len() > 0 {
            kinds.entry(kind).or_default().push(path);
        }
    }
    kinds
        .into_iter()
        .map(|(kind, paths)| {
            let mut chosen =
                vec![paths[0].clone(), paths[paths.len() / 2].clone(), paths[paths.len() - 1].clone()];
            chosen.dedup();
            (kind, chosen)
        })
        .collect()
}

fn copy(from: &Path, to: &Path) {
    let status = std::process::Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap();
    assert!(status.success());
}

pub(crate) fn quick(store: &Path) -> hayloft_volume::Config {
    quick_with(store, None)
}

pub(crate) fn quick_with(store: &Path, key: Option<&StoreKey>) -> hayloft_volume::Config {
    let mut config = config(store);
    config.key = key.cloned();
    // What was answered is to be durable.
    config.window = Duration::ZERO;
    config
}

/// A store with the files, whose server has gone in order or not.
pub(crate) fn stopped(store: &Path, in_order: bool) {
    stopped_with(store, in_order, None);
}

pub(crate) fn stopped_with(store: &Path, in_order: bool, key: Option<&StoreKey>) {
    let (running, mut client) = opened(quick_with(store, key));
    write(&mut client);
    drop(client);
    if in_order {
        running.shutdown();
    } else {
        running.crash();
    }
}

fn table(in_order: bool, key: Option<&StoreKey>) {
    let folder = tempfile::tempdir().unwrap();
    let whole = folder.path().join("whole");
    stopped_with(&whole, in_order, key);
    let (mut told, mut harmless) = (0, 0);
    let mut failures = Vec::new();
    for (kind, paths) in objects(&whole) {
        for path in &paths {
            for harm in HARMS {
                // No disk makes a folder of an object; where content was it is told all the same.
                if harm == Harm::Folder && kind != "packs" {
                    continue;
                }
                let store = folder.path().join("store");
                copy(&whole, &store);
                let object = path.strip_prefix(&whole).unwrap();
                harm.to(&store.join(object));
                let began = Instant::now();
                let what = format!("{kind}: {} {harm:?}, in order: {in_order}", object.display());
                let running = Running::start(quick_with(&store, key));
                let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| read(&running)));
                let checked = check(&running, true);
                let took = began.elapsed();
                let file = object.file_name().unwrap().to_string_lossy().into_owned();
                let names_it = |failed: &Failed| {
                    failed.message.contains(&file)
                        || failed.message.contains("the content of ") && kind == "packs"
                };
                match (outcome, checked) {
                    (Err(_), checked) => failures.push(format!("{what}: lost without a word; {checked:?}")),
                    (Ok(Ok(())), Ok(problems)) if problems.is_empty() => harmless += 1,
                    // Read before it was needed, or not needed by readers.
                    (Ok(Ok(())), Ok(_)) => told += 1,
                    (Ok(Ok(())), Err(failed)) if names_it(&failed) => told += 1,
                    (Ok(Err(failed)), Err(also)) if names_it(&failed) && names_it(&also) => told += 1,
                    (Ok(Err(failed)), Ok(problems)) if names_it(&failed) && !problems.is_empty() => told += 1,
                    (outcome, checked) => {
                        failures.push(format!("{what}: {:?}; {checked:?}", outcome.unwrap()));
                    }
                }
                if took > SECONDS {
                    failures.push(format!("{what}: took {took:?}"));
                }
                running.crash();
                fs::remove_dir_all(&store).unwrap();
            }
        }
    }
    println!("in order: {in_order}: {told} told, {harmless} harmless");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(told >= 15 && harmless > 10, "{told} told, {harmless} harmless");
}

#[test]
fn damage_after_a_stop_in_order_is_told_or_harms_nothing() {
    table(true, None);
}

#[test]
fn damage_after_a_crash_is_told_or_harms_nothing() {
    table(false, None);
}

#[test]
fn damage_of_an_encrypted_store_is_told_or_harms_nothing() {
    let key = StoreKey::new([5; 32]);
    table(true, Some(&key));
    table(false, Some(&key));
}

#[test]
fn what_is_damaged_says_so_with_a_code_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    stopped(folder.path(), false);
    let logs = &objects(folder.path())["volumes/db/wal"];
    Harm::Deleted.to(logs.last().unwrap());
    let running = Running::start(quick(folder.path()));
    let failed = read(&running).unwrap_err();
    assert_eq!(code(&failed), FailureCode::AtRest);
    assert!(failed.message.starts_with("volume vol: the store is damaged: volumes/"), "{}", failed.message);
}

#[test]
fn a_repair_goes_on_without_what_is_lost_and_says_what_that_was() {
    let folder = tempfile::tempdir().unwrap();
    stopped(folder.path(), false);
    let logs = &objects(folder.path())["volumes/db/wal"];
    let last = logs.last().unwrap();
    Harm::Deleted.to(last);
    let running = Running::start(quick(folder.path()));
    check(&running, false).unwrap_err();
    let repair = CheckVolume { name: "vol".into(), content: true, repair: true, scrub: false };
    // The session of the crashed client counts as a mount until it is evicted.
    let mut admin = Client::connect(running.address);
    let first = admin.ask(Ask::CheckVolume(repair.clone()));
    let checked = match first {
        Ok(Answer::Checked(checked)) => checked,
        Err(busy) => {
            assert_eq!(code(&busy), FailureCode::Busy, "{}", busy.message);
            let evict = hayloft_wire::EvictClient { volume: "vol".into(), session: 1 };
            admin.ask(Ask::EvictClient(evict)).unwrap();
            let Answer::Checked(checked) = admin.ask(Ask::CheckVolume(repair)).unwrap() else { panic!() };
            checked
        }
        other => panic!("{other:?}"),
    };
    assert_eq!(checked.problems, [""; 0], "{:?}", checked.mended);
    assert_eq!(check(&running, true).unwrap(), [""; 0]);
    let (mut client, _) = Client::open(running.address, hello(7)).unwrap();
    let found = client.enter(1, 1 << 20).unwrap().dirs[0].entries.len();
    assert!(found > 0 && found < files().len(), "{found} files");
}

#[test]
fn a_database_that_is_gone_is_no_empty_volume() {
    type Loss = fn(&Path);
    let losses: [(&str, Loss); 3] = [
        ("all of it", |volume| fs::remove_dir_all(volume).unwrap()),
        ("database", |volume| fs::remove_dir_all(volume.join("db")).unwrap()),
        ("manifests and the ledger", |volume| {
            fs::remove_dir_all(volume.join("db/manifest")).unwrap();
            fs::remove_dir_all(volume.join("ledger")).unwrap();
        }),
    ];
    for (what, lose) in losses {
        let folder = tempfile::tempdir().unwrap();
        let (store, kept) = (folder.path().join("store"), folder.path().join("kept"));
        stopped(&store, true);
        copy(&store, &kept);
        let volume = fs::read_dir(store.join("volumes")).unwrap().next().unwrap().unwrap();
        lose(&volume.path());
        let running = Running::start(quick(&store));
        let mut admin = Client::connect(running.address);
        let repair = CheckVolume { name: "vol".into(), repair: true, ..CheckVolume::default() };
        // A repair makes nothing of nothing.
        let told =
            [read(&running), check(&running, false).map(drop), admin.ask(Ask::CheckVolume(repair)).map(drop)];
        for told in told {
            let failed = told.expect_err(what);
            assert_eq!(code(&failed), FailureCode::AtRest, "{what}: {}", failed.message);
            assert!(failed.message.contains("manifest"), "{what}: {}", failed.message);
        }
        running.shutdown();
        // From the copy all is there again.
        fs::remove_dir_all(&store).unwrap();
        copy(&kept, &store);
        let running = Running::start(quick(&store));
        read(&running).unwrap();
        running.shutdown();
    }
}

#[test]
fn a_damaged_volume_can_be_deleted() {
    let folder = tempfile::tempdir().unwrap();
    stopped(folder.path(), true);
    let volume = fs::read_dir(folder.path().join("volumes")).unwrap().next().unwrap().unwrap().path();
    fs::remove_dir_all(volume.join("db/manifest")).unwrap();
    let running = Running::start(quick(folder.path()));
    check(&running, false).unwrap_err();
    let delete = hayloft_wire::DeleteVolume { name: "vol".into(), snapshots: false };
    Client::connect(running.address).ask(Ask::DeleteVolume(delete)).unwrap();
    assert!(!volume.exists());
    // The name is free.
    Client::create(running.address, 0);
    assert_eq!(check(&running, true).unwrap(), [""; 0]);
    running.shutdown();
}

#[test]
fn a_check_names_damaged_content_by_its_path() {
    let folder = tempfile::tempdir().unwrap();
    stopped(folder.path(), true);
    let packs = &objects(folder.path())["packs"];
    Harm::Deleted.to(&packs[0]);
    let running = Running::start(quick(folder.path()));
    let problems = check(&running, true).unwrap();
    assert!(problems.iter().all(|problem| problem.starts_with("/packed-") || problem.starts_with("/large-")));
    assert!(!problems.is_empty());
}

#[test]
fn scrubbing_reads_every_object_and_names_those_that_are_damaged() {
    scrubbed(None);
}

#[test]
fn scrubbing_reads_every_object_of_an_encrypted_store() {
    scrubbed(Some(&StoreKey::new([6; 32])));
}

fn scrubbed(key: Option<&StoreKey>) {
    let folder = tempfile::tempdir().unwrap();
    stopped_with(folder.path(), true, key);
    let running = Running::start(quick_with(folder.path(), key));
    let scrub = || {
        let scrub = CheckVolume { name: "vol".into(), scrub: true, ..CheckVolume::default() };
        let Ok(Answer::Checked(checked)) = Client::connect(running.address).ask(Ask::CheckVolume(scrub))
        else {
            panic!("no answer")
        };
        (checked.objects, checked.problems)
    };
    let (objects_read, problems) = scrub();
    assert_eq!(problems, [""; 0]);
    assert!(objects_read >= 4, "{objects_read}");
    let objects = objects(folder.path());
    for kind in ["packs", "volumes/db/compacted"] {
        Harm::Flipped(5).to(&objects[kind][0]);
        let file = objects[kind][0].file_name().unwrap().to_string_lossy().into_owned();
        let problems = scrub().1;
        assert!(problems.iter().any(|problem| problem.contains(&file)), "{kind}: {problems:?}");
    }
    // The registry mends itself.
    Harm::Flipped(5).to(&objects["registry"][0]);
    let damaged = fs::read(&objects["registry"][0]).unwrap();
    scrub();
    let mended = fs::read(&objects["registry"][0]).unwrap();
    match key {
        None => assert_eq!(mended, fs::read(&objects["registry-copy"][0]).unwrap()),
        Some(_) => assert!(mended != damaged && mended.len() == damaged.len()),
    }
}
