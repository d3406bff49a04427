//! A store that fails now and then: batches fail or not, but nothing acknowledged is lost and nothing is
//! applied twice. The client takes every failure for a refusal and makes another batch of the same
//! number, unless it is told that the outcome is not known.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::common::store::{Puts, Tampered, fault, is_log};
use crate::common::*;
use async_trait::async_trait;
use hayloft_model::{Content, FileKind, Record};
use hayloft_store::Store;
use hayloft_volume::Server;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{CheckVolume, CreateVolume, Failed, FailureCode, Goodbye, SweepVolume};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, PutOptions, PutPayload, PutResult, Result};

/// Fails puts in bursts that outlast the retries: half of them before, half after they took effect.
#[derive(Debug)]
struct Faulty {
    puts: AtomicU64,
    log_puts: Arc<AtomicU64>,
    /// Of so many puts, the last ones fail.
    every: u64,
    burst: u64,
    /// How long a put into the database's log takes.
    log_delay: Duration,
}

impl Faulty {
    fn store(every: u64, burst: u64, log_delay: Duration) -> Tampered<Faulty> {
        Tampered::new(Faulty { puts: AtomicU64::new(0), log_puts: Arc::default(), every, burst, log_delay })
    }
}

#[async_trait]
impl Puts for Faulty {
    async fn put(
        &self,
        inner: &InMemory,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        // The database's log has bursts of its own, longer than its retries.
        let is_log = is_log(location);
        let number = if is_log { &self.log_puts } else { &self.puts }.fetch_add(1, Relaxed);
        if is_log {
            tokio::time::sleep(self.log_delay).await;
        }
        let fails = number % self.every >= self.every - self.burst;
        // A put of the log that did take effect is found by the next try: every other burst has none.
        let is_lost = number.is_multiple_of(2) || (is_log && (number / self.every).is_multiple_of(2));
        if fails && is_lost {
            return Err(fault());
        }
        let done = inner.put_opts(location, payload, opts).await;
        if fails { done.and(Err(fault())) } else { done }
    }
}

