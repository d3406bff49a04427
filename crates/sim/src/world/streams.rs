//! Connections: two streams, in order each, and delayed at random.

use super::*;

/// A connection: two streams.
pub(crate) struct Connection {
    pub(crate) client: usize,
    pub(crate) life: u64,
    pub(crate) session: SessionId,
    /// The life of the server.
    pub(crate) server: u64,
    pub(crate) up: bool,
    to_server: VecDeque<ToServer>,
    /// With the mark up to which all is durable, and what is to be kept.
    to_client: VecDeque<(u64, Vec<Entry>, ToClient)>,
    last_to_server: u64,
    last_to_client: u64,
    pub(super) stalled_until: u64,
}

impl Connection {
    /// Whether nothing is on its way but keep-alives.
    pub(crate) fn is_empty(&self) -> bool {
        let ping = |message: &ToServer| matches!(message, ToServer::Ask { ask: Ask::Ping, .. });
        let pong = |(.., message): &(u64, Vec<Entry>, ToClient)| matches!(message, ToClient::Pong { .. });
        self.to_server.iter().all(ping) && self.to_client.iter().all(pong)
    }
}

impl World {
    fn delay(&mut self) -> u64 {
        let usual = 1 + self.rng.below(self.delay);
        if self.rng.permille(30) { usual * 4 } else { usual }
    }

    pub(crate) fn open(&mut self, client: usize, life: u64, session: SessionId) -> u64 {
        let number = self.next_connection;
        self.next_connection += 1;
        let connection = Connection {
            client,
            life,
            session,
            server: self.server.life,
            up: true,
            to_server: VecDeque::new(),
            to_client: VecDeque::new(),
            last_to_server: 0,
            last_to_client: 0,
            stalled_until: 0,
        };
        self.connections.insert(number, connection);
        number
    }

    pub(crate) fn send_to_server(&mut self, number: u64, message: ToServer) {
        let delay = self.delay();
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number).filter(|connection| connection.up) else {
            return;
        };
        let at = (now + delay).max(connection.last_to_server).max(connection.stalled_until);
        connection.last_to_server = at;
        connection.to_server.push_back(message);
        self.after(at - now, What::ToServer(number));
    }

    pub(crate) fn send_to_client(&mut self, number: u64, message: ToClient) {
        self.send_with(number, Vec::new(), message);
    }

    /// With what the client has to keep.
    pub(crate) fn send_with(&mut self, number: u64, entries: Vec<Entry>, message: ToClient) {
        let early = self.is_broken(Rule::MarkBeforeFlush);
        let delay = self.delay();
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number).filter(|connection| connection.up) else {
            return;
        };
        let at = (now + delay).max(connection.last_to_client).max(connection.stalled_until);
        connection.last_to_client = at;
        let store = if early { &self.server.stored } else { &self.server.durable };
        let mark = store.history.mark;
        let heard = self.server.take_heard(connection.session);
        let messages = if heard.is_empty() { 1 } else { 2 };
        if messages == 2 {
            connection.to_client.push_back((mark, Vec::new(), ToClient::AllHeard(heard)));
        }
        connection.to_client.push_back((mark, entries, message));
        (0..messages).for_each(|_| self.after(at - now, What::ToClient(number)));
    }

    pub(super) fn deliver_to_server(&mut self, number: u64) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number).filter(|connection| connection.up) else {
            return;
        };
        if connection.stalled_until > now {
            let wait = connection.stalled_until - now;
            return self.after(wait, What::ToServer(number));
        }
        let Some(message) = connection.to_server.pop_front() else { return };
        let session = connection.session;
        trace!(self, "c{} -> server: {message:?}", self.connections[&number].client);
        let server = self.connections[&number].server;
        if !self.on_server(server, |world| world.server_receives(number, session, message)) {
            self.cut_connection(number);
        }
    }

    pub(super) fn deliver_to_client(&mut self, number: u64) {
        let now = self.now;
        let Some(connection) = self.connections.get_mut(&number).filter(|connection| connection.up) else {
            return;
        };
        if connection.stalled_until > now {
            let wait = connection.stalled_until - now;
            return self.after(wait, What::ToClient(number));
        }
        let Some((mark, entries, message)) = connection.to_client.pop_front() else { return };
        let (client, life) = (connection.client, connection.life);
        if self.clients[client].life == life && self.clients[client].connection == Some(number) {
            trace!(self, "server -> c{client}: {message:?}");
            let marks: Vec<u64> = entries.iter().map(|entry| entry.mark).collect();
            if !marks.is_empty() {
                trace!(self, "c{client} keeps {marks:?}");
            }
            self.hears(client, mark, entries, &message);
            self.client_receives(client, message);
        }
    }

    /// A connection breaks: what is under way is lost, and both ends notice.
    pub(crate) fn cut_connection(&mut self, number: u64) {
        let Some(connection) = self.connections.remove(&number) else { return };
        trace!(self, "the connection of c{} breaks", connection.client);
        self.server_loses(number, connection.session);
        let client = &self.clients[connection.client];
        if client.life == connection.life && client.connection == Some(number) {
            self.client_loses(connection.client);
        }
    }
}
