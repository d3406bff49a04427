//! Control groups: what bounds a root's memory, processor time and processes, on cgroup v2 and on v1 where only that has the
//! controller (<https://docs.kernel.org/admin-guide/cgroup-v2.html>, `cgroup-v1/memory.html`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::{Error, Result, Trying};

/// The group on cgroup v2 that all roots' groups are in.
const V2_PARENT: &str = "hayloft";
/// How long the last processes of a group may take to leave it after they were killed.
const EMPTY_WITHIN: Duration = Duration::from_secs(5);
/// Length of a period of the processor's quota, in microseconds: the kernel's default.
const CPU_PERIOD_US: u64 = 100_000;

/// What a group shall bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Limits {
    /// Resident bytes.
    pub memory: Option<u64>,
    /// Bytes that may be swapped.
    pub spill: u64,
    /// Processors.
    pub cpus: Option<f64>,
    /// Processes and threads.
    pub processes: u64,
    /// The flag that asked for them, when nothing else can bound them.
    pub processes_flag: Option<&'static str>,
}

/// A controller's place for a new group.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    v2: bool,
    parent: PathBuf,
}

/// The groups of one root, not made yet.
#[derive(Debug)]
pub(crate) struct Groups {
    name: String,
    memory: Option<Place>,
    cpu: Option<Place>,
    pids: Option<Place>,
    limits: Limits,
}

impl Groups {
    /// Finds where the groups go. Without limits a memory group is still wanted for its figures, where it can be
    /// made.
    ///
    /// # Errors
    /// When there is a limit and no controller for it.
    pub(crate) fn plan(name: &str, limits: Limits) -> Result<Groups> {
        let mountinfo =
            fs::read_to_string("/proc/self/mountinfo").trying(|| "read /proc/self/mountinfo".to_owned())?;
        let own = fs::read_to_string("/proc/self/cgroup").trying(|| "read /proc/self/cgroup".to_owned())?;
        let hierarchies = Hierarchies::parse(&mountinfo, &own);
        let find = |controller: &str, asked: Option<&str>| -> Result<Option<Place>> {
            match (hierarchies.place(controller), asked) {
                (Ok(place), _) => Ok(Some(place)),
                (Err(_), None) => Ok(None),
                (Err(error), Some(flag)) => Err(refusal(controller, flag, &error)),
            }
        };
        Ok(Groups {
            name: name.to_owned(),
            memory: find("memory", limits.memory.map(|_| "--memory"))?,
            cpu: match limits.cpus {
                Some(_) => find("cpu", Some("--cpus"))?,
                None => None,
            },
            pids: find("pids", limits.processes_flag)?,
            limits,
        })
    }

    /// Whether a group will bound how many processes there are.
    pub(crate) fn bound_processes(&self) -> bool {
        self.pids.is_some()
    }

    /// The paths that [`Groups::create`] will make: written down before, so that whoever cleans up knows.
    pub(crate) fn paths(&self) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> = [&self.memory, &self.cpu, &self.pids]
            .into_iter()
            .flatten()
            .map(|place| place.parent.join(&self.name))
            .collect();
        // Those of cgroup v2 are one.
        paths.sort();
        paths.dedup();
        paths
    }

    /// Makes the groups and sets their limits.
    ///
    /// # Errors
    /// When a limit cannot be set.
    pub(crate) fn create(&self) -> Result<()> {
        for path in self.paths() {
            fs::create_dir(&path).trying(|| format!("make the control group {}", path.display()))?;
        }
        self.set_limits()
    }

    fn set_limits(&self) -> Result<()> {
        let set = |place: &Place, file: &str, value: String| {
            let path = place.parent.join(&self.name).join(file);
            fs::write(&path, &value).trying(|| format!("write {value} to {}", path.display()))
        };
        let has = |place: &Place, file: &str| place.parent.join(&self.name).join(file).exists();
        if let (Some(place), Some(memory)) = (&self.memory, self.limits.memory) {
            let spill = self.limits.spill;
            if place.v2 {
                set(place, "memory.max", memory.to_string())?;
                // Absent where the kernel has no swap, or does not count it; the same below.
                if has(place, "memory.swap.max") {
                    set(place, "memory.swap.max", spill.to_string())?;
                }
            } else {
                set(place, "memory.limit_in_bytes", memory.to_string())?;
                // Counts memory and swap together.
                if has(place, "memory.memsw.limit_in_bytes") {
                    set(place, "memory.memsw.limit_in_bytes", (memory + spill).to_string())?;
                }
            }
        }
        if let (Some(place), Some(cpus)) = (&self.cpu, self.limits.cpus) {
            let quota = ((cpus * CPU_PERIOD_US as f64) as u64).max(1000);
            if place.v2 {
                set(place, "cpu.max", format!("{quota} {CPU_PERIOD_US}"))?;
            } else {
                set(place, "cpu.cfs_period_us", CPU_PERIOD_US.to_string())?;
                set(place, "cpu.cfs_quota_us", quota.to_string())?;
            }
        }
        if let Some(place) = &self.pids {
            set(place, "pids.max", self.limits.processes.to_string())?;
        }
        Ok(())
    }
}

