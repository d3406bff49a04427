//! Tar archives, compressed or not, unpacked with everything that is in them.
//!
//! An archive may come from anywhere: each path in it is looked up with the new tree as the top of all (openat2(2),
//! `RESOLVE_IN_ROOT`), so that neither `..` nor a link of the archive leads out of it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{self, AtFlags, Mode, OFlags};
use tar::EntryType;

use crate::error::{Context, LayerError, Result};
use crate::files::copy::{Attributes, Copier, Lost};
use crate::files::folder::{FileKind, Folder, Xattrs};

/// What a file is, by its first bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sort {
    Tar,
    Gzip,
    Zstd,
    Xz,
    Bzip2,
    /// An image of a file system, which can be mounted.
    Image,
    Unknown,
}

/// Looks at the first bytes of a file.
pub(crate) fn sort_of(path: &Path) -> io::Result<Sort> {
    let mut first = Vec::new();
    File::open(path)?.take(2048).read_to_end(&mut first)?;
    let has = |at: usize, magic: &[u8]| first.get(at..at + magic.len()) == Some(magic);
    let known = [
        (has(0, &[0x1f, 0x8b]), Sort::Gzip),
        (has(0, &[0x28, 0xb5, 0x2f, 0xfd]), Sort::Zstd),
        (has(0, &[0xfd, b'7', b'z', b'X', b'Z', 0]), Sort::Xz),
        (has(0, b"BZh"), Sort::Bzip2),
        (has(257, b"ustar"), Sort::Tar),
        // squashfs, erofs, ext2 to ext4.
        (has(0, b"hsqs") || has(1024, &[0xe2, 0xe1, 0xf5, 0xe0]) || has(1080, &[0x53, 0xef]), Sort::Image),
    ];
    Ok(known.into_iter().find_map(|(is, sort)| is.then_some(sort)).unwrap_or(Sort::Unknown))
}

/// Unpacks an archive into an empty folder. `progress` is told how many of its bytes are read, and how many there are.
///
/// # Errors
/// When it is no archive, is damaged, or cannot be unpacked there.
pub(crate) fn unpack(archive: &Path, into: &Path, progress: &dyn Fn(u64, u64)) -> Result<Lost> {
    let file = File::open(archive).context("open", archive)?;
    let length = file.metadata().context("look at", archive)?.len();
    let read = Rc::new(Cell::new(0));
    let counted = BufReader::with_capacity(256 << 10, Counted { file, read: Rc::clone(&read) });
    let plain: Box<dyn Read> = match sort_of(archive).context("read", archive)? {
        Sort::Tar => Box::new(counted),
        Sort::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(counted)),
        Sort::Zstd => Box::new(zstd::Decoder::with_buffer(counted).context("read", archive)?),
        Sort::Xz => Box::new(liblzma::bufread::XzDecoder::new_multi_decoder(counted)),
        Sort::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(counted)),
        Sort::Image | Sort::Unknown => {
            let why = "it is no tar archive (plain, gzip, zstd, xz or bzip2)".to_owned();
            return Err(LayerError::NotALayer { path: archive.to_owned(), why });
        }
    };
    let mut unpacker = Unpacker {
        top: Folder::open(into).context("open", into)?,
        copier: Copier::new(),
        folders: BTreeMap::new(),
        open: None,
    };
    let mut tar = tar::Archive::new(plain);
    for (at, entry) in tar.entries().context("read", archive)?.enumerate() {
        let mut entry = entry.context("read", archive)?;
        let path = Path::new(OsStr::from_bytes(&entry.path_bytes())).to_owned();
        unpacker.entry(&mut entry).context("unpack", archive.join(path))?;
        if at % 64 == 0 {
            progress(read.get(), length);
        }
    }
    // What comes after the end mark has the checksum of a compressed archive.
    io::copy(&mut tar.into_inner(), &mut io::sink()).context("read", archive)?;
    unpacker.finish().context("unpack", archive)
}

/// Counts what is read.
struct Counted {
    file: File,
    read: Rc<Cell<u64>>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let length = self.file.read(buffer)?;
        self.read.set(self.read.get() + length as u64);
        Ok(length)
    }
}

