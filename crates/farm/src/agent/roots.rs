//! Build roots of tasks: this program makes them, as `hayloft run` and `hayloft root enter` do.
//!
//! Tasks of one build share a root: a process of `hayloft run` that waits for the end of its standard input, which this agent
//! holds open. So it goes with the agent, however that ends, and some time after its last task.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::execution::Execution;

/// What a root's first command is: it says that the root is there, and waits.
const HOLD: [&str; 3] = ["sh", "-c", "echo there; read _"];
/// How long a root stays without tasks.
const IDLE: Duration = Duration::from_secs(60);
/// What variables of a task are called on their way to its root.
const PREFIX: &str = "HAYLOFT_OF_TASK_";

/// What roots are made of; tasks for which all of it is the same may share one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Plan {
    /// User and name of the build.
    pub build: (String, String),
    /// Topmost first.
    pub layers: Vec<Vec<u8>>,
    /// A folder of this host, and where it is seen.
    pub bind: (Vec<u8>, Vec<u8>),
}

/// How a task runs in a root.
#[derive(Debug, Clone)]
pub(super) struct InRoot {
    pub plan: Plan,
    /// It has the root alone.
    pub isolated: bool,
    /// `USER:GROUP` in the root.
    pub user: String,
    /// Bytes that a root of its own may take; 0: as the host's configuration says.
    pub memory: u64,
}

#[derive(Debug)]
struct Held {
    name: String,
    process: Child,
}

/// It ends when nobody holds its standard input; somebody has to hear of that.
impl Drop for Held {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        if let Ok(None) = self.process.try_wait() {
            let pid = self.process.id() as i32;
            std::thread::spawn(move || drop(hayloft_process::wait(Some(pid), true)));
        }
    }
}

#[derive(Debug)]
struct Root {
    /// Locked while it is being made.
    held: tokio::sync::Mutex<Option<Held>>,
    users: AtomicU64,
    left: Mutex<Instant>,
}

/// A task that uses a root.
#[derive(Debug)]
pub(super) struct InUse(Arc<Root>);

impl Drop for InUse {
    fn drop(&mut self) {
        *self.0.left.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.users.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The shared roots of this agent.
#[derive(Debug, Clone, Default)]
pub(super) struct Roots {
    /// What stands before the verb.
    arguments: Vec<OsString>,
    all: Arc<Mutex<BTreeMap<Plan, Arc<Root>>>>,
    last: Arc<AtomicU64>,
}

impl Roots {
    pub(super) fn new(arguments: Vec<OsString>) -> Roots {
        Roots { arguments, ..Roots::default() }
    }

    /// Roots that nobody has used for a while go.
    pub(super) fn tidy(&self) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|_, root| {
            let left = *root.left.lock().unwrap_or_else(PoisonError::into_inner);
            root.users.load(Ordering::SeqCst) > 0 || left.elapsed() < IDLE
        });
    }

    /// What has to be executed for a task to run in a root, which is there then.
    ///
    /// # Errors
    /// Why there is no root.
    pub(super) async fn enter(
        &self,
        task: &Execution,
        how: &InRoot,
    ) -> Result<(Execution, Option<InUse>), String> {
        let mut command: Vec<Vec<u8>> = vec![program().into_bytes()];
        command.extend(self.arguments.iter().map(|argument| argument.as_bytes().to_vec()));
        let in_use = if how.isolated {
            command.extend(bytes(&["run", "--network", "host"]));
            command.extend(make(&how.plan));
            if how.memory > 0 {
                command.extend(bytes(&["--memory", &how.memory.to_string()]));
            }
            None
        } else {
            let (name, in_use) = self.shared(&how.plan).await?;
            command.extend(bytes(&["root", "enter", &name]));
            Some(in_use)
        };
        let umask = format!("{:o}", task.umask);
        command.extend(bytes(&["--user", &how.user, "--env-prefix", PREFIX, "--umask", &umask, "--chdir"]));
        command.push(task.directory.clone());
        command.push("--failure-to".into());
        let failure_at = command.len() as u32;
        command.push(Vec::new());
        command.push("--".into());
        command.extend(task.command.iter().cloned());
        // Nothing of the task's environment acts on this program, which has more rights.
        let mut environment: Vec<Vec<u8>> = own_environment();
        environment.extend(task.environment.iter().map(|one| [PREFIX.as_bytes(), one].concat()));
        let entered = Execution {
            command,
            environment,
            directory: "/".into(),
            umask: 0o022,
            failure_at,
            ..Execution::default()
        };
        Ok((entered, in_use))
    }

