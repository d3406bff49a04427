//! `hayloft mount`.

use std::error::Error;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use hayloft_mount::control::{self, ControlError};
use hayloft_mount::{Mount, MountConfig, MountError, MountOptions, Stopper};
use hayloft_transport::Dial;

use crate::config::Config;
use crate::dial;
use crate::exit::{Exit, exit_of, failure};
use crate::mountinfo;
use crate::mounts::args::MountArgs;
use crate::mounts::umount;
use crate::server::admin::Admin;
use crate::server::signers::Signers;
use crate::signals;
use crate::sys;

/// A mount as asked for, checked.
struct Plan {
    server: String,
    dial: Dial,
    volume: String,
    dir: PathBuf,
    options: String,
    cache_dir: Option<PathBuf>,
    die_with_parent: bool,
}

/// How long a mount of throw-away data waits for its last changes.
const AT_ONCE: Duration = Duration::from_secs(2);

/// Runs the command.
///
/// # Errors
/// When the mount cannot be made: one sentence that says why.
pub(crate) fn run(args: MountArgs, config: &Config) -> anyhow::Result<u8> {
    start(args, config, |made| println!("{made}"))
}

/// The same for mount(8), which says nothing itself when all is well, and so nor do its helpers.
///
/// # Errors
/// As [`run`].
pub(crate) fn run_silently(args: MountArgs, config: &Config) -> anyhow::Result<u8> {
    start(args, config, |_| {})
}

fn start(args: MountArgs, config: &Config, tell: impl Fn(&str)) -> anyhow::Result<u8> {
    if args.detached {
        return Ok(run_detached(args));
    }
    let log_dir = args.log_dir.clone().or_else(|| config.mount.log_dir.clone());
    let foreground = args.foreground;
    if args.die_with_parent {
        sys::die_with_parent()?;
    }
    let plan = plan(args, config)?;
    if foreground { serve(&plan, &mut Foreground) } else { detach(&plan, log_dir, tell) }
}

fn plan(args: MountArgs, config: &Config) -> anyhow::Result<Plan> {
    let (server, volume) = split_source(&args.source)?;
    let from_file = config.mount.options.iter().filter(|_| !args.detached);
    let given: Vec<&str> = from_file.chain(&args.options).flat_map(|list| list.split(',')).collect();
    let mut dial = dial::ours();
    let mut given = ours_only(&given);
    given.retain(|option| match option.split_once('=') {
        Some(("cert", folder)) => {
            dial.credentials = folder.into();
            false
        }
        None if *option == "insecure" => {
            dial.insecure = true;
            false
        }
        _ => true,
    });
    if volume.contains('@') {
        // A snapshot.
        given.push("ro");
        if let Some(keys) = &config.mount.trusted_keys {
            Signers::read(keys)?.require_of(&mut Admin::connect_as(&dial, &server)?, &volume)?;
        }
    }
    let options = given.join(",");
    MountOptions::parse(&options).map_err(|error| failure(Exit::Usage, error.to_string()))?;
    let dir = mount_point(&args.dir)?;
    let cache_dir = args.cache_dir.or_else(|| config.mount.cache_dir.clone());
    let cache_dir = cache_dir.map(std::path::absolute).transpose()?;
    Ok(Plan { server, dial, volume, dir, options, cache_dir, die_with_parent: args.die_with_parent })
}

/// `HOST:PORT/VOLUME`, or `unix:/PATH/VOLUME`.
fn split_source(source: &str) -> anyhow::Result<(String, String)> {
    dial::split_volume(source).map(|(server, volume)| (server.to_owned(), volume.to_owned())).ok_or_else(|| {
        failure(
            Exit::Usage,
            format!(
                "'{source}' names no volume: write HOST:PORT/VOLUME, as in 127.0.0.1:7440/builds, or unix:/PATH/VOLUME"
            ),
        )
    })
}

/// Without the options that only mean something to mount(8) and fstab(5).
fn ours_only<'a>(options: &[&'a str]) -> Vec<&'a str> {
    let foreign =
        ["defaults", "auto", "noauto", "user", "users", "nouser", "owner", "group", "nofail", "_netdev"];
    let is_ours = |option: &&&str| {
        !option.is_empty()
            && !foreign.contains(*option)
            && !option.starts_with("x-")
            && !option.starts_with("X-")
            && !option.starts_with("comment=")
    };
    options.iter().filter(is_ours).copied().collect()
}

