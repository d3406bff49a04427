//! `hayloft try`: the main job on a farm of one's own that is gone afterwards.

pub(crate) mod args;
mod command;
mod compare;
mod farm;
mod places;
mod report;
mod runner;
mod source;
mod steps;

use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::exit::{Exit, failure};
use crate::trial::args::TryArgs;
use runner::{Interrupted, Runner};

/// Runs the command.
///
/// # Errors
/// What went wrong; with a command to run always with [`Exit::Run`].
pub(crate) fn run(args: TryArgs) -> anyhow::Result<u8> {
    let runner = Runner::new()?;
    let runs_command = !args.command.is_empty();
    let outcome = Work::new(args.keep).and_then(|work| {
        if runs_command { command::run(&runner, &work, &args) } else { compare::run(&runner, &work, &args) }
    });
    let Err(error) = outcome else { return outcome };
    if let Some(Interrupted { signal }) = error.downcast_ref() {
        eprintln!("interrupted{}", if args.keep { "" } else { "; everything is removed" });
        return Ok(128 + u8::try_from(*signal).unwrap_or(0));
    }
    match runs_command {
        true => Err(failure(Exit::Run, format!("{error:#}"))),
        false => Err(error),
    }
}

/// The folder that a trial works in; removed when dropped, unless it is to be kept.
struct Work {
    folder: PathBuf,
    keep: bool,
}

impl Work {
    fn new(keep: bool) -> anyhow::Result<Work> {
        // /tmp is memory on many machines; what is named "disk" here should be one.
        let base = std::env::var_os("TMPDIR").map_or_else(|| PathBuf::from("/var/tmp"), PathBuf::from);
        let folder = tempfile::Builder::new().prefix("hayloft-try-").tempdir_in(&base);
        let folder = folder.with_context(|| format!("cannot make a folder in {}", base.display()))?;
        Ok(Work { folder: folder.keep().canonicalize()?, keep })
    }

    fn path(&self) -> &Path {
        &self.folder
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if !self.keep
            && let Err(error) = std::fs::remove_dir_all(&self.folder)
        {
            eprintln!("hayloft: cannot remove {}: {error}", self.folder.display());
        }
    }
}
