//! The end of a world: everything comes to rest, and is compared.

use hayloft_model::{Content, Rows};

use super::*;
use crate::reference::Reference;

/// What rows have otherwise than the reference, if anything.
pub(crate) fn differs(rows: &Rows, reference: &Reference) -> Option<String> {
    let names = rows.dentries.iter();
    let stored: BTreeMap<(u64, u8), u64> =
        names.map(|((dir, name), dentry)| ((dir.0, name.as_bytes()[0]), dentry.ino.0)).collect();
    if stored != *reference.names() {
        return Some(format!("stored names are {stored:?}, not {:?}", reference.names()));
    }
    rows.inodes.iter().filter(|(_, row)| row.nlink > 0).find_map(|(ino, row)| {
        let known = reference.attributes(ino.0);
        if known != Some(reference.looked_at(ino.0, Attributes::of(row))) {
            return Some(format!("{ino} is stored as {row:?}, not {known:?}"));
        }
        let data = match &row.content {
            Content::Inline(data) => data.to_vec(),
            _ => Vec::new(),
        };
        let is_other = row.kind() == FileKind::Regular && data != reference.data(ino.0);
        is_other.then(|| format!("the data of {ino} is {data:?}, not {:?}", reference.data(ino.0)))
    })
}

impl World {
    /// Everything comes to an end: connections heal, dead sessions are ended, logs are shipped.
    pub(crate) fn drain(&mut self) {
        (self.server.fault, self.server.flush_fails) = (None, false);
        self.server.drain_until = self.now + 20_000;
        for at in 0..self.clients.len() {
            if self.clients[at].stuck {
                self.restart_client(at);
            }
            self.clients[at].processes.iter_mut().for_each(Process::close_all);
        }
    }

    pub(crate) fn is_quiet(&mut self) -> bool {
        let clients = &self.clients;
        let has_client = |session| clients.iter().any(|client| client.session == session);
        if !self.server.up || self.replaced.is_some() || !self.server.is_idle(has_client) {
            return false;
        }
        let dead: Vec<SessionId> =
            self.sessions().into_iter().filter(|session| !has_client(*session)).collect();
        dead.into_iter().for_each(|session| self.end_session(session));
        for at in 0..self.clients.len() {
            if self.clients[at].link == Link::Up && self.clients[at].tree.is_dirty() {
                self.press(at);
            }
        }
        self.server.is_all_durable()
            && self.clients.iter().all(Client::is_at_rest)
            && self.connections.values().all(|connection| connection.is_empty())
    }

    /// At rest: all views are one, and nothing is left over.
    pub(crate) fn check_end(&mut self) {
        let mut wrong = Vec::new();
        for (at, client) in self.clients.iter().enumerate() {
            for ((dir, name), target) in client.kernel.cached_names() {
                let verdict = self.reference.observed(
                    Register::Name(dir.0, name),
                    &Value::Name(target.map(|ino| ino.0)),
                    self.now,
                );
                if let Err(why) = verdict {
                    wrong.push(format!("the kernel of c{at}: {why}"));
                }
            }
            for (ino, attributes) in client.kernel.cached_attributes() {
                let looked_at = self.reference.looked_at(ino.0, attributes);
                if self.reference.attributes(ino.0).is_some_and(|known| known != looked_at) {
                    wrong.push(format!("the kernel of c{at}: {ino} is {attributes:?}"));
                }
            }
        }
        for at in 0..self.clients.len() {
            let inos: Vec<Ino> = self.clients[at].kernel.known.keys().copied().collect();
            inos.into_iter().for_each(|ino| self.kernel_forgets(at, ino));
        }
        let rows = self.server.stored.rows.clone();
        let numbers = self.server.stored.next_ino;
        for (at, client) in self.clients.iter_mut().enumerate() {
            // What the next message would bring: then everything is shown.
            let heard = self.server.take_heard(client.session);
            client.tree.heard(&heard);
            for ino in (1..numbers).map(Ino).filter(|ino| !rows.inodes.contains_key(ino)) {
                let has_row = client.tree.inode(ino).is_ok_and(|row| row.nlink > 0);
                if has_row || client.tree.is_listed(ino) || client.tree.owns_itself(ino) {
                    wrong.push(format!("c{at} has {ino}, which is gone"));
                }
            }
            for (ino, row) in &rows.inodes {
                let is_split = client.tree.is_split(*ino);
                for name in b"abcd".iter().filter(|_| is_split).map(|name| Name::new(&[*name])) {
                    let stored = rows.listing(*ino).into_iter().find(|(of, _)| *of == name);
                    let stored = stored.map(|(_, dentry)| dentry);
                    if let Ok(here) = client.tree.lookup(*ino, name.as_bytes())
                        && here != stored
                    {
                        wrong.push(format!("c{at} has {name:?} of {ino} as {here:?}, stored is {stored:?}"));
                    }
                }
                if let Ok(here) = client.tree.inode(*ino)
                    && here != row
                    && !is_split
                {
                    wrong.push(format!("c{at} has {ino} as {here:?}, stored is {row:?}"));
                }
                if row.kind() == FileKind::Directory
                    && client.tree.is_listed(*ino)
                    && client.tree.has_inode(*ino)
                {
                    let here: Vec<_> = client
                        .tree
                        .entries(*ino, 0)
                        .map(|all| all.map(|(name, dentry)| (name.clone(), *dentry)).collect())
                        .unwrap_or_default();
                    if here != rows.listing(*ino) {
                        wrong.push(format!(
                            "c{at} has {ino} with {here:?}, stored is {:?}",
                            rows.listing(*ino)
                        ));
                    }
                }
            }
        }
        if self.server.durable.rows != rows {
            wrong.push("not all is durable".to_owned());
        }
        wrong.extend(differs(&rows, &self.reference));
        let named = rows.inodes.iter().filter(|(ino, row)| row.nlink > 0 && **ino != Ino::ROOT);
        let usage =
            Usage { inodes: named.clone().count() as u64, bytes: named.map(|(_, row)| row.allocated).sum() };
        if usage != self.server.stored.usage {
            wrong.push(format!("the usage is {usage:?}, and counted as {:?}", self.server.stored.usage));
        }
        if let Some(wrong) = wrong.into_iter().next() {
            return self.fail(format!("at the end: {wrong}"));
        }
        self.check_unused();
    }

    /// With all kernels empty, no inode without a name may be left.
    pub(super) fn check_unused(&mut self) {
        let until = self.now + 4 * LEASE;
        self.server.drain_until = until + 1;
        while self.outcome.failure.is_none() {
            if !self.one_more_before(until) {
                break;
            }
        }
        let left: Vec<Ino> = self
            .server
            .stored
            .rows
            .inodes
            .iter()
            .filter(|(_, row)| row.nlink == 0)
            .map(|(ino, _)| *ino)
            .collect();
        if !left.is_empty() && self.outcome.failure.is_none() {
            self.fail(format!("inodes {left:?} have neither a name nor a user, and are left"));
        }
    }
}
