//! The host's memory, and this process's control groups, which may allow less of it.

use std::fs;
use std::path::{Path, PathBuf};

use hayloft_memory::kib;

/// A figure of /proc/meminfo such as `MemTotal:`, bytes.
pub(super) fn meminfo(key: &str) -> Option<u64> {
    kib(&fs::read_to_string("/proc/meminfo").ok()?, key)
}

/// A control group that this process is in, with those above it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    /// Its folder.
    pub(super) dir: PathBuf,
    /// The topmost one that can be seen.
    top: PathBuf,
    /// Of the one hierarchy of all controllers (cgroup v2), not of the memory controller's own (v1).
    pub(super) unified: bool,
}

impl Group {
    /// Whether there is none above it.
    pub(super) fn is_top(&self) -> bool {
        self.dir == self.top
    }

    /// The least that it, or one above it, allows its processes.
    fn limit(&self) -> Option<u64> {
        let file = if self.unified { "memory.max" } else { "memory.limit_in_bytes" };
        let within = self.dir.ancestors().take_while(|dir| dir.starts_with(&self.top));
        within.filter_map(|dir| fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok()).min()
    }
}

/// The groups of this process that may have to do with memory.
pub(super) fn groups() -> Vec<Group> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    groups_of(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"))
}

fn groups_of(own: &str, mountinfo: &str) -> Vec<Group> {
    let mounts = || mountinfo.lines().filter_map(Mounted::parse);
    let group = |line: &str| {
        let mut fields = line.splitn(3, ':');
        let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
        let unified = controllers.is_empty();
        let is_it = |mount: &Mounted<'_>| match unified {
            true => mount.kind == "cgroup2",
            false => mount.kind == "cgroup" && mount.options.split(',').any(|option| option == "memory"),
        };
        if !unified && !controllers.split(',').any(|controller| controller == "memory") {
            return None;
        }
        let mount = mounts().find(is_it)?;
        // What lies above the mount's own root cannot be seen, nor, from a namespace, what is elsewhere.
        let below = Path::new(path).strip_prefix(mount.root).unwrap_or(Path::new(""));
        let top = PathBuf::from(mount.point);
        Some(Group { dir: top.join(below.strip_prefix("/").unwrap_or(below)), top, unified })
    };
    own.lines().filter_map(group).collect()
}

/// A line of /proc/PID/mountinfo, proc_pid_mountinfo(5).
struct Mounted<'a> {
    device: &'a str,
    root: &'a str,
    point: &'a str,
    kind: &'a str,
    options: &'a str,
}

impl<'a> Mounted<'a> {
    fn parse(line: &'a str) -> Option<Mounted<'a>> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut mount = mount.split(' ').skip(2);
        let (device, root, point) = (mount.next()?, mount.next()?, mount.next()?);
        let mut file_system = file_system.split(' ');
        let (kind, _, options) = (file_system.next()?, file_system.next()?, file_system.next()?);
        Some(Mounted { device, root, point, kind, options })
    }
}

/// What this process may have at most: the host's memory, or what its groups allow.
pub(super) fn memory() -> u64 {
    let host = meminfo("MemTotal:").unwrap_or(0);
    groups().iter().filter_map(Group::limit).fold(host, u64::min)
}

/// How many Hayloft mounts the host has, by what can be seen from here.
pub(super) fn mounts() -> usize {
    mounts_of(&fs::read_to_string("/proc/self/mountinfo").unwrap_or_default())
}

fn mounts_of(mountinfo: &str) -> usize {
    let is_ours = |mount: &Mounted<'_>| matches!(mount.kind, "fuse.hayloft" | "fuseblk.hayloft");
    let mut devices: Vec<&str> =
        mountinfo.lines().filter_map(Mounted::parse).filter(is_ours).map(|mount| mount.device).collect();
    devices.sort_unstable();
    devices.dedup();
    devices.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_found_in_both_hierarchies() {
        let mountinfo = "30 20 0:26 / /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n\
            31 20 0:27 /box /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        let found = groups_of("4:memory:/a/b\n3:cpu,cpuacct:/c\n0::/box/d\n", mountinfo);
        let group = |dir: &str, top: &str, unified| Group { dir: dir.into(), top: top.into(), unified };
        assert_eq!(
            found,
            [
                group("/sys/fs/cgroup/memory/a/b", "/sys/fs/cgroup/memory", false),
                group("/sys/fs/cgroup/unified/d", "/sys/fs/cgroup/unified", true)
            ]
        );
        assert!(groups_of("0::/x\n", "").is_empty());
    }

    #[test]
    fn mounts_are_counted_once() {
        let mountinfo = "30 20 0:50 / /a rw - fuse.hayloft h:1/v rw\n\
            31 20 0:50 /d /b rw - fuse.hayloft h:1/v rw\n\
            32 20 7:3 / /c rw - fuseblk.hayloft /dev/loop3 rw\n\
            33 20 0:51 / /d rw - fuse.sshfs x rw\n";
        assert_eq!(mounts_of(mountinfo), 2);
        assert_eq!(mounts_of(""), 0);
    }

    #[test]
    fn this_host_has_memory() {
        assert!(memory() > 16 << 20);
    }
}
