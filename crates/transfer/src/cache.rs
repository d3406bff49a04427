//! Manifests that a host keeps: of what it has sent and received. With them it knows which chunks it has without reading files.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use hayloft_tree::TreeName;

use crate::error::TransferError;
use crate::manifest::Manifest;

/// So many bytes of manifests are kept; those that were not used for the longest time go.
const KEPT: u64 = 1 << 30;

/// A manifest as it is kept.
#[derive(Debug)]
pub struct Packed(Vec<u8>);

impl Packed {
    /// Of a manifest.
    ///
    /// # Errors
    /// There is no memory.
    pub fn of(manifest: &Manifest) -> Result<Packed, TransferError> {
        let bytes = zstd::bulk::compress(&manifest.to_kept_bytes(), 3);
        bytes.map(Packed).map_err(TransferError::io("cannot compress a manifest"))
    }
}

/// A folder of manifests. It may be deleted at any time: then files are read again.
#[derive(Clone, Debug)]
pub struct Cache(PathBuf);

impl Cache {
    /// In this folder, which is made.
    ///
    /// # Errors
    /// It cannot be made.
    pub fn new(folder: &Path) -> Result<Cache, TransferError> {
        fs::create_dir_all(folder).map_err(TransferError::io(format!("cannot make {}", folder.display())))?;
        Ok(Cache(folder.to_owned()))
    }

    /// Where it is.
    pub(crate) fn folder(&self) -> &Path {
        &self.0
    }

    fn path(&self, tree: &TreeName) -> PathBuf {
        self.0.join(tree.to_string())
    }

    /// The manifest of a tree, if it is kept, and is what it should be.
    pub fn get(&self, tree: &TreeName) -> Option<Manifest> {
        let path = self.path(tree);
        let bytes = zstd::decode_all(fs::File::open(&path).ok()?).ok()?;
        let manifest = Manifest::from_bytes(&bytes).ok().filter(|manifest| manifest.tree == *tree)?;
        // The time says when it was last used.
        let _ =
            fs::File::options().write(true).open(&path).and_then(|file| file.set_modified(SystemTime::now()));
        Some(manifest)
    }

    /// Keeps one.
    ///
    /// # Errors
    /// There is no room.
    pub fn put(&self, manifest: &Manifest) -> Result<(), TransferError> {
        self.write(&self.path(&manifest.tree), Packed::of(manifest)?)
    }

    fn write(&self, path: &Path, Packed(bytes): Packed) -> Result<(), TransferError> {
        let failed = || TransferError::io(format!("cannot write in {}", self.0.display()));
        let file = tempfile::Builder::new().prefix(".new-").tempfile_in(&self.0).map_err(failed())?;
        fs::write(file.path(), bytes).map_err(failed())?;
        file.persist(path).map_err(|error| failed()(error.error))?;
        self.shrink().map_err(failed())
    }

    /// Where what is known of a folder is.
    fn path_of(&self, folder: &Path) -> Option<PathBuf> {
        let folder = folder.canonicalize().ok()?;
        let name = blake3::hash(folder.as_os_str().as_bytes());
        Some(self.0.join(format!("folder2-{}", name.to_hex())))
    }

    /// What a folder was when it was received or read last: what has changed since is read anew
    /// ([`Manifest::of_folder`]).
    pub fn of_folder(&self, folder: &Path) -> Option<Manifest> {
        let bytes = zstd::decode_all(fs::File::open(self.path_of(folder)?).ok()?).ok()?;
        Manifest::from_bytes(&bytes).ok()
    }

    /// Keeps what a folder is, once that is on its disk.
    ///
    /// # Errors
    /// There is no room.
    pub fn put_folder(&self, folder: &Path, manifest: Packed) -> Result<(), TransferError> {
        match self.path_of(folder) {
            Some(path) => self.write(&path, manifest),
            None => Ok(()),
        }
    }

    /// It is not what it was.
    pub fn forget_folder(&self, folder: &Path) {
        let _ = self.path_of(folder).map(fs::remove_file);
    }

    fn shrink(&self) -> std::io::Result<()> {
        let mut kept = Vec::new();
        for found in fs::read_dir(&self.0)? {
            let found = found?;
            let stat = found.metadata()?;
            let name = found.file_name();
            let is_ours = ["tree1-", "folder2-", "folder-", "incoming-"]
                .iter()
                .any(|begin| name.to_string_lossy().starts_with(begin));
            if stat.is_file() && is_ours {
                kept.push((stat.modified()?, stat.len(), found.path()));
            }
        }
        kept.sort_unstable_by(|a, b| b.cmp(a));
        let mut sum = 0;
        for (_, len, path) in kept {
            sum += len;
            if sum > KEPT {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }
}
