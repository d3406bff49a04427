//! What a mounted client holds in memory.

mod guard;

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::time::Instant;

use hayloft_fuse::Request;
use hayloft_model::grants::Object;
use hayloft_model::tree::Tree;
use hayloft_model::{Content, FileKind, Ino, Missing, Name, Record, Sequence, TreeError, Usage};
use hayloft_wire::VolumeStatus;
use parking_lot::Mutex;
use rustc_hash::FxBuildHasher;

pub(crate) use self::guard::CoreGuard;
use self::guard::Garbage;
use crate::cache::budget::Budget;
use crate::cache::data::{File, FileData};
use crate::cache::memory::Memory;
use crate::host::clock::Clock;
use crate::kernel::Word;
use crate::kernel::bases::Bases;
use crate::kernel::births::{Births, locked};
use crate::kernel::foreword::Foreword;
use crate::kernel::moved::{Excused, Moved};
use crate::kernel::names::KernelNames;
use crate::kernel::nodes::{Left, NodeId, Nodes};
use crate::kernel::sizes::{Lookers, Sizes};
use crate::log::ledger::Ledger;
use crate::log::rejoin::Restoring;
use crate::log::replaced::Replaced;
use crate::log::rescue::Unsent;
use crate::options::MountOptions;
use crate::session::link::Link;
use crate::sharing::Heard;
use crate::sharing::appends::Append;
use crate::sharing::fault::{Bundle, Faults};
use crate::sharing::quiet::Shipped;
use crate::sharing::recalls::Wanted;
use crate::stats::{Hold, Stats};

/// The tree and the files' data.
#[derive(Debug, Default)]
pub(crate) struct Core {
    pub(crate) tree: Tree,
    /// Files with data in memory. A clone of an `Arc` is only taken under the core's lock, so that a count
    /// of one means that nobody else has it.
    pub(crate) files: HashMap<Ino, Arc<File>, FxBuildHasher>,
    pub(crate) names: KernelNames,
    /// By which numbers the kernel knows directories.
    pub(crate) nodes: Nodes,
    pub(crate) moved: Moved,
    /// Files just made, of which the kernel may not have come to the answer.
    pub(crate) births: Births,
    /// Threads that were told to look at a name again.
    pub(crate) excused: Excused,
    /// What the server has made for a call that the kernel has no answer of yet: counted as known to the kernel, so that
    /// it stays whoever removes it meanwhile.
    pub(crate) made: HashSet<Ino, FxBuildHasher>,
    /// Files of which the kernel has sent, most likely, the first part of an append only.
    pub(crate) appending: HashMap<Ino, Append, FxBuildHasher>,
    /// Threads that append to files, and of whose calls the first part is lost: the second one is not done.
    pub(crate) torn: HashMap<Ino, u32, FxBuildHasher>,
    /// What the kernel has of data that has left memory.
    pub(crate) bases: Bases,
    /// Sizes that the kernel may have still.
    pub(crate) sizes: Sizes,
    /// A batch is on its way.
    pub(crate) in_flight: bool,
    /// The last event that was applied, after its connection.
    pub(crate) seen: (u64, u64),
    /// Paths of what was owned when the connection was lost last, with which the way to it may have left the tree.
    pub(crate) ways: HashMap<Ino, Vec<u8>>,
    /// What was owned, is recalled, and is not given back yet.
    pub(crate) giving: HashSet<Ino, FxBuildHasher>,
    /// The connection that was lost last: all that was not owned was forgotten with it, and what was recalled is recalled again.
    pub(crate) cut_off: u64,
    /// Files of which data was set aside for want of room, and whose users have not been told.
    pub(crate) lost: HashSet<Ino, FxBuildHasher>,
    /// When rows were evicted last.
    pub(crate) trimmed: Option<crate::cache::trim::Trimmed>,
    /// When the server was last told what this host would rather not own.
    pub(crate) released: Option<Instant>,
    /// Inodes that the kernel knows, with changes that could not be applied: who asks for durability is told once.
    pub(crate) failed: HashSet<Ino, FxBuildHasher>,
    /// What is not used any more.
    pub(crate) garbage: Garbage,
}

