//! Versions go from one server to another one in circumstances that few have: files of exabytes, and hosts that read meanwhile.

use std::fs;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::transfer::Side;
use crate::setup::farm::{noise, run, sh};

#[test]
fn files_with_huge_holes_are_named_sent_and_received() {
    let (here, there) = (Side::new(), Side::new());
    run(&mut here.farm.ask(["volume", "create", "v"]));
    let mirror = here.farm.dir().join("mirror");
    let mount = here.mount("v");
    let top = mount.path();
    // 7 EiB; a disk takes less, memory does.
    run(&mut sh(&format!(
        "cd {}; truncate -s 7E huge; truncate -s 6E nothing; printf begin | dd of=huge conv=notrunc status=none
        printf middle | dd of=huge bs=1 seek=3T conv=notrunc status=none
        printf end | dd of=huge bs=1 seek=5E conv=notrunc status=none",
        top.display()
    )));
    here.snapshot("v@one");
    let name = here.tree("v@one");
    run(&mut here.farm.ask(["verify", "v@one", "--deep", "--against", &name]));
    let sent = here.send("v@one", &mirror);
    assert!(sent["bytes"].as_u64().unwrap() < 1_000_000, "{sent}");
    there.receive(&mirror, "v");
    assert_eq!(there.tree("v@one"), name);
    let far = there.mount("v");
    let of = |at: u64, len: usize| {
        let mut bytes = vec![0; len];
        fs::File::open(far.join("huge")).unwrap().read_exact_at(&mut bytes, at).unwrap();
        String::from_utf8(bytes).unwrap()
    };
    assert_eq!([of(0, 5), of(3 << 40, 6), of(5 << 60, 3)], ["begin", "middle", "end"]);
    assert_eq!(fs::metadata(far.join("huge")).unwrap().len(), 7 << 60);
    // What has changed, by a mirror, and from server to server.
    run(&mut sh(&format!(
        "printf more | dd of={}/huge bs=1 seek=4E conv=notrunc status=none",
        top.display()
    )));
    here.snapshot("v@two");
    here.send("v@two", &mirror);
    there.receive(&mirror, "v");
    assert_eq!(there.tree("v@two"), here.tree("v@two"));
    assert_eq!(of(4 << 60, 4), "more");
    let from = format!("{}/v@two", here.farm.address);
    run(there.ask(["pull", &from]).args(["--volume", "w"]));
    assert_eq!(there.tree("w@two"), here.tree("v@two"));
    run(&mut there.farm.ask(["diff", "v@one", "v@two", "--stat"]));
}

#[test]
fn a_version_is_received_while_a_host_reads_what_it_has_open() {
    let (here, there) = (Side::new(), Side::new());
    run(&mut here.farm.ask(["volume", "create", "v"]));
    let mirror = here.farm.dir().join("mirror");
    let mount = here.mount("v");
    fs::write(mount.join("large"), noise(1, 3_000_000)).unwrap();
    here.snapshot("v@one");
    here.send("v@one", &mirror);
    there.receive(&mirror, "v@one");
    let far = there.mount("v");
    // Not from the kernel's memory.
    let open = fs::File::options().read(true).custom_flags(libc::O_DIRECT).open(far.join("large")).unwrap();
    fs::write(mount.join("large"), noise(2, 3_000_000)).unwrap();
    here.snapshot("v@two");
    here.send("v@two", &mirror);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (mut bytes, old) = (vec![0; 100_000], noise(1, 3_000_000));
            let mut round = 0;
            while !is_over.load(Relaxed) {
                let at = (round * 100_000) % 2_900_000;
                open.read_exact_at(&mut bytes, at as u64).unwrap();
                assert!(bytes == old[at..at + 100_000], "at {at}");
                round += 1;
            }
        });
        let received = there.receive(&mirror, "v@two");
        is_over.store(true, Relaxed);
        assert_eq!(received["received"], "v@two");
    });
    assert!(fs::read(far.join("large")).unwrap() == noise(2, 3_000_000));
}
