//! Sharing a volume with others: what may be changed here, and what others have changed.

use bytes::Bytes;

use super::log::Changes;
use super::{Directory, Tree};
use crate::grants::{Object, STRAY};
use crate::{Content, Dentry, FileKind, Ino, InodeRow, Missing, Name, Record, Sequence, TreeError};

/// What the kernel may hold that is no longer so.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stale {
    /// Names.
    pub names: Vec<(Ino, Name)>,
    /// Inodes of which attributes have changed.
    pub attributes: Vec<Ino>,
    /// Inodes of which data, or the listing, has changed as well.
    pub data: Vec<Ino>,
    /// Inodes in use here that the server has to keep, see [`Tree::take_released`].
    pub in_use: Vec<Ino>,
    /// Files that the kernel has, as they were.
    pub files: Vec<Was>,
}

/// What a file was.
#[derive(Clone, Debug, PartialEq)]
pub struct Was {
    /// The file.
    pub ino: Ino,
    /// Its size, bytes; `None`: its row was not in memory, and it may be something else.
    pub size: Option<u64>,
    /// Its data, as far as its row had that.
    pub content: Bytes,
}

impl Stale {
    fn keep_file(&mut self, ino: Ino, row: Option<&InodeRow>) {
        let content = match row.map(|row| &row.content) {
            _ if row.is_some_and(|row| row.kind() != FileKind::Regular) => return,
            Some(Content::Inline(bytes)) => bytes.clone(),
            _ => Bytes::new(),
        };
        self.files.push(Was { ino, size: row.map(|row| row.size), content });
    }

    fn extend(&mut self, more: Stale) {
        self.names.extend(more.names);
        self.attributes.extend(more.attributes);
        self.data.extend(more.data);
        self.in_use.extend(more.in_use);
        self.files.extend(more.files);
    }
}

impl Tree {
    /// From now on only what is owned is changed here; everything else asks for it.
    pub fn share(&mut self) {
        self.owned.get_or_insert_default();
    }

    /// The object may be changed here: it was granted, or made here. Without a name and a user it ends: who is granted
    /// it deletes it.
    pub fn own(&mut self, ino: Ino) {
        if let Some(owned) = &mut self.owned {
            owned.insert(ino);
            self.splits.owns(ino);
            self.homeless.remove(&ino);
            self.unheard.forget(ino);
            self.end_if_unused(ino);
        }
    }

    /// A file has lost its home, which covered it: it is owned by itself from now on. The server learns of it by the next
    /// cut that takes its row.
    pub(super) fn own_homeless(&mut self, ino: Ino) {
        if let Some(owned) = &mut self.owned
            && owned.insert(ino)
        {
            self.homeless.insert(ino);
        }
    }

    /// A file has a home again: it is owned by itself still, if the server knows (or will, by what is cut) that it was.
    pub(super) fn settle_at_home(&mut self, ino: Ino) {
        if self.homeless.contains(&ino) {
            self.disown(ino);
        }
    }

    /// The object may not be changed any more; what is known of it stays. Without a name it is the server's to delete
    /// from now on: it is among [`Tree::in_use`] while the kernel knows it, and who gives it back says so.
    pub fn disown(&mut self, ino: Ino) {
        self.homeless.remove(&ino);
        self.splits.disowns(ino);
        let may_go = self.is_home_split(ino) || self.nodes.get(&ino).is_some_and(|node| node.row.nlink == 0);
        if let Some(owned) = &mut self.owned
            && owned.remove(&ino)
            && may_go
            && self.nodes.is_known(ino)
        {
            self.in_use.insert(ino);
        }
    }

    /// Whether a directory's names, or an inode's row, may be changed here.
    pub fn owns(&self, ino: Ino) -> bool {
        match self.nodes.get(&ino) {
            Some(node) => self.owns_row(ino, &node.row),
            None => self.owned.as_ref().is_none_or(|owned| owned.contains(&ino)),
        }
    }

    /// The same of an inode that has this row. Most files are covered by their home.
    pub(super) fn owns_row(&self, ino: Ino, row: &InodeRow) -> bool {
        let Some(owned) = &self.owned else { return true };
        row.kind() != FileKind::Directory && owned.contains(&row.parent) || owned.contains(&ino)
    }

    /// Whether an object is owned by itself, see [`Tree::owned`].
    pub fn owns_itself(&self, ino: Ino) -> bool {
        self.owned.as_ref().is_some_and(|owned| owned.contains(&ino))
    }

    /// Everything that is owned by itself: directories, and files that their home does not cover. What was deleted here
    /// is among it until that is durable, see [`Tree::shipped`]: nobody else may be given it before.
    pub fn owned(&self) -> Vec<Object> {
        let object = |ino: &Ino| match (self.object(*ino), self.dying.get(ino)) {
            (Ok(object), _) => object,
            (Err(_), Some((object, _))) => *object,
            // Rows of files that are owned by themselves are not evicted.
            (Err(_), None) => Object::Directory(*ino),
        };
        self.owned.iter().flatten().map(object).collect()
    }

