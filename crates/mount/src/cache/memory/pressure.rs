//! Hearing that memory is short: the kernel says so when programs of the host, or of this process's control group, have to
//! wait for memory (PSI, Linux's Documentation/accounting/psi.rst).

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::host::{self, Group};

/// Of a window some program may wait so long, microseconds. Without CAP_SYS_RESOURCE only windows of two seconds can be had.
const TRIGGERS: [&[u8]; 2] = [b"some 150000 1000000\0", b"some 300000 2000000\0"];
/// Where the kernel says nothing: memory is short when less than this part of it is available.
const AVAILABLE_PART: u64 = 20;

/// Something that says when memory is short.
enum Source {
    /// A file of PSI.
    Stalls(File),
    /// The level of a group of cgroup v1: a counter of events.
    Level(std::os::fd::OwnedFd),
    /// `memory.events` of a group of cgroup v2, and how often it ran into its limits until now.
    Events(File, u64),
}

impl Source {
    fn flags(&self) -> PollFlags {
        match self {
            Source::Level(_) => PollFlags::IN,
            Source::Stalls(_) | Source::Events(..) => PollFlags::PRI,
        }
    }

    fn descriptor(&self) -> std::os::fd::BorrowedFd<'_> {
        use std::os::fd::AsFd;
        match self {
            Source::Stalls(file) | Source::Events(file, _) => file.as_fd(),
            Source::Level(counter) => counter.as_fd(),
        }
    }

    /// It has spoken; whether that means that memory is short.
    fn heard(&mut self) -> bool {
        match self {
            Source::Stalls(_) => true,
            Source::Level(counter) => rustix::io::read(&*counter, &mut [0u8; 8]).is_ok(),
            Source::Events(file, before) => {
                let now = limits_hit(file);
                now > std::mem::replace(before, now)
            }
        }
    }
}

/// All that says when memory is short.
pub(super) struct Pressure {
    sources: Vec<Source>,
}

impl Pressure {
    /// Listens to whatever there is.
    pub(super) fn new() -> Pressure {
        let mut sources: Vec<Source> = stalls(Path::new("/proc/pressure/memory")).into_iter().collect();
        for group in host::groups() {
            sources.extend(of_group(&group));
        }
        if sources.is_empty() {
            tracing::debug!(
                "the kernel does not say when memory is short: what is available is looked at instead"
            );
        }
        Pressure { sources }
    }

    /// Waits for so long at most, and says whether memory is short.
    pub(super) fn wait(&mut self, timeout: Duration) -> bool {
        let mut polled: Vec<PollFd<'_>> = self
            .sources
            .iter()
            .map(|source| PollFd::from_borrowed_fd(source.descriptor(), source.flags()))
            .collect();
        let timeout = Timespec { tv_sec: timeout.as_secs() as i64, tv_nsec: timeout.subsec_nanos().into() };
        let some = poll(&mut polled, Some(&timeout)).unwrap_or(0);
        let spoken: Vec<PollFlags> = polled.iter().map(|polled| polled.revents()).collect();
        drop(polled);
        if self.sources.is_empty() {
            return is_little_available();
        }
        if some == 0 {
            return false;
        }
        let mut is_short = false;
        let mut spoken = spoken.into_iter();
        self.sources.retain_mut(|source| {
            let spoken = spoken.next().unwrap_or(PollFlags::empty());
            let is_gone = match source {
                // What changes in such a file comes with both.
                Source::Events(..) => spoken.contains(PollFlags::NVAL),
                _ => spoken.intersects(PollFlags::ERR | PollFlags::NVAL),
            };
            is_short |= !is_gone && !spoken.is_empty() && source.heard();
            !is_gone
        });
        is_short
    }
}

/// Has the kernel tell of programs that wait for memory.
fn stalls(path: &Path) -> Option<Source> {
    let trigger = |words: &[u8]| {
        let mut file = OpenOptions::new().read(true).write(true).open(path).ok()?;
        file.write_all(words).ok()?;
        Some(Source::Stalls(file))
    };
    TRIGGERS.iter().find_map(|words| trigger(words))
}

fn of_group(group: &Group) -> Option<Source> {
    if !group.unified {
        return level(&group.dir);
    }
    if group.is_top() {
        // That is the host.
        return None;
    }
    stalls(&group.dir.join("memory.pressure")).or_else(|| {
        let mut file = File::open(group.dir.join("memory.events")).ok()?;
        let before = limits_hit(&mut file);
        Some(Source::Events(file, before))
    })
}

/// How often a group has run into `memory.high` or `memory.max`.
fn limits_hit(file: &mut File) -> u64 {
    let mut text = String::new();
    let read = file.rewind().and_then(|()| file.read_to_string(&mut text));
    let count = |line: &str| line.strip_prefix("high ").or(line.strip_prefix("max "))?.parse::<u64>().ok();
    read.map_or(0, |_| text.lines().filter_map(count).sum())
}

/// Has the kernel tell when a group of cgroup v1 finds little to reclaim.
fn level(dir: &Path) -> Option<Source> {
    let counter = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
    let level = File::open(dir.join("memory.pressure_level")).ok()?;
    let words = format!("{} {} medium", counter.as_raw_fd(), level.as_raw_fd());
    fs::write(dir.join("cgroup.event_control"), words).ok()?;
    Some(Source::Level(counter))
}

fn is_little_available() -> bool {
    match (host::meminfo("MemAvailable:"), host::meminfo("MemTotal:")) {
        (Some(available), Some(total)) => available < total / AVAILABLE_PART,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn only_limits_count_among_the_events() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"low 7\nhigh 2\nmax 3\noom 5\noom_kill 0\n").unwrap();
        assert_eq!(limits_hit(&mut file), 5);
        assert_eq!(limits_hit(&mut file), 5);
    }

    #[test]
    fn what_is_no_pressure_file_is_no_source() {
        let dir = tempfile::tempdir().unwrap();
        assert!(stalls(&dir.path().join("memory")).is_none());
        assert!(level(dir.path()).is_none());
    }
}
