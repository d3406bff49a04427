//! Pages of files in the kernel's cache, and how they are taken from it without waiting for calls that wait for us.
//!
//! The kernel locks a page while a read fills it, or a write that covers only a part of it, until the call is
//! answered; dropping the page waits for that. The call may wait for another host, which waits for the drop. A page
//! that is locked like this has nothing in it that anybody could read, and is filled by an answer that is made anew:
//! so what calls lock that wait here is left out, and everything else of the file is dropped. (A listing is read into
//! memory that nobody else sees, and copied into pages afterwards.) What was stored through a map is written by a call of its
//! own, of many pages at a time; none of these can be dropped before it is answered, and all go as soon as it is.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use hayloft_fuse::{Control, Interrupt, Operation, Request, write_flags};
use hayloft_model::Ino;
use parking_lot::Mutex;

use crate::cache::data::PAGE;
use crate::core::Client;
use crate::kernel::bases::OfPages;
use crate::kernel::nodes::NodeId;
use crate::kernel::speaker::Speaker;

/// How long a call that does not wait for anybody is waited for.
const RUN_PATIENCE: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_micros(20);
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// So many calls that have got a lock wait for pages that are written back.
const WAITING_MAX: usize = 64;
/// How long dropping is waited for before it is looked again which calls are in the way.
const DROP_PATIENCE: Duration = Duration::from_millis(10);
/// How long a page is waited for that may be locked.
const PAGE_PATIENCE: Duration = Duration::from_millis(2);

/// A read or a write that could not be answered at once.
#[derive(Debug)]
struct Call {
    ino: Ino,
    /// Bytes of the file.
    range: Range<u64>,
    does: Does,
    /// It waits for the server, and looks anew at what there is when it goes on.
    waits: bool,
}

/// What a call does with pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Does {
    Fills,
    Writes,
    /// Writes what was stored through a map: the pages are whole, and wait for the answer.
    WritesBack,
}

/// Calls about data that are under way, by the kernel's number.
#[derive(Debug, Default)]
pub(crate) struct Calls {
    calls: Mutex<HashMap<u64, Call>>,
    /// What the pages were filled from of those that write back.
    bases: Mutex<HashMap<u64, Arc<OfPages>>>,
    any_bases: AtomicBool,
    /// Threads that wait for calls that write back.
    waiting: AtomicUsize,
}

/// With so many calls of one file that write back the kernel may keep more of them for later, whose pages cannot go either. It takes
/// them in the order of the pages, and sends 64 at a time (`max_background`).
const WRITTEN_MANY: usize = 32;

/// The first page, and how many; 0 for up to the end.
type PageRun = (u64, u64);

/// What calls that wait keep locked of a file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Locked {
    /// Locked for certain, in bytes.
    ranges: Vec<Range<u64>>,
    /// Pages that are locked, unless they are up to date.
    pages: Vec<u64>,
    /// Pages that are written back, by the kernel's number of the call: they go as soon as that is answered.
    written: Vec<(u64, PageRun)>,
}

impl Calls {
    /// A call about data has to wait, or goes on.
    pub(crate) fn note(&self, request: &Request<'_>, waits: bool) {
        let (offset, size, does) = match request.op {
            Operation::Read { offset, size, .. } => (offset, u64::from(size), Does::Fills),
            Operation::Write { offset, data, write_flags: flags, .. } => {
                let is_cache = flags & write_flags::CACHE != 0;
                (offset, data.len() as u64, if is_cache { Does::WritesBack } else { Does::Writes })
            }
            // Into a link's only page, which is locked meanwhile.
            Operation::Readlink => (0, PAGE, Does::Fills),
            _ => return,
        };
        let range = offset..offset.saturating_add(size);
        let call = Call { ino: Ino(request.nodeid), range, does, waits };
        self.calls.lock().insert(request.unique, call);
    }

    /// The kernel has the answer.
    pub(crate) fn end(&self, unique: u64) {
        self.calls.lock().remove(&unique);
        if self.any_bases.load(Ordering::Acquire) {
            let mut bases = self.bases.lock();
            bases.remove(&unique);
            self.any_bases.store(!bases.is_empty(), Ordering::Release);
        }
    }

