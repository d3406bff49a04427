//! Makes a root, runs the command in it, and removes or keeps it.

use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use crate::command::sweep;
use crate::error::{Error, Result, Trying};
use crate::identity::mapping;
use crate::inside::holder::{self, Holding};
use crate::kernel;
use crate::memory::budget::{self, Budget};
use crate::memory::cgroup::{self, Groups, Limits};
use crate::memory::processes;
use crate::memory::spill;
use crate::report::{Link, Order, Said, TaskEnd};
use crate::spec::{Layer, Network, Spec, Spill};
use crate::state::{RootInfo, RootState, Roots, check_name};
use crate::sys::{self, Child, Forked};
use crate::terminal::Joined;
use crate::terminal::standard::Standard;
use crate::terminal::watch::Watch;
use crate::tree;

/// Exit code of a command that was killed along with its root.
const KILLED: i32 = 128 + libc::SIGKILL;

/// What a command did.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// How it ended.
    pub end: TaskEnd,
    /// From the request to the command's first instruction.
    pub start: Duration,
    /// From there to its end.
    pub wall: Duration,
    /// Most bytes that were resident at a time, where a memory group says so.
    pub memory_peak: Option<u64>,
    /// Bytes written to swap. Where the memory group does not say (cgroup v1), what the root's own swap space took, or
    /// what lies in swap at the end if that is more.
    pub spilled: u64,
    /// How many processes were killed because the root's memory was used up.
    pub out_of_memory_kills: u64,
    /// How many times a process or thread was refused, since the root had as many as it may have. Not known where no
    /// control group bounds them.
    pub processes_refused: u64,
}

/// A root whose command has been started. Dropped, it ends with everything in it.
#[derive(Debug)]
pub struct Running {
    roots: Roots,
    info: RootInfo,
    link: Option<Link>,
    child: Option<Child>,
    watch: Watch,
    standard: Standard,
    terminal: Option<Joined>,
    /// Held by us and by the first process: the sign of life.
    lock: Option<File>,
    spilled_before: u64,
    started: Instant,
    start: Duration,
}

/// Makes a root and starts its command.
///
/// # Errors
/// As [`Error`] says; nothing is left behind then.
pub fn start(roots: &Roots, spec: &Spec) -> Result<Running> {
    let begun = Instant::now();
    sys::check_single_thread().trying(|| "make a process from one with several threads".to_owned())?;
    kernel::check()?;
    check(spec)?;
    let budget = Budget::new(spec.memory, spec.spill.bytes(), spec.tmp, budget::meminfo("MemTotal")?)?;
    let watch = Watch::new()?;
    let standard = Standard::prepare()?;
    let (info, lock, groups) = claim(roots, spec, budget, &watch)?;
    let mut running = Running {
        roots: roots.clone(),
        info,
        link: None,
        child: None,
        watch,
        standard,
        terminal: None,
        lock: Some(lock),
        spilled_before: 0,
        started: begun,
        start: Duration::ZERO,
    };
    running.bring_up(spec, budget, &groups)?;
    running.start = begun.elapsed();
    running.started = Instant::now();
    Ok(running)
}

fn check(spec: &Spec) -> Result<()> {
    if spec.task.command.is_empty() {
        return Err(Error::Usage("there is no command to run".to_owned()));
    }
    for place in spec.binds.iter().map(|bind| &bind.target).chain(&spec.scratch) {
        crate::spec::check_place(place)?;
    }
    for layer in &spec.layers {
        let (path, kind, fits) = match layer {
            Layer::Folder { path, .. } => (path, "folder", path.is_dir()),
            Layer::Image(path) => (path, "image", path.is_file()),
        };
        if !fits {
            return Err(Error::NotFound(format!("there is no {kind} {} to be a layer", path.display())));
        }
        if kind == "image" && !rustix::process::geteuid().is_root() {
            return Err(Error::Denied(format!(
                "only root may mount the image {}: unpack it, and name the folder",
                path.display()
            )));
        }
    }
    for bind in &spec.binds {
        if let Err(error) = fs::metadata(&bind.source) {
            return Err(Error::NotFound(format!("cannot bind {}: {error}", bind.source.display())));
        }
    }
    match spec.cpus {
        Some(cpus) if !(cpus.is_finite() && cpus >= 0.01) => {
            Err(Error::Usage("--cpus takes a number such as 2 or 0.5".to_owned()))
        }
        _ => Ok(()),
    }
}

