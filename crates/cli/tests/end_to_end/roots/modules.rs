//! Layers that are put together from modules and packages, and their generations.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::setup::farm::{Farm, run, run_failing, sh};
use crate::setup::root_box::RootBox;
use crate::setup::small_debian::SmallDebian;

pub(super) const GCC: &str = r#"
description = "Compilers"
default = "12"
[stream.12]
packages = ["gcc-12"]
hooks = ["note.sh"]
[stream.12.profile.full]
packages = ["g++-12"]
[stream.12.profile.minimal]
[stream.13]
packages = ["gcc-13"]
hooks = ["note.sh"]
"#;

pub(super) const PYTHON: &str = r#"
description = "Python"
[stream."3.11"]
packages = ["python3.11"]
requires = ["gcc:12"]
"#;

pub(super) const NOTE: &str =
    "#!/bin/sh\necho \"$HAYLOFT_MODULE:$HAYLOFT_STREAM/$HAYLOFT_PROFILES\" >>/etc/noted\n";

/// Roots, layers, a catalogue, and a small base with packages.
pub(super) struct World {
    pub(super) roots: RootBox,
    pub(super) debian: SmallDebian,
}

impl World {
    pub(super) fn new() -> World {
        let roots = RootBox::new();
        let debian = SmallDebian::new(roots.dir());
        for name in ["gcc-12", "g++-12", "gcc-13", "python3.11", "tool"] {
            debian.package(name, "1", "");
        }
        let world = World { roots, debian };
        for (file, text) in [("gcc.toml", GCC), ("python.toml", PYTHON), ("note.sh", NOTE)] {
            world.module(file, text);
        }
        world
    }

    pub(super) fn module(&self, file: &str, text: &str) {
        let folder = self.roots.dir().join("volume/modules");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(file), text).unwrap();
    }

    /// The base as a layer.
    pub(super) fn with_base(self) -> World {
        run(&mut self.hayloft(["root", "create", "small", "--from", &self.base_source()]));
        self
    }

    pub(super) fn base_source(&self) -> String {
        format!("dir:{}", self.debian.base.display())
    }

    pub(super) fn layers(&self) -> PathBuf {
        self.roots.dir().join("layers")
    }

    pub(super) fn hayloft<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = self.roots.hayloft(args);
        command.env("HAYLOFT_LAYERS", self.layers());
        command.env("HAYLOFT_MODULES", self.roots.dir().join("volume"));
        command.stdin(Stdio::null());
        command
    }

    /// The same for a command that makes something of packages.
    pub(super) fn making<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = self.hayloft(args);
        command.arg("--repository").arg(&self.debian.repository);
        command
    }

    /// The same for `hayloft root`, whatever is made.
    pub(super) fn making_all(&self, args: &[&str]) -> Command {
        let mut command = self.hayloft(["root"]);
        command.args(args).arg("--repository").arg(&self.debian.repository);
        command
    }

    pub(super) fn json(&self, command: &mut Command) -> Value {
        serde_json::from_str(&run(command.arg("--json"))).unwrap()
    }

    pub(super) fn history(&self, name: &str) -> Vec<Value> {
        let all = self.json(&mut self.hayloft(["root", "history", name]));
        all.as_array().unwrap().clone()
    }

    /// What packages have put into a root of this layer.
    pub(super) fn shared(&self, layer: &str) -> String {
        run(&mut self.hayloft(["run", "--root", layer, "--", "sh", "-c", "cd /usr/share; ls"]))
            .split_whitespace()
            .filter(|name| *name != "dpkg")
            .collect::<Vec<_>>()
            .join(" ")
    }

    pub(super) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.layers()).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// What a kept root has in a file.
    pub(super) fn read(&self, root: &str, file: &str) -> Result<String, i32> {
        let output = self.hayloft(["root", "enter", root, "--", "cat", file]).output().unwrap();
        match output.status.success() {
            true => Ok(String::from_utf8(output.stdout).unwrap()),
            false => Err(output.status.code().unwrap()),
        }
    }

    pub(super) fn keep(&self, root: &str, layer: &str, script: &str) {
        let args = ["run", "--keep", "--name", root, "--root", layer, "--", "sh", "-euc", script];
        run(&mut self.hayloft(args));
    }
}

