//! This program's own file, kept from what runs in roots.
//!
//! A program in a root reaches the file of whatever process became it, as `/proc/self/exe`: a layer's `/bin/sh` that is a
//! script for the interpreter `/proc/self/exe` is this program with the layer's C library, and might change the host's
//! file. So whoever makes or enters a root first executes this program again, from a view of its file that is read-only for
//! good: a mount in nobody's namespace. It costs half a millisecond, and is done before `main`, since what
//! libraries do before that would take longer twice than everything here.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, CWD, MemfdFlags, SealFlags, StatVfsMountFlags};
use rustix::mount::OpenTreeFlags;
use rustix::process::{PidfdGetfdFlags, Signal};

use crate::error::{Result, Trying};
use crate::sys::{self, Forked};

const OWN_FILE: &str = "/proc/self/exe";
/// Where the file is that this program was executed from at first: the view has no path.
const PATH_VARIABLE: &str = "HAYLOFT_PROGRAM";

/// Makes sure that this process is executed from a file that nothing in a root can change; executes this program again
/// unless it is.
///
/// # Errors
/// When there is no way to do so.
pub fn protect() -> Result<()> {
    if is_protected() {
        return Ok(());
    }
    let text = |text: OsString| CString::new(text.into_vec()).map_err(io::Error::from);
    let args = std::env::args_os().map(text).collect::<io::Result<Vec<_>>>();
    let env =
        std::env::vars_os().map(|(key, value)| text(joined(&key, &value))).collect::<io::Result<Vec<_>>>();
    let error =
        args.and_then(|args| Ok((args, env?))).map_or_else(|error| error, |(args, env)| execute(&args, env));
    // Where there can be no roots at all, that is why.
    crate::kernel::check()?;
    Err(error).trying(|| "execute this program from where nothing can change it".to_owned())
}

/// How to start this program another time.
pub fn path() -> PathBuf {
    std::env::var_os(PATH_VARIABLE).map_or_else(|| OWN_FILE.into(), PathBuf::from)
}

fn joined(key: &OsStr, value: &OsStr) -> OsString {
    OsString::from_vec([key.as_bytes(), value.as_bytes()].join(&b'='))
}

fn is_protected() -> bool {
    let is_view =
        || rustix::fs::statvfs(OWN_FILE).is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY));
    let is_sealed = || {
        let file = File::open(OWN_FILE)?;
        Ok::<_, io::Error>(rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::WRITE))
    };
    // In an ordinary user's root nobody has more rights than he outside.
    let is_foreign = || {
        let file = std::fs::metadata(OWN_FILE)?;
        let is_writable = rustix::fs::access(OWN_FILE, Access::WRITE_OK).is_ok();
        Ok::<_, io::Error>(!rustix::process::geteuid().is_root() && file.uid() == 0 && !is_writable)
    };
    is_view() || is_sealed().unwrap_or(false) || is_foreign().unwrap_or(false)
}

/// Executes this program again; returns only when that fails.
fn execute(args: &[CString], mut env: Vec<CString>) -> io::Error {
    let path = std::fs::read_link(OWN_FILE);
    match path.and_then(|path| Ok(CString::new(joined(PATH_VARIABLE.as_ref(), path.as_os_str()).into_vec())?))
    {
        Ok(path) => {
            let name = joined(PATH_VARIABLE.as_ref(), OsStr::new(""));
            env.retain(|pair| !pair.as_bytes().starts_with(name.as_bytes()));
            env.push(path);
        }
        Err(error) => return error,
    }
    match view(Path::new(OWN_FILE)).or_else(|_| view_of_user()).or_else(|_| copy()) {
        Ok(file) => sys::exec_file(file.as_fd(), args, &env),
        Err(error) => error,
    }
}

fn view(path: &Path) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let view = rustix::mount::open_tree(CWD, path, flags)?;
    sys::set_mount_attributes(view.as_fd(), libc::MOUNT_ATTR_RDONLY, 0, false)?;
    Ok(view)
}

/// The same for an ordinary user: made by a process in a user namespace, which ends then.
fn view_of_user() -> io::Result<OwnedFd> {
    let (mut reader, mut writer) = io::pipe()?;
    let child = match sys::fork((libc::CLONE_NEWUSER | libc::CLONE_NEWNS) as u64)? {
        Forked::Child => {
            drop(reader);
            let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
            // By its path: what the link leads to is not mounted in this namespace.
            let here = std::fs::read_link(OWN_FILE).and_then(|path| view(&path));
            if let Ok(view) = here
                && is_own(&view).unwrap_or(false)
                && writer.write_all(&view.as_raw_fd().to_ne_bytes()).is_ok()
            {
                sys::wait_for_ever();
            }
            sys::exit_now(1);
        }
        Forked::Parent(child) => child,
    };
    drop(writer);
    let mut number = [0; 4];
    let view = reader.read_exact(&mut number).and_then(|()| {
        let number = i32::from_ne_bytes(number);
        Ok(rustix::process::pidfd_getfd(&child.pidfd, number, PidfdGetfdFlags::empty())?)
    });
    let _ = sys::pidfd_kill(child.pidfd.as_fd(), libc::SIGKILL);
    let _ = sys::wait(Some(child.pid), true);
    let view = view?;
    rustix::io::fcntl_setfd(&view, rustix::io::FdFlags::CLOEXEC)?;
    Ok(view)
}

fn is_own(view: &OwnedFd) -> io::Result<bool> {
    let (own, view) = (rustix::fs::stat(OWN_FILE)?, rustix::fs::fstat(view)?);
    Ok((own.st_dev, own.st_ino) == (view.st_dev, view.st_ino))
}

/// Where the kernel lets nobody make views: a copy in memory.
fn copy() -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let mut copy = File::from(rustix::fs::memfd_create("hayloft", flags)?);
    io::copy(&mut File::open(OWN_FILE)?, &mut copy)?;
    rustix::fs::fcntl_add_seals(
        &copy,
        SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL,
    )?;
    Ok(copy.into())
}

/// What the C library calls before `main`, with the same arguments: as [`protect`] for the commands that make and enter
/// roots, written as they usually are. What is missed here, and what fails, is left to that.
#[cfg(target_env = "gnu")]
extern "C" fn before_main(
    _: libc::c_int,
    argv: *const *const libc::c_char,
    envp: *const *const libc::c_char,
) {
    // SAFETY: both are lists of strings that end in a null pointer and live as long as the process.
    let list = |mut at: *const *const libc::c_char| unsafe {
        let mut texts = Vec::new();
        while !at.is_null() && !(*at).is_null() {
            texts.push(CStr::from_ptr(*at).to_owned());
            at = at.add(1);
        }
        texts
    };
    let args = list(argv);
    let is = |at: usize, text: &[u8]| args.get(at).is_some_and(|arg| arg.as_bytes() == text);
    if !(is(1, b"run") || is(1, b"root") && is(2, b"enter")) {
        return;
    }
    if is_protected() {
        // It would be the number of a descriptor.
        let _ = rustix::thread::set_name(c"hayloft");
        return;
    }
    execute(&args, list(envp));
}

#[cfg(target_env = "gnu")]
#[used]
#[unsafe(link_section = ".init_array.00150")]
static BEFORE_MAIN: extern "C" fn(libc::c_int, *const *const libc::c_char, *const *const libc::c_char) =
    before_main;
