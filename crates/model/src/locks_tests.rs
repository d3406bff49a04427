use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const FILE: Ino = Ino(20);

fn owner(number: u64) -> Owner {
    Owner { session: SessionId(1 + number % 2), id: 10 + number }
}

fn range(number: u64, start: u64, end: u64, mode: Mode) -> Lock {
    let (family, owner) = (Family::Posix, owner(number));
    Lock { ino: FILE, family, owner, start, end, mode, pid: number as u32, of_file: false }
}

fn whole(number: u64, mode: Mode) -> Lock {
    Lock { family: Family::Flock, ..range(number, 0, LAST_BYTE, mode) }
}

use Mode::{Exclusive, Shared};

#[test]
fn ranges_split_and_merge() {
    let mut locks = Locks::default();
    assert_eq!(locks.set(range(0, 0, 99, Exclusive), false), Answer::Set);
    locks.unset(&range(0, 40, 59, Shared));
    let parts = |locks: &Locks| locks.held().map(|lock| (lock.start, lock.end)).collect::<Vec<_>>();
    assert_eq!(parts(&locks), [(0, 39), (60, 99)]);
    assert_eq!(locks.set(range(1, 40, 59, Exclusive), false), Answer::Set);
    assert_eq!(locks.set(range(1, 50, 60, Shared), false), Answer::Blocked(range(0, 60, 99, Exclusive)));
    locks.release(FILE, Family::Posix, owner(1));
    assert_eq!(locks.set(range(0, 40, 59, Exclusive), false), Answer::Set);
    assert_eq!(parts(&locks), [(0, 99)]);
    assert_eq!(locks.set(range(0, 10, LAST_BYTE, Shared), false), Answer::Set);
    assert_eq!(parts(&locks), [(0, 9), (10, LAST_BYTE)]);
    assert_eq!(locks.test(&range(1, 5, 15, Shared)), Some(range(0, 0, 9, Exclusive)));
    assert_eq!(locks.test(&range(1, 10, 15, Shared)), None);
}

#[test]
fn the_families_do_not_see_each_other() {
    let mut locks = Locks::default();
    assert_eq!(locks.set(range(0, 0, LAST_BYTE, Exclusive), false), Answer::Set);
    assert_eq!(locks.set(whole(1, Exclusive), false), Answer::Set);
    assert!(matches!(locks.set(whole(2, Shared), false), Answer::Blocked(_)));
    assert_eq!((locks.count(SessionId(1)), locks.count(SessionId(2))), (1, 1));
}

#[test]
fn those_who_wait_are_served_in_order() {
    let mut locks = Locks::default();
    locks.set(whole(0, Exclusive), false);
    let waits: Vec<Wait> = [(1, Shared), (2, Shared), (3, Exclusive), (4, Shared)]
        .map(|(number, mode)| match locks.set(whole(number, mode), true) {
            Answer::Waits(wait) => wait,
            other => panic!("{other:?}"),
        })
        .into();
    locks.unset(&whole(0, Exclusive));
    // Nobody waits for what nobody holds: the last one shares with the first two.
    assert_eq!(locks.take_granted(), [waits[0], waits[1], waits[3]]);
    assert!(!locks.cancel(waits[1]));
    for number in [1, 2] {
        locks.unset(&whole(number, Shared));
    }
    assert!(locks.take_granted().is_empty());
    locks.end_session(owner(4).session);
    assert_eq!(locks.take_granted(), [waits[2]]);
    locks.end_owner(owner(3));
    assert_eq!((locks.held().count(), locks.waiting().count()), (0, 0));
    assert!(locks.queues.is_empty() && locks.waits.is_empty());
}

#[test]
fn flock_gives_up_the_old_mode_first() {
    let mut locks = Locks::default();
    locks.set(whole(0, Shared), false);
    locks.set(whole(1, Shared), false);
    assert_eq!(locks.set(whole(0, Exclusive), false), Answer::Blocked(whole(1, Shared)));
    assert!(!locks.holds(FILE, Family::Flock, owner(0)));
    let Answer::Waits(wait) = locks.set(whole(0, Exclusive), true) else { panic!() };
    // Two who want more than they share do not block each other for ever.
    assert_eq!(locks.set(whole(1, Exclusive), true), Answer::Set);
    locks.unset(&whole(1, Shared));
    assert_eq!(locks.take_granted(), [wait]);
}

