//! Operations of programs: what the kernel does of them by itself, what it asks the client, what the client asks the
//! server; and what is checked of each.

/// The value, or waits.
macro_rules! ready {
    ($flow:expr) => {
        match $flow {
            Flow::Ready(value) => value,
            Flow::Wait => return Flow::Wait,
        }
    };
}

mod answers;
mod looks;
mod workload;

use std::collections::BTreeSet;

use bytes::Bytes;
use hayloft_model::grants::Object;
use hayloft_model::tree::{AttributeChange, NewNode, RenameFlags};
use hayloft_model::{Change, Content, FileKind, Ino, Missing, Name, Sequence, TreeError};

use crate::Rule;
use crate::kernel::{Kernel, Moment, Target, Told};
use crate::messages::{Ask, Doing};
use crate::reference::{Attributes, How, Register, Value};
use crate::world::{What, World, trace};

/// How often a waiting operation looks again, when nothing wakes it.
const LOOK_AGAIN: u64 = 7;
/// How many directories a process holds open in worlds that are deep.
const DIRS_OPEN: usize = 4;
/// How many entries of a listing come with one answer.
const LISTED_AT_ONCE: usize = 3;

/// A process, with what it holds open.
#[derive(Default)]
pub(crate) struct Process {
    pub(crate) op: Option<Op>,
    pub(crate) open: Vec<Ino>,
    /// Directories that it holds open, in worlds that are deep: it goes on from there wherever they are moved.
    pub(crate) dirs: Vec<Ino>,
    /// How far it has come with what such a world begins with.
    crossing: u8,
    token: u64,
    wakes_at: u64,
}

impl Process {
    pub(crate) fn close_all(&mut self) {
        self.open.clear();
        self.dirs.clear();
    }

    /// Whether the kernel must not forget an inode.
    pub(crate) fn pins(&self, ino: Ino) -> bool {
        self.open.contains(&ino)
            || self.dirs.contains(&ino)
            || self.op.as_ref().is_some_and(|op| op.pins.contains(&ino))
    }
}

/// A directory by its path from the root, or from one that is open, and a name in it.
#[derive(Clone, Debug)]
struct Place {
    start: Ino,
    dir: Vec<u8>,
    name: u8,
}

impl Place {
    fn dir(&self) -> (Ino, Vec<u8>) {
        (self.start, self.dir.clone())
    }

    fn path(&self) -> (Ino, Vec<u8>) {
        (self.start, self.dir.iter().copied().chain([self.name]).collect())
    }
}

#[derive(Clone, Debug)]
enum Kind {
    Make(Place, FileKind),
    Link(Place, Place),
    Remove(Place, bool),
    Rename(Place, Place, RenameFlags),
    Write(Place, How),
    Chmod(Place, u32),
    Stat(Place),
    Read(Place),
    List(Place),
    Open(Place),
    ReadOpen(Ino),
    WriteOpen(Ino),
    StatOpen(Ino),
    Close(Ino),
    Sync,
}

/// What the kernel asks of the client.
#[derive(Clone, Debug)]
enum Act {
    Change(Change),
    Write(Ino, How),
    Attributes(Ino),
    Read(Ino),
    /// A part of a listing, from this cookie on.
    List(Ino, u64),
}

/// What the client answers.
#[derive(Clone, Debug)]
enum Answer {
    /// Where a name leads, and whether that may be kept without a limit.
    Entry(Target, Option<Attributes>, bool),
    Attributes(Attributes),
    Data(Vec<u8>),
    /// The next entries, where they end, whether all may be kept, and what a kernel that follows names is told with them.
    List(Vec<(u8, Ino)>, u64, bool, Vec<Told>),
    /// Done; with the inode that was made, its attributes, and whether its name may be kept without a limit.
    Done(Option<(Ino, FileKind, Attributes)>, bool),
    Error(TreeError),
}

/// A request of the kernel, on its way.
#[derive(Clone, Debug)]
struct Fuse {
    call: u64,
    moment: Moment,
    answer: Option<(u64, Answer)>,
    /// The directory whose lock a lookup, or a listing, holds.
    lock: Option<Ino>,
    /// What the kernel has of the name, and looks up without the lock.
    dentry: Option<(Ino, u8, u64)>,
    /// Names that the answer may make last however late it is, although they were expired.
    late: Vec<(Ino, u8)>,
    /// The kernel has what a listing tells.
    has_come: bool,
}

impl Fuse {
    fn new(call: u64, moment: Moment) -> Fuse {
        Fuse { call, moment, answer: None, lock: None, dentry: None, late: Vec::new(), has_come: false }
    }
}

