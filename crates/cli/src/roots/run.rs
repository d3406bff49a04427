//! `hayloft run`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use hayloft_layer::{LayersDir, Published};
use hayloft_root::{Bind, Error, Layer, Network, Outcome, RootInfo, Roots, Running, Spec, Spill, Task};
use serde_json::{Value, json};

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::mountinfo;
use crate::roots::layers::{Progress, as_failure, layers_dir};
use crate::roots::publish;
use crate::roots::publish::Destination;
use crate::roots::root::{root_failure, roots};
use crate::roots::root_args::{NetworkArg, OfFarmArgs, RunArgs, parse_spill};
use crate::roots::stop;
use crate::server::serve;
use crate::server::signers::Signers;
use crate::server::stats;
use crate::sys;
use crate::units::parse_size;

/// Where swap files are made when nothing says otherwise.
const DEFAULT_SPILL_DIR: &str = "/var/lib/hayloft/spill";
/// What of the host's own tree is not shown when that is the layer: other roots' files and the store.
const HOST_MASKED: [&str; 2] = ["/var/lib/hayloft", "/run/hayloft"];
/// Exit codes of a command that was not found or could not be run, as shells have them.
const NOT_FOUND: u8 = 127;
const CANNOT_RUN: u8 = 126;
/// The mask of a command in a root.
pub(crate) const UMASK: u32 = 0o022;
/// How often layers that were replaced before they were mounted are looked up again.
const REPLACED_MAX: u32 = 10;

/// Runs the command. Gives the exit code of what ran in the root.
///
/// # Errors
/// When the root could not be made: with [`Exit::Run`].
pub(crate) fn run(args: &RunArgs, config: &Config, config_file: Option<&Path>) -> anyhow::Result<u8> {
    serve::init_log("warn");
    hayloft_root::program::protect().map_err(root_failure)?;
    let report_to = args.json.as_deref().map(ReportTarget::open).transpose()?;
    let outcome = run_in_root(args, config, config_file);
    let (report, result) = match outcome {
        Ok((report, code)) => (report, Ok(code)),
        Err(error) => {
            let code = error.downcast_ref::<Error>().map_or(Exit::Run.code(), exit_code_of);
            let error = match error.downcast::<Error>() {
                Ok(error) => root_failure(error),
                Err(error) => error,
            };
            let kind = crate::exit::exit_of(&error).code();
            let report =
                json!({ "exit_code": code, "error": { "code": kind, "message": format!("{error:#}") } });
            (report, Err((error, code)))
        }
    };
    if let Some(target) = report_to {
        target.write(&report)?;
    }
    match result {
        Ok(code) => {
            args.of_farm.end_as(report["signal"].as_i64());
            Ok(code)
        }
        Err((error, code)) => {
            args.of_farm.tell(&format!("{error:#}"));
            Ok(code)
        }
    }
}

/// The exit code for a command that did not run.
pub(crate) fn exit_code_of(error: &Error) -> u8 {
    match error {
        Error::NoCommand(_) => NOT_FOUND,
        Error::CannotRun(_) => CANNOT_RUN,
        _ => Exit::Run.code(),
    }
}

