//! The key of an encrypted store, and what the store says of it.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use chacha20poly1305::{KeyInit, XChaCha20Poly1305};

use crate::sealed::blocks::Cipher;
use crate::{Store, StoreError};

/// Bytes of a key.
const KEY: usize = 32;

/// Where the store says that it is encrypted, and by which key; twice, as the registry.
const MARKS: [&str; 2] = ["sealed", "sealed-copy"];

/// Folders of a store that is in use.
const USED: [&str; 4] = ["registry", "registry-copy", "volumes", "packs"];

/// What everything in a store is encrypted with.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreKey([u8; KEY]);

impl fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreKey")
    }
}

/// Why a file has no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// It cannot be read.
    #[error("cannot read the key file {}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Others may read it.
    #[error("others may read the key file {0}: chmod 600 {0}")]
    Open(String),
    /// It is something else.
    #[error("{0} has no key in it: 32 random bytes, or 64 hexadecimal digits (openssl rand -hex 32 >{0})")]
    NoKey(String),
}

impl StoreKey {
    /// A key of these bytes, which have to be random.
    pub fn new(bytes: [u8; KEY]) -> StoreKey {
        StoreKey(bytes)
    }

    /// Reads a key from a file that only its owner may read.
    ///
    /// # Errors
    /// One sentence that says what to do.
    pub fn load(path: &Path) -> Result<StoreKey, KeyError> {
        let unreadable = |source| KeyError::Unreadable { path: path.to_owned(), source };
        let shown = || path.display().to_string();
        let meta = std::fs::metadata(path).map_err(unreadable)?;
        if meta.mode() & 0o077 != 0 {
            return Err(KeyError::Open(shown()));
        }
        let bytes = std::fs::read(path).map_err(unreadable)?;
        let key = match <[u8; KEY]>::try_from(&*bytes) {
            Ok(key) => Some(key),
            Err(_) => from_hex(bytes.trim_ascii()).and_then(|bytes| bytes.try_into().ok()),
        };
        key.map(StoreKey).ok_or_else(|| KeyError::NoKey(shown()))
    }

    fn derived(&self, of: &str) -> [u8; KEY] {
        blake3::derive_key(&format!("hayloft 2026 store {of}"), &self.0)
    }

    /// What encrypts objects.
    pub(super) fn objects(&self) -> Cipher {
        Cipher::new(self.derived("objects"))
    }

    /// What encrypts names.
    pub(super) fn names(&self) -> XChaCha20Poly1305 {
        XChaCha20Poly1305::new(&self.derived("names").into())
    }

    /// What the nonces of names are made with.
    pub(super) fn nonces_of_names(&self) -> [u8; KEY] {
        self.derived("nonces of names")
    }

    /// The key for hashes of content that are kept in the clear.
    pub(crate) fn notes(&self) -> [u8; KEY] {
        self.derived("notes")
    }

    /// What the store says of the key; it tells nothing of it.
    fn mark(&self) -> Bytes {
        format!("hayloft store, XChaCha20-Poly1305, format 1, key {}\n", to_hex(&self.derived("check")[..16]))
            .into()
    }
}

/// Whether a store may be used with this key, or without one. A new one begins to be encrypted.
///
/// # Errors
/// [`StoreError::Key`], in words; the store failed.
pub(crate) async fn admit(plain: &Store, key: Option<&StoreKey>) -> Result<(), StoreError> {
    let mut marks = Vec::new();
    for path in MARKS {
        match plain.get(path).await {
            Ok(mark) => marks.push((path, Some(mark))),
            Err(StoreError::NotFound { .. }) => marks.push((path, None)),
            Err(error) => return Err(error),
        }
    }
    let refused = |reason: &'static str| Err(StoreError::Key { url: plain.url().to_owned(), reason });
    let has_mark = marks.iter().any(|(_, mark)| mark.is_some());
    let Some(key) = key else {
        return match has_mark {
            true => refused("it is encrypted: give the file with its key (--key-file FILE)"),
            false => Ok(()),
        };
    };
    let own = Some(key.mark());
    if !has_mark {
        begin(plain, key).await?;
    } else if !marks.iter().any(|(_, mark)| *mark == own) {
        return refused(OTHER_KEY);
    }
    // One of the two may be lost, or damaged.
    for (path, mark) in marks {
        if mark != own {
            plain.put(path, key.mark()).await?;
        }
    }
    Ok(())
}

const OTHER_KEY: &str = "the key in the key file is not the one that it is encrypted with";

/// Marks a store that is empty. Of two servers that do so with two keys one is refused.
async fn begin(plain: &Store, key: &StoreKey) -> Result<(), StoreError> {
    let refused = |reason: &'static str| Err(StoreError::Key { url: plain.url().to_owned(), reason });
    for folder in USED {
        if !plain.list(folder).await?.is_empty() {
            return refused(
                "it began without a key, and what is in it is in the clear: serve it without --key-file, or begin a new store and copy what is in the volumes",
            );
        }
    }
    match plain.create(MARKS[0], key.mark()).await {
        Err(StoreError::Exists { .. }) if plain.get(MARKS[0]).await? != key.mark() => refused(OTHER_KEY),
        Err(StoreError::Exists { .. }) => Ok(()),
        done => done,
    }
}

pub(super) fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn from_hex(digits: &[u8]) -> Option<Vec<u8>> {
    let digit = |of: u8| (of as char).to_digit(16).map(|digit| digit as u8);
    let pair = |pair: &[u8]| Some(digit(pair[0])? << 4 | digit(*pair.get(1)?)?);
    digits.chunks(2).map(pair).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn keys_come_from_files_that_others_cannot_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let load = |bytes: &[u8], mode: u32| {
            std::fs::write(&path, bytes).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            StoreKey::load(&path).map_err(|error| error.to_string())
        };
        let key = StoreKey::new([0xab; 32]);
        assert_eq!(load(&[0xab; 32], 0o600).unwrap(), key);
        assert_eq!(load(format!("{}\n", "ab".repeat(32)).as_bytes(), 0o400).unwrap(), key);
        assert!(load(&[0xab; 32], 0o640).unwrap_err().contains("chmod 600"));
        for wrong in [&b""[..], &[1; 31], &[b'g'; 64], &[b'a'; 63], &[b'a'; 66]] {
            assert!(load(wrong, 0o600).unwrap_err().contains("openssl rand -hex 32"), "{wrong:?}");
        }
        assert!(StoreKey::load(&dir.path().join("none")).is_err());
        assert_eq!(format!("{key:?}"), "StoreKey");
    }
}