    /// Whether a file is owned without its home: then its row says what it is.
    pub(super) fn owns_alone(&self, ino: Ino, row: &InodeRow) -> bool {
        row.kind() != FileKind::Directory && self.owned.as_ref().is_some_and(|owned| owned.contains(&ino))
    }

    pub(super) fn keep_until_deleted(&mut self, object: Object) {
        if self.owned.as_ref().is_some_and(|owned| owned.contains(&object.ino())) {
            self.dying.insert(object.ino(), (object, None));
        }
    }

    /// The server holds everything up to this batch: what was deleted by then is nobody's any more. Returns that: what of
    /// it is being given back must not be owned again when the connection is lost.
    pub fn shipped(&mut self, durable: Sequence) -> Vec<Ino> {
        self.durable = self.durable.max(durable);
        let gone = |cut: &Option<Sequence>| cut.is_some_and(|cut| cut <= durable);
        let dead: Vec<Ino> =
            self.dying.iter().filter(|(_, (_, cut))| gone(cut)).map(|(ino, _)| *ino).collect();
        for ino in &dead {
            self.dying.remove(ino);
            self.disown(*ino);
        }
        for ino in std::mem::take(&mut self.lingering) {
            if self.end_if_unused(ino) {
                self.released.push(ino);
            }
        }
        dead
    }

    /// The object that an inode is.
    ///
    /// # Errors
    /// Its row is not in memory.
    pub fn object(&self, ino: Ino) -> Result<Object, TreeError> {
        let row = self.inode(ino)?;
        Ok(Object::of(ino, row))
    }

    pub(super) fn need_names(&self, dir: Ino) -> Result<(), TreeError> {
        match &self.owned {
            Some(owned) if !owned.contains(&dir) => {
                Err(TreeError::Missing(Missing::Own(Object::Directory(dir))))
            }
            _ => Ok(()),
        }
    }

    /// The same for one name.
    pub(super) fn need_name(&self, dir: Ino, name: &[u8]) -> Result<(), TreeError> {
        self.need_names(self.place(dir, name))
    }

    /// Whether an inode's row may be changed here, for a change that is made in two steps.
    ///
    /// # Errors
    /// [`Missing::Own`], or its row is not in memory.
    pub fn check_owned(&self, ino: Ino) -> Result<(), TreeError> {
        self.need_row(ino)
    }

    pub(super) fn need_row(&self, ino: Ino) -> Result<(), TreeError> {
        let row = self.inode(ino)?;
        match self.owns_row(ino, row) {
            true => Ok(()),
            false => Err(TreeError::Missing(Missing::Own(Object::of(ino, row)))),
        }
    }

    /// How many references the kernel has to an inode.
    pub fn lookups(&self, ino: Ino) -> u64 {
        self.nodes.lookups(ino)
    }

    /// Whether the server has heard of the inode; `durable` is the last batch that it is known to hold.
    pub fn is_stored(&self, ino: Ino, durable: Sequence) -> bool {
        self.nodes.get(&ino).is_none_or(|node| node.stored && node.cut <= durable)
    }

    /// Whether the server has the row of an inode as it is; `durable` as in [`Tree::is_stored`].
    pub fn is_clean(&self, ino: Ino, durable: Sequence) -> bool {
        self.nodes.get(&ino).is_some_and(|node| node.stored && !node.dirty && node.cut <= durable)
    }

    /// All inodes that the kernel has references to.
    pub fn known(&self) -> Vec<Ino> {
        self.nodes.known().collect()
    }

    /// All names in memory that lead to inodes which the kernel knows.
    pub fn all_known_names(&self) -> Vec<(Ino, Name)> {
        let places = self.dirs.iter().map(|(place, directory)| (place.or_directory(), directory));
        let names =
            places.flat_map(|(dir, directory)| directory.by_name.iter().map(move |entry| (dir, entry)));
        let known = names.filter(|(_, (_, dentry))| self.lookups(dentry.ino) > 0);
        known.map(|(dir, (name, _))| (dir, name.clone())).collect()
    }

    /// Names of a directory that lead to inodes which the kernel knows.
    pub fn known_names(&self, dir: Ino) -> Vec<Name> {
        let entries = self.all_names(dir);
        entries.filter(|(_, dentry)| self.lookups(dentry.ino) > 0).map(|(name, _)| name.clone()).collect()
    }