#[derive(Debug)]
pub(crate) struct Op {
    id: u64,
    pub(crate) call: u64,
    kind: Kind,
    /// Paths that are walked before anything is done, and how far each has come.
    walks: Vec<(Vec<u8>, usize, Ino, FileKind)>,
    pins: BTreeSet<Ino>,
    locked: BTreeSet<Ino>,
    locking: bool,
    /// Names that were looked up under the locks.
    looked_up: Vec<Target>,
    fuse: Option<Fuse>,
    /// Requests that the operation waits for.
    waits: Option<u64>,
    acquired: BTreeSet<Ino>,
    /// How often it has asked for slots.
    slots: u32,
    /// A change is requested when the server has this.
    ship: Option<(Sequence, bool)>,
    requested: Option<u64>,
    /// The client was told to do it itself once.
    was_yours: bool,
    executed: Option<Option<Ino>>,
    /// Where the file ended when it was looked at first.
    end: Option<usize>,
    /// What has come of a listing so far, where that ends, and when it began.
    listed: Option<Listed>,
    /// The directory that it made.
    made: Option<Ino>,
    /// What is to be durable, and how often there was no room before.
    synced: Option<(Sequence, u64)>,
    waits_for_store: bool,
}

impl Op {
    /// Whether it asks the server for a change as soon as older ones are shipped.
    pub(crate) fn waits_to_request(&self) -> bool {
        self.ship.is_some()
    }

    /// Names of which it was told that they may be kept, for which the kernel does not wait when it expires them, and it has not come
    /// to that.
    pub(crate) fn late(&self) -> &[(Ino, u8)] {
        let late = self.fuse.as_ref().filter(|fuse| {
            matches!(fuse.answer, Some((_, Answer::Entry(_, _, true) | Answer::Done(Some(_), true))))
        });
        late.map_or(&[], |fuse| &fuse.late)
    }

    /// The directory that it lists, if it is answered and has not come to that.
    pub(crate) fn lists(&self) -> Option<Ino> {
        let fuse = self.fuse.as_ref().filter(|fuse| !fuse.has_come)?;
        fuse.lock.filter(|_| matches!(fuse.answer, Some((_, Answer::List(..)))))
    }

    /// It comes to its listing, if it has one.
    pub(crate) fn comes_to_listing(&mut self, kernel: &mut Kernel) {
        let Some(fuse) = self.fuse.as_mut().filter(|fuse| !fuse.has_come) else { return };
        let (Some(dir), Some((_, Answer::List(.., listed)))) = (fuse.lock, &fuse.answer) else { return };
        listed.iter().for_each(|listed| kernel.put_listed(dir, listed, fuse.moment));
        fuse.has_come = true;
    }

    /// The kernel is told of a directory under another name: it moves what it has of it there. Whether something late goes along.
    pub(crate) fn is_told(&mut self, told: Ino, place: (Ino, u8)) -> bool {
        let Some(fuse) = &mut self.fuse else { return false };
        let is_it = matches!(fuse.answer, Some((_, Answer::Entry(Some((to, _)), _, true))) if to == told);
        let is_late = is_it && fuse.late.iter().any(|(dir, _)| *dir == place.0);
        if is_late && !fuse.late.contains(&place) {
            fuse.late.push(place);
        }
        is_late
    }

    /// A name may be renamed here: what is late may go along.
    pub(crate) fn moves(&mut self, from: (Ino, u8), to: (Ino, u8), exchange: bool) {
        let Some(Fuse { late, .. }) = &mut self.fuse else { return };
        let (moves, comes_back) = (late.contains(&from), exchange && late.contains(&to));
        late.extend((moves && !late.contains(&to)).then_some(to));
        late.extend((comes_back && !late.contains(&from)).then_some(from));
    }
}

/// Names with their inodes, the place behind the last of them, and when the listing began.
type Listed = (Vec<(u8, Ino)>, u64, Fuse);

enum Flow<T> {
    Ready(T),
    /// Look again when woken.
    Wait,
}

fn name(byte: u8) -> Name {
    Name::new(&[byte])
}

impl World {
    pub(crate) fn wake(&mut self, at: usize, process: usize, delay: u64) {
        let life = self.clients[at].life;
        let when = self.now + delay;
        let woken = &mut self.clients[at].processes[process];
        if woken.wakes_at > self.now && woken.wakes_at <= when {
            return;
        }
        woken.token += 1;
        woken.wakes_at = when;
        let token = woken.token;
        self.after(delay, What::Process(at, life, process, token));
    }

    pub(crate) fn wake_all(&mut self, at: usize) {
        for process in 0..self.clients[at].processes.len() {
            let delay = self.rng.below(3);
            self.wake(at, process, delay);
        }
    }

