//! What the databases of a server keep of their table files in memory.

use std::sync::Arc;

use async_trait::async_trait;
use moka::future::Cache;
use moka::policy::EvictionPolicy;
use slatedb::db_cache::moka::{MokaCache, MokaCacheOptions};
use slatedb::db_cache::{CachedEntry, CachedKey, DbCache, SplitCache};

/// The cache that all databases of a server share. Thousands of blocks have to go for one index: so indexes and filters, which every
/// read needs, have a part of their own.
pub(crate) fn cache(bytes: u64) -> Arc<dyn DbCache> {
    let options = MokaCacheOptions { max_capacity: bytes / 2, ..Default::default() };
    let (blocks, rest) = (Blocks::new(bytes / 2), MokaCache::new_with_opts(options));
    Arc::new(SplitCache::new().with_block_cache(Some(Arc::new(blocks))).with_meta_cache(Some(Arc::new(rest))))
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
