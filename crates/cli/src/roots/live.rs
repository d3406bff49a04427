//! `hayloft root layer NAME live`: roots that run get what the newest generation of a layer has.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use hayloft_layer::{Found, LayersDir, Marks, View, inputs, plan_live, resolve_all, resolve_generation};
use hayloft_root::{RootInfo, Roots};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::exit::{self, Exit, failure};
use crate::roots::layers::{Progress, as_failure, layers_dir};
use crate::roots::module_args::LiveArgs;
use crate::roots::modules::Setting;
use crate::roots::root::{root_failure, roots};

/// How many paths that a root has changed are named.
const NAMED_MAX: usize = 10;

/// What a root has been given while it ran: `live.json` in its state folder.
#[derive(Debug, Serialize, Deserialize)]
struct Given {
    /// The layer.
    layer: String,
    /// Which generation.
    generation: u64,
}

/// Folders by what the kernel knows them as: paths lead elsewhere in time.
type Identities = Vec<(u64, u64)>;

fn identities<'p>(paths: impl IntoIterator<Item = &'p Path>) -> anyhow::Result<Identities> {
    let identity = |path: &Path| {
        let meta = fs::metadata(path).with_context(|| format!("cannot look at {}", path.display()))?;
        Ok((meta.dev(), meta.ino()))
    };
    paths.into_iter().map(identity).collect()
}

fn paths(found: &[Found]) -> Vec<PathBuf> {
    found.iter().map(|found| found.path.clone()).collect()
}

/// Runs `live` after a layer has changed, where it was asked for.
///
/// # Errors
/// When this program cannot be run.
pub(crate) fn after(
    name: &str,
    as_json: bool,
    setting: Setting<'_>,
    layers: &LayersDir,
) -> anyhow::Result<u8> {
    // A process of its own: this one has had threads, and it takes one without to go beside a root.
    let mut command = Command::new(hayloft_root::program::path());
    if let Some(file) = setting.config_file {
        command.arg("--config").arg(file);
    }
    command.args(["root", "layer", name, "live", "--layers-dir"]).arg(layers.base());
    if as_json {
        command.arg("--json");
    }
    if let Some(dir) = setting.state_dir {
        command.arg("--state-dir").arg(dir);
    }
    let status = command.status().context("cannot run this program again")?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(Exit::Failed.code()))
}

/// The layers that roots have, when the layer is to be given to them.
struct Candidates {
    /// Those below the layer, and each of its generations on them.
    all: Vec<Identities>,
    new: Vec<PathBuf>,
    generation: u64,
}

impl Candidates {
    fn of(layers: &LayersDir, name: &str, new: &[Found]) -> anyhow::Result<Candidates> {
        let generation = layers.current(name).map_err(as_failure)?;
        let mut all = Vec::new();
        for (number, info) in layers.history(name).map_err(as_failure)? {
            // What is below may be gone for an old one.
            let Ok(found) = resolve_generation(layers, name, number) else { continue };
            all.push(identities(found.iter().map(|found| found.path.as_path()))?);
            if let Some(mut recipe) = info.recipe {
                recipe.layers.clear();
                if let Ok(below) = inputs(layers, name, &recipe, None, &|_, _| {}) {
                    all.push(identities(below.iter().map(|found| found.path.as_path()))?);
                }
            }
        }
        Ok(Candidates { all, new: paths(new), generation })
    }
}

/// Runs `hayloft root layer NAME live`.
///
/// # Errors
/// When there is no such layer or root; when a root has changed what is to be changed.
pub(crate) fn run(name: &str, args: &LiveArgs, setting: Setting<'_>) -> anyhow::Result<u8> {
    let layers = layers_dir(&args.layers, setting.config);
    let roots = roots(setting.state_dir, &setting.config.run)?;
    // Nobody makes a generation of it meanwhile, nor does another one give it to roots.
    let _draft = layers.draft(name).map_err(as_failure)?;
    let new = resolve_all(name, &layers, &|_, _| {}).map_err(as_failure)?;
    let candidates = Candidates::of(&layers, name, &new)?;
    let (mut worst, mut count) = (0, 0);
    for info in chosen(&roots, args)? {
        let given = given(&roots, &info.name);
        let lower = identities(info.lower.iter().map(PathBuf::as_path));
        let is_named = !args.roots.is_empty();
        let fits = lower.is_ok_and(|lower| candidates.all.contains(&lower))
            && given.as_ref().is_none_or(|given| given.layer == name);
        if !fits {
            if is_named {
                let other = given.filter(|given| given.layer != name);
                let why = match other {
                    Some(given) => format!("has been given the layer '{}' already", given.layer),
                    None => format!("is of other layers than '{name}' and those below it"),
                };
                return Err(failure(Exit::Usage, format!("the root '{}' {why}", info.name)));
            }
            continue;
        }
        count += 1;
        let code = give(name, args, (&layers, &roots), &info, given.as_ref(), &candidates);
        let code = exit::code_of(code);
        worst = if worst == 0 { code } else { worst };
    }
    if count == 0 && !args.json {
        println!("no root runs with the layer '{name}' or those below it alone");
    }
    Ok(worst)
}

