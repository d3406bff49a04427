//! The command lines of `hayloft run` and `hayloft root`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use hayloft_root::{Bind, Spill};

use crate::roots::layer_args::{LayersArgs, PublicationArgs, RootCreateArgs, RootDiffArgs, RootPublishArgs};
use crate::roots::module_args::{
    HistoryArgs, LayerCommandArgs, PruneArgs, RebuildArgs, RollbackLayerArgs, SwitchArgs,
};
use crate::sys;
use crate::units::{parse_mode, parse_size};

/// `hayloft run`.
#[derive(Debug, Args)]
#[command(after_help = "\
The root's lowest layers are read-only: what --root names, the first one on top; without it this host's own /. Whatever the command
writes goes to memory that only it sees, and is gone when it ends. docs/roots.md says more.

Exit code: the command's own, 128+N when signal N ended it; 127 when there is no such command in the root, 126 when it
cannot be run; 125 when the root could not be made or the command line is wrong.

Examples:
  hayloft run -- make -j4                             in the current folder, without changing it
  hayloft run --root bookworm --bind $PWD:/src:rw --chdir /src -- dpkg-buildpackage -b
  hayloft run --root /mnt/builds/sysroot --scratch /build --collect '/build/*.deb' --output out -- ./build.sh
  hayloft run --memory 2G --spill 20G --require-free 3G --json result.json -- make
  hayloft run --root bookworm --publish /mnt/builds:nightly --only /build/out -- ./build.sh
  hayloft run --keep --name look -- make || hayloft root enter look")]
pub(crate) struct RunArgs {
    /// A layer: a name (hayloft root create), a folder, a tar archive, or an erofs, squashfs or ext4 image; all but a
    /// name with a '/' in it; may be given several times, the topmost first [default: /]
    #[arg(long = "root", value_name = "LAYER")]
    pub layers: Vec<String>,
    /// Show a folder or file of the host in the root, read-only unless :rw is added; may be given several times
    #[arg(long = "bind", value_name = "SRC:DST[:rw]", value_parser = parse_bind)]
    pub binds: Vec<Bind>,
    /// A folder of bare memory, faster than one above layers; may be given several times
    #[arg(long, value_name = "DIR")]
    pub scratch: Vec<PathBuf>,
    /// What the root, files and processes together, may keep resident [default: no bound; files: half of the memory]
    #[arg(long, value_name = "SIZE", env = "HAYLOFT_MEMORY", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// What may go to disk beyond that: a size, zram:SIZE for compressed memory, or none [default: none]
    #[arg(long, value_name = "SIZE|none", env = "HAYLOFT_SPILL", value_parser = parse_spill)]
    pub spill: Option<Spill>,
    /// Folder on a disk for swap files [default: /var/lib/hayloft/spill]
    #[arg(long, value_name = "DIR", env = "HAYLOFT_SPILL_DIR")]
    pub spill_dir: Option<PathBuf>,
    /// Size of /tmp; otherwise it shares what the root has
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub tmp: Option<u64>,
    /// Refuse when less memory is free, after what other roots may still claim
    #[arg(long, value_name = "SIZE", env = "HAYLOFT_REQUIRE_FREE", value_parser = parse_size)]
    pub require_free: Option<u64>,
    /// Permission bits of the root's top folder, octal [default: the top layer's]
    #[arg(long, value_name = "MODE", value_parser = parse_mode)]
    pub mode: Option<u32>,
    /// Keep the root after the command, until hayloft root rm
    #[arg(long)]
    pub keep: bool,
    /// What of the network is there: nothing but a loopback interface, or the host's
    #[arg(long, value_enum, default_value = "none")]
    pub network: NetworkArg,
    /// Who runs the command: USER or USER:GROUP, names of the root's /etc/passwd or numbers
    #[arg(long, value_name = "NAME", default_value = "root")]
    pub user: String,
    /// A variable of the command's environment; K alone passes on the caller's value
    #[arg(long = "env", short = 'e', value_name = "K=V")]
    pub env: Vec<OsString>,
    /// How many processors it may use
    #[arg(long, value_name = "N")]
    pub cpus: Option<f64>,
    /// How many processes and threads it may have [default: 16384, or a quarter of what the host may if that is less]
    #[arg(long, value_name = "N", env = "HAYLOFT_PROCESSES")]
    pub processes: Option<u64>,
    /// A name for the root, and its host name
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// The command's working folder [default: the current one without --root, else /]
    #[arg(long, short = 'C', value_name = "DIR")]
    pub chdir: Option<PathBuf>,
    /// Copy this out of the root afterwards; names may have * and ?; may be given several times
    #[arg(long, value_name = "PATH")]
    pub collect: Vec<PathBuf>,
    /// Folder to copy to
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub output: PathBuf,
    /// When the command succeeds, put what it changed into a volume, all of it at once: VOLUME is a folder on a mount
    /// or HOST:PORT/NAME, PATH a folder in it [default: the root's name]
    #[arg(long, value_name = "VOLUME[:PATH]")]
    pub publish: Option<String>,
    /// What is published, and as what.
    #[command(flatten)]
    pub publication: PublicationArgs,
    /// Where layers are.
    #[command(flatten)]
    pub layers_dir: LayersArgs,
    /// Write what happened and what it took as JSON; - is standard output
    #[arg(long, value_name = "FILE|-")]
    pub json: Option<PathBuf>,
    /// Let overlayfs pass fsync and sync on instead of taking them for done
    #[arg(long)]
    pub fsync: bool,
    /// Let programs with the setuid bit, such as sudo, give rights inside the root
    #[arg(long)]
    pub setuid: bool,
    /// Publish with the owners that files have in the root, for a layer of this user's own
    #[arg(long, hide = true, requires = "publish")]
    pub with_owners: bool,
    /// Folder for the state of roots [default: /run/hayloft/roots, $XDG_RUNTIME_DIR/hayloft/roots for ordinary users]
    #[arg(long, value_name = "DIR", env = "HAYLOFT_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// What is said for tasks of the farm.
    #[command(flatten)]
    pub of_farm: OfFarmArgs,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// What an agent of the farm says when it runs this program for a task.
#[derive(Debug, Default, Args)]
pub(crate) struct OfFarmArgs {
    /// The command's environment is what begins with this in ours, without it
    #[arg(long, hide = true)]
    pub env_prefix: Option<String>,
    /// The command's file mode creation mask, octal
    #[arg(long, hide = true, value_parser = parse_mode)]
    pub umask: Option<u32>,
    /// Say there why the command did not run, end as it has ended, by a signal as well, and leave nothing of it running
    #[arg(long, hide = true)]
    pub failure_to: Option<PathBuf>,
}

impl OfFarmArgs {
    /// Says why a command did not run.
    pub(crate) fn tell(&self, message: &str) {
        let told = self.failure_to.as_ref().map(|file| std::fs::write(file, message));
        if !matches!(told, Some(Ok(()))) {
            eprintln!("hayloft: {message}");
        }
    }

