//! A store: objects by path.

use std::fmt;
use std::hash::BuildHasher;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use futures::TryStreamExt;
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload};

use crate::counting::{Counting, Watcher};
use crate::sealed::{Sealed, StoreKey};
use crate::{OperationStats, StoreError, Trail};

/// Ranges with a gap up to this many bytes between them are read as one.
const GAP: u64 = 32 * 1024;

/// Room on the disk of a store.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Space {
    /// Size of the file system, bytes.
    pub total: u64,
    /// What a program may still write, bytes.
    pub free: u64,
}

/// Where everything durable is kept. Cheap to clone; everything done with it is counted.
#[derive(Clone)]
pub struct Store {
    url: Arc<str>,
    objects: Arc<Counting>,
    folder: Option<Arc<PathBuf>>,
    /// The key for hashes that are kept in the clear, where the store is encrypted.
    notes: Option<[u8; 32]>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.url)
    }
}

fn path_of(path: &str) -> Path {
    Path::from(path)
}

impl Store {
    /// A store over `objects`, which tests may have wrapped in faults; `folder` is where it lies on this
    /// host, if it does.
    pub fn new(url: &str, objects: Arc<dyn ObjectStore>, folder: Option<PathBuf>) -> Store {
        Store::counted(url, Counting::new(objects), folder)
    }

    fn counted(url: &str, objects: Counting, folder: Option<PathBuf>) -> Store {
        Store { url: url.into(), objects: Arc::new(objects), folder: folder.map(Arc::new), notes: None }
    }

    /// The same, which encrypts what it stores. The store below it is one that a [`StoreKey`] was admitted to.
    pub(crate) fn encrypted(
        url: &str,
        objects: Arc<dyn ObjectStore>,
        folder: Option<PathBuf>,
        key: &StoreKey,
    ) -> Store {
        let sealed = Counting::as_given(Arc::new(Sealed::new(objects, key)));
        Store { notes: Some(key.notes()), ..Store::counted(url, sealed, folder) }
    }

    /// Begins the hash of an object's content that is noted outside of it. Where the store is encrypted, nobody without its
    /// key can guess the content by it.
    pub fn note_hasher(&self) -> blake3::Hasher {
        self.notes.as_ref().map_or_else(blake3::Hasher::new, blake3::Hasher::new_keyed)
    }

    /// Where it is.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The objects themselves, for a database that keeps its own among them; counted as well.
    pub fn objects(&self) -> Arc<dyn ObjectStore> {
        Arc::clone(&self.objects) as _
    }

    /// The same, telling of every object that is put whole.
    pub fn objects_watched(&self, watcher: Watcher) -> Arc<dyn ObjectStore> {
        Arc::new(self.objects.watched(watcher))
    }

    /// The file that is an object, where the store is a folder.
    pub(crate) fn file_of(&self, path: &str) -> Option<PathBuf> {
        self.folder.as_ref().map(|folder| folder.join(path))
    }

    /// Makes an object that can grow, over the one that may be there.
    ///
    /// # Errors
    /// When the store is full or fails.
    pub async fn trail(&self, path: &str, begin: Vec<u8>) -> Result<Trail, StoreError> {
        Trail::begin(self, path, begin).await
    }

    /// What was done with this store since it was opened.
    pub fn stats(&self) -> &OperationStats {
        &self.objects.stats
    }

    /// Room on the store's disk; `None` when the store cannot tell, as a bucket.
    pub fn space(&self) -> Option<Space> {
        let found = rustix::fs::statvfs(self.folder.as_ref()?.as_path()).ok()?;
        Some(Space { total: found.f_blocks * found.f_frsize, free: found.f_bavail * found.f_frsize })
    }

    /// Tests that an object can be created only once: the ground on which volumes are kept from having
    /// two writers.
    ///
    /// # Errors
    /// [`StoreError::NoConditions`] when that is not so, or when the store does not work at all.
    pub async fn self_test(&self) -> Result<(), StoreError> {
        // A name that two servers starting together do not share: the hasher's keys are random.
        let nonce = std::hash::RandomState::new().hash_one(std::process::id());
        let path = format!("self-test/{nonce:016x}");
        self.create(&path, Bytes::from_static(b"hayloft")).await?;
        let second = self.create(&path, Bytes::from_static(b"again")).await;
        let kept = self.get(&path).await;
        self.delete(&path).await?;
        match (second, kept) {
            (Err(StoreError::Exists { .. }), Ok(kept)) if kept == "hayloft" => Ok(()),
            (Ok(()) | Err(StoreError::Exists { .. }), Ok(_)) => {
                Err(StoreError::NoConditions { url: self.url.to_string() })
            }
            (_, Err(error)) | (Err(error), _) => Err(error),
        }
    }

    async fn put_mode(&self, path: &str, payload: PutPayload, mode: PutMode) -> Result<(), StoreError> {
        let options = PutOptions { mode, ..PutOptions::default() };
        self.objects.put_opts(&path_of(path), payload, options).await?;
        Ok(())
    }

    /// Writes an object that must not exist yet; durable when this returns.
    ///
    /// # Errors
    /// [`StoreError::Exists`] when it does; then it is as it was.
    pub async fn create(&self, path: &str, payload: impl Into<PutPayload>) -> Result<(), StoreError> {
        self.put_mode(path, payload.into(), PutMode::Create).await
    }

