//! How the client answers its kernel.

use super::*;

impl World {
    /// Has the client answer, and the answer come back.
    pub(super) fn answer(
        &mut self,
        at: usize,
        op: &mut Op,
        ask: impl FnOnce(&mut World, &mut Op) -> Flow<Answer>,
    ) -> Flow<Answer> {
        let answered = op.fuse.as_ref().and_then(|fuse| fuse.answer.clone());
        match answered {
            Some((when, answer)) if when <= self.now => Flow::Ready(answer),
            Some(_) => Flow::Wait,
            None => {
                if !self.answers(at) {
                    return Flow::Wait;
                }
                if let Some(request) = op.waits {
                    if self.clients[at].outstanding.contains_key(&request) {
                        return Flow::Wait;
                    }
                    op.waits = None;
                }
                let answer = ready!(ask(self, op));
                let when = self.now + self.rng.below(3) + self.starved(at, op, &answer);
                trace!(self, "c{at} op {} is answered {answer:?}", op.id);
                if let Some(fuse) = &mut op.fuse {
                    fuse.answer = Some((when, answer.clone()));
                }
                if when <= self.now { Flow::Ready(answer) } else { Flow::Wait }
            }
        }
    }

    /// How long the caller that has made a file, or has asked for a name without a lock, gets no processor: now and then others
    /// change the file, or the name, meanwhile.
    fn starved(&mut self, at: usize, op: &Op, answer: &Answer) -> u64 {
        let is_revalidated = op.fuse.as_ref().is_some_and(|fuse| fuse.dentry.is_some());
        let follows = self.clients[at].kernel.follows();
        match answer {
            Answer::Done(Some((ino, ..)), _) => {
                let is_starved = self.clients[at].kernel.is_arriving(*ino) && ino.0.is_multiple_of(4);
                if is_starved { 1000 + ino.0 % 256 } else { 0 }
            }
            Answer::Entry(_, _, true) if is_revalidated && self.rng.below(8) == 0 => {
                self.rng.below(if follows { 3000 } else { 400 })
            }
            Answer::Entry(_, _, true) | Answer::List(..) if follows && self.rng.below(16) == 0 => {
                self.rng.below(200)
            }
            _ => 0,
        }
    }

    pub(super) fn wait_for(&mut self, at: usize, op: &mut Op, missing: Missing) -> Flow<Answer> {
        op.waits = Some(self.fetch(at, missing));
        Flow::Wait
    }

    /// Whether a name of a directory may be handed out for ever. `by_slot`: in a split one, until its slot is given back.
    pub(super) fn unlimited(&mut self, at: usize, dir: Ino, at_name: u8, by_slot: bool) -> bool {
        let broken = self.is_broken(Rule::UnlimitedWhileChanging);
        let now = self.now;
        let client = &mut self.clients[at];
        let is_still = !client.is_changing(dir)
            && match client.tree.is_split(dir) {
                true => by_slot,
                false => !client.is_hot(dir, now),
            };
        let unlimited = broken || is_still;
        if unlimited {
            client.unlimited.insert((dir, at_name));
        }
        unlimited
    }

    pub(super) fn remember(&mut self, at: usize, ino: Ino) {
        let client = &mut self.clients[at];
        client.tree.remember(ino);
        *client.kernel.known.entry(ino).or_default() += 1;
    }

