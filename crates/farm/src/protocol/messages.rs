//! The messages: Protocol Buffers.

use prost::Message;

/// A stream of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub enum Stream {
    /// Standard input, to the task.
    Input = 0,
    /// Standard output.
    Output = 1,
    /// Standard error.
    Error = 2,
}

/// What a task needs of its host.
#[derive(Clone, PartialEq, Message)]
pub struct NeedMessage {
    /// Slots.
    #[prost(uint32, tag = "1")]
    pub cores: u32,
    /// Bytes of memory.
    #[prost(uint64, tag = "2")]
    pub memory: u64,
    /// Labels; those of its volume and user among them.
    #[prost(string, repeated, tag = "3")]
    pub labels: Vec<String>,
    /// Agents that it must not go to.
    #[prost(string, repeated, tag = "4")]
    pub not: Vec<String>,
}

/// One try of a task, named for everybody.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Message)]
pub struct TaskKey {
    /// Who has submitted it.
    #[prost(string, tag = "1")]
    pub client: String,
    /// Its number there. A further try has a number of its own.
    #[prost(uint64, tag = "2")]
    pub task: u64,
}

/// Whose tasks these are.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct BuildMessage {
    /// Submitters that say the same belong to one build.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The user.
    #[prost(string, tag = "2")]
    pub user: String,
    /// Nobody waits in front of it.
    #[prost(bool, tag = "3")]
    pub batch: bool,
    /// Its weight among the user's builds.
    #[prost(uint32, tag = "4")]
    pub weight: u32,
}

/// A task that waits for a slot, or has one.
#[derive(Clone, PartialEq, Message)]
pub struct Wanted {
    /// Its number.
    #[prost(uint64, tag = "1")]
    pub task: u64,
    /// What it needs.
    #[prost(message, optional, tag = "2")]
    pub need: Option<NeedMessage>,
    /// The agent that it was given to; empty while it waits.
    #[prost(string, tag = "3")]
    pub agent: String,
    /// How long it is expected to take, milliseconds; 0: not known.
    #[prost(uint32, tag = "4")]
    pub expected_ms: u32,
}

/// A submitter: what it has, what it wants, whom it hears.
#[derive(Clone, PartialEq, Message)]
pub struct ClientBeat {
    /// Its id.
    #[prost(string, tag = "1")]
    pub client: String,
    /// Its build.
    #[prost(message, optional, tag = "2")]
    pub build: Option<BuildMessage>,
    /// All its tasks that are not over.
    #[prost(message, repeated, tag = "3")]
    pub tasks: Vec<Wanted>,
    /// It goes: its tasks end.
    #[prost(bool, tag = "5")]
    pub goes: bool,
    /// Its host.
    #[prost(string, tag = "6")]
    pub host: String,
}

/// A task that runs at an agent.
#[derive(Clone, PartialEq, Message)]
pub struct RunningTask {
    /// Which.
    #[prost(message, optional, tag = "1")]
    pub key: Option<TaskKey>,
    /// Its build.
    #[prost(message, optional, tag = "2")]
    pub build: Option<BuildMessage>,
    /// What it takes.
    #[prost(message, optional, tag = "3")]
    pub need: Option<NeedMessage>,
}

/// An agent: what it has and what runs there.
#[derive(Clone, PartialEq, Message)]
pub struct AgentBeat {
    /// Its id: another one after each start.
    #[prost(string, tag = "1")]
    pub agent: String,
    /// Its host's name, or the name that it was given.
    #[prost(string, tag = "2")]
    pub host: String,
    /// Grows with each beat.
    #[prost(uint64, tag = "3")]
    pub beat: u64,
    /// When it was started, milliseconds since 1970.
    #[prost(uint64, tag = "4")]
    pub started: u64,
    /// Slots.
    #[prost(uint32, tag = "5")]
    pub slots: u32,
    /// Bytes of memory.
    #[prost(uint64, tag = "6")]
    pub memory: u64,
    /// Labels.
    #[prost(string, repeated, tag = "7")]
    pub labels: Vec<String>,
    /// What runs.
    #[prost(message, repeated, tag = "8")]
    pub running: Vec<RunningTask>,
    /// It takes nothing new.
    #[prost(bool, tag = "9")]
    pub draining: bool,
    /// It dispatches.
    #[prost(bool, tag = "10")]
    pub dispatches: bool,
    /// How long it lets tasks run without word of who has submitted them, milliseconds.
    #[prost(uint64, tag = "11")]
    pub lease: u64,
    /// It ends now, and nothing of it runs any more.
    #[prost(bool, tag = "12")]
    pub goes: bool,
}

/// An agent says to the others that it is there: while it dispatches, and while nobody does.
#[derive(Clone, PartialEq, Message)]
pub struct AgentSeen {
    /// Its id.
    #[prost(string, tag = "1")]
    pub agent: String,
    /// When it was started, milliseconds since 1970: without one that dispatches the oldest one will.
    #[prost(uint64, tag = "2")]
    pub started: u64,
    /// It ends: it does not dispatch, and will not.
    #[prost(bool, tag = "3")]
    pub draining: bool,
    /// It dispatches.
    #[prost(bool, tag = "4")]
    pub dispatches: bool,
}

