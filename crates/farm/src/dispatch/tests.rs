use hayloft_schedule::Config;

use super::*;
use crate::protocol::{AgentBeat, BuildMessage, ClientBeat, NeedMessage, RunningTask, TaskKey, Wanted};

fn agent(id: &str, beat: u64, slots: u32, running: &[RunningTask]) -> AgentBeat {
    AgentBeat {
        agent: id.to_owned(),
        host: id.to_owned(),
        beat,
        slots,
        memory: 1 << 30,
        running: running.to_vec(),
        lease: 5_000,
        ..AgentBeat::default()
    }
}

fn key(client: &str, task: u64) -> TaskKey {
    TaskKey { client: client.to_owned(), task }
}

fn build(client: &str) -> BuildMessage {
    BuildMessage { name: client.to_owned(), user: "u".to_owned(), batch: false, weight: 1 }
}

fn runs(client: &str, task: u64) -> RunningTask {
    let need = Some(NeedMessage { cores: 1, ..NeedMessage::default() });
    RunningTask { key: Some(key(client, task)), build: Some(build(client)), need }
}

/// Tasks with the agent that each has a slot at; without one when it waits.
fn wants(client: &str, tasks: &[(u64, &str)]) -> ClientBeat {
    let need = || Some(NeedMessage { cores: 1, ..NeedMessage::default() });
    let wanted = |(task, agent): &(u64, &str)| Wanted {
        task: *task,
        need: need(),
        agent: agent.to_string(),
        expected_ms: 0,
    };
    ClientBeat {
        client: client.to_owned(),
        build: Some(build(client)),
        tasks: tasks.iter().map(wanted).collect(),
        ..ClientBeat::default()
    }
}

fn granted(say: &[Say]) -> Vec<(u64, String)> {
    let one = |say: &Say| match say {
        Say::Granted(key, agent, _) => Some((key.task, agent.clone())),
        Say::Hopeless(..) => None,
    };
    say.iter().filter_map(one).collect()
}

fn busy(dispatch: &Dispatch, now_ms: u64) -> u32 {
    dispatch.status(now_ms).hosts.iter().map(|host| host.busy).sum()
}

#[test]
fn a_slot_is_given_and_comes_back() {
    let mut dispatch = Dispatch::new(Config::default(), 0);
    dispatch.agent(agent("a", 1, 1, &[]), 0);
    dispatch.client(wants("c", &[(1, ""), (2, "")]), true, 10);
    assert_eq!(granted(&dispatch.schedule(10)), [(1, "a".to_owned())]);
    assert_eq!(granted(&dispatch.schedule(20)), []);
    dispatch.over(&key("c", 1));
    assert_eq!(granted(&dispatch.schedule(30)), [(2, "a".to_owned())]);
}

#[test]
fn a_slot_whose_message_was_lost_is_told_again() {
    let mut dispatch = Dispatch::new(Config::default(), 0);
    dispatch.agent(agent("a", 1, 1, &[]), 0);
    dispatch.client(wants("c", &[(1, "")]), true, 0);
    dispatch.schedule(0);
    assert_eq!(granted(&dispatch.client(wants("c", &[(1, "")]), true, 500)), []);
    assert_eq!(granted(&dispatch.client(wants("c", &[(1, "")]), true, 1_500)), [(1, "a".to_owned())]);
    assert_eq!(busy(&dispatch, 1_500), 1);
}

#[test]
fn a_task_whose_end_was_lost_gives_its_slot_back_with_the_next_beat() {
    let mut dispatch = Dispatch::new(Config::default(), 0);
    dispatch.agent(agent("a", 1, 1, &[]), 0);
    dispatch.client(wants("c", &[(1, "")]), true, 0);
    dispatch.schedule(0);
    dispatch.agent(agent("a", 2, 1, &[runs("c", 1)]), 500);
    dispatch.client(wants("c", &[(1, "a"), (2, "")]), true, 600);
    assert_eq!(granted(&dispatch.schedule(600)), []);
    dispatch.agent(agent("a", 3, 1, &[]), 1_000);
    assert_eq!(granted(&dispatch.schedule(1_000)), [(2, "a".to_owned())]);
}

#[test]
fn a_new_dispatcher_learns_what_runs_from_agents_and_what_is_about_to_from_submitters() {
    let mut dispatch = Dispatch::new(Config::default(), 0);
    dispatch.agent(agent("a", 7, 2, &[runs("c", 1)]), 0);
    dispatch.client(wants("c", &[(1, "a"), (2, "a"), (3, "")]), true, 10);
    assert_eq!(busy(&dispatch, 10), 2);
    assert_eq!(granted(&dispatch.schedule(10)), []);
    // The submitter's word alone, before the agent's: nothing is known of that agent, and nothing is lost either.
    let mut dispatch = Dispatch::new(Config::default(), 0);
    dispatch.client(wants("c", &[(1, "a"), (3, "")]), true, 0);
    dispatch.agent(agent("a", 7, 2, &[runs("c", 1)]), 10);
    assert_eq!(granted(&dispatch.schedule(10)), [(3, "a".to_owned())]);
}

#[test]
fn a_silent_agent_gets_nothing_and_a_submitter_that_goes_wants_nothing() {
    let mut dispatch = Dispatch::new(Config::default(), 0);
    dispatch.agent(agent("a", 1, 1, &[]), 0);
    dispatch.agent(agent("b", 1, 1, &[]), 2_000);
    dispatch.tick(2_500);
    dispatch.client(wants("c", &[(1, ""), (2, "")]), true, 2_500);
    assert_eq!(granted(&dispatch.schedule(2_500)), [(1, "b".to_owned())]);
    dispatch.client(ClientBeat { goes: true, ..wants("c", &[]) }, true, 2_600);
    assert_eq!(busy(&dispatch, 2_600), 0);
    assert!(dispatch.status(2_600).builds.is_empty());
}

