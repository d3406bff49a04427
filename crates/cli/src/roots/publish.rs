//! `hayloft root publish`, and `--publish` of `hayloft run`.

use std::fmt;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context;
use hayloft_layer::{
    Durable, Form, LayerError, PublishOptions, Published, Target, mount_over, mounted_below, publish,
};
use hayloft_root::{RootInfo, Roots};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::{CreateSnapshot, ListSnapshots, Version};

use crate::dial;
use crate::exit::{Exit, exit_of, failure};
use crate::mountinfo::{self, MountEntry};
use crate::mounts::sync;
use crate::roots::layer_args::{PublicationArgs, RootPublishArgs};
use crate::roots::layers::{Progress, as_failure, stack};
use crate::roots::root::root_failure;
use crate::roots::stop;
use crate::server::admin::Admin;
use crate::server::snapshots::{self, parse_snapshot};
use crate::server::volume::show_volume;
use crate::units::{show_count, show_size};

/// Between two looks whether a mount is there.
const MOUNT_POLL: Duration = Duration::from_millis(5);

/// Runs `hayloft root publish`.
///
/// # Errors
/// When there is no such root, or nothing could be published.
pub(crate) fn run(args: &RootPublishArgs, roots: &Roots, config: Option<&Path>) -> anyhow::Result<u8> {
    stop::on_signals()?;
    let destination = Destination::parse(&args.to, &args.name)?;
    let info = roots.load(&args.name).map_err(root_failure)?;
    let published = publish_root(&info, &destination, &args.what, config)?;
    if args.json {
        println!("{}", serde_json::to_string(&published)?);
    } else {
        println!("{}", summary(&published, &destination));
    }
    Ok(0)
}

/// One line that says what was published.
pub(crate) fn summary(published: &Published, to: &Destination) -> String {
    let (written, removed) = (show_count(published.written), show_count(published.removed));
    format!("published to {to}: {written} written ({}), {removed} removed", show_size(published.bytes))
}