/// For the dispatcher.
#[derive(Clone, PartialEq, Message)]
pub struct ToDispatcher {
    /// What.
    #[prost(oneof = "dispatch::Body", tags = "1, 2, 3")]
    pub body: Option<dispatch::Body>,
}

/// What is said to the dispatcher.
pub mod dispatch {
    /// One of them.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Body {
        /// A beat.
        #[prost(message, tag = "1")]
        Beat(super::ClientBeat),
        /// A task wants a slot; the same as a beat, of one more task.
        #[prost(message, tag = "2")]
        Submit(super::ClientBeat),
        /// A try is over, or not wanted: its slot is free.
        #[prost(message, tag = "3")]
        Over(super::TaskKey),
    }
}

/// A command, and everything that it is to find at its host.
#[derive(Clone, PartialEq, Message)]
pub struct Spec {
    /// Program and arguments.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub command: Vec<Vec<u8>>,
    /// The environment, `NAME=VALUE` each.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub environment: Vec<Vec<u8>>,
    /// The volume's id.
    #[prost(string, tag = "3")]
    pub volume: String,
    /// Where the submitter has it mounted.
    #[prost(bytes = "vec", tag = "4")]
    pub point: Vec<u8>,
    /// Which folder of the volume is mounted there, `/` for all of it.
    #[prost(bytes = "vec", tag = "5")]
    pub inner: Vec<u8>,
    /// The working directory, as the submitter has it.
    #[prost(bytes = "vec", tag = "6")]
    pub directory: Vec<u8>,
    /// File mode creation mask.
    #[prost(uint32, tag = "7")]
    pub umask: u32,
    /// The user's name; empty when he has none.
    #[prost(string, tag = "8")]
    pub user: String,
    /// The user's number.
    #[prost(uint32, tag = "9")]
    pub uid: u32,
    /// The group's number.
    #[prost(uint32, tag = "10")]
    pub gid: u32,
    /// There is something to read on standard input.
    #[prost(bool, tag = "11")]
    pub has_input: bool,
    /// Standard error goes where standard output goes: in one stream, in its order.
    #[prost(bool, tag = "12")]
    pub merged: bool,
    /// Layers of the build root that it runs in, the topmost first: names of its host's, and paths on the volume as the submitter
    /// has it. Without any it runs in its host's own tree.
    #[prost(bytes = "vec", repeated, tag = "13")]
    pub layers: Vec<Vec<u8>>,
    /// It has a root of its own; else it shares one with the others of its build on that host.
    #[prost(bool, tag = "14")]
    pub isolated: bool,
    /// What it opens is to be recorded.
    #[prost(bool, tag = "15")]
    pub records: bool,
}

/// A part of a stream.
#[derive(Clone, PartialEq, Message)]
pub struct Data {
    /// Which stream.
    #[prost(enumeration = "Stream", tag = "1")]
    pub stream: i32,
    /// Where in the stream.
    #[prost(uint64, tag = "2")]
    pub offset: u64,
    /// The bytes.
    #[prost(bytes = "bytes", tag = "3")]
    pub bytes: bytes::Bytes,
    /// Nothing follows.
    #[prost(bool, tag = "4")]
    pub last: bool,
}

/// How far a stream was taken.
#[derive(Clone, PartialEq, Message)]
pub struct Taken {
    /// Which stream.
    #[prost(enumeration = "Stream", tag = "1")]
    pub stream: i32,
    /// Everything before is taken.
    #[prost(uint64, tag = "2")]
    pub offset: u64,
    /// Nobody reads it any more.
    #[prost(bool, tag = "3")]
    pub closed: bool,
}

/// For an agent.
#[derive(Clone, PartialEq, Message)]
pub struct ToAgent {
    /// Who says it.
    #[prost(string, tag = "1")]
    pub client: String,
    /// About which try; 0 for none.
    #[prost(uint64, tag = "2")]
    pub task: u64,
    /// What.
    #[prost(oneof = "agent::Body", tags = "3, 4, 5, 6, 7, 9, 11")]
    pub body: Option<agent::Body>,
    /// The ends of these tries of its were heard: forget them.
    #[prost(uint64, repeated, tag = "10")]
    pub heard: Vec<u64>,
}

/// What is said to an agent.
pub mod agent {
    /// One of them.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Body {
        /// Start it: a part of an encoded [`super::Start`].
        #[prost(message, tag = "3")]
        Start(super::StartPart),
        /// Standard input.
        #[prost(message, tag = "4")]
        Data(super::Data),
        /// Output was taken.
        #[prost(message, tag = "5")]
        Taken(super::Taken),
        /// A signal for its process group.
        #[prost(int32, tag = "6")]
        Signal(i32),
        /// End it at once, with all that it has started.
        #[prost(bool, tag = "7")]
        End(bool),
        /// The last beat of this agent that the submitter has heard.
        #[prost(uint64, tag = "9")]
        Echo(u64),
        /// It is to take nothing new, and to go when all that runs there has ended. Of no submitter.
        #[prost(bool, tag = "11")]
        Drain(bool),
    }
}