fn refusal(controller: &str, flag: &str, error: &io::Error) -> Error {
    let why = format!(
        "{flag} needs the {controller} controller of control groups, and this process cannot make a group: {error}"
    );
    match error.kind() {
        io::ErrorKind::NotFound => {
            Error::Missing(format!("{why}; mount cgroup2 on /sys/fs/cgroup, or leave {flag} out"))
        }
        _ => Error::Denied(format!(
            "{why}; run as root, or in a delegated group (systemd-run --user --scope -p Delegate=yes), or leave {flag} out"
        )),
    }
}

/// Puts a process into groups.
///
/// # Errors
/// When a group is gone.
pub(crate) fn join(paths: &[PathBuf], pid: i32) -> Result<()> {
    for path in paths {
        fs::write(path.join("cgroup.procs"), pid.to_string())
            .trying(|| format!("put process {pid} into {}", path.display()))?;
    }
    Ok(())
}

/// Removes groups, waiting for processes that were killed to leave them. One that is not there is no error.
///
/// # Errors
/// When processes stay in one.
pub(crate) fn remove(paths: &[PathBuf]) -> Result<()> {
    let deadline = Instant::now() + EMPTY_WITHIN;
    for path in paths {
        loop {
            match fs::remove_dir(path) {
                Ok(()) => break,
                Err(error) if error.kind() == io::ErrorKind::NotFound => break,
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => {
                    return Err(error).trying(|| format!("remove the control group {}", path.display()));
                }
            }
        }
    }
    Ok(())
}

fn figure(paths: &[PathBuf], files: &[&str]) -> Option<u64> {
    let candidates = paths.iter().flat_map(|path| files.iter().map(move |file| path.join(file)));
    candidates.filter_map(|file| fs::read_to_string(file).ok()).find_map(|text| text.trim().parse().ok())
}

/// Bytes resident now, caches included.
pub(crate) fn usage(paths: &[PathBuf]) -> Option<u64> {
    figure(paths, &["memory.current", "memory.usage_in_bytes"])
}

/// Bytes of them that are pages of files on other file systems than tmpfs, which are dropped when memory is wanted.
pub(crate) fn file_pages(paths: &[PathBuf]) -> u64 {
    let pages = |key| keyed(paths, &["memory.stat"], key).unwrap_or(0);
    pages("inactive_file") + pages("active_file")
}

/// Most bytes that were resident.
pub(crate) fn peak(paths: &[PathBuf]) -> Option<u64> {
    figure(paths, &["memory.peak", "memory.max_usage_in_bytes"])
}

/// How many processes were killed because their group's memory was used up.
pub(crate) fn out_of_memory_kills(paths: &[PathBuf]) -> u64 {
    keyed(paths, &["memory.events", "memory.oom_control"], "oom_kill").unwrap_or(0)
}

/// How many times a process or thread was refused, since the group had as many as it may have.
pub(crate) fn processes_refused(paths: &[PathBuf]) -> u64 {
    keyed(paths, &["pids.events"], "max").unwrap_or(0)
}

/// Bytes written to swap since the group was made; cgroup v1 does not say.
pub(crate) fn swapped_out(paths: &[PathBuf]) -> Option<u64> {
    keyed(paths, &["memory.stat"], "pswpout").map(|pages| pages * rustix::param::page_size() as u64)
}

