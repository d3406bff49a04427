//! What a mount keeps in memory: within its options, the allocator included, and given back.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::setup::farm::{Farm, HAYLOFT, Mount, leave, noise, number, run, sh, wait_until};
use crate::sharing::caching::{PASS, lookups, tree};

/// What a mount may take beside what its options say, and what stays of its cache, as docs/operations.md has it, bytes.
const OVERHEAD: u64 = 64 << 20;
const FLOOR: u64 = 16 << 20;

/// A figure of /proc/PID/status, bytes.
fn status(pid: u32, key: &str) -> u64 {
    let text = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    line.trim().trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// The most that a process has had, less the files that it has mapped: these are its program.
fn peak(pid: u32) -> u64 {
    status(pid, "VmHWM") - status(pid, "RssFile")
}

/// A mount keeps within its bounds, and never was more than an eighth above them: it looks once a second.
fn assert_bounded(mount: &Mount, most: u64, what: &str) {
    let (pid, had) = (mount.pid(), peak(mount.pid()));
    assert!(had <= most + most / 8, "{what}: {had} bytes, {}", mount.stats()["memory"]);
    let is_within = || status(pid, "VmRSS") - status(pid, "RssFile") <= most;
    wait_until(&format!("{what}: within {most} bytes"), Duration::from_secs(20), is_within);
}

/// Files of odd sizes, written in small pieces as a linker does, in folders of 100.
fn fill(dir: &Path, files: std::ops::Range<usize>, size: usize) {
    let bytes = noise(files.start as u64 + 1, size);
    for at in files {
        let folder = dir.join(format!("part-{}", at / 100));
        if at % 100 == 0 {
            fs::create_dir_all(&folder).unwrap();
        }
        let mut file = File::create(folder.join(format!("file-{at}"))).unwrap();
        file.write_all(&(at as u64).to_le_bytes()).unwrap();
        bytes[8..].chunks(5000).for_each(|piece| file.write_all(piece).unwrap());
    }
}

/// Has several programs read everything.
fn read_all(mount: &Mount) {
    run(sh("find . -type f -print0 | xargs -0 -P 8 -n 50 cat > /dev/null").current_dir(mount.path()));
}

#[test]
fn what_is_kept_stays_within_the_options() {
    let farm = Farm::new();
    farm.create("v");
    let options = "cache=128M,dirty=64M,commit=1,inodes=20000";
    let most = (128 << 20) + (64 << 20) + OVERHEAD;
    let mount = farm.mount("v", options);
    std::thread::scope(|scope| {
        for writer in 0..4 {
            let dir = mount.join(&format!("writer-{writer}"));
            // 430 MB in all. A buffer that grows in powers of two has nearly as much to spare.
            scope.spawn(move || fill(&dir, 0..3000, 36_000));
        }
    });
    assert_bounded(&mount, most, "writing");
    mount.unmount();
    let mount = farm.mount("v", options);
    read_all(&mount);
    let stats = mount.stats();
    let fetched = ["block_misses", "blocks_prefetched"].map(|key| number(&stats, &format!("cache.{key}")));
    assert!(fetched.iter().sum::<u64>() >= 12_000, "all has come from the server: {}", stats["cache"]);
    assert_bounded(&mount, most, "reading");
}

#[test]
fn small_files_count_by_their_size_among_the_rows() {
    let farm = Farm::new();
    farm.create("v");
    let options = "cache=16M,dirty=16M,commit=1,inodes=20000";
    // A row is reckoned with 1 KiB, and these are part of theirs: 150 MB in all.
    let most = (32 << 20) + (20_000 << 10) + OVERHEAD;
    let mount = farm.mount("v", options);
    fill(mount.path(), 0..50_000, 3000);
    mount.sync();
    assert_bounded(&mount, most, "writing");
    mount.unmount();
    let mount = farm.mount("v", options);
    read_all(&mount);
    assert_bounded(&mount, most, "reading");
}

#[test]
fn a_directory_of_more_names_than_inodes_is_served_and_said() {
    let farm = Farm::new();
    farm.create("v");
    const NAMES: u64 = 30_000;
    let options = "cache=16M,dirty=16M,commit=1,inodes=2000";
    let mount = farm.mount("v", options);
    fs::create_dir_all(mount.join("large")).unwrap();
    for n in 0..NAMES {
        fs::write(mount.join(&format!("large/{n}")), n.to_le_bytes()).unwrap();
    }
    mount.sync();
    mount.unmount();
    let mount = farm.mount("v", options);
    for round in 0..2 {
        assert_eq!(fs::read_dir(mount.join("large")).unwrap().count() as u64, NAMES);
        for n in (0..NAMES).step_by(997) {
            assert_eq!(fs::read(mount.join(&format!("large/{n}"))).unwrap(), n.to_le_bytes());
            assert!(!mount.join(&format!("large/no-{n}-{round}")).exists());
        }
        // Something else is used meanwhile.
        fs::create_dir_all(mount.join("small")).unwrap();
        (0..500).for_each(|n| fs::write(mount.join(&format!("small/{n}")), "x").unwrap());
    }
    let stats = mount.stats();
    assert_eq!(number(&stats, "cache.largest_directory"), NAMES, "{}", stats["cache"]);
    // Each of the two mounts has said it once.
    assert_eq!(mount.log().matches("more names than inodes= allows").count(), 2, "{}", mount.log());
    // About 1 KiB for each name, and no more.
    assert_bounded(&mount, (32 << 20) + (NAMES << 10) + OVERHEAD, "a large directory");
}

/// Waits until a mount keeps no more than it may when it is quiet.
fn goes_back(what: &str, mount: &Mount) {
    let begun = Instant::now();
    loop {
        let (stats, own) = (mount.stats(), status(mount.pid(), "RssAnon"));
        if number(&stats, "log.dirty_bytes") == 0
            && number(&stats, "cache.bytes") <= FLOOR
            && own <= FLOOR + OVERHEAD / 2
        {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{what} is not given back: {own} {stats}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn what_is_kept_goes_back_when_nothing_is_asked() {
    let farm = Farm::new();
    farm.create("v");
    // On a busy machine some of it goes back before all is written, if it has to be quiet for less.
    let mount = farm.mount("v", "quiet=10,cache=256M,dirty=256M");
    fill(mount.path(), 0..3000, 60_000);
    let full = peak(mount.pid());
    assert!(full > 150 << 20, "{full}");
    goes_back("what was written", &mount);
    mount.unmount();
    let mount = farm.mount("v", "quiet=2,cache=256M,dirty=256M");
    read_all(&mount);
    assert!(number(&mount.stats(), "cache.bytes") > 150 << 20);
    goes_back("what was read", &mount);
    // A file that the kernel has given up too costs its content, and nothing else.
    let before = mount.stats();
    let path = mount.join("part-7/file-777");
    run(&mut sh(&format!("dd if={} iflag=nocache count=0 2>&1", path.display())));
    assert_eq!(fs::read(&path).unwrap()[..8], 777u64.to_le_bytes());
    let asked = |stats: &Value, what: &str| number(stats, &format!("server.requests.{what}"));
    let after = mount.stats();
    for other in ["ENTER", "FETCH_INODE", "ACQUIRE", "RELEASE"] {
        assert_eq!(asked(&after, other), asked(&before, other), "{other}: {}", after["server"]);
    }
}

#[test]
fn a_second_pass_sends_nothing_after_memory_was_given_back() {
    let (farm, mount) = Farm::mounted("v");
    tree(mount.path(), 1200);
    mount.unmount();
    let mount = farm.mount("v", "quiet=1");
    let pass = || drop(run(sh(PASS).current_dir(mount.path())));
    pass();
    let before = mount.stats();
    std::thread::sleep(Duration::from_secs(8));
    pass();
    let after = mount.stats();
    assert_eq!(number(&after, "server.requests.total"), number(&before, "server.requests.total"), "{after}");
    assert_eq!(lookups(&after), lookups(&before), "{} {}", before["fuse"], after["fuse"]);
}

#[test]
fn mounts_of_a_host_share_a_tenth_of_its_memory() {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let tenth = (line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10) / 10;
    let limits = |mount: &Mount| {
        let stats = mount.stats();
        number(&stats, "memory.limit_cache_bytes") + number(&stats, "memory.limit_dirty_bytes")
    };
    // Each has 4 and 16 MiB at least, and others may be mounted meanwhile.
    let most = |mounts: u64| (tenth / mounts).max(20 << 20);
    let (farm, first) = Farm::mounted("v");
    let alone = limits(&first);
    assert!(alone > 0 && alone <= most(1), "{alone} of {tenth}");
    let more: Vec<Mount> = (0..3).map(|at| farm.mount_as("v", &format!("more-{at}"), "", None)).collect();
    wait_until("all have their share", Duration::from_secs(30), || {
        more.iter().chain([&first]).all(|mount| limits(mount) <= most(4))
    });
    let given = farm.mount_as("v", "given", "cache=100M,dirty=50M,inodes=4000", None);
    let stats = given.stats();
    assert_eq!(limits(&given), 150 << 20);
    assert_eq!(number(&stats, "memory.limit_inodes"), 4000);
    assert!(number(&stats, "memory.resident_bytes") >= number(&stats, "memory.own_bytes"));
}

/// A control group with a bound of memory.
pub(crate) struct Group {
    dir: PathBuf,
}

impl Group {
    /// In the first hierarchy that can have one.
    pub(crate) fn new(name: &str, mib: u64) -> Option<Group> {
        let name = format!("hayloft-e2e-{name}-{}", std::process::id());
        [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")]
            .into_iter()
            .find_map(|(top, limit)| {
                let dir = Path::new(top).join(&name);
                fs::create_dir(&dir).ok()?;
                let group = Group { dir };
                if !group.dir.join("cgroup.procs").exists() {
                    // A folder that hierarchies are mounted in.
                    return None;
                }
                fs::write(group.dir.join(limit), (mib << 20).to_string()).ok()?;
                Some(group)
            })
    }

    /// Brings a process into it; what that starts from then on is in it as well.
    pub(crate) fn add(&self, pid: u32) {
        fs::write(self.dir.join("cgroup.procs"), pid.to_string()).unwrap();
    }

    /// Shell commands that bring the shell into the group.
    fn enter(&self) -> String {
        format!("echo $$ > {}/cgroup.procs", self.dir.display())
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let empty = || fs::remove_dir(&self.dir).is_ok();
        for _ in 0..100 {
            if empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// Takes what is left of a group's memory but little, and reads a file that does not fit.
const HOG: &str = "
import os, sys
left, path, stop = int(sys.argv[1]), sys.argv[2], sys.argv[3]
with open(path, 'wb') as file:
    for _ in range(96):
        file.write(os.urandom(1 << 20))
    os.fsync(file.fileno())
taken = bytearray(left)
for at in range(0, left, 4096):
    taken[at] = 1
while not os.path.exists(stop):
    with open(path, 'rb', buffering=0) as file:
        for at in range(0, 96 << 20, 1 << 16):
            # What is read once goes without anybody's waiting.
            os.pread(file.fileno(), 1 << 16, at)
            os.pread(file.fileno(), 1 << 16, at)
";

#[test]
fn memory_pressure_empties_the_cache_at_once() {
    const GROUP_MIB: u64 = 400;
    let Some(group) = Group::new("hog", GROUP_MIB) else {
        eprintln!("skipped: no control group of memory can be made here");
        return;
    };
    let farm = Farm::new();
    farm.create("v");
    let mount = farm.mount("v", "");
    fill(mount.path(), 0..3000, 60_000);
    mount.unmount();
    // Nothing but pressure gives it back: it is never quiet for so long.
    let point = farm.dir().join("mnt-v");
    let script = format!(
        "{}; exec {HAYLOFT} mount {}/v {} --log-dir {dir} --cache-dir {dir} -o quiet=3600,cache=256M,dirty=32M",
        group.enter(),
        farm.address,
        point.display(),
        dir = farm.dir().display()
    );
    run(&mut sh(&script));
    let stats = || -> Value {
        serde_json::from_str(&run(&mut farm.hayloft(["stats", "--json", point.to_str().unwrap()]))).unwrap()
    };
    let read_all = || run(sh("find . -type f -print0 | xargs -0 -n 50 cat > /dev/null").current_dir(&point));
    // Memory of the host may have been short just now.
    wait_until("it keeps what was read", Duration::from_secs(60), || {
        // Not from the kernel's cache.
        fs::write("/proc/sys/vm/drop_caches", "1").unwrap();
        read_all();
        number(&stats(), "cache.bytes") > 150 << 20
    });
    let pid = number(&stats(), "mount.pid") as u32;
    let (file, stop) = (farm.dir().join("hog"), farm.dir().join("stop"));
    let press = || {
        // What is left is room for the hog's interpreter, and for a part of its file: it is to press, and not to be killed.
        let left = (GROUP_MIB << 20) - status(pid, "RssAnon") - (56 << 20);
        let (enter, file, stop) = (group.enter(), file.display(), stop.display());
        let script = format!("{enter}; exec python3 -c \"$1\" {left} {file} {stop}");
        sh(&script).args(["-", HOG]).spawn().unwrap()
    };
    let mut hog = press();
    wait_until("the cache is given up", Duration::from_secs(60), || {
        // It may be killed all the same.
        if hog.try_wait().unwrap().is_some() {
            hog = press();
        }
        let own = status(pid, "RssAnon");
        number(&stats(), "cache.bytes") <= FLOOR && own <= FLOOR + OVERHEAD / 2
    });
    let after = stats();
    assert!(number(&after, "memory.pressure") > 0, "{}", after["memory"]);
    fs::write(&stop, b"").unwrap();
    hog.wait().unwrap();
    // It goes on as before.
    read_all();
    fs::write(point.join("new"), b"new").unwrap();
    leave(&mut farm.hayloft(["umount", point.to_str().unwrap()]));
}

#[test]
fn what_a_server_does_not_need_any_more_goes_back() {
    let (farm, mounts) = Farm::shared(1);
    let memory = |key: &str| number(&farm.stats(), &format!("server.memory.{key}"));
    fill(mounts[0].path(), 0..60_000, 3000);
    mounts[0].sync();
    run(sh("rm -r *").current_dir(mounts[0].path()));
    mounts[0].sync();
    wait_until("its free memory goes back", Duration::from_secs(60), || {
        // Who asks all the time keeps it from being quiet.
        std::thread::sleep(Duration::from_secs(1));
        memory("own_bytes") < memory("allocated_bytes") + (64 << 20)
    });
}
