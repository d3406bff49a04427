//! The oracle of the crash tests: a tree in memory, and a writer that does the same to a real one.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;

use crate::setup::calls;

/// What a path leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Node {
    Dir { mode: u32 },
    File { mode: u32, content: Vec<u8> },
    Link(String),
}

/// Every path below the top.
pub(crate) type Tree = BTreeMap<String, Node>;

/// A change that the file system makes in one step.
#[derive(Debug, Clone)]
pub(crate) enum Op {
    Create(String),
    Write {
        path: String,
        offset: u64,
        bytes: Vec<u8>,
    },
    Truncate(String, u64),
    Chmod(String, u32),
    Mkdir(String),
    Symlink(String, String),
    Rename(String, String),
    Unlink(String),
    Rmdir(String),
    /// Changes nothing; when it has returned, everything before it is durable.
    Fsync(String),
    /// The same, said of the top directory: without the option `syncfs` the kernel hands no syncfs(2) to us.
    FsyncTop,
}

/// Random numbers from a seed (xorshift64*).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % end
    }

    pub(crate) fn bytes(&mut self, count: usize) -> Vec<u8> {
        std::iter::repeat_with(|| self.below(256) as u8).take(count).collect()
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        (!from.is_empty()).then(|| &from[self.below(from.len() as u64) as usize])
    }
}

/// Bytes that do not compress and never repeat.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

impl Op {
    /// A change that makes sense for this tree.
    pub(crate) fn random(tree: &Tree, random: &mut Random, serial: u64) -> Op {
        let of = |wanted: fn(&Node) -> bool| -> Vec<String> {
            tree.iter().filter(|(_, node)| wanted(node)).map(|(path, _)| path.clone()).collect()
        };
        let files = of(|node| matches!(node, Node::File { .. }));
        let mut dirs = of(|node| matches!(node, Node::Dir { .. }));
        dirs.push(String::new());
        let new = |random: &mut Random, kind: &str| {
            let dir = random.pick(&dirs).cloned().unwrap_or_default();
            let slash = if dir.is_empty() { "" } else { "/" };
            format!("{dir}{slash}{kind}{serial}")
        };
        let file = random.pick(&files).cloned();
        match (random.below(100), file) {
            (0..=24, _) | (_, None) => Op::Create(new(random, "f")),
            (25..=54, Some(path)) => {
                let Some(Node::File { content, .. }) = tree.get(&path) else { return Op::FsyncTop };
                let offset = random.below(content.len() as u64 + 50);
                let bytes = vec![random.below(256) as u8; 1 + random.below(3000) as usize];
                // Inside one page: a write over two may be cut by the kernel.
                let room = 4096 - offset % 4096;
                Op::Write { path, offset, bytes: bytes.into_iter().take(room as usize).collect() }
            }
            (55..=58, Some(path)) => Op::Truncate(path, random.below(5000)),
            (59..=62, Some(path)) => Op::Chmod(path, 0o400 + random.below(0o400) as u32),
            (63..=67, _) => Op::Mkdir(new(random, "d")),
            (68..=70, _) => Op::Symlink(new(random, "l"), format!("target-{serial}")),
            (71..=80, Some(path)) => {
                let to = if random.below(3) == 0 { random.pick(&files).cloned() } else { None };
                match to.unwrap_or_else(|| new(random, "r")) {
                    to if to == path => Op::Unlink(path),
                    to => Op::Rename(path, to),
                }
            }
            (81..=92, Some(path)) => Op::Unlink(path),
            (93..=94, _) => {
                let leaf = |dir: &&String| {
                    !dir.is_empty() && !tree.keys().any(|path| path.starts_with(&format!("{dir}/")))
                };
                dirs.iter().find(leaf).cloned().map_or(Op::FsyncTop, Op::Rmdir)
            }
            // Rarely, so that most of what is kept was shipped for its age.
            (95..=98, Some(path)) if random.below(8) == 0 => Op::Fsync(path),
            (99, _) if random.below(8) == 0 => Op::FsyncTop,
            _ => Op::Create(new(random, "e")),
        }
    }

    pub(crate) fn is_sync(&self) -> bool {
        matches!(self, Op::Fsync(_) | Op::FsyncTop)
    }

    /// Does it to the tree in memory.
    pub(crate) fn apply(&self, tree: &mut Tree) {
        match self {
            Op::Create(path) => {
                drop(tree.insert(path.clone(), Node::File { mode: 0o644, content: Vec::new() }))
            }
            Op::Write { path, offset, bytes } => {
                if let Some(Node::File { content, .. }) = tree.get_mut(path) {
                    let (start, end) = (*offset as usize, *offset as usize + bytes.len());
                    content.resize(content.len().max(end), 0);
                    content[start..end].copy_from_slice(bytes);
                }
            }
            Op::Truncate(path, len) => {
                if let Some(Node::File { content, .. }) = tree.get_mut(path) {
                    content.resize(*len as usize, 0);
                }
            }
            Op::Chmod(path, new) => {
                if let Some(Node::File { mode, .. }) = tree.get_mut(path) {
                    *mode = *new;
                }
            }
            Op::Mkdir(path) => drop(tree.insert(path.clone(), Node::Dir { mode: 0o755 })),
            Op::Symlink(path, target) => drop(tree.insert(path.clone(), Node::Link(target.clone()))),
            Op::Rename(from, to) => {
                if let Some(node) = tree.remove(from) {
                    tree.insert(to.clone(), node);
                }
            }
            Op::Unlink(path) | Op::Rmdir(path) => drop(tree.remove(path)),
            Op::Fsync(_) | Op::FsyncTop => {}
        }
    }