fn mount_point(dir: &Path) -> anyhow::Result<PathBuf> {
    if let Ok(entry) = mountinfo::ours(dir) {
        match control::stats(&entry.target()) {
            // Its client was killed: what is left there answers nothing, and only stands in the way.
            Err(ControlError::Gone(_)) => umount::take_away(&entry)?,
            Err(error @ ControlError::Silent { .. }) => {
                return Err(failure(Exit::Busy, format!("{} is busy: {error}", dir.display())));
            }
            _ => {
                return Err(failure(
                    Exit::Busy,
                    format!("{} is busy: {} is mounted there already", dir.display(), entry.volume()),
                ));
            }
        }
    }
    let dir = dir.canonicalize().with_context(|| format!("cannot mount on {}", dir.display()))?;
    match dir.is_dir() {
        true => Ok(dir),
        false => Err(failure(Exit::Usage, format!("cannot mount on {}: not a folder", dir.display()))),
    }
}

/// Starts this program again in a session of its own, and waits until it says how it went.
fn detach(plan: &Plan, log_dir: Option<PathBuf>, tell: impl Fn(&str)) -> anyhow::Result<u8> {
    let (log_path, log) = open_log(log_dir, &plan.dir)?;
    let mut command = Command::new(std::env::current_exe().context("cannot find this program's own file")?);
    command.arg("mount").arg(format!("{}/{}", plan.server, plan.volume)).arg(&plan.dir);
    if !plan.options.is_empty() {
        command.args(["-o", &plan.options]);
    }
    if let Some(cache_dir) = &plan.cache_dir {
        command.arg("--cache-dir").arg(cache_dir);
    }
    command.arg("--cert").arg(&plan.dial.credentials).args(plan.dial.insecure.then_some("--insecure"));
    command.args(["--foreground", "--detached", "--config", "/dev/null"]);
    for name in [
        "HAYLOFT_CONFIG",
        "HAYLOFT_MOUNT_OPTIONS",
        "HAYLOFT_CACHE_DIR",
        "HAYLOFT_LOG_DIR",
        "HAYLOFT_CERT",
        "HAYLOFT_INSECURE",
    ] {
        command.env_remove(name);
    }
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    let mut child = command.spawn().context("cannot start the process that serves the mount")?;
    let mut report = String::new();
    if let Some(stdout) = child.stdout.take() {
        BufReader::new(stdout).read_line(&mut report)?;
    }
    match report.trim_end().split_once(' ') {
        Some(("ready", _)) => {
            tell(&format!(
                "mounted {}/{} on {} (log: {})",
                plan.server,
                plan.volume,
                plan.dir.display(),
                log_path.display()
            ));
            Ok(0)
        }
        Some((code, message)) => {
            child.wait()?;
            Err(failure(Exit::from_code(code.parse().unwrap_or(1)), message))
        }
        None => {
            let status = child.wait()?;
            Err(failure(
                Exit::Failed,
                format!("the mount's process ended too early ({status}); its log is {}", log_path.display()),
            ))
        }
    }
}

fn open_log(log_dir: Option<PathBuf>, dir: &Path) -> anyhow::Result<(PathBuf, File)> {
    let folder = match log_dir {
        Some(folder) => std::path::absolute(folder)?,
        None => sys::log_dir().context("no folder for log files: set HOME or give --log-dir")?,
    };
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(&folder)
        .with_context(|| format!("cannot create the folder for log files {}", folder.display()))?;
    let name = dir.to_string_lossy().trim_matches('/').replace('/', "-");
    let path = folder.join(format!("mount-{name}.log"));
    let file = OpenOptions::new().create(true).append(true).mode(0o600).open(&path);
    let file = file.with_context(|| format!("cannot open the log file {}", path.display()))?;
    Ok((path, file))
}

/// Who wants to know how the mount went.
trait Audience {
    /// The mount is usable. False when nobody waits for it any more.
    fn ready(&mut self, plan: &Plan) -> bool;
}

/// A person or a service manager.
struct Foreground;

impl Audience for Foreground {
    fn ready(&mut self, plan: &Plan) -> bool {
        println!("mounted {}/{} on {}", plan.server, plan.volume, plan.dir.display());
        crate::notify::ready();
        true
    }
}

/// The process that started this one in the background.
struct Parent;

impl Parent {
    /// One line: a word and a message. Then the pipe is closed.
    fn tell(&mut self, word: &str, message: &str) -> bool {
        let line = format!("{word} {}\n", message.replace('\n', " "));
        let told = std::io::stdout().write_all(line.as_bytes()).is_ok() && std::io::stdout().flush().is_ok();
        sys::close_stdout().is_ok() && told
    }
}