#[test]
fn a_lock_that_gets_weaker_lets_others_in() {
    let mut locks = Locks::default();
    locks.set(range(0, 0, 9, Exclusive), false);
    let Answer::Waits(wait) = locks.set(range(1, 5, 5, Shared), true) else { panic!() };
    locks.set(range(0, 0, 9, Shared), false);
    assert_eq!(locks.take_granted(), [wait]);
}

#[test]
fn a_copy_takes_what_it_is_told() {
    let mut locks = Locks::default();
    for number in [0, 1] {
        locks.note(whole(number, Exclusive));
        assert!(locks.holds(FILE, Family::Flock, owner(number)));
    }
    locks.unset(&whole(0, Exclusive));
    assert_eq!(locks.held().copied().collect::<Vec<_>>(), [whole(1, Exclusive)]);
}

#[test]
fn deadlocks_are_found_across_sessions_and_files() {
    let mut locks = Locks::default();
    let file = |lock: Lock, ino| Lock { ino: Ino(ino), ..lock };
    for number in 0..3 {
        locks.set(file(range(number, 0, 9, Exclusive), number), false);
    }
    assert!(matches!(locks.set(file(range(0, 5, 5, Exclusive), 1), true), Answer::Waits(_)));
    let Answer::Waits(second) = locks.set(file(range(1, 5, 5, Exclusive), 2), true) else { panic!() };
    let third = file(range(2, 5, 5, Shared), 0);
    assert_eq!(locks.set(third, true), Answer::Deadlock);
    assert!(matches!(locks.set(Lock { of_file: true, ..third }, true), Answer::Waits(_)));
    assert!(locks.cancel(second));
    assert!(matches!(locks.set(third, true), Answer::Waits(_)));
}

#[test]
fn a_session_claims_what_it_holds_and_nothing_else() {
    let mut locks = Locks::default();
    locks.set(range(0, 0, 9, Exclusive), false);
    let Answer::Waits(wait) = locks.set(range(1, 0, 0, Shared), true) else { panic!() };
    let refused = locks.claim(SessionId(1), [range(0, 5, 9, Exclusive), range(2, 20, 29, Shared)]);
    assert!(refused.is_empty());
    assert_eq!(locks.take_granted(), [wait]);
    let claimed = [range(0, 0, 9, Exclusive), range(2, 20, 29, Shared)];
    assert_eq!(locks.claim(SessionId(1), claimed), [range(0, 0, 9, Exclusive)]);
    assert_eq!(locks.count(SessionId(1)), 1);
}

#[test]
fn who_holds_and_waits_for_very_much_holds_up_nobody() {
    const HELD: u64 = 30_000;
    const WAITS: u64 = 1000;
    let mut locks = Locks::default();
    let byte = |number, at| range(number, at, at, Exclusive);
    for at in 0..HELD {
        assert_eq!(locks.set(byte(0, 2 * at), false), Answer::Set);
        assert_eq!(locks.set(byte(1, 2 * at + 1), false), Answer::Set);
    }
    let waits: Vec<Wait> = (0..WAITS)
        .map(|at| match locks.set(byte(0, 2 * at + 1), true) {
            Answer::Waits(wait) => wait,
            other => panic!("{other:?}"),
        })
        .collect();
    // Who waits for the first one waits for all that this one waits for.
    for number in 2..WAITS {
        assert!(matches!(locks.set(byte(number, 2 * number), true), Answer::Waits(_)));
    }
    assert_eq!(locks.set(byte(1, 0), true), Answer::Deadlock);
    for at in 0..WAITS {
        locks.unset(&byte(1, 2 * at + 1));
    }
    assert_eq!(locks.take_granted(), waits);
    // The first one's have become one lock.
    assert_eq!((locks.count(SessionId(1)), locks.count(SessionId(2))), (29_000, 29_000));
    locks.end_session(SessionId(1));
    locks.end_session(SessionId(2));
    assert_eq!((locks.held().count(), locks.waiting().count()), (0, 0));
}

const BYTES: usize = 12;
const OWNERS: u64 = 4;

/// The same rules, byte by byte and without any index.
#[derive(Default)]
struct Naive {
    bytes: HashMap<(u64, Family, Owner, usize), Mode>,
    waiting: Vec<(Wait, Lock)>,
}

