//! What the world is judged by: a tree written separately, with the history of every name, inode and file.
//!
//! An operation takes effect here at one moment: when its client has done it in memory, or when the server has
//! executed it. Whoever does it owns what it changes, so the reference has to agree with the result exactly. An
//! observation may be of any value that was there between its call and its return, and of a value that is being
//! replaced by an operation which has not returned.

mod lost;
mod observed;
mod older;
mod order;
mod trees;
mod views;

use std::collections::{BTreeMap, BTreeSet};

use hayloft_model::{Change, FileKind, InodeRow, SessionId};

use lost::Lost;

pub(crate) use older::Kept;
use views::Views;

pub(crate) const ROOT: u64 = 1;

/// Something that has one value at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Register {
    Name(u64, u8),
    Attributes(u64),
    Data(u64),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Attributes {
    pub(crate) mode: u32,
    pub(crate) nlink: u32,
    pub(crate) size: u64,
    pub(crate) mtime: i128,
    pub(crate) ctime: i128,
}

impl Attributes {
    pub(crate) fn of(row: &InodeRow) -> Attributes {
        Attributes {
            mode: row.mode,
            nlink: row.nlink,
            size: row.size,
            mtime: row.mtime.as_nanos(),
            ctime: row.ctime.as_nanos(),
        }
    }
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Value {
    Name(Option<u64>),
    Attributes(Attributes),
    Data(Vec<u8>),
    Nothing,
}

#[derive(Clone, Debug)]
struct Version {
    value: Value,
    /// Who wrote it; 0: it was there from the beginning.
    op: u64,
    from: u64,
}

/// An operation that has changed something.
#[derive(Clone, Debug, Default)]
struct Operation {
    session: u64,
    call: u64,
    returned: Option<u64>,
    /// The batch of its session that has it; none: not cut yet.
    batch: Option<u64>,
    /// The server has done it with this batch of a session.
    with: Option<(SessionId, u64)>,
    /// The server has it: where its entry was made, an opening of the volume and a mark, and where it was written last.
    accepted: Option<Accepted>,
    durable: bool,
    writes: Vec<Register>,
}

/// Where the server has something.
#[derive(Clone, Copy, Debug)]
struct Accepted {
    entry: (u64, u64),
    place: (u64, u64),
    at: u64,
    /// It is answered before it is durable.
    early: bool,
}

impl Accepted {
    fn new(place: (u64, u64), early: bool, at: u64) -> Accepted {
        Accepted { entry: place, place, at, early }
    }
}

/// What is wrong.
pub(crate) type Verdict = Result<(), String>;

/// How a file's data is changed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum How {
    Append,
    Begin,
    Truncate,
}

impl How {
    /// The data after it.
    pub(crate) fn write(self, data: Vec<u8>, op: u64) -> Vec<u8> {
        match self {
            How::Append => How::write_at(data.len(), data, op),
            How::Begin => How::write_at(0, data, op),
            How::Truncate => Vec::new(),
        }
    }

    /// The data after two bytes were written there.
    pub(crate) fn write_at(at: usize, mut data: Vec<u8>, op: u64) -> Vec<u8> {
        data.resize(data.len().max(at + 2), 0);
        data[at..at + 2].copy_from_slice(&(op as u16).to_le_bytes());
        data
    }
}

#[derive(Clone, Default)]
pub(crate) struct Reference {
    kinds: BTreeMap<u64, FileKind>,
    names: BTreeMap<(u64, u8), u64>,
    history: BTreeMap<Register, Vec<Version>>,
    operations: BTreeMap<u64, Operation>,
    /// What ended sessions had changed and not made durable.
    lost: BTreeMap<u64, Lost>,
    /// What servers had of them that were replaced: they do not know, and send it again if the store is put back.
    lost_there: BTreeMap<u64, Lost>,
    views: Views,
    /// Changes by request, by who asked.
    pub(crate) requests: BTreeMap<(SessionId, u64), u64>,
    /// Times of directories run with the clock while they are split.
    no_directory_times: bool,
}

