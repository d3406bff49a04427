//! Layers by name, and the folder behind whatever names a layer.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::{Context, LayerError, Result};
use crate::files::copy::sync_filesystem;
use crate::files::folder::Folder;
use crate::named::archive::{Sort, sort_of, unpack};
use crate::publication::staging::Staging;

const NAME_BYTES_MAX: usize = 100;
/// The tree of a layer, in its folder.
const TREE: &str = "tree";
/// What is known of a layer, beside its tree.
const INFO: &str = "layer.json";
/// What the name of a replaced layer ends in that roots still use.
const OLD: &str = ".hayloft-old";
/// Where unpacked archives are, beside the layers.
const CACHE: &str = ".cache";
/// An unpacked archive is removed when it was not used for so long and another one is unpacked.
const UNUSED_MAX: Duration = Duration::from_secs(30 * 24 * 3600);
/// The same for an archive of which there is a newer version.
const OUTDATED_MAX: Duration = Duration::from_secs(24 * 3600);

/// What is known of a layer: `layer.json` beside its tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerInfo {
    /// What it was made from, as it was asked for.
    pub from: String,
    /// When it was made, in seconds since 1970.
    pub created: i64,
    /// Files and folders in it.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// The folder of all layers with a name. Each is a folder `NAME/` with `tree/` and `layer.json`.
#[derive(Debug, Clone)]
pub struct LayersDir {
    base: PathBuf,
}

impl LayersDir {
    /// Layers in this folder, which is made when the first layer is.
    pub fn new(base: impl Into<PathBuf>) -> LayersDir {
        LayersDir { base: base.into() }
    }

