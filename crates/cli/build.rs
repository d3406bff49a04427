//! Has `hayloft` start sooner, where that can be: `hayloft task` is started for each task of a build.
//!
//! Before a program of this size does anything the C library's loader goes through its tens of thousands of pointers, and loads its libraries.

use std::path::Path;
use std::process::Command;

/// The library that unwinds the stack, linked statically.
const UNWINDER: &str = "GROUP(-l:libgcc_eh.a -l:libgcc.a)\n";
/// The first loader that takes pointers packed.
const PACKED: (u32, u32) = (2, 36);

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let variable = |name| std::env::var(name).unwrap_or_default();
    let is_ours = variable("HOST") == variable("TARGET")
        && variable("CARGO_CFG_TARGET_OS") == "linux"
        && variable("CARGO_CFG_TARGET_ENV") == "gnu";
    if !is_ours {
        return;
    }
    if library_version().is_some_and(|version| version >= PACKED) {
        println!("cargo::rustc-link-arg-bins=-Wl,-z,pack-relative-relocs");
    }
    let folder = Path::new(&variable("OUT_DIR")).join("static");
    if ["libgcc.a", "libgcc_eh.a"].iter().all(|file| is_there(file))
        && std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(folder.join("libgcc_s.so"), UNWINDER))
            .is_ok()
    {
        println!("cargo::rustc-link-arg-bins=-L{}", folder.display());
    }
}

/// Of the C library of this host, which is the oldest that the program runs with.
fn library_version() -> Option<(u32, u32)> {
    let said = Command::new("getconf").arg("GNU_LIBC_VERSION").output().ok()?;
    let said = String::from_utf8(said.stdout).ok()?;
    let (major, minor) = said.trim().strip_prefix("glibc ")?.split_once('.')?;
    Some((major.parse().ok()?, minor.split('.').next()?.parse().ok()?))
}

fn is_there(file: &str) -> bool {
    let found = Command::new("cc").arg(format!("-print-file-name={file}")).output();
    // A file that it does not find it names as it was asked.
    found.is_ok_and(|found| found.stdout.starts_with(b"/"))
}