    /// Others have changed rows (or rows have become known), and these objects are owned here from now on.
    pub fn apply(&mut self, records: &[Record], own: &[Object], forget: &[Ino]) -> Stale {
        let mut stale = Stale::default();
        for record in records {
            match record {
                // Without a name it stays with whoever is made its owner.
                Record::PutInode(ino, row)
                    if row.nlink == 0 && !own.iter().any(|object| object.ino() == *ino) =>
                {
                    self.gone(*ino, &mut stale);
                }
                Record::PutInode(ino, row) => self.replace(*ino, row, &mut stale),
                Record::DeleteInode(ino) => self.gone(*ino, &mut stale),
                Record::PutDentry(dir, name, dentry) => {
                    self.replace_name(*dir, name, Some(*dentry), &mut stale);
                }
                Record::DeleteDentry(dir, name) => self.replace_name(*dir, name, None, &mut stale),
                // Pages are fetched with the file's data, which its row's change drops.
                Record::PutPage(..) | Record::DeletePages(..) => {}
            }
        }
        for ino in forget {
            // Its names are elsewhere now, where nobody tells of them.
            self.drop_row(*ino, &mut stale);
            self.report_in_use(*ino, &mut stale);
        }
        for object in own {
            self.own(object.ino());
            // A directory that was just made has no names yet: that is its whole listing.
            if let Object::Directory(dir) = object
                && self.nodes.get(dir).is_some_and(|node| node.row.next_cookie == super::FIRST_COOKIE)
            {
                self.dirs.entry(*dir).or_default();
            }
        }
        stale
    }

    fn replace(&mut self, ino: Ino, row: &InodeRow, stale: &mut Stale) {
        self.saw(row);
        let owned = self.owned.is_some() && self.owns(ino);
        let is_known = self.nodes.is_known(ino);
        match self.nodes.get_mut(&ino) {
            // Only the owner changes a row: what is here, or on its way from here, is newer.
            Some(node) if node.dirty || owned || node.cut > self.durable => return,
            Some(node) => {
                if node.row.content != row.content || node.row.size != row.size {
                    stale.data.push(ino);
                    if is_known {
                        stale.keep_file(ino, Some(&node.row));
                    }
                }
                node.row = row.clone();
                node.stored = true;
            }
            None => {
                self.nodes.insert(ino, row.clone(), true);
            }
        }
        stale.attributes.push(ino);
    }

    fn replace_name(&mut self, dir: Ino, name: &Name, dentry: Option<Dentry>, stale: &mut Stale) {
        if let Some(directory) = self.dirs.get_mut(&dir) {
            if let Some(before) = directory.by_name.get(name)
                && Some(*before) == dentry
            {
                return;
            }
            directory.remove(name.as_bytes());
            if let Some(dentry) = dentry {
                directory.insert(name.clone(), dentry);
            }
        }
        stale.names.push((dir, name.clone()));
        if stale.data.last() != Some(&dir) {
            stale.data.push(dir);
        }
    }

    /// The inode has no name any more.
    fn gone(&mut self, ino: Ino, stale: &mut Stale) {
        self.drop_row(ino, stale);
        self.disown(ino);
        self.dirs.remove(&ino);
        self.splits.leave(ino);
        self.report_in_use(ino, stale);
    }

    pub(super) fn report_in_use(&mut self, ino: Ino, stale: &mut Stale) {
        if self.nodes.is_known(ino) {
            self.in_use.insert(ino);
            stale.in_use.push(ino);
        }
    }

    /// The row of an inode may change elsewhere.
    pub(super) fn drop_row(&mut self, ino: Ino, stale: &mut Stale) {
        if self.nodes.get(&ino).is_some_and(|node| node.dirty) {
            return;
        }
        let row = self.nodes.remove(&ino).map(|node| node.row);
        let kind = row.as_ref().map(InodeRow::kind);
        if self.nodes.is_known(ino) {
            stale.keep_file(ino, row.as_ref());
        }
        stale.attributes.push(ino);
        // A link's target never changes, and nothing else has data.
        if matches!(kind, None | Some(FileKind::Regular | FileKind::Directory)) {
            stale.data.push(ino);
        }
    }

    /// The rows of these inodes may change elsewhere.
    pub fn drop_rows(&mut self, inos: &[Ino]) -> Stale {
        let mut stale = Stale::default();
        for ino in inos {
            let may_go = self.is_home_split(*ino);
            self.drop_row(*ino, &mut stale);
            if may_go {
                self.report_in_use(*ino, &mut stale);
            }
        }
        stale
    }

