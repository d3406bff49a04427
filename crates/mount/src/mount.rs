//! Mounting a volume, from the first word to the server to the last one.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::thread::JoinHandle;

use hayloft_fuse::{Config, Control, Session, SessionHandle, Transport};
use hayloft_model::tree::Tree;
use hayloft_model::{InoRange, Usage};
use hayloft_transport::Dial;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::{Bury, LostPeer};

use crate::cache::memory;
use crate::control::Listener;
use crate::core::{Client, Core};
use crate::error::MountError;
use crate::fs::VolumeFs;
use crate::host::clock::Clock;
use crate::keeper::{KnownInodes, Shared};
use crate::kernel::Word;
use crate::kernel::foreword::Foreword;
use crate::log::committer;
use crate::log::ledger::FlushError;
use crate::options::{LocksOption, MountOptions, TransportOption};
use crate::session::link::Link;
use crate::sharing::kept;
use crate::sharing::locks::Locks;
use crate::sharing::recalls::{self, Wanted};
use crate::sharing::{ahead, holders};
use crate::stats::Stats;
use crate::{control, host, keeper, kernel};

/// What to mount, and where.
#[derive(Clone, Debug)]
pub struct MountConfig {
    /// HOST:PORT of the server.
    pub server: String,
    /// How to reach it.
    pub dial: Dial,
    /// The volume's name.
    pub volume: String,
    /// The folder to mount on; it must exist.
    pub mount_point: PathBuf,
    /// Options.
    pub options: MountOptions,
    /// Where changes are kept that can never be applied; by default a folder of the user's state.
    pub cache_dir: Option<PathBuf>,
}

/// A mounted volume.
pub struct Mount {
    client: Arc<Client>,
    session: SessionHandle,
    committer: JoinHandle<()>,
    listener: Listener,
}

/// Ends a mount from another thread: ships everything, then unmounts.
#[derive(Clone)]
pub struct Stopper {
    client: Arc<Client>,
    control: Control,
}

impl Stopper {
    /// Ships what there is, and takes the mount away even when it is in use (programs inside keep what they have
    /// open until they end). [`Mount::wait`] returns afterwards.
    pub fn stop(&self) {
        // Failing to ship now is reported when the mount ends, which tries again.
        let _ = self.client.ledger.flush(None);
        if let Err(error) = self.control.unmount(true) {
            tracing::warn!(%error, "cannot unmount");
        }
    }
}

/// /var/lib/hayloft-client for root, else a folder of the user's state.
fn default_state_folder() -> PathBuf {
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local/state"));
    match std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).or_else(home) {
        Some(state) if !host::is_root() => state.join("hayloft"),
        _ => PathBuf::from("/var/lib/hayloft-client"),
    }
}

/// Makes locks hold on every host, if that is wanted and can be done.
fn share_locks(client: &Arc<Client>) {
    if client.options.locks != LocksOption::Shared {
        return;
    }
    let possible = holders::possible().map_err(str::to_string);
    let locks =
        possible.and_then(|()| Locks::new(Arc::clone(&client.link)).map_err(|error| error.to_string()));
    match locks {
        Ok(locks) => {
            holders::raise_descriptor_limit();
            let _ = client.locks.set(Arc::new(locks));
        }
        Err(reason) => tracing::warn!(
            reason,
            "flock and fcntl locks exclude programs of this host only: the client cannot see when shared ones end"
        ),
    }
}

/// Clients of this host that have ended without a word hold up others for as long as their lease: the server learns
/// that they are dead.
fn bury_the_dead(client: &Client, lost: &[LostPeer]) {
    let host_id = host::id();
    for peer in lost.iter().filter(|peer| peer.host_id == host_id && host::is_dead(peer.pid)) {
        if let Err(error) = client.link.call(Ask::Bury(Bury { session: peer.session }), None) {
            tracing::debug!(%error, session = peer.session, "a dead client's session ends with its lease");
        }
    }
}

