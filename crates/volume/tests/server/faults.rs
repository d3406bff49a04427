//! A store that fails now and then: batches fail or not, but nothing acknowledged is lost and nothing is
//! applied twice. The client takes every failure for a refusal and makes another batch of the same
//! number, unless it is told that the outcome is not known.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::common::*;
use async_trait::async_trait;
use futures::stream::BoxStream;
use hayloft_model::{Content, FileKind};
use hayloft_store::Store;
use hayloft_volume::Server;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{CheckVolume, FailureCode, ListedEntry, SweepVolume};
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

/// Fails puts in bursts that outlast the retries: half of them before, half after they took effect.
#[derive(Debug)]
struct Faulty {
    inner: object_store::memory::InMemory,
    puts: AtomicU64,
    log_puts: AtomicU64,
    every: u64,
}

impl fmt::Display for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("faulty")
    }
}

fn fault() -> object_store::Error {
    object_store::Error::Generic { store: "faulty", source: "made to fail".into() }
}

#[async_trait]
impl ObjectStore for Faulty {
    async fn put_opts(&self, location: &Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        // The database's log has bursts of its own, longer than its retries.
        let is_log = location.as_ref().contains("/wal/");
        let number = if is_log { &self.log_puts } else { &self.puts }.fetch_add(1, Relaxed);
        let fails = number % self.every >= self.every - 7;
        if fails && number.is_multiple_of(2) {
            return Err(fault());
        }
        let done = self.inner.put_opts(location, payload, opts).await;
        if fails { done.and(Err(fault())) } else { done }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, opts).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.inner.get_opts(location, options).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

#[test]
fn batches_sent_until_they_are_acknowledged_are_applied_once() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let faulty = Faulty {
        inner: object_store::memory::InMemory::new(),
        puts: AtomicU64::new(0),
        log_puts: AtomicU64::new(0),
        every: 30,
    };
    let store = Store::new("faulty", Arc::new(faulty), None);
    let folder = tempfile::tempdir().unwrap();
    let server = runtime.block_on(Server::start_on(store, config(folder.path()))).unwrap();
    let address = server.address();
    Client::create(address, 0);
    let (mut client, _) = Client::open(address, hello(1)).unwrap();
    let (mut refused, mut uncertain, mut used) = (0, 0, 0);
    let mut acknowledged = Vec::new();
    let started = Instant::now();
    for n in 1..=60u64 {
        // Another one after each refusal, with other names and numbers.
        let mut version = 0;
        loop {
            assert!(started.elapsed() < Duration::from_secs(120), "stuck at batch {n}");
            let len = if n % 3 == 0 { 5 } else { 1 };
            let blocks = (0..len).map(|at| Some(client.content(&noise(n * 10 + at, 65536)))).collect();
            let size = len * 65536;
            let records = [
                put(1, directory(1, 0, 3 + n)),
                link(1, &format!("f{n}.{version}"), 1000 * n + version, FileKind::Regular, 2 + n),
                put(1000 * n + version, file(Content::Blocks(blocks), size)),
            ];
            match client.commit(n, &records, (size as i64, 1)) {
                Ok(_) => {
                    used += size;
                    acknowledged.push(format!("f{n}.{version}"));
                    break;
                }
                Err(failed) if code(&failed) == FailureCode::Uncertain => uncertain += 1,
                Err(_) => {
                    refused += 1;
                    version += 1;
                }
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    println!("{refused} refused, {uncertain} uncertain, {:?}", started.elapsed());
    assert!(refused + uncertain > 0);
    // Once more at the end: the database may be on its way back.
    let names: Vec<String> = loop {
        assert!(started.elapsed() < Duration::from_secs(120));
        match client.enter(1, 0) {
            Ok(listed) => {
                let name = |entry: &ListedEntry| String::from_utf8(entry.name.to_vec()).unwrap();
                break listed.dirs[0].entries.iter().map(name).collect();
            }
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    assert_eq!(names, acknowledged);
    let again = |body: Ask| loop {
        assert!(started.elapsed() < Duration::from_secs(120));
        match Client::connect(address).ask(body.clone()) {
            Ok(answer) => return answer,
            Err(_) => std::thread::sleep(Duration::from_millis(50)),
        }
    };
    again(Ask::SweepVolume(SweepVolume { name: "vol".into() }));
    let Answer::Checked(checked) = again(Ask::CheckVolume(CheckVolume { name: "vol".into(), content: true }))
    else {
        panic!()
    };
    assert_eq!(checked.problems, [""; 0]);
    assert_eq!(checked.inodes, 61);
    let Answer::Volumes(shown) = again(Ask::ListVolumes(hayloft_wire::ListVolumes {})) else { panic!() };
    assert_eq!(shown.volumes[0].status.as_ref().unwrap().used_bytes, used);
    runtime.shutdown_background();
}
