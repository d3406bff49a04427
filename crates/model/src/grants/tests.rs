//! The grant machine by itself. Those that say "found by the simulator" were wrong once.

use super::*;

const A: SessionId = SessionId(1);
const B: SessionId = SessionId(2);
const C: SessionId = SessionId(3);
const DIR: Ino = Ino(100);
const FILE: Object = Object::File { ino: Ino(200), home: DIR };

fn dir() -> Object {
    Object::Directory(DIR)
}

fn sessions(of: &[SessionId]) -> Grants {
    let mut grants = Grants::default();
    of.iter().for_each(|session| grants.join(*session, false));
    of.iter().for_each(|session| grants.claim(*session, &[]).unwrap());
    grants
}

fn change(objects: &[Object]) -> Request {
    Request::Change { objects: objects.to_vec(), local: true, by_slots: BySlots::Cannot }
}

fn execute(objects: &[Object]) -> Request {
    Request::Change { objects: objects.to_vec(), local: false, by_slots: BySlots::Cannot }
}

type Orders = Vec<(SessionId, u64, Order)>;

/// What is ready, and which events went to whom.
fn outputs(grants: &mut Grants) -> (Vec<(Ticket, Outcome)>, Orders) {
    let (mut ready, mut orders) = (Vec::new(), Vec::new());
    for output in grants.take_outputs() {
        match output {
            Output::Ready { ticket, outcome } => ready.push((ticket, outcome)),
            Output::Order { to, event, order } => orders.push((to, event, order)),
            Output::Settled(_) | Output::Heard { .. } | Output::Whole(_) => {}
        }
    }
    (ready, orders)
}

fn read(grants: &mut Grants, session: SessionId, object: Object) {
    let ticket = grants.request(session, Request::Read(vec![object]));
    assert_eq!(outputs(grants), (vec![(ticket, Outcome::Granted)], vec![]));
    grants.finish(ticket);
    grants.take_outputs();
}

fn recall(object: Object, keep_read: bool) -> Order {
    Order::Recall { object, keep_read }
}

#[test]
fn who_is_alone_owns_what_it_reads() {
    let mut grants = sessions(&[A]);
    read(&mut grants, A, dir());
    assert_eq!(grants.held(A, DIR), Some(Grant::Own));
    let mut grants = sessions(&[A, B]);
    read(&mut grants, A, dir());
    assert_eq!(grants.held(A, DIR), Some(Grant::Read));
}

#[test]
fn an_owner_is_recalled_once_and_stays_a_reader() {
    let mut grants = sessions(&[A, B, C]);
    assert!(grants.adopt(A, dir()));
    let first = grants.request(B, Request::Read(vec![dir()]));
    let second = grants.request(C, Request::Read(vec![FILE]));
    assert_eq!(outputs(&mut grants), (vec![], vec![(A, 1, recall(dir(), true))]));
    grants.acknowledge(A, 1);
    let granted = vec![(first, Outcome::Granted), (second, Outcome::Granted)];
    assert_eq!(outputs(&mut grants), (granted, vec![]));
    assert_eq!([A, B, C].map(|session| grants.held(session, DIR)), [Some(Grant::Read); 3]);
    assert!(grants.covers(C, FILE));
}

#[test]
fn requests_do_not_overtake_each_other() {
    let mut grants = sessions(&[A, B, C]);
    assert!(grants.adopt(A, dir()));
    let first = grants.request(B, execute(&[dir()]));
    let second = grants.request(C, Request::Read(vec![dir()]));
    outputs(&mut grants);
    grants.acknowledge(A, 1);
    assert_eq!(outputs(&mut grants).0, [(first, Outcome::Execute)]);
    grants.finish(first);
    assert_eq!(outputs(&mut grants).0, [(second, Outcome::Granted)]);
}

