//! Objects in a folder, read without a change of threads where the kernel has what is asked for.
//!
//! A folder's objects are opened and read on threads that may wait for a disk. To hand a piece of a few KiB to one of these and back takes ten times as
//! long as the read, and a walk through a large volume reads thousands. So objects that were read lately are kept open, and a piece that the kernel
//! has in memory (`RWF_NOWAIT`, preadv2(2)) is taken at once; for all else it is as without this.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::IoSliceMut;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};
use parking_lot::Mutex;
use rustix::io::{ReadWriteFlags, preadv2};

/// Objects that are kept open.
const OPEN_MAX: usize = 128;

/// More bytes than this are copied by the threads that may wait.
const NOW_MAX: u64 = 256 << 10;

/// A local store whose objects are kept open.
pub(crate) struct Near<S> {
    inner: S,
    /// Nothing else is taken, and nothing waited for, while it is held.
    open: Arc<Mutex<Open>>,
}

#[derive(Default)]
struct Open {
    objects: HashMap<Path, Object>,
    uses: u64,
}

struct Object {
    file: Arc<File>,
    meta: ObjectMeta,
    used: u64,
}

impl<S: ObjectStore> Near<S> {
    pub(crate) fn new(inner: S) -> Near<S> {
        Near { inner, open: Arc::default() }
    }

    /// Pieces of an object that is open, if all of them are in memory.
    fn read_now(&self, location: &Path, ranges: &[Range<u64>]) -> Option<(Vec<Bytes>, ObjectMeta)> {
        let (file, meta) = self.open.lock().look(location)?;
        let pieces = ranges.iter().map(|range| in_memory(&file, range)).collect::<Option<_>>()?;
        // Without a name another one is in its place, or none: who deletes it may be another process.
        let is_there = file.metadata().is_ok_and(|found| found.nlink() > 0);
        if !is_there {
            self.close(location);
        }
        is_there.then_some((pieces, meta))
    }

    fn close(&self, location: &Path) {
        self.open.lock().objects.remove(location);
    }

    fn keep_open(&self, location: &Path, got: &GetResult) {
        if let GetResultPayload::File(file, _) = &got.payload
            && let Ok(file) = file.try_clone()
        {
            self.open.lock().keep(location.clone(), file, got.meta.clone());
        }
    }
}

impl Open {
    fn look(&mut self, location: &Path) -> Option<(Arc<File>, ObjectMeta)> {
        self.uses += 1;
        let object = self.objects.get_mut(location)?;
        object.used = self.uses;
        Some((Arc::clone(&object.file), object.meta.clone()))
    }

    /// Closes the one that was not used for longest when there are too many.
    fn keep(&mut self, location: Path, file: File, meta: ObjectMeta) {
        if self.objects.len() >= OPEN_MAX
            && let Some(oldest) = self.objects.iter().min_by_key(|(_, object)| object.used)
        {
            let oldest = oldest.0.clone();
            self.objects.remove(&oldest);
        }
        self.objects.insert(location, Object { file: Arc::new(file), meta, used: self.uses });
    }
}

/// The bytes, if the kernel has all of them. Never waits for the disk.
fn in_memory(file: &File, range: &Range<u64>) -> Option<Bytes> {
    let mut bytes = vec![0; range.end.checked_sub(range.start)? as usize];
    let read = preadv2(file, &mut [IoSliceMut::new(&mut bytes)], range.start, ReadWriteFlags::NOWAIT);
    (read == Ok(bytes.len())).then(|| bytes.into())
}

/// Whether pieces are few enough bytes together to be taken at once.
fn are_small(ranges: &[Range<u64>]) -> bool {
    ranges.iter().map(|range| range.end.saturating_sub(range.start)).sum::<u64>() <= NOW_MAX
}

/// The range that is asked for, when nothing else is.
fn piece_of(options: &GetOptions) -> Option<Range<u64>> {
    let is_plain = options.if_match.is_none()
        && options.if_none_match.is_none()
        && options.if_modified_since.is_none()
        && options.if_unmodified_since.is_none()
        && options.version.is_none()
        && !options.head;
    match &options.range {
        Some(GetRange::Bounded(range)) if is_plain => Some(range.clone()),
        _ => None,
    }
}

impl<S: fmt::Debug> fmt::Debug for Near<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl<S: fmt::Display> fmt::Display for Near<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

