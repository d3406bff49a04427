//! The log on its way to the server, and events from there.

use super::*;

/// From this seed on, rows that others want are kept for a while, as for calls that wait for what they lead to.
const KEPT_FROM: u64 = 1 << 35;

impl World {
    /// The log up to `until` is to be shipped.
    pub(crate) fn flush(&mut self, at: usize) -> Sequence {
        let until = self.clients[at].everything();
        let client = &mut self.clients[at];
        client.ship_to = client.ship_to.max(until);
        self.start_batch(at);
        until
    }

    /// The same, and somebody else waits for it.
    pub(crate) fn press(&mut self, at: usize) -> Sequence {
        self.clients[at].pauses = false;
        self.flush(at)
    }

    pub(crate) fn ship(&mut self, at: usize) {
        let life = self.clients[at].life;
        let wait = self.rng.between(20, 300);
        self.after(wait, What::Ship(at, life));
        let client = &mut self.clients[at];
        client.pauses = false;
        client.full &= client.tree.is_dirty() || client.in_flight.is_some();
        if self.clients[at].tree.is_dirty() {
            self.flush(at);
        }
        self.start_batch(at);
    }

    pub(super) fn start_batch(&mut self, at: usize) {
        let (now, pressed) = (self.now, self.is_pressed(at));
        let client = &mut self.clients[at];
        if client.pauses
            || client.link != Link::Up
            || client.in_flight.is_some()
            || client.last_cut >= client.ship_to
        {
            return;
        }
        let sequence = client.last_cut.next();
        let cut = client.tree.cut(sequence, false);
        client.last_cut = sequence;
        client.commit_sent = now;
        client.pressing = client.full && pressed;
        let pressing = client.pressing;
        let batch = cut.batch.clone();
        client.in_flight = Some((Some(cut), batch.clone()));
        let session = client.session;
        self.reference.cut(session, sequence.0);
        self.say(at, ToServer::Commit(batch, pressing));
    }

    pub(super) fn shipped(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let Some((_, batch)) = client.in_flight.take() else { return };
        client.accepted = batch.sequence;
        (client.full, client.refused) = (false, false);
        let accepted = client.accepted;
        let gone = client.tree.shipped(accepted);
        let given = client.recalls.iter_mut();
        given.for_each(|recall| recall.owned.retain(|ino| !gone.contains(ino)));
        let (ready, rest) =
            std::mem::take(&mut client.recalls).into_iter().partition(|recall| recall.until <= accepted);
        client.recalls = rest;
        let ready: Vec<Recall> = ready;
        ready.into_iter().for_each(|recall| self.give_back(at, recall));
        self.tell_shipped(at);
        self.let_go(at);
        let files = batch.records.iter().filter_map(|record| match record {
            Record::PutInode(ino, row) if row.parent != STRAY => Some(*ino),
            _ => None,
        });
        self.give_files_back(at, files.collect());
        self.start_batch(at);
        self.wake_all(at);
    }

    /// Without room it waits before it tries again, unless somebody else waits.
    pub(super) fn refused(&mut self, at: usize, sequence: Sequence, full: bool) {
        let pressed = self.is_pressed(at);
        let client = &mut self.clients[at];
        let Some((cut, _)) = client.in_flight.take_if(|(_, batch)| batch.sequence == sequence) else {
            return;
        };
        if let Some(cut) = cut {
            client.tree.undo_cut(cut);
        }
        client.last_cut = Sequence(sequence.0 - 1);
        let session = client.session;
        client.full = full;
        client.refused |= full;
        client.refusals += u64::from(full);
        client.pauses = full && !pressed;
        self.reference.undo_cut(session, sequence.0);
        self.start_batch(at);
    }

