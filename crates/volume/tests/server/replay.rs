//! What is answered before it is durable, and comes back when the server loses it. The store's log can be held up: what is
//! answered meanwhile is not durable.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use hayloft_model::tree::NewNode;
use hayloft_model::{Change, Content, FileKind, Ino, Name};
use hayloft_volume::Config;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::event::Body as Event;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    ChangeRequest, Changed, Claim, Commit, Enter, Entry, FailureCode, FetchInode, Hello, ListClients, Sync,
    VolumeStatus,
};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, PutOptions, PutPayload, PutResult, Result};

use crate::common::store::{Puts, Tampered, fault, is_log};
use crate::common::*;

/// Puts of the log wait, or fail.
#[derive(Debug, Default)]
struct Log {
    is_held: AtomicBool,
    fails: AtomicBool,
}

#[async_trait]
impl Puts for Log {
    async fn put(
        &self,
        inner: &InMemory,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        while is_log(location) && self.is_held.load(Relaxed) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if is_log(location) && self.fails.load(Relaxed) {
            return Err(fault());
        }
        inner.put_opts(location, payload, opts).await
    }
}

/// A store, and the servers on it.
struct Rig {
    store: Arc<Tampered<Log>>,
    running: Option<Running>,
    config: Config,
}

impl Rig {
    /// A server with an empty volume; its window does not end.
    fn new() -> Rig {
        Rig::with_window(Duration::from_secs(3600))
    }

    fn with_window(window: Duration) -> Rig {
        let config = Config { window, ..config(std::path::Path::new("/nowhere")) };
        let mut rig = Rig { store: Arc::new(Tampered::new(Log::default())), running: None, config };
        rig.start();
        Client::create(rig.address(), 0);
        rig
    }

    fn start(&mut self) {
        self.running = Some(self.started());
    }

    /// One more server.
    fn started(&self) -> Running {
        Running::start_on(self.store.clone(), self.config.clone())
    }

    fn address(&self) -> std::net::SocketAddr {
        self.running.as_ref().unwrap().address
    }

    fn hold(&self) {
        self.store.puts.is_held.store(true, Relaxed);
    }

    fn let_go(&self) {
        self.store.puts.is_held.store(false, Relaxed);
    }

    /// The server is killed, what it has not written is lost, and another one begins.
    fn lose(&mut self) {
        self.running.take().unwrap().crash();
        self.let_go();
        self.start();
    }

    /// A session that reads the root, which is nobody's own.
    fn reader(&self, session: u64) -> Client {
        let (mut client, _) = Client::open(self.address(), hello(session)).unwrap();
        client.enter(1, 0).unwrap();
        client
    }

    /// Two sessions that read the root, in which `old` is: each change of it is the server's to do.
    fn readers(&self) -> (Client, Client) {
        let mut one = self.reader(1);
        let (mut two, _) = Client::open(self.address(), hello(2)).unwrap();
        let asked = two.send(look());
        assert!(matches!(one.acked(), Event::Recall(_)));
        two.listings(asked).unwrap();
        // The first one takes numbers, which are durable before they are used.
        assert_eq!(changes(&mut one, &mut two, create("old")).error, 0);
        assert!(matches!(one.ask(Ask::Sync(sync(&one))), Ok(Answer::Done(_))));
        (one, two)
    }

    /// The session comes back, and brings these.
    fn back(&self, session: u64, entries: Vec<Entry>) -> Client {
        let claim = Claim { entries, ..Claim::default() };
        Client::open_with(self.address(), resume(session), claim).unwrap().0
    }

    fn problems(&self) -> Vec<String> {
        self.running.as_ref().unwrap().problems()
    }
}

fn resume(session: u64) -> Hello {
    Hello { resume: true, ..hello(session) }
}

fn create(name: &str) -> Ask {
    let new = NewNode { mode: FileKind::Regular.bits() | 0o644, ..NewNode::default() };
    change(Change::Create(Ino::ROOT, Name::new(name.as_bytes()), new))
}

fn unlink(name: &str) -> Ask {
    change(Change::Unlink(Ino::ROOT, Name::new(name.as_bytes())))
}

