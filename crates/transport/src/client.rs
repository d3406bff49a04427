//! The client's end of a connection. Blocking: one thread reads, and whoever has the sending half writes.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection};
use socket2::{Domain, Protocol, SockRef, Socket, Type};

use crate::credentials::{Credentials, CredentialsError, VERSIONS, provider};
use crate::local::is_local;
use crate::verdict::{Refusal, refusal};

/// How long one may wait for a step of the handshake.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Encrypted bytes that are read at a time.
const READ_SIZE: usize = 256 * 1024;

/// Bytes that are encrypted before they are written out.
const WRITE_SIZE: usize = 256 * 1024;

/// Bytes of a small packet: with its headers it fits wherever IPv6 does.
const SMALL_SEGMENT: u32 = 1200;

/// Bytes that the kernel takes before it can send them: what is small and somebody waits for stands behind no more than these when
/// contents are on their way.
const UNSENT: u32 = 64 << 10;

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The address is none, or its host is not known.
    #[error("cannot find the host of the server")]
    Address(#[source] io::Error),
    /// Nobody answers.
    #[error("cannot reach the server")]
    Unreachable(#[source] io::Error),
    /// This host has nothing to prove itself with.
    #[error("a server on another host is reached by TLS")]
    Credentials(#[from] CredentialsError),
    /// One of the two does not believe the other.
    #[error("{}", .0.message())]
    Refused(Refusal),
}

impl ConnectError {
    /// Whether there was a connection, and no answer in time.
    pub fn is_silence(&self) -> bool {
        matches!(self, ConnectError::Unreachable(error) if error.kind() == io::ErrorKind::WouldBlock)
    }

    /// Whether it has no use to try again.
    pub fn is_final(&self) -> bool {
        matches!(self, ConnectError::Refused(Refusal::Own(_) | Refusal::OutOfTime(_)))
    }
}

/// How a client reaches servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dial {
    /// The folder of this host's credentials.
    pub credentials: PathBuf,
    /// Without TLS, whoever may listen in or answer.
    pub insecure: bool,
}

impl Dial {
    /// Connects to `HOST:PORT`, or to the socket at a path, `unix:/PATH`: without TLS within this host.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect(&self, address: &str, timeout: Duration) -> Result<(Sending, Receiving), ConnectError> {
        self.connect_by(address, |to| TcpStream::connect_timeout(&to, timeout))
    }

    /// The same; both sides send small packets only, for a network that loses larger ones and tells nobody.
    ///
    /// # Errors
    /// See [`ConnectError`].
    pub fn connect_narrow(
        &self,
        address: &str,
        timeout: Duration,
    ) -> Result<(Sending, Receiving), ConnectError> {
        self.connect_by(address, |to| {
            let socket = Socket::new(Domain::for_address(to), Type::STREAM, Some(Protocol::TCP))?;
            if !to.ip().is_loopback() {
                socket.set_tcp_mss(SMALL_SEGMENT)?;
            }
            socket.connect_timeout(&to.into(), timeout)?;
            Ok(socket.into())
        })
    }

    fn connect_by(
        &self,
        address: &str,
        connect: impl Fn(SocketAddr) -> io::Result<TcpStream>,
    ) -> Result<(Sending, Receiving), ConnectError> {
        if let Some(path) = unix_path(address) {
            let socket = UnixStream::connect(path).map_err(ConnectError::Unreachable)?;
            let sending = socket.try_clone().map_err(ConnectError::Unreachable)?;
            return Ok((Sending::Unix(sending), Receiving::Unix(socket)));
        }
        let mut last =
            ConnectError::Address(io::Error::new(io::ErrorKind::InvalidInput, "the address has no host"));
        for resolved in address.to_socket_addrs().map_err(ConnectError::Address)? {
            let socket = match connect(resolved) {
                Ok(socket) => socket,
                Err(error) => {
                    last = ConnectError::Unreachable(error);
                    continue;
                }
            };
            socket.set_nodelay(true).map_err(ConnectError::Unreachable)?;
            // Without it all is as well, and slower.
            let _ = SockRef::from(&socket).set_tcp_notsent_lowat(UNSENT);
            let is_plain = self.insecure || has_both_ends(&socket, resolved);
            return match is_plain {
                true => plain(socket).map_err(ConnectError::Unreachable),
                false => secure(socket, host_of(address), &self.credentials),
            };
        }
        Err(last)
    }

    /// Why there is no connection, with what this host's clock says of its own certificate. Clocks are set right again: to try again has a
    /// use then.
    pub fn by_own_clock(&self, error: ConnectError) -> ConnectError {
        let is_valid = || Credentials::load(&self.credentials).is_ok_and(|own| own.is_valid());
        match error {
            ConnectError::Refused(refusal) => ConnectError::Refused(refusal.by_own_clock(is_valid)),
            other => other,
        }
    }
}

/// The path in `unix:/PATH`, an address of a server on this host.
pub fn unix_path(address: &str) -> Option<&Path> {
    address.strip_prefix("unix:").map(Path::new)
}

/// Whether the server is on this host.
fn has_both_ends(socket: &TcpStream, server: SocketAddr) -> bool {
    socket.local_addr().is_ok_and(|own| is_local(own.ip(), server.ip()))
}

/// The host in `HOST:PORT`.
fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn plain(socket: TcpStream) -> io::Result<(Sending, Receiving)> {
    Ok((Sending::Plain(socket.try_clone()?), Receiving::Plain(socket)))
}

