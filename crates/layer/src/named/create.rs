//! Making layers.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::str::FromStr;

use crate::error::{Context, LayerError, Result};
use crate::files::copy::may_set_everything;
use crate::files::folder::Folder;
use crate::named::apt;
use crate::named::archive::unpack;
use crate::named::child::ends_with_us;
use crate::named::dir::{LayerInfo, LayersDir, fill};
use crate::overlay::stack::{Marks, Stack};
use crate::publication::publish::copy_tree;

/// How much of what a program said is shown when it failed.
const LAST_LINES: usize = 15;

/// What a layer is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LayerSource {
    /// A Debian release from its package archive, with packages beside the essential ones.
    Debian {
        /// `bookworm`, `trixie`.
        suite: String,
        /// Packages to install.
        packages: Vec<String>,
    },
    /// A repository of RPM packages.
    Rpm {
        /// Its URL, or the path of a `.repo` file.
        repository: String,
        /// Packages to install.
        packages: Vec<String>,
    },
    /// A tar archive.
    Tar(PathBuf),
    /// A copy of a folder.
    Dir(PathBuf),
}

impl FromStr for LayerSource {
    type Err = LayerError;

    fn from_str(text: &str) -> Result<LayerSource> {
        let wrong = |why: &str| LayerError::Source { text: text.to_owned(), why: why.to_owned() };
        let (kind, rest) = text.split_once(':').ok_or_else(|| {
            wrong("write debian:SUITE[,PACKAGE...], tar:FILE, dir:PATH or rpm:REPOSITORY,PACKAGE...")
        })?;
        let mut words = rest.split(',').map(str::to_owned);
        let first = words.next().filter(|first| !first.is_empty());
        let first = first.ok_or_else(|| wrong(&format!("nothing after '{kind}:'")))?;
        let packages: Vec<String> = words.filter(|word| !word.is_empty()).collect();
        let is_package = |name: &String| {
            name.starts_with(|c: char| c.is_ascii_alphanumeric())
                && name.chars().all(|c| c.is_ascii_alphanumeric() || "+-.:_".contains(c))
        };
        match kind {
            "debian" | "rpm" => {
                if let Some(name) = packages.iter().find(|name| !is_package(name)) {
                    return Err(wrong(&format!("'{name}' is no name of a package")));
                }
                if kind == "rpm" {
                    return Ok(LayerSource::Rpm { repository: first, packages });
                }
                match is_package(&first) {
                    true => Ok(LayerSource::Debian { suite: first, packages }),
                    false => Err(wrong(&format!("'{first}' is no name of a release"))),
                }
            }
            "tar" => Ok(LayerSource::Tar(rest.into())),
            "dir" => Ok(LayerSource::Dir(rest.into())),
            _ => Err(wrong(&format!("'{kind}' is not known: debian, tar, dir and rpm are"))),
        }
    }
}

/// How to make a layer.
#[derive(Default)]
pub struct CreateOptions<'a> {
    /// Replace a layer of the same name.
    pub replace: bool,
    /// The package archive to take instead of the one that this machine's apt is set to.
    pub mirror: Option<&'a str>,
    /// What is being done, in words.
    pub progress: Option<&'a dyn Fn(&str)>,
}

impl LayerSource {
    /// Whether making it needs the right to give files to other users: packages have files of many. Root has it, and so
    /// has root of a user namespace with as many users.
    pub fn needs_users(&self) -> bool {
        matches!(self, LayerSource::Debian { .. } | LayerSource::Rpm { .. })
    }
}

/// Makes a layer with a name. It is there, for everybody, when all of it is.
///
/// # Errors
/// When there is one of that name, something it needs is missing, or it cannot be made.
pub fn create(layers: &LayersDir, name: &str, from: &str, options: &CreateOptions<'_>) -> Result<LayerInfo> {
    let source: LayerSource = from.parse()?;
    let info = info(from, options);
    let epoch = info.created;
    layers.create(name, info, options.replace, |tree| source.make(tree, epoch, options))
}

