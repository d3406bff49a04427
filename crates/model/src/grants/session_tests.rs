use super::*;

const A: SessionId = SessionId(1);
const B: SessionId = SessionId(2);
const C: SessionId = SessionId(3);
const DIR: Ino = Ino(20);
const OTHER: Ino = Ino(21);
const FILE: Object = Object::File { ino: Ino(30), home: DIR };

fn joined(sessions: &[SessionId]) -> Grants {
    let mut grants = Grants::default();
    for session in sessions {
        grants.join(*session, false);
        grants.claim(*session, &[]).expect("nothing is claimed");
    }
    grants
}

/// The outcome of a request that is ready at once.
fn ready(grants: &mut Grants, session: SessionId, request: Request) -> (Ticket, Outcome) {
    let ticket = grants.request(session, request);
    match grants.take_outputs().as_slice() {
        [Output::Ready { ticket: which, outcome }] if *which == ticket => (ticket, outcome.clone()),
        other => panic!("{other:?}"),
    }
}

fn read(grants: &mut Grants, session: SessionId, object: Object) {
    let (ticket, _) = ready(grants, session, Request::Read(vec![object]));
    grants.finish(ticket);
    grants.take_outputs();
}

fn recalls(outputs: &[Output]) -> Vec<(SessionId, u64, Object, bool)> {
    let recall = |output: &Output| match output {
        Output::Order { to, event, order: Order::Recall { object, keep_read } } => {
            Some((*to, *event, *object, *keep_read))
        }
        _ => None,
    };
    outputs.iter().filter_map(recall).collect()
}

#[test]
fn who_does_not_read_the_home_of_a_file_keeps_nothing_of_it() {
    let mut grants = joined(&[A, B]);
    assert!(grants.adopt(A, FILE));
    let change = Request::Change { objects: vec![FILE], local: false, by_slots: BySlots::Cannot };
    let ticket = grants.request(B, change);
    let outputs = grants.take_outputs();
    let [(to, event, object, keep_read)] = recalls(&outputs)[..] else { panic!("{outputs:?}") };
    assert_eq!((to, object, keep_read), (A, FILE, false));
    grants.acknowledge(A, event);
    assert!(matches!(grants.take_outputs()[..], [Output::Ready { outcome: Outcome::Execute, .. }]));
    let told: Vec<SessionId> =
        grants.publish(ticket, &[FILE]).into_iter().map(|(session, _)| session).collect();
    assert_eq!(told, [B], "A knows nothing of it any more");
}

#[test]
fn an_ended_session_gets_nothing_by_what_it_had_begun() {
    let mut grants = joined(&[A, B]);
    read(&mut grants, B, Object::Directory(DIR));
    let (reading, _) = ready(&mut grants, A, Request::Read(vec![Object::Directory(Ino(21))]));
    let change =
        Request::Change { objects: vec![Object::Directory(DIR)], local: true, by_slots: BySlots::Cannot };
    let (changing, outcome) = ready(&mut grants, A, change);
    assert_eq!(outcome, Outcome::Execute);
    grants.end(A);
    assert_eq!(grants.read_along(reading, Ino(22)), None);
    grants.extend(changing, [Object::Directory(Ino(23))]);
    assert_eq!(grants.take_outputs(), []);
    for dir in [21, 22, 23] {
        assert_eq!(grants.held(A, Ino(dir)), None);
    }
    let (_, outcome) = ready(&mut grants, B, Request::Own(Object::Directory(DIR)));
    assert_eq!(outcome, Outcome::Granted);
}

#[test]
fn a_stray_comes_along_unless_somebody_changes_it() {
    let mut grants = joined(&[A, B]);
    let stray = Object::File { ino: Ino(31), home: STRAY };
    let (reading, _) = ready(&mut grants, A, Request::Read(vec![Object::Directory(DIR)]));
    assert!(grants.read_file_along(reading, Ino(31)));
    let change =
        grants.request(B, Request::Change { objects: vec![stray], local: false, by_slots: BySlots::Cannot });
    assert_eq!(grants.take_outputs(), [], "it waits for the reader");
    grants.finish(reading);
    assert!(grants.take_outputs().contains(&Output::Ready { ticket: change, outcome: Outcome::Execute }));
    let (reading, _) = ready(&mut grants, A, Request::Read(vec![Object::Directory(DIR)]));
    assert!(!grants.read_file_along(reading, Ino(31)));
}

#[test]
fn nobody_is_served_before_all_have_claimed_or_ended() {
    let mut grants = joined(&[A]);
    grants.join(B, false);
    grants.join(C, false);
    let ticket = grants.request(A, Request::Read(vec![Object::Directory(DIR)]));
    assert_eq!(grants.take_outputs(), []);
    assert_eq!(grants.waited_for(), BTreeSet::from([B, C]));
    grants.claim(B, &[Object::Directory(DIR)]).expect("nobody else has it");
    grants.end(C);
    let outputs = grants.take_outputs();
    let [(to, event, ..)] = recalls(&outputs)[..] else { panic!("{outputs:?}") };
    assert_eq!(to, B);
    grants.acknowledge(B, event);
    assert!(matches!(grants.take_outputs()[..], [Output::Ready { ticket: which, .. }] if which == ticket));
    assert!(grants.claim(B, &[Object::Directory(DIR)]).is_err(), "A reads it");
}

