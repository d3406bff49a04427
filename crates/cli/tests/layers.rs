//! The crates use each other only as `ARCHITECTURE.md` says.

use std::collections::BTreeMap;
use std::process::Command;

/// A crate, and the crates of this workspace that it may use.
const MAY_USE: [(&str, &[&str]); 10] = [
    ("hayloft-model", &[]),
    ("hayloft-wire", &["hayloft-model"]),
    ("hayloft-store", &["hayloft-model"]),
    ("hayloft-volume", &["hayloft-model", "hayloft-wire", "hayloft-store"]),
    ("hayloft-sim", &["hayloft-model"]),
    ("hayloft-fuse", &[]),
    ("hayloft-mount", &["hayloft-model", "hayloft-wire", "hayloft-store", "hayloft-fuse"]),
    ("hayloft-layer", &[]),
    ("hayloft-root", &["hayloft-model"]),
    (
        "hayloft",
        &[
            "hayloft-model",
            "hayloft-wire",
            "hayloft-store",
            "hayloft-volume",
            "hayloft-fuse",
            "hayloft-mount",
            "hayloft-layer",
            "hayloft-root",
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
