//! The command lines of `hayloft send`, `receive`, `pull` and `merge`.

use std::path::PathBuf;

use clap::Args;
use hayloft_wire::Version;

use crate::server::snapshots::{parse_snapshot, parse_version};
use crate::versions::args::ServerArgs;

/// Which server this host talks to, and what it keeps.
#[derive(Debug, Args)]
pub(crate) struct HostArgs {
    /// Where this host keeps what it knows of trees, and what has come [default: /var/cache/hayloft/transfer, of users ~/.cache/hayloft/transfer]
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    #[command(flatten)]
    pub at: ServerArgs,
}

/// `hayloft send`.
#[derive(Debug, Args)]
#[command(after_help = "\
A mirror is a folder of packs of some MiB that never change, and a record of each version. Any web server makes it a mirror for all: copy it, or
let --to be its folder. Only chunks that the mirror does not have are added. Without --to the same goes to standard output, as a tar archive.

Examples:
  hayloft send builds@monday --to /srv/www/mirror
  hayloft send builds@tuesday --since builds@monday | ssh far hayloft receive - builds
  hayloft send /srv/root --as base@12.1 --to /srv/www/mirror")]
pub(crate) struct SendArgs {
    /// What to send: a snapshot, or a folder (anything with a slash, or `.`)
    #[arg(value_name = "VOLUME@NAME|DIR")]
    pub what: String,
    /// Add it to the mirror in this folder, which is made if need be
    #[arg(long, value_name = "DIR")]
    pub to: Option<PathBuf>,
    /// Send nothing that this snapshot has: the receiver has it
    #[arg(long, value_name = "VOLUME@NAME", value_parser = parse_snapshot, conflicts_with = "to")]
    pub since: Option<Version>,
    /// What it is called there [default: as here]
    #[arg(long = "as", value_name = "VOLUME@NAME", value_parser = parse_snapshot)]
    pub name: Option<Version>,
    /// For people [default: the note of the snapshot]
    #[arg(long, value_name = "TEXT")]
    pub note: Option<String>,
    /// Its server, and what it keeps.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `hayloft receive`.
#[derive(Debug, Args)]
#[command(after_help = "\
The volume gets the version's tree at once, on all hosts that have it mounted, and a snapshot of the same name; what it was is kept as another one.
A volume that is not there is made. Only chunks that this host lacks are asked for: those of snapshots that were sent from or received on this
host are found, and those of --seed. What has come is verified against the version's name by content before anybody sees it. After a cut the
same command goes on where it was.

Examples:
  hayloft receive https://mirror.example.org/farm builds             (the latest version)
  hayloft receive https://mirror.example.org/farm builds@monday --signers /etc/hayloft/allowed_signers
  hayloft receive /media/disk/mirror builds@monday --into /srv/root  (a folder instead of a volume)
  ssh far hayloft send builds@tuesday --since builds@monday | hayloft receive -")]
pub(crate) struct ReceiveArgs {
    /// The mirror: its address, or its folder; `-`: a stream of hayloft send
    #[arg(value_name = "URL|DIR|-")]
    pub from: String,
    /// The version as the mirror names it; of a stream it is known
    #[arg(value_name = "VOLUME[@NAME]", value_parser = parse_version)]
    pub version: Option<Version>,
    /// Where it goes.
    #[command(flatten)]
    pub to: IntoArgs,
}

/// Where a version that is received goes, and what it has to be.
#[derive(Debug, Args)]
pub(crate) struct IntoArgs {
    /// The volume that gets it [default: the one of the same name]
    #[arg(long, value_name = "VOLUME", conflicts_with = "into")]
    pub volume: Option<String>,
    /// Make this folder what the version is, instead of a volume; it must be empty, or not there
    #[arg(long, value_name = "DIR")]
    pub into: Option<PathBuf>,
    /// Chunks are looked for in this snapshot or folder, too; may be given several times
    #[arg(long, value_name = "VOLUME@NAME|DIR")]
    pub seed: Vec<String>,
    /// Require a signature by one of these keys (the format of ssh-keygen's allowed_signers)
    #[arg(long, value_name = "FILE")]
    pub signers: Option<PathBuf>,
    /// Replace what the volume has, also if that is not what was received last; it is kept as a snapshot
    #[arg(long, conflicts_with = "into")]
    pub force: bool,
    /// Its server, and what it keeps.
    #[command(flatten)]
    pub host: HostArgs,
}

/// `hayloft pull`.
#[derive(Debug, Args)]
#[command(after_help = "\
As hayloft receive, from a snapshot that another server has, and that may be mounted from here. Files that have not changed since this host
pulled an older snapshot of that volume are not read; of those that have changed all comes. Where only parts of large files change, or the link is slow,
hayloft send on the other side, and hayloft receive here, bring less.

Examples:
  hayloft pull farm2:7440/builds@monday
  hayloft pull farm2:7440/builds --volume far-builds              (the newest snapshot)")]
pub(crate) struct PullArgs {
    /// The snapshot; without @NAME the newest one
    #[arg(value_name = "HOST:PORT/VOLUME[@NAME]")]
    pub from: String,
    /// Where it goes.
    #[command(flatten)]
    pub to: IntoArgs,
}

/// `hayloft merge`.
#[derive(Debug, Args)]
#[command(after_help = "\
What was changed in the fork since it was made is done to the volume as well, all of it at once and on all hosts. Both may have changed
different paths; a path that both have changed, each in another way, is named, and nothing is done then. Times alone are no change. What
the volume was is kept as a snapshot; the fork stays as it is.

What both began as has to be a snapshot that is still there: the one that the fork was made of, or --base.

Examples:
  hayloft fork builds@monday fix; ...; hayloft merge fix
  hayloft merge fix --base builds@monday")]
pub(crate) struct MergeArgs {
    /// The fork
    pub fork: String,
    /// What the fork and the volume both began as [default: the snapshot that the fork was made of]
    #[arg(long, value_name = "VOLUME@NAME", value_parser = parse_snapshot)]
    pub base: Option<Version>,
    /// Its server, and what it keeps.
    #[command(flatten)]
    pub host: HostArgs,
}
