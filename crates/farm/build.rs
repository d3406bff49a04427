//! Names what this crate is built from, so that the two programs that are made of it know whether they belong together; and has the small one
//! linked statically where that can be.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Its own sources, and those that decide with it what a process does.
const SOURCES: [&str; 3] = ["src", "../process/src", "../layer/src"];

/// The libraries that are named to the linker for this platform, and what of the static ones is linked in their place.
const LIBRARIES: [(&str, &str); 7] = [
    ("gcc_s", "-l:libgcc_eh.a -l:libgcc.a -l:libc.a"),
    ("c", "-l:libc.a -l:libgcc.a -l:libgcc_eh.a"),
    ("m", "-l:libm.a"),
    ("util", "-l:libc.a"),
    ("rt", "-l:libc.a"),
    ("pthread", "-l:libc.a"),
    ("dl", "-l:libc.a"),
];

fn main() {
    let mut files = Vec::new();
    for folder in SOURCES {
        println!("cargo::rerun-if-changed={folder}");
        find(Path::new(folder), &mut files);
    }
    files.sort();
    let mut hasher = DefaultHasher::new();
    for file in files {
        (file.as_os_str(), std::fs::read(&file).unwrap_or_default()).hash(&mut hasher);
    }
    println!("cargo::rustc-env=HAYLOFT_FARM_SOURCES={:016x}", hasher.finish());
    println!("cargo::rustc-check-cfg=cfg(begins_alone)");
    if is_wanted() && has_static_libraries() {
        link_statically();
    }
}

fn find(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true => find(&entry.path(), files),
            false => files.push(entry.path()),
        }
    }
}

/// For this kind of machine, with glibc, and where the compiler was not told of it already.
fn is_wanted() -> bool {
    let variable = |name| std::env::var(name).unwrap_or_default();
    variable("HOST") == variable("TARGET")
        && variable("CARGO_CFG_TARGET_OS") == "linux"
        && variable("CARGO_CFG_TARGET_ENV") == "gnu"
        && !variable("CARGO_CFG_TARGET_FEATURE").split(',').any(|feature| feature == "crt-static")
}

fn has_static_libraries() -> bool {
    ["libc.a", "libm.a", "libgcc.a", "libgcc_eh.a", "crt1.o"].iter().all(|file| {
        let found = Command::new("cc").arg(format!("-print-file-name={file}")).output();
        // A file that it does not find it names as it was asked.
        found.is_ok_and(|found| found.stdout.starts_with(b"/"))
    })
}

/// `-C target-feature=+crt-static` is for all that is built or for none of it. So the linker finds, for this program only, scripts that name
/// static libraries before it finds the shared ones. It is not position-independent: its pages are as the file has them, and it can do
/// something before the C library has begun.
fn link_statically() {
    let Some(out) = std::env::var_os("OUT_DIR") else { return };
    let folder = Path::new(&out).join("static");
    let script = |(name, libraries): &(&str, &str)| {
        std::fs::write(folder.join(format!("lib{name}.so")), format!("GROUP({libraries})\n"))
    };
    if std::fs::create_dir_all(&folder).and_then(|()| LIBRARIES.iter().try_for_each(script)).is_ok() {
        println!("cargo::rustc-link-arg-bin=hayloft-task=-L{}", folder.display());
        println!("cargo::rustc-link-arg-bin=hayloft-task=-static");
        println!("cargo::rustc-link-arg-bin=hayloft-task=-no-pie");
        if std::env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|machine| machine == "x86_64") {
            // See `bin/hayloft-task/begin.rs`.
            println!("cargo::rustc-cfg=begins_alone");
            println!("cargo::rustc-link-arg-bin=hayloft-task=-Wl,--entry=hayloft_task_begins");
        }
    }
}