fn chosen(roots: &Roots, args: &LiveArgs) -> anyhow::Result<Vec<RootInfo>> {
    if args.roots.is_empty() {
        let mut all = roots.list().map_err(root_failure)?;
        // One that is just being made has no tree.
        all.retain(|info| info.pid != 0 && !info.lower.is_empty());
        return Ok(all);
    }
    args.roots.iter().map(|name| roots.load(name).map_err(root_failure)).collect()
}

fn given(roots: &Roots, root: &str) -> Option<Given> {
    serde_json::from_slice(&fs::read(roots.of(root).join("live.json")).ok()?).ok()
}

/// Gives the layer to one root.
fn give(
    name: &str,
    args: &LiveArgs,
    (layers, roots): (&LayersDir, &Roots),
    info: &RootInfo,
    given: Option<&Given>,
    candidates: &Candidates,
) -> anyhow::Result<u8> {
    // Held as long as it is compared with.
    let old = match given {
        Some(given) => {
            let gone = |error: hayloft_layer::LayerError| {
                let said = format!(
                    "the root '{}' has been given generation {} of the layer '{name}', and that is gone ({error}): end it, and begin again",
                    info.name, given.generation
                );
                failure(Exit::NoVolume, said)
            };
            Some(resolve_generation(layers, name, given.generation).map_err(gone)?)
        }
        None => None,
    };
    let before = old.as_deref().map_or_else(|| info.lower.clone(), paths);
    let (old_ids, new_ids) = (
        identities(before.iter().map(PathBuf::as_path))?,
        identities(candidates.new.iter().map(PathBuf::as_path))?,
    );
    let common = old_ids.iter().rev().zip(new_ids.iter().rev()).take_while(|(a, b)| a == b).count();
    let uppers = (old_ids.len() - common, new_ids.len() - common);
    let work = || exit::code_of(put(args.json, info, (&before, uppers.0), (&candidates.new, uppers.1)));
    let code = hayloft_root::beside(info, work).map_err(root_failure)?;
    if code == 0 {
        let text = serde_json::to_vec(&Given { layer: name.to_owned(), generation: candidates.generation })?;
        let folder = roots.of(&info.name);
        let fresh = folder.join("live.json.new");
        fs::write(&fresh, text)
            .and_then(|()| fs::rename(&fresh, folder.join("live.json")))
            .with_context(|| format!("cannot write in {}", folder.display()))?;
    }
    Ok(code)
}

/// Puts into a root what differs.
fn put(
    as_json: bool,
    info: &RootInfo,
    (before, before_uppers): (&[PathBuf], usize),
    (after, after_uppers): (&[PathBuf], usize),
) -> anyhow::Result<u8> {
    let marks = if info.userxattr { Marks::User } else { Marks::Trusted };
    let before = View::open(before, before_uppers, marks).map_err(as_failure)?;
    let after = View::open(after, after_uppers, marks).map_err(as_failure)?;
    let live = plan_live(&before, &after, &info.merged).map_err(as_failure)?;
    if !live.conflicts.is_empty() {
        if as_json {
            println!("{}", json!({ "root": info.name, "conflicts": live.conflicts }));
        }
        let shown: Vec<String> =
            live.conflicts.iter().take(NAMED_MAX).map(|path| path.display().to_string()).collect();
        let more = match live.conflicts.len().saturating_sub(NAMED_MAX) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        return Err(failure(
            Exit::Exists,
            format!(
                "the root '{}' stays as it is, since it has changed itself what is to be changed: {}{more}",
                info.name,
                shown.join(", ")
            ),
        ));
    }
    let progress = Progress::new();
    let say = |done: u64| progress.say(&format!("{}: {done} changes", info.name));
    let applied = live.apply(&after, &info.merged, &say);
    progress.end();
    let applied = applied.map_err(as_failure)?;
    if as_json {
        let mut value = json!(applied);
        value["root"] = json!(info.name);
        println!("{value}");
    } else {
        let hidden = match applied.hidden {
            0 => String::new(),
            some => format!(", {some} hidden by what is mounted in it"),
        };
        println!("root {}: {} written, {} removed{hidden}", info.name, applied.written, applied.removed);
    }
    Ok(0)
}
