//! Promises of the documents name tests that there are: a table of `docs/` with a column "test" has in each of its lines the name of one
//! at least, and every name there is that of a test, of a module with tests, of a rule of the simulator, or of a script.

use std::fs;
use std::path::{Path, PathBuf};

/// What columns with tests begin with.
const COLUMNS: [&str; 3] = ["test", "simulator", "real mounts"];

/// Instead of a name: those of the line above, and all of the simulator.
const WORDS: [&str; 3] = ["the same", "the random steps above", "imulator"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap()
}

fn files_below(dir: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            files_below(&path, extension, found);
        } else if path.extension().is_some_and(|of| of == extension) {
            found.push(path);
        }
    }
}

/// The modules of a file of `crates`, the crate first.
fn modules_of(path: &Path) -> Vec<String> {
    let parts = path.with_extension("");
    let parts = parts.iter().map(|part| part.to_string_lossy().into_owned());
    let mut modules: Vec<String> =
        parts.filter(|part| !["src", "mod", "lib", "main"].contains(&part.as_str())).collect();
    if let Some(of) = modules.last().and_then(|last| last.strip_suffix("_tests")).map(str::to_owned) {
        modules.pop();
        modules.extend([of, "tests".to_owned()]);
    }
    modules
}

/// The name of a function that a line begins.
fn function(line: &str) -> Option<&str> {
    let line = line.trim_start();
    let line = line.strip_prefix("pub ").unwrap_or(line);
    let line = line.strip_prefix("async ").unwrap_or(line);
    line.strip_prefix("fn ")?.split(['(', '<']).next()
}

/// The paths of all tests: crate, modules, function.
fn tests(root: &Path) -> Vec<Vec<String>> {
    let (mut files, mut tests) = (Vec::new(), Vec::new());
    files_below(&root.join("crates"), "rs", &mut files);
    for file in files {
        let mut modules = modules_of(file.strip_prefix(root.join("crates")).unwrap());
        let (text, mut is_test) = (fs::read_to_string(&file).unwrap(), false);
        for line in text.lines().map(str::trim_start) {
            if line == "mod tests {" {
                modules.push("tests".to_owned());
            }
            is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
            if let Some(name) = function(line).filter(|_| std::mem::take(&mut is_test)) {
                tests.push([&modules[..], &[name.to_owned()]].concat());
            }
        }
    }
    tests
}

/// Whether a name with at most one `*` is meant.
fn is_like(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        Some((begin, end)) => {
            name.len() >= begin.len() + end.len() && name.starts_with(begin) && name.ends_with(end)
        }
        None => pattern == name,
    }
}

/// The cells of a line of a table.
fn cells(line: &str) -> Vec<String> {
    let line = line.trim().trim_matches('|').replace("\\|", "\0");
    line.split('|').map(|cell| cell.trim().replace('\0', "|")).collect()
}

/// What stands between backticks.
fn names(cell: &str) -> Vec<&str> {
    cell.split('`').skip(1).step_by(2).collect()
}

struct Sources {
    root: PathBuf,
    tests: Vec<Vec<String>>,
    /// The simulator's source.
    rules: String,
}

impl Sources {
    fn new() -> Sources {
        let root = root();
        Sources {
            tests: tests(&root),
            rules: fs::read_to_string(root.join("crates/sim/src/lib.rs")).unwrap(),
            root,
        }
    }

    fn has(&self, name: &str) -> bool {
        let name = name.split(' ').next().unwrap_or(name);
        if name.contains('/') {
            return self.root.join(name).exists();
        }
        if self.rules.contains(&format!("\"{name}\"")) {
            return true;
        }
        let path: Vec<&str> = name.strip_prefix("hayloft-").unwrap_or(name).split("::").collect();
        self.tests.iter().any(|test| {
            test.windows(path.len()).any(|part| path.iter().zip(part).all(|(of, name)| is_like(of, name)))
        })
    }
}

/// Whether it names a test at all, and no option, variable or command.
fn is_name(text: &str) -> bool {
    let begins = text.starts_with(|first: char| first.is_ascii_lowercase());
    begins && !text.starts_with("hayloft ") && !text.starts_with("verify ") && !text.starts_with("*.")
}

#[test]
fn promises_name_tests_that_there_are() {
    let sources = Sources::new();
    assert!(sources.has("promises::promises_name_*") && !sources.has("promises::promises_nobody_made"));
    let (mut documents, mut wrong, mut tables, mut looked_at) = (Vec::new(), Vec::new(), 0, 0);
    files_below(&sources.root.join("docs"), "md", &mut documents);
    // Decisions stay as they were taken.
    documents.retain(|path| !path.components().any(|part| part.as_os_str() == "adr"));
    for path in documents {
        let text = fs::read_to_string(&path).unwrap();
        // Of the table that the line is in: the columns that name tests.
        let mut columns: Option<Vec<usize>> = None;
        for (at, line) in text.lines().enumerate() {
            let place = format!("{}:{}", path.file_name().unwrap().to_string_lossy(), at + 1);
            if !line.starts_with('|') {
                columns = None;
                continue;
            }
            let cells = cells(line);
            let Some(columns) = &columns else {
                if !text.lines().nth(at + 1).is_some_and(|next| next.starts_with("|--")) {
                    wrong.push(format!("{place}: a table without a heading"));
                }
                let names_tests = |at: &usize| COLUMNS.iter().any(|name| cells[*at].starts_with(name));
                let found: Vec<usize> = (0..cells.len()).filter(names_tests).collect();
                tables += usize::from(!found.is_empty());
                columns = Some(found);
                continue;
            };
            if columns.is_empty() || cells[0].starts_with("--") {
                continue;
            }
            let all: Vec<&String> = columns.iter().filter_map(|column| cells.get(*column)).collect();
            let named: Vec<&str> =
                all.iter().flat_map(|cell| names(cell)).filter(|name| is_name(name)).collect();
            if named.is_empty() && !all.iter().any(|cell| WORDS.iter().any(|word| cell.contains(word))) {
                wrong.push(format!("{place}: no test is named: {all:?}"));
            }
            looked_at += named.len();
            let missing = named.into_iter().filter(|name| !sources.has(name));
            wrong.extend(missing.map(|name| format!("{place}: there is no {name}")));
        }
    }
    assert!(tables > 15 && looked_at > 200, "{tables} tables, {looked_at} names");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