impl Core {
    /// The data of a regular file, made from its row when it is not in memory.
    pub(crate) fn file(&mut self, ino: Ino) -> Result<Arc<File>, TreeError> {
        if let Some(file) = self.files.get(&ino) {
            return Ok(Arc::clone(file));
        }
        let row = self.tree.inode(ino)?;
        if row.content == Content::LeftOut {
            return Err(TreeError::Missing(Missing::Inode(ino)));
        }
        match row.kind() {
            FileKind::Regular => {}
            FileKind::Directory => return Err(TreeError::IsDirectory),
            _ => return Err(TreeError::Invalid),
        }
        let file = Arc::new(File::new(FileData::from_row(row.size, row.allocated, &row.content)));
        self.files.insert(ino, Arc::clone(&file));
        Ok(file)
    }

    /// Whether a file that is owned by itself could be given back as it is.
    pub(crate) fn may_give_back(&self, ino: Ino, durable: Sequence) -> bool {
        let is_written = |file: &Arc<File>| file.writes.load(Ordering::Acquire) > 0;
        let is_quiet = |object| !self.is_appending(object) && !self.files.get(&ino).is_some_and(is_written);
        self.tree.owns_itself(ino)
            && self.tree.is_clean(ino, durable)
            && self.tree.inode(ino).is_ok_and(|row| row.kind() != FileKind::Directory && row.nlink > 0)
            && self.tree.object(ino).is_ok_and(is_quiet)
    }

    /// What is recalled and was not given back is still its own: changes of it may be in the log.
    pub(crate) fn own_given(&mut self) {
        for ino in std::mem::take(&mut self.giving) {
            self.tree.own(ino);
        }
    }

    /// The server holds everything up to this batch. What was deleted by then has not to be given back.
    pub(crate) fn shipped(&mut self, durable: Sequence) {
        for gone in self.tree.shipped(durable) {
            self.giving.remove(&gone);
        }
    }

    /// Notes where everything is that is owned, so that what cannot be sent can be told by name.
    pub(crate) fn note_ways(&mut self) {
        let known = std::mem::take(&mut self.ways);
        let mut paths = self.tree.paths(&known, |ino| self.tree.owns_itself(ino));
        paths.retain(|ino, _| self.tree.owns_itself(*ino));
        self.ways = paths;
    }

    /// How this host holds a directory, or the one that a file is in.
    pub(crate) fn hold(&mut self, ino: Ino) -> Hold {
        if self.tree.owns(ino) {
            return Hold::Owned;
        }
        let home = self.tree.inode(ino).ok().filter(|row| row.kind() != FileKind::Directory);
        let dir = home.map_or(ino, |row| row.parent);
        if self.names.is_changed_here(dir) { Hold::Shared } else { Hold::Read }
    }

    /// Whether something is so for an object, or for a file that a directory covers.
    pub(crate) fn covered_by(&self, object: Object, is_so: impl Fn(Ino) -> bool) -> bool {
        let at_home = |ino: &Ino| self.tree.inode(*ino).is_ok_and(|row| row.parent == object.ino());
        let files = || self.appending.keys().filter(|ino| at_home(ino)).any(|ino| is_so(*ino));
        is_so(object.ino()) || (matches!(object, Object::Directory(_)) && files())
    }

    /// Whether somebody appends to the object, or to a file that a directory covers, in several parts.
    pub(crate) fn is_appending(&self, object: Object) -> bool {
        self.covered_by(object, |ino| self.appending.contains_key(&ino))
    }

