//! What one who connects may take, and what happens when it is more. `docs/operations.md` has the table.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use bytes::BytesMut;
use hayloft_model::{Content, FileKind};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::frame::{self, Opener, Sealer};
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    Acquire, Claim, ClientMessage, Commit, Enter, FailureCode, Hello, ListClients, LockKind, LockMessage,
    LockRequest, ObjectMessage, Ping, RecordMessage, Records, ServerMessage, weight,
};

use crate::common::*;

/// A server on which what is begun has to be ended soon.
fn hasty() -> (tempfile::TempDir, Running) {
    let folder = tempfile::tempdir().unwrap();
    let running = Running::start(hayloft_volume::Config {
        frame_time: Duration::from_secs(1),
        ..config(folder.path())
    });
    Client::create(running.address, 0);
    (folder, running)
}

fn frame_of(body: Ask) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame::encode(&ClientMessage { request: 1, body: Some(body) }, &mut bytes);
    Sealer::default().seal(&mut bytes);
    bytes
}

fn connected(address: SocketAddr) -> TcpStream {
    let socket = TcpStream::connect(address).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    socket
}

/// What the server says before it closes the connection.
fn last_word(socket: &mut TcpStream) -> Option<ServerMessage> {
    let mut bytes = Vec::new();
    match socket.read_to_end(&mut bytes) {
        Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("it stays open: {error}"),
        _ => Opener::default().take(&mut BytesMut::from(&bytes[..])).unwrap(),
    }
}

fn reason(socket: &mut TcpStream) -> (FailureCode, String) {
    match last_word(socket).and_then(|message| message.body) {
        Some(Answer::Failed(failed)) => (failed.code(), failed.message),
        other => panic!("{other:?}"),
    }
}

/// An honest client is served, with a session and with none.
fn assert_serves(running: &Running, session: u64) {
    let (mut client, _) = Client::open(running.address, hello(session)).unwrap();
    client.enter(1, 0).unwrap();
}

#[test]
fn who_says_nothing_does_not_lock_others_out_and_has_to_go() {
    let (_folder, running) = hasty();
    let mut silent: Vec<TcpStream> = (0..400).map(|_| connected(running.address)).collect();
    for session in 1..4 {
        assert_serves(&running, session);
    }
    // The oldest had to go for the last ones; the rest when their time is over.
    last_word(&mut silent[0]);
    let (code, reason) = reason(silent.last_mut().unwrap());
    assert_eq!(code, FailureCode::Unavailable);
    assert!(reason.contains("nothing was said"), "{reason}");
    assert_serves(&running, 5);
    running.shutdown();
}

#[test]
fn who_says_hello_and_does_not_claim_holds_up_nobody() {
    let folder = tempfile::tempdir().unwrap();
    // Nobody is ended for being silent.
    let (running, mut honest) =
        opened(hayloft_volume::Config { lease: Duration::from_secs(600), ..config(folder.path()) });
    let mut greeted: Vec<Client> =
        (10..20).map(|session| Client::greet(running.address, hello(session)).unwrap().0).collect();
    greeted.drain(..5);
    honest.enter(1, 0).unwrap();
    let (mut other, _) = Client::open(running.address, hello(2)).unwrap();
    let asked = other.send(Ask::Enter(Enter { dir: 1, ..Enter::default() }));
    eventually(|| {
        honest.ack_all();
        other.is_answered(asked)
    });
    other.listings(asked).unwrap();
    // Nor does a session on another connection, of which all is known.
    drop(other);
    let (mut other, _) = Client::greet(running.address, Hello { resume: true, ..hello(2) }).unwrap();
    let (mut third, _) = Client::open(running.address, hello(3)).unwrap();
    let asked = third.send(Ask::Enter(Enter { dir: 1, ..Enter::default() }));
    eventually(|| {
        honest.ack_all();
        third.is_answered(asked)
    });
    assert!(matches!(other.ask(Ask::Claim(Claim::default())), Ok(Answer::Claimed(_))));
    running.shutdown();
}

#[test]
fn what_is_begun_has_to_be_ended() {
    let (_folder, running) = hasty();
    let whole = frame_of(Ask::Ping(Ping {}));
    for len in [1, 4, frame::HEADER, whole.len() - 1] {
        let mut socket = connected(running.address);
        socket.write_all(&whole[..len]).unwrap();
        let (code, reason) = reason(&mut socket);
        assert_eq!(code, FailureCode::Unavailable);
        assert!(reason.contains("not ended within"), "{len}: {reason}");
    }
    assert_serves(&running, 1);
    running.shutdown();
}

#[test]
fn who_has_no_session_says_little() {
    let (_folder, running) = started();
    let files = vec![u64::MAX; 20_000];
    let mut socket = connected(running.address);
    socket.write_all(&frame_of(Ask::Enter(Enter { files, ..Enter::default() }))[..frame::HEADER]).unwrap();
    let (_, reason) = reason(&mut socket);
    assert!(reason.contains("over the limit of 65536"), "{reason}");
    assert_serves(&running, 1);
    running.shutdown();
}

