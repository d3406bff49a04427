//! Ten thousand worlds, each judged by the reference.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use hayloft_sim::{Config, run};

/// Without optimisation a tenth of it takes as long.
const WORLDS: u64 = if cfg!(debug_assertions) { 500 } else { 10_000 };

#[test]
fn worlds_keep_their_promises() {
    let next = AtomicU64::new(1);
    let failed: Mutex<Vec<String>> = Mutex::default();
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed > WORLDS {
                        break;
                    }
                    let outcome = run(Config { seed, ops: 120, broken: None, trace: false });
                    if let Some(failure) = outcome.failure {
                        let what: String = failure.what.chars().take(300).collect();
                        failed.lock().unwrap().push(format!("seed {seed}: {what}"));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap();
    assert!(failed.is_empty(), "see crates/sim/README.md to replay:\n{}", failed.join("\n"));
}

/// Seeds from 2^32 on: a store that times out, and does things twice.
#[test]
fn worlds_with_a_late_store_keep_their_promises() {
    for seed in (1 << 32)..(1 << 32) + WORLDS / 10 {
        let failure = run(Config { seed, ops: 120, broken: None, trace: false }).failure;
        assert!(failure.is_none(), "seed {seed}: {:?}", failure.map(|failure| failure.what));
    }
}

/// Seeds from 2^33 on: most hosts know of many slots in a split directory.
#[test]
fn worlds_with_many_slots_keep_their_promises() {
    for seed in (1 << 33)..(1 << 33) + WORLDS / 5 {
        let failure = run(Config { seed, ops: 120, broken: None, trace: false }).failure;
        assert!(failure.is_none(), "seed {seed}: {:?}", failure.map(|failure| failure.what));
    }
}

/// Seeds from 2^34 on: kernels that follow names.
#[test]
fn worlds_whose_kernels_follow_names_keep_their_promises() {
    for seed in (1 << 34)..(1 << 34) + WORLDS / 5 {
        let failure = run(Config { seed, ops: 120, broken: None, trace: false }).failure;
        assert!(failure.is_none(), "seed {seed}: {:?}", failure.map(|failure| failure.what));
    }
}

/// Seeds from 2^35 on: rows that others want are kept for a while, too.
#[test]
fn worlds_whose_rows_are_kept_keep_their_promises() {
    for seed in (1 << 35)..(1 << 35) + WORLDS / 5 {
        let failure = run(Config { seed, ops: 120, broken: None, trace: false }).failure;
        assert!(failure.is_none(), "seed {seed}: {:?}", failure.map(|failure| failure.what));
    }
}

/// Seeds from 2^36 on: directories that hosts share are cleared, too.
#[test]
fn worlds_in_which_shared_directories_are_cleared_keep_their_promises() {
    for seed in (1 << 36)..(1 << 36) + WORLDS / 5 {
        let failure = run(Config { seed, ops: 120, broken: None, trace: false }).failure;
        assert!(failure.is_none(), "seed {seed}: {:?}", failure.map(|failure| failure.what));
    }
}

/// `README.md` says what was wrong.
#[test]
fn worlds_that_failed_once_keep_their_promises() {
    let seeds = [
        6_512, 12_641, 18_457, 54_104, 54_909, 90_288, 143_734, 178_505, 216_038, 217_136, 291_839, 137_539,
        428_068, 2_113_902, 2_143_320, 2_188_639, 2_203_160, 2_267_260, 2_294_130, 2_357_480, 2_446_217,
    ];
    for seed in seeds {
        let failure = run(Config { seed, ops: 120, broken: None, trace: false }).failure;
        assert!(failure.is_none(), "seed {seed}: {:?}", failure.map(|failure| failure.what));
    }
}

#[test]
fn a_seed_is_one_schedule() {
    for seed in [7, 77, 777] {
        let config = Config { seed, ops: 120, broken: None, trace: false };
        let [first, second] = [run(config), run(Config { trace: true, ..config })];
        assert_eq!((first.steps, first.ops, first.executed), (second.steps, second.ops, second.executed));
    }
}
