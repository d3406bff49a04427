//! What `hayloft serve`, `volume`, `scrub`, `stats`, `clients` and `evict` are asked.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::units::{parse_mode, parse_size};

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
    /// The volume, or a snapshot of it (VOLUME@NAME) [default: all volumes]
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

    #[test]
    fn owners_and_sessions() {
        assert_eq!(parse_owner("1000:100"), Ok((1000, 100)));
        assert!(parse_owner("root").is_err());
        assert_eq!(parse_session("00ff"), Ok(255));
        assert!(parse_session("barn").is_err());
    }
}
