//! Build roots for a test: a state folder of its own, empty at the end, also when the test panics.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::setup::farm::{hayloft, run, sh, wait_until};

/// The roots of one test.
pub(crate) struct RootBox {
    dir: TempDir,
}

impl RootBox {
    pub(crate) fn new() -> RootBox {
        let dir = tempfile::Builder::new().prefix("hayloft-root-").tempdir_in("/var/tmp").unwrap();
        RootBox { dir }
    }

    /// A folder on the local disk, for whatever the test needs.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Where the state of these roots is.
    pub(crate) fn state(&self) -> PathBuf {
        self.dir().join("state")
    }

    /// Where their swap files are.
    pub(crate) fn spill(&self) -> PathBuf {
        self.dir().join("spill")
    }

    /// `hayloft` with arguments, for these roots.
    pub(crate) fn hayloft<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = hayloft(args);
        command.env("HAYLOFT_STATE_DIR", self.state()).env("HAYLOFT_SPILL_DIR", self.spill());
        // A folder that is in every root, wherever the tests are.
        command.current_dir("/");
        command
    }

    /// `hayloft run` of a shell script, with flags before it.
    pub(crate) fn run<const N: usize>(&self, flags: [&str; N], script: &str) -> Command {
        let mut command = self.hayloft(["run"]);
        command.args(flags).args(["--", "sh", "-euc", script]);
        command
    }

    /// The same, and what its `--json` says, whatever its exit code.
    pub(crate) fn report<const N: usize>(&self, flags: [&str; N], script: &str) -> Value {
        let file = self.dir().join("report.json");
        let mut command = self.hayloft(["run", "--json"]);
        command.arg(&file).args(flags).args(["--", "sh", "-euc", script]);
        let output = command.output().unwrap();
        let report: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert_eq!(report["exit_code"], output.status.code().unwrap(), "{output:?}");
        report
    }

    /// Starts a script and waits until it says "ready".
    pub(crate) fn start<const N: usize>(&self, flags: [&str; N], script: &str) -> Started {
        use std::io::{BufRead, BufReader};
        let is_said = script.contains("echo ready");
        let mut command =
            self.run(flags, &if is_said { script.into() } else { format!("echo ready; {script}") });
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        Started { child, out }
    }

    /// `hayloft root list --json`.
    pub(crate) fn list(&self) -> Vec<Value> {
        serde_json::from_str(&run(&mut self.hayloft(["root", "list", "--json"]))).unwrap()
    }

    /// `hayloft root show --json`.
    pub(crate) fn show(&self, name: &str) -> Value {
        serde_json::from_str(&run(&mut self.hayloft(["root", "show", name, "--json"]))).unwrap()
    }

    /// What roots have left that this machine would not have otherwise, in words.
    pub(crate) fn leftovers(&self, groups: &[PathBuf]) -> Vec<String> {
        let mut left = Vec::new();
        for folder in [self.state(), self.spill()] {
            for entry in std::fs::read_dir(&folder).into_iter().flatten().flatten() {
                if entry.file_name() != ".lock" {
                    left.push(format!("file {}", entry.path().display()));
                }
            }
        }
        let own = self.dir().to_string_lossy().into_owned();
        let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
        left.extend(mounts.lines().filter(|line| line.contains(&own)).map(|line| format!("mount {line}")));
        for device in std::fs::read_dir("/sys/block").unwrap().flatten() {
            let file = std::fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default();
            if file.contains(&own) {
                left.push(format!("device {} of {file}", device.path().display()));
            }
        }
        left.extend(
            groups.iter().filter(|group| group.exists()).map(|group| format!("group {}", group.display())),
        );
        left
    }

    /// The control groups of all roots there are.
    pub(crate) fn groups(&self) -> Vec<PathBuf> {
        let groups = |root: &Value| -> Vec<PathBuf> {
            root["cgroups"].as_array().unwrap().iter().map(|group| group.as_str().unwrap().into()).collect()
        };
        self.list().iter().flat_map(groups).collect()
    }
}

impl Drop for RootBox {
    fn drop(&mut self) {
        let names = std::fs::read_dir(self.state()).into_iter().flatten().flatten();
        for name in names.map(|entry| entry.file_name().to_string_lossy().into_owned()) {
            let _ = self.hayloft(["root", "rm", "--force", &name]).output();
        }
        // The next start sweeps what was killed.
        let _ = self.run([], "true").output();
    }
}

/// A command in a root that runs.
pub(crate) struct Started {
    pub child: Child,
    pub out: std::io::BufReader<std::process::ChildStdout>,
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until no process has this text in its command line.
pub(crate) fn wait_no_process(text: &str) {
    wait_until(&format!("no process '{text}'"), Duration::from_secs(20), || processes(text) == 0);
}

/// How many processes have this text in their command line, hayloft's own left out.
pub(crate) fn processes(text: &str) -> usize {
    let all = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = all.filter_map(|entry| std::fs::read(entry.path().join("cmdline")).ok());
    lines.map(|line| String::from_utf8_lossy(&line).into_owned()).filter(|line| line.contains(text)).count()
}

/// A layer as small as can be: the host's /usr is to be bound to it.
pub(crate) fn small_layer(dir: &Path) -> PathBuf {
    let layer = dir.join("layer");
    let script = "mkdir -p \"$0/usr\" \"$0/etc\"
        for name in bin lib lib64 sbin; do ln -s usr/$name \"$0/$name\"; done
        echo root:x:0:0::/root:/bin/sh >\"$0/etc/passwd\"
        echo builder:x:1234:1234::/home:/bin/sh >>\"$0/etc/passwd\"";
    run(sh(script).arg(&layer));
    layer
}