fn change(change: Change) -> Ask {
    Ask::Change(ChangeRequest::of(&change, true, 0))
}

/// `one` asks for something that `two` hears of, too.
fn answered(one: &mut Client, two: &mut Client, asked: u64) -> Answer {
    for _ in 0..1000 {
        two.ack_all();
        one.ack_all();
        if one.is_answered(asked) {
            return one.receive(asked);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("no answer");
}

fn changes(one: &mut Client, two: &mut Client, ask: Ask) -> Changed {
    let asked = one.send(ask);
    match answered(one, two, asked) {
        Answer::Changed(changed) => changed,
        other => panic!("{other:?}"),
    }
}

/// What both see in the root.
fn both_see(one: &mut Client, two: &mut Client) -> [Vec<String>; 2] {
    let first = names_of(one, two);
    [first, names_of(two, one)]
}

fn names_of(one: &mut Client, two: &mut Client) -> Vec<String> {
    let asked = one.send(look());
    for _ in 0..1000 {
        two.ack_all();
        if one.is_answered(asked) {
            break;
        }
    }
    let listings = one.listings(asked).unwrap();
    let entries = listings.dirs[0].entries.iter();
    entries.map(ListedEntry::name).collect()
}

pub(crate) fn look() -> Ask {
    Ask::Enter(Enter { dir: 1, budget_bytes: 0, ..Enter::default() })
}

fn marks(entries: &[Entry]) -> Vec<u64> {
    entries.iter().map(|entry| entry.mark).collect()
}

fn status(client: &mut Client) -> VolumeStatus {
    match client.ask(Ask::Status(hayloft_wire::StatusRequest {})).unwrap() {
        Answer::Status(status) => status,
        other => panic!("{other:?}"),
    }
}

#[test]
fn changes_are_answered_while_the_log_is_held_up_and_come_back_from_whoever_heard_of_them() {
    // Who brings them: the asker, the reader, both.
    for (by_one, by_two) in [(true, false), (false, true), (true, true), (false, false)] {
        let mut rig = Rig::new();
        let (mut one, mut two) = rig.readers();
        rig.hold();
        let (known_to_one, known_to_two) = (one.kept.len(), two.kept.len());
        for name in ["a", "b", "c"] {
            changes(&mut one, &mut two, create(name));
        }
        assert_eq!(changes(&mut two, &mut one, unlink("b")).error, 0);
        let (kept_by_one, kept_by_two) = (one.kept.split_off(known_to_one), two.kept.split_off(known_to_two));
        assert_eq!((marks(&kept_by_one).len(), marks(&kept_by_one)), (4, marks(&kept_by_two)));
        rig.lose();
        let mut one = rig.back(1, if by_one { kept_by_one } else { Vec::new() });
        // Who looks waits for all.
        let looks = one.send(look());
        assert!(!one.is_answered(looks));
        let mut two = rig.back(2, if by_two { kept_by_two } else { Vec::new() });
        assert!(one.listings(looks).is_ok());
        let expected: &[&str] = if by_one || by_two { &["old", "a", "c"] } else { &["old"] };
        assert_eq!(both_see(&mut one, &mut two), [own(expected), own(expected)]);
        assert_eq!(status(&mut one).used_inodes, expected.len() as u64);
        changes(&mut one, &mut two, create("later"));
        assert_eq!(rig.problems(), [""; 0]);
    }
}

fn own(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

/// All that the client keeps.
fn sync(client: &Client) -> Sync {
    client.kept.last().map_or(Sync::default(), |entry| Sync { opening: entry.opening, mark: entry.mark })
}

#[test]
fn a_batch_comes_back_with_its_number_and_who_looks_at_it_keeps_it() {
    let mut rig = Rig::new();
    let mut one = rig.reader(1);
    rig.hold();
    let records = [
        put(1, directory(1, 0, 4)),
        link(1, "f", 100, FileKind::Regular, 3),
        put(100, file_in(1, Content::Inline(b"hay".to_vec().into()), 3)),
    ];
    let batch = Commit { durable: false, ..commit(1, &records, (3, 1)) };
    assert!(matches!(one.ask(Ask::Commit(batch)), Ok(Answer::Committed(done)) if done.sequence == 1));
    assert_eq!(one.kept.len(), 1);
    // A session begins with something durable; it looks when that is there.
    rig.let_go();
    let (mut two, _) = Client::open(rig.address(), hello(2)).unwrap();
    rig.hold();
    let records = [put(100, file_in(1, Content::Inline(b"straw".to_vec().into()), 5))];
    let batch = Commit { durable: false, ..commit(2, &records, (2, 0)) };
    assert!(matches!(one.ask(Ask::Commit(batch)), Ok(Answer::Committed(done)) if done.sequence == 2));
    let asked = two.send(look());
    assert!(matches!(one.acked(), Event::Recall(_)));
    assert_eq!(two.listings(asked).unwrap().dirs[0].entries.len(), 1);
    assert_eq!(marks(&two.kept), marks(&one.kept[1..]));
    // Its maker is gone, and comes back with nothing: the reader has its batch.
    rig.lose();
    rig.back(2, two.kept.clone());
    let (mut one, _) = Client::greet(rig.address(), resume(1)).unwrap();
    match one.ask(Ask::Claim(Claim::default())).unwrap() {
        Answer::Claimed(claimed) => assert_eq!(claimed.last_sequence, 2),
        other => panic!("{other:?}"),
    }
    match one.ask(Ask::FetchInode(FetchInode { ino: 100 })).unwrap() {
        Answer::Inode(answer) => assert_eq!(answer.inode.unwrap().size, 5),
        other => panic!("{other:?}"),
    }
    assert_eq!(rig.problems(), [""; 0]);
}

#[test]
fn who_asks_for_durability_waits_for_the_log() {
    let rig = Rig::new();
    let (mut one, mut two) = rig.readers();
    rig.hold();
    changes(&mut one, &mut two, create("a"));
    let synced = one.send(Ask::Sync(sync(&one)));
    // A batch that asks for it.
    let committed = two.send(Ask::Commit(commit(1, &[], (0, 0))));
    // And one that is about nothing: nobody would keep it, and its number would be given twice.
    let empty = one.send(Ask::Commit(Commit { durable: false, ..commit(1, &[], (0, 0)) }));
    std::thread::sleep(Duration::from_millis(100));
    assert!(!one.is_answered(synced) && !one.is_answered(empty) && !two.is_answered(committed));
    rig.let_go();
    assert!(matches!(one.receive(empty), Answer::Committed(_)));
    assert!(matches!(one.receive(synced), Answer::Done(_)));
    assert!(matches!(two.receive(committed), Answer::Committed(_)));
}

#[test]
fn nothing_is_answered_before_it_is_durable_when_something_older_than_the_window_waits_or_without_a_window() {
    for window in [Duration::from_millis(50), Duration::ZERO] {
        let rig = Rig::with_window(window);
        let (mut one, mut two) = rig.readers();
        rig.hold();
        if !window.is_zero() {
            changes(&mut one, &mut two, create("a"));
            std::thread::sleep(2 * window);
        }
        let asked = one.send(create("b"));
        assert!(!one.is_answered(asked) && !two.is_answered(0), "{window:?}");
        rig.let_go();
        assert!(matches!(answered(&mut one, &mut two, asked), Answer::Changed(_)));
    }
}

/// A rig whose server has lost a change that session 1 keeps.
fn with_a_lost_change() -> (Rig, Vec<Entry>) {
    let mut rig = Rig::new();
    let (mut one, mut two) = rig.readers();
    rig.hold();
    let before = one.kept.len();
    changes(&mut one, &mut two, create("a"));
    let kept = one.kept.split_off(before);
    rig.lose();
    (rig, kept)
}

#[test]
fn what_is_not_sealed_is_left_out() {
    let (rig, mut kept) = with_a_lost_change();
    kept[0].written = [&kept[0].written[..], b"\x18\x01"].concat().into();
    let (mut one, mut two) = (rig.back(1, kept), rig.back(2, Vec::new()));
    assert_eq!(both_see(&mut one, &mut two), [own(&["old"]), own(&["old"])]);
}

#[test]
fn what_comes_late_is_not_brought_back() {
    let (rig, kept) = with_a_lost_change();
    // One does not come, and its lease runs out: then the others look.
    let mut two = rig.back(2, Vec::new());
    let asked = two.send(look());
    while !two.is_answered(asked) {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(two.listings(asked).unwrap().dirs[0].entries.len(), 1);
    // One that begins now has nothing to bring.
    let claim = Claim { entries: kept, ..Claim::default() };
    let (mut three, _) = Client::open_with(rig.address(), hello(3), claim).unwrap();
    assert_eq!(both_see(&mut three, &mut two), [own(&["old"]), own(&["old"])]);
}

#[test]
fn a_request_that_is_sent_again_is_answered_with_what_came_back() {
    // It may do it itself, or wants it executed.
    for execute in [false, true] {
        let mut rig = Rig::new();
        let (mut one, mut two) = rig.readers();
        rig.hold();
        let again = || match create("a") {
            Ask::Change(change) => Ask::Change(ChangeRequest { execute, ..change }),
            other => other,
        };
        let asked = one.send(again());
        assert!(matches!(two.acked(), Event::Apply(_)));
        // The answer does not arrive.
        let kept = two.kept.clone();
        rig.lose();
        let mut one = rig.back(1, Vec::new());
        one.send_as(asked, again());
        let mut two = rig.back(2, kept);
        let Answer::Changed(changed) = answered(&mut one, &mut two, asked) else { panic!() };
        assert_eq!((changed.error, changed.ino != 0, changed.yours), (0, true, false));
        assert_eq!(both_see(&mut one, &mut two), [own(&["old", "a"]), own(&["old", "a"])]);
        assert_eq!(rig.problems(), [""; 0]);
    }
}

#[test]
fn a_database_that_fails_loses_nothing_that_was_answered() {
    let rig = Rig::new();
    let (mut one, mut two) = rig.readers();
    rig.hold();
    changes(&mut one, &mut two, create("a"));
    changes(&mut two, &mut one, create("b"));
    rig.store.puts.fails.store(true, Relaxed);
    rig.let_go();
    let synced = one.send(Ask::Sync(sync(&one)));
    // Longer than the log is tried again for.
    std::thread::sleep(Duration::from_secs(4));
    assert!(!one.is_answered(synced));
    rig.store.puts.fails.store(false, Relaxed);
    assert!(matches!(one.receive(synced), Answer::Done(_)));
    assert_eq!(both_see(&mut one, &mut two), [own(&["old", "a", "b"]), own(&["old", "a", "b"])]);
    changes(&mut one, &mut two, create("c"));
    assert_eq!(rig.problems(), [""; 0]);
}

#[test]
fn a_batch_that_failed_with_its_database_is_answered_when_it_is_sent_again() {
    let rig = Rig::new();
    let mut one = rig.reader(1);
    one.commit(1, &[], (0, 0)).unwrap();
    // Too large for an entry: when the database is open again it is not there.
    let large = |one: &mut Client| {
        let block = one.content(&noise(1, 65536));
        let records = [
            put(1, directory(1, 0, 4)),
            link(1, "f", 100, FileKind::Regular, 3),
            put(100, file_in(1, Content::Blocks(vec![Some(block)]), 65536)),
        ];
        one.commit(2, &records, (65536, 1))
    };
    rig.store.puts.fails.store(true, Relaxed);
    assert_eq!(code(&large(&mut one).unwrap_err()), FailureCode::Uncertain);
    rig.store.puts.fails.store(false, Relaxed);
    // Nothing is written meanwhile; what is asked for is what was before.
    let started = std::time::Instant::now();
    let is_late = || started.elapsed() > Duration::from_secs(30);
    while one.commit(1, &[], (0, 0)).is_err() {
        assert!(!is_late());
        std::thread::sleep(Duration::from_millis(20));
    }
    while large(&mut one).is_err() {
        assert!(!is_late());
    }
    assert_eq!(rig.problems(), [""; 0]);
}

#[test]
fn a_server_that_was_replaced_accepts_for_no_longer_than_its_window() {
    let mut rig = Rig::with_window(Duration::from_millis(200));
    let (mut one, mut two) = rig.readers();
    // Another server opens the volume when a session comes to it.
    let other = rig.started();
    rig.hold();
    changes(&mut one, &mut two, create("before"));
    rig.let_go();
    let claim = Claim { entries: Vec::new(), ..Claim::default() };
    let (mut two_there, _) = Client::open_with(other.address, resume(2), claim).unwrap();
    // The first one does not know it, and what it says now is known to whom it says it.
    let asked = one.send(create("behind"));
    two.ack_all();
    let answer = one.receive_or_end(asked);
    let was_told = matches!(&answer, Some(Answer::Changed(changed)) if changed.error == 0);
    std::thread::sleep(Duration::from_millis(400));
    let late = one.send(create("late"));
    assert!(!matches!(one.receive_or_end(late), Some(Answer::Changed(changed)) if changed.error == 0));
    let claim = Claim { entries: one.kept.clone(), ..Claim::default() };
    let (mut one_there, _) = Client::open_with(other.address, resume(1), claim).unwrap();
    let there = names_of(&mut two_there, &mut one_there);
    assert!(!there.contains(&"late".to_owned()), "{there:?}");
    assert!(there.contains(&"behind".to_owned()) || !was_told, "{there:?}");
    rig.running.take().unwrap().crash();
    rig.running = Some(other);
    assert_eq!(rig.problems(), [""; 0]);
}

/// A server on which session 200 was dropped and is over, which cannot become durable yet.
fn dropped() -> Rig {
    let mut rig = Rig::new();
    // Long enough that none is over before the log is held up.
    rig.config.lease = Duration::from_secs(2);
    rig.lose();
    for session in 200..300 {
        drop(Client::open(rig.address(), hello(session)).unwrap());
    }
    rig.hold();
    let mut looker = Client::connect(rig.address());
    eventually(|| !sessions(&mut looker).contains(&200));
    rig
}

/// The sessions that there are.
fn sessions(looker: &mut Client) -> Vec<u64> {
    let list = ListClients { volume: "vol".into() };
    let Ok(Answer::Clients(all)) = looker.ask(Ask::ListClients(list)) else { panic!("no list") };
    all.clients.iter().map(|client| client.session).collect()
}

#[test]
fn who_comes_back_for_a_dropped_session_hears_that_it_is_over_when_that_is_durable() {
    let mut rig = dropped();
    let address = rig.address();
    let back = std::thread::spawn(move || Client::greet(address, resume(200)).err());
    std::thread::sleep(Duration::from_millis(300));
    assert!(!back.is_finished(), "it is not durable");
    rig.let_go();
    let over = back.join().unwrap().expect("it is over");
    assert_eq!(code(&over), FailureCode::SessionEnded);
    rig.lose();
    let again = Client::greet(rig.address(), resume(200)).err().expect("it is over for the next server, too");
    assert_eq!(code(&again), FailureCode::SessionEnded);
    let (_, welcome) = Client::greet(rig.address(), Hello { replaces: 200, ..hello(2000) }).unwrap();
    assert!(welcome.goes_on);
}

#[test]
fn a_dropped_session_whose_end_is_lost_goes_on() {
    let mut rig = dropped();
    rig.lose();
    assert!(Client::greet(rig.address(), resume(200)).is_ok());
}

#[test]
fn sessions_whose_end_the_store_has_lost_end_once_more_and_keep_nobody_waiting() {
    let rig = dropped();
    rig.store.puts.fails.store(true, Relaxed);
    rig.let_go();
    std::thread::sleep(Duration::from_millis(300));
    rig.store.puts.fails.store(false, Relaxed);
    // Who begins now is served although they have not said what they own.
    eventually(|| {
        Client::open(rig.address(), hello(1)).is_ok_and(|(mut honest, _)| honest.enter(1, 0).is_ok())
    });
    let mut looker = Client::connect(rig.address());
    eventually(|| sessions(&mut looker).len() <= 65);
}