    /// Ends this process by the signal that has ended the command, for an agent.
    pub(crate) fn end_as(&self, signal: Option<i64>) {
        if let (Some(signal), true) = (signal, self.failure_to.is_some()) {
            sys::end_by(signal as i32);
        }
    }
}

/// `--network`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum NetworkArg {
    /// Nothing but a loopback interface of its own.
    None,
    /// The host's network.
    Host,
}

/// `hayloft root`.
#[derive(Debug, Args)]
#[command(subcommand_required = true, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
Examples:
  hayloft root create bookworm --from debian:bookworm,build-essential
  hayloft root layer tools --on bookworm install gdb
  hayloft root list
  hayloft root diff look
  hayloft root enter look -- sh
  hayloft root publish look /mnt/builds:nightly
  hayloft root rm look")]
pub(crate) struct RootArgs {
    /// Folder for the state of roots [default: /run/hayloft/roots, $XDG_RUNTIME_DIR/hayloft/roots for ordinary users]
    #[arg(long, global = true, value_name = "DIR", env = "HAYLOFT_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub verb: RootVerb,
}

/// The verbs of `hayloft root`.
#[derive(Debug, Subcommand)]
pub(crate) enum RootVerb {
    /// Make a layer that `hayloft run --root NAME` finds
    Create(RootCreateArgs),
    /// Install packages upon a layer that stays as it is, as a layer
    Layer(LayerCommandArgs),
    /// Choose other streams of modules for a layer
    Switch(SwitchArgs),
    /// Show the generations of a layer
    History(HistoryArgs),
    /// Go back to an older generation of a layer
    Rollback(RollbackLayerArgs),
    /// Remove old generations of a layer
    Prune(PruneArgs),
    /// Make a layer again by its recipe, and say what differs
    Rebuild(RebuildArgs),
    /// List the roots that run or are kept
    #[command(after_help = "\
Examples:
  hayloft root list
  hayloft root list --json
  hayloft root list --layers
  hayloft root list --modules /mnt/builds      (streams, [d] the default, and the layers that have them)")]
    List(ListArgs),
    /// Show one root
    #[command(after_help = "\
Examples:
  hayloft root show look
  hayloft root show look --json")]
    Show(ShowArgs),
    /// Run a command in a root that is there: a look at a kept one, or at a running one
    #[command(after_help = "\
Examples:
  hayloft root enter look
  hayloft root enter look --user builder -- make -C /src check")]
    Enter(EnterArgs),
    /// Show what a root has changed against its layers
    Diff(RootDiffArgs),
    /// Put what a root has changed into a volume, all of it at once
    Publish(RootPublishArgs),
    /// Remove roots and everything in them
    #[command(after_help = "\
Examples:
  hayloft root rm look other
  hayloft root rm --layer sdk
  hayloft root rm --force stuck     (also when its command still runs: ends it)")]
    Rm(RmArgs),
}

