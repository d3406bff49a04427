//! Layers by name, what a root has changed, and publishing it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;

use crate::setup::farm::{has_ended, run, run_failing, sh, wait_until};
use crate::setup::root_box::{RootBox, small_layer};

/// Roots with a small layer by the name of `small`, and programs from the host.
pub(crate) struct Layers {
    pub(super) roots: RootBox,
}

impl Layers {
    pub(crate) fn new() -> Layers {
        let roots = RootBox::new();
        let folder = small_layer(roots.dir());
        fs::create_dir(folder.join("old")).unwrap();
        fs::write(folder.join("old/inside"), "old").unwrap();
        let layers = Layers { roots };
        layers.create("small", &format!("dir:{}", folder.display()), &[]);
        layers
    }

    pub(crate) fn dir(&self) -> &Path {
        self.roots.dir()
    }

    pub(crate) fn hayloft<const N: usize>(&self, args: [&str; N]) -> std::process::Command {
        let mut command = self.roots.hayloft(args);
        command.env("HAYLOFT_LAYERS", self.dir().join("layers"));
        command
    }

    pub(super) fn create(&self, name: &str, from: &str, more: &[&str]) {
        run(self.hayloft(["root", "create", name, "--from", from]).args(more));
    }

    /// Makes the layer `v`, or replaces it, with a text in its file `version`.
    pub(super) fn create_version(&self, text: &str) {
        let folder = self.dir().join("folder");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("version"), text).unwrap();
        self.create("v", &format!("dir:{}", folder.display()), &["--force"]);
    }

    /// `hayloft run` of a shell script in a root of the small layer.
    pub(crate) fn run(&self, flags: &[&str], script: &str) -> std::process::Command {
        let mut command = self.hayloft(["run"]);
        command.args(flags).args(["--root", "small", "--bind", "/usr:/usr"]);
        command.args(["--", "sh", "-euc", script]);
        command
    }
}

pub(super) fn text(path: PathBuf) -> String {
    path.to_str().unwrap().to_owned()
}

pub(super) fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn layers_have_names() {
    let layers = Layers::new();
    assert_eq!(run(&mut layers.run(&[], "ls -d /etc/passwd")), "/etc/passwd\n");
    // An archive, with a name and as it is.
    fs::create_dir_all(layers.dir().join("more/opt")).unwrap();
    fs::write(layers.dir().join("more/opt/tool"), "tool").unwrap();
    run(sh("tar -C \"$0/more\" -czf \"$0/more.tar.gz\" .").arg(layers.dir()));
    let archive = text(layers.dir().join("more.tar.gz"));
    layers.create("more", &format!("tar:{archive}"), &[]);
    for layer in ["more", &archive, &archive] {
        assert_eq!(run(&mut layers.run(&["--root", layer], "cat /opt/tool")), "tool");
    }
    // What is wrong is said.
    let create = |name: &str, from: &str| {
        let mut command = layers.hayloft(["root", "create", name, "--from", from]);
        run_failing(&mut command)
    };
    let (code, said) = create("more", &format!("tar:{archive}"));
    assert!(code == 9 && said.contains("--force"), "{code}: {said}");
    layers.create("more", &format!("dir:{}/more/opt", layers.dir().display()), &["--force"]);
    assert_eq!(names(&layers.dir().join("layers/more/tree")), ["tool"]);
    for (name, from, expected) in
        [("a/b", "dir:/", 2), ("x", "zip:/", 2), ("x", "dir:/nowhere", 4), ("x", "tar:/etc/passwd", 1)]
    {
        let (code, said) = create(name, from);
        assert_eq!((code, said.lines().count()), (expected, 1), "{said}");
    }
    let (code, said) = run_failing(&mut layers.run(&["--root", "none"], "true"));
    assert!(code == 125 && said.contains("hayloft root create none"), "{code}: {said}");
    assert_eq!(names(&layers.dir().join("layers")), [".cache", "more", "small"]);
    // Listed, and removed when no root uses it.
    let listed = run(&mut layers.hayloft(["root", "list", "--layers", "--json"]));
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(
        (&listed[0]["name"], &listed[0]["files"], listed.as_array().unwrap().len()),
        (&"more".into(), &1.into(), 2)
    );
    run(&mut layers.run(&["--root", "more", "--keep", "--name", "user"], "true"));
    let remove = || layers.hayloft(["root", "rm", "--layer", "more"]);
    let (code, said) = run_failing(&mut remove());
    assert!(code == 5 && said.contains("'user'"), "{code}: {said}");
    run(&mut layers.hayloft(["root", "rm", "user"]));
    run(&mut remove());
    assert_eq!(run_failing(&mut remove()).0, 4);
}

/// A program by the name of mmdebstrap, in a folder of its own: a shell script that knows the new tree as `$tree`.
fn bootstrap(layers: &Layers, name: &str, script: &str) -> std::process::Command {
    use std::os::unix::fs::PermissionsExt;
    let folder = layers.dir().join(name);
    fs::create_dir(&folder).unwrap();
    let program = folder.join("mmdebstrap");
    let script =
        format!("#!/bin/sh\nfor word; do case \"$word\" in */tree) tree=$word;; esac; done\n{script}\n");
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let mut command =
        layers.hayloft(["root", "create", "b", "--from", "debian:x", "--mirror", "http://localhost"]);
    command.env("PATH", format!("{}:{}", folder.display(), std::env::var("PATH").unwrap()));
    command
}