    /// Calls that write back pages of a file, and could not do so at once.
    fn writes_late(&self, ino: Ino) -> Vec<u64> {
        let calls = self.calls.lock();
        let is_late = |call: &Call| NodeId(call.ino.0).ino() == ino && call.does == Does::WritesBack;
        calls.iter().filter(|(_, call)| is_late(call)).map(|(unique, _)| *unique).collect()
    }

    /// Waits until these have been answered, unless too many wait already: each takes a thread of the pool, which what is waited for
    /// needs as well.
    fn await_ends(&self, of: &[u64], interrupt: &Interrupt) {
        let is_any_under_way = || {
            let calls = self.calls.lock();
            of.iter().any(|unique| calls.contains_key(unique))
        };
        if self.waiting.fetch_add(1, Ordering::AcqRel) < WAITING_MAX {
            let mut pause = PAUSE;
            while is_any_under_way() && !interrupt.abandoned() {
                std::thread::sleep(pause);
                pause = (pause * 2).min(PAUSE_MAX);
            }
        }
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }

    fn bases(&self, unique: u64) -> Option<Arc<OfPages>> {
        self.any_bases.load(Ordering::Acquire).then(|| self.bases.lock().get(&unique).cloned()).flatten()
    }

    /// Until the call has ended.
    fn keep_bases(&self, unique: u64, of_pages: OfPages) {
        let mut bases = self.bases.lock();
        bases.insert(unique, Arc::new(of_pages));
        self.any_bases.store(true, Ordering::Release);
    }

    /// What is locked of these files by calls that wait; nothing as long as one of them does not wait.
    fn locked(&self, inos: &[Ino]) -> Option<HashMap<Ino, Locked>> {
        let calls = self.calls.lock();
        let mut locked: HashMap<Ino, Locked> = HashMap::new();
        if calls.is_empty() {
            return Some(locked);
        }
        for (unique, call) in calls.iter().filter(|(_, call)| inos.contains(&call.ino)) {
            if !call.waits {
                return None;
            }
            let of_file = locked.entry(call.ino).or_default();
            let (first, end) = (call.range.start / PAGE, call.range.end.div_ceil(PAGE));
            let last = call.range.end.saturating_sub(1) / PAGE;
            of_file.ranges.push(match call.does {
                Does::Fills | Does::WritesBack => first * PAGE..end * PAGE,
                // The kernel goes no further than the first page that it has to fill in part.
                Does::Writes => last * PAGE..(last + 1) * PAGE,
            });
            match call.does {
                Does::Fills => {}
                Does::Writes => of_file.pages.push(last),
                Does::WritesBack => of_file.written.push((*unique, (first, end - first))),
            }
        }
        Some(locked)
    }
}

impl Client {
    /// Who has got a lock of a file sees what others have stored under it: pages that were being written back when others changed the
    /// file, and so could not go then, go first.
    pub(crate) fn await_late_pages(&self, ino: Ino, interrupt: &Interrupt) {
        let late = self.calls.writes_late(ino);
        if !late.is_empty() {
            self.calls.await_ends(&late, interrupt);
        }
        self.drop_unlike(ino);
    }

    /// Pages that were written back beside what others have changed, or behind whose end they have appended, go.
    pub(crate) fn drop_unlike(&self, ino: Ino) {
        let unlike = self.core().bases.unlike(ino);
        let Some(notifier) = self.notifier.get() else { return };
        for (node, page) in unlike {
            let _ = notifier.inval_inode(node.0, (page * PAGE) as i64, PAGE as i64);
        }
    }

    /// A call has to wait: others may change meanwhile what it is about.
    pub(crate) fn note_wait(&self, request: &Request<'_>) {
        if let Operation::Write { offset, data, write_flags: flags, .. } = request.op
            && flags & write_flags::CACHE != 0
            && self.calls.bases(request.unique).is_none()
        {
            let of_pages = self.core().bases_of(NodeId(request.nodeid), offset, data.len() as u64, true);
            of_pages.into_iter().for_each(|of_pages| self.calls.keep_bases(request.unique, of_pages));
        }
        // Nobody waits any longer for the pages of a call that is noted, nor keeps what they were filled from.
        self.calls.note(request, true);
    }

