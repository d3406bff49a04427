//! A view of a mounted volume in a root costs what it costs outside (a chroot with null mounts over NFS, reported
//! in 2006, sent 2,136 lookups for the second `find` over such a tree).

use std::fs;
use std::io::BufRead;
use std::path::Path;
use std::time::Duration;

use crate::setup::farm::{Farm, Mount, number, rounds, run, sh, wait_until};
use crate::setup::root_box::{RootBox, Started, small_layer};
use crate::sharing::contention::Changers;

/// 302 directories and 1,016 files, with long paths.
fn tree(top: &Path) {
    for at in 0..298 {
        let dir = top.join(format!("package-category-{}/long-package-name-{at}", at / 100));
        fs::create_dir_all(&dir).unwrap();
        let files = 3 + usize::from(at < 122);
        for file in 0..files {
            fs::write(dir.join(format!("Makefile.{file}")), vec![b'x'; 100 + at]).unwrap();
        }
    }
}

const PASS: &str = "find . -exec stat -c %i {} + >/dev/null; ! test -e package-category-0/missing.h";

/// Requests to a mount and to its server, but those for the file system's size: find(1) asks for it each time, and
/// programs that look at all mounts do; and but those that the kernel sends when it comes to it.
fn requests(mount: &Mount) -> (u64, u64) {
    let stats = mount.stats();
    let count = |kind: &str| stats["fuse"]["requests"][kind].as_u64().unwrap_or(0);
    let others: u64 = ["STATFS", "FORGET", "BATCH_FORGET", "RELEASE"].map(count).iter().sum();
    (number(&stats, "fuse.requests.total") - others, number(&stats, "server.requests.total"))
}

#[test]
fn a_bind_and_a_layer_send_nothing_the_second_time() {
    let (farm, mount) = Farm::mounted("v");
    tree(mount.path());
    let count = run(sh("find . -type f | wc -l; find . -type d | wc -l").current_dir(mount.path()));
    assert_eq!(count, "1016\n302\n");
    mount.unmount();
    let roots = RootBox::new();
    let passes = |mount: &Mount, inside: Option<&[&str]>| {
        let mut costs = Vec::new();
        for _ in 0..3 {
            let before = requests(mount);
            match inside {
                None => drop(run(sh(PASS).current_dir(mount.path()))),
                Some(flags) => {
                    let mut command = roots.hayloft(["run"]);
                    run(command.args(flags).args(["--chdir", "/src", "--", "sh", "-euc", PASS]));
                }
            }
            let after = requests(mount);
            costs.push((after.0 - before.0, after.1 - before.1));
        }
        costs
    };
    let mount = farm.mount("v", "");
    let outside = passes(&mount, None);
    mount.unmount();
    let mount = farm.mount("v", "");
    let bind = format!("{}:/src", mount.path().display());
    let bound = passes(&mount, Some(&["--bind", &bind]));
    mount.unmount();
    assert_eq!(outside[2], (0, 0), "{outside:?}");
    assert_eq!(bound[1..], outside[1..], "{bound:?} {outside:?}");
    // The way to the mount itself is looked up once.
    assert!(bound[0].0 <= outside[0].0 + 4 && bound[0].1 <= outside[0].1 + 1, "{bound:?} {outside:?}");
}

#[test]
fn a_volume_is_a_layer() {
    let (farm, mount) = Farm::mounted("v");
    tree(mount.path());
    fs::create_dir(mount.path().join("usr")).unwrap();
    run(sh("for name in bin lib lib64 sbin; do ln -s usr/$name $name; done").current_dir(mount.path()));
    mount.unmount();
    let mount = farm.mount("v", "");
    let roots = RootBox::new();
    let layer = mount.path().to_str().unwrap();
    let find = "find /package-category-* -exec stat -c %i {} + >/dev/null";
    let flags = ["--root", layer, "--bind", "/usr:/usr", "--keep", "--name", "r"];
    let report = roots.report(flags, find);
    assert_eq!(report["exit_code"], 0, "{report}");
    assert!(report["operations"][layer]["fuse"].as_u64().unwrap() > 302, "{report}");
    // Once more: the folders' listings are kept from the second time on.
    for _ in 0..2 {
        run(&mut roots.hayloft(["root", "enter", "r", "--", "sh", "-euc", find]));
    }
    let before = requests(&mount);
    run(&mut roots.hayloft(["root", "enter", "r", "--", "sh", "-euc", find]));
    assert_eq!(requests(&mount), before, "{}", mount.stats()["fuse"]["requests"]);
    let change =
        "echo changed >/package-category-0/long-package-name-0/Makefile.0; rm -r /package-category-1";
    run(&mut roots.hayloft(["root", "enter", "r", "--", "sh", "-euc", change]));
    let file = mount.path().join("package-category-0/long-package-name-0/Makefile.0");
    assert_eq!(fs::read(file).unwrap(), vec![b'x'; 100]);
    assert!(mount.path().join("package-category-1").exists());
}

