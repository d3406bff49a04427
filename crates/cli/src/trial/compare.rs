//! The same build in three places, step by step in turn.

use std::fs::{self, File};
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::Work;
use super::farm::Farm;
use super::places::{Memory, Place, kind_of};
use super::report::{self, Row};
use super::runner::Runner;
use super::source::Source;
use super::steps::{self, Step};
use crate::exit::{Exit, failure};
use crate::mounts::sync;
use crate::server::stats;
use crate::trial::args::TryArgs;
use crate::units::{show_count, show_duration};

/// The step that comes before the build system's own.
const UNPACK: &str = "unpack";
/// How many lines of a failed step's output are shown.
const TAIL_LINES: usize = 20;

/// Builds and prints the table. Exit code 0 when the build went the same way everywhere.
pub(super) fn run(runner: &Runner, work: &Work, args: &TryArgs) -> anyhow::Result<u8> {
    say(args, "Fetching the source of a program to build ...");
    let source = Source::get(runner, args.source.as_deref(), work.path())?;
    say(args, "Starting a server with a fresh store, creating a volume, mounting it ...");
    let memory = Memory::new(work.path())?;
    let disk = work.path().join("disk");
    fs::create_dir(&disk)?;
    let farm = Farm::start(runner, work.path(), args.store.as_deref(), &args.options, args.keep)?;
    let places = [
        Place { name: "local disk", what: format!("{}, {}", kind_of(&disk), disk.display()), folder: disk },
        Place {
            name: "tmpfs",
            what: format!("memory, {}", memory.folder().display()),
            folder: memory.folder().into(),
        },
        Place {
            name: "Hayloft",
            what: format!(
                "volume {} of the server at {}, {}",
                farm.volume,
                farm.address,
                farm.mount_point.display()
            ),
            folder: farm.mount_point.clone(),
        },
    ];
    if !args.json {
        println!("\nBuilding {} in three places, each step in all of them before the next:", source.name);
        places.iter().for_each(|place| println!("  {:10}  {}", place.name, place.what));
        println!();
    }
    let rows = Trial { runner, source: &source, places: &places, logs: work.path(), quiet: args.json }
        .run(args.rounds)?;
    let start = Instant::now();
    sync::flush(&farm.mount_point, None)?;
    let flush = start.elapsed();
    let stats = stats::of_mount(&farm.mount_point)?;
    let names: Vec<&str> = places.iter().map(|place| place.name).collect();
    if args.json {
        println!("{}", report::to_json(&source.name, &names, &rows, flush, &stats));
    } else {
        println!("{}", report::table(&names, &rows));
        println!("  Afterwards {} until the store had everything.\n", show_duration(flush));
        print!("{}", report::requests(&stats));
    }
    if args.keep {
        tell_kept(&farm, work);
    } else {
        say(args, "\nRemoving the mount, the volume, the server and all folders.");
    }
    farm.close()?;
    Ok(0)
}

/// Says what `--keep` leaves behind, and how to be rid of it.
pub(super) fn tell_kept(farm: &Farm, work: &Work) {
    let (dir, work) = (farm.mount_point.display(), work.path().display());
    eprintln!(
        "\nKept: the volume {} on {dir}, its server at {}, and the folder {work}",
        farm.volume, farm.address
    );
    eprintln!("To remove them: hayloft umount {dir}, end the process that listens there, rm -r {work}");
}

fn say(args: &TryArgs, text: &str) {
    if !args.json {
        println!("{text}");
    }
}

struct Trial<'a> {
    runner: &'a Runner,
    source: &'a Source,
    places: &'a [Place],
    logs: &'a Path,
    quiet: bool,
}

