//! For tests only: an object store that misbehaves as its seed says. Servers that are released do not have it.
//!
//! `HAYLOFT_STORE_FAULTS` names a file that says at any moment how: lines of a kind of fault and how many of a thousand
//! operations meet it, and a line `seed N`. Without the file, or with an empty one, all is well.
//!
//! | kind | what happens |
//! |---|---|
//! | `error` | nothing was done, and it fails |
//! | `late` | it was done, and fails: an answer that got lost |
//! | `timeout` | seconds later it fails, done or not |
//! | `slow` | it takes up to half a second |
//! | `torn` | a write over an older object leaves half of the new one (stores make new objects whole), a read ends in the middle; both fail |
//! | `doubled` | it is done twice, and what the second time says counts |
//! | `full` | a write fails for want of room |

use std::fmt;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use futures::stream::{BoxStream, StreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMode,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, Result,
};
use parking_lot::Mutex;

/// The variable that names the file.
pub const VARIABLE: &str = "HAYLOFT_STORE_FAULTS";

/// How often the file is looked at.
const LOOK: Duration = Duration::from_millis(50);

/// A kind of fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Nothing was done, and it fails.
    Error,
    /// It was done, and fails.
    Late,
    /// It fails after seconds.
    Timeout,
    /// It takes longer.
    Slow,
    /// A part is done, and it fails.
    Torn,
    /// It is done twice.
    Doubled,
    /// There is no room.
    Full,
}

const KINDS: [(Fault, &str); 7] = [
    (Fault::Error, "error"),
    (Fault::Late, "late"),
    (Fault::Timeout, "timeout"),
    (Fault::Slow, "slow"),
    (Fault::Torn, "torn"),
    (Fault::Doubled, "doubled"),
    (Fault::Full, "full"),
];

/// How a store misbehaves.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Plan {
    seed: u64,
    /// Of a thousand operations.
    chances: Vec<(Fault, u64)>,
}

impl Plan {
    /// Reads lines of a name and a number.
    ///
    /// # Errors
    /// The line that is none.
    pub fn parse(text: &str) -> std::result::Result<Plan, String> {
        let mut plan = Plan::default();
        for line in text.lines().filter(|line| !line.trim().is_empty()) {
            let wrong = || format!("'{line}' is no kind of fault with a number");
            let (name, number) = line.trim().split_once(' ').ok_or_else(wrong)?;
            let number = number.trim().parse().map_err(|_| wrong())?;
            match KINDS.iter().find(|(_, of)| *of == name) {
                Some((fault, _)) => plan.chances.push((*fault, number)),
                None if name == "seed" => plan.seed = number,
                None => return Err(wrong()),
            }
        }
        Ok(plan)
    }

    /// What the operation of that number meets, and a number for what is to be chosen beside.
    fn of(&self, operation: u64) -> (Option<Fault>, u64) {
        let mixed = mix(self.seed ^ mix(operation));
        let mut at = mixed % 1000;
        for (fault, chance) in &self.chances {
            match at.checked_sub(*chance) {
                Some(rest) => at = rest,
                None => return (Some(*fault), mixed >> 20),
            }
        }
        (None, mixed >> 20)
    }
}

/// The finalizer of SplitMix64.
fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The store itself, or one that misbehaves, if the environment says so.
pub(crate) fn from_environment(inner: Arc<dyn ObjectStore>) -> Arc<dyn ObjectStore> {
    match std::env::var_os(VARIABLE) {
        Some(file) => Arc::new(Faulty::new(inner, file.into())),
        None => inner,
    }
}

/// A store that misbehaves.
pub struct Faulty {
    inner: Arc<dyn ObjectStore>,
    file: PathBuf,
    /// A leaf.
    plan: Mutex<(Option<Instant>, Plan)>,
    operations: AtomicU64,
}

impl Faulty {
    /// A store over another one, which misbehaves as the file says.
    pub fn new(inner: Arc<dyn ObjectStore>, file: PathBuf) -> Faulty {
        Faulty { inner, file, plan: Mutex::default(), operations: AtomicU64::new(0) }
    }

    /// What the next operation meets.
    fn choose(&self) -> (Option<Fault>, u64) {
        let mut plan = self.plan.lock();
        if plan.0.is_none_or(|looked| looked.elapsed() >= LOOK) {
            let text = std::fs::read_to_string(&self.file).unwrap_or_default();
            *plan = (Some(Instant::now()), Plan::parse(&text).unwrap_or_else(|wrong| panic!("{wrong}")));
        }
        plan.1.of(self.operations.fetch_add(1, Relaxed))
    }

    /// As [`Faulty::choose`]. Waits, where that is all, or part of it.
    async fn next(&self) -> (Option<Fault>, u64) {
        let (fault, chosen) = self.choose();
        match fault {
            Some(Fault::Slow) => tokio::time::sleep(Duration::from_millis(chosen % 500)).await,
            Some(Fault::Timeout) => tokio::time::sleep(Duration::from_millis(1000 + chosen % 4000)).await,
            _ => {}
        }
        (fault, chosen)
    }
}

fn failed(what: &str) -> Error {
    Error::Generic { store: "faulty", source: format!("made to fail: {what}").into() }
}

fn full() -> Error {
    let source = io::Error::new(io::ErrorKind::StorageFull, "made to be full");
    Error::Generic { store: "faulty", source: Box::new(source) }
}

