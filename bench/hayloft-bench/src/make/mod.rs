//! The workload `make`: a real package, made with recipes in turn on several mounts of one file system.

mod hosts;
mod products;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Serialize;

use crate::build::source::Source;
use crate::build::{check_nothing_was_rebuilt, in_path, objects, timed};
use crate::report::{Measurement, Phase, Role, Run, Unit};
use crate::target::{self, Mounts, WorkDir};
use crate::{Repeat, sys};
use hosts::Host;
use products::Products;

/// Options of the workload.
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    repeat: Repeat,
    /// A tarball or an unpacked directory with a `configure`; without it, GNU hello from Debian's archive
    #[arg(long, value_name = "TARBALL_OR_DIR")]
    source: Option<PathBuf>,
    /// What the package is configured to compile with; the default leaves less to the compiler, and more to the file system
    #[arg(long, value_name = "FLAGS", default_value = "-O0 -g", allow_hyphen_values = true)]
    cflags: String,
    /// Parallel jobs of make [default: as many as the target with the most mounts has]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    jobs: Option<u32>,
    /// Processes of a file system, whose processor time counts as well; may be given several times
    #[arg(long, value_name = "NAME=PID[,PID...]")]
    processes: Vec<Processes>,
    /// File systems to measure: with one mount make is as usual, with several each recipe is sent to one of them; the first
    /// is the baseline
    #[arg(value_name = "NAME=DIR[,DIR...]", required = true)]
    targets: Vec<Mounts>,
}

/// The processes of one target.
#[derive(Clone, Debug, PartialEq)]
struct Processes {
    name: String,
    pids: Vec<u32>,
}

impl FromStr for Processes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || "expected NAME=PID[,PID...]".to_owned();
        let (name, pids) = text.split_once('=').ok_or_else(wrong)?;
        let pids = pids.split(',').map(str::parse).collect::<Result<_, _>>().map_err(|_| wrong())?;
        Ok(Processes { name: name.into(), pids })
    }
}

impl Processes {
    fn cpu_seconds(&self) -> Result<f64> {
        let one = |pid: &u32| {
            sys::process_cpu_seconds(*pid).with_context(|| format!("{}: process {pid}", self.name))
        };
        self.pids.iter().map(one).sum()
    }
}

/// What the results say about the workload.
#[derive(Serialize)]
struct Described {
    name: &'static str,
    source: String,
    jobs: u32,
    cflags: String,
}

/// Room for what coreutils is built into, twice.
const BYTES_NEEDED: u64 = 200_000_000;

/// In the order of [`Making::measure`].
const PHASES: [Phase; 6] = [
    Phase { name: "copy", unit: Unit::Seconds, role: Role::Apart },
    Phase { name: "make", unit: Unit::Seconds, role: Role::Counted },
    Phase { name: "its processes", unit: Unit::Seconds, role: Role::Apart },
    Phase { name: "and the file system's", unit: Unit::Seconds, role: Role::Apart },
    Phase { name: "make again", unit: Unit::Seconds, role: Role::Apart },
    Phase { name: "delete", unit: Unit::Seconds, role: Role::Apart },
];

/// Sends each recipe to another host; what the tests of distributed builds use.
const ROUND_ROBIN: &str = include_str!("../../../../tests/lib/round-robin.sh");
const CONFIGURE: &str = r#"cd "$1"; ./configure --disable-nls CFLAGS="$2""#;
const COPY: &str = r#"cp -a "$2/." "$1""#;
const MAKE: &str = r#"cd "$1"; shift; exec make "$@""#;

/// Measures every target, prints the tables and writes the results.
pub(crate) fn run(options: &Options) -> Result<()> {
    let targets = target::check_mounts(&options.targets, BYTES_NEEDED, 10_000)?;
    for tool in ["tar", "make", "cc", "unshare", "nsenter"] {
        ensure!(
            in_path(tool),
            "{tool} is not in $PATH: the workload make needs tar, make, a C compiler and util-linux"
        );
    }
    for processes in &options.processes {
        let known = targets.iter().any(|target| target.name() == processes.name);
        ensure!(known, "--processes: no target {}", processes.name);
    }
    let source = Source::find(options.source.as_deref())?;
    let most = targets.iter().map(|target| target.dirs.len()).max().unwrap_or(1) as u32;
    let jobs = options.jobs.unwrap_or(most);
    let described = Described { name: "make", source: source.name(), jobs, cflags: options.cflags.clone() };
    eprintln!("source: {}; {jobs} jobs; CFLAGS={}", described.source, options.cflags);
    let firsts = targets.iter().map(|target| target.first.clone()).collect();
    let mut run = Run::new(described, PHASES.to_vec(), None, firsts);
    let work = WorkDir::create(&std::env::temp_dir(), "make")?;
    let making = Making::prepare(work.path(), &source, jobs, &options.cflags)?;
    let mut expected = None;
    for round in 1..=options.repeat.rounds {
        for (target, measured) in targets.iter().zip(&mut run.measurements) {
            eprintln!("round {round} of {}: {}", options.repeat.rounds, target.name());
            let processes = options.processes.iter().find(|processes| processes.name == target.name());
            measured.push(
                making.measure(target, processes, &mut expected).with_context(|| target.name().to_owned())?,
            );
        }
    }
    println!("{}", run.tables().trim_end());
    println!(
        "\nProcessor time of make with all that it starts, and with that of the file system's processes, in seconds."
    );
    options.repeat.json.as_deref().map_or(Ok(()), |path| run.write_json(path))
}

