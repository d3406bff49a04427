//! The tree of a root, built inside its new mount namespace.
//!
//! The **stage** is one tmpfs that holds everything the root keeps in memory: the overlay's `upper` and `work`, `tmp`,
//! `run`, `shm`, `scratch/N` and `dev`; so one size bounds them all, and a folder that no layer fills is a plain
//! folder of it. On `root` the overlay is mounted, and on that all the rest. The namespace's first process
//! has the stage as its root folder; the command's namespace is a copy of it whose root is `root`: nothing of the
//! stage, and nothing of the host, is in reach there. Other processes reach the stage as `/proc/PID/root`.

pub(crate) mod mounts;
pub(crate) mod overlay;
mod system;

use std::fs::{self, File};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::mount::{MountPropagationFlags, UnmountFlags};

use crate::error::{Error, Result, Trying};
use crate::loops;
use crate::memory::budget::Budget;
use crate::spec::{Bind, Layer};
use crate::sys;
use crate::tree::mounts::{attach, new_file_system, open_path, view};
use crate::tree::overlay::mount_overlay;
use crate::tree::system::{fill_dev, fill_proc, fill_sys};

/// Where the merged tree is, in the stage.
pub(crate) const MERGED: &str = "root";
/// Where the overlay's upper folder is, in the stage.
pub(crate) const UPPER: &str = "upper";
const RDONLY: u64 = libc::MOUNT_ATTR_RDONLY;
const NOSUID: u64 = libc::MOUNT_ATTR_NOSUID;
const NODEV: u64 = libc::MOUNT_ATTR_NODEV;
const NOEXEC: u64 = libc::MOUNT_ATTR_NOEXEC;

/// What to build.
#[derive(Debug)]
pub(crate) struct Plan {
    /// An empty folder, to mount the stage on.
    pub stage: PathBuf,
    pub budget: Budget,
    /// Whether the stage may be swapped.
    pub swap: bool,
    pub layers: Vec<Layer>,
    pub binds: Vec<Bind>,
    pub scratch: Vec<PathBuf>,
    pub masked: Vec<PathBuf>,
    pub mode: Option<u32>,
    pub fsync: bool,
    /// Whether an ordinary user builds it, in a user namespace.
    pub in_user_namespace: bool,
}

/// Builds the tree and makes the stage this process's root folder. The host's mounts are gone from this
/// namespace then.
///
/// # Errors
/// When a layer or a bind is not there or the kernel refuses a mount.
pub(crate) fn build(plan: &Plan) -> Result<()> {
    rustix::process::umask(Mode::empty());
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .trying(|| "separate the root's mounts from the host's".to_owned())?;
    mount_stage(plan)?;
    let stage = &plan.stage;
    let folders = [("upper", 0o755), ("work", 0o755), ("points", 0o755), ("empty", 0o555), ("lower", 0o755)];
    let shared = [("scratch", 0o755), ("dev", 0o755), ("shm", 0o1777), ("run", 0o755), ("run/lock", 0o1777)];
    for (name, mode) in folders.into_iter().chain(shared).chain([(MERGED, 0o755), ("tmp", 0o1777)]) {
        make_folder(&stage.join(name), mode)?;
    }
    let lower = mount_layers(plan)?;
    make_points(plan)?;
    set_top(plan, lower.first())?;
    mount_overlay(plan, &lower)?;
    fill(plan)?;
    enter(stage)
}

/// Makes a folder this process's root and lets go of everything above it.
///
/// # Errors
/// When the folder is no mount point.
pub(crate) fn enter(folder: &Path) -> Result<()> {
    rustix::process::chdir(folder)
        // The old root comes to lie on the new one, at the same place, and is taken off there (pivot_root(2)).
        .and_then(|()| rustix::process::pivot_root(".", "."))
        .and_then(|()| rustix::mount::unmount(".", UnmountFlags::DETACH))
        .and_then(|()| rustix::process::chdir("/"))
        .trying(|| "change into the root".to_owned())
}

/// Mounts a /proc of this process's own PID namespace over the root's, in the tree of the stage that is this process's root
/// folder.
///
/// # Errors
/// `Denied` where an ordinary user may not.
pub(crate) fn renew_proc() -> Result<()> {
    let stage = Path::new("/");
    let top = open_path(&stage.join(MERGED)).trying(|| "open the root".to_owned())?;
    fill_proc(stage, true, &open_own(&top, "proc")?)
}

fn make_folder(path: &Path, mode: u32) -> Result<()> {
    rustix::fs::mkdir(path, Mode::from_raw_mode(mode)).trying(|| format!("make {}", path.display()))
}

