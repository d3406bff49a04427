//! An object store that encrypts what it is given before another one stores it: objects in blocks ([`blocks`]), and the names of
//! volumes. Sizes are told as those of the content. What grows by a few bytes at a time ([`crate::Trail`]) stays in the clear: it
//! holds numbers, sizes and keyed hashes.

mod blocks;
mod key;
mod names;
mod upload;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult,
    MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions,
    PutPayload, PutResult, Result,
};

use crate::sealed::blocks::{BLOCK, Blocks, Cipher, Id, Parts, SEALED_BLOCK, content_len, sealed_len};
use crate::sealed::names::Names;
use crate::sealed::upload::Upload;

pub(crate) use crate::sealed::key::admit;
pub use crate::sealed::key::{KeyError, StoreKey};

/// From so many bytes on others are not kept waiting while they are encrypted.
const ASIDE: u64 = 128 << 10;

/// The object does not open with the store's key.
#[derive(Debug, thiserror::Error)]
#[error("{0} does not open with the store's key: it is damaged, or of another place")]
pub(crate) struct Tampered(pub(crate) String);

/// Encrypts for another store.
#[derive(Clone)]
pub(crate) struct Sealed {
    inner: Arc<dyn ObjectStore>,
    objects: Cipher,
    names: Names,
}

impl Sealed {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>, key: &StoreKey) -> Sealed {
        Sealed { inner, objects: key.objects(), names: Names::new(key) }
    }

    /// What another store is told of an object of its.
    fn meta(&self, meta: ObjectMeta) -> ObjectMeta {
        let location = self.names.inside(&meta.location);
        let size = if is_plain(&location) { meta.size } else { content_len(meta.size) };
        ObjectMeta { location, size, ..meta }
    }

    async fn seal(&self, location: &Path, payload: PutPayload) -> Result<PutPayload> {
        let (cipher, path) = (self.objects.clone(), location.to_string());
        let len = payload.content_length() as u64;
        aside(len, move || seal(&cipher, &path, &payload)).await
    }

    /// Reads content from `start` up to `end`, or to the object's end.
    async fn read(
        &self,
        location: &Path,
        options: GetOptions,
        start: u64,
        end: Option<u64>,
    ) -> Result<GetResult> {
        let first = start / BLOCK;
        let range = match end {
            Some(end) => {
                GetRange::Bounded(first * SEALED_BLOCK..end.div_ceil(BLOCK).saturating_mul(SEALED_BLOCK))
            }
            None => GetRange::Offset(first * SEALED_BLOCK),
        };
        // An empty object has no range.
        let is_whole = start == 0 && end.is_none();
        let range = (!is_whole).then_some(range);
        let options = GetOptions { range, ..options };
        let GetResult { payload, meta, range, attributes, extensions } =
            self.inner.get_opts(&self.names.outside(location), options).await?;
        let got = GetResult { payload, meta: meta.clone(), range, attributes, extensions };
        let (attributes, extensions) = (got.attributes.clone(), got.extensions.clone());
        let sealed = got.bytes().await?;
        let all = meta.size.div_ceil(SEALED_BLOCK);
        let (cipher, path) = (self.objects.clone(), location.to_string());
        let opened = aside(sealed.len() as u64, move || open(&cipher, &path, first, all, &sealed)).await?;
        let meta = self.meta(meta);
        let content = opened.ok_or_else(|| tampered(location))?;
        let end = end.unwrap_or(u64::MAX).min(meta.size);
        if start >= end && !is_whole {
            return Err(generic(Beyond { path: location.to_string(), start, size: meta.size }));
        }
        let from = (start - first * BLOCK) as usize;
        let part = Bytes::from(content).slice(from..from + (end - start) as usize);
        let payload = GetResultPayload::Stream(futures::stream::once(async { Ok(part) }).boxed());
        Ok(GetResult { payload, meta, range: start..end, attributes, extensions })
    }
}

/// A read of what is not there.
#[derive(Debug, thiserror::Error)]
#[error("{path} has {size} bytes, and was read from byte {start}")]
struct Beyond {
    path: String,
    start: u64,
    size: u64,
}

/// Not one that may pass: nobody tries again.
fn tampered(location: &Path) -> Error {
    Error::NotSupported { source: Box::new(Tampered(location.to_string())) }
}

fn generic(source: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::Generic { store: "sealed", source: Box::new(source) }
}

/// Notes of a [`crate::Trail`], which are added to a file behind the store's back.
fn is_plain(path: &Path) -> bool {
    let mut parts = path.as_ref().split('/');
    parts.next() == Some("volumes") && parts.nth(1) == Some("ledger")
}

