//! Names of volumes in the paths of objects, encrypted. The same name is always the same path.

use chacha20poly1305::aead::Aead;
use chacha20poly1305::{XChaCha20Poly1305, XNonce};
use object_store::path::Path;

use crate::StoreKey;
use crate::sealed::key::{from_hex, to_hex};

/// Folders whose objects are named after volumes.
const FOLDERS: [&str; 2] = ["registry", "registry-copy"];
const NONCE: usize = 24;

/// Encrypts names, and reads them.
#[derive(Clone)]
pub(super) struct Names {
    cipher: XChaCha20Poly1305,
    nonces: [u8; 32],
}

impl Names {
    pub(super) fn new(key: &StoreKey) -> Names {
        Names { cipher: key.names(), nonces: key.nonces_of_names() }
    }

    /// The path in the store below.
    pub(super) fn outside(&self, path: &Path) -> Path {
        match folder_and_name(path) {
            Some((folder, name)) => Path::from(format!("{folder}/{}", self.seal(name))),
            None => path.clone(),
        }
    }

    /// The path that [`Names::outside`] was given; of what is no name of ours as it is.
    pub(super) fn inside(&self, path: &Path) -> Path {
        let opened = folder_and_name(path).and_then(|(folder, name)| Some((folder, self.open(name)?)));
        opened.map_or_else(|| path.clone(), |(folder, name)| Path::from(format!("{folder}/{name}")))
    }

    fn nonce(&self, name: &str) -> XNonce {
        let hash = blake3::keyed_hash(&self.nonces, name.as_bytes());
        XNonce::from(*hash.as_bytes().first_chunk::<NONCE>().expect("hashes have 32 bytes"))
    }

    fn seal(&self, name: &str) -> String {
        let nonce = self.nonce(name);
        let sealed = self.cipher.encrypt(&nonce, name.as_bytes()).expect("a name is not too long");
        to_hex(&[&nonce[..], &sealed].concat())
    }

    fn open(&self, sealed: &str) -> Option<String> {
        let bytes = from_hex(sealed.as_bytes())?;
        let (nonce, sealed) = bytes.split_first_chunk::<NONCE>()?;
        String::from_utf8(self.cipher.decrypt(&XNonce::from(*nonce), sealed).ok()?).ok()
    }
}

fn folder_and_name(path: &Path) -> Option<(&str, &str)> {
    path.as_ref().split_once('/').filter(|(folder, name)| FOLDERS.contains(folder) && !name.contains('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_hidden_and_found_again() {
        let names = Names::new(&StoreKey::new([1; 32]));
        for name in ["builds", "a", &"n".repeat(64)] {
            let path = Path::from(format!("registry/{name}"));
            let outside = names.outside(&path);
            assert_eq!((names.outside(&path), names.inside(&outside)), (outside.clone(), path));
            let file = outside.as_ref().strip_prefix("registry/").unwrap();
            assert!(!file.contains(name) || name.len() == 1);
            assert!(file.len() <= 255, "longer than the names of files");
        }
        for other in ["registry", "packs/id/0001", "registry/a/b", "volumes/id/db/manifest/1.manifest"] {
            let path = Path::from(other);
            assert_eq!((names.outside(&path), names.inside(&path)), (path.clone(), path.clone()));
        }
        // What somebody else has put there.
        let foreign = Path::from("registry/readme");
        assert_eq!(names.inside(&foreign), foreign);
        assert!(
            Names::new(&StoreKey::new([2; 32])).outside(&Path::from("registry/a"))
                != names.outside(&Path::from("registry/a"))
        );
    }
}
