//! Operations on names: making, linking, removing and renaming.

use bytes::Bytes;

use super::{Directory, FIRST_COOKIE, Tree};
use crate::grants::STRAY;
use crate::{Content, Dentry, FileKind, Ino, InodeRow, Missing, Name, Timestamp, TreeError};

const SETGID: u32 = 0o2000;
const LINKS_MAX: u32 = 1 << 30;

/// What a new inode is to be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewNode {
    /// Type and permission bits, the umask already applied.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group, unless the directory's setgid bit says otherwise.
    pub gid: u32,
    /// Device number of a device node.
    pub rdev: u32,
    /// Target of a symbolic link.
    pub target: Option<Bytes>,
}

/// The flags of renameat2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RenameFlags {
    /// Fail when the new name exists.
    pub no_replace: bool,
    /// Swap the two names.
    pub exchange: bool,
    /// Leave a whiteout (a character device 0:0) under the old name.
    pub whiteout: bool,
}

impl Tree {
    /// Makes an inode under a new name.
    ///
    /// # Errors
    /// The name exists or is too long, the parent is deleted or no directory, the quota is used up, or
    /// something is missing.
    pub fn create(&mut self, dir: Ino, name: &[u8], new: NewNode, now: Timestamp) -> Result<Ino, TreeError> {
        self.create_at(dir, name, new, None, now)
    }

    fn create_at(
        &mut self,
        dir: Ino,
        name: &[u8],
        new: NewNode,
        place: Option<u64>,
        now: Timestamp,
    ) -> Result<Ino, TreeError> {
        if self.lookup(dir, name)?.is_some() {
            return Err(TreeError::Exists);
        }
        if FileKind::of_mode(new.mode) == Some(FileKind::Directory) {
            self.need_whole(dir)?;
        }
        self.need_name(dir, name)?;
        self.check_inode_room()?;
        let now = self.stamp(now, &[dir]);
        let ino = self.add_new(dir, new, 1, now)?;
        let place = place.or_else(|| self.is_split(dir).then(|| Tree::split_cookie(ino)));
        self.add_name(dir, name, ino, place, now)?;
        self.splits.makes(dir);
        self.count(0, 1);
        Ok(ino)
    }

    /// Makes a regular file without a name (O_TMPFILE); it lives while the kernel knows it, or until it
    /// gets a name by [`Tree::link`].
    ///
    /// # Errors
    /// As [`Tree::create`].
    pub fn create_unnamed(&mut self, dir: Ino, new: NewNode, now: Timestamp) -> Result<Ino, TreeError> {
        if !self.is_split(dir) {
            self.directory(dir)?;
        }
        let now = self.stamp(now, &[]);
        self.add_new(dir, new, 0, now)
    }

    fn add_new(&mut self, dir: Ino, new: NewNode, nlink: u32, now: Timestamp) -> Result<Ino, TreeError> {
        let kind = FileKind::of_mode(new.mode).ok_or(TreeError::Invalid)?;
        let parent = self.inode(dir)?;
        if parent.nlink == 0 {
            return Err(TreeError::NotFound);
        }
        let inherits = parent.mode & SETGID != 0;
        let gid = if inherits { parent.gid } else { new.gid };
        let is_dir = kind == FileKind::Directory;
        let ino = self.next_ino()?;
        let row = InodeRow {
            mode: if inherits && is_dir { new.mode | SETGID } else { new.mode },
            uid: new.uid,
            gid,
            nlink: if is_dir { 2 } else { nlink },
            rdev: new.rdev,
            size: new.target.as_ref().map_or(0, |target| target.len() as u64),
            allocated: 0,
            atime: now,
            mtime: now,
            ctime: now,
            btime: now,
            parent: if is_dir || nlink > 0 { dir } else { STRAY },
            next_cookie: if is_dir { FIRST_COOKIE } else { 0 },
            unnamed: !is_dir && nlink == 0,
            xattrs: Default::default(),
            content: new.target.map_or(Content::None, Content::Target),
        };
        self.nodes.insert(ino, row, false);
        self.changes.inodes.push(ino);
        if is_dir {
            self.dirs.insert(ino, Directory { used: self.operations, ..Directory::default() });
        }
        // Nobody else knows of it.
        if is_dir {
            self.own(ino);
        } else if nlink == 0 || self.is_split(dir) {
            self.own_homeless(ino);
        }
        Ok(ino)
    }

