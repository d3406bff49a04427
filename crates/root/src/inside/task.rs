//! The command: the last steps in its own process, from the root's namespaces to its first instruction.

use std::collections::BTreeMap;
use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::Mode;
use rustix::mount::MountPropagationFlags;
use rustix::process::Signal;
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::error::{Error, Result, Trying};
use crate::identity::users;
use crate::identity::users::User;
use crate::inside::holder::Supervised;
use crate::inside::seccomp;
use crate::report::Terminal;
use crate::spec::{Network, Task};
use crate::sys;
use crate::tree;
use crate::tree::mounts::open_path;

/// Where programs are, unless the environment says otherwise.
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// Largest /etc/passwd or /etc/group that is read.
const USERS_BYTES_MAX: u64 = 16 << 20;

/// What root in the root may do: what installing and building packages takes. A device that is made with MKNOD works
/// nowhere in the root (all mounts are `nodev`, /dev is read-only). Not among them: anything that reaches the kernel, other
/// namespaces, raw devices or, past permissions, files by handle.
pub(crate) const CAPABILITIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::KILL)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::NET_BIND_SERVICE)
    .union(CapabilitySet::SYS_CHROOT)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::AUDIT_WRITE)
    .union(CapabilitySet::SETFCAP);

/// Becomes the command. Called in a process of its own whose root folder is the stage.
///
/// # Errors
/// Whatever kept the command from running; it returns only then.
pub(crate) fn become_command(task: &Task, terminal: Option<&Terminal>, how: &Supervised) -> Error {
    match prepare(task, terminal, how).and_then(|env| run(task, &env)) {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

enum Never {}

fn prepare(
    task: &Task,
    terminal: Option<&Terminal>,
    how: &Supervised,
) -> Result<BTreeMap<OsString, OsString>> {
    // From here on it is seen by what runs in the root, which soon has the same rights.
    sys::hide_from_others().trying(|| "hide from others".to_owned())?;
    // The terminal outside, if there is one, is not this session's: nothing can be typed into it from here.
    rustix::process::setsid().trying(|| "start a session".to_owned())?;
    sys::new_mount_namespace().trying(|| "make a mount namespace".to_owned())?;
    rustix::mount::mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)
        .trying(|| "separate the command's mounts".to_owned())?;
    if task.ends_all {
        match tree::renew_proc() {
            // An ordinary user's root keeps the one that shows all of the root.
            Ok(()) | Err(Error::Denied(_)) => (),
            Err(error) => return Err(error),
        }
    }
    tree::enter(&Path::new("/").join(tree::MERGED))?;
    if !task.new_privileges {
        // No program gives rights then (see `confine`), and the kernel need not look for any each time that one is executed:
        // a layer on FUSE would be asked for them.
        open_path(Path::new("/"))
            .map_err(io::Error::from)
            .and_then(|top| sys::set_mount_attributes(top.as_fd(), libc::MOUNT_ATTR_NOSUID, 0, true))
            .trying(|| "mount the root without setuid programs".to_owned())?;
    }
    if let Some(terminal) = terminal {
        take_terminal(terminal)?;
    }
    let user = users::find(&task.user, &read_users("/etc/passwd")?, &read_users("/etc/group")?)?;
    if let Some(terminal) = terminal {
        // Else he could not open /dev/stdout; where users are not mapped it stays root's.
        let _ = std::os::unix::fs::chown(terminal_path(terminal), Some(user.uid), None);
    }
    let env = environment(task, &user);
    rustix::process::umask(Mode::from_bits_truncate(task.umask));
    sys::close_on_exec_from(3).trying(|| "close what the command must not inherit".to_owned())?;
    sys::reset_signals();
    if let Some(most) = how.processes_per_user {
        sys::bound_processes(most).trying(|| "bound the number of processes".to_owned())?;
    }
    confine(task, &user, how.network)?;
    if !how.is_first {
        // Not before: the kernel forgets it when a process changes its user.
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
            .trying(|| "be ended along with hayloft".to_owned())?;
    }
    // After the change of user: he may not be let in everywhere.
    let folder = task.folders.iter().find(|folder| rustix::process::chdir(*folder).is_ok());
    if folder.is_none() && !task.folders.is_empty() {
        let wanted = task.folders[0].display();
        return Err(Error::Usage(match task.folders[0].symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => format!(
                "the folder {wanted} is not in the root: show it there (--bind DIR:DIR), or name another (--chdir)"
            ),
            _ => format!("{} cannot enter the folder {wanted} in the root", user.name),
        }));
    }
    Ok(env)
}

fn terminal_path(terminal: &Terminal) -> String {
    format!("/dev/pts/{}", terminal.number)
}

fn take_terminal(terminal: &Terminal) -> Result<()> {
    let path = terminal_path(terminal);
    let what = || format!("open {path}");
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NOCTTY).open(&path).trying(what)?;
    rustix::process::ioctl_tiocsctty(&file).trying(|| format!("take {path} as the terminal"))?;
    for number in &terminal.descriptors {
        sys::replace_standard(file.as_fd(), *number).trying(what)?;
    }
    Ok(())
}

