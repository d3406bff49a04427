//! Several mounts of one file system, as several hosts would have it: who works where others work too.
//!
//! Workers take turns over the mounts of a target. Each part goes on for a while, or for so many files, and every call is
//! timed.

mod lines;
mod worker;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;

use crate::machine::Machine;
use crate::target::{self, Mounts, WorkDir};
use crate::{Repeat, sys};
use lines::Line;
use worker::{Calls, Worker, add};

/// Names that are in the directory of a crowd before it begins.
const CROWD_NAMES: usize = 100;

#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    repeat: Repeat,
    /// Workers, over all mounts
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    workers: u32,
    /// How long each part goes on
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// What is done, in this order
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    #[command(flatten)]
    looks: Looks,
    /// Process of the server of the last target: the part `crowd` tells what an operation costs it
    #[arg(long, value_name = "PID")]
    server_pid: Option<u32>,
    /// File systems to measure, each with one directory seen through all of its mounts; the first is the baseline
    #[arg(value_name = "NAME=DIR[,DIR...]", required = true)]
    targets: Vec<Mounts>,
}

/// How those look who only look, in `watched`.
#[derive(Args, Clone, Copy, Serialize)]
struct Looks {
    /// How long a looker waits after each look, milliseconds
    #[arg(long, value_name = "MS", default_value_t = 1.0)]
    look_every: f64,
    /// How long a looker waits after each listing, seconds; 0: it lists nothing
    #[arg(long, value_name = "S", default_value_t = 1.0)]
    list_every: f64,
    /// Looks only at the first so many files of each worker; 0: at any
    #[arg(long, value_name = "N", default_value_t = 0)]
    look_among: usize,
}

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
    /// Create in one directory through one mount, alone and then while the other mounts look
    Watch,
    /// Read and write one file in turn
    Pass,
    /// One makes objects, all others wait for each and read it
    Hand,
    /// All put the same contents into a store of 256 directories
    Store,
    /// One writes a file without a pause, all others read it
    Follow,
    /// A tenth of the mounts creates, renames and deletes in one directory, where nobody else has looked and then where all others have
    Crowd,
}

impl Part {
    fn name(self) -> &'static str {
        match self {
            Part::Depend => "depend",
            Part::Easy => "easy",
            Part::Durable => "durable",
            Part::Hard => "hard",
            Part::Watch => "watch",
            Part::Pass => "pass",
            Part::Hand => "hand",
            Part::Store => "store",
            Part::Follow => "follow",
            Part::Crowd => "crowd",
        }
    }
}

#[derive(Serialize)]
struct Report<'a> {
    machine: Machine,
    workers: u32,
    lookers: usize,
    looks: Looks,
    seconds: f64,
    targets: &'a [Mounts],
    /// By target, then round.
    measurements: &'a [Vec<Vec<Line>>],
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let machine = Machine::describe();
    let targets = target::check_mounts(&options.targets, 0, 0)?;
    let rounds = options.repeat.rounds;
    // On all targets as many, also where one mount takes the place of all.
    let lookers = targets.iter().map(|target| target.dirs.len() - 1).max().unwrap_or(0).max(1);
    let mut measured = vec![Vec::new(); targets.len()];
    for round in 1..=rounds {
        for (target, measured) in targets.iter().zip(&mut measured) {
            eprintln!("round {round} of {rounds}: {}, {} workers", target.name(), options.workers);
            let lines = Measuring { options, target, lookers, round }.all_parts();
            measured.push(lines.with_context(|| format!("on {}", target.name()))?);
        }
    }
    let names: Vec<&str> = targets.iter().map(Mounts::name).collect();
    let mounts: Vec<String> = targets.iter().map(|t| format!("{} {}", t.name(), t.dirs.len())).collect();
    println!(
        "\n{} workers; mounts: {}; {lookers} lookers in `watched`, every {} ms; load at the start {:.2}",
        options.workers,
        mounts.join(", "),
        options.looks.look_every,
        machine.load
    );
    println!(
        "Medians of {rounds} round{}; in brackets the speed relative to {} (more is faster).\n",
        if rounds == 1 { "" } else { "s" },
        names[0]
    );
    println!("{}\n{}", lines::table(&names, &measured), lines::watched(&names, &measured));
    print!("{}", lines::crowd(&names, &measured));
    let Some(path) = &options.repeat.json else { return Ok(()) };
    let report = Report {
        machine,
        workers: options.workers,
        lookers,
        looks: options.looks,
        seconds: options.seconds,
        targets: &targets,
        measurements: &measured,
    };
    fs::write(path, serde_json::to_string_pretty(&report)? + "\n").with_context(|| path.display().to_string())
}

