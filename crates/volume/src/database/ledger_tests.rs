//! Tests of the ledger.

use super::*;

#[test]
fn lines_come_back_up_to_the_first_damaged_one() {
    let written = |size| Written { size, hash: size + 1 };
    let ledger: Vec<u8> = [(Kind::Log, 7), (Kind::Manifest, 3), (Kind::Log, 8)]
        .into_iter()
        .flat_map(|(kind, number)| line(kind, number, written(number)))
        .collect();
    let read = |ledger: &[u8]| {
        let mut lines = Lines::new();
        read_lines(ledger, &mut lines);
        lines.into_iter().map(|((kind, number), of)| (kind, number, of.size)).collect::<Vec<_>>()
    };
    assert_eq!(read(&ledger), [(Kind::Log, 7, 7), (Kind::Log, 8, 8), (Kind::Manifest, 3, 3)]);
    assert_eq!(read(&ledger[..ledger.len() - 1]).len(), 2);
    let mut flipped = ledger.clone();
    flipped[LINE + 9] ^= 1;
    assert_eq!(read(&flipped), [(Kind::Log, 7, 7)]);
    assert_eq!(read(&[]), []);
}

#[test]
fn files_are_told_by_their_paths() {
    for (kind, number) in [(Kind::Log, 57), (Kind::Manifest, 2), (Kind::Compactions, 3)] {
        assert_eq!(parse("id", &Path::from(kind.file("id", number))), Some((kind, number)));
        assert_eq!(parse("id", &Path::from(kind.file("origin", number))), None, "of another volume");
        assert_eq!(parse("i", &Path::from(kind.file("id", number))), None, "of another volume");
    }
    for other in ["volumes/id/db/compacted/01J.sst", "packs/id/00", "registry/v", "volumes/id/db/wal/x.sst"] {
        assert_eq!(parse("id", &Path::from(other)), None);
    }
}

#[tokio::test]
async fn what_a_fork_writes_for_its_origin_is_not_in_its_ledger() {
    let store = store();
    let ledger = Ledger::new(&store, "fork");
    ledger.begin(0).await.unwrap();
    let path = |id, number| Path::from(Kind::Manifest.file(id, number));
    ledger.note(&path("fork", 4), &PutPayload::from_static(b"its own"));
    // As SlateDB does it when a fork that has all it needs gives its origin's checkpoint back.
    ledger.note(&path("origin", 9), &PutPayload::from_static(b"the origin's"));
    ledger.sync().await;
    let noted = read(&store, "fork").await.unwrap();
    assert_eq!(noted.keys().copied().collect::<Vec<_>>(), [(Kind::Manifest, 4)]);
}

/// A store of which the test sees when objects are put.
fn store() -> Store {
    Store::new("memory", Arc::new(object_store::memory::InMemory::new()), None)
}

#[tokio::test]
async fn what_is_added_becomes_durable_by_itself_and_the_task_ends_with_the_ledger() {
    let (store, path) = (store(), |number| Path::from(Kind::Log.file("id", number)));
    let ledger = Ledger::new(&store, "id");
    ledger.begin(0).await.unwrap();
    let puts = || store.stats().put.count.load(Ordering::Relaxed);
    // Twice: it has slept in between.
    for number in [1, 2] {
        ledger.note(&path(number), &PutPayload::from_static(b"log"));
        while read(&store, "id").await.unwrap().len() < number as usize {
            tokio::task::yield_now().await;
        }
        let after = puts();
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert_eq!(puts(), after, "nothing was added");
    }
    let task = ledger.added.clone();
    drop(ledger);
    // The task has let go of it: only this one is left.
    while Arc::strong_count(&task) > 1 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// `cargo test --release -p hayloft-volume --lib measure -- --ignored --nocapture`
#[tokio::test]
#[ignore = "prints figures"]
async fn measure() {
    let folder = tempfile::tempdir().unwrap();
    let store = hayloft_store::open(&format!("file://{}", folder.path().display()), None).await.unwrap();
    let ledger = Ledger::new(&store, "id");
    ledger.begin(0).await.unwrap();
    for size in [1 << 10, 4 << 10, 32 << 10, 256 << 10, 1 << 20] {
        let payload = PutPayload::from(vec![7; size]);
        let paths: Vec<Path> = (0..1000).map(|number| Path::from(Kind::Log.file("id", number))).collect();
        let cpu = || rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let nanos = |time: rustix::time::Timespec| time.tv_sec * 1_000_000_000 + time.tv_nsec;
        let before = nanos(cpu());
        paths.iter().for_each(|path| ledger.note(path, &payload));
        let each = (nanos(cpu()) - before) / paths.len() as i64;
        println!("a file of the log of {} KiB: {each} ns of processor time", size >> 10);
    }
}
