//! A server, a volume and a mount of one's own, and their end.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

use super::runner::Runner;
use crate::exit::{Exit, exit_of, failure};
use crate::mountinfo;
use crate::mounts::umount;
use crate::server::admin::Admin;
use crate::server::args::CreateArgs;
use crate::server::volume;
use crate::sys;

/// How long a process may take to end when asked nicely.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long what the command has left behind may keep the volume in use.
const LINGERING: Duration = Duration::from_secs(2);

/// A farm on this machine alone. Dropping it ends everything at once; [`Farm::close`] does it in order.
pub(super) struct Farm {
    work: PathBuf,
    server: Option<Child>,
    mount: Option<Child>,
    keep: bool,
    delete_volume: bool,
    /// Where the server listens.
    pub address: String,
    /// The volume.
    pub volume: String,
    /// Where it is mounted.
    pub mount_point: PathBuf,
}

impl Farm {
    /// Starts a server on `store`, or on a folder in `work`, creates a volume and mounts it.
    ///
    /// # Errors
    /// With the reason that the server or the mount gave.
    pub(super) fn start(
        runner: &Runner,
        work: &Path,
        store: Option<&str>,
        options: &[String],
        keep: bool,
    ) -> anyhow::Result<Farm> {
        let given = store.is_some();
        let store = store.map_or_else(|| format!("file://{}", work.join("store").display()), str::to_owned);
        let mut farm = Farm {
            work: work.to_owned(),
            server: None,
            mount: None,
            keep,
            delete_volume: given && !keep,
            address: String::new(),
            volume: if given { format!("try-{}", std::process::id()) } else { "try".to_owned() },
            mount_point: work.join("hayloft"),
        };
        let mut serve = farm.command("serve")?;
        serve.args(["--store", &store, "--listen", "127.0.0.1:0", "--audit-log"]).arg(work.join("audit.log"));
        let (server, line) = farm.launch(serve, "server")?;
        farm.server = Some(server);
        farm.address = line.rsplit(' ').next().unwrap_or_default().to_owned();
        runner.check()?;
        farm.create_volume()?;
        std::fs::create_dir(&farm.mount_point)?;
        let mut mount = farm.command("mount")?;
        mount.arg(format!("{}/{}", farm.address, farm.volume)).arg(&farm.mount_point).arg("--foreground");
        options.iter().for_each(|option| {
            mount.args(["-o", option]);
        });
        let (mount, _) = farm.launch(mount, "mount")?;
        farm.mount = Some(mount);
        runner.check()?;
        Ok(farm)
    }

    fn command(&self, verb: &str) -> anyhow::Result<Command> {
        let mut command =
            Command::new(std::env::current_exe().context("cannot find this program's own file")?);
        command.args([verb, "--config", "/dev/null"]);
        for (name, _) in
            std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("HAYLOFT_"))
        {
            command.env_remove(name);
        }
        if !self.keep {
            command.arg("--die-with-parent");
        }
        Ok(command)
    }

    /// Starts a part and waits for its one line.
    fn launch(&self, mut command: Command, name: &str) -> anyhow::Result<(Child, String)> {
        let log = self.work.join(format!("{name}.log"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(File::create(&log)?);
        // Ctrl-C is for us, and we end it in order.
        let mut child =
            sys::in_own_session(&mut command).spawn().with_context(|| format!("cannot start the {name}"))?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            BufReader::new(stdout).read_line(&mut line)?;
        }
        if line.is_empty() {
            let status = child.wait()?;
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            let reason = said.lines().rev().find_map(|line| line.strip_prefix("hayloft: "));
            let exit = Exit::from_code(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1));
            let reason = reason.map_or_else(|| status.to_string(), str::to_owned);
            return Err(failure(exit, format!("the {name} did not start: {reason}")));
        }
        Ok((child, line.trim_end().to_owned()))
    }

    fn create_volume(&self) -> anyhow::Result<()> {
        let name = self.volume.clone();
        let args = CreateArgs {
            name,
            quota: 0,
            inodes: 0,
            mode: 0o755,
            owner: None,
            grant: Vec::new(),
            trusted: false,
        };
        volume::create_volume(&mut Admin::connect(&self.address)?, &args)?;
        Ok(())
    }

    /// Unmounts when the store has everything, deletes the volume from a store that stays, ends the server.
    ///
    /// # Errors
    /// When one of these fails; the rest is done all the same.
    pub(super) fn close(mut self) -> anyhow::Result<()> {
        if self.keep {
            self.mount.take();
            self.server.take();
            return Ok(());
        }
        // What the command had started may be about to end: a signal has reached it too.
        let deadline = Instant::now() + LINGERING;
        let mut left = umount::leave(&self.mount_point, None);
        while left.as_ref().is_err_and(|error| exit_of(error) == Exit::Busy) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(50));
            left = umount::leave(&self.mount_point, None);
        }
        if left.is_ok()
            && let Some(mut mount) = self.mount.take()
        {
            mount.wait()?;
        }
        if self.delete_volume && left.is_ok() {
            volume::delete_volume(&mut Admin::connect(&self.address)?, &self.volume, false)?;
        }
        left
    }
}

impl Drop for Farm {
    fn drop(&mut self) {
        if mountinfo::ours(&self.mount_point).is_ok() && self.mount.is_some() {
            umount::on_signal(&self.mount_point);
        }
        for child in [self.mount.take(), self.server.take()].into_iter().flatten() {
            end(child);
        }
    }
}

/// Asks a process to end, and makes it when it does not.
fn end(mut child: Child) {
    let deadline = Instant::now() + PATIENCE;
    let _ = i32::try_from(child.id()).map(|pid| sys::kill(pid, libc::SIGTERM));
    while Instant::now() < deadline {
        match child.try_wait() {
            Ok(None) => std::thread::sleep(Duration::from_millis(10)),
            _ => return,
        }
    }
    eprintln!("hayloft: process {} did not end when asked to; killing it", child.id());
    let _ = child.kill();
    let _ = child.wait();
}
