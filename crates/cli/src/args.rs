//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::farm::args::{FarmArgs, MakeArgs, TaskArgs};
use crate::roots::root_args::{RootArgs, RunArgs};
use crate::server::cert_args::CertArgs;
use crate::transfer::args::{MergeArgs, PullArgs, ReceiveArgs, SendArgs};
use crate::units::parse_size;
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

/// `hayloft serve`.
#[derive(Debug, Args)]
#[command(after_help = "\
Prints one line when it is ready: serving STORE on HOST:PORT (or unix:/PATH). SIGTERM and SIGINT end it; clients that are
still mounted wait until a server is back. With NOTIFY_SOCKET set (systemd, Type=notify) it reports itself ready there.

Examples:
  hayloft serve
  hayloft serve --store file:///srv/hayloft --listen 0.0.0.0:7440         (needs certificates: hayloft cert)
  hayloft serve --listen unix:/run/hayloft-server/socket --socket-group builders
  HAYLOFT_STORE=file:///srv/hayloft hayloft serve --config /etc/hayloft/hayloft.toml
  hayloft serve --store file:///tmp/store --listen 127.0.0.1:0     (port 0: any free one; the line says which)")]
pub(crate) struct ServeArgs {
    /// Where everything durable lives: an object-store URL [default: file:///var/lib/hayloft]
    #[arg(long, value_name = "URL", env = "HAYLOFT_STORE")]
    pub store: Option<String>,
    /// File with the key that everything in the store is encrypted with, from its beginning on [default: not encrypted]
    #[arg(long, value_name = "FILE", env = "HAYLOFT_KEY_FILE")]
    pub key_file: Option<PathBuf>,
    /// Address to listen on, a socket of this host (unix:/PATH), or both, with a comma [default: 127.0.0.1:7440]
    #[arg(long, value_name = "HOST:PORT|unix:/PATH", env = "HAYLOFT_LISTEN")]
    pub listen: Option<String>,
    /// Group whose users may connect to the socket; otherwise only the server's user and root
    #[arg(long, value_name = "NAME|NUMBER", env = "HAYLOFT_SOCKET_GROUP")]
    pub socket_group: Option<String>,
    /// Memory for cached tables, all volumes together [default: 128M]
    #[arg(long, value_name = "SIZE", env = "HAYLOFT_CACHE", value_parser = parse_size)]
    pub cache: Option<u64>,
    /// Room on a local store's disk that new data never fills [default: depends on the disk]
    #[arg(long, value_name = "SIZE", env = "HAYLOFT_RESERVE", value_parser = parse_size)]
    pub reserve: Option<u64>,
    /// How long a client may be silent before another may take its place [default: 10]
    #[arg(long, value_name = "SECONDS", env = "HAYLOFT_LEASE")]
    pub lease: Option<u64>,
    /// How long what was answered may not be durable yet; 0: every answer waits for the store [default: 100]
    #[arg(long, value_name = "MILLISECONDS", env = "HAYLOFT_WINDOW")]
    pub window: Option<u64>,
    /// Where it is written who has administered what [default: /var/log/hayloft/audit.log, for others than root in $XDG_STATE_HOME/hayloft]
    #[arg(long, value_name = "FILE", env = "HAYLOFT_AUDIT_LOG")]
    pub audit_log: Option<PathBuf>,
    /// Bytes a second that are read to verify what is stored, when nobody needs the server; 0: none [default: 8M]
    #[arg(long, value_name = "SIZE", env = "HAYLOFT_SCRUB", value_parser = parse_size)]
    pub scrub: Option<u64>,
    /// End when the parent process ends.
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

/// `hayloft volume`.
#[derive(Debug, Args)]
#[command(subcommand_required = true, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
Examples:
  hayloft volume create builds --quota 200G
  hayloft volume list --server farm1:7440
  hayloft volume show builds --json
  hayloft volume delete builds")]
pub(crate) struct VolumeArgs {
    /// Server to talk to [default: 127.0.0.1:7440]
    #[arg(long, global = true, value_name = "HOST:PORT", env = "HAYLOFT_SERVER")]
    pub server: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub verb: VolumeVerb,
}

/// The verbs of `hayloft volume`.
#[derive(Debug, Subcommand)]
pub(crate) enum VolumeVerb {
    /// Create an empty volume
    #[command(after_help = "\
Examples:
  hayloft volume create builds
  hayloft volume create builds --quota 200G --inodes 5000000
  hayloft volume create builds --grant cert:build1=write --grant 'cert:*=read'
  hayloft volume create scratch --mode 1777 --owner 0:0 --server farm1:7440")]
    Create(CreateArgs),
    /// List all volumes
    #[command(after_help = "\
Examples:
  hayloft volume list
  hayloft volume list --json --server farm1:7440")]
    List,
    /// Show one volume: how full it is, who has it mounted
    #[command(after_help = "\
Examples:
  hayloft volume show builds
  hayloft volume show builds --json")]
    Show(NameArgs),
    /// Delete a volume and everything in it (refused while it is mounted)
    #[command(after_help = "\
Examples:
  hayloft volume delete builds
  hayloft volume delete builds --snapshots
  hayloft volume delete builds --server farm1:7440")]
    Delete(DeleteArgs),
    /// Give the space of deleted content back to the store now (it also happens by itself)
    #[command(after_help = "\
Examples:
  hayloft volume sweep builds
  hayloft volume sweep builds --json")]
    Sweep(NameArgs),
    /// Verify a volume's tables, and with --content every byte
    #[command(after_help = "\
Exits with 10 when it finds damage.

Examples:
  hayloft volume check builds
  hayloft volume check builds --content --json
  hayloft volume check builds --content --repair")]
    Check(CheckArgs),
    /// Give somebody a right on a volume
    #[command(after_help = "\
Rights: none, read (mounting it with -o ro), write (mounting it), admin (quota, rights, ending sessions, deleting). Root of
the server's host, and the user that the server runs as, may do everything; a volume's owner may write.

Examples:
  hayloft volume grant builds cert:build1 write
  hayloft volume grant builds 'cert:*' read --from 10.1.0.0/16
  hayloft volume grant builds uid:1000 write                  (a user of the server's own host)
  hayloft volume grant builds cert:build7 none")]
    Grant(GrantArgs),
    /// Take back what was given with `grant`: whoever has it mounted is cut off
    #[command(after_help = "\
Examples:
  hayloft volume revoke builds cert:build1")]
    Revoke(RevokeRightArgs),
    /// Say whether device and setuid files of a volume count where it is mounted
    #[command(after_help = "\
Mounts have nosuid and nodev unless the volume is trusted, or the options suid and dev are given.

Examples:
  hayloft volume set-trusted roots yes")]
    SetTrusted(SetTrustedArgs),
    /// Change how much a volume may hold
    #[command(after_help = "\
Examples:
  hayloft volume set-quota builds --quota 500G
  hayloft volume set-quota builds --quota 0 --inodes 0     (0: no limit)")]
    SetQuota(SetQuotaArgs),
}

/// A volume to delete.
#[derive(Debug, Args)]
pub(crate) struct DeleteArgs {
    /// Its name
    pub name: String,
    /// Delete its snapshots, too
    #[arg(long)]
    pub snapshots: bool,
}

/// A volume's name.
#[derive(Debug, Args)]
pub(crate) struct NameArgs {
    /// The volume
    pub name: String,
}

/// `hayloft volume create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The new volume
    pub name: String,
    /// Most bytes that it may hold (suffixes K, M, G, T); 0: no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_size, default_value = "0")]
    pub quota: u64,
    /// Most inodes that it may hold; 0: no limit
    #[arg(long, value_name = "COUNT", default_value = "0")]
    pub inodes: u64,
    /// Permission bits of its top folder, octal
    #[arg(long, value_parser = parse_mode, default_value = "0755")]
    pub mode: u32,
    /// Owner of its top folder as numbers [default: who runs this command]
    #[arg(long, value_name = "UID:GID", value_parser = parse_owner)]
    pub owner: Option<(u32, u32)>,
    /// A right that somebody has on it; may be given several times
    #[arg(long, value_name = "WHO=RIGHT", value_parser = parse_grant)]
    pub grant: Vec<(String, String)>,
    /// Device and setuid files of it count where it is mounted
    #[arg(long)]
    pub trusted: bool,
}

/// `hayloft volume grant`.
#[derive(Debug, Args)]
pub(crate) struct GrantArgs {
    /// The volume
    pub name: String,
    /// cert:NAME, uid:NUMBER, or all of a kind: cert:*, uid:*
    pub who: String,
    /// What they may do
    #[arg(value_parser = ["none", "read", "write", "admin"])]
    pub right: String,
    /// Only from this network; may be given several times
    #[arg(long, value_name = "NETWORK")]
    pub from: Vec<String>,
}

/// `hayloft volume revoke`.
#[derive(Debug, Args)]
pub(crate) struct RevokeRightArgs {
    /// The volume
    pub name: String,
    /// As it was given
    pub who: String,
}

/// `hayloft volume set-trusted`.
#[derive(Debug, Args)]
pub(crate) struct SetTrustedArgs {
    /// The volume
    pub name: String,
    /// Whether they do
    #[arg(value_name = "yes|no", value_parser = ["yes", "no"])]
    pub trusted: String,
}

/// `hayloft volume check`.
#[derive(Debug, Args)]
pub(crate) struct CheckArgs {
    /// The volume
    pub name: String,
    /// Read and verify all content, too
    #[arg(long)]
    pub content: bool,
    /// Mend what can be mended, and say what is gone; nobody may have the volume mounted
    #[arg(long)]
    pub repair: bool,
}

/// `hayloft scrub`.
#[derive(Debug, Args)]
pub(crate) struct ScrubArgs {
    /// The volume [default: all]
    pub volume: Option<String>,
    /// The server's address
    #[arg(long, value_name = "HOST:PORT", env = "HAYLOFT_SERVER")]
    pub server: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `hayloft volume set-quota`.
#[derive(Debug, Args)]
#[group(required = true, multiple = true, id = "limit", args = ["quota", "inodes"])]
pub(crate) struct SetQuotaArgs {
    /// The volume
    pub name: String,
    /// Most bytes that it may hold (suffixes K, M, G, T); 0: no limit [default: as it is]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub quota: Option<u64>,
    /// Most inodes that it may hold; 0: no limit [default: as it is]
    #[arg(long, value_name = "COUNT")]
    pub inodes: Option<u64>,
}

/// `hayloft mount`.
#[derive(Debug, Args)]
#[command(after_help = "\
Returns when the mount is usable and leaves a process behind that serves it; its log file is named. With
--foreground it stays, and SIGTERM or SIGINT unmount. `mount -t hayloft` and /etc/fstab work as well.

Mount options (sizes with K, M, G, T; durations in seconds):
  commit=SECONDS   a crash of this host loses at most so much (default 5)
  dirty=SIZE       most changes kept in memory that the store does not have yet
  cache=SIZE       most memory for what is kept beside these: content, names, attributes
  quiet=SECONDS    gives memory back when nothing was asked for so long (default 30)
  ro               read-only
  allow_other, noallow_other   let other users in, or not (default when root mounts, and else)
  syncfs           syncfs(2) and sync(1) wait for the store as well (root; Linux 6.18)
  transport=auto|dev|uring   how requests come from the kernel
  cert=DIR         folder with this host's certificate, as --cert
  locks=shared|local         whom flock and fcntl locks exclude: everybody, or this host's programs

Examples:
  hayloft mount 127.0.0.1:7440/builds /mnt/builds
  hayloft mount farm1:7440/builds /mnt/builds -o commit=10,dirty=1G,cache=4G
  hayloft mount farm1:7440/builds /mnt/builds --foreground
  mount -t hayloft farm1:7440/builds /mnt/builds
  /etc/fstab:  farm1:7440/builds  /mnt/builds  hayloft  commit=10,_netdev  0 0")]
pub(crate) struct MountArgs {
    /// What to mount: HOST:PORT/VOLUME
    #[arg(value_name = "HOST:PORT/VOLUME")]
    pub source: String,
    /// The folder to mount it on
    pub dir: PathBuf,
    /// Mount options, separated by commas; may be given several times
    #[arg(short = 'o', long = "options", value_name = "OPTIONS", env = "HAYLOFT_MOUNT_OPTIONS")]
    pub options: Vec<String>,
    /// Stay in the foreground
    #[arg(long, short = 'f')]
    pub foreground: bool,
    /// Folder for changes that can never be applied, which are kept there
    #[arg(long, value_name = "DIR", env = "HAYLOFT_CACHE_DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Folder for the log file [default: /var/log/hayloft for root, else $XDG_STATE_HOME/hayloft]
    #[arg(long, value_name = "DIR", env = "HAYLOFT_LOG_DIR")]
    pub log_dir: Option<PathBuf>,
    /// Report on standard output to the process that detached this one.
    #[arg(long, hide = true)]
    pub detached: bool,
    /// End when the parent process ends.
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

/// `hayloft umount`.
#[derive(Debug, Args)]
#[command(after_help = "\
Waits until the store has every change, then unmounts, then waits for the end of the mount's process. Of several
mount points of one mount (mount --bind) only the one that is named goes; the process ends with the last.

Examples:
  hayloft umount /mnt/builds
  hayloft umount --timeout 60 /mnt/builds
  hayloft umount --lazy /mnt/builds      (gone at once; changes still reach the store)
  hayloft umount --force /mnt/builds     (waits for nobody: changes that the store lacks are kept in a folder)")]
pub(crate) struct UmountArgs {
    /// Where it is mounted
    pub dir: PathBuf,
    /// Do not wait for the store; give up requests under way. Changes that the store does not have are kept in a folder
    /// of --cache-dir, or lost if the mount's process does not answer
    #[arg(long, short = 'f', conflicts_with = "lazy")]
    pub force: bool,
    /// Take it out of the tree at once, even when in use; it ends when nobody uses it any more
    #[arg(long, short = 'l')]
    pub lazy: bool,
    /// Fail when the store does not have everything by then [default: wait]
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["lazy", "force"])]
    pub timeout: Option<u64>,
}

/// `hayloft sync`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hayloft sync /mnt/builds
  hayloft sync --timeout 60 /mnt/builds
  make -C /mnt/builds/src && hayloft sync /mnt/builds")]
pub(crate) struct SyncArgs {
    /// Where it is mounted
    pub dir: PathBuf,
    /// Fail when the store does not have everything by then [default: wait]
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<u64>,
}

/// `hayloft stats`.
#[derive(Debug, Args)]
#[command(after_help = "\
Counters run since the mount, or since the server started. docs/operations.md describes every key.

Examples:
  hayloft stats /mnt/builds
  hayloft stats /mnt/builds --watch
  hayloft stats 127.0.0.1:7440
  hayloft stats /mnt/builds --json | jq .fuse.requests")]
pub(crate) struct StatsArgs {
    /// A folder where a volume is mounted, or a server's address
    #[arg(value_name = "DIR|HOST:PORT")]
    pub target: String,
    /// Print JSON; with --watch one line each time
    #[arg(long)]
    pub json: bool,
    /// Print again and again, with the change per second
    #[arg(long, short = 'w')]
    pub watch: bool,
    /// Seconds between two prints
    #[arg(long, value_name = "SECONDS", default_value = "2", requires = "watch")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub interval: u64,
}

/// `hayloft clients`.
#[derive(Debug, Args)]
#[command(after_help = "\
OWNS and READS count directories (and files owned by themselves); WAITING counts changes by others that the
client has not confirmed yet; SILENT is the time since it was last heard of.

Examples:
  hayloft clients 127.0.0.1:7440
  hayloft clients farm1:7440 --volume builds
  hayloft clients farm1:7440 --json | jq '.[] | select(.connected | not)'")]
pub(crate) struct ClientsArgs {
    /// The server's address
    #[arg(value_name = "HOST:PORT")]
    pub server: String,
    /// Only clients of this volume
    #[arg(long, value_name = "VOLUME")]
    pub volume: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `hayloft evict`.
#[derive(Debug, Args)]
#[command(after_help = "\
Whatever the client has not shipped is lost to the volume; it keeps that in its --cache-dir. A client that others wait
for, and that is silent for its lease, is ended by itself: this is for one that must not be waited for.

Examples:
  hayloft clients farm1:7440
  hayloft evict farm1:7440 builds 5f0c1d2e3a4b5c6d")]
pub(crate) struct EvictArgs {
    /// The server's address
    #[arg(value_name = "HOST:PORT")]
    pub server: String,
    /// The volume
    pub volume: String,
    /// The session, as `hayloft clients` shows it
    #[arg(value_parser = parse_session)]
    pub session: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

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

/// Permission bits, octal.
pub(crate) fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err(format!("'{text}' are no permission bits: write them in octal, as in 0755")),
    }
}

fn parse_session(text: &str) -> Result<u64, String> {
    u64::from_str_radix(text, 16)
        .map_err(|_| format!("'{text}' is no session: write it as `hayloft clients` shows it"))
}

fn parse_owner(text: &str) -> Result<(u32, u32), String> {
    text.split_once(':')
        .and_then(|(uid, gid)| Some((uid.parse().ok()?, gid.parse().ok()?)))
        .ok_or_else(|| format!("'{text}' is no owner: write UID:GID in numbers, as in 1000:1000"))
}

fn parse_grant(text: &str) -> Result<(String, String), String> {
    let (who, right) = text.rsplit_once('=').ok_or("write WHO=RIGHT, as in cert:build1=write")?;
    Ok((who.to_owned(), right.to_owned()))
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

    #[test]
    fn permission_bits_and_owners() {
        assert_eq!(parse_mode("1777"), Ok(0o1777));
        assert!(parse_mode("0o755").is_err());
        assert_eq!(parse_owner("1000:100"), Ok((1000, 100)));
        assert!(parse_owner("root").is_err());
        assert_eq!(parse_session("00ff"), Ok(255));
        assert!(parse_session("barn").is_err());
    }
}