#[test]
fn a_change_is_settled_when_all_readers_have_acknowledged() {
    let mut grants = sessions(&[A, B, C]);
    [A, B, C].into_iter().for_each(|session| read(&mut grants, session, dir()));
    let ticket = grants.request(A, change(&[dir()]));
    assert_eq!(outputs(&mut grants).0, [(ticket, Outcome::Execute)]);
    let published = grants.publish(ticket, &[dir()]);
    assert_eq!(published, [(A, 1), (B, 1), (C, 1)]);
    grants.finish(ticket);
    grants.acknowledge(B, 1);
    assert_eq!(grants.waited_for(), BTreeSet::from([C]));
    assert_eq!(grants.take_outputs(), []);
    // Whoever has ended waits no more, and is not waited for.
    grants.end(C);
    assert_eq!(grants.take_outputs(), [Output::Settled(ticket)]);
    // The asker is answered behind its own event, and heard of that later.
    assert!(grants.waited_for().is_empty() && grants.unheard_by(ticket).eq([A]));
    grants.acknowledge(A, 1);
    assert_eq!(grants.take_outputs(), [Output::Heard { change: ticket, to: BTreeSet::new() }]);
}

#[test]
fn who_is_told_of_a_change_early_is_told_when_all_others_have_heard_of_it() {
    let mut grants = sessions(&[A, B, C]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    let ticket = grants.request(A, change(&[dir()]));
    grants.publish(ticket, &[dir()]);
    for session in [A, B] {
        assert_eq!(grants.tell_change(ticket, session), Some(ticket));
    }
    grants.finish(ticket);
    grants.take_outputs();
    // Who reads it now is told so as well.
    assert_eq!(grants.tell_unheard(C, DIR), [ticket]);
    grants.acknowledge(B, 1);
    let to_asker = Output::Heard { change: ticket, to: BTreeSet::from([A]) };
    assert_eq!(grants.take_outputs(), [to_asker, Output::Settled(ticket)]);
    grants.acknowledge(A, 1);
    assert_eq!(grants.take_outputs(), [Output::Heard { change: ticket, to: BTreeSet::from([B, C]) }]);
    assert_eq!(grants.tell_change(ticket, C), None);
}

#[test]
fn a_change_is_shown_to_others_when_all_but_the_looker_have_heard_of_it() {
    let mut grants = sessions(&[A, B, C]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    let ticket = grants.request(A, change(&[dir()]));
    grants.publish(ticket, &[dir()]);
    grants.finish(ticket);
    for (session, is_unheard) in [(A, true), (B, true), (C, true)] {
        assert_eq!(grants.is_unheard(ticket, session), is_unheard);
        assert_eq!(grants.unheard_about(session, &[DIR]), [ticket]);
        assert_eq!(grants.unheard_about(session, &[Ino(1)]), []);
    }
    grants.acknowledge(A, 1);
    assert!(!grants.is_unheard(ticket, B) && grants.is_unheard(ticket, C));
    grants.acknowledge(B, 1);
    assert!(grants.unheard_about(C, &[DIR]).is_empty());
}

#[test]
fn what_nobody_else_uses_is_given_instead_of_executed() {
    let mut grants = sessions(&[A, B]);
    read(&mut grants, A, dir());
    let ticket = grants.request(A, change(&[dir()]));
    assert_eq!(outputs(&mut grants).0, [(ticket, Outcome::Yours(vec![dir()]))]);
    grants.finish(ticket);
    assert_eq!(grants.owner(DIR), Some(A));
}

#[test]
fn a_file_is_owned_when_other_readers_have_dropped_its_row() {
    let mut grants = sessions(&[A, B]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    let ticket = grants.request(A, Request::Own(FILE));
    assert_eq!(outputs(&mut grants), (vec![], vec![(B, 1, Order::Drop(FILE.ino()))]));
    grants.acknowledge(B, 1);
    assert_eq!(outputs(&mut grants).0, [(ticket, Outcome::Granted)]);
    grants.finish(ticket);
    assert!(grants.covers(A, FILE) && !grants.covers(B, FILE));
    // The names of the directory are everybody's, and nobody gets it whole while the file has an owner.
    let names = grants.request(B, change(&[dir()]));
    assert_eq!(outputs(&mut grants).0, [(names, Outcome::Execute)]);
}

#[test]
fn whoever_is_alone_in_changing_a_directory_for_long_gets_it() {
    let mut grants = sessions(&[A, B]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    for _ in 1..STREAK_MIN {
        let ticket = grants.request(A, change(&[dir()]));
        assert_eq!(outputs(&mut grants).0, [(ticket, Outcome::Execute)]);
        grants.finish(ticket);
    }
    let ticket = grants.request(A, change(&[dir()]));
    assert_eq!(outputs(&mut grants), (vec![], vec![(B, 1, recall(dir(), false))]));
    grants.acknowledge(B, 1);
    assert_eq!(outputs(&mut grants).0, [(ticket, Outcome::Yours(vec![dir()]))]);
    grants.finish(ticket);
    assert_eq!(grants.held(B, DIR), None);
    // It was wrong: the next time has to be longer.
    let back = grants.request(B, Request::Read(vec![dir()]));
    grants.acknowledge(A, 1);
    grants.finish(back);
    assert_eq!(grants.objects[&DIR].patience, Some(2 * STREAK_MIN));
}

#[test]
fn a_directory_that_others_look_into_is_not_taken_from_them() {
    let mut grants = sessions(&[A, B]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    for looked in [dir(), FILE] {
        for _ in 0..4 * STREAK_MIN {
            let ticket = grants.request(A, change(&[dir()]));
            assert_eq!(outputs(&mut grants), (vec![(ticket, Outcome::Execute)], vec![]));
            grants.finish(ticket);
            read(&mut grants, B, looked);
        }
    }
    // To look itself is no hindrance.
    for _ in 1..STREAK_MIN {
        let ticket = grants.request(A, change(&[dir()]));
        outputs(&mut grants);
        grants.finish(ticket);
        read(&mut grants, A, FILE);
    }
    grants.request(A, change(&[dir()]));
    assert_eq!(outputs(&mut grants).1, [(B, 1, recall(dir(), false))]);
}

#[test]
fn nobody_is_served_before_all_have_claimed() {
    let mut grants = Grants::default();
    [A, B, C].into_iter().for_each(|session| grants.join(session, false));
    grants.claim(A, &[]).unwrap();
    let ticket = grants.request(A, Request::Read(vec![dir()]));
    assert_eq!(grants.waited_for(), BTreeSet::from([B, C]));
    grants.claim(B, &[dir()]).unwrap();
    assert_eq!(grants.take_outputs(), []);
    grants.end(C);
    assert_eq!(outputs(&mut grants), (vec![], vec![(B, 1, recall(dir(), true))]));
    grants.acknowledge(B, 1);
    assert_eq!(outputs(&mut grants).0, [(ticket, Outcome::Granted)]);
    assert_eq!(grants.claim(C, &[]), Ok(()));
    assert!(grants.adopt(B, FILE));
    assert_eq!(grants.claim(A, &[FILE]), Err(vec![FILE]));
}

#[test]
fn what_a_connection_did_not_acknowledge_is_done_with_its_claim() {
    let mut grants = sessions(&[A, B]);
    assert!(grants.adopt(A, dir()));
    let ticket = grants.request(B, Request::Read(vec![dir()]));
    outputs(&mut grants);
    grants.claim(A, &[dir()]).unwrap();
    assert_eq!(outputs(&mut grants).1, [(A, 2, recall(dir(), true))], "it is told again");
    grants.claim(A, &[]).unwrap();
    assert_eq!(outputs(&mut grants).0, [(ticket, Outcome::Granted)]);
    assert_eq!(grants.held(A, DIR), None);
}

#[test]
fn a_request_that_is_given_up_lets_the_next_go() {
    let mut grants = sessions(&[A, B]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    let first = grants.request(A, Request::Own(FILE));
    let second = grants.request(B, execute(&[dir(), FILE]));
    outputs(&mut grants);
    grants.cancel(first);
    assert_eq!(outputs(&mut grants).0, [(second, Outcome::Execute)]);
}

/// Found by the simulator: it was executed while a listing of the directory was being read.
#[test]
fn a_request_that_is_extended_waits_for_what_has_begun_since() {
    let (other, below) = (Ino(101), Object::Directory(Ino(101)));
    let mut grants = sessions(&[A, B]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    let rmdir = grants.request(A, execute(&[dir()]));
    let enter = grants.request(B, Request::Read(vec![below]));
    assert_eq!(outputs(&mut grants).0, [(rmdir, Outcome::Execute), (enter, Outcome::Granted)]);
    grants.extend(rmdir, [below]);
    assert_eq!(outputs(&mut grants).0, []);
    grants.finish(enter);
    assert_eq!(outputs(&mut grants).0, [(rmdir, Outcome::Execute)]);
    assert!(grants.publish(rmdir, &[below]).iter().any(|(session, _)| *session == B), "{other} was read");
}

/// Found by the simulator: readers were told of the change after they had dropped the row for an owner.
#[test]
fn a_request_that_is_extended_waits_for_rows_that_are_dropped() {
    let mut grants = sessions(&[A, B]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    let link = grants.request(A, execute(&[Object::Directory(Ino(101))]));
    let own = grants.request(B, Request::Own(FILE));
    assert_eq!(outputs(&mut grants).1, [(A, 1, Order::Drop(FILE.ino()))]);
    grants.extend(link, [FILE]);
    grants.acknowledge(A, 1);
    assert_eq!(outputs(&mut grants).0, [(own, Outcome::Granted)]);
    grants.finish(own);
    assert_eq!(outputs(&mut grants).1, [(B, 1, recall(FILE, true))]);
    grants.acknowledge(B, 1);
    assert_eq!(outputs(&mut grants).0, [(link, Outcome::Execute)]);
}

/// Found by the simulator: an answer behind the recall in the stream said that the session owned it.
#[test]
fn what_is_recalled_is_not_said_to_be_owned() {
    let mut grants = sessions(&[A, B]);
    assert!(grants.adopt(A, dir()));
    let own = grants.request(A, Request::Read(vec![dir()]));
    assert_eq!(outputs(&mut grants).0, [(own, Outcome::Granted)]);
    assert_eq!(grants.held(A, DIR), Some(Grant::Own));
    grants.request(B, Request::Read(vec![dir()]));
    assert_eq!(outputs(&mut grants).1, [(A, 1, recall(dir(), true))]);
    assert_eq!(grants.held(A, DIR), Some(Grant::Read));
    assert_eq!(grants.read_along(own, DIR), None);
}

/// Found by the simulator: the acknowledgement of an older recall took what had been granted anew.
#[test]
fn a_late_acknowledgement_takes_nothing_that_was_granted_since() {
    let mut grants = sessions(&[A, B]);
    assert!(grants.adopt(A, dir()));
    let enter = grants.request(B, Request::Read(vec![dir()]));
    assert_eq!(outputs(&mut grants).1, [(A, 1, recall(dir(), true))]);
    grants.cancel(enter);
    let again = grants.request(A, change(&[dir()]));
    assert_eq!(outputs(&mut grants).0, [], "the acknowledgement is on its way");
    grants.acknowledge(A, 1);
    assert_eq!(outputs(&mut grants).0, [(again, Outcome::Yours(vec![dir()]))]);
    grants.finish(again);
    assert_eq!(grants.owner(DIR), Some(A));
}

/// Found by the simulator: it kept the row, and nobody told it of changes.
#[test]
fn an_owner_of_a_file_that_does_not_read_its_home_keeps_nothing() {
    let mut grants = sessions(&[A, B]);
    grants.claim(A, &[FILE]).unwrap();
    grants.request(B, Request::Read(vec![FILE]));
    assert_eq!(outputs(&mut grants).1, [(A, 1, recall(FILE, false))]);
}

/// Found by the simulator: it was told of a change behind the recall, kept the row, and was no reader any more.
#[test]
fn nothing_is_published_to_a_reader_that_is_letting_go() {
    let mut grants = sessions(&[A, B, C]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    for _ in 0..STREAK_MIN {
        let ticket = grants.request(A, execute(&[dir()]));
        grants.finish(ticket);
    }
    outputs(&mut grants);
    let own = grants.request(A, Request::Own(dir()));
    assert_eq!(outputs(&mut grants), (vec![], vec![(B, 1, recall(dir(), false))]));
    grants.cancel(own);
    let ticket = grants.request(C, execute(&[dir()]));
    assert_eq!(outputs(&mut grants).0, []);
    grants.acknowledge(B, 1);
    assert_eq!(outputs(&mut grants).0, [(ticket, Outcome::Execute)]);
    assert_eq!(grants.publish(ticket, &[dir()]), [(A, 1), (C, 1)]);
}

/// Found by the simulator: between the two its owner removed the last name, and owned the file again.
#[test]
fn a_home_is_recalled_before_its_file() {
    let mut grants = sessions(&[A, B]);
    grants.claim(A, &[dir(), FILE]).unwrap();
    grants.request(B, Request::Read(vec![FILE]));
    assert_eq!(outputs(&mut grants).1, [(A, 1, recall(dir(), true)), (A, 2, recall(FILE, true))]);
}

#[test]
fn what_a_session_would_rather_not_own_is_recalled() {
    let mut grants = sessions(&[A, B]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    assert!(grants.adopt(A, FILE));
    // Neither is B's to give back, nor is a directory.
    grants.release(B, &[FILE.ino()]);
    grants.release(A, &[DIR]);
    assert_eq!(outputs(&mut grants).1, []);
    grants.release(A, &[FILE.ino()]);
    grants.release(A, &[FILE.ino()]);
    assert_eq!(outputs(&mut grants).1, [(A, 1, recall(FILE, true))]);
    // Nobody needs it: its owner may be silent for longer than its lease.
    assert_eq!(grants.waited_for(), BTreeSet::new());
    let ticket = grants.request(B, Request::Own(FILE));
    assert_eq!(outputs(&mut grants), (vec![], vec![]));
    assert_eq!(grants.waited_for(), BTreeSet::from([A]));
    grants.acknowledge(A, 1);
    assert_eq!(outputs(&mut grants).1, [(A, 2, Order::Drop(FILE.ino()))]);
    grants.acknowledge(A, 2);
    assert_eq!(outputs(&mut grants).0, [(ticket, Outcome::Granted)]);
    assert_eq!(grants.owner(FILE.ino()), Some(B));
}

/// A host that does not give back a file would else keep others waiting for ever: what they want is not what it gives back.
#[test]
fn who_waits_behind_a_request_that_waits_for_a_release_waits_for_that() {
    let other = Object::Directory(Ino(101));
    let mut grants = sessions(&[A, B]);
    [A, B].into_iter().for_each(|session| {
        read(&mut grants, session, dir());
        read(&mut grants, session, other);
    });
    assert!(grants.adopt(A, FILE));
    grants.release(A, &[FILE.ino()]);
    let own = grants.request(A, change(&[dir(), other]));
    assert_eq!(outputs(&mut grants), (vec![], vec![(A, 1, recall(FILE, true))]));
    assert_eq!(grants.waited_for(), BTreeSet::new(), "it keeps nobody else waiting");
    let theirs = grants.request(B, change(&[other]));
    assert_eq!(outputs(&mut grants), (vec![], vec![]));
    assert_eq!(grants.waited_for(), BTreeSet::from([A]));
    grants.acknowledge(A, 1);
    assert_eq!(outputs(&mut grants).0, [(own, Outcome::Execute)]);
    grants.cancel(own);
    assert_eq!(outputs(&mut grants).0, [(theirs, Outcome::Execute)]);
}

/// Found by the simulator: a host that does not give back what it would rather not own says so again and again.
#[test]
fn what_a_session_would_rather_not_own_is_noted_once() {
    let mut grants = sessions(&[A, B]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    assert!(grants.adopt(A, FILE));
    let second = Object::File { ino: Ino(201), home: DIR };
    assert!(grants.adopt(A, second));
    for _ in 0..3 {
        grants.release(A, &[FILE.ino(), second.ino()]);
    }
    assert_eq!(outputs(&mut grants).1, [(A, 1, recall(FILE, true)), (A, 2, recall(second, true))]);
    assert_eq!(grants.requests_waiting(), 1);
    grants.acknowledge(A, 1);
    grants.acknowledge(A, 2);
    assert_eq!(grants.requests_waiting(), 0);
    assert!(grants.adopt(A, FILE));
    grants.release(A, &[FILE.ino()]);
    assert_eq!(outputs(&mut grants).1, [(A, 3, recall(FILE, true))], "it owns that anew");
}

#[test]
fn what_is_over_stands_in_nobodys_way() {
    let mut grants = sessions(&[A, B, C]);
    read(&mut grants, A, dir());
    read(&mut grants, B, dir());
    // A walk that takes another directory along, a change that is extended, a request that is given up, and one whose
    // session ends.
    let walk = grants.request(A, Request::Read(vec![dir()]));
    assert!(grants.read_along(walk, Ino(101)).is_some());
    let waits = grants.request(B, execute(&[dir(), Object::Directory(Ino(101))]));
    assert_eq!(outputs(&mut grants), (vec![(walk, Outcome::Granted)], vec![]));
    grants.finish(walk);
    assert_eq!(outputs(&mut grants), (vec![(waits, Outcome::Execute)], vec![]));
    grants.extend(waits, [Object::Directory(Ino(102))]);
    assert_eq!(outputs(&mut grants), (vec![(waits, Outcome::Execute)], vec![]));
    let behind = grants.request(C, Request::Read(vec![Object::Directory(Ino(102))]));
    let ends = grants.request(A, Request::Read(vec![dir()]));
    assert_eq!(outputs(&mut grants), (vec![], vec![]));
    grants.cancel(behind);
    grants.end(A);
    grants.cancel(ends);
    grants.finish(waits);
    grants.take_outputs();
    for wanted in [DIR, Ino(101), Ino(102)] {
        read(&mut grants, C, Object::Directory(wanted));
    }
    assert!(grants.claims.is_empty() && grants.line.is_empty() && grants.recalls.is_empty());
}

#[test]
fn who_waits_for_many_files_goes_on_when_the_last_is_given_back_or_its_owner_has_ended() {
    let mut grants = sessions(&[A, B, C]);
    [A, B, C].into_iter().for_each(|session| read(&mut grants, session, dir()));
    let file = |at: u64| Object::File { ino: Ino(200 + at), home: DIR };
    for at in 0..6 {
        assert!(grants.adopt(if at < 3 { A } else { B }, file(at)));
    }
    let ticket = grants.request(C, execute(&(0..6).map(file).collect::<Vec<_>>()));
    assert_eq!(outputs(&mut grants).1.len(), 6);
    (1..=3).for_each(|event| grants.acknowledge(A, event));
    grants.acknowledge(B, 1);
    // It has forgotten what it was told, owns one of the two still, and is told of that again.
    grants.claim(B, &[file(4)]).unwrap();
    let (ready, orders) = outputs(&mut grants);
    assert_eq!((ready, orders.len()), (vec![], 1));
    grants.end(B);
    assert_eq!(outputs(&mut grants).0, [(ticket, Outcome::Execute)]);
    assert!(grants.awaiting.is_empty());
}

#[test]
fn a_directory_is_changed_while_a_file_in_it_is_on_its_way() {
    let wants = [
        (Request::Read(vec![FILE]), Outcome::Granted),
        (Request::Own(FILE), Outcome::Granted),
        (execute(&[FILE]), Outcome::Execute),
        (execute(&[dir(), FILE]), Outcome::Execute),
    ];
    for (want, outcome) in wants {
        let mut grants = sessions(&[A, B, C]);
        [A, C].into_iter().for_each(|session| read(&mut grants, session, dir()));
        assert!(grants.adopt(A, FILE));
        let file = grants.request(B, want.clone());
        assert_eq!(outputs(&mut grants), (vec![], vec![(A, 1, recall(FILE, true))]));
        // It is not in the file's way either, when that has come meanwhile.
        let first = grants.request(C, execute(&[dir()]));
        assert_eq!(outputs(&mut grants).0, [(first, Outcome::Execute)], "{want:?}");
        grants.acknowledge(A, 1);
        let second = grants.request(C, execute(&[dir()]));
        assert_eq!(outputs(&mut grants), (vec![], vec![]));
        grants.finish(first);
        if let Request::Own(_) = want {
            // Readers of the home forget its row first.
            for (to, event, _) in outputs(&mut grants).1 {
                grants.acknowledge(to, event);
            }
        }
        assert_eq!(outputs(&mut grants).0, [(file, outcome)], "{want:?}");
        grants.finish(file);
        assert_eq!(outputs(&mut grants).0, [(second, Outcome::Execute)], "{want:?}");
        // A change of the file itself waits for it.
        let mut grants = sessions(&[A, B, C]);
        [A, C].into_iter().for_each(|session| read(&mut grants, session, dir()));
        assert!(grants.adopt(A, FILE));
        grants.request(B, want.clone());
        let both = grants.request(C, execute(&[dir(), FILE]));
        assert_eq!(outputs(&mut grants), (vec![], vec![(A, 1, recall(FILE, true))]), "{want:?}");
        grants.acknowledge(A, 1);
        assert!(outputs(&mut grants).0.iter().all(|(ready, _)| *ready != both), "{want:?}");
    }
}

#[test]
fn who_is_to_own_a_directory_does_not_wait_for_files_in_it() {
    let mut grants = sessions(&[A, B]);
    [A, B].into_iter().for_each(|session| read(&mut grants, session, dir()));
    assert!(grants.adopt(A, FILE));
    let change = |grants: &mut Grants| {
        let ticket = grants.request(B, change(&[dir()]));
        let (ready, orders) = outputs(grants);
        grants.finish(ticket);
        (ready.into_iter().map(|(_, outcome)| outcome).collect::<Vec<_>>(), orders)
    };
    for _ in 1..STREAK_MIN {
        assert_eq!(change(&mut grants), (vec![Outcome::Execute], vec![]));
    }
    assert_eq!(change(&mut grants), (vec![Outcome::Execute], vec![(A, 1, recall(FILE, true))]));
    grants.acknowledge(A, 1);
    for _ in 1..2 * STREAK_MIN {
        assert_eq!(change(&mut grants), (vec![Outcome::Execute], vec![]));
    }
    assert_eq!(change(&mut grants), (vec![], vec![(A, 2, recall(dir(), false))]));
}

#[test]
fn who_comes_to_a_file_that_is_on_its_way_keeps_nobody_from_its_directory() {
    for want in [Request::Own(FILE), execute(&[FILE]), execute(&[dir(), FILE])] {
        let mut grants = sessions(&[A, B, C]);
        [A, C].into_iter().for_each(|session| read(&mut grants, session, dir()));
        assert!(grants.adopt(A, FILE));
        // Nobody waits for it yet.
        let read = grants.request(C, Request::Read(vec![FILE]));
        outputs(&mut grants);
        grants.cancel(read);
        grants.request(B, want.clone());
        let change = grants.request(C, execute(&[dir()]));
        assert_eq!(outputs(&mut grants), (vec![(change, Outcome::Execute)], vec![]), "{want:?}");
    }
}

#[test]
fn who_waits_for_directories_of_several_is_not_overtaken_by_their_owners() {
    let other = Object::Directory(Ino(101));
    for request in [Request::Read(vec![dir(), other]), execute(&[dir(), other])] {
        let mut grants = sessions(&[A, B, C]);
        assert!(grants.adopt(A, dir()) && grants.adopt(B, other));
        let ticket = grants.request(C, request);
        assert_eq!(outputs(&mut grants).1.len(), 2);
        grants.acknowledge(A, 1);
        // What it has given back it would get again at once.
        let change = grants.request(A, change(&[dir()]));
        assert_eq!(outputs(&mut grants), (vec![], vec![]));
        grants.acknowledge(B, 1);
        assert_eq!(outputs(&mut grants).0[0].0, ticket);
        grants.finish(ticket);
        assert_eq!(outputs(&mut grants).0[0].0, change);
    }
}
