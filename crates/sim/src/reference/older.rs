//! A store that was put back to an older state: what was durable by then, and what clients had changed which go on, has
//! happened; all else has not.

use super::*;

/// What of all this the store had when it was copied.
pub(crate) struct Kept {
    durable: BTreeSet<u64>,
    /// How many versions there were that the store has made by itself.
    own: BTreeMap<Register, usize>,
}

impl Reference {
    pub(crate) fn keep(&self) -> Kept {
        let durable = self.operations.iter().filter(|(_, operation)| operation.durable).map(|(op, _)| *op);
        let count = |all: &Vec<Version>| all.iter().filter(|version| version.op == 0).count();
        let own = self.history.iter().map(|(register, all)| (*register, count(all)));
        Kept { durable: durable.collect(), own: own.collect() }
    }

    /// Names that a session has changed, and not made durable.
    pub(crate) fn unsent_names(&self, session: SessionId) -> Vec<(u64, u8)> {
        let is_unsent = |version: &&Version| {
            let operation = self.operations.get(&version.op);
            operation.is_some_and(|operation| operation.session == session.0 && !operation.durable)
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

    /// The store is as it was; these sessions have seen no more of it.
    pub(crate) fn put_back(&mut self, kept: &Kept, on: &BTreeSet<SessionId>, now: u64) -> Verdict {
        for (register, all) in &mut self.history {
            let mut left = kept.own.get(register).copied().unwrap_or(0);
            all.retain(|version| {
                let is_kept = version.op != 0 || left > 0;
                left -= usize::from(version.op == 0 && is_kept);
                is_kept
            });
        }
        let goes_on = |operation: &Operation| on.contains(&SessionId(operation.session));
        // What such a session has asked for will be asked for again.
        let executed = |operation: &Operation| operation.durable && operation.batch.is_none();
        let lost = self.operations.iter().filter(|(op, operation)| {
            let is_here = kept.durable.contains(op) || goes_on(operation) && !executed(operation);
            !is_here && !operation.writes.is_empty()
        });
        let lost = self.lose(lost.map(|(op, _)| *op).collect())?;
        for (op, Operation { session, call, .. }) in lost.operations {
            self.operations.insert(op, Operation { session, call, ..Operation::default() });
        }
        for (op, operation) in &mut self.operations {
            operation.durable &= kept.durable.contains(op);
        }
        // They had been ended since then, and do not know.
        on.iter().try_for_each(|session| self.revive(*session, now))
    }

    fn revive(&mut self, session: SessionId, now: u64) -> Verdict {
        let operations = self.lost.get(&session.0).map(|lost| lost.operations.clone()).unwrap_or_default();
        self.restored(session, now)?;
        self.operations.extend(operations);
        Ok(())
    }
}
