use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use hayloft_model::locks::LAST_BYTE;
use hayloft_wire::ServerMessage;
use hayloft_wire::frame::Opener;
use tokio::io::AsyncReadExt;
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpListener, TcpStream};

use super::*;

/// A session's connection, seen from the client.
struct Client {
    session: SessionId,
    replies: Replies,
    incoming: OwnedReadHalf,
    opener: Opener,
    buffer: BytesMut,
}

const A: u64 = 1;
const B: u64 = 2;

impl Client {
    async fn new(session: u64) -> Client {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (server, _) = listener.accept().await.unwrap();
        let (replies, _) = Replies::start(
            hayloft_transport::Outgoing::Plain(server.into_split().1),
            &Arc::default(),
            &Arc::default(),
            None,
        );
        // The other half only has to stay open.
        let (incoming, outgoing) = client.into_split();
        outgoing.forget();
        Client {
            session: SessionId(session),
            replies,
            incoming,
            opener: Opener::default(),
            buffer: BytesMut::new(),
        }
    }

    /// Asks; the answer if it comes at once.
    fn ask(&self, locks: &Locks, request: u64, lock: LockMessage, wait: bool) -> Option<LockAnswer> {
        let ask = LockRequest { lock: Some(lock), wait, test: false };
        locks.request(self.session, request, ask, &self.replies, &HashSet::new()).unwrap()
    }

    /// The next answer that comes later.
    async fn next(&mut self) -> (u64, LockAnswer) {
        let read = async {
            loop {
                if let Some(message) = self.opener.take::<ServerMessage>(&mut self.buffer).unwrap() {
                    match message.body {
                        Some(Answer::Locked(answer)) => return (message.request, answer),
                        other => panic!("{other:?}"),
                    }
                }
                self.incoming.read_buf(&mut self.buffer).await.unwrap();
            }
        };
        tokio::time::timeout(Duration::from_secs(10), read).await.expect("an answer")
    }
}

fn lock(owner: u64, kind: LockKind) -> LockMessage {
    let end = hayloft_model::locks::LAST_BYTE;
    LockMessage { ino: 20, owner, end, kind: kind as u32, pid: 7, ..LockMessage::default() }
}

const SET: Option<LockAnswer> = Some(LockAnswer { conflict: None, deadlock: false });

#[tokio::test]
async fn those_who_wait_are_answered_when_it_is_their_turn() {
    let locks = Locks::default();
    let (a, mut b) = (Client::new(A).await, Client::new(B).await);
    assert_eq!(a.ask(&locks, 1, lock(1, LockKind::Write), false), SET);
    let blocked = b.ask(&locks, 1, lock(1, LockKind::Read), false).unwrap().conflict.unwrap();
    assert_eq!((blocked.kind, blocked.pid), (LockKind::Write as u32, 0), "a number means nothing elsewhere");
    assert_eq!(a.ask(&locks, 2, lock(2, LockKind::Read), false).unwrap().conflict.unwrap().pid, 7);
    assert_eq!(b.ask(&locks, 2, lock(1, LockKind::Read), true), None);
    assert_eq!(b.ask(&locks, 3, lock(2, LockKind::Write), true), None);
    locks.cancel(b.session, 3);
    let (request, answer) = b.next().await;
    assert!(request == 3 && answer.conflict == Some(LockMessage::default()));
    assert_eq!(locks.take_needed(), [a.session].into());
    assert_eq!(a.ask(&locks, 3, lock(1, LockKind::Unlock), false), SET);
    assert_eq!(b.next().await, (2, LockAnswer::default()));
    assert_eq!((locks.count(a.session), locks.count(b.session)), (0, 1));
    locks.cancel(b.session, 2);
    assert_eq!(locks.count(b.session), 1, "too late to give up");
}

#[tokio::test]
async fn who_waits_before_another_one_is_in_its_way() {
    let locks = Locks::default();
    let clients = [Client::new(A).await, Client::new(B).await, Client::new(3).await];
    let asks = |at: usize| clients[at].ask(&locks, 1, lock(at as u64, LockKind::Write), true);
    assert_eq!(asks(0), SET);
    assert_eq!((asks(1), locks.take_needed()), (None, [SessionId(A)].into()));
    assert_eq!(clients[1].ask(&locks, 2, lock(9, LockKind::Write), true), None);
    assert_eq!(locks.take_needed(), [SessionId(A)].into(), "nobody is in the own way");
    assert_eq!((asks(2), locks.take_needed()), (None, [SessionId(A), SessionId(B)].into()));
}

#[tokio::test]
async fn the_end_of_a_session_frees_what_it_held() {
    let locks = Locks::default();
    let (a, mut b) = (Client::new(A).await, Client::new(B).await);
    a.ask(&locks, 1, lock(1, LockKind::Write), false);
    assert_eq!(b.ask(&locks, 1, lock(1, LockKind::Write), true), None);
    assert_eq!(a.ask(&locks, 2, lock(2, LockKind::Write), true), None);
    locks.end_session(a.session);
    assert_eq!(b.next().await, (1, LockAnswer::default()));
    b.ask(&locks, 2, lock(1, LockKind::Unlock), false);
    assert_eq!(locks.count(a.session), 0, "nobody is left to wait");
}

