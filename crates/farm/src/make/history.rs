//! How long recipes took, kept in a file of the project: which ones are worth a way to another host.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The file's name, in the folder in which make is started.
const FILE: &str = ".hayloft-history";
/// Most recipes that are remembered.
const ENTRIES: usize = 200_000;
/// What takes less runs here: another host would cost about a tenth of it.
const CHEAP_MS: u32 = 40;

/// Durations by recipe, milliseconds.
#[derive(Debug, Default)]
pub(super) struct History {
    path: PathBuf,
    known: BTreeMap<u64, u32>,
    is_changed: bool,
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
        History { path, known: text.lines().filter_map(entry).take(ENTRIES).collect(), is_changed: false }
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
    const LITTLE: [&[u8]; 12] = [
        b":", b"true", b"echo", b"printf", b"mkdir", b"rmdir", b"rm", b"mv", b"touch", b"test", b"ln",
        b"chmod",
    ];
    let first = recipe.trim_ascii().split(u8::is_ascii_whitespace).next().unwrap_or_default();
    let is_one = !recipe.iter().any(|byte| b";&|`$\n".contains(byte));
    first.is_empty() || (is_one && LITTLE.contains(&first))
}

#[cfg(test)]
mod tests {
    use super::*;

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
