//! Until when what is known here holds: keep-alives, and the lease of the session.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hayloft_fuse::Interrupt;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::{ClientMessage, Ping};
use socket2::Socket;

use crate::host::moment::Moment;
use crate::keeper::Shared;
use crate::session::link::{CallError, Condition, INTERRUPT_POLL, Link, Receiver, State};

/// How often, and for how long, the kernel may send something again without any answer before the connection is given up.
const REPEATED: u8 = 3;
const SILENCE: Duration = Duration::from_secs(3);

/// How late a thread may be that has taken a call from the kernel and got no processor since.
const OLD_CALLS: Duration = Duration::from_secs(5);

impl Link {
    /// Says something to the server often enough. It may have to wait for room, or for another writer.
    pub(super) fn keep_alive(&self) {
        let mut pinged = Instant::now();
        loop {
            std::thread::sleep(self.lease / 20);
            if self.ended().is_some() {
                return;
            }
            if let Some(connection) = self.connected()
                && pinged.elapsed() > self.lease / 4
            {
                pinged = Instant::now();
                self.stats.count_request(&Ask::Ping(Ping {}));
                let request = self.enlist(Ask::Ping(Ping {}), true);
                // An error shows on the reading side as well.
                let _ =
                    self.write(&ClientMessage { request, body: Some(Ask::Ping(Ping {})) }, Some(connection));
            }
        }
    }

    /// Notices when there has been no answer for too long. Waits for nobody who writes.
    pub(super) fn watch_lease(&self, receiver: &dyn Receiver) {
        let begun = Moment::now();
        let (mut told, mut repeats_since) = (false, None);
        loop {
            std::thread::sleep(self.lease / 20);
            let (connection, gone, silence) = {
                let state = self.state.lock();
                if state.ended.is_some() {
                    return;
                }
                let silence = state.lease_from().unwrap_or(begun).elapsed();
                // A new connection has its time to say something.
                let is_new = state.connected_at.is_some_and(|at| at.elapsed() <= self.lease);
                let is_gone = !is_new && state.heard.unwrap_or(begun).elapsed() > self.lease * 2;
                let connection = state.connected.then_some(state.connection);
                (connection, connection.filter(|_| is_gone), silence)
            };
            if let Some(connection) = gone {
                self.give_connection_up(connection);
            } else {
                self.abandon_if_cut(&mut repeats_since);
            }
            // Some way before the server may give what is held to others.
            let is_over = silence > self.lease / 10 * 7;
            if is_over && !told {
                tracing::warn!(server = %self.address, "no word from the server: calls wait until it is back");
                self.set_condition(Condition::Lapsed);
                if connection.is_some() {
                    // The server ends the session, it may be, before this connection is given up.
                    self.came_through_no_more.store(true, Ordering::Relaxed);
                }
                receiver.lapse();
            }
            told = is_over;
            receiver.tick();
        }
    }

    /// Gives a connection up whose way is cut, long before the lease is over: with another one the session goes on, if this host has another address
    /// now; and the kernel tries old connections more and more seldom. `since`: since when it has repeated what it sends.
    fn abandon_if_cut(&self, since: &mut Option<Instant>) {
        let Some((connection, (times, silence))) =
            self.breaker.lock().as_ref().map(|(connection, socket)| (*connection, repeated(socket)))
        else {
            return;
        };
        let begun = *since.get_or_insert_with(Instant::now);
        if times == 0 || silence < begun.elapsed() {
            *since = None;
        } else if times >= REPEATED && begun.elapsed() >= SILENCE {
            *since = None;
            self.give_connection_up(connection);
        }
    }

    /// What was sent on it, or should have come, did not come through.
    fn give_connection_up(&self, connection: u64) {
        self.came_through_no_more.store(true, Ordering::Relaxed);
        self.abandon(connection);
    }

    /// It may run longer than before.
    pub(super) fn lease_changed(&self, state: &State) {
        if let Some(from) = state.lease_from() {
            self.heard_at(from);
        }
    }

