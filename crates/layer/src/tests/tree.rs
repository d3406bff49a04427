//! Trees for tests: what is in one, and doing something to one.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, XattrFlags};

use crate::files::folder::{FileKind, Folder};

/// Everything that is to be kept of one file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Seen {
    kind: FileKind,
    mode: u32,
    owner: (u32, u32),
    mtime: (i64, i64),
    xattrs: BTreeMap<String, Vec<u8>>,
    /// Bytes, a link's target, or a device number.
    content: Vec<u8>,
    /// The first of the names of the same file.
    pub(super) first_name: PathBuf,
}

/// What is seen, by path.
pub(super) type SeenTree = BTreeMap<PathBuf, Seen>;

/// Everything below a folder, and the folder itself under an empty path.
pub(super) fn seen(top: &Path) -> SeenTree {
    let mut all = BTreeMap::new();
    look(top, Path::new(""), &mut all, &mut HashMap::new());
    all
}

fn look(top: &Path, path: &Path, all: &mut SeenTree, names: &mut HashMap<(u64, u64), PathBuf>) {
    let full = if path.as_os_str().is_empty() { top.to_owned() } else { top.join(path) };
    let (folder, name) = match path.file_name() {
        Some(name) => (Folder::open(full.parent().unwrap()).unwrap(), name),
        None => (Folder::open(top).unwrap(), OsStr::new(".")),
    };
    let meta = folder.meta(name).unwrap().unwrap();
    let content = match meta.kind {
        FileKind::File => fs::read(&full).unwrap(),
        FileKind::Symlink => fs::read_link(&full).unwrap().into_os_string().into_encoded_bytes(),
        _ => meta.rdev.to_le_bytes().to_vec(),
    };
    let xattrs = folder.xattrs(name).unwrap();
    let xattrs = xattrs.into_iter().map(|(name, value)| (name.into_string().unwrap(), value));
    let first_name = match meta.kind {
        FileKind::Folder => path.to_owned(),
        _ => names.entry(meta.inode).or_insert_with(|| path.to_owned()).clone(),
    };
    let is_folder = meta.kind == FileKind::Folder;

    all.insert(
        path.to_owned(),
        Seen {
            kind: meta.kind,
            mode: meta.mode,
            owner: (meta.uid, meta.gid),
            mtime: meta.mtime,
            xattrs: xattrs.collect(),
            content: if is_folder { Vec::new() } else { content },
            first_name,
        },
    );
    if is_folder {
        let mut below = Folder::open(&full).unwrap().names().unwrap();
        below.sort();
        below.iter().for_each(|name| look(top, &path.join(name), all, names));
    }
}

/// Fails, naming what differs, when two trees are not the same.
pub(super) fn assert_same(expected: &Path, found: &Path) {
    assert_same_as(&seen(expected), found);
}

pub(super) fn assert_same_as(expected: &SeenTree, found: &Path) {
    let found = seen(found);
    let paths: std::collections::BTreeSet<_> = expected.keys().chain(found.keys()).collect();
    let different: Vec<String> = paths
        .into_iter()
        .filter(|path| expected.get(*path) != found.get(*path))
        .map(|path| {
            format!(
                "/{}:\n  expected {:?}\n  found    {:?}",
                path.display(),
                expected.get(path),
                found.get(path)
            )
        })
        .collect();
    assert!(different.is_empty(), "{}", different.join("\n"));
}

