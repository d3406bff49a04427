//! What the kernel lets go of before the tree shows what another host has changed.
//!
//! A program sees names, attributes and listings that the kernel keeps, and what the tree answers; these cannot all change in
//! one moment. So the kernel lets go of what is about to change first. What is asked meanwhile is answered as it was, for
//! one use, and a listing, which the kernel keeps in any case, waits. Then the tree changes, which is the only view that is
//! left: nobody who has seen the new state finds the old one anywhere.
//!
//! The thread that reads the stream does this, so it waits for little: a call that has the lock of a directory may
//! itself wait for what comes next in the stream. What is not let go of within [`PATIENCE`] goes with the words that follow
//! the change, and those are what the acknowledgement waits for (`words`).

use std::collections::HashSet;
use std::time::Duration;

use hayloft_fuse::Control;
use hayloft_model::tree::Stale;
use hayloft_model::{FileKind, Ino, Name, Record};
use rustc_hash::FxBuildHasher;

use crate::core::{Client, Core};
use crate::kernel::nodes::NodeId;
use crate::kernel::speaker::{SHORT_PATIENCE, Speaker};

/// How long the stream waits for the kernel.
const PATIENCE: Duration = Duration::from_millis(20);

/// Speaks to the kernel before changes are applied.
pub(crate) struct Foreword {
    control: Control,
    speaker: Speaker,
}

impl Foreword {
    pub(crate) fn new(control: Control) -> Foreword {
        Foreword { speaker: Speaker::new(control.notifier()), control }
    }
}

/// What the kernel has let go of before a change.
#[derive(Default)]
pub(crate) struct Announced {
    /// Names of which it is not certain.
    pub(crate) left: Vec<(Ino, Name)>,
    /// Directories of which it has no attributes.
    attributes: Vec<Ino>,
    /// Directories of which it has no listing, and none is on its way.
    listings: Vec<Ino>,
}

impl Announced {
    /// Leaves out what the kernel need not be told any more: until the change is applied it is told things for one use.
    pub(crate) fn shorten(&self, stale: &mut Stale) {
        stale.attributes.retain(|ino| !self.attributes.contains(ino));
        stale.data.retain(|ino| !(self.listings.contains(ino) && self.attributes.contains(ino)));
    }
}

/// What others are just about to change here.
#[derive(Debug, Default)]
pub(crate) struct Changing {
    inos: HashSet<Ino, FxBuildHasher>,
    /// Listings wait: the kernel has let go of the one that it had.
    is_closed: bool,
    /// Directories of which the kernel may keep a listing.
    listed: HashSet<Ino, FxBuildHasher>,
}

impl Changing {
    /// Whether the inode is just being changed: what is said of it is for one use.
    pub(crate) fn contains(&self, ino: Ino) -> bool {
        self.inos.contains(&ino)
    }

    /// Whether a listing has to wait.
    pub(crate) fn is_closed(&self, dir: Ino) -> bool {
        self.is_closed && self.inos.contains(&dir)
    }

    /// Listings wait from now on. Of these directories the kernel had none; one that it was given meanwhile is of what was.
    fn close(&mut self, unlisted: &mut Vec<Ino>) {
        self.is_closed = true;
        unlisted.retain(|dir| !self.listed.contains(dir));
    }

    /// The kernel is given a listing.
    pub(crate) fn lists(&mut self, dir: Ino) {
        self.listed.insert(dir);
    }

    /// The kernel has forgotten a directory.
    pub(crate) fn forget(&mut self, dir: Ino) {
        self.listed.remove(&dir);
    }

    /// It has changed.
    pub(crate) fn end(&mut self) {
        self.inos.clear();
        self.is_closed = false;
    }

    pub(crate) fn shrink(&mut self) {
        self.listed.shrink_to_fit();
    }
}

