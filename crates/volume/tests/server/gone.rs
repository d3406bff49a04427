//! Connections whose clients have gone, or read nothing: they keep neither places nor room from others.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hayloft_model::{BLOCK_SIZE, Content, ContentHash, FileKind};
use hayloft_volume::Socket;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::frame::{self, Sealer};
use hayloft_wire::{Claim, ClientMessage, FetchContent, Ping};

use crate::common::*;

/// Blocks in an answer of 32 MiB, the largest.
const LARGE: usize = 512;

/// A session that says what it is told to, and reads when it is told to.
pub(crate) struct Raw<S> {
    pub(crate) socket: S,
    sealer: Sealer,
    request: u64,
}

impl<S: Write> Raw<S> {
    pub(crate) fn session(socket: S, session: u64) -> Raw<S> {
        let mut raw = Raw { socket, sealer: Sealer::default(), request: 0 };
        raw.say(Ask::Hello(hello(session)));
        raw.say(Ask::Claim(Claim::default()));
        raw
    }

    pub(crate) fn frame(&mut self, body: Ask) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.request += 1;
        frame::encode(&ClientMessage { request: self.request, body: Some(body) }, &mut bytes);
        self.sealer.seal(&mut bytes);
        bytes
    }

    fn say(&mut self, body: Ask) {
        let bytes = self.frame(body);
        self.socket.write_all(&bytes).unwrap();
    }

    /// Asks for one block as often as it fits into an answer.
    fn ask_for_much(&mut self, block: ContentHash, answers: usize) {
        for _ in 0..answers {
            self.say(Ask::FetchContent(FetchContent { hashes: block.0.repeat(LARGE).into() }));
        }
    }
}

/// A server that the kernel does not help, since leases are long, and a block in its volume.
fn patient(configure: impl FnOnce(&mut hayloft_volume::Config)) -> (tempfile::TempDir, Running, ContentHash) {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.lease = Duration::from_secs(600);
    configure(&mut config);
    let (running, mut client) = opened(config);
    let block = client.content(&noise(1, BLOCK_SIZE as usize));
    let ino = 100;
    let file = [
        put(1, directory(1, 0, 4)),
        link(1, "f", ino, FileKind::Regular, 3),
        put(ino, file_in(1, Content::Blocks(vec![Some(block)]), BLOCK_SIZE)),
    ];
    client.commit(1, &file, (BLOCK_SIZE as i64, 1)).unwrap();
    (folder, running, block.hash)
}

fn connections(running: &Running) -> u64 {
    let stats = running.runtime.as_ref().unwrap().block_on(running.server.as_ref().unwrap().stats_json());
    let at = stats.split_once("\"connections\":").unwrap().1;
    at.split(|c: char| !c.is_ascii_digit()).next().unwrap().parse().unwrap()
}

pub(crate) fn await_connections(running: &Running, wanted: u64) {
    let limit = Instant::now() + Duration::from_secs(40);
    while connections(running) != wanted {
        assert!(Instant::now() < limit, "{} connections, not {wanted}", connections(running));
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn who_goes_while_it_waits_for_room_gives_its_place_back() {
    let (_folder, running, block) = patient(|_| {});
    await_connections(&running, 0);
    // One that takes all the room, and goes on to read, but slowly.
    let mut slow = Raw::session(TcpStream::connect(running.address).unwrap(), 2);
    slow.ask_for_much(block, 4);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        // Also when an assertion fails.
        let _stop = Stop(&over);
        let (over, mut reader) = (&over, slow.socket.try_clone().unwrap());
        scope.spawn(move || {
            let mut part = vec![0; 128 << 10];
            while !over.load(Ordering::SeqCst) {
                reader.read_exact(&mut part).unwrap();
                std::thread::sleep(Duration::from_millis(100));
            }
        });
        std::thread::sleep(Duration::from_millis(500));
        for session in 3..6 {
            let mut goes = Raw::session(TcpStream::connect(running.address).unwrap(), session);
            // More than are worked on at a time, so that the connection is not read either.
            goes.ask_for_much(block, 40);
            std::thread::sleep(Duration::from_millis(200));
        }
        await_connections(&running, 1);
    });
    drop(slow);
    running.shutdown();
}

#[test]
fn who_reads_no_answers_does_not_keep_others_from_theirs() {
    let (_folder, running, block) = patient(|_| {});
    let mut deaf: Vec<_> =
        (2..6).map(|session| Raw::session(TcpStream::connect(running.address).unwrap(), session)).collect();
    deaf.iter_mut().for_each(|deaf| deaf.ask_for_much(block, 4));
    std::thread::sleep(Duration::from_millis(500));
    let (mut honest, _) = Client::open(running.address, hello(1)).unwrap();
    for _ in 0..3 {
        assert_eq!(honest.fetch(&[block; 64]).unwrap().len(), 64);
    }
    drop(deaf);
    running.shutdown();
}

#[test]
fn who_reads_nothing_at_a_socket_of_the_host_has_to_go_after_a_lease() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let (_folder, running, block) = patient(|config| {
        config.socket = Some(Socket { path: path.clone(), group: None });
        config.lease = Duration::from_secs(1);
    });
    let mut deaf = Raw::session(UnixStream::connect(&path).unwrap(), 2);
    deaf.ask_for_much(block, 1);
    deaf.say(Ask::Ping(Ping {}));
    await_connections(&running, 1);
    await_connections(&running, 0);
    drop(deaf);
    running.shutdown();
}