    pub(super) fn event_at_client(&mut self, at: usize, number: u64, body: Body) {
        if !matches!(self.clients[at].link, Link::Up | Link::Restoring) {
            // Cannot be: events go out after the claim was answered.
            return self.fail(format!("c{at} gets an event before its claim is answered"));
        }
        let client = &mut self.clients[at];
        client.owed.insert(number, (client.heard, None));
        self.watch_lease(at);
        if self.clients[at].stuck && matches!(body, Body::Recall { .. }) {
            return;
        }
        if self.is_broken(Rule::AckBeforeApply) && !matches!(body, Body::Recall { .. }) {
            let (life, wait) = (self.clients[at].life, self.rng.between(5, 60));
            self.after(wait, What::Late(at, life, Late::Body(body)));
            return self.say_acknowledged(at, number, Vec::new());
        }
        match body {
            Body::Apply { records, own, forget, change } => {
                self.announce(at, number, (records, own, forget), change);
            }
            Body::Drop(ino) => {
                let keeps = self.config.seed >= KEPT_FROM && self.clients[at].tree.inode(ino).is_ok();
                let client = &self.clients[at];
                match client.connection.filter(|_| keeps) {
                    Some(connection) if self.rng.below(2) == 0 => {
                        let (life, wait) = (client.life, self.rng.between(5, 600));
                        self.after(wait, What::DropKept(at, life, (connection, number), ino));
                    }
                    _ => self.drop_row(at, number, ino),
                }
            }
            Body::Recall { object, keep_read } => {
                let keeps_slots = self.is_broken(Rule::KeepSlotsBack);
                let tree = &mut self.clients[at].tree;
                let is_split = tree.is_split(object.ino());
                let owned = tree.owned_of(object, keep_read);
                owned.iter().for_each(|ino| tree.disown(*ino));
                let skips = self.is_broken(Rule::RecallWithoutShip) || keeps_slots && is_split;
                let until = if skips { Sequence(0) } else { self.press(at) };
                let recall = Recall { event: number, object, keep_read, owned, until };
                if recall.until <= self.clients[at].accepted {
                    self.give_back(at, recall);
                } else {
                    self.clients[at].recalls.push(recall);
                }
            }
        }
    }

    fn drop_row(&mut self, at: usize, event: u64, ino: Ino) {
        let stale = self.clients[at].tree.drop_rows(&[ino]);
        self.acknowledge(at, event, stale);
    }

    /// A row goes that was kept for calls. It may be this client's by now: whoever wanted it is gone.
    pub(crate) fn drop_kept(&mut self, at: usize, event: u64, ino: Ino) {
        if self.clients[at].tree.owns(ino) {
            return self.acknowledge(at, event, Stale::default());
        }
        self.drop_row(at, event, ino);
    }

    pub(super) fn apply(&mut self, at: usize, records: &[Record], own: &[Object], forget: &[Ino]) -> Stale {
        let client = &mut self.clients[at];
        for object in own {
            client.hot.remove(&object.ino());
        }
        client.tree.apply(records, own, forget)
    }

    pub(crate) fn apply_late(&mut self, at: usize, late: Late) {
        let stale = match late {
            Late::Body(Body::Apply { records, own, forget, .. }) => self.apply(at, &records, &own, &forget),
            Late::Body(Body::Drop(ino)) => self.clients[at].tree.drop_rows(&[ino]),
            Late::Body(Body::Recall { .. }) => return,
        };
        let client = &mut self.clients[at];
        stale.attributes.iter().chain(&stale.data).for_each(|ino| _ = client.kernel.invalidate(*ino));
        stale.names.iter().for_each(|(dir, name)| client.kernel.drop_name(*dir, name.as_bytes()[0]));
    }

    /// Before a change is requested: files that it is about and that are owned by themselves are given back, if what was
    /// changed of them is shipped. In half of the worlds they are left to be recalled.
    pub(crate) fn give_up_files(&mut self, at: usize, change: &Change) {
        let tree = &mut self.clients[at].tree;
        let named = change
            .places()
            .into_iter()
            .filter_map(|(dir, name)| tree.leads_to(dir, name.as_bytes()).map(|dentry| dentry.ino));
        let files = change.inode().into_iter().chain(named).collect();
        self.give_files_back(at, files);
    }

    /// The same for files of a batch that the server has.
    fn give_files_back(&mut self, at: usize, mut files: Vec<Ino>) {
        let unshipped = self.is_broken(Rule::GiveBackUnshipped);
        let client = &mut self.clients[at];
        if !self.gives_back || client.link != Link::Up || client.foreword.is_some() {
            return;
        }
        let tree = &mut client.tree;
        files.retain(|ino| {
            let is_file = |row: &InodeRow| row.kind() != FileKind::Directory && row.nlink > 0;
            tree.owns_itself(*ino)
                && tree.inode(*ino).is_ok_and(is_file)
                && (unshipped || tree.is_clean(*ino, client.accepted))
        });
        if !files.is_empty() {
            files.iter().for_each(|ino| client.tree.disown(*ino));
            let seen = client.seen;
            trace!(self, "c{at} gives {files:?} back");
            self.say(at, ToServer::GiveBack(files, seen));
        }
    }