#[test]
fn a_layer_has_one_stream_of_each_module_and_goes_back() {
    let world = World::new();
    let from = world.base_source();
    let made = world.json(&mut world.making([
        "root",
        "create",
        "base",
        "--from",
        &from,
        "--enable",
        "gcc:12/full,python:3.11",
    ]));
    assert_eq!((&made["generation"], &made["packages"].as_array().unwrap().len()), (&2.into(), &3));
    assert_eq!(world.shared("base"), "g++-12 gcc-12 python3.11");
    assert_eq!(
        run(&mut world.hayloft(["run", "--root", "base", "--", "cat", "/etc/noted"])),
        "gcc:12/full\n"
    );
    // Recipe and inputs are there, by name and by content.
    let history = world.history("base");
    let recipe = &history[1]["recipe"];
    assert_eq!(recipe["asked"], serde_json::json!(["gcc:12/full", "python:3.11"]));
    assert_eq!(recipe["hooks"][0]["file"], "note.sh");
    assert_eq!(recipe["hooks"][0]["hash"].as_str().unwrap().len(), 64);
    for generation in &history {
        assert!(generation["tree"].as_str().unwrap().starts_with("tree1-"), "{generation}");
    }
    assert_eq!(history[1]["packages"][1]["version"], "1");
    // The catalogue shows who has what.
    let listed = world.json(&mut world.hayloft(["root", "list", "--modules"]));
    let twelve = &listed[0]["streams"][0];
    assert_eq!((&twelve["stream"], &twelve["default"]), (&"12".into(), &true.into()));
    assert_eq!(twelve["enabled_in"], serde_json::json!([{ "layer": "base", "profiles": ["full"] }]));
    assert_eq!(listed[0]["streams"][1]["enabled_in"], serde_json::json!([]));
    let text = run(&mut world.hayloft(["root", "list", "--modules"]));
    assert!(text.contains("12 [d]") && text.contains("base (full)"), "{text}");
    // Another stream, while a root runs with the first one.
    world.keep("old", "base", "true");
    let (code, said) = run_failing(&mut world.making(["root", "switch", "base", "gcc:13"]));
    assert!(code == 2 && said.contains("'python' requires"), "{code}: {said}");
    run(&mut world.making(["root", "switch", "base", "gcc:13", "--off", "python"]));
    assert_eq!(world.shared("base"), "gcc-13");
    assert_eq!(world.read("old", "/usr/share/gcc-12").unwrap(), "gcc-12 1\n");
    // Back, and again.
    run(&mut world.hayloft(["root", "rollback", "base"]));
    assert_eq!(world.shared("base"), "g++-12 gcc-12 python3.11");
    run(&mut world.hayloft(["root", "rollback", "base"]));
    assert_eq!(world.shared("base"), "gcc-13");
    run(&mut world.hayloft(["root", "rollback", "base", "--to", "1"]));
    assert_eq!(world.shared("base"), "");
    let history = world.history("base");
    let same: Vec<&Value> = history.iter().map(|generation| &generation["same_as"]).collect();
    assert_eq!(same, [&Value::Null, &Value::Null, &Value::Null, &2.into(), &3.into(), &1.into()]);
    assert_eq!(history.iter().position(|generation| generation["current"] == true), Some(5));
    let (code, said) = run_failing(&mut world.hayloft(["root", "rollback", "base", "--to", "77"]));
    assert!(code == 4 && said.contains("there are 1, 2, 3, 4, 5, 6"), "{code}: {said}");
    // What a root has stays, and what all is upon.
    let pruned = world.json(&mut world.hayloft(["root", "prune", "base", "--keep", "1"]));
    assert_eq!(pruned, serde_json::json!({ "removed": [5, 4, 3], "in_use": [2, 1] }));
    assert_eq!(world.read("old", "/usr/share/gcc-12").unwrap(), "gcc-12 1\n");
    run(&mut world.hayloft(["root", "rm", "old"]));
    run(&mut world.hayloft(["root", "rm", "--layer", "base"]));
    assert!(world.names().is_empty(), "{:?}", world.names());
}