impl Mount {
    /// Connects and mounts; returns when the mount is usable.
    ///
    /// # Errors
    /// See [`MountError`].
    pub fn start(config: MountConfig) -> Result<Mount, MountError> {
        let MountConfig { server, dial, volume, mount_point, options, cache_dir } = config;
        let mount_point = mount_point
            .canonicalize()
            .map_err(|source| MountError::Folder { path: mount_point.clone(), source })?;
        memory::set_up();
        let (stats, clock) = (Arc::new(Stats::default()), Arc::new(Clock::default()));
        let point = mount_point.to_string_lossy();
        let opened = Link::open(
            (&server, &dial),
            &volume,
            &point,
            options.read_only,
            Arc::clone(&stats),
            Arc::clone(&clock),
        )?;
        let invalid = |what: &str| MountError::Refused {
            address: server.clone(),
            message: format!("it began the session with an invalid {what}"),
        };
        let welcome = opened.welcome;
        let status = welcome.status.ok_or_else(|| invalid("status"))?;
        let quota = Usage { bytes: status.quota_bytes, inodes: status.quota_inodes };
        let mut tree = Tree::new(status.used(), quota);
        if let Some(range) = &welcome.inos {
            tree.add_numbers(InoRange::try_from(range).map_err(|_| invalid("range of inode numbers"))?);
        }
        tree.share();
        let core = Core { tree, ..Core::default() };
        let fsname = format!("{server}/{volume}");
        let folder = cache_dir.unwrap_or_else(default_state_folder).join("unsent");
        let rescue = (folder, format!("{volume}-{}", welcome.volume_id));
        let (words, to_say) = std::sync::mpsc::channel();
        let (recalls, to_recall) = std::sync::mpsc::channel();
        let speech = (words, recalls);
        let client = Arc::new(Client::new(core, opened.link, clock, stats, options, status, rescue, speech));
        let _ = client.volume_id.set(welcome.volume_id.clone());
        let receiver: Arc<dyn crate::session::link::Receiver> = Arc::clone(&client) as _;
        client
            .link
            .start(opened.reader, receiver)
            .map_err(|source| MountError::Unreachable { address: server.clone(), source })?;
        bury_the_dead(&client, &welcome.lost);
        match Mount::start_session(&client, &mount_point, (fsname, welcome.trusted), to_say, to_recall) {
            Ok((session, listener, committer)) => Mount { client, session, committer, listener }.checked(),
            Err(error) => {
                client.link.close();
                Err(error)
            }
        }
    }

    fn start_session(
        client: &Arc<Client>,
        mount_point: &Path,
        (fsname, trusted): (String, bool),
        to_say: Receiver<Word>,
        to_recall: Receiver<Wanted>,
    ) -> Result<(SessionHandle, Listener, JoinHandle<()>), MountError> {
        let options = &client.options;
        let by_default = trusted && host::is_root();
        let fuse_options = hayloft_fuse::MountOptions {
            fsname,
            subtype: "hayloft".to_string(),
            read_only: options.read_only,
            allow_other: options.allow_other,
            default_permissions: true,
            suid: options.suid.unwrap_or(by_default),
            dev: options.dev.unwrap_or(by_default),
            exec: options.exec,
            atime: false,
            syncfs: options.syncfs && !options.read_only,
        };
        share_locks(client);
        let shared_locks = client.locks.get().is_some();
        let channel = hayloft_fuse::mount(mount_point, &fuse_options)?;
        let config = Config {
            transport: match options.transport {
                TransportOption::Auto => Transport::Auto,
                TransportOption::Dev => Transport::DevFuse,
                TransportOption::Uring => Transport::IoUring,
            },
            // That files are open here is nobody else's business: what is in use is kept until the kernel forgets it.
            no_open: true,
            no_opendir: true,
            posix_locks: shared_locks,
            flock_locks: shared_locks,
            // Each request that waits for a lock takes one.
            queue_depth_max: if shared_locks { 1024 } else { 256 },
            lock_threads_max: crate::sharing::locks::WAITS_MAX + 128,
            ..Config::default()
        };
        let session = Session::new(channel, VolumeFs::new(Arc::clone(client)), config)
            .map_err(|error| MountError::Session(error.to_string()))?
            .spawn()
            .map_err(|error| MountError::Session(error.to_string()))?;
        {
            let mut core = client.core();
            core.names.epochs = session.notifier().inc_epoch().is_ok();
            core.names.read_only = options.read_only;
            let kernel = crate::host::kernel();
            // Later ones look whether they have the name first: one that is on its way to them is not expired.
            core.names.locks_for_any = ((1, 0)..(6, 19)).contains(&kernel);
            // Linux 6.19 to 7.1 refuse to expire a name that leads to no inode (start_removing_dentry).
            core.names.expires_absent = core.names.locks_for_any || kernel >= (7, 2);
        }
        let _ = client.notifier.set(session.notifier());
        if let Ok(device) = session.control().device() {
            client.lookers.begin(mount_point.to_path_buf(), device);
        }
        *client.foreword.lock() = Some(Foreword::new(session.control()));
        let (speech, looked_after) = (session.control(), session.control());
        let (speaking, giving_way, looking) = (Arc::clone(client), Arc::clone(client), Arc::clone(client));
        let (fetching, reading) = (Arc::clone(client), Arc::clone(client));
        let keeping = Arc::clone(client);
        let shared = Shared::new().map(Arc::new).map_err(|error| MountError::Session(error.to_string()))?;
        client.core().tree.tell_known(Box::new(KnownInodes::new(Arc::clone(&shared))));
        client.link.keep(Arc::clone(&shared));
        keeper::start(session.control(), shared).map_err(|error| MountError::Session(error.to_string()))?;
        let thread = |name: &str| std::thread::Builder::new().name(name.to_string());
        thread("hayloft-words")
            .spawn(move || kernel::run(&speaking, &speech, &to_say))
            .and_then(|_| thread("hayloft-recall").spawn(move || recalls::run(&giving_way, &to_recall)))
            .and_then(|_| thread("hayloft-kept").spawn(move || kept::run(&keeping)))
            .and_then(|_| thread("hayloft-ahead").spawn(move || ahead::fetch_directories(&fetching)))
            .and_then(|_| thread("hayloft-ahead-c").spawn(move || ahead::fetch_contents(&reading)))
            .and_then(|_| thread("hayloft-memory").spawn(move || memory::run(&looking, &looked_after)))
            .map_err(|error| MountError::Session(error.to_string()))?;
        let shipping = Arc::clone(client);
        let committer = thread("hayloft-commit")
            .spawn(move || committer::run(&shipping))
            .map_err(|error| MountError::Session(error.to_string()))?;
        if !options.read_only {
            keeper::teach(mount_point);
        }
        match control::listen(mount_point, Arc::clone(client), session.control()) {
            Ok(listener) => Ok((session, listener, committer)),
            Err(error) => {
                let _ = session.unmount(true);
                Err(error)
            }
        }
    }

