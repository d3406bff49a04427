//! What all who connect share, and how much of it there is: places, sessions, room for what arrives. `docs/operations.md` has the table.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use hayloft_model::locks::LAST_BYTE;
use hayloft_volume::Config;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    Ack, AllocateInos, Enter, FailureCode, LockKind, LockMessage, LockRequest, Ping, RecordMessage, Records,
    weight,
};

use crate::common::*;
use crate::gone::{Raw, await_connections};

/// A server whose clients may be silent for long.
fn patient(configure: impl FnOnce(&mut Config)) -> (tempfile::TempDir, Running) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Config { lease: Duration::from_secs(600), ..config(folder.path()) };
    configure(&mut config);
    let running = Running::start(config);
    Client::create(running.address, 0);
    (folder, running)
}

/// Why the server has closed a connection.
fn reason(client: &mut Client) -> String {
    match client.receive_or_end(0) {
        Some(Answer::Failed(failed)) => failed.message,
        other => panic!("{other:?}"),
    }
}

#[test]
fn one_connection_too_many_is_closed() {
    let (_folder, running) = patient(|config| config.connections_max = 4);
    // What made the volume may be there still.
    await_connections(&running, 0);
    let mut open: Vec<Client> =
        (1..5).map(|session| Client::open(running.address, hello(session)).unwrap().0).collect();
    let mut one_more = TcpStream::connect(running.address).unwrap();
    one_more.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(one_more.read(&mut [0; 16]).unwrap_or(0), 0);
    assert!(matches!(open[3].ask(Ask::Ping(Ping {})), Ok(Answer::Pong(_))));
    drop(open.pop());
    await_connections(&running, 3);
    Client::open(running.address, hello(5)).unwrap();
    running.shutdown();
}

#[test]
fn one_session_too_many_is_refused_unless_another_one_was_dropped() {
    let (_folder, running) = patient(|config| config.sessions_max = 4);
    let mut open: Vec<Client> =
        (1..5).map(|session| Client::open(running.address, hello(session)).unwrap().0).collect();
    let refused = Client::greet(running.address, hello(5)).err().unwrap();
    assert!(refused.message.contains("more than 4 sessions of a volume"), "{}", refused.message);
    // One that goes on is none more.
    Client::open(running.address, hayloft_wire::Hello { resume: true, ..hello(4) }).unwrap();
    drop(open.pop());
    eventually(|| Client::greet(running.address, hello(5)).is_ok());
    running.shutdown();
}

#[test]
fn who_was_dropped_and_may_answer_from_what_it_knows_makes_no_room_yet() {
    let (_folder, running) = patient(|config| config.sessions_max = 2);
    let (mut knows, _) = Client::open(running.address, hello(1)).unwrap();
    knows.enter(1, 0).unwrap();
    let (mut looks, _) = Client::open(running.address, hello(2)).unwrap();
    let asked = looks.send(Ask::Enter(Enter { dir: 1, ..Enter::default() }));
    // Both know the root now, and nobody owns it.
    eventually(|| {
        knows.ack_all();
        looks.is_answered(asked)
    });
    looks.listings(asked).unwrap();
    knows.ack_all();
    drop(knows);
    for _ in 0..20 {
        let refused = Client::greet(running.address, hello(3)).err().expect("its lease runs");
        assert!(refused.message.contains("more than 2 sessions of a volume"), "{}", refused.message);
        std::thread::sleep(Duration::from_millis(50));
    }
    running.shutdown();
}

#[test]
fn who_does_not_begin_or_does_not_claim_has_to_go() {
    let (_folder, running) = patient(|config| config.frame_time = Duration::from_millis(300));
    let (mut greeted, _) = Client::greet(running.address, hello(2)).unwrap();
    assert!(reason(&mut greeted).contains("nothing was said for too long"));
    let mut asked = Client::connect(running.address);
    asked.ask(Ask::ListVolumes(hayloft_wire::ListVolumes {})).unwrap();
    let since = Instant::now();
    assert!(reason(&mut asked).contains("nothing was said for too long"));
    assert!(since.elapsed() > Duration::from_secs(2), "it has longer than one that has begun");
    // A session that has claimed says nothing for as long as it likes.
    let (mut quiet, _) = Client::open(running.address, hello(3)).unwrap();
    std::thread::sleep(Duration::from_millis(3500));
    assert!(matches!(quiet.ask(Ask::Ping(Ping {})), Ok(Answer::Pong(_))));
    running.shutdown();
}

#[test]
fn messages_of_sessions_have_a_size() {
    let (_folder, running) = patient(|_| {});
    let (mut client, _) = Client::open(running.address, hello(1)).unwrap();
    let stem = vec![b'x'; weight::MESSAGE_MAX + 1].into();
    client.send_as(1, Ask::Enter(Enter { dir: 1, stem, ..Enter::default() }));
    let said = reason(&mut client);
    assert!(said.contains("over the limit of 1048576"), "{said}");
    let (mut client, _) = Client::open(running.address, hello(2)).unwrap();
    client.send_as(0, Ask::Ack(Ack { events: vec![1; weight::LIST_MAX - 100], ..Ack::default() }));
    assert!(matches!(client.ask(Ask::Ping(Ping {})), Ok(Answer::Pong(_))));
    let mut raw = Raw::session(TcpStream::connect(running.address).unwrap(), 3);
    let large = raw.frame(Ask::Ack(Ack { events: vec![1; weight::LIST_MAX + 1], ..Ack::default() }));
    raw.socket.write_all(&large[..1000]).unwrap();
    raw.socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    // At its header: nobody waits for the rest.
    let mut said = Vec::new();
    let _ = raw.socket.read_to_end(&mut said);
    assert!(String::from_utf8_lossy(&said).contains("over the limit of 16777216"));
    running.shutdown();
}

