//! Copies files out of a root. Paths are followed inside the root only: a symbolic link to `/etc/passwd` means the
//! root's.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Dir, FileType, Mode, OFlags, Stat, Timespec, Timestamps};

use crate::error::{Error, Result, Trying};
use crate::tree::open_inside;

/// Read at a time.
const COPY_BYTES: usize = 1 << 20;
/// Links on the way to a file, as the kernel has it.
const LINKS_MAX: usize = 40;

/// Copies what a path inside a root names (`*` and `?` stand for any characters of a name) into a folder outside, and
/// gives the copies' paths. Mode, times and holes are kept; the owner is who calls. Devices, pipes and sockets are left out,
/// with a warning. A file has its name when all of it is there. `stop` is asked now and then whether to stop.
///
/// # Errors
/// When nothing is there that can be copied, the folder cannot be written, or it was to stop.
pub fn collect(
    merged: &Path,
    pattern: &Path,
    output: &Path,
    stop: &dyn Fn() -> bool,
) -> Result<Vec<PathBuf>> {
    let what = || format!("collect {}", pattern.display());
    let top = rustix::fs::open(merged, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).trying(what)?;
    let names: Vec<&OsStr> = pattern
        .components()
        .filter_map(|part| if let std::path::Component::Normal(name) = part { Some(name) } else { None })
        .collect();
    let mut found = vec![PathBuf::from("/")];
    for name in names {
        let mut next = Vec::new();
        for folder in &found {
            if !name.as_bytes().iter().any(|byte| b"*?".contains(byte)) {
                next.push(folder.join(name));
                continue;
            }
            let Ok(open) = open_inside(top.as_fd(), folder, OFlags::RDONLY | OFlags::DIRECTORY) else {
                continue;
            };
            let mut matching = entries(open).trying(what)?;
            matching.retain(|entry| matches(name.as_bytes(), entry.as_bytes()));
            matching.sort();
            next.extend(matching.into_iter().map(|entry| folder.join(entry)));
        }
        found = next;
    }
    let mut sources: Vec<(PathBuf, PathBuf, OwnedFd)> = Vec::new();
    let mut left_out = 0;
    for path in found {
        let source = match Walk::new(top.as_fd(), &path).open() {
            Ok(source) => source,
            Err(Error::NotFound(_)) => continue,
            Err(error) => return Err(error),
        };
        let kind =
            rustix::fs::fstat(&source).map(|stat| FileType::from_raw_mode(stat.st_mode)).trying(what)?;
        if !can_be_copied(kind) {
            warn_of_left_out(&path);
            left_out += 1;
            continue;
        }
        let Some(name) = path.file_name() else {
            return Err(Error::Usage("--collect takes a path in the root, not the whole of it".to_owned()));
        };
        let target = output.join(name);
        if let Some((other, ..)) = sources.iter().find(|(_, known, _)| *known == target) {
            return Err(Error::Usage(format!(
                "both {} and {} would be copied to {}: collect them into two folders",
                other.display(),
                path.display(),
                target.display()
            )));
        }
        sources.push((path, target, source));
    }
    if sources.is_empty() && left_out > 0 {
        let what = pattern.display();
        return Err(Error::Usage(format!(
            "{what} is a device, pipe or socket in the root: it is not collected"
        )));
    }
    if sources.is_empty() {
        return Err(Error::NotFound(format!("there is no {} in the root to collect", pattern.display())));
    }
    fs::create_dir_all(output).trying(|| format!("make {}", output.display()))?;
    let mut copies = Vec::new();
    for (path, target, source) in sources {
        copy(source.as_fd(), &target, stop)
            .trying(|| format!("copy {} out of the root to {}", path.display(), target.display()))?;
        copies.push(target);
    }
    Ok(copies)
}

/// The way to something in a root. Who has made a link there must not get what only others may read: links of others than
/// the root's root user lead to what belongs to the same user.
struct Walk<'a> {
    top: BorrowedFd<'a>,
    asked: &'a Path,
    /// What is left to go, after the links so far.
    path: PathBuf,
    /// Who has made the links so far, but the root's root user.
    owners: Vec<u32>,
}

