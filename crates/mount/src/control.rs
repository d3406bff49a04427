//! The control socket of a mount: statistics, flushing and unmounting, for the `hayloft` command.
//!
//! A line of JSON each way over a Unix socket that is named after the mount's device number. Only the user who
//! mounted, and root, may connect. Nobody here asks the file system itself: its answers may wait for the server.

mod ask;

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hayloft_fuse::{Control, Transport};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use crate::core::Client;
use crate::error::MountError;
use crate::log::ledger::FlushError;

pub use ask::{ControlError, Leave, Target, Visit, flush, stats};

/// How long a file system whose last mount was taken away may take to end.
const END_PATIENCE: Duration = Duration::from_millis(500);
/// How long a goodbye to the server may take when nothing is waited for.
const GOODBYE_PATIENCE: Duration = Duration::from_secs(2);
/// Why a session ended that was given up.
const GIVEN_UP: &str = "the mount was given up by `hayloft umount --force`";

/// The folder of the sockets: /run/hayloft for root, else one of the user's.
fn folder() -> PathBuf {
    if let Ok(metadata) = fs::metadata("/proc/self")
        && metadata.uid() == 0
    {
        return PathBuf::from("/run/hayloft");
    }
    match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(runtime) => Path::new(&runtime).join("hayloft"),
        None => {
            let uid = fs::metadata("/proc/self").map_or(0, |metadata| metadata.uid());
            PathBuf::from(format!("/tmp/hayloft-{uid}"))
        }
    }
}

fn socket(device: u64) -> PathBuf {
    folder().join(format!("mount-{device}.sock"))
}

/// Who waits for the end, and is told of it.
#[derive(Default)]
struct Farewell {
    waiting: Mutex<Vec<UnixStream>>,
}

impl Farewell {
    /// Has the other end of this stream told how the mount has ended.
    fn await_end(&self, stream: &UnixStream) -> bool {
        stream.try_clone().map(|stream| self.waiting.lock().push(stream)).is_ok()
    }
}

/// The socket of a mount.
pub(crate) struct Listener {
    path: PathBuf,
    /// Its inode.
    ino: u64,
    farewell: Arc<Farewell>,
}

impl Listener {
    /// The mount has ended: whoever asked for it learns how.
    pub(crate) fn end(self, problem: Option<String>) {
        // A client may end long after its mount, when the device number, and with it the path, are another mount's.
        if fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.ino() == self.ino) {
            let _ = fs::remove_file(&self.path);
        }
        let answer = match problem {
            None => json!({"ok": true}),
            Some(problem) => json!({"error": problem}),
        };
        for stream in self.farewell.waiting.lock().drain(..) {
            let _ = answer_with(&stream, &answer);
        }
    }
}

pub(crate) fn listen(point: &Path, client: Arc<Client>, control: Control) -> Result<Listener, MountError> {
    let failed = |path: &Path, source| MountError::Folder { path: path.to_path_buf(), source };
    let device = control.device().map_err(|source| failed(point, source))?;
    let folder = folder();
    fs::create_dir_all(&folder).map_err(|source| failed(&folder, source))?;
    fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))
        .map_err(|source| failed(&folder, source))?;
    let path = socket(device);
    // The number belonged to a mount that is gone.
    let _ = fs::remove_file(&path);
    let listener = UnixListener::bind(&path).map_err(|source| failed(&path, source))?;
    let ino = fs::symlink_metadata(&path).map_err(|source| failed(&path, source))?.ino();
    let farewell = Arc::new(Farewell::default());
    let serving = Arc::clone(&farewell);
    std::thread::Builder::new()
        .name("hayloft-control".to_string())
        .spawn(move || {
            for stream in listener.incoming().flatten() {
                let (client, control, serving) = (Arc::clone(&client), control.clone(), Arc::clone(&serving));
                // One thread a request: few come, and a flush may take long.
                let _ = std::thread::Builder::new().spawn(move || serve(stream, &client, &control, &serving));
            }
        })
        .map_err(|source| failed(&path, source))?;
    Ok(Listener { path, ino, farewell })
}

