use std::collections::{BTreeMap, BTreeSet, VecDeque};

use proptest::prelude::*;

use super::share::{jain, max_min};
use super::*;

fn host(cores: u32) -> Host {
    Host { cores, memory: 1 << 30, labels: BTreeSet::new() }
}

fn build(user: &str, class: Class, weight: u32) -> Build {
    Build { user: user.to_owned(), class, weight }
}

fn farm(hosts: u64, cores: u32) -> Scheduler {
    let mut scheduler = Scheduler::new(Config::default());
    (0..hosts).for_each(|id| scheduler.put_host(HostId(id), host(cores)));
    scheduler
}

/// Tasks of a build, numbered from `first`.
fn submit(scheduler: &mut Scheduler, of: u64, first: u64, count: u64, need: &Need) {
    (first..first + count).for_each(|id| scheduler.submit(TaskId(id), BuildId(of), need.clone(), 0));
}

fn cores(scheduler: &Scheduler, build: u64) -> u32 {
    scheduler.builds().iter().find(|load| load.id == BuildId(build)).map_or(0, |load| load.cores)
}

#[test]
fn shares_are_max_min() {
    assert_eq!(max_min(10.0, &[(1.0, 2.0), (1.0, 9.0), (1.0, 9.0)]), [2.0, 4.0, 4.0]);
    assert_eq!(max_min(12.0, &[(2.0, 99.0), (1.0, 99.0)]), [8.0, 4.0]);
    assert_eq!(max_min(12.0, &[(1.0, 1.0), (1.0, 2.0)]), [1.0, 2.0]);
    assert_eq!(max_min(12.0, &[]), [0.0; 0]);
    assert!((jain(&[1.0, 1.0, 1.0]) - 1.0).abs() < 1e-9 && (jain(&[1.0, 0.0]) - 0.5).abs() < 1e-9);
}

#[test]
fn one_build_gets_all_slots_and_two_get_half_each() {
    let mut scheduler = farm(4, 5);
    for of in 0..2 {
        scheduler.put_build(BuildId(of), build(&format!("user{of}"), Class::Interactive, 1));
    }
    submit(&mut scheduler, 0, 0, 100, &Need::default());
    let first = scheduler.schedule(0);
    assert_eq!((first.len(), cores(&scheduler, 0)), (20, 20));
    submit(&mut scheduler, 1, 1000, 100, &Need::default());
    // What is given back goes to who has less, until both have the same.
    for (at, one) in first.iter().enumerate() {
        scheduler.end(one.task);
        let next = scheduler.schedule(at as u64);
        assert_eq!((next.len(), next[0].host), (1, one.host));
    }
    assert_eq!((cores(&scheduler, 0), cores(&scheduler, 1)), (10, 10));
    assert!(scheduler.builds().iter().all(|load| (load.share - 10.0).abs() < 1e-9));
}

#[test]
fn a_user_with_many_builds_gets_no_more_than_one_with_one() {
    let mut scheduler = farm(1, 12);
    for of in 0..3 {
        scheduler.put_build(BuildId(of), build("many", Class::Interactive, 1));
    }
    scheduler.put_build(BuildId(9), build("one", Class::Interactive, 1));
    for of in [0, 1, 2, 9] {
        submit(&mut scheduler, of, of * 100, 50, &Need::default());
    }
    scheduler.schedule(0);
    assert_eq!([0, 1, 2, 9].map(|of| cores(&scheduler, of)), [2, 2, 2, 6]);
}

#[test]
fn weights_divide() {
    let mut scheduler = farm(1, 12);
    scheduler.put_build(BuildId(0), build("a", Class::Interactive, 2));
    scheduler.put_build(BuildId(1), build("a", Class::Interactive, 1));
    scheduler.put_build(BuildId(2), build("b", Class::Interactive, 1));
    scheduler.set_user_weight("b", 3);
    (0..3).for_each(|of| submit(&mut scheduler, of, of * 100, 50, &Need::default()));
    scheduler.schedule(0);
    assert_eq!([0, 1, 2].map(|of| cores(&scheduler, of)), [2, 1, 9]);
}