fn mount_stage(plan: &Plan) -> Result<()> {
    let size = plan.budget.files.to_string();
    let inodes = plan.budget.inodes.to_string();
    let mut options =
        vec![("size", &*size), ("nr_inodes", &*inodes), ("mode", "0755"), ("source", "hayloft")];
    if !plan.swap && !plan.in_user_namespace {
        options.push(("noswap", ""));
    }
    // Nothing opens a device in it; /dev is a view that does.
    let stage = match new_file_system("tmpfs", &options, NODEV) {
        // Before Linux 6.4 a tmpfs cannot be kept from swap; the memory group's limit of swap is what is left.
        Err(Errno::INVAL) => new_file_system("tmpfs", &options[..4], NODEV),
        other => other,
    };
    stage
        .and_then(|stage| attach(&stage, open_path(&plan.stage)?))
        .trying(|| "mount the root's memory (tmpfs)".to_owned())
}

/// Mounts the layers in the stage, where they stay whatever comes to their paths, and gives their places, topmost first.
fn mount_layers(plan: &Plan) -> Result<Vec<PathBuf>> {
    let mut places = Vec::new();
    for (at, layer) in plan.layers.iter().enumerate() {
        let place = plan.stage.join(layer_place(at));
        make_folder(&place, 0o755)?;
        match layer {
            Layer::Folder { path, identity } => {
                mount_folder(path, *identity, &place, plan.in_user_namespace)?
            }
            Layer::Image(image) => mount_image(image, &place)?,
        }
        places.push(place);
    }
    Ok(places)
}

/// Where layer number `at` is mounted, in the stage.
pub(crate) fn layer_place(at: usize) -> PathBuf {
    Path::new("lower").join(at.to_string())
}

fn mount_folder(
    path: &Path,
    identity: Option<(u64, u64)>,
    place: &Path,
    in_user_namespace: bool,
) -> Result<()> {
    let what = || format!("mount the layer {}", path.display());
    let mount = view(path, RDONLY, false).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) if in_user_namespace => Error::Denied(format!(
            "the kernel lets no ordinary user have a layer in which other file systems are mounted, such as {}: name a folder without (--root DIR), or run as root",
            path.display()
        )),
        _ => Error::system(what(), error),
    })?;
    let stat = rustix::fs::fstat(&mount).trying(what)?;
    if identity.is_some_and(|identity| identity != (stat.st_dev, stat.st_ino)) {
        return Err(Error::Replaced(format!(
            "the layer {} has just been replaced: try again",
            path.display()
        )));
    }
    open_path(place).and_then(|place| attach(&mount, place)).trying(what)
}

fn mount_image(image: &Path, folder: &Path) -> Result<()> {
    let what = || format!("mount the image {}", image.display());
    let file = File::open(image).trying(what)?;
    let mut start = [0; 2048];
    let read = file.read_at(&mut start, 0).trying(what)?;
    let has = |at: usize, magic: &[u8]| start[..read].get(at..at + magic.len()) == Some(magic);
    let (kind, options): (&str, &[(&str, &str)]) = match () {
        () if has(1024, &[0xe2, 0xe1, 0xf5, 0xe0]) => ("erofs", &[]),
        () if has(0, b"hsqs") => ("squashfs", &[]),
        // Its log may be unfinished, and must not be written to.
        () if has(1080, &[0x53, 0xef]) => ("ext4", &[("noload", "")]),
        () => {
            return Err(Error::Usage(format!(
                "{} is no layer: neither a folder nor an erofs, squashfs or ext4 image",
                image.display()
            )));
        }
    };
    let open = |source: &Path| {
        let source = source.to_string_lossy();
        let mut all = vec![("source", &*source), ("ro", "")];
        all.extend(options);
        new_file_system(kind, &all, RDONLY | NODEV)
    };
    // erofs reads its image without a block device, on some file systems (Linux 6.12).
    let direct = (kind == "erofs").then(|| open(image).ok()).flatten();
    let (mount, _device) = match direct {
        Some(mount) => (mount, None),
        None => {
            let device = loops::attach(&file, sys::LO_FLAGS_READ_ONLY)?;
            (open(&device.path).trying(what)?, Some(device))
        }
    };
    open_path(folder).and_then(|folder| attach(&mount, folder)).trying(what)
}

/// What a root without a file of hosts has.
const HOSTS: &str = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n";
/// Folders at the top of every root that are not from the layers.
const OWN: [&str; 5] = ["proc", "sys", "dev", "tmp", "run"];

/// The places inside the root where something will be mounted, and whether each is a folder.
fn places(plan: &Plan) -> Vec<(PathBuf, bool)> {
    let own = OWN.map(|name| (PathBuf::from(name), true));
    let masked = plan.masked.iter().map(|path| (inside(path), true));
    own.into_iter().chain(masked).chain(asked_for(plan)).collect()
}