    /// Makes sure of what was asked of the kernel: an option that does nothing must not look as if it did.
    fn checked(self) -> Result<Mount, MountError> {
        let options = &self.client.options;
        if !options.syncfs || options.read_only {
            return Ok(self);
        }
        let error = match self.session.control().hears_syncfs(keeper::sync) {
            Ok(true) => return Ok(self),
            Ok(false) => MountError::SyncfsUnheard,
            Err(error) => MountError::Session(error.to_string()),
        };
        self.stopper().stop();
        self.wait().and(Err(error))
    }

    /// A handle that ends the mount.
    pub fn stopper(&self) -> Stopper {
        Stopper { client: Arc::clone(&self.client), control: self.session.control() }
    }

    /// Waits until the mount is gone and everything of it is durable.
    ///
    /// # Errors
    /// When something could not be shipped.
    pub fn wait(self) -> Result<(), MountError> {
        let served = self.session.join();
        if let Some(locks) = self.client.locks.get() {
            locks.end();
        }
        let shipped = loop {
            match self.client.flush_all() {
                Ok(()) => break Ok(()),
                Err(FlushError::Ended(reason) | FlushError::Lost(reason)) => {
                    break Err(reason);
                }
                Err(error) => {
                    tracing::error!(
                        ?error,
                        "the volume is unmounted, but changes cannot be shipped yet; trying on"
                    );
                    self.client.ledger.press();
                    std::thread::sleep(std::time::Duration::from_secs(1));
                }
            }
        };
        self.client.ledger.stop();
        let _ = self.committer.join();
        self.client.replaced.close();
        self.client.link.close();
        self.client.tell_kernel(Word::End);
        let _ = self.client.recalls.send(Wanted::End);
        self.client.kept.end();
        self.client.memory.end();
        self.client.ahead.end();
        self.client.contents_ahead.end();
        self.listener.end(shipped.as_ref().err().cloned());
        served.map_err(|error| MountError::Session(error.to_string()))?;
        shipped.map_err(|reason| {
            MountError::Unsent(format!(
                "the last changes were not shipped, because the session ended: {reason}"
            ))
        })
    }
}