#[tokio::test]
async fn after_a_restart_nobody_gets_a_lock_before_all_have_claimed() {
    let locks = Locks::default();
    locks.await_claims([SessionId(A), SessionId(B), SessionId(3)]);
    let (a, mut b) = (Client::new(A).await, Client::new(B).await);
    locks.claim(b.session, &[]).unwrap();
    assert_eq!(b.ask(&locks, 1, lock(1, LockKind::Write), false), None);
    assert_eq!(b.ask(&locks, 2, LockMessage { ino: 21, ..lock(1, LockKind::Write) }, false), None);
    assert_eq!(b.ask(&locks, 3, lock(9, LockKind::Unlock), false), SET);
    locks.claim(a.session, &[lock(1, LockKind::Write)]).unwrap();
    assert_eq!(locks.count(b.session), 0, "the third one may hold them");
    assert_eq!(locks.take_needed(), [SessionId(3)].into());
    locks.end_session(SessionId(3));
    let (request, answer) = b.next().await;
    assert!(request == 1 && answer.conflict.is_some());
    assert_eq!(b.next().await, (2, LockAnswer::default()));
    // On a new connection it holds what it claims, and what it waited for is asked again.
    assert_eq!(b.ask(&locks, 4, lock(1, LockKind::Write), true), None);
    locks.claim(b.session, &[]).unwrap();
    assert_eq!(a.ask(&locks, 1, lock(1, LockKind::Unlock), false), SET);
    assert_eq!((locks.count(a.session), locks.count(b.session)), (0, 0));
    assert!(locks.claim(b.session, &[LockMessage { kind: 9, ..lock(1, LockKind::Read) }]).is_err());
}

#[tokio::test]
async fn locks_that_are_held_are_bounded_for_each_session() {
    let locks = Locks::default();
    let (one, two) = (Client::new(A).await, Client::new(B).await);
    let set = |client: &Client, ino, start, end, kind| {
        let lock = LockMessage { ino, owner: 1, start, end, kind: kind as u32, ..LockMessage::default() };
        let ask = LockRequest { lock: Some(lock), wait: false, test: false };
        locks.request(client.session, 1, ask, &client.replies, &HashSet::new())
    };
    let taken = (1..).take_while(|ino| set(&one, *ino, 0, 99, LockKind::Write).is_ok()).count();
    assert!((SESSION_LOCKS_MAX - 2..=SESSION_LOCKS_MAX).contains(&taken), "{taken}");
    // Another one is served, and a part is not freed, which would make two of one.
    assert!(set(&two, 1 << 40, 0, 99, LockKind::Write).is_ok());
    assert!(set(&one, 1, 10, 20, LockKind::Unlock).is_err());
    for ino in 1..10 {
        set(&one, ino, 0, LAST_BYTE, LockKind::Unlock).unwrap();
    }
    set(&one, 1, 0, 99, LockKind::Write).unwrap();
    let claim = vec![
        LockMessage { ino: 1, end: 9, ..LockMessage::default() };
        SESSION_LOCKS_MAX + 2 * SESSION_WAITS_MAX + 1
    ];
    assert!(locks.claim(two.session, &claim).is_err());
}

#[tokio::test]
async fn locks_that_are_held_are_bounded_for_all_sessions_and_each_may_have_some() {
    let locks = Locks::default();
    let set = |client: &Client, at: u64| {
        let range = LockMessage { ino: 1, owner: 1, start: 2 * at, end: 2 * at, ..LockMessage::default() };
        let lock = LockMessage { kind: LockKind::Read as u32, ..range };
        let ask = LockRequest { lock: Some(lock), wait: false, test: false };
        locks.request(client.session, 1, ask, &client.replies, &HashSet::new())
    };
    let greedy = (LOCKS_MAX / SESSION_LOCKS_MAX) as u64 + 1;
    let mut taken = 0;
    for session in 0..greedy {
        let client = Client::new(100 + session).await;
        taken += (0..).take_while(|at| set(&client, *at).is_ok()).count();
    }
    assert!((LOCKS_MAX - 2 * greedy as usize..=LOCKS_MAX + LOCKS_FREE).contains(&taken), "{taken}");
    let modest = Client::new(A).await;
    assert_eq!((0..).take_while(|at| set(&modest, *at).is_ok()).count(), LOCKS_FREE - 1);
    // What one has it can give up all the same, unless that makes two of it.
    let unlock = |client: &Client, start: u64, end: u64| {
        let range = LockMessage { ino: 1, owner: 1, start, end, ..LockMessage::default() };
        let lock = LockMessage { kind: LockKind::Unlock as u32, ..range };
        let ask = LockRequest { lock: Some(lock), wait: false, test: false };
        locks.request(client.session, 1, ask, &client.replies, &HashSet::new())
    };
    unlock(&modest, 0, 0).unwrap();
    unlock(&modest, 4, 9).unwrap();
    // After a restart all come back, whoever has come before them.
    let locks = Locks::default();
    let lock = |at| LockMessage { ino: 2, owner: 1, start: 2 * at, end: 2 * at, ..LockMessage::default() };
    for session in 0..greedy {
        let claimed = (0..SESSION_LOCKS_MAX as u64).map(lock);
        let claimed = claimed.map(|lock| LockMessage { kind: LockKind::Read as u32, ..lock });
        locks.claim(SessionId(200 + session), &claimed.collect::<Vec<_>>()).unwrap();
    }
}