fn serve(stream: UnixStream, client: &Client, control: &Control, farewell: &Farewell) {
    let mut line = String::new();
    if BufReader::new(&stream).read_line(&mut line).is_err() {
        return;
    }
    let request: Value = serde_json::from_str(&line).unwrap_or_default();
    let flushed = || match client.flush_all() {
        Ok(()) => Ok(()),
        Err(FlushError::NoSpace) => Err("the store is full, or the volume's quota used up".to_string()),
        Err(FlushError::Store(reason) | FlushError::Ended(reason) | FlushError::Lost(reason)) => Err(reason),
        Err(FlushError::Replaced) => Err("the session was ended by the server".to_string()),
        Err(FlushError::Interrupted) => Err("interrupted".to_string()),
    };
    let answer = match request["command"].as_str() {
        Some("stats") => statistics(client, control),
        Some("flush") => match flushed() {
            Ok(()) => json!({"ok": true}),
            Err(problem) => json!({"error": problem}),
        },
        // Its mount point is taken away already.
        Some("leave") => {
            if !control.await_end(END_PATIENCE) {
                json!({"ok": true, "goes_on": true})
            } else if farewell.await_end(&stream) {
                return;
            } else {
                json!({"error": "no descriptor to wait with"})
            }
        }
        Some("give_up") => {
            if !farewell.await_end(&stream) {
                return;
            }
            client.link.give_up(GIVEN_UP, GOODBYE_PATIENCE);
            json!({"ok": true})
        }
        _ => json!({"error": "unknown command"}),
    };
    let _ = answer_with(&stream, &answer);
}

fn answer_with(mut stream: &UnixStream, answer: &Value) -> io::Result<()> {
    // In one piece: formatted into a socket, each token would be a message of its own.
    stream.write_all(format!("{answer}\n").as_bytes())
}

/// Everything countable of a mount; the keys are described in `docs/operations.md`.
fn statistics(client: &Client, control: &Control) -> Value {
    let mut fuse: Map<String, Value> = control
        .counters()
        .by_opcode()
        .into_iter()
        .map(|(name, count)| (name.to_string(), json!(count)))
        .collect();
    fuse.insert("total".to_string(), json!(control.counters().total()));
    let (inodes, directories, largest, dirty_rows, usage, quota) = {
        let core = client.core();
        let (inodes, directories) = core.tree.in_memory();
        let largest = core.tree.largest_directory().map_or(0, |(_, names)| names);
        (inodes, directories, largest, core.tree.dirty_rows(), core.tree.usage(), core.tree.quota())
    };
    let status = client.status();
    let mut cache = client.stats.cache_json();
    cache["bytes"] = json!(client.budget.cached());
    cache["inodes"] = json!(inodes);
    cache["directories"] = json!(directories);
    cache["largest_directory"] = json!(largest);
    let mut log = client.stats.log_json();
    log["dirty_bytes"] = json!(client.budget.unshipped());
    log["in_flight_bytes"] = json!(client.budget.in_flight());
    log["dirty_rows"] = json!(dirty_rows);
    log["oldest_unsent_age_seconds"] = json!(client.ledger.oldest_age().as_secs_f64());
    log["durable_sequence"] = json!(client.durable().0);
    log["full"] = json!(client.ledger.is_full());
    let (limits, resident) = (client.memory.limits(), crate::cache::memory::resident());
    let memory = json!({
        "resident_bytes": resident.all,
        "own_bytes": resident.own,
        "content_bytes": client.budget.held(),
        "limit_cache_bytes": limits.cache,
        "limit_dirty_bytes": limits.dirty,
        "limit_inodes": limits.inodes,
        "limit_content_now_bytes": client.memory.content(),
        "pressure": client.memory.heard(),
    });
    let mut server = client.stats.server_json();
    server["connected"] = json!(client.link.connected().is_some());
    json!({
        "mount": {
            "mount_point": control.mount_point(),
            "pid": std::process::id(),
            "transport": match control.kernel().transport {
                Transport::IoUring => "io_uring",
                Transport::DevFuse | Transport::Auto => "dev_fuse",
            },
        },
        "fuse": {"requests": fuse},
        "server": server,
        "sharing": client.stats.sharing_json(),
        "cache": cache,
        "memory": memory,
        "lock": client.stats.lock.json(),
        "log": log,
        "volume": {
            "used_bytes": usage.bytes,
            "used_inodes": usage.inodes,
            "quota_bytes": quota.bytes,
            "quota_inodes": quota.inodes,
            "store_free_bytes": status.store_free_bytes,
        },
    })
}
