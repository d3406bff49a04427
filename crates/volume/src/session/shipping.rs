//! Sessions ship what they have changed when they are told to: then the server has everything whose call had returned.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use hayloft_model::SessionId;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{SHIPS, Ship, Shipped};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::error::VolumeError;
use crate::session::Session;
use crate::volume::Volume;

/// For so many leases a session may bring nothing, connected or not.
const PATIENCE: u32 = 3;

/// How often it is looked whether sessions have ended, or have other connections.
const LOOK: Duration = Duration::from_millis(20);

/// Who was asked, and has answered.
#[derive(Default)]
pub(crate) struct Shipping {
    state: Mutex<State>,
    answered: Notify,
}

#[derive(Default)]
struct State {
    /// The last number that was asked with.
    last: u64,
    /// The last number that a session has answered, and what has failed.
    answers: HashMap<SessionId, (u64, String)>,
}

impl Volume {
    /// A session has answered.
    pub(crate) fn shipped(&self, session: SessionId, shipped: Shipped) {
        let mut state = self.shipping.state.lock();
        if shipped.number <= state.last {
            state.answers.insert(session, (shipped.number, shipped.failed));
        }
        drop(state);
        self.shipping.answered.notify_waiters();
    }

    /// Waits until the server has everything that clients have changed up to now.
    ///
    /// # Errors
    /// A session does not ship for too long, or cannot be asked.
    pub(crate) async fn all_shipped(self: &Arc<Self>) -> Result<(), VolumeError> {
        let (begun_ms, patience) = (self.shared.uptime_ms(), PATIENCE * self.shared.config.lease);
        let number = {
            let mut state = self.shipping.state.lock();
            state.last += 1;
            state.last
        };
        // On which connection each was asked.
        let mut asked: HashMap<SessionId, Option<u64>> = {
            let state = self.state.lock();
            let writers = state.sessions.iter().filter(|(_, session)| !session.row.read_only);
            writers.map(|(id, _)| (*id, None)).collect()
        };
        loop {
            // Before it is looked: no answer is missed.
            let answered = self.shipping.answered.notified();
            {
                let sharing = self.sharing.lock();
                let state = self.state.lock();
                let mut shipping = self.shipping.state.lock();
                asked.retain(|id, _| {
                    let is_done = shipping
                        .answers
                        .get(id)
                        .is_some_and(|(of, failed)| *of >= number && failed.is_empty());
                    state.sessions.contains_key(id) && !is_done
                });
                for (id, asked_on) in &mut asked {
                    let Some(stream) = sharing.streams.get(id) else { continue };
                    if *asked_on != Some(stream.connection) {
                        let session = &state.sessions[id];
                        if session.spoken.features & SHIPS == 0 {
                            let row = &session.row;
                            return Err(VolumeError::CannotShip {
                                host: row.host_name.clone(),
                                pid: row.pid,
                                mount_point: row.mount_point.clone(),
                            });
                        }
                        stream.replies.push(0, Answer::Ship(Ship { number }));
                        *asked_on = Some(stream.connection);
                    }
                }
                shipping.answers.retain(|id, _| state.sessions.contains_key(id));
                if asked.is_empty() {
                    return Ok(());
                }
                let now_ms = self.shared.uptime_ms();
                // Whoever ships much takes as long as that takes.
                let is_late = |session: &&Session| {
                    let since_ms = session.worked.load(Relaxed).max(begun_ms);
                    now_ms.saturating_sub(since_ms) > patience.as_millis() as u64
                };
                if let Some(late) = asked.keys().map(|id| &state.sessions[id]).find(is_late) {
                    return Err(VolumeError::Unshipped {
                        host: late.row.host_name.clone(),
                        pid: late.row.pid,
                        mount_point: late.row.mount_point.clone(),
                        secs: patience.as_secs(),
                    });
                }
            }
            let _ = tokio::time::timeout(LOOK, answered).await;
        }
    }
}