impl Naive {
    fn blockers(&self, lock: &Lock) -> Vec<Owner> {
        let mut owners: Vec<Owner> = self
            .bytes
            .iter()
            .filter(|((ino, family, owner, byte), mode)| {
                (*ino, *family) == (lock.ino.0, lock.family)
                    && *owner != lock.owner
                    && (lock.start..=lock.end).contains(&(*byte as u64))
                    && (**mode == Exclusive || lock.mode == Exclusive)
            })
            .map(|((_, _, owner, _), _)| *owner)
            .collect();
        owners.sort();
        owners.dedup();
        owners
    }

    fn fill(&mut self, lock: &Lock, mode: Option<Mode>) {
        for byte in (0..BYTES).filter(|byte| (lock.start..=lock.end).contains(&(*byte as u64))) {
            let key = (lock.ino.0, lock.family, lock.owner, byte);
            match mode {
                Some(mode) => self.bytes.insert(key, mode),
                None => self.bytes.remove(&key),
            };
        }
    }

    fn wake(&mut self) -> Vec<Wait> {
        let mut granted = Vec::new();
        while let Some(at) = self.waiting.iter().position(|(_, lock)| self.blockers(lock).is_empty()) {
            let (wait, lock) = self.waiting.remove(at);
            self.fill(&lock, Some(lock.mode));
            granted.push(wait);
        }
        granted
    }

    fn would_wait_for_itself(&self, lock: &Lock) -> bool {
        let mut reached: Vec<Owner> = self.blockers(lock);
        loop {
            let more: Vec<Owner> = self
                .waiting
                .iter()
                .filter(|(_, waiting)| waiting.family == Family::Posix && reached.contains(&waiting.owner))
                .flat_map(|(_, waiting)| self.blockers(waiting))
                .filter(|owner| !reached.contains(owner))
                .collect();
            if more.is_empty() {
                return reached.contains(&lock.owner);
            }
            reached.extend(more);
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Set(Lock, bool),
    Unset(Lock),
    Cancel(usize),
    EndOwner(u64),
    EndSession(u64),
    Release(u64, u64),
    Claim(u64, Vec<Lock>),
}

fn any_lock() -> impl Strategy<Value = Lock> {
    let bytes = BYTES as u64;
    (0..OWNERS, 0..bytes, 0..bytes, any::<bool>(), any::<bool>(), 0..2u64).prop_map(
        move |(number, a, b, exclusive, flock, ino)| {
            let mode = if exclusive { Exclusive } else { Shared };
            let lock = if flock { whole(number, mode) } else { range(number, a.min(b), a.max(b), mode) };
            Lock { ino: Ino(ino), ..lock }
        },
    )
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (any_lock(), any::<bool>()).prop_map(|(lock, wait)| Step::Set(lock, wait)),
        4 => any_lock().prop_map(Step::Unset),
        1 => (0..8usize).prop_map(Step::Cancel),
        1 => (0..OWNERS).prop_map(Step::EndOwner),
        1 => (1..3u64).prop_map(Step::EndSession),
        1 => (0..OWNERS, 0..2u64).prop_map(|(number, ino)| Step::Release(number, ino)),
        1 => (1..3u64, prop::collection::vec(any_lock(), 0..4)).prop_map(|(session, locks)| {
            let of_session = |lock: &Lock| lock.owner.session == SessionId(session);
            Step::Claim(session, locks.into_iter().filter(of_session).collect())
        }),
    ]
}

/// The rules without an index.
impl Lock {
    fn overlaps(&self, other: &Lock) -> bool {
        self.start <= other.end && other.start <= self.end
    }

    fn touches(&self, other: &Lock) -> bool {
        self.start <= other.end + 1 && other.start <= self.end + 1
    }

