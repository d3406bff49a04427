//! Worlds of clients and a server from a seed: the pure rules of `hayloft-model` under random delays, lost
//! connections, crashes and restarts, judged by a reference that is written separately. See `README.md`.
//!
//! There is no input or output here, no thread and no clock: time is a counter, and one seed is one schedule.

mod client;
mod history;
mod kernel;
mod messages;
mod operation;
mod quota;
mod reference;
mod rng;
mod server;
mod trees;
mod world;

pub use trees::replaces_trees;
pub use world::{Config, Failure, Outcome, run};

/// A rule that is left out, to see that the simulator notices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Rule {
    /// Events are acknowledged before tree and kernel have them.
    AckBeforeApply,
    /// A recall is acknowledged before the log is shipped.
    RecallWithoutShip,
    /// A server that starts serves requests before all sessions have claimed.
    NoClaimGrace,
    /// Rule 1: names are handed out without a limit in directories that are changed by request.
    UnlimitedWhileChanging,
    /// Rule 1: the kernel's directory lock is waited for, instead of raising the epoch.
    WaitForLocks,
    /// A client whose lease has run out goes on answering.
    NoLease,
    /// Changes and batches that come again are done again.
    ReplayTwice,
    /// Nobody tells the server what is in use.
    ForgetInUse,
    /// Changes are requested while older ones are not shipped.
    ChangeBeforeShip,
    /// Rows of children are listed whoever owns them.
    ListUncovered,
    /// Whether a session owns what it reads is looked up when that is read, not when it goes into the stream.
    OwnFlagEarly,
    /// A client that loses its connection forgets to claim what was recalled and not given back.
    ForgetRecalled,
    /// What was recalled on a connection that is lost is given back all the same, and read on.
    RecallAfterLoss,
    /// Names that an uncovered directory does not have stay in the kernel.
    KeepAbsentNames,
    /// A change that came back as the client's own is requested as before.
    YoursForEver,
    /// A listing has the rows of files that the asker owns by themselves.
    ListOwnFiles,
    /// What a listing brings is added although it has ended here.
    AddEnded,
    /// Rule 4: a listing has the rows of files with names in other directories as well.
    ListStrays,
    /// Rule 7: times come from the host's clock alone.
    OwnClock,
    /// Rule 7: a change may have the time of the one before it.
    RepeatTimes,
    /// Rule 3: a client that owns both parents moves a directory by itself.
    MoveByOwners,
    /// Rule 6: an append goes to the end that was known when the call began.
    AppendAtKnownEnd,
    /// A name that is replaced gets another place in listings.
    NewCookie,
    /// Rule 8: who is heard is waited for, although it does not acknowledge.
    NeverOverdue,
    /// Rule 8: a client relies on keep-alives, whatever it has not acknowledged.
    RelyOnPings,
    /// What has lost its last name is linked all the same.
    ReviveRemoved,
    /// Attributes in answers to what makes an inode, or sets them, are kept.
    KeepMadeAttributes,
    /// Inodes that the kernel does not have are not dropped again when the answer that brings them has arrived.
    DropUnknownOnce,
    /// Whether the answer that makes a file has arrived matters to nobody.
    BirthWithoutBarrier,
    /// What an ended session had not shipped is applied, whatever others have changed since.
    RestoreOverOthers,
    /// It is applied while others know what was so before.
    RestoreUnheard,
    /// The tree shows what another host has changed before the kernel has let go of that.
    ApplyBeforeForeword,
    /// What others wait for is refused like everything else when the quota is used up.
    RefusePressing,
    /// A client goes on with a store that was put back to an older state than it has seen.
    TrustOlderStore,
    /// A client does not keep what comes with answers to its changes and batches.
    ForgetAtAnswer,
    /// Listings and rows come without entries.
    ListWithoutEntries,
    /// So do events.
    ApplyWithoutEntries,
    /// Who is told of something gets its last entries, and not what these build on.
    TellAlone,
    /// A client drops what it keeps of older openings at a mark of the present one.
    DropAtAnyMark,
    /// What was brought back is not noted.
    BringTwice,
    /// It is noted in memory only.
    NoteBroughtApart,
    /// What looks at rows does not wait for all claims, and a change that was done before is looked for only when it comes.
    LookBeforeClaims,
    /// The mark that clients are told is the last one that was given.
    MarkBeforeFlush,
    /// Inode numbers for changes are counted with what they make.
    BirthsFromRow,
    /// What entries say of the usage and of the last batch is put as it was then.
    OverwriteByEntries,
    /// Things are answered early however old the first is that is not durable.
    NoWindow,
    /// `sync` is answered at once.
    SyncAtOnce,
    /// A batch that is about nothing, and of which nobody is told, is answered before it is durable.
    NothingEarly,
    /// A claim is answered before what it brings is durable.
    ClaimAtOnce,
    /// Who finds its session ended brings with the next one what it kept.
    BringAfterEnd,
    /// Files are given back although what was changed of them is not shipped.
    GiveBackUnshipped,
    /// Names of a slot stay in the kernel when it is given back.
    KeepSplitNames,
    /// Names are expired although somebody was told that they may be kept, and has not come to that.
    ForgetCallers,
    /// Names of a listing may be kept although expiring them waits for nobody.
    KeepListed,
    /// The epoch is raised, whoever lists names that have to be expired.
    EpochAmidListing,
    /// What somebody lists is not expired any more when the epoch was raised for something else.
    DropListed,
    /// The kernel keeps it that a name is not there, which it does not expire.
    KeepUnexpired,
    /// Names that somebody may make last are not expired any more when the epoch was raised.
    ForgetWithEpoch,
    /// A directory that is told under another name is not expired there, although somebody may make that last.
    StayNoted,
    /// What is answered behind a batch shows that it has arrived, also when it is refused for want of room.
    CountRefused,
    /// A server counts the leases of sessions that it has found from when it has opened the volume.
    CountFromOpening,
    /// A server that was replaced, and does not see it, goes on for as long as it is not told.
    ReplacedGoesOn,
    /// Who lets go of a split directory ships nothing of its slots.
    KeepSlotsBack,
    /// A directory is made whole although slots of it are held.
    WholeWithSlots,
    /// The server reads, and refuses, what others have not heard of.
    TellUnheard,
    /// A client shows what it hears of before others have.
    ShowUnheard,
    /// Nothing is noted beside the log: its end is where it ends.
    NoNotes,
    /// It is noted that something is durable before it is.
    NoteEarly,
    /// Nobody is asked to ship before a snapshot.
    SnapshotUnasked,
    /// A snapshot has what is durable.
    SnapshotOfDurable,
    /// Sessions go on with another tree.
    ResumeOnOtherTree,
    /// Another tree is served while hosts know the one before it.
    ServeBeforeMoved,
    /// What was on its way when the tree was replaced counts as arrived.
    TakeForArrived,
    /// Another tree gives numbers from where it was.
    NumbersAgain,
    /// A file of the log is written over one of the same number.
    OverwriteLog,
    /// A change is refused for names of a directory of which somebody else may have removed them.
    RefuseUnclaimed,
}

