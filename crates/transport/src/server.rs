//! The server's end of a connection: who comes in, and as whom.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::BufMut;
use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustls::ServerConfig;
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use tokio::io::{AsyncReadExt, AsyncWriteExt, BufReader, ReadHalf, WriteHalf};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::unix;
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use x509_parser::num_bigint::BigUint;
use x509_parser::prelude::{CertificateRevocationList, FromDer};

use crate::credentials::{Credentials, CredentialsError, FILES, VERSIONS, provider, shown};
use crate::local::{is_local, user_of};
use crate::peer::{Identity, Peer};

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the end of a connection that is refused is waited for: it carries the reason to the peer.
const FAREWELL: Duration = Duration::from_secs(1);

/// Encrypted bytes that are read at a time.
const READ_BUFFER: usize = 64 * 1024;

/// Who may come from other hosts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Security {
    /// Nobody: it is for users of this host.
    Local,
    /// Who has a certificate that the folder's CA has issued.
    Tls(PathBuf),
    /// Anybody, as anybody, in the clear.
    Insecure,
}

/// Why somebody does not come in.
#[derive(Debug, thiserror::Error)]
pub enum AcceptError {
    /// The connection is broken, or its end is gone already.
    #[error("the connection broke")]
    Broken(#[from] io::Error),
    /// The kernel does not say who it is.
    #[error("the peer has gone, or is of another network namespace: nobody knows which user it is")]
    Unknown,
    /// It comes from another host, which the server does not serve.
    #[error("it comes from another host, and this server is for users of this one")]
    Foreign,
    /// It did not prove who it is.
    #[error("it did not prove who it is")]
    Handshake(#[source] io::Error),
    /// It took too long.
    #[error("it did not finish the TLS handshake within {} s", HANDSHAKE_TIMEOUT.as_secs())]
    Slow,
    /// Its certificate has no name.
    #[error("its certificate has no name")]
    Nameless,
}

/// Issuers and serial numbers of certificates.
type Revoked = HashSet<(Vec<u8>, Vec<u8>)>;

/// How new a list of revoked certificates is: its number, which grows, and when it was made.
#[derive(Clone)]
struct Age {
    number: Option<BigUint>,
    made: i64,
}

impl Age {
    fn is_after(&self, other: &Age) -> bool {
        match (&self.number, &other.number) {
            (Some(own), Some(other)) => own > other,
            _ => self.made > other.made,
        }
    }
}

/// What a folder of credentials was at some time.
type Stamp = Vec<Option<(u64, u64, i64, i64)>>;

struct Loaded {
    stamp: Stamp,
    config: Arc<ServerConfig>,
    revoked: Arc<Revoked>,
    /// The lists of revoked certificates, by their issuers.
    lists: HashMap<Vec<u8>, Age>,
    /// Of the CAs that are believed, their subjects without what stands before them.
    authorities: Vec<Vec<u8>>,
}

impl Loaded {
    /// Why these cannot come after those: somebody who was revoked would come in again.
    fn forgets(&self, before: &Loaded) -> Option<String> {
        before.lists.iter().find_map(|(issuer, age)| {
            let is_believed = self.authorities.iter().any(|subject| issuer.ends_with(subject));
            let stays = before.revoked.iter().filter(|(of, _)| of == issuer).all(|one| self.revoked.contains(one));
            match self.lists.get(issuer) {
                None if is_believed => Some(
                    "the list of revoked certificates (crl.pem) is gone: bring it back, or start the server anew without it"
                        .to_owned(),
                ),
                Some(new) if !stays && !new.is_after(age) => Some(
                    "the list of revoked certificates (crl.pem) is no newer than the one before, and lacks certificates of that: bring the CA's newest"
                        .to_owned(),
                ),
                _ => None,
            }
        })
    }
}

/// Lets peers in.
pub struct Acceptor {
    security: Security,
    /// A leaf: nothing is taken under it.
    loaded: Mutex<Option<Loaded>>,
}

/// A connection that has come, of somebody not known yet.
pub enum Caller {
    /// By the network, perhaps within this host.
    Tcp(TcpStream),
    /// By way of a file of this host.
    Unix(UnixStream),
}

impl AsFd for Caller {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Caller::Tcp(socket) => socket.as_fd(),
            Caller::Unix(socket) => socket.as_fd(),
        }
    }
}

impl From<TcpStream> for Caller {
    fn from(socket: TcpStream) -> Caller {
        Caller::Tcp(socket)
    }
}

impl From<UnixStream> for Caller {
    fn from(socket: UnixStream) -> Caller {
        Caller::Unix(socket)
    }
}

/// Where a connection by way of a file comes from.
const WITHIN: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

type Secure = TlsStream<BufReader<TcpStream>>;

/// The incoming half of a connection.
pub enum Incoming {
    /// Within a host.
    Plain(OwnedReadHalf),
    /// Within a host, by way of a file.
    Unix(unix::OwnedReadHalf),
    /// Between hosts; and the socket.
    Tls(ReadHalf<Secure>, OwnedFd),
}

