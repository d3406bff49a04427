//! What both transports share: from a parsed message to an answer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use crate::handling::config::Config;
use crate::handling::filesystem::{Failure, FileSystem, Forget, Pace};
use crate::handling::init::KernelInfo;
use crate::handling::interrupt::{Interrupt, Interrupts};
use crate::handling::pool::Pool;
use crate::protocol::abi::{Fields, IN_HEADER_SIZE, InHeader, Malformed, PAGE_SIZE, fixed_size, opcode};
use crate::protocol::errno::Errno;
use crate::protocol::reply::Reply;
use crate::protocol::request::Request;

/// What became of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Answered: 0, or a negative error number (the content of the reply then doesn't count).
    Answer(i32),
    /// To be handled again by a pool thread.
    Again,
}

/// A mounted file system, whatever the transport.
pub(crate) struct Engine<F> {
    pub(crate) fs: F,
    pub(crate) config: Config,
    pub(crate) info: KernelInfo,
    pub(crate) interrupts: Interrupts,
    pool: Pool,
    lock_pool: Pool,
}

impl<F: FileSystem> Engine<F> {
    pub(crate) fn new(fs: F, config: Config, info: KernelInfo) -> Engine<F> {
        let pool = |name, threads_max| Pool::new(name, threads_max, config.pool_queue_max, config.pool_idle);
        let pool_of = (config.pool_threads_max, config.lock_threads_max);
        let (pool, lock_pool) = (pool("fuse-pool", pool_of.0), pool("fuse-locks", pool_of.1));
        Engine { fs, config, info, interrupts: Interrupts::default(), pool, lock_pool }
    }

    /// Handles one request at the given pace.
    pub(crate) fn serve(&self, message: &Message<'_>, reply: &mut Reply<'_>, pace: Pace<'_>) -> Verdict {
        let Ok(request) = message.parse(self.setxattr_ext()) else {
            tracing::warn!(opcode = message.header.opcode, "malformed request");
            return Verdict::Answer(-libc::EIO);
        };
        match message.header.opcode {
            opcode::DESTROY => return Verdict::Answer(0),
            opcode::OPEN if self.config.no_open => return Verdict::Answer(-libc::ENOSYS),
            opcode::OPENDIR if self.config.no_opendir => return Verdict::Answer(-libc::ENOSYS),
            _ => {}
        }
        let result = catch_unwind(AssertUnwindSafe(|| self.fs.handle(&request, reply, pace)));
        match (result, pace) {
            (Ok(Ok(())), _) => Verdict::Answer(0),
            (Ok(Err(Failure::Errno(errno))), _) => Verdict::Answer(-errno.raw()),
            (Ok(Err(Failure::Again)), Pace::Fast) => {
                reply.clear();
                Verdict::Again
            }
            (Ok(Err(Failure::Again)), Pace::Patient(_)) => Verdict::Answer(-Errno::EIO.raw()),
            (Err(_), _) => {
                tracing::error!(op = ?request.op, "a request panicked");
                Verdict::Answer(-Errno::EIO.raw())
            }
        }
    }

    /// Hands a request to the pool. `work` gets the token and must end with [`Engine::serve_patiently`].
    pub(crate) fn submit(
        self: &Arc<Self>,
        header: &InHeader,
        work: impl FnOnce(&Self, &Interrupt) + Send + 'static,
    ) {
        let for_lock = header.opcode == opcode::SETLKW;
        let token = self.interrupts.register(header.unique, header.pid, for_lock);
        let pool = if for_lock { &self.lock_pool } else { &self.pool };
        let engine = Arc::clone(self);
        pool.submit(Box::new(move || work(&engine, &token)));
    }

    /// Handles one request on a pool thread; returns 0 or a negative error number.
    pub(crate) fn serve_patiently(
        &self,
        message: &Message<'_>,
        reply: &mut Reply<'_>,
        token: &Interrupt,
    ) -> i32 {
        let verdict = self.serve(message, reply, Pace::Patient(token));
        self.interrupts.finish(message.header.unique);
        match verdict {
            Verdict::Answer(error) => error,
            Verdict::Again => -libc::EIO,
        }
    }

    /// A pool thread has handed over its answer.
    pub(crate) fn answered(&self, unique: u64) {
        self.fs.answered(unique);
    }

    /// Takes a FORGET or BATCH_FORGET.
    pub(crate) fn forget(&self, message: &Message<'_>) {
        match forgets(message) {
            Ok(forgets) => {
                if catch_unwind(AssertUnwindSafe(|| self.fs.forget(&forgets))).is_err() {
                    tracing::error!("a forget panicked");
                }
            }
            Err(Malformed) => tracing::warn!("malformed forget"),
        }
    }

    /// The connection is gone: ends what is on the pool and waits for its threads.
    pub(crate) fn close(&self) {
        self.interrupts.close();
        self.pool.close();
        self.lock_pool.close();
    }

    /// Whether SETXATTR comes in its longer form.
    pub(crate) fn setxattr_ext(&self) -> bool {
        self.info.has(crate::protocol::abi::capability::SETXATTR_EXT)
    }