fn run_in_root(args: &RunArgs, config: &Config, config_file: Option<&Path>) -> anyhow::Result<(Value, u8)> {
    let roots = roots(args.state_dir.as_deref(), &config.run)?;
    // What is wrong with it is to be known before the build, not after.
    if let Some(to) = &args.publish {
        // A root without a name gets one that begins like this.
        let unnamed = format!("run-{:x}", std::process::id());
        Destination::parse(to, args.name.as_deref().unwrap_or(&unnamed))?.check()?;
    } else if args.publication.as_layer
        || !args.publication.only.is_empty()
        || args.publication.snapshot.is_some()
    {
        let said = "--only, --as-layer and --snapshot say what is published, and how: add --publish";
        return Err(failure(Exit::Usage, said));
    }
    let (spec, before, mut running) = start(args, config, &roots)?;
    // Until the command has ended signals are its own. What is published from a process of its own ends with this one.
    if !args.with_owners {
        stop::on_signals()?;
    }
    let outcome = running.wait()?;
    let (collected, mut problem) = collect(args, running.info().merged.as_path(), outcome.end.exit_code == 0);
    let mut published = None;
    if let Some(to) = args.publish.as_ref().filter(|_| outcome.end.exit_code == 0 && !stop::is_asked()) {
        match publish_to(to, args, running.info(), config_file) {
            Ok(done) => published = Some(done),
            Err(error) => problem = problem.or(Some(error)),
        }
    }
    if outcome.out_of_memory_kills > 0 {
        eprintln!(
            "hayloft: the root's memory was used up: {} of its processes were killed; --memory gives it more",
            outcome.out_of_memory_kills
        );
    }
    if outcome.processes_refused > 0 {
        eprintln!(
            "hayloft: the root had all the {} processes and threads that it may have, and more were refused {}; --processes allows more",
            running.info().processes.unwrap_or_default(),
            match outcome.processes_refused {
                1 => "once".to_owned(),
                times => format!("{times} times"),
            }
        );
    }
    let name = running.info().name.clone();
    // A root that was killed because it did not end has nothing left to look at.
    let kept = match args.keep {
        true => running.keep().map(|_| true),
        false => running.end().map(|()| false),
    };
    let kept = kept.unwrap_or_else(|error| {
        eprintln!("hayloft: {:#}", root_failure(error));
        false
    });
    if kept {
        eprintln!("hayloft: the root is kept as {name}: hayloft root enter {name}, hayloft root rm {name}");
    }
    let mut report = report(&name, &outcome);
    report["kept"] = json!(kept);
    let collected: Vec<_> = collected.iter().map(|path| path.to_string_lossy()).collect();
    report["collected"] = json!(collected);
    report["published"] = json!(published);
    let after = operations(&spec);
    warn_of_epochs(&before, &after);
    report["operations"] = json!(difference(&before, &after));
    let mut code = exit_code(&outcome);
    if let Some(error) = problem {
        eprintln!("hayloft: {error:#}");
        report["error"] = json!({ "code": Exit::Failed.code(), "message": format!("{error:#}") });
        let failed = stop::signal().and_then(|signal| u8::try_from(128 + signal).ok());
        code = if code == 0 { failed.unwrap_or(Exit::Run.code()) } else { code };
    }
    Ok((report, code))
}

/// Makes the root and starts the command.
fn start(
    args: &RunArgs,
    config: &Config,
    roots: &Roots,
) -> anyhow::Result<(Spec, BTreeMap<PathBuf, Counts>, Running)> {
    let mut replaced = 0;
    loop {
        let spec = spec(args, config, roots)?;
        let before = operations(&spec);
        match hayloft_root::start(roots, &spec) {
            Err(Error::Replaced(_)) if replaced < REPLACED_MAX => replaced += 1,
            started => return Ok((spec, before, started?)),
        }
    }
}

fn publish_to(
    to: &str,
    args: &RunArgs,
    info: &RootInfo,
    config_file: Option<&Path>,
) -> anyhow::Result<Published> {
    let destination = Destination::parse(to, &info.name)?;
    if args.with_owners {
        let publish = || publish::publish_root(info, &destination, &args.publication, config_file).map(|_| 0);
        return match hayloft_root::beside(info, || crate::exit::code_of(publish()))? {
            0 => Ok(Published::default()),
            _ => Err(failure(Exit::Failed, "the new layer was not written")),
        };
    }
    let published = publish::publish_root(info, &destination, &args.publication, config_file)?;
    eprintln!("hayloft: {}", publish::summary(&published, &destination));
    Ok(published)
}

fn exit_code(outcome: &Outcome) -> u8 {
    u8::try_from(outcome.end.exit_code).unwrap_or(u8::MAX)
}

fn report(name: &str, outcome: &Outcome) -> Value {
    let ms = |duration: Duration| (duration.as_secs_f64() * 1e6).round() / 1e3;
    json!({
        "root": name,
        "exit_code": outcome.end.exit_code,
        "signal": outcome.end.signal,
        "start_ms": ms(outcome.start),
        "wall_ms": ms(outcome.wall),
        "cpu_user_ms": outcome.end.cpu_user_us as f64 / 1e3,
        "cpu_system_ms": outcome.end.cpu_system_us as f64 / 1e3,
        "memory_peak_bytes": outcome.memory_peak,
        "spilled_bytes": outcome.spilled,
        "major_faults": outcome.end.major_faults,
        "out_of_memory_kills": outcome.out_of_memory_kills,
        "processes_refused": outcome.processes_refused,
    })
}

/// Where the report goes: opened before the command runs, so that what is wrong with it is known before.
enum ReportTarget<'a> {
    Stdout,
    File(&'a Path, File),
}