/// Makes the first generation of a layer in an empty folder, which becomes a layer's later: see [`Draft`](crate::Draft).
///
/// # Errors
/// When something it needs is missing, or it cannot be made.
pub fn make_first(
    top: &Path,
    from: &str,
    epoch: Option<i64>,
    options: &CreateOptions<'_>,
) -> Result<LayerInfo> {
    let source: LayerSource = from.parse()?;
    let info = info(from, options);
    let epoch = epoch.unwrap_or(info.created);
    fill(top, info, |tree| source.make(tree, epoch, options))
}

fn info(from: &str, options: &CreateOptions<'_>) -> LayerInfo {
    LayerInfo { mirror: options.mirror.map(str::to_owned), ..LayerInfo::new(from) }
}

impl LayerSource {
    fn make(&self, tree: &Path, epoch: i64, options: &CreateOptions<'_>) -> Result<()> {
        let say = |text: &str| {
            if let Some(progress) = options.progress {
                progress(text);
            }
        };
        match self {
            LayerSource::Debian { suite, packages } => {
                debian(tree, suite, packages, options.mirror, epoch, &say)
            }
            LayerSource::Rpm { repository, packages } => rpm(tree, repository, packages, epoch, &say),
            LayerSource::Tar(archive) => {
                let shown = archive.display();
                unpack(archive, tree, &|done, all| {
                    say(&format!("unpacking {shown}: {} %", (done * 100).checked_div(all).unwrap_or(100)));
                })
                .map(drop)
            }
            LayerSource::Dir(folder) => {
                let stack = Stack::open(folder, &[], Marks::None)?;
                copy_tree(&stack, tree, &|files| say(&format!("copying {}: {files} files", folder.display())))
            }
        }
    }
}

fn debian(
    tree: &Path,
    suite: &str,
    packages: &[String],
    mirror: Option<&str>,
    epoch: i64,
    say: &dyn Fn(&str),
) -> Result<()> {
    let sources = match mirror {
        Some(mirror) => vec![format!("deb {mirror} {suite} main")],
        None => apt::sources_for(suite, &apt::read_sources(Path::new("/etc/apt"))),
    };
    let include = packages.join(",");
    let of_this_host = ["etc/hostname", "etc/resolv.conf"].map(|name| tree.join(name));
    let what = || "a layer from a Debian archive".to_owned();
    let made_by = |command| run(command, epoch, say).and_then(|()| remove_files(&of_this_host));
    if !rustix::process::geteuid().is_root() {
        return Err(LayerError::NeedsUsers { what: what() });
    }
    if find_program("mmdebstrap").is_some() {
        let mut command = Command::new("mmdebstrap");
        command.args(["--variant=minbase", "--format=directory", "--mode=root"]);
        if !include.is_empty() {
            command.arg(format!("--include={include}"));
        }
        command.arg(suite).arg(tree);
        command.args(&sources);
        return made_by(command);
    }
    // It cannot do without devices, which nobody can make in a user namespace.
    if find_program("debootstrap").is_some() && may_set_everything() {
        let mut command = Command::new("debootstrap");
        command.arg("--variant=minbase");
        if !include.is_empty() {
            command.arg(format!("--include={include}"));
        }
        command.arg(suite).arg(tree);
        // It takes one archive, without suites for updates.
        command.args(sources.first().and_then(|line| apt::uri_of(line)));
        return made_by(command);
    }
    Err(LayerError::Missing { what: what(), program: "mmdebstrap", package: "mmdebstrap" })
}

/// Removes files that may be there.
fn remove_files(files: &[PathBuf]) -> Result<()> {
    for file in files {
        match std::fs::remove_file(file) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).context("remove", file);
            }
            _ => {}
        }
    }
    Ok(())
}

