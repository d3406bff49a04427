//! Where other threads are, as `/proc` says.

use std::os::unix::fs::FileExt;
use std::{fs, io};

const PAGE: u64 = 4096;

/// Where a thread is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// It has, or waits for, a processor.
    Running,
    /// It sleeps in a system call.
    Call {
        number: libc::c_long,
        /// The first five.
        arguments: [u64; 5],
    },
    /// It sleeps elsewhere.
    Elsewhere,
}

/// Where the thread `tid` is now, as `/proc/TID/syscall` has it.
///
/// # Errors
/// ENOENT or ESRCH when it has ended, EACCES without the right to trace it.
pub(crate) fn place_of(tid: u32) -> io::Result<Place> {
    Ok(parse(&fs::read_to_string(format!("/proc/{tid}/syscall"))?))
}

/// The state of the thread `tid` as `/proc/TID/stat` has it: `S` sleeps until a signal comes. `None`: it cannot be seen.
pub(crate) fn state_of(tid: u32) -> Option<u8> {
    let stat = fs::read(format!("/proc/{tid}/stat")).ok()?;
    // The name before it may have anything in it.
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(name_end + 2).copied()
}

/// Whether a thread that sleeps in the kernel is within this function of it, as far as `/proc/TID/stack` may be read (root only).
pub(crate) fn is_in(tid: u32, function: &str) -> bool {
    let stack = fs::read_to_string(format!("/proc/{tid}/stack")).unwrap_or_default();
    stack.lines().any(|line| line.contains(function))
}

/// A path in the memory of a thread's process.
///
/// # Errors
/// Nothing is there, or it may not be read.
pub(crate) fn path_at(tid: u32, address: u64) -> io::Result<Vec<u8>> {
    let memory = fs::File::open(format!("/proc/{tid}/mem"))?;
    let (mut path, mut page) = (Vec::new(), [0; PAGE as usize]);
    while path.len() < libc::PATH_MAX as usize {
        let at = address + path.len() as u64;
        // What follows a page may not be there.
        let read = memory.read_at(&mut page[..(PAGE - at % PAGE) as usize], at)?;
        let end = page[..read].iter().position(|byte| *byte == 0);
        path.extend_from_slice(&page[..end.unwrap_or(read)]);
        if end.is_some() {
            return Ok(path);
        }
        if read == 0 {
            break;
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

fn parse(text: &str) -> Place {
    let mut words = text.split_ascii_whitespace();
    let number = words.next().unwrap_or_default();
    if number == "running" {
        return Place::Running;
    }
    let mut argument = || u64::from_str_radix(words.next()?.strip_prefix("0x")?, 16).ok();
    let arguments = [argument(), argument(), argument(), argument(), argument()];
    match (number.parse(), arguments) {
        (Ok(number @ 0..), [Some(first), Some(second), Some(third), Some(fourth), Some(fifth)]) => {
            Place::Call { number, arguments: [first, second, third, fourth, fifth] }
        }
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
        assert_eq!(parse("73 0x9 0x2 0x0 0x1 0x0\n"), Place::Call { number: 73, arguments: [9, 2, 0, 1, 0] });
        assert_eq!(parse(""), Place::Elsewhere);
    }

    #[test]
    fn the_state_of_a_thread_is_seen() {
        let own = fs::read_link("/proc/thread-self").unwrap();
        assert_eq!(state_of(own.file_name().unwrap().to_str().unwrap().parse().unwrap()), Some(b'R'));
        assert_eq!(state_of(u32::MAX), None);
    }

    #[test]
    fn paths_are_read_from_memory() {
        let (own, path) = (std::process::id(), c"a/path/of/this/process");
        assert_eq!(path_at(own, path.as_ptr() as u64).unwrap(), path.to_bytes());
        assert!(path_at(own, 8).is_err());
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