    /// Adds a free name for an inode that is here: the dentry, the parent's times and links. `place` is the cookie of
    /// what had the name until now: a name that is there all the time stays at its place, so that a listing which goes on
    /// meanwhile has it once.
    fn add_name(
        &mut self,
        dir: Ino,
        name: &[u8],
        ino: Ino,
        place: Option<u64>,
        now: Timestamp,
    ) -> Result<(), TreeError> {
        let kind = self.inode(ino)?.kind();
        let cookie = match place {
            // The row of a split directory is nobody's.
            Some(place) if self.is_split(dir) => place,
            place => {
                let place = place.filter(|_| !self.replaced_names_move);
                let parent = self.change(dir)?;
                let cookie = place.unwrap_or(parent.next_cookie);
                parent.next_cookie += u64::from(place.is_none());
                parent.nlink += u32::from(kind == FileKind::Directory);
                (parent.mtime, parent.ctime) = (now, now);
                cookie
            }
        };
        let name = Name::new(name);
        self.note_name(dir, &name, false)?;
        self.names(dir, name.as_bytes())?.insert(name, Dentry { ino, kind, cookie });
        Ok(())
    }

    /// Takes a name away: the dentry, the parent's times and links. The inode is left as it is.
    fn take_name(&mut self, dir: Ino, name: &[u8], now: Timestamp) -> Result<Dentry, TreeError> {
        let dentry = self.names(dir, name)?.remove(name).ok_or(TreeError::NotFound)?;
        self.note_name(dir, &Name::new(name), true)?;
        if !self.is_split(dir) {
            let parent = self.change(dir)?;
            parent.nlink -= u32::from(dentry.kind == FileKind::Directory);
            (parent.mtime, parent.ctime) = (now, now);
        }
        Ok(dentry)
    }

    /// An inode has lost a name (a directory: its only one).
    fn drop_link(&mut self, ino: Ino, now: Timestamp) -> Result<(), TreeError> {
        let row = self.change(ino)?;
        row.ctime = now;
        row.nlink = if row.kind() == FileKind::Directory { 0 } else { row.nlink - 1 };
        if row.nlink == 0 {
            let allocated = row.allocated;
            if row.kind() != FileKind::Directory {
                row.parent = STRAY;
                self.own_homeless(ino);
            }
            self.count(-(allocated as i64), -1);
            self.end_if_unused(ino);
        }
        Ok(())
    }

    /// Gives an inode one more name.
    ///
    /// # Errors
    /// The name exists, the inode is a directory, or has lost its last name, or something is missing.
    pub fn link(&mut self, ino: Ino, dir: Ino, name: &[u8], now: Timestamp) -> Result<(), TreeError> {
        if self.lookup(dir, name)?.is_some() {
            return Err(TreeError::Exists);
        }
        let row = self.inode(ino)?;
        let (is_first, allocated) = (row.nlink == 0, row.allocated);
        if row.kind() == FileKind::Directory {
            return Err(TreeError::NotPermitted);
        }
        // Whoever has it open keeps it; nobody brings it back.
        if is_first && !row.unnamed && !self.links_revive {
            return Err(TreeError::NotFound);
        }
        if row.nlink >= LINKS_MAX {
            return Err(TreeError::TooManyLinks);
        }
        if self.inode(dir)?.nlink == 0 {
            return Err(TreeError::NotFound);
        }
        self.need_whole(dir)?;
        self.need_name(dir, name)?;
        self.need_row(ino)?;
        let now = self.stamp(now, &[ino, dir]);
        if is_first {
            self.check_inode_room()?;
            self.check_room(allocated)?;
            self.count(allocated as i64, 1);
        }
        let row = self.change(ino)?;
        row.nlink += 1;
        row.ctime = now;
        if is_first {
            (row.parent, row.unnamed) = (dir, false);
            self.settle_at_home(ino);
        } else if row.parent != dir {
            // Names in several directories: it is owned by itself from now on.
            row.parent = STRAY;
            self.own_homeless(ino);
        }
        self.add_name(dir, name, ino, None, now)
    }

