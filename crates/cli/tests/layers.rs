//! The crates use each other only as `ARCHITECTURE.md` says, and the rooms of a crate (folders of `src`) only those above
//! them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A crate, and the crates of this workspace that it may use.
const MAY_USE: [(&str, &[&str]); 18] = [
    ("hayloft-crash", &[]),
    ("hayloft-memory", &[]),
    ("hayloft-model", &[]),
    ("hayloft-process", &[]),
    ("hayloft-tree", &[]),
    ("hayloft-transfer", &["hayloft-tree"]),
    ("hayloft-wire", &["hayloft-model"]),
    ("hayloft-store", &["hayloft-crash", "hayloft-model"]),
    ("hayloft-transport", &[]),
    (
        "hayloft-volume",
        &[
            "hayloft-crash",
            "hayloft-memory",
            "hayloft-model",
            "hayloft-wire",
            "hayloft-store",
            "hayloft-transport",
            "hayloft-tree",
        ],
    ),
    ("hayloft-sim", &["hayloft-model"]),
    ("hayloft-fuse", &[]),
    (
        "hayloft-mount",
        &[
            "hayloft-crash",
            "hayloft-memory",
            "hayloft-model",
            "hayloft-wire",
            "hayloft-store",
            "hayloft-transport",
            "hayloft-fuse",
        ],
    ),
    ("hayloft-layer", &["hayloft-crash", "hayloft-tree"]),
    ("hayloft-root", &["hayloft-model", "hayloft-process"]),
    ("hayloft-schedule", &[]),
    ("hayloft-farm", &["hayloft-layer", "hayloft-process", "hayloft-schedule"]),
    (
        "hayloft",
        &[
            "hayloft-crash",
            "hayloft-memory",
            "hayloft-model",
            "hayloft-wire",
            "hayloft-store",
            "hayloft-transport",
            "hayloft-volume",
            "hayloft-fuse",
            "hayloft-mount",
            "hayloft-layer",
            "hayloft-root",
            "hayloft-farm",
            "hayloft-transfer",
            "hayloft-tree",
        ],
    ),
];

#[test]
fn no_crate_uses_what_the_table_does_not_allow() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let allowed: BTreeMap<_, _> = MAY_USE.into_iter().collect();
    let packages = metadata["packages"].as_array().expect("a list of packages");
    assert_eq!(packages.len(), allowed.len(), "a crate is missing in the table here and in ARCHITECTURE.md");
    for package in packages {
        let name = package["name"].as_str().expect("a name");
        let may = allowed.get(name).unwrap_or_else(|| panic!("{name} is not in the table"));
        for dependency in package["dependencies"].as_array().expect("a list") {
            let used = dependency["name"].as_str().expect("a name");
            let ours = allowed.contains_key(used);
            assert!(!ours || may.contains(&used), "{name} must not use {used}");
        }
    }
}

/// Crates with rooms, and the rooms in the order in which they may use each other. Files beside the rooms are for all, and so is
/// a folder with a file of its name beside it.
const ROOMS: [(&str, &[&str]); 10] = [
    ("cli", &["server", "mounts", "versions", "transfer", "roots", "farm", "trial"]),
    ("fuse", &["protocol", "mounting", "handling", "transport"]),
    ("model", &["grants", "tree", "sound"]),
    ("mount", &["host", "keeper", "cache", "kernel", "session", "log", "sharing", "fs"]),
    ("root", &["memory", "identity", "terminal", "tree", "inside", "command"]),
    ("sim", &["operation", "client", "server"]),
    ("wire", &["messages"]),
    (
        "volume",
        &["database", "content", "order", "sharing", "session", "commit", "versions", "admin", "connection"],
    ),
    ("layer", &["files", "overlay", "publication", "modules", "named", "tests"]),
    ("farm", &["protocol", "execution", "dispatch", "agent", "scale", "submit", "relay", "make"]),
];

#[test]
fn a_room_uses_only_those_above_it() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the folder of the crates");
    let mut wrong = Vec::new();
    for (name, rooms) in ROOMS {
        let src = crates.join(name).join("src");
        let mut folders: Vec<String> = std::fs::read_dir(&src)
            .expect("sources")
            .map(|entry| entry.expect("an entry"))
            .filter(|entry| entry.path().is_dir())
            .map(|entry| entry.file_name().into_string().expect("a name"))
            // Programs of their own.
            .filter(|folder| folder != "bin")
            .filter(|folder| !src.join(folder).with_extension("rs").exists())
            .collect();
        folders.sort();
        let mut known = rooms.to_vec();
        known.sort_unstable();
        assert_eq!(folders, known, "the rooms of {name}");
        for (at, room) in rooms.iter().enumerate() {
            for file in sources(&src.join(room)) {
                let text = std::fs::read_to_string(&file).expect("a source");
                for below in &rooms[at + 1..] {
                    if text.contains(&format!("crate::{below}::")) {
                        wrong.push(format!("{} uses {below}", file.display()));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// All sources below a folder.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|end| end == "rs") {
            found.push(path);
        }
    }
    found
}