    /// A process goes on.
    pub(crate) fn step(&mut self, at: usize, process: usize, token: u64) {
        let this = &mut self.clients[at].processes[process];
        if this.token != token {
            return;
        }
        this.wakes_at = 0;
        let op = this.op.take();
        let Some(mut op) = op.or_else(|| self.new_operation(at, process)) else { return };
        // Taken out, it must still pin what it uses: it is put back before anything else happens.
        let flow = self.drive(at, process, &mut op);
        match flow {
            Flow::Wait => {
                let soon = op.fuse.as_ref().and_then(|fuse| fuse.answer.as_ref()).map(|(when, _)| *when);
                let delay = soon.map_or(LOOK_AGAIN, |when| when.saturating_sub(self.now).max(1));
                self.clients[at].processes[process].op = Some(op);
                self.wake(at, process, delay);
            }
            Flow::Ready(result) => {
                trace!(self, "c{at}.{process} op {} returns {result:?}", op.id);
                let now = self.now;
                self.reference.returned(op.id, now);
                if !matches!(op.kind, Kind::Close(_)) {
                    self.check_tree(at, op.call);
                }
                op.locked.iter().for_each(|dir| self.clients[at].unlock(*dir));
                self.outcome.ops += 1;
                if let Some(dir) = op.made {
                    self.hold_open(at, process, dir);
                }
                if matches!(op.kind, Kind::Remove(..))
                    && result.is_ok()
                    && let Some(Some((ino, _))) = op.looked_up.first()
                    && self.rng.permille(700)
                {
                    // Without a name a kernel keeps an inode no longer than it is used.
                    self.kernel_forgets(at, *ino);
                }
                let idle = match self.busy {
                    Some(busy) if busy != at => 500,
                    _ => *self.rng.pick(&[0, 2, 10, 100]),
                };
                let delay = 1 + self.rng.below(idle + 1);
                self.wake_all(at);
                self.wake(at, process, delay);
            }
        }
    }

    fn hold_open(&mut self, at: usize, process: usize, dir: Ino) {
        if self.deep {
            let dirs = &mut self.clients[at].processes[process].dirs;
            dirs.push(dir);
            dirs.drain(..dirs.len().saturating_sub(DIRS_OPEN));
        }
    }

