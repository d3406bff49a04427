//! `hayloft snapshot`, `fork`, `rollback` and `promote`.

use hayloft_tree::TreeName;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    CreateSnapshot, DeleteSnapshot, Fork, ListSnapshots, NameTree, Named, Promote, Rollback, SnapshotInfo,
    Version,
};
use serde_json::{Value, json};

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::progress;
use crate::server::admin::Admin;
use crate::server::{snapshots, volume};
use crate::units::{show_count, show_size, show_utc};
use crate::versions::args::{
    ForkArgs, PromoteArgs, PruneArgs, RollbackArgs, ServerArgs, SnapshotArgs, SnapshotVerb,
};
use crate::versions::signatures;

/// What a snapshot waits for.
const SHIPPING: &str = "hosts bring what they have changed";

/// What going back waits for.
pub(crate) const EXCHANGE: &str = "all hosts let go of the tree that was";

pub(super) fn connect(at: &ServerArgs, config: &Config) -> anyhow::Result<Admin> {
    Admin::connect(at.server(config))
}

fn name_of(info: &SnapshotInfo) -> String {
    snapshots::shown(&info.of.clone().unwrap_or_default())
}

fn to_json(info: &SnapshotInfo) -> Value {
    let of = info.of.clone().unwrap_or_default();
    json!({
        "volume": of.volume,
        "snapshot": of.snapshot,
        "created": show_utc(info.created_nanos.div_euclid(1_000_000_000)),
        "created_nanos": info.created_nanos,
        "note": info.note,
        "by": info.by,
        "bytes": info.bytes,
        "inodes": info.inodes,
        "mounts": info.mounts,
        "tree": (!info.tree.is_empty()).then_some(&info.tree),
        "signatures": info.signatures,
    })
}

/// The name by content of a version; `anew` as it is worked out now, and not as it was given first.
///
/// # Errors
/// What the server refuses.
pub(crate) fn name_tree(admin: &mut Admin, of: &Version, anew: bool) -> anyhow::Result<Named> {
    let ask = Ask::NameTree(NameTree { of: Some(of.clone()), anew });
    match progress::waited("the server works out the name by content", || admin.ask(ask))? {
        Answer::Named(named) => Ok(named),
        _ => Err(admin.unexpected()),
    }
}

/// Reads a name by content that the server has said.
///
/// # Errors
/// It is none.
pub(crate) fn parse_tree(tree: &str) -> anyhow::Result<TreeName> {
    tree.parse().map_err(|said: &str| failure(Exit::Failed, format!("the server: {said}")))
}

/// Runs `hayloft snapshot`.
///
/// # Errors
/// What the server refuses; an unreachable server.
pub(crate) fn snapshot(args: SnapshotArgs, config: &Config) -> anyhow::Result<u8> {
    let mut admin = connect(&args.at, config)?;
    let json = args.at.json;
    match args.verb {
        SnapshotVerb::Create(args) => {
            let ask = CreateSnapshot { of: Some(args.snapshot), note: args.note, as_stored: args.as_stored };
            let made = progress::waited(SHIPPING, || snapshots::one(&mut admin, Ask::CreateSnapshot(ask)))?;
            let said = format!(
                "created snapshot {} ({} inodes, {})",
                name_of(&made),
                show_count(made.inodes),
                show_size(made.bytes)
            );
            say(json, to_json(&made), &said);
        }
        SnapshotVerb::List(args) => {
            let found = all(&mut admin, &args.volume)?;
            list(&args.volume, &found, json);
        }
        SnapshotVerb::Prune(args) => return prune(&mut admin, &args, json),
        SnapshotVerb::Show(args) => {
            let ask = Ask::ListSnapshots(ListSnapshots { of: Some(args.snapshot) });
            show(&snapshots::one(&mut admin, ask)?, json);
        }
        SnapshotVerb::Sign(args) => {
            let signed = signatures::sign(&mut admin, &args)?;
            let said = format!("signed {}: {}", name_of(&signed), signed.tree);
            say(json, to_json(&signed), &said);
        }
        SnapshotVerb::Delete(args) => {
            let name = snapshots::shown(&args.snapshot);
            match admin.ask(Ask::DeleteSnapshot(DeleteSnapshot { of: Some(args.snapshot) }))? {
                Answer::Done(_) => say(json, json!({ "deleted": name }), &format!("deleted snapshot {name}")),
                _ => return Err(admin.unexpected()),
            }
        }
    }
    Ok(0)
}

/// The snapshots of a volume, the oldest first.
///
/// # Errors
/// As [`snapshot`].
pub(crate) fn all(admin: &mut Admin, volume: &str) -> anyhow::Result<Vec<SnapshotInfo>> {
    let of = Version { volume: volume.to_owned(), snapshot: String::new() };
    snapshots::several(admin, Ask::ListSnapshots(ListSnapshots { of: Some(of) }))
}