/// Publishes what a root has changed; returns when it is durable.
///
/// # Errors
/// When the destination cannot be reached, or the root not be read; the destination is as it was then, but when the
/// error says that the new version is there.
pub(crate) fn publish_root(
    info: &RootInfo,
    destination: &Destination,
    what: &PublicationArgs,
    config: Option<&Path>,
) -> anyhow::Result<Published> {
    let stack = stack(info)?;
    let mounted = mounted_below(&info.merged, &what.only).map_err(as_failure)?;
    let place = Place::reach(&destination.volume, config)?;
    // In the volume there may be other mounts.
    let target = Target::open(place.path(), &destination.path).map_err(as_failure)?;
    let ours = hayloft_mount_of(&target.parent().map_err(as_failure)?)?;
    let point = what.snapshot.as_deref().map(|name| Point::new(ours.as_ref(), name)).transpose()?;
    let flush = |_: &Path| match &ours {
        Some(entry) => {
            sync::flush(&entry.mount_point, None).map_err(|error| io::Error::other(format!("{error:#}")))
        }
        None => Ok(()),
    };
    let progress = Progress::new();
    let say = |done: u64| progress.say(&format!("publishing: {} changes", show_count(done)));
    let options = PublishOptions {
        form: if what.as_layer { Form::Layer } else { Form::Merged },
        only: &what.only,
        mounted: &mounted,
        durable: ours.is_some().then_some(&flush as &Durable<'_>),
        progress: Some(&say),
        stop: Some(&stop::is_asked),
    };
    let outcome = publish(&stack, target, &options);
    progress.end();
    let published = outcome.map_err(|error| match error {
        // What is there all the same says so.
        LayerError::NotDurable { .. } => as_failure(error),
        _ if stop::is_asked() => stop::stopped("before it was published"),
        error => as_failure(error),
    })?;
    if let Some(point) = point {
        point.make(destination)?;
    }
    place.leave()?;
    warn_of_losses(&published);
    Ok(published)
}

fn warn_of_losses(published: &Published) {
    let lost = published.lost;
    let parts = [(lost.owners, "owners"), (lost.xattrs, "attributes"), (lost.devices, "device nodes")];
    let lost: Vec<String> =
        parts.iter().filter(|(count, _)| *count > 0).map(|(count, of)| format!("{count} {of}")).collect();
    if !lost.is_empty() {
        eprintln!("hayloft: not kept, without root rights or on that file system: {}", lost.join(", "));
    }
}

/// A snapshot that a publication is to be followed by.
struct Point {
    server: String,
    of: Version,
}

impl Point {
    /// # Errors
    /// The target is in no volume; there is such a snapshot already.
    fn new(mount: Option<&MountEntry>, name: &str) -> anyhow::Result<Point> {
        let source = mount.map(MountEntry::volume);
        let found = source.as_deref().and_then(dial::split_volume);
        let (server, volume) = found.ok_or_else(|| {
            failure(
                Exit::Usage,
                "--snapshot: what is published to is in no Hayloft volume, so it has no snapshots",
            )
        })?;
        let of = parse_snapshot(&format!("{volume}@{name}")).map_err(|_| {
            failure(Exit::Usage, format!("--snapshot '{name}': that is no name of a snapshot"))
        })?;
        let ask = Ask::ListSnapshots(ListSnapshots { of: Some(of.clone()) });
        if snapshots::one(&mut Admin::connect(server)?, ask).is_ok() {
            let said = format!("there is a snapshot {} already: choose another name", snapshots::shown(&of));
            return Err(failure(Exit::Exists, said));
        }
        Ok(Point { server: server.to_owned(), of })
    }

    fn make(self, published: &Destination) -> anyhow::Result<()> {
        let note = format!("published to {}", published.path.display());
        let ask = CreateSnapshot { of: Some(self.of.clone()), note, as_stored: false };
        let made = Admin::connect(&self.server)
            .and_then(|mut admin| snapshots::one(&mut admin, Ask::CreateSnapshot(ask)));
        made.map(drop).map_err(|error| {
            let shown = snapshots::shown(&self.of);
            failure(
                exit_of(&error),
                format!("{published} is published, but there is no snapshot {shown}: {error:#}"),
            )
        })
    }
}

/// Where something is published to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Destination {
    volume: Volume,
    /// The folder in it.
    path: PathBuf,
}

/// What `VOLUME` says.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Volume {
    /// A folder, on a mount or anywhere.
    Folder(PathBuf),
    /// `HOST:PORT/NAME`.
    Remote { server: String, name: String },
}

/// Where a volume is.
enum Found<'a> {
    /// On this host: the folder, or a mount of it that is there anyway and knows the target already.
    Here(PathBuf),
    /// This host has no mount of it.
    NotMounted { server: &'a str, name: &'a str },
}

impl Volume {
    fn find(&self) -> anyhow::Result<Found<'_>> {
        match self {
            Volume::Folder(folder) => {
                let found =
                    folder.canonicalize().with_context(|| format!("cannot publish to {}", folder.display()));
                Ok(Found::Here(found.map_err(|error| failure(Exit::NoVolume, format!("{error:#}")))?))
            }
            Volume::Remote { server, name } => {
                let source = format!("{server}/{name}");
                let of_it = |entry: &MountEntry| entry.is_ours() && entry.volume() == source;
                let mounts = mountinfo::all()?;
                let there = mounts.into_iter().rev().find(|entry| of_it(entry) && entry.is_usable());
                Ok(there.map_or(Found::NotMounted { server, name }, |entry| Found::Here(entry.mount_point)))
            }
        }
    }
}

impl fmt::Display for Destination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.volume {
            Volume::Folder(folder) => write!(f, "{}", folder.join(&self.path).display()),
            Volume::Remote { server, name } => write!(f, "{server}/{name}:{}", self.path.display()),
        }
    }
}

