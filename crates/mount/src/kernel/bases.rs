//! What pages of the kernel were filled from, so that what was stored through a map is told from the rest of its page.
//!
//! The kernel writes back whole pages. Another host may have stored into the same page meanwhile, under a lock of its own: the
//! page as it is would undo that. So of a page that had to wait only that is written which differs from its *base*. As
//! long as a file's data is in memory, that is the base of what the kernel has. When it leaves memory because others change
//! it, it goes on being that until the kernel has been told, but for pages that the kernel has read anew. And what was written back
//! beside changes of others is the base of these pages from then on, until the kernel drops them.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use hayloft_model::Ino;
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;

use crate::cache::data::{Base, PAGE};
use crate::core::Core;
use crate::kernel::nodes::NodeId;

/// So much is kept after it has left memory, bytes. Pages without a base are written whole.
pub(crate) const LEFT_MAX: u64 = 32 << 20;
/// What an entry takes besides.
const OVERHEAD: u64 = 512;
/// How many files there are entries of before those are looked for that have ended.
const SWEEP_AT_LEAST: usize = 64;

/// What pages of the kernel are like that are not like the file's data.
#[derive(Debug)]
pub(crate) struct Former {
    base: Arc<Base>,
    /// These pages, by the number that the kernel has of the file; `None`: all, by any.
    of: Option<(NodeId, Range<u64>)>,
    /// Pages that the kernel has filled anew since.
    anew: Mutex<HashSet<(NodeId, u64)>>,
    /// Bytes, and the sum of these.
    bytes: u64,
    sum: Arc<AtomicU64>,
}

impl Former {
    /// The pages that it is of, if it is not of all.
    pub(crate) fn pages(&self) -> Option<(NodeId, Range<u64>)> {
        self.of.clone()
    }

    fn is_of(&self, node: NodeId, page: u64) -> bool {
        let is_among = self.of.as_ref().is_none_or(|(of, pages)| *of == node && pages.contains(&page));
        is_among && !self.anew.lock().contains(&(node, page))
    }
}