#[test]
fn a_killed_bootstrap_writes_into_no_other_layer() {
    let layers = Layers::new();
    let write = "exec 2>/dev/null; for at in $(seq 2000); do mkdir -p \"$tree\"; echo >\"$tree/evil\"; sleep 0.01; done";
    for (name, first) in [("obedient", ""), ("stubborn", "trap '' TERM")] {
        let mut create = bootstrap(&layers, name, &format!("{first}\necho $$ >\"$0.pid\"\n{write}"));
        let mut create = create.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let pid = || {
            fs::read_to_string(layers.dir().join(name).join("mmdebstrap.pid"))
                .ok()?
                .trim()
                .parse::<u32>()
                .ok()
        };
        wait_until("the bootstrap program runs", Duration::from_secs(20), || pid().is_some());
        let pid = pid().unwrap();
        create.kill().unwrap();
        create.wait().unwrap();
        if name == "obedient" {
            wait_until("it has ended", Duration::from_secs(20), || has_ended(pid.into()));
            continue;
        }
        run(&mut bootstrap(&layers, "good", "sleep 0.3; echo >\"$tree/good\""));
        assert!(!has_ended(pid.into()));
        crate::setup::farm::kill(pid, libc::SIGKILL);
        assert_eq!(names(&layers.dir().join("layers/b/tree")), ["good"]);
    }
}

#[test]
fn a_layer_that_is_replaced_stays_for_the_roots_that_use_it() {
    let layers = Layers::new();
    let make = |text: &str| layers.create_version(text);
    make("one");
    run(&mut layers.run(&["--root", "v", "--keep", "--name", "k"], "true"));
    make("two");
    let read = || run(&mut layers.hayloft(["root", "enter", "k", "--", "cat", "/version"]));
    assert_eq!((read().as_str(), names(&layers.dir().join("layers")).len()), ("one", 3));
    assert_eq!(run(&mut layers.run(&["--root", "v"], "cat /version")), "two");
    // Roots of another state folder are asked as well.
    let mut remove = layers.hayloft(["root", "rm", "--layer", "small"]);
    let (code, said) = run_failing(remove.env("HAYLOFT_STATE_DIR", layers.dir().join("other")));
    assert!(code == 5 && said.contains("in use"), "{code}: {said}");
    run(&mut layers.hayloft(["root", "rm", "k"]));
    make("three");
    assert_eq!(names(&layers.dir().join("layers")), ["small", "v"]);
}

#[test]
fn a_layer_that_is_replaced_while_a_root_is_made_is_looked_up_again() {
    let layers = Layers::new();
    let make = |text: &str| layers.create_version(text);
    make("one");
    run(&mut layers.run(&["--root", "v"], "true"));
    // It waits for this after its layers were looked up.
    let path = layers.roots.state().join(".lock");
    let lock = File::options().write(true).open(&path).unwrap();
    lock.lock().unwrap();
    let go = layers.dir().join("go");
    fs::create_dir(&go).unwrap();
    let bind = format!("{}:/go", go.display());
    let mut command = layers
        .run(&["--root", "v", "--bind", &bind], "until test -e /go/on; do sleep 0.02; done; cat /version");
    let root = command.stdout(Stdio::piped()).spawn().unwrap();
    let descriptors = PathBuf::from(format!("/proc/{}/fd", root.id()));
    let is_open = |entry: fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|to| to == path);
    wait_until("the root waits", Duration::from_secs(20), || {
        fs::read_dir(&descriptors).unwrap().any(|entry| is_open(entry.unwrap()))
    });
    make("two");
    lock.unlock().unwrap();
    wait_until("the root runs", Duration::from_secs(20), || {
        layers.roots.list().iter().any(|root| !root["lower"].as_array().unwrap().is_empty())
    });
    make("three");
    fs::write(go.join("on"), "").unwrap();
    assert_eq!(String::from_utf8(root.wait_with_output().unwrap().stdout).unwrap(), "two");
}

#[test]
fn a_difference_is_to_the_layer_that_the_root_has() {
    let layers = Layers::new();
    let folder = layers.dir().join("folder");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("file"), "").unwrap();
    let make = || layers.create("v", &format!("dir:{}", folder.display()), &["--force"]);
    make();
    run(&mut layers.run(&["--root", "v", "--keep", "--name", "d"], "rm /file"));
    fs::remove_file(folder.join("file")).unwrap();
    make();
    assert_eq!(run(&mut layers.hayloft(["root", "diff", "d"])), "removed  /file\n");
    run(&mut layers.hayloft(["root", "rm", "d"]));
}

#[test]
fn a_difference_is_shown() {
    let layers = Layers::new();
    let script = "echo >>/etc/passwd; chmod 700 /etc; mkdir -p /new/dir; : >/new/file; rm -r /old; : >/old
        chown 5:6 /new/file; cat /etc/passwd >/dev/null";
    run(&mut layers.run(&["--keep", "--name", "d"], script));
    let shown = run(&mut layers.hayloft(["root", "diff", "d"]));
    assert_eq!(
        shown,
        "changed  /etc (mode 0755 -> 0700)\n\
         changed  /etc/passwd (content, time)\n\
         added    /new\n\
         added    /new/dir\n\
         added    /new/file\n\
         type     /old\n"
    );
    let lines = run(&mut layers.hayloft(["root", "diff", "d", "--json"]));
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines[0]["path"], "/etc");
    assert_eq!((&lines[0]["old"]["mode"], &lines[0]["new"]["mode"]), (&"0755".into(), &"0700".into()));
    assert_eq!((&lines[4]["new"]["uid"], &lines[4]["type"]), (&5.into(), &"file".into()));
    let (code, _) = run_failing(&mut layers.hayloft(["root", "diff", "none"]));
    assert_eq!(code, 4);
    run(&mut layers.hayloft(["root", "rm", "d"]));
    assert_eq!(layers.roots.leftovers(&[]), [""; 0]);
}
