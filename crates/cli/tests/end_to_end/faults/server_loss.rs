//! A build goes on when its server is killed and comes back.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::faults::crash::write;
use crate::setup::farm::{Farm, Mount, rounds, run, sh};
use crate::setup::model::{Random, Tree, find_prefix, read_tree};
use crate::sharing::contention::Changers;

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
    mounts.into_iter().for_each(crate::setup::farm::Mount::unmount);
    let said = run(&mut farm.volume(["check", "v", "--content"]));
    assert!(said.contains("is sound"), "{said}");
}

/// What a compiler does in a directory that others use, until told to stop: the names of what is done.
fn compiles(dir: &Path, maker: &str, stop: &AtomicBool) -> std::io::Result<Vec<String>> {
    let mut done = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        let name = format!("{maker}-{}", done.len());
        let temporary = dir.join(format!("{name}.tmp"));
        fs::write(&temporary, name.repeat(100))?;
        fs::rename(&temporary, dir.join(&name))?;
        // Every third one is removed.
        if done.len() % 3 == 2 {
            fs::remove_file(dir.join(&name))?;
        }
        done.push(name);
    }
    Ok(done)
}

/// Which of these are there; each is whole.
fn there(dir: &Path, names: &[String]) -> Vec<bool> {
    let there = |name: &String| match fs::read(dir.join(name)) {
        Ok(content) => {
            assert_eq!(content, name.repeat(100).into_bytes(), "{name}");
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::NotFound, "{name}: {error}");
            false
        }
    };
    names.iter().map(there).collect()
}

#[test]
fn what_was_answered_outlives_a_server_that_is_killed_at_once() {
    let (mut farm, mounts) = Farm::shared_with(2, "commit=0.2", &[]);
    fs::create_dir(mounts[0].join("dir")).unwrap();
    let mut random = Random::new(crate::setup::farm::seed());
    for round in 0..rounds(12, 300) {
        let stop = AtomicBool::new(false);
        let done: Vec<Vec<String>> = std::thread::scope(|scope| {
            let start = |(at, mount): (usize, &Mount)| {
                let (dir, maker, stop) = (mount.join("dir"), format!("{round}-{at}"), &stop);
                scope.spawn(move || compiles(&dir, &maker, stop))
            };
            let makers: Vec<_> = mounts.iter().enumerate().map(start).collect();
            std::thread::sleep(Duration::from_millis(20 + random.below(120)));
            // Each is in the middle of something, which is done when the server is back.
            stop.store(round % 2 == 0, Ordering::Relaxed);
            if round % 2 == 0 {
                makers.iter().for_each(|maker| while !maker.is_finished() {});
            }
            farm.kill_server();
            stop.store(true, Ordering::Relaxed);
            farm.start_server();
            makers.into_iter().map(|maker| maker.join().unwrap().unwrap()).collect()
        });
        for mount in &mounts {
            for names in &done {
                let expected: Vec<bool> = (0..names.len()).map(|at| at % 3 != 2).collect();
                assert_eq!(there(&mount.join("dir"), names), expected, "round {round}");
            }
            let names = fs::read_dir(mount.join("dir")).unwrap();
            let left = names.filter(|name| name.as_ref().unwrap().path().extension().is_some()).count();
            assert_eq!(left, 0, "round {round}");
        }
    }
    mounts.into_iter().for_each(Mount::unmount);
    let said = run(&mut farm.volume(["check", "v", "--content"]));
    assert!(said.contains("is sound"), "{said}");
}

#[test]
fn what_another_host_has_seen_outlives_server_and_maker() {
    let mut farm = Farm::with(None, &["--lease", "1"]);
    farm.create("v");
    let here = farm.mount_as("v", "here", "", None);
    fs::create_dir(here.join("dir")).unwrap();
    let mut random = Random::new(crate::setup::farm::seed());
    for round in 0..rounds(6, 60) {
        let maker = farm.mount_as("v", "maker", "commit=0.05", None);
        let stop = AtomicBool::new(false);
        let seen = std::thread::scope(|scope| {
            let (dir, name, stop) = (maker.join("dir"), format!("{round}"), &stop);
            // It ends when its mount does.
            let making = scope.spawn(move || compiles(&dir, &name, stop));
            let until = std::time::Instant::now() + Duration::from_millis(100 + random.below(200));
            let mut seen = Vec::new();
            while std::time::Instant::now() < until {
                seen = run(sh("ls").current_dir(here.join("dir"))).lines().map(str::to_owned).collect();
                let last = seen.iter().rfind(|name| !name.ends_with(".tmp"));
                // What is read is complete, if nobody has removed it meanwhile.
                last.into_iter().for_each(|name: &String| {
                    there(&here.join("dir"), std::slice::from_ref(name));
                });
            }
            farm.signal_server(libc::SIGKILL);
            crate::setup::farm::kill(maker.pid(), libc::SIGKILL);
            stop.store(true, Ordering::Relaxed);
            farm.kill_server();
            maker.kill();
            let _ = making.join().unwrap();
            seen
        });
        farm.start_server();
        let left: Vec<String> =
            run(sh("ls").current_dir(here.join("dir"))).lines().map(str::to_owned).collect();
        // Its maker may have gone on, and removed or renamed some of it; the last ones it has not.
        let number = |name: &str| -> Option<(usize, usize)> {
            let (of, at) = name.split_once('-')?;
            Some((of.parse().ok()?, at.trim_end_matches(".tmp").parse().ok()?))
        };
        for name in seen.iter().filter(|name| !name.ends_with(".tmp")) {
            let (of, at) = number(name).unwrap();
            let is_there = left.contains(name);
            assert!(is_there || (of == round && at % 3 == 2), "{name} was seen and is gone");
        }
        left.iter().filter(|name| !name.ends_with(".tmp")).for_each(|name| {
            assert_eq!(there(&here.join("dir"), std::slice::from_ref(name)), [true]);
        });
        run(sh("rm -f *").current_dir(here.join("dir")));
    }
    here.unmount();
    let said = run(&mut farm.volume(["check", "v", "--content"]));
    assert!(said.contains("is sound"), "{said}");
}
