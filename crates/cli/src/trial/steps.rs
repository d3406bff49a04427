//! How a folder's program is built: by its own build system.

use std::path::Path;

use crate::exit::{Exit, failure};

/// One step of a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Step {
    /// What the table calls it.
    pub name: &'static str,
    /// What the shell runs, in the program's folder. `$JOBS` is the number of cores.
    pub script: &'static str,
}

/// A build system: how it is known, what it needs and does.
struct BuildSystem {
    marker: &'static str,
    needs: &'static [&'static str],
    steps: &'static [Step],
}

const fn step(name: &'static str, script: &'static str) -> Step {
    Step { name, script }
}

/// In the order in which they are looked for.
const KNOWN: [BuildSystem; 6] = [
    BuildSystem {
        marker: "configure",
        needs: &["cc", "make"],
        steps: &[
            step("configure", "sh ./configure"),
            step("make", "make -j$JOBS"),
            step("make check", "if make -n check >/dev/null 2>&1; then make -j$JOBS check; fi"),
            step("make clean", "make clean"),
        ],
    },
    BuildSystem {
        marker: "Cargo.toml",
        needs: &["cargo"],
        steps: &[
            step("cargo build", "cargo build"),
            step("cargo test", "cargo test"),
            step("cargo clean", "cargo clean"),
        ],
    },
    BuildSystem {
        marker: "CMakeLists.txt",
        needs: &["cmake", "cc"],
        steps: &[
            step("cmake", "cmake -S . -B hayloft-build"),
            step("build", "cmake --build hayloft-build -j$JOBS"),
            step("ctest", "ctest --test-dir hayloft-build -j$JOBS"),
            step("clean", "cmake --build hayloft-build --target clean"),
        ],
    },
    BuildSystem {
        marker: "meson.build",
        needs: &["meson", "ninja", "cc"],
        steps: &[
            step("meson setup", "meson setup hayloft-build"),
            step("ninja", "ninja -C hayloft-build"),
            step("meson test", "meson test -C hayloft-build"),
            step("ninja clean", "ninja -C hayloft-build clean"),
        ],
    },
    MAKE,
    BuildSystem { marker: "makefile", ..MAKE },
];

const MAKE: BuildSystem = BuildSystem {
    marker: "Makefile",
    needs: &["cc", "make"],
    steps: &[
        step("make", "make -j$JOBS"),
        step(
            "make check",
            "for goal in check test; do if make -n $goal >/dev/null 2>&1; then exec make -j$JOBS $goal; fi; done",
        ),
        step("make clean", "if make -n clean >/dev/null 2>&1; then make clean; fi"),
    ],
};

/// The steps that build the program in `folder`.
///
/// # Errors
/// When its build system is not known, or this machine lacks a program for it.
pub(super) fn of_folder(folder: &Path) -> anyhow::Result<Vec<Step>> {
    let Some(system) = KNOWN.iter().find(|system| folder.join(system.marker).is_file()) else {
        let markers: Vec<&str> = KNOWN.iter().map(|system| system.marker).collect();
        return Err(failure(
            Exit::Usage,
            format!(
                "no build system known in the source (looked for {}); try `hayloft try -- COMMAND`",
                markers.join(", ")
            ),
        ));
    };
    let missing: Vec<&str> = system.needs.iter().copied().filter(|program| !on_path(program)).collect();
    match missing.is_empty() {
        true => Ok(system.steps.to_vec()),
        false => Err(failure(
            Exit::Missing,
            format!("this machine lacks {} (on Debian: apt-get install build-essential)", missing.join(", ")),
        )),
    }
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configure_comes_before_a_makefile() {
        let folder = tempfile::tempdir().unwrap();
        assert!(of_folder(folder.path()).is_err());
        std::fs::write(folder.path().join("Makefile"), "all:\n").unwrap();
        assert_eq!(of_folder(folder.path()).unwrap()[0].name, "make");
        std::fs::write(folder.path().join("configure"), "").unwrap();
        assert_eq!(of_folder(folder.path()).unwrap()[0].name, "configure");
    }
}