impl ReportTarget<'_> {
    fn open(target: &Path) -> anyhow::Result<ReportTarget<'_>> {
        if target.as_os_str() == "-" {
            return Ok(ReportTarget::Stdout);
        }
        let file = File::options().write(true).create(true).truncate(false).open(target);
        file.map(|file| ReportTarget::File(target, file))
            .map_err(|error| failure(Exit::Run, format!("cannot write {}: {error}", target.display())))
    }

    fn write(self, report: &Value) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(report)? + "\n";
        match self {
            ReportTarget::Stdout => Ok(std::io::stdout().write_all(text.as_bytes())?),
            ReportTarget::File(target, mut file) => {
                // What was there before may be longer; a pipe has no length.
                let _ = file.set_len(0);
                file.write_all(text.as_bytes()).with_context(|| format!("cannot write {}", target.display()))
            }
        }
    }
}

/// Copies out what was asked for. After a failed command what is not there is no error: it may not have come to it.
fn collect(args: &RunArgs, merged: &Path, succeeded: bool) -> (Vec<PathBuf>, Option<anyhow::Error>) {
    let (mut copies, mut problem) = (Vec::new(), None);
    for pattern in &args.collect {
        match hayloft_root::collect(merged, pattern, &args.output, &stop::is_asked) {
            Err(_) if stop::is_asked() => {
                problem = problem.or_else(|| Some(stop::stopped("while collecting")))
            }
            Ok(paths) => copies.extend(paths),
            Err(Error::NotFound(_)) if !succeeded => (),
            Err(error) => problem = problem.or(Some(root_failure(error))),
        }
    }
    (copies, problem)
}

fn spec(args: &RunArgs, config: &Config, roots: &Roots) -> anyhow::Result<Spec> {
    let layers_dir = layers_dir(&args.layers_dir, config);
    let config = &config.run;
    let usage = |error: String| failure(Exit::Usage, error);
    let setting = |text: &Option<String>| text.as_deref().map(parse_size).transpose().map_err(usage);
    let spill = match (args.spill, &config.spill) {
        (Some(spill), _) => spill,
        (None, Some(text)) => parse_spill(text).map_err(usage)?,
        (None, None) => Spill::None,
    };
    let mut folders = Vec::from_iter(args.chdir.clone());
    let (mut layers, mut in_use) = (Vec::new(), Vec::new());
    for layer in &args.layers {
        for (layer, locks) in resolve(layer, &layers_dir)? {
            layers.push(layer);
            in_use.extend(locks.into_iter().map(Arc::new));
        }
    }
    let spill_dir =
        args.spill_dir.clone().or(config.spill_dir.clone()).unwrap_or_else(|| DEFAULT_SPILL_DIR.into());
    let spill_dir = std::path::absolute(spill_dir)?;
    if layers.is_empty() {
        layers.push(Layer::Folder { path: "/".into(), identity: None });
        if folders.is_empty() {
            folders.extend(std::env::current_dir());
        }
    }
    if let Some(keys) = &config.trusted_keys {
        let signers = Signers::read(keys)?;
        for layer in &layers {
            signers.require_below(layer.path())?;
        }
    }
    let mut binds = args.binds.clone();
    if matches!(args.network, NetworkArg::Host) {
        binds.splice(0..0, name_service(&layers));
    }
    // What is to be covered must be there before. What is wrong with the second is said later.
    roots.create()?;
    if matches!(spill, Spill::File(_)) && sys::is_root() {
        let _ = std::fs::create_dir_all(&spill_dir);
    }
    let mut hidden = Vec::from(HOST_MASKED.map(PathBuf::from));
    hidden.extend([roots.folder().to_owned(), layers_dir.base().to_owned(), spill_dir.clone()]);
    let masked = masked(&layers, &hidden);
    // Without layers of its own it runs where it was called, or not at all.
    if args.chdir.is_none() && !args.layers.is_empty() {
        folders.push("/".into());
    }
    Ok(Spec {
        name: args.name.clone(),
        layers,
        in_use,
        binds,
        scratch: args.scratch.clone(),
        masked,
        memory: args.memory.or(setting(&config.memory)?),
        spill,
        spill_dir,
        tmp: args.tmp,
        require_free: args.require_free.or(setting(&config.require_free)?),
        mode: args.mode,
        keep: args.keep,
        network: match args.network {
            NetworkArg::None => Network::None,
            NetworkArg::Host => Network::Host,
        },
        cpus: args.cpus,
        processes: args.processes.or(config.processes),
        fsync: args.fsync,
        task: Task {
            command: args.command.clone(),
            user: args.user.clone(),
            folders,
            env: environment(&args.env, &args.of_farm),
            new_privileges: args.setuid,
            umask: args.of_farm.umask.unwrap_or(UMASK),
            ends_all: false,
        },
    })
}

