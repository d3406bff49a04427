//! A broker and agents for a test, gone at its end, also when it panics.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use crate::setup::farm::{Farm, Mount, hayloft, kill, run, wait_until};

/// NATS.
pub(crate) struct Broker {
    server: Option<Child>,
    port: u16,
    dir: TempDir,
    /// More arguments of `nats-server`.
    args: Vec<String>,
}

/// A port that nobody listens on.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

impl Broker {
    pub(crate) fn new() -> Broker {
        Broker::with(&[])
    }

    pub(crate) fn with(args: &[String]) -> Broker {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let mut broker = Broker { server: None, port: free_port(), dir, args: args.to_vec() };
        broker.start();
        broker
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn start(&mut self) {
        let log = File::create(self.dir.path().join("log")).unwrap();
        let mut command = Command::new("nats-server");
        command.args(["-a", "127.0.0.1", "-p", &self.port.to_string()]).args(&self.args);
        self.server = Some(command.stdout(Stdio::null()).stderr(log).spawn().unwrap());
        let port = self.port;
        wait_until("the broker listens", Duration::from_secs(20), || {
            std::net::TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
    }

    pub(crate) fn kill(&mut self) {
        let mut server = self.server.take().unwrap();
        server.kill().unwrap();
        server.wait().unwrap();
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// `hayloft farm agent`.
pub(crate) struct Agent {
    child: Option<Child>,
    log: PathBuf,
}

impl Agent {
    pub(crate) fn new(url: &str, name: &str, mount: &Path, args: &[&str]) -> Agent {
        Agent::by(hayloft::<&str>([]), url, name, mount, args)
    }

    /// By a command that becomes `hayloft` with further arguments.
    pub(crate) fn by(mut command: Command, url: &str, name: &str, mount: &Path, args: &[&str]) -> Agent {
        let log = mount.with_extension(format!("agent-{name}"));
        command.args(["farm", "agent", "--broker", url, "--name", name]);
        if !args.contains(&"--lease") {
            command.args(["--lease", "4"]);
        }
        command
            .arg("--mount")
            .arg(mount)
            .args(args)
            .stdout(Stdio::piped())
            .stderr(File::create(&log).unwrap());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let agent = Agent { child: Some(child), log };
        assert!(line.starts_with("offering "), "{line:?} {}", agent.log());
        agent
    }

    fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    pub(crate) fn kill(mut self) {
        let mut child = self.child.take().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
    }

    /// As a service manager does.
    pub(crate) fn stop(mut self) {
        let mut child = self.child.take().unwrap();
        kill(child.id(), libc::SIGTERM);
        assert!(child.wait().unwrap().success(), "{}", self.log());
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
            if std::thread::panicking() {
                eprintln!("the agent's log:\n{}", self.log());
            }
        }
    }
}

/// A volume, a mount of it for who submits, and agents that have one each.
pub(crate) struct Site {
    pub agents: Vec<Agent>,
    pub broker: Broker,
    pub mounts: Vec<Mount>,
    _farm: Farm,
}

impl Site {
    /// So many agents, each with these arguments.
    pub(crate) fn new(count: usize, args: &[&str]) -> Site {
        let (farm, mounts) = Farm::shared(count + 1);
        let broker = Broker::new();
        let mut site = Site { agents: Vec::new(), broker, mounts, _farm: farm };
        for at in 1..=count {
            site.add(at, args);
        }
        site.wait_for(count);
        site
    }

    /// An agent on the mount of this number.
    pub(crate) fn add(&mut self, at: usize, args: &[&str]) {
        let agent = Agent::new(&self.broker.url(), &format!("h{at}"), self.mounts[at].path(), args);
        self.agents.push(agent);
    }

    /// Waits until whoever gives slots knows so many agents.
    pub(crate) fn wait_for(&self, count: usize) {
        wait_until("all agents are known", Duration::from_secs(60), || {
            let output =
                hayloft(["farm", "status", "--json", "--broker", &self.broker.url()]).output().unwrap();
            let status: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            status["hosts"].as_array().is_some_and(|hosts| hosts.len() == count)
        });
    }

    pub(crate) fn status(&self) -> Value {
        let out = run(&mut hayloft(["farm", "status", "--json", "--broker", &self.broker.url()]));
        serde_json::from_str(&out).unwrap()
    }

    /// A folder on the submitter's mount.
    pub(crate) fn dir(&self) -> &Path {
        self.mounts[0].path()
    }

    /// `hayloft VERB ARGS -- COMMAND` in that folder.
    pub(crate) fn command(&self, before: &[&str], command: &[&str]) -> Command {
        let mut task = hayloft(before);
        task.arg("--").args(command).current_dir(self.dir()).env("HAYLOFT_BROKER", self.broker.url());
        task
    }

    /// A shell script as a task of the farm.
    pub(crate) fn task(&self, script: &str) -> Command {
        self.command(&["task", "--farm"], &["sh", "-c", script])
    }
}
