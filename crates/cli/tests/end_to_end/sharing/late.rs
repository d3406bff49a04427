//! Callers that get no processor between an answer and the moment in which it counts: what they were told does not outlast what it
//! says.
//!
//! `HAYLOFT_TEST_LONG` makes it ten times as many changes, `HAYLOFT_TEST_SEED` others.

use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::setup::farm::{Farm, kill, rounds, seed};
use crate::setup::model::Random;

/// Names of the directory: so many that one who looks at all is not done when another host changes one.
const NAMES: usize = 1500;
/// How long names that others have changed are handed out for one use, and a bit.
const COOLS: Duration = Duration::from_millis(1300);

/// A program on one processor that is ended with the test.
struct Runs(Child);

impl Runs {
    fn on(cpu: usize, program: &[&str], out: Stdio) -> Runs {
        let mut command = Command::new("taskset");
        command.args(["-c", &cpu.to_string()]).args(program).stdout(out);
        Runs(command.spawn().unwrap())
    }

    /// One that takes the processor from others whenever it is told to go on.
    fn greedy(cpu: usize) -> Runs {
        let greedy = Runs::on(cpu, &["nice", "-n", "-5", "sh", "-c", "while :; do :; done"], Stdio::null());
        greedy.signal(libc::SIGSTOP);
        greedy
    }

    fn signal(&self, signal: i32) {
        kill(self.0.id(), signal);
    }
}

impl Drop for Runs {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

/// Who looks at names gets no processor as soon as another one wants it. Linux looks up names that it has without a lock.
#[test]
fn a_name_that_was_looked_up_by_who_gets_no_processor_is_not_kept_when_it_has_changed() {
    let cpu = std::thread::available_parallelism().unwrap().get() - 1;
    if cpu == 0 {
        return eprintln!("not tried: there is one processor only");
    }
    let (_farm, mounts) = Farm::shared(2);
    let (here, there) = (mounts[0].path().join("d"), mounts[1].path().join("d"));
    fs::create_dir(&there).unwrap();
    let name = |at: usize| format!("n{at}");
    (0..NAMES).for_each(|at| fs::write(there.join(name(at)), b"").unwrap());
    let look =
        format!("cd '{}'; for ((n = 0; n < {NAMES}; n++)); do [[ -e n$n ]]; echo; done", here.display());
    let greedy = Runs::greedy(cpu);
    let mut random = Random::new(seed());
    let mut tried = 0;
    for round in 0..rounds(10, 100) {
        // The kernel has all names, and is to look them up.
        fs::rename(there.join(name(0)), there.join("away")).unwrap();
        fs::rename(there.join("away"), there.join(name(0))).unwrap();
        for at in 0..NAMES {
            let found = fs::metadata(here.join(name(at)));
            let is_file = found.as_ref().is_ok_and(fs::Metadata::is_file);
            assert!(is_file, "round {round}: {}: {found:?}", name(at));
        }
        std::thread::sleep(COOLS);
        let mut looks = Runs::on(cpu, &["chrt", "--idle", "0", "bash", "-c", &look], Stdio::piped());
        let lines = BufReader::new(looks.0.stdout.take().unwrap()).lines();
        let seen = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            let seen = &seen;
            let counts = scope.spawn(move || {
                lines.for_each(|line| drop(line.map(|_| seen.fetch_add(1, Ordering::SeqCst))))
            });
            while seen.load(Ordering::SeqCst) == 0 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_micros(random.below(5000)));
            greedy.signal(libc::SIGCONT);
            let (mut last, mut since) = (seen.load(Ordering::SeqCst), Instant::now());
            while last < NAMES && since.elapsed() < Duration::from_millis(5) {
                let now = seen.load(Ordering::SeqCst);
                if now != last {
                    (last, since) = (now, Instant::now());
                }
            }
            if last < NAMES {
                fs::rename(there.join(name(last)), there.join("away")).unwrap();
                tried += usize::from(seen.load(Ordering::SeqCst) == last);
            }
            greedy.signal(libc::SIGSTOP);
            counts.join().unwrap();
            if last < NAMES {
                assert!(!here.join(name(last)).exists(), "round {round}: {} is old", name(last));
                fs::rename(there.join("away"), there.join(name(last))).unwrap();
            }
        });
    }
    assert!(tried > 0, "who looked was never kept from it");
}

/// Who lists a directory gets no processor while its kernel takes in what it is told of the names.
#[test]
fn a_name_that_is_listed_by_who_gets_no_processor_is_not_kept_when_it_has_changed() {
    let cpu = std::thread::available_parallelism().unwrap().get() - 1;
    if cpu == 0 {
        return eprintln!("not tried: there is one processor only");
    }
    let (_farm, mounts) = Farm::shared(2);
    let greedy = Runs::greedy(cpu);
    let mut random = Random::new(seed());
    let mut tried = 0;
    for round in 0..rounds(10, 100) {
        let [here, there] = [0, 1].map(|at: usize| mounts[at].path().join(format!("d{round}")));
        fs::create_dir(&there).unwrap();
        (0..NAMES).for_each(|at| fs::write(there.join(format!("n{at}")), b"").unwrap());
        assert!(here.is_dir());
        std::thread::sleep(COOLS);
        let list = format!("echo; names=('{}'/*); echo", here.display());
        let mut lists = Runs::on(cpu, &["chrt", "--idle", "0", "bash", "-c", &list], Stdio::piped());
        let mut lines = BufReader::new(lists.0.stdout.take().unwrap()).lines();
        lines.next().unwrap().unwrap();
        std::thread::sleep(Duration::from_micros(random.below(4000)));
        greedy.signal(libc::SIGCONT);
        std::thread::sleep(Duration::from_millis(5));
        let name = format!("n{}", random.below(NAMES as u64));
        let is_over = std::thread::spawn(move || lines.next().is_some());
        fs::rename(there.join(&name), there.join("away")).unwrap();
        tried += usize::from(!is_over.is_finished());
        greedy.signal(libc::SIGSTOP);
        assert!(is_over.join().unwrap());
        assert!(!here.join(&name).exists(), "round {round}: {name} is old");
        fs::remove_dir_all(&there).unwrap();
    }
    assert!(tried > 0, "who listed was never kept from it");
}