#[test]
fn batches_sent_until_they_are_acknowledged_are_applied_once() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let store = Store::new("faulty", Arc::new(Faulty::store(30, 7, Duration::ZERO)), None);
    let folder = tempfile::tempdir().unwrap();
    let server = runtime.block_on(Server::start_on(store, config(folder.path()))).unwrap();
    let address = server.address();
    Client::create(address, 0);
    let (mut client, _) = Client::open(address, hello(1)).unwrap();
    persist(|| client.take_numbers(1 << 16));
    let (mut refused, mut uncertain, mut used) = (0, 0, 0);
    let mut acknowledged = Vec::new();
    let started = Instant::now();
    for n in 1..=60u64 {
        // Another one after each refusal, with other names and numbers.
        let mut version = 0;
        loop {
            assert!(started.elapsed() < Duration::from_secs(120), "stuck at batch {n}");
            let len = if n % 3 == 0 { 5 } else { 1 };
            let blocks = (0..len).map(|at| Some(client.content(&noise(n * 10 + at, 65536)))).collect();
            let size = len * 65536;
            let records = [
                put(1, directory(1, 0, 3 + n)),
                link(1, &format!("f{n}.{version}"), 1000 * n + version, FileKind::Regular, 2 + n),
                put(1000 * n + version, file(Content::Blocks(blocks), size)),
            ];
            match client.commit(n, &records, (size as i64, 1)) {
                Ok(_) => {
                    used += size;
                    acknowledged.push(format!("f{n}.{version}"));
                    break;
                }
                Err(failed) if code(&failed) == FailureCode::Uncertain => uncertain += 1,
                Err(_) => {
                    refused += 1;
                    version += 1;
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    println!("{refused} refused, {uncertain} uncertain, {:?}", started.elapsed());
    assert!(refused + uncertain > 0);
    // Once more at the end: the database may be on its way back.
    let names: Vec<String> = loop {
        assert!(started.elapsed() < Duration::from_secs(120));
        match client.enter(1, 0) {
            Ok(listed) => {
                let name = ListedEntry::name;
                break listed.dirs[0].entries.iter().map(name).collect();
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    assert_eq!(names, acknowledged);
    let again = |body: Ask| loop {
        assert!(started.elapsed() < Duration::from_secs(120));
        match Client::connect(address).ask(body.clone()) {
            Ok(answer) => return answer,
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    again(Ask::SweepVolume(SweepVolume { name: "vol".into() }));
    let Answer::Checked(checked) =
        again(Ask::CheckVolume(CheckVolume { name: "vol".into(), content: true, ..CheckVolume::default() }))
    else {
        panic!()
    };
    assert_eq!(checked.problems, [""; 0]);
    assert_eq!(checked.inodes, 61);
    let Answer::Volumes(shown) = again(Ask::ListVolumes(hayloft_wire::ListVolumes {})) else { panic!() };
    assert_eq!(shown.volumes[0].status.as_ref().unwrap().used_bytes, used);
    runtime.shutdown_background();
}

/// The inode number of a session's own directory.
fn own_directory(session: u64) -> u64 {
    100 * session
}

/// Sessions from 2 on, with a directory for each: nobody holds it, so it is its own with the first batch.
fn sessions_with_directories(address: SocketAddr, count: u64) -> Vec<Client> {
    Client::create(address, 0);
    let (mut first, _) = Client::open(address, hello(1)).unwrap();
    // They use numbers that it was given, and are not hindered once it is gone.
    persist(|| first.take_numbers(1 << 16));
    let mut records = vec![put(1, directory(1, count as u32, 3 + count))];
    for session in 2..2 + count {
        let dir = own_directory(session);
        records.push(put(dir, directory(1, 0, 3)));
        records.push(link(1, &format!("d{session}"), dir, FileKind::Directory, 1 + session));
    }
    persist(|| first.commit(1, &records, (0, count as i64)).map(drop));
    let goodbye = first.send(Ask::Goodbye(Goodbye {}));
    drop(first.receive_or_end(goodbye));
    let open = |session| {
        let mut client = None;
        persist(|| Client::open(address, hello(session)).map(|(opened, _)| client = Some(opened)));
        client.unwrap()
    };
    (2..2 + count).map(open).collect()
}

/// Tries until it is done.
fn persist(mut what: impl FnMut() -> Result<(), Failed>) {
    let begun = Instant::now();
    while let Err(failed) = what() {
        assert!(begun.elapsed() < Duration::from_secs(120), "{failed:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The `n`th file that a session makes in its directory.
fn one_file(session: u64, n: u64) -> [Record; 3] {
    let (dir, ino) = (own_directory(session), 1000 * session + n);
    let file = file_in(dir, Content::Inline(noise(ino, 100).into()), 100);
    [
        put(dir, directory(1, 0, 3 + n)),
        link(dir, &n.to_string(), ino, FileKind::Regular, 2 + n),
        put(ino, file),
    ]
}

fn names_of(client: &mut Client, session: u64) -> Vec<String> {
    let mut names = Vec::new();
    persist(|| {
        let listed = client.enter(own_directory(session), 0)?;
        let name = ListedEntry::name;
        names = listed.dirs[0].entries.iter().map(name).collect();
        Ok(())
    });
    names
}

#[test]
fn what_comes_while_the_log_is_written_is_written_together() {
    const SESSIONS: u64 = 8;
    const BATCHES: u64 = 20;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let slow = Faulty::store(u64::MAX, 0, Duration::from_millis(20));
    let log_puts = Arc::clone(&slow.puts.log_puts);
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new("slow", Arc::new(slow), None);
    let server = runtime.block_on(Server::start_on(store, config(folder.path()))).unwrap();
    let clients = sessions_with_directories(server.address(), SESSIONS);
    let before = log_puts.load(Relaxed);
    std::thread::scope(|scope| {
        for (session, mut client) in (2..).zip(clients) {
            scope.spawn(move || {
                for n in 1..=BATCHES {
                    client.commit(n, &one_file(session, n), (100, 1)).unwrap();
                }
            });
        }
    });
    let puts = log_puts.load(Relaxed) - before;
    assert!(puts < SESSIONS * BATCHES / 2, "{puts} writes of the log for {} batches", SESSIONS * BATCHES);
    runtime.shutdown_background();
}

#[test]
fn of_several_sessions_on_a_store_that_fails_each_has_what_was_acknowledged() {
    const SESSIONS: u64 = 4;
    const BATCHES: u64 = 30;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let faulty = Faulty::store(40, 16, Duration::from_millis(2));
    let log_puts = Arc::clone(&faulty.puts.log_puts);
    let store = Store::new("faulty", Arc::new(faulty), None);
    let server = runtime.block_on(Server::start_on(store, config(folder.path()))).unwrap();
    let address = server.address();
    let clients = sessions_with_directories(address, SESSIONS);
    let failed = AtomicU64::new(0);
    std::thread::scope(|scope| {
        for (session, mut client) in (2..).zip(clients) {
            let failed = &failed;
            scope.spawn(move || {
                for n in 1..=BATCHES {
                    persist(|| {
                        let done = client.commit(n, &one_file(session, n), (100, 1)).map(drop);
                        failed.fetch_add(u64::from(done.is_err()), Relaxed);
                        done
                    });
                }
                let expected: Vec<String> = (1..=BATCHES).map(|n| n.to_string()).collect();
                assert_eq!(names_of(&mut client, session), expected);
            });
        }
    });
    println!("{failed:?} failed, {log_puts:?} writes of the log");
    assert!(failed.load(Relaxed) > 0);
    let mut problems = Vec::new();
    persist(|| {
        let check =
            Ask::CheckVolume(CheckVolume { name: "vol".into(), content: true, ..CheckVolume::default() });
        if let Answer::Checked(checked) = Client::connect(address).ask(check)? {
            problems = checked.problems;
            assert_eq!(checked.inodes, 1 + SESSIONS + SESSIONS * BATCHES);
        }
        Ok(())
    });
    assert_eq!(problems, [""; 0]);
    runtime.shutdown_background();
}

/// Fails to say that a volume is made, after its database is there.
#[derive(Debug, Default)]
struct Unsaid {
    entries: AtomicU64,
}

#[async_trait]
impl Puts for Unsaid {
    async fn put(
        &self,
        inner: &InMemory,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        // The first one says that it is being made.
        if location.as_ref().starts_with("registry/") && self.entries.fetch_add(1, Relaxed) == 1 {
            return Err(fault());
        }
        inner.put_opts(location, payload, opts).await
    }
}

#[test]
fn of_a_volume_that_cannot_be_made_nothing_stays() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let store = Store::new("unsaid", Arc::new(Tampered::new(Unsaid::default())), None);
    let server = runtime.block_on(Server::start_on(store.clone(), config(folder.path()))).unwrap();
    let create = CreateVolume { name: "vol".into(), mode: 0o755, ..CreateVolume::default() };
    Client::connect(server.address()).ask(Ask::CreateVolume(create)).unwrap_err();
    for below in ["volumes", "packs", "registry", "registry-copy"] {
        let left = runtime.block_on(store.list(below)).unwrap();
        assert!(left.is_empty(), "{below}: {left:?}");
    }
    Client::create(server.address(), 0);
    runtime.shutdown_background();
}
