//! Changes and publishing, on real files and real overlay mounts. These tests need root.

mod naming;
mod overlay;
mod publishing;
mod tree;