/// Where folders of the host that no root is to see are in a root of these layers.
fn masked(layers: &[Layer], hidden: &[PathBuf]) -> Vec<PathBuf> {
    let folders = layers.iter().filter_map(|layer| match layer {
        Layer::Folder { path, .. } => path.canonicalize().ok(),
        Layer::Image(_) => None,
    });
    let hidden: Vec<PathBuf> =
        hidden.iter().filter(|path| path.is_dir()).filter_map(|path| path.canonicalize().ok()).collect();
    let mut masked = Vec::new();
    for folder in folders {
        let inside = hidden.iter().filter_map(|path| path.strip_prefix(&folder).ok());
        // A layer that is one of them was asked for.
        masked.extend(inside.filter(|path| path.file_name().is_some()).map(|path| Path::new("/").join(path)));
    }
    masked.sort();
    masked.dedup();
    masked
}

/// With the host's network its way to resolve names, unless a layer has a link there: that leads to what
/// a service in the root would have to fill.
fn name_service(layers: &[Layer]) -> Option<Bind> {
    let file = Path::new("/etc/resolv.conf");
    let linked = layers.iter().any(|layer| match layer {
        Layer::Folder { path, .. } => path.join("etc/resolv.conf").is_symlink(),
        Layer::Image(_) => true,
    });
    (file.is_file() && !linked).then(|| Bind { source: file.into(), target: file.into(), writable: false })
}

/// The layers that a text names, topmost first: the name of one that may be upon others, or the path of a folder, an archive or an
/// image; each with what is locked as long as it is used.
fn resolve(text: &str, layers: &LayersDir) -> anyhow::Result<Vec<(Layer, Vec<File>)>> {
    let progress = Progress::new();
    let unpacking = |done: u64, all: u64| {
        progress.say(&format!("unpacking {text}: {} %", (done * 100).checked_div(all).unwrap_or(100)));
    };
    let found = hayloft_layer::resolve_all(text, layers, &unpacking);
    progress.end();
    let as_layer = |found: hayloft_layer::Found| {
        let hayloft_layer::Found { path, in_use, identity } = found;
        (if path.is_dir() { Layer::Folder { path, identity } } else { Layer::Image(path) }, in_use)
    };
    Ok(found.map_err(as_failure)?.into_iter().map(as_layer).collect())
}

/// The variables of `--env`, after a few that programs expect.
pub(crate) fn environment(given: &[OsString], of_farm: &OfFarmArgs) -> Vec<(OsString, OsString)> {
    if let Some(prefix) = &of_farm.env_prefix {
        let own = |name: OsString| {
            Some(OsString::from_vec(name.as_bytes().strip_prefix(prefix.as_bytes())?.to_vec()))
        };
        return std::env::vars_os().filter_map(|(name, value)| Some((own(name)?, value))).collect();
    }
    let mut env: Vec<(OsString, OsString)> = vec![("LANG".into(), "C.UTF-8".into())];
    env.extend(std::env::var_os("TERM").map(|term| ("TERM".into(), term)));
    for variable in given {
        match variable.as_bytes().iter().position(|byte| *byte == b'=') {
            Some(at) => {
                let (key, value) = variable.as_bytes().split_at(at);
                env.push((OsString::from_vec(key.to_vec()), OsString::from_vec(value[1..].to_vec())));
            }
            None => env.extend(std::env::var_os(variable).map(|value| (variable.clone(), value))),
        }
    }
    env
}

/// What the process of a mount has counted so far.
#[derive(Clone, Copy, Default)]
struct Counts {
    /// Requests that it has answered, and that the server has.
    fuse: u64,
    server: u64,
    epochs: u64,
    /// A layer is on it.
    has_layer: bool,
}