impl Reference {
    pub(crate) fn new(root: &InodeRow) -> Reference {
        let mut reference = Reference::default();
        reference.kinds.insert(ROOT, FileKind::Directory);
        reference
            .operations
            .insert(0, Operation { returned: Some(0), durable: true, ..Operation::default() });
        reference.put(0, Register::Attributes(ROOT), Value::Attributes(Attributes::of(root)), 0);
        reference
    }

    pub(crate) fn begin(&mut self, op: u64, session: SessionId, call: u64) {
        let operation = Operation { session: session.0, call, ..Operation::default() };
        self.operations.insert(op, operation);
    }

    pub(crate) fn returned(&mut self, op: u64, now: u64) {
        if let Some(operation) = self.operations.get_mut(&op) {
            operation.returned = Some(now);
        }
    }

    fn value(&self, register: Register) -> Value {
        self.history.get(&register).and_then(|all| all.last()).map_or(
            match register {
                Register::Name(..) => Value::Name(None),
                Register::Data(_) => Value::Data(Vec::new()),
                Register::Attributes(_) => Value::Nothing,
            },
            |version| version.value.clone(),
        )
    }

    /// From now on times of directories are not looked at.
    pub(crate) fn ignore_directory_times(&mut self) {
        self.no_directory_times = true;
        let versions = self.history.remove(&Register::Attributes(ROOT)).into_iter().flatten();
        let plain = |value| plain(&value, true);
        let versions = versions.map(|version| Version { value: plain(version.value), ..version }).collect();
        self.history.insert(Register::Attributes(ROOT), versions);
    }

    /// A value as it is looked at.
    fn plain(&self, register: Register, value: &Value) -> Value {
        let is_dir = matches!(register, Register::Attributes(ino) if self.is_dir(ino));
        plain(value, is_dir && self.no_directory_times)
    }

    fn put(&mut self, op: u64, register: Register, value: Value, now: u64) {
        let value = self.plain(register, &value);
        if let (Register::Name(dir, name), Value::Name(to)) = (register, &value) {
            match to {
                Some(ino) => self.names.insert((dir, name), *ino),
                None => self.names.remove(&(dir, name)),
            };
        }
        self.history.entry(register).or_default().push(Version { value, op, from: now });
        if let Some(operation) = self.operations.get_mut(&op) {
            operation.writes.push(register);
        }
    }

    fn is_dir(&self, ino: u64) -> bool {
        self.kinds.get(&ino) == Some(&FileKind::Directory)
    }

    fn nlink(&self, ino: u64) -> u32 {
        let names = self.names.values().filter(|to| **to == ino).count() as u32;
        if !self.is_dir(ino) {
            return names;
        }
        if names == 0 && ino != ROOT {
            return 0;
        }
        let below = self.names.range((ino, 0)..=(ino, u8::MAX)).filter(|(_, to)| self.is_dir(**to)).count();
        2 + below as u32
    }

    fn above(&self, dir: u64) -> Option<u64> {
        self.names.iter().find(|(_, to)| **to == dir).map(|((parent, _), _)| *parent)
    }

    fn is_below(&self, dir: u64, top: u64) -> bool {
        // No way up is longer than there are names, not even in a cycle.
        let way_up = std::iter::successors(Some(dir), |dir| self.above(*dir));
        way_up.take(self.names.len() + 1).any(|dir| dir == top)
    }

    fn alive(&self, ino: u64) -> bool {
        self.kinds.contains_key(&ino) && self.nlink(ino) > 0
    }

    fn empty(&self, dir: u64) -> bool {
        self.names.range((dir, 0)..=(dir, u8::MAX)).next().is_none()
    }

