//! Waiting until all have heard of a change, before anything shows it to others: `model::grants` has the rule.

use std::sync::Arc;

use hayloft_model::grants::Ticket;
use hayloft_model::{Ino, SessionId};
use tokio::sync::oneshot;

use crate::sharing::Sharing;
use crate::volume::Volume;

/// Somebody who waits until others have heard of a change.
pub(super) struct Hearer {
    session: SessionId,
    told: oneshot::Sender<()>,
}

impl Volume {
    /// Waits until all but a session have heard of these changes.
    pub(crate) async fn heard(
        self: &Arc<Self>,
        session: SessionId,
        changes: impl IntoIterator<Item = Ticket>,
    ) {
        let waits: Vec<_> = {
            let mut sharing = self.sharing.lock();
            changes.into_iter().filter_map(|change| sharing.await_heard(session, change)).collect()
        };
        for wait in waits {
            // Who ends it without a word has closed the volume: nobody is answered there any more.
            let _ = wait.await;
        }
    }

    /// These, if there is something to wait for in [`Volume::heard_about`].
    pub(super) fn unheard_of(&self, session: SessionId, inos: &[Ino]) -> Vec<u64> {
        let is_heard = self.sharing.lock().grants.unheard_about(session, inos).is_empty();
        inos.iter().filter(|_| !is_heard).map(|ino| ino.0).collect()
    }

    /// Waits until all but a session have heard of what has changed of these, or in these directories, up to now.
    pub(crate) async fn heard_about(self: &Arc<Self>, session: SessionId, inos: &[Ino]) {
        let changes = self.sharing.lock().grants.unheard_about(session, inos);
        self.heard(session, changes).await;
    }
}

impl Sharing {
    fn await_heard(&mut self, session: SessionId, change: Ticket) -> Option<oneshot::Receiver<()>> {
        if self.closed || !self.grants.is_unheard(change, session) {
            return None;
        }
        let (told, wait) = oneshot::channel();
        self.hearers.entry(change).or_default().push(Hearer { session, told });
        Some(wait)
    }

    /// As [`hayloft_model::grants::Grants::tell_unheard`].
    pub(super) fn tell_unheard(&mut self, session: SessionId, ino: Ino) -> Vec<u64> {
        self.grants.tell_unheard(session, ino).into_iter().map(|change| change.0).collect()
    }

    /// Who has not heard of something, while somebody waits for that.
    pub(crate) fn waited_for_to_hear(&self) -> impl Iterator<Item = SessionId> {
        self.hearers.iter().flat_map(|(change, hearers)| {
            let left = self.grants.unheard_by(*change);
            left.filter(|left| {
                hearers.iter().any(|hearer| hearer.session != *left && !hearer.told.is_closed())
            })
        })
    }

    /// Wakes those who need not wait any longer.
    pub(super) fn wake_hearers(&mut self) {
        let grants = &self.grants;
        self.hearers.retain(|change, hearers| {
            let done = |hearer: &mut Hearer| !grants.is_unheard(*change, hearer.session);
            for hearer in hearers.extract_if(.., done) {
                let _ = hearer.told.send(());
            }
            !hearers.is_empty()
        });
    }
}