/// The first half of an object.
fn half(payload: &PutPayload) -> PutPayload {
    let whole: Vec<u8> = payload.iter().flatten().copied().collect();
    Bytes::copy_from_slice(&whole[..whole.len() / 2]).into()
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faulty({:?})", self.inner)
    }
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faulty({})", self.inner)
    }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let (fault, chosen) = self.next().await;
        let put = |payload: PutPayload| self.inner.put_opts(location, payload, opts.clone());
        match fault {
            None | Some(Fault::Slow) => put(payload).await,
            Some(Fault::Error) => Err(failed("nothing was written")),
            Some(Fault::Timeout) if chosen.is_multiple_of(2) => Err(failed("it timed out")),
            Some(Fault::Late | Fault::Timeout) => put(payload).await.and(Err(failed("the answer is lost"))),
            Some(Fault::Torn) if matches!(opts.mode, PutMode::Overwrite) => {
                put(half(&payload)).await.and(Err(failed("half was written")))
            }
            Some(Fault::Torn) => Err(failed("half was written, and is not to be seen")),
            Some(Fault::Doubled) => {
                put(payload.clone()).await?;
                put(payload).await
            }
            Some(Fault::Full) => Err(full()),
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        // What is written in parts is not there before it is complete, and is made anew when it fails.
        match self.next().await.0 {
            None | Some(Fault::Slow | Fault::Doubled) => self.inner.put_multipart_opts(location, opts).await,
            Some(Fault::Full) => Err(full()),
            Some(_) => Err(failed("nothing was begun")),
        }
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let (fault, _) = self.next().await;
        match fault {
            None | Some(Fault::Slow | Fault::Doubled | Fault::Full) => {
                self.inner.get_opts(location, options).await
            }
            Some(Fault::Torn) if !options.head => {
                let got = self.inner.get_opts(location, options).await?;
                let (meta, range, attributes) = (got.meta.clone(), got.range.clone(), got.attributes.clone());
                let whole = got.bytes().await?;
                let begin = whole.slice(..whole.len() / 2);
                let parts = futures::stream::iter([Ok(begin), Err(failed("the rest did not come"))]);
                let payload = object_store::GetResultPayload::Stream(parts.boxed());
                Ok(GetResult { payload, meta, range, attributes, extensions: Default::default() })
            }
            Some(_) => Err(failed("nothing was read")),
        }
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        match self.next().await.0 {
            None | Some(Fault::Slow | Fault::Doubled | Fault::Full) => {
                self.inner.get_ranges(location, ranges).await
            }
            Some(_) => Err(failed("nothing was read")),
        }
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        match self.choose().0 {
            Some(Fault::Error | Fault::Timeout | Fault::Torn) => {
                futures::stream::once(async { Err(failed("nothing was deleted")) }).boxed()
            }
            Some(Fault::Late) => self
                .inner
                .delete_stream(locations)
                .map(|deleted| deleted.and(Err(failed("the answer is lost"))))
                .boxed(),
            _ => self.inner.delete_stream(locations),
        }
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        match self.choose().0 {
            Some(Fault::Error | Fault::Timeout | Fault::Late) => {
                futures::stream::once(async { Err(failed("nothing was listed")) }).boxed()
            }
            Some(Fault::Torn) => {
                let end = futures::stream::once(async { Err(failed("the rest was not listed")) });
                self.inner.list(prefix).take(1).chain(end).boxed()
            }
            _ => self.inner.list(prefix),
        }
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        match self.next().await.0 {
            None | Some(Fault::Slow | Fault::Doubled | Fault::Full) => {
                self.inner.list_with_delimiter(prefix).await
            }
            Some(_) => Err(failed("nothing was listed")),
        }
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
    use object_store::memory::InMemory;

    use super::*;
    use crate::{Store, StoreError};

    #[test]
    fn a_seed_chooses_the_same_faults_each_time_about_as_often_as_the_plan_says() {
        let plan = Plan::parse("seed 7\nerror 100\n\nfull 50\n").unwrap();
        let faults = || (0..10_000).map(|operation| plan.of(operation).0).collect::<Vec<_>>();
        let count = |fault| faults().iter().filter(|found| **found == Some(fault)).count();
        assert_eq!(faults(), faults());
        assert!((800..1200).contains(&count(Fault::Error)) && (350..650).contains(&count(Fault::Full)));
        assert_eq!(count(Fault::Torn), 0);
        for wrong in ["error", "error many", "lightning 3"] {
            assert!(Plan::parse(wrong).unwrap_err().contains(wrong));
        }
    }

    #[tokio::test]
    async fn each_kind_does_what_it_says() {
        let folder = tempfile::tempdir().unwrap();
        for (kind, left, is_there) in [
            ("error", None, false),
            ("late", Some("hayloft"), false),
            ("torn", Some("hay"), false),
            ("full", None, false),
            ("slow", Some("hayloft"), true),
        ] {
            let file = folder.path().join(kind);
            std::fs::write(&file, format!("{kind} 1000")).unwrap();
            let inner: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
            let store = Store::new("faulty", Arc::new(Faulty::new(Arc::clone(&inner), file)), None);
            let put = store.put("x", Bytes::from_static(b"hayloft")).await;
            assert_eq!(put.is_ok(), is_there, "{kind}");
            assert_eq!(put.is_err_and(|error| error.is_no_space()), kind == "full");
            let plain = Store::new("plain", inner, None);
            match (plain.get("x").await, left) {
                (Ok(found), Some(left)) => assert_eq!(found, left),
                (Err(StoreError::NotFound { .. }), None) => {}
                (found, _) => panic!("{kind}: {found:?}"),
            }
        }
    }
}