    /// How large a transport's memory for content must be.
    pub(crate) fn content_max(&self) -> usize {
        // Extended attributes take up to 64 KiB, and kernels without MAX_PAGES send 128 KiB.
        (self.info.max_write as usize).max(32 * PAGE_SIZE)
    }
}

/// A message of the kernel in its parts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Message<'a> {
    pub(crate) header: InHeader,
    /// The structure with the fixed fields.
    pub(crate) fixed: &'a [u8],
    /// Names and data.
    pub(crate) rest: &'a [u8],
}

impl<'a> Message<'a> {
    /// Splits a message that came in one piece.
    pub(crate) fn split(bytes: &'a [u8], setxattr_ext: bool) -> Result<Message<'a>, Malformed> {
        let header = InHeader::parse(bytes)?;
        let body = bytes.get(IN_HEADER_SIZE..header.len as usize).ok_or(Malformed)?;
        let size = match header.opcode {
            opcode::SETXATTR if !setxattr_ext => 8,
            opcode => fixed_size(opcode),
        };
        let (fixed, rest) = body.split_at_checked(size).ok_or(Malformed)?;
        Ok(Message { header, fixed, rest })
    }

    fn parse(&self, setxattr_ext: bool) -> Result<Request<'a>, Malformed> {
        Request::parse(&self.header, self.fixed, self.rest, setxattr_ext)
    }

    /// How much content the answer may have, at most `content_max`.
    pub(crate) fn capacity(&self, content_max: usize) -> usize {
        let u32_at =
            |offset| Fields(self.fixed.get(offset..).unwrap_or_default()).u32().unwrap_or(0) as usize;
        let asked = match self.header.opcode {
            opcode::READ | opcode::READDIR | opcode::READDIRPLUS => u32_at(16),
            opcode::GETXATTR | opcode::LISTXATTR => u32_at(0),
            opcode::IOCTL => u32_at(28),
            opcode::READLINK => PAGE_SIZE - 1,
            _ => 0,
        };
        asked.min(content_max)
    }

    /// The number in an INTERRUPT.
    pub(crate) fn interrupted(&self) -> Result<u64, Malformed> {
        Fields(self.fixed).u64()
    }
}

fn forgets(message: &Message<'_>) -> Result<Vec<Forget>, Malformed> {
    let mut fields = Fields(message.fixed);
    if message.header.opcode == opcode::FORGET {
        return Ok(vec![Forget { nodeid: message.header.nodeid, nlookup: fields.u64()? }]);
    }
    let count = fields.u32()? as usize;
    let mut fields = Fields(message.rest);
    let mut forgets = Vec::with_capacity(count.min(message.rest.len() / 16));
    for _ in 0..count {
        forgets.push(Forget { nodeid: fields.u64()?, nlookup: fields.u64()? });
    }
    Ok(forgets)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; IN_HEADER_SIZE];
        bytes.extend(body);
        let len = bytes.len() as u32;
        bytes[0..4].copy_from_slice(&len.to_ne_bytes());
        bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        bytes[16..24].copy_from_slice(&5u64.to_ne_bytes());
        bytes
    }

    #[test]
    fn messages_are_split_behind_their_fixed_fields() {
        let bytes = message(opcode::MKDIR, b"12345678name\0");
        let split = Message::split(&bytes, true).unwrap();
        assert_eq!((split.fixed, split.rest), (&b"12345678"[..], &b"name\0"[..]));
        assert!(Message::split(&bytes[..bytes.len() - 1], true).is_err());
        assert!(Message::split(&message(opcode::MKDIR, b"1234"), true).is_err());
        let bytes = message(opcode::SETXATTR, &[1; 20]);
        assert_eq!(Message::split(&bytes, true).unwrap().fixed.len(), 16);
        assert_eq!(Message::split(&bytes, false).unwrap().fixed.len(), 8);
    }

    #[test]
    fn forgets_come_alone_or_in_batches() {
        let bytes = message(opcode::FORGET, &3u64.to_ne_bytes());
        let one = forgets(&Message::split(&bytes, true).unwrap()).unwrap();
        assert_eq!(one, [Forget { nodeid: 5, nlookup: 3 }]);
        let words = [2u64, 10, 1, 11, 4].map(u64::to_ne_bytes).concat();
        let bytes = message(opcode::BATCH_FORGET, &words);
        let batch = forgets(&Message::split(&bytes, true).unwrap()).unwrap();
        assert_eq!(batch, [Forget { nodeid: 10, nlookup: 1 }, Forget { nodeid: 11, nlookup: 4 }]);
        let bytes = message(opcode::BATCH_FORGET, &words[..24]);
        assert!(forgets(&Message::split(&bytes, true).unwrap()).is_err());
    }

    #[test]
    fn the_capacity_is_what_was_asked() {
        let mut read = [0; 40];
        read[16..20].copy_from_slice(&65536u32.to_ne_bytes());
        let bytes = message(opcode::READ, &read);
        let split = Message::split(&bytes, true).unwrap();
        assert_eq!((split.capacity(1 << 20), split.capacity(4096)), (65536, 4096));
        let bytes = message(opcode::READLINK, &[]);
        assert_eq!(Message::split(&bytes, true).unwrap().capacity(1 << 20), 4095);
    }
}
