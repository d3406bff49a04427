//! `hayloft root create`, `root diff`.

use std::cell::Cell;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::time::{Duration, Instant};

use hayloft_layer::{
    Change, ChangeKind, CreateOptions, LayerError, LayerSource, LayersDir, Marks, Stack, changes, create,
};
use hayloft_root::{RootInfo, Roots};
use serde_json::json;

use crate::config::Config;
use crate::exit::{self, Exit, failure};
use crate::roots::layer_args::{LayersArgs, RootCreateArgs, RootDiffArgs};
use crate::roots::root::root_failure;
use crate::units::{show_count, show_size, show_utc};

/// Between two updates of a line of progress on a terminal.
const PROGRESS_EVERY: Duration = Duration::from_millis(100);
/// Between two lines of progress elsewhere.
const PROGRESS_LINES_EVERY: Duration = Duration::from_secs(5);

/// The folder of the layers with a name: flag or variable, file, default.
pub(crate) fn layers_dir(args: &LayersArgs, config: &Config) -> LayersDir {
    match args.dir.clone().or_else(|| config.run.layers.clone()) {
        // Roots name layers by absolute paths.
        Some(dir) => LayersDir::new(std::path::absolute(&dir).unwrap_or(dir)),
        None => LayersDir::of_this_user(),
    }
}

/// Runs `hayloft root create`.
///
/// # Errors
/// When the layer cannot be made.
pub(crate) fn run_create(args: &RootCreateArgs, config: &Config) -> anyhow::Result<u8> {
    let layers = layers_dir(&args.making.layers, config);
    let from = args.from.as_deref().unwrap_or_default();
    let source: LayerSource = from.parse().map_err(as_failure)?;
    if source.needs_users() {
        return with_users(|| make(args, from, &layers));
    }
    // A copy of a folder is the user's own: to him, who is root in his roots, everybody else's files in it belong then.
    let made = make(args, from, &layers);
    // What it has replaced may be of such a kind.
    let swept = with_users(|| layers.sweep().map(|()| 0).map_err(as_failure));
    made.and_then(|code| swept.map(|_| code))
}

/// Does `work` with the right to files of an ordinary user's subordinate users, if he has any and is not root.
///
/// # Errors
/// The work's, or when the right cannot be had.
pub(crate) fn with_users(work: impl Fn() -> anyhow::Result<u8>) -> anyhow::Result<u8> {
    let told = || exit::code_of(work());
    hayloft_root::with_subordinate_users(told).map_err(root_failure)?.map_or_else(&work, Ok)
}

/// Does `work`, which makes a layer from this source, as one who may make all that is in such a one.
///
/// # Errors
/// The work's, or when there is no such source.
pub(crate) fn as_needed_for(from: &str, work: impl Fn() -> anyhow::Result<u8>) -> anyhow::Result<u8> {
    let source: LayerSource = from.parse().map_err(as_failure)?;
    if source.needs_users() { with_users(work) } else { work() }
}

fn make(args: &RootCreateArgs, from: &str, layers: &LayersDir) -> anyhow::Result<u8> {
    let progress = Progress::new();
    let say = |text: &str| progress.say(text);
    let options = CreateOptions { replace: args.force, mirror: args.mirror.as_deref(), progress: Some(&say) };
    let made = create(layers, &args.name, from, &options);
    progress.end();
    let info = made.map_err(as_failure)?;
    let tree = layers.tree(&args.name).map_err(as_failure)?;
    if args.making.json {
        let (files, bytes) = (info.files, info.bytes);
        println!(
            "{}",
            json!({ "name": args.name, "tree": tree.to_string_lossy(), "files": files, "bytes": bytes })
        );
    } else {
        let (files, bytes) = (show_count(info.files), show_size(info.bytes));
        println!("created the layer {}: {files} files, {bytes}, in {}", args.name, tree.display());
    }
    Ok(0)
}