/// One round on one target.
struct Measuring<'a> {
    options: &'a Options,
    target: &'a Mounts,
    lookers: usize,
    round: u32,
}

impl Measuring<'_> {
    fn all_parts(&self) -> Result<Vec<Line>> {
        let work = WorkDir::create(&self.target.dirs[0], "shared")?;
        let below = Path::new(work.path().file_name().context("a folder without a name")?);
        let mut lines = Vec::new();
        for part in &self.options.parts {
            lines.extend(self.one_part(*part, below).with_context(|| part.name())?);
        }
        drop(work);
        target::settle_mounts(self.target)?;
        Ok(lines)
    }

    fn one_part(&self, part: Part, below: &Path) -> Result<Vec<Line>> {
        let dir = |name: &str| self.folder(&below.join(name));
        let name = part.name();
        // Those of a crowd say themselves where they are.
        let workers = if part == Part::Crowd { Vec::new() } else { self.workers(&dir(name)?) };
        Ok(match part {
            Part::Depend => self.together(name, &workers, |worker| worker.depend())?.1,
            Part::Easy => self.together(name, &workers, |worker| worker.easy())?.1,
            Part::Durable => self.together(name, &workers, |worker| worker.durable())?.1,
            Part::Pass => self.together(name, &workers, |worker| worker.pass_on())?.1,
            Part::Hand => self.together(name, &workers, |worker| worker.hand_over())?.1,
            Part::Store => self.together(name, &workers, |worker| worker.put())?.1,
            Part::Follow => self.together(name, &workers, |worker| worker.follow())?.1,
            Part::Hard => {
                let (made, mut lines) = self.together(name, &workers, |worker| worker.hard())?;
                lines.extend(self.together("look", &workers, |worker| worker.look(&made))?.1);
                lines
            }
            Part::Crowd => {
                let mut lines = self.crowd("unseen", &dir("unseen")?, false)?;
                lines.extend(self.crowd("crowd", &dir(name)?, true)?);
                lines
            }
            Part::Watch => {
                // What comes first finds less in memory and on the disk: each is first in turn.
                let mut order = [("alone", 0), ("watched", self.lookers)];
                if self.round.is_multiple_of(2) {
                    order.reverse();
                }
                let mut lines = Vec::new();
                for (name, lookers) in order {
                    lines.extend(self.watched(name, &dir(name)?, lookers)?);
                }
                lines
            }
        })
    }

    /// All workers create through the first mount, while so many others look through the others.
    fn watched(&self, part: &'static str, folder: &Path, lookers: usize) -> Result<Vec<Line>> {
        let dirs = &self.target.dirs;
        let mut places = vec![dirs[0].join(folder); self.options.workers as usize];
        let made: Vec<AtomicUsize> = places.iter().map(|_| AtomicUsize::new(0)).collect();
        places.extend((1..=lookers).map(|n| dirs[n % dirs.len()].join(folder)));
        let (_, lines) = self.together(part, &places, |worker| {
            if worker.number < made.len() {
                worker.make_watched(&made)
            } else {
                worker.watch(&made, self.options.looks)
            }
        })?;
        Ok(lines)
    }

    /// A worker in each of a tenth of the mounts, in one folder. All others have seen what is in it before, if `seen`, and look again at the
    /// end: they find what was left.
    fn crowd(&self, part: &'static str, folder: &Path, seen: bool) -> Result<Vec<Line>> {
        let dirs = &self.target.dirs;
        let (busy, idle) = dirs.split_at(dirs.len().div_ceil(10));
        let places = |dirs: &[PathBuf]| dirs.iter().map(|dir| dir.join(folder)).collect::<Vec<_>>();
        for n in 0..CROWD_NAMES {
            fs::write(dirs[0].join(folder).join(format!("there{n}")), b"x")?;
        }
        let look = |worker: &mut Worker<'_>, names| worker.list_all(names);
        let mut lines = Vec::new();
        if seen && !idle.is_empty() {
            self.together("first look", &places(idle), |worker| look(worker, CROWD_NAMES))?;
        }
        let cpu = || self.options.server_pid.map(sys::process_cpu_seconds).transpose();
        let before = cpu()?;
        let (left, mut done) = self.together(part, &places(busy), |worker| worker.come_and_go())?;
        let calls: usize = done.iter().map(|line| line.calls).sum();
        let used = before.zip(cpu()?).map(|(before, after)| (after - before) * 1e6 / calls.max(1) as f64);
        done.iter_mut().for_each(|line| line.server_us = used);
        lines.extend(done);
        let names = CROWD_NAMES + left.iter().sum::<usize>();
        if !idle.is_empty() {
            lines.extend(self.together(part, &places(idle), |worker| look(worker, names))?.1);
        }
        Ok(lines)
    }

    /// Makes a folder that all mounts have to see.
    fn folder(&self, path: &Path) -> Result<PathBuf> {
        fs::create_dir(self.target.dirs[0].join(path))?;
        for dir in &self.target.dirs {
            fs::symlink_metadata(dir.join(path)).context("the directories are not one and the same")?;
        }
        Ok(path.to_owned())
    }

    /// Where each worker sees the folder.
    fn workers(&self, folder: &Path) -> Vec<PathBuf> {
        let dirs = &self.target.dirs;
        (0..self.options.workers as usize).map(|number| dirs[number % dirs.len()].join(folder)).collect()
    }

    /// Lets a worker in each place do something, all at the same time. Returns what each gives, and the lines.
    fn together<T: Send>(
        &self,
        part: &'static str,
        places: &[PathBuf],
        work: impl Fn(&mut Worker<'_>) -> Result<T> + Sync,
    ) -> Result<(Vec<T>, Vec<Line>)> {
        sys::check_interrupted()?;
        let barrier = Barrier::new(places.len());
        let one = |number: usize, dir: &Path| {
            barrier.wait();
            let begun = Instant::now();
            let until = begun + Duration::from_secs_f64(self.options.seconds);
            let mut worker = Worker { number, all: places.len(), dir, until, calls: Vec::new() };
            let given = work(&mut worker)?;
            Ok((given, worker.calls, begun.elapsed().as_secs_f64()))
        };
        let done: Vec<Result<_>> = std::thread::scope(|scope| {
            let one = &one;
            let start = |(number, dir)| scope.spawn(move || one(number, dir));
            let workers: Vec<_> = places.iter().map(PathBuf::as_path).enumerate().map(start).collect();
            workers.into_iter().map(|worker| worker.join().expect("a worker")).collect()
        });
        // No part pays for what the one before has still to write.
        target::settle_mounts(self.target)?;
        let mut given = Vec::new();
        let mut calls = Vec::new();
        for done in done {
            let (gave, called, seconds) = done?;
            given.push(gave);
            calls.push((called, seconds));
        }
        Ok((given, in_lines(part, calls)))
    }
}

/// The calls of all workers, each with how long it was at it, by kind.
fn in_lines(part: &'static str, workers: Vec<(Calls, f64)>) -> Vec<Line> {
    let mut by_call: Calls = Vec::new();
    let mut at_it: Calls = Vec::new();
    for (calls, seconds) in workers {
        for (call, times) in calls {
            // Stat, read and delete come one after the other: each has its own time.
            let seconds = if part == "look" { times.iter().sum() } else { seconds };
            add(&mut at_it, call, [seconds]);
            add(&mut by_call, call, times);
        }
    }
    let line = |((call, times), (_, seconds)): ((&'static str, Vec<f64>), (_, Vec<f64>))| {
        Line::new(part, call, times, seconds.iter().sum::<f64>() / seconds.len() as f64)
    };
    by_call.into_iter().zip(at_it).map(line).collect()
}
