//! Rules: which recipe a task is, and what make knows of what comes before what.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

/// A rule: a target of a make that was started in a folder.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rule {
    /// The folder.
    pub directory: PathBuf,
    /// The target, as make has it.
    pub target: PathBuf,
}

impl Rule {
    /// The target as a file, though there may be none of that name.
    pub(super) fn file(&self) -> PathBuf {
        clean(&self.directory.join(&self.target))
    }
}

/// Rules that a recipe belongs to, the outermost first: its own, and before that the one whose recipe has started its make. Each as folder,
/// tab, target and line end.
pub(super) fn chain(text: &[u8]) -> Vec<Rule> {
    let path = |bytes: &[u8]| PathBuf::from(OsStr::from_bytes(bytes));
    let rule = |line: &[u8]| {
        let at = line.iter().position(|byte| *byte == b'\t')?;
        Some(Rule { directory: path(&line[..at]), target: path(&line[at + 1..]) })
    };
    text.split(|byte| *byte == b'\n').filter_map(rule).collect()
}

/// One more rule of a chain.
pub(in crate::make) fn link(chain: &mut Vec<u8>, directory: &Path, target: &[u8]) {
    chain.extend(directory.as_os_str().as_bytes());
    chain.push(b'\t');
    chain.extend(target);
    chain.push(b'\n');
}

/// Without `.` and `..`, as the path reads.
fn clean(path: &Path) -> PathBuf {
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => drop(clean.pop()),
            other => clean.push(other),
        }
    }
    clean
}

/// What is made after what: files, and targets as if they were files.
#[derive(Debug, Clone, Default)]
pub struct Graph {
    before: BTreeMap<PathBuf, BTreeSet<PathBuf>>,
}

impl Graph {
    /// Reads what `make -p` prints, that of makes within it too, if these ran one after the other.
    pub fn read(text: &[u8]) -> Graph {
        let mut graph = Graph::default();
        let (mut directory, mut in_files) = (PathBuf::new(), false);
        for line in text.split(|byte| *byte == b'\n') {
            if let Some(path) = line.strip_prefix(b"CURDIR := ") {
                directory = PathBuf::from(OsStr::from_bytes(path));
            } else if line == b"# Files" {
                in_files = true;
            } else if line.starts_with(b"# files hash-table stats") {
                in_files = false;
            } else if in_files && !line.starts_with(b"#") && !line.starts_with(b"\t") {
                graph.read_rule(&directory, line);
            }
        }
        graph
    }

    fn read_rule(&mut self, directory: &Path, line: &[u8]) {
        let Some(at) = line.iter().position(|byte| *byte == b':') else { return };
        let (target, others) = (&line[..at], &line[at + 1..]);
        let others = others.strip_prefix(b":").unwrap_or(others);
        let file = |name: &[u8]| clean(&directory.join(OsStr::from_bytes(name)));
        // Behind the bar are those that need only be there before.
        let others = others.split(u8::is_ascii_whitespace).filter(|name| !name.is_empty() && *name != b"|");
        self.before.entry(file(target)).or_default().extend(others.map(file));
    }

    /// Whether anything is known.
    pub fn is_empty(&self) -> bool {
        self.before.is_empty()
    }

    /// All that has to be there before a file is made, as far as rules say so.
    pub(super) fn all_before(&self, file: &Path) -> BTreeSet<&Path> {
        let of = |file: &Path| self.before.get(file).into_iter().flatten().map(PathBuf::as_path);
        let mut found = BTreeSet::new();
        let mut next: Vec<&Path> = of(file).collect();
        while let Some(file) = next.pop() {
            if found.insert(file) {
                next.extend(of(file));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_make_prints_is_understood() {
        let text = b"# Variables\nX = a: b\nCURDIR := /v/sub\n# Implicit Rules\n%.o: %.c\n# Files\n\n# Not a target:\nb.c:\n\n\
            all: x ../gen.h | out\n#  recipe to execute\n\techo: no\n\nx:: b.c ./a.c\n# files hash-table stats:\n# Files: no\n\
            CURDIR := /v\n# Files\ngen.h: gen\n# files hash-table stats:\ny: z\n";
        let graph = Graph::read(text);
        let before = graph.all_before(Path::new("/v/sub/all"));
        let names: Vec<_> = before.iter().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(names, ["/v/gen", "/v/gen.h", "/v/sub/a.c", "/v/sub/b.c", "/v/sub/out", "/v/sub/x"]);
        assert!(graph.all_before(Path::new("/v/y")).is_empty());
    }

    #[test]
    fn rules_of_makes_within_makes_are_told_apart() {
        let mut text = Vec::new();
        link(&mut text, Path::new("/v"), b"all");
        link(&mut text, Path::new("/v/sub"), b"./x");
        let chain = chain(&text);
        assert_eq!(chain.len(), 2);
        assert_eq!((chain[0].file(), chain[1].file()), ("/v/all".into(), "/v/sub/x".into()));
    }
}
