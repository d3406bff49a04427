//! Flags of the farm's commands.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::units::parse_size;

/// Where the broker is, and how to get in.
#[derive(Debug, Default, Args)]
pub(crate) struct BrokerArgs {
    /// The farm's broker: nats://HOST:PORT or tls://HOST:PORT, several of one cluster separated by commas
    #[arg(long, value_name = "URL", env = "HAYLOFT_BROKER")]
    pub broker: Option<String>,
    /// Certificates of authorities that the broker's is checked with, PEM [default: the system's]
    #[arg(long, value_name = "FILE", env = "HAYLOFT_BROKER_CA")]
    pub broker_ca: Option<PathBuf>,
    /// A certificate of our own, PEM
    #[arg(long, value_name = "FILE", env = "HAYLOFT_BROKER_CERTIFICATE")]
    pub broker_certificate: Option<PathBuf>,
    /// Its key, PEM
    #[arg(long, value_name = "FILE", env = "HAYLOFT_BROKER_KEY")]
    pub broker_key: Option<PathBuf>,
    /// Credentials of NATS: a JWT with its key, as `nsc` writes them, or a user's key (nkey) alone
    #[arg(long, value_name = "FILE", env = "HAYLOFT_BROKER_CREDENTIALS")]
    pub broker_credentials: Option<PathBuf>,
}

/// What tasks need, and whose they are.
#[derive(Debug, Default, Args)]
pub(crate) struct NeedArgs {
    /// Memory that a task needs [default: not said]
    #[arg(long, value_name = "SIZE", env = "HAYLOFT_MEM", value_parser = parse_size)]
    pub mem: Option<u64>,
    /// A label that the host must have; may be given several times
    #[arg(long, value_name = "LABEL")]
    pub label: Vec<String>,
    /// Nobody waits for it: interactive builds go first
    #[arg(long, env = "HAYLOFT_BATCH")]
    pub batch: bool,
    /// Tasks that say the same belong to one build [default: those of one session]
    #[arg(long, value_name = "NAME", env = "HAYLOFT_BUILD")]
    pub build: Option<String>,
    /// Its weight among the user's builds
    #[arg(long, value_name = "N", env = "HAYLOFT_WEIGHT", default_value = "1")]
    pub weight: u32,
    /// Run in a build root of this layer: a name that hosts have (hayloft root create), or a path on the volume; may be given several
    /// times, the topmost first. Nothing runs here then
    #[arg(long = "root", value_name = "LAYER")]
    pub layers: Vec<String>,
    /// A root for each task alone, instead of one that the tasks of a build share on each host
    #[arg(long, requires = "layers")]
    pub isolate: bool,
}

/// `hayloft task`.
#[derive(Debug, Args)]
#[command(after_help = "\
The command runs on a host of the farm as if it ran here: in the same folder, which has to be on a mounted volume, with the same
environment, umask, user and standard streams; signals are passed on, and the exit code is the command's. All that it has
started ends with it. Without a broker, outside of volumes, and while the farm is away it runs here, when one of this host's slots
(as many as cores) is free.

Exit code 125: the farm failed, not the command.

Examples:
  hayloft task -- cc -c x.c -o x.o
  hayloft task --mem 4G --label gpu -- ./simulate
  hayloft task --root bookworm --isolate -- make check
  cmake -DCMAKE_C_COMPILER_LAUNCHER='hayloft;task;--' ...
  HAYLOFT_BROKER=nats://farm1:4222 hayloft task --farm -- hostname")]
