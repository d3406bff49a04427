//! Keeps a caller on its core.
//!
//! An answer wakes its caller while the queue's thread still runs on the caller's core. The kernel's scheduler
//! then prefers another core that is idle, and wakes that; from there the next request goes to another queue,
//! and so on: the caller changes its core with each request. On a virtual machine waking a halted core costs
//! several times what the request does (measured on two cores: creating and writing a file 165 us instead of 65).
//!
//! So a queue that sees callers come and go stays awake, yielding, while requests are being made on other cores:
//! its core is not idle, and the caller stays where it is. It gives up as soon as something else wants to run
//! there, and when requests pause. With many cores some are always idle, and nothing is tried.
#![allow(unsafe_code)]

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use io_uring::IoUring;
use io_uring::squeue::Entry128;

/// With more cores than this some are always idle.
const CORES_MAX: usize = 4;
/// Requests further apart than this are no burst: nobody would notice.
const PAUSE: Duration = Duration::from_micros(200);
/// A yield that takes longer has let something else run.
const LONG_YIELD: Duration = Duration::from_micros(50);
/// How long a core that has something else to do is left alone.
const LEFT_ALONE: Duration = Duration::from_millis(2);
/// Score of a request whose caller was elsewhere before; the others count one down.
const MOVED: u32 = 8;
const SCORE_MAX: u32 = 256;
const SCORE_HIGH: u32 = 64;

const CALLERS: usize = 256;
const GETEVENTS: u32 = 1;

/// What all queues know of callers.
pub(super) struct Trace {
    begun: Instant,
    /// By the caller's number: the queue of its last request, counted from 1.
    last_queue: [AtomicU16; CALLERS],
    /// When any queue had a request last, nanoseconds.
    last_request: AtomicU64,
}

impl Trace {
    pub(super) fn new() -> Trace {
        Trace {
            begun: Instant::now(),
            last_queue: [const { AtomicU16::new(0) }; CALLERS],
            last_request: AtomicU64::new(0),
        }
    }

    fn nanos(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }
}

/// One queue's part.
pub(super) struct Stay {
    trace: Option<Arc<Trace>>,
    queue: u16,
    score: u32,
    left_alone_until: Instant,
}

impl Stay {
    pub(super) fn new(trace: &Arc<Trace>, queue: usize, queues: usize) -> Stay {
        Stay {
            trace: (2..=CORES_MAX).contains(&queues).then(|| Arc::clone(trace)),
            queue: queue as u16 + 1,
            score: 0,
            left_alone_until: Instant::now(),
        }
    }

    /// A request has come from `caller`.
    pub(super) fn note(&mut self, caller: u32) {
        let Some(trace) = &self.trace else { return };
        trace.last_request.store(trace.nanos(), Ordering::Relaxed);
        let before = trace.last_queue[caller as usize % CALLERS].swap(self.queue, Ordering::Relaxed);
        self.score = match before {
            0 => self.score,
            before if before == self.queue => self.score.saturating_sub(1),
            _ => (self.score + MOVED).min(SCORE_MAX),
        };
    }

    /// Before the queue's thread sleeps: stays awake for as long as it keeps a caller from moving here.
    pub(super) fn awake(&mut self, uring: &mut IoUring<Entry128>) -> io::Result<()> {
        let Some(trace) = self.trace.as_ref().filter(|_| self.score >= SCORE_HIGH) else { return Ok(()) };
        let mut now = Instant::now();
        if now < self.left_alone_until {
            return Ok(());
        }
        uring.submit()?;
        loop {
            // SAFETY: no argument is passed; this only lets completions that are due appear.
            unsafe { uring.submitter().enter::<libc::sigset_t>(0, 0, GETEVENTS, None)? };
            if !uring.completion().is_empty() {
                return Ok(());
            }
            let silent = trace.nanos().saturating_sub(trace.last_request.load(Ordering::Relaxed));
            if u128::from(silent) > PAUSE.as_nanos() {
                return Ok(());
            }
            std::thread::yield_now();
            let after = Instant::now();
            if after - now > LONG_YIELD {
                self.left_alone_until = after + LEFT_ALONE;
                return Ok(());
            }
            now = after;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_callers_that_move_raise_the_score() {
        let trace = Arc::new(Trace::new());
        let mut queues = [Stay::new(&trace, 0, 2), Stay::new(&trace, 1, 2)];
        for _ in 0..1000 {
            queues[0].note(7);
            queues[1].note(8);
        }
        assert_eq!((queues[0].score, queues[1].score), (0, 0));
        for request in 0..100 {
            queues[request % 2].note(7);
        }
        assert!(queues.iter().all(|queue| queue.score >= SCORE_HIGH));
        for _ in 0..=SCORE_MAX + MOVED {
            queues[0].note(7);
        }
        assert_eq!(queues[0].score, 0);
    }

    #[test]
    fn many_cores_are_let_be() {
        let trace = Arc::new(Trace::new());
        assert!(Stay::new(&trace, 0, 64).trace.is_none());
        assert!(Stay::new(&trace, 0, 1).trace.is_none());
    }
}
