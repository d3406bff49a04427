//! Who is connected, and until when that may go on.

use std::collections::HashMap;
use std::sync::Arc;

use hayloft_transport::{Acceptor, Peer};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::rights::Right;

/// The connections of a server, by their numbers.
#[derive(Default)]
pub(crate) struct Peers {
    /// A leaf: nothing is taken under it but the acceptor's.
    connected: Mutex<HashMap<u64, Connected>>,
}

struct Connected {
    peer: Peer,
    hang_up: Arc<Notify>,
    /// The volume that it has mounted, and the right that it needs for that.
    mounted: Option<(String, Right)>,
}

impl Peers {
    pub(crate) fn enter(&self, connection: u64, peer: Peer, hang_up: &Arc<Notify>) {
        let connected = Connected { peer, hang_up: Arc::clone(hang_up), mounted: None };
        self.connected.lock().insert(connection, connected);
    }

    /// A connection is a session's from now on.
    pub(crate) fn mounted(&self, connection: u64, volume: &str, needs: Right) {
        if let Some(connected) = self.connected.lock().get_mut(&connection) {
            connected.mounted = Some((volume.to_owned(), needs));
        }
    }

    /// The rights of a volume have changed: ends the connections of those who have too small ones now.
    pub(crate) fn recheck(&self, volume: &str, right_of: impl Fn(&Peer) -> Right) {
        for Connected { peer, hang_up, mounted } in self.connected.lock().values() {
            if mounted.as_ref().is_some_and(|(of, needs)| of == volume && right_of(peer) < *needs) {
                tracing::warn!(peer = %peer.identity, volume, "a connection is ended: the right was taken away");
                hang_up.notify_one();
            }
        }
    }

    pub(crate) fn leave(&self, connection: u64) {
        self.connected.lock().remove(&connection);
    }

    /// Ends the connections of those whose certificates are not to be believed any more.
    pub(crate) fn check(&self, acceptor: &Acceptor) {
        acceptor.refresh();
        for (number, Connected { peer, hang_up, .. }) in &*self.connected.lock() {
            if let Err(reason) = acceptor.check(peer) {
                tracing::warn!(peer = %peer.identity, connection = number, reason, "a connection is ended");
                hang_up.notify_one();
            }
        }
    }
}