    /// Removes a name of something that is no directory. Returns its inode.
    ///
    /// # Errors
    /// No such name, a directory, or something missing.
    pub fn unlink(&mut self, dir: Ino, name: &[u8], now: Timestamp) -> Result<Ino, TreeError> {
        let dentry = self.lookup(dir, name)?.ok_or(TreeError::NotFound)?;
        if dentry.kind == FileKind::Directory {
            return Err(TreeError::IsDirectory);
        }
        self.need_name(dir, name)?;
        self.need_row(dentry.ino)?;
        let now = self.stamp(now, &[dir, dentry.ino]);
        self.take_name(dir, name, now)?;
        self.drop_link(dentry.ino, now)?;
        Ok(dentry.ino)
    }

    /// Removes an empty directory. Returns its inode.
    ///
    /// # Errors
    /// No such name, not a directory, not empty, or something missing.
    pub fn rmdir(&mut self, dir: Ino, name: &[u8], now: Timestamp) -> Result<Ino, TreeError> {
        let dentry = self.lookup(dir, name)?.ok_or(TreeError::NotFound)?;
        self.need_whole(dir)?;
        self.check_empty(dentry)?;
        self.need_name(dir, name)?;
        self.need_names(dentry.ino)?;
        let now = self.stamp(now, &[dir, dentry.ino]);
        self.take_name(dir, name, now)?;
        self.drop_link(dentry.ino, now)?;
        Ok(dentry.ino)
    }

    fn check_empty(&mut self, dentry: Dentry) -> Result<(), TreeError> {
        if dentry.kind != FileKind::Directory {
            return Err(TreeError::NotDirectory);
        }
        self.need_whole(dentry.ino)?;
        let is_empty = self.directory(dentry.ino)?.by_name.is_empty();
        self.check_all_heard(dentry.ino)?;
        if is_empty { Ok(()) } else { Err(TreeError::NotEmpty) }
    }

    /// Moves a name, replacing, swapping or leaving a whiteout as the flags say.
    ///
    /// # Errors
    /// Those of rename(2) and renameat2(2), or something missing.
    pub fn rename(
        &mut self,
        from: (Ino, &[u8]),
        to: (Ino, &[u8]),
        flags: RenameFlags,
        now: Timestamp,
    ) -> Result<(), TreeError> {
        let source = self.lookup(from.0, from.1)?.ok_or(TreeError::NotFound)?;
        let target = self.lookup(to.0, to.1)?;
        self.inode(source.ino)?;
        if self.inode(to.0)?.nlink == 0 {
            return Err(TreeError::NotFound);
        }
        let is_split = self.check_split(from.0, to.0, (source, target), flags)?;
        self.need_name(from.0, from.1)?;
        self.need_name(to.0, to.1)?;
        self.need_row(source.ino)?;
        target.map_or(Ok(()), |target| self.need_row(target.ino))?;
        let moves_directory =
            [Some(source), target].into_iter().flatten().any(|moved| moved.kind == FileKind::Directory);
        let shares = self.owned.is_some() && !self.owners_move_directories;
        if shares && from.0 != to.0 && moves_directory {
            // Owners who each know of their own move only could build a cycle.
            return Err(TreeError::Missing(Missing::Executor));
        }
        let changed = [from.0, to.0, source.ino, target.map_or(source.ino, |target| target.ino)];
        let now = self.stamp(now, &changed);
        self.check_no_cycle(source, from.0, to.0)?;
        match target {
            Some(_) if flags.no_replace => return Err(TreeError::Exists),
            Some(target) if flags.exchange => return self.exchange((from, source), (to, target), now),
            None if flags.exchange => return Err(TreeError::NotFound),
            // Two names of one file: POSIX wants nothing done.
            Some(target) if target.ino == source.ino => return Ok(()),
            Some(target) => self.check_replaceable(source, target)?,
            None => {}
        }
        if flags.whiteout {
            self.check_inode_room()?;
        }
        let counts = is_split && target.is_none();
        if (flags.whiteout || counts) && self.numbers_left() == 0 {
            return Err(TreeError::Missing(Missing::Numbers));
        }
        let place = match target {
            None if counts => Some(Tree::split_cookie(self.next_ino()?)),
            target => target.map(|target| target.cookie),
        };
        if let Some(target) = target {
            self.take_name(to.0, to.1, now)?;
            self.drop_link(target.ino, now)?;
        }
        self.take_name(from.0, from.1, now)?;
        self.add_name(to.0, to.1, source.ino, place, now)?;
        self.moved(source, to.0, now)?;
        if flags.whiteout {
            let owner = self.inode(source.ino)?;
            let (uid, gid) = (owner.uid, owner.gid);
            let whiteout = NewNode { mode: FileKind::CharDevice.bits(), uid, gid, ..NewNode::default() };
            self.create_at(from.0, from.1, whiteout, Some(source.cookie), now)?;
        }
        Ok(())
    }

