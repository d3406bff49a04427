//! The grant machine: which session may cache, or change, which object without asking, who has to give way
//! first, and when a change has reached everybody. `docs/sharing.md` has the rules in prose.
//!
//! Pure: the server feeds it requests, acknowledgements and ended sessions, and carries out what
//! [`Grants::take_outputs`] says. The simulator does the same.
//!
//! A request claims its objects in modes that conflict as usual (see `Mode`) until it is finished, in the order
//! of tickets; a request that waits keeps later ones from overtaking it. So the history of an object is one
//! sequence, and what is put into the sessions' streams before [`Grants::finish`] is in that order.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use crate::{Ino, InodeRow, SessionId};

/// How a session holds a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grant {
    /// Shared: may answer lookups and listings itself, and is told of every change.
    Read,
    /// Exclusive: may also change the directory and its files without asking.
    Own,
}

/// What is granted: a directory, or a file by itself.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Object {
    /// A directory: its names, its row, and its files as far as nobody owns them by themselves.
    Directory(Ino),
    /// Anything else: its row and data. `home` is the directory that all its names are in; `Ino(0)`: a stray.
    File {
        /// The file.
        ino: Ino,
        /// Its home directory, or `Ino(0)`.
        home: Ino,
    },
}

impl Object {
    /// The object that an inode's row says it is.
    pub fn of(ino: Ino, row: &InodeRow) -> Object {
        crate::tree::object_of(ino, row)
    }

    /// The object's inode.
    pub fn ino(self) -> Ino {
        match self {
            Object::Directory(ino) | Object::File { ino, .. } => ino,
        }
    }

    /// The home of a file that has one.
    pub fn home(self) -> Option<Ino> {
        match self {
            Object::File { home, .. } if home != STRAY => Some(home),
            _ => None,
        }
    }

    fn is_stray(self) -> bool {
        matches!(self, Object::File { home: STRAY, .. })
    }
}

/// An object with its home, in the order of recalls: while an owner has the home, a file that it has given back already
/// could become its own again, by losing its last name.
fn home_first(object: &Object) -> impl Iterator<Item = Object> + use<> {
    [object.home().map(Object::Directory), Some(*object)].into_iter().flatten()
}

/// The home of files that have none.
pub const STRAY: Ino = Ino(0);

/// Number of a request, in the order of arrival.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(pub u64);

/// What a session wants.
#[derive(Clone, PartialEq, Debug)]
pub enum Request {
    /// To know these objects.
    Read(Vec<Object>),
    /// To own an object.
    Own(Object),
    /// Not to own these files by themselves. Nothing comes of it but that they are recalled.
    Release(Vec<Object>),
    /// To own all of these, whoever knows them: for what a session that was ended has changed, see [`crate::Estates`].
    Reclaim(Vec<Object>),
    /// To have an operation on these objects executed. `local`: the session may do it itself when it owns them.
    Change {
        /// All that it changes.
        objects: Vec<Object>,
        /// Whether owning them is as good.
        local: bool,
    },
}

impl Request {
    fn objects(&self) -> &[Object] {
        match self {
            Request::Read(objects)
            | Request::Release(objects)
            | Request::Reclaim(objects)
            | Request::Change { objects, .. } => objects,
            Request::Own(object) => std::slice::from_ref(object),
        }
    }
}

/// What a request has come to when its turn is there.
#[derive(Clone, PartialEq, Debug)]
pub enum Outcome {
    /// Of `Read`: go on, see [`Grants::held`]; of `Own` and `Reclaim`: it is owned.
    Granted,
    /// Of `Own`: it is not, others use it too; changes have to be requested.
    Shared,
    /// Of `Change`: execute it.
    Execute,
    /// Of `Change`: the session owns these now, and does it itself.
    Yours(Vec<Object>),
}

/// What a session has to do, and to acknowledge.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// To stop owning an object, or holding it at all.
    Recall {
        /// The object.
        object: Object,
        /// It stays a reader.
        keep_read: bool,
    },
    /// To forget what it knows of a file.
    Drop(Ino),
}

/// What is to be done, in this order.
#[derive(Clone, PartialEq, Debug)]
pub enum Output {
    /// Send this to a session.
    Order {
        /// To whom.
        to: SessionId,
        /// The number that it acknowledges.
        event: u64,
        /// What.
        order: Order,
    },
    /// The turn of a request is there. It ends with [`Grants::finish`].
    Ready {
        /// Which.
        ticket: Ticket,
        /// What to do.
        outcome: Outcome,
    },
    /// Everybody has acknowledged what the request published.
    Settled(Ticket),
}

/// How often in a row a session has to be alone in changing a directory before it is worth recalling readers.
const STREAK_MIN: u32 = 8;
/// Wrong guesses double that, up to here.
const STREAK_MAX: u32 = 4096;

/// How an object is claimed by a request. Intentions are those of requests about files, on their home.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    /// A file below is read.
    ReadBelow,
    /// A file below is given to an owner.
    OwnBelow,
    Read,
    Exclusive,
}

