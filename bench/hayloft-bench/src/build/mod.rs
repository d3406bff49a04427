//! The workload `build`: unpacking, configuring and making a real package.

pub(crate) mod source;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Instant, SystemTime};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use serde::Serialize;

use crate::report::{Measurement, Phase, Role, Run, Unit};
use crate::target::{self, Target, WorkDir};
use crate::{Common, sys};
use source::Source;

/// Options of the workload.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,
    /// A tarball or an unpacked directory with a `configure`; without it, GNU hello from Debian's archive
    #[arg(long, value_name = "TARBALL_OR_DIR")]
    source: Option<PathBuf>,
    /// Parallel jobs of make
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..))]
    jobs: u32,
}

/// What the results say about the workload.
#[derive(Serialize)]
struct Described {
    name: &'static str,
    source: String,
    jobs: u32,
}

/// Room for the sources and what a package of ordinary size is built into.
const BYTES_NEEDED: u64 = 100_000_000;

/// In the order of [`measure`].
const PHASES: [Phase; 5] = [
    Phase { name: "unpack", unit: Unit::Seconds, role: Role::Apart },
    Phase { name: "configure", unit: Unit::Seconds, role: Role::Counted },
    Phase { name: "make", unit: Unit::Seconds, role: Role::Counted },
    Phase { name: "make again", unit: Unit::Seconds, role: Role::Apart },
    Phase { name: "delete", unit: Unit::Seconds, role: Role::Apart },
];

/// Measures every target, prints the tables and writes the results.
pub(crate) fn run(options: &Options) -> Result<()> {
    let targets = target::check(&options.common.targets, BYTES_NEEDED, 5_000)?;
    let source = Source::find(options.source.as_deref())?;
    for tool in ["tar", "make", "cc"] {
        ensure!(in_path(tool), "{tool} is not in $PATH: the workload build needs tar, make and a C compiler");
    }
    let described = Described { name: "build", source: source.name(), jobs: options.jobs };
    eprintln!("source: {}", described.source);
    let mut run = Run::new(described, PHASES.to_vec(), Some("configure + make"), targets);
    for round in 1..=options.common.repeat.rounds {
        for t in 0..run.targets.len() {
            let target = run.targets[t].clone();
            eprintln!("round {round} of {}: {}", options.common.repeat.rounds, target.name);
            let measured = measure(&target, &source, options.jobs)
                .with_context(|| format!("{}={}", target.name, target.dir.display()))?;
            run.measurements[t].push(measured);
        }
    }
    print!("{}", run.tables());
    options.common.repeat.json.as_deref().map_or(Ok(()), |path| run.write_json(path))
}

pub(crate) fn in_path(tool: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|dir| dir.join(tool).is_file())
}

/// One round on one target, in the order of the phases.
fn measure(target: &Target, source: &Source, jobs: u32) -> Result<Vec<Measurement>> {
    // What the tools print must not go to the file system under test, nor hold up the reader of the tables.
    let logs = WorkDir::create(&std::env::temp_dir(), "log")?;
    let log = logs.path().join("log");
    let work = WorkDir::create(&target.dir, "build")?;
    let step = |phase: &str, command: &mut Command| timed(phase, command.current_dir(work.path()), &log);
    let jobs = format!("-j{jobs}");
    let mut measured = vec![
        step("unpack", &mut source.unpack())?,
        step("configure", &mut Command::new("./configure"))?,
        step("make", Command::new("make").arg(&jobs))?,
    ];
    let made = objects(work.path())?;
    measured.push(step("make again", Command::new("make").arg(&jobs))?);
    check_nothing_was_rebuilt(work.path(), &made)?;
    let started = Instant::now();
    std::fs::remove_dir_all(work.path()).context("delete")?;
    measured.push(Measurement { seconds: started.elapsed().as_secs_f64(), ..Measurement::default() });
    target::settle(target)?;
    Ok(measured)
}

/// Runs one step; when it fails, shows the end of what it printed.
pub(crate) fn timed(phase: &str, command: &mut Command, log: &Path) -> Result<Measurement> {
    sys::check_interrupted()?;
    let out = File::create(log)?;
    command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
    // Messages in one language, and no refusal to configure as root (GNU tar and coreutils do).
    command.env("LC_ALL", "C").env("FORCE_UNSAFE_CONFIGURE", "1").env_remove("MAKEFLAGS");
    let started = Instant::now();
    let status = sys::wait_interruptibly(command).with_context(|| format!("{phase}: {command:?}"))?;
    let seconds = started.elapsed().as_secs_f64();
    if !status.success() {
        sys::check_interrupted()?;
        let printed = std::fs::read(log).unwrap_or_default();
        let printed = String::from_utf8_lossy(&printed);
        let lines: Vec<&str> = printed.lines().collect();
        bail!(
            "{phase} failed ({status}); it printed last:\n{}",
            lines[lines.len().saturating_sub(15)..].join("\n")
        );
    }
    Ok(Measurement { seconds, ..Measurement::default() })
}

/// The objects below `dir`, each with the time of its last change.
pub(crate) fn objects(dir: &Path) -> Result<BTreeMap<PathBuf, SystemTime>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let path = entry?.path();
        let metadata = std::fs::symlink_metadata(&path).with_context(|| path.display().to_string())?;
        if metadata.is_dir() {
            found.extend(objects(&path)?);
        } else if path.extension().is_some_and(|e| e == "o") {
            found.insert(path, metadata.modified()?);
        }
    }
    Ok(found)
}

/// On a file system with wrong modification times, or a wrong order of them, make compiles again.
pub(crate) fn check_nothing_was_rebuilt(dir: &Path, before: &BTreeMap<PathBuf, SystemTime>) -> Result<()> {
    let after = objects(dir)?;
    for (path, modified) in before {
        ensure!(
            after.get(path) == Some(modified),
            "{} was made again though nothing had changed: modification times are wrong",
            path.display()
        );
    }
    Ok(())
}
