//! Other trees in the place of a volume's (`docs/versions.md`): snapshots are made, and the volume gets the tree of one, or of a
//! fork of one, while hosts hold state of the tree that it has. What `volume::versions` and `volume::session::shipping` do.
//!
//! The reference of a tree that was replaced stays: hosts that have not let go of it are judged by it, and answer from it only
//! until anybody is served who knows the other one.

use std::collections::{BTreeMap, BTreeSet};

use hayloft_model::{Ino, Rows, SessionId, Usage};

use crate::Rule;
use crate::messages::ToClient;
use crate::reference::{Attributes, Reference};
use crate::rng::Rng;
use crate::world::{LEASE, What, World, trace};

/// Where the choice of worlds begins in which that happens.
const TREES: u64 = 0x0041_7150;
/// How often something is made or replaced.
const TURNS: u32 = 12;
/// How many leases hosts are waited for that were asked to ship.
const PATIENCE: u64 = 3;
/// How often it is looked whether they have.
const LOOK: u64 = 5;
/// Inode numbers that each fork may give.
const NUMBERS: u64 = 10_000;

/// Whether trees are replaced in the world of a seed.
pub fn replaces_trees(seed: u64) -> bool {
    Rng::new(seed ^ TREES).permille(40)
}

/// A snapshot, and what has happened by then.
#[derive(Clone)]
struct Snapshot {
    rows: Rows,
    next_ino: u64,
    reference: Reference,
}

/// Hosts that were asked to ship what they have.
struct Asked {
    number: u64,
    /// The life of the server that asks.
    life: u64,
    begun: u64,
    /// Who has not answered, and on which connection it was asked.
    waits: BTreeMap<SessionId, Option<u64>>,
    /// The tree that the volume gets then; none: it is a snapshot.
    target: Option<Snapshot>,
}

/// The volume's trees.
pub(crate) struct Trees {
    /// Of its own: the rest of a world is as it is without.
    rng: Rng,
    snapshots: Vec<Snapshot>,
    asked: Option<Asked>,
    last: u64,
    turns: u32,
    forks: u64,
    /// Those that were replaced, by their numbers.
    replaced: BTreeMap<u64, Reference>,
    /// The number of the present one.
    pub(crate) now: u64,
    /// Since when somebody may have been served who knows that one.
    served_since: Option<u64>,
}

impl Trees {
    pub(crate) fn new(seed: u64) -> Trees {
        Trees {
            rng: Rng::new(seed ^ !TREES),
            snapshots: Vec::new(),
            asked: None,
            last: 0,
            turns: 0,
            forks: 0,
            replaced: BTreeMap::new(),
            now: 0,
            served_since: Some(0),
        }
    }
}

impl World {
    pub(crate) fn plan_trees(&mut self) {
        let when = self.trees.rng.between(20, LEASE);
        self.after(when, What::Tree);
    }

    /// Does something for a host, judged by the reference of the tree that it knows.
    pub(crate) fn on_tree(&mut self, at: usize, act: impl FnOnce(&mut World)) {
        let tree = self.clients[at].tree_number;
        let Some(replaced) = self.trees.replaced.remove(&tree) else { return act(self) };
        let present = std::mem::replace(&mut self.reference, replaced);
        act(self);
        let replaced = std::mem::replace(&mut self.reference, present);
        self.trees.replaced.insert(tree, replaced);
    }

    /// Nobody begins something with a tree that was replaced when somebody is served who knows the other one.
    pub(crate) fn check_tree(&mut self, at: usize, call: u64) {
        let since = self.trees.served_since.filter(|since| *since < call);
        if let Some(since) = since.filter(|_| self.clients[at].tree_number != self.trees.now) {
            self.fail(format!(
                "c{at} answers what began at {call} from a tree that was replaced before {since}"
            ));
        }
    }

    /// All who knew the tree before this one have let go of it.
    pub(crate) fn tree_is_served(&mut self) {
        let now = self.now;
        self.trees.served_since.get_or_insert(now);
    }

    /// A snapshot is made, or the volume gets another tree.
    pub(crate) fn next_tree(&mut self) {
        if self.draining || self.ops_left == 0 || self.trees.turns == TURNS {
            return;
        }
        let next = self.trees.rng.between(10, LEASE);
        self.after(next, What::Tree);
        if self.trees.asked.is_some() || !self.server.up {
            return;
        }
        self.trees.turns += 1;
        let count = self.trees.snapshots.len() as u64;
        let target = (count > 0 && self.trees.rng.permille(500)).then(|| {
            let of = self.trees.rng.below(count) as usize;
            let snapshot = self.trees.snapshots[of].clone();
            if self.trees.rng.permille(300) { self.fork(snapshot) } else { snapshot }
        });
        let asks_nobody = self.is_broken(Rule::SnapshotUnasked);
        let waits = self.sessions().into_iter().filter(|_| !asks_nobody).map(|session| (session, None));
        let waits = waits.collect();
        self.trees.last += 1;
        let number = self.trees.last;
        trace!(self, "hosts are asked to ship: {number}, for {:?}", target.as_ref().map(|_| "another tree"));
        let (life, begun) = (self.server.life, self.now);
        self.trees.asked = Some(Asked { number, life, begun, waits, target });
        self.look_at_shipping();
    }

