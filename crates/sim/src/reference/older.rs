//! A store that was put back to an older state: what was durable by then, and what clients had changed which go on, has
//! happened; all else has not.

use super::*;

/// What of all this the store had when it was copied.
pub(crate) struct Kept {
    durable: BTreeSet<u64>,
}

impl Reference {
    pub(crate) fn keep(&self) -> Kept {
        let durable = self.operations.iter().filter(|(_, operation)| operation.durable).map(|(op, _)| *op);
        Kept { durable: durable.collect() }
    }

    /// Names that a session has changed, and not shipped, or not heard that batches from this one on have arrived.
    pub(crate) fn unsent_names(&self, session: SessionId, from: Option<u64>) -> Vec<(u64, u8)> {
        let is_unsent = |version: &&Version| {
            let operation = self.operations.get(&version.op);
            operation.filter(|operation| operation.session == session.0).is_some_and(|operation| {
                let is_unheard = from.is_some_and(|from| operation.batch.is_some_and(|batch| batch >= from));
                operation.accepted.is_none() || is_unheard
            })
        };
        let names = self.history.iter().filter_map(|(register, all)| match register {
            Register::Name(dir, name) => Some(((*dir, *name), all)),
            _ => None,
        });
        let changed = names.filter(|(_, all)| {
            let now = all.last().filter(is_unsent).map(|version| &version.value);
            let before = all.iter().rev().find(|version| !is_unsent(version)).map(|version| &version.value);
            now.is_some_and(|now| *now != *before.unwrap_or(&Value::Name(None)))
        });
        changed.map(|(place, _)| place).collect()
    }

    /// The store is as it was; these sessions have seen no more of it. What they keep of what the server had accepted, these
    /// entries, they bring.
    pub(crate) fn put_back(
        &mut self,
        kept: &Kept,
        (on, entries): (&BTreeSet<SessionId>, &BTreeSet<(u64, u64)>),
        now: u64,
    ) -> Verdict {
        for (op, operation) in &mut self.operations {
            operation.durable &= kept.durable.contains(op);
            if let Some(accepted) = operation.accepted.as_mut().filter(|_| !operation.durable) {
                accepted.place = accepted.entry;
            }
        }
        let lost = self.operations.iter().filter(|(_, operation)| {
            let is_kept = operation.accepted.is_some_and(|accepted| entries.contains(&accepted.entry));
            // What it had asked for, and has not heard of, it asks for again: that has not happened.
            let is_own =
                operation.accepted.is_none() || operation.batch.is_some() || operation.returned.is_some();
            let is_here =
                operation.durable || is_kept || (is_own && on.contains(&SessionId(operation.session)));
            !is_here && !operation.writes.is_empty()
        });
        let lost = self.lose(lost.map(|(op, _)| *op).collect())?;
        for (op, Operation { session, call, .. }) in lost.operations {
            self.operations.insert(op, Operation { session, call, ..Operation::default() });
        }
        // They had been ended since then, and do not know.
        on.iter().try_for_each(|session| self.revive(*session, now))
    }

    fn revive(&mut self, session: SessionId, now: u64) -> Verdict {
        for lost in [self.lost_there.remove(&session.0), self.lost.remove(&session.0)].into_iter().flatten() {
            let mut operations = lost.operations.clone();
            self.happened(session, lost, (0, 0), now)?;
            for accepted in operations.values_mut().filter_map(|operation| operation.accepted.as_mut()) {
                accepted.place = accepted.entry;
            }
            self.operations.extend(operations);
        }
        Ok(())
    }
}