    pub(super) fn answer_lookup(&mut self, at: usize, op: &mut Op, dir: Ino, at_name: u8) -> Flow<Answer> {
        let found = self.clients[at].tree.lookup(dir, &[at_name]);
        let dentry = match found {
            Ok(dentry) => dentry,
            Err(TreeError::Missing(missing)) => {
                if self.is_gone(at, op, dir) {
                    return Flow::Ready(Answer::Error(TreeError::Stale));
                }
                return self.wait_for(at, op, missing);
            }
            Err(error) => return Flow::Ready(Answer::Error(error)),
        };
        let Some(dentry) = dentry else {
            let expires = self.clients[at].kernel.expires_absent() || self.is_broken(Rule::KeepUnexpired);
            let unlimited = expires && self.unlimited(at, dir, at_name, true);
            return Flow::Ready(Answer::Entry(None, None, unlimited));
        };
        let row = match self.clients[at].tree.shown(dentry.ino) {
            Ok(row) => Attributes::of(row),
            Err(TreeError::Missing(missing)) => return self.wait_for(at, op, missing),
            Err(error) => return Flow::Ready(Answer::Error(error)),
        };
        if self.clients[at].kernel.is_arriving(dentry.ino) && !self.is_broken(Rule::BirthWithoutBarrier) {
            // A file is told under another name when the kernel has come to the answer that made it.
            return Flow::Wait;
        }
        self.remember(at, dentry.ino);
        op.pins.insert(dentry.ino);
        self.tell_directory(at, (dir, at_name), (dentry.ino, dentry.kind));
        let unlimited = self.unlimited(at, dir, at_name, true);
        Flow::Ready(Answer::Entry(Some((dentry.ino, dentry.kind)), Some(row), unlimited))
    }

    /// Whether the server that a client asks would say that there is no such inode. Before all have claimed, and have heard
    /// of that, it does not.
    fn is_absent(&self, at: usize, ino: Ino) -> bool {
        let session = self.clients[at].session;
        self.server_of(at).is_some_and(|server| {
            server.all_claimed()
                && !server.stored.rows.inodes.contains_key(&ino)
                && server.grants.unheard_about(session, &[ino]).is_empty()
        })
    }

    /// Whether an inode that the kernel knows is gone: then it had no name since the call.
    pub(super) fn is_gone(&mut self, at: usize, op: &Op, ino: Ino) -> bool {
        if !self.is_absent(at, ino) || self.clients[at].tree.has_inode(ino) {
            return false;
        }
        let call = op.fuse.as_ref().map_or(op.call, |fuse| fuse.call);
        // Made here and not shipped yet, it is in the tree.
        if !self.reference.could_be_unlinked(ino.0, call) {
            self.fail(format!("op {} of c{at}: {ino} has a name, and is gone", op.id));
        } else if self.clients[at].kernel.known.contains_key(&ino) {
            self.fail(format!("op {} of c{at}: {ino} is in use, and is gone", op.id));
        }
        true
    }

    pub(super) fn answer_inode(
        &mut self,
        at: usize,
        op: &mut Op,
        ino: Ino,
        of: impl Fn(&hayloft_model::InodeRow) -> Answer,
    ) -> Flow<Answer> {
        let answer = self.clients[at].tree.shown(ino).map(of);
        match answer {
            Ok(answer) => Flow::Ready(answer),
            Err(_) if self.is_gone(at, op, ino) => Flow::Ready(Answer::Error(TreeError::Stale)),
            Err(TreeError::Missing(missing)) => self.wait_for(at, op, missing),
            Err(error) => Flow::Ready(Answer::Error(error)),
        }
    }

    pub(super) fn answer_list(&mut self, at: usize, op: &mut Op, dir: Ino, from: u64) -> Flow<Answer> {
        let hot = self.clients[at].hot.contains(&dir);
        let entries = self.clients[at].tree.entries(dir, from).map(|entries| {
            let part = entries.take(LISTED_AT_ONCE);
            part.map(|(name, dentry)| ((name.as_bytes()[0], dentry.ino), dentry.cookie)).collect::<Vec<_>>()
        });
        match entries {
            Ok(part) => {
                let end = part.last().map_or(from, |(_, cookie)| *cookie);
                let list: Vec<(u8, Ino)> = part.into_iter().map(|(entry, _)| entry).collect();
                let told = self.tell_listed(at, op, dir, &list);
                Flow::Ready(Answer::List(list, end, !hot, told))
            }
            Err(TreeError::Missing(_)) if self.is_gone(at, op, dir) => {
                Flow::Ready(Answer::Error(TreeError::Stale))
            }
            Err(TreeError::Missing(missing)) => self.wait_for(at, op, missing),
            Err(error) => Flow::Ready(Answer::Error(error)),
        }
    }