/// Bytes that are in swap now, as cgroup v1 says it (v2 counts what was written: [`swapped_out`]).
pub(crate) fn swapped_now(paths: &[PathBuf]) -> u64 {
    keyed(paths, &["memory.stat"], "swap").unwrap_or(0)
}

fn keyed(paths: &[PathBuf], files: &[&str], key: &str) -> Option<u64> {
    let candidates = paths.iter().flat_map(|path| files.iter().map(move |file| path.join(file)));
    candidates.filter_map(|file| fs::read_to_string(file).ok()).find_map(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' '))?;
        line.parse().ok()
    })
}

/// Where control groups are mounted, and which this process is in.
#[derive(Debug, Default)]
struct Hierarchies {
    /// The mount of cgroup v2, and this process's group.
    v2: Option<(PathBuf, PathBuf)>,
    /// For each v1 controller this process's group.
    v1: Vec<(String, PathBuf)>,
}

impl Hierarchies {
    /// Reads the texts of /proc/self/mountinfo and /proc/self/cgroup.
    fn parse(mountinfo: &str, own: &str) -> Hierarchies {
        let mut found = Hierarchies::default();
        let own_path = |controller: &str| {
            own.lines().find_map(|line| {
                let mut fields = line.splitn(3, ':').skip(1);
                let controllers = fields.next()?;
                let path = fields.next()?;
                controllers.split(',').any(|name| name == controller).then(|| PathBuf::from(path))
            })
        };
        for line in mountinfo.lines() {
            let Some((before, after)) = line.split_once(" - ") else { continue };
            let before: Vec<&str> = before.split(' ').collect();
            let after: Vec<&str> = after.split(' ').collect();
            let (Some(root), Some(point), Some(kind)) = (before.get(3), before.get(4), after.first()) else {
                continue;
            };
            // The part of the hierarchy that is mounted, as in a container, may not be all of it.
            let group = |path: PathBuf| {
                let inside = path.strip_prefix(root).map(Path::to_owned).unwrap_or_default();
                Path::new(point).join(inside)
            };
            match *kind {
                "cgroup2" if found.v2.is_none() => {
                    found.v2 = own_path("").map(|path| (PathBuf::from(point), group(path)));
                }
                "cgroup" => {
                    for controller in after.get(2).into_iter().flat_map(|options| options.split(',')) {
                        if let Some(path) = own_path(controller) {
                            found.v1.push((controller.to_owned(), group(path)));
                        }
                    }
                }
                _ => (),
            }
        }
        found
    }