    /// What the pages were filled from that a call writes back, if that is not what the file is now: as it was when the call began to wait.
    pub(crate) fn bases_of(&self, request: &Request<'_>, offset: u64, len: u64) -> Option<Arc<OfPages>> {
        self.calls.bases(request.unique).or_else(|| {
            let of_pages = self.core().bases_of(NodeId(request.nodeid), offset, len, false)?;
            Some(Arc::new(of_pages))
        })
    }
}

impl Locked {
    /// Everything else of the file: offsets and lengths, 0 for up to the end.
    fn others(&self) -> Vec<(u64, u64)> {
        let mut ranges = self.ranges.clone();
        ranges.sort_by_key(|range| range.start);
        let (mut others, mut at) = (Vec::new(), 0);
        for range in ranges {
            if range.start > at {
                others.push((at, range.start - at));
            }
            at = at.max(range.end);
        }
        if self.written.len() < WRITTEN_MANY {
            others.push((at, 0));
        }
        others
    }

    /// What goes as soon as these calls are answered, and what the kernel may keep for later behind that.
    fn later(&self, of_calls: &[u64]) -> Vec<PageRun> {
        let of_these = self.written.iter().filter(|(unique, _)| of_calls.contains(unique));
        let mut later: Vec<PageRun> = of_these.map(|(_, run)| *run).collect();
        if self.written.len() >= WRITTEN_MANY && !later.is_empty() {
            let end = self.ranges.iter().map(|range| range.end).max().unwrap_or(0);
            later.push((end / PAGE, 0));
        }
        later
    }
}

/// Drops pages.
#[derive(Default)]
pub(crate) struct Pages {
    /// Pages that a thread waits for.
    waited_for: HashMap<(Ino, u64), Receiver<Vec<Ino>>>,
    /// Calls that write back, by the kernel's numbers, and threads that wait for them.
    written: Vec<(Vec<u64>, Receiver<Vec<Ino>>)>,
}

impl Pages {
    /// Takes from the kernel what it has of attributes, and of data with their attributes. What it asks for afterwards is answered as
    /// things are now. Returns which of these inodes the kernel does not have; `None`: it has not come through in time.
    pub(crate) fn drop_all(
        &mut self,
        calls: &Calls,
        control: &Control,
        speaker: &mut Speaker,
        (attributes, data): (&[Ino], &[Ino]),
        limit: Duration,
    ) -> Option<Vec<Ino>> {
        let begun = Instant::now();
        loop {
            let locked = self.await_running(calls, control, data, limit.min(RUN_PATIENCE))?;
            let ranges = data.iter().flat_map(|ino| {
                let others = locked.get(ino).map_or_else(|| vec![(0, 0)], Locked::others);
                others.into_iter().map(|(offset, length)| (*ino, offset, length))
            });
            let dropped = speaker.drop_inodes(attributes.to_vec(), ranges.collect());
            let mut unknown = dropped.recv_timeout(DROP_PATIENCE).ok();
            self.drop_uncertain(&locked, speaker);
            // As long as the same calls are in the way it is large files, or a busy machine, that take their time.
            while unknown.is_none()
                && begun.elapsed() <= limit
                && calls.locked(data).is_some_and(|now| now == locked)
            {
                unknown = dropped.recv_timeout(DROP_PATIENCE).ok();
            }
            if unknown.is_none() {
                speaker.go_on();
            }
            if unknown.is_some() || begun.elapsed() > limit {
                return unknown;
            }
        }
    }

    /// Waits for calls that will be answered at once. One that is not, however long it is waited for, is taken for one
    /// that locks nothing.
    fn await_running(
        &self,
        calls: &Calls,
        control: &Control,
        inos: &[Ino],
        patience: Duration,
    ) -> Option<HashMap<Ino, Locked>> {
        let begun = Instant::now();
        loop {
            if let Some(locked) = calls.locked(inos) {
                return Some(locked);
            }
            if begun.elapsed() > patience {
                return (patience >= RUN_PATIENCE).then(HashMap::new);
            }
            std::thread::sleep(PAUSE);
            control.settle();
        }
    }

