//! `hayloft run`.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use hayloft_layer::Published;
use hayloft_root::{Error, Outcome, RootInfo, Roots, Running, Spec};
use serde_json::{Value, json};

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::roots::counts::{Counts, difference, operations, warn_of_epochs};
use crate::roots::publish;
use crate::roots::publish::Destination;
use crate::roots::root::{root_failure, roots};
use crate::roots::root_args::RunArgs;
use crate::roots::spec::spec;
use crate::roots::stop;
use crate::server::serve;

/// Exit codes of a command that was not found or could not be run, as shells have them.
const NOT_FOUND: u8 = 127;
const CANNOT_RUN: u8 = 126;
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
