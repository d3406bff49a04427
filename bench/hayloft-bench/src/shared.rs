//! Several mounts of one file system, as several hosts would have it: who works where others work too.
//!
//! Every directory that is named is the same one, seen through another mount. Workers take turns over the mounts. Each
//! part goes on for a while, or for so many files, and every call is timed.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::machine::Machine;
use crate::sys;

#[derive(Args)]
pub(crate) struct Options {
    /// Workers, over all mounts
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// How long each part goes on
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// What is done, in this order
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Write every figure, and the machine, to this file
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// One directory, seen through each of the mounts
    #[arg(value_name = "DIR", required = true)]
    dirs: Vec<PathBuf>,
}

/// An object file of the usual size.
const OBJECT: usize = 20_000;
/// What libtool's dependency tracking writes for each object.
const DEPENDENCIES: usize = 3000;
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Create and rename, in one directory
    Depend,
    /// Create, each in a directory of its own
    Easy,
    /// Write and fsync, each in a directory of its own
    Durable,
    /// Create in one directory; then stat, read and delete what another has made
    Hard,
    /// Read and write one file in turn
    Pass,
    /// One makes objects, all others wait for each and read it
    Hand,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Part::Depend => "depend",
            Part::Easy => "easy",
            Part::Durable => "durable",
            Part::Hard => "hard",
            Part::Pass => "pass",
            Part::Hand => "hand",
        }
    }
}

/// How often who waits for an object looks.
const LOOK: Duration = Duration::from_millis(1);
/// What IO500's mdtest-hard writes to each file.
const HARD: usize = 3901;

/// How long the calls of one kind took, all workers together.
#[derive(Serialize)]
struct Line {
    part: &'static str,
    call: &'static str,
    calls: usize,
    /// All workers together.
    per_second: f64,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
}

/// The calls of one worker, by kind, in seconds.
type Calls = Vec<(&'static str, Vec<f64>)>;

/// Adds calls to those of their kind. Kinds stay in the order in which they came.
fn add(calls: &mut Calls, call: &'static str, times: impl IntoIterator<Item = f64>) {
    match calls.iter_mut().find(|(known, _)| *known == call) {
        Some((_, all)) => all.extend(times),
        None => calls.push((call, times.into_iter().collect())),
    }
}

struct Worker<'a> {
    number: usize,
    all: usize,
    dir: &'a Path,
    until: Instant,
    calls: Calls,
}

