//! A small client that speaks the protocol over a plain socket, and helpers to make trees with it.

mod listed;
mod records;
pub(crate) mod store;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hayloft_model::{BlockRef, ContentHash, Record};
use hayloft_store::{Codec, Store, decode_chunk, encode_chunk};
use hayloft_volume::{Config, Server, ServerError};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::event::Body as EventBody;
use hayloft_wire::listing::{row_from, unpack};
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    Ack, BatchCheck, BeginBatch, CheckVolume, Chunk, Claim, ClientMessage, Commit, CreateVolume, Enter,
    Entry, Failed, FailureCode, FetchContent, Hello, Listing, PROTOCOL, Ping, RecordMessage, Records,
    ServerMessage, Welcome,
    frame::{self, Opener, Sealer},
};
use object_store::ObjectStore;

pub(crate) use listed::*;
pub(crate) use records::*;

/// A server with a runtime of its own, on a folder.
pub(crate) struct Running {
    pub(crate) runtime: Option<tokio::runtime::Runtime>,
    pub(crate) server: Option<Server>,
    pub(crate) address: SocketAddr,
}

pub(crate) fn config(folder: &Path) -> Config {
    let mut config = Config::new(format!("file://{}", folder.display()), "127.0.0.1:0".parse().unwrap());
    config.lease = Duration::from_millis(600);
    config
}

/// A server with an empty volume.
pub(crate) fn started() -> (tempfile::TempDir, Running) {
    let folder = tempfile::tempdir().unwrap();
    let running = Running::start(config(folder.path()));
    Client::create(running.address, 0);
    (folder, running)
}

/// A server with an empty volume and a client of it, session 1.
pub(crate) fn opened(config: Config) -> (Running, Client) {
    let running = Running::start(config);
    Client::create(running.address, 0);
    let (client, _) = Client::open(running.address, hello(1)).unwrap();
    (running, client)
}