/// What the extended header of an entry says.
#[derive(Default)]
struct Extended {
    uid: Option<u32>,
    gid: Option<u32>,
    mtime: Option<(i64, i64)>,
    xattrs: Xattrs,
    sparse: Option<Sparse>,
}

/// A file with holes as GNU tar writes it in the PAX format.
struct Sparse {
    /// Its name, unless that of the entry is the one.
    name: Option<PathBuf>,
    /// With the holes.
    size: u64,
    /// Offset and length of each piece of the content; without it (version 1.0) they come before the content.
    map: Option<Vec<(u64, u64)>>,
}

/// What the extended header says of holes, in the versions 0.0, 0.1 and 1.0.
#[derive(Default)]
struct SparseKeys {
    found: bool,
    version: (u64, u64),
    name: Option<PathBuf>,
    size: Option<u64>,
    pieces: Option<u64>,
    /// Offsets and lengths in turn.
    map: Vec<u64>,
}

impl SparseKeys {
    fn take(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        self.found = true;
        let number = || {
            let text = std::str::from_utf8(value).ok();
            text.and_then(|text| text.parse().ok())
                .ok_or_else(|| damaged("a damaged number in a map of holes"))
        };
        match key {
            b"name" => self.name = Some(PathBuf::from(OsStr::from_bytes(value))),
            b"size" | b"realsize" => self.size = Some(number()?),
            b"major" => self.version.0 = number()?,
            b"minor" => self.version.1 = number()?,
            b"numblocks" => self.pieces = Some(number()?),
            b"offset" | b"numbytes" => self.map.push(number()?),
            b"map" => {
                let numbers =
                    std::str::from_utf8(value).unwrap_or("-").split(',').filter(|text| !text.is_empty());
                let numbers: Result<Vec<u64>, _> = numbers.map(str::parse).collect();
                self.map = numbers.map_err(|_| damaged("a damaged map of holes"))?;
            }
            other => {
                let key = String::from_utf8_lossy(other);
                return Err(damaged(&format!("a file with holes in an unknown form (GNU.sparse.{key})")));
            }
        }
        Ok(())
    }

    fn finish(self) -> io::Result<Option<Sparse>> {
        if !self.found {
            return Ok(None);
        }
        let size = self.size.ok_or_else(|| damaged("a file with holes and without a size"))?;
        match self.version {
            (1, 0) => Ok(Some(Sparse { name: self.name, size, map: None })),
            (0, _) => {
                let (pairs, rest) = self.map.as_chunks::<2>();
                let map: Vec<_> = pairs.iter().map(|[offset, length]| (*offset, *length)).collect();
                if !rest.is_empty() || self.pieces.is_none_or(|pieces| pieces != map.len() as u64) {
                    return Err(damaged("a damaged map of holes"));
                }
                Ok(Some(Sparse { name: self.name, size, map: Some(map) }))
            }
            (major, minor) => {
                Err(damaged(&format!("a file with holes in an unknown form (GNU.sparse {major}.{minor})")))
            }
        }
    }
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

impl Extended {
    fn of<R: Read>(entry: &mut tar::Entry<'_, R>) -> io::Result<Extended> {
        let mut extended = Extended::default();
        let mut sparse = SparseKeys::default();
        let Some(pairs) = entry.pax_extensions()? else { return Ok(extended) };
        for pair in pairs {
            let pair = pair?;
            let (key, value) = (pair.key_bytes(), pair.value_bytes());
            let number = || std::str::from_utf8(value).ok().and_then(|text| text.parse::<u64>().ok());
            match key {
                b"uid" => extended.uid = number().and_then(|n| n.try_into().ok()),
                b"gid" => extended.gid = number().and_then(|n| n.try_into().ok()),
                b"mtime" => extended.mtime = std::str::from_utf8(value).ok().and_then(parse_time),
                _ => {
                    if let Some(key) = key.strip_prefix(b"GNU.sparse.") {
                        sparse.take(key, value)?;
                    } else if let Some(attribute) = key.strip_prefix(b"SCHILY.xattr.") {
                        extended.xattrs.insert(OsStr::from_bytes(attribute).to_owned(), value.to_owned());
                    }
                }
            }
        }
        extended.sparse = sparse.finish()?;
        Ok(extended)
    }
}

/// Seconds with a fraction, as `1700000000.123456789`; negative before 1970.
fn parse_time(text: &str) -> Option<(i64, i64)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let secs: i64 = whole.parse().ok()?;
    let digits: String = fraction.chars().chain("000000000".chars()).take(9).collect();
    let nanos: i64 = digits.parse().ok()?;
    Some(if whole.starts_with('-') && nanos > 0 { (secs - 1, 1_000_000_000 - nanos) } else { (secs, nanos) })
}

