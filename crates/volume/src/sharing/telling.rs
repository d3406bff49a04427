//! Telling everybody who knows of what was changed.

use std::sync::Arc;

use hayloft_model::grants::Object;
use hayloft_model::{Executed, Ino, Record, SessionId};
use hayloft_wire::Apply;

use crate::error::VolumeError;
use crate::sharing::Sharing;
use crate::sharing::pass::Pass;
use crate::volume::Volume;

impl Volume {
    /// Tells everybody who knows what was changed, and waits until they have heard.
    pub(super) async fn publish(
        self: &Arc<Self>,
        session: SessionId,
        mut pass: Pass,
        executed: &Executed,
        about: &[Ino],
    ) -> Result<(), VolumeError> {
        let now_ms = self.shared.uptime_ms();
        {
            let mut sharing = self.sharing.lock();
            // Once more: the session may have a new connection, and claims them on the next one only if it is told.
            sharing.adopt_births(session, executed);
            let events = sharing.grants.publish(pass.ticket, &executed.objects);
            let own_event = events.iter().find(|(to, _)| *to == session).map(|(_, number)| *number);
            if let Some(number) = own_event {
                executed.births.iter().for_each(|birth| sharing.grants.told(birth.ino(), number));
            }
            for (to, number) in events {
                let mut apply = sharing.seen_by(to, executed, to == session);
                apply.change = sharing.grants.tell_change(pass.ticket, to).map_or(0, |change| change.0);
                let entries = || self.order.tell(to, about.iter().copied());
                sharing.apply((to, number), apply, now_ms, entries);
            }
            for record in &executed.records {
                if let Record::PutInode(ino, row) = record
                    && row.nlink == 0
                {
                    sharing.grants.forget(*ino);
                }
            }
            sharing.uses.unnamed(session, &executed.unnamed, own_event);
            if !sharing.grants.knows(session) {
                sharing.uses.told_all(session);
            }
            pass.finished(&mut sharing, now_ms);
        }
        let settled = pass.settled().await;
        if !executed.unnamed.is_empty() {
            self.sharing.lock().uses.settled(&executed.unnamed);
            self.settle_uses();
        }
        settled
    }
}

impl Sharing {
    /// What a session is told of a change: rows that it may know, names of directories that it holds.
    fn seen_by(&self, session: SessionId, executed: &Executed, is_asker: bool) -> Apply {
        let mut apply = Apply::default();
        if is_asker {
            apply.asked = true;
            let is_own = |birth: &&Object| self.grants.owner(birth.ino()) == Some(session);
            apply.own = executed.births.iter().filter(is_own).map(|object| (*object).into()).collect();
        }
        let is_born = |ino: Ino| executed.births.iter().any(|object| object.ino() == ino);
        for record in &executed.records {
            let is_seen = match record {
                Record::PutInode(ino, row) => {
                    row.nlink == 0 || self.grants.covers(session, Object::of(*ino, row))
                }
                Record::PutDentry(dir, ..) | Record::DeleteDentry(dir, _) => {
                    self.grants.held(session, *dir).is_some()
                }
                _ => false,
            };
            match record {
                _ if is_seen => apply.records.push(record.into()),
                Record::PutInode(ino, _) if !is_born(*ino) => apply.forget.push(ino.0),
                _ => {}
            }
        }
        apply
    }
}