    /// A fork of a snapshot in which somebody has changed something.
    fn fork(&mut self, mut snapshot: Snapshot) -> Snapshot {
        self.trees.forks += 1;
        snapshot.next_ino = self.trees.forks * NUMBERS;
        let named = |(ino, row): (&Ino, &hayloft_model::InodeRow)| (row.nlink > 0).then_some(*ino);
        let inos: Vec<Ino> = snapshot.rows.inodes.iter().filter_map(named).collect();
        for _ in 0..2 {
            let (ino, mode) = (*self.trees.rng.pick(&inos), 0o700 | self.trees.rng.below(0o100) as u32);
            if let Some(row) = snapshot.rows.inodes.get_mut(&ino) {
                (row.mode, row.ctime) = (row.mode & !0o777 | mode, row.ctime.next());
                snapshot.reference.changed_in_fork(ino.0, Attributes::of(row), self.now);
            }
        }
        snapshot
    }

    /// Asks those who are connected and were not asked; when all have answered, the point has come.
    pub(crate) fn look_at_shipping(&mut self) {
        let Some(mut asked) = self.trees.asked.take() else { return };
        let is_late = self.now - asked.begun > PATIENCE * LEASE;
        if asked.life != self.server.life || !self.server.up || is_late {
            return trace!(self, "{} is given up", asked.number);
        }
        let sessions: BTreeSet<SessionId> = self.sessions().into_iter().collect();
        asked.waits.retain(|session, _| sessions.contains(session));
        for (session, asked_on) in &mut asked.waits {
            let connection = self.server.claimed_on(*session);
            if connection.is_some() && *asked_on != connection {
                *asked_on = connection;
                let number = asked.number;
                connection.into_iter().for_each(|to| self.send_to_client(to, ToClient::Ship(number)));
            }
        }
        let is_settled = self.server.is_settled() && self.replaced.is_none();
        if !asked.waits.is_empty() || !is_settled {
            self.trees.asked = Some(asked);
            return self.after(LOOK, What::Shipping);
        }
        self.point(asked);
    }

    /// A host has shipped what it had when it was asked.
    pub(crate) fn has_shipped(&mut self, session: SessionId, number: u64) {
        if let Some(asked) = self.trees.asked.as_mut().filter(|asked| asked.number == number) {
            asked.waits.remove(&session);
        }
    }

    /// What has its place in the order by now is in the snapshot.
    fn point(&mut self, asked: Asked) {
        let of = match self.is_broken(Rule::SnapshotOfDurable) {
            true => &self.server.durable,
            false => &self.server.stored,
        };
        let (rows, next_ino) = (of.rows.clone(), of.next_ino);
        let here = self.sessions().into_iter().collect();
        let reference = match self.reference.at_point(asked.begun, &here, self.now) {
            Ok(reference) => reference,
            Err(why) => return self.fail(format!("snapshot {}: {why}", asked.number)),
        };
        if let Some(wrong) = crate::client::differs(&rows, &reference) {
            return self.fail(format!("snapshot {}: {wrong}", asked.number));
        }
        trace!(self, "{} is made", asked.number);
        self.trees.snapshots.push(Snapshot { rows, next_ino, reference });
        if let Some(target) = asked.target {
            self.exchange(target);
        }
    }

    /// The volume gets another tree. Whoever kills the server meanwhile finds all of it done, or nothing.
    fn exchange(&mut self, target: Snapshot) {
        if self.trees.rng.permille(100) {
            return self.stop_server();
        }
        if !self.flush_now() {
            return;
        }
        self.end_replaced();
        trace!(self, "the volume has another tree");
        self.outcome.replaced += 1;
        let old = &self.server.stored;
        let mut rows = target.rows;
        rows.inodes.retain(|_, row| row.nlink > 0);
        let named = rows.inodes.iter().filter(|(ino, _)| **ino != Ino::ROOT);
        let usage =
            Usage { inodes: named.clone().count() as u64, bytes: named.map(|(_, row)| row.allocated).sum() };
        let next_ino = match self.is_broken(Rule::NumbersAgain) {
            true => target.next_ino,
            false => old.next_ino.max(target.next_ino),
        };
        let store = old.with_tree((rows, usage, next_ino), !self.is_broken(Rule::ResumeOnOtherTree));
        let known: BTreeSet<SessionId> = store.sessions.keys().copied().collect();
        let mut reference = target.reference;
        reference.know_of(&self.reference);
        let replaced = std::mem::replace(&mut self.reference, reference);
        self.trees.replaced.insert(self.trees.now, replaced);
        self.trees.now += 1;
        self.trees.served_since = None;
        self.exchange_store(store);
        // Who has not been greeted knows nothing yet.
        for at in 0..self.clients.len() {
            if !self.clients[at].is_greeted() && !known.contains(&self.clients[at].session) {
                self.restart_client(at);
            }
        }
        self.has_fault();
        if self.trees.rng.permille(200) {
            self.stop_server();
        }
    }
}
