//! How long recipes took and how much memory, kept in a file of the project: which ones are worth a way to another host, and what they need there.

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

/// What needs no more than this asks for nothing, MiB: every slot has it.
const LITTLE_MIB: u64 = 64;

/// Commands that do little.
const LITTLE: [&str; 12] =
    [":", "true", "echo", "printf", "mkdir", "rmdir", "rm", "mv", "touch", "test", "ln", "chmod"];

/// What is known of a recipe.
#[derive(Debug, Clone, Copy, Default)]
struct Known {
    /// How long it takes, milliseconds.
    ms: u32,
    /// Most memory that any of its processes had resident, MiB; 0 when that is not known.
    mib: u32,
}

/// What is known of recipes.
#[derive(Debug, Default)]
pub(super) struct History {
    path: PathBuf,
    known: BTreeMap<u64, Known>,
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
            let mut words = line.split(' ');
            let key = u64::from_str_radix(words.next()?, 16).ok()?;
            let ms = words.next()?.parse().ok()?;
            Some((key, Known { ms, mib: words.next().map_or(Some(0), |mib| mib.parse().ok())? }))
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
        Some(Duration::from_millis(left.map(|(_, known)| u64::from(known.ms)).sum()))
    }

    /// Whether a recipe took little time before. One that is not known is not cheap, unless all that it does is said by its first word.
    pub(super) fn is_cheap(&self, recipe: &[u8]) -> bool {
        match self.known.get(&key(recipe)) {
            Some(known) => known.ms < CHEAP_MS,
            None => is_trivial(recipe),
        }
    }

    /// How long a recipe is expected to take; zero when that is not known.
    pub(super) fn expected(&self, recipe: &[u8]) -> Duration {
        self.known.get(&key(recipe)).map_or(Duration::ZERO, |known| Duration::from_millis(known.ms.into()))
    }

    /// The memory that a recipe asks for, bytes: what it had before and a quarter more; 0 when that is little or not known.
    pub(super) fn memory(&self, recipe: &[u8]) -> u64 {
        self.known.get(&key(recipe)).map_or(0, |known| with_headroom(known.mib.into())) << 20
    }

    /// A recipe has taken so long, and so many bytes of memory at most if that is known.
    pub(super) fn learn(&mut self, recipe: &[u8], took: Duration, peak: Option<u64>) {
        let took = u32::try_from(took.as_millis()).unwrap_or(u32::MAX);
        let key = key(recipe);
        self.seen.insert(key);
        let before = self.known.get(&key).copied();
        if self.known.len() >= ENTRIES && before.is_none() {
            return;
        }
        let mib = |peak: u64| u32::try_from(peak.div_ceil(1 << 20)).unwrap_or(u32::MAX);
        let (before, is_new) = (before.unwrap_or(Known { ms: took, mib: 0 }), before.is_none());
        let mean = ((u64::from(before.ms) + u64::from(took)) / 2) as u32;
        // More is believed at once, less by and by.
        let mib =
            peak.map_or(before.mib, |peak| mib(peak).max((before.mib / 2).saturating_add(mib(peak) / 2)));
        self.is_changed |= is_new || (mean, mib) != (before.ms, before.mib);
        self.known.insert(key, Known { ms: mean, mib });
    }

    /// Writes it down. A project that cannot be written to has no history.
    pub(super) fn save(&self) {
        if !self.is_changed {
            return;
        }
        let save = || -> std::io::Result<()> {
            let fresh = self.path.with_extension(format!("{}", std::process::id()));
            let mut file = std::io::BufWriter::new(std::fs::File::create(&fresh)?);
            for (key, Known { ms, mib }) in &self.known {
                writeln!(file, "{key:016x} {ms} {mib}")?;
            }
            file.into_inner().map_err(|error| error.into_error())?;
            std::fs::rename(&fresh, &self.path)
        };
        if let Err(error) = save() {
            tracing::debug!("{}: {error}", self.path.display());
        }
    }
}

