//! Connections that have said nothing yet: there are not too many, and those who speak at once get in.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Most connections that have said nothing. When one more comes, the one that has been silent for longest has to go.
pub(crate) const SILENT_MAX: usize = 256;

/// Those that have said nothing, by their numbers: later ones have higher ones.
#[derive(Default)]
pub(crate) struct Silent {
    /// A leaf: nothing is taken under it.
    waiting: Mutex<BTreeMap<u64, Arc<Notify>>>,
}

/// A connection that has said nothing, until it is dropped.
pub(crate) struct Newcomer<'a> {
    silent: &'a Silent,
    number: u64,
    gives_way: Arc<Notify>,
}

impl Silent {
    /// One more. Another one may have to go for it.
    pub(crate) fn enter(&self, number: u64) -> Newcomer<'_> {
        let gives_way: Arc<Notify> = Arc::default();
        let mut waiting = self.waiting.lock();
        if waiting.len() >= SILENT_MAX
            && let Some((oldest, gives_way)) = waiting.pop_first()
        {
            tracing::warn!(
                connection = oldest,
                "too many connections that say nothing; the oldest is closed"
            );
            gives_way.notify_one();
        }
        waiting.insert(number, Arc::clone(&gives_way));
        Newcomer { silent: self, number, gives_way }
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.waiting.lock().len()
    }
}

impl Newcomer<'_> {
    /// Returns when it has to go.
    pub(crate) async fn must_go(&self) {
        self.gives_way.notified().await;
    }
}

impl Drop for Newcomer<'_> {
    fn drop(&mut self) {
        self.silent.waiting.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_oldest_goes_when_there_are_too_many() {
        let silent = Silent::default();
        let first = silent.enter(0);
        let mut others: Vec<Newcomer<'_>> =
            (1..SILENT_MAX as u64).map(|number| silent.enter(number)).collect();
        let spoke = others.remove(0);
        drop(spoke);
        let last = silent.enter(1000);
        assert_eq!(silent.count(), SILENT_MAX);
        let _one_more = silent.enter(1001);
        assert_eq!(silent.count(), SILENT_MAX);
        first.must_go().await;
        drop((last, others, first));
        assert_eq!(silent.count(), 1);
    }
}
