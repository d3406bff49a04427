//! Several sessions of one volume, as clients see it: grants and recalls, changes that all are told of, inodes in use.

use std::time::Duration;

use crate::common::*;
use hayloft_model::grants::Object;
use hayloft_model::tree::NewNode;
use hayloft_model::{Change, Content, FileKind, Ino, Name, Record, TreeError};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::event::Body as Event;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    Acquire, Apply, ChangeRequest, Changed, Claim, DeleteVolume, Enter, EvictClient, FailureCode, FetchInode,
    GiveBack, Hello, LetGo, ListClients, ObjectMessage, StatsRequest, StatusRequest, error_of,
};

pub(crate) const ROOT: Object = Object::Directory(Ino::ROOT);
pub(crate) const FILE: u64 = 100;

pub(crate) fn resume(session: u64) -> Hello {
    Hello { resume: true, ..hello(session) }
}

/// The first one's log: `f` in the root.
pub(crate) fn file_records() -> [Record; 3] {
    [
        put(1, directory(1, 0, 4)),
        link(1, "f", FILE, FileKind::Regular, 3),
        put(FILE, file_in(1, Content::Inline(b"hay".to_vec().into()), 3)),
    ]
}

/// Two sessions that read the root, with a file `f` in it.
pub(crate) fn readers() -> (tempfile::TempDir, Running, Client, Client) {
    let (folder, running) = started();
    let (mut one, _) = Client::open(running.address, hello(1)).unwrap();
    assert!(one.enter(1, 0).unwrap().dirs[0].own);
    one.commit(1, &file_records(), (3, 1)).unwrap();
    let (mut two, _) = Client::open(running.address, hello(2)).unwrap();
    let asked = two.send(Ask::Enter(Enter { dir: 1, budget_bytes: 0, ..Enter::default() }));
    assert!(is_recall(&one.acked(), ROOT, true));
    assert_eq!(names(&two.listings(asked).unwrap()), ["f"]);
    (folder, running, one, two)
}

pub(crate) fn is_recall(event: &Event, object: Object, keep_read: bool) -> bool {
    matches!(event, Event::Recall(recall)
        if recall.object == Some(object.into()) && recall.keep_read == keep_read)
}

pub(crate) fn applied(event: Event) -> (Vec<Record>, Apply) {
    match event {
        Event::Apply(apply) => {
            (apply.records.iter().map(|record| Record::try_from(record).unwrap()).collect(), apply)
        }
        other => panic!("{other:?}"),
    }
}

pub(crate) fn names(listings: &Entered) -> Vec<String> {
    let entries = &listings.dirs[0].entries;
    entries.iter().map(ListedEntry::name).collect()
}

pub(crate) fn create(name: &str) -> Ask {
    let new = NewNode { mode: FileKind::Regular.bits() | 0o644, ..NewNode::default() };
    change(Change::Create(Ino::ROOT, Name::new(name.as_bytes()), new))
}

fn unlink(name: &str) -> Ask {
    change(Change::Unlink(Ino::ROOT, Name::new(name.as_bytes())))
}

fn change(change: Change) -> Ask {
    Ask::Change(ChangeRequest::of(&change, false, 0))
}

pub(crate) fn changed(answer: Answer) -> Changed {
    match answer {
        Answer::Changed(changed) => changed,
        other => panic!("{other:?}"),
    }
}

/// An owner of the root, and somebody who waits for it, with the recall's number and the request's.
pub(crate) fn recalled() -> (tempfile::TempDir, Running, Client, Client, u64, u64) {
    let (folder, running) = started();
    let (mut one, _) = Client::open(running.address, hello(1)).unwrap();
    assert!(one.enter(1, 0).unwrap().dirs[0].own, "alone");
    let (mut two, _) = Client::open(running.address, hello(2)).unwrap();
    let asked = two.send(Ask::Enter(Enter { dir: 1, budget_bytes: 1 << 20, ..Enter::default() }));
    let (event, body) = one.event();
    assert!(is_recall(&body, ROOT, true));
    (folder, running, one, two, event, asked)
}