/// Runs `hayloft root list --layers`.
///
/// # Errors
/// When they cannot be listed.
pub(crate) fn list(layers: &LayersDir, as_json: bool) -> anyhow::Result<u8> {
    let all = layers.list().map_err(as_failure)?;
    if as_json {
        let all: Vec<_> = all
            .iter()
            .map(|(name, info)| {
                let tree = layers.tree(name).ok().map(|tree| tree.to_string_lossy().into_owned());
                json!({ "name": name, "tree": tree, "from": info.from, "created": info.created,
                    "files": info.files, "bytes": info.bytes })
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(0);
    }
    println!("{:24} {:>10} {:>10}  {:23}  FROM", "NAME", "FILES", "SIZE", "MADE");
    for (name, info) in &all {
        let (files, bytes) = (show_count(info.files), show_size(info.bytes));
        println!("{name:24} {files:>10} {bytes:>10}  {:23}  {}", show_utc(info.created), info.from);
    }
    Ok(0)
}

/// Runs `hayloft root rm --layer`.
///
/// # Errors
/// When there is no such layer, or a root uses it.
pub(crate) fn remove(layers: &LayersDir, name: &str, roots: &Roots) -> anyhow::Result<()> {
    let tree = layers.tree(name).map_err(as_failure)?;
    let users = roots.list().map_err(root_failure)?;
    if let Some(user) = users.iter().find(|root| root.layers.contains(&tree)) {
        return Err(failure(Exit::Busy, format!("the layer '{name}' is in use by the root '{}'", user.name)));
    }
    layers.remove(name).map_err(as_failure)
}

/// Runs `hayloft root diff`.
///
/// # Errors
/// When there is no such root, or it cannot be read.
pub(crate) fn run_diff(args: &RootDiffArgs, roots: &Roots) -> anyhow::Result<u8> {
    let info = roots.load(&args.name).map_err(root_failure)?;
    let found: Result<Vec<Change>, LayerError> = changes(&stack(&info)?).collect();
    let mut found = found.map_err(as_failure)?;
    found.retain(|change| args.times || !change.is_only_a_folders_time());
    found.sort_by(|a, b| a.path.cmp(&b.path));
    let mut out = BufWriter::new(io::stdout().lock());
    for change in &found {
        if args.json {
            writeln!(out, "{}", as_json(change))?;
        } else {
            writeln!(out, "{}", as_line(change))?;
        }
    }
    out.flush()?;
    Ok(0)
}

/// The layers of a root, with what it has changed on top.
///
/// # Errors
/// When they cannot be opened.
pub(crate) fn stack(info: &RootInfo) -> anyhow::Result<Stack> {
    let marks = if info.userxattr { Marks::User } else { Marks::Trusted };
    Stack::open(&info.upper, &info.lower, marks).map_err(as_failure)
}

fn as_line(change: &Change) -> String {
    let mut line = change.to_string();
    let [old, new] = change.attributes();
    let mut notes = Vec::new();
    for aspect in change.aspects.names() {
        notes.push(match (aspect, old, new) {
            ("mode", Some(old), Some(new)) => format!("mode {:04o} -> {:04o}", old.0, new.0),
            ("owner", Some(old), Some(new)) => format!("owner {}:{} -> {}:{}", old.1, old.2, new.1, new.2),
            _ => aspect.to_owned(),
        });
    }
    if !notes.is_empty() {
        line = format!("{line} ({})", notes.join(", "));
    }
    line
}

fn as_json(change: &Change) -> serde_json::Value {
    let [old, new] = change.attributes();
    let attributes = |of: Option<(u32, u32, u32)>| {
        of.map(|(mode, uid, gid)| json!({ "mode": format!("{mode:04o}"), "uid": uid, "gid": gid }))
    };
    let mut value = json!({
        "path": format!("/{}", change.path.display()),
        "kind": change.kind,
        "type": change.file_kind(),
    });
    if change.kind == ChangeKind::Changed {
        value["aspects"] = change.aspects.names().collect();
    }
    for (key, attributes) in [("old", attributes(old)), ("new", attributes(new))] {
        if let Some(attributes) = attributes {
            value[key] = attributes;
        }
    }
    value
}

/// An error of layers with the exit code it asks for.
pub(crate) fn as_failure(error: LayerError) -> anyhow::Error {
    let exit = match &error {
        LayerError::NoLayer { .. } | LayerError::Generation(_) => Exit::NoVolume,
        LayerError::Exists(_) => Exit::Exists,
        LayerError::Name(_) | LayerError::Source { .. } | LayerError::Target { .. } => Exit::Usage,
        LayerError::Catalogue { .. } | LayerError::Choice(_) => Exit::Usage,
        LayerError::InUse(_) | LayerError::Below { .. } => Exit::Busy,
        LayerError::Missing { .. } | LayerError::NeedsUsers { .. } => Exit::Missing,
        LayerError::Io { source, .. } => match source.kind() {
            io::ErrorKind::NotFound => Exit::NoVolume,
            io::ErrorKind::PermissionDenied => Exit::Denied,
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Exit::NoSpace,
            _ => Exit::Failed,
        },
        LayerError::NotChanged(_)
        | LayerError::NotALayer { .. }
        | LayerError::NotDurable { .. }
        | LayerError::Stopped
        | LayerError::Program { .. } => Exit::Failed,
    };
    failure(exit, error.to_string())
}

/// What is being done: one line that changes on a terminal, a line each otherwise.
pub(crate) struct Progress {
    terminal: bool,
    last: Cell<Instant>,
    shown: Cell<bool>,
}

impl Progress {
    pub(crate) fn new() -> Progress {
        Progress {
            terminal: io::stderr().is_terminal(),
            last: Cell::new(Instant::now()),
            shown: Cell::new(false),
        }
    }

    /// Says it, unless something was said just now or it has only begun.
    pub(crate) fn say(&self, text: &str) {
        let every = if self.terminal { PROGRESS_EVERY } else { PROGRESS_LINES_EVERY };
        if self.last.get().elapsed() < every {
            return;
        }
        self.shown.set(true);
        self.last.set(Instant::now());
        if self.terminal {
            eprint!("\r\x1b[K{text}");
            let _ = io::stderr().flush();
        } else {
            eprintln!("{text}");
        }
    }

    /// Clears the line.
    pub(crate) fn end(&self) {
        if self.terminal && self.shown.get() {
            eprint!("\r\x1b[K");
            let _ = io::stderr().flush();
        }
    }
}
