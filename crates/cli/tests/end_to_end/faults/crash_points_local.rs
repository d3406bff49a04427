//! Crash points of what runs on a build host: mounts, and commands about layers. See [`crate::faults::crash_points`].

use std::fs;
use std::process::Command;

use crate::faults::crash::disturbed;
use crate::faults::crash_points::{
    LAYERING, MOUNTED, PUBLISHING, RESCUING, SOON, VARIABLE, at, is_alive, left, sound,
};
use crate::roots::layers::Layers;
use crate::setup::farm::{Farm, noise, rounds, run, seed, wait_until};
use crate::setup::model::{Random, Tree};

#[test]
fn a_mount_dies_at_each_point_of_its_log() {
    let farm = Farm::new();
    farm.create("v");
    let mut tree = Tree::new();
    for round in 0..rounds(1, 20) as u64 {
        for (number, (point, often)) in MOUNTED.iter().enumerate() {
            let seed = seed() * 100 + round * 1000 + number as u64;
            let passing = 1 + Random::new(seed).below(2 * often);
            eprintln!("{point}:{passing}");
            let mount = farm.mount_in("v", "mnt-v", "commit=0.2", &at(point, passing));
            let history = disturbed(&mount, &tree, seed, || {
                wait_until(point, SOON, || !is_alive(mount.pid()));
            });
            mount.kill();
            tree = left(&farm, &tree, &history);
        }
    }
}

#[test]
fn a_mount_dies_that_keeps_what_it_could_not_send() {
    let farm = Farm::new();
    farm.create("v");
    for point in RESCUING {
        let mount = farm.mount_in("v", "mnt-v", "commit=1000", &at(point, 1));
        fs::write(mount.join("unsent"), noise(3, 100_000)).unwrap();
        farm.evict("v", &mount);
        wait_until(point, SOON, || !is_alive(mount.pid()));
        let folders = mount.unsent();
        assert_eq!(folders.len(), 1, "{folders:?}");
        assert!(fs::read(folders[0].join("files/unsent")).unwrap() == noise(3, 100_000));
        // Without its name nobody takes it for a complete one.
        assert!(!folders[0].join("REPORT").exists());
        mount.kill();
        let mount = farm.mount("v", "");
        fs::write(mount.join("goes-on"), "x").unwrap();
        mount.unmount();
        sound(&farm);
    }
}

/// Runs a command that dies at a point.
fn dies(command: &mut Command, point: &str) {
    use std::os::unix::process::ExitStatusExt;
    let output = command.env(VARIABLE, point).output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGKILL), "{point}: {output:?}");
}

#[test]
fn who_publishes_dies_at_each_point_and_it_is_all_or_nothing() {
    let layers = Layers::new();
    let volume = layers.dir().join("volume");
    fs::create_dir_all(volume.join("out")).unwrap();
    for (number, point) in PUBLISHING.into_iter().enumerate() {
        let (old, new) = (format!("old-{number}"), format!("new-{number}"));
        fs::write(volume.join("out/version"), &old).unwrap();
        let name = format!("k{number}");
        let script = format!(
            "mkdir -p /files; for at in $(seq 50); do echo {new} >/files/$at; done; printf {new} >/version"
        );
        run(&mut layers.run(&["--keep", "--name", &name], &script));
        let to = format!("{}:out", volume.display());
        dies(&mut layers.hayloft(["root", "publish", &name, &to]), point);
        let is_there = ["publish.exchanged", "publish.durable"].contains(&point);
        let version = fs::read_to_string(volume.join("out/version")).unwrap();
        assert_eq!(version, if is_there { &*new } else { &*old }, "{point}");
        let files = fs::read_dir(volume.join("out/files")).map_or(0, Iterator::count);
        assert!(files == 50 || number == 0 && files == 0, "{point}: {files}");
        run(&mut layers.hayloft(["root", "publish", &name, &to]));
        assert_eq!(fs::read_dir(&volume).unwrap().count(), 1, "nothing is left of it");
        for at in 1..=50 {
            assert_eq!(fs::read_to_string(volume.join(format!("out/files/{at}"))).unwrap().trim_end(), new);
        }
        run(&mut layers.hayloft(["root", "rm", &name]));
    }
}

#[test]
fn who_makes_a_layer_dies_at_each_point_and_it_is_all_or_nothing() {
    let layers = Layers::new();
    let folder = layers.dir().join("more");
    fs::create_dir_all(folder.join("opt")).unwrap();
    fs::write(folder.join("opt/tool"), "tool").unwrap();
    let archive = layers.dir().join("more.tar");
    run(crate::setup::farm::sh("tar -C \"$0\" -cf \"$1\" .").arg(&folder).arg(&archive));
    let archive = archive.to_str().unwrap();
    for point in LAYERING {
        if point == "layer.unpacked" {
            dies(&mut layers.run(&["--root", archive], "cat /opt/tool"), point);
            assert_eq!(run(&mut layers.run(&["--root", archive], "cat /opt/tool")), "tool");
            continue;
        }
        if point.starts_with("generation.") {
            run(&mut layers.hayloft(["root", "create", point, "--on", "small"]));
            dies(&mut layers.hayloft(["root", "layer", point, "install"]), point);
            let generations = || {
                let all = run(&mut layers.hayloft(["root", "history", point, "--json"]));
                serde_json::from_str::<Vec<serde_json::Value>>(&all).unwrap().len()
            };
            let there = 1 + usize::from(point == "generation.there");
            assert_eq!(generations(), there, "{point}");
            run(&mut layers.hayloft(["root", "layer", point, "install"]));
            assert_eq!(generations(), there + 1, "{point}");
            assert!(!layers.dir().join("layers").join(format!(".{point}.hayloft-new")).exists());
            continue;
        }
        let from = format!("tar:{archive}");
        dies(&mut layers.hayloft(["root", "create", point, "--from", &from]), point);
        let again = layers.hayloft(["root", "create", point, "--from", &from]).output().unwrap();
        assert_eq!(again.status.success(), point == "layer.made", "{point}: {again:?}");
        assert_eq!(run(&mut layers.run(&["--root", point], "cat /opt/tool")), "tool");
    }
}
