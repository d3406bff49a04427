//! A network between clients and a server that changes what they say, both ways, as long as it is told to.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::setup::model::Random;

/// What happens to a part of what is said.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Harm {
    /// A bit is another one.
    Flip,
    /// Bytes are missing; all else goes on.
    Truncate,
    /// Bytes come twice.
    Double,
    /// Four bytes say something else: a length, most of all.
    Length,
    /// Bytes come in the place of others.
    Shift,
    /// The connection is cut off in the middle.
    Cut,
    /// Nothing more arrives, and the connection stands.
    Swallow,
}

const HARMS: [Harm; 7] =
    [Harm::Flip, Harm::Truncate, Harm::Double, Harm::Length, Harm::Shift, Harm::Cut, Harm::Swallow];

/// One of so many parts is harmed, as far as [`PAUSE`] allows.
const RARITY: u64 = 12;
/// And it is quiet for so long after it, so that something gets through.
const PAUSE: Duration = Duration::from_millis(150);

/// Bytes that are passed on at once, and that the kernel keeps beside them.
const BUFFER: usize = 256 << 10;

/// What all connections of one share.
struct Shared {
    server: String,
    active: AtomicBool,
    /// What the server says next is the last that arrives on that connection.
    cuts_next: AtomicBool,
    /// A client that says more than so many bytes on a connection has it cut off.
    most_said: AtomicU64,
    /// Bytes that clients can say in a second.
    pace: AtomicU64,
    /// One of so many harms that would be the last one is that: what is swallowed costs two leases each time.
    lasting: u64,
    started: Instant,
    /// When harm was done last, milliseconds after the start.
    last_ms: AtomicU64,
    counts: [AtomicUsize; HARMS.len()],
}

/// Passes connections on.
pub(crate) struct Mangler {
    /// Where clients connect.
    pub address: String,
    shared: Arc<Shared>,
}

impl Mangler {
    /// One that harms nothing yet.
    pub(crate) fn before(server: &str, seed: u64) -> Mangler {
        Mangler::with(server, seed, 4)
    }

    /// The same; what is swallowed is so rare.
    pub(crate) fn with(server: &str, seed: u64, lasting: u64) -> Mangler {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let shared = Arc::new(Shared {
            server: server.to_owned(),
            active: AtomicBool::new(false),
            cuts_next: AtomicBool::new(false),
            most_said: AtomicU64::new(u64::MAX),
            pace: AtomicU64::new(u64::MAX),
            lasting,
            started: Instant::now(),
            last_ms: AtomicU64::new(0),
            counts: Default::default(),
        });
        let of_all = Arc::clone(&shared);
        std::thread::spawn(move || {
            for (number, client) in (0_u64..).zip(listener.incoming().map_while(Result::ok)) {
                let _ = rustix::net::sockopt::set_socket_recv_buffer_size(&client, BUFFER);
                let Ok(upstream) = TcpStream::connect(&of_all.server) else { continue };
                let (back, forth) = (upstream.try_clone().unwrap(), client.try_clone().unwrap());
                for (way, from, to) in [(1, forth, upstream), (2, back, client)] {
                    let shared = Arc::clone(&of_all);
                    let random = Random::new(seed.wrapping_mul(1_000_003) + number * 2 + way);
                    std::thread::spawn(move || shared.pass(from, to, random, way == 2));
                }
            }
        });
        Mangler { address, shared }
    }

    pub(crate) fn set_active(&self, active: bool) {
        self.shared.active.store(active, Ordering::SeqCst);
    }

    /// Cuts the connection off behind what the server says next.
    pub(crate) fn cut_behind_next(&self) {
        self.shared.cuts_next.store(true, Ordering::SeqCst);
    }

    /// From now on a connection is cut off when its client has said so many bytes on it.
    pub(crate) fn cut_behind(&self, bytes: u64) {
        self.shared.most_said.store(bytes, Ordering::SeqCst);
    }

    /// From now on the way to the server carries so many bytes a second.
    pub(crate) fn slow_down(&self, pace: u64) {
        self.shared.pace.store(pace, Ordering::SeqCst);
    }

    /// How often each kind of harm was done.
    pub(crate) fn counts(&self) -> Vec<(String, usize)> {
        let counts = self.shared.counts.iter().map(|count| count.load(Ordering::SeqCst));
        HARMS.iter().map(|harm| format!("{harm:?}")).zip(counts).collect()
    }
}

impl Shared {
    fn pass(&self, mut from: TcpStream, mut to: TcpStream, mut random: Random, is_from_server: bool) {
        let _ = to.set_nodelay(true);
        let mut buffer = vec![0; BUFFER];
        let mut said = 0;
        while let Ok(read @ 1..) = from.read(&mut buffer) {
            let mut part = buffer[..read].to_vec();
            said += read as u64;
            if !is_from_server && said > self.most_said.load(Ordering::SeqCst) {
                break;
            }
            if !is_from_server {
                let pace = self.pace.load(Ordering::SeqCst);
                std::thread::sleep(Duration::from_secs_f64(read as f64 / pace as f64));
            }
            let harm = self.harm_now(&mut random);
            let at = |random: &mut Random, len: usize| random.below(len as u64) as usize;
            match harm {
                None => {}
                Some(Harm::Flip) => {
                    let at = at(&mut random, read);
                    part[at] ^= 1 << random.below(8);
                }
                Some(Harm::Truncate) => {
                    let (start, len) = (at(&mut random, read), 1 + at(&mut random, read.min(5000)));
                    part.drain(start..(start + len).min(read));
                }
                Some(Harm::Double) => {
                    let (start, len) = (at(&mut random, read), 1 + at(&mut random, read));
                    let end = (start + len).min(read);
                    let copy = part[start..end].to_vec();
                    part.splice(end..end, copy);
                }
                Some(Harm::Length) => {
                    let start = at(&mut random, read);
                    let end = (start + 4).min(read);
                    random
                        .bytes(end - start)
                        .into_iter()
                        .zip(&mut part[start..])
                        .for_each(|(new, old)| *old = new);
                }
                Some(Harm::Shift) => {
                    let start = at(&mut random, read);
                    part[start..].rotate_left(1.min(read - start));
                }
                Some(Harm::Cut) => {
                    part.truncate(at(&mut random, read));
                    let _ = to.write_all(&part);
                    break;
                }
                Some(Harm::Swallow) => {
                    while matches!(from.read(&mut buffer), Ok(1..)) {}
                    break;
                }
            }
            let is_last = is_from_server && self.cuts_next.swap(false, Ordering::SeqCst);
            if to.write_all(&part).is_err() || is_last {
                break;
            }
        }
        let _ = to.shutdown(Shutdown::Both);
        let _ = from.shutdown(Shutdown::Both);
    }

    /// What happens to the next part, if anything.
    fn harm_now(&self, random: &mut Random) -> Option<Harm> {
        if !self.active.load(Ordering::SeqCst) || random.below(RARITY) != 0 {
            return None;
        }
        let now = self.started.elapsed().as_millis() as u64;
        let last = self.last_ms.load(Ordering::SeqCst);
        let is_due = now >= last + PAUSE.as_millis() as u64;
        if !is_due || self.last_ms.compare_exchange(last, now, Ordering::SeqCst, Ordering::SeqCst).is_err() {
            return None;
        }
        let mut which = random.below(HARMS.len() as u64) as usize;
        if HARMS[which] == Harm::Swallow && random.below(self.lasting) != 0 {
            which = 0;
        }
        self.counts[which].fetch_add(1, Ordering::SeqCst);
        Some(HARMS[which])
    }
}