    /// The object is no longer held at all: what is known of it goes. It is not owned, and all of it is shipped.
    pub fn uncover(&mut self, object: Object) -> Stale {
        let ino = object.ino();
        if ino.of_slot().is_some() {
            return self.uncover_slot(ino);
        }
        let mut stale = Stale::default();
        let was_split = self.is_split(ino);
        for slot in self.slots_in_memory(ino) {
            if !self.owns_itself(slot) {
                stale.extend(self.uncover_slot(slot));
            }
        }
        match (object, self.dirs.remove(&ino)) {
            (Object::Directory(_), Some(directory)) => self.uncover_files(ino, directory, &mut stale),
            // The listing has left memory: whatever may be one of its files goes.
            (Object::Directory(_), None) => {
                let known = self.nodes.known_alone();
                let files = self
                    .nodes
                    .iter()
                    .filter(|(_, node)| {
                        node.row.kind() != FileKind::Directory && [ino, STRAY].contains(&node.row.parent)
                    })
                    .map(|(file, _)| *file);
                let files: Vec<Ino> = known.chain(files).collect();
                files.into_iter().for_each(|file| self.uncover_file(ino, file, &mut stale));
            }
            (Object::File { .. }, _) => {}
        }
        self.drop_row(ino, &mut stale);
        if was_split {
            self.splits.leave(ino);
        }
        self.report_in_use(ino, &mut stale);
        stale
    }

    fn uncover_files(&mut self, dir: Ino, directory: Directory, stale: &mut Stale) {
        for (name, dentry) in &directory.by_name {
            if self.nodes.is_known(dentry.ino) {
                stale.names.push((dir, name.clone()));
            }
            if dentry.kind != FileKind::Directory {
                self.uncover_file(dir, dentry.ino, stale);
            }
        }
    }

    /// A file has lost the cover of a directory that it has, or may have, a name in: its row goes unless something
    /// else covers it. Others may remove all its names now without this host being told, even those of a stray.
    fn uncover_file(&mut self, dir: Ino, file: Ino, stale: &mut Stale) {
        if self.owned.as_ref().is_some_and(|owned| owned.contains(&file)) {
            return;
        }
        if self.nodes.get(&file).is_none_or(|node| node.row.parent == dir) {
            self.drop_row(file, stale);
        }
        self.report_in_use(file, stale);
    }

    /// A new connection: everything that is not owned may have changed, and goes.
    pub fn uncover_all(&mut self) -> Stale {
        let mut stale = Stale::default();
        let Some(owned) = self.owned.clone() else { return stale };
        let dirs: Vec<Ino> = self.dirs.keys().filter(|dir| !owned.contains(dir)).copied().collect();
        for dir in dirs {
            if dir.of_slot().is_some() {
                stale.extend(self.uncover_slot(dir));
            } else if let Some(directory) = self.dirs.remove(&dir) {
                self.uncover_files(dir, directory, &mut stale);
            }
        }
        // Rows that were evicted are known to the kernel still.
        let known = self.nodes.keys().copied().chain(self.nodes.known_alone());
        let rows: Vec<Ino> = known.filter(|ino| !self.owns(*ino)).collect();
        for ino in rows {
            self.drop_row(ino, &mut stale);
            self.report_in_use(ino, &mut stale);
        }
        self.splits.leave_all();
        self.unheard.clear();
        stale.in_use.sort_unstable();
        stale.in_use.dedup();
        stale
    }

    /// The session is over and another one begins: nothing is owned, and nothing is known but what the kernel has been
    /// given. What no batch has taken is gone; who wants to keep it cuts the log before.
    pub fn restart(&mut self) -> Stale {
        let names = self.all_known_names();
        let mut stale = Stale::default();
        self.nodes.known().for_each(|ino| stale.keep_file(ino, self.nodes.get(&ino).map(|node| &node.row)));
        let known: Vec<Ino> = self.known().into_iter().chain([Ino::ROOT]).collect();
        self.in_use = self.nodes.known().filter(|ino| *ino != Ino::ROOT).collect();
        if let Some(owned) = &mut self.owned {
            owned.clear();
        }
        self.nodes.clear();
        self.dirs.clear();
        self.splits.clear();
        self.unheard.clear();
        self.homeless.clear();
        self.dying.clear();
        self.lingering.clear();
        self.released.clear();
        self.changes = Changes::default();
        Stale { names, attributes: known.clone(), data: known, ..stale }
    }

    /// Nothing is owned any more: who wants to change something has to ask. What is known stays.
    pub fn disown_all(&mut self) {
        let owned: Vec<Ino> = self.owned.iter().flatten().copied().collect();
        owned.into_iter().for_each(|ino| self.disown(ino));
    }

    /// Inodes whose names or cover are gone, or that have no name, and that the kernel knows.
    pub fn in_use(&self) -> impl Iterator<Item = Ino> + '_ {
        self.in_use.iter().copied()
    }

    /// Whether [`Tree::take_released`] has something to give.
    pub fn has_released(&self) -> bool {
        !self.released.is_empty()
    }

    /// Inodes that were reported in use, and are not any more, since this was asked last.
    pub fn take_released(&mut self) -> Vec<Ino> {
        std::mem::take(&mut self.released)
    }
}

#[cfg(test)]
#[path = "share_tests.rs"]
mod tests;
