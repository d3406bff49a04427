//! A mirror: a folder of packs and of what versions there are. Files in it never change but for the record of the latest version,
//! so any web server, and any copy of the folder, is a mirror too.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use hayloft_tree::TreeName;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use crate::chunk::ChunkId;
use crate::error::TransferError;
use crate::leftovers;
use crate::manifest::Manifest;
use crate::pack::UNFINISHED;

/// What this program writes and reads.
const FORMAT: u32 = 1;
/// How often a web server is asked again that has not answered.
const TRIES: u32 = 4;
/// No pack is larger.
const PACK_MOST: u64 = 64 << 20;
/// So many packs are kept of a web server that knows no ranges: parts of two are asked for at the same time.
const WHOLE: usize = 2;
/// A record is no larger.
const RECORD_MOST: u64 = 64 << 20;
/// The name under which the newest version of a volume is found.
pub const LATEST: &str = "latest";

/// A pack of a mirror.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PackRef {
    /// The BLAKE3 hash of the whole file.
    pub name: ChunkId,
    /// Bytes of it.
    pub size: u64,
    /// Bytes of its end that are the index.
    pub index: u64,
}

/// What a mirror says of a version.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Record {
    /// The format of the mirror.
    pub format: u32,
    /// The volume.
    pub volume: String,
    /// The version's name.
    pub snapshot: String,
    /// The tree's name by content.
    pub tree: String,
    /// When it was made, nanoseconds since 1970.
    pub created_nanos: i64,
    /// For people.
    pub note: String,
    /// Files, directories and all else.
    pub entries: u64,
    /// Bytes of all files.
    pub bytes: u64,
    /// Signatures of the tree's name.
    pub signatures: Vec<String>,
    /// The chunks of the manifest.
    pub manifest: Vec<ChunkId>,
    /// The packs that have chunks of this version.
    pub packs: Vec<PackRef>,
}

impl Record {
    /// The tree's name.
    ///
    /// # Errors
    /// It is none.
    pub fn tree_name(&self) -> Result<TreeName, TransferError> {
        self.tree
            .parse()
            .map_err(|said: &str| TransferError::Damaged(format!("the record of a version: {said}")))
    }

    fn parse(bytes: &[u8], of: &str) -> Result<Record, TransferError> {
        let record: Record = serde_json::from_slice(bytes)
            .map_err(|error| TransferError::Damaged(format!("{of}: {error}")))?;
        if record.format != FORMAT {
            let said = format!("{of} has format {}, and this hayloft reads format {FORMAT}", record.format);
            return Err(TransferError::Missing(said));
        }
        check_name(&record.volume)?;
        check_name(&record.snapshot)?;
        let pack_is_fine =
            |pack: &PackRef| pack.index > 4 && pack.size <= PACK_MOST && pack.index + 16 <= pack.size;
        let note_is_fine = record.note.len() <= 4096 && !record.note.chars().any(char::is_control);
        let signatures_are_fine =
            record.signatures.len() <= 16 && record.signatures.iter().all(|text| text.len() <= 16 << 10);
        match note_is_fine && signatures_are_fine && record.packs.iter().all(pack_is_fine) {
            true => Ok(record),
            false => Err(TransferError::Damaged(format!("{of} has numbers or texts that no version has"))),
        }
    }

    /// What is known of a version without a mirror: it has no packs.
    pub fn of(
        volume: &str,
        snapshot: &str,
        manifest: &Manifest,
        created_nanos: i64,
        note: &str,
        signatures: &[String],
    ) -> Record {
        Record {
            format: FORMAT,
            volume: volume.to_owned(),
            snapshot: snapshot.to_owned(),
            tree: manifest.tree.to_string(),
            created_nanos,
            note: note.to_owned(),
            entries: manifest.len(),
            bytes: manifest.bytes(),
            signatures: signatures.to_vec(),
            manifest: Vec::new(),
            packs: Vec::new(),
        }
    }
}

/// Refuses what would lead elsewhere as part of a path.
pub(crate) fn check_name(name: &str) -> Result<(), TransferError> {
    let is_good = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte);
    let good = (1..=64).contains(&name.len()) && !name.starts_with(['.', '-']) && name.bytes().all(is_good);
    match good {
        true => Ok(()),
        false => Err(TransferError::Missing(format!("'{name}' is no name of a volume or a version"))),
    }
}

