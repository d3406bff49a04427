//! Which streams are taken: one of each module, with all that they require.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::error::{LayerError, Result};
use crate::modules::catalogue::{Catalogue, HookFile, Module, Stream, listed};
use crate::modules::words::{Choice, Package, Word};

/// A stream that is taken, with its profiles.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Enabled {
    /// The module.
    pub module: Word,
    /// Its stream.
    pub stream: Word,
    /// Profiles of that.
    pub profiles: Vec<Word>,
    /// The module that required it, if nobody asked for it by name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub required_by: Option<Word>,
    /// The hash of the catalogue's file, BLAKE3.
    pub file: String,
}

impl Enabled {
    /// The same, as one writes it.
    pub fn choice(&self) -> Choice {
        Choice {
            module: self.module.clone(),
            stream: Some(self.stream.clone()),
            profiles: self.profiles.clone(),
        }
    }
}

/// What the streams that are taken need.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Selection {
    /// The streams; what is required is before what requires it.
    pub enabled: Vec<Enabled>,
    /// Their packages.
    pub packages: Vec<Package>,
    /// Their layers, the first one on top.
    pub layers: Vec<String>,
    /// Their hooks in order, each with its module.
    pub hooks: Vec<(Word, HookFile)>,
}

/// A module that has been decided on.
struct Taken {
    stream: Word,
    profiles: BTreeSet<Word>,
    /// Who has asked for it: none was a person.
    by: Option<Word>,
}

/// Decides on one stream for each module that is asked for, and for each that those require.
///
/// # Errors
/// When there is no such module, stream or profile, or two streams of one module are asked for.
pub fn select(catalogue: &Catalogue, choices: &[Choice]) -> Result<Selection> {
    let mut taken: BTreeMap<Word, Taken> = BTreeMap::new();
    let mut pending: VecDeque<(Choice, Option<Word>)> =
        choices.iter().map(|choice| (choice.clone(), None)).collect();
    // Those that leave the stream open wait until all others have been heard.
    let mut open = VecDeque::new();
    while let Some((choice, by)) = pending.pop_front().or_else(|| open.pop_front()) {
        if let (None, false) = (&choice.stream, pending.is_empty()) {
            open.push_back((choice, by));
            continue;
        }
        let module = find(catalogue, &choice, by.as_ref())?;
        let name = stream_of(module, &choice, taken.get(&choice.module))?;
        let stream = &module.streams[&name];
        for profile in &choice.profiles {
            if !stream.profiles.contains_key(profile) {
                return Err(LayerError::Choice(format!(
                    "the stream {}:{name} has no profile '{profile}': there are {}",
                    choice.module,
                    listed(stream.profiles.keys())
                )));
            }
        }
        if let Some(there) = taken.get_mut(&choice.module) {
            if there.stream != name {
                return Err(two_streams(&choice.module, (&there.stream, &there.by), (&name, &by)));
            }
            there.profiles.extend(choice.profiles.iter().cloned());
            continue;
        }
        let profiles = choice.profiles.iter().cloned().collect();
        taken.insert(choice.module.clone(), Taken { stream: name.clone(), profiles, by });
        for required in &stream.requires {
            pending.push_back((required.clone(), Some(choice.module.clone())));
        }
    }
    Ok(put_in_order(catalogue, &taken))
}

fn find<'c>(catalogue: &'c Catalogue, choice: &Choice, by: Option<&Word>) -> Result<&'c Module> {
    catalogue.module(&choice.module).ok_or_else(|| {
        let why = by.map(|by| format!(", which '{by}' requires")).unwrap_or_default();
        LayerError::Choice(format!(
            "there is no module '{}'{why} in {}: there are {}",
            choice.module,
            catalogue.folder().display(),
            listed(catalogue.modules().map(|(name, _)| name))
        ))
    })
}

fn stream_of(module: &Module, choice: &Choice, taken: Option<&Taken>) -> Result<Word> {
    let default = || module.default.as_ref().map(|default| default.get_ref().clone());
    let name = choice.stream.clone().or_else(|| taken.map(|taken| taken.stream.clone())).or_else(default);
    let there_are = || listed(module.streams.keys());
    match name {
        Some(name) if module.streams.contains_key(&name) => Ok(name),
        Some(name) => Err(LayerError::Choice(format!(
            "the module '{}' has no stream '{name}': there are {}",
            choice.module,
            there_are()
        ))),
        None => Err(LayerError::Choice(format!(
            "the module '{0}' has no default: name a stream, {0}:STREAM, of {1}",
            choice.module,
            there_are()
        ))),
    }
}

fn two_streams(
    module: &Word,
    (one, one_by): (&Word, &Option<Word>),
    (other, other_by): (&Word, &Option<Word>),
) -> LayerError {
    let who = |by: &Option<Word>| match by {
        Some(by) => format!("'{by}' requires"),
        None => "was asked for".to_owned(),
    };
    LayerError::Choice(format!(
        "a layer has one stream of a module: {module}:{one} ({}) and {module}:{other} ({}) are two; choose one",
        who(one_by),
        who(other_by)
    ))
}

fn put_in_order(catalogue: &Catalogue, taken: &BTreeMap<Word, Taken>) -> Selection {
    let mut selection = Selection::default();
    let mut seen = BTreeSet::new();
    for module in taken.keys() {
        visit(catalogue, taken, module, &mut seen, &mut selection);
    }
    // What comes later lies above.
    selection.layers.reverse();
    let mut layers = BTreeSet::new();
    selection.layers.retain(|layer| layers.insert(layer.clone()));
    selection.packages.sort();
    selection.packages.dedup();
    selection
}

