//! How an agent goes: it takes nothing new, what runs runs on for a while or ends at once, and then it leaves.
//!
//! Batch systems (Slurm) send a job's signal to each of its processes, those of tasks among them. What a task ends with then is not its own: it
//! runs again elsewhere.

use std::time::{Duration, Instant};

use crate::execution::Event;

/// So long tasks have to end, and ends to be heard, when they were not left to run on.
const END: Duration = Duration::from_secs(2);
/// So long it is waited whether the signal that has ended a task comes to the agent as well.
const SIGNAL: Duration = Duration::from_millis(100);

/// See the module's documentation.
#[derive(Debug, Default)]
pub(super) struct Ending {
    has_begun: bool,
    signals: u32,
    /// When tasks are ended, and whether they were.
    time: Option<(Instant, bool)>,
    /// Tasks that such a signal has ended, and when.
    held: Vec<(Instant, Event)>,
}

impl Ending {
    /// It takes nothing new from now on; true if it did until now.
    pub(super) fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.has_begun, true)
    }

    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// A signal has come: tasks have so much time still, with the second one none. True if they are to be ended now.
    pub(super) fn signal(&mut self, grace: Duration) -> bool {
        self.signals += 1;
        let grace = if self.signals == 1 { grace } else { Duration::ZERO };
        let at = Instant::now() + grace;
        let was_ended = self.time.is_some_and(|(_, ended)| ended);
        if !was_ended {
            self.time = Some((self.time.map_or(at, |(before, _)| before.min(at)), grace.is_zero()));
        }
        !was_ended && grace.is_zero()
    }

    /// Whether the time of tasks is over; true once.
    pub(super) fn is_time(&mut self) -> bool {
        let is_time = matches!(self.time, Some((at, false)) if at <= Instant::now());
        if is_time {
            self.time = Some((Instant::now(), true));
        }
        is_time
    }

    /// Whether the agent may leave: all is heard, or tasks were ended and have ended, or had time to.
    pub(super) fn is_over(&self, is_idle: bool, is_done: bool) -> bool {
        let was_ended = matches!(self.time, Some((at, true)) if is_idle || at.elapsed() >= END);
        self.has_begun && self.held.is_empty() && (is_done || was_ended)
    }

    /// A task has ended: what is to be told of it, if that is known by now.
    pub(super) fn judge(&mut self, event: Event) -> Option<Event> {
        let Some(report) = &event.report else { return Some(event) };
        if !report.has_failed() {
            return Some(event);
        }
        if self.signals > 0 {
            return Some(Event { report: None, ..event });
        }
        let by_signal = report.signal == libc::SIGTERM || report.code == 128 + libc::SIGTERM;
        if by_signal {
            self.held.push((Instant::now(), event));
            return None;
        }
        Some(event)
    }

    /// Those that were waited with for long enough.
    pub(super) fn released(&mut self) -> Vec<Event> {
        let not_own = self.signals > 0;
        let ripe = |at: &Instant| not_own || at.elapsed() >= SIGNAL;
        let (ripe, held) = std::mem::take(&mut self.held).into_iter().partition(|(at, _)| ripe(at));
        self.held = held;
        let told = |event: Event| if not_own { Event { report: None, ..event } } else { event };
        let ripe: Vec<(Instant, Event)> = ripe;
        ripe.into_iter().map(|(_, event)| told(event)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::execution::Report;

    fn event(code: i32, signal: i32) -> Event {
        Event {
            task: 1,
            report: Some(Report { code, signal, is_whole: true, ..Report::default() }),
            namespaces: true,
        }
    }

    #[test]
    fn what_tasks_end_with_after_a_signal_is_not_their_own() {
        let mut ending = Ending::default();
        assert!(ending.judge(event(1, 0)).unwrap().report.is_some());
        // It may be the agent's as well.
        assert!(ending.judge(event(0, libc::SIGTERM)).is_none() && ending.released().is_empty());
        assert!(ending.begin() && !ending.signal(Duration::from_secs(60)));
        assert!(!ending.is_over(true, true));
        assert!(ending.released()[0].report.is_none() && ending.is_over(true, true));
        assert!(ending.judge(event(1, 0)).unwrap().report.is_none());
        assert!(ending.judge(event(0, 0)).unwrap().report.is_some());
    }

    #[test]
    fn a_task_that_ends_itself_by_that_signal_has_ended_so() {
        let mut ending = Ending::default();
        assert!(ending.judge(event(143, 0)).is_none());
        std::thread::sleep(SIGNAL);
        assert_eq!(ending.released()[0].report.as_ref().unwrap().code, 143);
    }

    #[test]
    fn tasks_have_their_time_and_with_the_second_signal_none() {
        let mut ending = Ending::default();
        assert!(ending.begin() && !ending.begin());
        assert!(!ending.is_over(true, false) && ending.is_over(true, true));
        assert!(!ending.signal(Duration::from_secs(60)) && !ending.is_time() && !ending.is_over(true, false));
        assert!(
            ending.signal(Duration::from_secs(60))
                && ending.is_over(true, false)
                && !ending.is_over(false, false)
        );
        assert!(!ending.signal(Duration::ZERO));
        let mut ending = Ending::default();
        ending.begin();
        ending.signal(Duration::from_millis(1));
        std::thread::sleep(Duration::from_millis(2));
        assert!(ending.is_time() && !ending.is_time());
    }
}