/// The outgoing half of a connection.
pub enum Outgoing {
    /// Within a host.
    Plain(OwnedWriteHalf),
    /// Within a host, by way of a file.
    Unix(unix::OwnedWriteHalf),
    /// Between hosts.
    Tls(WriteHalf<Secure>),
}

impl Incoming {
    /// Appends what there is, at least a byte; 0 at the end. Nothing is lost when it is dropped before it is done.
    ///
    /// # Errors
    /// As a socket.
    pub async fn read_buf<B: BufMut>(&mut self, into: &mut B) -> io::Result<usize> {
        match self {
            Incoming::Plain(socket) => socket.read_buf(into).await,
            Incoming::Unix(socket) => socket.read_buf(into).await,
            Incoming::Tls(secure, _) => secure.read_buf(into).await,
        }
    }

    /// Whether the peer has closed its end, seen without reading what it has sent before. What it waited for is of no use.
    pub fn has_hung_up(&self) -> bool {
        let socket = match self {
            Incoming::Plain(socket) => socket.as_ref().as_fd(),
            Incoming::Unix(socket) => socket.as_ref().as_fd(),
            Incoming::Tls(_, socket) => socket.as_fd(),
        };
        let mut seen = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        matches!(poll(&mut seen, Some(&now)), Ok(1..))
    }
}

impl Outgoing {
    /// Writes some of it, at least a byte, and says how much. Nothing is lost when it is dropped before it is done.
    ///
    /// # Errors
    /// As a socket.
    pub async fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Outgoing::Plain(socket) => socket.write(bytes).await,
            Outgoing::Unix(socket) => socket.write(bytes).await,
            Outgoing::Tls(secure) => secure.write(bytes).await,
        }
    }

    /// What was written is on its way when this returns. May be dropped, and called again.
    ///
    /// # Errors
    /// As a socket.
    pub async fn flush(&mut self) -> io::Result<()> {
        match self {
            // Sockets keep nothing back.
            Outgoing::Plain(_) | Outgoing::Unix(_) => Ok(()),
            Outgoing::Tls(secure) => secure.flush().await,
        }
    }
}

impl Acceptor {
    /// # Errors
    /// The credentials cannot be used.
    pub fn new(security: Security) -> Result<Acceptor, CredentialsError> {
        let acceptor = Acceptor { security, loaded: Mutex::default() };
        if let Security::Tls(folder) = &acceptor.security {
            *acceptor.loaded.lock() = Some(load(folder, stamp(folder))?);
        }
        Ok(acceptor)
    }

    /// Who may come from other hosts.
    pub fn security(&self) -> &Security {
        &self.security
    }

    /// Lets a peer in: within this host the user counts, else the certificate.
    ///
    /// # Errors
    /// See [`AcceptError`].
    pub async fn accept(&self, caller: impl Into<Caller>) -> Result<(Incoming, Outgoing, Peer), AcceptError> {
        let socket = match caller.into() {
            Caller::Tcp(socket) => socket,
            Caller::Unix(socket) => {
                let peer = Peer::new(Identity::User(socket.peer_cred()?.uid()), WITHIN);
                let (incoming, outgoing) = socket.into_split();
                return Ok((Incoming::Unix(incoming), Outgoing::Unix(outgoing), peer));
            }
        };
        let (own, address) = (socket.local_addr()?, socket.peer_addr()?);
        if is_local(own.ip(), address.ip()) {
            let uid = user_of(own, address)?.ok_or(AcceptError::Unknown)?;
            return Ok(plain(socket, Peer::new(Identity::User(uid), address)));
        }
        self.accept_foreign(socket, address).await
    }

    /// Lets a peer in that is on another host.
    pub(crate) async fn accept_foreign(
        &self,
        socket: TcpStream,
        address: SocketAddr,
    ) -> Result<(Incoming, Outgoing, Peer), AcceptError> {
        match &self.security {
            Security::Local => Err(AcceptError::Foreign),
            Security::Insecure => Ok(plain(socket, Peer::new(Identity::Anyone, address))),
            Security::Tls(_) => {
                self.refresh();
                let config = self.current().0;
                let mut peer = Peer::new(Identity::Anyone, address);
                let own = socket.as_fd().try_clone_to_owned()?;
                let stream = handshake(config, socket).await?;
                let chain = stream.get_ref().1.peer_certificates().unwrap_or_default();
                let (name, shown) = chain.first().and_then(shown).ok_or(AcceptError::Nameless)?;
                (peer.identity, peer.shown) = (Identity::Certificate(name), Some(shown));
                let (incoming, outgoing) = tokio::io::split(stream);
                Ok((Incoming::Tls(incoming, own), Outgoing::Tls(outgoing), peer))
            }
        }
    }