#[test]
fn packages_are_installed_upon_a_layer_that_stays_as_it_is() {
    let world = World::new().with_base();
    let before = world.history("small");
    let on = ["root", "layer", "tools", "--on", "small", "install", "tool", "gcc-12"];
    run(&mut world.making(on));
    assert_eq!(world.shared("tools"), "gcc-12 tool");
    run(&mut world.making(["root", "layer", "tools", "remove", "gcc-12"]));
    assert_eq!(world.shared("tools"), "tool");
    // One upon that one, without a package of it.
    run(&mut world.making(["root", "layer", "more", "--on", "tools", "install", "gcc-13"]));
    run(&mut world.making(["root", "layer", "more", "remove", "tool"]));
    assert_eq!(world.shared("more"), "gcc-13");
    assert_eq!(world.history("small"), before);
    // What is below stays there.
    for mut command in [
        world.hayloft(["root", "rm", "--layer", "small"]),
        world.hayloft(["root", "create", "small", "--force", "--from", &world.base_source()]),
    ] {
        let (code, said) = run_failing(&mut command);
        assert!(code == 5 && said.contains("is made upon 'small'"), "{code}: {said}");
    }
    // A new generation below is not taken until that is asked for.
    run(&mut world.making(["root", "layer", "tools", "install", "python3.11"]));
    assert_eq!(world.shared("more"), "gcc-13");
    let pruned = world.json(&mut world.hayloft(["root", "prune", "tools", "--keep", "1"]));
    assert_eq!(pruned, serde_json::json!({ "removed": [1], "in_use": [2] }));
    run(&mut world.making(["root", "layer", "more", "--on", "tools", "install"]));
    assert_eq!(world.shared("more"), "gcc-13 python3.11");
    let (code, said) = run_failing(&mut world.making(["root", "layer", "small", "--on", "tools", "install"]));
    assert!(code == 2 && said.contains("first generation"), "{code}: {said}");
    // What is not there is not removed.
    let (code, said) = run_failing(&mut world.making(["root", "layer", "tools", "remove", "gcc-13"]));
    assert!(code == 4 && said.contains("no package 'gcc-13' in it"), "{code}: {said}");
    for name in ["more", "tools", "small"] {
        run(&mut world.hayloft(["root", "rm", "--layer", name]));
    }
    assert!(world.names().is_empty());
}

