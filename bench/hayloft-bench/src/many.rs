//! Very many small files, and what they cost the processes that serve them: processor time a file, and memory.
//!
//! Files are made in portions, so that one run shows whether the cost grows with what is there already. Each portion is
//! made durable; what the server does afterwards by itself, such as compactions, is waited for and counted with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::machine::Machine;
use crate::rng::Rng;
use crate::sys;

#[derive(Args)]
pub(crate) struct Options {
    /// Files in all
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(1..))]
    files: u64,
    /// Files that are made, or deleted, before the next line is measured
    #[arg(long, default_value_t = 50_000, value_parser = clap::value_parser!(u64).range(1..))]
    portion: u64,
    /// Files of one directory
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    per_directory: u64,
    /// Bytes of the smallest and of the largest file; all sizes between are equally frequent
    #[arg(long, value_delimiter = ',', default_values_t = [500, 4500])]
    sizes: Vec<usize>,
    /// Measure at these numbers of files in turn, instead of --files: fill the volume up to each, or delete down to it, then
    /// create, walk (what nobody has looked at since it was made) and delete one portion. Each at least one portion more than the
    /// places before it in the list
    #[arg(long, value_delimiter = ',', value_name = "FILES", conflicts_with_all = ["files", "parts"])]
    at: Vec<u64>,
    /// Go on in DIR itself, where earlier runs with this option have left so many files, and leave there what is there at the end:
    /// create begins behind these, and --at with as many
    #[arg(long, value_name = "FILES")]
    goes_on: Option<u64>,
    /// What is done, in this order; all portions of one before the next
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Process of the server
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// Process of the client that has DIR mounted
    #[arg(long, value_name = "PID")]
    client_pid: Option<u32>,
    /// Walks and reads through this mount of the same directory
    #[arg(long, value_name = "DIR")]
    through: Option<PathBuf>,
    /// Longest wait for the server to come to rest after a portion, seconds
    #[arg(long, default_value_t = 60.0)]
    rest: f64,
    /// Write every figure, and the machine, to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Where the files are made
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Create, write and close each file
    Create,
    /// List every directory and stat every name
    Walk,
    /// Read every file
    Read,
    /// Delete all of it
    Delete,
    /// As create, up to a number of files
    #[value(skip)]
    Fill,
    /// As delete, down to a number of files
    #[value(skip)]
    Empty,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Part::Create => "create",
            Part::Walk => "walk",
            Part::Read => "read",
            Part::Delete => "delete",
            Part::Fill => "fill",
            Part::Empty => "empty",
        }
    }
}

/// How long a server does next to nothing that has come to rest: longer than it waits between two compactions.
const REST: Duration = Duration::from_secs(5);
/// The share of a processor that is next to nothing.
const NOTHING: f64 = 0.04;

/// What a process has used.
#[derive(Clone, Copy, Default)]
struct Used {
    cpu_secs: f64,
    written: u64,
    memory: u64,
    /// Since it was measured last.
    memory_peak: u64,
}

/// A process that is looked at; without a number all its figures are 0.
#[derive(Clone, Copy)]
struct Process(Option<u32>);

impl Process {
    fn used(self) -> Result<Used> {
        let Some(pid) = self.0 else { return Ok(Used::default()) };
        let read = |name: &str| {
            let path = format!("/proc/{pid}/{name}");
            fs::read_to_string(&path).context(path)
        };
        let number = |text: &str, name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
        };
        let status = read("status")?;
        Ok(Used {
            cpu_secs: sys::process_cpu_seconds(pid)?,
            // Only its owner and root may know.
            written: read("io").map_or(0, |io| number(&io, "write_bytes:")),
            memory: number(&status, "VmRSS:") << 10,
            memory_peak: number(&status, "VmHWM:") << 10,
        })
    }

    /// The next peak is counted from now on; not possible for who is not its owner.
    fn forget_peak(self) {
        if let Some(pid) = self.0 {
            let _ = fs::write(format!("/proc/{pid}/clear_refs"), "5");
        }
    }

    /// Waits until it does next to nothing, for `most` seconds.
    fn rest(self, most: f64) -> Result<()> {
        let begun = Instant::now();
        while self.0.is_some() && begun.elapsed().as_secs_f64() < most {
            sys::check_interrupted()?;
            let before = self.used()?.cpu_secs;
            std::thread::sleep(REST);
            if self.used()?.cpu_secs - before < REST.as_secs_f64() * NOTHING {
                break;
            }
        }
        Ok(())
    }
}

