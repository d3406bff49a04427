//! Operations as values: what a client asks the server to execute when it does not own what they change.

use bytes::Bytes;

use crate::grants::BySlots;
use crate::tree::{AttributeChange, NewNode, RenameFlags, Tree};
use crate::{Ino, Name, Timestamp, TreeError};

/// An operation on names, or on a row.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// [`Tree::create`]
    Create(Ino, Name, NewNode),
    /// [`Tree::link`]: the inode gets a name in the directory.
    Link(Ino, Ino, Name),
    /// [`Tree::unlink`]
    Unlink(Ino, Name),
    /// [`Tree::rmdir`]
    Rmdir(Ino, Name),
    /// [`Tree::rename`]
    Rename((Ino, Name), (Ino, Name), RenameFlags),
    /// [`Tree::set_attributes`], never with a size.
    SetAttributes(Ino, AttributeChange),
    /// [`Tree::set_xattr`]: name, value, and whether it must not or must exist.
    SetXattr(Ino, Bytes, Bytes, (bool, bool)),
    /// [`Tree::remove_xattr`]
    RemoveXattr(Ino, Bytes),
}

impl Change {
    /// Directories of which names change, once or twice.
    pub fn directories(&self) -> Vec<Ino> {
        match self {
            Change::Create(dir, ..) | Change::Link(_, dir, _) => vec![*dir],
            Change::Unlink(dir, _) | Change::Rmdir(dir, _) => vec![*dir],
            Change::Rename((from, _), (to, _), _) if from == to => vec![*from],
            Change::Rename((from, _), (to, _), _) => vec![*from, *to],
            Change::SetAttributes(..) | Change::SetXattr(..) | Change::RemoveXattr(..) => Vec::new(),
        }
    }

    /// Names that it looks at or changes.
    pub fn places(&self) -> Vec<(Ino, &Name)> {
        match self {
            Change::Create(dir, name, _) | Change::Link(_, dir, name) => vec![(*dir, name)],
            Change::Unlink(dir, name) | Change::Rmdir(dir, name) => vec![(*dir, name)],
            Change::Rename((from, old), (to, new), _) => vec![(*from, old), (*to, new)],
            Change::SetAttributes(..) | Change::SetXattr(..) | Change::RemoveXattr(..) => Vec::new(),
        }
    }

    /// Whether who owns the slots of its names does it itself, in a directory that is split.
    pub fn by_slots(&self) -> BySlots {
        let is_file = |new: &NewNode| crate::FileKind::of_mode(new.mode) != Some(crate::FileKind::Directory);
        match self {
            Change::Create(_, _, new) if is_file(new) => BySlots::Makes,
            Change::Unlink(..) => BySlots::Can,
            Change::Rename(from, to, flags) if from.0 == to.0 && *flags == RenameFlags::default() => {
                BySlots::Can
            }
            _ => BySlots::Cannot,
        }
    }

    /// The inode that it is about by number.
    pub fn inode(&self) -> Option<Ino> {
        match self {
            Change::Link(ino, ..)
            | Change::SetAttributes(ino, _)
            | Change::SetXattr(ino, ..)
            | Change::RemoveXattr(ino, _) => Some(*ino),
            _ => None,
        }
    }

    /// Does it. Returns the inode that was made.
    ///
    /// # Errors
    /// Those of the operation; then nothing was changed.
    pub fn apply(&self, tree: &mut Tree, now: Timestamp) -> Result<Option<Ino>, TreeError> {
        match self {
            Change::Create(dir, name, new) => tree.create(*dir, name.as_bytes(), new.clone(), now).map(Some),
            Change::Link(ino, dir, name) => tree.link(*ino, *dir, name.as_bytes(), now).map(|()| None),
            Change::Unlink(dir, name) => tree.unlink(*dir, name.as_bytes(), now).map(|_| None),
            Change::Rmdir(dir, name) => tree.rmdir(*dir, name.as_bytes(), now).map(|_| None),
            Change::Rename((from, old), (to, new), flags) => {
                tree.rename((*from, old.as_bytes()), (*to, new.as_bytes()), *flags, now).map(|()| None)
            }
            Change::SetAttributes(ino, change) => tree.set_attributes(*ino, *change, now).map(|()| None),
            Change::SetXattr(ino, name, value, exists) => {
                tree.set_xattr(*ino, name, value, *exists, now).map(|()| None)
            }
            Change::RemoveXattr(ino, name) => tree.remove_xattr(*ino, name, now).map(|()| None),
        }
    }
}