    /// The paths that it changes, or may change.
    fn paths(&self) -> Vec<&String> {
        match self {
            Op::Create(path)
            | Op::Write { path, .. }
            | Op::Truncate(path, _)
            | Op::Chmod(path, _)
            | Op::Mkdir(path)
            | Op::Symlink(path, _)
            | Op::Unlink(path)
            | Op::Rmdir(path) => vec![path],
            Op::Rename(from, to) => vec![from, to],
            Op::Fsync(_) | Op::FsyncTop => Vec::new(),
        }
    }

    /// Does it to a real tree.
    pub(crate) fn perform(&self, top: &Path) -> io::Result<()> {
        let at = |path: &String| top.join(path);
        match self {
            Op::Create(path) => {
                calls::open(&at(path), libc::O_CREAT | libc::O_EXCL | libc::O_WRONLY, 0o644).map(drop)
            }
            Op::Write { path, offset, bytes } => {
                File::options().write(true).open(at(path))?.write_at(bytes, *offset).map(drop)
            }
            Op::Truncate(path, len) => {
                let path = calls::c_path(&at(path));
                // SAFETY: the string lives until the call returns.
                match unsafe { libc::truncate(path.as_ptr(), *len as i64) } {
                    0 => Ok(()),
                    _ => Err(io::Error::last_os_error()),
                }
            }
            Op::Chmod(path, mode) => fs::set_permissions(at(path), fs::Permissions::from_mode(*mode)),
            Op::Mkdir(path) => fs::create_dir(at(path)),
            Op::Symlink(path, target) => symlink(target, at(path)),
            Op::Rename(from, to) => fs::rename(at(from), at(to)),
            Op::Unlink(path) => fs::remove_file(at(path)),
            Op::Rmdir(path) => fs::remove_dir(at(path)),
            Op::Fsync(path) => File::open(at(path))?.sync_all(),
            Op::FsyncTop => File::open(top)?.sync_all(),
        }
    }
}

/// What is really there.
pub(crate) fn read_tree(top: &Path) -> Tree {
    fn walk(top: &Path, dir: &Path, tree: &mut Tree) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(top).unwrap().to_str().unwrap().to_owned();
            let info = fs::symlink_metadata(&path).unwrap();
            let mode = info.permissions().mode() & 0o7777;
            let node = if info.is_dir() {
                walk(top, &path, tree);
                Node::Dir { mode }
            } else if info.is_symlink() {
                Node::Link(fs::read_link(&path).unwrap().to_str().unwrap().to_owned())
            } else {
                Node::File { mode, content: fs::read(&path).unwrap() }
            };
            tree.insert(name, node);
        }
    }
    let mut tree = Tree::new();
    walk(top, top, &mut tree);
    tree
}

/// Finds the prefix of the history that a tree is; `least` of its changes must be in it. Panics when
/// it is none, with the first difference to the nearest.
pub(crate) fn find_prefix(start: &Tree, history: &[Op], least: usize, found: &Tree) -> usize {
    let mut tree = start.clone();
    let mut nearest = (usize::MAX, 0, String::new());
    // The last match: changes that alter nothing visible count as kept.
    let mut matched = None;
    let paths = tree.keys().chain(found.keys());
    let mut differences: BTreeSet<String> =
        paths.filter(|path| tree.get(*path) != found.get(*path)).cloned().collect();
    for count in 0..=history.len() {
        if count > 0 {
            let op = &history[count - 1];
            op.apply(&mut tree);
            for path in op.paths() {
                if tree.get(path) == found.get(path) {
                    differences.remove(path);
                } else {
                    differences.insert(path.clone());
                }
            }
        }
        match differences.first() {
            None => matched = Some(count),
            Some(first) if differences.len() < nearest.0 => {
                nearest = (differences.len(), count, format!("{first}: {}", describe(&tree, found, first)));
            }
            Some(_) => {}
        }
    }
    match matched {
        Some(count) if count >= least => count,
        Some(count) => panic!("only {count} changes are kept, {least} of {} were durable", history.len()),
        None => panic!(
            "the tree is no prefix of the {} changes ({least} were durable); nearest after {}: {} differences; {}",
            history.len(),
            nearest.1,
            nearest.0,
            nearest.2
        ),
    }
}

fn describe(expected: &Tree, found: &Tree, path: &str) -> String {
    let show = |node: Option<&Node>| match node {
        Some(Node::File { mode, content }) => format!("a file of {} bytes, mode {mode:o}", content.len()),
        other => format!("{other:?}"),
    };
    format!("expected {}, found {}", show(expected.get(path)), show(found.get(path)))
}
