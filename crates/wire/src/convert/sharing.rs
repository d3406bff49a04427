//! Conversions of the messages by which hosts share a volume.

use bytes::Bytes;
use hayloft_model::grants::Object;
use hayloft_model::tree::{AttributeChange, NewNode, RenameFlags};
use hayloft_model::{Change, FileKind, Ino, NAME_MAX, Name, Timestamp, TreeError};

use super::{InvalidMessage, invalid, name_from, valid};
use crate::messages::sharing::change_request::Operation;
use crate::messages::sharing::{
    ChangeRequest, CreateChange, LinkChange, ObjectMessage, PlaceMessage, RemoveXattrChange, RenameChange,
    SetAttributesChange, SetXattrChange,
};

impl From<Object> for ObjectMessage {
    fn from(object: Object) -> ObjectMessage {
        match object {
            Object::Directory(ino) => ObjectMessage { ino: ino.0, directory: true, home: 0 },
            Object::File { ino, home } => ObjectMessage { ino: ino.0, directory: false, home: home.0 },
        }
    }
}

impl TryFrom<&ObjectMessage> for Object {
    type Error = InvalidMessage;

    fn try_from(message: &ObjectMessage) -> Result<Object, InvalidMessage> {
        let ino = Ino(message.ino);
        match (message.ino, message.directory, message.home) {
            (0, ..) => invalid("number of an object"),
            (_, true, 0) => Ok(Object::Directory(ino)),
            (_, true, _) => invalid("home of a directory"),
            (_, false, home) if home == message.ino => invalid("home of a file"),
            (_, false, home) => Ok(Object::File { ino, home: Ino(home) }),
        }
    }
}

fn place_of(dir: Ino, name: &Name) -> Option<PlaceMessage> {
    Some(PlaceMessage { dir: dir.0, name: Bytes::copy_from_slice(name.as_bytes()) })
}

fn place_from(place: Option<&PlaceMessage>) -> Result<(Ino, Name), InvalidMessage> {
    let place = valid(place, "place of a name")?;
    Ok((Ino(place.dir), name_from(&place.name)?))
}

fn time_of(time: Option<Timestamp>) -> Vec<i64> {
    time.map(|time| vec![time.secs, i64::from(time.nanos)]).unwrap_or_default()
}

fn time_from(packed: &[i64]) -> Result<Option<Timestamp>, InvalidMessage> {
    match packed {
        [] => Ok(None),
        [secs, nanos] => {
            let nanos = u32::try_from(*nanos).ok().filter(|nanos| *nanos < 1_000_000_000);
            Ok(Some(Timestamp { secs: *secs, nanos: valid(nanos, "nanoseconds")? }))
        }
        _ => invalid("time"),
    }
}

fn xattr_name_from(name: &Bytes) -> Result<Bytes, InvalidMessage> {
    if name.is_empty() || name.len() > NAME_MAX || name.contains(&0) {
        return invalid("name of an attribute");
    }
    Ok(name.clone())
}

impl ChangeRequest {
    /// The request that `change` be executed; `execute`: by the server and nobody else.
    pub fn of(change: &Change, execute: bool, forget_below: u64) -> ChangeRequest {
        ChangeRequest { forget_below, execute, operation: Some(change.into()) }
    }

    /// What is asked for.
    ///
    /// # Errors
    /// When it breaks a rule.
    pub fn change(&self) -> Result<Change, InvalidMessage> {
        valid(self.operation.as_ref(), "operation")?.try_into()
    }
}

