//! Swap space that a root brings along: a sparse file behind a loop device (a swap file itself must not have holes), or
//! a compressed device in memory.
//!
//! Swap belongs to the host: pages of one root may lie on the device that another brought. Each root
//! brings as much as it may swap, so that when a device goes, the others have room for what is on it. A device
//! with much of others on it stays until the last root with swap ends.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Error, Result, Trying};
use crate::loops;
use crate::spec::Spill;
use crate::state::SpillInfo;
use crate::sys;

/// Up to so many bytes are brought back to memory when a device goes while others still swap.
const BRING_BACK_BYTES_MAX: u64 = 64 << 20;
/// Where in the header a swap device's UUID and label are, one after the other, and how long they are together.
const MARK_AT: usize = 1036;
const MARK_BYTES: usize = 32;
/// Less than this is no swap space to the kernel.
const SIZE_MIN: u64 = 1 << 20;
/// `TMPFS_MAGIC` and `RAMFS_MAGIC` of statfs(2): file systems in memory.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6_u32 as i64];

/// What is recorded before anything is made.
pub(crate) fn plan(spill: Spill, folder: &Path, name: &str) -> Result<Option<SpillInfo>> {
    if spill == Spill::None {
        return Ok(None);
    }
    let size = spill.bytes();
    if size < SIZE_MIN {
        return Err(Error::Usage(format!("--spill is too small: at least {} MiB", SIZE_MIN >> 20)));
    }
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Denied(
            "only root may swap: leave --spill out, and the root is full at --memory".to_owned(),
        ));
    }
    // By the path that the kernel has for it, else it would not be found again among the devices.
    let file = match spill {
        Spill::File(_) => {
            let what = || format!("make the folder {} for swap files", folder.display());
            fs::create_dir_all(folder).trying(what)?;
            Some(fs::canonicalize(folder).trying(what)?.join(format!("{name}.swap")))
        }
        _ => None,
    };
    // The end of the name is what no two have in common.
    let mark = name[name.len().saturating_sub(MARK_BYTES)..].to_owned();
    Ok(Some(SpillInfo { device: PathBuf::new(), file, size, mark, is_expected: false }))
}

/// Makes the swap space and has the kernel use it. `record` writes down what is going to be there.
///
/// # Errors
/// When the disk has no room for it or is none, or the machine has no loop device or zram.
pub(crate) fn create(info: &mut SpillInfo, mut record: impl FnMut(&SpillInfo) -> Result<()>) -> Result<()> {
    // Hold what is made until the kernel swaps to it.
    let (mut attached, mut held) = (None, None);
    match &info.file {
        Some(path) => {
            let device = attach_file(path, info.size)?;
            info.device = device.path.clone();
            record(info)?;
            attached = Some(device);
        }
        None => {
            held = Some(lock_devices()?);
            // The kernel gives the lowest number that is free. Written down before, it is found if we are killed while
            // the device is made.
            (info.device, info.is_expected) = (next_device(), true);
            record(info)?;
            let added = hot_add();
            info.device = added.as_ref().ok().cloned().unwrap_or_default();
            info.is_expected = false;
            record(info)?;
            added?;
            set_size(&info.device, info.size)?;
        }
    }
    write_header(info)?;
    sys::swap_on(&info.device).trying(|| format!("swap to {}", info.device.display()))?;
    drop((attached, held));
    Ok(())
}

fn attach_file(path: &Path, size: u64) -> Result<loops::LoopDevice> {
    let what = || format!("make the swap file {}", path.display());
    let folder = path.parent().expect("made by plan()");
    let stat = rustix::fs::statfs(folder).trying(what)?;
    if IN_MEMORY.contains(&(stat.f_type as i64)) {
        return Err(Error::Usage(format!(
            "{} is in memory: name a folder on a disk for --spill (--spill-dir)",
            folder.display()
        )));
    }
    let free = stat.f_bavail as u64 * stat.f_bsize as u64;
    if free < size {
        return Err(Error::NoRoom(format!(
            "{} has room for {} MiB, and --spill asks for {} MiB: ask for less, or name another folder (--spill-dir)",
            folder.display(),
            free >> 20,
            size >> 20
        )));
    }
    let file =
        OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(path).trying(what)?;
    file.set_len(size).trying(what)?;
    // Without direct I/O (the file system may lack it) pages on their way to the disk would be in memory twice.
    loops::attach(&file, sys::LO_FLAGS_DIRECT_IO).or_else(|_| loops::attach(&file, 0))
}