#[test]
fn an_owner_ships_its_log_before_another_reads() {
    let (_folder, running, mut one, mut two, event, asked) = recalled();
    assert!(!two.is_answered(asked));
    // In one go: the acknowledgement is handled behind the batch.
    let shipped = one.send(Ask::Commit(commit(1, &file_records(), (3, 1))));
    one.ack(event, &[]);
    let listings = two.listings(asked).unwrap();
    assert_eq!(names(&listings), ["f"]);
    assert!(listings.dirs[0].entries[0].inode.is_some() && !listings.dirs[0].own);
    assert!(matches!(one.receive(shipped), Answer::Committed(_)));
    assert!(!one.enter(1, 0).unwrap().dirs[0].own, "shared now");
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn a_file_that_is_given_back_is_not_recalled() {
    let (_folder, _running, mut one, mut two) = readers();
    // It is made by a request, and owned by itself.
    for (name, is_given) in [("kept", false), ("given", true)] {
        let asked = one.send(create(name));
        let (event, body) = one.event();
        let (_, Apply { own, .. }) = applied(body);
        one.ack(event, &[]);
        two.acked();
        let ino = changed(one.receive(asked)).ino;
        assert_eq!(own.len(), 1);
        if is_given {
            one.send(Ask::GiveBack(GiveBack { inos: vec![ino], seen: event }));
        }
        let asked = one.send(unlink(name));
        let body = one.acked();
        assert_eq!(matches!(body, Event::Recall(_)), !is_given, "{body:?}");
        if !is_given {
            applied(one.acked());
        }
        two.acked();
        assert_eq!(changed(one.receive(asked)).error, 0);
    }
}

#[test]
fn a_change_is_answered_when_all_readers_have_it() {
    let (_folder, running, mut one, mut two) = readers();
    let asked = one.send(create("new"));
    let (event, body) = two.event();
    let (records, apply) = applied(body);
    let born = records.iter().find_map(|record| match record {
        Record::PutDentry(Ino::ROOT, name, dentry) if name.as_bytes() == b"new" => Some(dentry.ino),
        _ => None,
    });
    let born = born.expect("the name");
    assert!(records.iter().any(|record| matches!(record, Record::PutInode(Ino::ROOT, _))));
    assert!(!records.iter().any(|record| matches!(record, Record::PutInode(ino, _) if *ino == born)));
    assert!(apply.own.is_empty());
    assert!(!one.is_answered(asked));
    two.ack(event, &[]);
    // The maker owns the file; its event is there before the answer.
    assert_eq!(changed(one.receive(asked)).ino, born.0);
    assert!(one.is_answered(0));
    let file = Object::File { ino: born, home: Ino::ROOT };
    let (records, apply) = applied(one.acked());
    assert_eq!(apply.own, [ObjectMessage::from(file)]);
    assert!(records.iter().any(|record| matches!(record, Record::PutInode(ino, _) if *ino == born)));
    // Listed without its row; who wants that has it recalled.
    let listings = two.enter(1, 0).unwrap();
    assert_eq!(names(&listings), ["f", "new"]);
    assert!(listings.dirs[0].entries[0].inode.is_some() && listings.dirs[0].entries[1].inode.is_none());
    let asked = two.send(Ask::FetchInode(FetchInode { ino: born.0 }));
    let (event, body) = one.event();
    assert!(is_recall(&body, file, true));
    let written = put(born.0, file_in(1, Content::Inline(b"straw".to_vec().into()), 5));
    one.commit(2, &[written], (5, 0)).unwrap();
    one.ack(event, &[]);
    let Answer::Inode(found) = two.receive(asked) else { panic!() };
    assert_eq!((found.inode.unwrap().size, found.own), (5, false));
    let exists = changed(two.ask(create("new")).unwrap());
    assert_eq!(error_of(exists.error), Ok(TreeError::Exists));
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn a_change_is_executed_once_over_reconnects_and_restarts() {
    let (folder, running, mut one, mut two) = readers();
    let request = 1000;
    one.send_as(request, create("new"));
    let (event, _) = two.event();
    drop(one);
    // Sent again while it waits for the reader: it is not executed a second time.
    let (mut one, _) = Client::open(running.address, resume(1)).unwrap();
    one.send_as(request, create("new"));
    assert!(!one.is_answered(request));
    two.ack(event, &[]);
    let made = changed(one.receive(request));
    assert!(made.error == 0 && made.ino != 0);
    one.send_as(request, create("new"));
    assert_eq!(changed(one.receive(request)), made);
    running.crash();
    let running = Running::start(config(folder.path()));
    let (mut one, _) = Client::open(running.address, resume(1)).unwrap();
    let (mut two, _) = Client::open(running.address, resume(2)).unwrap();
    one.send_as(request, create("new"));
    assert_eq!(changed(one.receive(request)), made);
    // An outcome that is not needed any more goes with the next batch.
    let Ask::Change(next) = create("new") else { panic!() };
    one.send_as(request + 1, Ask::Change(ChangeRequest { forget_below: request + 1, ..next }));
    // Nobody else knows the directory: it may become the maker's own.
    let next = changed(one.receive(request + 1));
    assert!(next.yours || error_of(next.error) == Ok(TreeError::Exists));
    assert_eq!(names(&two_listing(&mut one, &mut two)), ["f", "new"]);
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

/// The second one's listing of the root, whoever owns it.
fn two_listing(one: &mut Client, two: &mut Client) -> Entered {
    let asked = two.send(Ask::Enter(Enter { dir: 1, budget_bytes: 0, ..Enter::default() }));
    while !two.is_answered(asked) {
        if one.is_answered(0) {
            one.acked();
        }
    }
    two.listings(asked).unwrap()
}

#[test]
fn an_unlinked_file_stays_until_nobody_uses_it() {
    let (folder, running, mut one, mut two) = readers();
    let asked = one.send(unlink("f"));
    let (event, body) = two.event();
    let (records, _) = applied(body);
    assert!(records.contains(&Record::DeleteDentry(Ino::ROOT, Name::new(b"f"))));
    assert!(
        records.iter().any(|record| matches!(record, Record::PutInode(Ino(FILE), row) if row.nlink == 0))
    );
    two.ack(event, &[FILE]);
    assert_eq!(changed(one.receive(asked)).error, 0);
    one.acked();
    let Ok(Answer::Status(status)) = one.ask(Ask::Status(StatusRequest {})) else { panic!() };
    assert_eq!((status.used_bytes, status.used_inodes), (0, 0));
    let fetch = || Ask::FetchInode(FetchInode { ino: FILE });
    let Ok(Answer::Inode(found)) = two.ask(fetch()) else { panic!() };
    assert_eq!(found.inode.unwrap().nlink, 0);
    // The maker goes; the user stays, also over a restart.
    one.send(Ask::Goodbye(hayloft_wire::Goodbye {}));
    one.ask(Ask::Status(StatusRequest {})).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    running.crash();
    let running = Running::start(config(folder.path()));
    let claim = Claim { in_use: vec![FILE], ..Claim::default() };
    let (mut two, _) = Client::open_with(running.address, resume(2), claim).unwrap();
    two.ask(fetch()).unwrap();
    assert_eq!(running.problems(), [""; 0]);
    two.send(Ask::LetGo(LetGo { inos: vec![FILE] }));
    eventually(|| two.ask(fetch()).is_err_and(|failed| code(&failed) == FailureCode::NotFound));
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn a_file_that_nobody_uses_goes_when_all_have_said_so() {
    let (_folder, running, mut one, mut two) = readers();
    let asked = one.send(unlink("f"));
    two.acked();
    assert_eq!(changed(one.receive(asked)).error, 0);
    one.acked();
    let fetch = Ask::FetchInode(FetchInode { ino: FILE });
    eventually(|| two.ask(fetch.clone()).is_err_and(|failed| code(&failed) == FailureCode::NotFound));
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn an_owner_that_deletes_what_another_uses_leaves_it_to_the_server() {
    let (_folder, running, mut one, mut two) = readers();
    // The first one gets the directory for itself: the other lets go, and has the file open.
    for n in 0..7 {
        let asked = one.send(create(&format!("n{n}")));
        two.acked();
        changed(one.receive(asked));
        one.acked();
    }
    let asked = one.send(create("last"));
    let (event, body) = two.event();
    assert!(is_recall(&body, ROOT, false));
    two.ack(event, &[FILE]);
    assert!(changed(one.receive(asked)).yours);
    let (_, apply) = applied(one.acked());
    assert_eq!(apply.own, [ObjectMessage::from(ROOT)]);
    let gone = [Record::DeleteDentry(Ino::ROOT, Name::new(b"f")), Record::DeleteInode(Ino(FILE))];
    one.commit(2, &gone, (-3, -1)).unwrap();
    let fetch = Ask::FetchInode(FetchInode { ino: FILE });
    let Ok(Answer::Inode(found)) = two.ask(fetch.clone()) else { panic!() };
    assert_eq!(found.inode.unwrap().nlink, 0);
    assert_eq!(running.problems(), [""; 0]);
    two.send(Ask::LetGo(LetGo { inos: vec![FILE] }));
    eventually(|| two.ask(fetch.clone()).is_err());
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn a_restarted_server_waits_for_what_its_sessions_claim() {
    let (folder, running) = started();
    let (mut one, _) = Client::open(running.address, hello(1)).unwrap();
    assert!(one.enter(1, 0).unwrap().dirs[0].own);
    let (_two, _) = Client::open(running.address, hello(2)).unwrap();
    running.crash();
    let running = Running::start(config(folder.path()));
    let (mut two, _) = Client::open(running.address, resume(2)).unwrap();
    let asked = two.send(Ask::Enter(Enter { dir: 1, budget_bytes: 0, ..Enter::default() }));
    assert!(!two.is_answered(asked));
    let claim = Claim { own: vec![ROOT.into()], ..Claim::default() };
    let (mut one, _) = Client::open_with(running.address, resume(1), claim.clone()).unwrap();
    let (event, body) = one.event();
    assert!(is_recall(&body, ROOT, true));
    one.commit(1, &file_records(), (3, 1)).unwrap();
    one.ack(event, &[]);
    assert_eq!(names(&two.listings(asked).unwrap()), ["f"]);
    // What others hold cannot be claimed.
    drop(one);
    let failed = Client::open_with(running.address, resume(1), claim).err().unwrap();
    assert_eq!(code(&failed), FailureCode::SessionEnded);
    // And who does not come back is ended when somebody needs it to have claimed.
    let (mut three, _) = Client::open(running.address, hello(3)).unwrap();
    drop(three);
    running.crash();
    let running = Running::start(config(folder.path()));
    (three, _) = Client::open(running.address, resume(3)).unwrap();
    let asked = three.send(Ask::Enter(Enter { dir: 1, budget_bytes: 0, ..Enter::default() }));
    eventually(|| three.is_answered(asked));
    assert_eq!(names(&three.listings(asked).unwrap()), ["f"]);
    running.shutdown();
}

#[test]
fn a_batch_of_what_others_hold_ends_the_session() {
    let (_folder, running, _one, mut two) = readers();
    let row = put(1, directory(1, 0, 5));
    let failed = two.commit(1, &[row, link(1, "g", 200, FileKind::Regular, 4)], (0, 0)).unwrap_err();
    assert_eq!(code(&failed), FailureCode::SessionEnded, "{}", failed.message);
    let again = Client::greet(running.address, resume(2)).err().unwrap();
    assert_eq!(code(&again), FailureCode::SessionEnded);
    assert_eq!(running.problems(), [""; 0]);
    running.shutdown();
}

#[test]
fn who_acquires_a_file_has_its_row_alone() {
    let (_folder, running, mut one, mut two) = readers();
    let file = Object::File { ino: Ino(FILE), home: Ino::ROOT };
    let asked = one.send(Ask::Acquire(Acquire { object: Some(file.into()) }));
    let (event, body) = two.event();
    assert!(matches!(body, Event::Drop(drop) if drop.inos == [FILE]));
    assert!(!one.is_answered(asked));
    two.ack(event, &[]);
    assert!(matches!(one.receive(asked), Answer::Acquired(acquired) if acquired.owned));
    let (records, apply) = applied(one.acked());
    assert_eq!((apply.own, records.len()), (vec![ObjectMessage::from(file)], 1));
    assert!(two.enter(1, 0).unwrap().dirs[0].entries[0].inode.is_none());
    let written = put(FILE, file_in(1, Content::Inline(b"straw".to_vec().into()), 5));
    one.commit(2, &[written], (2, 0)).unwrap();
    // A directory that others read is not given away.
    let acquired = two.ask(Ask::Acquire(Acquire { object: Some(ROOT.into()) })).unwrap();
    assert!(matches!(acquired, Answer::Acquired(acquired) if !acquired.owned));
    running.shutdown();
}

#[test]
fn sessions_are_listed_evicted_and_counted() {
    let (_folder, running, mut one, mut two) = readers();
    let mut admin = Client::connect(running.address);
    let list = || Ask::ListClients(ListClients { volume: "vol".into() });
    let Ok(Answer::Clients(listed)) = admin.ask(list()) else { panic!() };
    let reads: Vec<_> =
        listed.clients.iter().map(|client| (client.session, client.read_directories)).collect();
    assert_eq!(reads, [(1, 1), (2, 1)]);
    let evict = |session| Ask::EvictClient(EvictClient { volume: "vol".into(), session });
    assert_eq!(code(&admin.ask(evict(9)).unwrap_err()), FailureCode::NotFound);
    let busy =
        admin.ask(Ask::DeleteVolume(DeleteVolume { name: "vol".into(), snapshots: false })).unwrap_err();
    assert_eq!(code(&busy), FailureCode::Busy);
    let asked = one.send(create("new"));
    two.event();
    assert!(matches!(admin.ask(evict(2)), Ok(Answer::Clients(gone)) if gone.clients.len() == 1));
    assert_eq!(changed(one.receive(asked)).error, 0);
    assert!(matches!(two.receive(0), Answer::Failed(failed) if code(&failed) == FailureCode::SessionEnded));
    let Ok(Answer::Stats(stats)) = admin.ask(Ask::Stats(StatsRequest {})) else { panic!() };
    for key in ["\"changes_executed\":1", "\"evictions\":1", "\"recall\":1", "\"CHANGE\"", "\"ACK\""] {
        assert!(stats.json.contains(key), "{key} in {}", stats.json);
    }
    running.shutdown();
}
