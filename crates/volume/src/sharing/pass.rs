//! Requests that wait for others: their turn, and until all that they said is acknowledged.

use std::sync::Arc;
use std::time::Duration;

use hayloft_model::SessionId;
use hayloft_model::grants::{Object, Outcome, Request, Ticket};
use tokio::sync::mpsc;

use crate::error::VolumeError;
use crate::sharing::Sharing;
use crate::volume::Volume;

/// How often to look whether all have claimed.
const CLAIMS_PAUSE: Duration = Duration::from_millis(5);

/// What a request that waits is told.
pub(super) enum Signal {
    Ready(Outcome),
    Settled,
}

pub(super) struct Waiter {
    pub(super) session: SessionId,
    /// Its turn has come; it goes on even if its session ends.
    pub(super) ready: bool,
    pub(super) signals: mpsc::UnboundedSender<Signal>,
}

/// A request that the grant machine knows. When it is dropped unfinished it is given up.
pub(crate) struct Pass {
    volume: Arc<Volume>,
    session: SessionId,
    pub(crate) ticket: Ticket,
    signals: mpsc::UnboundedReceiver<Signal>,
    open: bool,
}

impl Volume {
    /// Waits until all sessions have claimed, or are ended: until then they may bring back what is not to be found.
    pub(crate) async fn all_claimed(self: &Arc<Self>) -> Result<(), VolumeError> {
        if self.sharing.lock().grants.all_claimed() {
            return Ok(());
        }
        self.sharing.lock().claims_awaited += 1;
        let _awaited = ClaimsAwaited(self);
        loop {
            {
                let sharing = self.sharing.lock();
                if sharing.closed {
                    return Err(VolumeError::ShuttingDown);
                }
                if sharing.grants.all_claimed() {
                    return Ok(());
                }
            }
            tokio::time::sleep(CLAIMS_PAUSE).await;
        }
    }

    /// Puts a request into the line for its objects.
    pub(crate) fn request(
        self: &Arc<Self>,
        session: SessionId,
        request: Request,
    ) -> Result<Pass, VolumeError> {
        let now_ms = self.shared.uptime_ms();
        let mut sharing = self.sharing.lock();
        if sharing.closed {
            return Err(VolumeError::ShuttingDown);
        }
        if !sharing.grants.knows(session) {
            return Err(VolumeError::SessionEnded(session));
        }
        let (sender, signals) = mpsc::unbounded_channel();
        let ticket = sharing.grants.request(session, request);
        let waiter = Waiter { session, ready: false, signals: sender };
        sharing.waiters.insert(ticket, waiter);
        sharing.drive(now_ms);
        Ok(Pass { volume: Arc::clone(self), session, ticket, signals, open: true })
    }
}

/// Somebody waits until all have claimed.
struct ClaimsAwaited<'a>(&'a Volume);

impl Drop for ClaimsAwaited<'_> {
    fn drop(&mut self) {
        self.0.sharing.lock().claims_awaited -= 1;
    }
}

impl Pass {
    async fn signal(&mut self) -> Result<Signal, VolumeError> {
        // Nobody will tell any more: the session has ended, or the volume is closed.
        let gone = || VolumeError::SessionEnded(self.session);
        match self.signals.recv().await {
            Some(signal) => Ok(signal),
            None if self.volume.sharing.lock().closed => Err(VolumeError::ShuttingDown),
            None => Err(gone()),
        }
    }

    /// Waits for its turn. Rows of directories that have become whole by it are as they are shown then.
    pub(crate) async fn ready(&mut self) -> Result<Outcome, VolumeError> {
        loop {
            if let Signal::Ready(outcome) = self.signal().await? {
                Box::pin(self.volume.settle_whole()).await?;
                return Ok(outcome);
            }
        }
    }

    /// Waits again, for more objects.
    pub(crate) fn extend(&mut self, more: Vec<Object>) -> Result<(), VolumeError> {
        let now_ms = self.volume.shared.uptime_ms();
        let mut sharing = self.volume.sharing.lock();
        if !sharing.grants.knows(self.session) {
            return Err(VolumeError::SessionEnded(self.session));
        }
        if let Some(waiter) = sharing.waiters.get_mut(&self.ticket) {
            waiter.ready = false;
        }
        sharing.grants.extend(self.ticket, more);
        sharing.drive(now_ms);
        Ok(())
    }

    /// It is carried out, and what it has to say is in the streams.
    pub(crate) fn finish(mut self) {
        let now_ms = self.volume.shared.uptime_ms();
        self.finish_under(&mut self.volume.sharing.lock(), now_ms);
        self.open = false;
    }

    fn finish_under(&self, sharing: &mut Sharing, now_ms: u64) {
        sharing.grants.finish(self.ticket);
        sharing.drive(now_ms);
    }

    /// As [`Pass::finish`], by somebody who has the lock; [`Pass::settled`] is to follow.
    pub(crate) fn finished(&mut self, sharing: &mut Sharing, now_ms: u64) {
        self.open = false;
        self.finish_under(sharing, now_ms);
    }

    /// Waits until everybody has acknowledged what was published.
    pub(crate) async fn settled(&mut self) -> Result<(), VolumeError> {
        loop {
            if let Signal::Settled = self.signal().await? {
                return Ok(());
            }
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if self.open {
            let now_ms = self.volume.shared.uptime_ms();
            let mut sharing = self.volume.sharing.lock();
            sharing.waiters.remove(&self.ticket);
            sharing.grants.cancel(self.ticket);
            sharing.drive(now_ms);
        }
    }
}
