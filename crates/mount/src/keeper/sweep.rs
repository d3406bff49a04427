//! Taking everything from the kernel's caches, although single words may wait as long as the client is silent.
//!
//! Dropping pages waits for each that is locked: by a call that waits for the client. What such a page holds nobody can
//! read, but behind it there may be others. So a word that does not come through is left to its thread, and the rest
//! of the file is said by others, in parts.

use std::collections::VecDeque;
use std::io;
use std::iter::Peekable;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use hayloft_fuse::Notifier;
use hayloft_model::Ino;
use parking_lot::Mutex;

use super::shared::Shared;
use crate::host::moment::Moment;

const PAGE: u64 = 4096;
/// After so long a word waits for a lock, most likely.
const PATIENCE: Duration = Duration::from_millis(5);
const PAUSE: Duration = Duration::from_millis(1);
/// So many threads speak at most, beside those that wait.
const ACTIVE_MAX: usize = 32;
/// When so many wait, files are not split any more; and so many may there be in all.
const SPLITS_MAX: usize = 512;
const THREADS_MAX: usize = 1024;
const STACK: usize = 64 << 10;

/// The inodes that the kernel knows, the top first.
pub(super) struct Inodes {
    shared: Arc<Shared>,
    chunk: usize,
    first: u64,
    words: VecDeque<u64>,
    beyond: std::ops::RangeInclusive<u64>,
    top: bool,
}

impl Inodes {
    pub(super) fn new(shared: Arc<Shared>) -> Inodes {
        let (first, last) = shared.beyond();
        let beyond = first..=last;
        Inodes { shared, chunk: 0, first: 0, words: VecDeque::new(), beyond, top: true }
    }
}

impl Iterator for Inodes {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        if std::mem::take(&mut self.top) {
            return Some(Ino::ROOT.0);
        }
        loop {
            match self.words.front_mut() {
                Some(0) => {
                    self.words.pop_front();
                    self.first += 64;
                }
                Some(word) => {
                    let bit = word.trailing_zeros();
                    *word &= *word - 1;
                    return Some(self.first + u64::from(bit));
                }
                None if self.chunk < self.shared.used() => {
                    if let Some((first, words)) = self.shared.chunk(self.chunk) {
                        (self.first, self.words) = (first, words.into());
                    }
                    self.chunk += 1;
                }
                None => return self.beyond.next(),
            }
        }
    }
}

/// Pages of a file to drop; a length of 0 is up to the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Part {
    ino: u64,
    start: u64,
    len: u64,
}

impl Part {
    /// What lies behind a page in it that is locked, wherever that is.
    fn split(self) -> Vec<Part> {
        let part = |start: u64, len: u64| Part { ino: self.ino, start: self.start + start, len };
        match self.len {
            1 => Vec::new(),
            0 => {
                // Short parts where most files are, and longer and longer ones.
                let mut parts: Vec<Part> = (0..32).map(|power| part(1 << power, 1 << power)).collect();
                parts.push(part(0, 1));
                parts
            }
            len => vec![part(0, len / 2), part(len / 2, len - len / 2)],
        }
    }
}

/// A thread that says words.
#[derive(Debug, Default)]
struct Turn {
    /// Since when it says one, nanoseconds of CLOCK_BOOTTIME; 0 when it says nothing.
    since: AtomicU64,
    part: Mutex<Option<Part>>,
    /// Others say the rest.
    left: AtomicBool,
    done: AtomicBool,
}

/// Everything that has to be said.
struct Work {
    notifier: Notifier,
    inodes: Mutex<Peekable<Inodes>>,
    parts: Mutex<VecDeque<Part>>,
}

impl Work {
    fn next(&self) -> Option<Part> {
        let whole = self.inodes.lock().next().map(|ino| Part { ino, start: 0, len: 0 });
        whole.or_else(|| self.parts.lock().pop_front())
    }

    fn is_empty(&self) -> bool {
        self.inodes.lock().peek().is_none() && self.parts.lock().is_empty()
    }

    fn run(&self, turn: &Turn) {
        while let Some(part) = self.next() {
            *turn.part.lock() = Some(part);
            turn.since.store(Moment::now().nanos(), Ordering::Release);
            let (start, len) = ((part.start * PAGE) as i64, (part.len * PAGE) as i64);
            let _ = self.notifier.inval_inode(part.ino, start, len);
            turn.since.store(0, Ordering::Release);
            if turn.left.load(Ordering::Acquire) {
                break;
            }
        }
        turn.done.store(true, Ordering::Release);
    }

    fn spawn(self: &Arc<Self>) -> io::Result<Arc<Turn>> {
        let turn = Arc::new(Turn::default());
        let (work, own) = (Arc::clone(self), Arc::clone(&turn));
        std::thread::Builder::new().stack_size(STACK).spawn(move || work.run(&own))?;
        Ok(turn)
    }

    /// Leaves a word to its thread if it waits; whether it does.
    fn leave(&self, turn: &Turn, split: bool) -> bool {
        let since = turn.since.load(Ordering::Acquire);
        let waits = since != 0 && Moment::now().nanos().saturating_sub(since) > PATIENCE.as_nanos() as u64;
        if waits {
            turn.left.store(true, Ordering::Release);
            if split && let Some(part) = *turn.part.lock() {
                self.parts.lock().extend(part.split());
            }
        }
        waits
    }
}

/// Takes attributes and pages of all inodes from the kernel. Returns when all is said, but for what waits for a lock:
/// `false` when there was too much of that.
pub(super) fn sweep(notifier: &Notifier, shared: &Arc<Shared>) -> bool {
    // From here on nobody finds a name, or anything else that he has to ask for.
    for ino in Inodes::new(Arc::clone(shared)) {
        let _ = notifier.inval_inode(ino, -1, 0);
    }
    let work = Arc::new(Work {
        notifier: notifier.clone(),
        inodes: Mutex::new(Inodes::new(Arc::clone(shared)).peekable()),
        parts: Mutex::default(),
    });
    let (mut active, mut waiting): (Vec<Arc<Turn>>, usize) = (Vec::new(), 0);
    loop {
        let before = active.len();
        active.retain(|turn| !work.leave(turn, waiting < SPLITS_MAX));
        waiting += before - active.len();
        active.retain(|turn| !turn.done.load(Ordering::Acquire));
        let is_empty = work.is_empty();
        if is_empty && active.is_empty() {
            return true;
        }
        if is_empty || active.len() >= ACTIVE_MAX.min(1 + waiting) {
            std::thread::sleep(PAUSE);
            continue;
        }
        if waiting + active.len() >= THREADS_MAX {
            return false;
        }
        match work.spawn() {
            Ok(turn) => active.push(turn),
            Err(_) if active.is_empty() => return false,
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_file_cover_it_but_for_one_page() {
        let whole = Part { ino: 1, start: 0, len: 0 };
        let mut parts = whole.split();
        parts.sort_by_key(|part| part.start);
        let mut at = 0;
        for part in &parts {
            assert_eq!(part.start, at);
            at += part.len;
        }
        assert_eq!(at, 1 << 32);
        assert_eq!(Part { ino: 1, start: 9, len: 1 }.split(), []);
        let halves = Part { ino: 1, start: 9, len: 5 }.split();
        assert_eq!(halves, [Part { ino: 1, start: 9, len: 2 }, Part { ino: 1, start: 11, len: 3 }]);
    }
}
