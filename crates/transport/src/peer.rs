//! Who is at the other end of a connection.

use std::fmt;
use std::net::SocketAddr;

/// Whom a server takes a peer for.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Identity {
    /// A user of the server's own host, as the kernel says.
    User(u32),
    /// Who has a certificate of this name.
    Certificate(String),
    /// Nobody knows: the server was started to take anybody.
    Anyone,
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Identity::User(uid) => write!(f, "uid:{uid}"),
            Identity::Certificate(name) => write!(f, "cert:{name}"),
            Identity::Anyone => write!(f, "anyone"),
        }
    }
}

/// The certificate that a peer has shown.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Shown {
    /// Its issuer's name, as it is encoded.
    pub(crate) issuer: Vec<u8>,
    pub(crate) serial: Vec<u8>,
    /// Seconds since the epoch.
    pub(crate) expires: i64,
}

/// A peer of a server.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Peer {
    /// Who it is.
    pub identity: Identity,
    /// Where it speaks from.
    pub address: SocketAddr,
    pub(crate) shown: Option<Shown>,
}

impl Peer {
    /// A peer that has shown no certificate.
    pub fn new(identity: Identity, address: SocketAddr) -> Peer {
        Peer { identity, address: SocketAddr::new(address.ip().to_canonical(), address.port()), shown: None }
    }
}