#[test]
fn batch_comes_after_interactive_but_for_its_part() {
    let mut scheduler = farm(1, 10);
    scheduler.put_build(BuildId(0), build("a", Class::Interactive, 1));
    scheduler.put_build(BuildId(1), build("b", Class::Batch, 1));
    submit(&mut scheduler, 0, 0, 50, &Need::default());
    submit(&mut scheduler, 1, 100, 50, &Need::default());
    scheduler.schedule(0);
    assert_eq!((cores(&scheduler, 0), cores(&scheduler, 1)), (8, 2));
    // Alone it has all.
    scheduler.remove_build(BuildId(0));
    scheduler.schedule(1);
    assert_eq!(cores(&scheduler, 1), 10);
}

#[test]
fn memory_and_labels_count() {
    let mut scheduler = farm(2, 8);
    let arm = Host { labels: BTreeSet::from(["arm".to_owned()]), ..host(8) };
    scheduler.put_host(HostId(7), arm);
    scheduler.put_build(BuildId(0), build("a", Class::Interactive, 1));
    let large = Need { memory: 600 << 20, ..Need::default() };
    submit(&mut scheduler, 0, 0, 9, &large);
    assert_eq!(scheduler.schedule(0).len(), 3);
    let on_arm = Need { labels: BTreeSet::from(["arm".to_owned()]), ..Need::default() };
    submit(&mut scheduler, 0, 100, 2, &on_arm);
    assert!(scheduler.schedule(0).iter().all(|one| one.host == HostId(7)));
    let nowhere = Need { labels: BTreeSet::from(["mips".to_owned()]), ..Need::default() };
    submit(&mut scheduler, 0, 200, 1, &nowhere);
    assert_eq!(scheduler.hopeless(), [TaskId(200)]);
}

#[test]
fn who_wants_memory_pays_for_it() {
    let mut scheduler = farm(1, 16);
    for (of, memory) in [(0, 64 << 20), (1, 1 << 20)] {
        scheduler.put_build(BuildId(of), build(&format!("u{of}"), Class::Interactive, 1));
        submit(&mut scheduler, of, of * 100, 50, &Need { memory, ..Need::default() });
    }
    scheduler.schedule(0);
    // 8 of 16 cores each would be half the memory for the first: both have the same part of what is scarcest.
    assert_eq!((cores(&scheduler, 0), cores(&scheduler, 1)), (8, 8));
    let mut scheduler = farm(1, 16);
    for (of, memory) in [(0, 128 << 20), (1, 1 << 20)] {
        scheduler.put_build(BuildId(of), build(&format!("u{of}"), Class::Interactive, 1));
        submit(&mut scheduler, of, of * 100, 50, &Need { memory, ..Need::default() });
    }
    scheduler.schedule(0);
    // An eighth of the memory for each task of the one, a sixteenth of the cores for each of the other.
    assert_eq!((cores(&scheduler, 0), cores(&scheduler, 1)), (6, 10));
}

#[test]
fn hosts_that_know_a_build_are_preferred() {
    let mut scheduler = farm(10, 4);
    scheduler.put_build(BuildId(0), build("a", Class::Interactive, 1));
    submit(&mut scheduler, 0, 0, 1, &Need::default());
    let first = scheduler.schedule(0)[0];
    scheduler.end(first.task);
    submit(&mut scheduler, 0, 1, 4, &Need::default());
    let next = scheduler.schedule(0);
    // Until it has less than half as much free as another one.
    assert_eq!(next.iter().filter(|one| one.host == first.host).count(), 3);
    assert_eq!(next.len(), 4);
}

#[test]
fn what_is_not_known_goes_first_then_what_takes_longest() {
    let mut scheduler = farm(1, 1);
    scheduler.put_build(BuildId(0), build("a", Class::Interactive, 1));
    for (id, expected_ms) in [(1, 50), (2, 900), (3, 0), (4, 900), (5, 0)] {
        // Another need, and so another queue, changes nothing.
        let memory = if id == 2 { 1 << 20 } else { 0 };
        let need = Need { memory, ..Need::default() };
        scheduler.submit_expected(TaskId(id), BuildId(0), need, expected_ms, 0);
    }
    let order: Vec<u64> = (0..5)
        .map(|_| {
            let given = scheduler.schedule(0);
            scheduler.end(given[0].task);
            given[0].task.0
        })
        .collect();
    assert_eq!(order, [3, 5, 2, 4, 1]);
}