    /// Whether a peer that was let in may stay, as [`Acceptor::refresh`] has found: `Err` says why not.
    ///
    /// # Errors
    /// One sentence.
    pub fn check(&self, peer: &Peer) -> Result<(), &'static str> {
        let (Security::Tls(_), Some(shown)) = (&self.security, &peer.shown) else { return Ok(()) };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
        if shown.expires < now {
            return Err("its certificate has expired");
        }
        let revoked = self.current().1;
        match revoked.contains(&(shown.issuer.clone(), shown.serial.clone())) {
            true => Err("its certificate was revoked"),
            false => Ok(()),
        }
    }

    /// What the folder said when it was looked at last.
    fn current(&self) -> (Arc<ServerConfig>, Arc<Revoked>) {
        let loaded = self.loaded.lock();
        let loaded = loaded.as_ref().expect("credentials were loaded when the server began");
        (Arc::clone(&loaded.config), Arc::clone(&loaded.revoked))
    }

    /// Reads the folder again when a file of it has changed; what cannot be used changes nothing.
    pub fn refresh(&self) {
        let Security::Tls(folder) = &self.security else { return };
        let stamp = stamp(folder);
        if self.loaded.lock().as_ref().is_some_and(|loaded| loaded.stamp == stamp) {
            return;
        }
        let new = load(folder, stamp.clone());
        let mut loaded = self.loaded.lock();
        let forgets = |new: &Loaded| loaded.as_ref().and_then(|before| new.forgets(before));
        let new = new.and_then(|new| match forgets(&new) {
            Some(reason) => Err(CredentialsError::Invalid { path: folder.to_owned(), reason }),
            None => Ok(new),
        });
        match new {
            Ok(new) => {
                tracing::info!(folder = %folder.display(), "the certificates were read again");
                *loaded = Some(new);
            }
            Err(error) => {
                let reason = std::error::Error::source(&error).map(ToString::to_string);
                tracing::error!(%error, reason, "the certificates have changed, and cannot be used: the old ones hold");
                loaded.as_mut().expect("credentials were loaded when the server began").stamp = stamp;
            }
        }
    }
}

fn plain(socket: TcpStream, peer: Peer) -> (Incoming, Outgoing, Peer) {
    let (incoming, outgoing) = socket.into_split();
    (Incoming::Plain(incoming), Outgoing::Plain(outgoing), peer)
}

async fn handshake(config: Arc<ServerConfig>, socket: TcpStream) -> Result<Secure, AcceptError> {
    let socket = BufReader::with_capacity(READ_BUFFER, socket);
    let accepting = TlsAcceptor::from(config).accept(socket).into_fallible();
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, accepting).await {
        Err(_) => Err(AcceptError::Slow),
        Ok(Ok(stream)) => Ok(stream),
        Ok(Err((error, mut socket))) => {
            // Who has more to say than is read gets a reset, which may overtake the reason.
            let _ = socket.shutdown().await;
            let draining = async { while matches!(socket.read(&mut [0; 4096]).await, Ok(1..)) {} };
            let _ = tokio::time::timeout(FAREWELL, draining).await;
            Err(AcceptError::Handshake(error))
        }
    }
}

fn stamp(folder: &Path) -> Stamp {
    let of = |name: &&str| {
        let found = std::fs::metadata(folder.join(name)).ok()?;
        Some((found.ino(), found.len(), found.mtime(), found.mtime_nsec()))
    };
    FILES.iter().map(of).collect()
}

fn load(folder: &Path, stamp: Stamp) -> Result<Loaded, CredentialsError> {
    let credentials = Credentials::load(folder)?;
    let invalid = |reason: String| CredentialsError::Invalid { path: folder.to_owned(), reason };
    let authorities = credentials.authorities.roots.iter().map(|root| root.subject.to_vec()).collect();
    let (mut revoked, mut lists) = (HashSet::new(), HashMap::new());
    for list in &credentials.revoked {
        let (_, list) =
            CertificateRevocationList::from_der(list).map_err(|error| invalid(error.to_string()))?;
        let issuer = list.issuer().as_raw().to_vec();
        if !credentials.authorities.roots.iter().any(|root| issuer.ends_with(&root.subject)) {
            return Err(invalid(
                "the list of revoked certificates (crl.pem) is of no CA in ca.pem: bring that of the CA, `crl.pem` in its folder"
                    .to_owned(),
            ));
        }
        let age = Age { number: list.crl_number().cloned(), made: list.last_update().timestamp() };
        lists.insert(issuer.clone(), age);
        let serials = list.iter_revoked_certificates().map(|of| of.raw_serial().to_vec());
        revoked.extend(serials.map(|serial| (issuer.clone(), serial)));
    }
    let mut verifier = WebPkiClientVerifier::builder_with_provider(credentials.authorities, provider())
        .only_check_end_entity_revocation()
        .allow_unknown_revocation_status();
    if !lists.is_empty() {
        verifier = verifier.with_crls(credentials.revoked);
    }
    let verifier = verifier.build().map_err(|error| invalid(error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(VERSIONS)
        .expect("the provider has TLS 1.3")
        .with_client_cert_verifier(verifier)
        .with_single_cert(credentials.chain, credentials.key)
        .map_err(|error| invalid(error.to_string()))?;
    // Every connection shows its certificate: one that was revoked does not come back by a ticket.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(Loaded { stamp, config: Arc::new(config), revoked: Arc::new(revoked), lists, authorities })
}
