//! Makes requests that wait in the kernel move on.
//!
//! The kernel (6.14 to 6.18 at least) puts a request into a slot when it comes and a slot is free, else it
//! waits. Waiting requests are looked at when an answer is committed, but not when a slot is registered. So
//! when many requests come at once and all slots of a core go to the pool, a waiting request would wait for
//! one of their answers although new slots are free; and for ever, if these answers depend on it. A request
//! made on that core then takes a free slot, and the commit of its answer lets the others move on: a
//! statfs(2) of the mount point, which the crate answers by itself.
//!
//! It is a call into one's own mount, so it is made only when all slots of a core may have been taken.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::handling::config::Config;
use crate::handling::pool::Pool;
use crate::protocol::abi::{InHeader, opcode};
use crate::sys;

/// Makes the calls, on threads of its own.
pub(super) struct Kicker {
    point: CString,
    pool: Pool,
    /// Threads in a call, so that their requests are known.
    callers: Mutex<Vec<u32>>,
    /// How many these are.
    calls: AtomicUsize,
}

impl Kicker {
    pub(super) fn new(point: &Path, cores: usize, config: &Config) -> io::Result<Kicker> {
        // A call may itself have to wait, until another call finds the free slot; at most one per slot does.
        let threads_max = cores * config.queue_depth_max as usize;
        let pool = Pool::new("fuse-kick", threads_max, threads_max, config.pool_idle);
        let point = CString::new(point.as_os_str().as_bytes())?;
        Ok(Kicker { point, pool, callers: Mutex::default(), calls: AtomicUsize::new(0) })
    }

    /// Makes a request on this core.
    pub(super) fn kick(self: &Arc<Self>, core: usize) {
        let kicker = Arc::clone(self);
        self.pool.submit(Box::new(move || {
            if let Err(error) = sys::pin_to_core(core) {
                tracing::debug!(core, %error, "cannot move to a core");
            }
            let thread = sys::thread_id();
            kicker.callers.lock().push(thread);
            kicker.calls.fetch_add(1, Ordering::Release);
            if let Err(error) = sys::touch_file_system(&kicker.point) {
                tracing::debug!(core, %error, "no kick");
            }
            kicker.calls.fetch_sub(1, Ordering::Release);
            kicker.callers.lock().retain(|other| *other != thread);
        }));
    }

    /// Whether a request is one of these.
    pub(super) fn made(&self, header: &InHeader) -> bool {
        header.opcode == opcode::STATFS
            && self.calls.load(Ordering::Acquire) > 0
            && self.callers.lock().contains(&header.pid)
    }

    /// The connection is gone: waits for the calls to end.
    pub(super) fn close(&self) {
        self.pool.close();
    }
}