/// What the kernel has to let go of.
#[derive(Default)]
struct Kept {
    names: Vec<(Ino, Name)>,
    /// The names, and all else, by the numbers of the kernel.
    by_number: Vec<(Ino, Name)>,
    /// Directories, of which attributes go, with the numbers of the kernel.
    dirs: Vec<(Ino, Vec<Ino>)>,
    /// Those of them that it has no listing of.
    unlisted: Vec<Ino>,
    /// The same of anything else.
    files: Vec<Ino>,
    listings: Vec<Ino>,
    /// Names of files that were just made: who has their directories' locks has come to the answer.
    births: Vec<(Ino, Name)>,
    /// Directories whose locks are needed for that.
    locked: HashSet<Ino>,
}

impl Core {
    /// These records are about to be applied. Returns what the kernel may keep of what they change.
    fn begin_change(&mut self, records: &[Record]) -> Kept {
        let mut kept = Kept::default();
        let (mut dirs, mut changed): (Vec<Ino>, Vec<Ino>) = Default::default();
        let mut names = Vec::new();
        for record in records {
            let (ino, is_dir) = match record {
                Record::PutInode(ino, row) => (*ino, row.kind() == FileKind::Directory),
                Record::DeleteInode(ino) => (*ino, false),
                Record::PutDentry(dir, name, _) | Record::DeleteDentry(dir, name) => {
                    if self.is_handed_out(*dir) {
                        names.push((*dir, name.clone()));
                        dirs.push(*dir);
                    }
                    (*dir, true)
                }
                Record::PutPage(..) | Record::DeletePages(..) => continue,
            };
            if self.names.changing.inos.insert(ino) && self.is_handed_out(ino) {
                if is_dir { changed.push(ino) } else { kept.files.push(ino) }
            }
        }
        dirs.sort_unstable();
        dirs.dedup();
        kept.names = self.expire(names, &dirs);
        dirs.retain(|dir| self.names.changing.listed.remove(dir));
        kept.unlisted = changed.iter().filter(|dir| !dirs.contains(dir)).copied().collect();
        kept.listings = dirs;
        self.names.changing.is_closed = kept.names.is_empty();
        kept.by_number = self.nodes.each_name(kept.names.clone());
        kept.dirs = changed.into_iter().map(|dir| (dir, self.nodes.each(vec![dir]))).collect();
        kept.files = self.nodes.each(kept.files);
        kept.listings = self.nodes.each(kept.listings);
        let births = self.births.among(kept.files.iter());
        kept.births = births.into_iter().map(|(_, place)| place).collect();
        let born_in = kept.births.iter().map(|(dir, _)| NodeId(dir.0).ino());
        kept.locked = kept.names.iter().map(|(dir, _)| *dir).chain(born_in).collect();
        kept
    }
}

impl Client {
    /// Has the kernel let go of what these records change, before they are applied, as this connection says.
    pub(crate) fn announce(&self, connection: u64, records: &[Record]) -> Announced {
        let mut foreword = self.foreword.lock();
        // Nobody sees anything before it is mounted.
        let Some(Foreword { control, speaker }) = foreword.as_mut() else { return Announced::default() };
        let Kept { names, by_number, dirs, unlisted, files, listings, births, locked } =
            self.core().begin_change(records);
        let mut announced = Announced { listings: unlisted, ..Announced::default() };
        if !(births.is_empty() && names.is_empty() && files.is_empty() && listings.is_empty()) {
            // Others may wait for what has been heard, while this waits.
            self.acknowledge_heard(connection);
        }
        // A call that has such a lock and has asked waits for what comes next.
        let nobody_asks = || !self.core().names.is_asked_with(&locked);
        if !births.is_empty() {
            speaker.try_expire_while(births, PATIENCE, nobody_asks);
        }
        if !names.is_empty() {
            // Answers that let the kernel keep names are not to arrive afterwards.
            self.settle(control);
            let have_come = self.await_callers(&by_number, SHORT_PATIENCE);
            if !(speaker.try_expire_while(by_number, PATIENCE, nobody_asks) && have_come) {
                self.stats.late_names.add(names.len() as u64);
                announced.left = names;
            }
            // Not before: a listing has the directory's lock as well.
            self.core().names.changing.close(&mut announced.listings);
        }
        // A directory has nothing to write back, which the kernel may wait for when it is on its way out.
        for (dir, numbers) in dirs {
            if self.drop_attributes(&numbers) {
                announced.attributes.push(dir);
            }
        }
        if !files.is_empty() || !listings.is_empty() {
            let ranges = listings.into_iter().map(|dir| (dir, 0, 0)).collect();
            if speaker.drop_inodes(files, ranges).recv_timeout(PATIENCE).is_err() {
                speaker.go_on();
            }
        }
        announced
    }
}

