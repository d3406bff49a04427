//! The grant machine: which session may cache, or change, which object without asking, who has to give way
//! first, and when a change has reached everybody. `docs/sharing.md` has the rules in prose.
//!
//! Pure: the server feeds it requests, acknowledgements and ended sessions, and carries out what
//! [`Grants::take_outputs`] says. The simulator does the same.
//!
//! A request claims its objects in modes that conflict as usual (see `Mode`) until it is finished, in the order
//! of tickets; a request that waits keeps later ones from overtaking it, unless it waits for files only
//! (`Grants::is_aside`). So the history of an object is one sequence, and what is put into the sessions' streams before [`Grants::finish`] is in that order.

mod heard;
mod holds;
mod line;
mod looks;
mod object;
mod requests;
mod split;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::{Ino, SessionId};

pub use self::looks::Summary;
pub use self::object::{Grant, Object, STRAY};

/// Number of a request, in the order of arrival.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(pub u64);

/// What a session wants.
#[derive(Clone, PartialEq, Debug)]
pub enum Request {
    /// To know these objects.
    Read(Vec<Object>),
    /// To know all names of a directory, which is whole then.
    List(Object),
    /// To know the names of a slot of a split directory.
    Names(Object),
    /// To own an object.
    Own(Object),
    /// That a split directory is whole, since nothing is done in it. Nothing else comes of it.
    Rest(Object),
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
        /// Whether it can be done by slots.
        by_slots: BySlots,
    },
}

impl Request {
    fn objects(&self) -> &[Object] {
        match self {
            Request::Read(objects)
            | Request::Release(objects)
            | Request::Reclaim(objects)
            | Request::Change { objects, .. } => objects,
            Request::Own(object) | Request::List(object) | Request::Names(object) | Request::Rest(object) => {
                std::slice::from_ref(object)
            }
        }
    }
}

/// Whether who owns the slots of a directory's names can do a change by itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BySlots {
    /// It is more than names of files in one directory.
    Cannot,
    /// It can.
    Can,
    /// It can, and makes a file: directories in which several sessions do so are split.
    Makes,
}

/// What a request has come to when its turn is there.
#[derive(Clone, PartialEq, Debug)]
pub enum Outcome {
    /// Of `Read`: go on, see [`Grants::held`]; of `Own` and `Reclaim`: it is owned.
    Granted,
    /// Of `Own`: it is not, others use it too; changes have to be requested. Of a slot, and of `Names`: the directory is not
    /// split, or the session has to look at it first. Of `Change`: the directory is split already, the session does it itself when it
    /// has the slots.
    Shared,
    /// Of `Change`: execute it.
    Execute,
    /// Of `Change`: the session owns these now, and does it itself.
    Yours(Vec<Object>),
    /// Of `Change`: the directory is split now, and nobody holds anything of it; the session does it itself when it has the slots.
    Split,
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
    /// Everybody but the asker has acknowledged what the request published.
    Settled(Ticket),
    /// These were told of a change before all others had heard of it, and by now those have: they may show it.
    Heard {
        /// Of which.
        change: Ticket,
        /// Whom to tell; nobody if all have heard of it without being told that not all had.
        to: BTreeSet<SessionId>,
    },
    /// A directory is not split any more: its times are to be set before anybody reads its row.
    Whole(Ino),
}

/// How often in a row a session has to be alone in changing and looking into a directory before it is worth recalling readers.
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
    const ALL: [Mode; 4] = [Mode::ReadBelow, Mode::OwnBelow, Mode::Read, Mode::Exclusive];

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

/// Who claims an object: of ten thousand readers none is looked at to find out whether they are in each other's way.
#[derive(Clone, Debug, Default)]
struct Claims {
    by_mode: [BTreeSet<Ticket>; Mode::ALL.len()],
}

impl Claims {
    fn insert(&mut self, ticket: Ticket, mode: Mode) {
        self.by_mode[mode as usize].insert(ticket);
    }

    fn remove(&mut self, ticket: Ticket) {
        for tickets in &mut self.by_mode {
            tickets.remove(&ticket);
        }
    }

    fn is_empty(&self) -> bool {
        self.by_mode.iter().all(BTreeSet::is_empty)
    }

    /// Who claims it alone, in their order.
    fn exclusive(&self) -> impl Iterator<Item = Ticket> + '_ {
        self.by_mode[Mode::Exclusive as usize].iter().copied()
    }

    /// Others than this request who claim it in a way that conflicts with a mode.
    fn against(&self, ticket: Ticket, mode: Mode) -> impl Iterator<Item = Ticket> + '_ {
        let conflicting = Mode::ALL.into_iter().filter(move |theirs| theirs.conflicts(mode));
        let tickets = conflicting.flat_map(|theirs| &self.by_mode[theirs as usize]);
        tickets.copied().filter(move |other| *other != ticket)
    }
}

#[derive(Clone, Debug, Default)]
struct Holding {
    owner: Option<SessionId>,
    readers: BTreeSet<SessionId>,
    /// Home of a file.
    home: Option<Ino>,
    /// Who has changed the directory by request last, and how often in a row, without anybody else having asked for it or for
    /// a file in it.
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
    /// It knows of directories that are split in many slots.
    knows_many: bool,
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

/// Whether a request lets others have its directories while it waits for files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Aside {
    NotYet,
    Now,
    Over,
}

