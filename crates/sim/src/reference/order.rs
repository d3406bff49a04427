//! What the server has accepted, what of it is durable, and what it has lost.

use super::*;

impl Reference {
    /// A session has cut its log. It may have been ended, and not know.
    pub(crate) fn cut(&mut self, session: SessionId, batch: u64) {
        for operation in self.not_accepted(session) {
            if operation.batch.is_none() {
                operation.batch = (!operation.writes.is_empty()).then_some(batch);
            }
        }
    }

    pub(crate) fn undo_cut(&mut self, session: SessionId, batch: u64) {
        for operation in self.not_accepted(session) {
            operation.batch.take_if(|of| *of == batch);
        }
    }

    fn not_accepted(&mut self, session: SessionId) -> impl Iterator<Item = &mut Operation> {
        let lost = self.lost.get_mut(&session.0).into_iter().flat_map(|lost| lost.operations.values_mut());
        let all = self.operations.values_mut().chain(lost);
        all.filter(move |operation| operation.session == session.0 && operation.accepted.is_none())
    }

    /// A batch has come that had come before, and may be lost.
    pub(crate) fn comes_again(&mut self, session: SessionId, batch: u64) -> Verdict {
        let done = self.operations.iter().filter(|(_, operation)| {
            operation.with == Some((session, batch)) && !operation.durable && !operation.writes.is_empty()
        });
        let done = done.map(|(op, _)| *op).collect();
        self.undo(done).map(drop)
    }

    /// The server has a batch, in this place.
    pub(crate) fn committed(
        &mut self,
        session: SessionId,
        batch: u64,
        (place, early): ((u64, u64), bool),
        now: u64,
    ) {
        for operation in self.operations.values_mut() {
            if operation.session == session.0 && operation.batch == Some(batch) && !operation.durable {
                operation.accepted = Some(Accepted::new(place, early, now));
            }
        }
    }

    /// The server has executed a request, in this place: it has to have what returned before it was made.
    pub(crate) fn executed(&mut self, op: u64, (place, early): ((u64, u64), bool), now: u64) -> Verdict {
        let Some(operation) = self.operations.get_mut(&op) else { return Ok(()) };
        operation.accepted = Some(Accepted::new(place, early, now));
        let (session, call) = (operation.session, operation.call);
        self.returned_before(SessionId(session), call, |operation| operation.accepted.is_some())
    }

    /// Whether an operation has changed something.
    pub(crate) fn has_happened(&self, op: u64) -> bool {
        self.operations.get(&op).is_some_and(|operation| !operation.writes.is_empty())
    }

    /// Everything that a session has finished before `call` is durable.
    pub(crate) fn synced(&self, session: SessionId, call: u64) -> Verdict {
        self.returned_before(session, call, |operation| operation.durable)
    }

    fn returned_before(&self, session: SessionId, call: u64, is: impl Fn(&Operation) -> bool) -> Verdict {
        let lost = self.operations.iter().find(|(_, operation)| {
            operation.session == session.0
                && operation.returned.is_some_and(|returned| returned < call)
                && !is(operation)
                && !operation.writes.is_empty()
        });
        match lost {
            Some((op, _)) => {
                Err(format!("op {op} is not there, but what came after it is, or was said to be"))
            }
            None => Ok(()),
        }
    }

    /// All that has a place in an opening up to this mark is durable.
    pub(crate) fn durable(&mut self, (opening, mark): (u64, u64)) {
        for operation in self.operations.values_mut() {
            let place = operation.accepted.map(|accepted| accepted.place);
            operation.durable |= place.is_some_and(|place| place.0 == opening && place.1 <= mark);
        }
    }

    /// An entry was written once more, in this place.
    pub(crate) fn brought(&mut self, entry: (u64, u64), place: (u64, u64)) {
        for operation in self.operations.values_mut().filter(|operation| !operation.durable) {
            // A server that was replaced has none.
            let is_it = |accepted: &&mut Accepted| accepted.entry == entry && accepted.place.0 <= place.0;
            if let Some(accepted) = operation.accepted.as_mut().filter(is_it) {
                accepted.place = place;
            }
        }
    }