/// A file of the root: not a trap such as a FIFO, and of a sane size. None is an empty one.
fn read_users(path: &str) -> Result<String> {
    let what = || format!("read the root's {path}");
    let flags = libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = match OpenOptions::new().read(true).custom_flags(flags).open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(String::new()),
        other => other.trying(what)?,
    };
    if !file.metadata().trying(what)?.is_file() {
        return Ok(String::new());
    }
    let mut bytes = Vec::new();
    file.take(USERS_BYTES_MAX).read_to_end(&mut bytes).trying(what)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn environment(task: &Task, user: &User) -> BTreeMap<OsString, OsString> {
    let shell = if user.shell.is_empty() { "/bin/sh" } else { &user.shell };
    let own = [
        ("HOME", &*user.home),
        ("USER", &user.name),
        ("LOGNAME", &user.name),
        ("SHELL", shell),
        ("PATH", PATH),
    ];
    let own = own.into_iter().map(|(key, value)| (key.into(), value.into()));
    own.chain(task.env.iter().cloned()).collect()
}

/// Gives up what the command must not have. The order matters: the filter needs the right to administer
/// or `no_new_privs`, the bounding set a capability that changing the user takes away.
fn confine(task: &Task, user: &User, network: Network) -> Result<()> {
    let what = || "give up privileges".to_owned();
    for number in 0..64 {
        let one = CapabilitySet::from_bits_retain(1 << number);
        if CAPABILITIES.contains(one) {
            continue;
        }
        match rustix::thread::remove_capability_from_bounding_set(one) {
            // The kernel has no more of them.
            Err(rustix::io::Errno::INVAL) => break,
            other => other.trying(what)?,
        }
    }
    rustix::thread::clear_ambient_capability_set().trying(what)?;
    if !task.new_privileges {
        rustix::thread::set_no_new_privs(true).trying(what)?;
    }
    sys::install_filter(&seccomp::filter(network)).trying(|| "filter system calls (seccomp)".to_owned())?;
    // In a user namespace of an ordinary user groups cannot be set, unless a range of them was mapped.
    let groups = fs::read_to_string("/proc/self/setgroups").map_or(true, |text| text.trim() != "deny");
    sys::become_user(user.uid, user.gid, groups.then_some(&*user.groups)).map_err(|error| {
        match error.raw_os_error() {
            Some(libc::EINVAL) => Error::Denied(format!(
                "the user {} (number {}) does not exist in this user namespace: run as root, or give this user a range in /etc/subuid and /etc/subgid",
                user.name, user.uid
            )),
            _ => Error::system(format!("become the user {}", user.name), error),
        }
    })?;
    let keep = if user.uid == 0 { CAPABILITIES } else { CapabilitySet::empty() };
    let now = rustix::thread::capabilities(None).trying(what)?;
    let permitted = now.permitted & keep;
    let sets = CapabilitySets { effective: permitted, permitted, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).trying(what)
}

fn run(task: &Task, env: &BTreeMap<OsString, OsString>) -> Result<Never> {
    let program = task.command.first().ok_or_else(|| Error::Usage("there is no command".to_owned()))?;
    let text = |text: &OsStr| {
        CString::new(text.as_bytes())
            .map_err(|_| Error::Usage("the command or its environment has a NUL in it".to_owned()))
    };
    let args = task.command.iter().map(|arg| text(arg)).collect::<Result<Vec<_>>>()?;
    let pairs = env.iter().map(|(key, value)| {
        let joined = [key.as_bytes(), value.as_bytes()].join(&b'=');
        text(&OsString::from_vec(joined))
    });
    let pairs = pairs.collect::<Result<Vec<_>>>()?;
    let path = env.get(OsStr::new("PATH")).map_or_else(|| OsString::from(PATH), Clone::clone);
    let mut refused = None;
    for candidate in candidates(program, &path) {
        let error = sys::exec(&candidate, &args, &pairs);
        match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENOTDIR) if !candidate.exists() => (),
            _ => refused = refused.or(Some((candidate, error))),
        }
    }
    let name = program.to_string_lossy();
    Err(match refused {
        None => Error::NoCommand(format!("there is no '{name}' in the root")),
        Some((path, error)) => {
            let hint = match error.raw_os_error() {
                Some(libc::ENOENT) => " (its interpreter or loader is not in the root)",
                Some(libc::ENOEXEC) => {
                    " (neither a program of this machine nor a script that begins with #!)"
                }
                _ => "",
            };
            Error::CannotRun(format!("cannot run {} in the root: {error}{hint}", path.display()))
        }
    })
}

/// Where a command may be, as a shell looks for it.
fn candidates(program: &OsStr, path: &OsStr) -> Vec<PathBuf> {
    if program.is_empty() {
        return Vec::new();
    }
    if program.as_bytes().contains(&b'/') {
        return vec![program.into()];
    }
    std::env::split_paths(path).map(|folder| folder.join(program)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_capability_reaches_the_host() {
        for one in [
            CapabilitySet::SYS_ADMIN,
            CapabilitySet::SYS_PTRACE,
            CapabilitySet::SYS_MODULE,
            CapabilitySet::SYS_RAWIO,
            CapabilitySet::DAC_READ_SEARCH,
            CapabilitySet::NET_ADMIN,
            CapabilitySet::SYS_BOOT,
            CapabilitySet::SYS_TIME,
        ] {
            assert!(!CAPABILITIES.contains(one));
        }
    }

    #[test]
    fn programs_are_looked_for_as_a_shell_does() {
        let found = candidates(OsStr::new("make"), OsStr::new("/usr/bin:/bin"));
        assert_eq!(found, [Path::new("/usr/bin/make"), Path::new("/bin/make")]);
        assert_eq!(candidates(OsStr::new("./x"), OsStr::new("/bin")), [Path::new("./x")]);
    }
}