impl Worker<'_> {
    fn timed<T>(&mut self, call: &'static str, what: impl FnOnce() -> io::Result<T>) -> Result<T> {
        let begun = Instant::now();
        let done = what().with_context(|| format!("{call} in {}", self.dir.display()))?;
        add(&mut self.calls, call, [begun.elapsed().as_secs_f64()]);
        Ok(done)
    }

    /// Goes on until the time is over. Returns how often.
    fn repeat(&mut self, once: impl Fn(&mut Self, usize) -> Result<()>) -> Result<usize> {
        let mut done = 0;
        while Instant::now() < self.until {
            sys::check_interrupted()?;
            once(self, done)?;
            done += 1;
        }
        Ok(done)
    }

    fn create(&mut self, path: &Path, bytes: usize) -> Result<()> {
        self.timed("create", || File::create_new(path)?.write_all(&vec![b'x'; bytes]))
    }

    fn own_directory(&self) -> Result<PathBuf> {
        let own = self.dir.join(format!("own{}", self.number));
        fs::create_dir(&own)?;
        Ok(own)
    }

    /// Compilers with libtool: a temporary file beside the others, then its name.
    fn depend(&mut self) -> Result<usize> {
        self.repeat(|worker, n| {
            let number = worker.number;
            let [from, to] = ["Tpo", "Po"].map(|end| worker.dir.join(format!("w{number}-{n}.{end}")));
            worker.create(&from, DEPENDENCIES)?;
            worker.timed("rename", || fs::rename(&from, &to))
        })
    }

    /// Each in a directory of its own.
    fn easy(&mut self) -> Result<usize> {
        let own = self.own_directory()?;
        self.repeat(|worker, n| worker.create(&own.join(n.to_string()), 0))
    }

    /// Each in a directory of its own, and made durable.
    fn durable(&mut self) -> Result<usize> {
        let own = self.own_directory()?;
        self.repeat(|worker, n| {
            let mut file = File::create_new(own.join(n.to_string()))?;
            file.write_all(&[b'x'; HARD])?;
            worker.timed("fsync", || file.sync_all())
        })
    }

    /// All in one directory.
    fn hard(&mut self) -> Result<usize> {
        self.repeat(|worker, n| worker.create(&worker.dir.join(format!("f{}-{n}", worker.number)), HARD))
    }

    /// All write the same file in turn: what the one before has written is read, and one more is written. So each waits for the
    /// file to come over, and whoever is late finds what others have written meanwhile.
    fn pass_on(&mut self) -> Result<usize> {
        let path = self.dir.join("ball");
        self.repeat(|worker, n| {
            let mut file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
            let mut seen = Vec::new();
            worker.timed("read", || file.read_to_end(&mut seen))?;
            ensure!(seen.len() % HARD == 0 || n == 0, "{} is half written", path.display());
            worker.timed("write", || {
                file.rewind()?;
                file.write_all(&[b'x'; HARD])
            })
        })
    }

    /// One makes objects; all others read each as soon as it has its name.
    fn hand_over(&mut self) -> Result<usize> {
        let (ready, number) = (|dir: &Path, n: usize| dir.join(format!("o{n}")), self.number);
        if number > 0 {
            return self.repeat(|worker, n| {
                let path = ready(worker.dir, n);
                let mut bytes = Vec::with_capacity(OBJECT);
                let begun = Instant::now();
                while let Err(error) = fs::symlink_metadata(&path) {
                    ensure!(error.kind() == io::ErrorKind::NotFound, "{}: {error}", path.display());
                    if Instant::now() >= worker.until {
                        return Ok(());
                    }
                    // Who looks all the time takes the processor from who makes it.
                    std::thread::sleep(LOOK);
                }
                add(&mut worker.calls, "await", [begun.elapsed().as_secs_f64()]);
                worker.timed("read", || File::open(&path)?.read_to_end(&mut bytes))?;
                ensure!(bytes.len() == OBJECT, "{} is half written", path.display());
                Ok(())
            });
        }
        self.repeat(|worker, n| {
            let (temporary, path) = (worker.dir.join("temporary"), ready(worker.dir, n));
            worker.create(&temporary, OBJECT)?;
            worker.timed("rename", || fs::rename(&temporary, &path))
        })
    }

    /// What the next worker has made.
    fn look(&mut self, made: &[usize]) -> Result<()> {
        let other = (self.number + 1) % self.all;
        let paths: Vec<PathBuf> = (0..made[other]).map(|n| self.dir.join(format!("f{other}-{n}"))).collect();
        for path in &paths {
            sys::check_interrupted()?;
            self.timed("stat", || fs::symlink_metadata(path))?;
        }
        for path in &paths {
            sys::check_interrupted()?;
            let mut bytes = Vec::with_capacity(HARD);
            self.timed("read", || File::open(path)?.read_to_end(&mut bytes))?;
            ensure!(
                bytes.len() == HARD && bytes.iter().all(|byte| *byte == b'x'),
                "{} is not what was written",
                path.display()
            );
        }
        for path in &paths {
            sys::check_interrupted()?;
            self.timed("delete", || fs::remove_file(path))?;
        }
        Ok(())
    }
}