impl Mode {
    fn conflicts(self, other: Mode) -> bool {
        matches!(
            (self, other),
            (Mode::Exclusive, _)
                | (_, Mode::Exclusive)
                | (Mode::Read, Mode::OwnBelow)
                | (Mode::OwnBelow, Mode::Read)
        )
    }
}

#[derive(Clone, Debug, Default)]
struct Holding {
    owner: Option<SessionId>,
    readers: BTreeSet<SessionId>,
    /// Home of a file.
    home: Option<Ino>,
    /// Who has changed the directory by request last, and how often in a row.
    streak: Option<(SessionId, u32)>,
    /// How long a streak has to be, when it is not [`STREAK_MIN`].
    patience: Option<u32>,
    /// The event that told the owner so; [`NOT_TOLD`] before there is one, 0 if it knew by itself.
    told: u64,
}

/// An owner is not told yet that it is.
pub const NOT_TOLD: u64 = u64::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Awaited {
    Recall {
        object: Object,
        keep_read: bool,
        /// Others need it: not only its owner would rather not have it.
        wanted: bool,
    },
    Drop(Ticket),
    Published(Ticket),
}

#[derive(Clone, Debug, Default)]
struct Peer {
    read_only: bool,
    /// What it owned before a reconnection is known.
    claimed: bool,
    last_event: u64,
    awaited: BTreeMap<u64, Awaited>,
    /// Of these, by what is to be given back.
    recalls: HashMap<Ino, u64>,
}

#[derive(Clone, PartialEq, Debug)]
enum Stage {
    Waiting,
    /// Readers have been told to drop the file; these have not acknowledged.
    Dropping(BTreeSet<SessionId>),
    Ready,
    /// Published; these have not acknowledged.
    Settling(BTreeSet<SessionId>),
}

#[derive(Clone, Debug)]
struct Waiting {
    session: SessionId,
    request: Request,
    stage: Stage,
    /// Who has to acknowledge what was published while the request was ready.
    published: BTreeSet<SessionId>,
    /// Directories that the request became a reader of on the way.
    along: Vec<Ino>,
}

/// All grants of a volume.
#[derive(Clone, Debug, Default)]
pub struct Grants {
    objects: HashMap<Ino, Holding>,
    /// Files with an owner of their own, by home.
    files: HashMap<Ino, BTreeSet<Ino>>,
    peers: BTreeMap<SessionId, Peer>,
    requests: BTreeMap<Ticket, Waiting>,
    last_ticket: u64,
    outputs: Vec<Output>,
}

impl Grants {
    /// A session begins, or is found in the tables at the server's start. Nobody is served before it has claimed,
    /// or ended.
    pub fn join(&mut self, session: SessionId, read_only: bool) {
        let peer = self.peers.entry(session).or_default();
        (peer.read_only, peer.claimed) = (read_only, false);
    }

