//! Two servers on one store: the one that opened a volume last has it, and the other one stops to speak for it, whether its store
//! answers or not.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use hayloft_volume::Config;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{FailureCode, Ping};

use crate::common::store::{Puts, Tampered};
use crate::common::*;
use crate::replay::look;
use crate::sharing::resume;

/// A server's own way to the store, which may be cut.
#[derive(Debug, Default)]
struct Way {
    is_cut: AtomicBool,
}

impl Puts for Way {
    fn is_away(&self) -> bool {
        self.is_cut.load(Relaxed)
    }
}

struct Host {
    way: Arc<Tampered<Way>>,
    running: Running,
}

impl Host {
    fn start(way: Tampered<Way>, lease: Duration) -> Host {
        let (way, config) = (Arc::new(way), Config { lease, ..config(Path::new("/nowhere")) });
        Host { running: Running::start_on(way.clone(), config), way }
    }

    /// With an empty volume.
    fn new(lease: Duration) -> Host {
        let host = Host::start(Tampered::new(Way::default()), lease);
        Client::create(host.running.address, 0);
        host
    }

    /// Another server, with its own way to the same store.
    fn beside(&self, lease: Duration) -> Host {
        Host::start(self.way.beside(Way::default()), lease)
    }

    fn open(&self, session: u64) -> Client {
        Client::open(self.running.address, hello(session)).unwrap().0
    }

    /// Cuts its way to the store, for as long as what it has seen counts, and a moment more.
    fn cut(&self, lease: Duration) {
        self.way.puts.is_cut.store(true, Relaxed);
        std::thread::sleep(lease / 2 + lease / 10);
    }

    fn mend(&self) {
        self.way.puts.is_cut.store(false, Relaxed);
    }
}

const SHORT: Duration = Duration::from_millis(600);

/// So long that nothing happens by itself.
const LONG: Duration = Duration::from_secs(600);

#[test]
fn a_server_that_does_not_see_its_store_says_nothing_until_it_does() {
    let host = Host::new(SHORT);
    let mut client = host.open(1);
    client.enter(1, 0).unwrap();
    host.cut(SHORT);
    let asked = client.send(Ask::Ping(Ping {}));
    assert!(!client.hears_within(2 * SHORT), "nobody knows whose the volume is");
    host.mend();
    assert!(matches!(client.receive(asked), Answer::Pong(_)), "it was its own all the time");
    host.running.shutdown();
}

#[test]
fn a_folder_that_is_not_there_is_nobodys() {
    let (folder, running) = started();
    let (mut client, _) = Client::open(running.address, hello(1)).unwrap();
    let [volumes, away] = ["volumes", "away"].map(|name| folder.path().join(name));
    std::fs::rename(&volumes, &away).unwrap();
    std::thread::sleep(SHORT);
    let asked = client.send(Ask::Ping(Ping {}));
    assert!(!client.hears_within(2 * SHORT), "a listing of it is empty");
    std::fs::rename(&away, &volumes).unwrap();
    assert!(matches!(client.receive(asked), Answer::Pong(_)));
    running.shutdown();
}

#[test]
fn a_server_that_does_not_see_its_store_can_be_stopped() {
    let host = Host::new(SHORT);
    let mut client = host.open(1);
    host.cut(SHORT);
    // More than may wait to be said at a time.
    for _ in 0..50 {
        client.send(Ask::Ping(Ping {}));
    }
    let stopped = std::thread::spawn(|| drop(host.running.stop()));
    assert!(client.is_closed_soon(), "nobody knows whose the volume is, and nobody is waited for");
    stopped.join().unwrap();
}

#[test]
fn a_server_that_was_replaced_and_does_not_see_it_says_nothing_any_more() {
    let host = Host::new(SHORT);
    let mut one = host.open(1);
    one.enter(1, 0).unwrap();
    // Before the other one is there: what it counts from.
    host.cut(Duration::ZERO);
    let other = host.beside(SHORT);
    let mut two = other.open(2);
    host.cut(SHORT);
    let asked = one.send(look());
    // The other one ends who does not come, and lets its own change what that one knew.
    assert!(two.commit(1, &[put(1, directory(1, 0, 3))], (0, 0)).is_ok());
    assert!(!one.hears_within(2 * SHORT), "it is not its own to tell");
    host.mend();
    assert!(one.receive_or_end(asked).is_none(), "another one has it");
    // By now it may have taken it back.
    drop(other.running.stop());
}

#[test]
fn a_session_that_only_another_server_knows_is_not_told_that_it_has_ended() {
    let host = Host::new(LONG);
    drop(host.open(1));
    let other = host.beside(LONG);
    drop(other.open(2));
    match Client::open(host.running.address, resume(2)) {
        Ok(_) => panic!("it was not looked"),
        Err(failed) => assert_eq!(code(&failed), FailureCode::Unavailable, "{}", failed.message),
    }
    // It is opened again when somebody comes.
    drop(Client::open(host.running.address, resume(2)).unwrap());
    host.running.shutdown();
}

#[test]
fn a_session_is_silent_for_the_longest_lease_that_it_was_told() {
    let long = Duration::from_secs(10);
    let host = Host::new(long);
    let mut one = host.open(1);
    one.enter(1, 0).unwrap();
    let other = host.beside(SHORT);
    let mut two = other.open(2);
    let asked = two.send(look());
    std::thread::sleep(4 * SHORT);
    assert!(!two.is_answered(asked), "the first one may answer from what it knows still");
    // It is there at once when that one comes.
    let mut back = Client::open(other.running.address, resume(1)).unwrap().0;
    back.ack_all();
    two.listings(asked).unwrap();
    other.running.shutdown();
}
