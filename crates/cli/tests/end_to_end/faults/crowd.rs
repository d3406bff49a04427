//! A thousand connections that misbehave, each in its way: the server stays small, and an honest client is served.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hayloft_wire::client_message::Body;
use hayloft_wire::frame::{self, Sealer};
use hayloft_wire::{
    Ack, Chunk, Claim, ClientMessage, Enter, FetchContent, Hello, LockKind, LockMessage, LockRequest,
    PROTOCOL, Ping, RecordMessage, Records,
};

use crate::setup::farm::{Farm, noise, number, rounds};

const CONNECTIONS: usize = 1000;
const THREADS: usize = 40;
/// What the server's process may take, KiB.
const MEMORY_KIB: u64 = 512 << 10;
/// How much the honest client does at least, while all others misbehave.
const HONEST: usize = 20;

/// What one does.
const WAYS: usize = 10;

/// A connection that is used as no client uses it.
struct Bad {
    socket: TcpStream,
    sealer: Sealer,
    request: u64,
}

impl Bad {
    fn connect(address: &str) -> io::Result<Bad> {
        let socket = TcpStream::connect(address)?;
        socket.set_write_timeout(Some(Duration::from_millis(50)))?;
        socket.set_read_timeout(Some(Duration::from_millis(50)))?;
        Ok(Bad { socket, sealer: Sealer::default(), request: 0 })
    }

