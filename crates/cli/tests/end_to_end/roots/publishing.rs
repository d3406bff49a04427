//! What a root has changed is published, all of it or nothing.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value;

use super::layers::{Layers, names, text};
use crate::setup::farm::{Farm, rounds, run, run_failing, sh};

/// One of everything that a build may leave.
const EVERYTHING: &str = "mkdir /out; cd /out; echo text >file; ln file link; ln -s file symlink; mkfifo fifo
    chown 1234:5 file; chmod 6755 file; mkdir -m 1770 dir; truncate -s 1000000 sparse; echo end >>sparse
    setfattr -n user.note -v here dir; touch -d '2001-02-03 04:05:06.789 UTC' dir";

fn has_everything(out: &Path) {
    assert_eq!(names(out), ["dir", "fifo", "file", "link", "sparse", "symlink"]);
    let meta = |name: &str| out.join(name).symlink_metadata().unwrap();
    let file = meta("file");
    assert_eq!((file.mode() & 0o7777, file.uid(), file.gid(), file.nlink()), (0o6755, 1234, 5, 2));
    assert_eq!(file.ino(), meta("link").ino());
    assert!(meta("fifo").file_type().is_fifo());
    assert_eq!(fs::read_link(out.join("symlink")).unwrap(), Path::new("file"));
    assert_eq!((meta("dir").mode() & 0o7777, meta("dir").mtime()), (0o1770, 981_173_106));
    assert_eq!(meta("dir").mtime_nsec(), 789_000_000);
    assert_eq!(
        (meta("sparse").len(), &fs::read(out.join("sparse")).unwrap()[1_000_000..]),
        (1_000_004, &b"end\n"[..])
    );
    let note = run(sh("getfattr --only-values -n user.note \"$0\"").arg(out.join("dir")));
    assert_eq!(note, "here");
}

#[test]
fn a_volume_gets_what_was_changed() {
    let layers = Layers::new();
    let (farm, mount) = Farm::mounted("v");
    let to = format!("{}:a/nightly", mount.path().display());
    run(&mut layers.run(&["--publish", &to], EVERYTHING));
    let target = mount.path().join("a/nightly");
    has_everything(&target.join("out"));
    assert_eq!(names(&target), ["out"]);
    assert_eq!(names(&mount.path().join("a")), ["nightly"]);
    // It is durable: the client and the server die.
    crate::setup::farm::kill(mount.pid(), libc::SIGKILL);
    let mut farm = farm;
    farm.kill_server();
    mount.kill();
    farm.start_server();
    let mount = farm.mount("v", "");
    has_everything(&mount.path().join("a/nightly/out"));
    // Another root adds to it, and a removal removes.
    let small = text(layers.dir().join("layers/small/tree"));
    let out = text(mount.path().join("a/nightly"));
    let script = "rm -r /out/dir /out/fifo; echo new >/out/file";
    run(layers
        .hayloft(["run", "--root", &out, "--root", &small, "--bind", "/usr:/usr", "--publish", &to])
        .args(["--", "sh", "-euc", script]));
    assert_eq!(names(&mount.path().join("a/nightly/out")), ["file", "link", "sparse", "symlink"]);
    assert_eq!(fs::read_to_string(mount.path().join("a/nightly/out/file")).unwrap(), "new\n");
    mount.unmount();
}

#[test]
fn each_publication_is_a_point_that_one_can_go_back_to() {
    let layers = Layers::new();
    let (farm, mount) = Farm::mounted("v");
    let source = format!("{}/v", farm.address);
    for (name, to) in
        [("one", format!("{}:nightly", mount.path().display())), ("two", format!("{source}:nightly"))]
    {
        run(&mut layers.run(
            &["--publish", &to, "--only", "/out", "--snapshot", name],
            &format!("mkdir /out; echo {name} >/out/{name}"),
        ));
    }
    let has = |name: &str| mount.join(&format!("nightly/out/{name}")).exists();
    assert!(has("one") && has("two"));
    run(&mut farm.ask(["rollback", "v@one"]));
    assert!(has("one") && !has("two"));
    run(&mut farm.ask(["rollback", "v@two"]));
    assert!(has("one") && has("two"));
    let to = format!("{}:nightly", mount.path().display());
    let (_, said) = run_failing(&mut layers.run(&["--publish", &to, "--snapshot", "two"], "mkdir /x"));
    assert!(said.contains("there is a snapshot v@two already"), "{said}");
    let to = format!("{}:out", layers.dir().display());
    let (_, said) = run_failing(&mut layers.run(&["--publish", &to, "--snapshot", "three"], "mkdir /x"));
    assert!(said.contains("in no Hayloft volume"), "{said}");
    assert!(!layers.dir().join("out").exists());
    let (_, said) = run_failing(&mut layers.run(&["--snapshot", "three"], "mkdir /x"));
    assert!(said.contains("add --publish"), "{said}");
}