#[test]
fn large_messages_wait_for_each_other_and_small_ones_do_not() {
    let (_folder, running) = patient(|_| {});
    let events = vec![u64::MAX; 1_000_000];
    let mut begun: Vec<(Raw<TcpStream>, Vec<u8>)> = (2..6)
        .map(|session| {
            let mut raw = Raw::session(TcpStream::connect(running.address).unwrap(), session);
            let frame = raw.frame(Ask::Ack(Ack { events: events.clone(), ..Ack::default() }));
            (raw, frame)
        })
        .collect();
    // Ten million bytes each: there is room for three.
    std::thread::scope(|scope| {
        for (raw, frame) in &mut begun {
            scope.spawn(move || {
                raw.socket.set_write_timeout(Some(Duration::from_secs(3))).unwrap();
                // The one that there is no room for is not read.
                let _ = raw.socket.write_all(&frame[..frame.len() - 1]);
            });
        }
        std::thread::sleep(Duration::from_millis(500));
        let (mut honest, _) = Client::open(running.address, hello(1)).unwrap();
        honest.enter(1, 0).unwrap();
    });
    begun.truncate(3);
    drop(begun);
    // Their room is free again.
    let (mut client, _) = Client::open(running.address, hello(7)).unwrap();
    client.send_as(0, Ask::Ack(Ack { events, ..Ack::default() }));
    assert!(matches!(client.ask(Ask::Ping(Ping {})), Ok(Answer::Pong(_))));
    running.shutdown();
}

#[test]
fn batches_that_are_not_committed_share_room_and_those_that_stand_still_are_dropped() {
    let (_folder, running) = patient(|_| {});
    let mut greedy: Vec<Client> =
        (2..5).map(|session| Client::open(running.address, hello(session)).unwrap().0).collect();
    for (at, client) in greedy.iter_mut().enumerate() {
        client.begin(1, (0, 0));
        // About 24 MiB of memory.
        for _ in 0..(24 << 20) / (8000 * (size_of::<RecordMessage>() + 2)) {
            client.send_as(0, Ask::Records(Records { records: vec![RecordMessage::default(); 8000] }));
        }
        // The first two have their room, when all of it is read.
        if at < 2 {
            assert!(matches!(client.ask(Ask::Ping(Ping {})), Ok(Answer::Pong(_))));
        }
    }
    let (mut honest, _) = Client::open(running.address, hello(1)).unwrap();
    honest.enter(1, 0).unwrap();
    honest.commit(1, &[put(1, directory(1, 0, 4))], (0, 0)).unwrap();
    // The last one is read on when the first ones are dropped.
    assert!(matches!(greedy[2].ask(Ask::Ping(Ping {})), Ok(Answer::Pong(_))));
    let mut refused = 0;
    for client in &mut greedy {
        if let Err(failed) = client.commit(1, &[], (0, 0)) {
            refused += u32::from(code(&failed) == FailureCode::Unavailable);
        }
    }
    assert!(refused > 0, "nobody had to give room");
    running.shutdown();
}

#[test]
fn locks_that_wait_are_bounded_for_all_sessions_and_each_may_have_some() {
    let (_folder, running) = patient(|_| {});
    let lock = |owner| {
        let kind = LockKind::Write as u32;
        let lock = LockMessage { ino: 1, owner, end: LAST_BYTE, kind, ..LockMessage::default() };
        Ask::Lock(LockRequest { lock: Some(lock), wait: true, test: false })
    };
    let (mut holder, _) = Client::open(running.address, hello(1)).unwrap();
    assert!(matches!(holder.ask(lock(1)), Ok(Answer::Locked(_))));
    let mut many: Vec<Client> =
        (2..10).map(|session| Client::open(running.address, hello(session)).unwrap().0).collect();
    for client in &mut many {
        for owner in 0..1024 {
            client.send(lock(owner));
        }
        assert!(matches!(client.ask(Ask::Ping(Ping {})), Ok(Answer::Pong(_))));
    }
    let (mut last, _) = Client::open(running.address, hello(20)).unwrap();
    let waits: Vec<u64> = (0..64).map(|owner| last.send(lock(owner))).collect();
    assert!(!last.is_answered(waits[63]));
    let refused = last.ask(lock(99)).unwrap_err();
    assert!(refused.message.contains("more than 8192 requests that wait"), "{}", refused.message);
    running.shutdown();
}

#[test]
fn what_is_in_use_without_a_name_is_bounded() {
    let (_folder, running) = patient(|_| {});
    let (mut client, _) = Client::open(running.address, hello(1)).unwrap();
    client.send_as(0, Ask::Ack(Ack { in_use: vec![7; (1 << 20) + 1], ..Ack::default() }));
    let said = reason(&mut client);
    assert!(said.contains("more than 1048576 inodes in use"), "{said}");
    assert!(client.is_closed_soon());
    let claim = hayloft_wire::Claim { in_use: vec![7; (1 << 20) + 1], ..Default::default() };
    let refused = Client::open_with(running.address, hello(2), claim).err().unwrap();
    assert!(refused.message.contains("inodes in use"), "{}", refused.message);
    running.shutdown();
}

#[test]
fn numbers_are_not_given_by_the_million_million() {
    let (_folder, running) = patient(|_| {});
    let (mut client, _) = Client::open(running.address, hello(1)).unwrap();
    match client.ask(Ask::AllocateInos(AllocateInos { count: u64::MAX })) {
        Ok(Answer::Inos(given)) => assert_eq!(given.end - given.next, 1 << 24),
        other => panic!("{other:?}"),
    }
    running.shutdown();
}