    /// Whether names are moved within a split directory, which is done here for files only.
    fn check_split(
        &self,
        from: Ino,
        to: Ino,
        (source, target): (Dentry, Option<Dentry>),
        flags: RenameFlags,
    ) -> Result<bool, TreeError> {
        let is_split = self.is_split(from) || self.is_split(to);
        let has_directory =
            [Some(source), target].into_iter().flatten().any(|moved| moved.kind == FileKind::Directory);
        if is_split && (from != to || has_directory || flags.exchange || flags.whiteout) {
            return Err(TreeError::Missing(Missing::Executor));
        }
        Ok(is_split)
    }

    /// The inode itself learns that it is elsewhere now.
    fn moved(&mut self, dentry: Dentry, dir: Ino, now: Timestamp) -> Result<(), TreeError> {
        let row = self.change(dentry.ino)?;
        row.ctime = now;
        if dentry.kind == FileKind::Directory || row.nlink == 1 && row.parent != STRAY {
            row.parent = dir;
        } else if row.parent != dir {
            // Its other names stay where they were: it is owned by itself from now on.
            row.parent = STRAY;
            self.own_homeless(dentry.ino);
        }
        Ok(())
    }

    fn check_replaceable(&mut self, source: Dentry, target: Dentry) -> Result<(), TreeError> {
        self.inode(target.ino)?;
        match (source.kind == FileKind::Directory, target.kind == FileKind::Directory) {
            (true, false) => Err(TreeError::NotDirectory),
            (false, true) => Err(TreeError::IsDirectory),
            (true, true) => self.check_empty(target),
            (false, false) => Ok(()),
        }
    }

    /// A directory must not move below itself.
    fn check_no_cycle(&self, source: Dentry, from: Ino, to: Ino) -> Result<(), TreeError> {
        if source.kind != FileKind::Directory || from == to {
            return Ok(());
        }
        let mut above = to;
        loop {
            if above == source.ino {
                return Err(TreeError::Invalid);
            }
            if above == Ino::ROOT {
                return Ok(());
            }
            above = self.inode(above)?.parent;
        }
    }

    fn exchange(
        &mut self,
        (from, source): ((Ino, &[u8]), Dentry),
        (to, target): ((Ino, &[u8]), Dentry),
        now: Timestamp,
    ) -> Result<(), TreeError> {
        self.inode(target.ino)?;
        self.check_no_cycle(target, to.0, from.0)?;
        if source.ino == target.ino {
            return Ok(());
        }
        for (place, old, new) in [(from, source, target), (to, target, source)] {
            let name = Name::new(place.1);
            self.note_name(place.0, &name, true)?;
            self.names(place.0, place.1)?.insert(name, Dentry { cookie: old.cookie, ..new });
            let parent = self.change(place.0)?;
            parent.nlink -= u32::from(old.kind == FileKind::Directory);
            parent.nlink += u32::from(new.kind == FileKind::Directory);
            (parent.mtime, parent.ctime) = (now, now);
        }
        self.moved(source, to.0, now)?;
        self.moved(target, from.0, now)
    }
}
