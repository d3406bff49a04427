//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

use crate::farm::args::{FarmArgs, MakeArgs, TaskArgs};
use crate::mounts::args::{MountArgs, SyncArgs, UmountArgs};
use crate::roots::root_args::{RootArgs, RunArgs};
use crate::server::args::{ClientsArgs, EvictArgs, ScrubArgs, ServeArgs, StatsArgs, VolumeArgs};
use crate::server::cert_args::CertArgs;
use crate::transfer::args::{MergeArgs, PullArgs, ReceiveArgs, SendArgs};
use crate::trial::args::TryArgs;
use crate::versions::args::{DiffArgs, ForkArgs, PromoteArgs, RollbackArgs, SnapshotArgs, VerifyArgs};

const ABOUT: &str = "Mounted trees for build farms: many hosts share one tree at local speed.";

const EXIT_CODES: &str = "\
Settings: a flag wins over a HAYLOFT_* variable, that over the configuration file, that over the default.
The file is the one that --config names; without it /etc/hayloft/hayloft.toml and then
~/.config/hayloft/hayloft.toml, key by key.

Exit codes:
  0  done                          6  not permitted
  1  failed                        7  this machine lacks something (FUSE, a program)
  2  wrong usage or configuration  8  the store is full or the quota used up
  3  server not reachable          9  it exists, or others have changed it
  4  no such volume               10  a check found damage
  5  in use

Examples:
  hayloft try                                        see what it does, with nothing set up
  hayloft serve --store file:///srv/hayloft
  hayloft volume create builds
  hayloft mount 127.0.0.1:7440/builds /mnt/builds
  hayloft stats /mnt/builds
  hayloft umount /mnt/builds
  hayloft run --root /mnt/builds/sysroot -- make -j4
  hayloft task -- cc -c x.c -o x.o";

/// See [`ABOUT`].
#[derive(Debug, Parser)]
#[command(name = "hayloft", version, about = ABOUT, after_help = EXIT_CODES, subcommand_required = true)]
#[command(arg_required_else_help = true, disable_help_subcommand = true)]
pub(crate) struct Cli {
    /// Configuration file (TOML)
    #[arg(long, global = true, value_name = "FILE", env = "HAYLOFT_CONFIG")]
    pub config: Option<PathBuf>,
    /// Folder with this host's certificate, for servers on other hosts [default: /etc/hayloft/tls]
    #[arg(long, global = true, value_name = "DIR", env = "HAYLOFT_CERT")]
    pub cert: Option<PathBuf>,
    /// Between hosts without TLS: whoever reaches the network reads and changes everything. For benchmarks
    #[arg(long, global = true, env = "HAYLOFT_INSECURE", value_parser = clap::builder::FalseyValueParser::new())]
    pub insecure: bool,
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Serve the volumes of a store
    Serve(ServeArgs),
    /// Create, list, show, delete and look after volumes
    Volume(VolumeArgs),
    /// Read and verify all that volumes have in the store, now
    #[command(after_help = "\
Examples:
  hayloft scrub
  hayloft scrub builds --json")]
    Scrub(ScrubArgs),
    /// Mount a volume on a folder
    Mount(MountArgs),
    /// Make, list and delete snapshots: a volume's tree at one moment
    Snapshot(SnapshotArgs),
    /// Make a volume that begins as another one, or a snapshot of it, in no time
    Fork(ForkArgs),
    /// Give all hosts the tree of a snapshot; what the volume is now is kept as one
    Rollback(RollbackArgs),
    /// Put a fork in the place of the volume that it was made of
    Promote(PromoteArgs),
    /// Do to the volume that a fork was made of what was changed in the fork
    Merge(MergeArgs),
    /// Tell what differs between two versions of a tree
    Diff(DiffArgs),
    /// Prove that a tree is what it was, or what another one is, by its content
    Verify(VerifyArgs),
    /// Send a version of a tree to a mirror, or to another server
    Send(SendArgs),
    /// Receive a version of a tree from a mirror, or from another server
    Receive(ReceiveArgs),
    /// Receive a snapshot that another server has
    Pull(PullArgs),
    /// Leave a mount: wait until the store has everything, then unmount
    Umount(UmountArgs),
    /// Wait until the store has everything written so far on a mount
    Sync(SyncArgs),
    /// Make, install and revoke certificates: between hosts both sides prove who they are
    Cert(CertArgs),
    /// Show what a mount or a server has done
    Stats(StatsArgs),
    /// Show who has a server's volumes mounted
    Clients(ClientsArgs),
    /// End the session of a client, as if its host were gone
    Evict(EvictArgs),
    /// Run a command in a build root in memory
    Run(Box<RunArgs>),
    /// Make layers; list, show, enter, compare, publish and remove build roots
    Root(RootArgs),
    /// Run a command on a host of the farm as if it ran here
    Task(Box<TaskArgs>),
    /// Run GNU make, its recipes on the hosts of the farm
    Make(Box<MakeArgs>),
    /// Offer slots to the farm; show its hosts and builds
    Farm(FarmArgs),
    /// Build a real program on a throw-away volume and compare the times with disk and memory
    Try(TryArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn every_help_ends_in_examples(command: &clap::Command) {
        let help = command.clone().render_long_help().to_string();
        let last = help.trim_end().rsplit("\n\n").next().unwrap_or_default();
        assert!(last.contains("Examples:\n"), "{}: {last}", command.get_name());
        command.get_subcommands().for_each(every_help_ends_in_examples);
    }

    #[test]
    fn help_is_sound() {
        let command = Cli::command();
        command.clone().debug_assert();
        every_help_ends_in_examples(&command);
    }
}
