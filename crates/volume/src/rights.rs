//! What a peer may do with a volume. The server decides it, for each connection and each request: clients are not trusted.

use std::net::IpAddr;
use std::str::FromStr;

use hayloft_transport::{Identity, Peer, Security};
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::database::registry::Registered;
use crate::error::VolumeError;
use crate::server::Shared;

/// How much.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Right {
    /// Not even that it is there.
    None,
    /// Mounting it read-only.
    Read,
    /// Mounting it.
    Write,
    /// Its quota, its rights, ending sessions, deleting it.
    Admin,
}

impl FromStr for Right {
    type Err = VolumeError;

    fn from_str(text: &str) -> Result<Right, VolumeError> {
        match text {
            "none" => Ok(Right::None),
            "read" => Ok(Right::Read),
            "write" => Ok(Right::Write),
            "admin" => Ok(Right::Admin),
            _ => Err(VolumeError::Invalid("a right is one of none, read, write, admin")),
        }
    }
}

impl std::fmt::Display for Right {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Right::None => "none",
            Right::Read => "read",
            Right::Write => "write",
            Right::Admin => "admin",
        })
    }
}

/// A right that somebody was given.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(crate) struct Grant {
    /// `cert:NAME`, `uid:NUMBER`, `cert:*` or `uid:*`.
    pub(crate) who: String,
    pub(crate) right: Right,
    /// Networks that they may come from; none: from anywhere.
    #[serde(default)]
    pub(crate) from: Vec<IpNet>,
}

impl Grant {
    /// Checks what a client says.
    pub(crate) fn new(who: &str, right: &str, from: &[String]) -> Result<Grant, VolumeError> {
        let is_fine = match who.split_once(':') {
            Some(("cert", name)) => !name.is_empty() && name.len() <= 255 && !name.contains(char::is_control),
            Some(("uid", uid)) => {
                uid == "*" || uid.parse::<u32>().is_ok_and(|number| number.to_string() == uid)
            }
            _ => false,
        };
        if !is_fine {
            return Err(VolumeError::Invalid("rights are given to cert:NAME, uid:NUMBER, cert:* or uid:*"));
        }
        let network = |text: &String| {
            let address = || text.parse::<IpAddr>().map(IpNet::from);
            text.parse::<IpNet>().or_else(|_| address()).map(|network| network.trunc())
        };
        let from: Result<Vec<IpNet>, _> = from.iter().map(network).collect();
        let from = from.map_err(|_| VolumeError::Invalid("a network is written 10.1.0.0/16"))?;
        Ok(Grant { who: who.to_owned(), right: right.parse()?, from })
    }

    fn right_from(&self, address: IpAddr) -> Right {
        let is_from = self.from.is_empty() || self.from.iter().any(|network| network.contains(&address));
        if is_from { self.right } else { Right::None }
    }
}

/// What the rights of a volume give a peer: those of its name, else of the volume's owner, else of its kind.
pub(crate) fn given(of: &Registered, peer: &Peer) -> Right {
    let name = peer.identity.to_string();
    let find = |who: &str| of.rights.iter().find(|grant| grant.who == who);
    let address = peer.address.ip();
    // A certificate of the name `*` is not everybody.
    let exact = find(&name).filter(|grant| !grant.who.ends_with(":*"));
    if let Some(grant) = exact {
        return grant.right_from(address);
    }
    let kind = match peer.identity {
        Identity::User(uid) if uid == of.root.1 => return Right::Write,
        Identity::User(_) => "uid:*",
        Identity::Certificate(_) => "cert:*",
        Identity::Anyone => return Right::None,
    };
    find(kind).map_or(Right::None, |grant| grant.right_from(address))
}

impl Shared {
    /// Whether a peer may do everything: root of the server's host, and the user that the server runs as.
    pub(crate) fn is_master(&self, peer: &Peer) -> bool {
        *self.acceptor.security() == Security::Insecure
            || matches!(peer.identity, Identity::User(uid) if uid == 0 || uid == self.own_uid)
    }

    /// What a peer may do with a volume.
    pub(crate) fn right_of(&self, peer: &Peer, of: &Registered) -> Right {
        if self.is_master(peer) { Right::Admin } else { given(of, peer) }
    }
}

/// The error for who has too small a right.
pub(crate) fn denied(peer: &Peer, volume: &str, right: Right, needed: Right) -> VolumeError {
    let who = &peer.identity;
    VolumeError::Denied(match right {
        Right::Read if needed == Right::Write => {
            format!("{who} may only read volume {volume}: mount it with -o ro")
        }
        _ => format!(
            "{who}, from {}, has not the right '{needed}' on volume {volume} (its administrator gives it: hayloft volume grant {volume} {who} {needed})",
            peer.address.ip()
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(identity: Identity, address: &str) -> Peer {
        Peer::new(identity, format!("{address}:1000").parse().unwrap())
    }

    fn cert(name: &str) -> Peer {
        peer(Identity::Certificate(name.to_owned()), "10.1.2.3")
    }

    fn volume(rights: &[(&str, &str, &[&str])]) -> Registered {
        let grant = |(who, right, from): &(&str, &str, &[&str])| {
            Grant::new(who, right, &from.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap()
        };
        Registered {
            rights: rights.iter().map(grant).collect(),
            ..Registered::new(0, 0, (0o755, 1000, 1000))
        }
    }

    #[test]
    fn nobody_has_a_right_but_the_owner() {
        let of = volume(&[]);
        assert_eq!(given(&of, &cert("build1")), Right::None);
        assert_eq!(given(&of, &cert("*")), Right::None);
        assert_eq!(given(&of, &cert("uid:1000")), Right::None, "of that name, not that user");
        assert_eq!(given(&of, &peer(Identity::User(65_534), "127.0.0.1")), Right::None);
        assert_eq!(given(&of, &peer(Identity::User(1000), "127.0.0.1")), Right::Write);
        assert_eq!(given(&of, &peer(Identity::Anyone, "10.0.0.1")), Right::None);
    }

    #[test]
    fn a_right_of_ones_own_counts_before_that_of_ones_kind() {
        let of = volume(&[("cert:*", "write", &[]), ("cert:guest", "read", &[]), ("cert:out", "none", &[])]);
        assert_eq!(given(&of, &cert("build1")), Right::Write);
        assert_eq!(given(&of, &cert("guest")), Right::Read);
        assert_eq!(given(&of, &cert("out")), Right::None);
        assert_eq!(given(&of, &peer(Identity::User(7), "127.0.0.1")), Right::None);
    }

    #[test]
    fn a_network_that_one_does_not_come_from_gives_nothing() {
        let of = volume(&[("cert:*", "write", &[]), ("cert:build1", "admin", &["10.1.0.0/16", "::1"])]);
        assert_eq!(given(&of, &cert("build1")), Right::Admin);
        let elsewhere = peer(Identity::Certificate("build1".to_owned()), "10.2.0.1");
        assert_eq!(given(&of, &elsewhere), Right::None);
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for who in ["build1", "cert:", "uid:x", "uid:007", "uid:-1", "*", "cert:a\nb", "host:a"] {
            assert!(Grant::new(who, "read", &[]).is_err(), "{who}");
        }
        assert!(Grant::new("cert:a", "root", &[]).is_err());
        assert!(Grant::new("cert:a", "read", &["10.0.0.0/33".to_owned()]).is_err());
    }
}