fn record_path(volume: &str, snapshot: &str) -> String {
    format!("versions/{volume}/{snapshot}.json")
}

fn pack_path(name: ChunkId) -> String {
    format!("packs/{name}")
}

/// Where versions come from.
#[derive(Debug)]
pub enum Source {
    /// A mirror in a folder.
    Folder(PathBuf),
    /// A mirror behind a web server.
    Web(Web),
}

/// A web server.
#[derive(Debug)]
pub struct Web {
    base: String,
    agent: ureq::Agent,
    received: AtomicU64,
    /// It has answered a request for a range with the whole file.
    knows_no_ranges: AtomicBool,
    /// Then the packs that were read last, as a whole.
    whole: Mutex<VecDeque<(ChunkId, Arc<Vec<u8>>)>>,
}

impl Source {
    /// `http://...`, `https://...` or a folder.
    pub fn new(text: &str) -> Source {
        if !(text.starts_with("http://") || text.starts_with("https://")) {
            return Source::Folder(PathBuf::from(text));
        }
        let config = ureq::Agent::config_builder()
            .timeout_connect(Some(Duration::from_secs(10)))
            .timeout_recv_response(Some(Duration::from_secs(30)))
            .timeout_recv_body(Some(Duration::from_secs(120)))
            .user_agent(concat!("hayloft/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            .build();
        Source::Web(Web {
            base: text.trim_end_matches('/').to_owned(),
            agent: config.into(),
            received: AtomicU64::new(0),
            knows_no_ranges: AtomicBool::new(false),
            whole: Mutex::default(),
        })
    }

    /// Whether reading from it costs as much as reading from a file.
    pub(crate) fn is_folder(&self) -> bool {
        matches!(self, Source::Folder(_))
    }

    /// Bytes of bodies that a web server has sent.
    pub fn received(&self) -> u64 {
        match self {
            Source::Folder(_) => 0,
            Source::Web(web) => web.received.load(Relaxed),
        }
    }

    /// What is said of a version.
    ///
    /// # Errors
    /// There is no such version; the mirror cannot be read; the record is damaged.
    pub fn record(&self, volume: &str, snapshot: &str) -> Result<Record, TransferError> {
        check_name(volume)?;
        check_name(snapshot)?;
        // The newest one has a file of its own only when another one follows it. Asked in this order, a version that is there is found
        // also in that moment.
        match self.record_in(volume, LATEST) {
            Ok(newest) if [LATEST, &newest.snapshot].contains(&snapshot) => Ok(newest),
            newest if snapshot == LATEST || matches!(newest, Err(TransferError::Web(_))) => newest,
            _ => self.record_in(volume, snapshot),
        }
    }

    fn record_in(&self, volume: &str, snapshot: &str) -> Result<Record, TransferError> {
        let path = record_path(volume, snapshot);
        let (bytes, of) = match self {
            Source::Folder(folder) => {
                let path = folder.join(&path);
                let bytes = fs::read(&path).map_err(|error| match error.kind() {
                    io::ErrorKind::NotFound => missing(volume, snapshot, &folder.display().to_string()),
                    _ => TransferError::io(format!("cannot read {}", path.display()))(error),
                })?;
                (bytes, path.display().to_string())
            }
            Source::Web(web) => match web.get(&path, None)? {
                Some(bytes) => (bytes, format!("{}/{path}", web.base)),
                None => return Err(missing(volume, snapshot, &web.base)),
            },
        };
        let record = Record::parse(&bytes, &of)?;
        match record.volume == volume && (snapshot == LATEST || record.snapshot == snapshot) {
            true => Ok(record),
            false => Err(TransferError::Damaged(format!("{of} is of another version"))),
        }
    }

    /// A part of a pack.
    ///
    /// # Errors
    /// It is not there or cannot be read.
    pub(crate) fn read(&self, pack: &PackRef, offset: u64, len: u64) -> Result<Vec<u8>, TransferError> {
        let path = pack_path(pack.name);
        match self {
            Source::Folder(folder) => {
                let path = folder.join(&path);
                let failed = || TransferError::io(format!("cannot read {}", path.display()));
                let file = File::open(&path).map_err(failed())?;
                let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
                file.read_exact_at(&mut bytes, offset).map_err(failed())?;
                Ok(bytes)
            }
            Source::Web(web) => {
                let missing = || {
                    let base = &web.base;
                    TransferError::Missing(format!("{base}/{path} is not there: the mirror is not complete"))
                };
                if !web.knows_no_ranges.load(Relaxed) {
                    return web.get(&path, Some((offset, len)))?.ok_or_else(missing);
                }
                let whole = web.whole(pack, &path)?.ok_or_else(missing)?;
                let part = usize::try_from(offset).ok().and_then(|at| whole.get(at..)?.get(..len as usize));
                let short = || TransferError::Damaged(format!("{}/{path} is too short", web.base));
                part.map(<[u8]>::to_vec).ok_or_else(short)
            }
        }
    }
}

fn missing(volume: &str, snapshot: &str, at: &str) -> TransferError {
    let of = if snapshot == LATEST { volume.to_owned() } else { format!("{volume}@{snapshot}") };
    TransferError::Missing(format!("{at} has no version {of}"))
}

impl Web {
    /// A pack, of a server that sends nothing less. `None` if it is not there.
    fn whole(&self, pack: &PackRef, path: &str) -> Result<Option<Arc<Vec<u8>>>, TransferError> {
        // Whoever wants another part of it waits.
        let mut known = self.whole.lock();
        if let Some((_, whole)) = known.iter().find(|(name, _)| *name == pack.name) {
            return Ok(Some(Arc::clone(whole)));
        }
        let Some(whole) = self.get(path, Some((0, pack.size)))?.map(Arc::new) else { return Ok(None) };
        known.truncate(WHOLE - 1);
        known.push_front((pack.name, Arc::clone(&whole)));
        Ok(Some(whole))
    }

    /// `None` if it is not there. Asks again after errors that may pass.
    fn get(&self, path: &str, range: Option<(u64, u64)>) -> Result<Option<Vec<u8>>, TransferError> {
        let mut tried = 0;
        loop {
            match self.get_once(path, range) {
                Ok(got) => return Ok(got),
                Err((_, true)) if tried + 1 < TRIES => tried += 1,
                Err((error, _)) => return Err(TransferError::Web(error)),
            }
            std::thread::sleep(Duration::from_millis(200 << tried));
        }
    }

    /// The error says whether it may pass.
    fn get_once(&self, path: &str, range: Option<(u64, u64)>) -> Result<Option<Vec<u8>>, (String, bool)> {
        let url = format!("{}/{path}", self.base);
        let mut ask = self.agent.get(&url);
        if let Some((offset, len)) = range {
            ask = ask.header("Range", format!("bytes={offset}-{}", offset + len - 1));
        }
        let mut answer = ask.call().map_err(|error| (format!("{url}: {error}"), true))?;
        let status = answer.status().as_u16();
        let most = match (status, range) {
            (404 | 410, _) => return Ok(None),
            (206, Some((_, len))) => len,
            (200, Some((offset, len))) => offset + len,
            (200, None) => RECORD_MOST,
            _ => return Err((format!("{url}: the web server says {}", answer.status()), status >= 500)),
        };
        let mut bytes = Vec::new();
        let body = answer.body_mut().as_reader();
        let read = body.take(most).read_to_end(&mut bytes);
        self.received.fetch_add(bytes.len() as u64, Relaxed);
        read.map_err(|error| (format!("{url}: {error}"), true))?;
        if let (200, Some((offset, _))) = (status, range) {
            self.knows_no_ranges.store(true, Relaxed);
            bytes.drain(..bytes.len().min(usize::try_from(offset).unwrap_or(usize::MAX)));
        }
        match range {
            Some((_, len)) if bytes.len() as u64 != len => {
                Err((format!("{url}: the web server sent {} bytes instead of {len}", bytes.len()), true))
            }
            _ => Ok(Some(bytes)),
        }
    }
}

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
