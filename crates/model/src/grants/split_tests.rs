//! Split directories in the grant machine.

use super::*;
use crate::slot::Width;

const A: SessionId = SessionId(1);
const B: SessionId = SessionId(2);
const DIR: Ino = Ino(100);

fn dir() -> Object {
    Object::Directory(DIR)
}

fn slot(name: &str) -> Object {
    Object::Directory(DIR.slot(name.as_bytes(), Width::Few))
}

fn recall(object: Object, keep_read: bool) -> Order {
    Order::Recall { object, keep_read }
}

/// Acknowledges all that sessions are told until a request is ready; gives that, and what they were told.
fn run(grants: &mut Grants, ticket: Ticket) -> (Outcome, Vec<(SessionId, Order)>) {
    let mut told = Vec::new();
    loop {
        let outputs = grants.take_outputs();
        assert!(!outputs.is_empty(), "{ticket:?} waits for nothing");
        for output in outputs {
            match output {
                Output::Ready { ticket: of, outcome } if of == ticket => return (outcome, told),
                Output::Order { to, event, order } => {
                    told.push((to, order));
                    grants.acknowledge(to, event);
                }
                Output::Ready { .. } | Output::Settled(_) | Output::Heard { .. } | Output::Whole(_) => {}
            }
        }
    }
}

fn done(grants: &mut Grants, session: SessionId, request: Request) -> (Outcome, Vec<(SessionId, Order)>) {
    let ticket = grants.request(session, request);
    let answer = run(grants, ticket);
    grants.finish(ticket);
    answer
}

fn create(grants: &mut Grants, session: SessionId) -> Outcome {
    done(grants, session, Request::Change { objects: vec![dir()], local: true, by_slots: BySlots::Makes }).0
}

/// Two sessions that read a directory.
fn sessions() -> Grants {
    let mut grants = Grants::default();
    for session in [A, B] {
        grants.join(session, false);
    }
    for session in [A, B] {
        grants.claim(session, &[]).unwrap();
    }
    for session in [A, B] {
        done(&mut grants, session, Request::Read(vec![dir()]));
    }
    grants
}

/// The same, where both have changed it in turn until it was split, and have looked at it again.
fn split() -> Grants {
    let mut grants = sessions();
    let mut turns = [A, B].into_iter().cycle();
    while create(&mut grants, turns.next().unwrap()) != Outcome::Split {}
    assert!(grants.is_split(DIR));
    for session in [A, B] {
        done(&mut grants, session, Request::Read(vec![dir()]));
    }
    grants
}

#[test]
fn a_directory_is_split_when_sessions_take_turns_in_it_and_nobody_lists_it() {
    let mut grants = sessions();
    for _ in 0..100 {
        assert_eq!(create(&mut grants, A), Outcome::Execute, "alone");
        assert_eq!(create(&mut grants, B), Outcome::Execute);
        done(&mut grants, B, Request::List(dir()));
    }
    assert!(split().is_split(DIR));
}

#[test]
fn hosts_that_come_to_look_for_a_name_do_not_keep_a_directory_whole() {
    let mut grants = sessions();
    for at in 0..100 {
        let (host, turn) = (SessionId(100 + at), if at % 2 == 0 { A } else { B });
        grants.join(host, false);
        grants.claim(host, &[]).unwrap();
        done(&mut grants, host, Request::Read(vec![dir()]));
        if create(&mut grants, turn) == Outcome::Split {
            return;
        }
    }
    panic!("it is never split");
}

#[test]
fn names_are_owned_by_who_asks_first_and_shared_when_others_look() {
    let mut grants = split();
    let (outcome, told) = done(&mut grants, A, Request::Names(slot("foo.Tpo")));
    assert_eq!((outcome, told), (Outcome::Granted, vec![]), "nobody is told");
    assert_eq!(grants.held(A, slot("foo.Po").ino()), Some(Grant::Own));
    let (outcome, told) = done(&mut grants, B, Request::Names(slot("foo.Po")));
    assert_eq!((outcome, told), (Outcome::Granted, vec![(A, recall(slot("foo"), true))]));
    assert_eq!(grants.held(B, slot("foo").ino()), Some(Grant::Read));
    let (outcome, told) = done(&mut grants, B, Request::Own(slot("foo")));
    assert_eq!((outcome, told), (Outcome::Granted, vec![(A, recall(slot("foo"), false))]));
    assert_eq!(grants.held(A, slot("foo").ino()), None);
}

