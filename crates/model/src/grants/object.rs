//! What sessions hold.

use crate::{FileKind, Ino, InodeRow};

/// How a session holds a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grant {
    /// Shared: may answer lookups and listings itself, and is told of every change.
    Read,
    /// Exclusive: may also change the directory and its files without asking.
    Own,
}

/// What is granted: a directory, or a file by itself.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Object {
    /// A directory: its names, its row, and its files as far as nobody owns them by themselves.
    Directory(Ino),
    /// Anything else: its row and data. `home` is the directory that all its names are in; `Ino(0)`: a stray.
    File {
        /// The file.
        ino: Ino,
        /// Its home directory, or `Ino(0)`.
        home: Ino,
    },
}

impl Object {
    /// The object that an inode's row says it is.
    pub fn of(ino: Ino, row: &InodeRow) -> Object {
        match row.kind() {
            FileKind::Directory => Object::Directory(ino),
            _ => Object::File { ino, home: if row.nlink == 0 { STRAY } else { row.parent } },
        }
    }

    /// The object's inode.
    pub fn ino(self) -> Ino {
        match self {
            Object::Directory(ino) | Object::File { ino, .. } => ino,
        }
    }

    /// The home of a file that has one.
    pub fn home(self) -> Option<Ino> {
        match self {
            Object::File { home, .. } if home != STRAY => Some(home),
            _ => None,
        }
    }

    pub(super) fn is_stray(self) -> bool {
        matches!(self, Object::File { home: STRAY, .. })
    }
}

/// An object with its home, in the order of recalls: while an owner has the home, a file that it has given back already
/// could become its own again, by losing its last name.
pub(super) fn home_first(object: &Object) -> impl Iterator<Item = Object> + use<> {
    [object.home().map(Object::Directory), Some(*object)].into_iter().flatten()
}

/// The home of files that have none.
pub const STRAY: Ino = Ino(0);
