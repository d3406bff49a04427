//! The phases of the workload `tree`. Each returns what it took, and fails with the path at the first thing
//! that is not as it was written.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use super::content::{Content, patches};
use super::shape::{FilePlan, Plan};
use crate::report::Measurement;
use crate::rng::Rng;
use crate::sys;

/// The largest single write or read.
const PIECE_BYTES: usize = 64 << 10;

/// A tree to be written to, read from and deleted in one directory.
pub(crate) struct Tree<'a> {
    root: &'a Path,
    plan: &'a Plan,
    content: &'a Content,
    /// All paths, made beforehand.
    directories: Vec<PathBuf>,
    sources: Vec<(PathBuf, &'a FilePlan)>,
    outputs: Vec<(PathBuf, &'a FilePlan)>,
}

/// Time since the start, of which some was our own.
struct Clock {
    started: Instant,
    own: Duration,
}

impl Clock {
    fn start() -> Self {
        Clock { started: Instant::now(), own: Duration::ZERO }
    }

    fn own<T>(&mut self, work: impl FnOnce() -> T) -> T {
        let started = Instant::now();
        let done = work();
        self.own += started.elapsed();
        done
    }

    fn stop(self, files: usize, bytes: u64) -> Measurement {
        Measurement {
            seconds: self.started.elapsed().as_secs_f64(),
            own_seconds: self.own.as_secs_f64(),
            bytes,
            files: files as u64,
        }
    }
}

impl<'a> Tree<'a> {
    pub(crate) fn new(root: &'a Path, plan: &'a Plan, content: &'a Content) -> Self {
        let located = |files: &'a [FilePlan]| files.iter().map(|f| (root.join(&f.path), f)).collect();
        Tree {
            root,
            plan,
            content,
            directories: plan.directories.iter().map(|d| root.join(d)).collect(),
            sources: located(&plan.sources),
            outputs: located(&plan.outputs),
        }
    }

    /// Writes the sources, as unpacking an archive does.
    pub(crate) fn create(&self) -> Result<Measurement> {
        let mut writer = Writer::new(self.content);
        for directory in &self.directories {
            fs::create_dir(directory).with_context(|| shown(directory))?;
        }
        for (path, file) in &self.sources {
            writer.write_source(path, file).with_context(|| shown(path))?;
        }
        Ok(writer.clock.stop(self.sources.len(), self.plan.source_bytes()))
    }

    /// Writes the outputs, as assemblers and linkers do.
    pub(crate) fn compile(&self) -> Result<Measurement> {
        let mut writer = Writer::new(self.content);
        for (path, file) in &self.outputs {
            writer.write_output(path, file).with_context(|| shown(path))?;
        }
        Ok(writer.clock.stop(self.outputs.len(), self.plan.output_bytes()))
    }

    /// Waits until everything is durable.
    pub(crate) fn sync(&self) -> Result<Measurement> {
        let clock = Clock::start();
        let root = File::open(self.root)?;
        sys::syncfs(&root).context("syncfs")?;
        // The kernel does not pass syncfs on to every FUSE file system; fsync of what was written last it does.
        if let Some((path, _)) = self.outputs.last() {
            File::open(path).and_then(|f| f.sync_all()).with_context(|| shown(path))?;
        }
        root.sync_all().with_context(|| shown(self.root))?;
        let bytes = self.plan.source_bytes() + self.plan.output_bytes();
        Ok(clock.stop(self.sources.len() + self.outputs.len(), bytes))
    }

    /// Reads and checks every file, in the order of the tree.
    pub(crate) fn read(&self) -> Result<Measurement> {
        let mut files: Vec<_> = self.sources.iter().chain(&self.outputs).collect();
        files.sort_by_key(|(path, _)| path);
        let mut piece = vec![0; PIECE_BYTES];
        let mut clock = Clock::start();
        let mut bytes = 0;
        for (path, file) in files {
            bytes += self.read_file(path, file, &mut piece, &mut clock).with_context(|| shown(path))?;
        }
        Ok(clock.stop(self.sources.len() + self.outputs.len(), bytes))
    }

    fn read_file(&self, path: &Path, file: &FilePlan, piece: &mut [u8], clock: &mut Clock) -> Result<u64> {
        sys::check_interrupted()?;
        let mut input = File::open(path)?;
        let places: Vec<u64> = match file.kind {
            super::shape::Kind::Source => Vec::new(),
            super::shape::Kind::Output => patches(file).iter().map(|(at, _)| *at).collect(),
        };
        let mut offset = 0;
        loop {
            let len = input.read(piece)?;
            if len == 0 {
                break;
            }
            if offset + len as u64 > file.bytes {
                bail!("wrong content: longer than the {} bytes written", file.bytes);
            }
            clock
                .own(|| self.content.check(file, offset, &piece[..len], &places))
                .map_err(|at| anyhow::anyhow!("wrong content at byte {at} of {}", file.bytes))?;
            offset += len as u64;
        }
        ensure!(offset == file.bytes, "wrong content: {offset} bytes long, {} were written", file.bytes);
        Ok(offset)
    }

    /// Lists every directory and asks for the attributes of every entry, as `find` and `make` do.
    pub(crate) fn stat(&self) -> Result<Measurement> {
        let clock = Clock::start();
        let mut found = Found::default();
        found.walk(self.root)?;
        let entries = found.files + found.directories;
        let measured = clock.stop(entries, found.bytes);
        let bytes = self.plan.source_bytes() + self.plan.output_bytes();
        let files = self.sources.len() + self.outputs.len();
        if (found.files, found.directories, found.bytes) != (files, self.directories.len(), bytes) {
            self.name_the_difference(&found)?;
        }
        Ok(measured)
    }

    /// A listing was wrong: says where.
    fn name_the_difference(&self, found: &Found) -> Result<()> {
        for (path, file) in self.sources.iter().chain(&self.outputs) {
            let len = fs::symlink_metadata(path).with_context(|| shown(path))?.len();
            ensure!(
                len == file.bytes,
                "{}: lstat says {len} bytes, {} were written",
                path.display(),
                file.bytes
            );
        }
        bail!(
            "the listings of {} hold {} files, {} directories and {} bytes, but {}, {} and {} were written",
            self.root.display(),
            found.files,
            found.directories,
            found.bytes,
            self.sources.len() + self.outputs.len(),
            self.directories.len(),
            self.plan.source_bytes() + self.plan.output_bytes(),
        )
    }

    /// Deletes everything, as `rm -r` does.
    pub(crate) fn delete(&self) -> Result<Measurement> {
        sys::check_interrupted()?;
        let clock = Clock::start();
        fs::remove_dir_all(self.root).with_context(|| shown(self.root))?;
        Ok(clock.stop(self.sources.len() + self.outputs.len() + self.directories.len(), 0))
    }
}

/// Writes files one after the other; making up what they hold is not part of the time.
struct Writer<'a> {
    content: &'a Content,
    piece: Vec<u8>,
    clock: Clock,
}

