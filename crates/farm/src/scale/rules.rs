//! How many jobs there are to be: as many as the demand asked for all the time lately, and no fewer than it asked for at any moment of a
//! longer time. Pure: the time is an argument.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Most jobs that are submitted with one decision.
const SUBMIT_MAX: u32 = 50;
/// After a job that has ended before its agent came nothing is submitted for so long, and twice as long after the next one.
const AFTER_FAILURE_MS: u64 = 5_000;
/// At most so long.
const AFTER_FAILURE_MAX_MS: u64 = 300_000;

/// Between how many jobs, and how soon.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Fewest jobs.
    pub least: u32,
    /// Most jobs.
    pub most: u32,
    /// Slots of a job, as long as none has come.
    pub slots: u32,
    /// Demand that has lasted for so long is met, milliseconds.
    pub grow_ms: u64,
    /// What was not wanted for so long goes, milliseconds.
    pub shrink_ms: u64,
}

/// An agent of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobAgent {
    /// Its id.
    pub id: String,
    /// Slots that it has.
    pub slots: u32,
    /// Of these, taken.
    pub busy: u32,
    /// It gives slots to tasks, of all agents.
    pub dispatches: bool,
    /// It takes no tasks any more.
    pub draining: bool,
}

/// A job that waits or runs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Job {
    /// Its number.
    pub id: u64,
    /// Its agents that have come.
    pub agents: Vec<JobAgent>,
}

impl Job {
    fn is_leaving(&self) -> bool {
        !self.agents.is_empty() && self.agents.iter().all(|agent| agent.draining)
    }

    fn busy(&self) -> u32 {
        self.agents.iter().map(|agent| agent.busy).sum()
    }
}

/// What is to be done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Decision {
    /// So many jobs are submitted.
    pub submit: u32,
    /// These jobs, of which no agent has come, are cancelled.
    pub cancel: Vec<u64>,
    /// These agents finish what they run, and go.
    pub drain: Vec<String>,
}

/// Decides, from one look to the next.
#[derive(Debug)]
pub struct Rules {
    limits: Limits,
    /// How many jobs were wanted when.
    wanted: VecDeque<(u64, u32)>,
    /// Jobs without an agent so far.
    coming: BTreeSet<u64>,
    /// Jobs in a row that have ended before their agents came.
    failures: u32,
    /// Before this nothing is submitted.
    not_before_ms: u64,
}

impl Rules {
    /// Nothing was seen yet.
    pub fn new(limits: Limits) -> Rules {
        let limits = Limits { most: limits.most.max(limits.least), slots: limits.slots.max(1), ..limits };
        Rules { limits, wanted: VecDeque::new(), coming: BTreeSet::new(), failures: 0, not_before_ms: 0 }
    }

    /// Jobs in a row that have ended before their agents came.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// A look: tasks that wait want so many slots, and these jobs are there.
    pub fn decide(&mut self, now_ms: u64, waiting_slots: u64, jobs: &[Job]) -> Decision {
        self.count_failures(now_ms, jobs);
        let staying: Vec<&Job> = jobs.iter().filter(|job| !job.is_leaving()).collect();
        let there: Vec<&&Job> = staying.iter().filter(|job| !job.agents.is_empty()).collect();
        let slots: u64 = there.iter().flat_map(|job| &job.agents).map(|agent| u64::from(agent.slots)).sum();
        let each = if there.is_empty() { u64::from(self.limits.slots) } else { slots / there.len() as u64 };
        let busy: u64 = there.iter().map(|job| u64::from(job.busy())).sum();
        let jobs_wanted = (busy + waiting_slots).div_ceil(each.max(1));
        let wanted =
            u32::try_from(jobs_wanted).unwrap_or(u32::MAX).clamp(self.limits.least, self.limits.most);
        self.remember(now_ms, wanted);
        let have = staying.len() as u32;
        let lasting = self.over(now_ms, self.limits.grow_ms).map_or(self.limits.least, |wanted| wanted.0);
        if lasting > have {
            let submit = if now_ms < self.not_before_ms { 0 } else { (lasting - have).min(SUBMIT_MAX) };
            return Decision { submit, ..Decision::default() };
        }
        let kept = self.over(now_ms, self.limits.shrink_ms).map_or(u32::MAX, |wanted| wanted.1);
        give_up(staying, have.saturating_sub(kept) as usize)
    }

