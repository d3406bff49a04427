//! Whole builds through the scheduler, with a clock that is counted: how long they take, who gets what, and what a decision costs.
//!
//! `cargo test --release -p hayloft-schedule --test simulation -- --nocapture` prints the figures; with
//! `HAYLOFT_TEST_LONG` farms of 10,000 hosts are among them. No time that a decision takes is asserted.
#![allow(missing_docs)]

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::{Duration, Instant};

use hayloft_schedule::{Build, BuildId, Class, Config, Host, HostId, Need, Scheduler, TaskId};

/// A generator of Marsaglia's (xorshift64*): the same numbers each time.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16) % limit
    }
}

#[derive(Debug, Clone, Copy)]
struct Plan {
    hosts: u64,
    cores: u32,
    builds: u64,
    tasks_each: u64,
    /// A task takes so long in the mean, and up to `spread_ms` more or less.
    mean_ms: u64,
    spread_ms: u64,
    /// So often a host is lost, with what runs there; it is back after ten seconds.
    lost_every_ms: Option<u64>,
    /// How long tasks take is known before.
    knows: bool,
    /// Users, who have the builds in turn; 0: each has one.
    users: u64,
}

#[derive(Debug)]
struct Result {
    /// When the last task was done.
    took_ms: u64,
    /// What the slots that were there could have done the same in, with what was lost.
    ideal_ms: f64,
    /// The least fair moment while all builds had tasks waiting.
    jain_least: f64,
    /// As fair as such a moment can be: slots are whole, shares are not.
    jain_can_be: f64,
    /// What each had in all these moments.
    jain_in_all: f64,
    lost: u64,
    given: u64,
    deciding: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ends(TaskId, u32),
    Lose,
    Back(HostId),
}

/// The fairness index where so many slots are divided among so many with the same right to them.
fn jain_of_whole_slots(slots: u64, parties: u64) -> f64 {
    let has = |at| (slots / parties + u64::from(at < slots % parties)) as f64;
    jain(&(0..parties).map(has).collect::<Vec<_>>())
}

fn jain(values: &[f64]) -> f64 {
    let (sum, squares) = values.iter().fold((0.0, 0.0), |(sum, squares), v| (sum + v, squares + v * v));
    if squares == 0.0 { 1.0 } else { sum * sum / (values.len() as f64 * squares) }
}

struct World {
    plan: Plan,
    scheduler: Scheduler,
    random: Random,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    /// How long each task takes.
    takes: Vec<u64>,
    /// How often each was begun: an end of an earlier time does not count.
    begun: Vec<u32>,
    since: BTreeMap<TaskId, u64>,
    /// Slots that are there, and since when; and slot time so far.
    slots: u64,
    slots_since: u64,
    slot_ms: u64,
    wasted_ms: u64,
    left: u64,
    /// What builds had of their shares, summed over all looks.
    had: BTreeMap<BuildId, f64>,
    result: Result,
}

fn host(cores: u32) -> Host {
    Host { cores, memory: 1 << 36, ..Host::default() }
}

impl World {
    fn new(plan: Plan) -> World {
        let mut scheduler = Scheduler::new(Config::default());
        (0..plan.hosts).for_each(|id| scheduler.put_host(HostId(id), host(plan.cores)));
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let all = plan.builds * plan.tasks_each;
        let low = plan.mean_ms - plan.spread_ms;
        let takes: Vec<u64> = (0..all).map(|_| low + random.below(2 * plan.spread_ms + 1)).collect();
        for build in 0..plan.builds {
            let user = if plan.users == 0 { build } else { build % plan.users };
            let of = Build { user: format!("user{user}"), class: Class::Interactive, weight: 1 };
            scheduler.put_build(BuildId(build), of);
        }
        // Side by side, as makes that run at once have them.
        for task in 0..all {
            let expected_ms = if plan.knows { takes[task as usize] as u32 } else { 0 };
            let build = BuildId(task % plan.builds);
            scheduler.submit_expected(TaskId(task), build, Need::default(), expected_ms, 0);
        }
        let result = Result {
            took_ms: 0,
            ideal_ms: 0.0,
            jain_least: 1.0,
            jain_can_be: 1.0,
            jain_in_all: 1.0,
            lost: 0,
            given: 0,
            deciding: Duration::ZERO,
        };
        World {
            plan,
            scheduler,
            random,
            events: plan.lost_every_ms.map(|every| Reverse((every, Event::Lose))).into_iter().collect(),
            takes,
            begun: vec![0; all as usize],
            since: BTreeMap::new(),
            slots: plan.hosts * u64::from(plan.cores),
            slots_since: 0,
            slot_ms: 0,
            wasted_ms: 0,
            left: all,
            had: BTreeMap::new(),
            result,
        }
    }

