//! What `hayloft mount`, `umount` and `sync` are asked.

use std::path::PathBuf;

use clap::Args;

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