    fn drive(&mut self, at: usize, process: usize, op: &mut Op) -> Flow<Result<(), TreeError>> {
        if self.clients[at].is_over {
            return Flow::Ready(Err(TreeError::Stale));
        }
        for walk in 0..op.walks.len() {
            if let Err(error) = ready!(self.walk(at, op, walk)) {
                return Flow::Ready(Err(error));
            }
        }
        match op.kind.clone() {
            Kind::Open(_) => {
                let (_, _, ino, kind) = op.walks[0];
                if kind == FileKind::Regular && self.clients[at].processes[process].open.len() < 3 {
                    self.clients[at].processes[process].open.push(ino);
                } else if kind == FileKind::Directory {
                    self.hold_open(at, process, ino);
                }
                Flow::Ready(Ok(()))
            }
            Kind::Close(ino) => {
                self.clients[at].processes[process].open.retain(|open| *open != ino);
                Flow::Ready(Ok(()))
            }
            Kind::Sync => self.sync(at, op),
            Kind::Make(place, kind) => {
                ready!(self.lock(at, op));
                let dir = op.walks[0].2;
                if ready!(self.look(at, op, dir, place.name)).is_some() {
                    return Flow::Ready(Err(TreeError::Exists));
                }
                let target = (kind == FileKind::Symlink).then(|| Bytes::from_static(b"target"));
                let new = NewNode { mode: kind.bits() | 0o755, target, ..NewNode::default() };
                self.act(at, op, Act::Change(Change::Create(dir, name(place.name), new)))
            }
            Kind::Remove(place, is_dir) => {
                ready!(self.lock(at, op));
                let dir = op.walks[0].2;
                match ready!(self.look(at, op, dir, place.name)) {
                    None => Flow::Ready(Err(TreeError::NotFound)),
                    Some((_, FileKind::Directory)) if !is_dir => Flow::Ready(Err(TreeError::IsDirectory)),
                    Some((_, kind)) if is_dir && kind != FileKind::Directory => {
                        Flow::Ready(Err(TreeError::NotDirectory))
                    }
                    Some(_) if is_dir => self.act(at, op, Act::Change(Change::Rmdir(dir, name(place.name)))),
                    Some(_) => self.act(at, op, Act::Change(Change::Unlink(dir, name(place.name)))),
                }
            }
            Kind::Rename(from, to, flags) => {
                ready!(self.lock(at, op));
                let (from_dir, to_dir) = (op.walks[0].2, op.walks[1].2);
                if op.looked_up.is_empty() {
                    let source = ready!(self.look_up(at, op, from_dir, from.name, true));
                    op.looked_up.push(source);
                }
                if op.looked_up.len() == 1 {
                    let target = ready!(self.look_up(at, op, to_dir, to.name, true));
                    op.looked_up.push(target);
                }
                // Linux looks by itself whether there is what is to be exchanged, or must not be there.
                let (follows, has_target) = (self.clients[at].kernel.follows(), op.looked_up[1].is_some());
                if op.looked_up[0].is_none() || (follows && flags.exchange && !has_target) {
                    return Flow::Ready(Err(TreeError::NotFound));
                }
                if follows && flags.no_replace && has_target {
                    return Flow::Ready(Err(TreeError::Exists));
                }
                let change = Change::Rename((from_dir, name(from.name)), (to_dir, name(to.name)), flags);
                self.act(at, op, Act::Change(change))
            }
            Kind::Link(_, to) => {
                let (_, _, ino, kind) = op.walks[0];
                if kind == FileKind::Directory {
                    return Flow::Ready(Err(TreeError::NotPermitted));
                }
                ready!(self.lock(at, op));
                let dir = op.walks[1].2;
                if ready!(self.look(at, op, dir, to.name)).is_some() {
                    return Flow::Ready(Err(TreeError::Exists));
                }
                self.act(at, op, Act::Change(Change::Link(ino, dir, name(to.name))))
            }
            Kind::Write(_, how) => match op.walks[0] {
                (_, _, ino, FileKind::Regular) => self.act(at, op, Act::Write(ino, how)),
                _ => Flow::Ready(Err(TreeError::Invalid)),
            },
            Kind::WriteOpen(ino) => self.act(at, op, Act::Write(ino, How::Append)),
            Kind::Chmod(_, mode) => {
                let change = AttributeChange { mode: Some(mode), ..AttributeChange::default() };
                let ino = op.walks[0].2;
                self.act(at, op, Act::Change(Change::SetAttributes(ino, change)))
            }
            Kind::Stat(_) => self.stat(at, op, op.walks[0].2),
            Kind::StatOpen(ino) => self.stat(at, op, ino),
            Kind::Read(_) => match op.walks[0] {
                (_, _, ino, FileKind::Regular) => self.read(at, op, ino),
                _ => Flow::Ready(Err(TreeError::Invalid)),
            },
            Kind::ReadOpen(ino) => self.read(at, op, ino),
            Kind::List(_) => self.list(at, op, op.walks[0].2),
        }
    }

    fn sync(&mut self, at: usize, op: &mut Op) -> Flow<Result<(), TreeError>> {
        if !self.answers(at) {
            return Flow::Wait;
        }
        let (until, refusals) = match op.synced {
            Some(synced) => synced,
            None => {
                let refusals = self.clients[at].refusals;
                *op.synced.insert((self.flush(at), refusals))
            }
        };
        if self.clients[at].accepted < until {
            if self.clients[at].refusals == refusals {
                return Flow::Wait;
            }
            if !self.could_be_full(op.call) {
                self.fail(format!("c{at} op {} had no room", op.id));
            }
            return Flow::Ready(Err(TreeError::NoSpace));
        }
        // All of it has to be durable, and what it builds on.
        if !op.waits_for_store && !self.clients[at].kept.is_empty() {
            (op.waits, op.waits_for_store) = (Some(self.ask_to_sync(at)), true);
        }
        if op.waits.is_some_and(|request| self.clients[at].outstanding.contains_key(&request)) {
            return Flow::Wait;
        }
        let session = self.clients[at].session;
        let verdict = self.reference.synced(session, op.call);
        self.judge(&format!("c{at} op {} has synced", op.id), verdict);
        Flow::Ready(Ok(()))
    }