#[test]
fn a_build_that_has_no_room_is_passed_over_and_comes_back() {
    let mut scheduler = farm(2, 2);
    for of in 0..3 {
        scheduler.put_build(BuildId(of), build(&format!("u{of}"), Class::Batch, 1));
    }
    let nowhere = Need { labels: BTreeSet::from(["arm".to_owned()]), ..Need::default() };
    submit(&mut scheduler, 0, 0, 3, &nowhere);
    submit(&mut scheduler, 1, 100, 1, &Need::default());
    assert_eq!(scheduler.schedule(0).len(), 1);
    assert_eq!(scheduler.hopeless().len(), 3);
    scheduler.put_host(HostId(9), Host { labels: BTreeSet::from(["arm".to_owned()]), ..host(2) });
    assert_eq!(scheduler.schedule(0).iter().filter(|one| one.host == HostId(9)).count(), 2);
    // A build whose last task goes while it is passed over waits for nothing any more.
    scheduler.end(TaskId(2));
    submit(&mut scheduler, 2, 200, 9, &Need::default());
    assert_eq!(scheduler.schedule(0).len(), 3);
    assert!(scheduler.builds().iter().all(|load| load.id == BuildId(2) || load.waiting == 0));
}

#[test]
fn a_large_task_gets_a_host_in_the_end() {
    let mut scheduler = farm(2, 4);
    for of in 0..2 {
        scheduler.put_build(BuildId(of), build(&format!("u{of}"), Class::Interactive, 1));
    }
    submit(&mut scheduler, 0, 0, 1000, &Need::default());
    let mut running: VecDeque<Assignment> = scheduler.schedule(0).into();
    scheduler.submit(TaskId(5000), BuildId(1), Need { cores: 4, ..Need::default() }, 0);
    for now in 1..200 {
        let one = running.pop_front().expect("something runs");
        scheduler.end(one.task);
        running.extend(scheduler.schedule(now * 100));
        if running.iter().any(|one| one.task == TaskId(5000)) {
            return;
        }
    }
    panic!("it starved");
}

#[test]
fn what_is_lost_with_a_host_can_be_submitted_again() {
    let mut scheduler = farm(2, 2);
    scheduler.put_build(BuildId(0), build("a", Class::Interactive, 1));
    submit(&mut scheduler, 0, 0, 4, &Need::default());
    scheduler.schedule(0);
    let lost = scheduler.remove_host(HostId(0));
    assert_eq!((lost.len(), cores(&scheduler, 0)), (2, 2));
    let not = Need { not: BTreeSet::from([HostId(1)]), ..Need::default() };
    scheduler.submit(lost[0], BuildId(0), not, 0);
    assert!(scheduler.schedule(0).is_empty());
    scheduler.put_host(HostId(0), host(2));
    assert_eq!(scheduler.schedule(0)[0].host, HostId(0));
}

#[test]
fn a_new_scheduler_adopts_what_runs() {
    let mut scheduler = farm(1, 3);
    scheduler.put_build(BuildId(0), build("a", Class::Interactive, 1));
    submit(&mut scheduler, 0, 0, 5, &Need::default());
    scheduler.adopt(TaskId(0), BuildId(0), Need::default(), HostId(0), 0);
    scheduler.adopt(TaskId(9), BuildId(0), Need::default(), HostId(0), 0);
    assert_eq!(scheduler.schedule(0), [Assignment { task: TaskId(1), build: BuildId(0), host: HostId(0) }]);
    scheduler.put_host(HostId(0), host(5));
    assert_eq!(scheduler.schedule(0).len(), 2);
    scheduler.end(TaskId(9));
    assert_eq!(scheduler.schedule(0).len(), 1);
}

/// Builds with tasks of one slot each, which all take one round: (user, batch, weight, tasks).
type World = (Vec<u32>, Vec<(u8, bool, u32, u16)>);

fn worlds() -> impl Strategy<Value = World> {
    let hosts = prop::collection::vec(1..8u32, 1..6);
    let builds = prop::collection::vec((0..4u8, any::<bool>(), 1..4u32, 0..200u16), 1..8);
    (hosts, builds)
}