#[test]
fn who_lists_a_split_directory_has_it_given_back_with_all_slots() {
    let mut grants = split();
    done(&mut grants, A, Request::Names(slot("foo")));
    done(&mut grants, B, Request::Names(slot("bar")));
    let (outcome, told) = done(&mut grants, B, Request::List(dir()));
    assert_eq!(outcome, Outcome::Granted);
    assert_eq!(told, [(A, recall(dir(), false)), (B, recall(dir(), false))], "with all slots");
    assert_eq!((grants.owner(slot("foo").ino()), grants.owner(slot("bar").ino())), (None, None));
    assert!(!grants.is_split(DIR));
    assert_eq!(done(&mut grants, A, Request::Names(slot("foo"))).0, Outcome::Shared);
    assert_eq!(done(&mut grants, A, Request::Own(slot("foo"))).0, Outcome::Shared);
}

#[test]
fn what_is_more_than_files_is_done_in_the_whole_directory() {
    let mut grants = split();
    done(&mut grants, A, Request::Names(slot("foo")));
    let change = Request::Change { objects: vec![dir()], local: false, by_slots: BySlots::Cannot };
    assert_eq!(done(&mut grants, B, change).0, Outcome::Execute);
    assert!(!grants.is_split(DIR));
}

#[test]
fn names_are_not_told_to_who_has_not_looked_at_the_directory() {
    let mut grants = split();
    grants.claim(A, &[]).unwrap();
    assert_eq!(done(&mut grants, A, Request::Names(slot("foo"))).0, Outcome::Shared);
}

#[test]
fn slots_that_are_claimed_after_a_restart_split_their_directory() {
    let mut grants = Grants::default();
    grants.join(A, false);
    grants.join(B, false);
    grants.claim(A, &[slot("foo")]).unwrap();
    grants.claim(B, &[slot("bar")]).unwrap();
    assert!(grants.is_split(DIR));
    assert_eq!(grants.held(A, slot("foo").ino()), Some(Grant::Own));
    assert!(grants.claim(B, &[slot("foo")]).is_err());
    grants.end(A);
    grants.end(B);
    assert!(!grants.is_split(DIR));
    assert!(grants.take_outputs().contains(&Output::Whole(DIR)));
}

#[test]
fn a_directory_that_is_whole_again_soon_is_split_later_the_next_time() {
    let mut grants = split();
    let turns = |grants: &mut Grants| {
        done(grants, A, Request::List(dir()));
        done(grants, B, Request::List(dir()));
        (0..).map(|at| [A, B][at % 2]).position(|session| create(grants, session) == Outcome::Split).unwrap()
    };
    let first = turns(&mut grants);
    assert!(turns(&mut grants) > first);
}

#[test]
fn a_directory_in_which_nothing_is_done_is_whole_again() {
    let mut grants = split();
    done(&mut grants, A, Request::Names(slot("foo")));
    grants.take_outputs();
    grants.rest();
    assert_eq!(grants.take_outputs(), [], "it was worked in just now");
    grants.works_by_slots(DIR);
    grants.rest();
    assert_eq!(grants.take_outputs(), []);
    grants.rest();
    grants.rest();
    // A looks for a name meanwhile, and is told that there are none by slots.
    let ticket = grants.request(A, Request::Names(slot("bar")));
    let (outcome, told) = run(&mut grants, ticket);
    let recalls = [A, B].map(|session| (session, recall(dir(), false)));
    assert_eq!((outcome, &told[..]), (Outcome::Shared, &recalls[..]));
    grants.finish(ticket);
    assert!(!grants.is_split(DIR));
    assert_eq!(create(&mut grants, A), Outcome::Yours(vec![dir()]), "nothing is left in line");
}

#[test]
fn who_knows_of_few_slots_only_finds_a_directory_whole() {
    const C: SessionId = SessionId(3);
    let mut grants = sessions();
    [A, B].into_iter().for_each(|session| grants.knows_many_slots(session, true));
    let split = |grants: &mut Grants| {
        let mut turns = [A, B].into_iter().cycle();
        while create(grants, turns.next().unwrap()) != Outcome::Split {}
        assert_eq!(done(grants, A, Request::Read(vec![dir()])).0, Outcome::Granted);
    };
    split(&mut grants);
    assert_eq!(grants.width(DIR), Some(Width::Many));
    assert_eq!(done(&mut grants, A, Request::Names(slot("foo"))).0, Outcome::Shared, "it has no such slot");
    let many = Object::Directory(DIR.slot(b"foo", Width::Many));
    assert_eq!(done(&mut grants, A, Request::Names(many)).0, Outcome::Granted);
    grants.join(C, false);
    grants.claim(C, &[]).unwrap();
    let (outcome, told) = done(&mut grants, C, Request::Read(vec![dir()]));
    assert_eq!((outcome, told), (Outcome::Granted, vec![(A, recall(dir(), false))]));
    assert!(!grants.is_split(DIR) && grants.covers(C, dir()));
    split(&mut grants);
    assert_eq!(grants.width(DIR), Some(Width::Few), "C is there");
    assert_eq!(done(&mut grants, C, Request::Read(vec![dir()])).1, []);
    assert!(grants.is_split(DIR));
}
