//! An object store that counts what is done with another one.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions,
    Result,
};

use crate::Histogram;
use crate::error::{Unreadable, is_unreadable};
use crate::gather::gathered;

/// Counts of one kind of operation.
#[derive(Default)]
pub struct Operation {
    /// How many were done.
    pub count: AtomicU64,
    /// Bytes written or read.
    pub bytes: AtomicU64,
    /// How many failed, objects that were not there included.
    pub errors: AtomicU64,
    /// How long they took.
    pub latency: Histogram,
}

impl Operation {
    fn done<T>(&self, started: Instant, bytes: u64, result: &Result<T>) {
        self.count.fetch_add(1, Relaxed);
        match result {
            Ok(_) => self.bytes.fetch_add(bytes, Relaxed),
            Err(_) => self.errors.fetch_add(1, Relaxed),
        };
        self.latency.record(started.elapsed());
    }
}

/// What was done with a store.
#[derive(Default)]
pub struct OperationStats {
    /// Objects written.
    pub put: Operation,
    /// Objects, or ranges of them, read.
    pub get: Operation,
    /// Objects deleted.
    pub delete: Operation,
    /// Listings.
    pub list: Operation,
}

/// Is called with the path and the content of an object when it is durable, before whoever has written it hears of it.
pub type Watcher = Arc<dyn Fn(&Path, &PutPayload) + Send + Sync>;

/// Passes everything on to another store and counts it.
#[derive(Clone)]
pub(crate) struct Counting {
    inner: Arc<dyn ObjectStore>,
    /// What is written has few parts.
    gathers: bool,
    pub(crate) stats: Arc<OperationStats>,
    /// Is told of objects that were put whole.
    watcher: Option<Watcher>,
}

impl Counting {
    pub(crate) fn new(inner: Arc<dyn ObjectStore>) -> Counting {
        Counting { inner, gathers: true, stats: Arc::default(), watcher: None }
    }

    /// Over a store that makes parts of its own, so that gathering them would be one copy more.
    pub(crate) fn as_given(inner: Arc<dyn ObjectStore>) -> Counting {
        Counting { gathers: false, ..Counting::new(inner) }
    }

    /// The same store, counted together with it, that tells of what is put.
    pub(crate) fn watched(&self, watcher: Watcher) -> Counting {
        Counting { watcher: Some(watcher), ..self.clone() }
    }

    /// A read beyond the end of an object is no failure of the store that could pass: what is asked for is not there.
    async fn short(&self, location: &Path, error: Error, end: u64) -> Error {
        if !matches!(error, Error::Generic { .. }) {
            return error;
        }
        match self.inner.head(location).await {
            Ok(found) if found.size < end => {
                let path = format!("{location} ends at byte {} and was read up to {end}", found.size);
                Error::NotFound { path, source: Box::new(error) }
            }
            // A folder is in its place, perhaps.
            Err(gone @ Error::NotFound { .. }) => gone,
            _ => lasting(error),
        }
    }
}

/// What nobody tries again, where that would go on until somebody mends the disk.
fn lasting(error: Error) -> Error {
    match is_unreadable(&error) {
        true => Error::NotSupported { source: Box::new(Unreadable(error)) },
        false => error,
    }
}

impl fmt::Debug for Counting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.inner, f)
    }
}

impl fmt::Display for Counting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.inner, f)
    }
}

#[async_trait]
impl ObjectStore for Counting {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let (started, bytes) = (Instant::now(), payload.content_length() as u64);
        // A payload is a list of counted buffers: the copy is cheap.
        let watched = self.watcher.as_ref().map(|watcher| (watcher, payload.clone()));
        let payload = if self.gathers { gathered(payload) } else { payload };
        let result = self.inner.put_opts(location, payload, opts).await;
        self.stats.put.done(started, bytes, &result);
        if let (Ok(_), Some((watcher, payload))) = (&result, watched) {
            hayloft_crash::point("ledger.object-durable");
            watcher(location, &payload);
            hayloft_crash::point("ledger.line-added");
        }
        result
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        let started = Instant::now();
        let result = self.inner.put_multipart_opts(location, opts).await;
        self.stats.put.done(started, 0, &result);
        result
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (started, head, range) = (Instant::now(), options.head, options.range.clone());
        let result = self.inner.get_opts(location, options).await;
        let result = match (result, range) {
            (Err(error), Some(GetRange::Bounded(range))) => Err(self.short(location, error, range.end).await),
            (result, _) => result.map_err(lasting),
        };
        let bytes = match &result {
            Ok(got) if !head => got.range.end - got.range.start,
            _ => 0,
        };
        self.stats.get.done(started, bytes, &result);
        result
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        let started = Instant::now();
        let result = self.inner.get_ranges(location, ranges).await;
        let bytes = ranges.iter().map(|range| range.end - range.start).sum();
        let result = match result {
            Err(error) => {
                let end = ranges.iter().map(|range| range.end).max().unwrap_or(0);
                Err(self.short(location, error, end).await)
            }
            read => read,
        };
        self.stats.get.done(started, bytes, &result);
        result
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let stats = Arc::clone(&self.stats);
        let mut started = Instant::now();
        self.inner
            .delete_stream(locations)
            .inspect(move |result| {
                stats.delete.done(started, 0, result);
                started = Instant::now();
            })
            .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.stats.list.done(Instant::now(), 0, &Ok(()));
        self.inner.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.stats.list.done(Instant::now(), 0, &Ok(()));
        self.inner.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let started = Instant::now();
        let result = self.inner.list_with_delimiter(prefix).await;
        self.stats.list.done(started, 0, &result);
        result
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.inner.rename_opts(from, to, options).await
    }
}