impl Running {
    /// What a check of the volume finds.
    pub(crate) fn problems(&self) -> Vec<String> {
        let check = CheckVolume { name: "vol".into(), content: true, ..CheckVolume::default() };
        match Client::connect(self.address).ask(Ask::CheckVolume(check)).unwrap() {
            Answer::Checked(checked) => checked.problems,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn start(config: Config) -> Running {
        Running::begin(Server::start(config))
    }

    /// On a store that a test has its hands in.
    pub(crate) fn start_on(objects: Arc<dyn ObjectStore>, config: Config) -> Running {
        Running::begin(Server::start_on(Store::new("tampered", objects, None), config))
    }

    fn begin(server: impl Future<Output = Result<Server, ServerError>>) -> Running {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let server = runtime.block_on(server).unwrap();
        Running { address: server.address(), runtime: Some(runtime), server: Some(server) }
    }

    /// Ends everything at once, as a crash of the process does.
    pub(crate) fn crash(mut self) {
        std::mem::forget(self.server.take());
        self.runtime.take().unwrap().shutdown_background();
        // Blocking writes that have begun end by themselves, as the kernel's would.
        std::thread::sleep(Duration::from_millis(50));
    }

    pub(crate) fn shutdown(self) {
        self.stop().unwrap();
    }

    pub(crate) fn stop(mut self) -> Result<(), ServerError> {
        let server = self.server.take().unwrap();
        self.runtime.take().unwrap().block_on(server.shutdown())
    }
}

pub(crate) struct Client {
    socket: TcpStream,
    sealer: Sealer,
    opener: Opener,
    /// Of the batch that is being sent.
    check: BatchCheck,
    buffer: BytesMut,
    next: u64,
    early: HashMap<u64, Vec<ServerMessage>>,
    /// Requests that were sent.
    pub(crate) requests: u64,
    /// Entries that have come, whether they are durable by now or not.
    pub(crate) kept: Vec<Entry>,
}

pub(crate) fn hello(session: u64) -> Hello {
    Hello {
        protocol: PROTOCOL,
        volume: "vol".into(),
        session,
        host_id: "host".into(),
        host_name: "barn".into(),
        pid: 42,
        mount_point: "/mnt".into(),
        ..Hello::default()
    }
}

pub(crate) fn code(failed: &Failed) -> FailureCode {
    FailureCode::try_from(failed.code).unwrap()
}

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Client {
        let socket = TcpStream::connect(address).unwrap();
        socket.set_nodelay(true).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Client {
            socket,
            sealer: Sealer::default(),
            check: BatchCheck::default(),
            opener: Opener::default(),
            buffer: BytesMut::new(),
            next: 1,
            early: HashMap::new(),
            requests: 0,
            kept: Vec::new(),
        }
    }

    /// Makes the volume `vol`.
    pub(crate) fn create(address: SocketAddr, quota_bytes: u64) {
        let create = CreateVolume { name: "vol".into(), quota_bytes, mode: 0o755, ..CreateVolume::default() };
        let answer = Client::connect(address).ask(Ask::CreateVolume(create)).unwrap();
        assert!(matches!(answer, Answer::Volumes(made) if made.volumes.len() == 1));
    }

    /// A session that owns nothing yet.
    pub(crate) fn open(address: SocketAddr, hello: Hello) -> Result<(Client, Welcome), Failed> {
        Client::open_with(address, hello, Claim::default())
    }

    pub(crate) fn open_with(
        address: SocketAddr,
        hello: Hello,
        claim: Claim,
    ) -> Result<(Client, Welcome), Failed> {
        let (mut client, welcome) = Client::greet(address, hello)?;
        match client.ask(Ask::Claim(claim))? {
            Answer::Claimed(_) => Ok((client, welcome)),
            other => panic!("{other:?}"),
        }
    }

    /// More inode numbers: those behind what the session was given at its start, if nobody else was given any since.
    pub(crate) fn take_numbers(&mut self, count: u64) -> Result<(), Failed> {
        match self.ask(Ask::AllocateInos(hayloft_wire::AllocateInos { count }))? {
            Answer::Inos(_) => Ok(()),
            other => panic!("{other:?}"),
        }
    }

    /// A session that has not claimed.
    pub(crate) fn greet(address: SocketAddr, hello: Hello) -> Result<(Client, Welcome), Failed> {
        let mut client = Client::connect(address);
        match client.ask(Ask::Hello(hello))? {
            Answer::Welcome(welcome) => Ok((client, welcome)),
            other => panic!("{other:?}"),
        }
    }

    /// The next event.
    pub(crate) fn event(&mut self) -> (u64, EventBody) {
        match self.receive(0) {
            Answer::Event(event) => (event.number, event.body.unwrap()),
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn ack(&mut self, event: u64, in_use: &[u64]) {
        self.send(Ask::Ack(Ack { events: vec![event], in_use: in_use.to_vec() }));
    }

    /// The next event, which is acknowledged.
    pub(crate) fn acked(&mut self) -> EventBody {
        let (event, body) = self.event();
        self.ack(event, &[]);
        body
    }

    /// Acknowledges all events that have come, and those that come before the answer to a keep-alive; gives their number.
    pub(crate) fn ack_all(&mut self) -> u64 {
        assert!(matches!(self.ask(Ask::Ping(Ping {})), Ok(Answer::Pong(_))));
        let mut count = 0;
        for message in self.early.remove(&0).unwrap_or_default() {
            if let Some(Answer::Event(event)) = message.body {
                self.ack(event.number, &[]);
                count += 1;
            }
        }
        count
    }

    /// Whether the answer is there, after the server has said something else.
    pub(crate) fn is_answered(&mut self, request: u64) -> bool {
        assert!(matches!(self.ask(Ask::Ping(Ping {})), Ok(Answer::Pong(_))));
        self.early.get(&request).is_some_and(|waiting| !waiting.is_empty())
    }

    pub(crate) fn send(&mut self, mut body: Ask) -> u64 {
        let records = match &mut body {
            Ask::Records(records) => &mut records.records,
            Ask::Commit(commit) => &mut commit.records,
            _ => &mut Vec::new(),
        };
        // As clients do: what is too much for one message comes before it.
        while records.len() > 1 && encoded_len(records) > 100_000 {
            let rest = records.split_off(records.len().min(30));
            let records = std::mem::replace(records, rest);
            self.send_as(0, Ask::Records(Records { records }));
        }
        let one_way = matches!(
            body,
            Ask::Content(_)
                | Ask::Records(_)
                | Ask::BeginBatch(_)
                | Ask::Goodbye(_)
                | Ask::Ack(_)
                | Ask::LetGo(_)
                | Ask::Release(_)
        );
        let request = if one_way { 0 } else { self.next };
        self.next += 1;
        self.requests += u64::from(request != 0);
        self.send_as(request, body);
        request
    }

    /// Sends a request of that number.
    pub(crate) fn send_as(&mut self, request: u64, mut body: Ask) {
        match &mut body {
            Ask::BeginBatch(_) => self.check = BatchCheck::default(),
            Ask::Records(records) => self.check.add(&records.records),
            Ask::Commit(commit) => {
                let mut check = std::mem::take(&mut self.check);
                check.add(&commit.records);
                commit.check = commit.check.or(Some(check.of(commit)));
            }
            _ => {}
        }
        let mut bytes = Vec::new();
        frame::encode(&ClientMessage { request, body: Some(body) }, &mut bytes);
        self.sealer.seal(&mut bytes);
        self.socket.write_all(&bytes).unwrap();
    }

    /// Sends a message in which a bit was changed on the way.
    pub(crate) fn send_damaged(&mut self, body: Ask) {
        let mut bytes = Vec::new();
        frame::encode(&ClientMessage { request: 1, body: Some(body) }, &mut bytes);
        self.sealer.seal(&mut bytes);
        *bytes.last_mut().unwrap() ^= 1;
        self.socket.write_all(&bytes).unwrap();
    }

    /// Sends a frame that is as it should be, with something in it that is no message.
    pub(crate) fn send_no_message(&mut self) {
        /// With the tag of a hello, which it is not: what is not UTF-8 is no name of a volume.
        #[derive(Clone, PartialEq, prost::Message)]
        struct Other {
            #[prost(bytes = "bytes", tag = "2")]
            hello: Bytes,
        }
        let mut bytes = Vec::new();
        frame::encode(&Other { hello: Bytes::from_static(&[0x12, 1, 0xff]) }, &mut bytes);
        self.sealer.seal(&mut bytes);
        self.socket.write_all(&bytes).unwrap();
    }

    pub(crate) fn receive(&mut self, request: u64) -> Answer {
        self.receive_or_end(request).expect("the server closed the connection")
    }

    /// The answer; `None` when the connection ends without it.
    pub(crate) fn receive_or_end(&mut self, request: u64) -> Option<Answer> {
        loop {
            if let Some(waiting) = self.early.get_mut(&request)
                && !waiting.is_empty()
            {
                return waiting.remove(0).body;
            }
            while let Some(message) = self.opener.take::<ServerMessage>(&mut self.buffer).unwrap() {
                self.kept.extend(message.entries.iter().cloned());
                self.early.entry(message.request).or_default().push(message);
            }
            if self.early.get(&request).is_some_and(|waiting| !waiting.is_empty()) {
                continue;
            }
            let mut part = [0; 65536];
            let read = match self.socket.read(&mut part) {
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => 0,
                // With a time limit it is not begun anew by itself, not even after a stop.
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                read => read.unwrap(),
            };
            if read == 0 {
                return None;
            }
            self.buffer.extend_from_slice(&part[..read]);
        }
    }

    /// Whether the server says something, or closes the connection, within that time.
    pub(crate) fn hears_within(&mut self, time: Duration) -> bool {
        self.socket.set_read_timeout(Some(time)).unwrap();
        let peeked = self.socket.peek(&mut [0]);
        self.socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        peeked.is_ok()
    }

    /// Whether the server closes the connection within five seconds.
    pub(crate) fn is_closed_soon(&mut self) -> bool {
        self.socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let closed = matches!(self.socket.read(&mut [0; 1024]), Ok(0));
        self.socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        closed
    }

    pub(crate) fn begin(&mut self, sequence: u64, (bytes, inodes): (i64, i64)) {
        self.send(Ask::BeginBatch(BeginBatch { sequence, bytes, inodes, pressing: false }));
    }

    /// Begins a batch that others wait for.
    pub(crate) fn begin_pressing(&mut self, sequence: u64, (bytes, inodes): (i64, i64)) {
        self.send(Ask::BeginBatch(BeginBatch { sequence, bytes, inodes, pressing: true }));
    }

    pub(crate) fn records(&mut self, records: &[Record]) {
        let records = records.iter().map(RecordMessage::from).collect();
        self.send(Ask::Records(Records { records }));
    }

    pub(crate) fn ask(&mut self, body: Ask) -> Result<Answer, Failed> {
        let request = self.send(body);
        match self.receive(request) {
            Answer::Failed(failed) => Err(failed),
            answer => Ok(answer),
        }
    }

    pub(crate) fn content(&mut self, raw: &[u8]) -> BlockRef {
        let chunk = encode_chunk(raw);
        let hash = chunk.hash;
        self.send(Ask::Content(Chunk {
            hash: Bytes::copy_from_slice(&hash.0),
            len: chunk.len,
            codec: chunk.codec as u32,
            payload: chunk.payload,
        }));
        BlockRef { hash, len: raw.len() as u32 }
    }

    pub(crate) fn commit(
        &mut self,
        sequence: u64,
        records: &[Record],
        usage: (i64, i64),
    ) -> Result<u64, Failed> {
        let commit = commit(sequence, records, usage);
        match self.ask(Ask::Commit(commit))? {
            Answer::Committed(done) => Ok(done.sequence),
            other => panic!("{other:?}"),
        }
    }

    /// All parts of the answer to an `Enter`, put together.
    pub(crate) fn enter(&mut self, dir: u64, budget_bytes: u64) -> Result<Entered, Failed> {
        let request = self.send(Ask::Enter(Enter { dir, budget_bytes, ..Enter::default() }));
        self.listings(request)
    }

    pub(crate) fn listings(&mut self, request: u64) -> Result<Entered, Failed> {
        let mut whole = Entered::default();
        loop {
            match self.receive(request) {
                Answer::Listings(part) => {
                    for Listing { dir, packed, complete, own, .. } in part.dirs {
                        let entries = unpack(&packed).map(|entry| {
                            let (name, dentry, inode) = entry.unwrap();
                            ListedEntry { name, dentry, inode }
                        });
                        match whole.dirs.last_mut().filter(|last| last.dir == dir) {
                            Some(last) => {
                                last.entries.extend(entries);
                                (last.complete, last.own) = (complete, own);
                            }
                            None => {
                                whole.dirs.push(Listed { dir, entries: entries.collect(), complete, own })
                            }
                        }
                    }
                    whole.contents.extend(part.contents);
                    whole.files.extend(part.files.iter().map(|row| row_from(row).unwrap()));
                    if !part.more {
                        assert!(whole.dirs.iter().all(|listing| listing.complete));
                        whole.next = part.next;
                        return Ok(whole);
                    }
                }
                Answer::Failed(failed) => return Err(failed),
                other => panic!("{other:?}"),
            }
        }
    }

    pub(crate) fn fetch(&mut self, hashes: &[ContentHash]) -> Result<Vec<Bytes>, Failed> {
        let packed: Vec<u8> = hashes.iter().flat_map(|hash| hash.0).collect();
        match self.ask(Ask::FetchContent(FetchContent { hashes: packed.into() }))? {
            Answer::Contents(contents) => {
                assert_eq!(contents.chunks.len(), hashes.len());
                Ok(contents
                    .chunks
                    .into_iter()
                    .zip(hashes)
                    .map(|(chunk, hash)| decode(chunk, *hash))
                    .collect())
            }
            other => panic!("{other:?}"),
        }
    }
}

fn encoded_len(records: &[RecordMessage]) -> usize {
    records.iter().map(prost::Message::encoded_len).sum()
}

pub(crate) fn decode(chunk: Chunk, hash: ContentHash) -> Bytes {
    assert_eq!(chunk.hash, hash.0[..]);
    decode_chunk(hash, chunk.len, Codec::try_from(chunk.codec).unwrap(), chunk.payload).unwrap()
}

pub(crate) fn commit(sequence: u64, records: &[Record], (bytes, inodes): (i64, i64)) -> Commit {
    let records = records.iter().map(RecordMessage::from).collect();
    Commit { sequence, records, bytes, inodes, durable: true, ..Commit::default() }
}

/// Asks until it is so; somebody has to be heard of meanwhile.
pub(crate) fn eventually(mut is_so: impl FnMut() -> bool) {
    while !is_so() {
        std::thread::sleep(Duration::from_millis(20));
    }
}
