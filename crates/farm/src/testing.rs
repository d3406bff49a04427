//! For tests.

use std::path::Path;
use std::process::Command;

/// Writes a program that is a script, and not from this process: what it has open for writing its threads' children have for a moment as well, and nobody
/// can run that.
pub(crate) fn write_program(path: &Path, script: &str) {
    let write = "printf '%s' \"$1\" > \"$0\" && chmod 755 \"$0\"";
    assert!(Command::new("sh").args(["-c", write]).arg(path).arg(script).status().unwrap().success());
}