#[test]
fn a_mount_in_the_volume_is_flushed() {
    let layers = Layers::new();
    let farm = Farm::new();
    farm.create("v");
    // Nothing else sends what was changed.
    let mount = farm.mount("v", "commit=3600,locks=local");
    let (outer, inner) = (mount.path().parent().unwrap(), mount.path().file_name().unwrap());
    let to = format!("{}:{}/nightly", outer.display(), inner.display());
    run(&mut layers.run(&["--publish", &to], EVERYTHING));
    // All of it at once, as one flushes a Hayloft mount, and not each file.
    let stats = mount.stats();
    assert!(stats["fuse"]["requests"]["FSYNC"].as_u64().unwrap_or(0) == 0, "{}", stats["fuse"]["requests"]);
    assert!(stats["log"]["commits"].as_u64().unwrap() >= 2, "{}", stats["log"]);
    crate::setup::farm::kill(mount.pid(), libc::SIGKILL);
    let mut farm = farm;
    farm.kill_server();
    mount.kill();
    farm.start_server();
    let mount = farm.mount("v", "");
    has_everything(&mount.path().join("nightly/out"));
    // A link in the volume leads nowhere else.
    let elsewhere = layers.dir().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    std::os::unix::fs::symlink(&elsewhere, mount.path().join("link")).unwrap();
    let to = format!("{}:link/out", mount.path().display());
    let (code, said) = run_failing(&mut layers.run(&["--publish", &to], "mkdir /x"));
    assert!(code == 125 && said.contains("link: it is a symbolic link"), "{code}: {said}");
    assert_eq!(names(&elsewhere), [""; 0]);
    mount.unmount();
}

#[test]
fn access_control_lists_are_lost_on_a_volume_and_give_nobody_more() {
    let layers = Layers::new();
    let (_farm, mount) = Farm::mounted("v");
    let to = format!("{}:out", mount.path().display());
    let script = "mkdir /x; echo >/x/file; chmod 640 /x/file; setfacl -m u:7:rwx /x/file; stat -c %a /x/file";
    let output = layers.run(&["--publish", &to], script).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("1 attributes"), "{said}");
    assert_eq!(output.stdout, b"670\n");
    assert_eq!(mount.path().join("out/x/file").metadata().unwrap().mode() & 0o7777, 0o640);
    // A local folder has them.
    let folder = layers.dir().join("folder");
    fs::create_dir(&folder).unwrap();
    run(&mut layers.run(&["--publish", &format!("{}:out", folder.display())], script));
    let list =
        run(sh("getfacl --numeric --omit-header --absolute-names \"$0\"").arg(folder.join("out/x/file")));
    assert!(list.contains("user:7:rwx"), "{list}");
    assert_eq!(folder.join("out/x/file").metadata().unwrap().mode() & 0o7777, 0o670);
    mount.unmount();
}

#[test]
fn a_servers_volume_is_mounted_for_the_time() {
    let layers = Layers::new();
    let mut farm = Farm::new();
    farm.create("v");
    let to = format!("{}/v:nightly", farm.address);
    let report = layers.dir().join("report.json");
    let flags = ["--publish", &to, "--only", "/out/file", "--json", report.to_str().unwrap()];
    run(&mut layers.run(&flags, EVERYTHING));
    let report: Value = serde_json::from_slice(&fs::read(&report).unwrap()).unwrap();
    assert_eq!(report["published"]["written"], 1);
    // Nothing of the mount is left, and nothing is lost with the server.
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains(&format!("{}/v", farm.address)), "{mounts}");
    farm.kill_server();
    farm.start_server();
    let mount = farm.mount("v", "");
    assert_eq!(names(&mount.path().join("nightly/out")), ["file"]);
    // One that is mounted is taken as it is; without a path the root's name is one.
    let to = format!("{}/v", farm.address);
    run(&mut layers.run(&["--publish", &to, "--name", "byname"], "mkdir /x"));
    assert_eq!(names(&mount.path().join("byname")), ["x"]);
    mount.unmount();
    // One that is read-only is not; it shows what comes by another.
    let mount = farm.mount("v", "ro");
    run(&mut layers.run(&["--publish", &to, "--name", "beside"], "mkdir /y"));
    assert_eq!(names(&mount.path().join("beside")), ["y"]);
    mount.unmount();
    let (code, said) = run_failing(&mut layers.run(&["--publish", "127.0.0.1:1/v:x"], "mkdir /x"));
    assert!(code == 125 && said.contains("cannot publish to 127.0.0.1:1/v"), "{code}: {said}");
}

