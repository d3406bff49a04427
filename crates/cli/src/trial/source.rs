//! The source of a real program: from the machine's package archive, from a registry crate that
//! carries a C program, or from a folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::Context;

use super::runner::{Interrupted, Runner};
use crate::exit::{Exit, failure};
use crate::sys;

/// The Debian source package that is built.
const DEBIAN_PACKAGE: &str = "hello";
/// The crate that carries a C library with a `configure` script, its folder in the crate, its name.
const CRATE: (&str, &str, &str, &str) =
    ("libffi-sys", "=2.3.0", "libffi", "libffi (from the crate libffi-sys 2.3.0)");

/// Something to build.
pub(super) struct Source {
    /// What it is, for people.
    pub name: String,
    /// Where it comes from.
    pub origin: Origin,
}

/// How a source is brought to a place.
pub(super) enum Origin {
    /// A tar file with one folder at the top.
    Archive(PathBuf),
    /// A folder.
    Folder(PathBuf),
}

impl Source {
    /// The program to build: of the named folder, else fetched into `work`.
    ///
    /// # Errors
    /// When nothing can be had.
    pub(super) fn get(runner: &Runner, folder: Option<&Path>, work: &Path) -> anyhow::Result<Source> {
        if let Some(folder) = folder {
            let folder = folder
                .canonicalize()
                .with_context(|| format!("cannot read the source {}", folder.display()))?;
            return Ok(Source { name: folder.display().to_string(), origin: Origin::Folder(folder) });
        }
        let mut reasons = Vec::new();
        for fetch in [from_debian, from_crate] {
            match fetch(runner, work) {
                Ok(source) => return Ok(source),
                Err(error) if error.is::<Interrupted>() => return Err(error),
                Err(error) => reasons.push(format!("{error:#}")),
            }
        }
        Err(failure(
            Exit::Missing,
            format!("cannot fetch a program to build ({}); name a folder with --source", reasons.join("; ")),
        ))
    }

    /// The command that brings the source to an empty folder.
    pub(super) fn unpack_into(&self, place: &Path) -> Command {
        match &self.origin {
            Origin::Archive(archive) => {
                let mut tar = Command::new("tar");
                tar.arg("-xf")
                    .arg(archive)
                    .args(["--strip-components=1", "--no-same-owner", "-C"])
                    .arg(place);
                tar
            }
            Origin::Folder(folder) => {
                let mut cp = Command::new("cp");
                cp.arg("-a").arg("--").arg(folder.join(".")).arg(place);
                cp
            }
        }
    }
}

/// `apt-get source` with a state of its own: the machine's package lists stay as they are, and no root
/// is needed.
fn from_debian(runner: &Runner, work: &Path) -> anyhow::Result<Source> {
    let apt = work.join("apt");
    let (parts, files) = (apt.join("sources"), apt.join("files"));
    for folder in [&parts, &files, &apt.join("state/lists/partial"), &apt.join("cache/archives/partial")] {
        fs::create_dir_all(folder)?;
    }
    if copy_apt_sources(&parts)? == 0 {
        anyhow::bail!("this machine has no Debian package archive configured");
    }
    let apt_get = |verb: &[&str]| {
        let mut command = Command::new("apt-get");
        for (key, value) in [
            ("Dir::State", apt.join("state").display().to_string()),
            ("Dir::Cache", apt.join("cache").display().to_string()),
            ("Dir::Etc::SourceList", "/dev/null".to_owned()),
            ("Dir::Etc::SourceParts", parts.display().to_string()),
            ("APT::Sandbox::User", "root".to_owned()),
            ("Acquire::Languages", "none".to_owned()),
            ("Acquire::http::Timeout", "20".to_owned()),
            ("Acquire::Retries", "1".to_owned()),
        ] {
            command.arg("-o").arg(format!("{key}={value}"));
        }
        command.arg("-qq").args(verb).current_dir(&files);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    // One of several archives may be out of reach; what counts is whether the package comes.
    runner.run(&mut apt_get(&["update"])).context("no apt-get")?;
    runner.run(&mut apt_get(&["source", "--download-only", DEBIAN_PACKAGE]))?;
    let archive = fs::read_dir(&files)?.flatten().map(|entry| entry.path()).find(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.contains(".orig.tar.") && !name.ends_with(".asc")
    });
    let archive = archive.context("the Debian package archive did not give the source")?;
    let name = archive.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let version = name
        .split_once('_')
        .and_then(|(_, rest)| rest.split_once(".orig"))
        .map_or("", |(version, _)| version);
    Ok(Source {
        name: format!("GNU hello {version} (a Debian source package)"),
        origin: Origin::Archive(archive),
    })
}