pub(crate) fn secure(
    mut socket: TcpStream,
    host: &str,
    folder: &Path,
) -> Result<(Sending, Receiving), ConnectError> {
    let config = config(folder)?;
    let name = ServerName::try_from(host.to_owned())
        .map_err(|error| ConnectError::Address(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
    let failed = |error: io::Error| match refusal(&error) {
        Some(refusal) => ConnectError::Refused(refusal),
        None => ConnectError::Unreachable(match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::WouldBlock => io::Error::new(
                error.kind(),
                "the server does not answer with TLS: was it started with --insecure, or is it another program?",
            ),
            _ => error,
        }),
    };
    let mut session =
        ClientConnection::new(Arc::new(config), name).map_err(|error| failed(io::Error::other(error)))?;
    session.set_buffer_limit(None);
    socket.set_read_timeout(Some(HANDSHAKE_TIMEOUT)).map_err(failed)?;
    while session.is_handshaking() {
        session.complete_io(&mut socket).map_err(failed)?;
    }
    socket.set_read_timeout(None).map_err(failed)?;
    let session = Arc::new(Mutex::new(session));
    let sending = SecureSending {
        socket: socket.try_clone().map_err(failed)?,
        session: Arc::clone(&session),
        encrypted: Vec::new(),
    };
    let receiving = SecureReceiving { socket, session, encrypted: vec![0; READ_SIZE], next: 0, end: 0 };
    Ok((Sending::Tls(sending), Receiving::Tls(receiving)))
}

fn config(folder: &Path) -> Result<ClientConfig, CredentialsError> {
    let credentials = Credentials::load(folder)?;
    let invalid = |reason: String| CredentialsError::Invalid { path: folder.to_owned(), reason };
    let mut verifier = WebPkiServerVerifier::builder_with_provider(credentials.authorities, provider())
        .only_check_end_entity_revocation()
        .allow_unknown_revocation_status();
    if !credentials.revoked.is_empty() {
        verifier = verifier.with_crls(credentials.revoked);
    }
    let verifier = verifier.build().map_err(|error| invalid(error.to_string()))?;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(VERSIONS)
        .expect("the provider has TLS 1.3")
        .with_webpki_verifier(verifier)
        .with_client_auth_cert(credentials.chain, credentials.key)
        .map_err(|error| invalid(error.to_string()))?;
    // Every connection shows its certificate.
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// The sending half of a connection.
pub enum Sending {
    /// Within a host.
    Plain(TcpStream),
    /// Within a host, by way of a file.
    Unix(UnixStream),
    /// Between hosts.
    Tls(SecureSending),
}

/// The receiving half of a connection.
pub enum Receiving {
    /// Within a host.
    Plain(TcpStream),
    /// Within a host, by way of a file.
    Unix(UnixStream),
    /// Between hosts.
    Tls(SecureReceiving),
}

/// Encrypts, and writes. The session is not locked while it writes: what arrives can be read meanwhile.
pub struct SecureSending {
    socket: TcpStream,
    session: Arc<Mutex<ClientConnection>>,
    encrypted: Vec<u8>,
}

/// Reads, and decrypts.
pub struct SecureReceiving {
    socket: TcpStream,
    session: Arc<Mutex<ClientConnection>>,
    encrypted: Vec<u8>,
    /// What of it is not decrypted yet.
    next: usize,
    end: usize,
}

impl Sending {
    /// Writes all of it; it is on its way when this returns.
    ///
    /// # Errors
    /// The connection is broken, and no more can be written.
    pub fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Sending::Plain(socket) => socket.write_all(bytes),
            Sending::Unix(socket) => socket.write_all(bytes),
            Sending::Tls(secure) => secure.write_all(bytes),
        }
    }

    /// The socket below: to wait for room, to set limits, or to break the connection off.
    pub fn socket(&self) -> SockRef<'_> {
        match self {
            Sending::Plain(socket) => SockRef::from(socket),
            Sending::Unix(socket) => SockRef::from(socket),
            Sending::Tls(secure) => SockRef::from(&secure.socket),
        }
    }
}

impl Receiving {
    /// Reads what there is, at least a byte; 0 at the end.
    ///
    /// # Errors
    /// As a socket; [`refusal`] says whether it is about certificates.
    pub fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Receiving::Plain(socket) => socket.read(into),
            Receiving::Unix(socket) => socket.read(into),
            Receiving::Tls(secure) => secure.read(into),
        }
    }

    /// The socket below.
    pub fn socket(&self) -> SockRef<'_> {
        match self {
            Receiving::Plain(socket) => SockRef::from(socket),
            Receiving::Unix(socket) => SockRef::from(socket),
            Receiving::Tls(secure) => SockRef::from(&secure.socket),
        }
    }
}

impl SecureSending {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        for part in bytes.chunks(WRITE_SIZE) {
            self.encrypted.clear();
            {
                let mut session = self.session.lock();
                session.writer().write_all(part)?;
                while session.wants_write() {
                    session.write_tls(&mut self.encrypted)?;
                }
            }
            self.socket.write_all(&self.encrypted)?;
        }
        Ok(())
    }
}

impl SecureReceiving {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            {
                let mut session = self.session.lock();
                match session.reader().read(into) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    done => return done,
                }
                if self.next < self.end {
                    let mut rest = &self.encrypted[self.next..self.end];
                    self.next += session.read_tls(&mut rest)?;
                    session.process_new_packets().map_err(io::Error::other)?;
                    continue;
                }
            }
            let count = self.socket.read(&mut self.encrypted)?;
            if count == 0 {
                // Messages are framed: one that is cut off is seen as such.
                return Ok(0);
            }
            (self.next, self.end) = (0, count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_addresses() {
        assert_eq!(host_of("farm1:7440"), "farm1");
        assert_eq!(host_of("[::1]:7440"), "::1");
        assert_eq!(host_of("10.0.0.1:7440"), "10.0.0.1");
    }
}
