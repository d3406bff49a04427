//! The times of changes.

use super::Tree;
use crate::clock::LEAD_MAX;
use crate::grants::STRAY;
use crate::{FileKind, Ino, InodeRow, Timestamp};

impl Tree {
    /// The time of a change of these inodes' rows. It is later than every change of them that is known here, and of a file's
    /// home, and of what is at home in a directory; and not before any change that is known here, unless that is so far ahead
    /// of the clock that the clock must have been wrong.
    pub(super) fn stamp(&mut self, now: Timestamp, changed: &[Ino]) -> Timestamp {
        if self.times_go_back {
            return now;
        }
        if self.newest > latest_by(now) {
            self.newest = now;
        }
        let mut time = self.newest.max(now);
        for ino in changed.iter().filter(|_| !self.times_repeat) {
            time = time.max(self.latest(*ino).next());
        }
        if time <= latest_by(now) {
            self.newest = time;
        }
        for ino in changed {
            let home = self.nodes.get(ino).map_or(STRAY, |node| home(*ino, &node.row));
            if let Some(latest) = self.latest_in(home) {
                *latest = (*latest).max(time);
            }
        }
        time
    }

    /// The latest change that is known of what is at home in a directory.
    fn latest_in(&mut self, dir: Ino) -> Option<&mut Timestamp> {
        match self.dirs.get_mut(&dir) {
            Some(directory) => Some(&mut directory.latest),
            None => self.splits.latest_in(dir),
        }
    }

    /// The latest change of a row, or where it is at home.
    fn latest(&self, ino: Ino) -> Timestamp {
        let Some(node) = self.nodes.get(&ino) else { return Timestamp::default() };
        let home = home(ino, &node.row);
        let around = match self.dirs.get(&home) {
            Some(directory) => directory.latest,
            None => self.splits.latest(home),
        };
        let above = self.nodes.get(&home).map_or(Timestamp::default(), |node| node.row.ctime);
        node.row.ctime.max(around).max(above)
    }

    /// A row has come to be known here.
    pub(super) fn saw(&mut self, row: &InodeRow) {
        self.newest = self.newest.max(row.ctime);
        // Not of directories: a wrong time would go up to the root.
        if row.kind() != FileKind::Directory
            && let Some(latest) = self.latest_in(row.parent)
        {
            *latest = (*latest).max(row.ctime);
        }
    }
}

/// Where a row's changes are noted: the home of a file, and a directory itself.
fn home(ino: Ino, row: &InodeRow) -> Ino {
    if row.kind() == FileKind::Directory { ino } else { row.parent }
}

/// The latest time that is taken for right when the clock says `now`.
fn latest_by(now: Timestamp) -> Timestamp {
    Timestamp::from_nanos(now.as_nanos() + i128::from(LEAD_MAX))
}