/// The kernel looks for capabilities in each program that it executes, unless nothing in a mount gives rights.
#[test]
fn programs_of_a_layer_are_executed_without_a_request() {
    let (farm, mount) = Farm::mounted("v");
    run(sh(
        "mkdir usr; for name in bin lib lib64 sbin; do ln -s usr/$name $name; done; cp /usr/bin/true program",
    )
    .current_dir(mount.path()));
    mount.unmount();
    let mount = farm.mount("v", "");
    let roots = RootBox::new();
    let flags = ["--root", mount.path().to_str().unwrap(), "--bind", "/usr:/usr", "--keep", "--name", "r"];
    let execute = "for at in 1 2 3 4 5 6 7 8 9 10; do /program; done";
    run(&mut roots.run(flags, execute));
    let enter = || run(&mut roots.hayloft(["root", "enter", "r", "--", "sh", "-euc", execute]));
    enter();
    let before = requests(&mount);
    enter();
    assert_eq!(requests(&mount), before, "{}", mount.stats()["fuse"]["requests"]);
}

#[test]
fn a_bind_is_shared_with_other_hosts() {
    let (_farm, mounts) = Farm::shared(2);
    let roots = RootBox::new();
    let bind = format!("{}:/src:rw", mounts[0].path().display());
    let script =
        "cd /src; exec 9>lock; flock 9; echo made >made; echo; until test -e answer; do sleep 0.02; done
        cat answer; exec 9>&-; until test -e end; do sleep 0.02; done";
    let mut root = roots.start(["--bind", &bind], script);
    let line = |root: &mut Started| {
        let mut line = String::new();
        root.out.read_line(&mut line).unwrap();
        line
    };
    assert_eq!(line(&mut root), "\n");
    assert_eq!(fs::read_to_string(mounts[1].join("made")).unwrap(), "made\n");
    let lock = |how: &str| {
        sh(&format!("exec 9<lock; flock {how} 9")).current_dir(mounts[1].path()).status().unwrap()
    };
    assert!(!lock("-n").success(), "a lock of a program in a root excludes nobody");
    // Written under another name, so that it is there with what is in it.
    fs::write(mounts[1].join("new"), "answer\n").unwrap();
    fs::rename(mounts[1].join("new"), mounts[1].join("answer")).unwrap();
    assert_eq!(line(&mut root), "answer\n");
    assert!(lock("-w 20").success());
    fs::write(mounts[1].join("end"), "").unwrap();
    assert!(root.child.wait().unwrap().success());
}

/// A root over a volume, mounted once more for that, looks at all of its layer again and again while `disturb` goes on.
fn a_root_goes_on(mounts: &[Mount], layers: &Mount, disturb: impl FnOnce()) {
    let layer = mounts[0].join("layer");
    fs::create_dir(&layer).unwrap();
    tree(&layer);
    run(sh("mkdir usr go; for name in bin lib lib64 sbin; do ln -s usr/$name $name; done")
        .current_dir(&layer));
    let layer = layers.join("layer");
    let roots = RootBox::new();
    let go = roots.dir().join("go");
    fs::create_dir(&go).unwrap();
    let bind = format!("{}:/go:rw", go.display());
    let flags = ["--root", layer.to_str().unwrap(), "--bind", "/usr:/usr", "--bind", &bind];
    let look = "cd /package-category-0; until test -e /go/stop; do
        find /package-category-* -type f -exec cat {} + >/dev/null; echo >>/go/passes; done";
    let mut root = roots.start(flags, look);
    let passes = || fs::read_to_string(go.join("passes")).unwrap_or_default().len();
    let pass_on = || {
        let seen = passes();
        wait_until("a pass", Duration::from_secs(60), || passes() > seen + 1);
    };
    pass_on();
    disturb();
    pass_on();
    fs::write(go.join("stop"), "").unwrap();
    assert!(root.child.wait().unwrap().success(), "what was looked up before is not there any more");
}

#[test]
fn a_root_over_a_volume_outlives_the_server() {
    let (mut farm, mounts) = Farm::shared(2);
    let layers = farm.mount_as("v", "layers", "ro", None);
    a_root_goes_on(&mounts, &layers, || {
        farm.kill_server();
        farm.start_server();
    });
}

/// The kernel has the lock of a directory that it moves: who drops names in it meanwhile waits for the call.
#[test]
fn a_root_over_a_volume_goes_on_while_something_is_published_to_it() {
    let (_farm, mount) = Farm::mounted("v");
    let roots = RootBox::new();
    let small = small_layer(roots.dir());
    let target = format!("{}:published", mount.path().display());
    let flags = ["--root", small.to_str().unwrap(), "--bind", "/usr:/usr", "--publish", &target];
    let mounts = [mount];
    a_root_goes_on(&mounts, &mounts[0], || {
        for _ in 0..3 {
            run(&mut roots.run(flags, "mkdir -p /out/folder; date +%N >/out/folder/file; ls -R /out"));
        }
    });
    assert_eq!(number(&mounts[0].stats(), "server.epochs"), 0);
}

#[test]
fn a_root_over_a_volume_goes_on_while_hosts_contend_elsewhere_in_it() {
    let (farm, mounts) = Farm::shared(3);
    let layers = farm.mount_as("v", "layers", "ro", None);
    a_root_goes_on(&mounts, &layers, || Changers::start(&mounts, "dir", 4, rounds(150, 3000)).check(&mounts));
}
