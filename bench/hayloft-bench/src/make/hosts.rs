//! Mounts of one file system as so many hosts that have it at the same path: mount namespaces.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

/// Holds a namespace in which one folder is at the path of another. It ends with the pipe to it, and so with this program.
pub(super) struct Host {
    holder: Child,
}

const HOLD: &str = r#"mount --bind "$1" "$2"; echo; exec cat"#;

impl Host {
    /// On it, `folder` is at `path`.
    pub(super) fn new(folder: &Path, path: &Path) -> Result<Self> {
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-euc", HOLD, "sh"]).args([folder, path]);
        // An interruption ends the recipes; the namespaces are left in order.
        command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut host = Host { holder: command.spawn().context("unshare")? };
        let mut ready = String::new();
        let stdout = host.holder.stdout.take().context("no pipe")?;
        BufReader::new(stdout).read_line(&mut ready)?;
        ensure!(!ready.is_empty(), "no mount namespace (see above); this workload needs root");
        Ok(host)
    }

    /// Its process, in whose namespace recipes run.
    pub(super) fn pid(&self) -> u32 {
        self.holder.id()
    }

    /// A shell script on that host. Its folder has to be entered there: an inherited one would be on the host it came from.
    pub(super) fn script(&self, script: &str, arguments: &[impl AsRef<OsStr>]) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.pid()));
        command.args(["sh", "-euc", script, "sh"]).args(arguments);
        command
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}
