//! What the kernel believes of an inode: looked at, and asked for, by a process of its own.
//!
//! It finds the inode by its number, without a way to it. To have the kernel ask is to wait for an answer of the client, which a
//! thread of the client must not ([`super::teach`]).

#![allow(unsafe_code)]

use std::ffi::OsString;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, makedev, open, statx};

use super::ARGUMENT;

/// What comes before the mount point and the file system's device number.
pub(super) const LOOK: &str = "look";
/// The kind of handle that FUSE takes: the inode's number in two parts, and its generation, which is 0 here.
const INO64_GEN: i32 = 0x81;
const PARTS: usize = 3;
/// How long an answer is waited for.
const PATIENCE: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// The answer where it cannot be seen, and where it must not be.
const UNSEEN: u64 = u64::MAX;
const FORBIDDEN: u64 = u64::MAX - 1;

/// A process that looks. It ends with its client.
#[derive(Debug)]
pub(crate) struct Looker {
    process: Child,
    to: ChildStdin,
    from: ChildStdout,
}

impl Looker {
    /// Starts one for a mount: where that is, and the file system's device number.
    pub(crate) fn start(point: &Path, device: u64) -> io::Result<Looker> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(ARGUMENT).arg(LOOK).arg(point).arg(device.to_string()).current_dir("/");
        let mut process =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let (Some(to), Some(from)) = (process.stdin.take(), process.stdout.take()) else {
            return Err(io::ErrorKind::BrokenPipe.into());
        };
        Ok(Looker { process, to, from })
    }

    /// Its only thread.
    pub(crate) fn tid(&self) -> u32 {
        self.process.id()
    }

    /// The size that reads, and maps, of an inode end at, bytes, after the kernel has asked for it once if that was not `size`.
    ///
    /// # Errors
    /// `PermissionDenied`: without CAP_DAC_READ_SEARCH it cannot be seen. `NotFound`: the kernel does not have the inode. Others: the
    /// process is of no use any more.
    pub(crate) fn look(&mut self, number: u64, size: u64) -> io::Result<u64> {
        let mut asked = [0; 16];
        asked[..8].copy_from_slice(&number.to_ne_bytes());
        asked[8..].copy_from_slice(&size.to_ne_bytes());
        self.to.write_all(&asked)?;
        if poll(&mut [PollFd::new(&self.from, PollFlags::IN)], Some(&PATIENCE))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut answer = [0; 8];
        self.from.read_exact(&mut answer)?;
        match u64::from_ne_bytes(answer) {
            UNSEEN => Err(io::ErrorKind::NotFound.into()),
            FORBIDDEN => Err(io::ErrorKind::PermissionDenied.into()),
            kept => Ok(kept),
        }
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        // It may be waiting for this client: nobody waits for its end.
        let _ = self.process.kill();
        let _ = self.process.try_wait();
    }
}

/// Answers until the client has ended.
pub(super) fn answer(point: &OsString, device: &OsString) -> io::Result<()> {
    let device = device.to_str().and_then(|device| device.parse().ok());
    let place = Place { point: point.into(), device: device.ok_or(io::ErrorKind::InvalidInput)? };
    let _ = rustix::thread::set_name(c"hayloft-looker");
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let mut asked = [0; 16];
    while input.read_exact(&mut asked).is_ok() {
        let word = |at: usize| u64::from_ne_bytes(std::array::from_fn(|byte| asked[at + byte]));
        let answer = match place.look(word(0), word(8)) {
            Ok(kept) => kept,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => FORBIDDEN,
            Err(_) => UNSEEN,
        };
        output.write_all(&answer.to_ne_bytes())?;
        output.flush()?;
    }
    Ok(())
}

/// Where a mount is, and which one it is.
struct Place {
    point: PathBuf,
    device: u64,
}

#[repr(C)]
struct Handle {
    bytes: u32,
    kind: i32,
    parts: [u32; PARTS],
}

impl Place {
    fn look(&self, number: u64, size: u64) -> io::Result<u64> {
        let found = self.find(number)?;
        if found.size()? != size {
            // Where that fails it has the size that it had.
            let _ = found.ask();
        }
        found.size()
    }

    /// Finds an inode that the kernel has, by its number there. The mount is in use as long as this goes on. Fails without the
    /// right to do so (CAP_DAC_READ_SEARCH), when something else is mounted there, and when the kernel does not have it.
    fn find(&self, number: u64) -> io::Result<Found> {
        let root = open(&self.point, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        if device(&root)? != self.device {
            return Err(io::ErrorKind::NotFound.into());
        }
        let mut handle = Handle {
            bytes: (PARTS * size_of::<u32>()) as u32,
            kind: INO64_GEN,
            parts: [(number >> 32) as u32, number as u32, 0],
        };
        // SAFETY: the structure is laid out as file_handle, says how long it is, and outlives the call.
        let descriptor = unsafe {
            libc::open_by_handle_at(
                root.as_raw_fd(),
                (&raw mut handle).cast(),
                libc::O_PATH | libc::O_CLOEXEC,
            )
        };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: it was just opened, and nobody else has it.
        Ok(Found(unsafe { OwnedFd::from_raw_fd(descriptor) }))
    }
}

fn device(file: impl AsFd) -> io::Result<u64> {
    let stat = statx(file, "", AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC, StatxFlags::empty())?;
    Ok(makedev(stat.stx_dev_major, stat.stx_dev_minor))
}

/// An inode that the kernel has.
struct Found(OwnedFd);

impl Found {
    /// The size that reads, and maps, end at, bytes.
    fn size(&self) -> io::Result<u64> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        Ok(statx(&self.0, "", flags, StatxFlags::SIZE)?.stx_size)
    }

    /// Has the kernel ask for the attributes, by a request of this process.
    fn ask(&self) -> io::Result<()> {
        let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_FORCE_SYNC;
        statx(&self.0, "", flags, StatxFlags::SIZE)?;
        Ok(())
    }
}
