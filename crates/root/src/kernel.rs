//! Which kernel this is, and whether it can have roots at all.

use std::io;

use crate::error::{Error, Result};
use crate::sys;

/// The first kernel with all that a root cannot do without; mount_setattr(2) came last.
const NEEDED: (u32, u32) = (5, 12);

/// Major and minor number of the running kernel; zeros when it has no numbers for a name.
pub(crate) fn version() -> (u32, u32) {
    parse(&release())
}

fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn parse(release: &str) -> (u32, u32) {
    let mut numbers =
        release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or_default());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

/// Checks that roots can be made and entered here.
///
/// # Errors
/// One sentence that says which kernel is needed, or what else keeps the system call away.
pub(crate) fn check() -> Result<()> {
    match sys::mount_setattr_is_there() {
        Ok(()) => Ok(()),
        Err(error) => Err(lacks(&release(), &error)),
    }
}

/// Why clone3(2) is not there although newer calls are.
pub(crate) fn filtered(error: &io::Error) -> Error {
    lacks(&release(), error)
}

/// Why a kernel of this release answers a system call that roots need with this error.
fn lacks(release: &str, error: &io::Error) -> Error {
    let (major, minor) = NEEDED;
    Error::Missing(if parse(release) < NEEDED {
        format!(
            "this kernel is too old for roots: they need Linux {major}.{minor} or newer, and this is {release}; mounts work here"
        )
    } else {
        format!(
            "roots need mount_setattr(2) and clone3(2), which this Linux {release} does not let this process have ({error}): the seccomp filter of a container has to allow them"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_known_by_their_numbers() {
        assert_eq!(parse("6.1.0-53-amd64"), (6, 1));
        assert_eq!(parse("5.10.0"), (5, 10));
        assert_eq!(parse("7.0-rc3"), (7, 0));
        assert_eq!(parse("strange"), (0, 0));
        assert!(version() > (3, 0));
    }

    #[test]
    fn what_is_missing_is_named() {
        let error = || io::Error::from_raw_os_error(libc::ENOSYS);
        let old = lacks("5.10.0-35-amd64", &error()).to_string();
        assert!(old.contains("need Linux 5.12 or newer, and this is 5.10.0-35-amd64"), "{old}");
        let filtered = lacks("6.12.4", &error()).to_string();
        assert!(filtered.contains("seccomp") && filtered.contains("6.12.4"), "{filtered}");
        check().unwrap();
    }
}
