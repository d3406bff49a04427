//! `hayloft root history`, `root rollback`, `root prune`, `root rebuild`.

use std::path::{Path, PathBuf};

use hayloft_layer::{
    CreateOptions, LayerInfo, LayersDir, PackageDifference, Recipe, inputs, make_first, package_differences,
};
use hayloft_tree::{Difference, How};
use serde_json::{Value, json};

use crate::exit::{self, Exit, failure};
use crate::roots::compose::{Maker, Order, copy_hooks};
use crate::roots::layers::{Progress, as_failure, as_needed_for, layers_dir, with_users};
use crate::roots::live;
use crate::roots::module_args::{HistoryArgs, PruneArgs, RebuildArgs, RollbackLayerArgs};
use crate::roots::modules::{Setting, generation_json, sweep};
use crate::units::{show_count, show_size, show_utc};
use crate::versions::diff::shown;

/// What programs write anew each time, and no two makings have alike: not compared.
const BY_NATURE: [&str; 12] = [
    "var/log",
    "var/cache",
    "var/lib/rpm",
    "usr/lib/sysimage/rpm",
    "usr/lib/sysimage/libdnf5",
    "var/lib/dnf",
    "var/lib/dbus/machine-id",
    "var/lib/systemd/random-seed",
    "etc/machine-id",
    "etc/.updated",
    "var/.updated",
    "root/.ansible",
];