#[test]
fn hosts_publish_to_one_target_and_readers_see_all_or_nothing() {
    let layers = Layers::new();
    let (_farm, mounts) = Farm::shared(3);
    for name in ["k0", "k1"] {
        let script = format!(
            "mkdir /out; for at in $(seq 60); do echo {name} >/out/$at; done; echo {name} >/only-{name}"
        );
        run(&mut layers.run(&["--keep", "--name", name], &script));
    }
    let publish = &|at: usize| {
        let to = format!("{}:a/out", mounts[at].path().display());
        for _ in 0..rounds(5, 50) {
            run(&mut layers.hayloft(["root", "publish", &format!("k{at}"), &to]));
        }
    };
    publish(0);
    let done = AtomicBool::new(false);
    let read = || {
        let mut seen = 0;
        while !done.load(Ordering::Relaxed) {
            // The folder that this is in may be replaced and go; what is read of one is of one version.
            let output = sh("cd a/out/out; text=$(cat 1 30 60); echo \"$text\" | uniq")
                .current_dir(mounts[2].path())
                .output()
                .unwrap();
            if output.status.success() {
                let text = String::from_utf8_lossy(&output.stdout).into_owned();
                assert!(["k0\n", "k1\n"].contains(&text.as_str()), "{text}");
                seen += 1;
            } else {
                // By its name it is always there.
                assert!(mounts[2].join("a/out/out").is_dir());
            }
        }
        assert!(seen > 0);
    };
    std::thread::scope(|scope| {
        let reader = scope.spawn(read);
        let publishers = [0, 1].map(|at| scope.spawn(move || publish(at)));
        let outcomes = publishers.map(std::thread::ScopedJoinHandle::join);
        done.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        outcomes.into_iter().for_each(Result::unwrap);
    });
    for mount in &mounts {
        assert_eq!(names(&mount.join("a/out")), ["only-k0", "only-k1", "out"]);
        assert_eq!(names(&mount.join("a")), ["out"]);
    }
    let (code, said) = run_failing(&mut layers.hayloft(["root", "rm", "k0", "none", "k1"]));
    assert!(code == 4 && said.contains("'none'"), "{code}: {said}");
    assert_eq!(layers.roots.list(), [Value::Null; 0]);
}

#[test]
fn a_failed_command_publishes_nothing() {
    let layers = Layers::new();
    let volume = layers.dir().join("volume");
    fs::create_dir(&volume).unwrap();
    let to = format!("{}:out", volume.display());
    let flags = ["--publish", &to, "--keep", "--name", "f"];
    let (code, _) = run_failing(&mut layers.run(&flags, "echo half >/half; exit 7"));
    assert_eq!((code, names(&volume)), (7, vec![]));
    // It can be looked at, put right, and published.
    run(layers.hayloft(["root", "enter", "f", "--", "sh", "-euc"]).arg("cat /half; echo whole >/half"));
    run(&mut layers.hayloft(["root", "publish", "f", &to]));
    assert_eq!(fs::read_to_string(volume.join("out/half")).unwrap(), "whole\n");
    run(&mut layers.hayloft(["root", "rm", "f"]));
    // What is in memory of its own, or comes from the host, is published when it is chosen.
    fs::create_dir(layers.dir().join("bound")).unwrap();
    fs::write(layers.dir().join("bound/input"), "input").unwrap();
    let bind = format!("{}:/deep/bound", layers.dir().join("bound").display());
    let scratch = format!("{}:scratch", volume.display());
    let flags = ["--publish", &scratch, "--scratch", "/build", "--bind", &bind, "--only", "/build/out"];
    let flags = [&flags[..], &["--only", "/deep/bound/input", "--only", "/tmp/t"]].concat();
    run(&mut layers
        .run(&flags, "mkdir -m 700 /build/out; echo x >/build/out/a; echo y >/build/b; echo z >/tmp/t"));
    let found = run(sh("cd \"$0\"; find . -type f | sort; stat -c %a build/out").arg(volume.join("scratch")));
    assert_eq!(found, "./build/out/a\n./deep/bound/input\n./tmp/t\n700\n");
    let (code, said) = run_failing(&mut layers.run(&["--publish", &to, "--only", "/none"], "true"));
    assert!(code == 125 && said.contains("/none"), "{code}: {said}");
    assert_eq!(names(&volume), ["out", "scratch"]);
}