#[derive(Clone, Debug)]
struct Waiting {
    session: SessionId,
    request: Request,
    stage: Stage,
    /// Who has to acknowledge what was published while the request was ready.
    published: BTreeSet<SessionId>,
    /// All but the asker have.
    settled: bool,
    /// Who was told of it before all others had heard of it.
    told: BTreeSet<SessionId>,
    /// Directories that the request became a reader of on the way.
    along: Vec<Ino>,
    /// Whether it is in nobody's way at the directories that it claims.
    aside: Aside,
    /// How much of what it needs is being given back. Before all of that is there is nothing to look at: it may be thousands of files.
    awaits: usize,
}

/// All grants of a volume.
#[derive(Clone, Debug, Default)]
pub struct Grants {
    objects: HashMap<Ino, Holding>,
    /// Requests that wait until a session has given something back, by the event that told it to.
    awaiting: HashMap<(SessionId, u64), Vec<Ticket>>,
    /// Files with an owner of their own, by home.
    files: HashMap<Ino, BTreeSet<Ino>>,
    peers: BTreeMap<SessionId, Peer>,
    requests: BTreeMap<Ticket, Waiting>,
    splits: split::Splits,
    last_ticket: u64,
    /// Who claims what, of all requests that are not carried out yet.
    claims: HashMap<Ino, Claims>,
    /// Requests whose turn has not come.
    line: BTreeSet<Ticket>,
    /// Of these, those that are to be looked at.
    freed: BTreeSet<Ticket>,
    /// Sessions of which it is not known what they own.
    unclaimed: BTreeSet<SessionId>,
    /// Sessions that have begun, or have a new connection, and have not claimed. They are not served: a claim takes away all that it
    /// does not name, also what was granted just before.
    begun: BTreeSet<SessionId>,
    /// How many sessions were told to give an object back, and have not.
    recalls: HashMap<Ino, usize>,
    shows_all: bool,
    outputs: Vec<Output>,
}

impl Grants {
    /// A session is found in the tables when the volume is opened. Nobody is served before it has claimed, or ended.
    pub fn join(&mut self, session: SessionId, read_only: bool) {
        self.begin(session, read_only);
        self.unclaimed.insert(session);
    }

    /// A session begins, or has a new connection. Nobody else waits for what it will claim: it owns nothing, or what is known here. It
    /// is served itself when it has claimed.
    pub fn begin(&mut self, session: SessionId, read_only: bool) {
        self.peers.entry(session).or_default().read_only = read_only;
        self.begun.insert(session);
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
        self.unclaimed.remove(&session);
        self.begun.remove(&session);
        self.settle_all();
        self.advance();
        if refused.is_empty() { Ok(()) } else { Err(refused) }
    }

    /// The session is over: everything that it held is free, what it had to do is done, its requests are void.
    pub fn end(&mut self, session: SessionId) {
        self.let_go_of_all(session);
        self.peers.remove(&session);
        self.unclaimed.remove(&session);
        self.begun.remove(&session);
        let is_void = |request: &Waiting| {
            request.session == session && !matches!(request.stage, Stage::Ready | Stage::Settling(_))
        };
        let void: Vec<Ticket> =
            self.requests.iter().filter(|(_, request)| is_void(request)).map(|(of, _)| *of).collect();
        void.into_iter().for_each(|ticket| self.remove(ticket));
        self.settle_all();
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
        self.splits.dirs().into_iter().for_each(|dir| self.leave_split(dir));
        if let Some(peer) = self.peers.get_mut(&session) {
            peer.awaited.clear();
            let recalls: Vec<(Ino, u64)> = peer.recalls.drain().collect();
            recalls.into_iter().for_each(|(ino, event)| self.recall_is_over(session, ino, event));
        }
        for request in self.requests.values_mut() {
            request.published.remove(&session);
            if let Stage::Dropping(left) | Stage::Settling(left) = &mut request.stage {
                left.remove(&session);
            }
        }
    }

    /// What is to be done since the last call.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.outputs)
    }
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
            // Alone, so that nobody is told meanwhile that it is split.
            Request::List(_)
            | Request::Names(_)
            | Request::Rest(_)
            | Request::Own(_)
            | Request::Reclaim(_)
            | Request::Change { .. } => (Mode::Exclusive, Mode::Exclusive, Mode::OwnBelow),
        };
        let of_objects = self.request.objects().iter().flat_map(move |object| match object {
            Object::Directory(dir) => [Some((*dir, dir_mode)), dir.of_slot().map(|of| (of, Mode::OwnBelow))],
            Object::File { ino, .. } => [Some((*ino, file_mode)), object.home().map(|home| (home, below))],
        });
        let along = self.along.iter().map(|dir| Some((*dir, Mode::Read)));
        of_objects.chain(along).flatten().filter(move |_| !settling)
    }
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod session_tests;

#[cfg(test)]
mod split_tests;

#[cfg(test)]
mod line_tests;
