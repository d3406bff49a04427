//! A web server that has a mirror: perhaps a slow one, a silent one, or one that knows no ranges.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::chunk::ChunkId;
use crate::error::TransferError;
use crate::fetch::REQUESTS;
use crate::mirror::{PackRef, RECORD_MOST, pack_path};

/// How often a web server is asked for something of which no more than [`STEP`] comes.
const TRIES: u32 = 4;
/// When so many bytes have come, trying begins anew.
const STEP: usize = 64 << 10;
/// So many packs are kept of a web server that knows no ranges: parts of two are asked for at the same time.
const WHOLE: usize = 2;
/// So many bytes are looked at together when they come.
const PART: usize = 64 << 10;

/// When a web server is one that does not answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// It is silent for so long.
    pub(crate) silence: Duration,
    /// Or in so long a time fewer bytes come than this: at such a pace nothing gets there.
    pub(crate) period: Duration,
    pub(crate) least: u64,
    /// How long it is left alone before it is asked again, the first time.
    pub(crate) pause: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            silence: Duration::from_secs(30),
            period: Duration::from_secs(60),
            least: 6000,
            pause: Duration::from_millis(200),
        }
    }
}

/// How fast something comes.
struct Pace {
    patience: Patience,
    since: Instant,
    bytes: u64,
}

impl Pace {
    fn new(patience: Patience) -> Pace {
        Pace { patience, since: Instant::now(), bytes: 0 }
    }

    /// So many bytes have come. The error says how few these were.
    fn come(&mut self, bytes: usize) -> Result<(), String> {
        let passed = self.since.elapsed();
        self.bytes += bytes as u64;
        if passed < self.patience.period {
            return Ok(());
        }
        if self.bytes < self.patience.least {
            return Err(format!("the web server has sent {} bytes in {} s", self.bytes, passed.as_secs()));
        }
        *self = Pace::new(self.patience);
        Ok(())
    }
}

/// Why something did not come.
enum Failed {
    /// It may pass.
    Passing(String),
    Lasting(TransferError),
}

impl From<TransferError> for Failed {
    fn from(error: TransferError) -> Failed {
        Failed::Lasting(error)
    }
}

/// A web server.
#[derive(Debug)]
pub struct Web {
    base: String,
    agent: ureq::Agent,
    patience: Patience,
    received: AtomicU64,
    /// It has answered a request for a range with the whole file.
    knows_no_ranges: AtomicBool,
    /// Then the packs that were read last, as a whole.
    whole: Mutex<VecDeque<(ChunkId, Arc<Vec<u8>>)>>,
}

/// Who is given what has come of something, each time more has.
type Come<'a> = dyn FnMut(&[u8]) -> Result<(), TransferError> + 'a;