    fn run(mut self) -> Result {
        let mut now = 0;
        self.give(now);
        let mut next_look = 0;
        while self.left > 0 {
            let Some(Reverse((at, event))) = self.events.pop() else {
                panic!("{} tasks wait for ever", self.left)
            };
            now = at;
            self.happens(event, now);
            // What happens in the same moment is one decision, as it is for a dispatcher that has several messages.
            while let Some(Reverse((at, event))) =
                self.events.peek().copied().filter(|Reverse((at, _))| *at == now)
            {
                self.events.pop();
                self.happens(event, at);
            }
            self.give(now);
            if now >= next_look {
                self.look();
                next_look = now + 500;
            }
        }
        self.count_slots(now, 0);
        self.result.took_ms = now;
        self.ideal(now);
        self.result
    }

    /// As long as all that was done would have taken had no slot ever been free.
    fn ideal(&mut self, now: u64) {
        let work: u64 = self.takes.iter().sum::<u64>() + self.wasted_ms;
        let whole = self.slot_ms as f64 / now as f64;
        let longest = self.takes.iter().copied().max().unwrap_or(0) as f64;
        self.result.ideal_ms = (work as f64 / whole).max(longest);
    }

    fn happens(&mut self, event: Event, now: u64) {
        match event {
            Event::Ends(task, time) => {
                if self.begun[task.0 as usize] == time && self.since.remove(&task).is_some() {
                    self.left -= 1;
                    let begun = Instant::now();
                    self.scheduler.end(task);
                    self.result.deciding += begun.elapsed();
                }
            }
            Event::Lose => {
                let lost = HostId(self.random.below(self.plan.hosts));
                for task in self.scheduler.remove_host(lost) {
                    let since = self.since.remove(&task).expect("it ran");
                    self.wasted_ms += now - since;
                    self.result.lost += 1;
                    let build = BuildId(task.0 % self.plan.builds);
                    self.scheduler.submit(task, build, Need::default(), now);
                }
                let there: u64 = self.scheduler.hosts().iter().map(|load| u64::from(load.cores)).sum();
                self.count_slots(now, there);
                self.events.push(Reverse((now + 10_000, Event::Back(lost))));
                let every = self.plan.lost_every_ms.expect("there is one");
                self.events.push(Reverse((now + every, Event::Lose)));
            }
            Event::Back(id) => {
                self.scheduler.put_host(id, host(self.plan.cores));
                let there: u64 = self.scheduler.hosts().iter().map(|load| u64::from(load.cores)).sum();
                self.count_slots(now, there);
            }
        }
    }

    fn count_slots(&mut self, now: u64, slots: u64) {
        self.slot_ms += self.slots * (now - self.slots_since);
        (self.slots, self.slots_since) = (slots, now);
    }

    fn give(&mut self, now: u64) {
        let begun = Instant::now();
        let given = self.scheduler.schedule(now);
        self.result.deciding += begun.elapsed();
        self.result.given += given.len() as u64;
        for one in given {
            let at = one.task.0 as usize;
            self.begun[at] += 1;
            self.since.insert(one.task, now);
            self.events.push(Reverse((now + self.takes[at], Event::Ends(one.task, self.begun[at]))));
        }
    }

    fn look(&mut self) {
        let builds = self.scheduler.builds();
        if builds.iter().all(|build| build.waiting > 0) {
            let has: Vec<f64> = builds.iter().map(|build| f64::from(build.cores) / build.share).collect();
            self.result.jain_least = self.result.jain_least.min(jain(&has));
            for (build, has) in builds.iter().zip(has) {
                *self.had.entry(build.id).or_default() += has;
            }
            let can_be = jain_of_whole_slots(self.slots, self.plan.builds);
            self.result.jain_can_be = self.result.jain_can_be.min(can_be);
            self.result.jain_in_all = jain(&self.had.values().copied().collect::<Vec<_>>());
        }
    }
}

fn simulate(name: &str, plan: Plan) -> Result {
    let result = World::new(plan).run();
    let over = result.took_ms as f64 / result.ideal_ms;
    println!(
        "{name:<44} {:>9.1} s, {over:.3} of the ideal, Jain {:.4}, at any moment at least {:.4} of {:.4}, {} lost, {:.2} us a task",
        result.took_ms as f64 / 1e3,
        result.jain_in_all,
        result.jain_least,
        result.jain_can_be,
        result.lost,
        result.deciding.as_secs_f64() * 1e6 / result.given as f64
    );
    result
}

const FARM: Plan = Plan {
    hosts: 30,
    cores: 25,
    builds: 1,
    tasks_each: 6_000,
    mean_ms: 6_000,
    spread_ms: 300,
    lost_every_ms: None,
    knows: false,
    users: 0,
};

/// As fair at any moment as whole slots can be divided, and in the mean of them as if they could be cut.
fn is_fair(result: &Result) {
    assert!(result.jain_in_all >= 0.98, "{result:?}");
    assert!(result.jain_least >= 0.98 * result.jain_can_be, "{result:?}");
}

fn is_good(result: &Result) {
    assert!(result.took_ms as f64 <= 1.05 * result.ideal_ms, "{result:?}");
    is_fair(result);
}

