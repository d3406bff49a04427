//! What clients and the server say: the messages of `hayloft-wire` as plain values.

use std::collections::BTreeSet;
use std::rc::Rc;

use hayloft_model::grants::Object;
use hayloft_model::{
    Batch, Change, Dentry, Ino, InoRange, InodeRow, Name, Record, Sequence, SessionId, TreeError, UsageDelta,
};

use crate::history::Heard;

/// All that one mark has written, so that it can be written once more.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    pub(crate) opening: u64,
    pub(crate) mark: u64,
    pub(crate) session: SessionId,
    /// The number of a batch; 0: a change.
    pub(crate) sequence: Sequence,
    pub(crate) usage: UsageDelta,
    pub(crate) records: Vec<Record>,
    /// Of a change, what is to be answered.
    pub(crate) outcome: Option<(u64, Option<Ino>)>,
    /// Inodes whose rows or names change.
    pub(crate) about: BTreeSet<Ino>,
    /// The usage as it is then. Only for who gets it wrong.
    pub(crate) total: hayloft_model::Usage,
}

pub(crate) type Entry = Rc<Written>;

#[derive(Clone, Debug)]
pub(crate) enum Ask {
    Enter(Ino),
    /// All names of a directory, which is whole then.
    List(Ino),
    /// The names of a stem in a slot.
    Names(Ino, Name),
    Fetch(Ino),
    Acquire(Object),
    Change {
        change: Change,
        execute: bool,
    },
    Numbers,
    Ping,
    /// To be answered when all others have heard of this change.
    Hear(u64),
    /// To be answered when this mark of an opening is durable.
    Sync {
        opening: u64,
        mark: u64,
    },
    /// What a session had not shipped that was ended; its sequence is the new session's.
    Restore {
        batch: Box<Batch>,
        of: SessionId,
    },
}

#[derive(Clone, Debug)]
pub(crate) enum ToServer {
    Hello {
        session: SessionId,
        resume: bool,
        heard: Heard,
        /// The session in whose place it comes.
        replaces: Option<SessionId>,
    },
    Claim {
        own: Vec<Object>,
        in_use: Vec<Ino>,
        /// What is brought back.
        entries: Vec<Entry>,
    },
    Ask {
        request: u64,
        forget_below: u64,
        ask: Ask,
    },
    /// Whether others wait for it.
    Commit(Batch, bool),
    Ack {
        event: u64,
        in_use: Vec<Ino>,
    },
    LetGo(Vec<Ino>),
    Release(Vec<Ino>),
    /// These are not its own any more; with the last event that it had applied.
    GiveBack(Vec<Ino>, u64),
    /// What there was when it was asked is shipped.
    Shipped(u64),
    /// The session is over; nothing of it is left to send.
    Goodbye,
}

/// A directory with what the session may know of it.
#[derive(Clone, Debug)]
pub(crate) struct Listing {
    pub(crate) dir: Ino,
    /// With the rows that the session may know.
    pub(crate) entries: Vec<(Name, Dentry, Option<InodeRow>)>,
    pub(crate) own: Vec<Ino>,
    /// Changes in it of which others have not heard.
    pub(crate) unheard: Vec<u64>,
    pub(crate) what: Listed,
}

/// What a listing is.
#[derive(Clone, Debug)]
pub(crate) enum Listed {
    /// All of a directory.
    Directory,
    /// Names of a stem; the directory is their slot.
    Stem(Name),
    /// Nothing of a split directory but its row.
    Split(Box<InodeRow>),
    /// Nothing: it is not split any more.
    Whole,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    /// With the number of the change, if others have not heard of it; else 0.
    Apply {
        records: Vec<Record>,
        own: Vec<Object>,
        forget: Vec<Ino>,
        change: u64,
    },
    Drop(Ino),
    Recall {
        object: Object,
        keep_read: bool,
    },
}

/// Who does a change that was asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Doing {
    /// The server did it, or refused.
    Server,
    /// The client, which owns the directories.
    Yours,
    /// The client, by slots.
    BySlots,
}

#[derive(Clone, Debug)]
pub(crate) enum ToClient {
    Welcome {
        last: Sequence,
        numbers: InoRange,
        opening: u64,
    },
    /// The store is not the one that the client knows.
    OtherHistory,
    /// The session is over; its last batch, if that is known.
    Ended {
        last: Option<Sequence>,
    },
    /// The volume has another tree than the session knows; its last batch.
    OtherTree {
        last: Sequence,
    },
    /// With the last batch, which others may have brought.
    Claimed {
        last: Sequence,
    },
    /// Answers `Enter`; nothing: there is no such directory.
    Listings {
        request: u64,
        listings: Vec<Listing>,
    },
    Row {
        request: u64,
        ino: Ino,
        row: Option<Box<InodeRow>>,
        own: bool,
        split: bool,
        /// As in a listing.
        unheard: Vec<u64>,
    },
    Acquired {
        request: u64,
        owned: bool,
    },
    Changed {
        request: u64,
        result: Result<Option<Ino>, TreeError>,
        doing: Doing,
    },
    Numbers {
        request: u64,
        range: InoRange,
    },
    Pong {
        request: u64,
    },
    Synced {
        request: u64,
    },
    /// Answers `Hear`.
    Heard {
        request: u64,
    },
    /// With another message: all have heard of these changes.
    AllHeard(Vec<u64>),
    Restored {
        request: u64,
        applied: bool,
    },
    Committed(Sequence),
    /// Nothing of the batch was applied.
    Refused(Sequence),
    /// The same for want of room.
    Full(Sequence),
    /// Nobody knows.
    Uncertain,
    /// To be answered when all that there is now is shipped.
    Ship(u64),
    Event {
        number: u64,
        body: Body,
    },
}