impl Drop for Former {
    fn drop(&mut self) {
        self.sum.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// What the kernel's pages were filled from, where that is not what is in memory.
#[derive(Debug, Default)]
pub(crate) struct Bases {
    /// The oldest ones first.
    of: HashMap<Ino, Vec<Weak<Former>>, FxBuildHasher>,
    /// For the next word.
    untold: Vec<Arc<Former>>,
    sweep_at: usize,
    sum: Arc<AtomicU64>,
}

/// The bases of the pages that a call writes back, from its first one on.
pub(crate) type OfPages = Vec<Option<Arc<Base>>>;

impl Bases {
    fn former(&mut self, base: Base, of: Option<(NodeId, Range<u64>)>) -> Option<Arc<Former>> {
        let (bytes, sum) = (base.bytes() + OVERHEAD, Arc::clone(&self.sum));
        if sum.fetch_add(bytes, Ordering::Relaxed) + bytes > LEFT_MAX {
            sum.fetch_sub(bytes, Ordering::Relaxed);
            return None;
        }
        if self.of.len() >= self.sweep_at.max(SWEEP_AT_LEAST) {
            self.sweep();
            self.sweep_at = 2 * self.of.len();
        }
        Some(Arc::new(Former { base: Arc::new(base), of, anew: Mutex::default(), bytes, sum }))
    }

    /// A file's data has left memory, which the kernel is told by the next word.
    pub(crate) fn left(&mut self, ino: Ino, base: Base) {
        if let Some(former) = self.former(base, None) {
            self.of.entry(ino).or_default().push(Arc::downgrade(&former));
            self.untold.push(former);
        }
    }

    /// These bytes were written back, and are not all that is there now. The pages are as they are until the kernel has dropped them:
    /// as long as what is returned lives.
    pub(crate) fn written(&mut self, node: NodeId, offset: u64, bytes: &[u8]) -> Option<Arc<Former>> {
        let of = pages(offset, bytes.len() as u64);
        let base = Base::Written { offset, bytes: bytes.to_vec() };
        let former = self.former(base, Some((node, of.clone())))?;
        self.filled(node, of);
        self.of.entry(node.ino()).or_default().push(Arc::downgrade(&former));
        Some(former)
    }

    /// What the next word takes with it.
    pub(crate) fn take_untold(&mut self) -> Vec<Arc<Former>> {
        std::mem::take(&mut self.untold)
    }

    fn formers(&mut self, ino: Ino) -> Vec<Arc<Former>> {
        let Some(entries) = self.of.get_mut(&ino) else { return Vec::new() };
        let mut formers = Vec::new();
        entries.retain(|entry| entry.upgrade().map(|former| formers.push(former)).is_some());
        if formers.is_empty() {
            self.of.remove(&ino);
        }
        formers
    }

    fn filled(&mut self, node: NodeId, pages: Range<u64>) {
        if self.of.is_empty() {
            return;
        }
        for former in self.formers(node.ino()) {
            former.anew.lock().extend(pages.clone().map(|page| (node, page)));
        }
    }

    /// The kernel fills these pages, bytes of the file, from what is in memory now.
    pub(crate) fn read(&mut self, node: NodeId, offset: u64, size: u32) {
        self.filled(node, pages(offset, u64::from(size)));
    }

    /// A program has written these bytes: what covers a page whole fills it.
    pub(crate) fn write(&mut self, node: NodeId, offset: u64, len: u64) {
        self.filled(node, offset.div_ceil(PAGE)..offset.saturating_add(len) / PAGE);
    }

    /// Pages of a file that were written back beside what others had changed, and that the kernel may have still.
    pub(crate) fn unlike(&mut self, ino: Ino) -> Vec<(NodeId, u64)> {
        let mut unlike: Vec<(NodeId, u64)> = Vec::new();
        for former in self.formers(ino) {
            let Some((node, pages)) = former.pages() else { continue };
            unlike.extend(pages.filter(|page| former.is_of(node, *page)).map(|page| (node, page)));
        }
        unlike.sort_unstable_by_key(|(node, page)| (node.0, *page));
        unlike.dedup();
        unlike
    }

    fn sweep(&mut self) {
        self.of.retain(|_, formers| formers.iter().any(|former| former.strong_count() > 0));
    }

    pub(crate) fn shrink(&mut self) {
        self.sweep();
        self.of.shrink_to_fit();
    }
}

/// The pages that bytes of a file lie in.
fn pages(offset: u64, len: u64) -> Range<u64> {
    offset / PAGE..offset.saturating_add(len).div_ceil(PAGE)
}

impl Core {
    /// What the pages of a call were filled from that writes them back, if others have changed the file since, or may (`waits`) before it
    /// is done.
    pub(crate) fn bases_of(&mut self, node: NodeId, offset: u64, len: u64, waits: bool) -> Option<OfPages> {
        let ino = node.ino();
        let formers = self.bases.formers(ino);
        if formers.is_empty() && !waits {
            return None;
        }
        let now = match (self.files.get(&ino), self.inline(ino)) {
            (Some(file), _) => file.data.lock().base(offset, len),
            (None, Some(bytes)) => Some(Base::inline(bytes)),
            (None, None) => None,
        };
        let now = now.map(Arc::new);
        let of_page = |page| {
            let former = formers.iter().find(|former| former.is_of(node, page));
            former.map(|former| Arc::clone(&former.base)).or_else(|| now.clone())
        };
        Some(pages(offset, len).map(of_page).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: NodeId = NodeId(7);

    fn of(core: &mut Core, offset: u64, len: u64) -> Vec<Option<u64>> {
        let bases = core.bases_of(FILE, offset, len, true).unwrap_or_default();
        bases.iter().map(|base| base.as_ref().map(|base| base.bytes())).collect()
    }

    #[test]
    fn the_oldest_data_that_a_page_was_not_read_after_is_its_base() {
        let mut core = Core::default();
        assert!(core.bases_of(FILE, 0, 8192, false).is_none(), "nobody has changed it");
        core.bases.left(FILE.ino(), Base::inline(&[1; 10]));
        let first = core.bases.take_untold();
        assert_eq!(of(&mut core, 0, 8192), [Some(10), Some(10)]);
        core.bases.read(FILE, 4096, 4096);
        core.bases.read(NodeId(8), 0, 4096);
        core.bases.left(FILE.ino(), Base::inline(&[1; 20]));
        let second = core.bases.take_untold();
        assert_eq!(of(&mut core, 0, 12288), [Some(10), Some(20), Some(10)]);
        core.bases.read(FILE, 5000, 10);
        assert_eq!(of(&mut core, 4096, 4096), [None]);
        drop(first);
        assert_eq!(of(&mut core, 0, 8192), [Some(20), None], "the kernel has let go of the first");
        drop(second);
        assert!(core.bases_of(FILE, 0, 8192, false).is_none());
        assert!(core.bases.of.is_empty() && core.bases.sum.load(Ordering::Relaxed) == 0);
    }

    #[test]
    fn what_was_written_back_is_the_base_of_its_pages_until_they_are_filled_anew() {
        let mut core = Core::default();
        core.bases.left(FILE.ino(), Base::inline(&[1; 10]));
        let left = core.bases.take_untold();
        let first = core.bases.written(FILE, 4096, &[2; 8192]);
        let second = core.bases.written(FILE, 4096, &[3; 100]);
        assert_eq!(of(&mut core, 0, 16384), [Some(10), Some(100), Some(8192), Some(10)]);
        assert_eq!(core.bases.unlike(FILE.ino()), [(FILE, 1), (FILE, 2)]);
        drop(left);
        core.bases.write(FILE, 8000, 4288);
        assert_eq!(of(&mut core, 0, 16384), [None, Some(100), None, None]);
        assert_eq!(core.bases.unlike(FILE.ino()), [(FILE, 1)]);
        drop(second);
        assert_eq!(of(&mut core, 0, 16384), [None; 4], "the kernel has dropped the page");
        drop(first);
        assert!(core.bases_of(FILE, 0, 16384, false).is_none());
        assert!(core.bases.of.is_empty() && core.bases.sum.load(Ordering::Relaxed) == 0);
    }

    #[test]
    fn not_all_that_leaves_memory_is_kept() {
        let mut bases = Bases::default();
        let large = vec![1; (LEFT_MAX / 2 - OVERHEAD) as usize];
        for ino in 1..5 {
            bases.left(Ino(ino), Base::inline(&large));
        }
        assert!(bases.written(FILE, 0, &[1; 10]).is_none());
        assert_eq!(bases.take_untold().len(), 2);
        for ino in 1..1000 {
            bases.left(Ino(ino), Base::inline(&[1]));
            drop(bases.take_untold());
        }
        assert!(bases.of.len() <= 2 * SWEEP_AT_LEAST);
    }
}
