//! What each host has seen: where another host changes something, its view never goes back, neither of one thing nor from
//! one to another that the same operation has changed.
//!
//! Where a value was there several times the oldest is meant that fits.

use super::*;

/// For each thing, which version of it was seen when, or a later one. 0 is what was there in the beginning.
type Seen = BTreeMap<Register, Vec<(u64, usize)>>;

#[derive(Default)]
pub(super) struct Views(BTreeMap<u64, Seen>);

impl Views {
    /// Whether a session has seen more of something than so many versions.
    pub(super) fn has_seen(&self, session: SessionId, register: Register, versions: usize) -> bool {
        let seen = self.0.get(&session.0).and_then(|seen| seen.get(&register));
        seen.and_then(|seen| seen.last()).is_some_and(|(_, version)| *version > versions)
    }
}

impl Reference {
    /// A host observes something, since `call`: it has seen no later state before `since`.
    pub(crate) fn seen(
        &mut self,
        session: SessionId,
        register: Register,
        value: &Value,
        (call, since): (u64, u64),
        now: u64,
    ) -> Verdict {
        let value = &self.plain(register, value);
        let before = self.views.0.get(&session.0).and_then(|seen| seen.get(&register));
        let before = before.and_then(|seen| seen.iter().rev().find(|(when, _)| *when < since));
        let least = before.map_or(0, |(_, version)| *version);
        let visible: Vec<Value> = self.visible(register, call).collect();
        let last = self.history.get(&register).map_or(0, Vec::len);
        let fits = (least..=last).find(|version| visible.get(last - version) == Some(value));
        let Some(version) = fits else {
            let all = self.history.get(&register).map_or(&[][..], Vec::as_slice);
            let known = least.checked_sub(1).and_then(|at| all.get(at));
            return Err(format!("{register:?} was seen as {value:?} since {call}, and before as {known:?}"));
        };
        self.note_seen(session, register, version, now);
        Ok(())
    }

    /// A host is told that something is so, in other words.
    pub(crate) fn heard_of(
        &mut self,
        session: SessionId,
        register: Register,
        value: &Value,
        (call, now): (u64, u64),
    ) {
        let value = &self.plain(register, value);
        let visible: Vec<Value> = self.visible(register, call).collect();
        let last = self.history.get(&register).map_or(0, Vec::len);
        if let Some(version) = (0..=last).find(|version| visible.get(last - version) == Some(value)) {
            self.note_seen(session, register, version, now);
        }
    }

    /// With what it has seen it has seen all that was changed together with that, by others.
    fn note_seen(&mut self, session: SessionId, register: Register, version: usize, now: u64) {
        let mut later: BTreeMap<Register, usize> = BTreeMap::new();
        for (at, seen) in self.history.get(&register).into_iter().flatten().take(version).enumerate() {
            let Some(operation) = self.operations.get(&seen.op) else { continue };
            if operation.session == session.0 {
                continue;
            }
            later.insert(register, at + 1);
            for other in &operation.writes {
                let all = self.history.get(other).into_iter().flatten();
                let last = all.enumerate().filter(|(_, version)| version.op == seen.op).last();
                if let Some((at, _)) = last {
                    let known = later.entry(*other).or_default();
                    *known = (*known).max(at + 1);
                }
            }
        }
        let views = self.views.0.entry(session.0).or_default();
        for (register, version) in later {
            let seen = views.entry(register).or_default();
            if seen.last().is_none_or(|(_, known)| *known < version) {
                seen.push((now, version));
            }
        }
    }
}