    /// Where this user's layers are: `/var/lib/hayloft/layers` for root, otherwise `hayloft/layers` in
    /// `$XDG_DATA_HOME` or `~/.local/share`.
    pub fn of_this_user() -> LayersDir {
        let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/share"));
        let data = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|dir| dir.is_absolute());
        match data.or_else(home) {
            Some(data) if !rustix::process::geteuid().is_root() => {
                LayersDir::new(data.join("hayloft/layers"))
            }
            _ => LayersDir::new("/var/lib/hayloft/layers"),
        }
    }

    /// The folder itself.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// The tree of the layer of this name.
    ///
    /// # Errors
    /// When there is none.
    pub fn tree(&self, name: &str) -> Result<PathBuf> {
        check_name(name)?;
        let tree = self.base.join(name).join(TREE);
        if tree.is_dir() {
            return Ok(tree);
        }
        Err(LayerError::NoLayer { name: name.to_owned(), base: self.base.clone() })
    }

    /// What is known of a layer.
    ///
    /// # Errors
    /// When there is none of that name, or its `layer.json` is not ours.
    pub fn info(&self, name: &str) -> Result<LayerInfo> {
        self.tree(name)?;
        let path = self.base.join(name).join(INFO);
        let text = fs::read(&path).context("read", &path)?;
        serde_json::from_slice(&text).map_err(io::Error::from).context("make sense of", &path)
    }

    /// All layers, by name.
    ///
    /// # Errors
    /// When the folder cannot be read; none there means no layers.
    pub fn list(&self) -> Result<Vec<(String, LayerInfo)>> {
        let entries = match fs::read_dir(&self.base) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error).context("list", &self.base),
        };
        let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
        // One that is just being removed is not there.
        let mut layers: Vec<_> = names
            .filter(|name| check_name(name).is_ok())
            .filter_map(|name| self.info(&name).ok().map(|info| (name, info)))
            .collect();
        layers.sort_by(|a, b| a.0.cmp(&b.0));
        Ok(layers)
    }

    /// Removes a layer: at once for everybody who looks it up.
    ///
    /// # Errors
    /// When there is none of that name, or a root uses it.
    pub fn remove(&self, name: &str) -> Result<()> {
        self.tree(name)?;
        self.remove_old();
        let staging = Staging::begin(&self.base, OsStr::new(name))?;
        let Use::None(_lock) = use_of(&staging.target().join(INFO)).context("lock", staging.target())? else {
            return Err(LayerError::InUse(name.to_owned()));
        };
        staging.take_old()?;
        staging.finish()
    }

    /// Removes what killed programs have left, and what was replaced and is not used any more. For an ordinary user's layers it
    /// has to be done by one who may remove the files of his subordinate users.
    ///
    /// # Errors
    /// When the folder cannot be read; what stays is reported.
    pub fn sweep(&self) -> Result<()> {
        if self.base.is_dir() {
            Staging::sweep(&self.base)?;
            self.remove_old();
        }
        Ok(())
    }

    /// Removes replaced layers that no root uses any more.
    fn remove_old(&self) {
        let Ok(base) = Folder::open(&self.base) else { return };
        for name in base.names().unwrap_or_default() {
            let text = name.to_string_lossy();
            if !text.starts_with('.') || !text.ends_with(OLD) {
                continue;
            }
            if let Ok(Use::None(_lock)) = use_of(&self.base.join(&name).join(INFO))
                && let Err(error) = base.remove(&name)
            {
                tracing::warn!(%error, layer = %text, "a layer that was replaced stays for now");
            }
        }
    }

    /// Makes a layer: `make` fills an empty folder. The layer is there when all of it is.
    ///
    /// # Errors
    /// When there is one of that name and it was not asked to replace it, or it cannot be made.
    pub(crate) fn create(
        &self,
        name: &str,
        from: &str,
        replace: bool,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<LayerInfo> {
        check_name(name)?;
        fs::create_dir_all(&self.base).context("make", &self.base)?;
        self.sweep()?;
        let mut staging = Staging::begin(&self.base, OsStr::new(name))?;
        if !replace && staging.target().exists() {
            return Err(LayerError::Exists(name.to_owned()));
        }
        let new = staging.path();
        let tree = new.join(TREE);
        fs::create_dir_all(&tree).context("make", &tree)?;
        // Programs that fill it give up their rights for parts of the work, and have to reach it all the same.
        let mode = fs::Permissions::from_mode(0o711);
        fs::set_permissions(new.parent().unwrap_or(&new), mode).context("open up", &new)?;
        make(&tree)?;
        close(&new)?;
        let (files, bytes) = measure(&tree).context("measure", &tree)?;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
        let info = LayerInfo { from: from.to_owned(), created, files, bytes };
        let text = serde_json::to_vec_pretty(&info).map_err(io::Error::from).context("write", &new)?;
        fs::write(new.join(INFO), text).context("write", &new)?;
        sync_filesystem(&new).context("make durable", &new)?;
        hayloft_crash::point("layer.made");
        staging.commit()?;
        hayloft_crash::point("layer.exchanged");
        if let Err(source) = sync_filesystem(&self.base) {
            let path = staging.target();
            staging.leave();
            return Err(LayerError::NotDurable { path, source });
        }
        // What was there before is in the place of the new one. Who looks the layer up right now waits for the lock, and
        // looks it up again.
        let lock = match use_of(&new.join(INFO)).context("lock", &new)? {
            Use::None(lock) => lock,
            Use::Root => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
                fs::rename(&new, self.base.join(format!(".{name}.{since:x}{OLD}")))
                    .context("put aside", &new)?;
                None
            }
        };
        staging.end();
        drop(lock);
        Ok(info)
    }

    /// The folder with an archive's content: unpacked when that was not done yet, by one of those who ask.
    fn unpacked(&self, archive: &Path, progress: &dyn Fn(u64, u64)) -> Result<Found> {
        let meta = fs::metadata(archive).context("look at", archive)?;
        let identity = (
            archive,
            [meta.dev(), meta.ino(), meta.size()],
            [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()],
        );
        let key = blake3::hash(format!("{identity:?}").as_bytes()).to_hex()[..32].to_owned();
        let cache = self.base.join(CACHE);
        let (folder, used) = (cache.join(&key), cache.join(&key).join("used"));
        let tree = folder.join(TREE);
        if let Ok(lock) = touch(&used) {
            return Ok(Found { path: tree, in_use: Some(lock), identity: None });
        }
        fs::create_dir_all(&cache).context("make", &cache)?;
        let mut staging = Staging::begin(&cache, OsStr::new(&key))?;
        // Somebody else was faster.
        if let Ok(lock) = touch(&used) {
            staging.end();
            return Ok(Found { path: tree, in_use: Some(lock), identity: None });
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
        Ok(Found { path: tree, in_use: Some(lock), identity: None })
    }
}

/// Makes what holds a layer private: setuid programs and devices in it are not for the host's other users.
fn close(folder: &Path) -> Result<()> {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).context("close", folder)
}

/// What a layer is given as.
#[derive(Debug)]
pub struct Found {
    /// A folder, or an image of a file system.
    pub path: PathBuf,
    /// Locked: as long as it is open somewhere, in whatever process, nobody removes the layer.
    pub in_use: Option<File>,
    /// Device and inode of the folder that is locked: another one may have come to `path` since.
    pub identity: Option<(u64, u64)>,
}

/// Who uses a layer.
enum Use {
    /// Nobody, as long as this lock is held; there is nothing to lock in what a crash has left of one.
    None(Option<File>),
    Root,
}

/// Whether a root uses the layer with this file, which everyone who uses it has locked.
fn use_of(file: &Path) -> io::Result<Use> {
    let lock = match File::options().read(true).write(true).open(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Use::None(None)),
        other => other?,
    };
    match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(Use::Root),
        Err(error) if has_no_locks(error) => Ok(Use::None(None)),
        other => other.map(|()| Use::None(Some(lock))).map_err(io::Error::from),
    }
}

fn has_no_locks(error: Errno) -> bool {
    [Errno::NOLCK, Errno::NOSYS, Errno::OPNOTSUPP, Errno::INVAL].contains(&error)
}