/// For each Hayloft mount that is seen in the root: what it has counted.
fn operations(spec: &Spec) -> BTreeMap<PathBuf, Counts> {
    let Ok(mounts) = mountinfo::all() else { return BTreeMap::new() };
    // An image is mounted itself: the overlay does not look at the mount that it is on.
    let layers = spec.layers.iter().map(|layer| (layer.path(), matches!(layer, Layer::Folder { .. })));
    let paths = layers.chain(spec.binds.iter().map(|bind| (&*bind.source, false)));
    let on = |path: &Path| {
        let path = path.canonicalize().ok()?;
        let deepest = mounts.iter().filter(|mount| path.starts_with(&mount.mount_point));
        deepest.max_by_key(|mount| mount.mount_point.as_os_str().len()).filter(|mount| mount.is_ours())
    };
    let mut found: BTreeMap<PathBuf, Counts> = BTreeMap::new();
    for (path, is_layer) in paths {
        let Some(mount) = on(path) else { continue };
        if let Some(counts) = found.get_mut(&mount.mount_point) {
            counts.has_layer |= is_layer;
        } else if let Ok(stats) = stats::of_mount(&mount.mount_point) {
            let of = |key| stats::number(&stats, key).unwrap_or(0);
            let counts = Counts {
                fuse: of("fuse.requests.total"),
                server: of("server.requests.total"),
                epochs: of("server.epochs"),
                has_layer: is_layer,
            };
            found.insert(mount.mount_point.clone(), counts);
        }
    }
    found
}

fn difference(
    before: &BTreeMap<PathBuf, Counts>,
    after: &BTreeMap<PathBuf, Counts>,
) -> BTreeMap<String, Value> {
    let changes = after.iter().map(|(mount, now)| {
        let then = before.get(mount).copied().unwrap_or_default();
        let change = json!({
            "fuse": now.fuse.saturating_sub(then.fuse),
            "server": now.server.saturating_sub(then.server),
        });
        (mount.display().to_string(), change)
    });
    changes.collect()
}

/// Says under which layers all names were dropped meanwhile, which overlayfs takes for a change of the layer.
fn warn_of_epochs(before: &BTreeMap<PathBuf, Counts>, after: &BTreeMap<PathBuf, Counts>) {
    for (mount, now) in after {
        let then = before.get(mount).copied().unwrap_or_default();
        if now.has_layer && now.epochs > then.epochs {
            eprintln!(
                "hayloft: hosts changed the same folders of the volume at {} while the command ran: it may have got \"Stale \
                 file handle\"; mount the volume once more with -o ro, and take the layers from there",
                mount.display()
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_split_at_the_first_sign() {
        let given = ["A=b=c".into(), "EMPTY=".into(), "HAYLOFT_TEST_NOT_THERE".into()];
        let env = environment(&given, &OfFarmArgs::default());
        assert!(env.contains(&("A".into(), "b=c".into())) && env.contains(&("EMPTY".into(), "".into())));
        assert!(!env.iter().any(|(key, _)| key == "HAYLOFT_TEST_NOT_THERE"));
    }

    #[test]
    fn what_no_root_sees_is_found_in_each_layer() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(top.join("real/swap")).unwrap();
        std::os::unix::fs::symlink("real", top.join("link")).unwrap();
        let hidden = [top.join("link/swap"), top.join("none")];
        let of = |layers: &[&Path]| {
            let layers: Vec<Layer> = layers
                .iter()
                .map(|path| Layer::Folder { path: path.to_path_buf(), identity: None })
                .collect();
            masked(&layers, &hidden)
        };
        assert_eq!(of(&[Path::new("/")]), [top.join("real/swap")]);
        assert_eq!(of(&[&top, Path::new("/.")]), [Path::new("/real/swap"), &top.join("real/swap")]);
        assert_eq!(of(&[&top.join("link")]), [Path::new("/swap")]);
        assert!(of(&[&top.join("real/swap"), Path::new("/usr")]).is_empty());
    }

    #[test]
    fn a_layer_is_a_name_before_it_is_a_path() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("bookworm/tree")).unwrap();
        let layers = LayersDir::new(dir.path());
        let first = |text: &str| resolve(text, &layers).unwrap().remove(0).0.path().to_owned();
        assert_eq!(first("bookworm"), dir.path().join("bookworm/tree"));
        assert_eq!(first("/usr"), Path::new("/usr"));
        for none in ["none", "./none"] {
            assert_eq!(crate::exit::exit_of(&resolve(none, &layers).unwrap_err()), Exit::NoVolume);
        }
    }
}