pub(crate) struct TaskArgs {
    /// What the farm is reached by.
    #[command(flatten)]
    pub broker: BrokerArgs,
    /// What it needs.
    #[command(flatten)]
    pub need: NeedArgs,
    /// Slots that it takes
    #[arg(long, value_name = "N", default_value = "1")]
    pub slots: u32,
    /// Run it here, in one of this host's slots
    #[arg(long, conflicts_with_all = ["farm", "layers"])]
    pub here: bool,
    /// Run it on the farm only: wait for that while it is away
    #[arg(long)]
    pub farm: bool,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// `hayloft make`.
#[derive(Debug, Args)]
#[command(
    disable_version_flag = true,
    after_help = "\
GNU make itself, with the arguments that it knows; flags above stand before them. Its recipes run on the hosts of the farm as if they
ran here, when the folder is on a mounted volume; those that took little time before, sub-makes, and recipes with + run here. Without a
farm, and while it is away, all run here, as many at a time as there are cores. -j without a number is as many as the farm has slots;
without -j make runs one recipe at a time, here. How long recipes took is kept in .hayloft-history.

Exit codes are make's; 125: make was not run.

Examples:
  hayloft make -j -- all
  hayloft make --summary --explain -j -k check
  hayloft make --record -j -- all
  hayloft make --root /mnt/builds/toolchain -j -- all
  HAYLOFT_BROKER=nats://farm1:4222 hayloft make --batch -j100 -C src"
)]
pub(crate) struct MakeArgs {
    /// What the farm is reached by.
    #[command(flatten)]
    pub broker: BrokerArgs,
    /// What each recipe needs.
    #[command(flatten)]
    pub need: NeedArgs,
    /// Tell at the end how many recipes ran where
    #[arg(long)]
    pub summary: bool,
    /// Tell at the end where the time of the slowest recipes went
    #[arg(long)]
    pub explain: bool,
    /// Record what recipes read and write, all of which run on the farm then, and tell at the end what no rule names
    #[arg(long, conflicts_with = "layers")]
    pub record: bool,
    /// The same, and write all of it to this file as JSON
    #[arg(long, value_name = "FILE", conflicts_with = "layers")]
    pub record_to: Option<PathBuf>,
    /// Options and targets of make
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "MAKE ARGUMENTS")]
    pub arguments: Vec<OsString>,
}

/// `hayloft farm`.
#[derive(Debug, Args)]
#[command(subcommand_required = true, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
Examples:
  hayloft farm agent --slots 25 --broker nats://farm1:4222
  hayloft farm status --broker nats://farm1:4222
  hayloft farm top
  hayloft farm slurm --max 30 --slots 25 -- --exclusive agent.sh")]
pub(crate) struct FarmArgs {
    /// What to do.
    #[command(subcommand)]
    pub verb: FarmVerb,
}

/// The verbs of `hayloft farm`.
#[derive(Debug, Subcommand)]
pub(crate) enum FarmVerb {
    /// Offer this host's slots to the farm
    Agent(Box<AgentArgs>),
    /// Show hosts and builds
    Status(StatusArgs),
    /// Show hosts and builds, again and again
    Top(TopArgs),
    /// Have Slurm run as many agents as builds want
    Slurm(Box<SlurmArgs>),
}

/// `hayloft farm slurm`.
#[derive(Debug, Args)]
#[command(after_help = "\
What stands behind -- is for sbatch: options, and the script that becomes the agent (exec hayloft farm agent). It finds HAYLOFT_BROKER and
HAYLOFT_SLOTS set. What tasks wait for is met by further jobs when it has lasted for a while; of jobs that were not needed for a longer while
those go that have least to do, when their agents have finished what they run. While no agent is there tasks wait for the first job.

It keeps nothing, and may be stopped and started again; its jobs go on. Runs where sbatch, squeue and scancel do.

Examples:
  hayloft farm slurm --max 30 --slots 25 -- --exclusive --time=8:00:00 agent.sh
  hayloft farm slurm --min 2 --max 100 --slots 64 --shrink-after 900 -- --cpus-per-task=64 --mem=200G /etc/hayloft/agent.sh")]