#[cfg(test)]
mod tests {
    use hayloft_model::InodeRow;

    use super::*;

    fn row(kind: FileKind) -> InodeRow {
        InodeRow::new(kind.bits(), 2, Ino::ROOT)
    }

    #[test]
    fn what_the_kernel_knows_of_a_change_is_let_go_of_and_told_for_one_use() {
        let (mut core, dir, file, name) = (Core::default(), Ino(10), Ino(11), Name::new(b"file"));
        let rows = [(dir, FileKind::Directory), (file, FileKind::Regular)];
        let rows = rows.map(|(ino, kind)| Record::PutInode(ino, Box::new(row(kind))));
        let records = [&rows[..], &[Record::DeleteDentry(dir, name.clone())]].concat();
        // It knows nothing yet.
        let kept = core.begin_change(&records);
        assert!(kept.names.is_empty() && kept.dirs.is_empty() && kept.files.is_empty());
        assert!(core.names.changing.contains(dir) && core.names.changing.is_closed(dir));
        core.names.changing.end();
        assert!(!core.names.changing.contains(file) && !core.names.changing.is_closed(dir));
        [dir, file].into_iter().for_each(|ino| core.tree.remember(ino));
        core.names.changing.lists(dir);
        let kept = core.begin_change(&records);
        assert_eq!(kept.names, [(dir, name)]);
        assert_eq!((kept.dirs, kept.files, kept.listings), (vec![(dir, vec![dir])], vec![file], vec![dir]));
        assert!(kept.unlisted.is_empty());
        // Its names are expired first, for which nobody may have the lock.
        assert!(core.names.changing.contains(file) && !core.names.changing.is_closed(dir));
        core.names.changing.end();
        // Nothing was told since that it keeps.
        let kept = core.begin_change(&records);
        assert!(kept.names.is_empty() && kept.listings.is_empty() && core.names.changing.is_closed(dir));
        assert_eq!(kept.unlisted, [dir]);
        core.names.changing.end();
    }

    #[test]
    fn a_listing_that_is_read_while_names_are_expired_goes_with_the_word() {
        let (mut core, dir) = (Core::default(), Ino(10));
        let (old, other) = (Name::new(b"old"), Name::new(b"other"));
        core.tree.remember(dir);
        let records = |name: &Name| [Record::DeleteDentry(dir, name.clone())];
        for (name, is_listed) in [(old, true), (other, false)] {
            core.names.cool(dir);
            let mut kept = core.begin_change(&records(&name));
            assert_eq!((kept.names, &kept.unlisted), (vec![(dir, name)], &vec![dir]));
            if is_listed {
                core.names.changing.lists(dir);
            }
            core.names.changing.close(&mut kept.unlisted);
            let announced =
                Announced { attributes: vec![dir], listings: kept.unlisted, ..Announced::default() };
            let mut stale = Stale { attributes: vec![dir], data: vec![dir], ..Stale::default() };
            announced.shorten(&mut stale);
            assert_eq!((stale.attributes, stale.data.is_empty()), (vec![], !is_listed));
            core.names.changing.end();
            core.names.changing.forget(dir);
        }
    }
}
