//! Times file systems on the work of a build farm and prints ratios to a baseline.

mod build;
mod delay;
mod machine;
mod make;
mod many;
mod report;
mod rng;
mod shared;
mod sys;
mod target;
mod tree;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

use crate::target::Target;

const EXAMPLES: &str = "\
Examples:
  hayloft-bench tree tmpfs=/dev/shm ext4=/mnt/image
  hayloft-bench tree --scale 0.02 --rounds 1 tmpfs=/dev/shm          a smoke run
  hayloft-bench tree --sync --json run.json tmpfs=/dev/shm hayloft=/mnt/hayloft
  hayloft-bench cold --cold 'echo 3 >/proc/sys/vm/drop_caches' ext4=/mnt/image      as root
  hayloft-bench build --rounds 3 tmpfs=/dev/shm ext4=/mnt/image
  hayloft-bench build --source zlib_1.3.orig.tar.gz tmpfs=/dev/shm ext4=/mnt/image
  hayloft-bench shared --workers 8 tmpfs=/dev/shm hayloft=/mnt/a,/mnt/b      one volume, mounted twice
  hayloft-bench many --files 500000 --server-pid 4711 /mnt/hayloft   what each file costs the server
  hayloft-bench make --source coreutils.tar.xz ext4=/mnt/image hayloft=/mnt/a,/mnt/b    half of the recipes on each

Exit status: 0 done, 1 a file system failed or returned wrong content, 2 wrong usage, 130 interrupted.";

#[derive(Parser)]
#[command(version, about, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    workload: Workload,
}

#[derive(Subcommand)]
enum Workload {
    /// Create, compile, read, stat and delete a tree shaped like a kernel's, as compilebench does
    Tree(tree::Options),
    /// Walk through such a tree by find and by tar, of which nothing has been kept
    Cold(tree::cold::Options),
    /// Unpack, configure and make a real package
    Build(build::Options),
    /// Several mounts of one file system: create, rename, read and delete where others do so too
    Shared(shared::Options),
    /// Make a real package with recipes in turn on several mounts of one file system
    Make(make::Options),
    /// Very many small files: what each costs the server and the client
    Many(many::Options),
    /// No workload: a TCP proxy with a round-trip time, for mounts over a slow link
    Delay(delay::Options),
}

/// Options of every workload.
#[derive(Args)]
struct Repeat {
    /// How often each target is measured; the targets take turns
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Write every measurement, and the machine, to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Options of workloads that a single mount has.
#[derive(Args)]
struct Common {
    #[command(flatten)]
    repeat: Repeat,
    /// Directories to measure, each with a name for the table; the first is the baseline
    #[arg(value_name = "NAME=DIR", required = true)]
    targets: Vec<Target>,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    sys::catch_interrupts();
    let done = match &cli.workload {
        Workload::Tree(options) => tree::run(options),
        Workload::Cold(options) => tree::cold::run(options),
        Workload::Build(options) => build::run(options),
        Workload::Shared(options) => shared::run(options),
        Workload::Make(options) => make::run(options),
        Workload::Many(options) => many::run(options),
        Workload::Delay(options) => delay::run(options),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) if sys::interrupted() => {
            eprintln!("hayloft-bench: interrupted");
            ExitCode::from(130)
        }
        Err(error) => {
            eprintln!("hayloft-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
