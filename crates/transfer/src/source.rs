//! Where versions come from: a mirror in a folder, or behind a web server.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::error::TransferError;
use crate::mirror::{LATEST, PackRef, Record, check_name, pack_path, record_path};
use crate::web::{Patience, Web};

/// Where versions come from.
#[derive(Debug)]
pub enum Source {
    /// A mirror in a folder.
    Folder(PathBuf),
    /// A mirror behind a web server.
    Web(Web),
}

impl Source {
    /// `http://...`, `https://...` or a folder.
    pub fn new(text: &str) -> Source {
        if !(text.starts_with("http://") || text.starts_with("https://")) {
            return Source::Folder(PathBuf::from(text));
        }
        Source::Web(Web::new(text.trim_end_matches('/'), Patience::default()))
    }

    /// Whether reading from it costs as much as reading from a file.
    pub(crate) fn is_folder(&self) -> bool {
        matches!(self, Source::Folder(_))
    }

    /// Bytes of bodies that a web server has sent.
    pub fn received(&self) -> u64 {
        match self {
            Source::Folder(_) => 0,
            Source::Web(web) => web.received(),
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
            Source::Web(web) => match web.record(&path)? {
                Some(bytes) => (bytes, web.shown(&path)),
                None => return Err(missing(volume, snapshot, web.base())),
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
        self.read_as_it_comes(pack, offset, len, &mut |_| Ok(()))
    }

    /// As [`Source::read`]; `come` is given what there is of it each time more has come.
    ///
    /// # Errors
    /// As there, and those of `come`.
    pub(crate) fn read_as_it_comes(
        &self,
        pack: &PackRef,
        offset: u64,
        len: u64,
        come: &mut dyn FnMut(&[u8]) -> Result<(), TransferError>,
    ) -> Result<Vec<u8>, TransferError> {
        match self {
            Source::Folder(folder) => {
                let path = folder.join(pack_path(pack.name));
                let failed = || TransferError::io(format!("cannot read {}", path.display()));
                let file = File::open(&path).map_err(failed())?;
                let mut bytes = vec![0; usize::try_from(len).unwrap_or(0)];
                file.read_exact_at(&mut bytes, offset).map_err(failed())?;
                come(&bytes)?;
                Ok(bytes)
            }
            Source::Web(web) => web.read(pack, (offset, len), come),
        }
    }
}

fn missing(volume: &str, snapshot: &str, at: &str) -> TransferError {
    let of = if snapshot == LATEST { volume.to_owned() } else { format!("{volume}@{snapshot}") };
    TransferError::Missing(format!("{at} has no version {of}"))
}