    /// What a kernel that follows names is told of those that it lists.
    fn tell_listed(&mut self, at: usize, op: &mut Op, dir: Ino, list: &[(u8, Ino)]) -> Vec<Told> {
        let mut told = Vec::new();
        let follows = self.clients[at].kernel.follows();
        for (name, ino) in list.iter().filter(|_| follows) {
            let client = &self.clients[at];
            let Ok(row) = client.tree.shown(*ino) else { continue };
            if client.kernel.is_arriving(*ino) {
                continue;
            }
            let (to, attributes) = ((*ino, row.kind()), Attributes::of(row));
            self.remember(at, *ino);
            op.pins.insert(*ino);
            self.tell_directory(at, (dir, *name), to);
            let is_waited_for = self.clients[at].kernel.locks_for_any() || self.is_broken(Rule::KeepListed);
            let unlimited = is_waited_for && self.unlimited(at, dir, *name, false);
            told.push(Told { name: *name, to, attributes, unlimited });
        }
        told
    }

    /// The kernel is told of a directory under a name, and moves what it has of it there.
    fn tell_directory(&mut self, at: usize, place: (Ino, u8), (ino, kind): (Ino, FileKind)) {
        if kind == FileKind::Directory
            && self.clients[at].kernel.follows()
            && !self.is_broken(Rule::StayNoted)
        {
            let client = &mut self.clients[at];
            let ops = client.processes.iter_mut().filter_map(|process| process.op.as_mut());
            if ops.fold(false, |late, op| op.is_told(ino, place) | late) {
                client.unlimited.insert(place);
            }
        }
    }

    pub(super) fn answer_write(&mut self, at: usize, op: &mut Op, ino: Ino, how: How) -> Flow<Answer> {
        let now = self.client_now(at);
        let before = self.clients[at].tree.inode(ino).map(data_of);
        let before = match before {
            Ok(data) => data,
            Err(_) if self.is_gone(at, op, ino) => return Flow::Ready(Answer::Error(TreeError::Stale)),
            Err(_) => return self.wait_for(at, op, Missing::Inode(ino)),
        };
        if self.clients[at].full && how != How::Truncate {
            return Flow::Ready(Answer::Error(TreeError::NoSpace));
        }
        let known_end = *op.end.get_or_insert(before.len());
        let data = match how {
            How::Append if self.is_broken(Rule::AppendAtKnownEnd) => How::write_at(known_end, before, op.id),
            how => how.write(before, op.id),
        };
        let size = data.len() as u64;
        let tree = &mut self.clients[at].tree;
        let done = match how {
            How::Truncate => {
                let change = AttributeChange { size: Some((0, 0)), ..AttributeChange::default() };
                tree.set_attributes(ino, change, now)
            }
            _ => tree.check_owned(ino).and_then(|()| tree.wrote(ino, size, size, false, now)),
        };
        match done {
            Ok(()) => {
                tree.set_content(ino, Content::Inline(data.clone().into()));
                let row = |ino: u64| self.clients[at].tree.inode(Ino(ino)).ok().map(Attributes::of);
                let verdict = self.reference.write(op.id, ino.0, how, &data, row, self.now);
                self.judge(&format!("c{at} op {}", op.id), verdict);
                Flow::Ready(Answer::Done(None, false))
            }
            Err(TreeError::Missing(missing)) => self.wait_for(at, op, missing),
            Err(error) => Flow::Ready(Answer::Error(error)),
        }
    }