    /// A change has succeeded now; `row` tells what the inodes look like afterwards.
    pub(crate) fn change(
        &mut self,
        op: u64,
        change: &Change,
        made: Option<u64>,
        row: impl Fn(u64) -> Option<Attributes>,
        now: u64,
    ) -> Verdict {
        let get = |dir: hayloft_model::Ino, name: &hayloft_model::Name| {
            (dir.0, name.as_bytes()[0], self.names.get(&(dir.0, name.as_bytes()[0])).copied())
        };
        let wrong = |why: &str| Err(format!("{change:?} succeeded, but {why}"));
        let mut names: Vec<(u64, u8, Option<u64>)> = Vec::new();
        let mut touched: BTreeSet<u64> = BTreeSet::new();
        match change {
            Change::Create(dir, name, new) => {
                let (dir, name, found) = get(*dir, name);
                let Some(made) = made else { return wrong("made nothing") };
                if found.is_some() || !self.alive(dir) || self.kinds.contains_key(&made) {
                    return wrong("the name exists, or its directory does not, or the number is not new");
                }
                let kind = FileKind::of_mode(new.mode).expect("a kind");
                self.kinds.insert(made, kind);
                names.push((dir, name, Some(made)));
                touched.extend([dir, made]);
            }
            Change::Link(ino, dir, name) => {
                let (dir, name, found) = get(*dir, name);
                if found.is_some() || !self.alive(dir) || self.is_dir(ino.0) || !self.alive(ino.0) {
                    return wrong(
                        "the name exists, its directory or the file does not, or it is a directory",
                    );
                }
                names.push((dir, name, Some(ino.0)));
                touched.extend([dir, ino.0]);
            }
            Change::Unlink(dir, name) | Change::Rmdir(dir, name) => {
                let (dir, name, found) = get(*dir, name);
                let is_rmdir = matches!(change, Change::Rmdir(..));
                match found {
                    Some(ino) if self.is_dir(ino) == is_rmdir && (!is_rmdir || self.empty(ino)) => {
                        names.push((dir, name, None));
                        touched.extend([dir, ino]);
                    }
                    other => return wrong(&format!("the name leads to {other:?}")),
                }
            }
            Change::Rename(from, to, flags) => {
                let (from_dir, from_name, source) = get(from.0, &from.1);
                let (to_dir, to_name, target) = get(to.0, &to.1);
                let Some(source) = source else { return wrong("there is no such name") };
                if !self.alive(to_dir)
                    || (self.is_dir(source) && from_dir != to_dir && self.is_below(to_dir, source))
                    || (flags.no_replace && target.is_some())
                {
                    return wrong("the target is below, exists, or its directory does not");
                }
                match target {
                    Some(target) if flags.exchange => {
                        if self.is_dir(target) && from_dir != to_dir && self.is_below(from_dir, target) {
                            return wrong("the source is below the target");
                        }
                        if source != target {
                            names.extend([
                                (from_dir, from_name, Some(target)),
                                (to_dir, to_name, Some(source)),
                            ]);
                            touched.extend([from_dir, to_dir, source, target]);
                        }
                    }
                    None if flags.exchange => return wrong("there is no target"),
                    Some(target) if target == source => {}
                    target => {
                        if let Some(target) = target {
                            let fits = self.is_dir(source) == self.is_dir(target);
                            if !fits || (self.is_dir(target) && !self.empty(target)) {
                                return wrong("the target cannot be replaced");
                            }
                            touched.insert(target);
                        }
                        names.extend([(from_dir, from_name, None), (to_dir, to_name, Some(source))]);
                        touched.extend([from_dir, to_dir, source]);
                    }
                }
            }
            Change::SetAttributes(ino, _) => {
                touched.insert(ino.0);
            }
            Change::SetXattr(..) | Change::RemoveXattr(..) => {}
        }
        for (dir, name, to) in names {
            self.put(op, Register::Name(dir, name), Value::Name(to), now);
        }
        let mode = match change {
            Change::SetAttributes(_, attributes) => attributes.mode,
            _ => None,
        };
        touched.into_iter().try_for_each(|ino| self.touch(op, ino, mode, &row, now))
    }

    /// A file's data was changed now.
    pub(crate) fn write(
        &mut self,
        op: u64,
        ino: u64,
        how: How,
        data: &[u8],
        row: impl Fn(u64) -> Option<Attributes>,
        now: u64,
    ) -> Verdict {
        let Value::Data(before) = self.value(Register::Data(ino)) else { return Ok(()) };
        let after = how.write(before.clone(), op);
        if after != data {
            return Err(format!("{how:?} to {ino} gave {data:?}, not {after:?}: {before:?} was there"));
        }
        self.put(op, Register::Data(ino), Value::Data(after), now);
        self.touch(op, ino, None, &row, now)
    }