    fn frame(&mut self, body: Body) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.request += 1;
        frame::encode(&ClientMessage { request: self.request, body: Some(body) }, &mut bytes);
        self.sealer.seal(&mut bytes);
        bytes
    }

    fn say(&mut self, body: Body) -> io::Result<()> {
        let bytes = self.frame(body);
        self.socket.write_all(&bytes)
    }

    /// With a session, of which the answers are not read.
    fn session(address: &str, volume: &str) -> io::Result<Bad> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut bad = Bad::connect(address)?;
        bad.say(Body::Hello(Hello {
            protocol: PROTOCOL,
            volume: volume.to_owned(),
            session: NEXT.fetch_add(1, Ordering::SeqCst),
            host_name: "bad".to_owned(),
            ..Hello::default()
        }))?;
        bad.say(Body::Claim(Claim::default()))?;
        Ok(bad)
    }

    fn begin(way: usize, address: &str) -> io::Result<Bad> {
        match way {
            0..3 => Bad::connect(address),
            9 => Bad::session(address, "other"),
            _ => Bad::session(address, "v"),
        }
    }

    /// Does something more. An error ends the connection, and another one is made.
    fn go_on(&mut self, way: usize, address: &str) -> io::Result<()> {
        match way {
            // Says nothing.
            0 => self.wait(),
            // A part of a header, and no more.
            1 if self.request == 0 => {
                let bytes = self.frame(Body::Ping(Ping {}));
                self.socket.write_all(&bytes[..7])
            }
            // As much of a message as one may say without a session, but for the last byte.
            2 if self.request == 0 => {
                let files = vec![u64::MAX; 6000];
                let bytes = self.frame(Body::Enter(Enter { files, ..Enter::default() }));
                self.socket.write_all(&bytes[..bytes.len() - 1])
            }
            // A large message, and not its end.
            3 if self.request == 2 => {
                let bytes =
                    self.frame(Body::Ack(Ack { in_use: vec![u64::MAX >> 8; 1_800_000], events: Vec::new() }));
                self.socket.set_write_timeout(Some(Duration::from_secs(3)))?;
                self.socket.write_all(&bytes[..bytes.len() - 1])
            }
            // Content, for a batch that is never committed.
            4 if self.request < 300 => {
                let content = noise(self.request, 60_000);
                self.say(Body::Content(Chunk {
                    hash: vec![7; 32].into(),
                    len: content.len() as u32,
                    codec: 0,
                    payload: content.into(),
                }))
            }
            // Questions, of which the answers are not read.
            5 => (0..200).try_for_each(|_| self.say(Body::Ping(Ping {}))),
            // Sessions that are begun and dropped.
            6 => {
                *self = Bad::session(address, "v")?;
                Ok(())
            }
            // Messages of very many parts, and records that are never committed.
            7 if self.request.is_multiple_of(2) => {
                self.say(Body::Records(Records { records: vec![RecordMessage::default(); 8000] }))
            }
            7 => self.say(Body::Records(Records { records: vec![RecordMessage::default(); 500_000] })),
            // Locks that wait.
            8 => (0..100).try_for_each(|_| {
                let lock = LockMessage {
                    ino: 1,
                    owner: self.request,
                    end: u64::MAX >> 1,
                    kind: LockKind::Write as u32,
                    ..LockMessage::default()
                };
                self.say(Body::Lock(LockRequest { lock: Some(lock), wait: true, test: false }))
            }),
            // Whatever there is to read, and it is not read.
            9 => (0..20).try_for_each(|_| {
                self.say(Body::Enter(Enter { dir: 1, budget_bytes: 1 << 20, ..Enter::default() }))?;
                self.say(Body::FetchContent(FetchContent { hashes: vec![1; 32 * 512].into() }))
            }),
            _ => self.wait(),
        }
    }

    /// Whether the server has ended it.
    fn wait(&mut self) -> io::Result<()> {
        match self.socket.read(&mut [0; 512]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// The most memory that a process has taken so far, KiB.
fn most_memory(pid: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn misbehave(farm: &Farm, first: usize, over: &AtomicBool, [begun, ended]: [&AtomicUsize; 2]) {
    let address = &farm.address;
    let mut bad: Vec<(usize, Option<Bad>)> =
        (first..CONNECTIONS).step_by(THREADS).map(|number| (number % WAYS, None)).collect();
    while !over.load(Ordering::SeqCst) {
        for (way, place) in &mut bad {
            if over.load(Ordering::SeqCst) {
                return;
            }
            match place {
                None => match Bad::begin(*way, address) {
                    Ok(made) => {
                        *place = Some(made);
                        begun.fetch_add(1, Ordering::SeqCst);
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                },
                Some(connection) => {
                    if connection.go_on(*way, address).is_err() {
                        *place = None;
                        ended.fetch_add(1, Ordering::SeqCst);
                    }
                }
            }
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_thousand_connections_misbehave_and_one_is_served() {
    let farm = Farm::new();
    farm.create("v");
    farm.create("other");
    let (over, begun, ended) = (AtomicBool::new(false), AtomicUsize::new(0), AtomicUsize::new(0));
    let mut done = 0;
    let mut longest = [Duration::ZERO; 4];
    std::thread::scope(|scope| {
        struct Stop<'a>(&'a AtomicBool);
        impl Drop for Stop<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::SeqCst);
            }
        }
        // Also when the honest one fails.
        let stop = Stop(&over);
        for first in 0..THREADS {
            let (farm, over, counts) = (&farm, &over, [&begun, &ended]);
            scope.spawn(move || misbehave(farm, first, over, counts));
        }
        while begun.load(Ordering::SeqCst) < CONNECTIONS {
            std::thread::sleep(Duration::from_millis(20));
        }
        let mount = farm.mount("v", "");
        let until = Instant::now() + Duration::from_secs(rounds(30, 600) as u64);
        while done < HONEST || Instant::now() < until {
            let (path, content) = (mount.join(&format!("honest-{done}")), noise(done as u64, 100_000));
            let begun = Instant::now();
            let mut file = File::create(&path).unwrap();
            file.write_all(&content).unwrap();
            let written = begun.elapsed();
            file.sync_all().unwrap();
            let synced = begun.elapsed();
            assert!(fs::read(&path).unwrap() == content);
            let all = begun.elapsed();
            for (most, took) in longest.iter_mut().zip([all, written, synced - written, all - synced]) {
                *most = took.max(*most);
            }
            done += 1;
            std::thread::sleep(Duration::from_millis(100));
        }
        drop(stop);
        mount.unmount();
    });
    let most = most_memory(farm.server_pid());
    let [all, written, synced, read] = longest;
    println!(
        "the server took {} MiB at most; the honest client made {done} files, the longest took {all:?} (the longest to write {written:?}, to fsync {synced:?}, to read {read:?}); {} connections begun, {} ended",
        most >> 10,
        begun.load(Ordering::SeqCst),
        ended.load(Ordering::SeqCst),
    );
    assert!(most < MEMORY_KIB, "the server took {} MiB", most >> 10);
    assert_eq!(number(&farm.stats(), "server.frames_damaged"), 0);
    let mount = farm.mount("v", "");
    for at in 0..done {
        assert!(fs::read(mount.join(&format!("honest-{at}"))).unwrap() == noise(at as u64, 100_000));
    }
}