impl From<&Change> for Operation {
    /// A change of the size is left out: it is a change of data.
    fn from(change: &Change) -> Operation {
        match change {
            Change::Create(dir, name, new) => Operation::Create(CreateChange {
                place: place_of(*dir, name),
                mode: new.mode,
                uid: new.uid,
                gid: new.gid,
                rdev: new.rdev,
                target: new.target.clone(),
            }),
            Change::Link(ino, dir, name) => {
                Operation::Link(LinkChange { ino: ino.0, place: place_of(*dir, name) })
            }
            Change::Unlink(dir, name) => Operation::Unlink(place_of(*dir, name).unwrap_or_default()),
            Change::Rmdir(dir, name) => Operation::Rmdir(place_of(*dir, name).unwrap_or_default()),
            Change::Rename((from, old), (to, new), flags) => Operation::Rename(RenameChange {
                from: place_of(*from, old),
                to: place_of(*to, new),
                no_replace: flags.no_replace,
                exchange: flags.exchange,
                whiteout: flags.whiteout,
            }),
            Change::SetAttributes(ino, change) => Operation::SetAttributes(SetAttributesChange {
                ino: ino.0,
                mode: change.mode,
                uid: change.uid,
                gid: change.gid,
                atime: time_of(change.atime),
                mtime: time_of(change.mtime),
                kill_privileges: change.kill_privileges,
            }),
            Change::SetXattr(ino, name, value, (create, replace)) => Operation::SetXattr(SetXattrChange {
                ino: ino.0,
                name: name.clone(),
                value: value.clone(),
                create: *create,
                replace: *replace,
            }),
            Change::RemoveXattr(ino, name) => {
                Operation::RemoveXattr(RemoveXattrChange { ino: ino.0, name: name.clone() })
            }
        }
    }
}

impl TryFrom<&Operation> for Change {
    type Error = InvalidMessage;

    fn try_from(operation: &Operation) -> Result<Change, InvalidMessage> {
        Ok(match operation {
            Operation::Create(create) => {
                let (dir, name) = place_from(create.place.as_ref())?;
                let kind = valid(FileKind::of_mode(create.mode), "mode")?;
                if (kind == FileKind::Symlink) != create.target.is_some() {
                    return invalid("target of a link");
                }
                let new = NewNode {
                    mode: create.mode,
                    uid: create.uid,
                    gid: create.gid,
                    rdev: create.rdev,
                    target: create.target.clone(),
                };
                Change::Create(dir, name, new)
            }
            Operation::Link(link) => {
                let (dir, name) = place_from(link.place.as_ref())?;
                Change::Link(Ino(link.ino), dir, name)
            }
            Operation::Unlink(place) => {
                let (dir, name) = place_from(Some(place))?;
                Change::Unlink(dir, name)
            }
            Operation::Rmdir(place) => {
                let (dir, name) = place_from(Some(place))?;
                Change::Rmdir(dir, name)
            }
            Operation::Rename(rename) => {
                let flags = RenameFlags {
                    no_replace: rename.no_replace,
                    exchange: rename.exchange,
                    whiteout: rename.whiteout,
                };
                let (from, to) = (place_from(rename.from.as_ref())?, place_from(rename.to.as_ref())?);
                Change::Rename(from, to, flags)
            }
            Operation::SetAttributes(set) => {
                let change = AttributeChange {
                    mode: set.mode,
                    uid: set.uid,
                    gid: set.gid,
                    size: None,
                    atime: time_from(&set.atime)?,
                    mtime: time_from(&set.mtime)?,
                    kill_privileges: set.kill_privileges,
                };
                Change::SetAttributes(Ino(set.ino), change)
            }
            Operation::SetXattr(set) => Change::SetXattr(
                Ino(set.ino),
                xattr_name_from(&set.name)?,
                set.value.clone(),
                (set.create, set.replace),
            ),
            Operation::RemoveXattr(remove) => {
                Change::RemoveXattr(Ino(remove.ino), xattr_name_from(&remove.name)?)
            }
        })
    }
}

/// Errors that travel; the place in the list is the number. New ones are added at the end.
const ERRORS: [TreeError; 14] = [
    TreeError::NotFound,
    TreeError::NoAttribute,
    TreeError::Exists,
    TreeError::Stale,
    TreeError::NotDirectory,
    TreeError::IsDirectory,
    TreeError::NotEmpty,
    TreeError::NameTooLong,
    TreeError::Invalid,
    TreeError::NotPermitted,
    TreeError::TooManyLinks,
    TreeError::TooLarge,
    TreeError::AttributeTooLarge,
    TreeError::NoSpace,
];