    /// The kernel is told of an inode, whose row is here, under a name: one more reference. Returns the number that it is told, and
    /// places where it has a directory that was moved away. With the three functions below and [`Core::take_back`] this
    /// is all that knows which numbers the kernel has.
    pub(crate) fn hand_out(&mut self, at: NodeId, name: &[u8], ino: Ino) -> (NodeId, Vec<Left>) {
        self.tree.remember(ino);
        let (node, left) = match self.is_directory(ino) {
            true => self.nodes.hand_out(at, name, ino),
            false => (self.nodes.hand_out_file(ino), Vec::new()),
        };
        self.tree.note_other(ino, Ino(node.0), true);
        (node, left)
    }

    /// The same under a number by which the kernel has nothing, see [`crate::kernel::moved`].
    pub(crate) fn hand_out_apart(&mut self, at: NodeId, name: &[u8], ino: Ino) -> (NodeId, Vec<Left>) {
        self.tree.remember(ino);
        let (node, left) = self.nodes.hand_out_apart(at, name, ino, self.is_directory(ino));
        self.tree.note_other(ino, Ino(node.0), true);
        (node, left)
    }

    fn is_directory(&self, ino: Ino) -> bool {
        self.tree.inode(ino).is_ok_and(|row| row.kind() == FileKind::Directory)
    }

    /// The same for what the server has made for it, which is no directory.
    pub(crate) fn hand_out_made(&mut self, ino: Ino) {
        if !self.made.remove(&ino) {
            self.tree.remember(ino);
        }
    }

    /// The same for a directory that it has asked for by number. `is_lost`: it has no entry of it.
    pub(crate) fn hand_out_lone(&mut self, node: NodeId, is_lost: bool) {
        self.tree.remember(node.ino());
        if self.tree.inode(node.ino()).is_ok_and(|row| row.kind() == FileKind::Directory) {
            self.nodes.hand_out_lone(node, is_lost);
            self.tree.note_other(node.ino(), Ino(node.0), true);
        }
    }

    /// The kernel has forgotten a number so many times.
    pub(crate) fn take_back(&mut self, node: NodeId, count: u64) {
        let ino = node.ino();
        if self.nodes.forget_replaced(node, count) {
            return;
        }
        if self.nodes.forget(node, count) {
            self.tree.note_other(ino, Ino(node.0), false);
            self.births.was_locked(node);
        } else if self.nodes.forget_apart(node, count) {
            self.tree.note_other(ino, Ino(node.0), false);
        }
        self.tree.forget(ino, count);
        if self.tree.lookups(ino) == 0 {
            self.tree.note_other(ino, Ino(node.0), false);
            self.nodes.forget_file(ino);
            self.forgotten(ino);
        }
    }

    /// The volume has another tree, and this one's is known as that number from now on: the kernel has its files still, open ones
    /// among them, and is told under other numbers of those of the other tree. Nothing of the tree is in memory. Returns whether
    /// the kernel has any.
    pub(crate) fn replace_files(&mut self, tree: u32) -> bool {
        for ino in self.tree.known() {
            if ino == Ino::ROOT || self.nodes.is_directory(ino) {
                continue;
            }
            // What was made for an answer on its way will be told as it is then.
            let count = self.tree.lookups(ino) - u64::from(self.made.contains(&ino));
            let number = self.nodes.file(ino);
            let apart = self.nodes.take_apart(ino);
            let of_apart: u64 = apart.iter().map(|(_, count)| count).sum();
            let of_number = count.saturating_sub(of_apart);
            self.tree.forget(ino, count);
            for (number, count) in apart.into_iter().chain([(number, of_number)]) {
                self.nodes.replace(number, count, tree);
                self.tree.note_other(ino, Ino(number.0), false);
            }
            self.forgotten(ino);
        }
        // The server has not heard of it with the session that begins.
        self.tree.take_released();
        self.nodes.has_of(tree)
    }

