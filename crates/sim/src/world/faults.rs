//! What goes wrong, and whether all goes on after it.

use super::*;

impl World {
    /// Some clock is an hour wrong from now on, or right again.
    fn set_a_clock(&mut self) {
        let skew = *self.clocks.pick(&[0, 0, HOUR, -HOUR]);
        match self.clocks.below(2 * self.clients.len() as u64) as usize {
            at if at < self.clients.len() => {
                trace!(self, "the clock of c{at} is {skew} off");
                self.clients[at].skew = skew;
            }
            _ => {
                trace!(self, "the server's clock is {skew} off");
                self.server.skew = skew;
            }
        }
    }

    pub(super) fn fault(&mut self) {
        if self.draining || self.ops_left == 0 {
            return;
        }
        self.last_fault = self.now;
        let next = 1 + self.rng.below(2 * self.faults);
        self.after(next, What::Fault);
        self.set_a_clock();
        let client = self.rng.below(self.clients.len() as u64) as usize;
        let what = match self.lossy && self.rng.permille(500) {
            true => *self.rng.pick(&[6, 6, 11, 12]),
            false => self.rng.below(14),
        };
        match what {
            0 | 1 => {
                if let Some(connection) = self.clients[client].connection {
                    self.cut_connection(connection);
                }
            }
            2..=4 => {
                let until = self.now + self.rng.between(LEASE / 4, 4 * LEASE);
                trace!(self, "the connection of c{client} stalls until {until}");
                if let Some(number) = self.clients[client].connection
                    && let Some(connection) = self.connections.get_mut(&number)
                {
                    connection.stalled_until = until;
                }
            }
            5 if self.rng.permille(400) => {
                trace!(self, "c{client} unmounts");
                self.clients[client].leaving = true;
            }
            5 => {
                trace!(self, "c{client} crashes");
                self.restart_client(client);
            }
            6 => self.stop_server(),
            10 => self.server.flush_fails = true,
            11 => self.take_over(),
            12 | 13 => {
                self.stop_server();
                let odds = *self.rng.pick(&[300, 500, 900]);
                for at in 0..self.clients.len() {
                    if self.rng.permille(odds) {
                        trace!(self, "and c{at} crashes with it");
                        self.restart_client(at);
                    }
                }
            }
            _ => {
                let fault = *self.rng.pick(&[Fault::Refuse, Fault::UncertainApplied, Fault::UncertainLost]);
                self.server.fault = Some(fault);
            }
        }
    }

    pub(crate) fn has_fault(&mut self) {
        self.last_fault = self.now;
    }

    pub(super) fn stick(&mut self, at: usize) {
        if self.clients[at].life > 1 || self.draining {
            return;
        }
        self.last_fault = self.now;
        if std::mem::replace(&mut self.clients[at].stuck, true) {
            trace!(self, "the stuck c{at} is given up");
            self.restart_client(at);
        } else {
            trace!(self, "c{at} is stuck");
            self.after(STUCK_FOR, What::Stick(at));
        }
    }

    pub(super) fn check_patience(&mut self) {
        let (now, last_fault) = (self.now, self.last_fault);
        let late =
            self.clients.iter().enumerate().filter(|(_, client)| !client.stuck).find_map(|(at, client)| {
                client.oldest_call().filter(|call| now - (*call).max(last_fault) > PATIENCE).map(|_| at)
            });
        if let Some(at) = late {
            let about = self.clients[at].waits_for();
            self.fail(format!("c{at} waits for ever: {about}; grants: {:#?}", self.server.grants));
        }
        if self.draining && now > self.server.drain_until {
            let waits: Vec<String> = self.clients.iter().map(|client| client.waits_for()).collect();
            self.fail(format!("it does not come to rest: {waits:#?}; {:#?}", self.server.grants));
        }
    }
}
