//! The small program, `hayloft-task`: what is started for each task, where it is installed beside `hayloft`. It starts in less than half of the
//! time, and is copied in less.

use std::path::{Path, PathBuf};

/// Its name.
pub const NAME: &str = "hayloft-task";

/// What programs of this crate are built from: its version, and a number made of its sources. Two that say the same understand each other.
pub const BUILD: &str = concat!(env!("CARGO_PKG_VERSION"), " ", env!("HAYLOFT_FARM_SOURCES"));

/// Where it is, if it is beside this program and was built from the same sources.
pub fn beside(program: &Path) -> Option<PathBuf> {
    let small = program.with_file_name(NAME);
    let said = std::process::Command::new(&small).arg("--version").output().ok()?;
    let is_ours = said.stdout.trim_ascii() == BUILD.as_bytes();
    if !is_ours {
        tracing::warn!("{} is of another build than this program, and not used", small.display());
    }
    is_ours.then_some(small)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::write_program;

    #[test]
    fn one_of_the_same_version_and_other_sources_is_not_used() {
        let dir = tempfile::tempdir().unwrap();
        let (large, small) = (dir.path().join("hayloft"), dir.path().join(NAME));
        assert_eq!(beside(&large), None);
        for (says, is_used) in [(BUILD, true), (env!("CARGO_PKG_VERSION"), false)] {
            write_program(&small, &format!("#!/bin/sh\necho {says}\n"));
            assert_eq!(beside(&large), is_used.then(|| small.clone()), "{says}");
        }
    }
}
