//! Two mounts behind a network that flips, drops, doubles and moves bytes, and cuts connections: no wrong data is read, nothing that
//! was fsynced is missing, and nobody hangs. `HAYLOFT_TEST_LONG` makes it 30 minutes, `HAYLOFT_TEST_SEED` another one.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::setup::farm::{Farm, number, rounds, run, seed};
use crate::setup::mangler::Mangler;
use crate::setup::workers::{Work, leave, of_all};

#[test]
fn what_a_network_does_to_bytes_does_nothing_to_data() {
    work_behind("3", 4);
}

/// Leases run out more often, and sessions are ended.
#[test]
fn what_a_network_does_to_bytes_does_nothing_to_data_with_short_leases() {
    work_behind("1", 2);
}

/// With leases of so many seconds, and one of so many streams that could be swallowed.
fn work_behind(lease: &str, lasting: u64) {
    let farm = Farm::with(None, &["--lease", lease]);
    farm.create("v");
    let mangler = Mangler::with(&farm.address, seed(), lasting);
    let mounts = [0, 1].map(|at| farm.mount_through(&mangler.address, "v", &format!("mnt-{at}")));
    let work = Work::new(&mounts, "");
    let until = Instant::now() + Duration::from_secs(rounds(40, 30 * 60) as u64);
    mangler.set_active(true);
    work.run(seed(), |over| {
        while Instant::now() < until && !over.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(100));
        }
        over.store(true, Ordering::SeqCst);
        // Whoever waits is served when it is quiet.
        mangler.set_active(false);
    });
    let damaged = number(&farm.stats(), "server.frames_damaged") + of_all(&mounts, "server.frames_damaged");
    let replaced = of_all(&mounts, "server.sessions_replaced");
    let counts = &work.counts;
    let [made, read, refused, missing] = [&counts.made, &counts.read, &counts.refused, &counts.missing]
        .map(|count| count.load(Ordering::SeqCst));
    println!(
        "made {made}, read {read}, refused {refused}, missing {missing}; {:?}; frames damaged {damaged}, connected again {}, sessions replaced {replaced}",
        mangler.counts(),
        of_all(&mounts, "server.reconnects"),
    );
    assert!(damaged > 0, "{:?}", mangler.counts());
    assert!(made > 0 && read > 0);
    assert!(
        missing == 0 || replaced > 0,
        "{missing} files that were not fsynced were missing, and no session had ended"
    );
    let [one, two] = mounts;
    leave(one, replaced);
    leave(two, replaced);
    assert!(run(&mut farm.volume(["check", "v", "--content"])).contains("is sound"));
    let mount = farm.mount("v", "");
    work.verify(mount.path(), replaced);
}
