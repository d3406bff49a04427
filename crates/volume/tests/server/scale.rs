//! What files cost a server, whatever is there already: processor time, printed, of a server that runs by itself.
//!
//! ```sh
//! hayloft serve --store file:///srv/hayloft & hayloft volume create vol
//! HAYLOFT_MEASURE_SERVER=127.0.0.1:7440 HAYLOFT_MEASURE_PID=$! HAYLOFT_MEASURE_AT=10000,200000,2000000,1000000 \
//!     cargo test --release -p hayloft-volume --test server scale -- --ignored --nocapture
//! ```
//! The volume is filled up to each number of files in turn, or emptied down to it, and left as it is at the end; what an earlier
//! run has left is said by `HAYLOFT_MEASURE_THERE`. Kernel and mounts, which take ten times as long for a file, have no part in it: so two
//! million files are there within minutes. `hayloft-bench many` measures the same through mounts.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use crate::common::*;
use hayloft_model::{Content, FileKind, Ino, Name, Record};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::{AllocateInos, Enter, Goodbye};

/// Files of a directory, and directories of one of those above.
const FILES: u64 = 100;
const DIRS: u64 = 1000;
/// Directories that a batch makes or deletes: about a thousand records.
const BATCH: u64 = 5;
/// Files that are measured at a time.
const PORTION: u64 = 50_000;
/// As clients ask: see `ENTER_NAMES` there.
const NAMES_BUDGET: u64 = 64 << 10;

fn above(dir: u64) -> u64 {
    1000 + dir / DIRS
}

fn number(dir: u64) -> u64 {
    1_000_000 + dir * 128
}

fn name(dir: u64, file: u64) -> Name {
    Name::new(format!("file{}.c", dir * FILES + file).as_bytes())
}

/// The row of what the directory is in, when so many are there.
fn row_above(dir: u64, there: u64) -> Record {
    put(above(dir), directory(1, there as u32, 3 + DIRS))
}

fn made(dir: u64, bytes: &[u8]) -> (Vec<Record>, i64) {
    let (up, ino) = (above(dir), number(dir));
    let mut records = Vec::new();
    if dir.is_multiple_of(DIRS) {
        let count = dir / DIRS + 1;
        records.push(link(1, &format!("p{}", dir / DIRS), up, FileKind::Directory, 2 + count));
        records.push(put(1, directory(1, count as u32, 3 + count)));
    }
    records.push(row_above(dir, dir % DIRS + 1));
    records.push(link(up, &format!("d{dir}"), ino, FileKind::Directory, 3 + dir % DIRS));
    records.push(put(ino, directory(up, 0, 3 + FILES)));
    let mut size = 0;
    for file in 0..FILES {
        let len = len_of(dir, file);
        let begin = (seed_of(dir, file) % (bytes.len() as u64 - 4096)) as usize;
        let content = Content::Inline(bytes[begin..begin + len as usize].to_vec().into());
        let dentry =
            hayloft_model::Dentry { ino: Ino(ino + 1 + file), kind: FileKind::Regular, cookie: 3 + file };
        records.push(Record::PutDentry(Ino(ino), name(dir, file), dentry));
        records.push(put(ino + 1 + file, file_in(ino, content, len)));
        size += len as i64;
    }
    (records, size)
}

fn seed_of(dir: u64, file: u64) -> u64 {
    (dir * FILES + file).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16
}

fn len_of(dir: u64, file: u64) -> u64 {
    500 + seed_of(dir, file) % 3500
}

fn deleted(dir: u64) -> (Vec<Record>, i64) {
    let (up, ino) = (above(dir), number(dir));
    let files = (0..FILES).flat_map(|file| {
        [Record::DeleteDentry(Ino(ino), name(dir, file)), Record::DeleteInode(Ino(ino + 1 + file))]
    });
    let gone = Record::DeleteDentry(Ino(up), Name::new(format!("d{dir}").as_bytes()));
    let records = files.chain([gone, Record::DeleteInode(Ino(ino)), row_above(dir, dir % DIRS)]);
    (records.collect(), -(0..FILES).map(|file| len_of(dir, file) as i64).sum::<i64>())
}

struct Scale {
    address: SocketAddr,
    pid: u32,
    sessions: u64,
    bytes: Vec<u8>,
}

impl Scale {
    /// Seconds of processor time of the server, and megabytes of its memory that are in use.
    fn used(&self) -> (f64, u64) {
        let read = |file: &str| std::fs::read_to_string(format!("/proc/{}/{file}", self.pid)).unwrap();
        let stat = read("stat");
        let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
        let status = read("status");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        let kib: u64 = resident.split_whitespace().next().unwrap().parse().unwrap();
        (ticks as f64 / 100.0, kib >> 10)
    }

    fn session(&mut self) -> Client {
        self.sessions += 1;
        let (mut client, _) = Client::open(self.address, hello(self.sessions)).unwrap();
        for _ in 0..4 {
            client.ask(Ask::AllocateInos(AllocateInos { count: 1 << 16 })).unwrap();
        }
        client
    }

