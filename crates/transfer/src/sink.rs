//! Where versions are sent to: a mirror in a folder, or a stream.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

use crate::chunk::ChunkId;
use crate::error::TransferError;
use crate::leftovers;
use crate::mirror::{LATEST, PackRef, RECORD_MOST, Record, pack_path, record_path};
use crate::pack::UNFINISHED;

/// Where a version is sent to.
pub trait Sink {
    /// Packs that are there already with their chunks, which need not be sent again; the newest first.
    ///
    /// # Errors
    /// They cannot be read.
    fn packs(&self) -> Result<Vec<(PackRef, Vec<ChunkId>)>, TransferError>;

    /// Where packs are written before they are given to [`Sink::take`].
    fn folder(&self) -> &Path;

    /// Takes a pack.
    ///
    /// # Errors
    /// It cannot be written.
    fn take(&mut self, pack: &PackRef, file: NamedTempFile) -> Result<(), TransferError>;

    /// Takes the record, after all packs.
    ///
    /// # Errors
    /// It cannot be written.
    fn finish(&mut self, record: &Record) -> Result<(), TransferError>;
}

/// A mirror in a folder.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    packs: PathBuf,
}

impl Folder {
    /// Makes the folder if need be.
    ///
    /// # Errors
    /// It cannot be made, or holds something else.
    pub fn new(path: &Path) -> Result<Folder, TransferError> {
        let packs = path.join("packs");
        let holds_else = || fs::read_dir(path).is_ok_and(|mut found| found.next().is_some());
        if !packs.exists() && holds_else() {
            let said = format!("{} is no mirror, and not empty: name an empty folder", path.display());
            return Err(TransferError::Exists(said));
        }
        for folder in [&packs, &path.join("versions")] {
            fs::create_dir_all(folder)
                .map_err(TransferError::io(format!("cannot make {}", folder.display())))?;
        }
        leftovers::sweep(&packs, UNFINISHED, |_| true, false);
        Ok(Folder { path: path.to_owned(), packs })
    }

    /// Puts what another program has received: a stream of [`Tar`].
    ///
    /// # Errors
    /// It is something else, ends early, or cannot be written.
    pub fn unpack(&self, stream: impl Read) -> Result<Record, TransferError> {
        let wrong = |what: &str| TransferError::Damaged(format!("the stream: {what}"));
        let mut archive = tar::Archive::new(stream);
        let mut last = None;
        let entries = archive.entries().map_err(TransferError::io("cannot read the stream"))?;
        for entry in entries {
            let mut entry = entry.map_err(TransferError::io("cannot read the stream"))?;
            let path = entry.path().map_err(TransferError::io("cannot read the stream"))?.into_owned();
            let parts: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
            match parts[..] {
                ["packs", name] => {
                    let name =
                        ChunkId::try_from(name.to_owned()).map_err(|_| wrong("a pack without a name"))?;
                    let mut file = tempfile::Builder::new()
                        .prefix(UNFINISHED)
                        .tempfile_in(&self.packs)
                        .map_err(TransferError::io("cannot write a pack"))?;
                    leftovers::hold(file.as_file());
                    let mut hasher = blake3::Hasher::new();
                    let mut buffer = vec![0; 1 << 18];
                    loop {
                        let some =
                            entry.read(&mut buffer).map_err(TransferError::io("cannot read the stream"))?;
                        if some == 0 {
                            break;
                        }
                        hasher.update(&buffer[..some]);
                        file.write_all(&buffer[..some]).map_err(TransferError::io("cannot write a pack"))?;
                    }
                    if *hasher.finalize().as_bytes() != name.0 {
                        return Err(wrong("a pack is not what its name says"));
                    }
                    place(file, &self.packs.join(name.to_string()))?;
                }
                ["versions", _, _] => {
                    let mut bytes = Vec::new();
                    entry
                        .by_ref()
                        .take(RECORD_MOST)
                        .read_to_end(&mut bytes)
                        .map_err(TransferError::io("cannot read the stream"))?;
                    last = Some(Record::parse(&bytes, "the stream")?);
                }
                _ => return Err(wrong("it has other files")),
            }
        }
        let record = last.ok_or_else(|| wrong("it ends before the version's record"))?;
        self.write(&record, &record.snapshot)?;
        Ok(record)
    }

    fn write(&self, record: &Record, name: &str) -> Result<(), TransferError> {
        let path = self.path.join(record_path(&record.volume, name));
        let folder = path.parent().unwrap_or(&self.path);
        let failed = || TransferError::io(format!("cannot write {}", path.display()));
        fs::create_dir_all(folder).map_err(failed())?;
        let mut file = tempfile::Builder::new().prefix(".record-").tempfile_in(folder).map_err(failed())?;
        serde_json::to_writer(&mut file, record).map_err(|error| failed()(error.into()))?;
        file.as_file().sync_all().map_err(failed())?;
        place(file, &path)
    }
}

