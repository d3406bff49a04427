//! Who asks for something: the process of a thread, and what it may do.

use crate::host::moment::Moment;

/// A capability of Linux, by its number.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Capability {
    /// Who has it gives files away.
    Chown = 0,
    /// Who has it does what only a file's owner may.
    Fowner = 3,
    /// Who has it looks into other processes.
    SysPtrace = 19,
}

/// Whether a thread has a capability over what belongs to a user. Nobody has who is not seen from here (of another PID namespace).
pub(crate) fn has_capability(tid: u32, capability: Capability, uid: u32) -> bool {
    let read = |what: &str| std::fs::read_to_string(format!("/proc/{tid}/{what}")).unwrap_or_default();
    is_effective(&read("status"), capability) && is_mapped(&read("uid_map"), uid)
}

/// Whether a user is one of a user namespace: in a new one everybody has all capabilities, over his own.
fn is_mapped(uid_map: &str, uid: u32) -> bool {
    uid_map.lines().any(|line| {
        let numbers: Vec<u64> = line.split_whitespace().filter_map(|number| number.parse().ok()).collect();
        matches!(numbers[..], [_, outside, count] if (outside..outside + count).contains(&u64::from(uid)))
    })
}

/// The process that a thread belongs to; `None`: it has ended, or is not seen from here.
pub(crate) fn process_of(tid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Tgid:"))?.trim().parse().ok()
}

/// When a process was started.
pub(crate) fn started(pid: u32) -> Option<Moment> {
    /// Numbers of a stat behind the name, which may have spaces in it.
    const START_TIME: usize = 19;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let ticks: u64 = stat.rsplit_once(')')?.1.split_whitespace().nth(START_TIME)?.parse().ok()?;
    Some(Moment::of_ticks(ticks))
}

/// Whether this process has a capability.
pub(crate) fn own_capability(capability: Capability) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    is_effective(&status, capability)
}

fn is_effective(status: &str, capability: Capability) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask & (1 << capability as u32) != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_are_read_from_a_status() {
        let status = "Name:\tx\nCapPrm:\t000001ffffffffff\nCapEff:\t0000000000080008\n";
        assert!(is_effective(status, Capability::Fowner) && is_effective(status, Capability::SysPtrace));
        assert!(!is_effective(status, Capability::Chown) && !is_effective("", Capability::Fowner));
        assert!(!has_capability(0, Capability::Chown, 0));
    }

    #[test]
    fn capabilities_of_a_user_namespace_are_over_its_users() {
        let (all, own, several) =
            ("         0          0 4294967295\n", "0 1001 1\n", "0 1000 1\n1 100000 65536\n");
        assert!(is_mapped(all, 0) && is_mapped(all, 1001));
        assert!(is_mapped(own, 1001) && !is_mapped(own, 0) && !is_mapped(own, 1002));
        assert!(is_mapped(several, 100_005) && !is_mapped(several, 165_536) && !is_mapped("", 0));
    }
}
