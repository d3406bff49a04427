//! Listings that go on while names of the directory change.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::setup::calls;
use crate::setup::farm::{Farm, Mount, rounds, seed};
use crate::setup::model::Random;

/// Names that are there all the time, however often they are replaced.
const LASTING: u64 = 150;

/// Makes a file under another name, and has it take the place of one that is there.
fn replace(dir: &Path, me: usize, at: usize, random: &mut Random) {
    let name = dir.join(format!("stays-{}", random.below(LASTING)));
    let new = dir.join(format!("new-{me}-{at}"));
    File::create(&new).unwrap();
    match random.below(6) {
        // Two names of one file: rename(2) leaves both.
        0 => {
            fs::remove_file(&new).unwrap();
            // What had the name may have lost it to another one that replaces it.
            if fs::hard_link(&name, &new).is_ok() {
                fs::rename(&new, &name).unwrap();
                let _ = fs::remove_file(&new);
            }
        }
        1 => {
            calls::rename(&new, &name, libc::RENAME_EXCHANGE).unwrap();
            fs::remove_file(&new).unwrap();
        }
        _ => fs::rename(&new, &name).unwrap(),
    }
}

/// How often each of the lasting names comes in a listing that is read so many bytes at a time.
fn times(dir: &Path, bytes: usize) -> HashMap<Vec<u8>, u32> {
    let mut times = HashMap::new();
    for name in calls::list(&File::open(dir).unwrap(), bytes) {
        if name.starts_with(b"stays-") {
            *times.entry(name).or_default() += 1;
        }
    }
    times
}

fn listings_while_names_are_replaced(mounts: &[Mount], replacers: usize, listings: usize) {
    let dir = |at: usize| mounts[at % mounts.len()].join("dir");
    fs::create_dir(dir(0)).unwrap();
    (0..LASTING).for_each(|at| drop(File::create(dir(0).join(format!("stays-{at}"))).unwrap()));
    let left = AtomicUsize::new(mounts.len());
    let replaced: usize = std::thread::scope(|scope| {
        for at in 0..mounts.len() {
            let (dir, left) = (dir(at), &left);
            scope.spawn(move || {
                let mut random = Random::new(seed() * 100 + at as u64);
                for listing in 0..listings {
                    let bytes = [280, 1000, 4096, 32 << 10][random.below(4) as usize];
                    let times = times(&dir, bytes);
                    let twice: Vec<_> = times.iter().filter(|(_, times)| **times > 1).collect();
                    if !twice.is_empty() || times.len() as u64 != LASTING {
                        left.store(0, Ordering::Relaxed);
                        panic!("listing {listing} of mount {at}: {} names, twice {twice:?}", times.len());
                    }
                }
                let _ = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1));
            });
        }
        let replacers: Vec<_> = (0..replacers)
            .map(|me| {
                let (dir, left) = (dir(me), &left);
                scope.spawn(move || {
                    let mut random = Random::new(seed() * 1000 + me as u64);
                    let mut replaced = 0;
                    while left.load(Ordering::Relaxed) > 0 {
                        replace(&dir, me, replaced, &mut random);
                        replaced += 1;
                    }
                    replaced
                })
            })
            .collect();
        replacers.into_iter().map(|replacer| replacer.join().unwrap()).sum()
    });
    assert!(replaced > 0);
}

#[test]
fn a_name_that_hosts_replace_comes_once_in_every_listing() {
    let (_farm, mounts) = Farm::shared(2);
    listings_while_names_are_replaced(&mounts, 2, rounds(500, 20_000));
}

#[test]
fn a_name_that_its_owner_replaces_comes_once_in_every_listing() {
    let (_farm, mounts) = Farm::shared(1);
    listings_while_names_are_replaced(&mounts, 2, rounds(1000, 50_000));
}
