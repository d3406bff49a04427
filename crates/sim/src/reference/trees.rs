//! The tree of a snapshot: what the server has accepted by then, and nothing else.

use super::*;

impl Reference {
    /// The tree at a point of the order. Everything of these sessions that had returned before `begun` is in it, and with
    /// what any of them has seen of others all that this builds on.
    pub(crate) fn at_point(
        &self,
        begun: u64,
        here: &BTreeSet<SessionId>,
        now: u64,
    ) -> Result<Reference, String> {
        let is_here = |session: u64| here.contains(&SessionId(session));
        let is_late = |operation: &Operation| operation.accepted.is_none() && !operation.writes.is_empty();
        let late = self.operations.iter().filter(|(op, operation)| **op != 0 && is_late(operation));
        let late: BTreeMap<u64, &Operation> = late.map(|(op, operation)| (*op, operation)).collect();
        let returned = late.iter().find(|(_, operation)| {
            is_here(operation.session) && operation.returned.is_some_and(|returned| returned < begun)
        });
        if let Some((op, _)) = returned {
            return Err(format!("op {op} had returned before {begun}, and is not in it"));
        }
        for (session, register, versions) in self.views.seen().filter(|(session, ..)| is_here(session.0)) {
            let seen = self.history.get(&register).into_iter().flatten().take(versions);
            let mut lacking = seen.filter_map(|version| late.get(&version.op).map(|by| (version.op, by)));
            if let Some((op, _)) = lacking.find(|(_, by)| by.session != session.0) {
                return Err(format!("op {op} is not in it, and {session} has seen {register:?} of it"));
            }
        }
        let late = late.into_keys().collect();
        let mut tree = self.clone();
        tree.lose(late)?;
        tree.is_tree()?;
        tree.operations.retain(|op, operation| *op == 0 || !operation.writes.is_empty());
        for operation in tree.operations.values_mut() {
            operation.returned.get_or_insert(now);
            operation.durable = true;
        }
        (tree.views, tree.lost, tree.lost_there, tree.requests) = Default::default();
        Ok(tree)
    }

    /// Somebody has changed attributes in a fork, before it is shown to anybody here.
    pub(crate) fn changed_in_fork(&mut self, ino: u64, attributes: Attributes, now: u64) {
        self.put(0, Register::Attributes(ino), Value::Attributes(attributes), now);
    }

    /// Inode numbers of the tree before it are never given again.
    pub(crate) fn know_of(&mut self, before: &Reference) {
        let mut kinds = before.kinds.clone();
        kinds.append(&mut self.kinds);
        self.kinds = kinds;
    }
}
