//! Who flushes: one at a time, for all who wait then.
//!
//! Nobody stands in line. In a line each one would have to be woken by the one before it, only to find that it is durable already.

use tokio::sync::{Mutex, MutexGuard, Notify};

/// Whether somebody flushes.
#[derive(Default)]
pub(super) struct Flushing {
    one: Mutex<()>,
    /// Somebody has ended, with a flush or without.
    over: Notify,
}

/// Has the flush, until it is dropped: then all others look again.
pub(super) struct Turn<'a> {
    one: Option<MutexGuard<'a, ()>>,
    over: &'a Notify,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.one = None;
        self.over.notify_waiters();
    }
}

impl Flushing {
    /// Waits until it is done, or nobody flushes: then it is the caller who has to.
    pub(super) async fn turn(&self, is_done: impl Fn() -> bool) -> Option<Turn<'_>> {
        loop {
            let mut over = std::pin::pin!(self.over.notified());
            // Before it is looked: whoever ends from now on is heard.
            over.as_mut().enable();
            if is_done() {
                return None;
            }
            if let Ok(one) = self.one.try_lock() {
                return Some(Turn { one: Some(one), over: &self.over });
            }
            over.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

    use super::*;

    #[derive(Default)]
    struct Log {
        flushing: Flushing,
        written: AtomicU64,
        durable: AtomicU64,
        flushes: AtomicU64,
        at_once: AtomicU64,
    }

    impl Log {
        async fn write(&self) -> bool {
            let number = self.written.fetch_add(1, SeqCst) + 1;
            let turn = self.flushing.turn(|| self.durable.load(SeqCst) >= number).await;
            let Some(_turn) = turn else { return false };
            assert_eq!(self.at_once.fetch_add(1, SeqCst), 0, "two flush at a time");
            let upto = self.written.load(SeqCst);
            tokio::task::yield_now().await;
            self.durable.fetch_max(upto, SeqCst);
            self.flushes.fetch_add(1, SeqCst);
            self.at_once.fetch_sub(1, SeqCst);
            true
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn all_who_wait_are_done_with_one_flush_or_two() {
        let log = Arc::new(Log::default());
        let first = log.flushing.turn(|| false).await;
        let mut writers = tokio::task::JoinSet::new();
        for _ in 0..1000 {
            let log = Arc::clone(&log);
            writers.spawn(async move { log.write().await });
        }
        while log.written.load(SeqCst) < 1000 {
            tokio::task::yield_now().await;
        }
        drop(first);
        writers.join_all().await;
        assert_eq!(log.durable.load(SeqCst), 1000);
        assert!(log.flushes.load(SeqCst) <= 2, "{}", log.flushes.load(SeqCst));
    }

    #[tokio::test]
    async fn another_one_flushes_when_the_one_that_did_has_gone() {
        let log = Arc::new(Log::default());
        let first = log.flushing.turn(|| false).await;
        let writing = Arc::clone(&log);
        let mut second = std::pin::pin!(writing.write());
        assert!(futures::poll!(second.as_mut()).is_pending());
        // Its connection is gone, and it has flushed nothing.
        drop(first);
        assert!(second.await, "it has flushed itself");
        assert_eq!(log.durable.load(SeqCst), 1);
    }
}
