use object_store::memory::InMemory;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use slatedb::admin::AdminBuilder;
use slatedb::config::CompactionWorkerOptions;
use slatedb::{CompactorBuilder, Settings};
use tokio::runtime::Runtime;

use super::*;

type Objects = Arc<ThrottledStore<InMemory>>;

fn admin(objects: &Objects) -> Admin {
    AdminBuilder::new("db", Arc::clone(objects) as _).build()
}

/// Opens a database in which four table files stand beside each other, and no more.
async fn open(objects: &Objects) -> Db {
    let soon = Duration::from_millis(50);
    let usual = crate::database::compactor();
    let worker = usual.worker.clone().map(|worker| CompactionWorkerOptions {
        compactions_poll_interval: soon,
        heartbeat_interval: soon,
        ..worker
    });
    // Longer than any test waits.
    let timeout = Duration::from_secs(3600);
    let options =
        CompactorOptions { poll_interval: soon, worker_heartbeat_timeout: timeout, worker, ..usual };
    let clock = Arc::new(AfterClaims::of(&admin(objects), &options).await);
    let compactor = CompactorBuilder::new("db", Arc::clone(objects) as _).with_options(options);
    let settings = Settings { l0_max_ssts: 4, compactor_options: None, ..Settings::default() };
    let db = Db::builder("db", Arc::clone(objects) as _).with_settings(settings);
    db.with_system_clock(clock).with_compactor_builder(compactor).build().await.unwrap()
}

async fn put(db: &Db, row: u8) {
    db.put([row], vec![row; 1 << 20]).await.unwrap();
    db.flush_with_options(FlushOptions { flush_type: FlushType::MemTable }).await.unwrap();
}

async fn is_claimed(objects: &Objects) -> bool {
    let begun = admin(objects).read_compactions(None).await.unwrap();
    begun.is_some_and(|begun| begun.recent_compactions().any(|one| one.active() && one.worker().is_some()))
}

#[test]
fn a_compaction_that_a_killed_server_has_begun_is_taken_over_at_once() {
    let objects = Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default()));
    let slow =
        |per_byte| objects.config_mut(|config| config.wait_get_per_byte = Duration::from_micros(per_byte));
    // Killed three times: whoever takes over is killed as well.
    for killed in 0..3 {
        let server = Runtime::new().unwrap();
        server.block_on(async {
            let db = open(&objects).await;
            if killed == 0 {
                for row in 0..3 {
                    put(&db, row).await;
                }
            }
            slow(5);
            if killed == 0 {
                put(&db, 3).await;
            }
            while !is_claimed(&objects).await {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            std::mem::forget(db);
        });
        server.shutdown_background();
        slow(0);
    }
    Runtime::new().unwrap().block_on(async {
        assert!(is_claimed(&objects).await);
        let db = open(&objects).await;
        let more = tokio::time::timeout(Duration::from_secs(60), put(&db, 4));
        more.await.expect("there is no room for another table file");
        for row in 0..5_u8 {
            assert_eq!(db.get([row]).await.unwrap().unwrap()[0], row);
        }
        db.close().await.unwrap();
    });
}
