//! Waiting until answers that transport threads have begun are with the kernel.
//!
//! An answer that was made before something changed may still be on its way when the kernel is told of the change, and
//! then undo that. Who tells the kernel waits for such answers first.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How long a transport thread is waited for: handlers do not block there, so this is only for one that has died.
const PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_micros(20);

/// A transport thread, as others see it.
#[derive(Default)]
pub(crate) struct Turn {
    /// Odd while a message is handled and its answer not written (threads that write answers one by one).
    busy: AtomicU64,
    /// How often somebody wanted all answers submitted, and up to which of that they are (threads that gather).
    wanted: AtomicU64,
    done: AtomicU64,
    /// Memory of slots is to be given back (threads that gather).
    spare: AtomicBool,
    ended: AtomicBool,
    wake: Option<Box<dyn Fn() + Send + Sync>>,
}

impl Turn {
    /// Of a thread that gathers answers; `wake` makes it look at [`Turn::wanted`].
    pub(crate) fn gathering(wake: impl Fn() + Send + Sync + 'static) -> Turn {
        Turn { wake: Some(Box::new(wake)), ..Turn::default() }
    }

    /// A message is about to be handled, or its answer is written.
    pub(crate) fn step(&self) {
        self.busy.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether answers have to be submitted now; [`Turn::submitted`] follows with what it returned.
    pub(crate) fn wanted(&self) -> Option<u64> {
        let wanted = self.wanted.load(Ordering::SeqCst);
        (wanted != self.done.load(Ordering::Relaxed)).then_some(wanted)
    }

    /// All answers that were made before are with the kernel.
    pub(crate) fn submitted(&self, wanted: u64) {
        self.done.store(wanted, Ordering::SeqCst);
    }

    /// Whether memory is to be given back that no request is in; says so once.
    pub(crate) fn is_spare_wanted(&self) -> bool {
        self.spare.swap(false, Ordering::Relaxed)
    }

    /// It cannot be done now: asks again.
    pub(crate) fn want_spare(&self) {
        self.spare.store(true, Ordering::Relaxed);
    }

    /// The thread ends.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
    }

    fn wait(&self, passed: impl Fn() -> bool) {
        let begun = Instant::now();
        while !passed() && !self.ended.load(Ordering::SeqCst) && begun.elapsed() < PATIENCE {
            std::thread::sleep(PAUSE);
        }
    }
}

/// All transport threads of a session.
#[derive(Clone, Default)]
pub(crate) struct Turns(Arc<Mutex<Vec<Arc<Turn>>>>);

impl Turns {
    pub(crate) fn add(&self, turn: Turn) -> Arc<Turn> {
        let turn = Arc::new(turn);
        let mut turns = self.0.lock();
        turns.retain(|turn| !turn.ended.load(Ordering::Relaxed));
        turns.push(Arc::clone(&turn));
        turn
    }

    /// Has all threads give back memory that no request is in.
    pub(crate) fn release_memory(&self) {
        for turn in self.0.lock().iter() {
            if let Some(wake) = &turn.wake {
                turn.want_spare();
                wake();
            }
        }
    }

    /// Waits until every answer that was begun before is with the kernel.
    pub(crate) fn settle(&self) {
        let turns = self.0.lock().clone();
        let asked: Vec<(Arc<Turn>, u64)> = turns
            .into_iter()
            .map(|turn| {
                let mark = match &turn.wake {
                    Some(wake) => {
                        let wanted = turn.wanted.fetch_add(1, Ordering::SeqCst) + 1;
                        wake();
                        wanted
                    }
                    None => turn.busy.load(Ordering::SeqCst),
                };
                (turn, mark)
            })
            .collect();
        for (turn, mark) in asked {
            if turn.wake.is_some() {
                turn.wait(|| turn.done.load(Ordering::SeqCst) >= mark);
            } else {
                turn.wait(|| mark.is_multiple_of(2) || turn.busy.load(Ordering::SeqCst) != mark);
            }
        }
    }
}

impl std::fmt::Debug for Turns {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Turns").field(&self.0.lock().len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_begun_before_are_waited_for() {
        let turns = Turns::default();
        let one_by_one = turns.add(Turn::default());
        let woken = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&woken);
        let gathering = turns.add(Turn::gathering(move || {
            count.fetch_add(1, Ordering::SeqCst);
        }));
        one_by_one.step();
        let settled = Arc::new(AtomicBool::new(false));
        let (waiting, told) = (turns.clone(), Arc::clone(&settled));
        let thread = std::thread::spawn(move || {
            waiting.settle();
            told.store(true, Ordering::SeqCst);
        });
        while gathering.wanted().is_none() {
            std::thread::yield_now();
        }
        assert!(!settled.load(Ordering::SeqCst));
        one_by_one.step();
        assert!(!settled.load(Ordering::SeqCst));
        gathering.submitted(gathering.wanted().expect("just seen"));
        thread.join().unwrap();
        assert_eq!(woken.load(Ordering::SeqCst), 1);
        assert!(gathering.wanted().is_none());
        gathering.end();
        turns.settle();
    }
}
