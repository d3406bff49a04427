//! Runs worlds: `hayloft-sim --seeds 1..10001 [--ops N] [--break RULE] [--trees] [--trace]`.

use std::ops::Range;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use hayloft_sim::{Config, Outcome, Rule, replaces_trees, run};

const USAGE: &str =
    "usage: hayloft-sim [--seeds FROM..TO] [--ops N] [--break RULE] [--trees] [--all] [--trace]

  --seeds FROM..TO  one world a seed, TO not included (1..1001)
  --ops N           operations of all clients of a world together (120)
  --break RULE      leaves out a rule, to see that it is noticed
  --trees           only worlds in which the volume gets other trees
  --all             goes on after a failure, and lists all
  --trace           prints the last steps even of a world without a failure";

struct Options {
    seeds: Range<u64>,
    ops: u64,
    broken: Option<(&'static str, Rule)>,
    trees: bool,
    all: bool,
    trace: bool,
}

fn options() -> Option<Options> {
    let mut options =
        Options { seeds: 1..1001, ops: 120, broken: None, trees: false, all: false, trace: false };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--seeds" => {
                let range = args.next()?;
                let (from, to) = range.split_once("..")?;
                options.seeds = from.parse().ok()?..to.parse().ok()?;
            }
            "--ops" => options.ops = args.next()?.parse().ok()?,
            "--break" => {
                let name = args.next()?;
                options.broken = Some(*Rule::ALL.iter().find(|(of, _)| *of == name)?);
            }
            "--trees" => options.trees = true,
            "--all" => options.all = true,
            "--trace" => options.trace = true,
            _ => return None,
        }
    }
    Some(options)
}

fn main() -> ExitCode {
    let Some(options) = options() else {
        let rules: Vec<&str> = Rule::ALL.iter().map(|(name, _)| *name).collect();
        eprintln!("{USAGE}\n\nrules: {}", rules.join(", "));
        return ExitCode::from(2);
    };
    let config =
        |seed| Config { seed, ops: options.ops, broken: options.broken.map(|(_, rule)| rule), trace: false };
    let started = std::time::Instant::now();
    let next = AtomicU64::new(options.seeds.start);
    let stop = AtomicBool::new(false);
    let failed: Mutex<Vec<(u64, String)>> = Mutex::default();
    let sum: Mutex<Outcome> = Mutex::default();
    let worlds = AtomicU64::new(0);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= options.seeds.end {
                        break;
                    }
                    if options.trees && !replaces_trees(seed) {
                        continue;
                    }
                    let outcome = run(config(seed));
                    worlds.fetch_add(1, Relaxed);
                    if let Ok(mut sum) = sum.lock() {
                        sum.steps += outcome.steps;
                        sum.ops += outcome.ops;
                        sum.executed += outcome.executed;
                        sum.recalls += outcome.recalls;
                        sum.brought += outcome.brought;
                        sum.lost += outcome.lost;
                        sum.splits += outcome.splits;
                        sum.replaced += outcome.replaced;
                    }
                    if let Some(failure) = outcome.failure {
                        stop.fetch_or(!options.all, Relaxed);
                        if let Ok(mut failed) = failed.lock() {
                            failed.push((seed, failure.what));
                        }
                    }
                }
            });
        }
    });
    let seconds = started.elapsed().as_secs_f64();
    let worlds = worlds.load(Relaxed);
    let sum = sum.into_inner().unwrap_or_default();
    println!(
        "{worlds} worlds in {seconds:.1} s, {:.0} worlds/s; {} operations, {} executed by the server, {} recalls, {} brought \
         back, {} lost, {} splits, {} trees replaced, {} steps",
        worlds as f64 / seconds,
        sum.ops,
        sum.executed,
        sum.recalls,
        sum.brought,
        sum.lost,
        sum.splits,
        sum.replaced,
        sum.steps,
    );
    let mut failed = failed.into_inner().unwrap_or_default();
    failed.sort();
    report(&options, &failed, config);
    if options.trace && failed.is_empty() {
        let outcome = run(Config { trace: true, ..config(options.seeds.start) });
        println!("{outcome:?}");
    }
    if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn report(options: &Options, failed: &[(u64, String)], config: impl Fn(u64) -> Config) {
    let Some((seed, _)) = failed.first() else { return };
    if options.all {
        for (seed, what) in failed {
            println!("seed {seed}: {}", what.chars().take(200).collect::<String>().replace('\n', " "));
        }
        println!("{} failed", failed.len());
        return;
    }
    if let Some(failure) = run(Config { trace: true, ..config(*seed) }).failure {
        failure.trace.iter().for_each(|line| println!("{line}"));
        println!("\nseed {seed}: {}", failure.what);
    }
    let broken = options.broken.map(|(name, _)| format!(" --break {name}")).unwrap_or_default();
    println!(
        "replay: cargo run -p hayloft-sim --release -- --seeds {seed}..{} --ops {}{broken}",
        seed + 1,
        options.ops
    );
}