/// Keeps other roots on this host, whatever their state folder, from making and removing compressed devices.
fn lock_devices() -> Result<OwnedFd> {
    let folder = Path::new("/sys/class/zram-control");
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let control = rustix::fs::open(folder, flags, Mode::empty()).map_err(|error| match error {
        Errno::NOENT => Error::Missing(
            "there is no zram here: load the module (modprobe zram), or spill to a file".to_owned(),
        ),
        _ => Error::system("open /sys/class/zram-control", error),
    })?;
    rustix::fs::flock(&control, FlockOperation::LockExclusive)
        .trying(|| "lock /sys/class/zram-control".to_owned())?;
    Ok(control)
}

fn next_device() -> PathBuf {
    let device = |number: u32| PathBuf::from(format!("/dev/zram{number}"));
    (0..).map(device).find(|device| !sysfs(device).exists()).expect("there are fewer devices than numbers")
}

fn hot_add() -> Result<PathBuf> {
    let number =
        fs::read_to_string("/sys/class/zram-control/hot_add").trying(|| "make a zram device".to_owned())?;
    Ok(PathBuf::from(format!("/dev/zram{}", number.trim())))
}

fn set_size(device: &Path, size: u64) -> Result<()> {
    let file = sysfs(device).join("disksize");
    fs::write(&file, size.to_string()).trying(|| format!("write {}", file.display()))
}

fn sysfs(device: &Path) -> PathBuf {
    Path::new("/sys/block").join(device.file_name().unwrap_or_default())
}

/// What mkswap(8) writes: the header is the first page, `union swap_header` of the kernel's `swap.h`.
fn header(size: u64, mark: &str, page: usize) -> Vec<u8> {
    let mut header = vec![0; page];
    let pages = size / page as u64;
    header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
    header[1028..1032]
        .copy_from_slice(&(pages.saturating_sub(1).min(u64::from(u32::MAX)) as u32).to_ne_bytes());
    header[MARK_AT..MARK_AT + mark.len()].copy_from_slice(mark.as_bytes());
    header[page - 10..].copy_from_slice(b"SWAPSPACE2");
    header
}

fn write_header(info: &SpillInfo) -> Result<()> {
    let what = || format!("prepare {} for swapping", info.device.display());
    let mut file = OpenOptions::new().write(true).open(&info.device).trying(what)?;
    file.write_all(&header(info.size, &info.mark, rustix::param::page_size())).trying(what)?;
    file.sync_data().trying(what)
}

/// Whether it is our mark that stands in a device's header.
fn is_marked(device: &Path, mark: &str) -> bool {
    let mut found = [0; MARK_BYTES];
    let read = fs::File::open(device).and_then(|file| file.read_exact_at(&mut found, MARK_AT as u64));
    read.is_ok() && !mark.is_empty() && found.starts_with(mark.as_bytes())
}

fn is_blank(device: &Path) -> bool {
    let mut found = vec![0; rustix::param::page_size()];
    let read = fs::File::open(device).and_then(|file| file.read_exact_at(&mut found, 0));
    read.is_ok() && found.iter().all(|byte| *byte == 0)
}

/// Bytes written to a device so far.
pub(crate) fn written(device: &Path) -> u64 {
    let text = fs::read_to_string(sysfs(device).join("stat")).unwrap_or_default();
    // The seventh figure, in sectors of 512 bytes (the kernel's `block/stat`).
    text.split_whitespace().nth(6).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) * 512
}

