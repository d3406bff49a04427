//! `hayloft verify`.

use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;

use hayloft_tree::{How, Progress, TreeName, Walked};
use hayloft_wire::{Named, Version};
use serde_json::json;

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::progress;
use crate::server::admin::Admin;
use crate::server::signers::Signers;
use crate::server::snapshots::parse_version;
use crate::units::{show_count, show_size};
use crate::versions::args::{VerifyArgs, is_folder};
use crate::versions::commands;
use crate::versions::diff::shown;
use crate::versions::mounted::Mounted;

/// What is verified.
enum What<'a> {
    Folder(&'a Path),
    Version(Version),
}

/// What it has to be.
enum Against {
    Name(TreeName),
    Version(Version),
}

fn what(text: &str) -> anyhow::Result<What<'_>> {
    if is_folder(text) {
        return Ok(What::Folder(Path::new(text)));
    }
    let wrong = |said: String| failure(Exit::Usage, format!("'{text}' is no folder and no version: {said}"));
    parse_version(text).map(What::Version).map_err(wrong)
}

fn against(text: &str) -> anyhow::Result<Against> {
    if text.starts_with("tree1-") {
        return text.parse().map(Against::Name).map_err(|said: &str| failure(Exit::Usage, said));
    }
    let wrong = |said: String| failure(Exit::Usage, format!("--against '{text}': {said}"));
    parse_version(text).map(Against::Version).map_err(wrong)
}

fn ask(server: &str, of: &Version, anew: bool) -> anyhow::Result<Named> {
    commands::name_tree(&mut Admin::connect(server)?, of, anew)
}

/// Reads a folder; on a terminal it is seen how far that has come.
fn read(folder: &Path) -> anyhow::Result<Walked> {
    let progress = Progress::default();
    let text = || {
        let (entries, bytes) = (progress.entries.load(Relaxed), progress.bytes.load(Relaxed));
        format!("{} files, {} read", show_count(entries), show_size(bytes))
    };
    let walked = progress::shown(text, || hayloft_tree::walk(folder, &progress));
    walked.map_err(|error| failure(Exit::Failed, error.to_string()))
}

/// Runs the command.
///
/// # Errors
/// What is not as it should be ([`Exit::Damaged`]); what cannot be read; what the server refuses.
pub(crate) fn run(args: &VerifyArgs, config: &Config) -> anyhow::Result<u8> {
    let server = args.at.server(config);
    let what = what(&args.what)?;
    let wanted = args.against.as_deref().map(against).transpose()?;
    let signers = args.signers.as_deref().map(Signers::read).transpose()?;
    let mut signed_by = None;
    // What was given first, and what the server finds now.
    let mut names: Vec<(String, TreeName)> = Vec::new();
    let (mut walked, mut rows_read) = (None, None);
    match &what {
        What::Folder(folder) => {
            if signers.is_some() {
                let said =
                    "only snapshots are signed: verify the folder --against one, and that one with --signers";
                return Err(failure(Exit::Usage, said));
            }
            walked = Some(read(folder)?);
        }
        What::Version(version) => {
            let named = ask(server, version, true)?;
            rows_read = Some(named.rows_read);
            names.push(("by the server".to_owned(), commands::parse_tree(&named.tree)?));
            if let Some(info) = &named.snapshot {
                names.push(("as it was named first".to_owned(), commands::parse_tree(&info.tree)?));
            }
            if let Some(signers) = &signers {
                let none = || failure(Exit::Usage, "only snapshots are signed: write VOLUME@NAME");
                let info = named.snapshot.as_ref().ok_or_else(none)?;
                signed_by = Some(signers.require(info)?.to_owned());
            }
            if args.deep {
                let mounted = Mounted::new(server, version)?;
                walked = Some(read(mounted.path())?);
            }
        }
    }
    if let Some(walked) = &walked {
        names.push(("as it is read here".to_owned(), walked.name));
    }
    match &wanted {
        Some(Against::Name(name)) => names.push(("what it has to be".to_owned(), *name)),
        Some(Against::Version(version)) => {
            names.push((
                args.against.clone().unwrap_or_default(),
                commands::parse_tree(&ask(server, version, false)?.tree)?,
            ));
        }
        None => {}
    }
    let found = walked.as_ref().map_or(names[0].1, |walked| walked.name);
    let is_same = names.iter().all(|(_, name)| *name == found);
    let mut differences = Vec::new();
    if let (false, Some(walked), Some(Against::Version(version))) = (is_same, &walked, &wanted) {
        let mounted = Mounted::new(server, version)?;
        differences = hayloft_tree::compare(&read(mounted.path())?, walked);
    }
    let told = |how: &How| match how {
        How::Added => "added".to_owned(),
        How::Missing => "missing".to_owned(),
        How::Changed(words) => words.join(", "),
    };
    if args.at.json {
        let list = differences.iter().map(|difference| {
            json!({ "path": String::from_utf8_lossy(&difference.path), "how": told(&difference.how) })
        });
        let names = names.iter().map(|(whose, name)| json!({ "name": name.to_string(), "whose": whose }));
        println!(
            "{}",
            json!({
                "tree": found.to_string(),
                "same": is_same,
                "names": names.collect::<Vec<_>>(),
                "signed_by": signed_by,
                "rows_read": rows_read,
                "differences": list.collect::<Vec<_>>(),
            })
        );
    } else if is_same {
        println!("{found}");
        if let Some(who) = signed_by {
            println!("signed by {who}");
        }
    } else {
        for (whose, name) in &names {
            println!("{name}  {whose}");
        }
        for difference in &differences {
            println!("{}: {}", shown(&difference.path), told(&difference.how));
        }
    }
    if is_same {
        return Ok(0);
    }
    let count = match differences.len() {
        0 => "its names by content differ".to_owned(),
        1 => "1 path differs".to_owned(),
        some => format!("{} paths differ", show_count(some as u64)),
    };
    Err(failure(Exit::Damaged, format!("{} is not what it should be: {count}", args.what)))
}
