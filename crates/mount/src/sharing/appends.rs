//! Appends of which the kernel has sent, most likely, only the first part.
//!
//! What a program appends with one call, the kernel sends in two parts when it begins within a page that it has not read.
//! Between the two nobody else may append. Nothing in the first part says that there is a second one; but as long as
//! the thread is within the call, it may come, however busy the machine is.

use std::fs;
use std::time::{Duration, Instant};

use crate::host::thread::{Place, place_of};

/// How long the second part is waited for without a look at the thread, and how often that is looked at then.
const UNSEEN: Duration = Duration::from_millis(2);
const LOOK_EACH: Duration = Duration::from_millis(2);
/// How long it is waited for when nothing can be known of the thread.
const PATIENCE: Duration = Duration::from_millis(200);
/// No call is waited for longer.
const LIMIT: Duration = Duration::from_secs(20);
/// So much processor time is more than the call needs for the rest.
const RUN_MAX: Duration = Duration::from_millis(20);

/// System calls that write.
const WRITES: [libc::c_long; 9] = [
    libc::SYS_write,
    libc::SYS_pwrite64,
    libc::SYS_writev,
    libc::SYS_pwritev,
    libc::SYS_pwritev2,
    libc::SYS_sendfile,
    libc::SYS_splice,
    libc::SYS_copy_file_range,
    libc::SYS_io_uring_enter,
];

/// An append of which the first part is under way, or done.
#[derive(Debug)]
pub(crate) struct Append {
    /// The thread; 0 when it is in another PID namespace.
    tid: u32,
    since: Instant,
    looked: Instant,
    /// Processor time of the thread at the first look at it, nanoseconds.
    ran: Option<u64>,
}

/// What can be seen of a thread.
#[derive(Debug, PartialEq)]
enum Thread {
    Gone,
    /// It sleeps in a system call.
    Within(libc::c_long),
    /// It has, or waits for, a processor; with its processor time so far.
    Running(Option<u64>),
    Unknown,
}

impl Append {
    /// To be called when the first part is admitted.
    pub(crate) fn begun(tid: u32) -> Append {
        let now = Instant::now();
        Append { tid, since: now, looked: now, ran: None }
    }

    /// Who appends, if that is known.
    pub(crate) fn thread(&self) -> Option<u32> {
        (self.tid != 0).then_some(self.tid)
    }

    /// Whether the second part may still come.
    pub(crate) fn goes_on(&mut self) -> bool {
        let waited = self.since.elapsed();
        if waited < UNSEEN || (waited < LIMIT && self.looked.elapsed() < LOOK_EACH) {
            return true;
        }
        self.looked = Instant::now();
        let may_come = match look_at(self.tid) {
            Thread::Gone => false,
            Thread::Within(call) => WRITES.contains(&call),
            Thread::Running(Some(ran)) => {
                let before = *self.ran.get_or_insert(ran);
                u128::from(ran.saturating_sub(before)) < RUN_MAX.as_nanos()
            }
            Thread::Running(None) | Thread::Unknown => waited < PATIENCE,
        };
        may_come && waited < LIMIT
    }
}

fn look_at(tid: u32) -> Thread {
    if tid == 0 {
        return Thread::Unknown;
    }
    match place_of(tid) {
        Ok(Place::Running) => {
            let spent = fs::read_to_string(format!("/proc/{tid}/schedstat"));
            Thread::Running(spent.ok().and_then(|text| text.split(' ').next()?.parse().ok()))
        }
        Ok(Place::Call { number, .. }) => Thread::Within(number),
        Ok(Place::Elsewhere) => Thread::Unknown,
        // ESRCH when it ends at this moment.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) => Thread::Gone,
        Err(_) => Thread::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::mpsc::channel;

    use super::*;

    /// Begins an append of a thread that does this, and says for how long it goes on.
    fn goes_on_for(work: impl FnOnce() + Send + 'static, limit: Duration) -> Duration {
        let (said, tid) = channel();
        std::thread::spawn(move || {
            let own = fs::read_link("/proc/thread-self").unwrap();
            let _ = said.send(own.file_name().unwrap().to_str().unwrap().parse().unwrap());
            work();
        });
        let mut append = Append::begun(tid.recv().unwrap());
        while append.goes_on() && append.since.elapsed() < limit {
            std::thread::sleep(Duration::from_micros(200));
        }
        append.since.elapsed()
    }

    #[test]
    fn a_thread_that_is_elsewhere_appends_no_more() {
        let limit = Duration::from_secs(10);
        assert!(goes_on_for(|| (), limit) < limit, "it has ended");
        assert!(goes_on_for(|| std::thread::sleep(Duration::from_secs(15)), limit) < limit, "it sleeps");
        let spin = || {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(15) {
                std::hint::spin_loop();
            }
        };
        assert!(goes_on_for(spin, limit) < limit, "it computes");
    }

    #[test]
    fn a_thread_that_is_kept_from_going_on_is_waited_for() {
        let (reader, mut writer) = std::io::pipe().unwrap();
        // More than a pipe holds: it is within the call until the reader goes.
        let work = move || drop(writer.write_all(&[0; 1 << 20]));
        let limit = Duration::from_secs(1);
        assert!(goes_on_for(work, limit) >= limit);
        drop(reader);
    }
}