/// Bytes that lie on a device, if the kernel swaps to it.
fn used(device: &Path) -> Option<u64> {
    let text = fs::read_to_string("/proc/swaps").ok()?;
    let line = text.lines().find(|line| line.split_whitespace().next() == device.to_str())?;
    line.split_whitespace().nth(3)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

/// Takes the swap space away. With `others` still swapping it stays when much lies on it: false.
///
/// # Errors
/// When memory has no room for what lies on it.
pub(crate) fn remove(info: &SpillInfo, others: bool) -> Result<bool> {
    let devices = match &info.file {
        // Known by its file: the device may have been given to it after the last record was written.
        Some(file) => loops::devices_of(file),
        None if info.device.as_os_str().is_empty() => Vec::new(),
        None => vec![info.device.clone()],
    };
    for device in &devices {
        match used(device) {
            // Its number was given to another one since.
            Some(_) if info.file.is_none() && !is_marked(device, &info.mark) => continue,
            Some(bytes) if others && bytes > BRING_BACK_BYTES_MAX => return Ok(false),
            Some(_) => sys::swap_off(device).trying(|| format!("stop swapping to {}", device.display()))?,
            None => (),
        }
        if info.file.is_none() {
            remove_zram(device, info)?;
        }
    }
    match info.file.as_deref().map(fs::remove_file) {
        Some(Err(error)) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).trying(|| "remove a swap file".to_owned())
        }
        _ => Ok(true),
    }
}

/// Removes a zram device if it is still the one that we made: of our size, or of none yet.
fn remove_zram(device: &Path, info: &SpillInfo) -> Result<()> {
    let _held = match lock_devices() {
        // Without zram there is no device of it.
        Err(Error::Missing(_)) => return Ok(()),
        other => other?,
    };
    let Ok(found) = fs::read_to_string(sysfs(device).join("disksize")) else { return Ok(()) };
    let found: u64 = found.trim().parse().unwrap_or(0);
    // The kernel rounds up to whole pages.
    let is_our_size = found.abs_diff(info.size) < rustix::param::page_size() as u64 && !info.is_expected;
    if found != 0 && !is_our_size {
        return Ok(());
    }
    // Nothing is written to it before the mark.
    if found != 0 && !is_marked(device, &info.mark) && !is_blank(device) {
        return Ok(());
    }
    let number = device.to_string_lossy().trim_start_matches("/dev/zram").to_owned();
    let _ = fs::write(sysfs(device).join("reset"), "1");
    fs::write("/sys/class/zram-control/hot_remove", number).trying(|| format!("remove {}", device.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_as_mkswap_writes_it() {
        let header = header(1 << 20, "hayloft-1-2", 4096);
        assert_eq!(&header[1036..1068], b"hayloft-1-2\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        assert_eq!(&header[4086..], b"SWAPSPACE2");
        assert_eq!(header[1024..1032], [1, 0, 0, 0, 255, 0, 0, 0]);
    }

    #[test]
    fn nothing_is_no_swap_space() {
        assert_eq!(plan(Spill::None, Path::new("/x"), "r").unwrap(), None);
        assert!(matches!(plan(Spill::File(1), Path::new("/x"), "r"), Err(Error::Usage(_))));
        assert!(used(Path::new("/dev/hayloft-none")).is_none());
    }

    #[test]
    fn a_device_is_known_by_its_mark() {
        let dir = tempfile::tempdir().unwrap();
        let device = dir.path().join("device");
        fs::write(&device, header(1 << 20, "hayloft-1-2", 4096)).unwrap();
        assert!(is_marked(&device, "hayloft-1-2"));
        for other in ["hayloft-1-3", ""] {
            assert!(!is_marked(&device, other), "{other}");
        }
        assert!(!is_marked(&dir.path().join("none"), "hayloft-1-2"));
    }

    #[test]
    fn a_swap_file_has_the_path_that_the_kernel_has_for_it() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let info = plan(Spill::File(1 << 20), &link.join("new"), "r").unwrap().unwrap();
        assert_eq!(info.file.unwrap(), real.canonicalize().unwrap().join("new/r.swap"));
    }
}