/// Gives a file its name, for all to read.
fn place(file: NamedTempFile, path: &Path) -> Result<(), TransferError> {
    use std::os::unix::fs::PermissionsExt;
    let failed = || TransferError::io(format!("cannot write {}", path.display()));
    file.as_file().set_permissions(fs::Permissions::from_mode(0o644)).map_err(failed())?;
    file.persist(path).map_err(|error| failed()(error.error))?;
    let folder = path.parent().unwrap_or(path);
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed())
}

impl Sink for Folder {
    fn packs(&self) -> Result<Vec<(PackRef, Vec<ChunkId>)>, TransferError> {
        let failed = || TransferError::io(format!("cannot read {}", self.packs.display()));
        // The newest first: they have most of what a host lacks.
        let mut packs = Vec::new();
        for found in fs::read_dir(&self.packs).map_err(failed())? {
            let found = found.map_err(failed())?;
            let name = found.file_name().to_string_lossy().into_owned();
            // What is being written has another name.
            if let Ok(name) = ChunkId::try_from(name) {
                let written = found.metadata().and_then(|stat| stat.modified()).map_err(failed())?;
                packs.push((written, crate::pack::describe(name, &found.path())?));
            }
        }
        packs.sort_unstable_by_key(|(written, (pack, _))| (std::cmp::Reverse(*written), pack.name));
        Ok(packs.into_iter().map(|(_, pack)| pack).collect())
    }

    fn folder(&self) -> &Path {
        &self.packs
    }

    fn take(&mut self, pack: &PackRef, file: NamedTempFile) -> Result<(), TransferError> {
        place(file, &self.packs.join(pack.name.to_string()))
    }

    fn finish(&mut self, record: &Record) -> Result<(), TransferError> {
        let path = |name: &str| self.path.join(record_path(&record.volume, name));
        let read = |name| fs::read(path(name)).ok().and_then(|bytes| Record::parse(&bytes, "").ok());
        let (there, newest) = (read(&record.snapshot), read(LATEST));
        let is_taken = |there: &Record| there.snapshot == record.snapshot && there.tree != record.tree;
        if there.iter().chain(&newest).any(is_taken) {
            let said = format!(
                "the mirror has another tree as {}@{}: choose another name (--as)",
                record.volume, record.snapshot
            );
            return Err(TransferError::Exists(said));
        }
        // First: whoever looks for it finds it at any time.
        if let Some(newest) =
            newest.filter(|newest| newest.snapshot != record.snapshot && !path(&newest.snapshot).exists())
        {
            self.write(&newest, &newest.snapshot)?;
        }
        if there.is_some() {
            self.write(record, &record.snapshot)?;
        }
        self.write(record, LATEST)
    }
}

/// A stream: a tar archive of what a mirror would have more.
pub struct Tar<W: Write> {
    archive: tar::Builder<W>,
    folder: tempfile::TempDir,
}

impl<W: Write> Tar<W> {
    /// Writes to `to`; what is not sent yet lies in a temporary folder, a pack at a time.
    ///
    /// # Errors
    /// There is no room for temporary files.
    pub fn new(to: W) -> Result<Tar<W>, TransferError> {
        let folder = tempfile::tempdir().map_err(TransferError::io("cannot make a temporary folder"))?;
        Ok(Tar { archive: tar::Builder::new(to), folder })
    }

    fn header(len: u64) -> tar::Header {
        let mut header = tar::Header::new_ustar();
        header.set_mode(0o644);
        header.set_size(len);
        header
    }
}

impl<W: Write> Sink for Tar<W> {
    fn packs(&self) -> Result<Vec<(PackRef, Vec<ChunkId>)>, TransferError> {
        Ok(Vec::new())
    }

    fn folder(&self) -> &Path {
        self.folder.path()
    }

    fn take(&mut self, pack: &PackRef, file: NamedTempFile) -> Result<(), TransferError> {
        let failed = || TransferError::io("cannot write the stream");
        let mut reread = file.reopen().map_err(failed())?;
        let mut header = Self::header(pack.size);
        self.archive.append_data(&mut header, pack_path(pack.name), &mut reread).map_err(failed())
    }

    fn finish(&mut self, record: &Record) -> Result<(), TransferError> {
        let failed = || TransferError::io("cannot write the stream");
        let bytes = serde_json::to_vec(record).map_err(|error| failed()(error.into()))?;
        let mut header = Self::header(bytes.len() as u64);
        let path = record_path(&record.volume, &record.snapshot);
        self.archive.append_data(&mut header, path, bytes.as_slice()).map_err(failed())?;
        self.archive.finish().map_err(failed())?;
        self.archive.get_mut().flush().map_err(failed())
    }
}
