//! The small program, `hayloft-task`: what is started for each task, where it is installed beside `hayloft`. It starts in less than half of the
//! time, and is copied in less.

use std::path::{Path, PathBuf};

/// Its name.
pub const NAME: &str = "hayloft-task";

/// Where it is, if it is beside this program and was installed together with it.
pub fn beside(program: &Path) -> Option<PathBuf> {
    let small = program.with_file_name(NAME);
    let said = std::process::Command::new(&small).arg("--version").output().ok()?;
    (said.stdout.trim_ascii() == env!("CARGO_PKG_VERSION").as_bytes()).then_some(small)
}