impl Audience for Parent {
    fn ready(&mut self, _plan: &Plan) -> bool {
        self.tell("ready", "mounted")
    }
}

fn run_detached(args: MountArgs) -> u8 {
    let _ = sys::new_session();
    let mut parent = Parent;
    match plan(args, &Config::default()).and_then(|plan| serve(&plan, &mut parent)) {
        Ok(code) => code,
        Err(error) => {
            let message = format!("{error:#}");
            let code = exit_of(&error).code();
            eprintln!("hayloft: {message}");
            parent.tell(&code.to_string(), &message);
            code
        }
    }
}

/// Mounts and serves until it is unmounted and everything is flushed.
fn serve(plan: &Plan, audience: &mut dyn Audience) -> anyhow::Result<u8> {
    crate::server::serve::init_log("info");
    let ending =
        Arc::new(Ending { dir: plan.dir.clone(), at_once: plan.die_with_parent, stopper: OnceLock::new() });
    let told = Arc::clone(&ending);
    signals::on_ending(move |_| told.tell())?;
    let options =
        MountOptions::parse(&plan.options).map_err(|error| failure(Exit::Usage, error.to_string()))?;
    let mount = Mount::start(MountConfig {
        server: plan.server.clone(),
        dial: plan.dial.clone(),
        volume: plan.volume.clone(),
        mount_point: plan.dir.clone(),
        options,
        cache_dir: plan.cache_dir.clone(),
    })
    .map_err(mount_failure)?;
    let _ = ending.stopper.set(mount.stopper());
    if !audience.ready(plan) {
        ending.tell();
    }
    mount.wait()?;
    Ok(0)
}

/// What ending signals do.
struct Ending {
    dir: PathBuf,
    /// The data is not worth waiting for a server.
    at_once: bool,
    stopper: OnceLock<Stopper>,
}

impl Ending {
    /// The first signal ends the mount in order, which may have to wait for the server; a second one gives up.
    fn tell(&self) {
        static TOLD: AtomicBool = AtomicBool::new(false);
        let Some(stopper) = self.stopper.get().cloned() else {
            std::process::exit(Exit::Failed.code().into())
        };
        if TOLD.swap(true, Ordering::SeqCst) {
            self.give_up();
        }
        if self.at_once {
            // The server is ending as well.
            umount::on_signal(&self.dir);
            std::thread::sleep(AT_ONCE);
            self.give_up();
        }
        std::thread::spawn(move || stopper.stop());
    }

    fn give_up(&self) -> ! {
        umount::on_signal(&self.dir);
        tracing::error!("ended without waiting for the server; what it did not have is lost");
        std::process::exit(Exit::Failed.code().into())
    }
}

/// The error with the code that fits.
fn mount_failure(error: MountError) -> anyhow::Error {
    use hayloft_fuse::MountError as Fuse;
    let exit = match &error {
        MountError::Unreachable { .. } => Exit::Unreachable,
        MountError::NoSuchVolume { .. } => Exit::NoVolume,
        MountError::Credentials { .. } | MountError::Distrusted { .. } => Exit::Denied,
        MountError::Fuse(Fuse::Busy(_) | Fuse::Dead(_)) => Exit::Busy,
        MountError::Fuse(
            Fuse::NotPermitted(_) | Fuse::Device(_) | Fuse::Fusermount { .. } | Fuse::SyncfsNotPermitted,
        ) => Exit::Denied,
        MountError::Fuse(
            Fuse::NoDevice | Fuse::NoFusermount | Fuse::NoLoop | Fuse::Loop { .. } | Fuse::NoFuseblk,
        )
        | MountError::SyncfsUnheard => Exit::Missing,
        _ => Exit::Failed,
    };
    let mut message = error.to_string();
    // Some messages hold their cause already.
    if let Some(cause) =
        error.source().map(ToString::to_string).filter(|cause| !message.contains(cause.as_str()))
    {
        message = format!("{message}: {cause}");
    }
    failure(exit, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources() {
        assert_eq!(split_source("h:1/v").unwrap(), ("h:1".to_owned(), "v".to_owned()));
        assert_eq!(split_source("[::1]:7440/v").unwrap().0, "[::1]:7440");
        for wrong in ["h:1", "h/v", "h:1/", "h:1/a/b", ""] {
            assert!(split_source(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn options_of_fstab_are_left_out() {
        let given = ["defaults", "commit=5", "_netdev", "x-systemd.automount", "", "ro"];
        assert_eq!(ours_only(&given), ["commit=5", "ro"]);
    }
}
