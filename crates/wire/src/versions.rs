//! Which protocol two sides speak: the newest that both know, and what of it.
//!
//! A side says the newest version that it speaks, the oldest that it still speaks, and its features. The version grows when
//! messages mean something else than before. What is only new is a feature: a bit that both have to have before one of the
//! two makes use of it. What a side cannot do without it says as well, so that it is refused in words and not misunderstood.

/// The oldest version of the protocol that this crate still speaks.
pub const PROTOCOL_OLDEST: u32 = crate::PROTOCOL;

/// A client ships what it has changed when the server says so ([`crate::Ship`]).
pub const SHIPS: u64 = 1;

/// A client knows of directories that are split in many slots (`hayloft_model::slot::Width`).
pub const MANY_SLOTS: u64 = 2;

/// A client lets go of what has no name any more when the server says so ([`crate::Pong::nameless`]).
pub const LETS_GO: u64 = 4;

/// The features that this crate knows beyond the protocol itself.
pub const FEATURES: u64 = SHIPS | MANY_SLOTS | LETS_GO;

/// What one side speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spoken<'a> {
    /// The newest version.
    pub newest: u32,
    /// The oldest; 0, as those say who know of one only: the newest.
    pub oldest: u32,
    /// Bits of what it can do beyond that.
    pub features: u64,
    /// Bits of what the other side has to be able to do.
    pub needs: u64,
    /// The release, for people; empty where it is not said.
    pub release: &'a str,
}

/// What both speak.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Agreed {
    /// The version.
    pub protocol: u32,
    /// The features that both have.
    pub features: u64,
}

/// Why two sides do not understand each other.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Mismatch {
    /// The client's newest version is older than the server's oldest.
    #[error(
        "the mount's hayloft{client} is older than the server{server} understands: install the server's version on this host, and mount again"
    )]
    ClientTooOld {
        /// The client's release and protocol.
        client: String,
        /// What the server speaks.
        server: String,
    },
    /// The server's newest version is older than the client's oldest.
    #[error(
        "the server's hayloft{server} is older than this host's{client} understands: install this version at the server first, the hosts follow"
    )]
    ServerTooOld {
        /// What the client speaks.
        client: String,
        /// The server's release and protocol.
        server: String,
    },
    /// One needs what the other has not.
    #[error("the {who} needs what the other side does not have (features {missing:#x}): {}", advice(.who))]
    Lacks {
        /// Who needs it: "client" or "server".
        who: &'static str,
        /// The bits of it.
        missing: u64,
    },
}

fn advice(who: &str) -> &'static str {
    match who {
        "client" => "install its version at the server first, or mount without the option that asks for it",
        _ => "install its version on this host, and mount again",
    }
}

impl Spoken<'static> {
    /// What this crate speaks.
    pub fn ours() -> Spoken<'static> {
        Spoken {
            newest: crate::PROTOCOL,
            oldest: PROTOCOL_OLDEST,
            features: FEATURES,
            needs: 0,
            release: env!("CARGO_PKG_VERSION"),
        }
    }
}

impl Spoken<'_> {
    fn oldest(&self) -> u32 {
        if self.oldest == 0 { self.newest } else { self.oldest }
    }

    /// As in " 0.2.0 (protocol 7 to 8)".
    fn shown(&self) -> String {
        let release = if self.release.is_empty() { String::new() } else { format!(" {}", self.release) };
        match (self.oldest(), self.newest) {
            (oldest, newest) if oldest == newest => format!("{release} (protocol {newest})"),
            (oldest, newest) => format!("{release} (protocol {oldest} to {newest})"),
        }
    }
}

/// What a client and a server speak with each other.
///
/// # Errors
/// One sentence: which of the two is older, and what to do.
pub fn agree(client: &Spoken<'_>, server: &Spoken<'_>) -> Result<Agreed, Mismatch> {
    if client.newest < server.oldest() {
        return Err(Mismatch::ClientTooOld { client: client.shown(), server: server.shown() });
    }
    if server.newest < client.oldest() {
        return Err(Mismatch::ServerTooOld { client: client.shown(), server: server.shown() });
    }
    let needed = [("client", client.needs & !server.features), ("server", server.needs & !client.features)];
    match needed.into_iter().find(|(_, missing)| *missing != 0) {
        Some((who, missing)) => Err(Mismatch::Lacks { who, missing }),
        None => Ok(Agreed {
            protocol: client.newest.min(server.newest),
            features: client.features & server.features,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn speaks(oldest: u32, newest: u32) -> Spoken<'static> {
        Spoken { newest, oldest, features: 0, needs: 0, release: "" }
    }

    #[test]
    fn the_newest_version_that_both_know_is_spoken() {
        for (client, server, agreed) in [
            ((8, 8), (8, 8), 8),
            ((7, 8), (8, 9), 8),
            ((8, 9), (7, 8), 8),
            ((0, 8), (8, 9), 8),
            ((8, 9), (0, 8), 8),
        ] {
            let (client, server) = (speaks(client.0, client.1), speaks(server.0, server.1));
            assert_eq!(agree(&client, &server).unwrap().protocol, agreed, "{client:?} {server:?}");
        }
    }

    #[test]
    fn who_is_older_is_told_what_to_do() {
        let said = |client, server| agree(&client, &server).unwrap_err().to_string();
        let client = said(Spoken { release: "0.1.0", ..speaks(0, 7) }, speaks(8, 9));
        assert!(client.contains("the mount's hayloft 0.1.0 (protocol 7) is older"), "{client}");
        assert!(client.contains("(protocol 8 to 9)") && client.contains("on this host"), "{client}");
        let server = said(speaks(8, 9), speaks(0, 7));
        assert!(server.contains("the server's hayloft (protocol 7) is older"), "{server}");
        assert!(server.contains("at the server first"), "{server}");
    }

    #[test]
    fn features_count_where_both_have_them() {
        let client = Spoken { features: 0b110, ..speaks(8, 8) };
        let server = Spoken { features: 0b011, ..speaks(8, 8) };
        assert_eq!(agree(&client, &server).unwrap().features, 0b010);
        let needs = |needs| Spoken { needs, ..client };
        assert!(agree(&needs(0b001), &server).is_ok());
        let said = agree(&needs(0b101), &server).unwrap_err().to_string();
        assert!(said.contains("the client needs") && said.contains("features 0x4"), "{said}");
        let demanding = Spoken { needs: 0b001, ..server };
        let said = agree(&client, &demanding).unwrap_err().to_string();
        assert!(said.contains("the server needs") && said.contains("on this host"), "{said}");
    }
}