struct Unpacker {
    top: Folder,
    copier: Copier,
    /// Attributes of the folders, set when all is in them.
    folders: BTreeMap<PathBuf, Attributes>,
    /// The folder that the last entry went into: most come in order.
    open: Option<OpenFolder>,
}

struct OpenFolder {
    folder: Folder,
    /// Its path in the archive.
    named: PathBuf,
    /// Its path below the top of the tree without links: when all is unpacked they may lead elsewhere, or be no way for what
    /// is in the tree.
    real: PathBuf,
}

impl Unpacker {
    fn entry<R: Read>(&mut self, entry: &mut tar::Entry<'_, R>) -> io::Result<()> {
        let extended = Extended::of(entry)?;
        let named = extended.sparse.as_ref().and_then(|sparse| sparse.name.clone());
        let raw = named.unwrap_or_else(|| PathBuf::from(OsStr::from_bytes(&entry.path_bytes())));
        let path = below_top(&raw);
        let header = entry.header();
        let number = |value: io::Result<u64>| value.and_then(|v| u32::try_from(v).map_err(io::Error::other));
        let attributes = Attributes {
            mode: header.mode()? & 0o7777,
            uid: extended.uid.map_or_else(|| number(header.uid()), Ok)?,
            gid: extended.gid.map_or_else(|| number(header.gid()), Ok)?,
            mtime: extended.mtime.unwrap_or((header.mtime()? as i64, 0)),
            xattrs: extended.xattrs,
        };
        let kind = header.entry_type();
        if path.as_os_str().is_empty() {
            if kind.is_dir() {
                self.folders.insert(path, attributes);
            }
            return Ok(());
        }
        let name = path.file_name().unwrap_or_default().to_owned();
        let parent = path.parent().unwrap_or(Path::new("")).to_owned();
        let open = match self.open.take() {
            Some(open) if open.named == parent => open,
            _ => self.open_folder(parent)?,
        };
        let OpenFolder { folder, real, .. } = &*self.open.insert(open);
        let path = real.join(&name);
        let there = folder.meta(&name)?;
        if kind.is_dir() {
            if !there.is_some_and(|there| there.is_folder()) {
                folder.remove(&name)?;
                fs::mkdirat(folder, &name, Mode::RWXU)?;
            }
            self.folders.insert(path, attributes);
            return Ok(());
        }
        if there.is_some() {
            self.folders.retain(|folder, _| !folder.starts_with(&path));
            folder.remove(&name)?;
        }
        let device = || -> io::Result<u64> {
            let part = |part: io::Result<Option<u32>>| part.map(Option::unwrap_or_default);
            Ok(fs::makedev(part(header.device_major())?, part(header.device_minor())?))
        };
        let kind = match kind {
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = File::from(fs::openat(folder, &name, flags, Mode::RUSR | Mode::WUSR)?);
                match extended.sparse {
                    Some(sparse) => write_mapped(entry, file, sparse)?,
                    None => write_sparse(entry, file)?,
                }
                FileKind::File
            }
            EntryType::Symlink => {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                fs::symlinkat(OsStr::from_bytes(&target), folder, &name)?;
                FileKind::Symlink
            }
            EntryType::Link => {
                let target =
                    below_top(Path::new(OsStr::from_bytes(&entry.link_name_bytes().unwrap_or_default())));
                let from = self.top.sub_in_root(target.parent().unwrap_or(Path::new("")))?;
                let from_name = target.file_name().unwrap_or_default();
                // The attributes are the target's.
                return Ok(fs::linkat(&from, from_name, folder, &name, AtFlags::empty())?);
            }
            EntryType::Fifo | EntryType::Char | EntryType::Block => {
                let (kind, device) = match kind {
                    EntryType::Fifo => (FileKind::Fifo, 0),
                    EntryType::Char => (FileKind::Chardev, device()?),
                    _ => (FileKind::Blockdev, device()?),
                };
                if !self.copier.make_node(folder, &name, kind, device)? {
                    return Ok(());
                }
                kind
            }
            other => {
                tracing::warn!(path = %path.display(), kind = ?other, "an entry of an unknown kind is left out");
                return Ok(());
            }
        };
        self.copier.set(folder, &name, kind, &attributes)
    }

    /// Opens a folder that an entry goes into, and makes it when the archive has not said what it is like.
    fn open_folder(&self, named: PathBuf) -> io::Result<OpenFolder> {
        let folder = match self.top.sub_in_root(&named) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let above = self.open_folder(named.parent().unwrap_or(Path::new("")).to_owned())?;
                let name = named.file_name().unwrap_or_default();
                fs::mkdirat(&above.folder, name, Mode::from_raw_mode(0o755))?;
                self.top.sub_in_root(&named)?
            }
            other => other?,
        };
        let (path, top) = (folder.host_path()?, self.top.host_path()?);
        let real =
            path.strip_prefix(top).map_err(|_| io::Error::other("somebody moves the folder meanwhile"))?;
        Ok(OpenFolder { folder, named, real: real.to_owned() })
    }

    fn finish(mut self) -> io::Result<Lost> {
        for (path, attributes) in self.folders.iter().rev() {
            let (folder, name) = self.top.parent_of(path)?;
            // It may have become something else since.
            if folder.meta(name)?.is_some_and(|there| there.is_folder()) {
                self.copier.set(&folder, name, FileKind::Folder, attributes)?;
            }
        }
        Ok(self.copier.lost)
    }
}

