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

/// Whether a thread has a capability. Of one that is not seen from here (0, of another PID namespace) the kernel has to know.
pub(crate) fn has_capability(tid: u32, capability: Capability) -> bool {
    let status = |tid: &str| std::fs::read_to_string(format!("/proc/{tid}/status"));
    tid == 0 || status(&tid.to_string()).is_ok_and(|status| is_effective(&status, capability))
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
    has_capability(std::process::id(), capability)
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
        assert!(has_capability(0, Capability::Chown) && !has_capability(u32::MAX, Capability::Chown));
    }
}