impl<'a> Writer<'a> {
    fn new(content: &'a Content) -> Self {
        Writer { content, piece: vec![0; PIECE_BYTES], clock: Clock::start() }
    }

    /// In pieces of the same size.
    fn write_source(&mut self, path: &Path, file: &FilePlan) -> io::Result<()> {
        sys::check_interrupted()?;
        let mut out = OpenOptions::new().write(true).create_new(true).open(path)?;
        self.write_in_order(&mut out, file, &[], || PIECE_BYTES)
    }

    /// Writes of 4 to 64 KiB in order; what is known only later is left zero and written at the end.
    fn write_output(&mut self, path: &Path, file: &FilePlan) -> io::Result<()> {
        sys::check_interrupted()?;
        let patches = patches(file);
        let mut out = OpenOptions::new().read(true).write(true).create(true).truncate(true).open(path)?;
        let mut rng = Rng::new(file.id ^ 1);
        self.write_in_order(&mut out, file, &patches, || 4096 << rng.below(5))?;
        for (at, len) in patches {
            self.clock.own(|| self.content.fill(file, at, &mut self.piece[..len]));
            out.write_all_at(&self.piece[..len], at)?;
        }
        Ok(())
    }

    /// From the first byte to the last; `blanks` are left zero.
    fn write_in_order(
        &mut self,
        out: &mut File,
        file: &FilePlan,
        blanks: &[(u64, usize)],
        mut next_len: impl FnMut() -> usize,
    ) -> io::Result<()> {
        let mut offset = 0;
        while offset < file.bytes {
            let len = next_len().min((file.bytes - offset) as usize);
            let piece = &mut self.piece[..len];
            self.clock.own(|| {
                self.content.fill(file, offset, piece);
                blanks.iter().for_each(|blank| zero(piece, offset, *blank));
            });
            out.write_all(piece)?;
            offset += len as u64;
        }
        Ok(())
    }
}

