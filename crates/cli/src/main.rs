//! The `hayloft` command: flags, configuration, wiring and output.
//!
//! A command is a module of a room: `server` (servers and their volumes), `mounts`, `roots` (build roots and layers),
//! `trial` (`hayloft try`), `farm` (tasks, agents, make). A room uses only those before it.

// First: its macros are for all.
#[macro_use]
mod output;

mod args;
mod config;
mod dial;
mod exit;
mod farm;
mod mountinfo;
mod mounts;
mod notify;
mod progress;
mod roots;
mod server;
mod signals;
mod sys;
mod transfer;
mod trial;
mod units;
mod versions;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};
use hayloft_farm::small::Environment;

use crate::args::{Cli, Verb};
use crate::config::Config;
use crate::exit::Exit;
use crate::farm::args::FarmVerb;
use crate::farm::{agent, make, slurm, status, task};
use crate::mounts::{helper, mount, sync, umount};
use crate::roots::{root, run as run_root};
use crate::server::{cert, clients, serve, stats, volume};
use crate::transfer::{merge, pull, receive, send};
use crate::versions::{commands, diff, verify};

fn main() -> ExitCode {
    let argv: Vec<OsString> = std::env::args_os().collect();
    if let Some(role) = helper::role(&argv) {
        return helper::run(role, &argv[1..]);
    }
    if argv.get(1).is_some_and(|first| first == hayloft_mount::KEEPER_ARGUMENT) {
        return hayloft_mount::keep(&argv[2..]).into();
    }
    if argv.get(1).is_some_and(|first| first == hayloft_farm::execution::SPAWNER_ARGUMENT) {
        let code = u8::from(hayloft_farm::execution::spawner().is_err());
        return code.into();
    }
    if argv.get(1).is_some_and(|first| first == hayloft_farm::relay::ARGUMENT) {
        return u8::from(hayloft_farm::relay::serve().is_err()).into();
    }
    if argv.len() > 2 && argv[1] == hayloft_farm::make::recipe::ARGUMENT {
        return hayloft_farm::make::recipe::serve(&argv[2..], Environment::of_process()).leave().into();
    }
    match Cli::try_parse_from(&argv) {
        Ok(cli) => exit::finish(output::whole(run(cli))),
        // What is not a command's own code must not look like one.
        Err(error) if error.use_stderr() && runs_a_command(&argv) => {
            let _ = error.print();
            Exit::Run.code().into()
        }
        Err(error) => error.exit(),
    }
}

/// Whether a command line that is wrong is one of those whose exit code is otherwise a command's, as far as it is understood.
fn runs_a_command(argv: &[OsString]) -> bool {
    let Ok(all) = Cli::command().ignore_errors(true).try_get_matches_from(argv) else { return false };
    match all.subcommand_name() {
        Some("run" | "task" | "make") => true,
        Some("try") => argv.iter().any(|arg| arg == "--"),
        _ => false,
    }
}

fn run(cli: Cli) -> anyhow::Result<u8> {
    let config = || {
        let config = Config::load(cli.config.as_deref())?;
        dial::decide(cli.cert.as_deref(), cli.insecure, &config);
        anyhow::Ok(config)
    };
    match cli.verb {
        Verb::Serve(args) => serve::run(args, &config()?),
        Verb::Volume(args) => volume::run(args, &config()?),
        Verb::Snapshot(args) => commands::snapshot(args, &config()?),
        Verb::Fork(args) => commands::fork(args, &config()?),
        Verb::Rollback(args) => commands::rollback(args, &config()?),
        Verb::Promote(args) => commands::promote(args, &config()?),
        Verb::Merge(args) => merge::run(&args, &config()?),
        Verb::Diff(args) => diff::run(&args, &config()?),
        Verb::Verify(args) => verify::run(&args, &config()?),
        Verb::Send(args) => send::run(&args, &config()?),
        Verb::Receive(args) => receive::run(&args, &config()?),
        Verb::Pull(args) => pull::run(&args, &config()?),
        Verb::Scrub(args) => volume::scrub(args, &config()?),
        Verb::Mount(args) => mount::run(args, &config()?),
        Verb::Umount(args) => umount::run(&args),
        Verb::Sync(args) => sync::run(&args),
        Verb::Cert(args) => config().and_then(|_| cert::run(&args, &dial::ours().credentials)),
        Verb::Stats(args) => config().and_then(|_| stats::run(&args)),
        Verb::Clients(args) => config().and_then(|_| clients::list(&args)),
        Verb::Evict(args) => config().and_then(|_| clients::evict(&args)),
        Verb::Run(args) => config()
            .and_then(|config| run_root::run(&args, &config, cli.config.as_deref()))
            .map_err(|error| exit::failure(Exit::Run, format!("{error:#}"))),
        Verb::Root(args) => root::run(args, &config()?, cli.config.as_deref()),
        Verb::Try(args) => trial::run(args),
        Verb::Task(args) => config()
            .and_then(|config| task::run(&args, &config))
            .map_err(|error| exit::failure(Exit::Run, format!("{error:#}"))),
        Verb::Make(args) => config()
            .and_then(|config| make::run(&args, &config))
            .map_err(|error| exit::failure(Exit::Run, format!("{error:#}"))),
        Verb::Farm(args) => match args.verb {
            FarmVerb::Agent(args) => agent::run(*args, &config()?, cli.config.as_deref()),
            FarmVerb::Status(args) => status::status(&args, &config()?),
            FarmVerb::Top(args) => status::top(&args, &config()?),
            FarmVerb::Slurm(args) => slurm::run(*args, &config()?),
        },
    }
}
