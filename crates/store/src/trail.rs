//! An object that grows by a few bytes at a time, for notes about what is durable elsewhere.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;

use crate::{Store, StoreError};

/// How long what was added may stay without a sync: a power cut loses it.
const LAG_ON_DISK: Duration = Duration::from_secs(1);
/// The same, where each sync writes the whole object, and the end of the process loses it.
const LAG_ELSEWHERE: Duration = Duration::from_millis(50);

/// An object that grows. Where the store is a folder, what was added outlives the process at once, for the price of one
/// write to the page cache, and a power cut when [`Trail::sync`] has returned; elsewhere both come with the sync.
pub struct Trail {
    store: Store,
    path: String,
    /// A leaf.
    state: Mutex<State>,
}

struct State {
    file: Option<Arc<File>>,
    /// All of it, where there is no file.
    whole: Vec<u8>,
    len: u64,
    is_behind: bool,
}

impl Trail {
    pub(crate) async fn begin(store: &Store, path: &str, begin: Vec<u8>) -> Result<Trail, StoreError> {
        store.put(path, Bytes::from(begin.clone())).await?;
        let len = begin.len() as u64;
        let (file, whole) = match store.file_of(path) {
            Some(on_disk) => {
                let opened = OpenOptions::new().write(true).open(&on_disk);
                let failed = |source| StoreError::Folder { path: on_disk.display().to_string(), source };
                (Some(Arc::new(opened.map_err(failed)?)), Vec::new())
            }
            None => (None, begin),
        };
        let state = Mutex::new(State { file, whole, len, is_behind: false });
        Ok(Trail { store: store.clone(), path: path.to_owned(), state })
    }

    /// Where it is in the store.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// How long to wait from an addition to the sync.
    pub fn lag(&self) -> Duration {
        if self.state.lock().file.is_some() { LAG_ON_DISK } else { LAG_ELSEWHERE }
    }

    /// Adds to it.
    ///
    /// # Errors
    /// Nothing was added; the next addition takes its place.
    pub fn add(&self, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock();
        match &state.file {
            Some(file) => file.write_all_at(bytes, state.len)?,
            None => state.whole.extend_from_slice(bytes),
        }
        state.len += bytes.len() as u64;
        state.is_behind = true;
        Ok(())
    }

    /// Returns when everything that was added before is durable.
    ///
    /// # Errors
    /// The store failed; it can be tried again.
    pub async fn sync(&self) -> Result<(), StoreError> {
        let (file, whole) = {
            let mut state = self.state.lock();
            if !std::mem::replace(&mut state.is_behind, false) {
                return Ok(());
            }
            (state.file.clone(), Bytes::copy_from_slice(&state.whole))
        };
        let synced = match file {
            Some(file) => {
                let synced = tokio::task::spawn_blocking(move || file.sync_data()).await;
                let synced = synced.unwrap_or_else(|stopped| Err(io::Error::other(stopped)));
                synced.map_err(|source| StoreError::Folder { path: self.path.clone(), source })
            }
            None => self.store.put(&self.path, whole).await,
        };
        if synced.is_err() {
            self.state.lock().is_behind = true;
        }
        synced
    }
}
