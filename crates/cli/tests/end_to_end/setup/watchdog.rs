//! Ends what is stuck, and says where it is stuck: no process that a test has started lives for longer than [`PATIENCE`].

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Once;
use std::time::Duration;

use crate::setup::farm::{kill, rounds};

/// Whatever a test has started is stuck when it has lived for so long; the long form has twelve times as much.
const PATIENCE: Duration = Duration::from_secs(600);

/// Watches what this process has started and will start. Of what is stuck the kernel stacks are printed, and those of all that
/// the same tests have started; then it is killed: whoever waits for it fails.
pub(crate) fn watch() {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(|| {
        let patience = PATIENCE * rounds(1, 12) as u32;
        std::thread::spawn(move || {
            loop {
                std::thread::sleep(Duration::from_secs(10));
                let stuck = older_than(patience);
                if !stuck.is_empty() {
                    // Past the capture of the test's output: whoever started this thread may have ended.
                    let said = format!("stuck for {patience:?}: {stuck:?}\n{}", stacks());
                    let _ = std::io::Write::write_all(&mut std::io::stderr(), said.as_bytes());
                    stuck.keys().for_each(|pid| kill(*pid, libc::SIGKILL));
                }
            }
        });
    });
}

/// Descendants of this process that are so old, with what they run.
fn older_than(patience: Duration) -> BTreeMap<u32, String> {
    // SAFETY: asks for a constant.
    let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) } as f64;
    let up = text("/proc/uptime".into());
    let up: f64 = up.split(' ').next().and_then(|up| up.parse().ok()).unwrap_or(0.0);
    let is_old = |pid: &u32| {
        let started = field::<f64>(*pid, 22).map_or(up, |started| started / ticks);
        up - started > patience.as_secs_f64()
    };
    let runs = |pid| text(format!("/proc/{pid}/cmdline")).replace('\0', " ");
    descendants().into_iter().filter(is_old).map(|pid| (pid, runs(pid))).collect()
}

fn text(path: String) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn numbers(path: &str) -> Vec<u32> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// A field of `/proc/PID/stat`, counted as proc(5) does.
fn field<T: std::str::FromStr>(pid: u32, number: usize) -> Option<T> {
    let stat = text(format!("/proc/{pid}/stat"));
    stat.rsplit(')').next()?.split_whitespace().nth(number - 3)?.parse().ok()
}

fn descendants() -> BTreeSet<u32> {
    let parents: BTreeMap<u32, u32> =
        numbers("/proc").into_iter().filter_map(|pid| Some((pid, field(pid, 4)?))).collect();
    let own = std::process::id();
    let is_descendant = |pid: u32| {
        std::iter::successors(parents.get(&pid).copied(), |pid| parents.get(pid).copied())
            .any(|pid| pid == own)
    };
    parents.keys().copied().filter(|pid| is_descendant(*pid)).collect()
}

/// Kernel stacks of the tasks of what this process has started that wait in the kernel for something else than each other.
fn stacks() -> String {
    let mut out = String::new();
    for pid in descendants() {
        for task in numbers(&format!("/proc/{pid}/task")) {
            let stack = text(format!("/proc/{pid}/task/{task}/stack"));
            let idle = ["futex_wait", "ep_poll", "do_wait", "hrtimer_nanosleep", "io_cqring_wait"];
            let idle = stack.is_empty() || idle.iter().any(|call| stack.contains(call));
            if !idle || stack.contains("fuse") {
                let name = text(format!("/proc/{pid}/task/{task}/comm"));
                out += &format!("{pid}/{task} {}:\n{stack}", name.trim_end());
            }
        }
    }
    out
}