fn lock_shared(file: &File) -> io::Result<()> {
    match rustix::fs::flock(file, FlockOperation::LockShared) {
        Err(error) if has_no_locks(error) => Ok(()),
        other => Ok(other?),
    }
}

/// Locks a layer by one of its files, for one who uses it.
fn lock_in_place(path: &Path, how: &fs::OpenOptions) -> io::Result<File> {
    loop {
        let file = how.open(path)?;
        lock_shared(&file)?;
        // It may have been replaced or removed while we waited.
        let (held, there) = (file.metadata()?, fs::metadata(path)?);
        if (held.dev(), held.ino()) == (there.dev(), there.ino()) {
            return Ok(file);
        }
    }
}

/// Locks a named layer; with device and inode of the tree that is locked, wherever it is by now.
fn lock_tree(layer: &Path) -> io::Result<(File, (u64, u64))> {
    loop {
        let lock = lock_in_place(&layer.join(INFO), File::options().read(true))?;
        let folder =
            rustix::fs::open(layer, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let identity = |name: &str| {
            rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)
                .map(|stat| (stat.st_dev, stat.st_ino))
        };
        let held = lock.metadata()?;
        if identity(INFO)? == (held.dev(), held.ino()) {
            return Ok((lock, identity(TREE)?));
        }
    }
}

/// Says that an unpacked archive is in use; fails when there is none.
fn touch(used: &Path) -> io::Result<File> {
    let file = lock_in_place(used, File::options().write(true))?;
    file.set_modified(SystemTime::now())?;
    Ok(file)
}

/// Removes unpacked archives that nobody has asked for in a long time, and that no root uses.
fn evict(cache: &Path, current: &str, source: &[u8]) -> io::Result<()> {
    for entry in fs::read_dir(cache)?.flatten() {
        let (name, folder) = (entry.file_name(), entry.path());
        if name == current || name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        let Ok(Use::None(Some(lock))) = use_of(&folder.join("used")) else { continue };
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

/// The path of what a layer is given as: the tree of a named layer, a folder, the folder with an archive's content
/// (unpacked once for each version of the archive), or an image of a file system as it is.
///
/// Whatever has a `/` in it, or is `.` or `..`, is a path; anything else is a name.
///
/// # Errors
/// When there is no such layer, or it is no layer.
pub fn resolve(spec: &str, layers: &LayersDir) -> Result<PathBuf> {
    Ok(resolve_with(spec, layers, &|_, _| {})?.path)
}

/// As [`resolve`], for one who uses it; `progress` is told how many bytes of an archive are unpacked, and how many there
/// are.
///
/// # Errors
/// See there.
pub fn resolve_with(spec: &str, layers: &LayersDir, progress: &dyn Fn(u64, u64)) -> Result<Found> {
    if !spec.contains('/') && spec != "." && spec != ".." {
        check_name(spec)?;
        return match lock_tree(&layers.base.join(spec)) {
            // Then there is no layer, or one that nobody made by name.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) =>
            {
                Ok(Found { path: layers.tree(spec)?, in_use: None, identity: None })
            }
            other => {
                let (lock, identity) = other.context("lock the layer", Path::new(spec))?;
                Ok(Found { path: layers.tree(spec)?, in_use: Some(lock), identity: Some(identity) })
            }
        };
    }
    let path = fs::canonicalize(spec).context("find the layer", Path::new(spec))?;
    if path.is_dir() {
        return Ok(Found { path, in_use: None, identity: None });
    }
    match sort_of(&path).context("read the layer", &path)? {
        Sort::Image => Ok(Found { path, in_use: None, identity: None }),
        Sort::Unknown => Err(LayerError::NotALayer {
            path,
            why: "it is no folder, no tar archive (plain, gzip, zstd, xz or bzip2) and no image (erofs, squashfs, ext4)"
                .to_owned(),
        }),
        _ => layers.unpacked(&path, progress),
    }
}

/// Whether a text can name a layer.
pub(crate) fn check_name(name: &str) -> Result<()> {
    let known = |c: char| c.is_ascii_alphanumeric() || "._+-".contains(c);
    let fits = (1..=NAME_BYTES_MAX).contains(&name.len());
    if fits && !name.starts_with(['.', '-']) && name.chars().all(known) {
        return Ok(());
    }
    Err(LayerError::Name(name.to_owned()))
}

/// Files and bytes below a folder.
fn measure(folder: &Path) -> io::Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    let mut pending = vec![folder.to_owned()];
    while let Some(folder) = pending.pop() {
        let entries = match fs::read_dir(folder) {
            // A folder that an ordinary user has made for another one.
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => continue,
            other => other?,
        };
        for entry in entries {
            let entry = entry?;
            let meta = entry.metadata()?;
            files += 1;
            if meta.is_dir() {
                pending.push(entry.path());
            } else if meta.is_file() {
                bytes += meta.len();
            }
        }
    }
    Ok((files, bytes))
}
