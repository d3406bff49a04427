//! The catalogue: a folder of files `MODULE.toml`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;
use toml::Spanned;

use crate::error::{Context, LayerError, Result};
use crate::modules::words::{Choice, Package, Word};

/// The folder of the catalogue in a volume.
const IN_A_VOLUME: &str = "modules";
/// Longest file: what is larger is none.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// A module: `MODULE.toml`.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Module {
    /// What it is, in a line.
    pub description: String,
    /// The stream that is taken when none is named.
    pub default: Option<Spanned<Word>>,
    /// Its streams: one at a time.
    #[serde(rename = "stream", default)]
    pub streams: BTreeMap<Word, Stream>,
    /// The file's hash, BLAKE3.
    #[serde(skip)]
    pub hash: String,
}

/// A stream of a module.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Stream {
    /// Packages that it installs.
    pub packages: Vec<Package>,
    /// Layers that it needs below: names, folders, archives.
    pub layers: Vec<String>,
    /// Streams of other modules that it needs.
    pub requires: Vec<Choice>,
    /// What is run when its packages are there.
    pub hooks: Vec<HookFile>,
    /// Its profiles: any number of them.
    #[serde(rename = "profile")]
    pub profiles: BTreeMap<Word, Profile>,
}

/// What a profile adds to its stream.
#[derive(Debug, Clone, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Profile {
    /// Packages.
    pub packages: Vec<Package>,
    /// Layers.
    pub layers: Vec<String>,
    /// Hooks.
    pub hooks: Vec<HookFile>,
}

/// A hook, as it is written: `"setup.sh"`, or `{ ansible = "play.yml" }`. Paths are below the catalogue.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "a hook is \"FILE\", or { ansible = \"FILE\" }")]
pub enum HookFile {
    /// A program.
    Script(PathBuf),
    /// A play.
    Ansible(Play),
}

/// A play of Ansible.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Play {
    /// Its file.
    pub ansible: PathBuf,
}

impl HookFile {
    /// The file, below the catalogue.
    pub fn path(&self) -> &Path {
        match self {
            HookFile::Script(path) | HookFile::Ansible(Play { ansible: path }) => path,
        }
    }
}

/// A catalogue of modules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Catalogue {
    folder: PathBuf,
    modules: BTreeMap<Word, Module>,
}

