//! Threads for requests that block.
//!
//! Threads are started when there is work and none is idle, up to a bound, and end after some idle time.
//! Beyond the bound work waits in line; when the line is full too, the transport thread that brings more
//! waits, and the kernel with it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

/// Work for a pool thread.
pub(crate) type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    line: VecDeque<Job>,
    idle: usize,
    threads: usize,
    closed: bool,
}

struct Shared {
    /// A leaf: jobs run without it.
    state: Mutex<State>,
    /// There is work, or the pool is closed.
    work: Condvar,
    /// There is room in the line, or a thread ended.
    room: Condvar,
    name: &'static str,
    threads_max: usize,
    line_max: usize,
    idle_time: Duration,
}

/// A bounded pool of threads.
pub(crate) struct Pool(Arc<Shared>);

impl Pool {
    pub(crate) fn new(name: &'static str, threads_max: usize, line_max: usize, idle_time: Duration) -> Pool {
        let (state, work, room) = (Mutex::default(), Condvar::new(), Condvar::new());
        Pool(Arc::new(Shared { state, work, room, name, threads_max, line_max, idle_time }))
    }

    /// Hands over work. After [`Pool::close`] it is dropped.
    pub(crate) fn submit(&self, job: Job) {
        let shared = &self.0;
        let mut state = shared.state.lock();
        shared.room.wait_while(&mut state, |state| state.line.len() >= shared.line_max && !state.closed);
        if state.closed {
            return;
        }
        state.line.push_back(job);
        if state.idle >= state.line.len() {
            shared.work.notify_one();
            return;
        }
        if state.threads < shared.threads_max {
            let worker = Arc::clone(shared);
            let spawned = std::thread::Builder::new().name(shared.name.into()).spawn(move || worker.run());
            match spawned {
                Ok(_) => state.threads += 1,
                Err(error) if state.threads > 0 => tracing::warn!(%error, "no further pool thread"),
                Err(error) => {
                    // Nobody else will do the work: better late than never.
                    tracing::error!(%error, "no pool thread at all, working on the transport thread");
                    let job = state.line.pop_back();
                    drop(state);
                    job.into_iter().for_each(|job| job());
                    return;
                }
            }
        }
        shared.work.notify_one();
    }

    /// Takes no more work, drops what is in line, and waits until the threads have ended.
    pub(crate) fn close(&self) {
        let mut state = self.0.state.lock();
        state.closed = true;
        let dropped = std::mem::take(&mut state.line);
        self.0.work.notify_all();
        self.0.room.notify_all();
        self.0.room.wait_while(&mut state, |state| state.threads > 0);
        drop(state);
        drop(dropped);
    }
}

impl Shared {
    fn run(&self) {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.line.pop_front() {
                self.room.notify_one();
                drop(state);
                job();
                state = self.state.lock();
                continue;
            }
            if state.closed {
                break;
            }
            state.idle += 1;
            let waited = self.work.wait_for(&mut state, self.idle_time);
            state.idle -= 1;
            if waited.timed_out() && state.line.is_empty() {
                break;
            }
        }
        state.threads -= 1;
        self.room.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::channel;

    #[test]
    fn the_pool_grows_to_its_bound_and_then_queues() {
        let pool = Pool::new("test", 2, 8, Duration::from_secs(60));
        let (go, gate) = channel::<()>();
        let gate = Arc::new(Mutex::new(gate));
        let (done, results) = channel();
        for number in 0..6 {
            let (gate, done) = (Arc::clone(&gate), done.clone());
            pool.submit(Box::new(move || {
                gate.lock().recv().unwrap();
                done.send(number).unwrap();
            }));
        }
        assert_eq!(pool.0.state.lock().threads, 2);
        for _ in 0..6 {
            go.send(()).unwrap();
        }
        let mut numbers: Vec<i32> = results.iter().take(6).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [0, 1, 2, 3, 4, 5]);
        pool.close();
        assert_eq!(pool.0.state.lock().threads, 0);
        pool.submit(Box::new(|| panic!("closed")));
    }

    #[test]
    fn idle_threads_end() {
        let pool = Pool::new("test", 4, 8, Duration::from_millis(1));
        let (done, results) = channel();
        pool.submit(Box::new(move || done.send(()).unwrap()));
        results.recv().unwrap();
        let mut state = pool.0.state.lock();
        pool.0.room.wait_while(&mut state, |state| state.threads > 0);
    }
}
