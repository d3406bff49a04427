//! What can go wrong, and what a client is told.

use hayloft_model::{ContentHash, Ino, SessionId};
use hayloft_store::{ChunkError, StoreError};
use hayloft_wire::{Failed, FailureCode, InvalidMessage};

use crate::database::ledger::Damage;

/// Why a server could not be started or stopped.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The store cannot be used.
    #[error("cannot open the store")]
    Store(#[from] StoreError),
    /// The address cannot be listened at: is another server running there?
    #[error("cannot listen at {address}")]
    Listen {
        /// The address, or `unix:PATH`.
        address: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Other hosts could reach the server, and it would not know who they are.
    #[error("refusing to listen at {address}, where other hosts reach it, without certificates")]
    Open {
        /// The address.
        address: std::net::SocketAddr,
    },
    /// The audit log cannot be written.
    #[error("cannot write the audit log {}", path.display())]
    Audit {
        /// The file.
        path: std::path::PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// The certificates cannot be used.
    #[error("cannot use the certificates")]
    Credentials(#[from] hayloft_transport::CredentialsError),
    /// A volume's database could not be closed; its acknowledged changes are safe all the same.
    #[error("cannot close the database of volume {volume}")]
    Close {
        /// The volume.
        volume: String,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Why a request is refused or failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum VolumeError {
    #[error("there is no volume {0}")]
    NoVolume(String),
    #[error("there is a volume {0} already")]
    VolumeExists(String),
    #[error("there is no snapshot {0}")]
    NoSnapshot(String),
    #[error("there is a snapshot {0} already")]
    SnapshotExists(String),
    #[error(
        "{0:?} cannot be the name of a snapshot: 1 to 64 of A-Z a-z 0-9 . _ - +, not beginning with . or -"
    )]
    SnapshotName(String),
    #[error(
        "the snapshot {0} is not made yet, or was left by a server that was killed: it is deleted like others"
    )]
    SnapshotUnfinished(String),
    #[error(
        "{host} (process {pid}, at {mount_point}) has not shipped what it has changed for {secs} s: wait until it answers, end its session (hayloft evict), or take what the server has (--as-stored)"
    )]
    Unshipped { host: String, pid: u32, mount_point: String, secs: u64 },
    #[error(
        "{host} (process {pid}, at {mount_point}) runs a hayloft that cannot be asked to ship what it has changed: update it, or take what the server has (--as-stored)"
    )]
    CannotShip { host: String, pid: u32, mount_point: String },
    #[error(
        "volume {volume} has {count} snapshots (hayloft snapshot list {volume}): delete them first, or all together (hayloft volume delete {volume} --snapshots)"
    )]
    HasSnapshots { volume: String, count: usize },
    #[error("the fork that was to be promoted is gone, and {0} is another one: look at it, and say so again")]
    OtherFork(String),
    #[error("{0:?} cannot be the name of a volume: 1 to 64 of A-Z a-z 0-9 . _ -, not beginning with . or -")]
    VolumeName(String),
    #[error("the volume is in use by {host} (process {pid}, at {mount_point})")]
    Busy { session: SessionId, host_id: String, host: String, pid: u32, mount_point: String },
    #[error("session {0} was ended by the server")]
    SessionEnded(SessionId),
    #[error(
        "session {session} was ended by the server: it was silent for too long, and others needed what it held"
    )]
    SessionOver { session: SessionId, last_sequence: u64 },
    #[error("session {session} is of another tree than the volume has now (hayloft rollback, or promote)")]
    OtherTree { session: SessionId, last_sequence: u64, durable: u64, kept: String, kept_id: String },
    #[error("session {0} was ended by an administrator (hayloft evict)")]
    Evicted(SessionId),
    #[error(
        "the volume's store holds an older or another history than this mount has seen: its numbers may mean other things there"
    )]
    OtherHistory,
    #[error("changes that the session had asked for are on their way to others still")]
    Settling,
    #[error(
        "others have waited for this mount {times} times, one soon after the other, since it did not answer: it may go on in \
         {left_secs} s (look at its network, and at its memory)"
    )]
    Troubled { times: u32, left_secs: u64 },
    #[error("there is no session {0}")]
    NoSession(SessionId),
    #[error("a change of inode {0}, which the session does not own")]
    NotOwned(Ino),
    #[error("inode {0} was changed by others after the session had ended, or may have been")]
    Contradicted(Ino),
    #[error("there is no inode {0}")]
    NoInode(Ino),
    #[error("inode {0} is no directory")]
    NotDirectory(Ino),
    #[error("content {0} is not in the store")]
    NoContent(ContentHash),
    #[error("the store has no space left")]
    StoreFull,
    #[error("the volume's quota of {what} is used up")]
    Quota { what: &'static str },
    #[error("content was damaged on its way here, and nothing of the batch is stored")]
    Content(#[from] ChunkError),
    #[error("a batch is not the one that its client has cut from its log, and nothing of it is stored")]
    BatchDamaged,
    #[error("{0}")]
    Ended(String),
    #[error("the server has no room for the batch now: send it again")]
    Crowded,
    #[error("more than {limit} {what}")]
    Limit { what: &'static str, limit: usize },
    #[error("what arrives is not what was sent: something between the two changes it")]
    FrameDamaged,
    #[error("{0}")]
    Denied(String),
    #[error("session {0} is of somebody else")]
    NotYours(SessionId),
    #[error("nothing is done, since the audit log cannot be written: {0}")]
    Audit(#[source] std::io::Error),
    #[error("the request makes no sense: {0}")]
    Invalid(&'static str),
    #[error("the request makes no sense")]
    Message(#[from] InvalidMessage),
    #[error("rows that no client sends: {0}")]
    Unsound(#[from] hayloft_model::sound::Unsound),
    #[error(
        "volume {volume} has format {format}, and this server ({release}) knows formats up to {known}: start the version of hayloft that wrote it, or a newer one (hayloft --version); nothing was changed",
        release = env!("CARGO_PKG_VERSION"),
        known = crate::database::format::KNOWN
    )]
    Newer { volume: String, format: u64 },
    #[error(transparent)]
    Versions(#[from] hayloft_wire::Mismatch),
    #[error("batch {sequence} cannot follow batch {last}")]
    Gap { sequence: u64, last: u64 },
    #[error("an earlier batch failed: send it again first")]
    After(FailureCode),
    #[error("nobody knows yet whether the batch was applied: send the same one again")]
    Uncertain(#[source] Box<VolumeError>),
    #[error("the session has a newer connection")]
    Superseded,
    #[error("the volume's database is being opened again: {0}")]
    Reopening(String),
    #[error("the volume's database cannot be opened: {0}")]
    Broken(String),
    #[error("another server has taken over the volume")]
    Fenced,
    #[error("the store does not tell whether another server has taken over the volume: {0}")]
    Unseen(String),
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the store is damaged: {0}")]
    AtRest(Damage),
    #[error("volume {volume}: {source}")]
    Of { volume: String, source: Box<VolumeError> },
    #[error("a damaged row: {0}")]
    Damaged(&'static str),
    #[error("the database failed: {0}")]
    Database(#[from] slatedb::Error),
    #[error("the store failed: {0}")]
    Store(#[from] StoreError),
}

impl VolumeError {
    pub(crate) fn code(&self) -> FailureCode {
        use VolumeError as E;
        match self {
            E::NoVolume(_)
            | E::OtherFork(_)
            | E::NoSnapshot(_)
            | E::NoInode(_)
            | E::NoContent(_)
            | E::NoSession(_) => FailureCode::NotFound,
            E::VolumeExists(_) | E::SnapshotExists(_) => FailureCode::Exists,
            E::Busy { .. } | E::HasSnapshots { .. } | E::SnapshotUnfinished(_) => FailureCode::Busy,
            E::Unshipped { .. } | E::CannotShip { .. } => FailureCode::Busy,
            E::SessionEnded(_) | E::SessionOver { .. } | E::OtherTree { .. } | E::NotOwned(_) => {
                FailureCode::SessionEnded
            }
            E::Contradicted(_) => FailureCode::Contradicted,
            E::Evicted(_) => FailureCode::Evicted,
            E::OtherHistory => FailureCode::OtherHistory,
            E::StoreFull | E::Quota { .. } => FailureCode::NoSpace,
            E::Denied(_) | E::NotYours(_) => FailureCode::Denied,
            E::VolumeName(_)
            | E::SnapshotName(_)
            | E::NotDirectory(_)
            | E::Invalid(_)
            | E::Limit { .. }
            | E::Message(_)
            | E::Unsound(_)
            | E::Gap { .. } => FailureCode::Invalid,
            E::Versions(_) | E::Newer { .. } => FailureCode::Protocol,
            E::After(code) => *code,
            E::AtRest(_) | E::Damaged(_) => FailureCode::AtRest,
            E::Of { source, .. } => source.code(),
            E::Store(
                StoreError::NotFound { .. } | StoreError::Damaged { .. } | StoreError::Unreadable { .. },
            ) => FailureCode::AtRest,
            E::Database(error)
                if StoreError::caused_by_damage(error) || StoreError::caused_by_unreadable(error) =>
            {
                FailureCode::AtRest
            }
            E::Database(error) if error.kind() == slatedb::ErrorKind::Data => FailureCode::AtRest,
            E::Uncertain(_) => FailureCode::Uncertain,
            E::Content(_) | E::BatchDamaged | E::FrameDamaged => FailureCode::Damaged,
            E::Superseded
            | E::Fenced
            | E::ShuttingDown
            | E::Settling
            | E::Troubled { .. }
            | E::Crowded
            | E::Ended(_) => FailureCode::Unavailable,
            E::Store(error) if error.is_no_space() => FailureCode::NoSpace,
            E::Database(error) if StoreError::caused_by_no_space(error) => FailureCode::NoSpace,
            E::Broken(_) => FailureCode::AtRest,
            E::Audit(_) | E::Reopening(_) | E::Unseen(_) | E::Database(_) | E::Store(_) => FailureCode::Store,
        }
    }
}

impl VolumeError {
    /// Whether the store holds what it should not, or lacks what it should hold: waiting does not help.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.code() == FailureCode::AtRest
    }

    /// The same, saying of which volume.
    pub(crate) fn of(self, volume: &str) -> VolumeError {
        match self {
            error @ (VolumeError::NoVolume(_) | VolumeError::Of { .. }) => error,
            error if error.is_at_rest() => {
                VolumeError::Of { volume: volume.to_owned(), source: Box::new(error) }
            }
            error => error,
        }
    }

    /// Whether room in the store would help, which a sweep may find.
    pub(crate) fn wants_room(&self) -> bool {
        match self {
            VolumeError::Uncertain(cause) => cause.wants_room(),
            VolumeError::Quota { .. } | VolumeError::After(_) => false,
            error => error.code() == FailureCode::NoSpace,
        }
    }
}

/// The error with everything that caused it, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        next = cause.source();
    }
    text
}

impl From<&VolumeError> for Failed {
    fn from(error: &VolumeError) -> Failed {
        let mut failed = Failed { code: error.code() as i32, message: chain(error), ..Failed::default() };
        if let VolumeError::Busy { session, host_id, pid, .. } = error {
            failed.holder_session = session.0;
            failed.holder_host_id.clone_from(host_id);
            failed.holder_pid = *pid;
        }
        if let VolumeError::SessionOver { last_sequence, .. } = error {
            failed.last_sequence = Some(*last_sequence);
        }
        if let VolumeError::OtherTree { last_sequence, durable, kept, kept_id, .. } = error {
            (failed.last_sequence, failed.durable) = (Some(*last_sequence), *durable);
            (failed.kept, failed.kept_id) = (kept.clone(), hayloft_wire::id_begin(kept_id));
        }
        failed
    }
}
