//! Inode numbers in a family: whatever becomes of a volume and its forks, none is given twice, and they stay low.

use std::collections::{BTreeMap, BTreeSet};

use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    AllocateInos, CreateSnapshot, DeleteVolume, Failed, Fork, Goodbye, Hello, InoRangeMessage, Promote,
    Rollback, Version,
};

use crate::common::*;
use crate::history::Dice;

/// What was given, from where to where, and to whom.
#[derive(Default)]
struct Given(BTreeMap<u64, (u64, String)>);

impl Given {
    fn note(&mut self, range: &InoRangeMessage, to: &str) {
        assert!(range.next < range.end, "{range:?}");
        let before = self.0.range(..range.end).next_back();
        if let Some((next, (end, of))) = before.filter(|(_, (end, _))| *end > range.next) {
            panic!("{range:?} for {to}: {next}..{end} was given to {of}");
        }
        self.0.insert(range.next, (range.end, to.to_owned()));
    }
}

/// A volume with its forks, and those who ask.
struct Family {
    running: Option<Running>,
    folder: tempfile::TempDir,
    admin: Client,
    sessions: u64,
    given: Given,
}

impl Family {
    fn new() -> Family {
        let (folder, running) = started();
        let admin = Client::connect(running.address);
        Family { running: Some(running), folder, admin, sessions: 0, given: Given::default() }
    }

    fn address(&self) -> std::net::SocketAddr {
        self.running.as_ref().unwrap().address
    }

    /// A session of a volume that takes numbers as it begins, and then so many, and leaves.
    fn takes(&mut self, volume: &str, more: &[u64]) {
        self.sessions += 1;
        let hello = Hello { volume: volume.into(), ..hello(self.sessions) };
        let (mut client, welcome) = Client::open(self.address(), hello).unwrap();
        let to = format!("session {} of {volume}", self.sessions);
        self.given.note(&welcome.inos.unwrap(), &to);
        for count in more {
            let answer = client.ask(Ask::AllocateInos(AllocateInos { count: *count }));
            let Ok(Answer::Inos(range)) = answer else { panic!("{answer:?}") };
            self.given.note(&range, &to);
        }
        client.send(Ask::Goodbye(Goodbye {}));
    }

    fn ask(&mut self, what: Ask) -> Result<Answer, Failed> {
        self.admin.ask(what)
    }

    fn snapshot(&mut self, name: &str) {
        let of = Some(Version { volume: "vol".into(), snapshot: name.into() });
        self.ask(Ask::CreateSnapshot(CreateSnapshot { of, as_stored: true, ..CreateSnapshot::default() }))
            .unwrap();
    }

    fn fork(&mut self, volume: &str, snapshot: &str, name: &str) {
        let of = Some(Version { volume: volume.into(), snapshot: snapshot.into() });
        self.ask(Ask::Fork(Fork { of, name: name.into(), as_stored: true })).unwrap();
    }

    /// Its sessions have left, which the server may have to notice.
    fn promote(&mut self, fork: &str) {
        let ask = Promote { fork: fork.into(), ..Promote::default() };
        eventually(|| match self.admin.ask(Ask::Promote(ask.clone())) {
            Ok(_) => true,
            Err(failed) => {
                assert!(failed.message.contains("in use"), "{failed:?}");
                false
            }
        });
    }

    fn start_again(&mut self, crashes: bool) {
        let running = self.running.take().unwrap();
        if crashes {
            running.crash()
        } else {
            running.shutdown()
        }
        let running = Running::start(config(self.folder.path()));
        self.admin = Client::connect(running.address);
        self.running = Some(running);
    }

    fn highest(&self) -> u64 {
        self.given.0.values().map(|(end, _)| *end).max().unwrap_or(0)
    }
}