impl Destination {
    /// Says before a long build what would fail after it.
    ///
    /// # Errors
    /// When there is no such folder or volume, its server does not answer, or it cannot be written to.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        match self.volume.find()? {
            Found::Here(folder) => Target::check(&folder, &self.path).map_err(as_failure),
            Found::NotMounted { server, name } => Admin::connect(server)
                .and_then(|mut admin| show_volume(&mut admin, name))
                .map(|_| ())
                .map_err(|error| failure(exit_of(&error), format!("cannot publish to {self}: {error:#}"))),
        }
    }

    /// Reads `VOLUME[:PATH]`; without PATH it is the root's name.
    ///
    /// # Errors
    /// When it is neither a folder nor a server's volume, or PATH leads out of it.
    pub(crate) fn parse(text: &str, root: &str) -> anyhow::Result<Destination> {
        let wrong = |why: &str| failure(Exit::Usage, format!("cannot publish to '{text}': {why}"));
        let (volume, path) = match text.starts_with(['/', '.']) {
            true => {
                let (folder, path) = text.split_once(':').map_or((text, None), |(a, b)| (a, Some(b)));
                (Volume::Folder(folder.into()), path)
            }
            false => {
                // The first ':' is the port's, unless the address has brackets; the one after the name is ours.
                let Some(start) = text.find('/') else {
                    return Err(wrong("write a folder with a '/', or HOST:PORT/NAME"));
                };
                let end = text[start..].find(':').map_or(text.len(), |at| start + at);
                let path = text.get(end + 1..);
                let Some((server, name)) = dial::split_volume(&text[..end]) else {
                    return Err(wrong(
                        "write an absolute path, one with './', HOST:PORT/NAME or unix:/PATH/NAME",
                    ));
                };
                (Volume::Remote { server: server.to_owned(), name: name.to_owned() }, path)
            }
        };
        let path = Path::new(path.unwrap_or(root));
        let inside: PathBuf = path.components().filter(|step| matches!(step, Component::Normal(_))).collect();
        if inside.as_os_str().is_empty() {
            return Err(wrong(
                "a volume's top folder cannot be exchanged: name a folder in it, as in VOLUME:out",
            ));
        }
        if path.components().any(|step| step == Component::ParentDir) {
            return Err(wrong("'..' leads out of the volume"));
        }
        Ok(Destination { volume, path: inside })
    }
}

/// A folder to publish into, mounted for the time being when it has to be.
struct Place {
    folder: PathBuf,
    /// The folder that was made for the mount: the mount is on `mnt` in it, the log beside that.
    mounted: Option<PathBuf>,
}

impl Place {
    fn reach(volume: &Volume, config: Option<&Path>) -> anyhow::Result<Place> {
        match volume.find()? {
            Found::Here(folder) => Ok(Place { folder, mounted: None }),
            Found::NotMounted { server, name } => mount(&format!("{server}/{name}"), config),
        }
    }

    fn path(&self) -> &Path {
        &self.folder
    }

