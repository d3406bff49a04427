//! When what was not answered is said again.

use std::time::Duration;

use tokio::time::{Interval, MissedTickBehavior};

/// Wakes who has something to say again, every so often. A farm runs many tasks that say nothing for long: no timer wakes them.
#[derive(Debug)]
pub(crate) struct Reminder {
    timer: Interval,
    is_wanted: bool,
}

impl Reminder {
    pub(crate) fn every(period: Duration) -> Reminder {
        let mut timer = tokio::time::interval(period);
        timer.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Reminder { timer, is_wanted: false }
    }

    /// Whether there is something to say again. From when there is, a whole period passes before the first time.
    pub(crate) fn want(&mut self, is_wanted: bool) {
        if is_wanted && !self.is_wanted {
            self.timer.reset();
        }
        self.is_wanted = is_wanted;
    }

    /// Returns when it is time, and never while there is nothing. Nothing is lost when it is dropped before.
    pub(crate) async fn due(&mut self) {
        match self.is_wanted {
            true => drop(self.timer.tick().await),
            false => std::future::pending().await,
        }
    }
}
