//! What `hayloft try` is asked.

use std::path::PathBuf;

use clap::Args;

/// `hayloft try`.
#[derive(Debug, Args)]
#[command(after_help = "\
Starts a server on a temporary store, creates a volume and mounts it, and removes everything at the end, also
after Ctrl-C. Without COMMAND it fetches the source of a real program, builds and tests it there, on the local
disk and on tmpfs, step by step in turn, and prints the times. With COMMAND it runs that in a fresh volume that
holds a copy of the current folder, and exits with the command's code (125 when the trial itself failed).

Examples:
  hayloft try
  hayloft try --source ~/src/myprogram --rounds 3
  hayloft try -- make -j4
  hayloft try --keep -- sh -c './configure && make'
  hayloft try --store file:///srv/hayloft-trial")]
pub(crate) struct TryArgs {
    /// Keep the data in this store instead of a temporary one
    #[arg(long, value_name = "URL")]
    pub store: Option<String>,
    /// Build this folder's program instead of fetching one
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    pub source: Option<PathBuf>,
    /// How often to build in each place; the table shows medians
    #[arg(long, value_name = "COUNT", default_value = "1", conflicts_with = "command")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Leave the folders, the mount and the server behind, and say where they are
    #[arg(long)]
    pub keep: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
    /// Options of the mount
    #[arg(short = 'o', long = "options", value_name = "OPTIONS")]
    pub options: Vec<String>,
    /// A command to run in a fresh volume that holds a copy of the current folder
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<std::ffi::OsString>,
}