    fn remember(&mut self, now_ms: u64, wanted: u32) {
        self.wanted.push_back((now_ms, wanted));
        let longest = self.limits.grow_ms.max(self.limits.shrink_ms);
        // The last one before the time that is looked at stays: it says that this was seen as a whole.
        while self.wanted.get(1).is_some_and(|(at, _)| at + longest <= now_ms) {
            self.wanted.pop_front();
        }
    }

    /// The least and the most that was wanted in the last so many milliseconds; nothing when they were not all seen.
    fn over(&self, now_ms: u64, span_ms: u64) -> Option<(u32, u32)> {
        let is_whole = self.wanted.front().is_some_and(|(at, _)| at + span_ms <= now_ms);
        let within = self.wanted.iter().filter(|(at, _)| at + span_ms >= now_ms).map(|(_, wanted)| *wanted);
        is_whole.then(|| within.fold((u32::MAX, 0), |(least, most), one| (least.min(one), most.max(one))))
    }

    fn count_failures(&mut self, now_ms: u64, jobs: &[Job]) {
        let is_there: BTreeMap<u64, bool> = jobs.iter().map(|job| (job.id, !job.agents.is_empty())).collect();
        let coming = std::mem::take(&mut self.coming);
        let failed = coming.iter().filter(|id| !is_there.contains_key(id)).count();
        if coming.iter().any(|id| is_there.get(id) == Some(&true)) {
            self.failures = 0;
        }
        if failed > 0 {
            self.failures += 1;
            let pause = AFTER_FAILURE_MS.saturating_mul(1 << (self.failures - 1).min(10));
            self.not_before_ms = now_ms + pause.min(AFTER_FAILURE_MAX_MS);
        }
        self.coming = is_there.into_iter().filter_map(|(id, there)| (!there).then_some(id)).collect();
    }

    /// This one was submitted: it may have ended before the next look.
    pub fn submitted(&mut self, job: u64) {
        self.coming.insert(job);
    }

    /// These were cancelled: that they are gone is no failure.
    pub fn cancelled(&mut self, jobs: &[u64]) {
        self.coming.retain(|job| !jobs.contains(job));
    }
}