    /// Asks the client for something that is no lookup.
    fn act(&mut self, at: usize, op: &mut Op, act: Act) -> Flow<Result<(), TreeError>> {
        let now = self.now;
        if op.fuse.is_none() {
            let kernel = &mut self.clients[at].kernel;
            let mut fuse = Fuse::new(now, kernel.moment());
            match &act {
                Act::List(dir, _) if kernel.follows() => {
                    kernel.lock_shared(*dir);
                    fuse.lock = Some(*dir);
                }
                Act::Change(change) if !kernel.locks_for_any() => {
                    let made = change.places().first().map(|(dir, name)| (*dir, name.as_bytes()[0]));
                    fuse.late.extend(made);
                }
                _ => {}
            }
            op.fuse = Some(fuse);
        }
        let answer = ready!(self.answer(at, op, |world, op| match &act {
            Act::Change(change) => world.answer_change(at, op, change),
            Act::Write(ino, how) => world.answer_write(at, op, *ino, *how),
            Act::Attributes(ino) =>
                world.answer_inode(at, op, *ino, |row| Answer::Attributes(Attributes::of(row))),
            Act::Read(ino) => world.answer_inode(at, op, *ino, |row| Answer::Data(data_of(row))),
            Act::List(dir, from) => world.answer_list(at, op, *dir, *from),
        }));
        op.comes_to_listing(&mut self.clients[at].kernel);
        let fuse = op.fuse.take().expect("just answered");
        let returned = self.returned(at, op, &act, answer, &fuse);
        fuse.lock.into_iter().for_each(|dir| self.clients[at].unlock(dir));
        Flow::Ready(returned)
    }

    /// The kernel learns of the answer.
    fn returned(
        &mut self,
        at: usize,
        op: &mut Op,
        act: &Act,
        answer: Answer,
        fuse: &Fuse,
    ) -> Result<(), TreeError> {
        match (act, answer) {
            (Act::Attributes(ino), Answer::Attributes(attributes)) => {
                self.clients[at].kernel.put_attributes(*ino, attributes, fuse.moment);
                self.see(at, op, Register::Attributes(ino.0), Value::Attributes(attributes), fuse.call);
            }
            (Act::Read(ino), Answer::Data(data)) => {
                self.clients[at].kernel.put_data(*ino, data.clone(), fuse.moment);
                self.see(at, op, Register::Data(ino.0), Value::Data(data), fuse.call);
            }
            (Act::List(dir, _), Answer::List(part, end, keep, _)) => {
                let goes_on = part.len() == LISTED_AT_ONCE;
                let (mut list, _, begun) = op.listed.take().unwrap_or((Vec::new(), 0, fuse.clone()));
                list.extend(part);
                if goes_on {
                    op.listed = Some((list, end, begun));
                    return Ok(());
                }
                if keep {
                    self.clients[at].kernel.put_listing(*dir, list.clone(), begun.moment);
                }
                if !self.comes_too_late(at) {
                    self.see_list(at, op, *dir, &list, begun.call);
                }
            }
            (Act::Write(ino, _), Answer::Done(..)) => drop(self.clients[at].kernel.invalidate(*ino)),
            (Act::Change(change), Answer::Done(made, unlimited)) => {
                let keep = self.is_broken(Rule::KeepMadeAttributes);
                let kernel = &mut self.clients[at].kernel;
                let looked_up = op.looked_up.iter().flatten().map(|(ino, _)| *ino);
                for ino in change.directories().into_iter().chain(change.inode()).chain(looked_up) {
                    kernel.invalidate(ino);
                }
                let places: Vec<_> =
                    change.places().iter().map(|(dir, name)| (*dir, name.as_bytes()[0])).collect();
                match (change, &op.looked_up[..]) {
                    (Change::Rename(_, _, flags), [source, target]) if source != target => {
                        kernel.move_name(places[0], places[1], flags.exchange);
                    }
                    _ => places.iter().for_each(|(dir, name)| kernel.drop_name(*dir, *name)),
                }
                if let Some((ino, kind, attributes)) = made {
                    if let Some((dir, at_name)) = change.places().first() {
                        // One that others have removed already is gone for its maker too.
                        op.made = (kind == FileKind::Directory && attributes.nlink > 0).then_some(ino);
                        let name = at_name.as_bytes()[0];
                        kernel.put_name(*dir, name, Some((ino, kind)), unlimited, fuse.moment);
                    }
                    kernel.put_changed(ino, attributes, keep);
                }
            }
            (_, Answer::Error(error)) => {
                let explained = self.explains(act, error, fuse.call);
                if !explained {
                    self.fail(format!("c{at} op {}: {act:?} gave {error:?} since {}", op.id, fuse.call));
                }
                if self.reference.has_happened(op.id) {
                    self.fail(format!("c{at} op {}: {act:?} has happened, and gave {error:?}", op.id));
                }
                self.learn_from(at, act, error, fuse.call);
                return Err(error);
            }
            (act, answer) => self.fail(format!("{act:?} was answered {answer:?}")),
        }
        Ok(())
    }
}

fn data_of(row: &hayloft_model::InodeRow) -> Vec<u8> {
    match &row.content {
        Content::Inline(data) => data.to_vec(),
        _ => Vec::new(),
    }
}