    /// The last page of a write is either locked, or up to date, and has to go then. What is written back goes when that is answered.
    fn drop_uncertain(&mut self, locked: &HashMap<Ino, Locked>, speaker: &mut Speaker) {
        let waits = |wait: &Receiver<Vec<Ino>>| matches!(wait.try_recv(), Err(TryRecvError::Empty));
        self.waited_for.retain(|_, wait| waits(wait));
        self.written.retain(|(_, wait)| waits(wait));
        for (ino, of_file) in locked {
            for page in &of_file.pages {
                if self.waited_for.contains_key(&(*ino, *page)) {
                    continue;
                }
                let wait = speaker.drop_apart(vec![(*ino, page * PAGE, PAGE)]);
                if let Some(wait) = wait
                    && wait.recv_timeout(PAGE_PATIENCE).is_err()
                {
                    self.waited_for.insert((*ino, *page), wait);
                }
            }
            let is_new = |unique: &u64| !self.written.iter().any(|(calls, _)| calls.contains(unique));
            let calls: Vec<u64> =
                of_file.written.iter().map(|(unique, _)| *unique).filter(|unique| is_new(unique)).collect();
            let later = of_file.later(&calls).into_iter();
            let ranges: Vec<_> = later.map(|(first, count)| (*ino, first * PAGE, count * PAGE)).collect();
            if !ranges.is_empty()
                && let Some(wait) = speaker.drop_apart(ranges)
            {
                self.written.push((calls, wait));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(ino: u64, range: Range<u64>, does: Does, waits: bool) -> Call {
        Call { ino: Ino(ino), range, does, waits }
    }

    #[test]
    fn what_waiting_calls_lock_is_left_out() {
        let calls = Calls::default();
        calls.calls.lock().insert(1, call(5, 4096..12288, Does::Fills, true));
        calls.calls.lock().insert(2, call(5, 13000..20010, Does::Writes, true));
        calls.calls.lock().insert(3, call(6, 0..10, Does::Fills, false));
        let locked = calls.locked(&[Ino(5)]).unwrap();
        assert_eq!(locked[&Ino(5)].others(), [(0, 4096), (12288, 4096), (20480, 0)]);
        assert_eq!((&locked[&Ino(5)].pages[..], locked[&Ino(5)].later(&[1, 2, 3])), (&[4][..], vec![]));
        calls.calls.lock().insert(4, call(8, 8192..24576, Does::WritesBack, true));
        let locked = calls.locked(&[Ino(8)]).unwrap();
        assert_eq!(locked[&Ino(8)].others(), [(0, 8192), (24576, 0)]);
        assert_eq!((locked[&Ino(8)].later(&[4]), locked[&Ino(8)].later(&[5])), (vec![(2, 4)], vec![]));
        for at in 0..WRITTEN_MANY as u64 {
            calls.calls.lock().insert(10 + at, call(9, 8192 * at..8192 * at + 4096, Does::WritesBack, true));
        }
        let locked = calls.locked(&[Ino(9)]).unwrap();
        // The kernel may keep more calls, for pages behind these.
        assert_eq!(locked[&Ino(9)].others().last(), Some(&(4096 + 8192 * 30, 4096)));
        assert_eq!(locked[&Ino(9)].later(&[10, 41]).last(), Some(&(63, 0)));
        assert!(locked[&Ino(9)].later(&[]).is_empty());
        assert!(calls.locked(&[Ino(6)]).is_none());
        assert!(calls.locked(&[Ino(7)]).unwrap().is_empty());
        calls.end(3);
        assert_eq!(calls.locked(&[Ino(6)]).unwrap().len(), 0);
    }

    #[test]
    fn a_file_without_calls_goes_whole() {
        assert_eq!(Locked::default().others(), [(0, 0)]);
        let both = Locked { ranges: vec![0..8192, 4096..12288], ..Locked::default() };
        assert_eq!(both.others(), [(12288, 0)]);
    }
}
