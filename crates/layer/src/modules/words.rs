//! Words that a catalogue and a command line are made of: none leads out of a folder, and none is taken for a flag.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

const BYTES_MAX: usize = 64;

/// The name of a module, a stream or a profile.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Word(String);

impl Word {
    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Word {
    type Err = String;

    fn from_str(text: &str) -> Result<Word, String> {
        let known = |c: char| c.is_ascii_alphanumeric() || "._+-".contains(c);
        let fits = (1..=BYTES_MAX).contains(&text.len());
        if fits && !text.starts_with(['.', '-']) && text.chars().all(known) {
            return Ok(Word(text.to_owned()));
        }
        Err(format!(
            "'{text}' is no name of a module, stream or profile: letters, digits, '.', '_', '+' and '-' are allowed, at most {BYTES_MAX}, the first no '.' or '-'"
        ))
    }
}

impl TryFrom<String> for Word {
    type Error = String;

    fn try_from(text: String) -> Result<Word, String> {
        text.parse()
    }
}

impl From<Word> for String {
    fn from(word: Word) -> String {
        word.0
    }
}

impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A package, as the package manager of a layer takes it: a name, perhaps with a version or an architecture.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Package(String);

impl Package {
    /// Its text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text without a version.
    pub fn name(&self) -> &str {
        self.0.split_once('=').map_or(&self.0, |(name, _)| name)
    }
}

impl FromStr for Package {
    type Err = String;

    fn from_str(text: &str) -> Result<Package, String> {
        let known = |c: char| c.is_ascii_alphanumeric() || "+-.:_=~".contains(c);
        // apt-get takes a '-' at the end for "remove".
        let is_one = text.starts_with(|c: char| c.is_ascii_alphanumeric())
            && text.chars().all(known)
            && !text.ends_with('-')
            && text.len() <= 4 * BYTES_MAX;
        match is_one {
            true => Ok(Package(text.to_owned())),
            false => Err(format!("'{text}' is no name of a package")),
        }
    }
}

impl TryFrom<String> for Package {
    type Error = String;

    fn try_from(text: String) -> Result<Package, String> {
        text.parse()
    }
}

impl From<Package> for String {
    fn from(package: Package) -> String {
        package.0
    }
}

impl fmt::Display for Package {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One stream of a module with profiles of it: `gcc:12/full`, `gcc:12`, `gcc` for the stream that is the default.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Choice {
    /// The module.
    pub module: Word,
    /// The stream; none: the default one.
    pub stream: Option<Word>,
    /// The profiles.
    pub profiles: Vec<Word>,
}

impl FromStr for Choice {
    type Err = String;

    fn from_str(text: &str) -> Result<Choice, String> {
        let mut parts = text.split('/');
        let first = parts.next().unwrap_or_default();
        let (module, stream) = match first.split_once(':') {
            Some((module, stream)) => (module, Some(stream)),
            None => (first, None),
        };
        let wrong =
            |said: String| format!("'{text}' is no choice, which is MODULE[:STREAM][/PROFILE...]: {said}");
        Ok(Choice {
            module: module.parse().map_err(wrong)?,
            stream: stream.map(str::parse).transpose().map_err(wrong)?,
            profiles: parts.map(|profile| profile.parse().map_err(wrong)).collect::<Result<_, _>>()?,
        })
    }
}

impl TryFrom<String> for Choice {
    type Error = String;

    fn try_from(text: String) -> Result<Choice, String> {
        text.parse()
    }
}

impl From<Choice> for String {
    fn from(choice: Choice) -> String {
        choice.to_string()
    }
}

impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.module)?;
        if let Some(stream) = &self.stream {
            write!(f, ":{stream}")?;
        }
        self.profiles.iter().try_for_each(|profile| write!(f, "/{profile}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_and_shown_alike() {
        for text in ["gcc", "gcc:12", "gcc:12/full", "c++:3.11/minimal/full", "gcc/full"] {
            assert_eq!(text.parse::<Choice>().unwrap().to_string(), text);
        }
        for text in ["", ":", "gcc:", "../x", "gcc:12/", "gcc:12/../x", "-x", "a b", "gcc:1:2", "/full"] {
            assert!(text.parse::<Choice>().is_err(), "{text}");
        }
    }

    #[test]
    fn packages_are_no_flags_and_no_removals() {
        for text in ["g++", "libc6:amd64", "gcc-12=12.2.0-14+deb12u1", "a~b", "zlib1g"] {
            assert_eq!(text.parse::<Package>().unwrap().as_str(), text);
        }
        for text in ["", "-y", "gcc-", "a b", "a;b", "./x.deb", "/x", "a'b", "$x"] {
            assert!(text.parse::<Package>().is_err(), "{text}");
        }
    }
}
