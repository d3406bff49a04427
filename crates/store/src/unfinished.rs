//! What puts leave that were cut off: a store in a folder writes a new object beside its place first, under a name that no listing
//! shows. When the process ends in between, nobody takes that away.

use std::fs;
use std::io;
use std::path::Path;
use std::time::{Duration, SystemTime};

use crate::{Store, StoreError};

/// No put takes so long: what is as old was left.
const AGE: Duration = Duration::from_secs(3600);

impl Store {
    /// Deletes what puts to paths below this one have left that were cut off, and says how many bytes that were. Where objects are no
    /// files the store sees to that itself.
    ///
    /// # Errors
    /// When the folder fails.
    pub async fn delete_unfinished(&self, below: &str) -> Result<u64, StoreError> {
        let Some(folder) = self.file_of(below) else { return Ok(0) };
        let deleted = tokio::task::spawn_blocking(move || delete_below(&folder, SystemTime::now()));
        let deleted = deleted.await.unwrap_or_else(|stopped| Err(io::Error::other(stopped)));
        deleted.map_err(|source| StoreError::Folder { path: below.to_owned(), source })
    }
}

fn delete_below(folder: &Path, now: SystemTime) -> io::Result<u64> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        entries => entries?,
    };
    let mut bytes = 0;
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            bytes += delete_below(&entry.path(), now)?;
        } else if entry.file_name().to_str().is_some_and(is_unfinished) {
            bytes += delete_if_left(&entry, now)?;
        }
    }
    Ok(bytes)
}

/// As `object_store` names them: the object's name, and a number.
fn is_unfinished(name: &str) -> bool {
    let number = name.rsplit_once('#').map(|(_, number)| number);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// One that is being finished at the moment is not there any more, or new.
fn delete_if_left(entry: &fs::DirEntry, now: SystemTime) -> io::Result<u64> {
    let deleted = entry.metadata().and_then(|found| {
        let is_left = now.duration_since(found.modified()?).is_ok_and(|age| age >= AGE);
        if !is_left {
            return Ok(0);
        }
        fs::remove_file(entry.path())?;
        Ok(found.len())
    });
    match deleted {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        deleted => deleted,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_cut_off_long_ago_goes_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let store = crate::open(&format!("file://{}", folder.path().display()), None).await.unwrap();
        store.put("packs/id/one", bytes::Bytes::from_static(b"hay")).await.unwrap();
        let write = |name: &str, age: Duration| {
            let path = folder.path().join("packs/id").join(name);
            fs::write(&path, b"straw").unwrap();
            fs::File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_modified(SystemTime::now() - age)
                .unwrap();
        };
        write("two#1", 2 * AGE);
        write("two#17", 2 * AGE);
        write("two#2", AGE / 2);
        write("old", 2 * AGE);
        write("old#x", 2 * AGE);
        assert_eq!(store.delete_unfinished("packs").await.unwrap(), 10);
        assert_eq!(store.delete_unfinished("packs").await.unwrap(), 0);
        assert_eq!(store.delete_unfinished("none").await.unwrap(), 0);
        let mut left: Vec<_> = fs::read_dir(folder.path().join("packs/id"))
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        left.sort();
        assert_eq!(left, ["old", "old#x", "one", "two#2"]);
    }
}
