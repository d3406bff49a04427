//! How long recipes took, kept in a file of the project: which ones are worth a way to another host.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The file's name, in the folder in which make is started.
const FILE: &str = ".hayloft-history";
/// Most recipes that are remembered.
const ENTRIES: usize = 200_000;
/// What takes less runs here: another host would cost about a tenth of it.
const CHEAP_MS: u32 = 40;

/// Commands that do little.
const LITTLE: [&str; 12] =
    [":", "true", "echo", "printf", "mkdir", "rmdir", "rm", "mv", "touch", "test", "ln", "chmod"];

/// Durations by recipe, milliseconds.
#[derive(Debug, Default)]
pub(super) struct History {
    path: PathBuf,
    known: BTreeMap<u64, u32>,
    is_changed: bool,
    /// Recipes of this run.
    seen: BTreeSet<u64>,
}

impl History {
    /// What is known of a project.
    pub(super) fn open(directory: &Path) -> History {
        let path = directory.join(FILE);
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let entry = |line: &str| {
            let (key, ms) = line.split_once(' ')?;
            Some((u64::from_str_radix(key, 16).ok()?, ms.parse().ok()?))
        };
        let known = text.lines().filter_map(entry).take(ENTRIES).collect();
        History { path, known, is_changed: false, seen: BTreeSet::new() }
    }

    /// What the recipes take that are known and were not run yet, once this looks like a build of all of it.
    pub(super) fn left(&self) -> Option<Duration> {
        if self.seen.len() < 5 || self.seen.len() * 10 < self.known.len() {
            return None;
        }
        let left = self.known.iter().filter(|(key, _)| !self.seen.contains(key));
        Some(Duration::from_millis(left.map(|(_, ms)| u64::from(*ms)).sum()))
    }

    /// Whether a recipe took little time before. One that is not known is not cheap, unless all that it does is said by its first word.
    pub(super) fn is_cheap(&self, recipe: &[u8]) -> bool {
        match self.known.get(&key(recipe)) {
            Some(ms) => *ms < CHEAP_MS,
            None => is_trivial(recipe),
        }
    }

    /// A recipe has taken so long.
    pub(super) fn learn(&mut self, recipe: &[u8], took: Duration) {
        let took = u32::try_from(took.as_millis()).unwrap_or(u32::MAX);
        let key = key(recipe);
        self.seen.insert(key);
        if self.known.len() >= ENTRIES && !self.known.contains_key(&key) {
            return;
        }
        let known = self.known.entry(key).or_insert(took);
        let mean = ((u64::from(*known) + u64::from(took)) / 2) as u32;
        self.is_changed |= *known == took || mean != *known;
        *known = mean;
    }

    /// Writes it down. A project that cannot be written to has no history.
    pub(super) fn save(&self) {
        if !self.is_changed {
            return;
        }
        let save = || -> std::io::Result<()> {
            let fresh = self.path.with_extension(format!("{}", std::process::id()));
            let mut file = std::io::BufWriter::new(std::fs::File::create(&fresh)?);
            for (key, ms) in &self.known {
                writeln!(file, "{key:016x} {ms}")?;
            }
            file.into_inner().map_err(|error| error.into_error())?;
            std::fs::rename(&fresh, &self.path)
        };
        if let Err(error) = save() {
            tracing::debug!("{}: {error}", self.path.display());
        }
    }
}

/// FNV-1a, 64 bits: the file outlives this program.
fn key(recipe: &[u8]) -> u64 {
    recipe
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

/// A single command that is known to do little.
fn is_trivial(recipe: &[u8]) -> bool {
    let first = recipe.trim_ascii().split(u8::is_ascii_whitespace).next().unwrap_or_default();
    let is_one = !recipe.iter().any(|byte| b";&|`$\n".contains(byte));
    first.is_empty() || (is_one && LITTLE.iter().any(|little| little.as_bytes() == first))
}

/// What a shell has to look at to know a recipe that does little without asking anybody: `text` is the recipe, `"$@"` the command.
pub(super) fn trivial_in_shell() -> String {
    let little: Vec<String> = LITTLE.iter().map(|name| format!("{name}|{name}\\ *")).collect();
    let more_than_one = "*[\\;\\&\\|\\`\\$'\n']*";
    format!("case $text in {more_than_one}) ;; {}) exec \"$@\" ;; esac\n", little.join("|"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_knows_the_same_recipes() {
        let script = format!("for text; do :; done\n{}echo asks", trivial_in_shell());
        for recipe in [
            ":",
            ": x",
            "echo a b > c",
            "rm -f x",
            "echo",
            "rmx",
            "cc -c x.c",
            "rm x; cc",
            "echo `x`",
            "echo $$",
            "a|b",
            "rm x\ncc",
        ] {
            let shell = ["-c", &script, "recipe", "printf", "here%.0s", recipe];
            let output = std::process::Command::new("sh").args(shell).output().unwrap();
            let expected: &[u8] = if is_trivial(recipe.as_bytes()) { b"here" } else { b"asks\n" };
            assert_eq!(output.stdout, expected, "{recipe}");
        }
    }

    #[test]
    fn what_is_left_is_told_when_much_of_it_was_seen() {
        let dir = tempfile::tempdir().unwrap();
        let mut history = History::open(dir.path());
        (0..60).for_each(|at| history.learn(format!("cc {at}.c").as_bytes(), Duration::from_secs(1)));
        history.save();
        let mut history = History::open(dir.path());
        (0..5).for_each(|at| history.learn(format!("cc {at}.c").as_bytes(), Duration::from_secs(1)));
        assert_eq!(history.left(), None);
        history.learn(b"cc 5.c", Duration::from_secs(1));
        assert_eq!(history.left(), Some(Duration::from_secs(54)));
    }

    #[test]
    fn what_was_learnt_is_known_the_next_time() {
        let dir = tempfile::tempdir().unwrap();
        let mut history = History::open(dir.path());
        assert!(
            !history.is_cheap(b"cc -c a.c") && history.is_cheap(b"echo a") && !history.is_cheap(b"rm x; cc")
        );
        history.learn(b"cc -c a.c", Duration::from_millis(5));
        history.learn(b"cc -c b.c", Duration::from_secs(5));
        history.learn(b"echo a", Duration::from_secs(5));
        history.save();
        let history = History::open(dir.path());
        assert!(
            history.is_cheap(b"cc -c a.c") && !history.is_cheap(b"cc -c b.c") && !history.is_cheap(b"echo a")
        );
    }
}