/// What a portion has taken.
#[derive(Serialize)]
struct Line {
    part: &'static str,
    /// Files that were there when it began.
    before: u64,
    files: u64,
    /// Until all of it was durable.
    seconds: f64,
    /// Processor time of the server until all of it was durable, microseconds a file.
    server_us: f64,
    /// The same until the server had come to rest.
    server_all_us: f64,
    server_written_mib: u64,
    server_peak_mib: u64,
    server_mib: u64,
    client_us: f64,
    client_peak_mib: u64,
    client_mib: u64,
}

const HEAD: &str = "part       before    files  seconds  server us  with rest  MiB written   peak     now  client us   peak     now";

impl Line {
    fn print(&self) {
        println!(
            "{:<7}{:>10}{:>9}{:>9.2}{:>11.1}{:>11.1}{:>13}{:>7}{:>8}{:>11.1}{:>7}{:>8}",
            self.part,
            self.before,
            self.files,
            self.seconds,
            self.server_us,
            self.server_all_us,
            self.server_written_mib,
            self.server_peak_mib,
            self.server_mib,
            self.client_us,
            self.client_peak_mib,
            self.client_mib
        );
    }
}

struct Run<'a> {
    options: &'a Options,
    /// The directory, through the mount that writes and through the one that reads.
    top: PathBuf,
    seen: PathBuf,
    server: Process,
    client: Process,
}