#[test]
fn no_number_is_given_twice_whatever_becomes_of_a_volume_and_its_forks() {
    let mut promoted = 0;
    for seed in 1..=3 {
        let mut dice = Dice(u64::wrapping_mul(seed, 0x9e37_79b9_7f4a_7c15) | 1);
        let mut family = Family::new();
        let (mut forks, mut snapshots) = (BTreeSet::<String>::new(), Vec::<String>::new());
        for step in 0..80 {
            let members: Vec<String> = forks.iter().cloned().chain(["vol".to_owned()]).collect();
            let member = members[dice.roll(members.len() as u64) as usize].clone();
            let fork = forks.iter().nth(dice.roll(forks.len().max(1) as u64) as usize).cloned();
            match dice.roll(9) {
                0..=2 => family.takes(&member, &[1 << dice.roll(18), 1 << dice.roll(10)]),
                3 => {
                    snapshots.push(format!("s{step}"));
                    family.snapshot(snapshots.last().unwrap());
                }
                4 | 5 => {
                    let name = format!("f{step}");
                    match snapshots.get(dice.roll(2 * snapshots.len() as u64 + 1) as usize) {
                        Some(snapshot) => family.fork("vol", &snapshot.clone(), &name),
                        None => family.fork(&member, "", &name),
                    }
                    forks.insert(name);
                }
                6 => {
                    if let Some(name) = fork {
                        forks.remove(&name);
                        match dice.roll(3) {
                            0 => drop(family.ask(Ask::DeleteVolume(DeleteVolume { name, snapshots: false }))),
                            // Into the place of a fork, or of the volume: whatever it was made of.
                            _ => match family
                                .ask(Ask::Promote(Promote { fork: name.clone(), ..Promote::default() }))
                            {
                                Ok(_) => promoted += 1,
                                // Its origin is gone, or it has what the origin's tree is kept as.
                                Err(_) => drop(forks.insert(name)),
                            },
                        }
                    }
                }
                7 => {
                    if let Some(snapshot) = snapshots.get(dice.roll(snapshots.len().max(1) as u64) as usize) {
                        let to = Some(Version { volume: "vol".into(), snapshot: snapshot.clone() });
                        family.ask(Ask::Rollback(Rollback { to, ..Rollback::default() })).unwrap();
                    }
                }
                _ => family.start_again(dice.roll(2) == 0),
            }
        }
        assert!(family.given.0.len() > 20, "{}", family.given.0.len());
        assert_eq!(family.running.as_ref().unwrap().problems(), [""; 0]);
        family.running.take().unwrap().shutdown();
    }
    assert!(promoted > 5, "{promoted}");
}

#[test]
fn numbers_stay_low_in_forks_and_where_forks_have_taken_a_place() {
    let mut family = Family::new();
    family.takes("vol", &[100]);
    family.snapshot("s");
    family.fork("vol", "s", "fork");
    family.fork("fork", "", "inner");
    for volume in ["fork", "inner", "vol", "fork"] {
        family.takes(volume, &[10_000]);
    }
    family.promote("inner");
    family.takes("fork", &[10_000]);
    family.fork("fork", "", "other");
    family.takes("other", &[10_000]);
    for round in 0..50 {
        // As a mirror that is received into again and again.
        let name = format!("received-{round}");
        family.fork("vol", "", &name);
        family.takes(&name, &[1000]);
        family.promote(&name);
        family.takes("vol", &[1]);
    }
    // What forks leave is used again.
    assert!(family.highest() < 50 * 10_000 + 4 * (1 << 17), "{}", family.highest());
    family
        .ask(Ask::Rollback(Rollback {
            to: Some(Version { volume: "vol".into(), snapshot: "s".into() }),
            ..Rollback::default()
        }))
        .unwrap();
    family.takes("vol", &[1]);
    // A fork that has used up its run goes on where nobody else is.
    family.fork("vol", "s", "large");
    family.takes("large", &[1 << 17, 1 << 17, 1 << 17]);
    assert!(family.highest() > 1 << 35);
    family.promote("large");
    let (vol, fork) = (family.highest(), "behind");
    family.takes("vol", &[1]);
    assert_eq!(family.highest(), vol, "the volume itself goes on below");
    family.fork("vol", "", fork);
    family.takes(fork, &[1 << 17, 1 << 17, 1 << 17]);
    assert_eq!(family.running.as_ref().unwrap().problems(), [""; 0]);
    family.running.take().unwrap().shutdown();
}