/// Those among the places that the user has named.
fn asked_for(plan: &Plan) -> impl Iterator<Item = (PathBuf, bool)> {
    let binds = plan.binds.iter().map(|bind| (inside(&bind.target), bind.source.is_dir()));
    plan.scratch.iter().map(|path| (inside(path), true)).chain(binds)
}

/// A path in the root, as one below its top.
fn inside(path: &Path) -> PathBuf {
    path.strip_prefix("/").unwrap_or(path).to_owned()
}

/// Makes the places in a layer of their own below all others, so that the upper folder holds what the command has
/// changed and nothing else.
fn make_points(plan: &Plan) -> Result<()> {
    let points = plan.stage.join("points");
    for (place, is_folder) in places(plan) {
        make_place(&points, &place, is_folder).trying(|| format!("make /{}", place.display()))?;
    }
    // Few layers that were made from packages have it, and the root's loopback interface is called so.
    if has_layer_with(plan, "etc") && !has_layer_with(plan, "etc/hosts") {
        make_place(&points, Path::new("etc/hosts"), false)
            .and_then(|()| fs::write(points.join("etc/hosts"), HOSTS))
            .trying(|| "make /etc/hosts".to_owned())?;
    }
    Ok(())
}

/// Whether a layer has something at a path.
fn has_layer_with(plan: &Plan, inside: impl AsRef<Path>) -> bool {
    let has = |at| plan.stage.join(layer_place(at)).join(inside.as_ref()).symlink_metadata().is_ok();
    (0..plan.layers.len()).any(has)
}

fn make_place(below: &Path, place: &Path, is_folder: bool) -> io::Result<()> {
    let mut path = below.to_owned();
    let names: Vec<_> = place.iter().collect();
    for (at, name) in names.iter().enumerate() {
        path.push(name);
        if path.symlink_metadata().is_ok() {
            continue;
        }
        if at + 1 == names.len() && !is_folder {
            File::create(&path)?.set_permissions(fs::Permissions::from_mode(0o644))?;
        } else {
            rustix::fs::mkdir(&path, Mode::from_raw_mode(0o755))?;
        }
    }
    Ok(())
}

/// The top folder is the upper folder's: it gets what was asked for, or what the topmost layer has.
fn set_top(plan: &Plan, topmost: Option<&PathBuf>) -> Result<()> {
    let upper = plan.stage.join(UPPER);
    let what = || "set the mode of the root's top folder".to_owned();
    let mut mode = 0o755;
    if let Some(layer) = topmost {
        let meta = fs::metadata(layer).trying(|| format!("look at the layer {}", layer.display()))?;
        if !meta.is_dir() {
            return Err(Error::Usage(format!("the layer {} is no folder", layer.display())));
        }
        mode = meta.mode() & 0o7777;
        if !plan.in_user_namespace {
            std::os::unix::fs::chown(&upper, Some(meta.uid()), Some(meta.gid())).trying(what)?;
        }
    }
    fs::set_permissions(&upper, fs::Permissions::from_mode(plan.mode.unwrap_or(mode))).trying(what)
}

/// The merged tree, as something to mount in.
struct Merged {
    top: OwnedFd,
}

impl Merged {
    /// The place at a path; symbolic links are those of the root and never lead out of it.
    fn place(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::openat2(&self.top, path, flags, Mode::empty(), ResolveFlags::IN_ROOT)
    }

    /// One of the folders [`OWN`], as the layers have it: no link leads from there to another place, where what is mounted
    /// would be out of sight of what relies on it.
    ///
    /// # Errors
    /// When a layer has something else there.
    fn own(&self, name: &str) -> Result<OwnedFd> {
        open_own(&self.top, name)
    }
}

/// Names what is there, whatever links say.
fn open_without_links(top: &OwnedFd, name: &str, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let flags = flags | OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    rustix::fs::openat2(top, name, flags, Mode::empty(), resolve)
}

fn open_own(top: &OwnedFd, name: &str) -> Result<OwnedFd> {
    open_without_links(top, name, OFlags::DIRECTORY).map_err(|error| match error {
        Errno::LOOP | Errno::NOTDIR => {
            Error::Usage(format!("a layer has a link or a file at /{name}, where a root needs a folder"))
        }
        error => Error::system(format!("open /{name}"), error),
    })
}