/// Takes a name and what the root may claim, with all others waiting.
fn claim(roots: &Roots, spec: &Spec, budget: Budget, watch: &Watch) -> Result<(RootInfo, File, Groups)> {
    let held = sweep::lock_watched(roots, watch)?;
    sweep::sweep(roots, &held)?;
    if let Some(required) = spec.require_free {
        let claims: Vec<u64> = roots.list()?.iter().map(budget::claim).collect();
        budget::require_free(required, budget::meminfo("MemAvailable")?, &claims)?;
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // No two roots are made by one process at the same nanosecond.
    let unique = format!("{:x}-{:x}", std::process::id(), now.as_nanos() as u64 & 0xffff_ffff);
    let name = spec.name.clone().unwrap_or_else(|| format!("run-{unique}"));
    check_name(&name)?;
    let (processes, can_bound_users) = (processes::limit(spec.processes)?, processes::can_bound_users());
    let groups = Groups::plan(
        &format!("hayloft-{unique}"),
        Limits {
            memory: spec.memory,
            spill: spec.spill.bytes(),
            cpus: spec.cpus,
            processes,
            processes_flag: spec.processes.filter(|_| !can_bound_users).map(|_| "--processes"),
        },
    )?;
    let processes_per_user = !groups.bound_processes() && can_bound_users;
    let spill = spill::plan(spec.spill, &spec.spill_dir, &format!("hayloft-{unique}"))?;
    let folder = roots.of(&name);
    match fs::create_dir(&folder) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            return Err(Error::Busy(format!(
                "a root '{name}' exists: choose another name, or remove it (hayloft root rm {name})"
            )));
        }
        other => other.trying(|| format!("make {}", folder.display()))?,
    }
    let what = || format!("make the state of the root in {}", folder.display());
    let lock =
        File::options().create_new(true).read(true).write(true).open(folder.join("lock")).trying(what)?;
    lock.lock().trying(what)?;
    fs::create_dir(folder.join("stage")).trying(what)?;
    let info = RootInfo {
        name,
        created: now.as_secs() as i64,
        command: spec.task.command.iter().map(|arg| arg.to_string_lossy().into_owned()).collect(),
        layers: Vec::new(),
        lower: Vec::new(),
        upper: PathBuf::new(),
        merged: PathBuf::new(),
        userxattr: !rustix::process::geteuid().is_root(),
        state: RootState::Running,
        pid: 0,
        exit_code: None,
        memory: spec.memory,
        processes: (groups.bound_processes() || processes_per_user).then_some(processes),
        processes_per_user,
        files_bytes_max: budget.files_max(),
        cgroups: groups.paths(),
        spill,
        network: spec.network,
        pid_started: 0,
    };
    info.save(&folder)?;
    Ok((info, lock, groups))
}

impl Running {
    fn folder(&self) -> PathBuf {
        self.roots.of(&self.info.name)
    }

    fn bring_up(&mut self, spec: &Spec, budget: Budget, groups: &Groups) -> Result<()> {
        groups.create()?;
        let folder = self.folder();
        if let Some(mut space) = self.info.spill.take() {
            let outcome = spill::create(&mut space, |space| {
                let info = RootInfo { spill: Some(space.clone()), ..self.info.clone() };
                info.save(&folder)
            });
            self.spilled_before = spill::written(&space.device);
            self.info.spill = Some(space);
            outcome?;
        }
        let holding = self.holding(spec, budget, &folder);
        let (ours, theirs) = Link::pair()?;
        let child =
            match sys::fork(namespaces(spec, holding.plan.in_user_namespace)).map_err(no_namespaces)? {
                Forked::Child => {
                    drop(ours);
                    // A panic must not run what belongs to the process that this one is a copy of.
                    let standard = &self.standard;
                    let code =
                        std::panic::catch_unwind(|| holder::run(theirs, &holding, standard)).unwrap_or(101);
                    sys::exit_now(code);
                }
                Forked::Parent(child) => child,
            };
        drop(theirs);
        self.standard.let_go();
        self.info.pid = child.pid;
        self.info.pid_started = sys::start_time(child.pid).unwrap_or(0);
        self.child = Some(child);
        let child = self.child.as_ref().expect("just set");
        cgroup::join(&self.info.cgroups, child.pid)?;
        if holding.plan.in_user_namespace {
            mapping::map_user(child.pid)?;
            let _ = ours.send(&Order::Build);
        }
        self.watch.wait_built(&ours, child)?;
        let stage = PathBuf::from(format!("/proc/{}/root", child.pid));
        self.info.upper = stage.join(tree::UPPER);
        self.info.merged = stage.join(tree::MERGED);
        self.info.layers = spec.layers.iter().map(|layer| layer.path().to_owned()).collect();
        self.info.lower = (0..spec.layers.len()).map(|at| stage.join(tree::layer_place(at))).collect();
        self.info.save(&folder)?;
        let terminal = Joined::open(&self.info.merged)?;
        let (mut joined, terminal) = terminal.unzip();
        let _ = ours.send(&Order::Start(terminal));
        if let Some(joined) = &mut joined {
            joined.join()?;
        }
        self.terminal = joined;
        self.watch.wait_started(&ours, child, self.terminal.as_mut())?;
        self.link = Some(ours);
        Ok(())
    }

