//! What can go wrong with a store.

use std::error::Error;
use std::io;

use crate::sealed::Tampered;

/// Why an operation on a store failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The URL cannot be used: correct it.
    #[error("{url} is no store: {reason}")]
    Url {
        /// As it was given.
        url: String,
        /// One clear sentence part.
        reason: String,
    },
    /// The folder cannot be used: correct its path or its permissions.
    #[error("the store's folder {path} cannot be used")]
    Folder {
        /// The folder.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The store lets two writers create one object: it cannot keep a volume safe. Use another one.
    #[error("the store {url} lets an object be created twice; it needs conditional writes (If-None-Match)")]
    NoConditions {
        /// The store.
        url: String,
    },
    /// The store is encrypted with another key, or with none: serve it as it was begun.
    #[error("the store {url} cannot be served so: {reason}")]
    Key {
        /// The store.
        url: String,
        /// One clear sentence part that says what to do.
        reason: &'static str,
    },
    /// The object is not what was written, or of another place; it stays so.
    #[error("{path} does not open with the store's key: it is damaged, or of another place")]
    Damaged {
        /// The object.
        path: String,
    },
    /// The object does not exist.
    #[error("{path} does not exist in the store")]
    NotFound {
        /// The object.
        path: String,
    },
    /// The object exists already; nothing was written.
    #[error("{path} exists already in the store")]
    Exists {
        /// The object.
        path: String,
    },
    /// The store is full: free space, then repeat.
    #[error("the store is full")]
    NoSpace(#[source] object_store::Error),
    /// The store does not work at the moment: repeat later.
    #[error("the store failed")]
    Failed(#[source] object_store::Error),
}

impl From<object_store::Error> for StoreError {
    fn from(error: object_store::Error) -> StoreError {
        match error {
            object_store::Error::NotFound { path, .. } => StoreError::NotFound { path },
            object_store::Error::AlreadyExists { path, .. }
            | object_store::Error::Precondition { path, .. } => StoreError::Exists { path },
            error if tampered(&error).is_some() => {
                StoreError::Damaged { path: tampered(&error).unwrap_or_default().to_owned() }
            }
            error if is_out_of_space(&error) => StoreError::NoSpace(error),
            error => StoreError::Failed(error),
        }
    }
}

/// The object that `error`, or anything that it was caused by, says not to open.
fn tampered<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a str> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(Tampered(path)) = error.downcast_ref() {
            return Some(path);
        }
        next = match error.downcast_ref::<io::Error>() {
            Some(io) => io.get_ref().map(|inner| inner as &(dyn Error + 'static)),
            None => error.source(),
        };
    }
    None
}

/// Whether `error`, or anything that it was caused by, says that a disk or a quota is full.
pub(crate) fn is_out_of_space(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        next = match error.downcast_ref::<io::Error>() {
            Some(io) if matches!(io.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                return true;
            }
            // `io::Error::source` skips the error that it wraps.
            Some(io) => io.get_ref().map(|inner| inner as &(dyn Error + 'static)),
            None => error.source(),
        };
    }
    false
}

impl StoreError {
    /// Whether space has to be freed before anything else can help.
    pub fn is_no_space(&self) -> bool {
        match self {
            StoreError::NoSpace(_) => true,
            StoreError::Folder { source, .. } => is_out_of_space(source),
            _ => false,
        }
    }

    /// Whether `error`, or anything that it was caused by, says that an object does not open with the store's key.
    pub fn caused_by_damage(error: &(dyn Error + 'static)) -> bool {
        tampered(error).is_some()
    }

    /// Whether `error`, or anything that it was caused by, says that a disk or a quota is full.
    pub fn caused_by_no_space(error: &(dyn Error + 'static)) -> bool {
        is_out_of_space(error)
    }
}