    /// The session has a new connection: it has forgotten everything but what it says to own. What it had not
    /// acknowledged is done.
    ///
    /// # Errors
    /// Objects that somebody else holds: it must not go on.
    pub fn claim(&mut self, session: SessionId, own: &[Object]) -> Result<(), Vec<Object>> {
        self.let_go_of_all(session);
        let mut refused = Vec::new();
        for object in own {
            if !self.adopt(session, *object) {
                refused.push(*object);
            }
        }
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.claimed = true;
        }
        self.advance();
        if refused.is_empty() { Ok(()) } else { Err(refused) }
    }

    /// The session is over: everything that it held is free, what it had to do is done, its requests are void.
    pub fn end(&mut self, session: SessionId) {
        self.let_go_of_all(session);
        self.peers.remove(&session);
        self.requests.retain(|_, request| {
            request.session != session || matches!(request.stage, Stage::Ready | Stage::Settling(_))
        });
        self.advance();
    }

    fn let_go_of_all(&mut self, session: SessionId) {
        let mut emptied = Vec::new();
        for (ino, holding) in &mut self.objects {
            holding.readers.remove(&session);
            if holding.owner == Some(session) {
                holding.owner = None;
                emptied.push(*ino);
            }
        }
        emptied.into_iter().for_each(|ino| self.unlist_file(ino));
        self.objects.retain(|_, holding| !holding.is_idle());
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.awaited.clear();
            peer.recalls.clear();
        }
        for request in self.requests.values_mut() {
            request.published.remove(&session);
            if let Stage::Dropping(left) | Stage::Settling(left) = &mut request.stage {
                left.remove(&session);
            }
        }
    }

    /// A session wants something. [`Output::Ready`] follows, at once or later.
    pub fn request(&mut self, session: SessionId, request: Request) -> Ticket {
        self.last_ticket += 1;
        let ticket = Ticket(self.last_ticket);
        if let Request::Change { objects, .. } = &request {
            self.count_streaks(session, objects);
        }
        let waiting = Waiting {
            session,
            request,
            stage: Stage::Waiting,
            published: BTreeSet::new(),
            along: Vec::new(),
        };
        self.requests.insert(ticket, waiting);
        self.advance();
        ticket
    }

    /// A session would rather not own these files by themselves. What it has said so of before, and has not given back,
    /// is left out: it may say so again and again meanwhile.
    pub fn release(&mut self, session: SessionId, files: &[Ino]) {
        let said: HashSet<Ino> = self
            .releases_of(session)
            .flat_map(|release| release.request.objects())
            .map(|of| of.ino())
            .collect();
        let owned = |ino: &Ino| {
            let holding = self.objects.get(ino).filter(|holding| holding.owner == Some(session))?;
            let file = Object::File { ino: *ino, home: holding.home? };
            (!said.contains(ino)).then_some(file)
        };
        let files: Vec<Object> = files.iter().filter_map(owned).collect();
        if !files.is_empty() {
            self.request(session, Request::Release(files));
        }
    }

    fn count_streaks(&mut self, session: SessionId, objects: &[Object]) {
        for object in objects {
            if let Object::Directory(dir) = object
                && let Some(holding) = self.objects.get_mut(dir)
            {
                holding.streak = match holding.streak {
                    Some((last, count)) if last == session => Some((last, count.saturating_add(1))),
                    _ => Some((session, 1)),
                };
            }
        }
    }

    /// A request that is ready turns out to concern more objects: it waits again, for all of them, at its old
    /// place in line. The request of a session that has ended is void.
    pub fn extend(&mut self, ticket: Ticket, more: impl IntoIterator<Item = Object>) {
        if self.requests.get(&ticket).is_some_and(|waiting| !self.peers.contains_key(&waiting.session)) {
            self.cancel(ticket);
        } else if let Some(waiting) = self.requests.get_mut(&ticket) {
            if let Request::Read(objects) | Request::Change { objects, .. } = &mut waiting.request {
                for object in more {
                    if !objects.contains(&object) {
                        objects.push(object);
                    }
                }
            }
            waiting.stage = Stage::Waiting;
        }
        self.advance();
    }

    /// A request that is ready takes along one more directory, if nobody owns it or is about to. Returns how the
    /// session holds it now.
    pub fn read_along(&mut self, ticket: Ticket, dir: Ino) -> Option<Grant> {
        let session = self.take_along(ticket, dir)?;
        Some(self.register_reader(session, dir))
    }

    /// The same for a file that no directory covers: nobody owns it, and nobody will while the request is under way.
    pub fn read_stray_along(&mut self, ticket: Ticket, file: Ino) -> bool {
        self.take_along(ticket, file).is_some()
    }

    fn take_along(&mut self, ticket: Ticket, ino: Ino) -> Option<SessionId> {
        let session = self.requests.get(&ticket)?.session;
        let foreign = self.owner(ino).is_some_and(|owner| owner != session);
        let given_back = self.is_recalled(session, ino);
        if foreign || given_back || !self.peers.contains_key(&session) || self.is_wanted(ticket, ino) {
            return None;
        }
        self.requests.get_mut(&ticket)?.along.push(ino);
        Some(session)
    }

    /// Whether another request claims the object in a way that conflicts with reading it.
    fn is_wanted(&self, ticket: Ticket, wanted: Ino) -> bool {
        self.requests.iter().any(|(other, waiting)| {
            *other != ticket
                && waiting.claims().any(|(ino, mode)| ino == wanted && mode.conflicts(Mode::Read))
        })
    }

    /// What of a ready request was put into streams that others have to acknowledge: everybody who is concerned
    /// gets an event number. Directories: their readers; files: readers of their home; strays: everybody. The
    /// asker is among them, and is not waited for: its answer comes after the event.
    pub fn publish(&mut self, ticket: Ticket, objects: &[Object]) -> Vec<(SessionId, u64)> {
        let Some(asker) = self.requests.get(&ticket).map(|waiting| waiting.session) else {
            return Vec::new();
        };
        let mut to = BTreeSet::from([asker]);
        for object in objects {
            if object.is_stray() {
                to.extend(self.peers.keys());
            } else {
                let dir = object.home().unwrap_or(object.ino());
                to.extend(self.objects.get(&dir).iter().flat_map(|holding| &holding.readers));
            }
        }
        to.retain(|session| self.peers.contains_key(session));
        let mut events = Vec::with_capacity(to.len());
        for session in to {
            if session == asker {
                events.extend(self.tell(session).map(|event| (session, event)));
            } else {
                events.push((session, self.number(session, Awaited::Published(ticket))));
                if let Some(waiting) = self.requests.get_mut(&ticket) {
                    waiting.published.insert(session);
                }
            }
        }
        events
    }

    /// The number of an event for one session that no request waits for: what it asked for is in its stream before
    /// the answer.
    pub fn tell(&mut self, session: SessionId) -> Option<u64> {
        self.peers.get_mut(&session).map(|peer| {
            peer.last_event += 1;
            peer.last_event
        })
    }

    fn number(&mut self, session: SessionId, awaited: Awaited) -> u64 {
        let Some(peer) = self.peers.get_mut(&session) else { return 0 };
        peer.last_event += 1;
        if let Awaited::Recall { object, .. } = awaited {
            peer.recalls.insert(object.ino(), peer.last_event);
        }
        peer.awaited.insert(peer.last_event, awaited);
        peer.last_event
    }

    /// A request is carried out: others may have its objects. [`Output::Settled`] follows when what it published
    /// is acknowledged.
    pub fn finish(&mut self, ticket: Ticket) {
        if let Some(waiting) = self.requests.get_mut(&ticket) {
            waiting.stage = Stage::Settling(std::mem::take(&mut waiting.published));
        }
        self.advance();
    }

    /// A request is given up, or has failed; nothing of it was published.
    pub fn cancel(&mut self, ticket: Ticket) {
        self.requests.remove(&ticket);
        for peer in self.peers.values_mut() {
            peer.awaited.retain(|_, awaited| !matches!(awaited, Awaited::Drop(of) if *of == ticket));
        }
        self.advance();
    }

    /// A session has done what an event told it.
    pub fn acknowledge(&mut self, session: SessionId, event: u64) {
        let Some(peer) = self.peers.get_mut(&session) else { return };
        let Some(awaited) = peer.awaited.remove(&event) else { return };
        match awaited {
            Awaited::Recall { object, keep_read, .. } => {
                peer.recalls.remove(&object.ino());
                self.recalled(session, object, keep_read);
            }
            Awaited::Drop(ticket) => {
                if let Some(Stage::Dropping(left)) =
                    self.requests.get_mut(&ticket).map(|waiting| &mut waiting.stage)
                {
                    left.remove(&session);
                }
            }
            Awaited::Published(ticket) => {
                if let Some(waiting) = self.requests.get_mut(&ticket) {
                    waiting.published.remove(&session);
                    if let Stage::Settling(left) = &mut waiting.stage {
                        left.remove(&session);
                    }
                }
            }
        }
        self.advance();
    }

    fn recalled(&mut self, session: SessionId, object: Object, keep_read: bool) {
        let ino = object.ino();
        let Some(holding) = self.objects.get_mut(&ino) else { return };
        let owned = holding.owner == Some(session);
        if owned {
            holding.owner = None;
        }
        if matches!(object, Object::Directory(_)) {
            if !keep_read {
                holding.readers.remove(&session);
            } else if owned {
                holding.readers.insert(session);
            }
            if owned && holding.patience.is_some() {
                holding.patience = holding.patience.map(|patience| (patience * 2).min(STREAK_MAX));
            }
            holding.streak = None;
        } else if keep_read && owned {
            // What it keeps of a file is covered by the home from now on.
            let home = holding.home.filter(|home| *home != STRAY);
            if let Some(home) = home {
                let holding = self.objects.entry(home).or_default();
                if holding.owner.is_none() {
                    holding.readers.insert(session);
                }
            }
        }
        self.unlist_file(ino);
        self.drop_idle(ino);
    }

    fn unlist_file(&mut self, ino: Ino) {
        let home = self.objects.get(&ino).filter(|holding| holding.owner.is_none()).and_then(|of| of.home);
        if let Some(home) = home
            && let Some(files) = self.files.get_mut(&home)
        {
            files.remove(&ino);
            if files.is_empty() {
                self.files.remove(&home);
            }
        }
    }

    fn drop_idle(&mut self, ino: Ino) {
        if self.objects.get(&ino).is_some_and(Holding::is_idle) {
            self.objects.remove(&ino);
        }
    }

    /// A session brings an object that it owns without having asked: it made it. `false` when somebody else holds
    /// it.
    pub fn adopt(&mut self, session: SessionId, object: Object) -> bool {
        if !self.peers.contains_key(&session) {
            return false;
        }
        let holding = self.objects.entry(object.ino()).or_default();
        let others = holding.owner.is_some_and(|owner| owner != session)
            || holding.readers.iter().any(|reader| *reader != session);
        if others {
            return false;
        }
        // What it is just being told of again it may not know yet.
        let told = if holding.owner == Some(session) { holding.told } else { 0 };
        self.give(session, object);
        self.told(object.ino(), told);
        true
    }

    /// This event tells the owner of an object that it is.
    pub fn told(&mut self, ino: Ino, event: u64) {
        if let Some(holding) = self.objects.get_mut(&ino) {
            holding.told = event;
        }
    }

    /// A session has given files back that it owned by themselves, without having been asked: what it had changed of them is
    /// stored. `seen` is the last event that it had applied then. What it was told again meanwhile, what is recalled from
    /// it, and what it asks for, is left as it is: these are recalled when they are needed.
    pub fn give_back(&mut self, session: SessionId, files: &[Ino], seen: u64) {
        let is_asked = |ino: Ino| {
            let mut own = self.requests.values().filter(|waiting| waiting.session == session);
            own.any(|waiting| {
                !matches!(waiting.stage, Stage::Settling(_))
                    && waiting.request.objects().iter().any(|object| object.ino() == ino)
            })
        };
        let given = |ino: &Ino| {
            let holding = self.objects.get(ino).filter(|holding| holding.owner == Some(session))?;
            let object = Object::File { ino: *ino, home: holding.home? };
            let is_recalled = self.peers.get(&session).is_none_or(|peer| peer.is_recalled(*ino));
            let is_given = holding.told <= seen && !is_recalled && !is_asked(*ino);
            (is_given && self.may_keep(session, object)).then_some(object)
        };
        let given: Vec<Object> = files.iter().filter_map(given).collect();
        given.iter().for_each(|object| self.recalled(session, *object, true));
        self.advance();
    }

    fn give(&mut self, session: SessionId, object: Object) {
        let holding = self.objects.entry(object.ino()).or_default();
        holding.told = NOT_TOLD;
        holding.owner = Some(session);
        holding.readers.clear();
        holding.streak = None;
        if let Object::File { ino, home } = object {
            if let Some(before) = holding.home.replace(home).filter(|before| *before != home)
                && let Some(files) = self.files.get_mut(&before)
            {
                files.remove(&ino);
            }
            self.files.entry(home).or_default().insert(ino);
        }
    }

    fn register_reader(&mut self, session: SessionId, dir: Ino) -> Grant {
        let alone = self.peers.len() == 1 && self.peers.get(&session).is_some_and(|peer| !peer.read_only);
        let foreign_files = self.foreign_file(session, dir).is_some();
        if let Some(held @ Grant::Own) = self.held(session, dir) {
            return held;
        }
        let holding = self.objects.entry(dir).or_default();
        if holding.owner == Some(session) {
            return Grant::Read;
        }
        if alone && !foreign_files {
            self.give(session, Object::Directory(dir));
            return Grant::Own;
        }
        holding.readers.insert(session);
        Grant::Read
    }

    /// A file at home in a directory that another session owns by itself.
    fn foreign_file(&self, session: SessionId, dir: Ino) -> Option<(SessionId, Ino)> {
        self.files.get(&dir)?.iter().find_map(|file| {
            let owner = self.objects.get(file)?.owner?;
            (owner != session).then_some((owner, *file))
        })
    }

    /// The inode is deleted: nobody holds it.
    pub fn forget(&mut self, ino: Ino) {
        if let Some(holding) = self.objects.get_mut(&ino) {
            holding.owner = None;
            self.unlist_file(ino);
            self.objects.remove(&ino);
        }
    }

    /// Whether the session has joined and not ended.
    pub fn knows(&self, session: SessionId) -> bool {
        self.peers.contains_key(&session)
    }

    /// Sessions of which it is not known yet what they own and use.
    pub fn unclaimed(&self) -> Vec<SessionId> {
        self.peers.iter().filter(|(_, peer)| !peer.claimed).map(|(session, _)| *session).collect()
    }

    /// Whether all sessions have said what they own.
    pub fn all_claimed(&self) -> bool {
        self.peers.values().all(|peer| peer.claimed)
    }

    /// Who owns an object.
    pub fn owner(&self, ino: Ino) -> Option<SessionId> {
        self.objects.get(&ino)?.owner
    }

    /// Everything that a session owns.
    pub fn owned_by(&self, session: SessionId) -> Vec<Ino> {
        let owned = self.objects.iter().filter(|(_, holding)| holding.owner == Some(session));
        owned.map(|(ino, _)| *ino).collect()
    }

    /// How a session holds a directory (or owns a file). What it has been told to give back it owns no more, though
    /// nobody else does yet: to say so behind the recall in its stream would give it back.
    pub fn held(&self, session: SessionId, ino: Ino) -> Option<Grant> {
        let holding = self.objects.get(&ino)?;
        match holding.owner {
            Some(owner) if owner != session => None,
            Some(_) if self.is_recalled(session, ino) => Some(Grant::Read),
            Some(_) => Some(Grant::Own),
            None => holding.readers.contains(&session).then_some(Grant::Read),
        }
    }

    fn is_recalled(&self, session: SessionId, ino: Ino) -> bool {
        self.peers.get(&session).is_some_and(|peer| peer.is_recalled(ino))
    }

    /// Whether a session may know the row of an object: somebody else's own row it may not.
    pub fn covers(&self, session: SessionId, object: Object) -> bool {
        match (self.owner(object.ino()), object) {
            (Some(owner), _) => owner == session,
            (None, Object::File { home: STRAY, .. }) => true,
            (None, Object::File { home, .. }) => self.held(session, home).is_some(),
            (None, Object::Directory(dir)) => self.held(session, dir).is_some(),
        }
    }

    /// Who has to acknowledge something before the request can go on, or has been sent what it published: those
    /// that somebody waits for.
    pub fn waited_for(&self) -> BTreeSet<SessionId> {
        let unclaimed = self.peers.iter().filter(|(_, peer)| !peer.claimed && !self.requests.is_empty());
        let late = self.peers.iter().filter(|(session, peer)| {
            let is_wanted = |awaited: &Awaited| !matches!(awaited, Awaited::Recall { wanted: false, .. });
            peer.awaited.values().any(is_wanted)
                || !peer.awaited.is_empty() && self.is_release_in_the_way(**session)
        });
        unclaimed.chain(late).map(|(session, _)| *session).collect()
    }

    /// Whether requests of others wait until a session has given back what it would rather not own: for that, or behind
    /// requests of the session itself that wait for it.
    fn is_release_in_the_way(&self, session: SessionId) -> bool {
        let mut claimed: HashMap<Ino, Vec<Mode>> = HashMap::new();
        for (ino, _) in self.releases_of(session).flat_map(Waiting::claims) {
            claimed.entry(ino).or_default().push(Mode::Exclusive);
        }
        let waits = |waiting: &&Waiting| waiting.stage == Stage::Waiting;
        let is_behind = |waiting: &Waiting, claimed: &HashMap<Ino, Vec<Mode>>| {
            waiting.claims().any(|(ino, mode)| {
                claimed.get(&ino).into_iter().flatten().any(|theirs| theirs.conflicts(mode))
            })
        };
        let (mut own, others): (Vec<&Waiting>, Vec<&Waiting>) =
            self.requests.values().filter(waits).partition(|waiting| waiting.session == session);
        while let Some(at) = own.iter().position(|waiting| is_behind(waiting, &claimed)) {
            for (ino, mode) in own.swap_remove(at).claims() {
                claimed.entry(ino).or_default().push(mode);
            }
        }
        others.into_iter().any(|waiting| is_behind(waiting, &claimed))
    }

    /// What a session has said that it would rather not own, and has not given back.
    fn releases_of(&self, session: SessionId) -> impl Iterator<Item = &Waiting> {
        self.requests.values().filter(move |waiting| {
            waiting.session == session && matches!(waiting.request, Request::Release(_))
        })
    }

    /// Directories owned and read, files owned, and events not acknowledged, of a session.
    pub fn summary(&self, session: SessionId) -> Summary {
        let mut summary = Summary::default();
        for holding in self.objects.values() {
            match (holding.owner == Some(session), holding.home) {
                (true, None) => summary.own_directories += 1,
                (true, Some(_)) => summary.own_files += 1,
                (false, _) => summary.read_directories += u64::from(holding.readers.contains(&session)),
            }
        }
        summary.events_waiting = self.peers.get(&session).map_or(0, |peer| peer.awaited.len() as u64);
        summary
    }

    /// The same of all sessions together.
    pub fn totals(&self) -> Summary {
        let mut totals = Summary::default();
        for holding in self.objects.values() {
            match (holding.owner, holding.home) {
                (Some(_), None) => totals.own_directories += 1,
                (Some(_), Some(_)) => totals.own_files += 1,
                (None, _) => totals.read_directories += holding.readers.len() as u64,
            }
        }
        totals.events_waiting = self.peers.values().map(|peer| peer.awaited.len() as u64).sum();
        totals
    }

    /// How many requests wait for their turn.
    pub fn requests_waiting(&self) -> usize {
        let waits = |waiting: &&Waiting| matches!(waiting.stage, Stage::Waiting | Stage::Dropping(_));
        self.requests.values().filter(waits).count()
    }

    /// What is to be done since the last call.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.outputs)
    }

    /// Goes through the requests in their order; whatever can go on does.
    fn advance(&mut self) {
        let settled: Vec<Ticket> = self
            .requests
            .iter()
            .filter(|(_, request)| matches!(&request.stage, Stage::Settling(left) if left.is_empty()))
            .map(|(ticket, _)| *ticket)
            .collect();
        for ticket in settled {
            self.requests.remove(&ticket);
            self.outputs.push(Output::Settled(ticket));
        }
        let waits = |waiting: &Waiting| matches!(waiting.stage, Stage::Waiting | Stage::Dropping(_));
        if self.peers.values().any(|peer| !peer.claimed) || !self.requests.values().any(waits) {
            return;
        }
        let mut claimed: HashMap<Ino, Vec<(Ticket, Mode)>> = HashMap::new();
        // What is being carried out comes first, wherever it stands in line: a request that was extended stands before
        // others that have begun since.
        for (ticket, begun) in &self.requests {
            if matches!(begun.stage, Stage::Ready | Stage::Dropping(_)) {
                begun.claims().for_each(|(ino, mode)| claimed.entry(ino).or_default().push((*ticket, mode)));
            }
        }
        let tickets: Vec<Ticket> = self.requests.keys().copied().collect();
        for ticket in tickets {
            let waiting = &self.requests[&ticket];
            let claims: Vec<(Ino, Mode)> = waiting.claims().collect();
            let waits = waits(waiting);
            let begun = matches!(waiting.stage, Stage::Dropping(_));
            let free = begun
                || claims.iter().all(|(ino, mode)| {
                    let others = claimed.get(ino).into_iter().flatten();
                    !others.into_iter().any(|(other, theirs)| *other != ticket && theirs.conflicts(*mode))
                });
            if waits && free {
                self.try_ready(ticket);
            }
            if !self.requests.contains_key(&ticket) {
                // A release is over.
                continue;
            }
            claims.into_iter().for_each(|(ino, mode)| claimed.entry(ino).or_default().push((ticket, mode)));
        }
    }

    /// The request is the first in line for all its objects: recalls what it needs, or is ready.
    fn try_ready(&mut self, ticket: Ticket) {
        let waiting = &self.requests[&ticket];
        let session = waiting.session;
        let reads = matches!(waiting.request, Request::Read(_) | Request::Release(_));
        let concerned = |object: &Object| [Some(object.ino()), object.home()].into_iter().flatten();
        let recalled = |ino| match reads {
            true => self.is_recalled(session, ino),
            false => self.peers.values().any(|peer| peer.is_recalled(ino)),
        };
        if waiting.request.objects().iter().flat_map(concerned).any(recalled) {
            // Its acknowledgement is on its way, and would take what the session is about to be given; nor may a
            // reader that is letting go be told of a change behind that, and keep it.
            return;
        }
        match waiting.request.clone() {
            Request::Release(files) => self.try_release(ticket, session, &files),
            Request::Read(objects) => {
                if self.recall(self.owners_of(session, &objects)) {
                    return;
                }
                for object in objects {
                    match object {
                        Object::Directory(dir) => drop(self.register_reader(session, dir)),
                        Object::File { home, .. } if home != STRAY => {
                            let holding = self.objects.entry(home).or_default();
                            if holding.owner != Some(session) {
                                holding.readers.insert(session);
                            }
                        }
                        Object::File { .. } => {}
                    }
                }
                self.ready(ticket, Outcome::Granted);
            }
            Request::Own(object @ Object::Directory(dir)) => {
                if !self.may_own(session, dir) {
                    self.ready(ticket, Outcome::Shared);
                } else if !self.recall(self.holders_of(session, dir)) {
                    self.give(session, object);
                    self.ready(ticket, Outcome::Granted);
                }
            }
            Request::Own(object @ Object::File { ino, .. }) => {
                if self.recall(self.owners_of(session, &[object])) {
                    return;
                }
                match &self.requests[&ticket].stage {
                    Stage::Dropping(left) if !left.is_empty() => {}
                    Stage::Dropping(_) => {
                        self.give(session, object);
                        self.ready(ticket, Outcome::Granted);
                    }
                    _ => self.drop_rows(ticket, session, object, ino),
                }
            }
            Request::Reclaim(objects) => {
                let holders = objects.iter().flat_map(|object| match object {
                    Object::Directory(dir) => self.holders_of(session, *dir),
                    Object::File { .. } => self.owners_of(session, &[*object]),
                });
                if !self.recall(holders.collect()) {
                    objects.into_iter().for_each(|object| self.give(session, object));
                    self.ready(ticket, Outcome::Granted);
                }
            }
            Request::Change { objects, local } => {
                let dirs: Vec<Ino> = objects
                    .iter()
                    .filter_map(|object| matches!(object, Object::Directory(_)).then_some(object.ino()))
                    .collect();
                let foreign = objects.iter().any(|object| {
                    matches!(object, Object::File { .. })
                        && self.owner(object.ino()).is_some_and(|owner| owner != session)
                });
                let strays = objects.iter().any(|object| object.is_stray());
                if local && !foreign && !strays && dirs.iter().all(|dir| self.may_own(session, *dir)) {
                    let holders: Vec<_> =
                        dirs.iter().flat_map(|dir| self.holders_of(session, *dir)).collect();
                    if !self.recall(holders) {
                        let own: Vec<Object> = dirs.into_iter().map(Object::Directory).collect();
                        own.iter().for_each(|object| self.give(session, *object));
                        self.ready(ticket, Outcome::Yours(own));
                    }
                    return;
                }
                let owners: Vec<_> = objects
                    .iter()
                    .flat_map(home_first)
                    .filter_map(|object| {
                        let owner = self.owner(object.ino())?;
                        Some((owner, object, self.may_keep(owner, object)))
                    })
                    .collect();
                if !self.recall(owners) {
                    self.ready(ticket, Outcome::Execute);
                }
            }
        }
    }

    /// Recalls what the session owns of these files, and is over when all of it has been given back.
    fn try_release(&mut self, ticket: Ticket, session: SessionId, files: &[Object]) {
        let mut is_over = true;
        for file in files {
            // Its owner could make it its own again while it has the home, by moving it elsewhere.
            let at_home = file.home().and_then(|home| self.owner(home)) == Some(session);
            if self.owner(file.ino()) != Some(session) || at_home {
                continue;
            }
            is_over = false;
            self.order_recall(session, *file, self.may_keep(session, *file), false);
        }
        if is_over {
            self.requests.remove(&ticket);
        }
    }

    fn ready(&mut self, ticket: Ticket, outcome: Outcome) {
        if let Some(waiting) = self.requests.get_mut(&ticket) {
            waiting.stage = Stage::Ready;
        }
        self.outputs.push(Output::Ready { ticket, outcome });
    }

    /// Other owners of these objects and of their homes; they keep what they know.
    fn owners_of(&self, session: SessionId, objects: &[Object]) -> Vec<(SessionId, Object, bool)> {
        objects
            .iter()
            .flat_map(home_first)
            .filter_map(|object| {
                let owner = self.owner(object.ino())?;
                (owner != session).then(|| (owner, object, self.may_keep(owner, object)))
            })
            .collect()
    }

    /// Whether an owner stays a reader: of a file it is told by being a reader of its home, which it may not be after a
    /// reconnection.
    fn may_keep(&self, owner: SessionId, object: Object) -> bool {
        object.home().is_none_or(|home| self.held(owner, home).is_some())
    }

    /// Everybody else who holds the directory, or a file in it; they have to let go.
    fn holders_of(&self, session: SessionId, dir: Ino) -> Vec<(SessionId, Object, bool)> {
        let holding = self.objects.get(&dir);
        let files = self.files.get(&dir).into_iter().flatten().filter_map(|file| {
            let owner = self.owner(*file)?;
            (owner != session).then_some((owner, Object::File { ino: *file, home: dir }, false))
        });
        holding
            .into_iter()
            .flat_map(|holding| holding.owner.iter().chain(&holding.readers))
            .filter(|holder| **holder != session)
            .map(|holder| (*holder, Object::Directory(dir), false))
            .chain(files)
            .collect()
    }

    /// Whether a session should own a directory: nobody else uses it, or nobody else has changed it for long.
    fn may_own(&self, session: SessionId, dir: Ino) -> bool {
        let Some(holding) = self.objects.get(&dir) else { return true };
        let patience = holding.patience.unwrap_or(STREAK_MIN);
        let others = self.holders_of(session, dir);
        others.is_empty()
            || (holding.owner.is_none()
                && holding.streak.is_some_and(|(last, count)| last == session && count >= patience))
    }

    /// Recalls what is not being recalled yet. Returns whether there is anything to wait for.
    fn recall(&mut self, wanted: Vec<(SessionId, Object, bool)>) -> bool {
        let mut seen = HashSet::new();
        for (holder, object, keep_read) in &wanted {
            // Holders are peers.
            let Some(peer) = self.peers.get(holder).filter(|_| seen.insert((*holder, object.ino()))) else {
                continue;
            };
            if !peer.is_recalled(object.ino()) {
                if !keep_read && let Some(holding) = self.objects.get_mut(&object.ino()) {
                    holding.patience.get_or_insert(STREAK_MIN);
                }
                self.order_recall(*holder, *object, *keep_read, true);
            }
        }
        !wanted.is_empty()
    }

    fn order_recall(&mut self, holder: SessionId, object: Object, keep_read: bool, wanted: bool) {
        let event = self.number(holder, Awaited::Recall { object, keep_read, wanted });
        self.outputs.push(Output::Order { to: holder, event, order: Order::Recall { object, keep_read } });
    }

    /// Has all other readers of a file drop its row.
    fn drop_rows(&mut self, ticket: Ticket, session: SessionId, object: Object, ino: Ino) {
        let readers: BTreeSet<SessionId> = match object.home() {
            Some(home) => self.objects.get(&home).map(|of| of.readers.clone()).unwrap_or_default(),
            None => self.peers.keys().copied().collect(),
        };
        let readers: BTreeSet<SessionId> = readers
            .into_iter()
            .filter(|reader| *reader != session && self.peers.contains_key(reader))
            .collect();
        for reader in &readers {
            let event = self.number(*reader, Awaited::Drop(ticket));
            self.outputs.push(Output::Order { to: *reader, event, order: Order::Drop(ino) });
        }
        if readers.is_empty() {
            self.give(session, object);
            self.ready(ticket, Outcome::Granted);
        } else if let Some(waiting) = self.requests.get_mut(&ticket) {
            waiting.stage = Stage::Dropping(readers);
        }
    }
}