    /// Where a new group with this controller can be made.
    fn place(&self, controller: &str) -> io::Result<Place> {
        if let Some((mount, own)) = &self.v2
            && has_word(&mount.join("cgroup.controllers"), controller)
        {
            return v2_parent(mount, own, controller).map(|parent| Place { v2: true, parent });
        }
        match self.v1.iter().find(|(name, _)| name == controller) {
            Some((_, own)) => {
                rustix::fs::access(own, rustix::fs::Access::WRITE_OK)?;
                Ok(Place { v2: false, parent: own.clone() })
            }
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

/// A group whose children have the controller and which has no processes itself: one of our own at the top for root;
/// otherwise the nearest above this process that was delegated to this user.
fn v2_parent(mount: &Path, own: &Path, controller: &str) -> io::Result<PathBuf> {
    if rustix::process::geteuid().is_root() {
        let parent = mount.join(V2_PARENT);
        enable(mount, controller)?;
        match fs::create_dir(&parent) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => (),
        }
        enable(&parent, controller)?;
        return Ok(parent);
    }
    let above = own.ancestors().skip(1).take_while(|path| path.starts_with(mount));
    let mut refused = io::ErrorKind::PermissionDenied.into();
    for path in above {
        match rustix::fs::access(path, rustix::fs::Access::WRITE_OK).map_err(io::Error::from) {
            Ok(()) => match enable(path, controller) {
                Ok(()) => return Ok(path.to_owned()),
                Err(error) => refused = error,
            },
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

fn enable(group: &Path, controller: &str) -> io::Result<()> {
    let file = group.join("cgroup.subtree_control");
    match has_word(&file, controller) {
        true => Ok(()),
        false => fs::write(file, format!("+{controller}")),
    }
}

fn has_word(file: &Path, word: &str) -> bool {
    fs::read_to_string(file).is_ok_and(|text| text.split_whitespace().any(|found| found == word))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIXED: &str = "\
30 25 0:26 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw
31 25 0:27 / /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory
32 25 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct
";
    const OWN: &str = "9:cpu,cpuacct:/a\n4:memory:/job/7\n0::/\n";

    #[test]
    fn groups_are_found_on_both_versions() {
        let found = Hierarchies::parse(MIXED, OWN);
        assert_eq!(found.v2, Some(("/sys/fs/cgroup/unified".into(), "/sys/fs/cgroup/unified/".into())));
        assert!(found.v1.contains(&("memory".to_owned(), "/sys/fs/cgroup/memory/job/7".into())));
        assert!(found.v1.contains(&("cpu".to_owned(), "/sys/fs/cgroup/cpu,cpuacct/a".into())));
        // A container that sees its own part only.
        let part = "31 25 0:27 /docker/1 /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n";
        let found = Hierarchies::parse(part, "0::/docker/1/x\n");
        assert_eq!(found.v2.unwrap().1, Path::new("/sys/fs/cgroup/x"));
    }

    #[test]
    fn figures_are_read_under_either_name() {
        let dir = tempfile::tempdir().unwrap();
        let paths = [dir.path().to_owned()];
        assert_eq!((peak(&paths), out_of_memory_kills(&paths)), (None, 0));
        fs::write(dir.path().join("memory.max_usage_in_bytes"), "77\n").unwrap();
        fs::write(dir.path().join("memory.oom_control"), "under_oom 0\noom_kill 3\n").unwrap();
        fs::write(dir.path().join("memory.stat"), "swap 1\npswpout 2\n").unwrap();
        fs::write(dir.path().join("pids.events"), "max 4\n").unwrap();
        assert_eq!((peak(&paths), out_of_memory_kills(&paths)), (Some(77), 3));
        assert_eq!(processes_refused(&paths), 4);
        assert_eq!(swapped_now(&paths), 1);
        assert_eq!(swapped_out(&paths), Some(2 * rustix::param::page_size() as u64));
    }

    /// Groups whose places are folders of a disk: what is looked for before it is written can be told from what is not.
    fn groups(parent: &Path, v2: bool) -> Groups {
        let place = || Some(Place { v2, parent: parent.to_owned() });
        let limits =
            Limits { memory: Some(1 << 20), spill: 512, cpus: None, processes: 77, processes_flag: None };
        Groups { name: "one".to_owned(), memory: place(), cpu: None, pids: place(), limits }
    }

    #[test]
    fn a_kernel_that_does_not_count_swap_is_not_asked_to_bound_it() {
        for (v2, file, value) in
            [(true, "memory.swap.max", "512"), (false, "memory.memsw.limit_in_bytes", "1049088")]
        {
            let dir = tempfile::tempdir().unwrap();
            let groups = groups(dir.path(), v2);
            assert_eq!(groups.paths(), [dir.path().join("one")]);
            groups.create().unwrap();
            assert!(!dir.path().join("one").join(file).exists(), "{file}");
            assert_eq!(fs::read_to_string(dir.path().join("one/pids.max")).unwrap(), "77");
            // Where the kernel has the file it is written.
            let groups = Groups { name: "two".to_owned(), ..groups };
            fs::create_dir(dir.path().join("two")).unwrap();
            fs::write(dir.path().join("two").join(file), "max").unwrap();
            groups.set_limits().unwrap();
            assert_eq!(fs::read_to_string(dir.path().join("two").join(file)).unwrap(), value);
        }
    }

    #[test]
    fn a_delegated_group_is_the_nearest_that_can_be_written() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("cgroup.subtree_control"), "cpu memory\n").unwrap();
        enable(dir.path(), "memory").unwrap();
        assert!(has_word(&dir.path().join("cgroup.subtree_control"), "cpu"));
        assert!(!has_word(&dir.path().join("cgroup.subtree_control"), "mem"));
    }
}
