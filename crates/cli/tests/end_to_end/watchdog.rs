//! Ends a test that is stuck, and says where it is stuck.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::farm::{HAYLOFT, Mount, kill, rounds};

/// Without progress for so long, a test is stuck.
const PATIENCE: Duration = Duration::from_secs(300);

struct Shared {
    started: Instant,
    progress_ms: AtomicU64,
    over: AtomicBool,
    barked: AtomicBool,
}

/// Watches a test with these mounts. When it is stuck, the kernel stacks of all its tasks are printed and the
/// mounts' processes killed: every call in them fails then, and so does the test.
pub(crate) struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    pub(crate) fn over(mounts: &[Mount]) -> Watchdog {
        let pids: Vec<u32> = mounts.iter().map(Mount::pid).collect();
        let shared = Arc::new(Shared {
            started: Instant::now(),
            progress_ms: AtomicU64::new(0),
            over: AtomicBool::new(false),
            barked: AtomicBool::new(false),
        });
        let patience = PATIENCE * rounds(1, 12) as u32;
        let watched = Arc::clone(&shared);
        let thread = std::thread::spawn(move || {
            while !watched.over.load(Ordering::Relaxed) {
                std::thread::park_timeout(Duration::from_secs(1));
                let progress = Duration::from_millis(watched.progress_ms.load(Ordering::Relaxed));
                if watched.started.elapsed().saturating_sub(progress) > patience {
                    watched.barked.store(true, Ordering::Relaxed);
                    eprintln!("stuck for {patience:?}:\n{}", stacks());
                    pids.iter().filter(|pid| is_ours(**pid)).for_each(|pid| kill(*pid, libc::SIGKILL));
                    return;
                }
            }
        });
        Watchdog { shared, thread: Some(thread) }
    }

    /// Something was done: the patience begins anew.
    pub(crate) fn progress(&self) {
        self.shared.progress_ms.store(self.shared.started.elapsed().as_millis() as u64, Ordering::Relaxed);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            let _ = thread.join();
        }
        let barked = self.shared.barked.load(Ordering::Relaxed);
        assert!(!barked || std::thread::panicking(), "it was stuck, see above");
    }
}

fn is_ours(pid: u32) -> bool {
    fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == Path::new(HAYLOFT))
}

/// Kernel stacks of the tasks of this process and of its descendants that wait in the kernel for something
/// else than each other.
fn stacks() -> String {
    let text = |path: String| fs::read_to_string(path).unwrap_or_default();
    let numbers = |path: &str| -> Vec<u32> {
        let entries = fs::read_dir(path).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    };
    let parents: HashMap<u32, u32> = numbers("/proc")
        .into_iter()
        .filter_map(|pid| {
            let stat = text(format!("/proc/{pid}/stat"));
            Some((pid, stat.rsplit(')').next()?.split_whitespace().nth(1)?.parse().ok()?))
        })
        .collect();
    let own = std::process::id();
    let is_descendant =
        |pid: u32| std::iter::successors(Some(pid), |pid| parents.get(pid).copied()).any(|pid| pid == own);
    let mut out = String::new();
    for pid in parents.keys().copied().filter(|pid| is_descendant(*pid)) {
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
