//! Files that were just made here: the kernel may not have come to the answer yet.
//!
//! Attributes in the answer to what makes a file count however late its caller goes on, also after the word that they
//! have changed. The kernel has the directory's lock from before it asks until it has come to the answer (`lookup_open`),
//! also when the caller is being ended meanwhile: who has asked waits. So of each directory one such answer at most is on
//! its way. It has arrived when somebody has that lock afterwards, or asks for the file by its number, which the kernel has
//! from nowhere else: another name of it is not answered before.
//!
//! Nobody waits here. Who has a word about such a file has the kernel expire its name first, for which that takes the
//! lock (`words`).

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hayloft_fuse::{Operation, Request};
use hayloft_model::{Ino, Name};
use rustc_hash::FxBuildHasher;

use crate::kernel::nodes::NodeId;

/// Most directories with such an answer.
const MOST: usize = 1024;
/// How long another name of the file is held back.
const PATIENCE: Duration = Duration::from_millis(200);

/// A file, and the name that it was made under.
#[derive(Debug)]
struct Birth {
    dir: NodeId,
    name: Name,
    /// Since when another name of it has been asked for.
    awaited: Option<Instant>,
}

/// Answers that may be on their way, by the kernel's numbers.
#[derive(Debug, Default)]
pub(crate) struct Births {
    files: HashMap<NodeId, Birth, FxBuildHasher>,
    /// The last one of each directory.
    last: HashMap<NodeId, NodeId, FxBuildHasher>,
    /// There are too many, and somebody was told.
    is_excess_told: bool,
}

impl Births {
    /// A file is made: the answer may say its attributes for longer than one use. The one before has arrived.
    pub(crate) fn begin(&mut self, dir: NodeId, name: &[u8], file: NodeId) -> bool {
        if self.last.len() >= MOST && !self.last.contains_key(&dir) {
            return false;
        }
        self.is_excess_told &= self.last.len() >= MOST;
        if let Some(before) = self.last.insert(dir, file) {
            self.files.remove(&before);
        }
        self.files.insert(file, Birth { dir, name: Name::new(name), awaited: None });
        true
    }

    /// All, once, when there are too many: a word about them makes sure that they have arrived.
    pub(crate) fn take_excess(&mut self) -> Option<Vec<Ino>> {
        let is_new = self.last.len() >= MOST && !std::mem::replace(&mut self.is_excess_told, true);
        is_new.then(|| self.files.keys().map(|file| Ino(file.0)).collect())
    }

    pub(crate) fn is_arriving(&self, file: NodeId) -> bool {
        self.files.contains_key(&file)
    }

    /// The answer has arrived.
    pub(crate) fn arrived(&mut self, file: NodeId) {
        if let Some(birth) = self.files.remove(&file) {
            self.last.remove(&birth.dir);
        }
    }

    /// Somebody had the lock of a directory after the answer.
    pub(crate) fn was_locked(&mut self, dir: NodeId) {
        if let Some(file) = self.last.remove(&dir) {
            self.files.remove(&file);
        }
    }

    /// Those of these inodes that may be on their way, with the directory and the name for the kernel.
    pub(crate) fn among<'a>(&self, inos: impl Iterator<Item = &'a Ino>) -> Vec<(NodeId, (Ino, Name))> {
        if self.files.is_empty() {
            return Vec::new();
        }
        let files = inos.map(|ino| NodeId(ino.0));
        files
            .filter_map(|file| self.files.get(&file).map(|birth| (file, birth)))
            .map(|(file, birth)| (file, (Ino(birth.dir.0), birth.name.clone())))
            .collect()
    }

    /// Whether a name is not answered yet: the kernel would have the file from there before its birth has arrived.
    pub(crate) fn holds_back(&mut self, file: NodeId, dir: NodeId, name: &[u8]) -> bool {
        let Some(birth) = self.files.get_mut(&file) else { return false };
        if birth.dir == dir && birth.name.as_bytes() == name {
            return false;
        }
        birth.awaited.get_or_insert_with(Instant::now).elapsed() < PATIENCE
    }

    pub(crate) fn shrink(&mut self) {
        self.files.shrink_to_fit();
        self.last.shrink_to_fit();
    }
}

/// Directories whose locks the kernel has from before it asks. (LOOKUP may come without.)
pub(crate) fn locked(request: &Request<'_>) -> impl Iterator<Item = NodeId> {
    use Operation::{Create, Link, Mkdir, Mknod, Readdir, Readdirplus, Rename, Rmdir, Symlink, Unlink};
    let (first, second) = match request.op {
        Rename { new_parent, .. } => (true, Some(NodeId(new_parent))),
        Create { .. } | Mkdir { .. } | Mknod { .. } | Symlink { .. } | Link { .. } => (true, None),
        Unlink { .. } | Rmdir { .. } | Readdir { .. } | Readdirplus { .. } => (true, None),
        _ => (false, None),
    };
    first.then_some(NodeId(request.nodeid)).into_iter().chain(second)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: NodeId = NodeId(10);

    fn arriving(births: &Births) -> Vec<u64> {
        let mut files: Vec<u64> = births.files.keys().map(|file| file.0).collect();
        files.sort_unstable();
        files
    }

    #[test]
    fn one_of_each_directory_is_on_its_way() {
        let mut births = Births::default();
        assert!(births.begin(DIR, b"a", NodeId(1)));
        assert!(births.begin(NodeId(11), b"a", NodeId(2)));
        assert!(births.begin(DIR, b"b", NodeId(3)));
        assert_eq!(arriving(&births), [2, 3]);
        let among = births.among([Ino(1), Ino(3)].iter());
        assert_eq!(among, [(NodeId(3), (Ino(10), Name::new(b"b")))]);
        births.arrived(NodeId(1));
        births.arrived(NodeId(2));
        assert_eq!(arriving(&births), [3]);
        births.was_locked(DIR);
        assert_eq!((births.files.len(), births.last.len()), (0, 0));
    }

    #[test]
    fn other_names_of_it_are_held_back() {
        let mut births = Births::default();
        births.begin(DIR, b"a", NodeId(1));
        assert!(!births.holds_back(NodeId(1), DIR, b"a"));
        assert!(births.holds_back(NodeId(1), DIR, b"b"));
        assert!(births.holds_back(NodeId(1), NodeId(11), b"a"));
        births.arrived(NodeId(1));
        assert!(!births.holds_back(NodeId(1), NodeId(11), b"a"));
    }

    #[test]
    fn there_are_not_too_many() {
        let mut births = Births::default();
        (0..MOST as u64).for_each(|at| assert!(births.begin(NodeId(100_000 + at), b"a", NodeId(at))));
        assert!(!births.begin(DIR, b"a", NodeId(MOST as u64)));
        assert_eq!(births.take_excess().map(|files| files.len()), Some(MOST));
        assert_eq!(births.take_excess(), None);
        assert!(births.begin(NodeId(100_000), b"b", NodeId(MOST as u64)));
    }
}