/// Zeroes the part of `patch` that lies in `piece`, which begins at `offset`.
fn zero(piece: &mut [u8], offset: u64, (at, len): (u64, usize)) {
    let end = offset + piece.len() as u64;
    let (first, last) = (at.max(offset), (at + len as u64).min(end));
    if first < last {
        piece[(first - offset) as usize..(last - offset) as usize].fill(0);
    }
}

/// What a walk came by.
#[derive(Default)]
struct Found {
    files: usize,
    directories: usize,
    bytes: u64,
}

impl Found {
    fn walk(&mut self, directory: &Path) -> Result<()> {
        sys::check_interrupted()?;
        let mut below = Vec::new();
        for entry in fs::read_dir(directory).with_context(|| shown(directory))? {
            let path = entry.with_context(|| shown(directory))?.path();
            let metadata = fs::symlink_metadata(&path).with_context(|| shown(&path))?;
            if metadata.is_dir() {
                self.directories += 1;
                below.push(path);
            } else {
                self.files += 1;
                self.bytes += metadata.len();
            }
        }
        below.iter().try_for_each(|path| self.walk(path))
    }
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::WorkDir;

    /// A small tree in a temporary directory, compiled, then damaged by `damage`.
    fn read_and_stat_after(name: &str, damage: impl FnOnce(&Tree<'_>)) -> (Result<()>, Result<()>) {
        let (plan, content) = (Plan::new(5, 0.01), Content::new(5));
        let work = WorkDir::create(&std::env::temp_dir(), name).unwrap();
        let tree = Tree::new(work.path(), &plan, &content);
        tree.create().unwrap();
        tree.compile().unwrap();
        damage(&tree);
        let results = (tree.read().map(drop), tree.stat().map(drop));
        tree.delete().unwrap();
        assert!(!work.path().exists());
        results
    }

    #[test]
    fn a_right_tree_passes() {
        let (read, stat) = read_and_stat_after("right", |_| ());
        assert!(read.is_ok() && stat.is_ok(), "{read:?} {stat:?}");
    }

    #[test]
    fn damage_is_found_and_named() {
        let path_of = |tree: &Tree<'_>| tree.sources[100].0.clone();
        let mut path = PathBuf::new();
        let (read, _) = read_and_stat_after("swapped", |tree| {
            path = path_of(tree);
            let other = fs::read(&tree.sources[101].0).unwrap();
            fs::write(&path, &other).unwrap();
        });
        assert!(format!("{:#}", read.unwrap_err()).contains(path.to_str().unwrap()));
        let (read, stat) = read_and_stat_after("short", |tree| {
            path = path_of(tree);
            File::options().write(true).open(&path).unwrap().set_len(tree.sources[100].1.bytes - 1).unwrap();
        });
        for result in [read, stat] {
            let error = format!("{:#}", result.unwrap_err());
            assert!(error.contains(path.to_str().unwrap()), "{error}");
        }
        let (read, stat) = read_and_stat_after("extra", |tree| {
            fs::write(tree.root.join("extra"), b"").unwrap();
        });
        assert!(read.is_ok() && stat.unwrap_err().to_string().contains("listings"));
    }

    #[test]
    fn a_lost_patch_is_found() {
        let (read, _) = read_and_stat_after("patch", |tree| {
            let (path, file) = tree.outputs.iter().find(|(_, f)| patches(f).len() > 1).unwrap();
            let (at, len) = patches(file)[1];
            File::options().write(true).open(path).unwrap().write_all_at(&vec![0; len], at).unwrap();
        });
        assert!(format!("{:#}", read.unwrap_err()).contains("wrong content at byte"));
    }
}
