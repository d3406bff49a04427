//! Operations of programs: what the kernel does of them by itself, what it asks the client, what the client asks the
//! server; and what is checked of each.

use std::collections::BTreeSet;

use bytes::Bytes;
use hayloft_model::grants::Object;
use hayloft_model::tree::{AttributeChange, NewNode, RenameFlags};
use hayloft_model::{Change, Content, FileKind, Ino, Missing, Name, Sequence, TreeError};

use crate::Rule;
use crate::kernel::{Moment, Target};
use crate::messages::Ask;
use crate::reference::{Attributes, How, Register, Value};
use crate::world::{What, World, trace};

/// How often a waiting operation looks again, when nothing wakes it.
const LOOK_AGAIN: u64 = 7;

/// A process, with the files that it holds open.
#[derive(Default)]
pub(crate) struct Process {
    pub(crate) op: Option<Op>,
    pub(crate) open: Vec<Ino>,
    token: u64,
    wakes_at: u64,
}

impl Process {
    /// Whether the kernel must not forget an inode.
    pub(crate) fn pins(&self, ino: Ino) -> bool {
        self.open.contains(&ino) || self.op.as_ref().is_some_and(|op| op.pins.contains(&ino))
    }
}

/// A directory by its path from the root, and a name in it.
#[derive(Clone, Debug)]
struct Place {
    dir: Vec<u8>,
    name: u8,
}