/// What all rounds need.
struct Making {
    /// Where each host has the tree: outputs hold their paths.
    tree: PathBuf,
    /// Unpacked and configured there, once.
    configured: PathBuf,
    /// make's shell where recipes are sent.
    shell: PathBuf,
    /// Which host each recipe was sent to.
    sent: PathBuf,
    log: PathBuf,
    jobs: String,
}

impl Making {
    fn prepare(work: &Path, source: &Source, jobs: u32, cflags: &str) -> Result<Self> {
        let [tree, configured, shell, sent, log] =
            ["tree", "configured", "shell", "sent", "log"].map(|name| work.join(name));
        for folder in [&tree, &configured] {
            fs::create_dir(folder)?;
        }
        fs::write(&shell, ROUND_ROBIN)?;
        fs::set_permissions(&shell, fs::Permissions::from_mode(0o755))?;
        timed("unpack", source.unpack().current_dir(&configured), &log)?;
        let arguments = [tree.as_os_str(), OsStr::new(cflags)];
        let took =
            timed("configure", &mut Host::new(&configured, &tree)?.script(CONFIGURE, &arguments), &log)?;
        eprintln!("configured in {:.1} s, for all", took.seconds);
        Ok(Making { tree, configured, shell, sent, log, jobs: format!("-j{jobs}") })
    }

    /// One round on one target, in the order of the phases. What it makes has to be what the first has made.
    fn measure(
        &self,
        target: &Mounts,
        processes: Option<&Processes>,
        expected: &mut Option<Products>,
    ) -> Result<Vec<Measurement>> {
        let work = WorkDir::create(&target.dirs[0], "make")?;
        let name = work.path().file_name().context("a folder without a name")?;
        let folders: Vec<PathBuf> = target.dirs.iter().map(|dir| dir.join(name)).collect();
        let hosts = folders.iter().map(|folder| Host::new(folder, &self.tree)).collect::<Result<Vec<_>>>()?;
        let copy = timed("copy", &mut hosts[0].script(COPY, &[&self.tree, &self.configured]), &self.log)?;
        target::settle(&target.first)?;
        let [make, its_own, in_all] = self.make(&hosts, processes)?;
        let made = objects(work.path())?;
        let again = timed("make again", &mut self.make_on(&hosts, hosts.len() - 1), &self.log)?;
        check_nothing_was_rebuilt(work.path(), &made)?;
        drop(hosts);
        for folder in &folders {
            let products = Products::of(folder)?;
            match expected {
                Some(expected) => products
                    .compare(expected)
                    .with_context(|| format!("not made as first: {}", folder.display()))?,
                None => {
                    eprintln!("{} files and folders, {} objects", products.count(), made.len());
                    *expected = Some(products);
                }
            }
        }
        let started = Instant::now();
        fs::remove_dir_all(work.path()).context("delete")?;
        let delete = seconds(started.elapsed().as_secs_f64());
        target::settle(&target.first)?;
        Ok(vec![copy, make, its_own, in_all, again, delete])
    }

    /// Makes it, and sees that each host has had its part. Returns the time, its processor time, and that with the file system's.
    fn make(&self, hosts: &[Host], processes: Option<&Processes>) -> Result<[Measurement; 3]> {
        fs::write(&self.sent, "")?;
        let of_file_system = || processes.map_or(Ok(0.0), Processes::cpu_seconds);
        let before = [sys::children_cpu_seconds()?, of_file_system()?];
        let make = timed("make", &mut self.make_on(hosts, 0), &self.log)?;
        let its_own = sys::children_cpu_seconds()? - before[0];
        let in_all = its_own + of_file_system()? - before[1];
        if hosts.len() > 1 {
            let sent = fs::read_to_string(&self.sent)?;
            let counts: Vec<usize> = (0..hosts.len())
                .map(|n| sent.lines().filter(|line| *line == n.to_string()).count())
                .collect();
            eprintln!("recipes sent to each mount: {counts:?}");
            ensure!(counts.iter().filter(|count| **count > 0).count() > 1, "all recipes went to one mount");
        }
        Ok([make, seconds(its_own), seconds(in_all)])
    }

    /// make on one host, with its recipes on all of them.
    fn make_on(&self, hosts: &[Host], host: usize) -> Command {
        let mut arguments = vec![self.tree.clone().into_os_string(), self.jobs.clone().into()];
        if hosts.len() > 1 {
            arguments.push(format!("SHELL={}", self.shell.display()).into());
        }
        let pids: Vec<String> = hosts.iter().map(|host| host.pid().to_string()).collect();
        let mut command = hosts[host].script(MAKE, &arguments);
        command.env("ROUND_ROBIN", pids.join(" ")).env("ROUND_ROBIN_LOG", &self.sent);
        command
    }
}

fn seconds(seconds: f64) -> Measurement {
    Measurement { seconds, ..Measurement::default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_have_the_name_of_their_target() {
        let expected = Processes { name: "hayloft".into(), pids: vec![1, 23] };
        assert_eq!("hayloft=1,23".parse::<Processes>().unwrap(), expected);
        for wrong in ["12", "hayloft=", "hayloft=1,", "hayloft=x"] {
            assert!(wrong.parse::<Processes>().is_err(), "{wrong}");
        }
        let own = Processes { name: "own".into(), pids: vec![std::process::id()] };
        assert!(own.cpu_seconds().is_ok());
    }
}