#[test]
fn what_is_wrong_with_a_destination_is_said_before_the_command_runs() {
    let layers = Layers::new();
    let farm = Farm::new();
    farm.create("v");
    let mount = farm.mount("v", "ro");
    let volume = layers.dir().join("volume");
    fs::create_dir_all(volume.join("a")).unwrap();
    fs::write(volume.join("a/file"), "").unwrap();
    let to = |path: &str| format!("{}:{path}", volume.display());
    for (to, why) in [
        ("/nowhere/at/all:x".to_owned(), "No such file"),
        ("word".to_owned(), "HOST:PORT/NAME"),
        ("/tmp:..".to_owned(), "top folder"),
        (to("a/file"), "it is no folder"),
        (to("a/file/out"), "it is no folder"),
        (format!("{}:out", mount.path().display()), "Read-only"),
        (format!("{}:mnt-v", farm.dir().display()), "mount point"),
        (format!("{}/none:out", farm.address), "no volume"),
        ("127.0.0.1:1/v:x".to_owned(), "cannot reach the server"),
    ] {
        let (code, said) = run_failing(&mut layers.run(&["--publish", &to], "echo it ran >&2"));
        assert!(code == 125 && said.contains(why) && !said.contains("it ran"), "{to}: {code}: {said}");
    }
    assert_eq!((names(&volume), names(&volume.join("a"))), (vec!["a".to_owned()], vec!["file".to_owned()]));
    mount.unmount();
    // Nothing is wrong with one that gets the root's name.
    fs::write(volume.join("root"), "").unwrap();
    run(&mut layers.run(&["--publish", &text(volume.clone())], "touch /x"));
    assert!(names(&volume).iter().any(|name| name.starts_with("run-")));
}

#[test]
fn a_layer_is_published_and_used_again() {
    let layers = Layers::new();
    let volume = layers.dir().join("volume");
    fs::create_dir(&volume).unwrap();
    let to = format!("{}:layer", volume.display());
    let script = format!("rm /etc/passwd; {EVERYTHING}; rm -r /old; mkdir /old; echo >/old/only");
    run(&mut layers.run(&["--publish", &to, "--as-layer", "--keep", "--name", "one"], &script));
    let layer = text(volume.join("layer"));
    assert!(volume.join("layer/etc/passwd").symlink_metadata().unwrap().file_type().is_char_device());
    let look = "test ! -e /etc/passwd; ls /old; test /out/file -ef /out/link; stat -c %a:%u:%g /out/file";
    assert_eq!(run(&mut layers.run(&["--root", &layer], look)), "only\n6755:1234:5\n");
    // Once more with what a second root changes, from both layers.
    let to = format!("{}:second", volume.display());
    let flags = ["--root", &layer, "--publish", &to, "--as-layer"];
    run(&mut layers.run(&flags, "rm -r /out; mkdir /out; echo back >/etc/passwd"));
    let second = text(volume.join("second"));
    let look = "cat /etc/passwd; ls /out; ls /old";
    assert_eq!(run(&mut layers.run(&["--root", &second, "--root", &layer], look)), "back\nonly\n");
    run(&mut layers.hayloft(["root", "rm", "one"]));
}

#[test]
fn what_is_mounted_in_the_target_stays() {
    let layers = Layers::new();
    let script = "cd \"$0\"; mkdir -p vol/out/data precious; echo important >precious/f; mount --bind precious vol/out/data";
    run(sh(script).arg(layers.dir()));
    let to = format!("{}:out", layers.dir().join("vol").display());
    for more in [&[][..], &["--as-layer"]] {
        let flags = [&["--publish", &to, "--only", "/x"][..], more].concat();
        let (code, said) = run_failing(&mut layers.run(&flags, "mkdir /x; echo hi >/x/y"));
        assert!(code == 125 && said.contains("vol/out/data in it: unmount it"), "{code}: {said}");
    }
    run(sh("umount \"$0/vol/out/data\"").arg(layers.dir()));
    assert_eq!(names(&layers.dir().join("precious")), ["f"]);
    assert_eq!(names(&layers.dir().join("vol/out")), ["data"]);
}