    /// What a part takes: until it is durable, and until the server does next to nothing any more.
    fn measure(&mut self, what: &str, there: u64, part: impl FnOnce(&mut Scale) -> (u64, u64)) {
        let (before, begun) = (self.used().0, Instant::now());
        let (files, batches) = part(self);
        let (seconds, durable) = (begun.elapsed().as_secs_f64(), self.used().0 - before);
        let rest = Instant::now();
        while rest.elapsed() < Duration::from_secs(60) {
            let so_far = self.used().0;
            std::thread::sleep(Duration::from_secs(4));
            if self.used().0 - so_far < 0.15 {
                break;
            }
        }
        let (all, memory) = self.used();
        let us = |seconds: f64| seconds * 1e6 / files.max(1) as f64;
        let batch =
            if batches > 0 { format!("{:.2}", durable * 1e3 / batches as f64) } else { String::new() };
        println!(
            "{what:<8}{there:>9}{files:>9}{seconds:>9.1}{:>11.2}{:>11.2}{batch:>10}{memory:>9}",
            us(durable),
            us(all - before)
        );
    }

    /// Makes or deletes the directories of these files, in batches of a thousand records.
    fn change(&mut self, from: u64, to: u64, makes: bool) -> (u64, u64) {
        let mut client = self.session();
        let (mut asked, mut sequence) = (Vec::new(), 0);
        let dirs: Vec<u64> = (from / FILES..to / FILES).collect();
        for dirs in dirs.chunks(BATCH as usize) {
            let (mut records, mut usage) = (Vec::new(), (0, 0));
            for dir in dirs {
                let (more, bytes) = match makes {
                    true => made(*dir, &self.bytes),
                    false => deleted(*dir),
                };
                records.extend(more);
                usage = (usage.0 + bytes, usage.1 + if makes { FILES as i64 } else { -(FILES as i64) });
            }
            sequence += 1;
            asked.push(client.send(Ask::Commit(commit(sequence, &records, usage))));
            // As a client that ships: a few are under way.
            if asked.len() > 3 {
                client.receive(asked.remove(0));
            }
        }
        for request in asked {
            client.receive(request);
        }
        client.send(Ask::Goodbye(Goodbye {}));
        (to - from, sequence)
    }

    /// Lists directories as `find` does through a mount that knows nothing.
    fn walk(&mut self) -> (u64, u64) {
        let mut client = self.session();
        let (mut listed, mut seen): (HashMap<u64, Vec<u64>>, HashSet<u64>) = Default::default();
        let (mut waiting, mut names, mut next, mut growths) = (vec![above(0)], 0, 0, 0);
        while let Some(dir) = waiting.pop().filter(|_| names < PORTION) {
            if !seen.insert(dir) {
                continue;
            }
            if !listed.contains_key(&dir) {
                growths = if dir == next { (growths + 1).min(3) } else { 0 };
                let budget_bytes = NAMES_BUDGET << (2 * growths);
                let enter = Enter { dir, budget_bytes, names_only: true, ..Enter::default() };
                let asked = client.send(Ask::Enter(enter));
                let entered = client.listings(asked).unwrap();
                next = entered.next;
                for of in entered.dirs {
                    names += of.entries.len() as u64;
                    let below = of.entries.iter().filter(|entry| entry.dentry.kind == FileKind::Directory);
                    listed.insert(of.dir, below.map(|entry| entry.dentry.ino.0).collect());
                }
            }
            waiting.extend(listed[&dir].iter().rev());
        }
        client.send(Ask::Goodbye(Goodbye {}));
        assert!(names >= PORTION, "{names} names");
        (names, 0)
    }
}

#[test]
#[ignore = "prints figures of a server that runs by itself"]
fn what_files_cost_at_sizes() {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let Ok(address) = variable("HAYLOFT_MEASURE_SERVER").parse() else { return };
    let mut scale = Scale {
        address,
        pid: variable("HAYLOFT_MEASURE_PID").parse().unwrap(),
        sessions: u64::from(std::process::id()) << 20,
        bytes: noise(1, 1 << 20).into_iter().map(|byte| byte & 0x0f).collect(),
    };
    let mut there: u64 = variable("HAYLOFT_MEASURE_THERE").parse().unwrap_or(0);
    if there == 0 {
        let mut client = scale.session();
        for _ in 0..80 {
            client.ask(Ask::AllocateInos(AllocateInos { count: 1 << 16 })).unwrap();
        }
        client.send(Ask::Goodbye(Goodbye {}));
    }
    println!("part       there    files  seconds  server us  with rest  ms/batch      MiB");
    for at in variable("HAYLOFT_MEASURE_AT").split(',').map(|at| at.parse::<u64>().unwrap()) {
        let (low, high) = (at.min(there), at.max(there));
        if at != there {
            let what = if at > there { "fill" } else { "empty" };
            scale.measure(what, there, |scale| scale.change(low, high, at > there));
        }
        there = at;
        scale.measure("create", there, |scale| scale.change(at, at + PORTION, true));
        scale.measure("walk", there + PORTION, Scale::walk);
        scale.measure("delete", there + PORTION, |scale| scale.change(at, at + PORTION, false));
    }
}
