//! The workload `cold`: `find` and `tar` of a kernel tree that nothing has been kept of, by the programs themselves.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;

use super::content::Content;
use super::phases::Tree;
use super::shape::Plan;
use super::{hook, positive};
use crate::Common;
use crate::report::{Measurement, Phase, Role, Run, Unit, aligned, median};
use crate::target::{self, Target, WorkDir};

/// Options of the workload.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,
    /// Decides names, sizes and contents
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of files and directories, relative to a whole kernel tree
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    scale: f64,
    /// Makes a target cold: a shell command, run before each walk with $BENCH_NAME and $BENCH_DIR set
    #[arg(long, value_name = "CMD")]
    cold: String,
    /// Prints how many requests a target has sent to its server since it was made cold, or nothing: a shell command, run after
    /// each walk
    #[arg(long, value_name = "CMD")]
    requests: Option<String>,
}

/// What is walked by, in this order, each time cold.
const WALKS: [(&str, &str); 3] = [
    ("find", "exec find . -printf '%s\\n'"),
    ("tar", "tar -cf - . | cat"),
    // What a walk has brought is not brought again.
    ("find, then tar", "find . -printf '%s\\n' && tar -cf - . | cat"),
];

#[derive(Serialize)]
struct Described {
    name: &'static str,
    seed: u64,
    scale: f64,
    directories: usize,
    files: usize,
    bytes: u64,
    /// By target, then walk, then round: requests that were sent meanwhile.
    requests: Vec<Vec<Vec<u64>>>,
}

/// Measures every target, prints the tables and writes the results.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut plan = Plan::new(options.seed, options.scale);
    // The sources alone: what a host unpacks, and another one builds from.
    plan.outputs.clear();
    let (bytes, files) = (plan.source_bytes(), plan.sources.len());
    let needed = bytes + bytes / 8 + 4096 * files as u64;
    let targets = target::check(&options.common.targets, needed, (files + plan.directories.len()) as u64)?;
    let content = Content::new(options.seed);
    let described = Described {
        name: "cold",
        seed: options.seed,
        scale: options.scale,
        directories: plan.directories.len() + 1,
        files,
        bytes,
        requests: vec![vec![Vec::new(); WALKS.len()]; targets.len()],
    };
    let phases = WALKS.map(|(name, _)| Phase { name, unit: Unit::Seconds, role: Role::Counted });
    let mut run = Run::new(described, phases.to_vec(), None, targets);
    for round in 1..=options.common.repeat.rounds {
        for t in 0..run.targets.len() {
            let target = run.targets[t].clone();
            eprintln!("round {round} of {}: {}", options.common.repeat.rounds, target.name);
            let measured = measure(&target, &plan, &content, options)
                .with_context(|| format!("{}={}", target.name, target.dir.display()))?;
            for (walk, (_, requests)) in measured.iter().enumerate() {
                run.workload.requests[t][walk].extend(requests);
            }
            run.measurements[t].push(measured.into_iter().map(|(measured, _)| measured).collect());
        }
    }
    print!("{}{}", run.tables(), requests_of(&run));
    options.common.repeat.json.as_deref().map_or(Ok(()), |path| run.write_json(path))
}

/// One round on one target.
fn measure(
    target: &Target,
    plan: &Plan,
    content: &Content,
    options: &Options,
) -> Result<Vec<(Measurement, Option<u64>)>> {
    let work = WorkDir::create(&target.dir, "cold")?;
    let tree = Tree::new(work.path(), plan, content);
    tree.create().context("create")?;
    target::settle(target)?;
    let names = plan.sources.len() + plan.directories.len() + 1;
    let mut measured = Vec::new();
    for (name, command) in WALKS {
        hook(&options.cold, target).context("--cold")?;
        let walked = walk(command, work.path()).context(name)?;
        let is_right = match name {
            "tar" => walked.bytes > plan.source_bytes(),
            "find" => walked.lines == names,
            _ => walked.lines > names && walked.bytes > plan.source_bytes(),
        };
        ensure!(is_right, "{name}: {} bytes, {} lines of a tree of {names}", walked.bytes, walked.lines);
        let requests = options.requests.as_deref().map(|command| requests(command, target)).transpose()?;
        let bytes = if name == "find" { 0 } else { plan.source_bytes() };
        let files = plan.sources.len() as u64;
        let seconds = walked.seconds;
        measured.push((Measurement { seconds, own_seconds: 0.0, bytes, files }, requests.flatten()));
    }
    tree.delete().context("delete")?;
    target::settle(target)?;
    Ok(measured)
}

/// What a program has printed, and the time that it took.
struct Walked {
    seconds: f64,
    bytes: u64,
    lines: usize,
}

fn walk(command: &str, dir: &Path) -> Result<Walked> {
    let start = |dir: &Path| {
        Command::new("sh")
            .args(["-c", command])
            .current_dir(dir)
            .env("LC_ALL", "C")
            .stdout(Stdio::piped())
            .spawn()
            .context("sh")
    };
    // The programs themselves are on a disk, and are not to be cold.
    let warm = start(Path::new("/proc/self/fdinfo"))?.wait_with_output()?;
    ensure!(warm.status.success(), "{}: {command}", warm.status);
    let begun = Instant::now();
    let mut child = start(dir)?;
    let (mut bytes, mut lines) = (0, 0);
    let mut piece = vec![0; 64 << 10];
    let mut output = child.stdout.take().context("no output")?;
    loop {
        let len = output.read(&mut piece)?;
        if len == 0 {
            break;
        }
        bytes += len as u64;
        lines += piece[..len].iter().filter(|byte| **byte == b'\n').count();
    }
    let status = child.wait()?;
    ensure!(status.success(), "{status}: {command}");
    Ok(Walked { seconds: begun.elapsed().as_secs_f64(), bytes, lines })
}

fn requests(command: &str, target: &Target) -> Result<Option<u64>> {
    let printed = hook(command, target).context("--requests")?;
    let printed = printed.trim();
    (!printed.is_empty()).then(|| printed.parse().context("--requests: not a number")).transpose()
}

/// How many requests a walk has taken, for targets that say it.
fn requests_of(run: &Run<Described>) -> String {
    let mut rows = vec![vec!["requests (files for each)".to_string()]];
    rows[0].extend(WALKS.map(|(name, _)| name.to_string()));
    for (target, walks) in run.targets.iter().zip(&run.workload.requests) {
        if walks[0].is_empty() {
            continue;
        }
        let mut row = vec![target.name.clone()];
        row.extend(walks.iter().map(|rounds| {
            let requests = median(rounds.iter().map(|requests| *requests as f64).collect());
            format!("{requests:.0} ({:.0})", run.workload.files as f64 / requests.max(1.0))
        }));
        rows.push(row);
    }
    if rows.len() == 1 { String::new() } else { format!("\n{}", aligned(&rows)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_programs_print_is_counted() {
        let dir = WorkDir::create(&std::env::temp_dir(), "walk").unwrap();
        for name in ["a", "b"] {
            std::fs::write(dir.path().join(name), [b'x'; 3000]).unwrap();
        }
        let found = walk(WALKS[0].1, dir.path()).unwrap();
        assert_eq!(found.lines, 3);
        assert!(walk(WALKS[1].1, dir.path()).unwrap().bytes > 6000);
        assert!(walk("find ./gone", dir.path()).is_err());
    }
}