/// So many fewer: those that have not begun, the newest first, then those that have least to do.
fn give_up(mut jobs: Vec<&Job>, count: usize) -> Decision {
    jobs.sort_by_key(|job| {
        let dispatches = job.agents.iter().any(|agent| agent.dispatches);
        (!job.agents.is_empty(), job.busy(), dispatches, std::cmp::Reverse(job.id))
    });
    let mut decision = Decision::default();
    for job in jobs.into_iter().take(count) {
        if job.agents.is_empty() {
            decision.cancel.push(job.id);
        }
        decision.drain.extend(job.agents.iter().map(|agent| agent.id.clone()));
    }
    decision
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { least: 0, most: 10, slots: 4, grow_ms: 2_000, shrink_ms: 10_000 };

    fn job(id: u64, busy: u32) -> Job {
        let agent = JobAgent { id: format!("a{id}"), slots: 4, busy, ..JobAgent::default() };
        Job { id, agents: vec![agent] }
    }

    fn pending(id: u64) -> Job {
        Job { id, agents: Vec::new() }
    }

    #[test]
    fn demand_that_lasts_is_met_and_what_is_not_wanted_goes_later() {
        let mut rules = Rules::new(LIMITS);
        assert_eq!(rules.decide(0, 10, &[]), Decision::default());
        assert_eq!(rules.decide(1_000, 10, &[]), Decision::default());
        assert_eq!(rules.decide(2_000, 10, &[]).submit, 3);
        // They are on their way.
        let coming = [pending(1), pending(2), pending(3)];
        assert_eq!(rules.decide(3_000, 10, &coming), Decision::default());
        let there = [job(1, 4), job(2, 4), job(3, 2)];
        assert_eq!(rules.decide(4_000, 0, &there), Decision::default());
        let quiet = [job(1, 0), job(2, 1), job(3, 0)];
        (5..14).for_each(|at| assert_eq!(rules.decide(at * 1_000, 0, &quiet), Decision::default(), "{at}"));
        // The last moment in which three were wanted is ten seconds ago: only one works.
        let decision = rules.decide(14_500, 0, &quiet);
        assert_eq!((decision.submit, decision.drain), (0, vec!["a3".to_owned(), "a1".to_owned()]));
    }

    #[test]
    fn a_short_peak_changes_nothing() {
        let mut rules = Rules::new(Limits { least: 1, ..LIMITS });
        let one = [job(1, 4)];
        for at in 0..60 {
            let waiting = if at % 3 == 0 { 0 } else { 40 };
            assert_eq!(rules.decide(at * 1_000, waiting, &one), Decision::default(), "{at}");
        }
    }

    #[test]
    fn the_fewest_are_there_at_once_and_never_more_than_the_most() {
        let mut rules = Rules::new(Limits { least: 2, most: 3, ..LIMITS });
        assert_eq!(rules.decide(0, 0, &[]).submit, 2);
        let jobs: Vec<Job> = (1..=2).map(|id| job(id, 4)).collect();
        let all = (1..10).map(|at| rules.decide(at * 1_000, 9_999, &jobs).submit).max();
        assert_eq!(all, Some(1));
    }

    #[test]
    fn what_has_not_begun_goes_first_and_who_gives_slots_last() {
        let mut rules = Rules::new(Limits { shrink_ms: 0, ..LIMITS });
        let mut jobs = [job(1, 0), job(2, 0), pending(3), job(4, 3)];
        jobs[1].agents[0].dispatches = true;
        let decision = rules.decide(0, 0, &jobs);
        assert_eq!((decision.cancel, decision.drain), (vec![3], vec!["a1".to_owned(), "a2".to_owned()]));
        // Those that leave are not counted, and not told again.
        jobs[0].agents[0].draining = true;
        jobs[1].agents[0].draining = true;
        assert_eq!(
            rules.decide(1_000, 0, &[jobs[0].clone(), jobs[1].clone(), jobs[3].clone()]),
            Decision::default()
        );
    }

    #[test]
    fn jobs_that_end_before_their_agents_come_are_not_submitted_without_end() {
        let mut rules = Rules::new(Limits { grow_ms: 0, ..LIMITS });
        let mut submitted = 0;
        for at in 0..600u64 {
            // Each job is gone with the next look, or the one after that.
            let jobs: Vec<Job> =
                if at % 3 == 1 && submitted > 0 { vec![pending(submitted)] } else { Vec::new() };
            for _ in 0..rules.decide(at * 1_000, 4, &jobs).submit {
                submitted += 1;
                rules.submitted(submitted);
            }
        }
        assert!(rules.failures() > 3);
        assert!(submitted < 20, "{submitted}");
        // One that comes is none of them.
        rules.decide(700_000, 4, &[pending(9)]);
        rules.decide(701_000, 0, &[job(9, 1)]);
        assert_eq!(rules.failures(), 0);
        // Nor is one that was not wanted any more.
        rules.decide(702_000, 0, &[job(9, 1), pending(10)]);
        rules.cancelled(&[10]);
        rules.decide(703_000, 0, &[job(9, 1)]);
        assert_eq!(rules.failures(), 0);
    }

    proptest! {
        #[test]
        fn the_limits_hold_and_it_comes_to_rest(
            demands in prop::collection::vec(0..80u64, 1..6), least in 0..3u32, most in 3..8u32,
        ) {
            let mut rules = Rules::new(Limits { least, most, ..LIMITS });
            let (mut jobs, mut last, mut now) = (Vec::<Job>::new(), 0, 0);
            for demand in demands {
                let mut changes = 0;
                for _ in 0..40 {
                    now += 500;
                    // What waits is taken by whoever has come.
                    let mut left = demand;
                    for job in &mut jobs {
                        let takes = left.min(4) as u32;
                        *job = super::tests::job(job.id, takes);
                        left -= u64::from(takes);
                    }
                    let decision = rules.decide(now, left, &jobs);
                    changes += usize::from(decision != Decision::default());
                    prop_assert!(decision.submit == 0 || decision.drain.is_empty());
                    jobs.retain(|job| !decision.drain.contains(&job.agents[0].id));
                    for _ in 0..decision.submit {
                        last += 1;
                        jobs.push(super::tests::job(last, 0));
                    }
                    prop_assert!(jobs.len() as u32 >= least && jobs.len() as u32 <= most);
                }
                let wanted = (demand.div_ceil(4) as u32).clamp(least, most);
                prop_assert_eq!(jobs.len() as u32, wanted);
                prop_assert!(changes <= 2, "{}", changes);
            }
        }
    }
}
