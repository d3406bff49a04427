//! The FUSE protocol of Linux on its two transports: /dev/fuse, and io_uring with a queue per core.
//!
//! A [`FileSystem`] answers [`Request`]s by filling in a [`Reply`]. Requests are handled on the transport
//! threads ([`Pace::Fast`]); one that must block says [`Failure::Again`] and is handled anew on a pool of
//! threads ([`Pace::Patient`]), with a token that tells when to give up.
//!
//! ```no_run
//! use hayloft_fuse::{Config, Errno, Failure, FileSystem, Forget, MountOptions, Operation, Pace, Reply};
//! use hayloft_fuse::{Attr, Request, Session, Validity, mount};
//!
//! /// An empty directory.
//! struct Empty;
//!
//! impl FileSystem for Empty {
//!     fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>, _: Pace<'_>) -> Result<(), Failure> {
//!         match request.op {
//!             Operation::Getattr { .. } => {
//!                 let attr = Attr { ino: request.nodeid, mode: 0o040_755, nlink: 2, ..Attr::default() };
//!                 reply.attr(&attr, Validity::FOREVER);
//!             }
//!             Operation::Opendir { .. } => reply.open(0, 0),
//!             Operation::Readdir { .. } | Operation::Releasedir { .. } => reply.empty(),
//!             Operation::Lookup { .. } => return Err(Errno::ENOENT.into()),
//!             _ => return Err(Errno::ENOSYS.into()),
//!         }
//!         Ok(())
//!     }
//!
//!     fn forget(&self, _: &[Forget]) {}
//! }
//!
//! let channel = mount("/mnt".as_ref(), &MountOptions::default())?;
//! Session::new(channel, Empty, Config::default())?.run()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! The protocol is that of the kernel's `include/uapi/linux/fuse.h`, version 7.31 (Linux 5.4) or newer.
//! Over io_uring (Linux 6.14, module parameter `enable_uring` of `fuse`) a request is handled on the core
//! that made it. FORGET and INTERRUPT come over /dev/fuse on either transport.

mod handling;
mod mounting;
mod protocol;
mod session;
mod sys;
mod transport;

pub use handling::config::{Config, Readdirplus, Transport};
pub use handling::counters::Counters;
pub use handling::error::SessionError;
pub use handling::filesystem::{Failure, FileSystem, Forget, Pace};
pub use handling::init::KernelInfo;
pub use handling::interrupt::Interrupt;
pub use mounting::abort::{Abort, abort};
pub use mounting::{Channel, MountError, MountOptions, mount, unmount};
pub use protocol::abi::capability;
pub use protocol::errno::Errno;
pub use protocol::reply::{Attr, DirectoryWriter, Entry, Reply, Statfs, Validity, open_flags};
pub use protocol::request::{Lock, Operation, Request, SetAttr, TimeOrNow, Timestamp, write_flags};
pub use session::{Session, SessionHandle};
pub use transport::control::{Control, has_ended};
pub use transport::notify::Notifier;
pub use transport::ring::{enable as enable_io_uring, enabled as io_uring_enabled};