    fn holding(&self, spec: &Spec, budget: Budget, folder: &Path) -> Holding {
        Holding {
            plan: tree::Plan {
                stage: folder.join("stage"),
                budget,
                swap: spec.spill != Spill::None,
                layers: spec.layers.clone(),
                binds: spec.binds.clone(),
                scratch: spec.scratch.clone(),
                masked: spec.masked.clone(),
                mode: spec.mode,
                fsync: spec.fsync,
                in_user_namespace: self.info.userxattr,
            },
            task: spec.task.clone(),
            // The same for every unnamed root: builds write it into what they make.
            host_name: spec.name.clone().unwrap_or_else(|| "hayloft".to_owned()),
            network: spec.network,
            processes_per_user: self.info.processes.filter(|_| self.info.processes_per_user),
            locks: self
                .lock
                .iter()
                .chain(spec.in_use.iter().map(|file| &**file))
                .map(AsRawFd::as_raw_fd)
                .collect(),
        }
    }

    /// What another process sees of the root.
    pub fn info(&self) -> &RootInfo {
        &self.info
    }

    /// Waits until the command has ended. Everything else in the root has been ended then, too; its files are
    /// still there. Signals act again as they did before the root was made.
    ///
    /// # Errors
    /// When the root's first process was killed.
    pub fn wait(&mut self) -> Result<Outcome> {
        let (Some(link), Some(child)) = (&self.link, &self.child) else {
            return Err(Error::Failed("the root has ended".to_owned()));
        };
        let ended = self.watch.wait_ended(link, child, self.terminal.as_mut());
        self.terminal = None;
        self.watch.release();
        let ended = ended?;
        let asked = self.watch.asked();
        // Killed because it did not end when it was asked to: as if by the signal that asked.
        let killed = || TaskEnd {
            exit_code: asked.map_or(KILLED, |signal| 128 + signal),
            signal: asked,
            ..TaskEnd::default()
        };
        let end = ended.unwrap_or_else(killed);
        self.info.exit_code = Some(end.exit_code);
        let device = self.info.spill.as_ref().map(|space| spill::written(&space.device)).unwrap_or(0);
        Ok(Outcome {
            start: self.start,
            wall: self.started.elapsed(),
            memory_peak: cgroup::peak(&self.info.cgroups),
            spilled: cgroup::swapped_out(&self.info.cgroups).unwrap_or_else(|| {
                // Its pages may be on a device that another root brought.
                let own = device.saturating_sub(self.spilled_before);
                own.max(cgroup::swapped_now(&self.info.cgroups))
            }),
            out_of_memory_kills: cgroup::out_of_memory_kills(&self.info.cgroups),
            processes_refused: cgroup::processes_refused(&self.info.cgroups),
            end,
        })
    }

    /// Leaves the root behind, for a look, until it is removed.
    ///
    /// # Errors
    /// When its first process has ended.
    pub fn keep(mut self) -> Result<RootInfo> {
        self.info.state = RootState::Kept;
        self.info.save(&self.folder())?;
        let gone = || Error::Failed("the root has ended and cannot be kept".to_owned());
        let link = self.link.as_ref().ok_or_else(gone)?;
        link.send(&Order::Keep).map_err(|_| gone())?;
        match link.receive() {
            Ok(Some(Said::Kept)) => (),
            _ => return Err(gone()),
        }
        self.child = None;
        Ok(self.info.clone())
    }

    /// Ends the root and removes all of it.
    ///
    /// # Errors
    /// When something of it stays; the next root that is made tries again.
    pub fn end(mut self) -> Result<()> {
        self.remove()
    }

    fn remove(&mut self) -> Result<()> {
        self.terminal = None;
        self.link = None;
        if let Some(child) = self.child.take() {
            // It ends by itself when it sees that nobody is there; this is for one that is stuck.
            let _ = sys::pidfd_kill(child.pidfd.as_fd(), libc::SIGKILL);
            let _ = sys::wait(Some(child.pid), true);
        }
        self.lock = None;
        sweep::finish(&self.roots, &self.info.name)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Kept, or removed already.
        if self.lock.is_none() || (self.child.is_none() && self.info.state == RootState::Kept) {
            return;
        }
        if let Err(error) = self.remove() {
            tracing::warn!(root = self.info.name, %error, "something of the root stays for now");
        }
    }
}

fn namespaces(spec: &Spec, in_user_namespace: bool) -> u64 {
    let mut flags = libc::CLONE_NEWNS | libc::CLONE_NEWPID | libc::CLONE_NEWIPC | libc::CLONE_NEWUTS;
    if spec.network == Network::None {
        flags |= libc::CLONE_NEWNET;
    }
    if in_user_namespace {
        flags |= libc::CLONE_NEWUSER;
    }
    flags as u64
}

fn no_namespaces(error: std::io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::EPERM) => Error::Denied(
            "not permitted to make namespaces: run as root, or allow them to ordinary users (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns)"
                .to_owned(),
        ),
        // mount_setattr(2), which is newer than clone3(2), is there: see `kernel::check`.
        Some(libc::ENOSYS) => kernel::filtered(&error),
        Some(libc::ENOSPC) => Error::NoRoom("there are too many namespaces: see /proc/sys/user/max_*_namespaces".to_owned()),
        _ => Error::system("make namespaces", error),
    }
}