/// Writes the machine's package archives, as archives of source packages, to a folder; how many files.
fn copy_apt_sources(parts: &Path) -> anyhow::Result<usize> {
    let listed =
        fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten().map(|entry| entry.path());
    let mut written = 0;
    for path in listed.chain([PathBuf::from("/etc/apt/sources.list")]) {
        let Ok(text) = fs::read_to_string(&path) else { continue };
        let (text, extension) = match path.extension().and_then(|extension| extension.to_str()) {
            Some("sources") => (deb822_to_source(&text), "sources"),
            Some("list") => (list_to_source(&text), "list"),
            _ => continue,
        };
        if !text.trim().is_empty() {
            fs::write(parts.join(format!("{written}.{extension}")), text)?;
            written += 1;
        }
    }
    Ok(written)
}

/// See sources.list(5), "DEB822-STYLE FORMAT".
fn deb822_to_source(text: &str) -> String {
    let mut out = String::new();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        match line.strip_prefix("Types:") {
            Some(_) => out.push_str("Types: deb-src"),
            None => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

/// See sources.list(5), "ONE-LINE-STYLE FORMAT".
fn list_to_source(text: &str) -> String {
    let archives = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("deb ").or(line.trim().strip_prefix("deb-src ")));
    let mut lines: Vec<String> = archives.map(|rest| format!("deb-src {}\n", rest.trim())).collect();
    lines.sort();
    lines.dedup();
    lines.concat()
}

/// A crate from the registry that carries a C program with its own build system.
fn from_crate(runner: &Runner, work: &Path) -> anyhow::Result<Source> {
    let (package, version, folder, name) = CRATE;
    let project = work.join("crate");
    fs::create_dir_all(project.join("src"))?;
    fs::write(project.join("src/lib.rs"), "")?;
    fs::write(
        project.join("Cargo.toml"),
        format!(
            "[package]\nname = \"fetch\"\nversion = \"0.0.0\"\nedition = \"2021\"\n\n\
             [dependencies]\n{package} = \"{version}\"\n\n[workspace]\n"
        ),
    )?;
    let mut cargo = Command::new("cargo");
    cargo.args(["vendor", "--quiet", "vendor"]).current_dir(&project);
    cargo.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let status = runner.run(&mut cargo)?;
    let source = project.join("vendor").join(package).join(folder);
    if !status.success() || !source.join("configure").exists() {
        anyhow::bail!("cargo did not give the crate {package}");
    }
    // Crates keep no times; make would take generated files for outdated.
    same_time(&source)?;
    Ok(Source { name: name.to_owned(), origin: Origin::Folder(source) })
}

fn same_time(path: &Path) -> anyhow::Result<()> {
    if path.is_dir() && !path.is_symlink() {
        for entry in fs::read_dir(path)? {
            same_time(&entry?.path())?;
        }
    }
    Ok(sys::set_mtime(path, 1_000_000_000, 0)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_of_packages_become_archives_of_sources() {
        let text =
            "# comment\nTypes: deb deb-src\nURIs: http://archive/debian\nSuites: stable\nComponents: main\n";
        let out = deb822_to_source(text);
        assert_eq!(out, "Types: deb-src\nURIs: http://archive/debian\nSuites: stable\nComponents: main\n");
        let text =
            "deb http://a/debian stable main\ndeb-src http://a/debian stable main\n# deb http://b x y\n";
        assert_eq!(list_to_source(text), "deb-src http://a/debian stable main\n");
    }
}
