//! What the kernel shows of itself in a root: /dev, /proc and /sys.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::error::{Error, Result, Trying};
use crate::tree::mounts::{attach, new_file_system, open_path, view, view_of, view_with_devices};
use crate::tree::{
    Merged, NODEV, NOEXEC, NOSUID, Plan, RDONLY, is_folder, make_folder, open_own, open_without_links,
};

/// Devices that every program may expect.
const DEVICES: [(&str, u32, u32); 6] =
    [("null", 1, 3), ("zero", 1, 5), ("full", 1, 7), ("random", 1, 8), ("urandom", 1, 9), ("tty", 5, 0)];
const DEVICE_LINKS: [(&str, &str); 5] = [
    ("fd", "/proc/self/fd"),
    ("stdin", "/proc/self/fd/0"),
    ("stdout", "/proc/self/fd/1"),
    ("stderr", "/proc/self/fd/2"),
    ("ptmx", "pts/ptmx"),
];
/// What of /proc tells of the host or reaches it: looks empty.
const PROC_HIDDEN: [&str; 9] =
    ["acpi", "asound", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list", "timer_stats"];
/// What of /proc sets the host's properties: can only be read.
const PROC_READ_ONLY: [&str; 5] = ["bus", "fs", "irq", "sys", "sysrq-trigger"];

/// /dev: nothing but the few devices, and read-only, so that no other device is ever made there; everywhere else
/// devices do not work.
pub(super) fn fill_dev(plan: &Plan, merged: &Merged) -> Result<()> {
    let dev = plan.stage.join("dev");
    for (name, major, minor) in DEVICES {
        let path = dev.join(name);
        let mode = Mode::from_raw_mode(0o666);
        let made = rustix::fs::mknodat(
            CWD,
            &path,
            FileType::CharacterDevice,
            mode,
            rustix::fs::makedev(major, minor),
        );
        if made.is_err() {
            // An ordinary user makes no devices, but may look at those of the host.
            File::create(&path)
                .and_then(|_| view(&Path::new("/dev").join(name), 0, false))
                .and_then(|device| Ok(attach(&device, open_path(&path)?)?))
                .trying(|| format!("make /dev/{name}"))?;
        }
    }
    for (name, target) in DEVICE_LINKS {
        rustix::fs::symlink(target, dev.join(name)).trying(|| format!("make /dev/{name}"))?;
    }
    for name in ["pts", "shm", "mqueue"] {
        make_folder(&dev.join(name), 0o755)?;
    }
    let place = merged.own("dev")?;
    let mount = view_with_devices(&dev, RDONLY | NOSUID | NOEXEC).trying(|| "mount /dev".to_owned())?;
    attach(&mount, place).trying(|| "mount /dev".to_owned())?;
    let inside = |name: &str| open_own(&mount, name);
    let mut options = vec![("ptmxmode", "0666"), ("mode", "0620")];
    if !plan.in_user_namespace {
        // The group "tty" has this number on all common distributions.
        options.push(("gid", "5"));
    }
    let place = inside("pts")?;
    new_file_system("devpts", &options, NOSUID | NOEXEC)
        .and_then(|pts| attach(&pts, place))
        .trying(|| "mount /dev/pts".to_owned())?;
    // Not every kernel has message queues, and few programs miss them.
    if let Ok(queues) = new_file_system("mqueue", &[], NOSUID | NODEV | NOEXEC) {
        attach(&queues, inside("mqueue")?).trying(|| "mount /dev/mqueue".to_owned())?;
    }
    let place = inside("shm")?;
    view(&plan.stage.join("shm"), NOSUID | NODEV, false)
        .and_then(|shm| Ok(attach(&shm, place)?))
        .trying(|| "mount /dev/shm".to_owned())
}

/// Mounts a /proc of this process's PID namespace at a place of the tree that is made in `stage`.
pub(super) fn fill_proc(stage: &Path, in_user_namespace: bool, place: &OwnedFd) -> Result<()> {
    let proc = new_file_system("proc", &[], NOSUID | NODEV | NOEXEC)
        .and_then(|proc| attach(&proc, place).map(|()| proc))
        .map_err(|error| match (error, in_user_namespace) {
            (Errno::PERM, true) => Error::Denied(
                "the kernel lets no ordinary user mount /proc here, because parts of the host's /proc are covered (as in a container): run as root"
                    .to_owned(),
            ),
            (error, _) => Error::system("mount /proc", error),
        })?;
    // All from the descriptor of what was mounted: no path of a layer decides what is covered.
    for name in PROC_READ_ONLY {
        let what = || format!("make /proc/{name} read-only");
        let Some(place) = open_if_there(&proc, name).trying(what)? else { continue };
        view_of(&place, RDONLY | NOSUID | NODEV | NOEXEC)
            .and_then(|mount| Ok(attach(&mount, &place)?))
            .trying(what)?;
    }
    for name in PROC_HIDDEN {
        let what = || format!("cover /proc/{name}");
        let Some(place) = open_if_there(&proc, name).trying(what)? else { continue };
        let is_folder = is_folder(&place).trying(what)?;
        let cover = match is_folder {
            true => view(&stage.join("empty"), RDONLY | NOSUID, false),
            false => view_with_devices(&stage.join("dev/null"), RDONLY | NOSUID),
        };
        cover.and_then(|cover| Ok(attach(&cover, &place)?)).trying(what)?;
    }
    Ok(())
}

pub(super) fn fill_sys(plan: &Plan, merged: &Merged) -> Result<()> {
    let attributes = RDONLY | NOSUID | NODEV | NOEXEC;
    let place = merged.own("sys")?;
    let sys = new_file_system("sysfs", &[], attributes)
        .map_err(io::Error::from)
        // An ordinary user may mount it only along with a network namespace.
        .or_else(|_| view(Path::new("/sys"), attributes, true))
        .and_then(|sys| Ok(attach(&sys, place).map(|()| sys)?))
        .trying(|| "mount /sys".to_owned())?;
    // Variables of the firmware, and what it knows of the machine.
    let what = || "cover /sys/firmware".to_owned();
    let Some(firmware) = open_if_there(&sys, "firmware").trying(what)? else { return Ok(()) };
    view(&plan.stage.join("empty"), attributes, false)
        .and_then(|empty| Ok(attach(&empty, firmware)?))
        .trying(what)
}

/// What `name` on a mount of the kernel's is; `None` when this kernel does not have it. Nothing else is taken for that.
fn open_if_there(mount: &OwnedFd, name: &str) -> rustix::io::Result<Option<OwnedFd>> {
    match open_without_links(mount, name, OFlags::empty()) {
        Ok(place) => Ok(Some(place)),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error),
    }
}
