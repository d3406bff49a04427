//! `mount -o remount` of a mount that is there: what the kernel keeps of its options can be changed, that is whether it
//! may be written to, and `nosuid`, `nodev`, `noexec`. The client's own options stay as they are.

use std::path::Path;

use crate::exit::{Exit, failure};
use crate::mountinfo;
use crate::mounts::sync;
use crate::mounts::umount;
use crate::sys;

/// Whether mount(8) asks its helper for this.
pub(crate) fn is_asked(options: &[String]) -> bool {
    words(options).any(|word| word == "remount")
}

/// Changes the mount on `dir`. When it is read-only from now on, the store has everything of it.
///
/// # Errors
/// Not a mount, not permitted, or files are open for writing.
pub(crate) fn run(dir: &Path, options: &[String]) -> anyhow::Result<u8> {
    let dir = mountinfo::ours(dir)?.mount_point;
    let flags = flags(options);
    sys::remount(&dir, flags).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => umount::in_use(&dir),
        Some(libc::EPERM) => failure(Exit::Denied, format!("not permitted to remount {}", dir.display())),
        _ => failure(Exit::Failed, format!("cannot remount {}: {error}", dir.display())),
    })?;
    if flags & libc::MS_RDONLY != 0 {
        sync::flush(&dir, None)?;
    }
    Ok(0)
}

fn words(options: &[String]) -> impl Iterator<Item = &str> {
    options.iter().flat_map(|list| list.split(','))
}

/// The flags of mount(2). Of two that say the opposite the last one counts.
fn flags(options: &[String]) -> libc::c_ulong {
    let mut flags = libc::MS_NOATIME;
    for word in words(options) {
        match word {
            "ro" => flags |= libc::MS_RDONLY,
            "rw" => flags &= !libc::MS_RDONLY,
            "nosuid" => flags |= libc::MS_NOSUID,
            "suid" => flags &= !libc::MS_NOSUID,
            "nodev" => flags |= libc::MS_NODEV,
            "dev" => flags &= !libc::MS_NODEV,
            "noexec" => flags |= libc::MS_NOEXEC,
            "exec" => flags &= !libc::MS_NOEXEC,
            // The client's own, and what mount(8) found in the kernel's table.
            _ => {}
        }
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_mount_hands_over_becomes_flags() {
        let options = |text: &str| vec![text.to_owned()];
        assert!(is_asked(&options("rw,remount,commit=5")) && !is_asked(&options("rw,commit=5")));
        let found =
            options("ro,nosuid,noatime,remount,user_id=0,group_id=0,default_permissions,blksize=4096");
        assert_eq!(flags(&found), libc::MS_NOATIME | libc::MS_RDONLY | libc::MS_NOSUID);
        assert_eq!(flags(&options("ro,noexec,rw,exec,nodev")), libc::MS_NOATIME | libc::MS_NODEV);
    }
}