/// `hayloft root list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// List the layers that have a name instead
    #[arg(long)]
    pub layers: bool,
    /// List the modules of a catalogue instead, with the layers that have them [default: HAYLOFT_MODULES, run.modules]
    #[arg(long, value_name = "DIR|VOLUME", num_args = 0..=1, default_missing_value = "", conflicts_with = "layers")]
    pub modules: Option<String>,
    /// Where layers are.
    #[command(flatten)]
    pub layers_dir: LayersArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `hayloft root show`.
#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// The root
    pub name: String,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `hayloft root enter`.
#[derive(Debug, Args)]
pub(crate) struct EnterArgs {
    /// The root
    pub name: String,
    /// Who runs the command: USER or USER:GROUP, names of the root's /etc/passwd or numbers
    #[arg(long, value_name = "NAME", default_value = "root")]
    pub user: String,
    /// A variable of the command's environment; K alone passes on the caller's value
    #[arg(long = "env", short = 'e', value_name = "K=V")]
    pub env: Vec<OsString>,
    /// The command's working folder
    #[arg(long, short = 'C', value_name = "DIR", default_value = "/")]
    pub chdir: PathBuf,
    /// Let programs with the setuid bit, such as sudo, give rights inside the root
    #[arg(long)]
    pub setuid: bool,
    /// What is said for tasks of the farm.
    #[command(flatten)]
    pub of_farm: OfFarmArgs,
    /// The command and its arguments [default: sh]
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// `hayloft root rm`.
#[derive(Debug, Args)]
pub(crate) struct RmArgs {
    /// The roots
    #[arg(required = true, value_name = "NAME")]
    pub names: Vec<String>,
    /// Remove the layers of these names instead; roots must not use them any more
    #[arg(long, conflicts_with = "force")]
    pub layer: bool,
    /// Where layers are.
    #[command(flatten)]
    pub layers_dir: LayersArgs,
    /// Also when its command still runs
    #[arg(long, short = 'f')]
    pub force: bool,
}

fn parse_bind(text: &str) -> Result<Bind, String> {
    let (rest, writable) = match text.strip_suffix(":rw") {
        Some(rest) => (rest, true),
        None => (text.strip_suffix(":ro").unwrap_or(text), false),
    };
    let (source, target) = rest.split_once(':').unwrap_or((rest, rest));
    if source.is_empty() || !target.starts_with('/') || target.contains(':') {
        return Err(format!(
            "'{text}' is no bind: write SRC:DST or SRC:DST:rw, DST an absolute path in the root; neither has a ':' in it"
        ));
    }
    let source = std::path::absolute(source).map_err(|error| error.to_string())?;
    Ok(Bind { source, target: target.into(), writable })
}

/// `SIZE`, `zram:SIZE` or `none`.
pub(crate) fn parse_spill(text: &str) -> Result<Spill, String> {
    match text.strip_prefix("zram:") {
        _ if text == "none" => Ok(Spill::None),
        Some(size) => parse_size(size).map(Spill::Zram),
        None => parse_size(text).map(Spill::File),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binds_are_read_only_unless_said() {
        let bind = parse_bind("/a:/b").unwrap();
        assert_eq!((bind.source, bind.target, bind.writable), ("/a".into(), "/b".into(), false));
        assert!(parse_bind("/a:/b:rw").unwrap().writable);
        assert_eq!(parse_bind("/a").unwrap().target, PathBuf::from("/a"));
        for text in ["", "/a:b", ":/b", "a", "/a:/b:foo"] {
            assert!(parse_bind(text).is_err(), "{text}");
        }
    }

    #[test]
    fn spill_is_a_size_with_a_place() {
        assert_eq!(parse_spill("none"), Ok(Spill::None));
        assert_eq!(parse_spill("2G"), Ok(Spill::File(2 << 30)));
        assert_eq!(parse_spill("zram:1G"), Ok(Spill::Zram(1 << 30)));
        assert!(parse_spill("disk").is_err());
    }
}