/// A quarter more, in steps of a quarter of a power of two: few different needs are found room for faster. All of it MiB.
fn with_headroom(mib: u64) -> u64 {
    if mib <= LITTLE_MIB {
        return 0;
    }
    let more = mib + mib / 4;
    more.next_multiple_of((more.next_power_of_two() / 8).max(1))
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

/// What a shell has to look at to know a recipe that does little without asking anybody: `text` is the recipe, `"$@"` the command. Where make would
/// start no shell (see [`direct`](super::direct)), it is not started here either; what cannot be seen without looking into quotes is asked.
pub(super) fn trivial_in_shell() -> String {
    let little: Vec<String> = LITTLE.iter().map(|name| format!("{name}|{name}\\ *")).collect();
    let little = little.join("|");
    format!(
        "case $text in *[\\;\\&\\|\\`\\$'\n']*) ;; {little})\n\
         case $1$2$# in /bin/sh-c3) case $text in *[\\#\\\"\\*\\?\\<\\>\\(\\)\\{{\\}}\\^\\~\\!\\[]*|*\\]*|test*) ;; :*) exit 0 ;; *) eval \"exec $text\" ;; esac ;; esac\n\
         case $text in *\\'*) ;; *) exec \"$@\" ;; esac ;;\nesac\n"
    )
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
    fn what_make_runs_without_a_shell_is_no_command_of_the_shell() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("echo");
        crate::testing::write_program(&program, "#!/bin/sh\nprintf 'program %s' \"$*\"\n");
        let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
        let script = format!("for text; do :; done\n{}printf asks", trivial_in_shell());
        let expected = [
            ("echo -e x=y", "program -e x=y"),
            ("echo", "program "),
            ("echo x > y", ""),
            ("echo 'x;y'", "asks"),
            ("echo 'a b'", "program a b"),
            ("echo '(x)'", "asks"),
            ("echo \"x\"", "x\n"),
            ("echo a\\b", "program ab"),
            (": x", ""),
            ("test x = x", ""),
        ];
        for (recipe, expected) in expected {
            let shell = ["-c", &script, "recipe", "/bin/sh", "-c", recipe];
            let mut shell_of_make = std::process::Command::new("sh");
            let output =
                shell_of_make.args(shell).current_dir(dir.path()).env("PATH", &path).output().unwrap();
            assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{recipe}");
        }
    }

    #[test]
    fn what_is_left_is_told_when_much_of_it_was_seen() {
        let dir = tempfile::tempdir().unwrap();
        let mut history = History::open(dir.path());
        (0..60).for_each(|at| history.learn(format!("cc {at}.c").as_bytes(), Duration::from_secs(1), None));
        history.save();
        let mut history = History::open(dir.path());
        (0..5).for_each(|at| history.learn(format!("cc {at}.c").as_bytes(), Duration::from_secs(1), None));
        assert_eq!(history.left(), None);
        history.learn(b"cc 5.c", Duration::from_secs(1), None);
        assert_eq!(history.left(), Some(Duration::from_secs(54)));
    }

    #[test]
    fn what_was_learnt_is_known_the_next_time() {
        let dir = tempfile::tempdir().unwrap();
        let mut history = History::open(dir.path());
        assert!(
            !history.is_cheap(b"cc -c a.c") && history.is_cheap(b"echo a") && !history.is_cheap(b"rm x; cc")
        );
        history.learn(b"cc -c a.c", Duration::from_millis(5), None);
        history.learn(b"cc -c b.c", Duration::from_secs(5), None);
        history.learn(b"echo a", Duration::from_secs(5), None);
        history.save();
        let history = History::open(dir.path());
        assert!(
            history.is_cheap(b"cc -c a.c") && !history.is_cheap(b"cc -c b.c") && !history.is_cheap(b"echo a")
        );
    }

    #[test]
    fn memory_is_asked_for_with_headroom_and_a_file_without_it_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let line = format!("{:016x} 5000\n", key(b"old"));
        std::fs::write(dir.path().join(FILE), line).unwrap();
        let mut history = History::open(dir.path());
        assert_eq!((history.expected(b"old"), history.memory(b"old")), (Duration::from_secs(5), 0));
        history.learn(b"small", Duration::from_secs(1), Some(30 << 20));
        history.learn(b"large", Duration::from_secs(1), Some(1000 << 20));
        history.save();
        let mut history = History::open(dir.path());
        assert_eq!((history.memory(b"small"), history.memory(b"large")), (0, 1280 << 20));
        history.learn(b"large", Duration::from_secs(1), Some(500 << 20));
        assert_eq!(history.memory(b"large"), 1024 << 20);
        history.learn(b"large", Duration::from_secs(1), Some(2000 << 20));
        // One that has run here says nothing of it.
        history.learn(b"large", Duration::from_secs(1), None);
        assert_eq!(history.memory(b"large"), 2560 << 20);
    }

    #[test]
    fn few_different_needs_are_asked_for() {
        let all: BTreeSet<u64> = (1..64 << 10).map(with_headroom).collect();
        assert!(all.len() < 50, "{}", all.len());
        assert!(
            (65..64 << 10).all(|mib| with_headroom(mib) >= mib * 5 / 4 && with_headroom(mib) <= mib * 8 / 5)
        );
    }
}
