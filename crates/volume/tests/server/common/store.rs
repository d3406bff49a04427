//! A store in memory whose puts a test has its hands in.

use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;
use futures::stream::{self, BoxStream, StreamExt};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// What becomes of puts.
#[async_trait]
pub(crate) trait Puts: fmt::Debug + Send + Sync + 'static {
    async fn put(
        &self,
        inner: &InMemory,
        location: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        inner.put_opts(location, payload, opts).await
    }

    /// Whether nothing can be read or put.
    fn is_away(&self) -> bool {
        false
    }
}

#[derive(Debug)]
pub(crate) struct Tampered<P> {
    inner: Arc<InMemory>,
    pub(crate) puts: P,
}

impl<P> Tampered<P> {
    pub(crate) fn new(puts: P) -> Tampered<P> {
        Tampered { inner: Arc::default(), puts }
    }

    /// Another way to what is in there.
    pub(crate) fn beside(&self, puts: P) -> Tampered<P> {
        Tampered { inner: Arc::clone(&self.inner), puts }
    }
}

/// Whether the object is of a database's log.
pub(crate) fn is_log(location: &Path) -> bool {
    location.as_ref().contains("/wal/")
}

pub(crate) fn fault() -> object_store::Error {
    object_store::Error::Generic { store: "tampered", source: "made to fail".into() }
}

impl<P> fmt::Display for Tampered<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tampered")
    }
}

#[async_trait]
impl<P: Puts> ObjectStore for Tampered<P> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        if self.puts.is_away() {
            return Err(fault());
        }
        self.puts.put(&self.inner, location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        if self.puts.is_away() {
            return Err(fault());
        }
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        if self.puts.is_away() {
            return stream::once(async { Err(fault()) }).boxed();
        }
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