/// Something done to a tree; what cannot be done there is left.
#[derive(Debug, Clone)]
#[allow(missing_docs)]
pub(super) enum Op {
    Write(PathBuf, u8),
    Append(PathBuf, u8),
    Sparse(PathBuf, u8),
    /// Opens it to write, and writes nothing: overlayfs copies it up.
    CopyUp(PathBuf),
    Mkdir(PathBuf),
    Unlink(PathBuf),
    RemoveTree(PathBuf),
    ReplaceFolder(PathBuf),
    Rename(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    Symlink(PathBuf, u8),
    Chmod(PathBuf, u32),
    Chown(PathBuf, u32, u32),
    Xattr(PathBuf, &'static str, u8),
    Unxattr(PathBuf, &'static str),
    Special(PathBuf, FileKind, u8),
    Touch(PathBuf, i64, i64),
}

const CAPABILITY: &str = "security.capability";
/// A value of the attribute that setcap(8) writes: VFS_CAP_REVISION_2, permitted and effective.
const CAP_NET_RAW: [u8; 20] = [1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];

fn path() -> impl Strategy<Value = PathBuf> {
    let name = prop::sample::select(vec!["a", "b", "c", "d"]);
    prop::collection::vec(name, 1..=3).prop_map(|names| names.iter().collect())
}

/// One random operation.
pub(super) fn op() -> impl Strategy<Value = Op> {
    let attribute = || prop::sample::select(vec!["user.a", "user.b", "trusted.t", CAPABILITY]);
    let special =
        prop::sample::select(vec![FileKind::Fifo, FileKind::Socket, FileKind::Chardev, FileKind::Blockdev]);
    let mode = prop::sample::select(vec![0o644, 0o4755, 0o2755, 0o600, 0o1777, 0]);
    prop_oneof![
        3 => (path(), any::<u8>()).prop_map(|(p, b)| Op::Write(p, b)),
        1 => (path(), any::<u8>()).prop_map(|(p, b)| Op::Append(p, b)),
        1 => (path(), any::<u8>()).prop_map(|(p, b)| Op::Sparse(p, b)),
        1 => path().prop_map(Op::CopyUp),
        4 => path().prop_map(Op::Mkdir),
        1 => path().prop_map(Op::Unlink),
        1 => path().prop_map(Op::RemoveTree),
        1 => path().prop_map(Op::ReplaceFolder),
        2 => (path(), path()).prop_map(|(a, b)| Op::Rename(a, b)),
        2 => (path(), path()).prop_map(|(a, b)| Op::Link(a, b)),
        1 => (path(), any::<u8>()).prop_map(|(p, b)| Op::Symlink(p, b)),
        1 => (path(), mode).prop_map(|(p, m)| Op::Chmod(p, m)),
        1 => (path(), 0..3u32, 0..3u32).prop_map(|(p, u, g)| Op::Chown(p, u * 1000, g * 1000)),
        1 => (path(), attribute(), any::<u8>()).prop_map(|(p, a, b)| Op::Xattr(p, a, b)),
        1 => (path(), attribute()).prop_map(|(p, a)| Op::Unxattr(p, a)),
        1 => (path(), special, any::<u8>()).prop_map(|(p, k, b)| Op::Special(p, k, b)),
        1 => (path(), 0..2_000_000_000i64, 0..1_000_000_000i64).prop_map(|(p, s, n)| Op::Touch(p, s, n)),
    ]
}

/// Does it below `top`; an operation that fails there is fine.
pub(super) fn apply(top: &Path, ops: &[Op]) {
    for op in ops {
        let _ = apply_one(top, op);
    }
}

fn apply_one(top: &Path, op: &Op) -> io::Result<()> {
    let at = |path: &Path| top.join(path);
    match op {
        Op::Write(path, byte) => {
            plain(&at(path))?;
            fs::write(at(path), vec![*byte; usize::from(*byte) * 17])
        }
        Op::Append(path, byte) => {
            plain(&at(path))?;
            OpenOptions::new().append(true).open(at(path))?.write_all(&[*byte])
        }
        Op::Sparse(path, byte) => {
            plain(&at(path))?;
            let file = File::create(at(path))?;
            file.write_at(&[*byte], 100_000)?;
            file.set_len(1_000_000)
        }
        Op::CopyUp(path) => {
            plain(&at(path))?;
            OpenOptions::new().write(true).open(at(path)).map(drop)
        }
        Op::Mkdir(path) => fs::create_dir_all(at(path)),
        Op::Unlink(path) => fs::remove_file(at(path)),
        Op::RemoveTree(path) => fs::remove_dir_all(at(path)),
        Op::ReplaceFolder(path) => {
            fs::remove_dir_all(at(path))?;
            fs::create_dir(at(path))
        }
        Op::Rename(from, to) => fs::rename(at(from), at(to)),
        Op::Link(from, to) => fs::hard_link(at(from), at(to)),
        Op::Symlink(path, byte) => symlink(format!("../{byte}"), at(path)),
        Op::Chmod(path, mode) => {
            if at(path).symlink_metadata()?.is_symlink() {
                return Ok(());
            }
            Ok(rustix::fs::chmod(at(path), Mode::from_raw_mode(*mode))?)
        }
        Op::Chown(path, uid, gid) => lchown(at(path), Some(*uid), Some(*gid)),
        Op::Xattr(path, name, byte) => {
            let value = if *name == CAPABILITY { &CAP_NET_RAW[..] } else { &[*byte; 40][..] };
            Ok(rustix::fs::lsetxattr(at(path), *name, value, XattrFlags::empty())?)
        }
        Op::Unxattr(path, name) => Ok(rustix::fs::lremovexattr(at(path), *name)?),
        Op::Special(path, kind, byte) => {
            let device = rustix::fs::makedev(7, u32::from(*byte));
            Ok(rustix::fs::mknodat(CWD, at(path), kind.file_type(), Mode::from_raw_mode(0o640), device)?)
        }
        Op::Touch(path, secs, nanos) => {
            let (folder, name) =
                (Folder::open(at(path).parent().unwrap())?, path.file_name().unwrap().to_owned());
            folder.set_mtime(&name, (*secs, *nanos))
        }
    }
}

/// Not through a link, and not into a FIFO, which would wait, or a device.
fn plain(path: &Path) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(there) if !there.is_file() => Err(io::Error::other("no regular file")),
        _ => Ok(()),
    }
}

/// A tree with one of everything.
pub(super) fn with_everything(top: &Path) {
    fs::create_dir_all(top.join("usr/bin")).unwrap();
    fs::create_dir_all(top.join("etc/deep/er")).unwrap();
    fs::write(top.join("usr/bin/ping"), b"a program").unwrap();
    chown(top.join("usr/bin/ping"), Some(0), Some(1000)).unwrap();
    apply(
        top,
        &[
            Op::Chmod("usr/bin/ping".into(), 0o4755),
            Op::Xattr("usr/bin/ping".into(), CAPABILITY, 0),
            Op::Xattr("etc/deep".into(), "user.a", 7),
            Op::Chmod("etc/deep".into(), 0o2750),
            Op::Write("etc/one".into(), 3),
            Op::Link("etc/one".into(), "etc/two".into()),
            Op::Link("etc/one".into(), "usr/three".into()),
            Op::Sparse("etc/sparse".into(), 9),
            Op::Symlink("etc/link".into(), 4),
            Op::Special("etc/fifo".into(), FileKind::Fifo, 0),
            Op::Special("etc/socket".into(), FileKind::Socket, 0),
            Op::Special("etc/null".into(), FileKind::Chardev, 3),
            Op::Special("etc/disk".into(), FileKind::Blockdev, 5),
            Op::Chown("etc/link".into(), 1000, 1000),
            Op::Write("etc/deep/er/x".into(), 8),
            Op::Touch("etc/deep/er/x".into(), 981_173_106, 123_456_789),
            Op::Touch("etc/deep".into(), 981_173_106, 987_654_321),
        ],
    );
    assert_eq!(seen(top).len(), 17);
}

/// A whiteout, as overlayfs makes it.
pub(super) fn whiteout(path: &Path) {
    rustix::fs::mknodat(CWD, path, FileType::CharacterDevice, Mode::empty(), 0).unwrap();
}

/// Sets an extended attribute.
pub(super) fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    rustix::fs::lsetxattr(path, name, value, XattrFlags::empty()).unwrap();
}
