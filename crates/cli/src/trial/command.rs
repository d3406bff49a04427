//! `hayloft try -- COMMAND`.

use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::Context;
use serde_json::json;

use super::Work;
use super::farm::Farm;
use super::report;
use super::runner::Runner;
use crate::exit::{Exit, failure};
use crate::server::stats;
use crate::trial::args::TryArgs;
use crate::units::show_duration;

/// Runs the command in a fresh volume that holds a copy of the current folder; its exit code.
pub(super) fn run(runner: &Runner, work: &Work, args: &TryArgs) -> anyhow::Result<u8> {
    let here = std::env::current_dir().context("cannot tell the current folder")?;
    if work.path().starts_with(&here) {
        return Err(failure(
            Exit::Run,
            format!("{} holds temporary files; run this in a smaller folder", here.display()),
        ));
    }
    let farm = Farm::start(runner, work.path(), args.store.as_deref(), &args.options, args.keep)?;
    eprintln!("copying {} to a fresh volume", here.display());
    let mut copy = Command::new("cp");
    copy.arg("-a").arg("--").arg(here.join(".")).arg(&farm.mount_point).stdin(Stdio::null());
    if !runner.run(&mut copy)?.success() {
        return Err(failure(Exit::Run, format!("cannot copy {}", here.display())));
    }
    let [program, rest @ ..] = args.command.as_slice() else {
        return Err(failure(Exit::Run, "no command"));
    };
    let mut command = Command::new(program);
    command.args(rest).current_dir(&farm.mount_point).env("PWD", &farm.mount_point);
    let start = Instant::now();
    let code = runner.run_in_terminal(&mut command)?;
    let elapsed = start.elapsed();
    let stats = stats::of_mount(&farm.mount_point)?;
    if args.json {
        println!("{}", json!({ "exit_code": code, "seconds": elapsed.as_secs_f64(), "stats": stats }));
    } else {
        eprintln!("\nexit code {code} after {} on the volume", show_duration(elapsed));
        eprint!("{}", report::requests(&stats));
    }
    if args.keep {
        super::compare::tell_kept(&farm, work);
    }
    farm.close()?;
    Ok(code)
}
