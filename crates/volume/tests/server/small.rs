//! Content of small files: kept in packs when a batch brings much of it, moved and dropped by the sweep.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::*;
use bytes::Bytes;
use hayloft_model::{Content, FileKind, Ino, InodeRow, Name, Record};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{FailureCode, Hello, SweepVolume};

const FILES: u64 = 400;
const LEN: usize = 3000;

fn content(n: u64) -> Bytes {
    noise(n + 1, LEN).into()
}

/// Makes files in the root in one batch.
fn fill(client: &mut Client, sequence: u64, numbers: std::ops::Range<u64>) {
    let mut records = vec![put(1, directory(1, 0, 3 + numbers.end))];
    for n in numbers.clone() {
        records.push(link(1, &format!("f{n}"), 100 + n, FileKind::Regular, 3 + n));
        records.push(put(100 + n, file_in(1, Content::Inline(content(n)), LEN as u64)));
    }
    let count = (numbers.end - numbers.start) as i64;
    client.commit(sequence, &records, (count * LEN as i64, count)).unwrap();
}

fn delete(client: &mut Client, sequence: u64, numbers: impl Iterator<Item = u64>) {
    let mut records = vec![put(1, directory(1, 0, 3 + FILES))];
    let mut count = 0;
    for n in numbers {
        records.push(Record::DeleteDentry(Ino(1), Name::new(format!("f{n}").as_bytes())));
        records.push(Record::DeleteInode(Ino(100 + n)));
        count += 1;
    }
    client.commit(sequence, &records, (-count * LEN as i64, -count)).unwrap();
}

fn sweep(running: &Running) {
    let sweep = SweepVolume { name: "vol".into() };
    let swept = Client::connect(running.address).ask(Ask::SweepVolume(sweep)).unwrap();
    assert!(matches!(swept, Answer::Swept(_)));
}

/// The session before is ended; the next one knows nothing, and looks at the root.
fn look(running: &Running, session: u64) -> (Client, Vec<(u64, InodeRow)>) {
    let hello = Hello { takes_over: session - 1, ..hello(session) };
    let (mut client, _) = Client::open(running.address, hello).unwrap();
    let listings = client.enter(1, 8 << 20).unwrap();
    let rows = listings.dirs[0].entries.iter().map(|entry| {
        let row = entry.inode.clone().unwrap();
        (entry.dentry.ino.0 - 100, row)
    });
    let rows = rows.collect();
    (client, rows)
}

fn assert_all(rows: &[(u64, InodeRow)], numbers: impl Iterator<Item = u64>) {
    assert_eq!(rows.iter().map(|(n, _)| *n).collect::<Vec<_>>(), numbers.collect::<Vec<_>>());
    for (n, row) in rows {
        assert_eq!(row.content, Content::Inline(content(*n)), "file {n}");
    }
}

fn packs(folder: &Path) -> Vec<PathBuf> {
    let Ok(volumes) = fs::read_dir(folder.join("packs")) else { return Vec::new() };
    let volumes = volumes.map(|volume| volume.unwrap().path());
    volumes.flat_map(|volume| fs::read_dir(volume).unwrap()).map(|pack| pack.unwrap().path()).collect()
}

#[test]
fn contents_of_small_files_lie_in_packs_that_the_sweep_empties() {
    let folder = tempfile::tempdir().unwrap();
    let (running, mut client) = opened(config(folder.path()));
    fill(&mut client, 1, 0..FILES);
    assert_eq!(packs(folder.path()).len(), 1);
    assert_eq!(running.problems(), [""; 0]);
    // Little stays in rows: no pack for it.
    fill(&mut client, 2, FILES..FILES + 3);
    assert_eq!(packs(folder.path()).len(), 1);
    delete(&mut client, 3, FILES..FILES + 3);
    running.crash();

    let running = Running::start(config(folder.path()));
    let (_, rows) = look(&running, 2);
    assert_all(&rows, 0..FILES);

    let (mut client, _) = look(&running, 3);
    delete(&mut client, 1, (0..FILES).filter(|n| n % 4 != 0));
    let before = packs(folder.path());
    sweep(&running);
    // What is left of a sparse pack has moved to another one.
    let after = packs(folder.path());
    assert_eq!((before.len(), after.len()), (1, 1));
    assert_ne!(before, after);
    assert!(fs::metadata(&after[0]).unwrap().len() < FILES * LEN as u64 / 3);
    assert_eq!(running.problems(), [""; 0]);
    let (mut client, rows) = look(&running, 4);
    assert_all(&rows, (0..FILES).step_by(4));

    delete(&mut client, 1, (0..FILES).step_by(4));
    sweep(&running);
    assert_eq!(packs(folder.path()), [""; 0].map(PathBuf::from));
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn damage_to_one_small_file_spoils_no_other_and_its_row_can_be_changed() {
    let folder = tempfile::tempdir().unwrap();
    let (running, mut client) = opened(config(folder.path()));
    fill(&mut client, 1, 0..FILES);
    let pack = &packs(folder.path())[0];
    let mut bytes = fs::read(pack).unwrap();
    // In the second file.
    bytes[8 + LEN + 100] ^= 1;
    fs::write(pack, &bytes).unwrap();
    let problems = running.problems();
    assert!(problems.len() == 1 && problems[0].starts_with("/f1 (inode 101): its content is damaged (pack "));

    let (mut client, mut rows) = look(&running, 2);
    let (_, mut damaged) = rows.remove(1);
    assert_all(&rows, (0..FILES).filter(|n| *n != 1));
    let Content::Blocks(blocks) = &damaged.content else { panic!("{damaged:?}") };
    let failed = client.fetch(&[blocks[0].unwrap().hash]).unwrap_err();
    assert_eq!(code(&failed), FailureCode::AtRest);
    damaged.mode ^= 0o111;
    let records = [put(1, directory(1, 0, 3 + FILES)), put(101, damaged)];
    client.commit(1, &records, (0, 0)).unwrap();
    delete(&mut client, 2, 1..2);
    assert_eq!(running.problems(), [""; 0]);

    fs::remove_file(pack).unwrap();
    let (_client, rows) = look(&running, 3);
    assert_eq!(rows.len() as u64, FILES - 1);
    assert!(rows.iter().all(|(_, row)| matches!(row.content, Content::Blocks(_))));
    assert_eq!(running.problems().len(), 100);
    running.shutdown();
}