#[test]
fn what_is_wrong_is_said_and_nothing_is_half() {
    let world = World::new().with_base();
    world.debian.package(
        "broken",
        "1",
        "printf '#!/bin/sh\\nexit 7\\n' >DEBIAN/postinst; chmod 755 DEBIAN/postinst",
    );
    world.module("broken.toml", "description = \"x\"\n[stream.1]\npackages = [\"broken\"]\n[stream.2]\nhooks = [\"fails.sh\"]\n[stream.3]\nhooks = [{ ansible = \"play.yml\" }]\n[stream.4]\nlayers = [\"none\"]\n[stream.5]\nhooks = [\"gone.sh\"]\n");
    world.module("fails.sh", "#!/bin/sh\necho it fails\nexit 3\n");
    world.module("play.yml", "- hosts: all\n");
    run(&mut world.making(["root", "create", "base", "--on", "small", "--enable", "gcc"]));
    let before = (world.names(), world.history("base"), world.history("small"));
    for (enable, code, said) in [
        ("gcc:12,gcc:13", 2, "gcc:12 (was asked for) and gcc:13 (was asked for) are two"),
        ("gcc:13,python:3.11", 2, "gcc:12 ('python' requires) are two"),
        ("gcc:14", 2, "there are 12, 13"),
        ("gcc:12/tiny", 2, "there are full, minimal"),
        ("python", 2, "name a stream, python:STREAM, of 3.11"),
        ("java:8", 2, "there are broken, gcc, python"),
        ("../x:1", 2, "'../x:1'"),
        ("broken:1", 1, "install: exit code"),
        ("broken:2", 1, "run the hook fails.sh of broken: exit code 3\n"),
        ("broken:3", 7, "ansible-core"),
        ("broken:4", 4, "no layer 'none'"),
        ("broken:5", 4, "gone.sh"),
    ] {
        for verb in [
            &["create", "new", "--on", "small", "--enable"][..],
            &["create", "new", "--from", &world.base_source(), "--enable"],
            &["switch", "base"],
        ] {
            // There one stream takes the place of another.
            if verb[0] == "switch" && enable.contains(',') {
                continue;
            }
            let args = [verb, &[enable]].concat();
            let (code_is, said_is) = run_failing(&mut world.making_all(&args));
            assert!(code_is == code && said_is.contains(said), "{verb:?} {enable}: {code_is}: {said_is}");
            assert_eq!((world.names(), world.history("base"), world.history("small")), before);
        }
    }
    for (args, code, said) in [
        (&["layer", "new", "install", "tool"][..], 4, "--on LAYER makes one upon that"),
        (&["layer", "new", "--on", "none", "install", "tool"], 4, "no layer 'none'"),
        (
            &["layer", "new", "--on", "small", "install", "tol"],
            4,
            "no source of packages of 'small' has 'tol'",
        ),
        (&["layer", "base", "install", "tool=9"], 4, "has 'tool'"),
        (&["layer", "base", "install", "-y"], 2, ""),
        (&["layer", "base", "install", "gcc-"], 2, "no name of a package"),
        (&["layer", "base", "remove", "gcc-12"], 2, "is a package of gcc:12"),
        (&["layer", "../base", "--on", "small", "install", "tool"], 2, "no name of a layer"),
        (&["switch", "base", "--off", "python"], 2, "not in the layer"),
        (&["create", "base", "--on", "small", "--enable", "gcc"], 9, "--force"),
    ] {
        let (code_is, said_is) = run_failing(&mut world.making_all(args));
        assert!(code_is == code && said_is.contains(said), "{args:?}: {code_is}: {said_is}");
        assert_eq!((world.names(), world.history("base"), world.history("small")), before);
    }
    // A base without packages, and catalogues that are wrong.
    let empty = world.roots.dir().join("empty");
    fs::create_dir(&empty).unwrap();
    let (code, said) = run_failing(&mut world.making([
        "root",
        "layer",
        "new",
        "--on",
        empty.to_str().unwrap(),
        "install",
        "tool",
    ]));
    assert!(code == 7 && said.contains("no package manager"), "{code}: {said}");
    world.module("zz.toml", "description = \"x\"\n[stream.1]\nhooks = [\"../../etc/passwd\"]\n");
    let (code, said) = run_failing(&mut world.hayloft(["root", "list", "--modules"]));
    assert!(code == 2 && said.contains("zz.toml:3: ") && said.lines().count() == 1, "{code}: {said}");
    let (code, said) =
        run_failing(world.hayloft(["root", "list", "--modules"]).env_remove("HAYLOFT_MODULES"));
    assert!(code == 2 && said.contains("--modules DIR"), "{code}: {said}");
    assert_eq!((world.names(), world.history("base"), world.history("small")), before);
    assert_eq!(world.roots.list(), [Value::Null; 0]);
}