/// What a session holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Summary {
    /// Directories that it owns.
    pub own_directories: u64,
    /// Directories that it reads.
    pub read_directories: u64,
    /// Files that it owns by themselves.
    pub own_files: u64,
    /// Events that it has not acknowledged.
    pub events_waiting: u64,
}

impl Peer {
    /// Whether it has been told to give an object back, and has not.
    fn is_recalled(&self, ino: Ino) -> bool {
        self.recalls.contains_key(&ino)
    }
}

impl Holding {
    fn is_idle(&self) -> bool {
        self.owner.is_none() && self.readers.is_empty()
    }
}

impl Waiting {
    /// What the request claims, and how.
    fn claims(&self) -> impl Iterator<Item = (Ino, Mode)> + '_ {
        let settling = matches!(self.stage, Stage::Settling(_));
        let (dir_mode, file_mode, below) = match &self.request {
            Request::Read(_) | Request::Release(_) => (Mode::Read, Mode::Read, Mode::ReadBelow),
            Request::Own(_) | Request::Reclaim(_) | Request::Change { .. } => {
                (Mode::Exclusive, Mode::Exclusive, Mode::OwnBelow)
            }
        };
        let of_objects = self.request.objects().iter().flat_map(move |object| match object {
            Object::Directory(dir) => [Some((*dir, dir_mode)), None],
            Object::File { ino, .. } => [Some((*ino, file_mode)), object.home().map(|home| (home, below))],
        });
        let along = self.along.iter().map(|dir| Some((*dir, Mode::Read)));
        of_objects.chain(along).flatten().filter(move |_| !settling)
    }
}

#[cfg(test)]
#[path = "grants_tests.rs"]
mod tests;

#[cfg(test)]
#[path = "grants_session_tests.rs"]
mod session_tests;
