//! `hayloft merge`.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use hayloft_transfer::{Cache, Conflict, Manifest, Tree};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::{CreateSnapshot, DeleteSnapshot, ListSnapshots, Version};
use serde_json::json;

use crate::config::Config;
use crate::exit::{Exit, exit_of, failure};
use crate::server::admin::Admin;
use crate::server::volume::show_volume;
use crate::transfer::args::MergeArgs;
use crate::transfer::{cache, failed, manifest_of, replace};
use crate::units::show_count;
use crate::versions::args::parse_snapshot;
use crate::versions::commands;
use crate::versions::diff::shown;
use crate::versions::mounted::Mounted;

/// So often it is tried again when hosts have written meanwhile.
const TRIES: u32 = 5;

/// A snapshot with its manifest.
struct Side {
    of: Version,
    manifest: Manifest,
}

/// Where it is merged.
struct Merge<'a> {
    server: &'a str,
    cache: Cache,
    volume: String,
}

/// Runs the command.
///
/// # Errors
/// Paths that both have changed; no snapshot that both began as; what the server refuses.
pub(crate) fn run(args: &MergeArgs, config: &Config) -> anyhow::Result<u8> {
    let server = args.host.at.server(config);
    let mut admin = Admin::connect(server)?;
    let forked = show_volume(&mut admin, &args.fork)?;
    let origin = forked.origin;
    let base = match &args.base {
        Some(base) => base.clone(),
        None => parse_snapshot(&origin).map_err(|_| {
            let said = match origin.is_empty() {
                true => format!("{} is no fork", args.fork),
                false => format!(
                    "{} was made of {origin} as it was then, and no snapshot says what that is: name one that both began as (--base)",
                    args.fork
                ),
            };
            failure(Exit::Usage, said)
        })?,
    };
    let info = commands::one(&mut admin, Ask::ListSnapshots(ListSnapshots { of: Some(base.clone()) }))?;
    if info.created_nanos.div_euclid(1_000_000_000) > forked.created_secs {
        let said = format!(
            "{} was made after {}: it is not what that began as; name a snapshot that is (--base)",
            commands::shown(&base),
            args.fork
        );
        return Err(failure(Exit::Usage, said));
    }
    let merge = Merge { server, cache: cache(args.host.cache.as_ref())?, volume: base.volume.clone() };
    let fork = Version { volume: args.fork.clone(), snapshot: format!("merge-{}", now()) };
    create(&mut admin, &fork, "for hayloft merge")?;
    let merged = merge.run(&mut admin, &base, &fork);
    // The fork gets no snapshot by this.
    let deleted = Admin::connect(server).and_then(|mut admin| delete(&mut admin, &fork));
    let kept = merged?;
    deleted?;
    let kept = kept.map(|kept| commands::shown(&kept));
    match (args.host.at.json, &kept) {
        (true, _) => println!("{}", json!({ "merged": args.fork, "into": base.volume, "kept": kept })),
        (false, Some(kept)) => println!("merged {} into {}; what that was is {kept}", args.fork, base.volume),
        (false, None) => println!("{} has nothing that {} has not", args.fork, base.volume),
    }
    Ok(0)
}

fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis())
}

fn create(admin: &mut Admin, of: &Version, note: &str) -> anyhow::Result<()> {
    let ask = CreateSnapshot { of: Some(of.clone()), note: note.to_owned(), as_stored: false };
    commands::one(admin, Ask::CreateSnapshot(ask)).map(drop)
}

fn delete(admin: &mut Admin, of: &Version) -> anyhow::Result<()> {
    admin.ask(Ask::DeleteSnapshot(DeleteSnapshot { of: Some(of.clone()) })).map(drop)
}

