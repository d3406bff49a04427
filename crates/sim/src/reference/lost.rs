//! What has not happened: changes of sessions that were ended.

use super::*;

/// What a session had changed that was ended, and how many versions there were of each register without that.
#[derive(Clone, Default)]
pub(super) struct Lost {
    pub(super) operations: BTreeMap<u64, Operation>,
    pub(super) versions: BTreeMap<Register, (usize, Vec<Version>)>,
    kinds: BTreeMap<u64, FileKind>,
}

impl Lost {
    /// What of it a session had done in its batches, without what others did behind it.
    pub(super) fn of_batches(&self, session: u64) -> Lost {
        let of = |operation: &&Operation| operation.session == session && operation.batch.is_some();
        let operations = self.operations.iter().filter(|(_, operation)| of(operation));
        let operations: BTreeMap<u64, Operation> = operations.map(|(op, it)| (*op, it.clone())).collect();
        let versions = self.versions.iter().filter_map(|(register, (before, versions))| {
            let own = versions.iter().take_while(|version| operations.contains_key(&version.op));
            let own: Vec<Version> = own.cloned().collect();
            (!own.is_empty()).then_some((*register, (*before, own)))
        });
        Lost { versions: versions.collect(), operations, kinds: self.kinds.clone() }
    }
}

impl Reference {
    /// A session is over: what the server does not have of it has not happened, and nobody may have built on it.
    pub(crate) fn ended(&mut self, session: SessionId) -> Verdict {
        let lost: Vec<u64> = self
            .operations
            .iter()
            .filter(|(_, operation)| {
                operation.session == session.0 && operation.accepted.is_none() && !operation.writes.is_empty()
            })
            .map(|(op, _)| *op)
            .collect();
        let left = self.lose(lost)?;
        self.lost.insert(session.0, left);
        Ok(())
    }

    /// These have not happened, and nobody may have built on them.
    pub(super) fn lose(&mut self, lost: Vec<u64>) -> Result<Lost, String> {
        let mut left = Lost::default();
        let mut registers = BTreeSet::new();
        for op in &lost {
            registers.extend(self.operations[op].writes.iter().copied());
        }
        for register in registers {
            let Some(all) = self.history.get_mut(&register) else { continue };
            let keep = all.iter().position(|version| lost.contains(&version.op)).unwrap_or(all.len());
            if let Some(built) = all[keep..].iter().find(|version| !lost.contains(&version.op)) {
                let before = all[keep].op;
                return Err(format!(
                    "{register:?} was changed by op {} after op {before}, which was lost",
                    built.op
                ));
            }
            let versions = all.split_off(keep);
            self.views.lose(register, keep);
            left.versions.insert(register, (keep, versions));
            match (register, self.value(register)) {
                (Register::Name(dir, name), Value::Name(Some(ino))) => {
                    self.names.insert((dir, name), ino);
                }
                (Register::Name(dir, name), _) => drop(self.names.remove(&(dir, name))),
                (Register::Attributes(ino), Value::Nothing) => {
                    left.kinds.extend(self.kinds.remove(&ino).map(|kind| (ino, kind)));
                }
                _ => {}
            }
        }
        for op in lost {
            left.operations.extend(self.operations.remove(&op).map(|operation| (op, operation)));
        }
        Ok(left)
    }

    /// What a session had changed that was ended has happened now: nobody may have changed anything of it since.
    pub(crate) fn restored(&mut self, session: SessionId, place: (u64, u64), now: u64) -> Verdict {
        let Some(lost) = self.lost.remove(&session.0) else { return Ok(()) };
        self.happened(session, lost, place, now)
    }

    pub(super) fn happened(
        &mut self,
        session: SessionId,
        lost: Lost,
        place: (u64, u64),
        now: u64,
    ) -> Verdict {
        self.kinds.extend(lost.kinds);
        for (register, (before, versions)) in lost.versions {
            let all = self.history.entry(register).or_default();
            if all.len() != before {
                return Err(format!("{register:?} was changed by others, and is as {session} had it"));
            }
            if let (Register::Name(dir, name), Some(Version { value: Value::Name(to), .. })) =
                (register, versions.last())
            {
                match to {
                    Some(ino) => self.names.insert((dir, name), *ino),
                    None => self.names.remove(&(dir, name)),
                };
            }
            all.extend(versions.into_iter().map(|version| Version { from: now, ..version }));
        }
        for (op, operation) in lost.operations {
            let accepted = Some(Accepted::new(place, false, now));
            self.operations
                .insert(op, Operation { accepted, durable: true, returned: Some(now), ..operation });
        }
        Ok(())
    }
}