#[test]
fn nobody_waits_for_who_has_just_begun_or_has_another_connection() {
    let mut grants = joined(&[A, C]);
    read(&mut grants, A, Object::Directory(DIR));
    read(&mut grants, C, Object::Directory(DIR));
    grants.begin(B, false);
    grants.begin(A, false);
    assert!(grants.all_claimed());
    let change =
        Request::Change { objects: vec![Object::Directory(DIR)], local: false, by_slots: BySlots::Cannot };
    let (_, outcome) = ready(&mut grants, C, change);
    assert_eq!(outcome, Outcome::Execute);
    // Who has not claimed is not served: the claim would take away what it was given, and it would go on knowing it.
    let asked = grants.request(A, Request::Read(vec![Object::Directory(OTHER)]));
    let is_ready = |outputs: &[Output]| {
        outputs.iter().any(|output| matches!(output, Output::Ready { ticket, .. } if *ticket == asked))
    };
    assert!(!is_ready(&grants.take_outputs()));
    let change =
        Request::Change { objects: vec![Object::Directory(OTHER)], local: false, by_slots: BySlots::Cannot };
    let (ticket, _) = ready(&mut grants, C, change);
    grants.finish(ticket);
    grants.claim(A, &[]).unwrap();
    assert!(is_ready(&grants.take_outputs()));
    assert_eq!(grants.held(A, OTHER), Some(Grant::Read));
    // One that was there when the volume was opened is waited for, how often ever it connects.
    grants.join(B, false);
    grants.begin(B, false);
    assert_eq!(grants.unclaimed(), [B]);
}

#[test]
fn who_is_long_alone_in_changing_becomes_the_owner() {
    let mut grants = joined(&[A, B]);
    read(&mut grants, A, Object::Directory(DIR));
    read(&mut grants, B, Object::Directory(DIR));
    let change =
        || Request::Change { objects: vec![Object::Directory(DIR)], local: true, by_slots: BySlots::Cannot };
    for _ in 1..STREAK_MIN {
        let (ticket, outcome) = ready(&mut grants, A, change());
        assert_eq!(outcome, Outcome::Execute);
        grants.cancel(ticket);
    }
    grants.request(A, change());
    let outputs = grants.take_outputs();
    let [(to, event, _, keep_read)] = recalls(&outputs)[..] else { panic!("{outputs:?}") };
    assert_eq!((to, keep_read), (B, false));
    grants.acknowledge(B, event);
    let outputs = grants.take_outputs();
    assert!(matches!(&outputs[..], [Output::Ready { outcome: Outcome::Yours(own), .. }] if own.len() == 1));
}

#[test]
fn what_is_given_back_is_not_recalled() {
    let mut grants = joined(&[A, B]);
    read(&mut grants, A, Object::Directory(DIR));
    read(&mut grants, B, Object::Directory(DIR));
    let owned = |grants: &mut Grants, told: u64| {
        assert!(grants.adopt(A, FILE));
        grants.told(FILE.ino(), told);
    };
    let change = || Request::Change { objects: vec![FILE], local: false, by_slots: BySlots::Cannot };
    owned(&mut grants, 7);
    grants.give_back(B, &[FILE.ino()], 9);
    grants.give_back(A, &[FILE.ino()], 6);
    assert_eq!(grants.owner(FILE.ino()), Some(A), "another's, or told so meanwhile");
    grants.give_back(A, &[FILE.ino()], 7);
    assert_eq!(grants.owner(FILE.ino()), None);
    let (ticket, outcome) = ready(&mut grants, A, change());
    assert_eq!(outcome, Outcome::Execute);
    // It reads the home, and is told.
    assert!(grants.publish(ticket, &[FILE]).iter().any(|(session, _)| *session == A));
    grants.cancel(ticket);
    // What is recalled is given back by the acknowledgement, and what it asks for is as the answer says.
    owned(&mut grants, 8);
    grants.request(B, change());
    let [(_, event, ..)] = recalls(&grants.take_outputs())[..] else { panic!("no recall") };
    grants.give_back(A, &[FILE.ino()], 8);
    assert_eq!(grants.owner(FILE.ino()), Some(A));
    grants.acknowledge(A, event);
    let outputs = grants.take_outputs();
    let [Output::Ready { ticket, .. }] = outputs[..] else { panic!("{outputs:?}") };
    grants.cancel(ticket);
    owned(&mut grants, 9);
    let ticket = grants.request(A, Request::Own(FILE));
    let outputs = grants.take_outputs();
    let [Output::Order { to: B, event, order: Order::Drop(_) }] = outputs[..] else { panic!("{outputs:?}") };
    grants.acknowledge(B, event);
    grants.give_back(A, &[FILE.ino()], 9);
    grants.finish(ticket);
    grants.give_back(A, &[FILE.ino()], 9);
    assert_eq!(grants.owner(FILE.ino()), Some(A), "it is not told of the answer yet");
}