impl<'a> Walk<'a> {
    fn new(top: BorrowedFd<'a>, asked: &'a Path) -> Walk<'a> {
        Walk { top, asked, path: asked.to_owned(), owners: Vec::new() }
    }

    /// # Errors
    /// When nothing is there, or a link leads where it must not.
    fn open(mut self) -> Result<OwnedFd> {
        let what = || format!("collect {}", self.asked.display());
        for _ in 0..LINKS_MAX {
            let Some(link) = self.first_link()? else {
                let place = self.entry(&self.path).trying(what)?;
                let owner = rustix::fs::fstat(&place).trying(what)?.st_uid;
                return match self.owners.iter().find(|by| **by != owner) {
                    None => Ok(place),
                    Some(by) => Err(Error::Denied(format!(
                        "{} is, or is below, a link of the user {by} to what belongs to the user {owner}: it is not followed",
                        self.asked.display()
                    ))),
                };
            };
            self.path = link;
        }
        Err(Error::Usage(format!("{} goes through too many links", self.asked.display())))
    }

    /// The path without its first link, if there is one on it.
    fn first_link(&mut self) -> Result<Option<PathBuf>> {
        let what = || format!("collect {}", self.asked.display());
        let mut so_far = PathBuf::new();
        let mut parts = self.path.components();
        while let Some(part) = parts.next() {
            let parent = so_far.clone();
            so_far.push(part);
            let entry = match self.entry(&so_far) {
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) =>
                {
                    return Err(Error::NotFound(format!("there is no {} in the root", self.asked.display())));
                }
                other => other.trying(what)?,
            };
            let stat = rustix::fs::fstat(&entry).trying(what)?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::Symlink {
                continue;
            }
            if stat.st_uid != rustix::process::geteuid().as_raw() {
                self.owners.push(stat.st_uid);
            }
            let link = rustix::fs::readlinkat(&entry, "", Vec::new()).trying(what)?;
            let mut path = parent.join(OsStr::from_bytes(link.as_bytes()));
            path.extend(parts);
            return Ok(Some(path));
        }
        Ok(None)
    }

    /// What is at a path of which only the last part may be a link.
    fn entry(&self, path: &Path) -> io::Result<OwnedFd> {
        open_inside(self.top, path, OFlags::PATH | OFlags::NOFOLLOW)
    }
}

/// Copies what a descriptor (O_PATH) names.
fn copy(source: BorrowedFd<'_>, target: &Path, stop: &dyn Fn() -> bool) -> io::Result<()> {
    let stat = rustix::fs::fstat(source)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => copy_file(source, target, &stat, stop),
        FileType::Directory => copy_folder(source, target, &stat, stop),
        FileType::Symlink => {
            let link = rustix::fs::readlinkat(source, "", Vec::new())?;
            replace(target, |new| std::os::unix::fs::symlink(OsStr::from_bytes(link.as_bytes()), new))
        }
        _ => {
            warn_of_left_out(target);
            Ok(())
        }
    }
}

fn can_be_copied(kind: FileType) -> bool {
    matches!(kind, FileType::RegularFile | FileType::Directory | FileType::Symlink)
}

fn warn_of_left_out(path: &Path) {
    tracing::warn!(path = %path.display(), "a device, pipe or socket is left out");
}

/// Makes something under a name of its own, and then puts it in the place of what is there.
fn replace(target: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let new = target.with_file_name(format!(".hayloft-new-{}", std::process::id()));
    remove_old(&new)?;
    let made = make(&new).and_then(|()| fs::rename(&new, target));
    if made.is_err() {
        let _ = remove_old(&new);
    }
    made
}

