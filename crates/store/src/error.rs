//! What can go wrong with a store.

use std::error::Error;
use std::io;

use crate::sealed::Tampered;

/// What nobody tries again: an object is there, and cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("it cannot be read, though it is there")]
pub(crate) struct Unreadable(#[source] pub(crate) object_store::Error);

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
    /// The disk of the store, or its permissions, do not let the object be read: mend that.
    #[error("{path} cannot be read, though it is there")]
    Unreadable {
        /// The object.
        path: String,
        /// Why.
        #[source]
        source: object_store::Error,
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
    cause(error).map(|Tampered(path)| path.as_str())
}

/// The error of this kind among `error` and what it was caused by.
fn cause<'a, E: Error + 'static>(error: &'a (dyn Error + 'static)) -> Option<&'a E> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        next = match error.downcast_ref::<io::Error>() {
            // `io::Error::source` skips the error that it wraps.
            Some(io) => io.get_ref().map(|inner| inner as &(dyn Error + 'static)),
            None => error.source(),
        };
    }
    None
}

/// Whether `error`, or anything that it was caused by, says that a disk or a quota is full.
pub(crate) fn is_out_of_space(error: &(dyn Error + 'static)) -> bool {
    is_caused_by(error, |io| matches!(io.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
}

/// Whether a read that failed with `error` fails as long as nobody mends the disk, or its permissions.
pub(crate) fn is_unreadable(error: &(dyn Error + 'static)) -> bool {
    is_caused_by(error, |io| {
        io.kind() == io::ErrorKind::PermissionDenied
            || io.raw_os_error() == Some(rustix::io::Errno::IO.raw_os_error())
    })
}

fn is_caused_by(error: &(dyn Error + 'static), is_it: fn(&io::Error) -> bool) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        next = match error.downcast_ref::<io::Error>() {
            Some(io) if is_it(io) => return true,
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

    /// Of a read of the object at `path`.
    pub(crate) fn of_read(path: &str, error: object_store::Error) -> StoreError {
        match is_unreadable(&error) {
            true => StoreError::Unreadable { path: path.to_owned(), source: error },
            false => error.into(),
        }
    }

    /// Whether `error`, or anything that it was caused by, says that an object cannot be read as long as nobody mends the disk, or
    /// its permissions.
    pub fn caused_by_unreadable(error: &(dyn Error + 'static)) -> bool {
        cause::<Unreadable>(error).is_some()
    }

    /// Whether `error`, or anything that it was caused by, says that a disk or a quota is full.
    pub fn caused_by_no_space(error: &(dyn Error + 'static)) -> bool {
        is_out_of_space(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_disk_does_not_give_is_told_from_what_may_pass() {
        let of = |source: io::Error| object_store::Error::Generic { store: "test", source: Box::new(source) };
        let wrapped = |source: io::Error| of(io::Error::other(of(source)));
        for (error, is_so) in [
            (of(io::ErrorKind::PermissionDenied.into()), true),
            (wrapped(io::Error::from_raw_os_error(rustix::io::Errno::IO.raw_os_error())), true),
            (of(io::ErrorKind::TimedOut.into()), false),
            (of(io::Error::other("made to fail")), false),
        ] {
            let said = StoreError::of_read("packs/id/1", error);
            assert_eq!(
                matches!(&said, StoreError::Unreadable { path, .. } if path == "packs/id/1"),
                is_so,
                "{said:?}"
            );
        }
        let not_tried_again = Unreadable(of(io::ErrorKind::PermissionDenied.into()));
        let not_tried_again = object_store::Error::NotSupported { source: Box::new(not_tried_again) };
        assert!(StoreError::caused_by_unreadable(&not_tried_again));
        // A write is.
        assert!(!StoreError::caused_by_unreadable(&of(io::ErrorKind::PermissionDenied.into())));
    }
}