proptest! {
    #[test]
    fn no_slot_is_idle_while_somebody_waits_and_all_is_done((hosts, builds) in worlds()) {
        let mut scheduler = Scheduler::new(Config::default());
        for (id, cores) in hosts.iter().enumerate() {
            scheduler.put_host(HostId(id as u64), host(*cores));
        }
        let mut left = 0u64;
        for (of, (user, batch, weight, tasks)) in builds.iter().enumerate() {
            let class = if *batch { Class::Batch } else { Class::Interactive };
            scheduler.put_build(BuildId(of as u64), build(&user.to_string(), class, *weight));
            submit(&mut scheduler, of as u64, of as u64 * 1000, u64::from(*tasks), &Need::default());
            left += u64::from(*tasks);
        }
        let slots: u64 = hosts.iter().map(|cores| u64::from(*cores)).sum();
        let mut rounds = 0;
        while left > 0 {
            let given = scheduler.schedule(rounds);
            prop_assert_eq!(given.len() as u64, slots.min(left));
            let mut per_host = BTreeMap::new();
            for one in &given {
                *per_host.entry(one.host).or_insert(0u32) += 1;
            }
            prop_assert!(per_host.iter().all(|(id, count)| *count <= hosts[id.0 as usize]));
            given.iter().for_each(|one| scheduler.end(one.task));
            left -= given.len() as u64;
            rounds += 1;
        }
        prop_assert!(scheduler.schedule(rounds).is_empty());
        prop_assert!(scheduler.hosts().iter().all(|load| load.busy == 0 && load.tasks == 0));
    }

    #[test]
    fn each_has_its_share_to_a_slot((hosts, builds) in worlds()) {
        let mut scheduler = Scheduler::new(Config::default());
        for (id, cores) in hosts.iter().enumerate() {
            scheduler.put_host(HostId(id as u64), host(*cores));
        }
        for (of, (user, _, weight, tasks)) in builds.iter().enumerate() {
            scheduler.put_build(BuildId(of as u64), build(&user.to_string(), Class::Interactive, *weight));
            submit(&mut scheduler, of as u64, of as u64 * 1000, u64::from(*tasks), &Need::default());
        }
        scheduler.schedule(0);
        let mut of_users: BTreeMap<String, (f64, f64)> = BTreeMap::new();
        for load in scheduler.builds() {
            let user = of_users.entry(load.build.user.clone()).or_default();
            user.0 += load.share;
            user.1 += f64::from(load.cores);
        }
        for (share, cores) in of_users.values() {
            prop_assert!((share - cores).abs() <= 1.0 + 1e-6, "{} of {}", cores, share);
        }
    }

    #[test]
    fn no_build_waits_for_ever(weights in prop::collection::vec(1..50u32, 2..12), slots in 1..4u32) {
        let mut scheduler = farm(1, slots);
        let count = weights.len() as u64;
        for (of, weight) in weights.iter().enumerate() {
            let class = if of % 2 == 0 { Class::Batch } else { Class::Interactive };
            scheduler.put_build(BuildId(of as u64), build(&of.to_string(), class, *weight));
            submit(&mut scheduler, of as u64, of as u64 * 1_000, 1_000, &Need::default());
        }
        let mut served = BTreeSet::new();
        let mut running: VecDeque<Assignment> = VecDeque::new();
        for now in 0..50 * count {
            if let Some(one) = running.pop_front() {
                scheduler.end(one.task);
            }
            let given = scheduler.schedule(now);
            served.extend(given.iter().map(|one| one.build));
            running.extend(given);
        }
        prop_assert_eq!(served.len() as u64, count);
    }

    #[test]
    fn the_same_calls_give_the_same_answers((hosts, builds) in worlds()) {
        let run = || {
            let mut scheduler = Scheduler::new(Config::default());
            for (id, cores) in hosts.iter().enumerate() {
                scheduler.put_host(HostId(id as u64), host(*cores));
            }
            for (of, (user, _, weight, tasks)) in builds.iter().enumerate() {
                scheduler.put_build(BuildId(of as u64), build(&user.to_string(), Class::Batch, *weight));
                submit(&mut scheduler, of as u64, of as u64 * 1000, u64::from(*tasks), &Need::default());
            }
            scheduler.schedule(0)
        };
        prop_assert_eq!(run(), run());
    }
}