/// Runs `hayloft snapshot prune`.
fn prune(admin: &mut Admin, args: &PruneArgs, json: bool) -> anyhow::Result<u8> {
    let found = all(admin, &args.volume)?;
    let moments: Vec<i64> = found.iter().map(|info| info.created_nanos.div_euclid(1_000_000_000)).collect();
    let old: Vec<&SnapshotInfo> = args
        .keep
        .superfluous(&moments)
        .into_iter()
        .map(|at| &found[at])
        .filter(|info| info.mounts == 0)
        .collect();
    if args.yes {
        for info in &old {
            admin.ask(Ask::DeleteSnapshot(DeleteSnapshot { of: info.of.clone() }))?;
        }
    }
    if json {
        let names: Vec<String> = old.iter().map(|info| name_of(info)).collect();
        println!("{}", json!({ "snapshots": names, "deleted": args.yes }));
        return Ok(0);
    }
    for info in &old {
        let created = show_utc(info.created_nanos.div_euclid(1_000_000_000));
        println!("{} {} of {created}", if args.yes { "deleted" } else { "would delete" }, name_of(info));
    }
    eprintln!(
        "{} of {} snapshots {}",
        show_count(old.len() as u64),
        show_count(found.len() as u64),
        if args.yes { "deleted" } else { "would be deleted; --yes does it" }
    );
    Ok(0)
}

fn say(json: bool, value: Value, text: &str) {
    if json { println!("{value}") } else { println!("{text}") }
}

fn list(volume: &str, found: &[SnapshotInfo], json: bool) {
    if json {
        println!("{}", Value::Array(found.iter().map(to_json).collect()));
        return;
    }
    if found.is_empty() {
        eprintln!("no snapshots of {volume} yet; make one with `hayloft snapshot create {volume}@NAME`");
        return;
    }
    let width = found.iter().map(|info| name_of(info).len()).max().unwrap_or(0).max("SNAPSHOT".len());
    println!(
        "{:width$}  {:23}  {:>10}  {:>12}  {:>6}  NOTE",
        "SNAPSHOT", "CREATED", "SIZE", "INODES", "MOUNTS"
    );
    for info in found {
        println!(
            "{:width$}  {:23}  {:>10}  {:>12}  {:>6}  {}",
            name_of(info),
            show_utc(info.created_nanos.div_euclid(1_000_000_000)),
            show_size(info.bytes),
            show_count(info.inodes),
            info.mounts,
            info.note,
        );
    }
}

fn show(info: &SnapshotInfo, json: bool) {
    if json {
        println!("{}", to_json(info));
        return;
    }
    println!("{:12} {}", "snapshot", name_of(info));
    println!("{:12} {}", "created", show_utc(info.created_nanos.div_euclid(1_000_000_000)));
    println!("{:12} {}", "by", info.by);
    if !info.note.is_empty() {
        println!("{:12} {}", "note", info.note);
    }
    if !info.tree.is_empty() {
        println!("{:12} {}", "tree", info.tree);
        println!("{:12} {}", "signatures", info.signatures.len());
    }
    println!("{:12} {}", "size", show_size(info.bytes));
    println!("{:12} {}", "inodes", show_count(info.inodes));
    println!(
        "{:12} {}",
        "mounted",
        if info.mounts == 0 { "nowhere".to_owned() } else { info.mounts.to_string() }
    );
}

/// Runs `hayloft fork`.
///
/// # Errors
/// As [`snapshot`].
pub(crate) fn fork(args: ForkArgs, config: &Config) -> anyhow::Result<u8> {
    let mut admin = connect(&args.at, config)?;
    let of = snapshots::shown(&args.of);
    let ask = Fork { of: Some(args.of), name: args.name, as_stored: args.as_stored };
    let answer = progress::waited(SHIPPING, || admin.ask(Ask::Fork(ask)))?;
    let made = volume::one_volume(&admin, answer)?;
    say(args.at.json, volume::to_json(&made), &format!("created volume {}, a fork of {of}", made.name));
    Ok(0)
}

/// Runs `hayloft rollback`.
///
/// # Errors
/// As [`snapshot`].
pub(crate) fn rollback(args: RollbackArgs, config: &Config) -> anyhow::Result<u8> {
    let mut admin = connect(&args.at, config)?;
    let (volume, to) = (args.to.volume.clone(), snapshots::shown(&args.to));
    let ask = Rollback { to: Some(args.to), keep_as: args.keep_as };
    let kept = progress::waited(EXCHANGE, || snapshots::one(&mut admin, Ask::Rollback(ask)))?;
    let said = format!("{volume} is what {to} was; what it was itself is {}", name_of(&kept));
    say(args.at.json, json!({ "kept": to_json(&kept) }), &said);
    Ok(0)
}

/// Runs `hayloft promote`.
///
/// # Errors
/// As [`snapshot`].
pub(crate) fn promote(args: PromoteArgs, config: &Config) -> anyhow::Result<u8> {
    let mut admin = connect(&args.at, config)?;
    // While hosts are waited for the name may become another one's.
    let id = match args.id {
        Some(id) => id,
        None => volume::show_volume(&mut admin, &args.fork)?.id,
    };
    let ask = Promote { fork: args.fork.clone(), keep_as: args.keep_as, id };
    let kept = progress::waited(EXCHANGE, || snapshots::one(&mut admin, Ask::Promote(ask)))?;
    let volume = kept.of.clone().unwrap_or_default().volume;
    let said = format!("{volume} is what {} was; what it was itself is {}", args.fork, name_of(&kept));
    say(args.at.json, json!({ "kept": to_json(&kept) }), &said);
    Ok(0)
}