    /// The kernel has asked for something by a number. That of a file just made it has by one answer.
    pub(crate) fn asked_for(&mut self, number: NodeId) {
        if self.births.is_arriving(number) && self.tree.lookups(number.ino()) == 1 {
            self.births.arrived(number);
        }
    }

    /// What a request, which is not answered yet, says about files just made. `has_made`: the last of them is its own.
    pub(crate) fn note_arrivals(&mut self, request: &Request<'_>, has_made: bool) {
        self.asked_for(NodeId(request.nodeid));
        if !has_made {
            locked(request).for_each(|dir| self.births.was_locked(dir));
        }
    }

    /// Others are changing these rows: which names they take from what the kernel knows.
    pub(crate) fn note_taken(&mut self, records: &[Record]) {
        for record in records {
            let (Record::DeleteDentry(dir, name) | Record::PutDentry(dir, name, _)) = record else {
                continue;
            };
            self.note_leaving(*dir, name);
        }
    }

    /// Others may move what is in a directory, and nobody will tell.
    pub(crate) fn note_uncovered(&mut self, object: Object) {
        if let Object::Directory(dir) = object {
            let at = dir.or_directory();
            self.tree
                .known_names(dir)
                .iter()
                .take(crate::kernel::moved::KEPT_MAX)
                .for_each(|name| self.note_leaving(at, name));
        }
    }

    fn note_leaving(&mut self, dir: Ino, name: &Name) {
        if let Some(before) = self.tree.leads_to(dir, name.as_bytes())
            && self.tree.lookups(before.ino) > 0
        {
            self.moved.take(before.ino, dir, name);
        }
    }

    /// The kernel will not be told of what was made for it.
    pub(crate) fn give_up_made(&mut self, ino: Ino) {
        if self.made.remove(&ino) {
            self.tree.forget(ino, 1);
        }
    }

    /// Gives back what tables keep for more entries than they have.
    pub(crate) fn shrink(&mut self) {
        self.tree.shrink();
        self.names.shrink();
        self.births.shrink();
        if self.files.capacity() / 4 > self.files.len() {
            self.files.shrink_to_fit();
        }
        self.appending.shrink_to_fit();
        self.bases.shrink();
        self.sizes.shrink();
        self.ways.shrink_to_fit();
    }

    /// The data of a small file that only its row holds.
    pub(crate) fn inline(&self, ino: Ino) -> Option<&[u8]> {
        if self.files.contains_key(&ino) {
            return None;
        }
        match &self.tree.inode(ino).ok()?.content {
            Content::Inline(bytes) => Some(bytes),
            _ => None,
        }
    }
}

