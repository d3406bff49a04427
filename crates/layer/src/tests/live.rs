//! New versions of layers in a tree that is there.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::{Marks, View, plan_live};

/// Two versions of layers upon one ground, and the tree of a root that has the first one.
struct World {
    dir: tempfile::TempDir,
}

fn shell(folder: &Path, script: &str) {
    let status = Command::new("sh").args(["-euc", script]).current_dir(folder).status().unwrap();
    assert!(status.success(), "{script}");
}

/// All paths below a folder, with what they are.
fn listing(folder: &Path) -> Vec<String> {
    let output = Command::new("sh")
        .args(["-euc", "find . -mindepth 1 -printf '%P %y %m %l' -exec sh -c '[ ! -f \"$0\" ] || cat \"$0\"' {} \\; -printf '\\n' | sort"])
        .current_dir(folder)
        .env("LC_ALL", "C")
        .output()
        .unwrap();
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect()
}

impl World {
    fn new() -> World {
        let world = World { dir: tempfile::tempdir().unwrap() };
        for name in ["ground", "before", "after", "above", "merged"] {
            fs::create_dir(world.path(name)).unwrap();
        }
        shell(
            &world.path("ground"),
            "mkdir -p gone/deep back/deep opaque kind; echo g >gone/deep/f; echo g >back/deep/f; echo g >opaque/hidden
             echo g >kind/file; mkdir kind/folder; echo g >kind/folder/f; echo g >same",
        );
        // It has lost `back`, and has something of its own.
        shell(
            &world.path("before"),
            "mknod back c 0 0; mkdir kind; echo b >only; echo b >kind/changed; ln -s only link",
        );
        shell(
            &world.path("after"),
            "mknod gone c 0 0; mkdir -p opaque kind/file new/er; echo a >opaque/shown; setfattr -n trusted.overlay.opaque -v y opaque
             echo a >kind/file/f; echo a >kind/folder; echo a >kind/changed; echo a >new/er/f; chmod 640 new/er/f; ln -s new link",
        );
        shell(&world.path("above"), "mkdir -p new/er; echo above >new/er/above; mknod same c 0 0");
        shell(
            &world.path("merged"),
            "cp -a ../ground/. .; rm -r back; cp -a ../before/only ../before/link .; cp ../before/kind/changed kind/; echo own >kind/own",
        );
        world
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn view(&self, layers: &[&str]) -> View {
        let paths: Vec<PathBuf> = layers.iter().map(|name| self.path(name)).collect();
        View::open(&paths, paths.len() - 1, Marks::Trusted).unwrap()
    }
}

const EXPECTED: [&str; 16] = [
    "back d 755 ",
    "back/deep d 755 ",
    "back/deep/f f 644 g",
    "kind d 755 ",
    "kind/changed f 644 a",
    "kind/file d 755 ",
    "kind/file/f f 644 a",
    "kind/folder f 644 a",
    "kind/own f 644 own",
    "link l 777 new",
    "new d 755 ",
    "new/er d 755 ",
    "new/er/above f 644 above",
    "new/er/f f 640 a",
    "opaque d 755 ",
    "opaque/shown f 644 a",
];

#[test]
fn a_tree_becomes_the_new_version_and_keeps_what_is_its_own() {
    let world = World::new();
    let (before, after) = (world.view(&["before", "ground"]), world.view(&["above", "after", "ground"]));
    let merged = world.path("merged");
    // What a kill has left.
    fs::write(merged.join("kind/.hayloft-live"), "half").unwrap();
    let live = plan_live(&before, &after, &merged).unwrap();
    assert_eq!(live.conflicts, [""; 0].map(PathBuf::from));
    live.apply(&after, &merged, &|_| {}).unwrap();
    assert_eq!(listing(&merged), EXPECTED);
    // Nothing more is to be done, and it goes back.
    assert_eq!(
        plan_live(&before, &after, &merged).unwrap().apply(&after, &merged, &|_| {}).unwrap().written,
        0
    );
    let back = plan_live(&after, &before, &merged).unwrap();
    assert_eq!(back.conflicts, [""; 0].map(PathBuf::from));
    back.apply(&before, &merged, &|_| {}).unwrap();
    let other = World::new();
    assert_eq!(listing(&merged), listing(&other.path("merged")));
}

#[test]
fn what_the_tree_has_changed_itself_is_named_and_nothing_is_done() {
    let world = World::new();
    let (before, after) = (world.view(&["before", "ground"]), world.view(&["after", "ground"]));
    let merged = world.path("merged");
    fs::write(merged.join("kind/changed"), "own").unwrap();
    fs::set_permissions(merged.join("only"), fs::Permissions::from_mode(0o600)).unwrap();
    fs::write(merged.join("gone/deep/f"), "own").unwrap();
    fs::create_dir(merged.join("new")).unwrap();
    fs::write(merged.join("new/er"), "a file where a folder is to be").unwrap();
    let then = listing(&merged);
    let live = plan_live(&before, &after, &merged).unwrap();
    let named: Vec<_> = live.conflicts.iter().map(|path| path.to_str().unwrap()).collect();
    assert_eq!(named, ["/gone/deep/f", "/kind/changed", "/new/er", "/new/er/f", "/only"]);
    assert!(live.apply(&after, &merged, &|_| {}).is_err());
    assert_eq!(listing(&merged), then);
}