    /// Leaves the mount, if it was made for this.
    fn leave(mut self) -> anyhow::Result<()> {
        match self.mounted.take() {
            Some(dir) => {
                let left =
                    itself(["umount"]).arg(&self.folder).status().context("cannot run this program")?;
                stop::set_mount(None);
                if !left.success() {
                    return Err(failure(
                        Exit::Failed,
                        format!("published, but the mount on {} stays", self.folder.display()),
                    ));
                }
                if let Err(error) = remove_folder(&dir) {
                    tracing::warn!(folder = %dir.display(), %error, "an empty folder stays");
                }
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(dir) = self.mounted.take() {
            stop::set_mount(None);
            leave_behind(&dir);
        }
    }
}

/// Takes the mount in a folder of [`mount`] away, whoever uses it, and removes the folder.
pub(crate) fn leave_behind(dir: &Path) {
    let left = itself(["umount", "--lazy"]).arg(dir.join("mnt")).stderr(Stdio::null()).status();
    // There is none, or it is gone: a folder with something in it stays.
    if left.is_ok() {
        let _ = remove_folder(dir);
    }
}

/// Removes the folder of a mount that is not there any more: the mount point if it is empty, and files beside it. Never
/// what is below anything: a volume that is still mounted there would be emptied.
fn remove_folder(dir: &Path) -> io::Result<()> {
    std::fs::remove_dir(dir.join("mnt"))?;
    for entry in std::fs::read_dir(dir)? {
        std::fs::remove_file(entry?.path())?;
    }
    std::fs::remove_dir(dir)
}

fn mount(source: &str, config: Option<&Path>) -> anyhow::Result<Place> {
    let dir =
        tempfile::Builder::new().prefix("hayloft-publish-").tempdir().context("cannot make a folder")?;
    // From before there is a mount in it, it is not removed with all that is below.
    let dir = dir.keep();
    let folder = dir.join("mnt");
    std::fs::create_dir(&folder)?;
    let mut command = itself(["mount", source]);
    command.arg(&folder).arg("--log-dir").arg(&dir);
    if let Some(config) = config {
        command.arg("--config").arg(config);
    }
    let dial = dial::ours();
    command.arg("--cert").arg(&dial.credentials).args(dial.insecure.then_some("--insecure"));
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    stop::set_mount(Some(dir.clone()));
    let place = Place { folder, mounted: Some(dir) };
    let mut child = command.spawn().context("cannot run this program")?;
    let status = loop {
        match child.try_wait().context("cannot wait for the mount")? {
            Some(status) => break status,
            None if stop::is_asked() => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(stop::stopped("before it was published"));
            }
            None => std::thread::sleep(MOUNT_POLL),
        }
    };
    if !status.success() {
        let mut said = String::new();
        if let Some(mut stderr) = child.stderr.take() {
            let _ = stderr.read_to_string(&mut said);
        }
        let code = status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1);
        let said = said.trim().trim_start_matches("hayloft: ");
        return Err(failure(Exit::from_code(code), format!("cannot publish to {source}: {said}")));
    }
    Ok(place)
}

/// This program again.
fn itself<const N: usize>(args: [&str; N]) -> Command {
    let mut command = Command::new(hayloft_root::program::path());
    command.args(args).stdin(Stdio::null());
    command
}

/// The Hayloft mount that a folder is on.
fn hayloft_mount_of(folder: &Path) -> anyhow::Result<Option<MountEntry>> {
    let folder = folder.canonicalize()?;
    Ok(mount_over(mountinfo::all()?, &folder, |entry| &entry.mount_point).filter(MountEntry::is_ours))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_removed_by_name_only() {
        let make = || {
            let dir = tempfile::tempdir().unwrap().keep();
            std::fs::create_dir(dir.join("mnt")).unwrap();
            std::fs::write(dir.join("mount.log"), "log").unwrap();
            dir
        };
        let dir = make();
        remove_folder(&dir).unwrap();
        assert!(!dir.exists());
        // As when a volume is mounted there.
        let dir = make();
        std::fs::write(dir.join("mnt/precious"), "data").unwrap();
        remove_folder(&dir).unwrap_err();
        assert_eq!(std::fs::read_to_string(dir.join("mnt/precious")).unwrap(), "data");
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn destinations_are_read() {
        let to = |volume, path: &str| Destination { volume, path: path.into() };
        let folder = |path: &str| Volume::Folder(path.into());
        let remote = |server: &str| Volume::Remote { server: server.to_owned(), name: "v".to_owned() };
        for (text, expected) in [
            ("/mnt/v", to(folder("/mnt/v"), "build")),
            ("/mnt/v:a/b", to(folder("/mnt/v"), "a/b")),
            ("./v:/a//b/", to(folder("./v"), "a/b")),
            ("farm1:7440/v", to(remote("farm1:7440"), "build")),
            ("farm1:7440/v:a", to(remote("farm1:7440"), "a")),
            ("[::1]:7440/v:a", to(remote("[::1]:7440"), "a")),
        ] {
            assert_eq!(Destination::parse(text, "build").unwrap(), expected, "{text}");
        }
        for text in ["v", "v:a", "v/x", "/mnt/v:", "/mnt/v:/", "/mnt/v:../x", "h:1/", "h:1/a/b:c", ""] {
            let error = Destination::parse(text, "build").unwrap_err();
            assert_eq!(crate::exit::exit_of(&error), Exit::Usage, "{text}: {error}");
        }
    }
}