impl Run<'_> {
    fn directory(&self, top: &Path, number: u64) -> PathBuf {
        // Not all directories in one.
        top.join(format!("p{}", number / 1000)).join(format!("d{number}"))
    }

    fn directories(&self, from: u64, to: u64) -> std::ops::Range<u64> {
        from / self.options.per_directory..to.div_ceil(self.options.per_directory)
    }

    fn create(&self, from: u64, to: u64, bytes: &[u8]) -> Result<()> {
        let [least, most] = [self.options.sizes[0], self.options.sizes[1]];
        for number in from..to {
            sys::check_interrupted()?;
            let dir = self.directory(&self.top, number / self.options.per_directory);
            if number.is_multiple_of(self.options.per_directory) || number == from {
                fs::create_dir_all(&dir)?;
            }
            let mut rng = Rng::new(number);
            let size = least + rng.below(most - least + 1);
            // No two files begin alike.
            let begin = rng.below(bytes.len() - size);
            fs::write(dir.join(format!("file{number}.c")), &bytes[begin..begin + size])?;
        }
        Ok(())
    }

    fn walk(&self, from: u64, to: u64, reads: bool) -> Result<()> {
        let mut seen = 0;
        for number in self.directories(from, to) {
            for entry in fs::read_dir(self.directory(&self.seen, number))? {
                sys::check_interrupted()?;
                let path = entry?.path();
                if reads {
                    fs::read(&path)?;
                } else {
                    fs::symlink_metadata(&path)?;
                }
                seen += 1;
            }
        }
        ensure!(seen == to - from, "{seen} files where {} were made", to - from);
        Ok(())
    }

    fn delete(&self, from: u64, to: u64) -> Result<()> {
        for number in self.directories(from, to) {
            sys::check_interrupted()?;
            fs::remove_dir_all(self.directory(&self.top, number))?;
        }
        Ok(())
    }

    /// Files `from..to`, while there are `before`.
    fn portion(&self, part: Part, (from, to): (u64, u64), before: u64, bytes: &[u8]) -> Result<Line> {
        let (server, client) = (self.server, self.client);
        server.forget_peak();
        client.forget_peak();
        let (server_before, client_before, begun) = (server.used()?, client.used()?, Instant::now());
        match part {
            Part::Create | Part::Fill => self.create(from, to, bytes)?,
            Part::Walk => self.walk(from, to, false)?,
            Part::Read => self.walk(from, to, true)?,
            Part::Delete | Part::Empty => self.delete(from, to)?,
        }
        // A file system in user space may not be told of the one, and is asked for all of it by the other.
        let top = File::open(&self.top)?;
        sys::syncfs(&top)?;
        top.sync_all()?;
        let (seconds, durable) = (begun.elapsed().as_secs_f64(), server.used()?);
        server.rest(self.options.rest)?;
        let (server, client) = (server.used()?, client.used()?);
        let files = to - from;
        let per_file = |now: Used, before: Used| (now.cpu_secs - before.cpu_secs) * 1e6 / files as f64;
        Ok(Line {
            part: part.name(),
            before,
            files,
            seconds,
            server_us: per_file(durable, server_before),
            server_all_us: per_file(server, server_before),
            server_written_mib: (server.written - server_before.written) >> 20,
            server_peak_mib: server.memory_peak >> 20,
            server_mib: server.memory >> 20,
            client_us: per_file(client, client_before),
            client_peak_mib: client.memory_peak >> 20,
            client_mib: client.memory >> 20,
        })
    }

    fn measure(&self) -> Result<Vec<Line>> {
        let mut rng = Rng::new(1);
        // Half of it can be compressed away, as of binaries and of dense text.
        let bytes: Vec<u8> = std::iter::repeat_with(|| rng.next().to_le_bytes().map(|byte| byte & 0x0f))
            .take(1 << 20)
            .flatten()
            .collect();
        println!("{HEAD}");
        let mut lines = Vec::new();
        let mut measure = |part: Part, files: (u64, u64), before: u64| -> Result<()> {
            let line = self.portion(part, files, before, &bytes).context(part.name())?;
            line.print();
            lines.push(line);
            Ok(())
        };
        if !self.options.at.is_empty() {
            self.measure_at(&mut measure)?;
            return Ok(lines);
        }
        let (files, there) = (self.options.files, self.options.goes_on.unwrap_or(0));
        for part in &self.options.parts {
            let mut from = if *part == Part::Create { there } else { 0 };
            while from < files {
                let to = (from + self.options.portion).min(files);
                measure(*part, (from, to), if *part == Part::Delete { files - from } else { from })?;
                from = to;
            }
        }
        Ok(lines)
    }

    /// A portion of each part at each number of files.
    fn measure_at(&self, measure: &mut impl FnMut(Part, (u64, u64), u64) -> Result<()>) -> Result<()> {
        let portion = self.options.portion;
        let mut there = self.options.goes_on.unwrap_or(0);
        for (at, wanted) in self.options.at.iter().copied().enumerate() {
            match wanted {
                more if more > there => measure(Part::Fill, (there, more), there)?,
                less if less < there => measure(Part::Empty, (less, there), there)?,
                _ => {}
            }
            there = wanted;
            let unseen = at as u64 * portion;
            measure(Part::Create, (there, there + portion), there)?;
            measure(Part::Walk, (unseen, unseen + portion), there + portion)?;
            measure(Part::Delete, (there, there + portion), there + portion)?;
        }
        Ok(())
    }
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    per_directory: u64,
    sizes: Vec<usize>,
    lines: Vec<Line>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    ensure!(
        options.sizes.len() == 2 && options.sizes[0] <= options.sizes[1] && options.sizes[1] < 1 << 20,
        "--sizes: at most 1 MiB, the least first"
    );
    ensure!(
        options.portion.is_multiple_of(options.per_directory),
        "--portion has to be a multiple of --per-directory"
    );
    let mut needed = (0..).map(|at: u64| (at + 1) * options.portion).zip(&options.at);
    ensure!(
        needed.all(|(needed, at)| *at >= needed && at.is_multiple_of(options.portion)),
        "--at: multiples of --portion, the first at least one of them, the second two, and so on"
    );
    let name = match options.goes_on {
        Some(_) => ".".to_string(),
        None => format!("hayloft-bench-many-{}", std::process::id()),
    };
    let run = Run {
        options,
        top: options.dir.join(&name),
        seen: options.through.as_ref().unwrap_or(&options.dir).join(&name),
        server: Process(options.server_pid),
        client: Process(options.client_pid),
    };
    if options.goes_on.is_none() {
        fs::create_dir(&run.top).with_context(|| format!("{}", run.top.display()))?;
    }
    let machine = Machine::describe();
    let measured = run.measure();
    let removed = match options.goes_on {
        Some(_) => Ok(()),
        None => fs::remove_dir_all(&run.top).with_context(|| format!("{}", run.top.display())),
    };
    let lines = measured?;
    removed?;
    if let Some(path) = &options.json {
        let (per_directory, sizes) = (options.per_directory, options.sizes.clone());
        let report = Report { machine, per_directory, sizes, lines };
        fs::write(path, serde_json::to_string_pretty(&report)?)
            .with_context(|| format!("{}", path.display()))?;
    }
    Ok(())
}
