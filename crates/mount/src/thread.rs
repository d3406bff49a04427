//! Where other threads are, as `/proc/TID/syscall` says.

use std::{fs, io};

/// Where a thread is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// It has, or waits for, a processor.
    Running,
    /// It sleeps in a system call.
    Call {
        number: libc::c_long,
        /// The first two.
        arguments: [u64; 2],
    },
    /// It sleeps elsewhere.
    Elsewhere,
}

/// Where the thread `tid` is now.
///
/// # Errors
/// ENOENT or ESRCH when it has ended, EACCES without the right to trace it.
pub(crate) fn place_of(tid: u32) -> io::Result<Place> {
    Ok(parse(&fs::read_to_string(format!("/proc/{tid}/syscall"))?))
}

fn parse(text: &str) -> Place {
    let mut words = text.split_ascii_whitespace();
    let number = words.next().unwrap_or_default();
    if number == "running" {
        return Place::Running;
    }
    let mut argument = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    match (number.parse(), argument(), argument()) {
        (Ok(number @ 0..), Some(first), Some(second)) => Place::Call { number, arguments: [first, second] },
        _ => Place::Elsewhere,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn places_are_parsed() {
        assert_eq!(parse("running\n"), Place::Running);
        assert_eq!(parse("-1 0x7ffc 0x7f3a\n"), Place::Elsewhere);
        assert_eq!(parse("73 0x9 0x2 0x0\n"), Place::Call { number: 73, arguments: [9, 2] });
        assert_eq!(parse(""), Place::Elsewhere);
    }

    #[test]
    fn a_thread_that_waits_is_in_its_call() {
        let (mut reader, writer) = io::pipe().unwrap();
        let descriptor = reader.as_raw_fd() as u64;
        let (said, tid) = channel();
        let waits = std::thread::spawn(move || {
            let own = fs::read_link("/proc/thread-self").unwrap();
            said.send(own.file_name().unwrap().to_str().unwrap().parse().unwrap()).unwrap();
            reader.read(&mut [0]).unwrap()
        });
        let tid = tid.recv().unwrap();
        let is_there = |place| matches!(place, Place::Call { number: libc::SYS_read, arguments } if arguments[0] == descriptor);
        while !is_there(place_of(tid).unwrap()) {
            std::thread::yield_now();
        }
        drop(writer);
        assert_eq!(waits.join().unwrap(), 0);
        assert_eq!(place_of(u32::MAX).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