/// A mounted volume's client.
pub(crate) struct Client {
    /// Lock order: first of all; then a file's data. `ledger` and the others are leaves.
    core: Mutex<Core>,
    pub(crate) budget: Budget,
    pub(crate) memory: Memory,
    pub(crate) ledger: Ledger,
    pub(crate) faults: Faults,
    pub(crate) link: Arc<Link>,
    pub(crate) clock: Arc<Clock>,
    pub(crate) stats: Arc<Stats>,
    pub(crate) options: MountOptions,
    status: Mutex<VolumeStatus>,
    /// Blocks in memory that may leave it, oldest first.
    pub(crate) cache_queue: Mutex<std::collections::VecDeque<(Ino, u64)>>,
    /// Folder and name for changes that can never be applied.
    pub(crate) rescue: (PathBuf, String),
    /// The volume's id, random, never used twice.
    pub(crate) volume_id: std::sync::OnceLock<String>,
    /// What has to be kept there, and why.
    pub(crate) unsent: Mutex<Vec<(Unsent, String)>>,
    /// The same, while it may be applied still.
    pub(crate) restoring: Mutex<Option<Restoring>>,
    /// A writer waits: whatever can go to the server should.
    pub(crate) room_wanted: AtomicBool,
    /// Changed rows that are in no cut, as of the last change.
    pub(crate) dirty_rows: AtomicUsize,
    /// Locks that hold on every host; not set: the kernel keeps them for this host alone.
    pub(crate) locks: std::sync::OnceLock<Arc<crate::sharing::locks::Locks>>,
    /// How often rows were evicted: what was asked for before may be outdated.
    pub(crate) evictions: AtomicU64,
    /// It was said in the log that a directory is larger than what is to be kept.
    pub(crate) told_of_large: AtomicBool,
    /// What the kernel has to be told, see [`crate::kernel`].
    pub(crate) words: Sender<Word>,
    /// To tell the kernel what waits for no lock, from threads that may block.
    pub(crate) notifier: std::sync::OnceLock<hayloft_fuse::Notifier>,
    /// To tell the kernel before something changes. Lock order: before `core`; only the thread that reads the stream uses it.
    pub(crate) foreword: Mutex<Option<Foreword>>,
    /// What others need, see [`crate::sharing`].
    pub(crate) recalls: Sender<Wanted>,
    /// Answers of which parts are still to come, by request; only the thread that reads the stream uses it.
    pub(crate) partial: Mutex<HashMap<u64, Bundle>>,
    /// Somebody has read a file since a directory was fetched.
    pub(crate) is_reading: AtomicBool,
    /// What is fetched ahead of a walk: directories, and contents of files.
    pub(crate) ahead: crate::sharing::ahead::Ahead,
    pub(crate) contents_ahead: crate::sharing::ahead::Ahead,
    pub(crate) coming: crate::sharing::contents::Coming,
    /// Reads and writes under way, see [`crate::kernel::pages`].
    pub(crate) calls: crate::kernel::pages::Calls,
    /// What looks at which sizes the kernel has.
    pub(crate) lookers: Lookers,
    /// Objects that calls are waiting to own, and how many calls.
    pub(crate) wanted: Mutex<HashMap<Ino, u32>>,
    /// Rows that calls wait for.
    pub(crate) kept: crate::sharing::kept::Kept,
    /// Serializes what is said of inodes in use. Lock order: before `core`.
    pub(crate) uses_told: Mutex<()>,
    /// Events that are acknowledged when all that has come is received.
    pub(crate) heard: Mutex<Vec<Heard>>,
    /// Others have changed something since the server said how full the volume is.
    pub(crate) others_changed: AtomicBool,
    /// Changes whose callers were ended and that are not certain yet, see [`crate::sharing::abandoned`].
    pub(crate) abandoned: AtomicUsize,
    /// Files that are given back if they are not changed again.
    pub(crate) shipped: Shipped,
    /// Whether the kernel knows any directory by another number than its own.
    pub(crate) any_moved: Arc<AtomicBool>,
    /// Whether any thread was told that there is no target of its rename.
    pub(crate) any_hidden: AtomicBool,
    /// Whether it has files of trees that were replaced, and these trees.
    pub(crate) any_replaced: Arc<AtomicBool>,
    pub(crate) replaced: Replaced,
    pub(crate) trees: AtomicU32,
}

