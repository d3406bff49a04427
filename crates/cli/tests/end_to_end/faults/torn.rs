//! What a crash leaves of one write(2). A request of the kernel is there whole or not at all, wherever it ends; a write over several
//! pages may come in several requests, and then a part of it may be there (docs/semantics.md, "Durability").

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::setup::farm::{Farm, kill, number, rounds, seed};
use crate::setup::model::Random;

/// Programs that write, each to files of its own.
const WRITERS: usize = 6;

/// Writes 2 KiB, and 2 KiB over the second half of that and beyond its end: in one page, so in one request each.
fn overlap(top: &std::path::Path, stop: &AtomicBool) {
    for serial in 0.. {
        let Ok(file) = File::create(top.join(format!("{}", serial % 8))) else { return };
        for (byte, offset) in [(b'a', 0), (b'b', 1024)] {
            if stop.load(Ordering::Relaxed) || file.write_at(&[byte; 2048], offset).is_err() {
                return;
            }
        }
    }
}

/// Makes the log long, so that it takes a while to be cut.
fn lengthen(top: &std::path::Path, stop: &AtomicBool) {
    for serial in 0.. {
        let path = top.join(format!("{}", serial % 20_000));
        if stop.load(Ordering::Relaxed) || fs::write(path, "x").is_err() {
            return;
        }
    }
}

#[test]
fn a_write_beyond_the_end_is_there_whole_or_not_at_all() {
    let farm = Farm::new();
    farm.create("v");
    let states = [vec![], [b'a'; 2048].to_vec(), [vec![b'a'; 1024], vec![b'b'; 2048]].concat()];
    let mut random = Random::new(seed());
    let mut seen = [0; 3];
    for round in 0..rounds(12, 300) {
        let mount = farm.mount("v", "commit=0.1");
        let tops: Vec<_> = (0..WRITERS).map(|at| mount.join(&format!("{round}-{at}"))).collect();
        let long = mount.join(&format!("{round}-long"));
        tops.iter().chain([&long]).for_each(|top| fs::create_dir(top).unwrap());
        mount.sync();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            tops.iter().for_each(|top| drop(scope.spawn(|| overlap(top, &stop))));
            scope.spawn(|| lengthen(&long, &stop));
            std::thread::sleep(Duration::from_millis(400 + random.below(600)));
            kill(mount.pid(), libc::SIGKILL);
            stop.store(true, Ordering::Relaxed);
        });
        mount.kill();
        let mount = farm.mount("v", "");
        for at in 0..WRITERS {
            for entry in fs::read_dir(mount.join(&format!("{round}-{at}"))).unwrap() {
                let path = entry.unwrap().path();
                let found = fs::read(&path).unwrap();
                let state = states.iter().position(|state| *state == found);
                let bytes = |byte| found.iter().filter(|of| **of == byte).count();
                seen[state.unwrap_or_else(|| {
                    panic!(
                        "round {round}: a write is torn: {} bytes, {} of the first and {} of the second",
                        found.len(),
                        bytes(b'a'),
                        bytes(b'b')
                    )
                })] += 1;
            }
        }
        mount.unmount();
    }
    println!("empty, first write, both: {seen:?}");
    assert!(seen[2] > 0);
}

/// The kernel sends what goes into a page that it has not read apart from the rest: such a write is several requests.
#[test]
fn a_write_into_a_page_that_the_kernel_has_not_read_is_several_requests() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.join("file"), [1; 3 * 4096]).unwrap();
    mount.unmount();
    let mount = farm.mount("v", "");
    let file = File::options().read(true).write(true).open(mount.join("file")).unwrap();
    let requests = || number(&mount.stats(), "fuse.requests.WRITE");
    let before = requests();
    file.write_at(&[2; 4096], 2048).unwrap();
    let unread = requests() - before;
    // It has read both pages.
    file.read_at(&mut [0; 3 * 4096], 0).unwrap();
    file.write_at(&[3; 4096], 2048).unwrap();
    let read = requests() - before - unread;
    file.write_at(&[4; 4096], 4096).unwrap();
    let aligned = requests() - before - unread - read;
    assert_eq!((unread, read, aligned), (2, 1, 1), "requests of an unread, a read, and an aligned page");
}