impl Place {
    fn path(&self) -> Vec<u8> {
        self.dir.iter().copied().chain([self.name]).collect()
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
    List(Vec<u8>),
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
    List(Ino),
}

/// What the client answers.
#[derive(Clone, Debug)]
enum Answer {
    /// Where a name leads, and whether that may be kept without a limit.
    Entry(Target, Option<Attributes>, bool),
    Attributes(Attributes),
    Data(Vec<u8>),
    List(Vec<(u8, Ino)>, bool),
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
    /// The directory whose lock a lookup holds.
    lock: Option<Ino>,
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
    /// A change is requested when this is durable.
    ship: Option<(Sequence, bool)>,
    requested: Option<u64>,
    /// The client was told to do it itself once.
    was_yours: bool,
    executed: Option<Option<Ino>>,
    synced: Option<Sequence>,
}

enum Flow<T> {
    Ready(T),
    /// Look again when woken.
    Wait,
}

macro_rules! ready {
    ($flow:expr) => {
        match $flow {
            Flow::Ready(value) => value,
            Flow::Wait => return Flow::Wait,
        }
    };
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
                op.locked.iter().for_each(|dir| self.clients[at].kernel.unlock(*dir));
                self.outcome.ops += 1;
                let idle = *self.rng.pick(&[0, 2, 10, 100]);
                let delay = 1 + self.rng.below(idle + 1);
                self.wake_all(at);
                self.wake(at, process, delay);
            }
        }
    }

    fn new_operation(&mut self, at: usize, process: usize) -> Option<Op> {
        if self.ops_left == 0 || self.draining {
            return None;
        }
        self.ops_left -= 1;
        let kind = self.random_kind(at, process);
        let id = self.new_op();
        let session = self.clients[at].session;
        let now = self.now;
        self.reference.begin(id, session, now);
        let walks = match &kind {
            Kind::Make(place, _) | Kind::Remove(place, _) => vec![place.dir.clone()],
            Kind::Link(from, to) => vec![from.path(), to.dir.clone()],
            Kind::Rename(from, to, _) => vec![from.dir.clone(), to.dir.clone()],
            Kind::Write(place, _)
            | Kind::Chmod(place, _)
            | Kind::Stat(place)
            | Kind::Read(place)
            | Kind::Open(place) => {
                vec![place.path()]
            }
            Kind::List(dir) => vec![dir.clone()],
            _ => Vec::new(),
        };
        trace!(self, "c{at}.{process} op {id} begins: {kind:?}");
        Some(Op {
            id,
            call: self.now,
            kind,
            walks: walks.into_iter().map(|path| (path, 0, Ino::ROOT, FileKind::Directory)).collect(),
            pins: BTreeSet::new(),
            locked: BTreeSet::new(),
            locking: false,
            looked_up: Vec::new(),
            fuse: None,
            waits: None,
            acquired: BTreeSet::new(),
            ship: None,
            requested: None,
            was_yours: false,
            executed: None,
            synced: None,
        })
    }

    fn random_place(&mut self) -> Place {
        let names = [b'a', b'b', b'c', b'd'];
        let depth = *self.rng.pick(&[0, 0, 1, 1, 1, 2]);
        // Directories are mostly those at the beginning, so that hosts meet.
        let dir = (0..depth).map(|_| *self.rng.pick(&[b'a', b'a', b'b'])).collect();
        Place { dir, name: *self.rng.pick(&names) }
    }

    fn random_kind(&mut self, at: usize, process: usize) -> Kind {
        let open = self.clients[at].processes[process].open.clone();
        let place = self.random_place();
        match self.rng.below(100) {
            0..=13 => Kind::Make(place, FileKind::Regular),
            14..=23 => Kind::Make(place, FileKind::Directory),
            24..=25 => Kind::Make(place, FileKind::Symlink),
            26..=29 => Kind::Link(place, self.random_place()),
            30..=36 => Kind::Remove(place, false),
            37..=40 => Kind::Remove(place, true),
            41..=49 => {
                let flags = RenameFlags {
                    no_replace: self.rng.permille(200),
                    exchange: self.rng.permille(200),
                    whiteout: false,
                };
                let flags = RenameFlags { exchange: flags.exchange && !flags.no_replace, ..flags };
                Kind::Rename(place, self.random_place(), flags)
            }
            50..=58 => {
                let how = *self.rng.pick(&[How::Append, How::Append, How::Begin, How::Truncate]);
                Kind::Write(place, how)
            }
            59..=62 => Kind::Chmod(place, 0o700 | self.rng.below(64) as u32),
            63..=72 => Kind::Stat(place),
            73..=78 => Kind::Read(place),
            79..=83 => Kind::List(place.dir),
            84..=87 => Kind::Open(place),
            88..=96 => match open.first().copied() {
                Some(ino) => match self.rng.below(10) {
                    0..=2 => Kind::ReadOpen(ino),
                    3..=4 => Kind::WriteOpen(ino),
                    5..=6 => Kind::StatOpen(ino),
                    _ => Kind::Close(ino),
                },
                None => Kind::Open(place),
            },
            _ => Kind::Sync,
        }
    }

    fn drive(&mut self, at: usize, process: usize, op: &mut Op) -> Flow<Result<(), TreeError>> {
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
                if op.looked_up[0].is_none() {
                    return Flow::Ready(Err(TreeError::NotFound));
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
        let until = match op.synced {
            Some(until) => until,
            None => {
                let until = self.flush(at);
                op.synced = Some(until);
                until
            }
        };
        if self.clients[at].durable < until {
            return Flow::Wait;
        }
        let session = self.clients[at].session;
        let verdict = self.reference.synced(session, op.call);
        self.judge(&format!("c{at} op {} has synced", op.id), verdict);
        Flow::Ready(Ok(()))
    }

    /// Goes along a path as far as it is not known yet.
    fn walk(&mut self, at: usize, op: &mut Op, walk: usize) -> Flow<Result<(), TreeError>> {
        loop {
            let (path, done, cur, kind) = &op.walks[walk];
            let (cur, done) = (*cur, *done);
            let Some(next) = path.get(done).copied() else {
                // Directories come before the last name of a path.
                let wants_dir = match &op.kind {
                    Kind::Link(..) => walk == 1,
                    Kind::Make(..) | Kind::Remove(..) | Kind::Rename(..) | Kind::List(..) => true,
                    _ => false,
                };
                let fits = !wants_dir || *kind == FileKind::Directory;
                return Flow::Ready(if fits { Ok(()) } else { Err(TreeError::NotDirectory) });
            };
            if *kind != FileKind::Directory {
                return Flow::Ready(Err(TreeError::NotDirectory));
            }
            match ready!(self.look_up(at, op, cur, next, false)) {
                None => return Flow::Ready(Err(TreeError::NotFound)),
                Some((ino, kind)) => {
                    let walk = &mut op.walks[walk];
                    (walk.1, walk.2, walk.3) = (done + 1, ino, kind);
                }
            }
        }
    }

    /// The locks of the directories whose names change.
    fn lock(&mut self, at: usize, op: &mut Op) -> Flow<()> {
        if op.locking {
            return Flow::Ready(());
        }
        let first = usize::from(matches!(op.kind, Kind::Link(..)));
        let dirs: BTreeSet<Ino> = op.walks[first..].iter().map(|walk| walk.2).collect();
        if !self.clients[at].kernel.lock_all(&dirs) {
            return Flow::Wait;
        }
        op.locked = dirs;
        op.locking = true;
        Flow::Ready(())
    }

    /// A name under the lock, looked up once.
    fn look(&mut self, at: usize, op: &mut Op, dir: Ino, at_name: u8) -> Flow<Target> {
        if op.looked_up.is_empty() {
            let target = ready!(self.look_up(at, op, dir, at_name, true));
            op.looked_up.push(target);
        }
        Flow::Ready(op.looked_up[0])
    }

    fn see(&mut self, at: usize, op: &Op, register: Register, value: Value, call: u64) {
        let verdict = self.reference.observed(register, &value, call);
        self.judge(&format!("c{at} op {}", op.id), verdict);
    }

    /// Where a name leads: by the kernel's cache, or by a request.
    fn look_up(&mut self, at: usize, op: &mut Op, dir: Ino, at_name: u8, locked: bool) -> Flow<Target> {
        let now = self.now;
        if op.fuse.is_none() {
            if let Some(target) = self.clients[at].kernel.name(dir, at_name) {
                self.see(
                    at,
                    op,
                    Register::Name(dir.0, at_name),
                    Value::Name(target.map(|(ino, _)| ino.0)),
                    now,
                );
                op.pins.extend(target.map(|(ino, _)| ino));
                return Flow::Ready(target);
            }
            let kernel = &mut self.clients[at].kernel;
            if !locked && !kernel.lock_shared(dir) {
                return Flow::Wait;
            }
            op.pins.insert(dir);
            let lock = (!locked).then_some(dir);
            op.fuse = Some(Fuse { call: now, moment: kernel.moment(), answer: None, lock });
        }
        let answer = ready!(self.answer(at, op, |world, op| world.answer_lookup(at, op, dir, at_name)));
        let fuse = op.fuse.take().expect("just answered");
        if let Some(lock) = fuse.lock {
            self.clients[at].kernel.unlock(lock);
        }
        let Answer::Entry(target, attributes, unlimited) = answer else {
            // The directory is gone.
            return Flow::Ready(None);
        };
        self.see(
            at,
            op,
            Register::Name(dir.0, at_name),
            Value::Name(target.map(|(ino, _)| ino.0)),
            fuse.call,
        );
        let kernel = &mut self.clients[at].kernel;
        kernel.put_name(dir, at_name, target, unlimited, fuse.moment);
        if let (Some((ino, _)), Some(attributes)) = (target, attributes) {
            kernel.put_attributes(ino, attributes, fuse.moment);
            op.pins.insert(ino);
            self.see(at, op, Register::Attributes(ino.0), Value::Attributes(attributes), fuse.call);
        }
        Flow::Ready(target)
    }

    /// Has the client answer, and the answer come back.
    fn answer(
        &mut self,
        at: usize,
        op: &mut Op,
        ask: impl FnOnce(&mut World, &mut Op) -> Flow<Answer>,
    ) -> Flow<Answer> {
        let answered = op.fuse.as_ref().and_then(|fuse| fuse.answer.clone());
        match answered {
            Some((when, answer)) if when <= self.now => Flow::Ready(answer),
            Some(_) => Flow::Wait,
            None => {
                if !self.answers(at) {
                    return Flow::Wait;
                }
                if let Some(request) = op.waits {
                    if self.clients[at].outstanding.contains_key(&request) {
                        return Flow::Wait;
                    }
                    op.waits = None;
                }
                let answer = ready!(ask(self, op));
                let when = self.now + self.rng.below(3);
                trace!(self, "c{at} op {} is answered {answer:?}", op.id);
                if let Some(fuse) = &mut op.fuse {
                    fuse.answer = Some((when, answer.clone()));
                }
                if when <= self.now { Flow::Ready(answer) } else { Flow::Wait }
            }
        }
    }

    fn wait_for(&mut self, at: usize, op: &mut Op, missing: Missing) -> Flow<Answer> {
        op.waits = Some(self.fetch(at, missing));
        Flow::Wait
    }

    /// Whether a name of a directory may be handed out for ever.
    fn unlimited(&mut self, at: usize, dir: Ino, at_name: u8) -> bool {
        let broken = self.is_broken(Rule::UnlimitedWhileChanging);
        let client = &mut self.clients[at];
        let unlimited = broken || !client.hot.contains(&dir);
        if unlimited {
            client.unlimited.insert((dir, at_name));
        }
        unlimited
    }

    fn remember(&mut self, at: usize, ino: Ino) {
        let client = &mut self.clients[at];
        client.tree.remember(ino);
        *client.kernel.known.entry(ino).or_default() += 1;
    }

    fn answer_lookup(&mut self, at: usize, op: &mut Op, dir: Ino, at_name: u8) -> Flow<Answer> {
        let found = self.clients[at].tree.lookup(dir, &[at_name]);
        let dentry = match found {
            Ok(dentry) => dentry,
            Err(TreeError::Missing(missing)) => {
                if self.is_gone(at, op, dir) {
                    return Flow::Ready(Answer::Error(TreeError::Stale));
                }
                return self.wait_for(at, op, missing);
            }
            Err(error) => return Flow::Ready(Answer::Error(error)),
        };
        let Some(dentry) = dentry else {
            let unlimited = self.unlimited(at, dir, at_name);
            return Flow::Ready(Answer::Entry(None, None, unlimited));
        };
        let row = match self.clients[at].tree.inode(dentry.ino) {
            Ok(row) => Attributes::of(row),
            Err(_) => return self.wait_for(at, op, Missing::Inode(dentry.ino)),
        };
        self.remember(at, dentry.ino);
        op.pins.insert(dentry.ino);
        let unlimited = self.unlimited(at, dir, at_name);
        Flow::Ready(Answer::Entry(Some((dentry.ino, dentry.kind)), Some(row), unlimited))
    }

    /// Whether an inode that the kernel knows is gone: then it had no name since the call.
    fn is_gone(&mut self, at: usize, op: &Op, ino: Ino) -> bool {
        if self.server.stored.rows.inodes.contains_key(&ino) || self.clients[at].tree.has_inode(ino) {
            return false;
        }
        let call = op.fuse.as_ref().map_or(op.call, |fuse| fuse.call);
        // Made here and not shipped yet, it is in the tree.
        if !self.reference.could_be_unlinked(ino.0, call) {
            self.fail(format!("op {} of c{at}: {ino} has a name, and is gone", op.id));
        } else if self.clients[at].kernel.known.contains_key(&ino) {
            self.fail(format!("op {} of c{at}: {ino} is in use, and is gone", op.id));
        }
        true
    }

    fn stat(&mut self, at: usize, op: &mut Op, ino: Ino) -> Flow<Result<(), TreeError>> {
        let now = self.now;
        if op.fuse.is_none()
            && let Some(attributes) = self.clients[at].kernel.attributes(ino)
        {
            self.see(at, op, Register::Attributes(ino.0), Value::Attributes(attributes), now);
            return Flow::Ready(Ok(()));
        }
        self.act(at, op, Act::Attributes(ino))
    }

    fn read(&mut self, at: usize, op: &mut Op, ino: Ino) -> Flow<Result<(), TreeError>> {
        let now = self.now;
        if op.fuse.is_none()
            && let Some(data) = self.clients[at].kernel.data(ino)
        {
            let data = data.clone();
            self.see(at, op, Register::Data(ino.0), Value::Data(data), now);
            return Flow::Ready(Ok(()));
        }
        self.act(at, op, Act::Read(ino))
    }

    fn list(&mut self, at: usize, op: &mut Op, dir: Ino) -> Flow<Result<(), TreeError>> {
        let now = self.now;
        if op.fuse.is_none()
            && let Some(list) = self.clients[at].kernel.listing(dir)
        {
            let list = list.clone();
            self.see_list(at, op, dir, &list, now);
            return Flow::Ready(Ok(()));
        }
        self.act(at, op, Act::List(dir))
    }

    fn see_list(&mut self, at: usize, op: &Op, dir: Ino, list: &[(u8, Ino)], call: u64) {
        for at_name in *b"abcd" {
            let found = list.iter().find(|(name, _)| *name == at_name).map(|(_, ino)| ino.0);
            self.see(at, op, Register::Name(dir.0, at_name), Value::Name(found), call);
        }
    }

    /// Asks the client for something that is no lookup.
    fn act(&mut self, at: usize, op: &mut Op, act: Act) -> Flow<Result<(), TreeError>> {
        let now = self.now;
        if op.fuse.is_none() {
            let moment = self.clients[at].kernel.moment();
            op.fuse = Some(Fuse { call: now, moment, answer: None, lock: None });
        }
        let answer = ready!(self.answer(at, op, |world, op| match &act {
            Act::Change(change) => world.answer_change(at, op, change),
            Act::Write(ino, how) => world.answer_write(at, op, *ino, *how),
            Act::Attributes(ino) =>
                world.answer_inode(at, op, *ino, |row| Answer::Attributes(Attributes::of(row))),
            Act::Read(ino) => world.answer_inode(at, op, *ino, |row| Answer::Data(data_of(row))),
            Act::List(dir) => world.answer_list(at, op, *dir),
        }));
        let fuse = op.fuse.take().expect("just answered");
        Flow::Ready(self.returned(at, op, &act, answer, &fuse))
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
            (Act::List(dir), Answer::List(list, keep)) => {
                if keep {
                    self.clients[at].kernel.put_listing(*dir, list.clone(), fuse.moment);
                }
                self.see_list(at, op, *dir, &list, fuse.call);
            }
            (Act::Write(ino, _), Answer::Done(..)) => self.clients[at].kernel.invalidate(*ino),
            (Act::Change(change), Answer::Done(made, unlimited)) => {
                let kernel = &mut self.clients[at].kernel;
                change.directories().into_iter().for_each(|dir| kernel.invalidate(dir));
                change.inode().into_iter().for_each(|ino| kernel.invalidate(ino));
                op.looked_up.iter().flatten().for_each(|(ino, _)| kernel.invalidate(*ino));
                for (dir, at_name) in change.places() {
                    kernel.drop_name(dir, at_name.as_bytes()[0]);
                }
                if let (Some((ino, kind, attributes)), Some((dir, at_name))) = (made, change.places().first())
                {
                    kernel.put_name(*dir, at_name.as_bytes()[0], Some((ino, kind)), unlimited, fuse.moment);
                    kernel.put_attributes(ino, attributes, fuse.moment);
                }
            }
            (_, Answer::Error(error)) => {
                let explained = self.explains(act, error, fuse.call);
                if !explained {
                    self.fail(format!("c{at} op {}: {act:?} gave {error:?} since {}", op.id, fuse.call));
                }
                return Err(error);
            }
            (act, answer) => self.fail(format!("{act:?} was answered {answer:?}")),
        }
        Ok(())
    }

    fn answer_inode(
        &mut self,
        at: usize,
        op: &mut Op,
        ino: Ino,
        of: impl Fn(&hayloft_model::InodeRow) -> Answer,
    ) -> Flow<Answer> {
        let answer = self.clients[at].tree.inode(ino).map(of);
        match answer {
            Ok(answer) => Flow::Ready(answer),
            Err(_) if self.is_gone(at, op, ino) => Flow::Ready(Answer::Error(TreeError::Stale)),
            Err(_) => self.wait_for(at, op, Missing::Inode(ino)),
        }
    }

    fn answer_list(&mut self, at: usize, op: &mut Op, dir: Ino) -> Flow<Answer> {
        let hot = self.clients[at].hot.contains(&dir);
        let entries = self.clients[at].tree.entries(dir, 0).map(|entries| {
            entries.map(|(name, dentry)| (name.as_bytes()[0], dentry.ino)).collect::<Vec<_>>()
        });
        match entries {
            Ok(list) => Flow::Ready(Answer::List(list, !hot)),
            Err(TreeError::Missing(_)) if self.is_gone(at, op, dir) => {
                Flow::Ready(Answer::Error(TreeError::Stale))
            }
            Err(TreeError::Missing(missing)) => self.wait_for(at, op, missing),
            Err(error) => Flow::Ready(Answer::Error(error)),
        }
    }

    fn answer_write(&mut self, at: usize, op: &mut Op, ino: Ino, how: How) -> Flow<Answer> {
        let now = self.client_now(at);
        let before = self.clients[at].tree.inode(ino).map(data_of);
        let before = match before {
            Ok(data) => data,
            Err(_) if self.is_gone(at, op, ino) => return Flow::Ready(Answer::Error(TreeError::Stale)),
            Err(_) => return self.wait_for(at, op, Missing::Inode(ino)),
        };
        let data = how.write(before, op.id);
        let size = data.len() as u64;
        let tree = &mut self.clients[at].tree;
        let done = match how {
            How::Truncate => {
                let change = AttributeChange { size: Some((0, 0)), ..AttributeChange::default() };
                tree.set_attributes(ino, change, now)
            }
            _ => tree.wrote(ino, size, size, false, now),
        };
        match done {
            Ok(()) => {
                tree.set_content(ino, Content::Inline(data.clone().into()));
                let row = |ino: u64| self.clients[at].tree.inode(Ino(ino)).ok().map(Attributes::of);
                let verdict = self.reference.write(op.id, ino.0, how, &data, row, self.now);
                self.judge(&format!("c{at} op {}", op.id), verdict);
                Flow::Ready(Answer::Done(None, false))
            }
            Err(TreeError::Missing(missing)) => self.wait_for(at, op, missing),
            Err(error) => Flow::Ready(Answer::Error(error)),
        }
    }

    /// A change of names or attributes: here, or at the server.
    fn answer_change(&mut self, at: usize, op: &mut Op, change: &Change) -> Flow<Answer> {
        if let Some(made) = op.executed {
            return self.answer_executed(at, op, change, made);
        }
        if let Some(request) = op.requested {
            let Some((result, yours)) = self.clients[at].answers.remove(&request) else { return Flow::Wait };
            op.requested = None;
            match result {
                Err(error) => return Flow::Ready(Answer::Error(error)),
                Ok(_) if yours => op.was_yours = true,
                Ok(made) => {
                    op.executed = Some(made);
                    return self.answer_executed(at, op, change, made);
                }
            }
        }
        if let Some((until, execute)) = op.ship {
            if self.clients[at].durable < until && !self.is_broken(Rule::ChangeBeforeShip) {
                return Flow::Wait;
            }
            op.ship = None;
            let request = self.ask(at, Ask::Change { change: change.clone(), execute });
            let session = self.clients[at].session;
            self.reference.requests.insert((session, request), op.id);
            (op.requested, op.waits) = (Some(request), Some(request));
            return Flow::Wait;
        }
        let now = self.client_now(at);
        let done = change.apply(&mut self.clients[at].tree, now);
        match done {
            Ok(made) => {
                let row = |ino: u64| self.clients[at].tree.inode(Ino(ino)).ok().map(Attributes::of);
                let verdict = self.reference.change(op.id, change, made.map(|ino| ino.0), row, self.now);
                self.judge(&format!("c{at} op {}", op.id), verdict);
                self.answer_made(at, op, change, made)
            }
            Err(TreeError::Missing(missing)) => self.need(at, op, change, missing),
            Err(error) => Flow::Ready(Answer::Error(error)),
        }
    }

    fn need(&mut self, at: usize, op: &mut Op, change: &Change, missing: Missing) -> Flow<Answer> {
        match missing {
            Missing::Inode(ino) | Missing::Directory(ino) if self.is_gone(at, op, ino) => {
                Flow::Ready(Answer::Error(TreeError::Stale))
            }
            Missing::Own(Object::Directory(dir)) if !op.acquired.insert(dir) => {
                self.request_change(at, op, change, false)
            }
            Missing::Executor => self.request_change(at, op, change, true),
            missing => self.wait_for(at, op, missing),
        }
    }

    fn request_change(&mut self, at: usize, op: &mut Op, change: &Change, execute: bool) -> Flow<Answer> {
        // What is its own may not be enough: the row of a directory that is moved or removed is another's. Told so again
        // and again, it would never end.
        let execute = execute || op.was_yours;
        let client = &mut self.clients[at];
        client.hot.extend(change.directories());
        let until = self.flush(at);
        op.ship = Some((until, execute));
        self.answer_change(at, op, change)
    }

    /// A change that the server has executed; the kernel is told what was made.
    fn answer_executed(
        &mut self,
        at: usize,
        op: &mut Op,
        change: &Change,
        made: Option<Ino>,
    ) -> Flow<Answer> {
        if let Some(ino) = made
            && !self.clients[at].tree.has_inode(ino)
        {
            if !self.server.stored.rows.inodes.contains_key(&ino) {
                // Somebody has removed it already, before the kernel knew of it.
                return Flow::Ready(Answer::Done(None, false));
            }
            return self.wait_for(at, op, Missing::Inode(ino));
        }
        self.answer_made(at, op, change, made)
    }

    fn answer_made(&mut self, at: usize, op: &mut Op, change: &Change, made: Option<Ino>) -> Flow<Answer> {
        let linked = if let Change::Link(ino, ..) = change { Some(*ino) } else { None };
        let entry = made.or(linked);
        let row = entry.and_then(|ino| self.clients[at].tree.inode(ino).ok().map(|row| (ino, row)));
        let Some((ino, row)) = row else { return Flow::Ready(Answer::Done(None, false)) };
        let (kind, attributes) = (row.kind(), Attributes::of(row));
        self.remember(at, ino);
        op.pins.insert(ino);
        let (dir, at_name) = (change.directories()[0], change.places()[0].1.as_bytes()[0]);
        // What the server has executed may be over already.
        let unlimited = op.executed.is_none() && self.unlimited(at, dir, at_name);
        Flow::Ready(Answer::Done(Some((ino, kind, attributes)), unlimited))
    }

    /// Whether an error may be right: something that it says was so between the call and now.
    fn explains(&self, act: &Act, error: TreeError, call: u64) -> bool {
        let reference = &self.reference;
        let change = match act {
            Act::Change(change) => change,
            Act::Write(ino, _) | Act::Attributes(ino) | Act::Read(ino) | Act::List(ino) => {
                return error == TreeError::Stale && reference.could_be_unlinked(ino.0, call);
            }
        };
        let places: Vec<(u64, u8)> =
            change.places().iter().map(|(dir, name)| (dir.0, name.as_bytes()[0])).collect();
        let could_be = |at: usize| {
            places.get(at).map(|(dir, name)| reference.could_be(*dir, *name, call)).unwrap_or_default()
        };
        let dead = change
            .directories()
            .into_iter()
            .chain(change.inode())
            .any(|ino| reference.could_be_unlinked(ino.0, call));
        let last = places.len().saturating_sub(1);
        let is_dir = |ino: &u64| reference.kind(*ino) == Some(FileKind::Directory);
        match error {
            TreeError::Exists => could_be(last).iter().any(Option::is_some),
            TreeError::NotFound => dead || (0..=last).any(|at| could_be(at).contains(&None)),
            TreeError::Stale => dead,
            TreeError::NotEmpty => {
                could_be(last).iter().flatten().any(|ino| reference.could_have_names(*ino, call))
            }
            TreeError::IsDirectory => could_be(last).iter().flatten().any(is_dir),
            TreeError::NotDirectory => could_be(last).iter().flatten().any(|ino| !is_dir(ino)),
            TreeError::Invalid => could_be(0).iter().chain(&could_be(last)).flatten().any(is_dir),
            TreeError::NotPermitted => could_be(last).iter().flatten().any(is_dir),
            _ => false,
        }
    }
}

fn data_of(row: &hayloft_model::InodeRow) -> Vec<u8> {
    match &row.content {
        Content::Inline(data) => data.to_vec(),
        _ => Vec::new(),
    }
}
