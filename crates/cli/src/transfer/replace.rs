//! Gives a volume another tree at once: a fork is made what it has to be, and takes the volume's place.

use std::hash::{BuildHasher, RandomState};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use hayloft_tree::TreeName;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{CreateVolume, Fork, ListVolumes, Promote, SetQuota, SnapshotInfo, Version, VolumeInfo};

use crate::exit::{Exit, exit_of, failure};
use crate::progress;
use crate::server::admin::Admin;
use crate::server::snapshots;
use crate::server::volume;
use crate::sys;
use crate::transfer::name;
use crate::units::{show_count, show_size};
use crate::versions::commands;
use crate::versions::diff;
use crate::versions::mounted::{Mounted, Mounting};

/// What is made for the time being has a name that begins so.
const INCOMING: &str = "incoming-";

/// What was left behind by a command that was killed goes when it is so old.
const OLD: Duration = Duration::from_secs(86_400);

/// A volume that is made what another one has to be; nobody else knows its name.
struct Incoming<'a> {
    server: &'a str,
    version: Version,
}

impl Incoming<'_> {
    fn new(server: &str) -> Incoming<'_> {
        let random = RandomState::new().hash_one(std::process::id());
        let version = Version { volume: format!("{INCOMING}{random:016x}"), snapshot: String::new() };
        Incoming { server, version }
    }

    /// Has `make` make it what it has to be, and `is_right` look whether it is.
    fn fill(
        &self,
        admin: &mut Admin,
        mounted: Mounted,
        make: impl FnOnce(&Path) -> anyhow::Result<()>,
        is_right: impl FnOnce(&mut Admin, &Version) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        mounted.fill(make)?;
        let stored = || "the new tree is not in the store";
        mounted.flush().with_context(stored)?;
        // Nobody changes it any more: it is looked at while the mount ends.
        std::thread::scope(|scope| {
            let leaving = scope.spawn(|| mounted.leave());
            let is_right = is_right(admin, &self.version);
            let ended = |_| Err(failure(Exit::Failed, "the thread that unmounts has ended"));
            let left = leaving.join().unwrap_or_else(ended).with_context(stored);
            is_right.and(left)
        })
    }

    /// Deletes it. What failed before may have been the connection.
    fn delete(&self) -> anyhow::Result<()> {
        const TRIES: u32 = 100;
        let mut admin = Admin::connect(self.server)?;
        let mut tried = 0;
        loop {
            match volume::delete_volume(&mut admin, &self.version.volume, true) {
                Err(error) if exit_of(&error) == Exit::Busy && tried < TRIES => {
                    tried += 1;
                    std::thread::sleep(Duration::from_millis(100));
                }
                done => return done,
            }
        }
    }
}

/// Deletes what commands have left behind that were killed.
fn delete_left(admin: &mut Admin) -> anyhow::Result<()> {
    let Answer::Volumes(list) = admin.ask(Ask::ListVolumes(ListVolumes {}))? else {
        return Err(admin.unexpected());
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let is_left = |info: &VolumeInfo| {
        let random = info.name.strip_prefix(INCOMING).unwrap_or_default();
        let created = Duration::from_secs(u64::try_from(info.created_secs).unwrap_or(u64::MAX));
        random.len() == 16
            && random.bytes().all(|byte| byte.is_ascii_hexdigit())
            && now.saturating_sub(created) > OLD
            && info.clients.is_empty()
    };
    for info in list.volumes.iter().filter(|info| is_left(info)) {
        // One that is mounted stays.
        let _ = volume::delete_volume(admin, &info.name, true);
    }
    Ok(())
}

/// For [`Replacement::finish`]: whether a version is this tree.
pub(super) fn is_tree(tree: TreeName) -> impl FnOnce(&mut Admin, &Version) -> anyhow::Result<()> {
    move |admin, version| {
        let found = name(admin, version)?;
        if found == tree {
            return Ok(());
        }
        let said = format!("the new tree is {found}, and has to be {tree}: what came is not what was sent");
        Err(failure(Exit::Damaged, said))
    }
}

/// A fork that is made what a volume has to be, and takes its place. Until then nothing has happened; what was made of it goes with this.
pub(super) struct Replacement<'a> {
    /// The volume whose place it takes.
    volume: String,
    incoming: Incoming<'a>,
    forking: Option<JoinHandle<anyhow::Result<()>>>,
    mounting: Option<Mounting>,
    is_over: bool,
}