    async fn shared(&self, plan: &Plan) -> Result<(String, InUse), String> {
        let root = {
            let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
            let new = || Root {
                held: tokio::sync::Mutex::default(),
                users: AtomicU64::new(0),
                left: Mutex::new(Instant::now()),
            };
            let root = all.entry(plan.clone()).or_insert_with(|| Arc::new(new()));
            root.users.fetch_add(1, Ordering::SeqCst);
            Arc::clone(root)
        };
        let in_use = InUse(Arc::clone(&root));
        let mut held = root.held.lock().await;
        if let Some(there) = &mut *held
            && matches!(there.process.try_wait(), Ok(None))
        {
            return Ok((there.name.clone(), in_use));
        }
        let number = self.last.fetch_add(1, Ordering::SeqCst);
        let name = format!("farm-{}-{number}", std::process::id());
        let mut command = Command::new(program());
        command.args(&self.arguments).args(["run", "--network", "host", "--name", &name]);
        command.args(make(plan).into_iter().map(OsString::from_vec)).arg("--").args(HOLD);
        let made = tokio::task::spawn_blocking(move || Held::make(name, command)).await;
        let there = held.insert(made.map_err(|error| error.to_string())??);
        Ok((there.name.clone(), in_use))
    }
}

impl Held {
    /// Makes a root, and waits until it is there.
    fn make(name: String, mut command: Command) -> Result<Held, String> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut process = command.spawn().map_err(|error| format!("the root could not be made: {error}"))?;
        let output = process.stdout.take().ok_or("the root says nothing")?;
        let mut line = String::new();
        let _ = BufReader::new(output).read_line(&mut line);
        if line.trim() == "there" {
            return Ok(Held { name, process });
        }
        let mut said = String::new();
        if let Some(error) = &mut process.stderr {
            let _ = error.read_to_string(&mut said);
        }
        let _ = process.wait();
        let said = said.trim().trim_start_matches("hayloft: ");
        Err(format!("the root could not be made: {said}"))
    }
}

/// This program, for other ones: what starts tasks may be the [small one](crate::small).
fn program() -> String {
    format!("/proc/{}/exe", std::process::id())
}

fn bytes(words: &[&str]) -> Vec<Vec<u8>> {
    words.iter().map(|word| word.as_bytes().to_vec()).collect()
}

/// The flags that say what a root is made of.
fn make(plan: &Plan) -> Vec<Vec<u8>> {
    let mut flags = Vec::new();
    for layer in &plan.layers {
        flags.extend([b"--root".to_vec(), layer.clone()]);
    }
    let (from, to) = &plan.bind;
    flags.extend([b"--bind".to_vec(), [&**from, b":", to, b":rw"].concat()]);
    flags
}

/// What this program needs to know of this host.
fn own_environment() -> Vec<Vec<u8>> {
    let is_ours = |name: &OsString| {
        let name = name.as_bytes();
        name.starts_with(b"HAYLOFT_")
            || [&b"PATH"[..], b"HOME", b"XDG_RUNTIME_DIR", b"XDG_DATA_HOME"].contains(&name)
    };
    let ours = std::env::vars_os().filter(|(name, _)| is_ours(name));
    ours.map(|(name, value)| [name.as_bytes(), b"=", value.as_bytes()].concat()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn nothing_of_a_task_acts_on_the_program_that_makes_its_root() {
        let task = Execution {
            command: bytes(&["cc", "-c", "x.c"]),
            environment: bytes(&["LD_PRELOAD=/tmp/evil", "HAYLOFT_MEMORY=1"]),
            directory: "/v/x".into(),
            umask: 0o27,
            ..Execution::default()
        };
        let plan = Plan {
            build: ("u".into(), "b".into()),
            layers: vec!["one".into(), "/v/two".into()],
            bind: ("/mnt".into(), "/v".into()),
        };
        let how = InRoot { plan, isolated: true, user: "5:6".into(), memory: 7 };
        let (entered, in_use) = Roots::new(Vec::new()).enter(&task, &how).await.unwrap();
        assert!(in_use.is_none());
        let command: Vec<_> = entered.command.iter().map(|word| String::from_utf8_lossy(word)).collect();
        assert_eq!(
            command[1..].join(" "),
            "run --network host --root one --root /v/two --bind /mnt:/v:rw --memory 7 --user 5:6 \
             --env-prefix HAYLOFT_OF_TASK_ --umask 27 --chdir /v/x --failure-to  -- cc -c x.c"
        );
        assert!(entered.command[entered.failure_at as usize].is_empty());
        let given: Vec<_> = entered.environment.iter().map(|one| String::from_utf8_lossy(one)).collect();
        assert!(given.contains(&"HAYLOFT_OF_TASK_LD_PRELOAD=/tmp/evil".into()), "{given:?}");
        assert!(!given.iter().any(|one| one.starts_with("LD_PRELOAD") || one.starts_with("HAYLOFT_MEMORY")));
    }
}
