//! Where a server listens: at an address, at a socket of its host, or at both.

use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net;
use std::path::{Path, PathBuf};

use hayloft_transport::Caller;
use rustix::fs::{Gid, Mode};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use tokio::net::{TcpListener, UnixListener};

use crate::error::ServerError;

/// Connections that wait to be taken.
const BACKLOG: i32 = 1024;

/// A socket of this host that a server listens at.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Socket {
    /// Its path.
    pub path: PathBuf,
    /// The group whose users may connect as well; else the owner alone may, and root.
    pub group: Option<u32>,
}

/// What a server listens at.
pub(crate) struct Listener {
    tcp: Option<TcpListener>,
    unix: Option<(UnixListener, PathBuf)>,
}

impl Listener {
    /// Begins to listen.
    ///
    /// # Errors
    /// Something else is there, or it is not permitted.
    pub(crate) async fn bind(
        address: Option<SocketAddr>,
        socket: Option<&Socket>,
    ) -> Result<Listener, ServerError> {
        let tcp = match address {
            None => None,
            Some(address) => {
                let failed = |source| ServerError::Listen { address: address.to_string(), source };
                Some(TcpListener::bind(address).await.map_err(failed)?)
            }
        };
        let unix = socket.map(|socket| {
            let failed =
                |source| ServerError::Listen { address: format!("unix:{}", socket.path.display()), source };
            Ok::<_, ServerError>((socket_at(socket).map_err(failed)?, socket.path.clone()))
        });
        Ok(Listener { tcp, unix: unix.transpose()? })
    }

    /// The address; `None` where there is only a socket.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().and_then(|tcp| tcp.local_addr().ok())
    }

    /// The next connection, and where it comes from.
    ///
    /// # Errors
    /// As accept(2).
    pub(crate) async fn accept(&self) -> io::Result<(Caller, String)> {
        let by_tcp = async {
            match &self.tcp {
                Some(tcp) => tcp.accept().await.map(|(socket, peer)| (socket.into(), peer.to_string())),
                None => std::future::pending().await,
            }
        };
        let by_unix = async {
            match &self.unix {
                Some((unix, path)) => {
                    unix.accept().await.map(|(socket, _)| (socket.into(), path.display().to_string()))
                }
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            accepted = by_tcp => accepted,
            accepted = by_unix => accepted,
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // Nobody shall wait for what nobody answers.
        if let Some((_, path)) = &self.unix {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// A socket that nobody else may connect to from its first moment.
fn socket_at(socket: &Socket) -> io::Result<UnixListener> {
    let Socket { path, group } = socket;
    take_away_dead(path)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let bound = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets the mode that the socket has when it is bound (unix(7)).
    rustix::fs::fchmod(&bound, Mode::from_raw_mode(0o600))?;
    bind(&bound, &SocketAddrUnix::new(path)?)?;
    if let Some(group) = group {
        rustix::fs::chown(path, None, Some(Gid::from_raw(*group)))?;
        rustix::fs::chmod(path, Mode::from_raw_mode(0o660))?;
    }
    listen(&bound, BACKLOG)?;
    UnixListener::from_std(net::UnixListener::from(bound))
}

/// Removes the socket of a server that was killed. What is none, or answers, stays.
fn take_away_dead(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(found) if found.file_type().is_socket() => {}
        Ok(_) => {
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is something that is no socket"));
        }
    }
    match net::UnixStream::connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::new(io::ErrorKind::AddrInUse, "another server listens there")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn at(path: &Path, group: Option<u32>) -> Socket {
        Socket { path: path.to_owned(), group }
    }

    #[tokio::test]
    async fn a_socket_is_its_owners_alone_or_a_groups() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let mode = || std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777;
        let one = Listener::bind(None, Some(&at(&path, None))).await.unwrap();
        assert_eq!(mode(), 0o600);
        drop(one);
        assert!(!path.exists());
        let own = rustix::process::getegid().as_raw();
        let _two = Listener::bind(None, Some(&at(&path, Some(own)))).await.unwrap();
        assert_eq!(mode(), 0o660);
    }

    #[tokio::test]
    async fn what_another_server_has_left_goes_and_what_it_uses_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        // As after kill -9: bound once, and nobody is there.
        drop(net::UnixListener::bind(&path).unwrap());
        let one = Listener::bind(None, Some(&at(&path, None))).await.unwrap();
        let error = Listener::bind(None, Some(&at(&path, None))).await.err().unwrap();
        assert!(
            matches!(&error, ServerError::Listen { source, .. } if source.kind() == io::ErrorKind::AddrInUse)
        );
        assert!(path.exists(), "it is another one's");
        drop(one);
        std::fs::write(&path, "mine").unwrap();
        assert!(Listener::bind(None, Some(&at(&path, None))).await.is_err());
        assert_eq!(std::fs::read(&path).unwrap(), b"mine");
    }
}