fn rpm(tree: &Path, repository: &str, packages: &[String], epoch: i64, say: &dyn Fn(&str)) -> Result<()> {
    let what = "a layer from a repository of RPM packages".to_owned();
    if !rustix::process::geteuid().is_root() {
        return Err(LayerError::NeedsUsers { what });
    }
    if find_program("dnf").is_none() {
        return Err(LayerError::Missing { what, program: "dnf", package: "dnf" });
    }
    if packages.is_empty() {
        let text = format!("rpm:{repository}");
        let why = "name the packages, as in rpm:REPOSITORY,basesystem,rpm-build".to_owned();
        return Err(LayerError::Source { text, why });
    }
    let mut command = Command::new("dnf");
    command.arg(format!("--installroot={}", tree.display())).args(["--assumeyes", "--quiet"]);
    // Nothing of the host: neither its repositories nor where it keeps downloads.
    let cache = tree.join("var/cache/dnf");
    command.arg(format!("--setopt=cachedir={}", cache.display())).arg("--setopt=keepcache=0");
    command.arg("--setopt=install_weak_deps=0");
    let repo_file = Path::new(repository);
    if repository.ends_with(".repo") {
        let folder = repo_file.parent().unwrap_or(Path::new("/"));
        command.arg(format!("--setopt=reposdir={}", folder.display()));
    } else {
        command.arg("--setopt=reposdir=/dev/null").arg(format!("--repofrompath=layer,{repository}"));
        // What is on this machine's own disk is signed by nobody.
        if repository.starts_with("file:") || repository.starts_with('/') {
            command.arg("--nogpgcheck");
        }
    }
    command.arg("install").args(packages);
    run(command, epoch, say)?;
    let above = Folder::open(tree).and_then(|tree| tree.sub_in_root(Path::new("var/cache")));
    match above.map(|above| above.remove(OsStr::new("dnf"))) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed.flatten().context("remove", &cache),
    }
}

/// Runs a program and tells its lines as progress. Times that it writes into files are `epoch` at most.
fn run(mut command: Command, epoch: i64, say: &dyn Fn(&str)) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    // A language that is not in the new tree makes every program in it complain.
    command.env("LC_ALL", "C.UTF-8").env("DEBIAN_FRONTEND", "noninteractive");
    command.env("SOURCE_DATE_EPOCH", epoch.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    ends_with_us(&mut command);
    let mut child = command.spawn().context("run", Path::new(&program))?;
    let mut last = VecDeque::new();
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr).split(b'\n').map_while(|line| line.ok()) {
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            // A bar that moves: only where it ends.
            let line = line.rsplit('\r').next().unwrap_or_default().to_owned();
            if line.is_empty() {
                continue;
            }
            say(line.trim_start_matches("I: "));
            if last.len() == LAST_LINES {
                last.pop_front();
            }
            last.push_back(line);
        }
    }
    let status = child.wait().context("wait for", Path::new(&program))?;
    match status.success() {
        true => Ok(()),
        false => {
            Err(LayerError::Program { program, status: status.to_string(), said: Vec::from(last).join("\n") })
        }
    }
}

/// Where a program is.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_read() {
        let debian = LayerSource::Debian {
            suite: "bookworm".to_owned(),
            packages: vec!["build-essential".to_owned(), "g++".to_owned()],
        };
        assert_eq!("debian:bookworm,build-essential,g++".parse::<LayerSource>().unwrap(), debian);
        assert_eq!("dir:/srv/a,b:c".parse::<LayerSource>().unwrap(), LayerSource::Dir("/srv/a,b:c".into()));
        let rpm =
            LayerSource::Rpm { repository: "https://h/r".to_owned(), packages: vec!["rpm-build".to_owned()] };
        assert_eq!("rpm:https://h/r,rpm-build".parse::<LayerSource>().unwrap(), rpm);
        for text in ["bookworm", "debian:", "debian:-x", "debian:bookworm,--evil", "zip:x", "debian:a b"] {
            let error = text.parse::<LayerSource>().unwrap_err();
            assert!(matches!(error, LayerError::Source { .. }), "{text}: {error}");
        }
    }

    #[test]
    fn a_program_that_fails_is_quoted() {
        let mut command = Command::new("sh");
        command.args(["-c", "echo one >&2; echo two >&2; exit 3"]);
        let told = std::cell::RefCell::new(Vec::new());
        let error = run(command, 0, &|line| told.borrow_mut().push(line.to_owned())).unwrap_err().to_string();
        assert_eq!(error, "sh failed (exit status: 3):\none\ntwo");
        assert_eq!(*told.borrow(), ["one", "two"]);
    }
}
