//! The control socket of a mount: statistics, flushing and unmounting, for the `hayloft` command.
//!
//! A line of JSON each way over a Unix socket that is named after the mount's device number. Only the user who
//! mounted, and root, may connect.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hayloft_fuse::{Control, Transport};
use parking_lot::Mutex;
use serde_json::{Map, Value, json};

use crate::committer::FlushError;
use crate::core::Client;
use crate::error::MountError;

/// Why a mount's client could not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The folder is not the top of a Hayloft mount of this host.
    #[error("{path} is not on a Hayloft mount", path = .0.display())]
    NotAMount(PathBuf),
    /// The client has ended without unmounting.
    #[error("the client of {path} is gone; take the mount away with `umount -l {path}`", path = .0.display())]
    Gone(PathBuf),
    /// The folder, or the client's socket, cannot be used.
    #[error("cannot reach the client of {path}: {source}", path = path.display())]
    Io {
        /// The folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Something uses the mount.
    #[error("{path} is in use", path = .0.display())]
    Busy(PathBuf),
    /// The client answered with an error.
    #[error("{0}")]
    Failed(String),
}

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

/// What a waiting `unmount` is told at the end.
#[derive(Default)]
struct Farewell {
    waiting: Mutex<Vec<UnixStream>>,
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
    let device = fs::metadata(point).map_err(|source| failed(point, source))?.dev();
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
    let flushed = || match client.ledger.flush(None) {
        Ok(()) => Ok(()),
        Err(FlushError::NoSpace) => Err("the store is full, or the volume's quota used up".to_string()),
        Err(FlushError::Store(reason) | FlushError::Ended(reason)) => Err(reason),
        Err(FlushError::Interrupted) => Err("interrupted".to_string()),
    };
    let answer = match request["command"].as_str() {
        Some("stats") => statistics(client, control),
        Some("flush") => match flushed() {
            Ok(()) => json!({"ok": true}),
            Err(problem) => json!({"error": problem}),
        },
        Some("unmount") => {
            let force = request["force"].as_bool().unwrap_or(false);
            match flushed().map_err(|problem| json!({"error": problem})) {
                Err(problem) if !force => problem,
                _ => {
                    farewell.waiting.lock().push(match stream.try_clone() {
                        Ok(stream) => stream,
                        Err(_) => return,
                    });
                    let lazy = force || request["lazy"].as_bool().unwrap_or(false);
                    match control.unmount(lazy) {
                        // The answer comes from the end of the mount.
                        Ok(()) => return,
                        Err(error) => {
                            farewell.waiting.lock().clear();
                            let busy = error.raw_os_error() == Some(libc::EBUSY);
                            json!({"error": error.to_string(), "busy": busy})
                        }
                    }
                }
            }
        }
        _ => json!({"error": "unknown command"}),
    };
    let _ = answer_with(&stream, &answer);
}

fn answer_with(mut stream: &UnixStream, answer: &Value) -> io::Result<()> {
    writeln!(stream, "{answer}")
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
    let (inodes, directories, dirty_rows, usage, quota) = {
        let core = client.core();
        let (inodes, directories) = core.tree.in_memory();
        (inodes, directories, core.tree.dirty_rows(), core.tree.usage(), core.tree.quota())
    };
    let status = client.status();
    let mut cache = client.stats.cache_json();
    cache["bytes"] = json!(client.budget.cached());
    cache["inodes"] = json!(inodes);
    cache["directories"] = json!(directories);
    let mut log = client.stats.log_json();
    log["dirty_bytes"] = json!(client.budget.unshipped());
    log["in_flight_bytes"] = json!(client.budget.in_flight());
    log["dirty_rows"] = json!(dirty_rows);
    log["oldest_unsent_age_seconds"] = json!(client.ledger.oldest_age().as_secs_f64());
    log["durable_sequence"] = json!(client.durable().0);
    log["full"] = json!(client.ledger.is_full());
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

fn ask(dir: &Path, request: &Value) -> Result<Value, ControlError> {
    let io = |source: io::Error| match source.raw_os_error() {
        Some(libc::ENOTCONN) => ControlError::Gone(dir.to_path_buf()),
        _ => ControlError::Io { path: dir.to_path_buf(), source },
    };
    let device = fs::metadata(dir).map_err(io)?.dev();
    let stream = UnixStream::connect(socket(device)).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => ControlError::NotAMount(dir.to_path_buf()),
        io::ErrorKind::ConnectionRefused => ControlError::Gone(dir.to_path_buf()),
        _ => ControlError::Io { path: dir.to_path_buf(), source },
    })?;
    answer_with(&stream, request).map_err(io)?;
    let mut line = String::new();
    BufReader::new(&stream).read_line(&mut line).map_err(io)?;
    if line.is_empty() {
        return Err(ControlError::Gone(dir.to_path_buf()));
    }
    let answer: Value =
        serde_json::from_str(&line).map_err(|error| ControlError::Failed(error.to_string()))?;
    match answer["error"].as_str() {
        Some(_) if answer["busy"] == json!(true) => Err(ControlError::Busy(dir.to_path_buf())),
        Some(problem) => Err(ControlError::Failed(problem.to_string())),
        None => Ok(answer),
    }
}

/// The statistics of the mount that `dir` is on.
///
/// # Errors
/// Not a mount, its client is gone or does not answer.
pub fn stats(dir: &Path) -> Result<Value, ControlError> {
    ask(dir, &json!({"command": "stats"}))
}

/// Waits until everything that was changed on the mount is durable.
///
/// # Errors
/// Not a mount, or the store is full or does not work.
pub fn flush(dir: &Path) -> Result<(), ControlError> {
    ask(dir, &json!({"command": "flush"})).map(drop)
}

/// How to unmount.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnmountOptions {
    /// Take it out of the tree now, end it when nobody uses it any more.
    pub lazy: bool,
    /// As `lazy`, and also when what changed cannot be shipped at once.
    pub force: bool,
}

/// Ships everything, unmounts, and returns when the client has ended.
///
/// # Errors
/// Not a mount, in use, or something could not be shipped.
pub fn unmount(dir: &Path, options: UnmountOptions) -> Result<(), ControlError> {
    ask(dir, &json!({"command": "unmount", "lazy": options.lazy, "force": options.force})).map(drop)
}
