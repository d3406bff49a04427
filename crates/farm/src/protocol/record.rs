//! Which files a task has read and written.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use prost::Message;

/// Longest record, bytes, as it is sent: messages of a broker are limited to 1 MiB.
const MAX: usize = 512 << 10;

/// A file, after the one before.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Accessed {
    /// So many bytes of its path are those of the path before.
    #[prost(uint32, tag = "1")]
    pub kept: u32,
    /// The others.
    #[prost(bytes = "vec", tag = "2")]
    pub rest: Vec<u8>,
    /// It was open for reading.
    #[prost(bool, tag = "3")]
    pub read: bool,
    /// It was open for writing.
    #[prost(bool, tag = "4")]
    pub written: bool,
}

/// What a task has opened, as a message.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Record {
    /// The files, in the order of their paths.
    #[prost(message, repeated, tag = "1")]
    pub files: Vec<Accessed>,
    /// Files that were opened and are not named here.
    #[prost(uint64, tag = "2")]
    pub lost: u64,
}

/// What a task has opened.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files {
    /// Files that were open for reading.
    pub read: BTreeSet<PathBuf>,
    /// Files that were open for writing.
    pub written: BTreeSet<PathBuf>,
    /// How many others it has opened, which are not known.
    pub lost: u64,
}

impl Record {
    /// Of files in the order of their paths: path, read, written.
    pub(crate) fn of(files: impl Iterator<Item = (Vec<u8>, bool, bool)>, lost: u64) -> Record {
        let mut record = Record { files: Vec::new(), lost };
        let (mut before, mut length) = (Vec::new(), 0);
        for (path, read, written) in files {
            let kept = before.iter().zip(&path).take_while(|(a, b)| a == b).count();
            let file = Accessed { kept: kept as u32, rest: path[kept..].to_vec(), read, written };
            // Its key and its length are before it.
            length += file.encoded_len() + 4;
            if length > MAX {
                record.lost += 1;
                continue;
            }
            record.files.push(file);
            before = path;
        }
        record
    }

    /// The same, where files below the first folder are seen below the second.
    pub(crate) fn shown(self, at: Option<&(PathBuf, PathBuf)>) -> Record {
        let Some((from, to)) = at else { return self };
        let lost = self.lost;
        let shown =
            |path: PathBuf| path.strip_prefix(from).map(|below| to.join(below)).unwrap_or(path.clone());
        let files: BTreeMap<_, _> = self.paths().map(|(path, file)| (shown(path), file)).collect();
        let path = |path: PathBuf| path.into_os_string().into_vec();
        Record::of(files.into_iter().map(|(at, (read, written))| (path(at), read, written)), lost)
    }

    fn paths(self) -> impl Iterator<Item = (PathBuf, (bool, bool))> {
        let mut path = Vec::new();
        self.files.into_iter().map(move |file| {
            path.truncate(file.kept as usize);
            path.extend(&file.rest);
            (PathBuf::from(OsString::from_vec(path.clone())), (file.read, file.written))
        })
    }
}

impl From<Record> for Files {
    fn from(record: Record) -> Files {
        let mut files = Files { lost: record.lost, ..Files::default() };
        for (path, (read, written)) in record.paths() {
            if written {
                files.written.insert(path.clone());
            }
            if read {
                files.read.insert(path);
            }
        }
        files
    }
}

impl Files {
    /// Adds what another task of the same rule has opened.
    pub(crate) fn add(&mut self, other: Files) {
        self.read.extend(other.read);
        self.written.extend(other.written);
        self.lost += other.lost;
    }

    /// What was read that it has not written, below this folder or outside of it.
    pub(crate) fn only_read(&self, below: &Path, is_below: bool) -> impl Iterator<Item = &PathBuf> {
        let here = move |path: &&PathBuf| path.starts_with(below) == is_below;
        self.read.iter().filter(|path| !self.written.contains(*path)).filter(here)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(files: &[(&str, bool, bool)]) -> Record {
        Record::of(files.iter().map(|(path, read, written)| (path.as_bytes().to_vec(), *read, *written)), 0)
    }

    #[test]
    fn files_are_as_they_were() {
        let all = [("/a/b", true, false), ("/a/bc", false, true), ("/usr/x", true, true)];
        let sent = Record::decode(&*record(&all).encode_to_vec()).unwrap();
        let files = Files::from(sent.shown(Some(&("/a".into(), "/z/q".into()))));
        assert_eq!(files.read, BTreeSet::from(["/z/q/b".into(), "/usr/x".into()]));
        assert_eq!(files.written, BTreeSet::from(["/z/q/bc".into(), "/usr/x".into()]));
        assert_eq!(files.only_read(Path::new("/z"), true).count(), 1);
        assert_eq!(files.only_read(Path::new("/z"), false).count(), 0);
    }

    #[test]
    fn a_record_fits_into_a_message_and_says_what_it_lacks() {
        let files = (0..60_000).map(|at| (format!("/{at:06}{}", "x".repeat(30)).into_bytes(), true, false));
        let record = Record::of(files, 5);
        assert!(record.encoded_len() <= MAX);
        assert_eq!(record.files.len() as u64 + record.lost, 60_005);
        assert_eq!(Files::from(record.clone()).read.len(), record.files.len());
        assert!(record.lost > 5);
    }
}