fn visit(
    catalogue: &Catalogue,
    taken: &BTreeMap<Word, Taken>,
    name: &Word,
    seen: &mut BTreeSet<Word>,
    selection: &mut Selection,
) {
    // Two that require each other: one is first.
    let (Some(module), Some(choice), true) =
        (catalogue.module(name), taken.get(name), seen.insert(name.clone()))
    else {
        return;
    };
    let stream: &Stream = &module.streams[&choice.stream];
    for required in &stream.requires {
        visit(catalogue, taken, &required.module, seen, selection);
    }
    let profiles = choice.profiles.iter().map(|profile| &stream.profiles[profile]);
    let mut add = |packages: &[Package], layers: &[String], hooks: &[HookFile]| {
        selection.packages.extend_from_slice(packages);
        // From the lowest one up, until all are there.
        selection.layers.extend(layers.iter().rev().cloned());
        selection.hooks.extend(hooks.iter().map(|hook| (name.clone(), hook.clone())));
    };
    add(&stream.packages, &stream.layers, &stream.hooks);
    for profile in profiles {
        add(&profile.packages, &profile.layers, &profile.hooks);
    }
    selection.enabled.push(Enabled {
        module: name.clone(),
        stream: choice.stream.clone(),
        profiles: choice.profiles.iter().cloned().collect(),
        required_by: choice.by.clone(),
        file: module.hash.clone(),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    const GCC: &str = r#"
description = "Compilers"
default = "12"
[stream.12]
packages = ["gcc-12"]
requires = ["binutils"]
hooks = ["gcc.sh"]
[stream.12.profile.minimal]
[stream.12.profile.full]
packages = ["g++-12", "gcc-12"]
hooks = ["full.sh"]
[stream.13]
packages = ["gcc-13"]
layers = ["new-libc", "sources"]
requires = ["binutils:2.41"]
"#;
    const BINUTILS: &str = r#"
description = "Linker"
default = "2.40"
[stream."2.40"]
packages = ["binutils"]
layers = ["sources"]
hooks = ["ld.sh"]
[stream."2.41"]
packages = ["binutils-2.41"]
"#;
    const RUST: &str = r#"
description = "Rust"
[stream.1]
requires = ["gcc:12", "rust:1"]
[stream.2]
requires = ["gcc:13", "none:1"]
"#;

    fn selected(choices: &str) -> Result<Selection> {
        let catalogue = Catalogue::of(&[("gcc", GCC), ("binutils", BINUTILS), ("rust", RUST)]).unwrap();
        let choices: Vec<Choice> = choices.split(',').map(|text| text.parse().unwrap()).collect();
        select(&catalogue, &choices)
    }

    fn texts<T: ToString>(all: impl IntoIterator<Item = T>) -> Vec<String> {
        all.into_iter().map(|one| one.to_string()).collect()
    }

    #[test]
    fn one_stream_of_each_with_what_it_requires_before_it() {
        let all = selected("gcc:12/full,gcc:12/minimal").unwrap();
        assert_eq!(texts(all.enabled.iter().map(Enabled::choice)), ["binutils:2.40", "gcc:12/full/minimal"]);
        assert_eq!(all.enabled[0].required_by.as_ref().unwrap().as_str(), "gcc");
        assert_eq!(texts(&all.packages), ["binutils", "g++-12", "gcc-12"]);
        let hooks: Vec<_> = all.hooks.iter().map(|(_, hook)| hook.path().to_str().unwrap()).collect();
        assert_eq!(hooks, ["ld.sh", "gcc.sh", "full.sh"]);
        // The default, unless something says more, whatever the order.
        assert_eq!(texts(selected("gcc").unwrap().packages), ["binutils", "gcc-12"]);
        for choices in ["gcc,binutils:2.41", "binutils:2.41,gcc", "gcc,binutils,binutils:2.41"] {
            assert_eq!(texts(selected(choices).unwrap().packages), ["binutils-2.41", "gcc-12"], "{choices}");
        }
        // One that requires itself.
        assert_eq!(selected("rust:1").unwrap().enabled.len(), 3);
        assert_eq!(selected("gcc:13").unwrap().layers, ["new-libc", "sources"]);
    }

    #[test]
    fn what_does_not_fit_is_said_in_words() {
        for (choices, said) in [
            ("gcc:12,gcc:13/x", "the stream gcc:13 has no profile 'x': there are none"),
            (
                "gcc:12,gcc:13",
                "a layer has one stream of a module: gcc:12 (was asked for) and gcc:13 (was asked for) are two; choose one",
            ),
            (
                "rust:1,gcc:13",
                "a layer has one stream of a module: gcc:13 (was asked for) and gcc:12 ('rust' requires) are two; choose one",
            ),
            (
                "gcc:13,binutils:2.40",
                "a layer has one stream of a module: binutils:2.40 (was asked for) and binutils:2.41 ('gcc' requires) are two; choose one",
            ),
            ("gcc:14", "the module 'gcc' has no stream '14': there are 12, 13"),
            ("gcc:12/tiny", "the stream gcc:12 has no profile 'tiny': there are full, minimal"),
            ("rust", "the module 'rust' has no default: name a stream, rust:STREAM, of 1, 2"),
            ("java", "there is no module 'java' in /catalogue: there are binutils, gcc, rust"),
            (
                "rust:2",
                "there is no module 'none', which 'rust' requires in /catalogue: there are binutils, gcc, rust",
            ),
        ] {
            assert_eq!(selected(choices).unwrap_err().to_string(), said);
        }
    }
}
