//! A build goes on when its server is killed and comes back.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::contention::Changers;
use crate::crash::write;
use crate::farm::{Farm, rounds, run, sh};
use crate::model::{Random, Tree, find_prefix, read_tree};
use crate::watchdog::Watchdog;

/// A program of 60 sources with a Makefile; it prints the sum of what they return.
pub(crate) fn write_program(dir: &std::path::Path) {
    let mut calls = String::new();
    for at in 0..60 {
        let body = format!("#include \"all.h\"\nint part_{at}(void) {{ return {at}; }}\n");
        fs::write(dir.join(format!("part_{at}.c")), body).unwrap();
        calls.push_str(&format!(" + part_{at}()"));
    }
    let heads: String = (0..60).map(|at| format!("int part_{at}(void);\n")).collect();
    fs::write(dir.join("all.h"), heads + &"/* text */\n".repeat(3000)).unwrap();
    let main = format!(
        "#include <stdio.h>\n#include \"all.h\"\nint main(void) {{ printf(\"%d\\n\", 0{calls}); return 0; }}\n"
    );
    fs::write(dir.join("main.c"), main).unwrap();
    let makefile = "objects = $(patsubst %.c,%.o,$(wildcard *.c))\n\
        prog: $(objects)\n\tcc -o $@ $^\n%.o: %.c all.h\n\tcc -O1 -g -c -o $@ $<\nclean:\n\trm -f prog *.o\n";
    fs::write(dir.join("Makefile"), makefile).unwrap();
}

#[test]
fn a_build_outlives_its_server() {
    let (mut farm, mount) = Farm::mounted("v");
    write_program(mount.path());
    let mut build =
        sh("for round in 1 2 3; do make -s -j2; test $(./prog) = 1770; make -s clean; done; make -s -j2")
            .current_dir(mount.path())
            .spawn()
            .unwrap();
    let mut random = Random::new(5);
    let mut kills = 0;
    let status = loop {
        if let Some(status) = build.try_wait().unwrap() {
            break status;
        }
        std::thread::sleep(Duration::from_millis(200 + random.below(800)));
        farm.kill_server();
        kills += 1;
        std::thread::sleep(Duration::from_millis(random.below(400)));
        farm.start_server();
    };
    assert!(status.success(), "{status} after {kills} kills");
    assert!(kills >= 2, "the build was over too soon");
    mount.unmount();
    let mount = farm.mount("v", "");
    assert_eq!(run(sh("./prog; make -s").current_dir(mount.path())), "1770\n");
}

#[test]
fn a_server_that_stops_in_order_is_missed_for_a_moment_only() {
    let (mut farm, mount) = Farm::mounted("v");
    fs::write(mount.path().join("before"), b"1").unwrap();
    farm.stop_server();
    fs::write(mount.path().join("meanwhile"), b"2").unwrap();
    farm.start_server();
    mount.sync();
    fs::write(mount.path().join("after"), b"3").unwrap();
    mount.unmount();
    let mount = farm.mount("v", "");
    for (name, content) in [("before", "1"), ("meanwhile", "2"), ("after", "3")] {
        assert_eq!(fs::read_to_string(mount.path().join(name)).unwrap(), content);
    }
}

#[test]
fn eight_busy_mounts_outlive_their_server() {
    let (mut farm, mounts) = Farm::shared_with(8, "commit=0.2", &[]);
    let watchdog = Watchdog::over(&mounts);
    // Each has a folder of its own, and two processes in one that is everybody's.
    let tops: Vec<_> =
        mounts.iter().enumerate().map(|(at, mount)| mount.join(&format!("own-{at}"))).collect();
    tops.iter().for_each(|top| fs::create_dir(top).unwrap());
    let mut changers = Changers::start(&mounts, "dir", 2, rounds(60, 2000));
    let (stop, mut random) = (AtomicBool::new(false), Random::new(9));
    let (stopped, mut kills) = (&stop, 0);
    let histories: Vec<_> = std::thread::scope(|scope| {
        let writers: Vec<_> = tops
            .iter()
            .enumerate()
            .map(|(at, top)| scope.spawn(move || write(top, &Tree::new(), 900 + at as u64, stopped)))
            .collect();
        while kills < rounds(3, 60) || !changers.are_over() {
            if kills >= rounds(3, 60) {
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
            std::thread::sleep(Duration::from_millis(300 + random.below(1200)));
            farm.kill_server();
            kills += 1;
            std::thread::sleep(Duration::from_millis(random.below(400)));
            farm.start_server();
            watchdog.progress();
        }
        stop.store(true, Ordering::Relaxed);
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    changers.check(&mounts);
    for (at, history) in histories.iter().enumerate() {
        assert!(history.ops.len() > 20, "mount {at} has done {} things only", history.ops.len());
        let found = read_tree(&tops[at]);
        find_prefix(&Tree::new(), &history.ops, history.ops.len(), &found);
        for mount in &mounts {
            assert!(
                read_tree(&mount.join(&format!("own-{at}"))) == found,
                "{} differs",
                mount.path().display()
            );
        }
    }
    drop(watchdog);
    mounts.into_iter().for_each(crate::farm::Mount::unmount);
    let said = run(&mut farm.volume(["check", "v", "--content"]));
    assert!(said.contains("is sound"), "{said}");
}
