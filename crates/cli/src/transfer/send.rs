//! `hayloft send`.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use hayloft_transfer::{Folder, Manifest, Sent, Sink, Tar};
use hayloft_wire::Version;
use serde_json::json;

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::progress;
use crate::server::admin::Admin;
use crate::server::snapshots::{self, parse_snapshot};
use crate::transfer::args::SendArgs;
use crate::transfer::{Share, cache, failed, manifest_of, read};
use crate::units::{show_count, show_size};
use crate::versions::args::is_folder;
use crate::versions::mounted::Mounted;

/// A folder, or a snapshot that is mounted.
enum Tree {
    Folder(PathBuf),
    Mounted(Mounted),
}

impl Tree {
    fn path(&self) -> &Path {
        match self {
            Tree::Folder(path) => path,
            Tree::Mounted(mounted) => mounted.path(),
        }
    }
}

/// Runs the command.
///
/// # Errors
/// What cannot be read or written; what the server refuses.
pub(crate) fn run(args: &SendArgs, config: &Config) -> anyhow::Result<u8> {
    if args.to.is_none() && io::stdout().is_terminal() {
        let said =
            "standard output is a terminal: write --to DIR for a mirror, or pipe it into hayloft receive -";
        return Err(failure(Exit::Usage, said));
    }
    let server = args.host.at.server(config);
    let cache = cache(args.host.cache.as_ref())?;
    let (tree, manifest, name, info): (Tree, Manifest, Version, _);
    if is_folder(&args.what) {
        let missing = "a folder has no version's name: write --as VOLUME@NAME";
        name = args.name.clone().ok_or_else(|| failure(Exit::Usage, missing))?;
        tree = Tree::Folder(PathBuf::from(&args.what));
        manifest = read(tree.path(), None)?;
        info = None;
    } else {
        let of = parse_snapshot(&args.what).map_err(|said| failure(Exit::Usage, said))?;
        name = args.name.clone().unwrap_or_else(|| of.clone());
        let mut admin = Admin::connect(server)?;
        let found = manifest_of(&mut admin, server, &of, &cache, None)?;
        (info, manifest) = (Some(found.0), found.1);
        tree = Tree::Mounted(Mounted::new(server, &of)?);
    }
    let since = match &args.since {
        None => None,
        Some(of) => {
            let mut admin = Admin::connect(server)?;
            Some(manifest_of(&mut admin, server, of, &cache, None)?.1)
        }
    };
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i64);
    let info = info.unwrap_or_default();
    let version = hayloft_transfer::Version {
        volume: &name.volume,
        snapshot: &name.snapshot,
        created_nanos: if info.created_nanos == 0 { now() } else { info.created_nanos },
        note: args.note.as_deref().unwrap_or(&info.note),
        signatures: &info.signatures,
        manifest: &manifest,
        folder: tree.path(),
    };
    let mut sink: Box<dyn Sink> = match &args.to {
        Some(folder) => Box::new(Folder::new(folder).map_err(failed)?),
        None => Box::new(Tar::new(io::stdout().lock()).map_err(failed)?),
    };
    let share = Share::default();
    let text = || {
        let (done, all, percent) = share.get();
        format!("{percent:3} %  {} of {} packed", show_size(done), show_size(all))
    };
    let report = |done, all| share.set(done, all);
    let send = || hayloft_transfer::send(&version, since.as_ref(), sink.as_mut(), &report);
    let sent = progress::shown(text, send).map_err(failed)?;
    say(args, &name, &manifest, sent);
    Ok(0)
}

fn say(args: &SendArgs, name: &Version, manifest: &Manifest, sent: Sent) {
    let shown = snapshots::shown(name);
    if args.host.at.json && args.to.is_some() {
        let tree = manifest.tree.to_string();
        println!(
            "{}",
            json!({ "version": shown, "tree": tree, "packs": sent.packs, "bytes": sent.bytes, "chunks": sent.chunks, "new_chunks": sent.new_chunks })
        );
        return;
    }
    // Standard output may be the stream.
    eprintln!(
        "sent {shown}: {} new of {} chunks, {} in {} packs; {}",
        show_count(sent.new_chunks),
        show_count(sent.chunks),
        show_size(sent.bytes),
        show_count(sent.packs),
        manifest.tree
    );
}