impl Merge<'_> {
    fn side(&self, admin: &mut Admin, of: &Version, like: Option<&Manifest>) -> anyhow::Result<Side> {
        let (_, manifest) = manifest_of(admin, self.server, of, &self.cache, like)?;
        Ok(Side { of: of.clone(), manifest })
    }

    /// The snapshot of what the volume was, if it is another one now.
    fn run(&self, admin: &mut Admin, base: &Version, fork: &Version) -> anyhow::Result<Option<Version>> {
        let mut base = self.side(admin, base, None)?;
        let mut theirs = self.side(admin, fork, Some(&base.manifest))?;
        let begun = now();
        let name = |round: u32| match round {
            0 => format!("before-merge-{begun}"),
            _ => format!("before-merge-{begun}-{round}"),
        };
        let version = |round| Version { volume: self.volume.clone(), snapshot: name(round) };
        // What nobody wants to go back to.
        let mut passing: Vec<Version> = Vec::new();
        let mut tries = 0;
        let mut round = 0;
        loop {
            let of = version(round);
            create(admin, &of, &format!("before the merge of {}", fork.volume))?;
            let ours = self.side(admin, &of, Some(&base.manifest))?;
            let done = self.round(admin, &base, &ours, &theirs);
            if !matches!(done, Ok(Some(_))) {
                // The volume is what it was.
                let _ = delete(admin, &of);
            }
            let kept = match done {
                Ok(Some(kept)) => kept,
                Ok(None) => return Ok(None),
                Err(error) if exit_of(&error) == Exit::Busy && tries < TRIES => {
                    tries += 1;
                    continue;
                }
                Err(error) if round > 0 => {
                    let said = "it is merged but for what hosts have written in that moment, which is in the snapshots before-promote-*";
                    return Err(error.context(said));
                }
                Err(error) => return Err(error),
            };
            if round > 0 {
                passing.push(of.clone());
            }
            passing.push(kept.clone());
            if replace::differences(admin, &of, &kept)? == 0 {
                for of in &passing {
                    delete(admin, of)?;
                }
                return Ok(Some(version(0)));
            }
            // What hosts have written until the trees were exchanged is merged into the new one.
            theirs = self.side(admin, &kept, Some(&ours.manifest))?;
            base = ours;
            round += 1;
        }
    }

    /// The snapshot of what the volume was when the trees were exchanged; none if there is nothing to do.
    fn round(
        &self,
        admin: &mut Admin,
        base: &Side,
        ours: &Side,
        theirs: &Side,
    ) -> anyhow::Result<Option<Version>> {
        let merged = hayloft_transfer::merge(&base.manifest, &ours.manifest, &theirs.manifest)
            .map_err(|conflicts| refused(&conflicts, ours, theirs))?;
        if merged.tree == ours.manifest.tree {
            return Ok(None);
        }
        let mut mounts = Vec::new();
        let mut seeds = Vec::new();
        for side in [ours, theirs] {
            let mounted = Mounted::new(self.server, &side.of)?;
            seeds.push(Tree { manifest: side.manifest.clone(), folder: mounted.path().to_owned() });
            mounts.push(mounted);
        }
        let make = |folder: &Path| {
            hayloft_transfer::make(folder, &ours.manifest, &merged, &seeds, &|_, _| {}).map_err(failed)
        };
        let live = Version { volume: self.volume.clone(), snapshot: String::new() };
        let rests = |admin: &mut Admin| match replace::differences(admin, &ours.of, &live)? {
            0 => Ok(()),
            _ => {
                let said = format!(
                    "hosts are writing to {}, and would be interrupted: merge when they rest",
                    self.volume
                );
                Err(failure(Exit::Busy, said))
            }
        };
        let kept = replace::replace(admin, self.server, &ours.of, merged.tree, make, rests)?;
        let _ = self.cache.put(&merged);
        Ok(kept.of)
    }
}

fn refused(conflicts: &[Conflict], ours: &Side, theirs: &Side) -> anyhow::Error {
    const SHOWN: usize = 50;
    let lines = conflicts
        .iter()
        .take(SHOWN)
        .map(|conflict| format!("\n  {}: {}", shown(&conflict.path), conflict.why));
    let more = match conflicts.len().saturating_sub(SHOWN) {
        0 => String::new(),
        more => format!("\n  and {} more", show_count(more as u64)),
    };
    let said = format!(
        "{} and {} have changed the same paths; nothing is merged:{}{more}",
        ours.of.volume,
        commands::shown(&theirs.of),
        lines.collect::<String>()
    );
    failure(Exit::Exists, said)
}
