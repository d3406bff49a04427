//! Layers that are made again, and what a kill, a second one, or a full disk does to one that is being made.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::modules::World;
use crate::setup::farm::{run, run_failing, wait_until};

#[test]
fn a_layer_is_made_again_and_what_differs_is_said() {
    let world = World::new().with_base();
    run(&mut world.making(["root", "create", "base", "--on", "small", "--enable", "gcc:12/full"]));
    run(&mut world.making(["root", "layer", "base", "install", "tool"]));
    let rebuild = || world.hayloft(["root", "rebuild", "base"]);
    let before = world.history("base");
    let same = world.json(&mut rebuild());
    assert_eq!((&same["same"], &same["tree"]), (&true.into(), &same["rebuilt"]), "{same}");
    assert_eq!(same["not_compared"], 0);
    let small = world.json(&mut world.hayloft(["root", "rebuild", "small"]));
    assert_eq!(small["same"], true);
    // The catalogue may change: the layer has what it was made with.
    world.module("note.sh", "#!/bin/sh\nexit 1\n");
    run(&mut rebuild());
    // A newer package.
    world.debian.package("tool", "2", "");
    let output = rebuild().output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(10), "{text}");
    assert!(text.contains("package tool: 1 -> 2\n") && text.contains("usr/share/tool: content\n"), "{text}");
    world.debian.withdraw("tool", "2");
    // Somebody has been at the files of it, and of the layer below.
    fs::write(world.layers().join("base/generations/2/tree/usr/share/gcc-12"), "evil").unwrap();
    fs::write(world.layers().join("small/tree/etc/evil"), "evil").unwrap();
    let output = rebuild().output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(10), "{text}");
    for line in
        ["the layer below 'small' is not what it was", "the layer itself is not", "usr/share/gcc-12: content"]
    {
        assert!(text.contains(line), "{text}");
    }
    assert_eq!((world.history("base"), world.names()), (before, vec!["base".to_owned(), "small".to_owned()]));
    // The archive has the package no more.
    world.debian.withdraw("gcc-12", "1");
    let (code, said) = run_failing(&mut rebuild());
    assert!(code == 4 && said.contains("has 'gcc-12'"), "{code}: {said}");
}

#[test]
fn killed_or_two_at_once_it_is_whole() {
    let world = World::new().with_base();
    run(&mut world.making(["root", "layer", "tools", "--on", "small", "install", "tool"]));
    let install = || world.making(["root", "layer", "tools", "install", "gcc-12"]);
    let (mut killed, mut delay) = (0, Duration::from_millis(20));
    let mut done = 1;
    loop {
        let mut child = install().stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(delay);
        delay = delay.mul_f64(1.7);
        child.kill().unwrap();
        let status = child.wait().unwrap();
        killed += usize::from(!status.success());
        let history = world.history("tools");
        done += usize::from(status.success());
        // One that was killed when it was done is there.
        assert!(history.len() == done || history.len() == done + 1, "{history:?}");
        done = history.len();
        let expected = if done == 1 { "tool" } else { "gcc-12 tool" };
        assert_eq!(world.shared("tools"), expected);
        if status.success() {
            break;
        }
    }
    assert!(killed > 0);
    // Two at once: one after the other, and both are there.
    let others = ["gcc-13", "python3.11", "g++-12"].map(|package| {
        world.making(["root", "layer", "tools", "install", package]).stdout(Stdio::null()).spawn().unwrap()
    });
    for mut other in others {
        assert!(other.wait().unwrap().success());
    }
    assert_eq!(world.shared("tools"), "g++-12 gcc-12 gcc-13 python3.11 tool");
    assert_eq!(world.history("tools").len(), done + 3);
    // A package that hangs, and a signal.
    let hangs = "printf '#!/bin/sh\\ntrap \"\" INT TERM\\nwhile :; do sleep 3171; done\\n' >DEBIAN/postinst; chmod 755 DEBIAN/postinst";
    world.debian.package("hangs", "1", hangs);
    let mut child = world
        .making(["root", "layer", "tools", "install", "hangs"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("it hangs", Duration::from_secs(60), || {
        crate::setup::root_box::processes("sleep\x003171") > 0
    });
    crate::setup::farm::kill(child.id(), libc::SIGINT);
    assert!(!child.wait().unwrap().success());
    crate::setup::root_box::wait_no_process("sleep\x003171");
    assert_eq!(world.history("tools").len(), done + 3);
    run(&mut world.making(["root", "layer", "tools", "remove", "gcc-13"]));
    wait_until("nothing is left", Duration::from_secs(20), || {
        run(&mut world.hayloft(["root", "layer", "tools", "live"]));
        world.names() == ["small", "tools"] && world.roots.list().is_empty()
    });
}

/// A disk of its own, gone at the end of the test.
struct Disk(PathBuf);

impl Disk {
    fn mount(at: PathBuf) -> Disk {
        fs::create_dir_all(&at).unwrap();
        run(Command::new("mount").args(["-t", "tmpfs", "-o", "size=256m", "none"]).arg(&at));
        Disk(at)
    }

    /// Fills it but for so many bytes.
    fn fill(&self, but: u64) -> PathBuf {
        let path = self.0.join("filler");
        let mut file = fs::File::create(&path).unwrap();
        let mut written = 0;
        while let Ok(some) = file.write(&[1; 1 << 20]) {
            written += some as u64;
        }
        file.set_len(written - but).unwrap();
        path
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_full_disk_leaves_all_layers_as_they_were() {
    let world = World::new();
    let disk = Disk::mount(world.layers());
    let world = world.with_base();
    world.debian.package("big", "1", "head -c 8000000 /dev/urandom >usr/share/big-data");
    run(&mut world.making(["root", "create", "base", "--on", "small", "--enable", "gcc"]));
    let filler = disk.fill(2_000_000);
    let before = (world.names(), world.history("base"), world.history("small"));
    for args in [
        &["layer", "base", "install", "big"][..],
        &["layer", "other", "--on", "small", "install", "big"],
        &["create", "new", "--from", &world.base_source()],
    ] {
        let (code, said) = run_failing(&mut world.making_all(args));
        assert!(code == 8 && said.contains("No space left"), "{args:?}: {code}: {said}");
        assert_eq!((world.names(), world.history("base"), world.history("small")), before, "{args:?}");
    }
    assert_eq!(world.shared("base"), "gcc-12");
    fs::remove_file(filler).unwrap();
    run(&mut world.making(["root", "layer", "base", "install", "big"]));
    assert_eq!(world.shared("base"), "big big-data gcc-12");
}
