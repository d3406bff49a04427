//! A server and mounts for a test, gone at its end, also when it panics.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

pub(crate) use crate::setup::model::noise;
pub(crate) use crate::setup::place::Place;

/// The binary under test.
pub(crate) const HAYLOFT: &str = env!("CARGO_BIN_EXE_hayloft");

/// `hayloft` with arguments, in an environment without settings.
pub(crate) fn hayloft<I: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = I>) -> Command {
    hayloft_at(None, args)
}

/// The same, on the network of a host of [`crate::setup::net::Net`].
fn hayloft_at<I: AsRef<std::ffi::OsStr>>(host: Option<&str>, args: impl IntoIterator<Item = I>) -> Command {
    crate::setup::watchdog::watch();
    let mut command = Command::new(if host.is_some() { "nsenter" } else { HAYLOFT });
    if let Some(host) = host {
        command.arg(format!("--net=/run/netns/{host}")).arg(HAYLOFT);
    }
    command.args(args).stdin(Stdio::null());
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("HAYLOFT_")) {
        command.env_remove(name);
    }
    command.env("HAYLOFT_CONFIG", "/dev/null");
    if host.is_some() {
        // What is tested there is the network; certificates are tested in `security`.
        command.env("HAYLOFT_INSECURE", "1");
    }
    command
}

/// Starts a server or a mount as a service manager does, in a session of its own. Within one session the scheduler of
/// Linux 6.18 lets programs that wait for each other all the time keep disks waiting for seconds (docs/operations.md).
fn start(command: &mut Command) -> Child {
    // SAFETY: one system call between fork and exec.
    let command = unsafe {
        command.pre_exec(|| match libc::setsid() {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        })
    };
    command.spawn().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"))
}

/// Copies a program, by a process of its own: what another test starts meanwhile would keep the copy open for writing, and it could
/// not be run ("text file busy").
pub(crate) fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    run(Command::new("cp").arg(from.as_ref()).arg(to.as_ref()));
}

/// Runs a command and gives what it printed; panics when it fails.
pub(crate) fn run(command: &mut Command) -> String {
    let output = output_of(command);
    printed(command, &output)
}

fn output_of(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"))
}

/// What a command printed; panics when it has failed.
fn printed(command: &Command, output: &Output) -> String {
    let (out, err) = texts(output);
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    out
}