#[test]
fn a_message_of_too_many_parts_is_not_decoded() {
    let (_folder, running) = started();
    let many = || vec![RecordMessage::default(); weight::RECORDS_MAX + 1];
    for (session, body) in [
        Ask::Records(Records { records: many() }),
        Ask::Commit(Commit { records: many(), ..Commit::default() }),
        Ask::Claim(Claim { own: vec![ObjectMessage::default(); weight::ITEMS_MAX + 1], ..Claim::default() }),
    ]
    .into_iter()
    .enumerate()
    {
        let (mut client, _) = Client::open(running.address, hello(session as u64 + 1)).unwrap();
        client.send_as(0, body);
        match client.receive_or_end(0) {
            Some(Answer::Failed(failed)) => assert!(failed.message.contains("parts"), "{}", failed.message),
            other => panic!("{other:?}"),
        }
        assert!(client.is_closed_soon());
    }
    running.shutdown();
}

#[test]
fn who_does_not_read_is_not_read_either() {
    let (_folder, running) = started();
    let (mut honest, _) = Client::open(running.address, hello(1)).unwrap();
    let mut socket = connected(running.address);
    let mut sealer = Sealer::default();
    let mut say = |request, body| {
        let mut bytes = Vec::new();
        frame::encode(&ClientMessage { request, body: Some(body) }, &mut bytes);
        sealer.seal(&mut bytes);
        bytes
    };
    socket.write_all(&say(1, Ask::Hello(hello(2)))).unwrap();
    socket.write_all(&say(2, Ask::Claim(Claim::default()))).unwrap();
    socket.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    let mut written = 0_usize;
    // Until it is taken no more, or its connection has ended since nobody reads at its end.
    let stopped = (3..).find_map(|request| {
        let bytes = say(request, Ask::Ping(Ping {}));
        assert!(written < 256 << 20, "{written} bytes were taken");
        match socket.write_all(&bytes) {
            Ok(()) => {
                written += bytes.len();
                None
            }
            Err(error) => Some(error),
        }
    });
    assert!(stopped.is_some());
    assert!(matches!(honest.ask(Ask::Ping(Ping {})), Ok(Answer::Pong(_))));
    running.shutdown();
}

#[test]
fn locks_that_wait_are_bounded_for_each_session() {
    let (_folder, running) = started();
    let (mut one, _) = Client::open(running.address, hello(1)).unwrap();
    let (mut two, _) = Client::open(running.address, hello(2)).unwrap();
    let lock = |owner| {
        let end = hayloft_model::locks::LAST_BYTE;
        let lock = LockMessage {
            ino: 1,
            owner,
            end,
            kind: LockKind::Write as u32,
            pid: 7,
            ..LockMessage::default()
        };
        Ask::Lock(LockRequest { lock: Some(lock), wait: true, test: false })
    };
    assert!(matches!(one.ask(lock(1)), Ok(Answer::Locked(_))));
    for owner in 0..1024 {
        two.send(lock(100 + owner));
    }
    let refused = two.ask(lock(9)).unwrap_err();
    assert!(refused.message.contains("more than 1024 requests"), "{}", refused.message);
    // Others can wait all the same.
    let (mut three, _) = Client::open(running.address, hello(3)).unwrap();
    let request = three.send(lock(5));
    assert!(!three.is_answered(request));
    running.shutdown();
}

#[test]
fn requests_that_wait_are_bounded_for_each_session() {
    let folder = tempfile::tempdir().unwrap();
    let patient = hayloft_volume::Config { lease: Duration::from_secs(30), ..config(folder.path()) };
    let running = Running::start(patient);
    Client::create(running.address, 0);
    let (mut owner, _) = Client::open(running.address, hello(3)).unwrap();
    let object = |ino| Acquire { object: Some(ObjectMessage { ino, directory: true, home: 0 }) };
    assert!(matches!(owner.ask(Ask::Acquire(object(1))), Ok(Answer::Acquired(_))));
    let (mut two, _) = Client::open(running.address, hello(2)).unwrap();
    let requests: Vec<u64> =
        (0..1100).map(|_| two.send(Ask::Enter(Enter { dir: 1, ..Enter::default() }))).collect();
    match two.receive(requests[1099]) {
        Answer::Failed(failed) => assert!(failed.message.contains("more than 1024"), "{}", failed.message),
        other => panic!("{other:?}"),
    }
    running.shutdown();
}