#[async_trait]
impl<S: ObjectStore> ObjectStore for Near<S> {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        self.inner.put_opts(location, payload, opts).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let Some(range) = piece_of(&options).filter(|range| are_small(std::slice::from_ref(range))) else {
            return self.inner.get_opts(location, options).await;
        };
        if let Some((mut pieces, meta)) = self.read_now(location, std::slice::from_ref(&range)) {
            let piece = stream::iter(pieces.pop().map(Ok)).boxed();
            return Ok(GetResult {
                payload: GetResultPayload::Stream(piece),
                meta,
                range,
                attributes: Default::default(),
                extensions: Default::default(),
            });
        }
        let got = self.inner.get_opts(location, options).await;
        match &got {
            Ok(got) => self.keep_open(location, got),
            Err(_) => self.close(location),
        }
        got
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        if !are_small(ranges) {
            return self.inner.get_ranges(location, ranges).await;
        }
        if let Some((pieces, _)) = self.read_now(location, ranges) {
            return Ok(pieces);
        }
        if !self.open.lock().objects.contains_key(location)
            && let Some(first) = ranges.first()
        {
            let options =
                GetOptions { range: Some(GetRange::Bounded(first.clone())), ..GetOptions::default() };
            // What goes wrong is told by what comes then.
            if let Ok(got) = self.inner.get_opts(location, options).await {
                self.keep_open(location, &got);
            }
            if let Some((pieces, _)) = self.read_now(location, ranges) {
                return Ok(pieces);
            }
        }
        self.inner.get_ranges(location, ranges).await.inspect_err(|_| self.close(location))
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let open = Arc::clone(&self.open);
        let deleted = self.inner.delete_stream(locations);
        // Its room comes back when it is closed.
        deleted.inspect(move |path| drop(path.as_ref().map(|path| open.lock().objects.remove(path)))).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list_with_offset(prefix, offset)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        self.inner.rename_opts(from, to, options).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::local::LocalFileSystem;
    use object_store::{Error, ObjectStoreExt};

    fn near() -> (tempfile::TempDir, Near<LocalFileSystem>) {
        let folder = tempfile::tempdir().unwrap();
        let near = Near::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
        (folder, near)
    }

    fn bytes(of: u8) -> PutPayload {
        (0..100_000).map(|at| (at % 251) as u8 ^ of).collect::<Vec<u8>>().into()
    }

    #[tokio::test]
    async fn pieces_are_the_same_the_first_time_and_from_then_on() {
        let (_folder, near) = near();
        let at = Path::from("packs/one");
        near.put(&at, bytes(0)).await.unwrap();
        let whole = near.get(&at).await.unwrap().bytes().await.unwrap();
        assert!(near.open.lock().objects.is_empty(), "what is read whole is not read again");
        for _ in 0..3 {
            for range in [0..1, 5..5000, 99_000..100_000, 7..7] {
                let expected = whole.slice(range.start as usize..range.end as usize);
                if !range.is_empty() {
                    assert_eq!(near.get_range(&at, range.clone()).await.unwrap(), expected);
                }
                let both = near.get_ranges(&at, &[range.clone(), 10..20]).await.unwrap();
                assert_eq!(both, [expected, whole.slice(10..20)]);
            }
            assert_eq!(near.open.lock().objects.len(), 1);
        }
        // Beyond the end it says what it says without being open.
        let other = LocalFileSystem::new_with_prefix(_folder.path()).unwrap();
        let told = near.get_range(&at, 99_999..100_002).await.map_err(|error| error.to_string());
        assert_eq!(told, other.get_range(&at, 99_999..100_002).await.map_err(|error| error.to_string()));
        assert!(near.get_range(&at, 100_001..100_002).await.is_err());
    }

    #[tokio::test]
    async fn what_is_put_anew_or_gone_is_not_what_was_open() {
        let (folder, near) = near();
        let at = Path::from("one");
        near.put(&at, bytes(0)).await.unwrap();
        let first = near.get_range(&at, 0..100).await.unwrap();
        near.put(&at, bytes(7)).await.unwrap();
        let second = near.get_range(&at, 0..100).await.unwrap();
        assert_ne!(first, second);
        // By somebody else.
        let other = LocalFileSystem::new_with_prefix(folder.path()).unwrap();
        other.put(&at, bytes(9)).await.unwrap();
        assert_ne!(near.get_ranges(&at, &[0..100, 0..1]).await.unwrap()[0], second);
        std::fs::remove_file(folder.path().join("one")).unwrap();
        assert!(matches!(near.get_range(&at, 0..100).await, Err(Error::NotFound { .. })));
        assert!(matches!(near.get_ranges(&at, &[0..100, 0..1]).await, Err(Error::NotFound { .. })));
        assert!(near.open.lock().objects.is_empty(), "what is gone is closed");
        near.put(&at, bytes(1)).await.unwrap();
        near.get_range(&at, 0..100).await.unwrap();
        near.delete(&at).await.unwrap();
        assert!(near.open.lock().objects.is_empty(), "its room comes back");
        assert!(matches!(near.get_range(&at, 0..100).await, Err(Error::NotFound { .. })));
    }

    #[tokio::test]
    async fn no_more_are_open_than_there_may_be() {
        let (_folder, near) = near();
        for n in 0..OPEN_MAX + 20 {
            let at = Path::from(format!("{n}"));
            near.put(&at, bytes(n as u8)).await.unwrap();
            near.get_range(&at, 0..10).await.unwrap();
            near.get_range(&Path::from("0"), 0..10).await.unwrap();
        }
        let open = near.open.lock();
        assert_eq!(open.objects.len(), OPEN_MAX);
        assert!(open.objects.contains_key(&Path::from("0")), "the one that is used stays");
    }
}