/// Runs a command that unmounts, and panics when it fails. A program that another test starts has copies of what is open here until it runs, so that
/// what is mounted may be in use for a moment.
pub(crate) fn leave(command: &mut Command) {
    let mut output = output_of(command);
    for _ in 0..20 {
        let said = String::from_utf8_lossy(&output.stderr);
        if output.status.success() || !(said.contains("is in use") || said.contains("busy")) {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
        output = output_of(command);
    }
    printed(command, &output);
}

/// Runs a command that must fail; its exit code and what it said on standard error.
pub(crate) fn run_failing(command: &mut Command) -> (i32, String) {
    let output = output_of(command);
    assert!(!output.status.success(), "{command:?} succeeded");
    (output.status.code().unwrap_or(-1), texts(&output).1)
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

/// A shell script.
pub(crate) fn sh(script: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-euc", script]).stdin(Stdio::null());
    command
}

/// A program in Python.
pub(crate) fn python(script: &str) -> Command {
    let mut command = Command::new("python3");
    command.args(["-c", script]).stdin(Stdio::null());
    command
}

/// How often a test does something: `HAYLOFT_TEST_LONG` chooses the long form.
pub(crate) fn rounds(short: usize, long: usize) -> usize {
    if std::env::var_os("HAYLOFT_TEST_LONG").is_some() { long } else { short }
}

/// Where the random choices of a test begin.
pub(crate) fn seed() -> u64 {
    std::env::var("HAYLOFT_TEST_SEED").ok().and_then(|value| value.parse().ok()).unwrap_or(1)
}

/// Waits until something is so; panics when it does not come within `limit`.
pub(crate) fn wait_until(what: &str, limit: Duration, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !is_so() {
        assert!(Instant::now() < deadline, "not within {limit:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// A server with a store of its own.
pub(crate) struct Farm {
    dir: TempDir,
    store: PathBuf,
    server_args: Vec<String>,
    server: Option<Child>,
    /// The network that it is on, when it is not the machine's.
    host: Option<String>,
    /// The file that says how far the server's clock is off.
    clock: Option<PathBuf>,
    /// What else servers that are started have in their environment.
    env: Vec<(&'static str, String)>,
    /// Where it listens; stays the same over restarts.
    pub address: String,
}

impl Farm {
    /// Starts a server on an empty store.
    pub(crate) fn new() -> Farm {
        Farm::with(None, &[])
    }

    /// Starts a server on this store, with more arguments.
    pub(crate) fn with(store: Option<&Path>, server_args: &[&str]) -> Farm {
        Farm::at(None, "127.0.0.1:0", store, server_args)
    }

    /// Starts a server whose clock is off by what this file says, as in `+3600`, at any moment.
    pub(crate) fn with_clock(file: &Path) -> Farm {
        Farm::started(None, "127.0.0.1:0", None, &[], Some(file.to_owned()))
    }

    /// Starts a server on a host of a network.
    pub(crate) fn at(host: Option<&str>, address: &str, store: Option<&Path>, server_args: &[&str]) -> Farm {
        Farm::started(host, address, store, server_args, None)
    }

    fn started(
        host: Option<&str>,
        address: &str,
        store: Option<&Path>,
        server_args: &[&str],
        clock: Option<PathBuf>,
    ) -> Farm {
        assert!(is_root(), "end-to-end tests mount file systems: run them as root");
        let dir = tempfile::Builder::new().prefix("hayloft-e2e-").tempdir_in("/var/tmp").unwrap();
        let store = store.map_or_else(|| dir.path().join("store"), Path::to_owned);
        let server_args = server_args.iter().map(ToString::to_string).collect();
        let (host, address) = (host.map(str::to_owned), address.to_owned());
        let mut farm = Farm { dir, store, server_args, server: None, host, clock, env: Vec::new(), address };
        farm.start_server();
        farm
    }

    /// A folder on the local disk, for whatever the test needs.
    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Starts the server, at the same address as before.
    pub(crate) fn start_server(&mut self) {
        assert!(self.server.is_none(), "the server runs");
        let log = File::options().create(true).append(true).open(self.dir().join("server.log")).unwrap();
        let mut command = self.hayloft(["serve", "--listen", &self.address, "--store"]);
        command.arg(format!("file://{}", self.store.display()));
        command.arg("--audit-log").arg(self.dir().join("audit.log")).args(&self.server_args);
        if let Some(file) = &self.clock {
            by_clock(&mut command, file);
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        let mut server = start(command.stdout(Stdio::piped()).stderr(log));
        let mut line = String::new();
        BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
        self.server = Some(server);
        assert!(line.starts_with("serving file:///"), "{line:?}; {}", self.server_log());
        self.address = line.trim_end().rsplit(' ').next().unwrap().to_owned();
    }

    /// `hayloft` on the server's host.
    pub(crate) fn hayloft<const N: usize>(&self, args: [&str; N]) -> Command {
        hayloft_at(self.host.as_deref(), args)
    }

    pub(crate) fn server_log(&self) -> String {
        std::fs::read_to_string(self.dir().join("server.log")).unwrap_or_default()
    }

    /// kill -9.
    pub(crate) fn kill_server(&mut self) {
        let mut server = self.server.take().expect("the server runs");
        server.kill().unwrap();
        server.wait().unwrap();
    }

    /// What servers that are started from now on have in their environment, beside what all have.
    pub(crate) fn set_env(&mut self, env: &[(&'static str, String)]) {
        self.env = env.to_vec();
    }

    /// The server's process.
    pub(crate) fn server_pid(&self) -> u32 {
        self.server.as_ref().expect("the server runs").id()
    }

    /// Sends the server a signal.
    pub(crate) fn signal_server(&self, signal: i32) {
        kill(self.server.as_ref().expect("the server runs").id(), signal);
    }

    /// Ends the server as a service manager does.
    pub(crate) fn stop_server(&mut self) {
        let mut server = self.server.take().expect("the server runs");
        kill(server.id(), libc::SIGTERM);
        assert!(server.wait().unwrap().success(), "{}", self.server_log());
    }

    /// A command that asks the server.
    pub(crate) fn ask<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = self.hayloft(args);
        command.args(["--server", &self.address]);
        command
    }

    /// `hayloft volume ...`.
    pub(crate) fn volume<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = self.ask(["volume"]);
        command.args(args);
        command
    }

    /// Creates a volume.
    pub(crate) fn create(&self, name: &str) {
        run(&mut self.volume(["create", name, "--owner", "0:0"]));
    }

    /// Mounts a volume.
    pub(crate) fn mount(&self, volume: &str, options: &str) -> Mount {
        self.mount_as(volume, &format!("mnt-{volume}"), options, None)
    }

    /// Mounts a volume on the folder of this name, from a host of a network.
    pub(crate) fn mount_as(&self, volume: &str, name: &str, options: &str, host: Option<&str>) -> Mount {
        Mount::new(&self.address, volume, self.dir().join(name), options, host, &[]).expect("a mount")
    }

    /// Mounts a volume on the folder of this name, or gives what the mount said before it ended.
    pub(crate) fn try_mount(&self, volume: &str, name: &str) -> Result<Mount, String> {
        let path = self.dir().join(name);
        let _ = std::fs::remove_file(path.with_extension("log"));
        Mount::new(&self.address, volume, path, "", None, &[])
    }

    /// Mounts a volume on the folder of this name; the mount's process has more in its environment.
    pub(crate) fn mount_in(&self, volume: &str, name: &str, options: &str, env: &[(&str, String)]) -> Mount {
        Mount::new(&self.address, volume, self.dir().join(name), options, None, env).expect("a mount")
    }

    /// Mounts a volume by way of another address.
    pub(crate) fn mount_through(&self, address: &str, volume: &str, name: &str) -> Mount {
        Mount::new(address, volume, self.dir().join(name), "", None, &[]).expect("a mount")
    }

    /// Mounts a volume so many times.
    pub(crate) fn mounts(&self, volume: &str, count: usize, options: &str) -> Vec<Mount> {
        (0..count).map(|at| self.mount_as(volume, &format!("mnt-{volume}-{at}"), options, None)).collect()
    }

    /// Creates a volume and mounts it so many times.
    pub(crate) fn shared(count: usize) -> (Farm, Vec<Mount>) {
        Farm::shared_with(count, "", &[])
    }

    /// The same, with mount options and with arguments for the server.
    pub(crate) fn shared_with(count: usize, options: &str, server_args: &[&str]) -> (Farm, Vec<Mount>) {
        let farm = Farm::with(None, server_args);
        farm.create("v");
        let mounts = farm.mounts("v", count, options);
        (farm, mounts)
    }

    /// Two mounts for a round of a test that makes others wait for one of them for a lease, of 2 s; new ones each third round, since a mount that
    /// others have waited for three times would wait itself.
    pub(crate) fn for_round<'a>(
        shared: &'a mut Option<(Vec<Mount>, Farm)>,
        round: usize,
        options: &str,
    ) -> &'a [Mount] {
        if round.is_multiple_of(3) {
            drop(shared.take());
        }
        let new = || {
            let (farm, mounts) = Farm::shared_with(2, options, &["--lease", "2"]);
            // The mounts go first.
            (mounts, farm)
        };
        &shared.get_or_insert_with(new).0
    }

    /// Creates a volume and mounts it.
    pub(crate) fn mounted(volume: &str) -> (Farm, Mount) {
        let farm = Farm::new();
        farm.create(volume);
        let mount = farm.mount(volume, "");
        (farm, mount)
    }

    /// The server's statistics.
    pub(crate) fn stats(&self) -> Value {
        serde_json::from_str(&run(&mut self.hayloft(["stats", &self.address, "--json"]))).unwrap()
    }
}

impl Farm {
    /// `hayloft clients`: the sessions of a volume.
    pub(crate) fn clients(&self, volume: &str) -> Vec<Value> {
        let mut command = self.hayloft(["clients", &self.address, "--volume", volume, "--json"]);
        serde_json::from_str(&run(&mut command)).unwrap()
    }

    /// `hayloft evict`: ends the session of a mount.
    pub(crate) fn evict(&self, volume: &str, mount: &Mount) {
        let clients = self.clients(volume);
        let client = clients.iter().find(|client| client["pid"] == mount.pid());
        let session = &client.unwrap_or_else(|| panic!("{} is not in {clients:?}", mount.pid()))["session"];
        run(&mut self.hayloft(["evict", &self.address, volume, session.as_str().unwrap()]));
    }
}

impl Drop for Farm {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
        // What a test that fails has left mounted here waits for the server, and would who removes the folder.
        mounted_below(self.dir()).iter().rev().for_each(|path| detach(path));
        if std::thread::panicking() {
            eprintln!("the server's log:\n{}", tail(&self.server_log()));
        }
    }
}

/// Lets a program go by a clock that is off by what a file says: the system's clock only, for the program measures how long things take.
pub(crate) fn by_clock(command: &mut Command, file: &Path) {
    command.env("LD_PRELOAD", faketime()).env("FAKETIME_TIMESTAMP_FILE", file);
    command.env("FAKETIME_NO_CACHE", "1").env("NO_FAKE_STAT", "1");
    command.env("DONT_FAKE_MONOTONIC", "1").env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
}

/// Where the library of faketime(1) is.
fn faketime() -> PathBuf {
    let folders = std::fs::read_dir("/usr/lib").unwrap().map(|entry| entry.unwrap().path());
    let mut found = folders.map(|folder| folder.join("faketime/libfaketimeMT.so.1"));
    found.find(|library| library.is_file()).expect("the package faketime is installed")
}

/// A mount in the foreground, served by a child process.
pub(crate) struct Mount {
    child: Option<Child>,
    path: PathBuf,
    log: PathBuf,
}

impl Mount {
    /// `Err`: what it has said of why it is not there.
    fn new(
        address: &str,
        volume: &str,
        path: PathBuf,
        options: &str,
        host: Option<&str>,
        env: &[(&str, String)],
    ) -> Result<Mount, String> {
        std::fs::create_dir_all(&path).unwrap();
        let log = path.with_extension("log");
        let file = File::options().create(true).append(true).open(&log).unwrap();
        let mut command = hayloft_at(host, ["mount", &format!("{address}/{volume}"), "--foreground"]);
        command.arg("--cache-dir").arg(path.with_extension("state"));
        command.arg(&path).stdout(Stdio::piped()).stderr(file);
        command.envs(env.iter().map(|(name, value)| (name, value)));
        if !options.is_empty() {
            command.args(["-o", options]);
        }
        let mut child = start(&mut command);
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let mut mount = Mount { child: Some(child), path, log };
        if line.starts_with("mounted ") {
            return Ok(mount);
        }
        let _ = mount.child.take().map(|mut child| child.kill().and_then(|()| child.wait()));
        Err(line + &mount.log())
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Folders of what could never be applied.
    pub(crate) fn unsent(&self) -> Vec<PathBuf> {
        let folder = self.path.with_extension("state").join("unsent");
        std::fs::read_dir(folder)
            .map_or(Vec::new(), |entries| entries.map(|entry| entry.unwrap().path()).collect())
    }

    /// The process that serves it.
    pub(crate) fn pid(&self) -> u32 {
        self.child.as_ref().expect("mounted").id()
    }

    /// kill -9, and the dead mount is taken out of the tree.
    pub(crate) fn kill(mut self) {
        let mut child = self.child.take().expect("mounted");
        child.kill().unwrap();
        child.wait().unwrap();
        detach(&self.path);
    }

    /// `hayloft umount`; everything is in the store afterwards.
    pub(crate) fn unmount(mut self) {
        leave(hayloft(["umount"]).arg(&self.path));
        let mut child = self.child.take().expect("mounted");
        assert!(child.wait().unwrap().success(), "{}", self.log());
    }

    /// Waits until its process ends by itself.
    pub(crate) fn ended(mut self) {
        let mut child = self.child.take().expect("mounted");
        assert!(child.wait().unwrap().success(), "{}", self.log());
    }

    /// The mount's statistics.
    pub(crate) fn stats(&self) -> Value {
        serde_json::from_str(&run(hayloft(["stats", "--json"]).arg(&self.path))).unwrap()
    }

    /// `hayloft sync`.
    pub(crate) fn sync(&self) {
        run(hayloft(["sync"]).arg(&self.path));
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
            detach(&self.path);
            if std::thread::panicking() {
                eprintln!("the mount's log:\n{}", tail(&self.log()));
            }
        }
    }
}

/// The figure under a key such as `fuse.requests.LOOKUP`; 0 when it is not there.
pub(crate) fn number(stats: &Value, key: &str) -> u64 {
    key.split('.').try_fold(stats, |value, part| value.get(part)).and_then(Value::as_u64).unwrap_or(0)
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(30)..].join("\n")
}

/// What is mounted in a folder, in the order of mounting.
fn mounted_below(dir: &Path) -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let points = mounts.lines().filter_map(|line| line.split(' ').nth(4)).map(PathBuf::from);
    points.filter(|point| point.starts_with(dir)).collect()
}

pub(crate) fn detach(path: &Path) {
    let path = crate::setup::calls::c_path(path);
    // SAFETY: the string lives until the call returns.
    unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
}

pub(crate) fn kill(pid: u32, signal: i32) {
    // SAFETY: plain numbers.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

/// A process and all that it has started.
pub(crate) fn tree(pid: u32) -> Vec<u32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let children: String =
        threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok()).collect();
    let below = children.split_ascii_whitespace().flat_map(|child| tree(child.parse().unwrap()));
    std::iter::once(pid).chain(below).collect()
}

/// Whether a process has ended, its parent knowing or not.
pub(crate) fn has_ended(pid: u64) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_none_or(|rest| rest.is_empty() || rest.trim_start().starts_with(['Z', 'X']))
}

pub(crate) fn is_root() -> bool {
    // SAFETY: takes nothing.
    unsafe { libc::geteuid() == 0 }
}
