//! Connections between hosts: who is at the other end, and that nobody listens in or changes anything on the way.
//!
//! Within one host a connection is plain TCP, or a Unix socket, and the kernel says which user the peer is (`local`). Between hosts it is
//! TLS 1.3 with certificates on both sides ([`Credentials`]); `authority` is the small CA for those who have none. The
//! file-system path works on the two halves of a connection: an enum each, of which the plain arm is the bare socket.

pub mod authority;
mod client;
mod credentials;
mod local;
mod peer;
mod server;
#[cfg(test)]
mod tests;
mod verdict;

pub use client::{ConnectError, Dial, Receiving, Sending, unix_path};
pub use credentials::{Bundle, Credentials, CredentialsError, DEFAULT_FOLDER, write_new};
pub use peer::{Identity, Peer};
pub use server::{AcceptError, Acceptor, Caller, Incoming, Outgoing, Security};
pub use verdict::{Refusal, refusal};