/// Runs `hayloft root history`.
///
/// # Errors
/// When there is no such layer.
pub(crate) fn history(args: &HistoryArgs, setting: Setting<'_>) -> anyhow::Result<u8> {
    let layers = layers_dir(&args.layers, setting.config);
    let all = layers.history(&args.name).map_err(as_failure)?;
    let current = all.last().map_or(0, |(number, _)| *number);
    if args.json {
        let all: Vec<Value> = all
            .iter()
            .map(|(number, info)| {
                let mut value = generation_json(*number, info);
                value["current"] = json!(*number == current);
                value
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(0);
    }
    println!("  {:>4}  {:23} {:>10} {:>8}  {:28} IS", "N", "MADE", "SIZE", "PACKAGES", "BY");
    for (number, info) in &all {
        let mark = if *number == current { '*' } else { ' ' };
        let why = info.why.clone().unwrap_or_else(|| format!("create {}", args.name));
        let packages = match info.recipe {
            Some(_) => info.packages.len().to_string(),
            None => "-".to_owned(),
        };
        println!(
            "{mark} {number:>4}  {:23} {:>10} {packages:>8}  {why:28} {}",
            show_utc(info.created),
            show_size(info.bytes),
            info.from
        );
    }
    Ok(0)
}

/// Runs `hayloft root rollback`.
///
/// # Errors
/// When there is no such layer or generation.
pub(crate) fn rollback(args: &RollbackLayerArgs, setting: Setting<'_>) -> anyhow::Result<u8> {
    let layers = layers_dir(&args.layers, setting.config);
    let number = layers.rollback(&args.name, args.to).map_err(as_failure)?;
    let info = layers.generation(&args.name, number).map_err(as_failure)?;
    if args.json {
        println!("{}", generation_json(number, &info));
    } else {
        let as_before = info.same_as.unwrap_or(number);
        println!(
            "generation {number} of the layer {} is what generation {as_before} is: {}",
            args.name, info.from
        );
    }
    match args.live {
        true => live::after(&args.name, args.json, setting, &layers),
        false => Ok(0),
    }
}

/// Runs `hayloft root prune`.
///
/// # Errors
/// When there is no such layer, or something cannot be removed.
pub(crate) fn prune(args: &PruneArgs, setting: Setting<'_>) -> anyhow::Result<u8> {
    let layers = layers_dir(&args.layers, setting.config);
    let work = || {
        let pruned = layers.prune(&args.name, args.keep.into()).map_err(as_failure)?;
        if args.json {
            println!("{}", serde_json::to_string(&pruned)?);
            return Ok(0);
        }
        let listed = |all: &[u64]| all.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        match pruned.removed.is_empty() {
            true => println!("nothing to prune"),
            false => println!("removed generations {}", listed(&pruned.removed)),
        }
        if !pruned.in_use.is_empty() {
            println!("in use: {}", listed(&pruned.in_use));
        }
        Ok(0)
    };
    with_users(work)
}

/// What a layer that was made again is compared with.
struct Rebuilt {
    /// Layers below that are not what they were, in words.
    inputs: Vec<String>,
    packages: Vec<PackageDifference>,
    info: LayerInfo,
    tree: PathBuf,
}

/// Runs `hayloft root rebuild`.
///
/// # Errors
/// When it cannot be made, or differs: [`Exit::Damaged`].
pub(crate) fn rebuild(args: &RebuildArgs, setting: Setting<'_>) -> anyhow::Result<u8> {
    let layers = layers_dir(&args.layers, setting.config);
    sweep(&layers)?;
    let draft = layers.draft(&args.name).map_err(as_failure)?;
    let asked = args.generation.map_or_else(|| layers.current(&args.name), Ok).map_err(as_failure)?;
    let asked_info = layers.generation(&args.name, asked).map_err(as_failure)?;
    let number = asked_info.same_as.unwrap_or(asked);
    let info = layers.generation(&args.name, number).map_err(as_failure)?;
    let old = layers.generation_tree(&args.name, number).map_err(as_failure)?;
    let rebuilt = match &info.recipe {
        Some(recipe) => {
            let folder = draft.folder(number).map_err(as_failure)?;
            again(&layers, args, setting, (number, recipe, &info), &folder)?
        }
        None => {
            let made = as_needed_for(&info.from, || {
                let progress = Progress::new();
                let say = |text: &str| progress.say(text);
                let options =
                    CreateOptions { replace: false, mirror: info.mirror.as_deref(), progress: Some(&say) };
                let made = make_first(draft.top(), &info.from, Some(info.created), &options);
                progress.end();
                made.map(|_| 0).map_err(as_failure)
            })?;
            if made != 0 {
                return Ok(made);
            }
            let made = LayerInfo::read(draft.top()).map_err(as_failure)?;
            Rebuilt { inputs: Vec::new(), packages: Vec::new(), info: made, tree: draft.top().join("tree") }
        }
    };
    let report = || report(args, asked, &info, &old, &rebuilt);
    let done = if info.recipe.is_some() { with_users(report) } else { as_needed_for(&info.from, report) };
    drop(draft);
    sweep(&layers)?;
    done
}

fn again(
    layers: &LayersDir,
    args: &RebuildArgs,
    setting: Setting<'_>,
    (number, recipe, info): (u64, &Recipe, &LayerInfo),
    folder: &Path,
) -> anyhow::Result<Rebuilt> {
    let mut changed = changed_inputs(layers, &args.name, recipe)?;
    let files = layers.generation_files(&args.name, number);
    for hook in copy_hooks(&files, recipe, folder)? {
        changed.push(format!("the hook {} is not what it was", hook.display()));
    }
    let order = Order { name: &args.name, recipe, own: None, folder, info: info.clone() };
    let maker = Maker { layers, state_dir: setting.state_dir, config_file: setting.config_file };
    let made = maker.make(&order)?;
    Ok(Rebuilt {
        inputs: changed,
        packages: package_differences(&info.packages, &made.packages),
        info: made,
        tree: folder.join("tree"),
    })
}

/// Reads the layers below, and says which are not what they were.
fn changed_inputs(layers: &LayersDir, name: &str, recipe: &Recipe) -> anyhow::Result<Vec<String>> {
    let mut changed = Vec::new();
    for input in recipe.layers.iter().chain(&recipe.on) {
        let only = Recipe { on: Some(input.clone()), ..Recipe::default() };
        let found = inputs(layers, name, &only, None, &|_, _| {}).map_err(as_failure)?;
        let Some(first) = found.first() else { continue };
        let wanted = input.tree.as_str();
        let read = || {
            let walked = hayloft_tree::walk(&first.path, &hayloft_tree::Progress::default());
            let walked = walked.map_err(|error| failure(Exit::Failed, error.to_string()))?;
            Ok(u8::from(walked.name.to_string() != wanted))
        };
        // An ordinary user's own files have other owners for his subordinate users: it was named as it was made.
        let is_same = with_users(read)? == 0 || read().is_ok_and(|differs| differs == 0);
        if !is_same {
            changed.push(format!("the layer below '{}' is not what it was ({wanted})", input.name));
        }
    }
    Ok(changed)
}

fn is_by_nature(difference: &Difference) -> bool {
    let path = Path::new(std::ffi::OsStr::new(std::str::from_utf8(&difference.path).unwrap_or_default()));
    BY_NATURE.iter().any(|folder| path.starts_with(folder))
}

fn told(how: &How) -> String {
    match how {
        How::Added => "added".to_owned(),
        How::Missing => "missing".to_owned(),
        How::Changed(words) => words.join(", "),
    }
}

fn report(
    args: &RebuildArgs,
    number: u64,
    info: &LayerInfo,
    old: &Path,
    rebuilt: &Rebuilt,
) -> anyhow::Result<u8> {
    let walk = |tree: &Path| {
        hayloft_tree::walk(tree, &hayloft_tree::Progress::default())
            .map_err(|error| failure(Exit::Failed, error.to_string()))
    };
    let (was, is) = (walk(old)?, walk(&rebuilt.tree)?);
    let all = hayloft_tree::compare(&was, &is);
    let (left_out, differences): (Vec<_>, Vec<_>) = all.into_iter().partition(is_by_nature);
    let mut changed = rebuilt.inputs.clone();
    if let Some(recorded) = info.tree.as_deref().filter(|recorded| *recorded != was.name.to_string()) {
        changed.push(format!("the layer itself is not what it was made as ({recorded})"));
    }
    let is_same = changed.is_empty() && rebuilt.packages.is_empty() && differences.is_empty();
    if args.json {
        let paths = differences.iter().map(|difference| {
            json!({ "path": String::from_utf8_lossy(&difference.path), "how": told(&difference.how) })
        });
        println!(
            "{}",
            json!({
                "name": args.name,
                "generation": number,
                "same": is_same,
                "tree": was.name.to_string(),
                "rebuilt": rebuilt.info.tree,
                "inputs": changed,
                "packages": rebuilt.packages,
                "differences": paths.collect::<Vec<_>>(),
                "not_compared": left_out.len(),
            })
        );
    } else {
        for text in &changed {
            println!("{text}");
        }
        for package in &rebuilt.packages {
            println!("package {package}");
        }
        for difference in &differences {
            println!("{}: {}", shown(&difference.path), told(&difference.how));
        }
        if !left_out.is_empty() {
            println!("{} paths not compared: logs, caches and the like", show_count(left_out.len() as u64));
        }
    }
    if is_same {
        if !args.json {
            println!("generation {number} of the layer {} came out the same: {}", args.name, was.name);
        }
        return Ok(0);
    }
    let count = differences.len() + rebuilt.packages.len() + changed.len();
    let said = match count {
        1 => "1 difference".to_owned(),
        some => format!("{} differences", show_count(some as u64)),
    };
    Ok(exit::code_of(Err(failure(
        Exit::Damaged,
        format!("generation {number} of the layer '{}' did not come out the same: {said}", args.name),
    ))))
}