    /// What was recalled is shipped.
    pub(super) fn give_back(&mut self, at: usize, recall: Recall) {
        let mut stale = Stale::default();
        if recall.keep_read {
            // Names that are kept go with the lock: an answer that has made one has arrived then.
            let of_dir = |(dir, name): &(Ino, u8)| (*dir, Name::new(&[*name]));
            let names = self.clients[at].unlimited.iter().filter(|(dir, _)| *dir == recall.object.ino());
            stale.names = names.map(of_dir).collect();
        } else {
            let keeps = self.is_broken(Rule::KeepSplitNames);
            let client = &mut self.clients[at];
            let slot = recall.object.ino();
            let of_slot =
                |(dir, name): &&(Ino, u8)| slot != *dir && client.tree.place(*dir, &[*name]) == slot;
            let by_slot: Vec<(Ino, u8)> =
                client.unlimited.iter().filter(of_slot).filter(|_| !keeps).copied().collect();
            stale = client.tree.uncover(recall.object);
            if keeps && slot.of_slot().is_some() {
                stale.names.clear();
            }
            stale.names.extend(by_slot.into_iter().map(|(dir, name)| (dir, Name::new(&[name]))));
            let is_whole = recall.object.ino().of_slot().is_none();
            if matches!(recall.object, Object::Directory(_))
                && is_whole
                && !self.is_broken(Rule::KeepAbsentNames)
            {
                // Names that it does not have were handed out as well.
                self.clients[at].drop_names(|dir| dir == recall.object.ino());
                stale.names.clear();
            }
        }
        let ino = recall.object.ino();
        if self.clients[at].tree.in_use().any(|used| used == ino) && !stale.in_use.contains(&ino) {
            // It has no name: whether it stays is the server's business from now on.
            stale.in_use.push(ino);
        }
        self.acknowledge(at, recall.event, stale);
    }

    /// The kernel is told what is stale, then the server.
    pub(super) fn acknowledge(&mut self, at: usize, event: u64, stale: Stale) {
        let unlimited = self.is_broken(Rule::UnlimitedWhileChanging);
        let once = self.is_broken(Rule::DropUnknownOnce);
        let barrier = !self.is_broken(Rule::BirthWithoutBarrier);
        let client = &mut self.clients[at];
        let inodes: BTreeSet<Ino> = stale.attributes.iter().chain(&stale.data).copied().collect();
        let (kernel, tree) = (&mut client.kernel, &client.tree);
        let mut unknown: Vec<Ino> =
            inodes.into_iter().filter(|ino| !is_heard(kernel, tree, *ino, barrier)).collect();
        if once {
            unknown.clear();
        }
        let names = stale
            .names
            .iter()
            .map(|(dir, name)| (*dir, name.as_bytes()[0]))
            .filter(|place| client.keeps(*place, unlimited))
            .collect();
        let since = self.now;
        client.expiries.insert(event, Expiry { names, unknown, in_use: stale.in_use, since });
        self.expire_names(at, event);
    }

    pub(crate) fn expire_names(&mut self, at: usize, event: u64) {
        let wait_for_locks = self.is_broken(Rule::WaitForLocks);
        let barrier = !self.is_broken(Rule::BirthWithoutBarrier);
        let now = self.now;
        let client = &mut self.clients[at];
        let Some(mut expiry) = client.expiries.remove(&event) else { return };
        expiry.names = client.expire(expiry.names);
        let (kernel, tree) = (&mut client.kernel, &client.tree);
        expiry.unknown.retain(|ino| !is_heard(kernel, tree, *ino, barrier));
        let wait = match expiry.unknown.is_empty() {
            false => Some(1),
            true => (!expiry.names.is_empty() && (now - expiry.since < EXPIRY_PATIENCE || wait_for_locks))
                .then_some(3),
        };
        if let Some(wait) = wait {
            let life = client.life;
            client.expiries.insert(event, expiry);
            return self.after(wait, What::Expire(at, life, event));
        }
        if !expiry.names.is_empty() {
            trace!(self, "c{at} raises the epoch");
            let dirs: BTreeSet<Ino> = expiry.names.iter().map(|(dir, _)| *dir).collect();
            self.clients[at].drop_names(|dir| dirs.contains(&dir));
        }
        let mut in_use = expiry.in_use;
        // The kernel may have forgotten some while names were expired: the server was told, if it knew.
        let used: BTreeSet<Ino> = self.clients[at].tree.in_use().collect();
        in_use.retain(|ino| used.contains(ino));
        if self.is_broken(Rule::ForgetInUse) {
            in_use.clear();
        }
        self.say_acknowledged(at, event, in_use);
    }

    fn say_acknowledged(&mut self, at: usize, event: u64, in_use: Vec<Ino>) {
        if self.clients[at].stuck {
            return;
        }
        if let Some((_, acknowledged)) = self.clients[at].owed.get_mut(&event) {
            *acknowledged = Some(self.now);
        }
        self.say(at, ToServer::Ack { event, in_use });
    }
}

/// Drops what a kernel has of an inode. Whether nothing older can arrive there afterwards.
fn is_heard(kernel: &mut Kernel, tree: &Tree, ino: Ino, barrier: bool) -> bool {
    let is_arriving = barrier && kernel.is_arriving(ino);
    (kernel.invalidate(ino) || tree.lookups(ino) == 0) && !is_arriving
}
