//! The command lines of `hayloft snapshot`, `fork`, `rollback`, `promote`, `diff` and `verify`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use hayloft_wire::Version;

use crate::config::{Config, DEFAULT_SERVER};
use crate::server::snapshots::{parse_snapshot, parse_version};
use crate::versions::retention::Keep;

/// Where the server is, and how to answer.
#[derive(Debug, Args)]
pub(crate) struct ServerArgs {
    /// Server to talk to [default: 127.0.0.1:7440]
    #[arg(long, global = true, value_name = "HOST:PORT", env = "HAYLOFT_SERVER")]
    pub server: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
}

impl ServerArgs {
    /// The server: that of the command line, or of the configuration.
    pub(crate) fn server<'a>(&'a self, config: &'a Config) -> &'a str {
        self.server.as_ref().or(config.server.as_ref()).map_or(DEFAULT_SERVER, String::as_str)
    }
}

/// Whether what was named is a folder, and not a volume or a snapshot.
pub(crate) fn is_folder(text: &str) -> bool {
    text.contains('/') || text == "." || text == ".."
}

/// `hayloft snapshot`.
#[derive(Debug, Args)]
#[command(subcommand_required = true, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
A snapshot is a volume's whole tree at one moment, on all hosts. It costs no room but for what is changed or deleted later,
and takes as long for a million files as for one. Mount it as HOST:PORT/VOLUME@NAME.

Examples:
  hayloft snapshot create builds@monday --note 'before the compiler update'
  hayloft snapshot list builds
  hayloft mount 127.0.0.1:7440/builds@monday /mnt/monday
  hayloft snapshot delete builds@monday")]
pub(crate) struct SnapshotArgs {
    #[command(flatten)]
    pub at: ServerArgs,
    /// What to do.
    #[command(subcommand)]
    pub verb: SnapshotVerb,
}

/// The verbs of `hayloft snapshot`.
#[derive(Debug, Subcommand)]
pub(crate) enum SnapshotVerb {
    /// Make a snapshot: everything whose call has returned by now, on any host, is in it
    #[command(after_help = "\
Hosts are asked to ship what they have in memory; they go on working meanwhile. One that brings nothing for 30 s is named,
and no snapshot is made.

Examples:
  hayloft snapshot create builds@monday
  hayloft snapshot create builds@now --as-stored            (what the server has; asks nobody)")]
    Create(CreateSnapshotArgs),
    /// List a volume's snapshots, the oldest first
    #[command(after_help = "\
Examples:
  hayloft snapshot list builds
  hayloft snapshot list builds --json")]
    List(VolumeNameArgs),
    /// Show one snapshot
    #[command(after_help = "\
Examples:
  hayloft snapshot show builds@monday")]
    Show(VersionArgs),
    /// Sign a snapshot's name by content with a key of ssh-keygen(1)
    #[command(after_help = "\
The name is worked out by the server (see `hayloft verify`) and signed here, by ssh-keygen, so keys with a passphrase, of an agent and
of hardware work. Who mounts snapshots can ask for a signature: trusted_keys in the table [mount] of the configuration.

Examples:
  hayloft snapshot sign builds@monday --key ~/.ssh/id_ed25519")]
    Sign(SignArgs),
    /// Delete a snapshot; what only it has had goes soon after (refused while it is mounted)
    #[command(after_help = "\
Examples:
  hayloft snapshot delete builds@monday")]
    Delete(VersionArgs),
    /// Show which snapshots are older than what is to be kept, and with --yes delete them
    #[command(after_help = "\
Of each of the last so many hours, days, weeks (from Monday) and months (UTC) that have snapshots the last one is kept, and the
last one of all. Those that are mounted stay.

Examples:
  hayloft snapshot prune builds --keep 24h,7d,4w
  hayloft snapshot prune builds --keep 24h,7d,4w --yes")]
    Prune(PruneArgs),
}

/// Snapshots to delete.
#[derive(Debug, Args)]
pub(crate) struct PruneArgs {
    /// The volume
    pub volume: String,
    /// What to keep one of each of: hours, days, weeks, months
    #[arg(long, value_name = "24h,7d,4w,12m")]
    pub keep: Keep,
    /// Delete them
    #[arg(long)]
    pub yes: bool,
}

/// A volume.
#[derive(Debug, Args)]
pub(crate) struct VolumeNameArgs {
    /// Its name
    pub volume: String,
}

/// A snapshot.
#[derive(Debug, Args)]
pub(crate) struct VersionArgs {
    /// The snapshot
    #[arg(value_name = "VOLUME@NAME", value_parser = parse_snapshot)]
    pub snapshot: Version,
}

/// A snapshot to make.
#[derive(Debug, Args)]
pub(crate) struct CreateSnapshotArgs {
    /// The volume, and the snapshot's name
    #[arg(value_name = "VOLUME@NAME", value_parser = parse_snapshot)]
    pub snapshot: Version,
    /// What it is, for people
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub note: String,
    /// Take what the server has: do not ask hosts for what they have not shipped
    #[arg(long)]
    pub as_stored: bool,
}

/// A snapshot to sign.
#[derive(Debug, Args)]
pub(crate) struct SignArgs {
    /// The snapshot
    #[arg(value_name = "VOLUME@NAME", value_parser = parse_snapshot)]
    pub snapshot: Version,
    /// The private key, or the public one of a key that an agent holds
    #[arg(long, value_name = "FILE")]
    pub key: PathBuf,
}