    /// A change of names or attributes: here, or at the server.
    pub(super) fn answer_change(&mut self, at: usize, op: &mut Op, change: &Change) -> Flow<Answer> {
        if let Some(made) = op.executed {
            return self.answer_executed(at, op, change, made);
        }
        if let Some(request) = op.requested {
            let Some((result, doing)) = self.clients[at].answers.remove(&request) else { return Flow::Wait };
            op.requested = None;
            match result {
                Err(error) => return Flow::Ready(Answer::Error(error)),
                Ok(_) if doing == Doing::Yours => op.was_yours = true,
                Ok(_) if doing == Doing::BySlots => {}
                Ok(made) => {
                    op.executed = Some(made);
                    return self.answer_executed(at, op, change, made);
                }
            }
        }
        if let Some((until, execute)) = op.ship {
            if self.clients[at].accepted < until && !self.is_broken(Rule::ChangeBeforeShip) {
                return Flow::Wait;
            }
            op.ship = None;
            self.clients[at].renames(change);
            self.give_up_files(at, change);
            let request = self.ask(at, Ask::Change { change: change.clone(), execute });
            let session = self.clients[at].session;
            self.reference.requests.insert((session, request), op.id);
            (op.requested, op.waits) = (Some(request), Some(request));
            return Flow::Wait;
        }
        if self.clients[at].full && matches!(change, Change::Create(..)) {
            return Flow::Ready(Answer::Error(TreeError::NoSpace));
        }
        let now = self.client_now(at);
        let done = change.apply(&mut self.clients[at].tree, now);
        match done {
            Ok(made) => {
                let row = |ino: u64| self.clients[at].tree.inode(Ino(ino)).ok().map(Attributes::of);
                let verdict = self.reference.change(op.id, change, made.map(|ino| ino.0), row, self.now);
                self.judge(&format!("c{at} op {}", op.id), verdict);
                self.clients[at].renames(change);
                self.answer_made(at, op, change, made)
            }
            Err(TreeError::Missing(missing)) => self.need(at, op, change, missing),
            Err(error) => Flow::Ready(Answer::Error(error)),
        }
    }

    pub(super) fn need(&mut self, at: usize, op: &mut Op, change: &Change, missing: Missing) -> Flow<Answer> {
        match missing {
            Missing::Inode(ino) | Missing::Directory(ino) if self.is_gone(at, op, ino) => {
                Flow::Ready(Answer::Error(TreeError::Stale))
            }
            Missing::Own(Object::Directory(slot))
                if slot.of_slot().is_some() && op.slots < hayloft_model::slot::ASKS_MAX =>
            {
                op.slots += 1;
                self.wait_for(at, op, missing)
            }
            Missing::Own(Object::Directory(slot)) if slot.of_slot().is_some() => {
                self.request_change(at, op, change, true)
            }
            Missing::Own(Object::Directory(dir)) if !op.acquired.insert(dir) => {
                self.request_change(at, op, change, false)
            }
            Missing::Executor => self.request_change(at, op, change, true),
            missing => self.wait_for(at, op, missing),
        }
    }

    pub(super) fn request_change(
        &mut self,
        at: usize,
        op: &mut Op,
        change: &Change,
        execute: bool,
    ) -> Flow<Answer> {
        // What is its own may not be enough: the row of a directory that is moved or removed is another's. Told so again
        // and again, it would never end.
        let execute = execute || op.was_yours && !self.is_broken(Rule::YoursForEver);
        let client = &mut self.clients[at];
        client.hot.extend(change.directories());
        let until = self.press(at);
        op.ship = Some((until, execute));
        self.answer_change(at, op, change)
    }

    /// A change that the server has executed; the kernel is told what was made.
    pub(super) fn answer_executed(
        &mut self,
        at: usize,
        op: &mut Op,
        change: &Change,
        made: Option<Ino>,
    ) -> Flow<Answer> {
        if let Some(ino) = made
            && !self.clients[at].tree.has_inode(ino)
        {
            if self.is_absent(at, ino) {
                // Somebody has removed it already, before the kernel knew of it.
                return Flow::Ready(Answer::Done(None, false));
            }
            return self.wait_for(at, op, Missing::Inode(ino));
        }
        self.answer_made(at, op, change, made)
    }

