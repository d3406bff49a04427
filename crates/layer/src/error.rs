//! What can go wrong with layers.

use std::io;
use std::path::{Path, PathBuf};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// A system call failed; the caller tells the user.
    #[error("cannot {what} {}: {source}", .path.display())]
    Io {
        /// What was tried, as in "read".
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A name that no layer can have.
    #[error(
        "'{0}' is no name of a layer: letters, digits, '.', '_', '+' and '-' are allowed, at most 100, the first no '.' or '-'"
    )]
    Name(String),
    /// There is no layer of that name.
    #[error(
        "no layer '{name}' in {}: `hayloft root create {name} --from ...` makes one; a folder or an archive needs a '/' in its name",
        .base.display()
    )]
    NoLayer {
        /// The name.
        name: String,
        /// Where layers are kept.
        base: PathBuf,
    },
    /// There is a layer of that name, and it was not asked to replace it.
    #[error("a layer '{0}' exists: --force replaces it")]
    Exists(String),
    /// Text that is no source of a layer.
    #[error("'{text}' is no source of a layer: {why}")]
    Source {
        /// The text.
        text: String,
        /// What is wrong with it.
        why: String,
    },
    /// A target that cannot be published to.
    #[error("cannot publish to {}: {why}", .path.display())]
    Target {
        /// The target.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The new version has taken its place, and a crash may still bring the old one back.
    #[error("the new version is there as {}, but not known to be durable: {source}", .path.display())]
    NotDurable {
        /// Where it is.
        path: PathBuf,
        /// What kept it from that.
        source: io::Error,
    },
    /// The caller wanted no more of it.
    #[error("stopped")]
    Stopped,
    /// A layer that a root has below it.
    #[error("the layer '{0}' is in use by a root")]
    InUse(String),
    /// A layer that another one is made upon.
    #[error(
        "the layer '{above}' is made upon '{name}': remove that one first (hayloft root rm --layer {above})"
    )]
    Below {
        /// The layer.
        name: String,
        /// The one that is made upon it.
        above: String,
    },
    /// A path that was chosen and is not in the root.
    #[error("'{}' is not among what changed: nothing was published", .0.display())]
    NotChanged(PathBuf),
    /// A file of a catalogue that is not as it has to be.
    #[error("{}{}: {said}", .file.display(), .line.map(|line| format!(":{line}")).unwrap_or_default())]
    Catalogue {
        /// The file.
        file: PathBuf,
        /// The line, the first one 1, where it is known.
        line: Option<usize>,
        /// What is wrong.
        said: String,
    },
    /// Modules, streams or profiles that are not there, or do not go together.
    #[error("{0}")]
    Choice(String),
    /// A layer, or a generation of one, that does not allow what was asked for.
    #[error("{0}")]
    Generation(String),
    /// A file that is neither a folder nor an archive of a known kind.
    #[error("{} is no layer: {why}", .path.display())]
    NotALayer {
        /// The file.
        path: PathBuf,
        /// What it lacks.
        why: String,
    },
    /// A program of this machine is needed and is not there; the user installs it.
    #[error("{what} needs {program}, which is not installed: apt-get install {package}")]
    Missing {
        /// What needs it.
        what: String,
        /// The program, or several.
        program: &'static str,
        /// The Debian package that has it.
        package: &'static str,
    },
    /// An ordinary user lacks subordinate users.
    #[error(
        "{what} has files of many users: make it as root, or get ranges in /etc/subuid and /etc/subgid (usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER) and newuidmap (apt-get install uidmap)"
    )]
    NeedsUsers {
        /// What needs them.
        what: String,
    },
    /// A program was run and failed.
    #[error("{program} failed ({status}){}", last_lines(.said))]
    Program {
        /// Which.
        program: String,
        /// How it ended.
        status: String,
        /// The end of what it said.
        said: String,
    },
}

fn last_lines(said: &str) -> String {
    if said.is_empty() { String::new() } else { format!(":\n{}", said.trim_end()) }
}

/// The result of this crate's functions.
pub type Result<T, E = LayerError> = std::result::Result<T, E>;

/// Says what failed, and on what.
pub(crate) trait Context<T> {
    /// An error that says "cannot WHAT PATH".
    fn context(self, what: &'static str, path: impl AsRef<Path>) -> Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for std::result::Result<T, E> {
    fn context(self, what: &'static str, path: impl AsRef<Path>) -> Result<T> {
        self.map_err(|error| LayerError::Io { what, path: path.as_ref().to_owned(), source: error.into() })
    }
}