    fn conflicts(&self, other: &Lock) -> bool {
        self.key() == other.key()
            && self.owner != other.owner
            && self.overlaps(other)
            && (self.mode == Exclusive || other.mode == Exclusive)
    }
}

fn check_form(locks: &Locks) {
    for queue in locks.queues.values() {
        assert!(!queue.held.is_empty(), "somebody waits for nothing: {queue:?}");
        for (at, lock) in queue.held.iter().enumerate() {
            assert!(lock.is_valid());
            for other in queue.held.iter().skip(at + 1) {
                assert!(!lock.conflicts(other));
                let same = lock.owner == other.owner;
                assert!(
                    !same || (!lock.overlaps(other) && (lock.mode != other.mode || !lock.touches(other)))
                );
            }
        }
        for lock in queue.waiting.values() {
            assert!(queue.obstacle(lock).is_some(), "waits without need: {lock:?}");
        }
    }
    assert_eq!(locks.waits.len(), locks.waiting().count());
    let mut counts = BTreeMap::new();
    locks.held().for_each(|lock| *counts.entry(lock.owner.session).or_default() += 1);
    assert_eq!((&locks.counts, locks.total), (&counts, locks.held().count()));
    let by_owner = locks.waits.iter().map(|(wait, (_, owner))| (*owner, *wait));
    assert_eq!(locks.waits_of, by_owner.collect());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn random_histories_match_a_table_of_bytes(steps in prop::collection::vec(any_step(), 1..60)) {
        let (mut locks, mut naive) = (Locks::default(), Naive::default());
        for step in steps {
            let mut granted = Vec::new();
            match step {
                Step::Set(lock, wait) => {
                    let upgrade = lock.family == Family::Flock
                        && naive.bytes.get(&(lock.ino.0, lock.family, lock.owner, 0)).is_some_and(|mode| *mode != lock.mode);
                    if upgrade {
                        naive.fill(&lock, None);
                    }
                    let blockers = naive.blockers(&lock);
                    match locks.set(lock, wait) {
                        Answer::Set => {
                            prop_assert!(blockers.is_empty());
                            naive.fill(&lock, Some(lock.mode));
                            granted = naive.wake();
                        }
                        Answer::Blocked(by) => {
                            prop_assert!(!wait && blockers.contains(&by.owner) && by.conflicts(&lock));
                            granted = naive.wake();
                        }
                        Answer::Deadlock => {
                            prop_assert!(wait && lock.family == Family::Posix && naive.would_wait_for_itself(&lock));
                        }
                        Answer::Waits(number) => {
                            prop_assert!(wait && !blockers.is_empty());
                            prop_assert!(lock.family == Family::Flock || !naive.would_wait_for_itself(&lock));
                            granted = naive.wake();
                            naive.waiting.push((number, lock));
                        }
                    }
                }
                Step::Unset(lock) => {
                    locks.unset(&lock);
                    naive.fill(&lock, None);
                    granted = naive.wake();
                }
                Step::Cancel(at) => {
                    let Some((wait, _)) = naive.waiting.get(at).copied() else { continue };
                    naive.waiting.remove(at);
                    prop_assert!(locks.cancel(wait));
                }
                Step::EndOwner(number) => {
                    locks.end_owner(owner(number));
                    naive.bytes.retain(|(_, _, other, _), _| *other != owner(number));
                    naive.waiting.retain(|(_, lock)| lock.owner != owner(number));
                    granted = naive.wake();
                }
                Step::EndSession(session) => {
                    locks.end_session(SessionId(session));
                    naive.bytes.retain(|(_, _, other, _), _| other.session != SessionId(session));
                    naive.waiting.retain(|(_, lock)| lock.owner.session != SessionId(session));
                    granted = naive.wake();
                }
                Step::Release(number, ino) => {
                    locks.release(Ino(ino), Family::Posix, owner(number));
                    naive.fill(&Lock { ino: Ino(ino), ..range(number, 0, LAST_BYTE, Shared) }, None);
                    granted = naive.wake();
                }
                Step::Claim(session, claimed) => {
                    let id = SessionId(session);
                    naive.bytes.retain(|(_, _, other, _), _| other.session != id);
                    naive.waiting.retain(|(_, lock)| lock.owner.session != id);
                    let refused = locks.claim(id, claimed.clone());
                    for lock in claimed {
                        let blocked = !naive.blockers(&lock).is_empty();
                        prop_assert_eq!(blocked, refused.contains(&lock));
                        if !blocked {
                            naive.fill(&lock, Some(lock.mode));
                        }
                    }
                    granted = naive.wake();
                }
            }
            let mut got = locks.take_granted();
            got.sort();
            granted.sort();
            prop_assert_eq!(got, granted);
            check_form(&locks);
            let mut bytes = HashMap::new();
            for lock in locks.held() {
                for byte in (0..BYTES).filter(|byte| (lock.start..=lock.end).contains(&(*byte as u64))) {
                    bytes.insert((lock.ino.0, lock.family, lock.owner, byte), lock.mode);
                }
            }
            prop_assert_eq!(&bytes, &naive.bytes);
        }
    }
}
