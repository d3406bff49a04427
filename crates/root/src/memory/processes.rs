//! How many processes and threads a root may have, so that one that makes more and more leaves the host the rest.
//!
//! A control group bounds them where one can be made. An ordinary user without one has RLIMIT_NPROC (getrlimit(2)): it
//! binds in a user namespace, and there it counts each of the namespace's users by himself since Linux 5.14. Before, it
//! counted all that the user had anywhere, and would refuse a root its processes for what runs outside. It never binds
//! the host's root.

use std::fs;

use crate::error::{Error, Result};
use crate::kernel;

/// Least bound: the first process, the command, and what a shell starts.
const LEAST: u64 = 8;
/// Most that a control group takes (PID_MAX_LIMIT).
const MOST: u64 = 4 << 20;
/// The bound when nothing says one, unless the host itself has few.
const USUAL: u64 = 16 << 10;
/// The part of what the host may have that a root gets then.
const PART_OF_HOST: u64 = 4;

/// The bound that was asked for, or the usual one.
///
/// # Errors
/// When it is out of range.
pub(crate) fn limit(asked: Option<u64>) -> Result<u64> {
    match asked {
        Some(asked) if !(LEAST..=MOST).contains(&asked) => {
            Err(Error::Usage(format!("--processes takes a number from {LEAST} to {MOST}")))
        }
        Some(asked) => Ok(asked),
        None => Ok(usual(host("pid_max").min(host("threads-max")))),
    }
}

fn host(setting: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/sys/kernel/{setting}")).unwrap_or_default();
    text.trim().parse().unwrap_or(u64::MAX)
}

fn usual(host: u64) -> u64 {
    USUAL.min(host / PART_OF_HOST).max(LEAST)
}

/// Whether each user of a root can be bound without a control group.
pub(crate) fn can_bound_users() -> bool {
    !rustix::process::geteuid().is_root() && kernel::version() >= (5, 14)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_leaves_the_host_most_of_what_it_may_have() {
        assert_eq!((usual(u64::MAX), usual(32 << 10), usual(1)), (16 << 10, 8 << 10, LEAST));
        assert!(limit(None).unwrap() <= host("threads-max") / 4);
        assert_eq!(limit(Some(100)).unwrap(), 100);
        for asked in [0, 7, 5 << 20] {
            assert!(limit(Some(asked)).unwrap_err().to_string().contains("from 8 to 4194304"), "{asked}");
        }
    }
}