    /// Writes an object, over the one that may be there; durable when this returns.
    ///
    /// # Errors
    /// When the store is full or fails.
    pub async fn put(&self, path: &str, payload: impl Into<PutPayload>) -> Result<(), StoreError> {
        self.put_mode(path, payload.into(), PutMode::Overwrite).await
    }

    /// Reads a whole object.
    ///
    /// # Errors
    /// When it does not exist, or the store fails.
    pub async fn get(&self, path: &str) -> Result<Bytes, StoreError> {
        let got = async { self.objects.get(&path_of(path)).await?.bytes().await };
        got.await.map_err(|error| StoreError::of_read(path, error))
    }

    /// Reads ranges of an object, in the order given; neighbours are read together.
    ///
    /// # Errors
    /// When the object does not exist, is too short, or the store fails.
    pub async fn read_ranges(&self, path: &str, ranges: &[Range<u64>]) -> Result<Vec<Bytes>, StoreError> {
        let merged = merge(ranges);
        let parts = self.objects.get_ranges(&path_of(path), &merged).await;
        let parts = parts.map_err(|error| StoreError::of_read(path, error))?;
        ranges
            .iter()
            .map(|range| {
                let at = merged.partition_point(|part| part.start <= range.start) - 1;
                let from = (range.start - merged[at].start) as usize;
                let to = (range.end - merged[at].start) as usize;
                if to > parts[at].len() {
                    return Err(StoreError::NotFound { path: format!("{path} up to byte {}", range.end) });
                }
                Ok(parts[at].slice(from..to))
            })
            .collect()
    }

    /// Deletes an object; one that does not exist is fine.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn delete(&self, path: &str) -> Result<(), StoreError> {
        match self.objects.delete(&path_of(path)).await.map_err(StoreError::from) {
            Err(StoreError::NotFound { .. }) => Ok(()),
            done => done,
        }
    }

    /// All objects below a path.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn list(&self, below: &str) -> Result<Vec<ObjectMeta>, StoreError> {
        Ok(self.objects.list(Some(&path_of(below))).try_collect().await?)
    }

    /// All objects below a path whose own path comes after another one.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn list_after(&self, below: &str, after: &str) -> Result<Vec<ObjectMeta>, StoreError> {
        Ok(self.objects.list_with_offset(Some(&path_of(below)), &path_of(after)).try_collect().await?)
    }

    /// The names of the folders that lie directly below a path, sorted.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn folders(&self, below: &str) -> Result<Vec<String>, StoreError> {
        let listed = self.objects.list_with_delimiter(Some(&path_of(below))).await?;
        let mut names: Vec<String> =
            listed.common_prefixes.iter().filter_map(|path| path.filename().map(str::to_owned)).collect();
        names.sort();
        Ok(names)
    }

    /// Deletes everything below a path, and the folders that held it.
    ///
    /// # Errors
    /// When the store fails; some of it may be deleted then.
    pub async fn delete_below(&self, below: &str) -> Result<(), StoreError> {
        for object in self.list(below).await? {
            self.delete(object.location.as_ref()).await?;
        }
        if let Some(folder) = &self.folder {
            let folder = folder.join(below);
            let removed = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(folder)).await;
            if let Ok(Err(error)) = removed
                && error.kind() != std::io::ErrorKind::NotFound
            {
                return Err(StoreError::Folder { path: below.to_owned(), source: error });
            }
        }
        Ok(())
    }
}

/// Joins ranges that overlap or lie close together.
fn merge(ranges: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut sorted = ranges.to_vec();
    sorted.sort_by_key(|range| range.start);
    let mut merged: Vec<Range<u64>> = Vec::new();
    for range in sorted {
        match merged.last_mut() {
            Some(last) if range.start <= last.end + GAP => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::memory::InMemory;

    fn memory() -> Store {
        Store::new("memory", Arc::new(InMemory::new()), None)
    }

    #[tokio::test]
    async fn ranges_come_in_the_order_asked_however_they_lie() {
        let store = memory();
        let bytes: Vec<u8> = (0..400_000u32).map(|at| (at * 7 % 251) as u8).collect();
        store.put("packs/a", Bytes::from(bytes.clone())).await.unwrap();
        let ranges = [300_000..300_500, 10..20, 15..40, 40..41, 100_000..200_000, 399_999..400_000];
        let read = store.read_ranges("packs/a", &ranges).await.unwrap();
        for (range, part) in ranges.iter().zip(read) {
            assert_eq!(part, bytes[range.start as usize..range.end as usize]);
        }
        assert!(store.read_ranges("packs/a", &[10..20, 399_999..400_001]).await.is_err());
        assert!(matches!(
            store.read_ranges("packs/b", &[0..1, 2..3]).await,
            Err(StoreError::NotFound { .. })
        ));
    }

    #[tokio::test]
    async fn objects_are_created_once_and_deleted_often() {
        let store = memory();
        store.self_test().await.unwrap();
        store.create("x", Bytes::from_static(b"1")).await.unwrap();
        assert!(matches!(store.create("x", Bytes::new()).await, Err(StoreError::Exists { .. })));
        store.put("x", Bytes::from_static(b"2")).await.unwrap();
        assert_eq!(store.get("x").await.unwrap(), "2");
        store.delete("x").await.unwrap();
        store.delete("x").await.unwrap();
        assert!(matches!(store.get("x").await, Err(StoreError::NotFound { .. })));
        assert!(store.stats().put.count.load(std::sync::atomic::Ordering::Relaxed) >= 4);
    }
}