fn remove_old(target: &Path) -> io::Result<()> {
    match fs::remove_file(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn copy_file(source: BorrowedFd<'_>, target: &Path, stat: &Stat, stop: &dyn Fn() -> bool) -> io::Result<()> {
    let from = reopen(source, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY).map(File::from)?;
    replace(target, |new| {
        // Nobody else writes to it before it has its mode; setuid bits stay inside.
        let to = File::options().write(true).create_new(true).mode(0o600).open(new)?;
        copy_content(&from, &to, stop)?;
        to.set_permissions(fs::Permissions::from_mode(stat.st_mode & 0o777))?;
        Ok(rustix::fs::futimens(&to, &times(stat))?)
    })
}

/// Copies a file's bytes; holes stay holes.
fn copy_content(mut from: &File, mut to: &File, stop: &dyn Fn() -> bool) -> io::Result<()> {
    let length = from.metadata()?.len();
    let mut buffer = vec![0; COPY_BYTES];
    let mut at = 0;
    while at < length {
        // Where the file system knows no holes it is all data.
        let start = match rustix::fs::seek(from, rustix::fs::SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(_) => at,
        };
        let end = rustix::fs::seek(from, rustix::fs::SeekFrom::Hole(start)).unwrap_or(length);
        // It is shorter than it was.
        if end <= start {
            break;
        }
        from.seek(SeekFrom::Start(start))?;
        to.seek(SeekFrom::Start(start))?;
        at = start;
        while at < end.min(length) {
            if stop() {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let wanted = COPY_BYTES.min(usize::try_from(end - at).unwrap_or(COPY_BYTES));
            match from.read(&mut buffer[..wanted])? {
                0 => return Ok(()),
                read => {
                    to.write_all(&buffer[..read])?;
                    at += read as u64;
                }
            }
        }
    }
    to.set_len(length)
}

fn copy_folder(
    source: BorrowedFd<'_>,
    target: &Path,
    stat: &Stat,
    stop: &dyn Fn() -> bool,
) -> io::Result<()> {
    if let Err(error) = fs::create_dir(target)
        && !target.symlink_metadata().is_ok_and(|meta| meta.is_dir())
    {
        return Err(error);
    }
    for name in entries(reopen(source, OFlags::RDONLY | OFlags::DIRECTORY)?)? {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let entry = rustix::fs::openat(source, &name, flags, Mode::empty())?;
        copy(entry.as_fd(), &target.join(&name), stop)?;
    }
    fs::set_permissions(target, fs::Permissions::from_mode(stat.st_mode & 0o777 | 0o700))?;
    let folder = File::open(target)?;
    rustix::fs::futimens(&folder, &times(stat))?;
    Ok(())
}

/// Opens what an O_PATH descriptor names; the path that leads there may have changed.
fn reopen(source: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
    use std::os::fd::AsRawFd;
    let path = format!("/proc/self/fd/{}", source.as_raw_fd());
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty())?)
}

fn entries(folder: OwnedFd) -> io::Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in Dir::new(folder)? {
        let name = entry?.file_name().to_bytes().to_vec();
        if name != b"." && name != b".." {
            names.push(std::os::unix::ffi::OsStringExt::from_vec(name));
        }
    }
    Ok(names)
}

fn times(stat: &Stat) -> Timestamps {
    let time = Timespec { tv_sec: stat.st_mtime, tv_nsec: stat.st_mtime_nsec as _ };
    Timestamps { last_access: time, last_modification: time }
}

