//! The command line of what has to do with layers.

use std::path::PathBuf;

use clap::Args;
use hayloft_layer::Choice;

use crate::roots::module_args::{MakingArgs, parse};

/// Where layers with a name are.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct LayersArgs {
    /// Folder of the layers that have a name [default: /var/lib/hayloft/layers for root, else ~/.local/share/hayloft/layers]
    #[arg(long = "layers-dir", value_name = "DIR", env = "HAYLOFT_LAYERS")]
    pub dir: Option<PathBuf>,
}

/// `hayloft root create`.
#[derive(Debug, Args)]
#[command(after_help = "\
What a layer is made from:
  debian:SUITE[,PACKAGE...]      a Debian release with these packages, from where this machine's apt gets
                                 its own (needs mmdebstrap or debootstrap)
  tar:FILE                       a tar archive (plain, gzip, zstd, xz or bzip2)
  dir:PATH                       a copy of a folder
  rpm:REPOSITORY,PACKAGE...      RPM packages; REPOSITORY is a URL or the path of a .repo file (needs dnf)

Examples:
  hayloft root create bookworm --from debian:bookworm,build-essential
  hayloft root create sdk --from tar:/srv/sdk-4.2.tar.zst
  hayloft root create sdk --from dir:/opt/sdk --force
  hayloft root create base --from debian:bookworm --enable gcc:12/full,python:3.11 --modules /mnt/builds
  hayloft root create base13 --on bookworm --enable gcc:13 --modules /mnt/builds
  hayloft root create fedora --from rpm:/etc/yum.repos.d/fedora.repo,fedora-release,rpm-build
  hayloft run --root sdk --root bookworm -- make")]
pub(crate) struct RootCreateArgs {
    /// The layer's name
    pub name: String,
    /// What it is made from
    #[arg(long, value_name = "SOURCE", required_unless_present = "on")]
    pub from: Option<String>,
    /// The layer that it is made upon: a name, a folder or an archive
    #[arg(long, value_name = "LAYER", conflicts_with = "from")]
    pub on: Option<String>,
    /// Streams of modules, as gcc:12/full or python, several with commas: one stream of each module, any number of its profiles
    #[arg(long, value_name = "CHOICE", value_delimiter = ',', value_parser = parse::<Choice>)]
    pub enable: Vec<Choice>,
    /// Replace a layer of this name; roots that use the old one keep it until they end
    #[arg(long)]
    pub force: bool,
    /// Debian archive to take instead of this machine's
    #[arg(long, value_name = "URL", env = "HAYLOFT_MIRROR")]
    pub mirror: Option<String>,
    /// How it is put together.
    #[command(flatten)]
    pub making: MakingArgs,
}

/// `hayloft root diff`.
#[derive(Debug, Args)]
#[command(after_help = "\
Shows what is different from the layers: added, removed (with all below), type (a file is a folder now, say) and
changed, with what changed: content, mode, owner, xattrs, time, links. What was opened for writing and is as it was
is not shown, nor folders that got nothing but a new time.

Examples:
  hayloft root diff build7
  hayloft root diff build7 --json | jq -r 'select(.kind == \"added\").path'")]
pub(crate) struct RootDiffArgs {
    /// The root
    pub name: String,
    /// Show folders of which only the time is different as well
    #[arg(long)]
    pub times: bool,
    /// Print JSON, one object a line
    #[arg(long)]
    pub json: bool,
}

/// What is published, and as what.
#[derive(Debug, Args)]
pub(crate) struct PublicationArgs {
    /// Publish only what has changed at or below this path of the root; may be given several times
    #[arg(long, value_name = "PATH")]
    pub only: Vec<PathBuf>,
    /// Publish a layer: changes alone, removals marked as overlayfs does, in place of what is there
    #[arg(long)]
    pub as_layer: bool,
    /// Make a snapshot of the volume when it is published: `hayloft rollback` goes back to it
    #[arg(long, value_name = "NAME")]
    pub snapshot: Option<String>,
}

/// `hayloft root publish`.
#[derive(Debug, Args)]
#[command(after_help = "\
VOLUME is a folder on a mount, or HOST:PORT/NAME, which is mounted for the time being. PATH is the folder in it that
gets the changes [default: the root's name]. What was added and changed is put there, what was removed is
removed there, and all else stays. Whoever looks there sees all of it or nothing; when this command returns, it is durable.

Examples:
  hayloft root publish build7 /mnt/builds:nightly
  hayloft root publish build7 farm1:7440/builds:nightly/7 --only /build/out
  hayloft root publish build7 /mnt/builds:nightly --snapshot nightly-7   (a point to go back to: builds@nightly-7)
  hayloft root publish build7 /mnt/layers:with-deps --as-layer")]
pub(crate) struct RootPublishArgs {
    /// The root
    pub name: String,
    /// Where to
    #[arg(value_name = "VOLUME[:PATH]")]
    pub to: String,
    /// What, and as what.
    #[command(flatten)]
    pub what: PublicationArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
