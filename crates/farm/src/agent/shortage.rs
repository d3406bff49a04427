//! Whether the host was short of memory: the kernel counts the processes that it has ended for that.

use std::time::Instant;

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Shortage {
    /// What the kernel has counted by the last look.
    counted: Option<u64>,
    /// When it was found last that more had been ended.
    found: Option<Instant>,
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

    /// Whether processes of this host were ended since then, or shortly before.
    pub(super) fn since(&mut self, then: Instant) -> bool {
        self.look();
        self.found.is_some_and(|found| found >= then)
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