/// Lets all workers do something at the same time. Returns what each gives, and the lines.
fn part<T: Send>(
    options: &Options,
    part: &'static str,
    below: &Path,
    work: impl Fn(&mut Worker<'_>) -> Result<T> + Sync,
) -> Result<(Vec<T>, Vec<Line>)> {
    let all = options.workers as usize;
    let barrier = Barrier::new(all);
    let begun = Instant::now();
    let done: Vec<Result<(T, Calls)>> = std::thread::scope(|scope| {
        let (barrier, work) = (&barrier, &work);
        let workers: Vec<_> = (0..all)
            .map(|number| {
                let dir = options.dirs[number % options.dirs.len()].join(below);
                scope.spawn(move || {
                    barrier.wait();
                    let until = Instant::now() + Duration::from_secs_f64(options.seconds);
                    let mut worker = Worker { number, all, dir: &dir, until, calls: Vec::new() };
                    let given = work(&mut worker)?;
                    Ok((given, worker.calls))
                })
            })
            .collect();
        workers.into_iter().map(|worker| worker.join().expect("a worker")).collect()
    });
    let seconds = begun.elapsed().as_secs_f64();
    let mut by_call: Calls = Vec::new();
    let mut given = Vec::new();
    for done in done {
        let (one, calls) = done?;
        given.push(one);
        calls.into_iter().for_each(|(call, times)| add(&mut by_call, call, times));
    }
    Ok((given, by_call.into_iter().map(|(call, times)| line(part, call, times, seconds, all)).collect()))
}

/// `seconds`: of the whole part. Where it has calls of several kinds one after the other, each has its own time.
fn line(part: &'static str, call: &'static str, mut times: Vec<f64>, seconds: f64, workers: usize) -> Line {
    times.sort_by(f64::total_cmp);
    let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize] * 1e3;
    let busy = times.iter().sum::<f64>() / workers as f64;
    let own_seconds = if part == "look" { busy } else { seconds };
    Line {
        part,
        call,
        calls: times.len(),
        per_second: times.len() as f64 / own_seconds,
        p50_ms: at(0.5),
        p99_ms: at(0.99),
        max_ms: at(1.0),
    }
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    mounts: usize,
    workers: u32,
    lines: Vec<Line>,
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let machine = Machine::describe();
    let name = format!("hayloft-bench-shared-{}", std::process::id());
    let top = options.dirs[0].join(&name);
    fs::create_dir(&top).with_context(|| format!("{}", top.display()))?;
    let measured = measure(options, Path::new(&name));
    let removed = fs::remove_dir_all(&top).with_context(|| format!("{}", top.display()));
    let lines = measured?;
    removed?;
    println!("{} mounts, {} workers", options.dirs.len(), options.workers);
    println!(
        "{:<8}{:<8}{:>10}{:>12}{:>10}{:>10}{:>10}",
        "part", "call", "calls", "a second", "p50 ms", "p99 ms", "max ms"
    );
    for line in &lines {
        let Line { part, call, calls, per_second, p50_ms, p99_ms, max_ms } = line;
        println!("{part:<8}{call:<8}{calls:>10}{per_second:>12.0}{p50_ms:>10.2}{p99_ms:>10.2}{max_ms:>10.1}");
    }
    if let Some(path) = &options.json {
        let report = Report { machine, mounts: options.dirs.len(), workers: options.workers, lines };
        fs::write(path, serde_json::to_string_pretty(&report)?)
            .with_context(|| format!("{}", path.display()))?;
    }
    Ok(())
}

fn measure(options: &Options, below: &Path) -> Result<Vec<Line>> {
    let folder = |name: &str| -> Result<PathBuf> {
        let path = below.join(name);
        fs::create_dir(options.dirs[0].join(&path))?;
        // All have to see it.
        for dir in &options.dirs {
            fs::symlink_metadata(dir.join(&path)).context("the directories are not one and the same")?;
        }
        Ok(path)
    };
    let mut lines = Vec::new();
    for name in &options.parts {
        let dir = folder(name.name())?;
        let done = match name {
            Part::Depend => part(options, "depend", &dir, |worker| worker.depend())?,
            Part::Easy => part(options, "easy", &dir, |worker| worker.easy())?,
            Part::Durable => part(options, "durable", &dir, |worker| worker.durable())?,
            Part::Hard => {
                let (made, created) = part(options, "hard", &dir, |worker| worker.hard())?;
                lines.extend(created);
                let (_, looked) = part(options, "look", &dir, |worker| worker.look(&made))?;
                (Vec::new(), looked)
            }
            Part::Pass => part(options, "pass", &dir, |worker| worker.pass_on())?,
            Part::Hand => part(options, "hand", &dir, |worker| worker.hand_over())?,
        };
        lines.extend(done.1);
    }
    Ok(lines)
}