/// Whether a name fits a pattern: `*` is any characters, `?` is one; a name that begins with a dot only if the
/// pattern does. Takes time in proportion to the product of both lengths at most: the names are the command's.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    if name.first() == Some(&b'.') && pattern.first() != Some(&b'.') {
        return false;
    }
    let (mut in_pattern, mut in_name) = (0, 0);
    // The last `*`, and where in the name what comes after it is tried.
    let mut star = None;
    while in_name < name.len() {
        match pattern.get(in_pattern) {
            Some(b'*') => {
                star = Some((in_pattern, in_name));
                in_pattern += 1;
            }
            Some(&byte) if byte == b'?' || byte == name[in_name] => {
                in_pattern += 1;
                in_name += 1;
            }
            _ => {
                let Some((at, tried)) = star else { return false };
                star = Some((at, tried + 1));
                (in_pattern, in_name) = (at + 1, tried + 1);
            }
        }
    }
    pattern[in_pattern..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns() {
        for (pattern, name, fits) in [
            ("*.deb", "hello_1.deb", true),
            ("*.deb", "hello.changes", false),
            ("*", ".hidden", false),
            (".*", ".hidden", true),
            ("h?llo*", "hello", true),
            ("a*b*c", "aXbXc", true),
            ("a*b*c", "aXbXcX", false),
            ("*", "", true),
            ("?", "", false),
            ("a**", "a", true),
        ] {
            assert_eq!(matches(pattern.as_bytes(), name.as_bytes()), fits, "{pattern} {name}");
        }
        // Tried in all ways this would take for ever.
        assert!(!matches("*-".repeat(40).as_bytes(), "-".repeat(30).as_bytes()));
        assert!(!matches(format!("{}x", "*-".repeat(40)).as_bytes(), "-".repeat(250).as_bytes()));
    }

    #[test]
    fn links_lead_nowhere_outside() {
        let dir = tempfile::tempdir().unwrap();
        let (root, out) = (dir.path().join("root"), dir.path().join("out"));
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::create_dir_all(root.join("build/tree/sub")).unwrap();
        fs::write(root.join("etc/passwd"), "inside").unwrap();
        fs::write(root.join("build/a.deb"), "deb").unwrap();
        fs::write(root.join("build/tree/sub/f"), "f").unwrap();
        std::os::unix::fs::symlink("/etc/passwd", root.join("build/link")).unwrap();
        std::os::unix::fs::symlink("../../../../../etc/passwd", root.join("build/tree/up")).unwrap();
        collect(&root, Path::new("/build/link"), &out, &|| false).unwrap();
        assert_eq!(fs::read_to_string(out.join("link")).unwrap(), "inside");
        let copies = collect(&root, Path::new("/build/*.deb"), &out, &|| false).unwrap();
        assert_eq!(copies, [out.join("a.deb")]);
        collect(&root, Path::new("build/tree"), &out, &|| false).unwrap();
        assert_eq!(fs::read_to_string(out.join("tree/sub/f")).unwrap(), "f");
        assert!(out.join("tree/up").symlink_metadata().unwrap().is_symlink());
        assert!(matches!(collect(&root, Path::new("/none"), &out, &|| false), Err(Error::NotFound(_))));
    }

    #[test]
    fn links_of_other_users_lead_to_what_is_theirs() {
        if !rustix::process::geteuid().is_root() {
            return println!("skipped: only root changes owners");
        }
        let dir = tempfile::tempdir().unwrap();
        let (root, out) = (dir.path().join("root"), dir.path().join("out"));
        fs::create_dir_all(root.join("etc")).unwrap();
        fs::create_dir_all(root.join("home")).unwrap();
        let user = Some(1234);
        for (name, owner) in [("etc/shadow", None), ("home/result", user)] {
            fs::write(root.join(name), name).unwrap();
            std::os::unix::fs::chown(root.join(name), owner, None).unwrap();
        }
        let links = [
            ("latest", "result", user),
            ("secret", "/etc/shadow", user),
            ("folder", "/etc", user),
            ("second", "secret", None),
            ("roots", "../etc/shadow", None),
            ("around", "around", user),
        ];
        for (name, to, owner) in links {
            let link = root.join("home").join(name);
            std::os::unix::fs::symlink(to, &link).unwrap();
            std::os::unix::fs::lchown(&link, owner, None).unwrap();
        }
        let collect = |path: &str| collect(&root, Path::new(path), &out, &|| false);
        collect("/home/latest").unwrap();
        assert_eq!(fs::read_to_string(out.join("latest")).unwrap(), "home/result");
        collect("/home/roots").unwrap();
        for path in ["/home/secret", "/home/folder", "/home/folder/shadow", "/home/second", "/home/s*"] {
            assert!(matches!(collect(path), Err(Error::Denied(_))), "{path}");
        }
        assert!(matches!(collect("/home/around"), Err(Error::Usage(_))));
        assert_eq!(fs::read_dir(&out).unwrap().count(), 2);
    }

    #[test]
    fn no_copy_takes_the_place_of_another() {
        let dir = tempfile::tempdir().unwrap();
        let (root, out) = (dir.path().join("root"), dir.path().join("out"));
        for name in ["b/one", "b/two"] {
            fs::create_dir_all(root.join(name)).unwrap();
            fs::write(root.join(name).join("log"), name).unwrap();
        }
        let refused = collect(&root, Path::new("/b/*/log"), &out, &|| false);
        assert!(matches!(refused, Err(Error::Usage(_))), "{refused:?}");
        assert!(!out.exists());
    }

    #[test]
    fn holes_stay_holes_and_a_file_is_there_when_all_of_it_is() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let (root, out) = (dir.path().join("root"), dir.path().join("out"));
        fs::create_dir(&root).unwrap();
        let mut image = File::create(root.join("image")).unwrap();
        image.seek(SeekFrom::Start(40 << 20)).unwrap();
        image.write_all(b"data").unwrap();
        image.set_len(80 << 20).unwrap();
        collect(&root, Path::new("/image"), &out, &|| false).unwrap();
        let copy = out.join("image");
        let meta = fs::metadata(&copy).unwrap();
        assert_eq!(meta.len(), 80 << 20);
        assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
        assert!(fs::read(&copy).unwrap() == fs::read(root.join("image")).unwrap());
        // One that is not copied to the end leaves what was there.
        fs::write(root.join("image"), "new").unwrap();
        collect(&root, Path::new("/image"), &out, &|| true).unwrap_err();
        assert_eq!(fs::metadata(&copy).unwrap().len(), 80 << 20);
        assert_eq!(fs::read_dir(&out).unwrap().count(), 1);
    }
}
