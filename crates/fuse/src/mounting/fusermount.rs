//! Mounting without privileges, by the helper fusermount3: it opens /dev/fuse, mounts, and passes the
//! descriptor through a socket.
#![allow(unsafe_code)]

use std::ffi::OsStr;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::mounting::error::MountError;

/// The names under which the helper is installed, best first.
const HELPERS: [&str; 2] = ["fusermount3", "fusermount"];

/// The variable that tells the helper which descriptor the socket is.
const COMM_FD: &str = "_FUSE_COMMFD";

pub(crate) fn mount(point: &Path, options: &OsStr) -> Result<OwnedFd, MountError> {
    let io_error = |source| MountError::Io { point: point.into(), source };
    let (ours, theirs) = UnixStream::pair().map_err(io_error)?;
    let socket = theirs.as_raw_fd();
    let mut child = spawn(|command| {
        command.arg("-o").arg(options).arg("--").arg(point).env(COMM_FD, socket.to_string());
        // SAFETY: between fork and exec only fcntl is called, which is async-signal-safe.
        unsafe { command.pre_exec(move || keep_open(socket)) };
    })
    .map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => MountError::NoFusermount,
        _ => io_error(error),
    })?;
    drop(theirs);
    let received = receive_descriptor(&ours);
    let mut message = String::new();
    if let Some(mut stderr) = child.stderr.take() {
        stderr.read_to_string(&mut message).map_err(io_error)?;
    }
    let status = child.wait().map_err(io_error)?;
    match received {
        Ok(Some(fd)) if status.success() => Ok(fd),
        Ok(_) => Err(refusal(point, message.trim())),
        Err(error) => Err(io_error(error)),
    }
}

fn refusal(point: &Path, message: &str) -> MountError {
    if message.contains("/dev/fuse") && message.contains("not found") {
        return MountError::NoDevice;
    }
    if message.contains("open /dev/fuse") && message.contains("denied") {
        return MountError::Device(io::ErrorKind::PermissionDenied.into());
    }
    let message = if message.is_empty() { "it gave no reason" } else { message };
    MountError::Fusermount { point: point.into(), message: message.into() }
}

pub(crate) fn unmount(point: &Path, lazy: bool) -> io::Result<()> {
    let child = spawn(|command| {
        command.arg("-u").args(lazy.then_some("-z")).arg("--").arg(point);
    })?;
    let output = child.wait_with_output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_string()))
}

fn spawn(prepare: impl Fn(&mut Command)) -> io::Result<std::process::Child> {
    let mut result = Err(io::ErrorKind::NotFound.into());
    for helper in HELPERS {
        let mut command = Command::new(helper);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        prepare(&mut command);
        result = command.spawn();
        if !matches!(&result, Err(error) if error.kind() == io::ErrorKind::NotFound) {
            break;
        }
    }
    result
}

/// Lets a descriptor survive exec.
fn keep_open(fd: RawFd) -> io::Result<()> {
    // SAFETY: fcntl with F_SETFD takes no pointers.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Receives one descriptor; `None` when the other side closes without sending one.
fn receive_descriptor(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut byte = 0u8;
    let mut vector = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    // Larger than CMSG_SPACE of one descriptor and aligned for cmsghdr.
    let mut control = [0u64; 8];
    // SAFETY: an all-zero msghdr is valid and empty.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut vector;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = std::mem::size_of_val(&control);
    let received = loop {
        // SAFETY: the message points to the byte and the control buffer, both alive, with their sizes.
        let received = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
        if received >= 0 {
            break received;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    };
    if received == 0 {
        return Ok(None);
    }
    // SAFETY: the kernel has filled in the message; CMSG_FIRSTHDR returns null or a header within the buffer.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    if header.is_null() {
        return Ok(None);
    }
    // SAFETY: the header is not null and lies in the control buffer, see above.
    let (level, kind) = unsafe { ((*header).cmsg_level, (*header).cmsg_type) };
    if level != libc::SOL_SOCKET || kind != libc::SCM_RIGHTS {
        return Ok(None);
    }
    // SAFETY: a SCM_RIGHTS message carries at least one descriptor, which now belongs to this process.
    let fd = unsafe { OwnedFd::from_raw_fd(libc::CMSG_DATA(header).cast::<RawFd>().read_unaligned()) };
    Ok(Some(fd))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_descriptor_is_received_or_its_absence_noticed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert!(receive_descriptor(&ours).unwrap().is_none());
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"x").unwrap();
        assert!(receive_descriptor(&ours).unwrap().is_none());
    }

    #[test]
    fn refusals_are_told_apart() {
        let point = Path::new("dir");
        let device = "fusermount3: fuse device /dev/fuse not found. Kernel module not loaded?";
        assert!(matches!(refusal(point, device), MountError::NoDevice));
        let closed = "fusermount3: failed to open /dev/fuse: Permission denied";
        assert!(matches!(refusal(point, closed), MountError::Device(_)));
        let other = refusal(point, "fusermount3: user has no write access to mountpoint");
        assert!(other.to_string().contains("no write access"));
    }
}
