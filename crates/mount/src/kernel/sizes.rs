//! Sizes of files that others have changed, as the kernel has them.
//!
//! Linux passes an answer about attributes on to the program that has asked, but does not keep it when it was told meanwhile
//! that they have changed. Then the program knows the new size, and its reads and maps end at the old one. So where the size
//! has changed, the program has its answer when the kernel has the size: the client looks, and has it ask once more
//! by a call of a process of its own.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hayloft_model::Ino;
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;

use crate::core::Client;
use crate::keeper::Looker;
use crate::kernel::nodes::NodeId;

/// How long others are waited for that look.
const PATIENCE: Duration = Duration::from_millis(50);
/// How often is tried: each time others have changed the file in the some ten microseconds that asking takes.
const TRIES: usize = 200;
/// So often without a pause.
const AT_ONCE: usize = 4;
const PAUSE: Duration = Duration::from_micros(200);

/// Sizes that the kernel had when it was told that the attributes have changed; `None`: it is not known which.
#[derive(Debug, Default)]
pub(crate) struct Sizes(HashMap<Ino, Option<u64>, FxBuildHasher>);

impl Sizes {
    /// The kernel is told that attributes of a file have changed.
    pub(crate) fn changes(&mut self, ino: Ino, size: Option<u64>) {
        // It may have asked in between, or not.
        let kept = self.0.entry(ino).or_insert(size);
        *kept = kept.filter(|kept| size.is_none_or(|size| size == *kept));
    }

    /// Whether the kernel may have another size than this. If not, it has it.
    pub(crate) fn may_differ(&mut self, ino: Ino, size: u64) -> bool {
        let may_differ = self.0.get(&ino).is_some_and(|kept| *kept != Some(size));
        if !may_differ {
            self.settled(ino);
        }
        may_differ
    }

    /// The kernel has the right one, or nothing of the file.
    pub(crate) fn settled(&mut self, ino: Ino) {
        self.0.remove(&ino);
    }

    pub(crate) fn shrink(&mut self) {
        self.0.shrink_to_fit();
    }
}

/// Looks at what the kernel has.
#[derive(Debug, Default)]
pub(crate) struct Lookers {
    /// The mount point, and the file system's device number.
    place: OnceLock<(PathBuf, u64)>,
    looker: Mutex<Option<Looker>>,
    /// Its thread's number; 0: there is none.
    tid: AtomicU32,
    /// It may not.
    is_forbidden: AtomicBool,
}

impl Lookers {
    pub(crate) fn begin(&self, point: PathBuf, device: u64) {
        let _ = self.place.set((point, device));
    }

    /// Whether it can be seen which sizes the kernel has.
    pub(crate) fn can_look(&self) -> bool {
        self.place.get().is_some() && !self.is_forbidden.load(Ordering::Relaxed)
    }

    /// Whether a request comes from here: it must not wait for anything. (What the kernel asks for by itself comes from 0.)
    pub(crate) fn has(&self, tid: u32) -> bool {
        tid != 0 && self.tid.load(Ordering::Acquire) == tid
    }

    /// Sees to it that the kernel has the size of a file. `size`: what that is now, if it is known without waiting. Returns which one the
    /// kernel has; `None`: that cannot be seen, or the size has to be fetched first.
    pub(crate) fn confirm(&self, node: NodeId, size: impl Fn() -> Option<u64>) -> Option<u64> {
        let (point, device) = self.place.get().filter(|_| self.can_look())?;
        let mut looker = self.looker.try_lock_for(PATIENCE)?;
        if looker.is_none() {
            match Looker::start(point, *device) {
                Ok(started) => {
                    self.tid.store(started.tid(), Ordering::Release);
                    *looker = Some(started);
                }
                Err(error) => tracing::warn!(%error, "the sizes that the kernel has cannot be looked at"),
            }
        }
        for at in 0..TRIES {
            let size = size()?;
            match looker.as_mut()?.look(node.0, size) {
                Ok(kept) if kept == size => return Some(kept),
                // It is changed meanwhile; or the kernel takes no answer, since a call is writing.
                Ok(_) if at < AT_ONCE => {}
                Ok(_) => std::thread::sleep(PAUSE),
                Err(error) if error.kind() == ErrorKind::NotFound => return None,
                Err(error) => {
                    let is_forbidden = error.kind() == ErrorKind::PermissionDenied;
                    self.is_forbidden.store(is_forbidden, Ordering::Relaxed);
                    self.tid.store(0, Ordering::Release);
                    *looker = None;
                    return None;
                }
            }
        }
        None
    }
}

impl Client {
    /// Sees to it that the kernel has the size of a file. Returns whether that can be seen; others may have changed it again.
    pub(crate) fn settle_size(&self, node: NodeId) -> bool {
        // Behind the end that the kernel has these may have zeros, which nobody can read as long as it has that.
        self.drop_unlike(node.ino());
        let size = || self.core().tree.inode(node.ino()).ok().map(|row| row.size);
        let kept = self.lookers.confirm(node, size);
        let mut core = self.core();
        if kept.is_some() && core.tree.inode(node.ino()).is_ok_and(|row| Some(row.size) == kept) {
            core.sizes.settled(node.ino());
        }
        kept.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_size_that_others_have_changed_may_differ_until_it_is_settled() {
        let (file, mut sizes) = (Ino(7), Sizes::default());
        assert!(!sizes.may_differ(file, 5));
        sizes.changes(file, Some(5));
        sizes.changes(file, None);
        assert!(sizes.may_differ(file, 6) && !sizes.may_differ(file, 5));
        assert!(!sizes.may_differ(file, 6), "it has had the right one");
        sizes.changes(file, Some(5));
        // Changed twice: which of the two the kernel has asked for is not known.
        sizes.changes(file, Some(6));
        assert!(sizes.may_differ(file, 5) && sizes.may_differ(file, 6));
        sizes.settled(file);
        assert!(!sizes.may_differ(file, 6));
        sizes.changes(file, None);
        assert!(sizes.may_differ(file, 6));
    }

    #[test]
    fn what_the_kernel_asks_for_by_itself_is_nobodys_look() {
        let lookers = Lookers::default();
        assert!(!lookers.has(0));
        lookers.tid.store(5, Ordering::Release);
        assert!(lookers.has(5) && !lookers.has(6) && !lookers.has(0));
    }
}