#[test]
fn roots_that_run_get_a_layer_live() {
    let world = World::new().with_base();
    world.debian.package("tool", "2", "mkdir -p usr/share/deep/er; echo deep >usr/share/deep/er/file");
    let on = ["root", "layer", "tools", "--on", "small", "install", "tool=1"];
    world.keep("below", "small", "echo own >/own");
    run(&mut world.making(on));
    for root in ["plain", "changed", "removed"] {
        world.keep(root, "tools", "true");
    }
    world.keep("more", "tools", "mkdir -p /usr/share/deep; echo mine >/usr/share/deep/mine");
    let enter = |root: &str, script: &str| {
        run(&mut world.hayloft(["root", "enter", root, "--", "sh", "-euc", script]));
    };
    enter("changed", "echo mine >/usr/share/tool");
    enter("removed", "rm /usr/share/tool");
    // A reader that looks all the time finds the old file or the new one, and nothing else.
    let looking = world
        .hayloft(["root", "enter", "plain", "--", "sh", "-euc"])
        .arg("while [ ! -e /stop ]; do read -r text </usr/share/tool; case $text in 'tool 1'|'tool 2') ;; *) exit 9;; esac; done")
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let install = ["root", "layer", "tools", "install", "tool=2", "gcc-12", "--live"];
    let (code, said) = run_failing(&mut world.making(install));
    assert_eq!(code, 9, "{said}");
    for (root, path) in [("changed", "/usr/share/tool"), ("removed", "/usr/share/tool")] {
        let line = said.lines().find(|line| line.contains(&format!("'{root}'"))).unwrap();
        assert!(line.contains(path), "{line}");
    }
    assert_eq!(world.read("changed", "/usr/share/tool").unwrap(), "mine\n");
    assert!(world.read("changed", "/usr/share/gcc-12").is_err());
    assert!(world.read("removed", "/usr/share/tool").is_err());
    for root in ["plain", "below", "more"] {
        assert_eq!(world.read(root, "/usr/share/tool").unwrap(), "tool 2\n", "{root}");
        assert_eq!(world.read(root, "/usr/share/deep/er/file").unwrap(), "deep\n");
        assert_eq!(world.read(root, "/usr/share/gcc-12").unwrap(), "gcc-12 1\n");
    }
    enter("plain", ": >/stop");
    assert!(looking.wait_with_output().unwrap().status.success());
    assert_eq!(world.read("below", "/own").unwrap(), "own\n");
    // The package manager knows it as well.
    enter("plain", "dpkg-query -W gcc-12 >/dev/null");
    // Back: what came goes, and what is the root's own stays.
    run(&mut world.hayloft(["root", "rollback", "tools", "--to", "1", "--live"]));
    for root in ["plain", "below", "more"] {
        assert_eq!(world.read(root, "/usr/share/tool").unwrap(), "tool 1\n", "{root}");
        assert!(world.read(root, "/usr/share/gcc-12").is_err());
        assert!(world.read(root, "/usr/share/deep/er/file").is_err());
    }
    assert_eq!(world.read("more", "/usr/share/deep/mine").unwrap(), "mine\n");
    // Once more is nothing more.
    let said = run(&mut world.hayloft(["root", "layer", "tools", "live", "plain"]));
    assert!(said.contains("0 written, 0 removed"), "{said}");
    // Of other layers, or of another layer upon the same one.
    run(&mut world.making(["root", "layer", "other", "--on", "small", "install", "gcc-13"]));
    let (code, said) = run_failing(&mut world.hayloft(["root", "layer", "other", "live", "below"]));
    assert!(code == 2 && said.contains("the layer 'tools' already"), "{code}: {said}");
    let (code, said) = run_failing(&mut world.hayloft(["root", "layer", "other", "live", "plain"]));
    assert!(code == 2, "{said}");
    run(&mut world.hayloft(["root", "rm", "below", "plain", "more", "changed", "removed"]));
}

#[test]
fn a_catalogue_is_named_by_the_volume_that_is_mounted() {
    let world = World::new().with_base();
    let (farm, mount) = Farm::mounted("builds");
    let named = format!("{}/builds", farm.address);
    let list = |named: &str| {
        let mut command = world.hayloft(["root", "list", "--modules"]);
        command.arg(named).env_remove("HAYLOFT_MODULES");
        command
    };
    assert!(!run(&mut list(&named)).contains("python"));
    run(sh("cp -r \"$1\" \"$2\"").arg("-").arg(world.roots.dir().join("volume/modules")).arg(mount.path()));
    assert!(run(&mut list(&named)).contains("python"));
    let mut create = world.making(["root", "create", "base", "--on", "small", "--enable", "gcc:12/full"]);
    run(create.env_remove("HAYLOFT_MODULES").args(["--modules", &named]));
    assert_eq!(world.shared("base"), "g++-12 gcc-12");
    // A snapshot of it is a catalogue that nobody changes.
    run(&mut farm.ask(["snapshot", "create", "builds@old"]));
    fs::write(mount.join("modules/python.toml"), PYTHON.replace("3.11", "3.12")).unwrap();
    let snapshot = farm.mount("builds@old", "");
    let streams = |named: &str| run(&mut list(named));
    assert!(streams(&named).contains("3.12"));
    assert!(streams(&format!("{named}@old")).contains("3.11"));
    drop(snapshot);
    let (code, said) = run_failing(&mut list(&format!("{named}@old")));
    assert!(code == 4 && said.contains("is not mounted on this host"), "{code}: {said}");
}
