//! Processor time of this process, and the core that a thread runs on.

#![allow(unsafe_code)]

use std::time::Duration;

/// User and system time of all threads so far.
pub(crate) fn of_process() -> Duration {
    // SAFETY: `rusage` is plain numbers, for which zeroes are a value, and the call writes within it.
    let usage = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &mut usage), 0, "getrusage");
        usage
    };
    [usage.ru_utime, usage.ru_stime]
        .iter()
        .map(|t| Duration::from_secs(t.tv_sec as u64) + Duration::from_micros(t.tv_usec as u64))
        .sum()
}

/// Keeps the calling thread, and threads that it starts later, on one core.
pub(crate) fn pin_this_thread(core: usize) -> std::io::Result<()> {
    // SAFETY: `cpu_set_t` is a plain bit set, for which zeroes are a value; the size passed is its own.
    let done = unsafe {
        let mut set = std::mem::zeroed::<libc::cpu_set_t>();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &set)
    };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}