/// A part of a [`Start`], which may be longer than a message.
#[derive(Clone, PartialEq, Message)]
pub struct StartPart {
    /// Which part, from 0.
    #[prost(uint32, tag = "1")]
    pub at: u32,
    /// How many parts there are.
    #[prost(uint32, tag = "2")]
    pub count: u32,
    /// The bytes.
    #[prost(bytes = "bytes", tag = "3")]
    pub bytes: bytes::Bytes,
}

/// Starts a try.
#[derive(Clone, PartialEq, Message)]
pub struct Start {
    /// What.
    #[prost(message, optional, tag = "1")]
    pub spec: Option<Spec>,
    /// For which build.
    #[prost(message, optional, tag = "2")]
    pub build: Option<BuildMessage>,
    /// What it takes.
    #[prost(message, optional, tag = "3")]
    pub need: Option<NeedMessage>,
    /// The last beat of this agent that the submitter has heard, or was told with the slot.
    #[prost(uint64, tag = "4")]
    pub beat: u64,
}

/// For a submitter.
#[derive(Clone, PartialEq, Message)]
pub struct ToClient {
    /// About which try; 0 for none.
    #[prost(uint64, tag = "1")]
    pub task: u64,
    /// The agent that says it, or that it is about.
    #[prost(string, tag = "2")]
    pub agent: String,
    /// What.
    #[prost(oneof = "client::Body", tags = "3, 4, 5, 6, 7, 8, 9")]
    pub body: Option<client::Body>,
}

/// What is said to a submitter.
pub mod client {
    /// One of them.
    #[derive(Clone, PartialEq, prost::Oneof)]
    pub enum Body {
        /// It has a slot at this agent.
        #[prost(message, tag = "3")]
        Granted(super::Granted),
        /// It runs.
        #[prost(bool, tag = "4")]
        Started(bool),
        /// Output.
        #[prost(message, tag = "5")]
        Data(super::Data),
        /// Input was taken.
        #[prost(message, tag = "6")]
        Taken(super::Taken),
        /// It is over.
        #[prost(message, tag = "7")]
        Ended(super::Ended),
        /// No host of the farm could run it, for this reason.
        #[prost(string, tag = "8")]
        Hopeless(String),
        /// The agent lives.
        #[prost(message, tag = "9")]
        Beat(super::Alive),
    }
}

/// A slot.
#[derive(Clone, PartialEq, Message)]
pub struct Granted {
    /// The agent's host.
    #[prost(string, tag = "1")]
    pub host: String,
    /// The last beat of the agent that the dispatcher has heard.
    #[prost(uint64, tag = "2")]
    pub beat: u64,
    /// How long the agent lets tasks run without word of who has submitted them, milliseconds.
    #[prost(uint64, tag = "3")]
    pub lease: u64,
}

/// An agent that lives.
#[derive(Clone, PartialEq, Message)]
pub struct Alive {
    /// The number of its beat.
    #[prost(uint64, tag = "1")]
    pub beat: u64,
    /// Tries of this submitter that it knows.
    #[prost(uint64, repeated, tag = "2")]
    pub tasks: Vec<u64>,
}

/// How a try has ended.
#[derive(Clone, PartialEq, Message)]
pub struct Ended {
    /// How.
    #[prost(enumeration = "End", tag = "1")]
    pub end: i32,
    /// The exit code, or the signal's number.
    #[prost(int32, tag = "2")]
    pub number: i32,
    /// What went wrong, when it was the farm.
    #[prost(string, tag = "3")]
    pub reason: String,
    /// Length of standard output.
    #[prost(uint64, tag = "4")]
    pub output: u64,
    /// Length of standard error.
    #[prost(uint64, tag = "5")]
    pub error: u64,
    /// How long it ran, milliseconds.
    #[prost(uint64, tag = "6")]
    pub ran: u64,
    /// Processor time that it took, milliseconds.
    #[prost(uint64, tag = "7")]
    pub cpu: u64,
    /// What it has opened, if that was to be recorded.
    #[prost(message, optional, tag = "8")]
    pub record: Option<super::Record>,
    /// Most memory that any of its processes had resident, bytes.
    #[prost(uint64, tag = "9")]
    pub peak: u64,
}

/// Ways in which a try ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum End {
    /// It has exited with a code.
    Exited = 0,
    /// A signal has ended it.
    Signalled = 1,
    /// It cannot be run, here or elsewhere: the reason says why, the number is 126 or 127.
    NotRun = 2,
    /// The agent does not do that: for this user, on this volume. Another one may.
    Refused = 3,
    /// The farm has ended it, or could not start it on this host: it may run elsewhere.
    Lost = 4,
    /// It was not started since the host has no room for it now, or it was asked for too late: it may run anywhere.
    Busy = 5,
    /// It has failed while the kernel has ended processes of its host for want of memory: it may run where it has more.
    NoMemory = 6,
    /// It has failed while its host had no room for temporary files: it may run elsewhere.
    NoRoom = 7,
}
