//! `hayloft receive`.

use std::io;
use std::path::{Path, PathBuf};

use hayloft_transfer::{Cache, Folder, LATEST, Manifest, Packed, Packs, Received, Record, Source, leftovers};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::words;
use hayloft_wire::{CreateSnapshot, DeleteSnapshot, ListVolumes, SignSnapshot, SnapshotInfo, Version};
use serde_json::json;

use crate::config::Config;
use crate::exit::{Exit, exit_of, failure};
use crate::server::admin::Admin;
use crate::server::signers::Signers;
use crate::server::snapshots::{self, parse_snapshot};
use crate::server::volume;
use crate::transfer::args::{IntoArgs, ReceiveArgs};
use crate::transfer::pull::Pulled;
use crate::transfer::replace::{self, Replacement};
use crate::transfer::seeds::{Known, Place, Seeds};
use crate::transfer::{cache, failed, making, manifest_of, name, named, read, receiving};
use crate::units::{show_count, show_size};
use crate::versions::args::is_folder;
use crate::versions::commands;

/// What is received, from where, and what this host keeps.
struct Transfer<'a> {
    args: &'a IntoArgs,
    server: &'a str,
    from: From,
    record: Record,
    cache: Cache,
}

/// Where it comes from.
pub(super) enum From {
    Mirror(Source),
    Server(Box<Pulled>),
}

/// Runs `hayloft receive`.
///
/// # Errors
/// A version that is not there, is damaged, or not signed; a volume that others have changed; what the server refuses.
pub(crate) fn run(args: &ReceiveArgs, config: &Config) -> anyhow::Result<u8> {
    let cache = cache(args.to.host.cache.as_ref())?;
    let spool;
    let (source, record) = match (&args.version, args.from.as_str()) {
        (asked, "-") => {
            let (at, begin) = (Path::new("/var/tmp"), "hayloft-stream-");
            leftovers::sweep(at, begin, |_| true, false);
            let dir = tempfile::Builder::new().prefix(begin).tempdir_in(at)?;
            spool = (leftovers::hold_folder(dir.path())?, dir);
            let record = Folder::new(spool.1.path()).and_then(|folder| folder.unpack(io::stdin().lock()));
            let record = record.map_err(failed)?;
            let is_asked = |asked: &Version| {
                asked.volume == record.volume && ["", &record.snapshot].contains(&asked.snapshot.as_str())
            };
            if let Some(asked) = asked.as_ref().filter(|asked| !is_asked(asked)) {
                let said = format!(
                    "the stream is {}@{}, not {}: name the volume that gets it with --volume",
                    record.volume,
                    record.snapshot,
                    snapshots::shown(asked)
                );
                return Err(failure(Exit::Usage, said));
            }
            (Source::new(&spool.1.path().to_string_lossy()), record)
        }
        (None, _) => return Err(failure(Exit::Usage, "which version? write VOLUME, or VOLUME@NAME")),
        (Some(asked), from) => {
            let source = Source::new(from);
            let snapshot = if asked.snapshot.is_empty() { LATEST } else { &asked.snapshot };
            let record = source.record(&asked.volume, snapshot).map_err(failed)?;
            (source, record)
        }
    };
    bring(&args.to, config, From::Mirror(source), record, cache)
}

/// Brings a version to where it is wanted.
pub(super) fn bring(
    args: &IntoArgs,
    config: &Config,
    from: From,
    record: Record,
    cache: Cache,
) -> anyhow::Result<u8> {
    let server = args.host.at.server(config);
    if let Some(path) = &args.signers {
        let signers = Signers::read(path)?;
        signers.signer(&record.tree, &record.signatures).ok_or_else(|| {
            let (volume, snapshot, keys) = (&record.volume, &record.snapshot, path.display());
            let said = format!("{volume}@{snapshot}: none of its signatures is of a key in {keys}");
            failure(Exit::Denied, said)
        })?;
    }
    let transfer = Transfer { args, server, from, record, cache };
    match &args.into {
        Some(folder) => transfer.to_folder(folder),
        None => transfer.to_volume(),
    }
}

