//! The rules of Hayloft, pure: identifiers, inode and dentry rows, log records and how they apply,
//! the tree that answers file-system operations, the grant machine, and errors.
//!
//! Nothing here does I/O, spawns, sleeps or reads a clock: the time of an operation is an argument.
//! The same code runs in the server, in the client and in tests.

mod batch;
mod change;
pub mod clock;
mod error;
pub mod estates;
mod execute;
pub mod grants;
mod id;
pub mod locks;
pub mod replay;
mod row;
mod rows;
pub mod slot;
pub mod sound;
mod time;
pub mod tree;

pub use batch::{Batch, Record, Usage, UsageDelta};
pub use change::Change;
pub use error::{Missing, TreeError};
pub use estates::Estates;
pub use execute::{Executed, Execution, Refused, Wants};
pub use id::{ContentHash, Ino, InoRange, Sequence, SessionId};
pub use row::{
    BLOCK_SIZE, BlockRef, Content, Dentry, FileKind, INLINE_MAX, InodeRow, NAME_MAX, Name, PAGE_BLOCKS,
    Xattrs, blocks_of, pages_of,
};
pub use rows::Rows;
pub use time::Timestamp;