/// Mounts everything that is not from the layers.
fn fill(plan: &Plan) -> Result<()> {
    let stage = &plan.stage;
    let merged = Merged { top: open_path(&stage.join(MERGED)).trying(|| "open the root".to_owned())? };
    fill_dev(plan, &merged)?;
    fill_proc(stage, plan.in_user_namespace, &merged.own("proc")?)?;
    fill_sys(plan, &merged)?;
    if let Some(size) = plan.budget.tmp {
        let (size, inodes) = (size.to_string(), plan.budget.tmp_inodes.to_string());
        let mut options =
            vec![("size", &*size), ("nr_inodes", &*inodes), ("mode", "1777"), ("source", "hayloft")];
        if !plan.swap && !plan.in_user_namespace {
            options.push(("noswap", ""));
        }
        new_file_system("tmpfs", &options, NODEV)
            .or_else(|_| new_file_system("tmpfs", &options[..4], NODEV))
            .and_then(|tmp| attach(&tmp, open_path(&stage.join("tmp"))?))
            .trying(|| "mount /tmp".to_owned())?;
    }
    for name in ["tmp", "run"] {
        let place = merged.own(name)?;
        view(&stage.join(name), NOSUID | NODEV, false)
            .and_then(|mount| Ok(attach(&mount, place)?))
            .trying(|| format!("mount /{name}"))?;
    }
    for (place, is_folder) in asked_for(plan) {
        if ["tmp", "run"].iter().any(|top| place.starts_with(top) && place != Path::new(top)) {
            make_place(stage, &place, is_folder).trying(|| format!("make /{}", place.display()))?;
        }
    }
    for path in &plan.masked {
        let place = match merged.place(path) {
            // One that lies under another that is masked has nothing to hide, nor has one that a layer above has a file for.
            Err(Errno::NOENT | Errno::NOTDIR) => continue,
            other => other.trying(|| format!("cover {}", path.display()))?,
        };
        view(&stage.join("empty"), RDONLY | NOSUID | NODEV, false)
            .and_then(|empty| Ok(attach(&empty, place)?))
            .trying(|| format!("cover {}", path.display()))?;
    }
    for (at, path) in plan.scratch.iter().enumerate() {
        fill_scratch(plan, &merged, at, path)?;
    }
    plan.binds.iter().try_for_each(|bind| fill_bind(&merged, bind))
}

fn fill_scratch(plan: &Plan, merged: &Merged, at: usize, path: &Path) -> Result<()> {
    let what = || format!("mount memory on {}", path.display());
    let folder = plan.stage.join("scratch").join(at.to_string());
    make_folder(&folder, 0o755)?;
    let place = merged.place(path).trying(what)?;
    let stat = rustix::fs::fstat(&place).trying(what)?;
    // Where no layer says whose it is, it is everybody's, as /tmp is.
    let mode = if has_layer_with(plan, inside(path)) { stat.st_mode & 0o7777 } else { 0o1777 };
    fs::set_permissions(&folder, fs::Permissions::from_mode(mode)).trying(what)?;
    if !plan.in_user_namespace {
        std::os::unix::fs::chown(&folder, Some(stat.st_uid), Some(stat.st_gid)).trying(what)?;
    }
    view(&folder, NODEV, false).and_then(|mount| Ok(attach(&mount, place)?)).trying(what)
}

fn fill_bind(merged: &Merged, bind: &Bind) -> Result<()> {
    let attributes = NODEV | NOSUID | if bind.writable { 0 } else { RDONLY };
    let source = view(&bind.source, attributes, true)
        .trying(|| format!("look at {}, which is to be bound", bind.source.display()))?;
    let mounted = merged.place(&bind.target).and_then(|place| {
        // The kernel's EINVAL would have other reasons too.
        if is_folder(&place)? == is_folder(&source)? { attach(&source, place) } else { Err(Errno::NOTDIR) }
    });
    mounted.map_err(|error| match error {
        Errno::NOENT | Errno::NOTDIR => Error::Usage(format!(
            "{} cannot be bound to {}: a layer has something else there than {}",
            bind.source.display(),
            bind.target.display(),
            if bind.source.is_dir() { "a folder" } else { "a file" }
        )),
        error => Error::system(format!("bind {} to {}", bind.source.display(), bind.target.display()), error),
    })
}

fn is_folder(what: &OwnedFd) -> rustix::io::Result<bool> {
    Ok(FileType::from_raw_mode(rustix::fs::fstat(what)?.st_mode).is_dir())
}

/// Opens a place inside a tree by its path, following symbolic links only inside.
///
/// # Errors
/// As openat2(2) says.
pub(crate) fn open_inside(top: BorrowedFd<'_>, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let flags = flags | OFlags::CLOEXEC;
    Ok(rustix::fs::openat2(
        top,
        path,
        flags,
        Mode::empty(),
        ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
    )?)
}