    /// The lease runs from then on.
    pub(super) fn heard_at(&self, heard: Moment) {
        // Later than this process notices by itself, if it can; there is time left until the server acts.
        let deadline = heard.after(self.lease / 10 * 8).nanos();
        self.deadline.store(deadline, Ordering::Release);
        if let Some(shared) = self.kept.get() {
            shared.set_deadline(deadline);
        }
    }

    /// From now on the keeper knows until when the lease runs.
    pub(crate) fn keep(&self, shared: Arc<Shared>) {
        let shared = self.kept.get_or_init(|| shared);
        shared.set_deadline(self.deadline.load(Ordering::Acquire));
    }

    /// How long the last keep-alive took to be answered; 0 before the first one.
    pub(crate) fn round_trip(&self) -> Duration {
        Duration::from_micros(self.round_trip_micros.load(Ordering::Relaxed))
    }

    /// Whether what is known here holds. It does not after the lease, even if this process was stopped meanwhile and its
    /// threads have not noticed yet.
    pub(crate) fn condition(&self) -> Condition {
        match self.condition.load(Ordering::Acquire) {
            0 if Moment::now().nanos() > self.deadline.load(Ordering::Acquire) => {
                self.set_condition(Condition::Lapsed);
                Condition::Lapsed
            }
            0 => Condition::Live,
            1 => Condition::Lapsed,
            _ => Condition::Ended,
        }
    }

    pub(super) fn set_condition(&self, condition: Condition) {
        self.condition.fetch_max(condition as u8, Ordering::AcqRel);
    }

    /// Waits until the lease runs again, the session is over, or the call is given up.
    pub(crate) fn await_lease(&self, interrupt: &Interrupt) -> Result<(), CallError> {
        let mut state = self.state.lock();
        while self.condition() == Condition::Lapsed {
            if interrupt.interrupted() {
                return Err(CallError::Interrupted);
            }
            self.changed.wait_for(&mut state, INTERRUPT_POLL);
        }
        Ok(())
    }

    /// Whether a call that comes to be answered now may have been made before the lease was over: when that was, if it is not long ago.
    /// Its caller may have been ended since, for what it did was to be done elsewhere: then it is not to be done here any more.
    pub(crate) fn relived(&self) -> Option<u64> {
        let at = self.relived.load(Ordering::Acquire);
        if at == 0 {
            return None;
        }
        if Moment::now().nanos().saturating_sub(at) > OLD_CALLS.as_nanos() as u64 {
            let _ = self.relived.compare_exchange(at, 0, Ordering::AcqRel, Ordering::Relaxed);
            return None;
        }
        Some(at)
    }

    /// There has been word from the server: when it is not too old, the lease runs.
    pub(super) fn relive(&self, state: &mut State) {
        if !state.restoring && state.lease_from().is_some_and(|from| from.elapsed() < self.lease / 2) {
            let (lapsed, live) = (Condition::Lapsed as u8, Condition::Live as u8);
            if self.condition.load(Ordering::Acquire) == lapsed {
                self.relived.store(Moment::now().nanos(), Ordering::Release);
            }
            let _ = self.condition.compare_exchange(lapsed, live, Ordering::AcqRel, Ordering::Acquire);
        }
    }
}

/// How often in a row what was sent has been sent again without an answer, and since when no packet at all has come. A server that reads
/// nothing is not meant: its kernel acknowledges what comes, and what asks for room.
#[allow(unsafe_code)]
fn repeated(socket: &Socket) -> (u8, Duration) {
    // SAFETY: all fields are integers.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the descriptor is open, and no more than `length` bytes are written.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    match result {
        // Packets that the host itself cannot send are counted as probes.
        0 => (
            info.tcpi_retransmits.max(info.tcpi_probes),
            Duration::from_millis(info.tcpi_last_ack_recv.into()),
        ),
        _ => (0, Duration::ZERO),
    }
}
