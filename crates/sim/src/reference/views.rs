//! What hosts have seen. Where another host changes something, the view of one never goes back, neither of one thing nor from
//! one to another that the same operation has changed. Nor does that of all of them together, of names: what one has seen another
//! one sees that looks later.
//!
//! Where a value was there several times the oldest is meant that fits.

use super::*;

/// For each thing, which version of it was seen when, or a later one. 0 is what was there in the beginning.
type Seen = BTreeMap<Register, Vec<(u64, usize)>>;

#[derive(Clone, Default)]
pub(super) struct Views {
    sessions: BTreeMap<u64, Seen>,
    /// Names, by any host.
    all: Seen,
}

impl Views {
    /// Whether a session has seen more of something than so many versions.
    pub(super) fn has_seen(&self, session: SessionId, register: Register, versions: usize) -> bool {
        let seen = self.sessions.get(&session.0).and_then(|seen| seen.get(&register));
        seen.and_then(|seen| seen.last()).is_some_and(|(_, version)| *version > versions)
    }

    /// For each session, how many versions it has seen of what.
    pub(super) fn seen(&self) -> impl Iterator<Item = (SessionId, Register, usize)> + '_ {
        let all =
            self.sessions.iter().flat_map(|(session, seen)| seen.iter().map(move |seen| (*session, seen)));
        all.filter_map(|(session, (register, seen))| Some((SessionId(session), *register, seen.last()?.1)))
    }

    /// There are no more than so many versions of something: whoever has seen more is gone with them.
    pub(super) fn lose(&mut self, register: Register, versions: usize) {
        if let Some(seen) = self.all.get_mut(&register) {
            seen.retain(|(_, version)| *version <= versions);
        }
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
        let of_session = self.views.sessions.get(&session.0).and_then(|seen| seen.get(&register));
        let of_all = self.views.all.get(&register);
        let before = |seen: &Vec<(u64, usize)>| {
            seen.iter().rev().find(|(when, _)| *when < since).map(|(_, version)| *version)
        };
        let least = of_session.and_then(before).max(of_all.and_then(before)).unwrap_or(0);
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
        let is_name = matches!(register, Register::Name(..));
        let (mut later, mut by_all): (BTreeMap<Register, usize>, BTreeMap<Register, usize>) =
            Default::default();
        for (at, seen) in self.history.get(&register).into_iter().flatten().take(version).enumerate() {
            let Some(operation) = self.operations.get(&seen.op) else { continue };
            let is_own = operation.session == session.0;
            if is_own && operation.returned.is_none() {
                // Nobody is shown it on a real host: who looks, or lists, waits for the lock that it has.
                continue;
            }
            let writes = operation.writes.iter().filter_map(|other| {
                let all = self.history.get(other).into_iter().flatten();
                let last = all.enumerate().filter(|(_, version)| version.op == seen.op).last();
                last.map(|(at, _)| (*other, at + 1))
            });
            for (register, version) in writes.chain([(register, at + 1)]) {
                // Times, and what a directory counts, may be seen before the names.
                let tables = [(!is_own).then_some(&mut later), is_name.then_some(&mut by_all)];
                for table in tables.into_iter().flatten() {
                    let known = table.entry(register).or_default();
                    *known = (*known).max(version);
                }
            }
        }
        by_all.retain(|register, _| matches!(register, Register::Name(..)));
        let of_session = self.views.sessions.entry(session.0).or_default();
        for (views, later) in [(of_session, later), (&mut self.views.all, by_all)] {
            for (register, version) in later {
                let seen = views.entry(register).or_default();
                if seen.last().is_none_or(|(_, known)| *known < version) {
                    seen.push((now, version));
                }
            }
        }
    }
}
