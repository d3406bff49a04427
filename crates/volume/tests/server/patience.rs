//! How long who was told something, or who was asked to give something back, is waited for.

use std::time::{Duration, Instant};

use crate::common::*;
use crate::sharing::*;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{FailureCode, Ping, SetQuota};

#[test]
fn a_reader_that_never_acknowledges_is_ended_after_its_lease() {
    let (_folder, running, mut one, mut two) = readers();
    let asked = one.send(create("new"));
    let (_, body) = two.event();
    applied(body);
    eventually(|| one.is_answered(asked));
    assert_eq!(changed(one.receive(asked)).error, 0);
    let Answer::Failed(failed) = two.receive(0) else { panic!() };
    assert_eq!(code(&failed), FailureCode::SessionEnded);
    assert!(two.is_closed_soon());
    let again = Client::greet(running.address, resume(2)).err().unwrap();
    assert_eq!(code(&again), FailureCode::SessionEnded);
    running.shutdown();
}

/// Until it is told that it has ended; how often it did something meanwhile.
fn until_ended(client: &mut Client, mut asks: impl FnMut(&mut Client) -> u64) -> u64 {
    let mut times = 0;
    loop {
        let asked = asks(client);
        if client.receive_or_end(asked).is_none() {
            break;
        }
        times += 1;
        std::thread::sleep(Duration::from_millis(50));
    }
    let Answer::Failed(failed) = client.receive(0) else { panic!() };
    assert_eq!(code(&failed), FailureCode::SessionEnded);
    times
}

#[test]
fn who_is_heard_but_never_acknowledges_is_ended_after_its_lease() {
    let (_folder, running, mut one, mut two) = readers();
    // In time.
    let asked = one.send(create("new"));
    let (event, body) = two.event();
    applied(body);
    for _ in 0..20 {
        assert!(!two.is_answered(0));
        std::thread::sleep(Duration::from_millis(10));
    }
    two.ack(event, &[]);
    assert_eq!(changed(one.receive(asked)).error, 0);
    one.acked();
    let asked = one.send(create("newer"));
    let (_, body) = two.event();
    applied(body);
    // It asks whether it is alive all the time.
    until_ended(&mut two, |two| two.send(Ask::Ping(Ping {})));
    assert!(two.is_closed_soon());
    assert_eq!(changed(one.receive(asked)).error, 0);
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn who_ships_a_long_log_for_a_recall_is_waited_for() {
    let (_folder, running, mut one, mut two, event, asked) = recalled();
    // Seven leases long.
    one.begin(1, (3, 1));
    for n in 0..42 {
        one.content(&noise(n, 1000));
        assert!(!one.is_answered(0));
        std::thread::sleep(Duration::from_millis(100));
    }
    one.commit(1, &file_records(), (3, 1)).unwrap();
    one.ack(event, &[]);
    assert_eq!(names(&two.listings(asked).unwrap()), ["f"]);
    assert!(!one.is_answered(0));
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn who_ships_for_ever_and_never_acknowledges_is_ended_too() {
    let (_folder, running, mut one, mut two, _, asked) = recalled();
    let mut sequence = 0;
    let times = until_ended(&mut one, |one| {
        sequence += 1;
        one.send(Ask::Commit(commit(sequence, &[], (0, 0))))
    });
    assert!((20..200).contains(&times), "ended after {times} batches");
    assert_eq!(names(&two.listings(asked).unwrap()), [""; 0]);
    running.shutdown();
}

#[test]
fn who_tries_for_ever_what_there_is_no_room_for_and_never_acknowledges_is_ended_too() {
    let (_folder, running, mut one, mut two, _, asked) = recalled();
    let quota = SetQuota { name: "vol".into(), quota_bytes: 1000, quota_inodes: 0 };
    Client::connect(running.address).ask(Ask::SetQuota(quota)).unwrap();
    until_ended(&mut one, |one| one.send(Ask::Commit(commit(1, &[], (2000, 0)))));
    assert_eq!(names(&two.listings(asked).unwrap()), [""; 0]);
    running.shutdown();
}

#[test]
fn who_is_cut_off_while_something_of_it_is_worked_on_holds_nobody_up_for_longer_than_a_lease() {
    let (_folder, running, mut one, mut two) = readers();
    two.send_no_message();
    assert!(
        matches!(two.receive_or_end(0), Some(Answer::Failed(failed)) if failed.message.contains("unreadable"))
    );
    assert!(two.is_closed_soon());
    // It has to hear of this, or to be ended.
    let asked = one.send(create("g"));
    let until = Instant::now() + Duration::from_secs(20);
    while !one.is_answered(asked) {
        assert!(Instant::now() < until, "it waits for who has gone");
    }
    changed(one.receive(asked));
    running.shutdown();
}