/// The number of an error, never 0. What is missing somewhere is nobody else's concern: it does not travel, and
/// has the number of [`TreeError::Stale`].
pub fn error_code(error: TreeError) -> u32 {
    let at = ERRORS.iter().position(|known| *known == error);
    at.map_or_else(|| error_code(TreeError::Stale), |at| at as u32 + 1)
}

/// The reverse of [`error_code`].
///
/// # Errors
/// When no error has that number; 0 means that there is none.
pub fn error_of(code: u32) -> Result<TreeError, InvalidMessage> {
    let at = valid(code.checked_sub(1), "error")?;
    valid(ERRORS.get(at as usize).copied(), "error")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hayloft_model::Missing;

    fn name(name: &str) -> Name {
        Name::new(name.as_bytes())
    }

    #[test]
    fn changes_come_back_as_they_went() {
        let new = NewNode { mode: 0o100644, uid: 1, gid: 2, rdev: 3, target: None };
        let link = NewNode { mode: 0o120777, target: Some(Bytes::from_static(b"to")), ..NewNode::default() };
        let flags = RenameFlags { no_replace: true, exchange: false, whiteout: true };
        let attributes = AttributeChange {
            mode: Some(0),
            uid: Some(5),
            gid: None,
            size: None,
            atime: Some(Timestamp { secs: -1, nanos: 7 }),
            mtime: None,
            kill_privileges: true,
        };
        for change in [
            Change::Create(Ino(1), name("a"), new),
            Change::Create(Ino(1), name("l"), link),
            Change::Link(Ino(9), Ino(1), name("b")),
            Change::Unlink(Ino(1), name("\u{fe}")),
            Change::Rmdir(Ino(1), name("d")),
            Change::Rename((Ino(1), name("a")), (Ino(2), name("b")), flags),
            Change::SetAttributes(Ino(9), attributes),
            Change::SetAttributes(Ino(9), AttributeChange::default()),
            Change::SetXattr(Ino(9), Bytes::from_static(b"user.x"), Bytes::new(), (false, true)),
            Change::RemoveXattr(Ino(9), Bytes::from_static(b"user.x")),
        ] {
            let request = ChangeRequest::of(&change, true, 3);
            assert_eq!(request.change().unwrap(), change);
        }
    }

    #[test]
    fn changes_that_break_a_rule_are_refused() {
        let place = |name: &'static [u8]| PlaceMessage { dir: 1, name: Bytes::from_static(name) };
        let create = |mode, target| {
            Operation::Create(CreateChange {
                place: Some(place(b"a")),
                mode,
                target,
                ..CreateChange::default()
            })
        };
        let late = vec![0, 1_000_000_000];
        for broken in [
            Operation::Unlink(place(b"a/b")),
            Operation::Link(LinkChange { ino: 5, place: None }),
            create(0o644, None),
            create(0o120777, None),
            create(0o100644, Some(Bytes::new())),
            Operation::SetAttributes(SetAttributesChange { atime: late, ..Default::default() }),
            Operation::SetAttributes(SetAttributesChange { mtime: vec![1], ..Default::default() }),
            Operation::RemoveXattr(RemoveXattrChange { ino: 5, name: Bytes::new() }),
        ] {
            assert!(Change::try_from(&broken).is_err(), "{broken:?}");
        }
        assert!(ChangeRequest::default().change().is_err());
    }

    #[test]
    fn objects_come_back_as_they_went() {
        let file = |home| Object::File { ino: Ino(7), home: Ino(home) };
        for object in [Object::Directory(Ino(1)), file(3), file(0)] {
            assert_eq!(Object::try_from(&ObjectMessage::from(object)).unwrap(), object);
        }
        for (ino, directory, home) in [(0, true, 0), (5, true, 1), (5, false, 5)] {
            assert!(Object::try_from(&ObjectMessage { ino, directory, home }).is_err());
        }
    }

    #[test]
    fn errors_come_back_as_they_went() {
        for error in ERRORS {
            assert_eq!(error_of(error_code(error)), Ok(error));
        }
        assert!(error_of(0).is_err() && error_of(15).is_err());
        assert_eq!(error_of(error_code(TreeError::Missing(Missing::Numbers))), Ok(TreeError::Stale));
    }
}
