//! Where versions come from: a mirror in a folder, or behind a web server.

use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use parking_lot::Mutex;

use crate::chunk::ChunkId;
use crate::error::TransferError;
use crate::mirror::{LATEST, PackRef, RECORD_MOST, Record, check_name, pack_path, record_path};

/// How often a web server is asked again that has not answered.
const TRIES: u32 = 4;
/// So many packs are kept of a web server that knows no ranges: parts of two are asked for at the same time.
const WHOLE: usize = 2;

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
