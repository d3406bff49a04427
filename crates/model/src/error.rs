//! What can go wrong with an operation on the tree.

use crate::Ino;
use crate::grants::Object;

/// Something that is not here: get it from the server and repeat the operation, which has changed nothing.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Missing {
    /// The inode's row.
    Inode(Ino),
    /// The directory's listing.
    Directory(Ino),
    /// The names of a stem in a slot of a split directory: [`crate::tree::Tree::wanted_stem`].
    Names(Ino),
    /// The whole listing of a split directory, which is not split any more then.
    Listing(Ino),
    /// More inode numbers.
    Numbers,
    /// The object belongs to others as well: acquire it, or ask the server to execute the operation.
    Own(Object),
    /// Only the server may execute this operation.
    Executor,
    /// That all hosts have heard of this change: see [`crate::tree::Tree::unheard`].
    Heard(u64),
}

/// Why an operation on the tree was refused; the tree is as it was before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TreeError {
    /// The name, or the attribute, does not exist.
    #[error("no such file, directory or attribute")]
    NotFound,
    /// The extended attribute does not exist.
    #[error("no such extended attribute")]
    NoAttribute,
    /// The name, or the attribute, exists already.
    #[error("it exists already")]
    Exists,
    /// The inode is no longer there.
    #[error("the inode is gone")]
    Stale,
    /// A directory is needed here.
    #[error("not a directory")]
    NotDirectory,
    /// A directory is not allowed here.
    #[error("is a directory")]
    IsDirectory,
    /// The directory still has entries.
    #[error("directory not empty")]
    NotEmpty,
    /// The name is longer than [`crate::NAME_MAX`] bytes.
    #[error("name too long")]
    NameTooLong,
    /// The arguments make no sense together.
    #[error("invalid argument")]
    Invalid,
    /// Not allowed on this kind of inode.
    #[error("operation not permitted")]
    NotPermitted,
    /// The inode has as many links as it may have.
    #[error("too many links")]
    TooManyLinks,
    /// The file would grow over the largest size.
    #[error("file too large")]
    TooLarge,
    /// The attribute's value, or all of them together, would be too large.
    #[error("attribute too large")]
    AttributeTooLarge,
    /// The volume's quota, in bytes or in inodes, is used up.
    #[error("no space left in the volume")]
    NoSpace,
    /// Something that the operation needs is not in memory: fetch it and repeat.
    #[error("not in memory: {0:?}")]
    Missing(Missing),
}
