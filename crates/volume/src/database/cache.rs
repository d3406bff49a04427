//! What the databases of a server keep of their table files in memory.

use std::sync::Arc;

use async_trait::async_trait;
use moka::future::Cache;
use moka::policy::EvictionPolicy;
use slatedb::db_cache::moka::{MokaCache, MokaCacheOptions};
use slatedb::db_cache::{CachedEntry, CachedKey, DbCache, SplitCache};

/// The cache that all databases of a server share. Thousands of blocks have to go for one index: so indexes and filters, which every
/// read needs, have a part of their own.
pub(crate) struct TableCache {
    all: Arc<dyn DbCache>,
    blocks: Arc<Blocks>,
}

impl TableCache {
    /// One of so many bytes.
    pub(crate) fn new(bytes: u64) -> TableCache {
        let options = MokaCacheOptions { max_capacity: bytes / 2, ..Default::default() };
        let (blocks, rest) = (Arc::new(Blocks::new(bytes / 2)), MokaCache::new_with_opts(options));
        let split = SplitCache::new().with_block_cache(Some(Arc::clone(&blocks) as Arc<dyn DbCache>));
        TableCache { all: Arc::new(split.with_meta_cache(Some(Arc::new(rest)))), blocks }
    }

    /// As databases use it.
    pub(crate) fn for_databases(&self) -> Arc<dyn DbCache> {
        Arc::clone(&self.all)
    }

    /// Bytes of blocks in it, about.
    pub(crate) fn block_bytes(&self) -> u64 {
        self.blocks.blocks.weighted_size()
    }

    /// Drops all blocks: whoever needs one reads it again. Indexes and filters stay.
    pub(crate) async fn drop_blocks(&self) {
        let blocks = &self.blocks.blocks;
        for (key, _) in blocks {
            blocks.invalidate(&*key).await;
        }
        blocks.run_pending_tasks().await;
    }
}

/// Blocks, those dropped first that were not used for longest. A cache that prefers what is asked for often takes some of the
/// blocks that a walk reads and refuses others; the next walk then finds every other block, and reads those between one by one.
struct Blocks {
    blocks: Cache<CachedKey, CachedEntry>,
}

impl Blocks {
    fn new(bytes: u64) -> Blocks {
        let blocks = Cache::builder()
            .weigher(|_, block: &CachedEntry| u32::try_from(block.size()).unwrap_or(u32::MAX))
            .max_capacity(bytes)
            .eviction_policy(EvictionPolicy::lru())
            .build();
        Blocks { blocks }
    }
}

#[async_trait]
impl DbCache for Blocks {
    async fn get_block(&self, key: &CachedKey) -> Result<Option<CachedEntry>, slatedb::Error> {
        Ok(self.blocks.get(key).await)
    }

    async fn get_index(&self, key: &CachedKey) -> Result<Option<CachedEntry>, slatedb::Error> {
        self.get_block(key).await
    }

    async fn get_filter(&self, key: &CachedKey) -> Result<Option<CachedEntry>, slatedb::Error> {
        self.get_block(key).await
    }

    async fn get_stats(&self, key: &CachedKey) -> Result<Option<CachedEntry>, slatedb::Error> {
        self.get_block(key).await
    }

    async fn insert(&self, key: CachedKey, value: CachedEntry) {
        self.blocks.insert(key, value).await;
    }

    async fn remove(&self, key: &CachedKey) {
        self.blocks.remove(key).await;
    }

    fn entry_count(&self) -> u64 {
        self.blocks.entry_count()
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;
    use slatedb::config::{FlushOptions, FlushType};

    use super::*;

    #[tokio::test]
    async fn blocks_that_are_dropped_take_nothing_and_are_read_again() {
        let cache = TableCache::new(64 << 20);
        let objects = Arc::new(InMemory::new());
        let db = slatedb::Db::builder("db", objects).with_db_cache(cache.for_databases(), 1);
        let db = db.build().await.unwrap();
        for row in 0..100_u8 {
            db.put([row], vec![row; 50_000]).await.unwrap();
        }
        db.flush_with_options(FlushOptions { flush_type: FlushType::MemTable }).await.unwrap();
        for round in 0..2 {
            for row in 0..100_u8 {
                assert!(db.get([row]).await.unwrap().unwrap() == vec![row; 50_000]);
            }
            cache.blocks.blocks.run_pending_tasks().await;
            assert!(cache.block_bytes() > 4_000_000, "{} in round {round}", cache.block_bytes());
            cache.drop_blocks().await;
            assert_eq!(cache.block_bytes(), 0);
        }
        db.close().await.unwrap();
    }
}