    /// The server has lost what was in this place, and cannot write it once more: it has not told anybody.
    pub(crate) fn lost_place(&mut self, place: (u64, u64)) -> Verdict {
        let mut undone = Vec::new();
        for (op, operation) in self.operations.iter_mut().filter(|(_, operation)| !operation.durable) {
            let Some(accepted) = operation.accepted.as_mut().filter(|accepted| accepted.place == place)
            else {
                continue;
            };
            match accepted.entry != place {
                // Brought, by somebody who brings it once more.
                true => accepted.place = accepted.entry,
                false if operation.batch.is_some() => operation.accepted = None,
                false => undone.push(*op),
            }
        }
        self.undo(undone).map(drop)
    }

    /// All who may bring something back have done so. `alive` are the sessions that go on, with the last batch of each
    /// that is there. What was not brought has not happened, nobody who goes on may know of it, and what was answered of it was
    /// answered within a window. Gives how many operations that are.
    pub(crate) fn settle(
        &mut self,
        opening: u64,
        alive: &BTreeMap<SessionId, u64>,
        goes_on: &BTreeSet<SessionId>,
        window: u64,
    ) -> Result<u64, String> {
        let mut lost = Vec::new();
        for (op, operation) in self.operations.iter_mut().filter(|(_, operation)| !operation.durable) {
            let is_elsewhere = operation.accepted.is_some_and(|accepted| accepted.place.0 != opening);
            if !is_elsewhere || operation.writes.is_empty() {
                continue;
            }
            let last = alive.get(&SessionId(operation.session));
            match (operation.batch, last) {
                // It comes again.
                (Some(batch), Some(last)) if batch > *last => operation.accepted = None,
                _ => lost.push(*op),
            }
        }
        let mut answered: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
        for op in &lost {
            let operation = &self.operations[op];
            let Some(accepted) = operation.accepted.filter(|_| operation.returned.is_some()) else {
                continue;
            };
            if goes_on.contains(&SessionId(operation.session)) && operation.session != 0 {
                return Err(format!("op {op} is lost, which was answered, and its host goes on"));
            }
            if accepted.early {
                answered.entry(accepted.place.0).or_default().push(accepted.at);
            }
        }
        for (opening, at) in answered {
            let (first, last) =
                (at.iter().min().copied().unwrap_or(0), at.iter().max().copied().unwrap_or(0));
            if last - first > window {
                return Err(format!("what opening {opening} has answered from {first} to {last} is lost"));
            }
        }
        let left = self.undo(lost)?;
        for (register, (keep, versions)) in &left.versions {
            for session in goes_on {
                if self.views.has_seen(*session, *register, *keep) {
                    return Err(format!("{session} has seen {register:?} as {versions:?}, which is lost"));
                }
            }
        }
        self.is_tree()?;
        let ended: BTreeSet<u64> = left.operations.values().map(|operation| operation.session).collect();
        for session in ended.into_iter().filter(|session| !alive.contains_key(&SessionId(*session))) {
            self.lost_there.insert(session, left.of_batches(session));
        }
        Ok(left.operations.len() as u64)
    }

    /// Every directory is below the root.
    pub(super) fn is_tree(&self) -> Verdict {
        let lost = self.names.values().find(|dir| self.is_dir(**dir) && !self.is_below(**dir, ROOT));
        lost.map_or(Ok(()), |dir| Err(format!("directory {dir} is not below the root any more")))
    }

    /// These have not happened. Who has asked for one may ask again.
    fn undo(&mut self, lost: Vec<u64>) -> Result<Lost, String> {
        let left = self.lose(lost)?;
        for (op, operation) in &left.operations {
            let Operation { session, call, .. } = *operation;
            self.operations.insert(*op, Operation { session, call, ..Operation::default() });
        }
        Ok(left)
    }
}
