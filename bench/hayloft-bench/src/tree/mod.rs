//! The workload `tree`: what unpacking, building, searching and deleting a kernel tree asks of a file system. And `cold`: what
//! walks through one cost.

pub(crate) mod cold;
mod content;
mod corpus;
mod phases;
mod shape;

use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;

use crate::report::{Measurement, Phase, Role, Run, Unit};
use crate::target::{self, Target, WorkDir};
use crate::{Common, sys};
use content::Content;
use phases::Tree;
use shape::Plan;

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
    /// Also time how long it takes, after compiling, until everything is durable (syncfs, then fsync)
    #[arg(long)]
    sync: bool,
    /// Run this shell command after compiling, outside the timing, with $BENCH_NAME and $BENCH_DIR set
    #[arg(long, value_name = "CMD")]
    after: Option<String>,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(f) if f > 0.0 && f <= 10.0 => Ok(f),
        _ => Err("expected a number above 0, at most 10".into()),
    }
}

/// What the results say about the workload.
#[derive(Serialize)]
struct Described {
    name: &'static str,
    seed: u64,
    scale: f64,
    directories: usize,
    sources: usize,
    source_bytes: u64,
    outputs: usize,
    output_bytes: u64,
    generator_bytes_per_second: f64,
}

/// Measures every target, prints the tables and writes the results.
pub(crate) fn run(options: &Options) -> Result<()> {
    let plan = Plan::new(options.seed, options.scale);
    let bytes = plan.source_bytes() + plan.output_bytes();
    let files = plan.sources.len() + plan.outputs.len();
    // Blocks, directories and file-system metadata take some more than the contents.
    let targets = target::check(
        &options.common.targets,
        bytes + bytes / 8 + 4096 * files as u64,
        (files + plan.directories.len()) as u64,
    )?;
    let content = Content::new(options.seed);
    let described = describe(options, &plan, &content);
    eprintln!(
        "{} files in {} directories, {:.0} MB; {} outputs, {:.0} MB; content made at {:.1} GB/s",
        described.sources,
        described.directories,
        described.source_bytes as f64 / 1e6,
        described.outputs,
        described.output_bytes as f64 / 1e6,
        described.generator_bytes_per_second / 1e9,
    );
    let total = if options.sync { "all but sync" } else { "all" };
    let mut run = Run::new(described, phase_list(options.sync), Some(total), targets);
    for round in 1..=options.common.repeat.rounds {
        for t in 0..run.targets.len() {
            let target = run.targets[t].clone();
            eprintln!("round {round} of {}: {}", options.common.repeat.rounds, target.name);
            let measured = measure(&target, &plan, &content, options)
                .with_context(|| format!("{}={}", target.name, target.dir.display()))?;
            run.measurements[t].push(measured);
        }
    }
    print!("{}\n{}", run.tables(), run.own_share());
    options.common.repeat.json.as_deref().map_or(Ok(()), |path| run.write_json(path))
}

fn describe(options: &Options, plan: &Plan, content: &Content) -> Described {
    Described {
        name: "tree",
        seed: options.seed,
        scale: options.scale,
        directories: plan.directories.len() + 1,
        sources: plan.sources.len(),
        source_bytes: plan.source_bytes(),
        outputs: plan.outputs.len(),
        output_bytes: plan.output_bytes(),
        generator_bytes_per_second: content.bytes_per_second(&plan.outputs),
    }
}

/// In the order of [`measure`].
fn phase_list(sync: bool) -> Vec<Phase> {
    let counted = |name, unit| Phase { name, unit, role: Role::Counted };
    let mut phases =
        vec![counted("create", Unit::MegabytesPerSecond), counted("compile", Unit::MegabytesPerSecond)];
    if sync {
        phases.push(Phase { name: "sync", unit: Unit::Seconds, role: Role::NotCompared });
    }
    phases.extend([
        counted("read", Unit::MegabytesPerSecond),
        counted("read again", Unit::MegabytesPerSecond),
        counted("stat", Unit::FilesPerSecond),
        counted("delete", Unit::Seconds),
    ]);
    phases
}

/// One round on one target.
fn measure(target: &Target, plan: &Plan, content: &Content, options: &Options) -> Result<Vec<Measurement>> {
    let work = WorkDir::create(&target.dir, "tree")?;
    let tree = Tree::new(work.path(), plan, content);
    let mut measured = vec![tree.create().context("create")?, tree.compile().context("compile")?];
    if options.sync {
        measured.push(tree.sync().context("sync")?);
    }
    if let Some(command) = &options.after {
        print!("{}", hook(command, target).context("--after")?);
    }
    // The first pass after writing still fetches what the kernel has not kept of it; the second is all warm.
    let read = tree
        .read()
        .context("read")
        .and_then(|read| Ok([read, tree.read().context("read again")?, tree.stat().context("stat")?]));
    if read.is_err() && !sys::interrupted() {
        work.keep();
    }
    measured.extend(read?);
    measured.push(tree.delete().context("delete")?);
    target::settle(target)?;
    Ok(measured)
}

/// Runs a shell command that is told of the target; gives what it prints.
fn hook(command: &str, target: &Target) -> Result<String> {
    let output = Command::new("sh")
        .args(["-c", command])
        .env("BENCH_NAME", &target.name)
        .env("BENCH_DIR", &target.dir)
        .stderr(Stdio::inherit())
        .output()
        .context("sh")?;
    ensure!(output.status.success(), "failed ({}): {command}", output.status);
    String::from_utf8(output.stdout).context("what it prints")
}
