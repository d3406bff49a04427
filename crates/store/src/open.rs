//! From a URL to a store.

use std::fs::{DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::ObjectStore;
use object_store::local::LocalFileSystem;

use crate::near::Near;
use crate::sealed::{StoreKey, admit};
use crate::{Store, StoreError};

/// Opens the store at `url`, and tests that it can do what is needed of it. With a key everything in it is encrypted, from its
/// beginning on.
///
/// `file:///path` is a folder of this host; it is made when it does not exist. Everything written to it
/// is synced to the disk before it counts as written.
///
/// # Errors
/// With a sentence for a person when the URL cannot be used as a store.
pub async fn open(url: &str, key: Option<&StoreKey>) -> Result<Store, StoreError> {
    let folder = folder_of(url)?;
    let failed = |source| StoreError::Folder { path: folder.display().to_string(), source };
    let to_prepare = folder.clone();
    let prepared = tokio::task::spawn_blocking(move || prepare(&to_prepare)).await;
    prepared.unwrap_or_else(|panic| Err(io::Error::other(panic))).map_err(failed)?;
    let objects = LocalFileSystem::new_with_prefix(&folder).map_err(StoreError::from)?.with_fsync(true);
    let objects: Arc<dyn ObjectStore> = Arc::new(Near::new(objects));
    #[cfg(feature = "faults")]
    let objects = crate::faults::from_environment(objects);
    let plain = Store::new(url, Arc::clone(&objects), Some(folder.clone()));
    plain.self_test().await?;
    admit(&plain, key).await?;
    Ok(match key {
        Some(key) => Store::encrypted(url, objects, Some(folder.clone()), key),
        None => plain,
    })
}

fn folder_of(url: &str) -> Result<PathBuf, StoreError> {
    let wrong = |reason: &str| Err(StoreError::Url { url: url.to_owned(), reason: reason.to_owned() });
    match url.split_once("://") {
        Some(("file", path)) if path.starts_with('/') => Ok(PathBuf::from(path)),
        Some(("file", _)) => wrong("a folder is written file:///absolute/path, with three slashes"),
        Some((scheme, _)) => {
            wrong(&format!("this version keeps volumes in a local folder (file:///path), not in {scheme}"))
        }
        None if url.starts_with('/') => wrong(&format!("write file://{url}")),
        None => wrong("a store is a URL such as file:///var/lib/hayloft"),
    }
}

/// Makes the folder when it is missing, and sees whether it can be written to.
fn prepare(folder: &Path) -> io::Result<()> {
    match std::fs::metadata(folder) {
        Ok(found) if found.is_dir() => {}
        Ok(_) => return Err(io::Error::new(io::ErrorKind::NotADirectory, "it is a file, not a folder")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(parent) = folder.parent() {
                std::fs::create_dir_all(parent)?;
            }
            DirBuilder::new().mode(0o700).create(folder)?;
        }
        Err(error) => return Err(error),
    }
    // Stores of earlier versions could be read by everybody. The folder itself may be somebody else's matter.
    for below in ["packs", "registry", "volumes"] {
        match std::fs::set_permissions(folder.join(below), Permissions::from_mode(0o700)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    rustix::fs::access(folder, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn urls_that_cannot_be_stores_are_refused_with_a_sentence() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (url, part) in [
            ("s3://bucket/x", "local folder"),
            ("/srv/store", "write file:///srv/store"),
            ("file://srv", "three slashes"),
            ("nonsense", "file:///var/lib/hayloft"),
        ] {
            let message = open(url, None).await.err().unwrap().to_string();
            assert!(message.contains(part), "{message}");
        }
        let url = format!("file://{}", file.path().display());
        assert!(matches!(open(&url, None).await, Err(StoreError::Folder { source, .. })
            if source.kind() == io::ErrorKind::NotADirectory));
    }

    #[tokio::test]
    async fn a_missing_folder_is_made_and_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("file://{}/a/b", folder.path().display());
        for _ in 0..2 {
            let store = open(&url, None).await.unwrap();
            let space = store.space().unwrap();
            assert!(space.total >= space.free && space.free > 0);
            assert!(store.list("").await.unwrap().is_empty());
        }
    }
}
