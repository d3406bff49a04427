//! Connections that have said nothing yet: there are not too many, and those who speak at once get in.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

/// Most connections that have said nothing. When one more comes, the one that has been silent for longest has to go.
pub(crate) const SILENT_MAX: usize = 256;

/// More than this there are never, whatever they say.
const WAITING_MAX: usize = 2 * SILENT_MAX;

/// Those that have said nothing, by their numbers: later ones have higher ones.
#[derive(Default)]
pub(crate) struct Silent {
    /// A leaf: nothing is taken under it.
    waiting: Mutex<BTreeMap<u64, Waiting>>,
}

struct Waiting {
    gives_way: Arc<Notify>,
    /// The connection's; `None` when there is no descriptor for it.
    socket: Option<OwnedFd>,
}

impl Waiting {
    /// Whether it has said something that was not read yet: then it is the server that is late.
    fn has_spoken(&self) -> bool {
        let unread = |socket: &OwnedFd| rustix::io::ioctl_fionread(socket).unwrap_or(0);
        self.socket.as_ref().is_some_and(|socket| unread(socket) > 0)
    }
}

/// A connection that has said nothing, until it is dropped.
pub(crate) struct Newcomer<'a> {
    silent: &'a Silent,
    number: u64,
    gives_way: Arc<Notify>,
}

impl Silent {
    /// One more. Another one may have to go for it.
    pub(crate) fn enter(&self, number: u64, socket: BorrowedFd<'_>) -> Newcomer<'_> {
        let gives_way: Arc<Notify> = Arc::default();
        let mut waiting = self.waiting.lock();
        if waiting.len() >= SILENT_MAX {
            let silent = waiting.iter().find(|(_, of)| !of.has_spoken()).map(|(number, _)| *number);
            let oldest = waiting.keys().next().copied().filter(|_| waiting.len() >= WAITING_MAX);
            if let Some((number, gone)) = silent.or(oldest).and_then(|number| waiting.remove_entry(&number)) {
                tracing::warn!(
                    connection = number,
                    "too many connections that say nothing; the oldest is closed"
                );
                gone.gives_way.notify_one();
            }
        }
        let socket = socket.as_fd().try_clone_to_owned().ok();
        waiting.insert(number, Waiting { gives_way: Arc::clone(&gives_way), socket });
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
    use std::io::Write;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[tokio::test]
    async fn who_has_spoken_and_was_not_heard_stays() {
        let silent = Silent::default();
        let (mut honest, served) = UnixStream::pair().unwrap();
        honest.write_all(b"hello").unwrap();
        let honest = silent.enter(0, served.as_fd());
        let (_mute, quiet) = UnixStream::pair().unwrap();
        let others: Vec<Newcomer<'_>> =
            (1..=SILENT_MAX as u64).map(|number| silent.enter(number, quiet.as_fd())).collect();
        others[0].must_go().await;
        assert!(silent.waiting.lock().contains_key(&honest.number), "its hello waits to be read");
        drop((others, honest));
        // Not even those who say something are without number.
        let talkers: Vec<Newcomer<'_>> =
            (0..=WAITING_MAX as u64).map(|number| silent.enter(number, served.as_fd())).collect();
        assert_eq!(silent.count(), WAITING_MAX);
        talkers[0].must_go().await;
    }

    #[tokio::test]
    async fn the_oldest_goes_when_there_are_too_many() {
        let silent = Silent::default();
        let (_mute, quiet) = UnixStream::pair().unwrap();
        let quiet = quiet.as_fd();
        let first = silent.enter(0, quiet);
        let mut others: Vec<Newcomer<'_>> =
            (1..SILENT_MAX as u64).map(|number| silent.enter(number, quiet)).collect();
        let spoke = others.remove(0);
        drop(spoke);
        let last = silent.enter(1000, quiet);
        assert_eq!(silent.count(), SILENT_MAX);
        let _one_more = silent.enter(1001, quiet);
        assert_eq!(silent.count(), SILENT_MAX);
        first.must_go().await;
        drop((last, others, first));
        assert_eq!(silent.count(), 1);
    }
}
