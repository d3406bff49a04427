//! Who has heard of what was changed by request. Until all have, it is shown to nobody: who reads it anew, or is refused
//! something because of it, is told so.

use std::collections::BTreeSet;

use crate::grants::{Grants, Object, Stage, Ticket, Waiting};
use crate::{Ino, SessionId};

impl Grants {
    /// From now on what others have not heard of is shown: only for the simulator, which shows that it notices.
    pub fn let_all_be_shown(&mut self) {
        self.shows_all = true;
    }

    /// Whether others than a session have still to acknowledge what a request has published. The session itself may show it
    /// to its programs by what asks this.
    pub fn is_unheard(&self, ticket: Ticket, session: SessionId) -> bool {
        self.requests.get(&ticket).is_some_and(|waiting| waiting.is_unheard(session))
    }

    /// A session is about to be told of what a request has published: the change, if others have still to hear of it.
    /// [`crate::grants::Output::Heard`] says when they have.
    pub fn tell_change(&mut self, ticket: Ticket, session: SessionId) -> Option<Ticket> {
        let waiting = self.requests.get_mut(&ticket).filter(|waiting| waiting.is_unheard(session))?;
        waiting.told.insert(session);
        Some(ticket)
    }

    /// A session is about to be told how an inode is, or a directory with its names: the changes of that of which others have
    /// not heard. As [`Grants::tell_change`].
    pub fn tell_unheard(&mut self, session: SessionId, ino: Ino) -> Vec<Ticket> {
        let changes = self.unheard_about(session, &[ino]);
        changes.into_iter().filter_map(|change| self.tell_change(change, session)).collect()
    }

    /// Who has still to acknowledge what a request has published.
    pub fn unheard_by(&self, ticket: Ticket) -> impl Iterator<Item = SessionId> {
        self.requests.get(&ticket).into_iter().flat_map(|waiting| waiting.left().iter().copied())
    }

    /// Changes of these inodes, or of names or files in these directories, of which others than a session have not heard.
    pub fn unheard_about(&self, session: SessionId, inos: &[Ino]) -> Vec<Ticket> {
        if self.shows_all {
            return Vec::new();
        }
        let is_about = |object: &Object| {
            inos.contains(&object.ino()) || object.home().is_some_and(|home| inos.contains(&home))
        };
        self.requests
            .iter()
            .filter(|(_, waiting)| {
                matches!(waiting.stage, Stage::Settling(_))
                    && waiting.is_unheard(session)
                    && waiting.request.objects().iter().any(is_about)
            })
            .map(|(ticket, _)| *ticket)
            .collect()
    }
}

impl Waiting {
    fn left(&self) -> &BTreeSet<SessionId> {
        match &self.stage {
            Stage::Settling(left) => left,
            _ => &self.published,
        }
    }

    fn is_unheard(&self, session: SessionId) -> bool {
        self.left().iter().any(|of| *of != session)
    }
}