/// `hayloft fork`.
#[derive(Debug, Args)]
#[command(after_help = "\
A fork is a volume of its own that begins as another one, or as a snapshot of it. Both share what is stored until one of them
changes it. Rights and quota are those of the origin.

Examples:
  hayloft fork builds builds-test
  hayloft fork builds@monday builds-monday")]
pub(crate) struct ForkArgs {
    /// What it begins as
    #[arg(value_name = "VOLUME[@SNAPSHOT]", value_parser = parse_version)]
    pub of: Version,
    /// The new volume
    pub name: String,
    /// Take what the server has: do not ask hosts for what they have not shipped
    #[arg(long)]
    pub as_stored: bool,
    #[command(flatten)]
    pub at: ServerArgs,
}

/// `hayloft rollback`.
#[derive(Debug, Args)]
#[command(after_help = "\
All hosts that have the volume mounted see the snapshot's tree at once, without mounting anew. What the volume was is kept as
a snapshot, so this can be undone the same way. A file that is open stays that file: it has what it had then, or is gone
(ESTALE) if it was not there.

Examples:
  hayloft rollback builds@monday
  hayloft rollback builds@monday --keep-as broken")]
pub(crate) struct RollbackArgs {
    /// What to go back to
    #[arg(value_name = "VOLUME@NAME", value_parser = parse_snapshot)]
    pub to: Version,
    /// Name of the snapshot that keeps what the volume was [default: before-rollback-SECONDS]
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub keep_as: String,
    #[command(flatten)]
    pub at: ServerArgs,
}

/// `hayloft promote`.
#[derive(Debug, Args)]
#[command(after_help = "\
The volume that the fork was made of gets the fork's tree, at once and on all hosts; the fork's name is free again. What the
volume was is kept as a snapshot of it. The fork must not be mounted, and have no snapshots of its own.

Examples:
  hayloft promote builds-test
  hayloft promote builds-test --keep-as before-test
  hayloft promote builds-test --id \"$tested\"      of volume show --json; not what has got the name since")]
pub(crate) struct PromoteArgs {
    /// The fork
    pub fork: String,
    /// Only if the fork has this id: a name may have become another one's
    #[arg(long, value_name = "ID")]
    pub id: Option<String>,
    /// Name of the snapshot that keeps what the volume was [default: before-promote-SECONDS]
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    pub keep_as: String,
    #[command(flatten)]
    pub at: ServerArgs,
}

/// `hayloft diff`.
#[derive(Debug, Args)]
#[command(after_help = "\
A line for each path: A added, D removed, M changed, R renamed, and what has changed: content, mode, owner, xattrs, type, links.
Times do not count, and a file with several names is told by one of them. It takes as long as what differs, not as the tree, unless most of the tables have been rewritten since.
Both versions have to be of one family: a volume, its snapshots, its forks and theirs.

Examples:
  hayloft diff builds@monday                        against the volume as it is now
  hayloft diff builds@monday builds@tuesday --stat
  hayloft diff builds builds-test --below src/lib --patch")]
pub(crate) struct DiffArgs {
    /// The older version
    #[arg(value_name = "VOLUME[@SNAPSHOT]", value_parser = parse_version)]
    pub from: Version,
    /// The newer one [default: the volume of the older one as it is now]
    #[arg(value_name = "VOLUME[@SNAPSHOT]", value_parser = parse_version)]
    pub to: Option<Version>,
    /// Tell only what is in this folder
    #[arg(long, value_name = "DIR")]
    pub below: Option<PathBuf>,
    /// Count instead of listing
    #[arg(long, conflicts_with = "patch")]
    pub stat: bool,
    /// Show what has changed in text files (mounts both versions for it)
    #[arg(long, conflicts_with = "json")]
    pub patch: bool,
    #[command(flatten)]
    pub at: ServerArgs,
}

/// `hayloft verify`.
#[derive(Debug, Args)]
#[command(after_help = "\
The name by content of a tree (tree1-...) covers names, modes, owners, extended attributes and contents, not times. The same tree has the
same name everywhere; docs/versions.md says how it is computed.

Of VOLUME@NAME the server works it out from all rows, and it must be the one that the snapshot was given first. With --deep, and of a
folder (anything with a slash, or `.`), every byte is read here. Exit code 10: it is not what it should be.

Examples:
  hayloft verify builds@monday
  hayloft verify builds@monday --deep --signers /etc/hayloft/allowed_signers
  hayloft verify /srv/root --against builds@monday       (lists what differs)
  hayloft verify . --against tree1-e94eb87541ce2fcbf7d0e523423e9a62ca9ac90a17b4697c08f08940c1d3f2bf")]
pub(crate) struct VerifyArgs {
    /// The folder, or the version
    #[arg(value_name = "DIR|VOLUME[@NAME]")]
    pub what: String,
    /// What it has to be: a name by content, or a version
    #[arg(long, value_name = "tree1-...|VOLUME[@NAME]")]
    pub against: Option<String>,
    /// Read every byte here, through a mount
    #[arg(long)]
    pub deep: bool,
    /// Require a signature by one of these keys (the format of ssh-keygen's allowed_signers)
    #[arg(long, value_name = "FILE")]
    pub signers: Option<PathBuf>,
    #[command(flatten)]
    pub at: ServerArgs,
}
