//! The command line of layers that are put together: modules, packages, generations.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use hayloft_layer::{Choice, Package, Word};

use crate::roots::layer_args::LayersArgs;

/// How a layer is put together.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct MakingArgs {
    /// Catalogue of modules: a folder of MODULE.toml files, the top of a mounted volume that has one in `modules`, or
    /// HOST:PORT/VOLUME of one that is mounted here
    #[arg(long = "modules", value_name = "DIR|VOLUME", env = "HAYLOFT_MODULES")]
    pub catalogue: Option<String>,
    /// Show a folder of this host in the layer while it is made, at the same place: for packages that its sources name by
    /// file: addresses; may be given several times
    #[arg(long = "repository", value_name = "DIR")]
    pub repositories: Vec<PathBuf>,
    /// Where layers are.
    #[command(flatten)]
    pub layers: LayersArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `hayloft root layer`.
#[derive(Debug, Args)]
#[command(subcommand_required = true, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
A layer on another one that stays as it is: what packages add to that. It is made anew each time, upon the same layer below; the old
generation stays (hayloft root history, rollback). Packages come from where the layer below has them from, with this host's network.

Examples:
  hayloft root layer tools --on bookworm install gdb strace     makes the layer tools
  hayloft root layer tools install valgrind --live              and roots that use it see it at once
  hayloft root layer tools remove strace
  hayloft root layer tools live                                 roots that began with an older generation get this one
  hayloft run --root tools -- gdb --version                     upon bookworm, without naming that")]
pub(crate) struct LayerCommandArgs {
    /// The layer
    pub name: String,
    /// The layer below: a name, a folder or an archive; again for one that exists: what that is by now
    #[arg(long, value_name = "LAYER")]
    pub on: Option<String>,
    /// What to do with it.
    #[command(subcommand)]
    pub verb: LayerVerb,
}

/// The verbs of `hayloft root layer`.
#[derive(Debug, Subcommand)]
pub(crate) enum LayerVerb {
    /// Install packages, by the package manager of the layer below
    #[command(after_help = "\
Examples:
  hayloft root layer tools --on bookworm install gdb
  hayloft root layer tools install valgrind --live
  hayloft root layer tools install                  makes it anew, with what the archive has now")]
    Install(PackageArgs),
    /// Take back packages that were installed, or remove those of the layer below
    #[command(after_help = "\
Examples:
  hayloft root layer tools remove strace")]
    Remove(PackageArgs),
    /// Let roots that run with an older generation, or with the layers below, see what this one has
    #[command(after_help = "\
Each file appears at once, whole; not all of them in one moment. Where a root has changed one itself nothing is done to that root, and
the paths are named (exit code 9). docs/modules.md says more.

Examples:
  hayloft root layer tools live
  hayloft root layer tools live build7 --json")]
    Live(LiveArgs),
}

/// Packages to install or remove.
#[derive(Debug, Args)]
pub(crate) struct PackageArgs {
    /// The packages
    #[arg(value_name = "PACKAGE", value_parser = parse::<Package>)]
    pub packages: Vec<Package>,
    /// Let roots that run see it at once
    #[arg(long)]
    pub live: bool,
    /// How.
    #[command(flatten)]
    pub making: MakingArgs,
}

/// `hayloft root layer NAME live`.
#[derive(Debug, Args)]
pub(crate) struct LiveArgs {
    /// The roots [default: all that use the layer or those below it, and no others]
    #[arg(value_name = "ROOT")]
    pub roots: Vec<String>,
    /// Where layers are.
    #[command(flatten)]
    pub layers: LayersArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `hayloft root switch`.
#[derive(Debug, Args)]
#[command(after_help = "\
Makes a new generation with other streams: one of each module. A module that the layer has not yet is added.

Examples:
  hayloft root switch base gcc:13
  hayloft root switch base gcc:13/full,python:3.12 --live
  hayloft root switch base --off python
  hayloft root rollback base                  and back again")]
pub(crate) struct SwitchArgs {
    /// The layer
    pub name: String,
    /// Streams with profiles, as gcc:13/full
    #[arg(value_name = "CHOICE", value_delimiter = ',', value_parser = parse::<Choice>, required_unless_present = "off")]
    pub choices: Vec<Choice>,
    /// Take a module away; may be given several times
    #[arg(long, value_name = "MODULE", value_delimiter = ',', value_parser = parse::<Word>)]
    pub off: Vec<Word>,
    /// Let roots that run see it at once
    #[arg(long)]
    pub live: bool,
    /// How.
    #[command(flatten)]
    pub making: MakingArgs,
}

/// `hayloft root history`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hayloft root history base
  hayloft root history base --json | jq '.[-1].recipe'")]
pub(crate) struct HistoryArgs {
    /// The layer
    pub name: String,
    /// Where layers are.
    #[command(flatten)]
    pub layers: LayersArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `hayloft root rollback`.
#[derive(Debug, Args)]
#[command(after_help = "\
Going back is a new generation, too, so it can be undone in the same way. Roots that run keep what they have, without --live.

Examples:
  hayloft root rollback base
  hayloft root rollback base --to 2")]
pub(crate) struct RollbackLayerArgs {
    /// The layer
    pub name: String,
    /// The generation to go back to [default: the one before]
    #[arg(long, value_name = "N")]
    pub to: Option<u64>,
    /// Let roots that run see it at once
    #[arg(long)]
    pub live: bool,
    /// Where layers are.
    #[command(flatten)]
    pub layers: LayersArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `hayloft root prune`.
#[derive(Debug, Args)]
#[command(after_help = "\
What a root uses stays, and what another layer is made upon.

Examples:
  hayloft root prune base
  hayloft root prune base --keep 5")]
pub(crate) struct PruneArgs {
    /// The layer
    pub name: String,
    /// How many generations stay, the newest ones
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    pub keep: u16,
    /// Where layers are.
    #[command(flatten)]
    pub layers: LayersArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `hayloft root rebuild`.
#[derive(Debug, Args)]
#[command(after_help = "\
Makes the layer again by its recipe, beside it, and says what differs: inputs, versions of packages, files. The layer stays as it is.
Exit code 0 if it came out the same, 10 if not. Logs, caches and the database of rpm differ each time and are not compared.

Examples:
  hayloft root rebuild base
  hayloft root rebuild base --generation 1 --json")]
pub(crate) struct RebuildArgs {
    /// The layer
    pub name: String,
    /// The generation [default: the newest]
    #[arg(long, value_name = "N")]
    pub generation: Option<u64>,
    /// Where layers are.
    #[command(flatten)]
    pub layers: LayersArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// Reads a word, for clap.
pub(crate) fn parse<T: std::str::FromStr<Err = String>>(text: &str) -> Result<T, String> {
    text.parse()
}
