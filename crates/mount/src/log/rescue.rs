//! What to do with changes that cannot be applied any more, because the server has ended the session: they are kept in
//! a folder of this host and reported by name.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use hayloft_model::{BLOCK_SIZE, FileKind, Ino, Record, Sequence};

use crate::cache::data::FileData;
use crate::core::{Client, Core};
use crate::log::committer::Shipment;

/// What was kept.
#[derive(Debug)]
pub(crate) struct Rescue {
    /// The folder: `files/` holds the changed files under their paths, `REPORT` says what happened to each name.
    pub(crate) folder: PathBuf,
    /// Names that were changed or removed.
    pub(crate) names: usize,
}

/// Changes that no batch has taken to the server, out of the tree and of the files that they are about.
#[derive(Debug)]
pub(crate) struct Unsent {
    /// As a batch.
    pub(crate) shipment: Shipment,
    paths: HashMap<Ino, Vec<u8>>,
    files: HashMap<Ino, FileData>,
}

impl Unsent {
    /// Takes them, as the batch of that number; `None` when there are none. Files without a name end with the session.
    pub(crate) fn take(client: &Client, core: &mut Core, sequence: Sequence) -> Option<Unsent> {
        if !core.tree.is_dirty() {
            return None;
        }
        let mut cut = core.tree.cut(sequence, false);
        cut.batch.end_unnamed();
        let records = &cut.batch.records;
        if records.is_empty() {
            return None;
        }
        let changed: HashSet<Ino> = records.iter().filter_map(changed_inode).collect();
        let paths = core.tree.paths(&core.ways, |ino| changed.contains(&ino));
        let (mut files, mut cuts, mut bytes) = (HashMap::new(), Vec::new(), 0);
        for record in records {
            if let Record::PutInode(ino, row) = record
                && row.kind() == FileKind::Regular
                && let Some(file) = core.files.remove(ino)
            {
                let mut data = client.budget.take(&file);
                bytes += data.dirty_bytes();
                cuts.push((*ino, data.cut(sequence)));
                files.insert(*ino, data);
            }
        }
        let shipment = Shipment { cut, files: cuts, bytes, pressing: false, durable: true, completed: None };
        Some(Unsent { shipment, paths, files })
    }

    /// Inodes that are changed, or made.
    pub(crate) fn inodes(&self) -> impl Iterator<Item = Ino> + '_ {
        self.shipment.cut.batch.records.iter().filter_map(changed_inode)
    }
}

/// Keeps changes. The disk is written to: to be called while nobody waits.
pub(crate) fn keep(unsent: &Unsent, parent: &Path, name: &str, reason: &str) -> io::Result<Rescue> {
    let Unsent { paths, files, shipment } = unsent;
    let path_of = |ino: Ino| paths.get(&ino).map(|path| String::from_utf8_lossy(path).into_owned());
    let folder = fresh_folder(parent, name)?;
    // It has its name when all of it is there.
    let unfinished = folder.join("REPORT.unfinished");
    let mut report = private_file(&unfinished)?;
    writeln!(report, "These changes could not be applied: {reason}\n")?;
    let mut names = 0;
    for record in &shipment.cut.batch.records {
        match record {
            Record::PutInode(ino, row) if row.nlink > 0 && *ino != Ino::ROOT => {
                names += 1;
                let Some(path) = path_of(*ino) else {
                    writeln!(report, "changed   inode {ino}, whose name is not known here")?;
                    continue;
                };
                writeln!(report, "changed   {path} (mode {:o}, size {})", row.mode, row.size)?;
                if let (Some(file), Some(bytes)) = (files.get(ino), paths.get(ino)) {
                    let complete =
                        save(&folder.join("files").join(OsStr::from_bytes(bytes)), file, row.size, row.mode)?;
                    if !complete {
                        writeln!(
                            report,
                            "          parts of it were not in memory and are zeros in the copy"
                        )?;
                    }
                }
            }
            Record::DeleteDentry(dir, name) => {
                names += 1;
                let name = String::from_utf8_lossy(name.as_bytes()).into_owned();
                writeln!(report, "removed   {}/{name}", path_of(*dir).unwrap_or_default())?;
            }
            _ => {}
        }
    }
    report.sync_all()?;
    hayloft_crash::point("rescue.kept");
    fs::rename(unfinished, folder.join("REPORT"))?;
    Ok(Rescue { folder, names })
}

/// Data of a file that there is no room for.
#[derive(Debug)]
pub(crate) struct Aside {
    pub(crate) ino: Ino,
    pub(crate) path: Option<Vec<u8>>,
    pub(crate) mode: u32,
    pub(crate) blocks: crate::cache::data::Blocks,
}

/// Keeps data that the server has no room for, while the session goes on.
pub(crate) fn keep_aside(parent: &Path, name: &str, aside: &[Aside]) -> io::Result<Rescue> {
    let folder = fresh_folder(parent, name)?;
    let unfinished = folder.join("REPORT.unfinished");
    let mut report = private_file(&unfinished)?;
    writeln!(
        report,
        "There was no room for this data at the server, and other hosts needed these files. They were cut down to what is\n\
         stored of them. The copies have what was set aside, at its place, and zeros elsewhere.\n"
    )?;
    for Aside { ino, path, mode, blocks } in aside {
        let bytes: usize = blocks.iter().map(|(_, data)| data.len()).sum();
        let place = match path {
            Some(path) => PathBuf::from(OsStr::from_bytes(path)),
            None => PathBuf::from(format!("inode-{ino}")),
        };
        writeln!(report, "set aside {} ({bytes} bytes)", place.display())?;
        let copy = folder.join("files").join(place);
        private(true).create(copy.parent().unwrap_or(&folder))?;
        let out = private_file(&copy)?;
        for (index, data) in blocks {
            out.write_all_at(data, index * BLOCK_SIZE)?;
        }
        out.set_permissions(Permissions::from_mode(mode & 0o777))?;
        out.sync_all()?;
    }
    report.sync_all()?;
    fs::rename(unfinished, folder.join("REPORT"))?;
    Ok(Rescue { folder, names: aside.len() })
}

fn changed_inode(record: &Record) -> Option<Ino> {
    if let Record::PutInode(ino, _) = record { Some(*ino) } else { None }
}

/// Folders for their owner only.
fn private(recursive: bool) -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.recursive(recursive).mode(0o700);
    builder
}

/// A file for its owner only.
fn private_file(path: &Path) -> io::Result<File> {
    File::options().write(true).create(true).truncate(true).mode(0o600).open(path)
}

fn fresh_folder(parent: &Path, name: &str) -> io::Result<PathBuf> {
    private(true).create(parent)?;
    for attempt in 0.. {
        let folder = parent.join(format!("{name}.{attempt}"));
        match private(false).create(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    unreachable!("numbers do not run out")
}

/// Writes a copy; `false` when parts of the data are not in memory.
fn save(path: &Path, file: &FileData, size: u64, mode: u32) -> io::Result<bool> {
    if let Some(parent) = path.parent() {
        private(true).create(parent)?;
    }
    let mut out = private_file(path)?;
    let complete = file.copy_to(&mut out)?;
    out.set_len(size)?;
    // The copy is of another owner: what it may do as that is not for it.
    out.set_permissions(Permissions::from_mode(mode & 0o777))?;
    out.sync_all()?;
    Ok(complete)
}