impl Transfer<'_> {
    /// The seeds that were named.
    fn named_seeds(&self) -> anyhow::Result<Vec<Known>> {
        let mut known = Vec::new();
        for seed in &self.args.seed {
            let (manifest, place) = if is_folder(seed) {
                let folder = PathBuf::from(seed);
                (self.seed(&folder)?, Place::Folder(folder))
            } else {
                let of = parse_snapshot(seed).map_err(|said| failure(Exit::Usage, said))?;
                let mut admin = Admin::connect(self.server)?;
                let (_, manifest) = manifest_of(&mut admin, self.server, &of, &self.cache, None)?;
                (manifest, Place::Version(of))
            };
            known.push(Known { manifest, place, is_optional: false });
        }
        Ok(known)
    }

    /// A folder of which what has changed since this host has received or read it last is read.
    fn seed(&self, folder: &Path) -> anyhow::Result<Manifest> {
        let known = self.cache.of_folder(folder);
        let manifest = read(folder, known.as_ref())?;
        if known.as_ref() != Some(&manifest) {
            let packed = Packed::of(&manifest).map_err(failed)?;
            self.cache.put_folder(folder, packed).map_err(failed)?;
        }
        Ok(manifest)
    }

    /// The newest snapshot of each of the server's volumes that this host knows the manifest of. One that goes meanwhile is not needed.
    fn others(&self, admin: &mut Admin, but: &str) -> anyhow::Result<Vec<Known>> {
        let Answer::Volumes(list) = admin.ask(Ask::ListVolumes(ListVolumes {}))? else {
            return Err(admin.unexpected());
        };
        let mut others = Vec::new();
        for volume in list.volumes.iter().filter(|volume| volume.name != but) {
            let found = commands::all(admin, &volume.name).unwrap_or_default();
            if let Some((info, manifest)) = found.iter().rev().find_map(|info| self.kept(info)) {
                let place = Place::Version(info.of.clone().unwrap_or_default());
                others.push(Known { manifest, place, is_optional: true });
            }
        }
        Ok(others)
    }

    fn kept<'i>(&self, info: &'i SnapshotInfo) -> Option<(&'i SnapshotInfo, Manifest)> {
        let tree = info.tree.parse().ok()?;
        Some((info, self.cache.get(&tree)?))
    }

    /// Brings what none of the trees has that `known` finds, and those of them that have something. What of them is to be read in another
    /// place, `settle` says once it is known what is wanted.
    fn fetch(
        &self,
        known: impl FnOnce() -> anyhow::Result<Vec<Known>>,
        settle: impl FnOnce(&mut Vec<Known>, &Manifest) -> anyhow::Result<()>,
    ) -> anyhow::Result<(Received, Seeds)> {
        let source = match &self.from {
            From::Mirror(source) => source,
            From::Server(pulled) => {
                let mut known = known()?;
                settle(&mut known, pulled.manifest())?;
                return pulled.fetch(self.server, &self.cache, known);
            }
        };
        let mut packs = Packs::new(source, &self.record);
        // While files are looked at the manifest comes: most of it is that of a folder as it was.
        let as_they_were = self.args.seed.iter().filter(|seed| is_folder(seed));
        let like: Vec<Manifest> =
            as_they_were.filter_map(|seed| self.cache.of_folder(Path::new(seed))).collect();
        let mut bring = |like: &[&Manifest]| {
            hayloft_transfer::manifest(&mut packs, &self.record, &self.cache, like).map_err(failed)
        };
        let (mut known, manifest) = if like.is_empty() {
            let known = known()?;
            let like: Vec<&Manifest> = known.iter().map(|known| &known.manifest).collect();
            let manifest = bring(&like)?;
            (known, manifest)
        } else {
            std::thread::scope(|scope| {
                let coming = scope.spawn(|| bring(&like.iter().collect::<Vec<_>>()));
                let known = known()?;
                let ended = |_| Err(failure(Exit::Failed, "the thread that receives has ended"));
                anyhow::Ok((known, coming.join().unwrap_or_else(ended)?))
            })?
        };
        settle(&mut known, &manifest)?;
        let seeds = Seeds::of(self.server, known, &manifest)?;
        let fetch = |report: &(dyn Fn(u64, u64) + Sync)| {
            hayloft_transfer::fetch(&mut packs, &self.record, manifest, &seeds.trees, &self.cache, report)
        };
        let received = receiving(fetch).map_err(failed)?;
        Ok((received, seeds))
    }

    fn apply(
        &self,
        received: &Received,
        folder: &Path,
        is: Option<&Manifest>,
        seeds: &Seeds,
    ) -> anyhow::Result<()> {
        let applied = making(|report| received.apply(folder, is, &seeds.trees, report));
        if applied.is_err() {
            // What was known of them may be what is wrong.
            seeds.trees.iter().for_each(|tree| self.cache.forget_folder(&tree.folder));
        }
        applied.map_err(failed)
    }

    fn to_folder(&self, folder: &Path) -> anyhow::Result<u8> {
        std::fs::create_dir_all(folder)
            .map_err(|error| failure(Exit::Failed, format!("cannot make {}: {error}", folder.display())))?;
        let mut entries = std::fs::read_dir(folder)
            .map_err(|error| failure(Exit::Failed, format!("cannot read {}: {error}", folder.display())))?;
        if entries.next().is_some() {
            let said = format!(
                "{} is not empty: name another folder, and this one with --seed if it has much of it",
                folder.display()
            );
            return Err(failure(Exit::Exists, said));
        }
        let known = || {
            let mut known = self.named_seeds()?;
            // Without a server there are no others.
            if let Ok(mut admin) = Admin::connect(self.server) {
                known.extend(self.others(&mut admin, "")?);
            }
            Ok(known)
        };
        let (received, seeds) = self.fetch(known, |_, _| Ok(()))?;
        self.apply(&received, folder, None, &seeds)?;
        let now = |now: Manifest| (now.tree, Packed::of(&now));
        let (tree, packed) = received.copy(folder, now).map_err(failed)?;
        self.check(&tree.to_string(), folder.display())?;
        self.cache.put_folder(folder, packed.map_err(failed)?).map_err(failed)?;
        self.say(&received, &folder.display().to_string(), None)?;
        received.forget();
        Ok(0)
    }

    fn check(&self, tree: &str, what: impl std::fmt::Display) -> anyhow::Result<()> {
        if tree == self.record.tree {
            return Ok(());
        }
        let said =
            format!("{what} is {tree}, and has to be {}: what came is not what was sent", self.record.tree);
        Err(failure(Exit::Damaged, said))
    }

    fn to_volume(&self) -> anyhow::Result<u8> {
        let volume = self.args.volume.clone().unwrap_or_else(|| self.record.volume.clone());
        let mut admin = Admin::connect(self.server)?;
        let answer = admin.ask(Ask::ListVolumes(ListVolumes {}))?;
        let Answer::Volumes(list) = answer else { return Err(admin.unexpected()) };
        let has = |name: &str| list.volumes.iter().any(|info| info.name == name);
        let version = |snapshot: &str| Version { volume: volume.clone(), snapshot: snapshot.to_owned() };
        let of = version(&self.record.snapshot);
        let snapshots = if has(&volume) { commands::all(&mut admin, &volume)? } else { Vec::new() };
        if snapshots.iter().any(|info| info.of.as_ref() == Some(&of)) {
            return self.is_here(&mut admin, &of);
        }
        let newest = snapshots.last().and_then(|info| info.of.clone());
        // While it is looked what there is, and what has to come.
        let begin = newest.clone().unwrap_or_else(|| version(""));
        let mut replacement = has(&volume).then(|| Replacement::begin(self.server, &begin));
        if has(&volume) && !self.args.force {
            let refused = match &newest {
                Some(newest) => refuse_changed(&mut admin, newest),
                None => refuse_filled(&mut admin, &volume),
            };
            if let Err(refused) = refused {
                // All was done but the snapshot by a command that was killed.
                if name(&mut admin, &version(""))?.to_string() != self.record.tree {
                    return Err(refused);
                }
                self.keep(&mut admin, &of)?;
                eprintln!("{} is here already", snapshots::shown(&of));
                return Ok(0);
            }
        }
        let mut base = None;
        let known = || {
            let mut known = Vec::new();
            if let Some(newest) = &newest {
                let (_, manifest) = manifest_of(&mut admin, self.server, newest, &self.cache, None)?;
                base = Some(manifest.clone());
                let place = Place::Version(newest.clone());
                known.push(Known { manifest, place, is_optional: false });
            }
            known.extend(self.named_seeds()?);
            known.extend(self.others(&mut admin, &volume)?);
            Ok(known)
        };
        let settle = |known: &mut Vec<Known>, wanted: &Manifest| {
            let Some(replacement) = &mut replacement else { return Ok(()) };
            let folder = replacement.mount("rw")?;
            // What the fork has can be read there until all is made.
            if newest.is_some()
                && let Some(own) = known.first_mut()
                && own.manifest.stays_until_made(wanted)
            {
                own.place = Place::Folder(folder);
            }
            Ok(())
        };
        // First what can be interrupted, and goes on later.
        let (received, seeds) = self.fetch(known, settle)?;
        if let Some(replacement) = replacement {
            let kept = self.exchange(&mut admin, replacement, newest.as_ref(), base, (&received, &seeds))?;
            self.say(&received, &snapshots::shown(&of), kept.as_ref())?;
        } else {
            let make = |folder: &Path| self.apply(&received, folder, None, &seeds);
            replace::create(&mut admin, self.server, &volume, received.manifest.tree, make)?;
            self.keep(&mut admin, &of)?;
            self.say(&received, &snapshots::shown(&of), None)?;
        }
        self.remember(received);
        drop(seeds);
        Ok(0)
    }

    /// Puts what was received in the place of what a volume has; the snapshot of that, if it has no other name.
    fn exchange(
        &self,
        admin: &mut Admin,
        replacement: Replacement<'_>,
        newest: Option<&Version>,
        base: Option<Manifest>,
        (received, seeds): (&Received, &Seeds),
    ) -> anyhow::Result<Option<SnapshotInfo>> {
        let volume = self.args.volume.as_ref().unwrap_or(&self.record.volume);
        let version = |snapshot: &str| Version { volume: volume.clone(), snapshot: snapshot.to_owned() };
        let make = |folder: &Path| {
            let is = match (base, self.args.force) {
                (Some(base), _) => Some(base),
                // All that is there goes.
                (None, true) => Some(read(folder, None)?),
                // A host may have brought something only now.
                (None, false) if std::fs::read_dir(folder)?.next().is_some() => return Err(filled(volume)),
                (None, false) => None,
            };
            self.apply(received, folder, is.as_ref(), seeds)
        };
        let still = |admin: &mut Admin| match newest {
            _ if self.args.force => Ok(()),
            Some(newest) => refuse_changed(admin, newest),
            None => refuse_filled(admin, volume),
        };
        let is_right = replace::is_tree(received.manifest.tree);
        let kept = replacement.finish(admin, make, is_right, still)?;
        self.keep(admin, &version(&self.record.snapshot))?;
        // What it was has a name already, or is nothing.
        let of = kept.of.clone().unwrap_or_default();
        let is_known = match newest {
            Some(newest) => replace::differences(admin, newest, &of)? == 0,
            None => kept.inodes == 0,
        };
        if !is_known {
            return Ok(Some(kept));
        }
        match admin.ask(Ask::DeleteSnapshot(DeleteSnapshot { of: Some(of) })) {
            // Hosts read what they had open.
            Err(error) if exit_of(&error) == Exit::Busy => Ok(Some(kept)),
            deleted => deleted.map(|_| None),
        }
    }

    /// It is in place: what it consists of is found here from now on, and what has come is not needed any more.
    fn remember(&self, received: Received) {
        if let Err(error) = self.cache.put(&received.manifest) {
            eprintln!("hayloft: its chunks will not be found here: {error}");
        }
        received.forget();
    }

    /// A snapshot of this name is there.
    fn is_here(&self, admin: &mut Admin, of: &Version) -> anyhow::Result<u8> {
        let (info, tree) = named(admin, of)?;
        let shown = snapshots::shown(of);
        if tree.to_string() != self.record.tree {
            let said = format!("there is a {shown} that is another tree ({tree}): delete it first");
            return Err(failure(Exit::Exists, said));
        }
        let volume = Version { volume: of.volume.clone(), snapshot: String::new() };
        if name(admin, &volume)? != tree {
            let said = format!(
                "{shown} is here already, but {} is another tree now: `hayloft rollback {shown}` goes back to it",
                of.volume
            );
            return Err(failure(Exit::Exists, said));
        }
        self.sign(admin, of, &info.signatures)?;
        eprintln!("{shown} is here already");
        Ok(0)
    }

    /// Makes the snapshot of what the volume is now, with the signatures that came with it.
    fn keep(&self, admin: &mut Admin, of: &Version) -> anyhow::Result<()> {
        // A stranger's note as a server takes it.
        let note = words::fit(&self.record.note, words::NOTE_MAX, " ");
        let made = CreateSnapshot { of: Some(of.clone()), note, as_stored: true };
        let made = snapshots::one(admin, Ask::CreateSnapshot(made))?;
        // Of the tree that was just named it has the name already.
        let tree = if made.tree.is_empty() { name(admin, of)?.to_string() } else { made.tree };
        if let Err(other) = self.check(&tree, snapshots::shown(of)) {
            admin.ask(Ask::DeleteSnapshot(DeleteSnapshot { of: Some(of.clone()) }))?;
            return Err(other.context(format!("{} was written to in the moment it was received", of.volume)));
        }
        self.sign(admin, of, &[])
    }

    /// Gives a snapshot the signatures that came with it.
    fn sign(&self, admin: &mut Admin, of: &Version, has: &[String]) -> anyhow::Result<()> {
        for signature in self.record.signatures.iter().filter(|signature| !has.contains(signature)) {
            let (tree, signature) = (self.record.tree.clone(), signature.clone());
            snapshots::one(admin, Ask::SignSnapshot(SignSnapshot { of: Some(of.clone()), tree, signature }))?;
        }
        Ok(())
    }

    fn say(&self, received: &Received, what: &str, kept: Option<&SnapshotInfo>) -> anyhow::Result<()> {
        let kept = kept.map(|kept| snapshots::shown(&kept.of.clone().unwrap_or_default()));
        let (web_bytes, asked_bytes) = match &self.from {
            From::Mirror(source) => (source.received(), 0),
            From::Server(pulled) => (0, pulled.received()),
        };
        if self.args.host.at.json {
            println!(
                "{}",
                json!({
                    "received": what,
                    "tree": self.record.tree,
                    "entries": self.record.entries,
                    "had_bytes": received.had,
                    "lacked_bytes": received.lacked,
                    "web_bytes": web_bytes,
                    "asked_bytes": asked_bytes,
                    "kept": kept,
                })
            );
            return Ok(());
        }
        println!(
            "received {what}: {} files, {} of chunks were here, {} came; {}",
            show_count(self.record.entries),
            show_size(received.had),
            show_size(received.lacked),
            self.record.tree
        );
        if let Some(kept) = kept {
            println!("what it was is {kept}");
        }
        Ok(())
    }
}

/// Refuses a volume that has files.
fn refuse_filled(admin: &mut Admin, name: &str) -> anyhow::Result<()> {
    let used = volume::show_volume(admin, name)?.status.map_or(0, |status| status.used_inodes);
    if used == 0 { Ok(()) } else { Err(filled(name)) }
}

fn filled(name: &str) -> anyhow::Error {
    let said = format!(
        "{name} has files, and no snapshot: receive into another volume (--volume), or replace what it has (--force)"
    );
    failure(Exit::Exists, said)
}

/// Refuses a volume that is not what its newest snapshot is.
fn refuse_changed(admin: &mut Admin, newest: &Version) -> anyhow::Result<()> {
    let now = Version { volume: newest.volume.clone(), snapshot: String::new() };
    let count = replace::differences(admin, newest, &now)?;
    if count == 0 {
        return Ok(());
    }
    let said = format!(
        "{} differs from {} in {} paths (see `hayloft diff {1}`): make a snapshot of it, receive into another volume (--volume), \
         or replace it (--force; what it is will be kept as a snapshot)",
        newest.volume,
        snapshots::shown(newest),
        show_count(count)
    );
    Err(failure(Exit::Exists, said))
}