#[test]
fn builds_take_what_they_must_and_have_equal_shares() {
    is_good(&simulate("30 x 25, 1 build of 6,000 tasks", FARM));
    is_good(&simulate("30 x 25, 20 builds", Plan { builds: 20, ..FARM }));
    let tasks_each = if std::env::var_os("HAYLOFT_TEST_LONG").is_some() { 6_000 } else { 1_000 };
    let hundred = Plan { builds: 100, tasks_each, ..FARM };
    is_good(&simulate("30 x 25, 100 builds", hundred));
}

#[test]
fn lost_hosts_cost_what_ran_there() {
    let plan = Plan { builds: 20, tasks_each: 3_000, lost_every_ms: Some(7_000), ..FARM };
    let result = simulate("30 x 25, 20 builds, a host lost every 7 s", plan);
    assert!(result.lost > 500, "{result:?}");
    is_good(&result);
}

/// Tasks of very different length, in the order in which make finds them: the last ones may be long. What that can cost is known (Graham,
/// 1966): as much as the longest one.
#[test]
fn long_tasks_at_the_end_cost_no_more_than_one_of_them() {
    let result = simulate("30 x 25, 1 build, tasks of 1 to 11 s", Plan { spread_ms: 5_000, ..FARM });
    assert!(result.took_ms as f64 <= result.ideal_ms + 11_000.0, "{result:?}");
}

#[test]
fn with_a_history_they_cost_nothing_at_the_end() {
    let plan = Plan { spread_ms: 5_000, knows: true, ..FARM };
    is_good(&simulate("30 x 25, 1 build, tasks of 1 to 11 s, known", plan));
    let twenty = Plan { builds: 20, tasks_each: 1_000, ..plan };
    is_good(&simulate("30 x 25, 20 builds, tasks of 1 to 11 s, known", twenty));
}

#[test]
fn large_farms_are_used_as_well_as_small_ones() {
    let large = if std::env::var_os("HAYLOFT_TEST_LONG").is_some() { 10_000 } else { 1_000 };
    for hosts in [100, large] {
        let tasks_each = hosts * 25 * 8 / 20;
        let plan = Plan { hosts, builds: 20, tasks_each, ..FARM };
        is_good(&simulate(&format!("{hosts} x 25, 20 builds of {tasks_each} tasks"), plan));
    }
}

/// What a decision costs does not grow with the builds: the figures are for who reads them.
#[test]
fn many_builds_of_few_users_and_of_many() {
    let most = if std::env::var_os("HAYLOFT_TEST_LONG").is_some() { 1_000 } else { 300 };
    for builds in [10, 100, most] {
        for users in [0, 5] {
            let plan = Plan { hosts: 100, builds, users, tasks_each: 40_000 / builds, ..FARM };
            let whose = if users == 0 { "a user each".to_owned() } else { format!("{users} users") };
            let result = simulate(&format!("100 x 25, {builds} builds, {whose}"), plan);
            assert!(result.took_ms as f64 <= 1.05 * result.ideal_ms, "{result:?}");
            // Of several builds of a user each has what is left for it of his share: a slot more or less is much of that.
            if users == 0 {
                is_fair(&result);
            }
        }
    }
}

/// The clock is counted: these are times of the farm, not of this machine.
#[test]
fn a_small_build_beside_twenty_large_ones_waits_for_nobody() {
    const COMES: u64 = 20_000;
    let mut scheduler = Scheduler::new(Config::default());
    (0..30).for_each(|id| scheduler.put_host(HostId(id), host(25)));
    let build = |scheduler: &mut Scheduler, id: u64, first: u64, tasks: u64, now: u64| {
        let of = Build { user: format!("user{id}"), class: Class::Interactive, weight: 1 };
        scheduler.put_build(BuildId(id), of);
        let all = first..first + tasks;
        all.for_each(|task| scheduler.submit(TaskId(task), BuildId(id), Need::default(), now));
    };
    (0..20).for_each(|id| build(&mut scheduler, id, id * 10_000, 1_000, 0));
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut ends = BinaryHeap::new();
    let (mut first, mut last, mut left) = (None, 0, 30);
    let mut now = 0;
    while left > 0 {
        if now == COMES {
            build(&mut scheduler, 99, 990_000, left, now);
        }
        while let Some(Reverse((at, task))) = ends.peek().copied()
            && at <= now
        {
            ends.pop();
            scheduler.end(task);
            if task.0 >= 990_000 {
                (left, last) = (left - 1, at);
            }
        }
        for one in scheduler.schedule(now) {
            let is_small = one.build == BuildId(99);
            first = first.or(is_small.then_some(now));
            // The large ones' take 3 to 9 s, its own 6.
            let takes = if is_small { 6_000 } else { 3_000 + random.below(6_001) };
            ends.push(Reverse((now + takes, one.task)));
        }
        now += 1;
    }
    let first = first.expect("it has run") - COMES;
    println!(
        "a small build beside 20: first task after {first} ms, done after {} ms, alone 6000",
        last - COMES
    );
    assert!(first <= 100 && last - COMES <= 7_200, "{first} {last}");
}
