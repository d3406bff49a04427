//! Trees of files by their content: the name that a tree has (a Merkle root over names, modes, owners, extended attributes and
//! contents), worked out from a folder, what differs between two of them, and where contents are cut for transfer. The server works the same name out from its rows.

mod below;
pub mod chunk;
mod compare;
pub mod holes;
pub mod name;
mod walk;
mod whole;
mod xattrs;

pub use below::{file_below, names_below, open_below};
pub use compare::{Difference, How, compare};
pub use name::{Attributes, Body, Kind, Node, PIECE, Pieces, TreeName};
pub use walk::{
    Contents, Entry, Found, Progress, Unopened, WalkError, Walked, is_mount, named, read, split, walk,
    walk_with,
};