impl Catalogue {
    /// Reads the files of a folder, or of `modules` in it: of a mounted volume its top is enough.
    ///
    /// # Errors
    /// When there is no such folder, or one of its files is not as it has to be: file and line are named.
    pub fn read(folder: &Path) -> Result<Catalogue> {
        let below = folder.join(IN_A_VOLUME);
        let folder = if below.is_dir() { below } else { folder.to_owned() };
        let mut modules = BTreeMap::new();
        for entry in fs::read_dir(&folder).context("read the catalogue of modules", &folder)? {
            let path = entry.context("read the catalogue of modules", &folder)?.path();
            if path.extension().is_none_or(|end| end != "toml") || !path.is_file() {
                continue;
            }
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            // What editors leave beside files.
            if name.starts_with('.') {
                continue;
            }
            let name: Word = name.parse().map_err(|said| wrong(&path, None, said))?;
            let size = fs::metadata(&path).context("read", &path)?.len();
            if size > FILE_BYTES_MAX {
                return Err(wrong(
                    &path,
                    None,
                    format!("it has {size} bytes, at most {FILE_BYTES_MAX} are read"),
                ));
            }
            let text = fs::read_to_string(&path).context("read", &path)?;
            modules.insert(name, parse(&path, &text)?);
        }
        Ok(Catalogue { folder, modules })
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All modules, by name.
    pub fn modules(&self) -> impl Iterator<Item = (&Word, &Module)> {
        self.modules.iter()
    }

    /// A module.
    pub fn module(&self, name: &Word) -> Option<&Module> {
        self.modules.get(name)
    }

    /// What is in a hook's file.
    ///
    /// # Errors
    /// When it cannot be read, or links lead out of the catalogue.
    pub fn hook(&self, hook: &HookFile) -> Result<Vec<u8>> {
        let path = self.folder.join(hook.path());
        let top = self.folder.canonicalize().context("find", &self.folder)?;
        let real = path.canonicalize().context("read the hook", &path)?;
        if !real.starts_with(&top) {
            let error = io::Error::other("a link leads out of the catalogue");
            return Err(error).context("read the hook", &path);
        }
        fs::read(&real).context("read the hook", &path)
    }

    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Result<Catalogue> {
        let modules = files.iter().map(|(name, text)| {
            Ok((name.parse().unwrap(), parse(Path::new(&format!("{name}.toml")), text)?))
        });
        Ok(Catalogue { folder: "/catalogue".into(), modules: modules.collect::<Result<_>>()? })
    }
}

fn wrong(file: &Path, line: Option<usize>, said: impl Into<String>) -> LayerError {
    LayerError::Catalogue { file: file.to_owned(), line, said: said.into() }
}

/// The line of a place in a text, the first one 1.
fn line_of(text: &str, at: usize) -> usize {
    1 + text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count()
}

fn parse(file: &Path, text: &str) -> Result<Module> {
    let refused = |error: toml::de::Error| {
        wrong(file, error.span().map(|span| line_of(text, span.start)), one_line(error.message()))
    };
    let mut module: Module = toml::from_str(text).map_err(refused)?;
    module.hash = blake3::hash(text.as_bytes()).to_hex().to_string();
    if let Some(default) = &module.default
        && !module.streams.contains_key(default.get_ref())
    {
        let said = format!(
            "the default '{}' is none of its streams: {}",
            default.get_ref(),
            listed(module.streams.keys())
        );
        return Err(wrong(file, Some(line_of(text, default.span().start)), said));
    }
    if module.streams.is_empty() {
        return Err(wrong(file, None, "it has no stream: add one, [stream.NAME]"));
    }
    for stream in module.streams.values() {
        let hooks = stream.profiles.values().flat_map(|profile| &profile.hooks);
        for hook in hooks.chain(&stream.hooks) {
            let path = hook.path();
            let is_below = path.components().all(|step| matches!(step, Component::Normal(_)));
            if !is_below || path.as_os_str().is_empty() {
                let shown = path.display().to_string();
                // Where it is written first; a path has no place of its own in what was read.
                let at = text.find(&shown).filter(|_| !shown.is_empty());
                let said = format!(
                    "the hook '{shown}' is no path below the catalogue, without '..' and '/' at its begin"
                );
                return Err(wrong(file, at.map(|at| line_of(text, at)), said));
            }
        }
    }
    Ok(module)
}

fn one_line(text: &str) -> String {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Names with commas between them.
pub(crate) fn listed<'a>(names: impl IntoIterator<Item = &'a Word>) -> String {
    let names: Vec<&str> = names.into_iter().map(Word::as_str).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GCC: &str = r#"
description = "The GNU compilers"
default = "12"

[stream.12]
packages = ["gcc-12"]
hooks = ["setup.sh", { ansible = "plays/gcc.yml" }]

[stream.12.profile.full]
packages = ["g++-12"]

[stream."13.1"]
packages = ["gcc-13"]
layers = ["sources-13"]
requires = ["binutils:2.40"]
"#;

    #[test]
    fn a_module_is_read() {
        let module = parse(Path::new("gcc.toml"), GCC).unwrap();
        let streams: Vec<&str> = module.streams.keys().map(Word::as_str).collect();
        assert_eq!(streams, ["12", "13.1"]);
        let twelve = &module.streams[&"12".parse().unwrap()];
        assert_eq!(twelve.hooks[0].path(), Path::new("setup.sh"));
        assert!(
            matches!(&twelve.hooks[1], HookFile::Ansible(play) if play.ansible == Path::new("plays/gcc.yml"))
        );
        assert_eq!(module.streams[&"13.1".parse().unwrap()].requires[0].to_string(), "binutils:2.40");
    }

    #[test]
    fn what_is_wrong_is_said_with_file_and_line() {
        let stream = "description = \"x\"\n[stream.1]\n";
        for (text, line, word) in [
            ("description = \"x\"\nstreem = 1\n", "2", "streem"),
            ("packages = [\n", "1", ""),
            (&format!("{stream}pakages = []\n"), "3", "pakages"),
            (&format!("{stream}packages = [\"-y\"]\n"), "3", "-y"),
            // A list is named by where it begins.
            (&format!("{stream}packages = [\n  \"ok\",\n  \"a b\" ]\n"), "3", "a b"),
            (&format!("{stream}requires = [\"../x\"]\n"), "3", "../x"),
            (&format!("{stream}hooks = [\"../x\"]\n"), "3", "../x"),
            (&format!("{stream}hooks = [\"/etc/x\"]\n"), "3", "/etc/x"),
            (&format!("{stream}hooks = [{{ anzible = \"x\" }}]\n"), "3", "ansible"),
            ("description = \"x\"\ndefault = \"2\"\n[stream.1]\n", "2", "none of its streams: 1"),
            ("description = \"x\"\n[stream.\"../1\"]\n", "2", "../1"),
            (&format!("{stream}[stream.1.profile.\"a/b\"]\n"), "3", "a/b"),
        ] {
            let said = parse(Path::new("gcc.toml"), text).unwrap_err().to_string();
            assert!(said.starts_with(&format!("gcc.toml:{line}: ")) && said.contains(word), "{text}: {said}");
            assert_eq!(said.lines().count(), 1, "{said}");
        }
        let said = parse(Path::new("gcc.toml"), "description = \"x\"\n").unwrap_err().to_string();
        assert_eq!(said, "gcc.toml: it has no stream: add one, [stream.NAME]");
    }

    #[test]
    fn a_folder_is_read_and_no_hook_leads_out_of_it() {
        let dir = tempfile::tempdir().unwrap();
        let modules = dir.path().join("modules");
        fs::create_dir(&modules).unwrap();
        fs::write(modules.join("gcc.toml"), GCC).unwrap();
        fs::write(modules.join("setup.sh"), "#!/bin/sh\n").unwrap();
        fs::write(modules.join(".gcc.toml"), "half").unwrap();
        fs::write(modules.join("notes.txt"), "half").unwrap();
        fs::write(dir.path().join("secret"), "secret").unwrap();
        std::os::unix::fs::symlink("../secret", modules.join("link")).unwrap();
        for folder in [dir.path(), &modules] {
            let catalogue = Catalogue::read(folder).unwrap();
            assert_eq!(catalogue.modules().count(), 1);
            assert_eq!(catalogue.hook(&HookFile::Script("setup.sh".into())).unwrap(), b"#!/bin/sh\n");
            let said = catalogue.hook(&HookFile::Script("link".into())).unwrap_err().to_string();
            assert!(said.contains("out of the catalogue"), "{said}");
        }
        fs::write(modules.join("..evil.toml"), GCC).unwrap();
        fs::write(modules.join("a b.toml"), GCC).unwrap();
        assert!(Catalogue::read(dir.path()).unwrap_err().to_string().contains("'a b'"));
        assert!(Catalogue::read(&dir.path().join("none")).is_err());
    }

    proptest::proptest! {
        #[test]
        fn whatever_is_written_is_taken_or_refused(
            text in r#"(description|default|stream|packages|hooks|requires|\[stream\.1\]\n|\[stream\.1\.profile\.a\]\n| ?= ?|"\PC{0,5}"|\[|\]|\{|\}|,|\n|1|\PC){0,20}"#,
        ) {
            if let Err(error) = parse(Path::new("x.toml"), &text) {
                proptest::prop_assert_eq!(error.to_string().lines().count(), 1);
            }
        }
    }
}