pub(crate) struct SlurmArgs {
    /// What the farm is reached by.
    #[command(flatten)]
    pub broker: BrokerArgs,
    /// Fewest jobs
    #[arg(long, value_name = "JOBS", default_value = "0")]
    pub min: u32,
    /// Most jobs
    #[arg(long, value_name = "JOBS", value_parser = clap::value_parser!(u32).range(1..))]
    pub max: u32,
    /// Slots of a job's agent
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub slots: u32,
    /// Jobs are submitted for what has waited for so long
    #[arg(long, value_name = "SECONDS", default_value = "3")]
    pub grow_after: u64,
    /// Jobs go that were not needed for so long
    #[arg(long, value_name = "SECONDS", default_value = "300")]
    pub shrink_after: u64,
    /// By this name its jobs are told from others of this user
    #[arg(long, value_name = "NAME", default_value = "hayloft-agent")]
    pub name: String,
    /// Options of sbatch, and the script
    #[arg(last = true, required = true, value_name = "SBATCH ARGUMENTS")]
    pub batch: Vec<OsString>,
}

/// `hayloft farm agent`.
#[derive(Debug, Args)]
#[command(after_help = "\
Prints one line when it has the broker: offering N slots as HOST. SIGTERM and SIGINT end it; its tasks run elsewhere then, or have
--grace to end. As a job of Slurm it has the label slurm=JOB. With
NOTIFY_SOCKET set (systemd, Type=notify) it reports itself ready there. As root it runs tasks as the user who has submitted them,
if there is one of that name and number here; never as root unless that is allowed. Otherwise it runs tasks of its own user.

Examples:
  hayloft farm agent --broker nats://farm1:4222
  hayloft farm agent --slots 25 --memory 96G --label gpu --broker nats://farm1:4222,nats://farm2:4222
  hayloft farm agent --user-map '*=builder' --mount /mnt/builds --broker tls://farm1:4222")]
pub(crate) struct AgentArgs {
    /// What the farm is reached by.
    #[command(flatten)]
    pub broker: BrokerArgs,
    /// Slots that it offers [default: the number of cores]
    #[arg(long, value_name = "N", env = "HAYLOFT_SLOTS")]
    pub slots: Option<u32>,
    /// Memory that tasks may ask for in sum [default: that of the host]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub memory: Option<u64>,
    /// A label that tasks may ask for; may be given several times
    #[arg(long, value_name = "LABEL")]
    pub label: Vec<String>,
    /// Mount whose volume tasks may use; may be given several times [default: all of this host]
    #[arg(long, value_name = "DIR")]
    pub mount: Vec<PathBuf>,
    /// Run tasks of the first user as the second; * is everybody else; may be given several times
    #[arg(long, value_name = "FROM=TO", value_parser = parse_map)]
    pub user_map: Vec<(String, String)>,
    /// Tasks may run as root
    #[arg(long)]
    pub allow_root: bool,
    /// The host's name in the farm [default: its own]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// How long tasks run on without word of who has submitted them
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = clap::value_parser!(u64).range(3..=120))]
    pub lease: u64,
    /// How long tasks that run may run on after SIGTERM or SIGINT; with the second one they end at once
    #[arg(long, value_name = "SECONDS", default_value = "0")]
    pub grace: u64,
    /// End when the parent process ends.
    #[arg(long, hide = true)]
    pub die_with_parent: bool,
}

/// `hayloft farm status`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hayloft farm status --broker nats://farm1:4222
  hayloft farm status --json")]
pub(crate) struct StatusArgs {
    /// What the farm is reached by.
    #[command(flatten)]
    pub broker: BrokerArgs,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `hayloft farm top`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hayloft farm top
  hayloft farm top --interval 5 --broker nats://farm1:4222")]
pub(crate) struct TopArgs {
    /// What the farm is reached by.
    #[command(flatten)]
    pub broker: BrokerArgs,
    /// How often
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub interval: u64,
}

fn parse_map(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((from, to)) if !from.is_empty() && !to.is_empty() => Ok((from.to_owned(), to.to_owned())),
        _ => Err(format!("'{text}' maps no user: write FROM=TO, as in '*=builder'")),
    }
}
