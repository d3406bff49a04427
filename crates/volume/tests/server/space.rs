//! A full disk: refused in time, nothing acknowledged is lost, and deleting makes room. On a small tmpfs,
//! which takes root to mount.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::*;
use hayloft_model::{Content, FileKind, Ino, Name, Record};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{FailureCode, Hello, SetQuota, StatusRequest, SweepVolume};

struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount(size: &str) -> Option<SmallDisk> {
        let folder = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
            .arg(folder.path())
            .status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(SmallDisk(folder));
        }
        println!("skipped: mounting a tmpfs takes root");
        None
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

fn file_records(n: u64, content: Content, size: u64) -> Vec<Record> {
    vec![
        put(1, directory(1, 0, 4 + n)),
        link(1, &format!("f{n}"), 100 + n, FileKind::Regular, 3 + n),
        put(100 + n, file(content, size)),
    ]
}

fn delete_records(n: u64) -> Vec<Record> {
    vec![
        Record::DeleteDentry(Ino(1), Name::new(format!("f{n}").as_bytes())),
        Record::DeleteInode(Ino(100 + n)),
    ]
}

#[test]
fn a_full_store_refuses_in_time_and_recovers_by_deleting() {
    let Some(disk) = SmallDisk::mount("96m") else { return };
    let (running, mut client) = opened(config(disk.path()));
    const BLOCKS: u64 = 16;
    let mut stored = 0;
    let write = |client: &mut Client, sequence: u64, n: u64| {
        let blocks = (0..BLOCKS).map(|at| Some(client.content(&noise(n * 100 + at, 65536)))).collect();
        let size = BLOCKS * 65536;
        client.commit(sequence, &file_records(n, Content::Blocks(blocks), size), (size as i64, 1))
    };
    let full = loop {
        match write(&mut client, stored + 1, stored) {
            Ok(_) => stored += 1,
            Err(failed) => break failed,
        }
    };
    assert_eq!(code(&full), FailureCode::NoSpace, "{}", full.message);
    assert!(stored > 40, "only {stored} MiB of 96 were used");
    assert_eq!(running.problems(), [""; 0]);
    for n in 0..30 {
        client.commit(stored + 1 + n, &delete_records(n), (-((BLOCKS * 65536) as i64), -1)).unwrap();
    }
    let sweep = SweepVolume { name: "vol".into() };
    let Ok(Answer::Swept(swept)) = Client::connect(running.address).ask(Ask::SweepVolume(sweep)) else {
        panic!()
    };
    println!("{stored} MiB stored; {swept:?}");
    for n in 0..20 {
        write(&mut client, stored + 31 + n, 1000 + n).unwrap();
    }
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn a_full_store_is_swept_when_it_refuses_and_shrinking_batches_go_on() {
    let Some(disk) = SmallDisk::mount("96m") else { return };
    let (running, mut client) = opened(config(disk.path()));
    let content = |client: &mut Client, seed: u64, blocks: u64| {
        let blocks = (0..blocks).map(|at| Some(client.content(&noise(seed * 100 + at, 65536)))).collect();
        Content::Blocks(blocks)
    };
    const SIZE: u64 = 16 * 65536;
    let mut stored = 0;
    let write = |client: &mut Client, stored: &mut u64| {
        let content = content(client, *stored, 16);
        let done = client.commit(*stored + 1, &file_records(*stored, content, SIZE), (SIZE as i64, 1));
        done.inspect(|_| *stored += 1)
    };
    while write(&mut client, &mut stored).is_ok() {}
    // A file is written again, shorter: that must be possible on a full store.
    let shorter = -(SIZE as i64) / 2;
    client.begin(stored + 1, (shorter, 0));
    let half = content(&mut client, 7777, 8);
    client.commit(stored + 1, &[put(100, file(half, SIZE / 2))], (shorter, 0)).unwrap();
    client.begin(stored + 2, (-12 * SIZE as i64, -12));
    let deleted: Vec<Record> = (1..13).flat_map(delete_records).collect();
    client.commit(stored + 2, &deleted, (-12 * SIZE as i64, -12)).unwrap();
    // Nobody asks for a sweep.
    let (started, mut next) = (Instant::now(), stored + 2);
    let enough = next + 8;
    while next < enough {
        let Err(refused) = write(&mut client, &mut next) else { continue };
        assert_eq!(code(&refused), FailureCode::NoSpace, "{}", refused.message);
        assert!(started.elapsed() < Duration::from_secs(20), "{}", refused.message);
        std::thread::sleep(Duration::from_millis(100));
    }
    println!("{stored} MiB stored; room after {:?}", started.elapsed());
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn what_others_wait_for_may_exceed_the_quota_and_use_the_reserve() {
    let Some(disk) = SmallDisk::mount("96m") else { return };
    let (running, mut client) = opened(config(disk.path()));
    let set_quota = |quota_bytes, quota_inodes| {
        let quota = SetQuota { name: "vol".into(), quota_bytes, quota_inodes };
        Client::connect(running.address).ask(Ask::SetQuota(quota)).unwrap();
    };
    const SIZE: u64 = 16 * 65536;
    let usage = (SIZE as i64, 1);
    let write = |client: &mut Client, sequence: u64, pressing: bool| {
        if pressing {
            client.begin_pressing(sequence, usage);
        }
        let blocks = (0..16).map(|at| Some(client.content(&noise(sequence * 100 + at, 65536)))).collect();
        client.commit(sequence, &file_records(sequence, Content::Blocks(blocks), SIZE), usage)
    };
    for (bytes, inodes) in [(1000, 0), (0, 1)] {
        set_quota(bytes, inodes);
        for sequence in [1, 2].map(|at| at + 2 * inodes) {
            let full = write(&mut client, sequence, false).unwrap_err();
            assert_eq!(code(&full), FailureCode::NoSpace, "{}", full.message);
            write(&mut client, sequence, true).unwrap();
        }
    }
    set_quota(0, 0);
    let mut next = 5;
    while write(&mut client, next, false).is_ok() {
        next += 1;
    }
    // A few more fit the half of the reserve that is there for it; then it is full indeed, and only that.
    let refused = next;
    while write(&mut client, next, true).is_ok() {
        next += 1;
    }
    assert!((1..8).contains(&(next - refused)), "{refused} {next}");
    client.commit(next, &delete_records(1), (-(SIZE as i64), -1)).unwrap();
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn a_client_that_fills_up_to_the_free_bytes_it_was_told_is_not_refused() {
    let Some(disk) = SmallDisk::mount("96m") else { return };
    let running = Running::start(config(disk.path()));
    Client::create(running.address, 0);
    let (mut client, welcome) = Client::open(running.address, hello(1)).unwrap();
    let mut free = welcome.status.unwrap().store_free_bytes;
    assert!(free > 60 << 20, "{free} of 96 MiB");
    for n in 0..3 {
        let count = free / 65536;
        let blocks: Vec<_> =
            (0..count).map(|at| Some(client.content(&noise(n * 10_000 + at, 65536)))).collect();
        let size = count * 65536;
        let mut pages = blocks.chunks(64).map(<[_]>::to_vec);
        let mut records = file_records(n, Content::Blocks(pages.next().unwrap_or_default()), size);
        records.extend((1..).zip(pages).map(|(page, blocks)| Record::PutPage(Ino(100 + n), page, blocks)));
        client.commit(n + 1, &records, (size as i64, 1)).unwrap();
        let Ok(Answer::Status(status)) = client.ask(Ask::Status(StatusRequest {})) else { panic!() };
        println!(
            "{} KiB written of {} KiB; now {} KiB",
            size >> 10,
            free >> 10,
            status.store_free_bytes >> 10
        );
        free = status.store_free_bytes;
    }
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn a_disk_that_somebody_else_fills_loses_nothing_that_was_acknowledged() {
    let Some(disk) = SmallDisk::mount("64m") else { return };
    let (running, mut client) = opened(config(disk.path()));
    let mut sequence = 0;
    let mut write = |client: &mut Client| {
        let content = Content::Inline(noise(sequence, 4000).into());
        let done = client.commit(sequence + 1, &file_records(sequence, content, 4000), (4000, 1));
        done.inspect(|_| sequence += 1)
    };
    for _ in 0..50 {
        write(&mut client).unwrap();
    }
    // To the last byte: even the smallest deletion cannot be written now.
    let filler = disk.path().join("filler");
    let mut file = std::fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut file, &[1; 4096]).is_ok() {}
    let failed = write(&mut client).unwrap_err();
    assert_eq!(code(&failed), FailureCode::NoSpace, "{}", failed.message);
    let sequence = 50;
    let failed = client.commit(sequence + 1, &delete_records(0), (-4000, -1)).unwrap_err();
    println!("{}", failed.message);
    drop(file);
    std::fs::remove_file(&filler).unwrap();
    let started = Instant::now();
    loop {
        match client.commit(sequence + 1, &delete_records(0), (-4000, -1)) {
            Ok(_) => break,
            Err(failed) => {
                assert!(started.elapsed() < Duration::from_secs(30), "{}", failed.message);
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
    println!("written again after {:?}", started.elapsed());
    assert_eq!(running.problems(), [""; 0]);
    drop(client);
    let resume = Hello { resume: true, ..hello(1) };
    let (mut client, welcome) = Client::open(running.address, resume).unwrap();
    assert_eq!(welcome.last_sequence, sequence + 1);
    assert_eq!(client.enter(1, 0).unwrap().dirs[0].entries.len(), 49);
    running.shutdown();
}
