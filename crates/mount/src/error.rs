//! Why a mount failed.

use std::path::PathBuf;

/// Why a volume could not be mounted; each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// Nothing answers at the server's address.
    #[error("cannot reach the server at {address}: {source}; is `hayloft serve` running there?")]
    Unreachable {
        /// HOST:PORT as given.
        address: String,
        /// What the connection said.
        #[source]
        source: std::io::Error,
    },
    /// This host has nothing to prove itself with.
    #[error("cannot use the server at {address}, which is on another host: {source}")]
    Credentials {
        /// HOST:PORT as given.
        address: String,
        /// What is missing.
        #[source]
        source: hayloft_transport::CredentialsError,
    },
    /// The server does not believe this host, or this host does not believe the server.
    #[error("no connection to {address}: {message}")]
    Distrusted {
        /// HOST:PORT as given.
        address: String,
        /// Why.
        message: String,
    },
    /// The server does not have the volume.
    #[error(
        "no volume named {volume:?} at {address}; `hayloft volume list --server {address}` shows those that exist"
    )]
    NoSuchVolume {
        /// The name as given.
        volume: String,
        /// HOST:PORT as given.
        address: String,
    },
    /// The server said no for another reason.
    #[error("the server at {address} refused: {message}")]
    Refused {
        /// HOST:PORT as given.
        address: String,
        /// Its own words.
        message: String,
    },
    /// The kernel, or the mount point, does not allow it.
    #[error(transparent)]
    Fuse(#[from] hayloft_fuse::MountError),
    /// The FUSE session could not start.
    #[error("the FUSE session could not start: {0}")]
    Session(String),
    /// The kernel has no way to say that somebody called syncfs(2).
    #[error(
        "this kernel does not tell FUSE file systems of syncfs(2): use Linux 6.18 or newer, or mount without the option syncfs"
    )]
    SyncfsUnheard,
    /// A folder that the client needs could not be made or used.
    #[error("cannot use {path}: {source}", path = path.display())]
    Folder {
        /// Which one.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Something was not shipped when the mount ended.
    #[error("{0}")]
    Unsent(String),
}