#[test]
fn nothing_in_a_target_blocks_it() {
    let layers = Layers::new();
    let volume = layers.dir().join("volume");
    fs::create_dir(&volume).unwrap();
    let script = "cd /; mkdir -p $(printf 'd/%.0s' $(seq 400)); echo text >/file";
    run(&mut layers.run(&["--keep", "--name", "deep"], script));
    let to = format!("{}:out", volume.display());
    let publish = || {
        let mut command = sh("ulimit -n 256; exec \"$0\" root publish deep \"$1\"");
        command.arg(crate::setup::farm::HAYLOFT).arg(&to).env("HAYLOFT_CONFIG", "/dev/null");
        run(command.env("HAYLOFT_STATE_DIR", layers.roots.state()));
    };
    // More levels than descriptors, to be linked and removed.
    for _ in 0..3 {
        publish();
        assert_eq!(
            (names(&volume), names(&volume.join("out"))),
            (vec!["out".into()], vec!["d".into(), "file".into()])
        );
    }
    // What cannot be removed stays, and nobody is kept from publishing.
    run(sh("chattr +i \"$0/out/file\"").arg(&volume));
    publish();
    publish();
    let left = names(&volume);
    run(sh("chattr -i \"$0\"/.out.hayloft-new/new-*/file").arg(&volume));
    assert_eq!(left, [".out.hayloft-new", "out"]);
    publish();
    assert_eq!(names(&volume), ["out"]);
    run(&mut layers.hayloft(["root", "rm", "deep"]));
}

#[test]
fn an_ordinary_user_publishes_as_far_as_may_be() {
    let layers = Layers::new();
    let home = layers.dir().join("home");
    run(sh("chmod 755 \"$0\"; mkdir -p \"$0/home/vol\" \"$0/home/run\"; chown -R 1000:1000 \"$0/home\"")
        .arg(layers.dir()));
    let script = "cd \"$1\"; run() { \"$0\" run --root base --bind /usr:/usr \"$@\"; }
        \"$0\" root create base --from \"dir:$2\" >/dev/null
        run --publish ./vol:out --as-layer -- sh -euc 'rm -r /old; mkdir /old; echo 1 >/old/new; rm /etc/passwd'
        \"$0\" run --root ./vol/out --root base --bind /usr:/usr -- sh -euc 'ls /old /etc'";
    let mut setpriv = std::process::Command::new("setpriv");
    setpriv.args(["--reuid", "1000", "--regid", "1000", "--clear-groups", "sh", "-euc", script]);
    setpriv.args([
        crate::setup::farm::HAYLOFT.as_ref(),
        home.as_os_str(),
        layers.dir().join("layer").as_os_str(),
    ]);
    setpriv.env("HOME", &home).env("XDG_RUNTIME_DIR", home.join("run")).env("HAYLOFT_CONFIG", "/dev/null");
    assert_eq!(run(setpriv.stdin(Stdio::null())), "/etc:\nhosts\n\n/old:\nnew\n");
}

#[test]
fn killed_while_publishing_it_is_all_or_nothing() {
    let layers = Layers::new();
    let volume = layers.dir().join("volume");
    fs::create_dir_all(volume.join("out")).unwrap();
    fs::write(volume.join("out/version"), "old").unwrap();
    let script = "mkdir /files; for at in $(seq 1500); do echo $at >/files/$at; done; printf new >/version";
    run(&mut layers.run(&["--keep", "--name", "k"], script));
    let to = format!("{}:out", volume.display());
    let (mut killed, mut delay) = (0, Duration::from_millis(3));
    for _ in 0..25 {
        let mut command = layers.hayloft(["root", "publish", "k", &to]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(delay);
        delay = delay.mul_f64(1.3);
        child.kill().unwrap();
        let status = child.wait().unwrap();
        killed += usize::from(!status.success());
        let version = fs::read_to_string(volume.join("out/version")).unwrap();
        match version.as_str() {
            "old" => assert_eq!(names(&volume.join("out")), ["version"]),
            _ => assert_eq!(fs::read_dir(volume.join("out/files")).unwrap().count(), 1500),
        }
        if status.success() {
            break;
        }
    }
    assert!(killed > 0);
    run(&mut layers.hayloft(["root", "publish", "k", &to]));
    assert_eq!(names(&volume), ["out"]);
    assert_eq!(fs::read_dir(volume.join("out/files")).unwrap().count(), 1500);
    run(&mut layers.hayloft(["root", "rm", "k"]));
}