impl Rule {
    /// All, by name.
    pub const ALL: [(&'static str, Rule); 76] = [
        ("ack-before-apply", Rule::AckBeforeApply),
        ("recall-without-ship", Rule::RecallWithoutShip),
        ("no-claim-grace", Rule::NoClaimGrace),
        ("unlimited-while-changing", Rule::UnlimitedWhileChanging),
        ("wait-for-locks", Rule::WaitForLocks),
        ("no-lease", Rule::NoLease),
        ("replay-twice", Rule::ReplayTwice),
        ("forget-in-use", Rule::ForgetInUse),
        ("change-before-ship", Rule::ChangeBeforeShip),
        ("list-uncovered", Rule::ListUncovered),
        ("own-flag-early", Rule::OwnFlagEarly),
        ("forget-recalled", Rule::ForgetRecalled),
        ("recall-after-loss", Rule::RecallAfterLoss),
        ("keep-absent-names", Rule::KeepAbsentNames),
        ("yours-for-ever", Rule::YoursForEver),
        ("list-own-files", Rule::ListOwnFiles),
        ("add-ended", Rule::AddEnded),
        ("list-strays", Rule::ListStrays),
        ("own-clock", Rule::OwnClock),
        ("repeat-times", Rule::RepeatTimes),
        ("move-by-owners", Rule::MoveByOwners),
        ("append-at-known-end", Rule::AppendAtKnownEnd),
        ("new-cookie", Rule::NewCookie),
        ("never-overdue", Rule::NeverOverdue),
        ("rely-on-pings", Rule::RelyOnPings),
        ("revive-removed", Rule::ReviveRemoved),
        ("keep-made-attributes", Rule::KeepMadeAttributes),
        ("drop-unknown-once", Rule::DropUnknownOnce),
        ("birth-without-barrier", Rule::BirthWithoutBarrier),
        ("restore-over-others", Rule::RestoreOverOthers),
        ("restore-unheard", Rule::RestoreUnheard),
        ("apply-before-foreword", Rule::ApplyBeforeForeword),
        ("refuse-pressing", Rule::RefusePressing),
        ("trust-older-store", Rule::TrustOlderStore),
        ("forget-at-answer", Rule::ForgetAtAnswer),
        ("list-without-entries", Rule::ListWithoutEntries),
        ("apply-without-entries", Rule::ApplyWithoutEntries),
        ("tell-alone", Rule::TellAlone),
        ("drop-at-any-mark", Rule::DropAtAnyMark),
        ("bring-twice", Rule::BringTwice),
        ("note-brought-apart", Rule::NoteBroughtApart),
        ("look-before-claims", Rule::LookBeforeClaims),
        ("mark-before-flush", Rule::MarkBeforeFlush),
        ("births-from-row", Rule::BirthsFromRow),
        ("overwrite-by-entries", Rule::OverwriteByEntries),
        ("no-window", Rule::NoWindow),
        ("sync-at-once", Rule::SyncAtOnce),
        ("nothing-early", Rule::NothingEarly),
        ("claim-at-once", Rule::ClaimAtOnce),
        ("bring-after-end", Rule::BringAfterEnd),
        ("give-back-unshipped", Rule::GiveBackUnshipped),
        ("keep-split-names", Rule::KeepSplitNames),
        ("forget-callers", Rule::ForgetCallers),
        ("keep-listed", Rule::KeepListed),
        ("drop-listed", Rule::DropListed),
        ("epoch-amid-listing", Rule::EpochAmidListing),
        ("keep-unexpired", Rule::KeepUnexpired),
        ("forget-with-epoch", Rule::ForgetWithEpoch),
        ("stay-noted", Rule::StayNoted),
        ("count-refused", Rule::CountRefused),
        ("count-from-opening", Rule::CountFromOpening),
        ("replaced-goes-on", Rule::ReplacedGoesOn),
        ("keep-slots-back", Rule::KeepSlotsBack),
        ("whole-with-slots", Rule::WholeWithSlots),
        ("tell-unheard", Rule::TellUnheard),
        ("show-unheard", Rule::ShowUnheard),
        ("no-notes", Rule::NoNotes),
        ("note-early", Rule::NoteEarly),
        ("snapshot-unasked", Rule::SnapshotUnasked),
        ("snapshot-of-durable", Rule::SnapshotOfDurable),
        ("resume-on-other-tree", Rule::ResumeOnOtherTree),
        ("serve-before-moved", Rule::ServeBeforeMoved),
        ("take-for-arrived", Rule::TakeForArrived),
        ("numbers-again", Rule::NumbersAgain),
        ("overwrite-log", Rule::OverwriteLog),
        ("refuse-unclaimed", Rule::RefuseUnclaimed),
    ];
}