fn sessions(address: SocketAddr) -> usize {
    match Client::connect(address).ask(Ask::ListClients(ListClients { volume: "vol".into() })) {
        Ok(Answer::Clients(clients)) => clients.clients.len(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn sessions_that_are_begun_and_dropped_go_by_themselves() {
    let (_folder, running) = started();
    for session in 100..1600 {
        // Some have not even claimed.
        match session % 2 {
            0 => drop(Client::open(running.address, hello(session)).unwrap()),
            _ => drop(Client::greet(running.address, hello(session)).unwrap()),
        }
    }
    let (mut honest, welcome) = Client::open(running.address, hello(1)).unwrap();
    let ino = welcome.inos.unwrap().next;
    honest.enter(1, 0).unwrap();
    // One that owns something stays.
    let file = [
        put(1, directory(1, 0, 4)),
        link(1, "f", ino, FileKind::Regular, 3),
        put(ino, file_in(1, Content::None, 0)),
    ];
    honest.commit(1, &file, (0, 1)).unwrap();
    drop(honest);
    let limit = Instant::now() + Duration::from_secs(60);
    while sessions(running.address) > 65 {
        assert!(Instant::now() < limit, "{} sessions are left", sessions(running.address));
        std::thread::sleep(Duration::from_millis(50));
    }
    let (mut honest, _) = Client::open(running.address, Hello { resume: true, ..hello(1) }).unwrap();
    honest.enter(1, 0).unwrap();
    running.shutdown();
}

#[test]
fn a_client_of_an_earlier_version_is_told_so_in_its_framing() {
    let (_folder, running) = started();
    let mut socket = connected(running.address);
    let mut bytes = Vec::new();
    let old = Hello { protocol: 7, ..hello(1) };
    frame::encode_plain(&ClientMessage { request: 9, body: Some(Ask::Hello(old)) }, &mut bytes);
    let (first, rest) = bytes.split_at(20);
    socket.write_all(first).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    socket.write_all(rest).unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).unwrap();
    let answer: ServerMessage = frame::take_plain(&mut BytesMut::from(&answer[..]), 4096).unwrap().unwrap();
    match answer.body {
        Some(Answer::Failed(failed)) if answer.request == 9 => {
            assert_eq!(failed.code(), FailureCode::Protocol)
        }
        other => panic!("{other:?}"),
    }
    running.shutdown();
}

#[test]
fn a_frame_that_is_damaged_ends_the_connection_and_is_counted() {
    let (_folder, running) = started();
    let (mut client, _) = Client::open(running.address, hello(1)).unwrap();
    client.send_damaged(Ask::Ping(Ping {}));
    match client.receive_or_end(0) {
        Some(Answer::Failed(failed)) => assert_eq!(failed.code(), FailureCode::Damaged),
        other => panic!("{other:?}"),
    }
    assert!(client.is_closed_soon());
    let stats = running.runtime.as_ref().unwrap().block_on(running.server.as_ref().unwrap().stats_json());
    assert!(stats.contains("\"frames_damaged\":1"), "{stats}");
    // The same session goes on.
    let (mut client, _) = Client::open(running.address, Hello { resume: true, ..hello(1) }).unwrap();
    client.enter(1, 0).unwrap();
    running.shutdown();
}

#[test]
fn a_batch_that_is_not_what_its_client_has_cut_is_not_stored() {
    let (_folder, running) = started();
    let (mut client, _) = Client::open(running.address, hello(1)).unwrap();
    client.enter(1, 0).unwrap();
    let records = |name: &str| {
        [
            put(1, directory(1, 0, 4)),
            link(1, name, 50, FileKind::Regular, 3),
            put(50, file_in(1, Content::None, 0)),
        ]
    };
    let mut right = commit(1, &records("right"), (0, 1));
    let mut check = hayloft_wire::BatchCheck::default();
    check.add(&right.records);
    right.check = Some(check.of(&right));
    for wrong in [
        Commit { records: commit(1, &records("wrong"), (0, 1)).records, ..right.clone() },
        Commit { records: right.records[..2].to_vec(), ..right.clone() },
        Commit { inodes: 2, ..right.clone() },
        Commit { check: Some(0), ..right.clone() },
    ] {
        let refused = client.ask(Ask::Commit(wrong)).unwrap_err();
        assert_eq!(code(&refused), FailureCode::Damaged, "{}", refused.message);
    }
    assert!(matches!(client.ask(Ask::Commit(right)), Ok(Answer::Committed(done)) if done.sequence == 1));
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn nobody_makes_inodes_under_numbers_of_others() {
    let (_folder, running) = started();
    let (one, of_one) = Client::open(running.address, hello(1)).unwrap();
    let (mut two, of_two) = Client::open(running.address, hello(2)).unwrap();
    let (of_one, of_two) = (of_one.inos.unwrap(), of_two.inos.unwrap());
    two.enter(1, 0).unwrap();
    let file = |ino| {
        [
            put(1, directory(1, 0, 4)),
            link(1, "f", ino, FileKind::Regular, 3),
            put(ino, file_in(1, Content::None, 0)),
        ]
    };
    for ino in [of_one.next, of_one.end - 1, of_two.end, of_two.end + 1000] {
        let refused = two.commit(1, &file(ino), (0, 1)).unwrap_err();
        assert_eq!(code(&refused), FailureCode::Invalid);
        assert!(refused.message.contains("a number that was"), "{}", refused.message);
    }
    two.commit(1, &file(of_two.end - 1), (0, 1)).unwrap();
    // Its own row may be changed.
    two.commit(2, &[put(of_two.end - 1, file_in(1, Content::None, 7))], (7, 0)).unwrap();
    drop(one);
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}