    pub(super) fn answer_made(
        &mut self,
        at: usize,
        op: &mut Op,
        change: &Change,
        made: Option<Ino>,
    ) -> Flow<Answer> {
        if let Change::SetAttributes(ino, _) = change {
            let row = self.clients[at].tree.inode(*ino).ok();
            let set = row.map(|row| (*ino, row.kind(), Attributes::of(row)));
            return Flow::Ready(Answer::Done(set, false));
        }
        let linked = if let Change::Link(ino, ..) = change { Some(*ino) } else { None };
        let entry = made.or(linked);
        let row = entry.and_then(|ino| self.clients[at].tree.inode(ino).ok().map(|row| (ino, row)));
        let Some((ino, row)) = row else { return Flow::Ready(Answer::Done(None, false)) };
        let (kind, attributes) = (row.kind(), Attributes::of(row));
        self.remember(at, ino);
        let is_split = change.directories().first().is_some_and(|dir| self.clients[at].tree.is_split(*dir));
        let is_birth = op.executed.is_none() && matches!(change, Change::Create(..)) && !is_split;
        if is_birth && kind == FileKind::Regular {
            self.clients[at].kernel.begin_birth(ino);
        }
        op.pins.insert(ino);
        let (dir, at_name) = (change.directories()[0], change.places()[0].1.as_bytes()[0]);
        // What the server has executed may be over already.
        let unlimited = op.executed.is_none() && self.unlimited(at, dir, at_name, false);
        Flow::Ready(Answer::Done(Some((ino, kind, attributes)), unlimited))
    }

    /// Whether an error may be right: something that it says was so between the call and now.
    pub(super) fn explains(&self, act: &Act, error: TreeError, call: u64) -> bool {
        if error == TreeError::NoSpace {
            let adds = matches!(act, Act::Write(..) | Act::Change(Change::Create(..)));
            return adds && self.could_be_full(call);
        }
        let reference = &self.reference;
        let change = match act {
            Act::Change(change) => change,
            Act::Write(ino, _) | Act::Attributes(ino) | Act::Read(ino) | Act::List(ino, _) => {
                return error == TreeError::Stale && reference.could_be_unlinked(ino.0, call);
            }
        };
        let places: Vec<(u64, u8)> =
            change.places().iter().map(|(dir, name)| (dir.0, name.as_bytes()[0])).collect();
        let could_be = |at: usize| {
            places.get(at).map(|(dir, name)| reference.could_be(*dir, *name, call)).unwrap_or_default()
        };
        let dead = change
            .directories()
            .into_iter()
            .chain(change.inode())
            .any(|ino| reference.could_be_unlinked(ino.0, call));
        let last = places.len().saturating_sub(1);
        let is_dir = |ino: &u64| reference.kind(*ino) == Some(FileKind::Directory);
        match error {
            TreeError::Exists => could_be(last).iter().any(Option::is_some),
            TreeError::NotFound => dead || (0..=last).any(|at| could_be(at).contains(&None)),
            TreeError::Stale => dead,
            TreeError::NotEmpty => {
                could_be(last).iter().flatten().any(|ino| reference.could_have_names(*ino, call))
            }
            TreeError::IsDirectory => could_be(last).iter().flatten().any(is_dir),
            TreeError::NotDirectory => could_be(last).iter().flatten().any(|ino| !is_dir(ino)),
            // What moves (an exchange moves both) is above where it goes to.
            TreeError::Invalid => [(0, last), (last, 0)].into_iter().any(|(from, to)| {
                let moved = could_be(from).into_iter().flatten();
                moved.filter(is_dir).any(|top| reference.could_be_below(places[to].0, top, call))
            }),
            TreeError::NotPermitted => could_be(last).iter().flatten().any(is_dir),
            _ => false,
        }
    }

    /// Who is told that a name exists, or does not, has seen that, if it can only be one.
    pub(super) fn learn_from(&mut self, at: usize, act: &Act, error: TreeError, call: u64) {
        let Act::Change(change) = act else { return };
        let places = change.places();
        let places: Vec<(u64, u8)> = match error {
            TreeError::Exists => places.last().copied().into_iter(),
            TreeError::NotFound => places.first().filter(|_| places.len() == 1).copied().into_iter(),
            _ => return,
        }
        .map(|(dir, name)| (dir.0, name.as_bytes()[0]))
        .collect();
        let (session, now) = (self.clients[at].session, self.now);
        for (dir, name) in places {
            let mut told = self.reference.could_be(dir, name, call);
            told.retain(|to| to.is_some() == (error == TreeError::Exists));
            if let [to] = told[..] {
                let value = Value::Name(to);
                self.reference.heard_of(session, Register::Name(dir, name), &value, (call, now));
            }
        }
    }
}