impl Trial<'_> {
    /// Everything `rounds` times; medians by step and place.
    fn run(&self, rounds: u32) -> anyhow::Result<Vec<Row>> {
        let mut all: Vec<(&'static str, Vec<Vec<Duration>>, bool)> = Vec::new();
        for round in 0..rounds {
            for (at, row) in self.round(round)?.into_iter().enumerate() {
                if all.len() <= at {
                    all.push((row.name, vec![Vec::new(); self.places.len()], false));
                }
                all[at].2 |= row.failed;
                row.times.into_iter().zip(&mut all[at].1).for_each(|(time, times)| times.push(time));
            }
        }
        let rows = all.into_iter().map(|(name, mut times, failed)| Row {
            name,
            times: times.iter_mut().map(|times| report::median(times)).collect(),
            failed,
        });
        Ok(rows.collect())
    }

    fn round(&self, round: u32) -> anyhow::Result<Vec<Row>> {
        let mut rows = vec![self.unpack(round)?];
        let first = self.build_dir(&self.places[0], round);
        if round == 0 && !self.quiet {
            let (files, bytes) = measure(&first)?;
            println!(
                "  {} source files, {} of text and data\n",
                show_count(files),
                crate::units::show_size(bytes)
            );
        }
        for step in steps::of_folder(&first)? {
            rows.push(self.step(&step, round)?);
        }
        for place in self.places {
            let mut rm = Command::new("rm");
            self.runner.run(rm.arg("-rf").arg("--").arg(self.build_dir(place, round)))?;
        }
        Ok(rows)
    }

    fn build_dir(&self, place: &Place, round: u32) -> std::path::PathBuf {
        place.folder.join(format!("build-{round}"))
    }

    fn unpack(&self, round: u32) -> anyhow::Result<Row> {
        let mut times = Vec::new();
        for place in self.places {
            self.progress(UNPACK, place, round);
            let dir = self.build_dir(place, round);
            fs::create_dir(&dir).with_context(|| format!("cannot write to {}", place.folder.display()))?;
            let mut command = self.source.unpack_into(&dir);
            let (time, ok) = self.timed(&mut command, UNPACK, place)?;
            if !ok {
                return Err(self.failed(UNPACK, place));
            }
            times.push(time);
        }
        Ok(Row { name: UNPACK, times, failed: false })
    }

    fn step(&self, step: &Step, round: u32) -> anyhow::Result<Row> {
        let mut times = Vec::new();
        let mut failures = Vec::new();
        for place in self.places {
            self.progress(step.name, place, round);
            let mut command = Command::new("sh");
            command.args(["-c", step.script]).current_dir(self.build_dir(place, round));
            command.env("JOBS", cores().to_string()).env("LC_ALL", "C").env("FORCE_UNSAFE_CONFIGURE", "1");
            command.env_remove("MAKEFLAGS").env_remove("CARGO_TARGET_DIR").env_remove("RUSTFLAGS");
            let (time, ok) = self.timed(&mut command, step.name, place)?;
            times.push(time);
            if !ok {
                failures.push(place);
            }
        }
        match failures.as_slice() {
            // Tests that fail on every file system say nothing about this one; a build has to work.
            [first, ..] if failures.len() < self.places.len() || !is_test(step) => {
                Err(self.failed(step.name, first))
            }
            failures => Ok(Row { name: step.name, times, failed: !failures.is_empty() }),
        }
    }

    fn timed(&self, command: &mut Command, step: &str, place: &Place) -> anyhow::Result<(Duration, bool)> {
        let log = File::create(self.log(step, place))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let start = Instant::now();
        let status = self.runner.run(command)?;
        Ok((start.elapsed(), status.success()))
    }

    fn log(&self, step: &str, place: &Place) -> std::path::PathBuf {
        self.logs.join(format!("{}-{}.log", step, place.name).replace(' ', "-"))
    }

    fn failed(&self, step: &str, place: &Place) -> anyhow::Error {
        let text = fs::read(self.log(step, place)).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        for line in &lines[lines.len().saturating_sub(TAIL_LINES)..] {
            eprintln!("  | {line}");
        }
        failure(Exit::Failed, format!("{step} failed on {}", place.name))
    }

    fn progress(&self, step: &str, place: &Place, round: u32) {
        if std::io::stderr().is_terminal() && !self.quiet {
            eprint!("\r\x1b[K  round {}: {step} on {} ...\r", round + 1, place.name);
            let _ = std::io::stderr().flush();
        }
    }
}

fn is_test(step: &Step) -> bool {
    ["check", "test"].iter().any(|word| step.name.contains(word))
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Files and bytes below a folder.
fn measure(folder: &Path) -> anyhow::Result<(u64, u64)> {
    let (mut files, mut bytes) = (0, 0);
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        if meta.is_dir() {
            let below = measure(&entry.path())?;
            files += below.0;
            bytes += below.1;
        } else {
            files += 1;
            bytes += meta.len();
        }
    }
    Ok((files, bytes))
}
