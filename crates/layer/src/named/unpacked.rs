//! Archives that were unpacked, to be layers: once for each version of them.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::error::{Context, Result};
use crate::files::copy::sync_filesystem;
use crate::named::archive::unpack;
use crate::named::dir::{LayersDir, TREE, close};
use crate::named::find::Found;
use crate::named::locks::{Use, lock_shared, touch, use_of};
use crate::publication::staging::Staging;

/// Where unpacked archives are, beside the layers.
const CACHE: &str = ".cache";
/// An unpacked archive is removed when it was not used for so long and another one is unpacked.
const UNUSED_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// The same for an archive of which there is a newer version.
const OUTDATED_MAX: Duration = Duration::from_secs(24 * 3600);

impl LayersDir {
    /// The folder with an archive's content: unpacked when that was not done yet, by one of those who ask.
    pub(super) fn unpacked(&self, archive: &Path, progress: &dyn Fn(u64, u64)) -> Result<Found> {
        let meta = fs::metadata(archive).context("look at", archive)?;
        let identity = (
            archive,
            [meta.dev(), meta.ino(), meta.size()],
            [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()],
        );
        let key = blake3::hash(format!("{identity:?}").as_bytes()).to_hex()[..32].to_owned();
        let cache = self.base().join(CACHE);
        let (folder, used) = (cache.join(&key), cache.join(&key).join("used"));
        let tree = folder.join(TREE);
        if let Ok(lock) = touch(&used) {
            return Ok(Found { path: tree, in_use: vec![lock], identity: None });
        }
        fs::create_dir_all(&cache).context("make", &cache)?;
        let mut staging = Staging::begin(&cache, std::ffi::OsStr::new(&key))?;
        // Somebody else was faster.
        if let Ok(lock) = touch(&used) {
            staging.end();
            return Ok(Found { path: tree, in_use: vec![lock], identity: None });
        }
        let new = staging.path();
        let new_tree = new.join(TREE);
        fs::create_dir_all(&new_tree).context("make", &new_tree)?;
        close(&new)?;
        let lost = unpack(archive, &new_tree, progress)?;
        if lost.any() {
            tracing::warn!(?lost, archive = %archive.display(), "only root can unpack all of it");
        }
        let source = archive.as_os_str().as_encoded_bytes();
        fs::write(new.join("source"), source).context("write", &new)?;
        let lock = File::create(new.join("used")).context("write", &new)?;
        lock_shared(&lock).context("lock", &new)?;
        sync_filesystem(&new).context("make durable", &new)?;
        hayloft_crash::point("layer.unpacked");
        staging.commit()?;
        staging.end();
        if let Err(error) = evict(&cache, &key, source) {
            tracing::warn!(%error, "cannot look for outdated archives");
        }
        Ok(Found { path: tree, in_use: vec![lock], identity: None })
    }
}

/// Removes unpacked archives that nobody has asked for in a long time, and that no root uses.
fn evict(cache: &Path, current: &str, source: &[u8]) -> io::Result<()> {
    for entry in fs::read_dir(cache)?.flatten() {
        let (name, folder) = (entry.file_name(), entry.path());
        if name == current || name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let Ok(Use::None(locks)) = use_of(&folder.join("used")) else { continue };
        let Some(lock) = locks.first() else { continue };
        let Ok(used) = lock.metadata().and_then(|meta| meta.modified()) else { continue };
        let outdated = fs::read(folder.join("source")).is_ok_and(|other| other == source);
        let unused = SystemTime::now().duration_since(used).unwrap_or_default();
        if unused > if outdated { OUTDATED_MAX } else { UNUSED_MAX }
            && let Ok(staging) = Staging::begin(cache, &name)
        {
            staging.take_old().map_err(io::Error::other)?;
            staging.end();
        }
    }
    Ok(())
}
