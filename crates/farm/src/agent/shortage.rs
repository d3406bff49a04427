//! Whether the host was short of memory, or of room for temporary files: what fails then may not have failed by itself.
//!
//! The kernel counts the processes that it has ended for want of memory. Room is looked at by a thread of its own: the place may not answer.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use rustix::fs::{StatVfsMountFlags, statvfs};

use crate::protocol::BEAT;

/// Where programs put temporary files.
const PLACES: [&str; 2] = ["/tmp", "/var/tmp"];
/// With less than this a place is full: compilers write some at a time, and take what they wrote away when they fail.
const ROOM_MIN: u64 = 4 << 20;
/// So often it is looked.
const LOOK: Duration = BEAT;

/// What a host was short of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Short {
    Memory,
    Room,
}

/// See the module's documentation.
#[derive(Debug)]
pub(super) struct Shortage {
    /// What the kernel has counted by the last look.
    counted: Option<u64>,
    /// When it was found last that more had been ended.
    found: Option<Instant>,
    /// When a place was found full last.
    full: Arc<Mutex<Option<Instant>>>,
}

impl Default for Shortage {
    fn default() -> Shortage {
        let full = Arc::default();
        let tells = Arc::downgrade(&full);
        // Without the thread no place is ever full.
        let _ = std::thread::Builder::new().name("room".to_owned()).spawn(move || watch(&tells));
        Shortage { counted: None, found: None, full }
    }
}

/// Looks at all places until nobody wants to know any more.
fn watch(tells: &Weak<Mutex<Option<Instant>>>) {
    loop {
        let is_full = PLACES.iter().any(|place| is_full(Path::new(place)));
        let Some(full) = tells.upgrade() else { return };
        if is_full {
            *full.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        drop(full);
        std::thread::sleep(LOOK);
    }
}

/// One that nobody can write to, or without any bound, has no room for other reasons.
fn is_full(place: &Path) -> bool {
    statvfs(place).is_ok_and(|found| {
        let may_be = found.f_blocks > 0 && !found.f_flag.contains(StatVfsMountFlags::RDONLY);
        let has_room =
            found.f_bavail * found.f_frsize >= ROOM_MIN && (found.f_files == 0 || found.f_favail > 0);
        may_be && !has_room
    })
}

impl Shortage {
    /// Looks at the count. To be done now and then, so that it is known when it has changed.
    pub(super) fn look(&mut self) {
        let text = std::fs::read_to_string("/proc/vmstat").unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
        self.hear(line.and_then(|count| count.trim().parse().ok()));
    }

    fn hear(&mut self, counted: Option<u64>) {
        if self.counted.is_some_and(|before| counted.is_some_and(|now| now > before)) {
            self.found = Some(Instant::now());
        }
        self.counted = counted.or(self.counted);
    }

    /// What this host was short of since then, or shortly before.
    pub(super) fn since(&mut self, then: Instant) -> Option<Short> {
        self.look();
        let full = *self.full.lock().unwrap_or_else(PoisonError::into_inner);
        if self.found.is_some_and(|found| found >= then) {
            Some(Short::Memory)
        } else {
            full.filter(|found| *found + LOOK >= then).map(|_| Short::Room)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_known_when_processes_were_ended() {
        let mut shortage = Shortage::default();
        shortage.hear(Some(5));
        let begun = Instant::now();
        let since = |shortage: &Shortage| shortage.found.is_some_and(|found| found >= begun);
        shortage.hear(Some(5));
        assert!(!since(&shortage));
        shortage.hear(None);
        shortage.hear(Some(6));
        assert!(since(&shortage));
        let later = Instant::now();
        shortage.hear(Some(6));
        assert!(shortage.found.is_some_and(|found| found < later));
    }
}