impl Web {
    pub(crate) fn new(base: &str, patience: Patience) -> Web {
        let config = ureq::Agent::config_builder()
            .timeout_connect(Some(patience.silence.min(Duration::from_secs(10))))
            .timeout_recv_response(Some(patience.silence))
            .timeout_per_read(Some(patience.silence))
            .max_idle_connections_per_host(REQUESTS)
            .user_agent(concat!("hayloft/", env!("CARGO_PKG_VERSION")))
            .http_status_as_error(false)
            .build();
        Web {
            base: base.to_owned(),
            agent: config.into(),
            patience,
            received: AtomicU64::new(0),
            knows_no_ranges: AtomicBool::new(false),
            whole: Mutex::default(),
        }
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Where something is, for people.
    pub(crate) fn shown(&self, path: &str) -> String {
        format!("{}/{path}", self.base)
    }

    /// Bytes of bodies that have come.
    pub(crate) fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// The record of a version; `None` if it is not there.
    pub(crate) fn record(&self, path: &str) -> Result<Option<Vec<u8>>, TransferError> {
        self.get(path, None, &mut |_| Ok(()))
    }

    /// A part of a pack: from where on, and how much.
    pub(crate) fn read(
        &self,
        pack: &PackRef,
        (offset, len): (u64, u64),
        come: &mut Come<'_>,
    ) -> Result<Vec<u8>, TransferError> {
        let path = pack_path(pack.name);
        let missing = || {
            TransferError::Missing(format!("{} is not there: the mirror is not complete", self.shown(&path)))
        };
        if !self.knows_no_ranges.load(Relaxed) {
            return self.get(&path, Some((offset, len)), come)?.ok_or_else(missing);
        }
        let whole = self.whole(pack, &path)?.ok_or_else(missing)?;
        let part = usize::try_from(offset).ok().and_then(|at| whole.get(at..)?.get(..len as usize));
        let part =
            part.ok_or_else(|| TransferError::Damaged(format!("{} is too short", self.shown(&path))))?;
        come(part)?;
        Ok(part.to_vec())
    }

    /// A pack, of a server that sends nothing less. `None` if it is not there.
    fn whole(&self, pack: &PackRef, path: &str) -> Result<Option<Arc<Vec<u8>>>, TransferError> {
        // Whoever wants another part of it waits.
        let mut known = self.whole.lock();
        if let Some((_, whole)) = known.iter().find(|(name, _)| *name == pack.name) {
            return Ok(Some(Arc::clone(whole)));
        }
        let whole = self.get(path, Some((0, pack.size)), &mut |_| Ok(()))?;
        let Some(whole) = whole.map(Arc::new) else { return Ok(None) };
        known.truncate(WHOLE - 1);
        known.push_front((pack.name, Arc::clone(&whole)));
        Ok(Some(whole))
    }

    /// `None` if it is not there. After errors that may pass it asks again, for what has not come yet.
    fn get(
        &self,
        path: &str,
        range: Option<(u64, u64)>,
        come: &mut Come<'_>,
    ) -> Result<Option<Vec<u8>>, TransferError> {
        let (mut tried, mut bytes, mut mark) = (0, Vec::new(), 0);
        loop {
            match self.get_once(path, range, &mut bytes, come) {
                Ok(is_there) => return Ok(is_there.then_some(bytes)),
                Err(Failed::Lasting(error)) => return Err(error),
                Err(Failed::Passing(_)) if bytes.len() >= mark + STEP => (tried, mark) = (0, bytes.len()),
                Err(Failed::Passing(error)) if tried + 1 == TRIES => return Err(TransferError::Web(error)),
                Err(Failed::Passing(_)) => tried += 1,
            }
            std::thread::sleep(self.patience.pause * (1 << tried));
        }
    }

    /// Asks for what `bytes` has not yet. Says whether it is there.
    fn get_once(
        &self,
        path: &str,
        range: Option<(u64, u64)>,
        bytes: &mut Vec<u8>,
        come: &mut Come<'_>,
    ) -> Result<bool, Failed> {
        let url = self.shown(path);
        let mut ask = self.agent.get(&url);
        if let Some((offset, len)) = range {
            if bytes.len() as u64 == len {
                return Ok(true);
            }
            ask = ask.header("Range", format!("bytes={}-{}", offset + bytes.len() as u64, offset + len - 1));
        }
        let mut answer =
            ask.call().map_err(|error| Failed::Passing(format!("{url}: {}", self.why(&error))))?;
        let status = answer.status().as_u16();
        let said = format!("{url}: the web server says {}", answer.status());
        let body = &mut answer.body_mut().as_reader();
        match (status, range) {
            (404 | 410, _) => return Ok(false),
            (206, Some((_, len))) => {
                let rest = len - bytes.len() as u64;
                self.take(body, rest, bytes, come).map_err(|failed| failed.at(&url))?;
            }
            (200, Some((offset, len))) => {
                let mut all = Vec::new();
                self.take(body, offset + len, &mut all, &mut |_| Ok(())).map_err(|failed| failed.at(&url))?;
                let come = all.len() as u64;
                if come != offset + len {
                    // Not the file, then; what has come before stays.
                    let said = format!("{url}: the web server sent {come} bytes instead of {}", offset + len);
                    return Err(Failed::Passing(said));
                }
                self.knows_no_ranges.store(true, Relaxed);
                all.drain(..usize::try_from(offset).unwrap_or(usize::MAX));
                *bytes = all;
            }
            (200, None) => {
                bytes.clear();
                self.take(body, RECORD_MOST, bytes, come).map_err(|failed| failed.at(&url))?;
            }
            _ if status >= 500 => return Err(Failed::Passing(said)),
            _ => return Err(TransferError::Web(said).into()),
        }
        match range {
            Some((_, len)) if bytes.len() as u64 != len => {
                let said = format!("{url}: the web server sent {} bytes instead of {len}", bytes.len());
                Err(Failed::Passing(said))
            }
            Some(_) if status == 200 => Ok(come(bytes).map(|()| true)?),
            _ => Ok(true),
        }
    }

    /// Reads up to `most` bytes of a body.
    fn take(
        &self,
        body: &mut dyn Read,
        most: u64,
        bytes: &mut Vec<u8>,
        come: &mut Come<'_>,
    ) -> Result<(), Failed> {
        let (mut part, mut left, mut pace) = (vec![0; PART], most, Pace::new(self.patience));
        while left > 0 {
            let room = usize::try_from(left).unwrap_or(PART).min(PART);
            let read = match body.read(&mut part[..room]) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(Failed::Passing(self.why_not_read(&error))),
            };
            self.received.fetch_add(read as u64, Relaxed);
            bytes.extend_from_slice(&part[..read]);
            left -= read as u64;
            come(bytes)?;
            pace.come(read).map_err(Failed::Passing)?;
        }
        // The connection can be used again by who has seen the end.
        let _ = body.read(&mut [0]);
        Ok(())
    }

    fn why(&self, error: &ureq::Error) -> String {
        match error {
            ureq::Error::Timeout(ureq::Timeout::Connect | ureq::Timeout::Resolve) => {
                "the web server cannot be reached".to_owned()
            }
            ureq::Error::Timeout(_) => {
                format!("the web server has sent nothing for {} s", self.patience.silence.as_secs())
            }
            error => error.to_string(),
        }
    }

    fn why_not_read(&self, error: &io::Error) -> String {
        match error.get_ref().and_then(|error| error.downcast_ref()) {
            Some(error) => self.why(error),
            None => error.to_string(),
        }
    }
}

impl Failed {
    /// With the place that was asked.
    fn at(self, url: &str) -> Failed {
        match self {
            Failed::Passing(error) => Failed::Passing(format!("{url}: {error}")),
            lasting => lasting,
        }
    }
}