    /// The attributes of an inode after an operation: what is known here has to be so, times move forward.
    fn touch(
        &mut self,
        op: u64,
        ino: u64,
        mode: Option<u32>,
        row: &impl Fn(u64) -> Option<Attributes>,
        now: u64,
    ) -> Verdict {
        let before = match self.value(Register::Attributes(ino)) {
            Value::Attributes(before) => Some(before),
            _ => None,
        };
        let size = match (self.kinds.get(&ino), self.value(Register::Data(ino))) {
            (Some(FileKind::Regular), Value::Data(data)) => Some(data.len() as u64),
            _ => None,
        };
        let nlink = self.nlink(ino);
        let Some(after) = row(ino) else {
            // It has gone with its last user.
            let Some(before) = before else { return Ok(()) };
            if nlink > 0 {
                return Err(format!("inode {ino} has gone, and has {nlink} names"));
            }
            self.put(op, Register::Attributes(ino), Value::Attributes(Attributes { nlink, ..before }), now);
            return Ok(());
        };
        let mode = mode.map(|mode| mode & 0o7777).or(before.map(|before| before.mode & 0o7777));
        if after.nlink != nlink
            || size.is_some_and(|size| size != after.size)
            || mode.is_some_and(|mode| mode != after.mode & 0o7777)
        {
            return Err(format!(
                "inode {ino} is {after:?} after the operation, not nlink {nlink}, size {size:?}, mode {mode:?}"
            ));
        }
        let has_times = !(self.no_directory_times && self.is_dir(ino));
        let went_back = |before: Attributes| after.mtime < before.mtime || after.ctime <= before.ctime;
        if has_times && before.is_some_and(went_back) {
            return Err(format!("times of inode {ino} did not grow: {before:?}, then {after:?}"));
        }
        let (register, value) = (Register::Attributes(ino), Value::Attributes(after));
        // Names of a split directory are changed independently of each other.
        if has_times || self.plain(register, &value) != self.value(register) {
            self.put(op, register, value, now);
        }
        Ok(())
    }

    /// The last writes to a file that its owner deleted never left the owner: whoever has it open sees it as it was
    /// stored last.
    pub(crate) fn deleted_elsewhere(
        &mut self,
        op: u64,
        ino: u64,
        stored: Attributes,
        data: Vec<u8>,
        (with, place, now): ((SessionId, u64), (u64, u64), u64),
    ) {
        let accepted = Some(Accepted::new(place, false, now));
        let (returned, with) = (Some(now), Some(with));
        let operation = Operation { call: now, returned, with, accepted, ..Operation::default() };
        self.operations.insert(op, operation);
        self.put(op, Register::Attributes(ino), Value::Attributes(Attributes { nlink: 0, ..stored }), now);
        self.put(op, Register::Data(ino), Value::Data(data), now);
    }

    pub(crate) fn kind(&self, ino: u64) -> Option<FileKind> {
        self.kinds.get(&ino).copied()
    }

    /// Names of directories in a directory.
    pub(crate) fn directories_in(&self, dir: u64) -> Vec<u8> {
        let names = self.names.range((dir, 0)..=(dir, u8::MAX));
        names.filter(|(_, to)| self.is_dir(**to)).map(|((_, name), _)| *name).collect()
    }

    /// All names.
    pub(crate) fn names(&self) -> &BTreeMap<(u64, u8), u64> {
        &self.names
    }

    /// Attributes as they are looked at.
    pub(crate) fn looked_at(&self, ino: u64, attributes: Attributes) -> Attributes {
        match self.plain(Register::Attributes(ino), &Value::Attributes(attributes)) {
            Value::Attributes(plain) => plain,
            _ => attributes,
        }
    }

    pub(crate) fn attributes(&self, ino: u64) -> Option<Attributes> {
        match self.value(Register::Attributes(ino)) {
            Value::Attributes(attributes) => Some(attributes),
            _ => None,
        }
    }

    pub(crate) fn data(&self, ino: u64) -> Vec<u8> {
        match self.value(Register::Data(ino)) {
            Value::Data(data) => data,
            _ => Vec::new(),
        }
    }
}

/// A value without times, if these are not looked at.
fn plain(value: &Value, is_without_times: bool) -> Value {
    match value {
        Value::Attributes(attributes) if is_without_times => {
            Value::Attributes(Attributes { mtime: 0, ctime: 0, ..*attributes })
        }
        value => value.clone(),
    }
}