/// Without what leads to the top or above it.
fn below_top(path: &Path) -> PathBuf {
    path.components().filter(|step| matches!(step, Component::Normal(_))).collect()
}

/// Blocks of zeros become holes.
fn write_sparse(content: &mut impl Read, mut file: File) -> io::Result<()> {
    let mut block = vec![0; 64 << 10];
    let mut length = 0;
    loop {
        let got = content.read(&mut block)?;
        if got == 0 {
            return file.set_len(length);
        }
        match got >= 4096 && block[..got].iter().all(|byte| *byte == 0) {
            true => drop(file.seek(SeekFrom::Current(got as i64))?),
            false => file.write_all(&block[..got])?,
        }
        length += got as u64;
    }
}

/// Writes the pieces of a file with holes to where they belong.
fn write_mapped(content: &mut impl Read, mut file: File, sparse: Sparse) -> io::Result<()> {
    let map = match sparse.map {
        Some(map) => map,
        None => read_map(content)?,
    };
    for (offset, length) in map {
        file.seek(SeekFrom::Start(offset))?;
        if io::copy(&mut content.by_ref().take(length), &mut file)? != length {
            return Err(damaged("a file with holes whose content ends early"));
        }
    }
    file.set_len(sparse.size)
}

/// The map that the content begins with in version 1.0, in decimal lines: how many pieces, then offset and length of
/// each; filled up to a block of 512.
fn read_map(content: &mut impl Read) -> io::Result<Vec<(u64, u64)>> {
    let mut taken = 0u64;
    let mut number = |content: &mut dyn Read| -> io::Result<u64> {
        let mut value = 0u64;
        loop {
            let mut byte = [0];
            content.read_exact(&mut byte)?;
            taken += 1;
            match byte[0] {
                b'\n' => return Ok(value),
                digit @ b'0'..=b'9' => {
                    value = value.saturating_mul(10).saturating_add(u64::from(digit - b'0'))
                }
                _ => return Err(damaged("a damaged map of holes")),
            }
        }
    };
    let count = number(content)?;
    let mut pieces = Vec::new();
    for _ in 0..count {
        pieces.push((number(content)?, number(content)?));
    }
    io::copy(&mut content.by_ref().take(taken.next_multiple_of(512) - taken), &mut io::sink())?;
    Ok(pieces)
}