/// Does what takes long where it keeps nobody waiting.
async fn aside<T: Send + 'static>(len: u64, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    if len < ASIDE {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await.map_err(|stopped| generic(std::io::Error::other(stopped)))
}

fn seal(cipher: &Cipher, path: &str, payload: &PutPayload) -> PutPayload {
    let len = payload.content_length() as u64;
    let (id, mut blocks) = (random_id(), Blocks::new(cipher, path));
    let mut sealed = Parts::new(sealed_len(len));
    let mut parts = payload.iter().map(|part| part.as_ref());
    let mut part: &[u8] = &[];
    let all = len.div_ceil(BLOCK).max(1);
    for number in 0..all {
        blocks.seal(&id, number, number + 1 == all, sealed.next(), |out| {
            let mut wanted = (len - number * BLOCK).min(BLOCK) as usize;
            while wanted > 0 {
                if part.is_empty() {
                    part = parts.next().expect("as long as it says");
                }
                let (now, rest) = part.split_at(wanted.min(part.len()));
                out.extend_from_slice(now);
                (part, wanted) = (rest, wanted - now.len());
            }
        });
    }
    sealed.payload()
}

/// The content of blocks from number `first` on, of an object that has `all`; `None` when one of them is none.
fn open(cipher: &Cipher, path: &str, first: u64, all: u64, sealed: &[u8]) -> Option<Vec<u8>> {
    let mut blocks = Blocks::new(cipher, path);
    let mut out = Vec::with_capacity(sealed.len());
    let mut number = first;
    let mut id = None;
    for block in sealed.chunks(SEALED_BLOCK as usize) {
        // All of one writing.
        let own = block.first_chunk::<{ size_of::<Id>() }>()?;
        if id.replace(own).is_some_and(|id| id != own) {
            return None;
        }
        blocks.open(number, number + 1 == all, block, &mut out).then_some(())?;
        number += 1;
    }
    // What was emptied has not even a block.
    (number > first).then_some(out)
}

fn random_id() -> Id {
    let mut id = Id::default();
    getrandom::fill(&mut id).expect("the system has random numbers");
    id
}

impl fmt::Debug for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sealed({:?})", self.inner)
    }
}

impl fmt::Display for Sealed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "encrypted {}", self.inner)
    }
}

#[async_trait]
impl ObjectStore for Sealed {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let payload = if is_plain(location) { payload } else { self.seal(location, payload).await? };
        self.inner.put_opts(&self.names.outside(location), payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let inner = self.inner.put_multipart_opts(&self.names.outside(location), opts).await?;
        Ok(Box::new(Upload::new(inner, self.objects.clone(), location.to_string(), random_id())))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        if is_plain(location) {
            return self.inner.get_opts(location, options).await;
        }
        if options.head {
            let options = GetOptions { range: None, ..options };
            let got = self.inner.get_opts(&self.names.outside(location), options).await?;
            let payload = GetResultPayload::Stream(futures::stream::empty().boxed());
            return Ok(GetResult { payload, meta: self.meta(got.meta), range: 0..0, ..got });
        }
        match options.range.clone() {
            None => self.read(location, options, 0, None).await,
            Some(GetRange::Offset(start)) => self.read(location, options, start, None).await,
            Some(GetRange::Bounded(range)) => {
                self.read(location, options, range.start, Some(range.end)).await
            }
            Some(GetRange::Suffix(len)) => {
                let size = self.head(location).await?.size;
                self.read(location, options, size.saturating_sub(len), Some(size)).await
            }
        }
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let reads = ranges.iter().map(|range| self.get_range(location, range.clone()));
        futures::future::try_join_all(reads).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let (to, from) = (self.names.clone(), self.names.clone());
        let outside = locations.map(move |path| path.map(|path| to.outside(&path))).boxed();
        self.inner.delete_stream(outside).map(move |path| path.map(|path| from.inside(&path))).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let own = self.clone();
        self.inner.list(prefix).map(move |meta| meta.map(|meta| own.meta(meta))).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let listed = self.inner.list_with_delimiter(prefix).await?;
        Ok(ListResult { objects: listed.objects.into_iter().map(|meta| self.meta(meta)).collect(), ..listed })
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        // A block opens at its place alone.
        let mode = match options.mode {
            CopyMode::Overwrite => PutMode::Overwrite,
            CopyMode::Create => PutMode::Create,
        };
        let content = self.get(from).await?.bytes().await?;
        self.put_opts(to, content.into(), PutOptions { mode, ..PutOptions::default() }).await.map(drop)
    }
}

#[cfg(test)]
mod tests;
