//! The overlay: the layers below, memory above.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, OpenTreeFlags, UnmountFlags};

use crate::error::{Error, Result};
use crate::kernel;
use crate::tree::mounts::{attach, open_path};
use crate::tree::{MERGED, Plan, UPPER};

/// The kernel that takes layers one by one (`lowerdir+`). One that does not is not asked: it would be at each start.
const LAYERS_ONE_BY_ONE: (u32, u32) = (6, 8);
/// Longest string that fsconfig(2) takes.
const FSCONFIG_BYTES_MAX: usize = 255;

/// What would change the meaning of the upper folder is off, whatever the kernel's default: others read it, too.
const PLAIN_UPPER: [(&str, &str); 3] = [("redirect_dir", "nofollow"), ("metacopy", "off"), ("index", "off")];

/// Mounts the overlay of `layers`, topmost first, in the stage.
///
/// # Errors
/// When the kernel does not accept the layers.
pub(crate) fn mount_overlay(plan: &Plan, layers: &[PathBuf]) -> Result<()> {
    let stage = &plan.stage;
    let points = stage.join("points");
    let all: Vec<&Path> = layers.iter().chain([&points]).map(PathBuf::as_path).collect();
    let mut flags = Vec::new();
    if !plan.fsync {
        flags.push("volatile");
    }
    if plan.in_user_namespace {
        flags.push("userxattr");
    }
    let mount = match kernel::version() >= LAYERS_ONE_BY_ONE {
        true => overlay_by_parts(stage, &all, &flags),
        false => overlay_by_text(stage, &all, &flags),
    };
    mount
        .and_then(|mount| attach(&mount, open_path(&stage.join(MERGED))?))
        .map_err(|error| match error {
            rustix::io::Errno::NODEV => Error::Missing("this kernel has no overlayfs: load the module (modprobe overlay)".to_owned()),
            rustix::io::Errno::INVAL if plan.in_user_namespace => Error::Denied(
                "the kernel lets no ordinary user have a layer in which other file systems are mounted, such as /: name a folder without (--root DIR), or run as root"
                    .to_owned(),
            ),
            rustix::io::Errno::LOOP | rustix::io::Errno::INVAL => Error::Usage(format!(
                "the kernel does not accept these layers together ({error}): is one named twice, or inside another, or itself an overlay of two?"
            )),
            error => Error::system("mount the overlay of the layers", error),
        })
}

fn overlay_by_parts(stage: &Path, layers: &[&Path], flags: &[&str]) -> rustix::io::Result<OwnedFd> {
    let context = rustix::mount::fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    let context = context.as_fd();
    let set = |key: &str, path: &Path| {
        if path.as_os_str().len() <= FSCONFIG_BYTES_MAX {
            return rustix::mount::fsconfig_set_string(context, key, path);
        }
        let open = open_path(path)?;
        rustix::mount::fsconfig_set_string(context, key, format!("/proc/self/fd/{}", open.as_raw_fd()))
    };
    rustix::mount::fsconfig_set_string(context, "source", "hayloft")?;
    for layer in layers {
        set("lowerdir+", layer)?;
    }
    set("upperdir", &stage.join(UPPER))?;
    set("workdir", &stage.join("work"))?;
    for (key, value) in PLAIN_UPPER {
        rustix::mount::fsconfig_set_string(context, key, value)?;
    }
    for flag in flags {
        rustix::mount::fsconfig_set_flag(context, *flag)?;
    }
    rustix::mount::fsconfig_create(context)?;
    let nodev = MountAttrFlags::from_bits_retain(libc::MOUNT_ATTR_NODEV as _);
    rustix::mount::fsmount(context, FsMountFlags::FSMOUNT_CLOEXEC, nodev)
}

fn overlay_by_text(stage: &Path, layers: &[&Path], flags: &[&str]) -> rustix::io::Result<OwnedFd> {
    let escaped = |path: &Path| {
        let text = path.to_string_lossy();
        text.chars().fold(String::new(), |mut out, c| {
            if "\\:,".contains(c) {
                out.push('\\');
            }
            out.push(c);
            out
        })
    };
    let lower: Vec<String> = layers.iter().map(|layer| escaped(layer)).collect();
    let mut options = format!(
        "lowerdir={},upperdir={},workdir={}",
        lower.join(":"),
        escaped(&stage.join(UPPER)),
        escaped(&stage.join("work"))
    );
    for (key, value) in PLAIN_UPPER {
        options.push_str(&format!(",{key}={value}"));
    }
    for flag in flags {
        options.push(',');
        options.push_str(flag);
    }
    let merged = stage.join(MERGED);
    let data = std::ffi::CString::new(options).map_err(|_| rustix::io::Errno::INVAL)?;
    rustix::mount::mount("hayloft", &merged, "overlay", MountFlags::NODEV, Some(&*data))?;
    let again = rustix::mount::open_tree(
        CWD,
        &merged,
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC,
    )?;
    rustix::mount::unmount(&merged, UnmountFlags::empty())?;
    Ok(again)
}