impl<'a> Replacement<'a> {
    /// Begins to fork a version. Something else can be asked for meanwhile.
    pub(super) fn begin(server: &'a str, of: &Version) -> Replacement<'a> {
        let incoming = Incoming::new(server);
        let volume = of.volume.clone();
        let (server, of, name) = (server.to_owned(), of.clone(), incoming.version.volume.clone());
        let fork = move || {
            let mut admin = Admin::connect(&server)?;
            delete_left(&mut admin)?;
            admin.ask(Ask::Fork(Fork { of: Some(of), name: name.clone(), as_stored: false }))?;
            // Until the new tree is whole the old one is there beside it. What that may take is looked at when it is whole.
            admin.ask(Ask::SetQuota(SetQuota { name, quota_bytes: 0, quota_inodes: 0 })).map(drop)
        };
        let forking = Some(std::thread::spawn(fork));
        Replacement { volume, incoming, forking, mounting: None, is_over: false }
    }

    fn forked(&mut self) -> anyhow::Result<()> {
        let ended = |_| Err(failure(Exit::Failed, "the thread that forks has ended"));
        self.forking.take().map_or(Ok(()), |forking| forking.join().unwrap_or_else(ended))
    }

    /// Begins to mount the fork, with options of mount(8), and tells where that will be.
    ///
    /// # Errors
    /// It cannot be made, or mounted.
    pub(super) fn mount(&mut self, options: &str) -> anyhow::Result<PathBuf> {
        self.forked()?;
        let mounting = Mounting::begin(self.incoming.server, &self.incoming.version, options)?;
        Ok(self.mounting.insert(mounting).path().to_owned())
    }

    /// Has `make` make the fork what it has to be, and puts it in the volume's place if it `is_right` then and `still` agrees.
    /// Returns the snapshot of what the volume was.
    ///
    /// # Errors
    /// What `make` or `still` says, what the server refuses: then the volume is as it was.
    pub(super) fn finish(
        mut self,
        admin: &mut Admin,
        make: impl FnOnce(&Path) -> anyhow::Result<()>,
        is_right: impl FnOnce(&mut Admin, &Version) -> anyhow::Result<()>,
        still: impl FnOnce(&mut Admin) -> anyhow::Result<()>,
    ) -> anyhow::Result<SnapshotInfo> {
        if self.mounting.is_none() {
            self.mount("rw")?;
        }
        let mounted = match self.mounting.take() {
            Some(mounting) => mounting.done()?,
            None => return Err(failure(Exit::Failed, "the fork is not mounted")),
        };
        self.incoming.fill(admin, mounted, make, is_right)?;
        self.has_room(admin)?;
        still(admin)?;
        let ask = Promote { fork: self.incoming.version.volume.clone(), ..Promote::default() };
        let kept = progress::waited(commands::EXCHANGE, || snapshots::one(admin, Ask::Promote(ask)))?;
        self.is_over = true;
        Ok(kept)
    }
}

impl Replacement<'_> {
    /// Whether the new tree is within the quota of the volume.
    fn has_room(&self, admin: &mut Admin) -> anyhow::Result<()> {
        let quota = volume::show_volume(admin, &self.volume)?.status.unwrap_or_default();
        let made = volume::show_volume(admin, &self.incoming.version.volume)?.status.unwrap_or_default();
        let is_within = |used: u64, quota: u64| quota == 0 || used <= quota;
        if is_within(made.used_bytes, quota.quota_bytes) && is_within(made.used_inodes, quota.quota_inodes) {
            return Ok(());
        }
        let said = format!(
            "the new tree has {} in {} inodes, more than the quota of {} lets it have (hayloft volume set-quota)",
            show_size(made.used_bytes),
            show_count(made.used_inodes),
            self.volume
        );
        Err(failure(Exit::NoSpace, said))
    }
}

impl Drop for Replacement<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        self.mounting = None;
        if self.forked().is_ok() {
            let _ = self.incoming.delete();
        }
    }
}

/// Makes a volume that is `tree` from its beginning.
///
/// # Errors
/// What `make` says, what the server refuses: then there is no such volume.
pub(super) fn create(
    admin: &mut Admin,
    server: &str,
    volume: &str,
    tree: TreeName,
    make: impl FnOnce(&Path) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    delete_left(admin)?;
    let incoming = Incoming::new(server);
    let (uid, gid) = sys::user_and_group();
    let name = incoming.version.volume.clone();
    admin.ask(Ask::CreateVolume(CreateVolume { name, mode: 0o755, uid, gid, ..CreateVolume::default() }))?;
    let filled = Mounted::writable(server, &incoming.version)
        .and_then(|mounted| incoming.fill(admin, mounted, make, is_tree(tree)));
    let created = filled.and_then(|()| {
        let fork = Fork { of: Some(incoming.version.clone()), name: volume.to_owned(), as_stored: false };
        admin.ask(Ask::Fork(fork)).map(drop)
    });
    let deleted = incoming.delete();
    created.and(deleted)
}

/// In how many paths two versions differ.
///
/// # Errors
/// They are not of one family; what the server refuses.
pub(super) fn differences(admin: &mut Admin, from: &Version, to: &Version) -> anyhow::Result<u64> {
    Ok(diff::differences(admin, from, to, Vec::new())?.0.len() as u64)
}