impl Client {
    #[allow(clippy::too_many_arguments)] // all that a client consists of
    pub(crate) fn new(
        core: Core,
        link: Arc<Link>,
        clock: Arc<Clock>,
        stats: Arc<Stats>,
        options: MountOptions,
        status: VolumeStatus,
        rescue: (PathBuf, String),
        (words, recalls): (Sender<Word>, Sender<Wanted>),
    ) -> Client {
        Client {
            any_moved: core.nodes.any_moved(),
            any_hidden: AtomicBool::new(false),
            any_replaced: core.nodes.any_replaced(),
            replaced: Replaced::default(),
            trees: AtomicU32::new(0),
            shipped: Shipped::default(),
            core: Mutex::new(core),
            budget: Budget::default(),
            memory: Memory::new(&options),
            ledger: Ledger::default(),
            faults: Faults::default(),
            link,
            clock,
            stats,
            options,
            status: Mutex::new(status),
            cache_queue: Mutex::default(),
            rescue,
            volume_id: std::sync::OnceLock::new(),
            unsent: Mutex::default(),
            restoring: Mutex::default(),
            room_wanted: AtomicBool::new(false),
            dirty_rows: AtomicUsize::new(0),
            locks: std::sync::OnceLock::new(),
            evictions: AtomicU64::new(0),
            told_of_large: AtomicBool::new(false),
            words,
            notifier: std::sync::OnceLock::new(),
            foreword: Mutex::default(),
            recalls,
            partial: Mutex::default(),
            is_reading: AtomicBool::new(false),
            ahead: crate::sharing::ahead::Ahead::new(0),
            contents_ahead: crate::sharing::ahead::Ahead::new(crate::sharing::contents::REACH),
            coming: crate::sharing::contents::Coming::default(),
            lookers: Lookers::default(),
            calls: crate::kernel::pages::Calls::default(),
            wanted: Mutex::default(),
            kept: crate::sharing::kept::Kept::default(),
            uses_told: Mutex::default(),
            heard: Mutex::default(),
            others_changed: AtomicBool::new(false),
            abandoned: AtomicUsize::new(0),
        }
    }

    pub(crate) fn core(&self) -> CoreGuard<'_> {
        CoreGuard::lock(&self.core, &self.stats.lock)
    }

    /// Files that have ended since: their data goes.
    pub(crate) fn drop_ended(&self, core: &mut Core) {
        for ended in core.tree.take_ended() {
            self.drop_file(core, ended.ino);
            core.garbage.rows.push(ended);
        }
    }

    /// Whether this is still the file's data.
    pub(crate) fn is_current(&self, ino: Ino, file: &Arc<File>) -> bool {
        self.core().files.get(&ino).is_some_and(|current| Arc::ptr_eq(current, file))
    }

    /// A file whose data is all elsewhere leaves memory.
    pub(crate) fn drop_file(&self, core: &mut Core, ino: Ino) {
        drop(self.take_file(core, ino));
    }

    /// The same; returns what there was of it.
    pub(crate) fn take_file(&self, core: &mut Core, ino: Ino) -> Option<FileData> {
        let file = core.files.remove(&ino)?;
        let data = self.budget.take(&file);
        core.garbage.files.push(file);
        Some(data)
    }

    /// How full the volume is, as the server said last.
    pub(crate) fn status(&self) -> VolumeStatus {
        *self.status.lock()
    }

    pub(crate) fn set_status(&self, status: VolumeStatus) {
        *self.status.lock() = status;
        let quota = Usage { bytes: status.quota_bytes, inodes: status.quota_inodes };
        self.core().tree.set_quota(quota);
    }

    /// The server's account of the usage, while no batch is under way: what others use counts too.
    pub(crate) fn set_usage(&self, status: VolumeStatus) {
        self.set_status(status);
        self.others_changed.store(false, Ordering::Relaxed);
        self.core().tree.set_usage(status.used());
    }

    /// The numbers by which the kernel knows an inode.
    pub(crate) fn numbers(&self, ino: Ino) -> Vec<Ino> {
        self.core().nodes.each(vec![ino])
    }

    /// Has the kernel forget the attributes of inodes, by these numbers of theirs, and waits for that. Takes no lock of the
    /// kernel's that a call holds; not for transport threads all the same, and not with a lock of ours held. Returns
    /// whether it knows them all.
    pub(crate) fn drop_attributes(&self, numbers: &[Ino]) -> bool {
        let Some(notifier) = self.notifier.get() else { return false };
        // All of them, whatever comes of one.
        let dropped = numbers.iter().filter(|ino| matches!(notifier.inval_inode(ino.0, -1, 0), Ok(true)));
        dropped.count() == numbers.len()
    }

    /// The last batch known to be durable.
    pub(crate) fn durable(&self) -> Sequence {
        self.ledger.durable_sequence()
    }
}