#[test]
fn a_submitter_that_is_silent_loses_what_does_not_run_yet() {
    let mut dispatch = Dispatch::new(Config::default(), 0);
    for beat in 1..20 {
        dispatch.agent(agent("a", beat, 3, &[runs("c", 1)]), beat * 500);
        if beat == 1 {
            dispatch.client(wants("c", &[(1, "a"), (2, "")]), true, 500);
            assert_eq!(granted(&dispatch.schedule(500)), [(2, "a".to_owned())]);
        }
        dispatch.tick(beat * 500);
    }
    // Its agent ends what runs, by its lease; until it says so the slot is taken.
    assert_eq!(busy(&dispatch, 9_500), 1);
}

#[test]
fn what_no_host_can_run_is_told_so() {
    let mut dispatch = Dispatch::new(Config::default(), 0);
    let mut beat = wants("c", &[(1, "")]);
    beat.tasks[0].need = Some(NeedMessage { cores: 1, not: vec!["a".to_owned()], ..NeedMessage::default() });
    dispatch.agent(agent("a", 1, 1, &[]), 1_900);
    dispatch.client(beat, true, 1_900);
    assert_eq!(dispatch.schedule(1_900), []);
    // Others may come yet.
    assert_eq!(dispatch.tick(1_999), []);
    assert!(matches!(&dispatch.tick(2_100)[..], [Say::Hopeless(hopeless, _)] if *hopeless == key("c", 1)));
}

#[test]
fn a_beat_that_is_late_changes_nothing() {
    let mut dispatch = Dispatch::new(Config::default(), 0);
    dispatch.agent(agent("a", 2, 1, &[]), 0);
    dispatch.agent(agent("a", 1, 8, &[runs("c", 9)]), 10);
    assert_eq!(busy(&dispatch, 10), 0);
    assert_eq!(dispatch.status(10).hosts[0].slots, 1);
}

mod worlds {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Messages of three agents and three submitters are lost at random, and dispatchers change: once nothing is lost any
        /// more, all tasks are done, and no slot stays taken.
        #[test]
        fn everything_is_dispatched_in_the_end(fates in prop::collection::vec(0..10u8, 20..200)) {
            let mut fates = fates.into_iter();
            let mut dispatch = Dispatch::new(Config::default(), 0);
            let mut waiting: BTreeMap<String, BTreeSet<u64>> =
                (0..3).map(|client| (format!("c{client}"), (1..=6).collect())).collect();
            let mut given: BTreeMap<(String, u64), (String, u64)> = BTreeMap::new();
            let mut running: BTreeMap<String, BTreeMap<(String, u64), u64>> = BTreeMap::new();
            let (mut now, mut beat) = (0u64, 0u64);
            while waiting.values().any(|tasks| !tasks.is_empty()) || !given.is_empty() {
                now += 250;
                beat += 1;
                prop_assert!(now < 600_000, "{waiting:?} {given:?}");
                let mut lost = || fates.next().is_some_and(|fate| fate < 4);
                let mut say = Vec::new();
                for client in ["c0", "c1", "c2"] {
                    let mut tasks: Vec<(u64, String)> =
                        waiting[client].iter().map(|task| (*task, String::new())).collect();
                    tasks.extend(given.iter().filter(|(at, _)| at.0 == client).map(|(at, to)| (at.1, to.0.clone())));
                    let tasks: Vec<(u64, &str)> = tasks.iter().map(|(task, to)| (*task, &**to)).collect();
                    if !lost() {
                        say.extend(dispatch.client(wants(client, &tasks), true, now));
                    }
                }
                for name in ["a0", "a1", "a2"] {
                    let tasks = running.entry(name.to_owned()).or_default();
                    let done: Vec<_> = tasks.iter().filter(|(_, until)| **until <= now).map(|(at, _)| at.clone()).collect();
                    for at in done {
                        tasks.remove(&at);
                        given.remove(&at);
                        if !lost() {
                            dispatch.over(&key(&at.0, at.1));
                        }
                    }
                    let tasks: Vec<RunningTask> = tasks.keys().map(|at| runs(&at.0, at.1)).collect();
                    if !lost() {
                        dispatch.agent(agent(name, beat, 2, &tasks), now);
                    }
                }
                if beat == 12 {
                    dispatch = Dispatch::new(Config::default(), now);
                }
                say.extend(dispatch.tick(now));
                say.extend(dispatch.schedule(now));
                for (task, to) in say.iter().filter_map(|say| match say {
                    Say::Granted(key, to, _) => Some((key.clone(), to.clone())),
                    Say::Hopeless(..) => None,
                }) {
                    let at = (task.client.clone(), task.task);
                    if lost() || !waiting.get_mut(&task.client).unwrap().remove(&task.task) {
                        continue;
                    }
                    // An agent that is full does not start it; the submitter wants it again, as another try.
                    let tasks = running.entry(to.clone()).or_default();
                    if tasks.len() >= 2 {
                        waiting.get_mut(&task.client).unwrap().insert(task.task + 1000);
                    } else {
                        given.insert(at.clone(), (to, now));
                        tasks.insert(at, now + 700);
                    }
                }
            }
            now += 500;
            for client in ["c0", "c1", "c2"] {
                dispatch.client(wants(client, &[]), true, now);
            }
            for name in ["a0", "a1", "a2"] {
                dispatch.agent(agent(name, beat + 1, 2, &[]), now);
            }
            prop_assert_eq!(busy(&dispatch, now), 0);
        }
    }
}
