//! The folder of layers that have a name.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::error::{Context, LayerError, Result};
use crate::files::folder::Folder;
use crate::modules::recipe::{Installed, Recipe};
use crate::named::locks::{Use, use_of_all};
use crate::publication::staging::Staging;

const NAME_BYTES_MAX: usize = 100;
/// The tree of a layer, in its folder.
pub(super) const TREE: &str = "tree";
/// What is known of a layer, beside its tree.
pub(super) const INFO: &str = "layer.json";
/// What the name of a replaced layer ends in that roots still use.
pub(super) const OLD: &str = ".hayloft-old";

/// What is known of a generation of a layer: `layer.json` beside its tree.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LayerInfo {
    /// What it was made from, as it was asked for.
    pub from: String,
    /// The package archive that was taken instead of this machine's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<String>,
    /// What was done to have this generation, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// When it was made, in seconds since 1970.
    pub created: i64,
    /// Files and folders in it.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
    /// The name by content of its tree; none where that could not be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tree: Option<String>,
    /// The generation whose tree it has, when it has none of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub same_as: Option<u64>,
    /// What it was made from, when it is upon other layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<Recipe>,
    /// Packages that it adds to those, or has in another version.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub packages: Vec<Installed>,
}

impl LayerInfo {
    /// That of a tree that is being made now.
    pub fn new(from: &str) -> LayerInfo {
        LayerInfo { from: from.to_owned(), created: now(), ..LayerInfo::default() }
    }

    /// That of the generation in this folder.
    ///
    /// # Errors
    /// When it is not there, or not ours.
    pub fn read(folder: &Path) -> Result<LayerInfo> {
        let path = folder.join(INFO);
        let text = fs::read(&path).context("read", &path)?;
        serde_json::from_slice(&text).map_err(io::Error::from).context("make sense of", &path)
    }

    /// Writes it into the folder of a generation, measured and named as its tree is.
    ///
    /// # Errors
    /// When the tree cannot be read, or the file not be written.
    pub fn seal(mut self, folder: &Path) -> Result<LayerInfo> {
        let tree = folder.join(TREE);
        let progress = hayloft_tree::Progress::default();
        match hayloft_tree::walk(&tree, &progress) {
            Ok(walked) => {
                let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
                // The top is none of its files.
                (self.files, self.bytes) =
                    (count(&progress.entries).saturating_sub(1), count(&progress.bytes));
                self.tree = Some(walked.name.to_string());
            }
            Err(error) => {
                tracing::debug!(%error, "a layer without a name by content");
                (self.files, self.bytes) = measure(&tree).context("measure", &tree)?;
            }
        }
        self.write(folder)?;
        Ok(self)
    }

    pub(crate) fn write(&self, folder: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(io::Error::from).context("write", folder)?;
        fs::write(folder.join(INFO), text).context("write", folder)
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64)
}

/// The folder of all layers with a name. Each is a folder `NAME/` with `tree/` and `layer.json`, which is its first generation, and
/// `generations/N/` with the same for each that came later. One that is made upon another layer has all of them there.
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

    /// The tree of the layer of this name, of its newest generation: what it adds to the layers below it.
    ///
    /// # Errors
    /// When there is none.
    pub fn tree(&self, name: &str) -> Result<PathBuf> {
        self.generation_tree(name, self.current(name)?)
    }

    /// What is known of a layer, of its newest generation.
    ///
    /// # Errors
    /// When there is none of that name, or its `layer.json` is not ours.
    pub fn info(&self, name: &str) -> Result<LayerInfo> {
        self.generation(name, self.current(name)?)
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

    /// Removes a layer with all its generations: at once for everybody who looks it up.
    ///
    /// # Errors
    /// When there is none of that name, a root uses it, or a layer is made upon it.
    pub fn remove(&self, name: &str) -> Result<()> {
        self.current(name)?;
        self.remove_old();
        let staging = Staging::begin(&self.base, OsStr::new(name))?;
        self.refuse_if_below(name)?;
        let Use::None(_locks) = use_of_all(&staging.target()).context("lock", staging.target())? else {
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
            if let Ok(Use::None(_locks)) = use_of_all(&self.base.join(&name))
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
        info: LayerInfo,
        replace: bool,
        make: impl FnOnce(&Path) -> Result<()>,
    ) -> Result<LayerInfo> {
        check_name(name)?;
        fs::create_dir_all(&self.base).context("make", &self.base)?;
        self.sweep()?;
        let draft = self.draft(name)?;
        if !replace && draft.exists() {
            return Err(LayerError::Exists(name.to_owned()));
        }
        let info = fill(draft.top(), info, make)?;
        draft.put(replace)?;
        Ok(info)
    }
}

/// Makes the tree of a first generation in the folder of a layer, which is there.
pub(crate) fn fill(top: &Path, info: LayerInfo, make: impl FnOnce(&Path) -> Result<()>) -> Result<LayerInfo> {
    let tree = top.join(TREE);
    fs::create_dir_all(&tree).context("make", &tree)?;
    // Programs that fill it give up their rights for parts of the work, and have to reach it all the same.
    for folder in [top.parent().unwrap_or(top), top] {
        let mode = fs::Permissions::from_mode(0o711);
        fs::set_permissions(folder, mode).context("open up", folder)?;
    }
    make(&tree)?;
    close(top)?;
    info.seal(top)
}

/// Makes what holds a layer private: setuid programs and devices in it are not for the host's other users.
pub(super) fn close(folder: &Path) -> Result<()> {
    fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).context("close", folder)
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
