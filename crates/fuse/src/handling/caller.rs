//! Whether the thread that made a request is being ended, as `/proc/TID/status` says.

use std::fs;

/// What becomes of a thread that waits in a system call.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    GoesOn,
    /// It never returns to its program.
    Ends,
    /// It cannot be seen: it is in another PID namespace, or `/proc` is closed to us.
    Unknown,
}

/// Signals whose default is to end the process and to leave a core. The kernel makes SIGKILL of others that end it, for
/// all threads, when they are sent; of these when one thread has taken them, which those that wait for us cannot.
const CORE: [libc::c_int; 10] = [
    libc::SIGQUIT,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGBUS,
    libc::SIGSYS,
    libc::SIGXCPU,
    libc::SIGXFSZ,
];

/// What becomes of the thread `tid`; 0 is one of another PID namespace.
pub(crate) fn fate(tid: u32) -> Fate {
    if tid == 0 {
        return Fate::Unknown;
    }
    fs::read_to_string(format!("/proc/{tid}/status")).map_or(Fate::Unknown, |status| parse(&status))
}

fn bit(signal: libc::c_int) -> u64 {
    1 << (signal - 1)
}

fn parse(status: &str) -> Fate {
    let value = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    let signals = |name| value(name).and_then(|text| u64::from_str_radix(text, 16).ok());
    let (Some(own), Some(shared)) = (signals("SigPnd:"), signals("ShdPnd:")) else { return Fate::Unknown };
    let pending = own | shared;
    if pending & bit(libc::SIGKILL) != 0 {
        return Fate::Ends;
    }
    // A debugger may take a signal away.
    let is_traced = value("TracerPid:").is_some_and(|tracer| tracer != "0");
    let kept = ["SigBlk:", "SigIgn:", "SigCgt:"].map(|name| signals(name).unwrap_or(u64::MAX));
    let ending = CORE.map(bit).into_iter().fold(0, |all, bit| all | bit)
        & !kept.into_iter().fold(0, |all, set| all | set);
    if pending & ending != 0 && !is_traced { Fate::Ends } else { Fate::GoesOn }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn own_tid() -> u32 {
        fs::read_link("/proc/thread-self").unwrap().file_name().unwrap().to_str().unwrap().parse().unwrap()
    }

    fn status(own: u64, shared: u64, caught: u64, tracer: u32) -> String {
        format!(
            "Name:\tcp\nTracerPid:\t{tracer}\nSigQ:\t0/1\nSigPnd:\t{own:016x}\nShdPnd:\t{shared:016x}\n\
             SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\nSigCgt:\t{caught:016x}\n"
        )
    }

    #[test]
    fn only_signals_that_end_a_process_end_it() {
        let (alarm, quit, kill) = (bit(libc::SIGALRM), bit(libc::SIGQUIT), bit(libc::SIGKILL));
        assert_eq!(parse(&status(alarm, alarm, alarm, 0)), Fate::GoesOn);
        assert_eq!(parse(&status(kill, 0, alarm, 0)), Fate::Ends);
        assert_eq!(parse(&status(0, kill, 0, 0)), Fate::Ends);
        assert_eq!(parse(&status(0, quit, 0, 0)), Fate::Ends);
        assert_eq!(parse(&status(0, quit, quit, 0)), Fate::GoesOn);
        assert_eq!(parse(&status(quit, 0, 0, 7)), Fate::GoesOn);
        assert_eq!(parse("Name:\tcp\n"), Fate::Unknown);
    }

    #[test]
    fn a_thread_that_nobody_ends_goes_on() {
        assert_eq!(fate(own_tid()), Fate::GoesOn);
        assert_eq!(fate(0), Fate::Unknown);
        assert_eq!(fate(u32::MAX), Fate::Unknown);
    }
}
