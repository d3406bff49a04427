//! Where this machine's apt takes packages from (sources.list(5)): a new Debian root takes them from there as well.

use std::fs;
use std::path::Path;

/// One place of packages: an archive's address, a suite, and what may be said of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AptSource {
    uri: String,
    suite: String,
    components: Vec<String>,
    /// Options of the one-line form, as in `signed-by=/usr/share/keyrings/x.gpg`.
    options: Vec<String>,
}

impl AptSource {
    fn line(&self) -> String {
        let options =
            if self.options.is_empty() { String::new() } else { format!("[{}] ", self.options.join(" ")) };
        format!("deb {options}{} {} {}", self.uri, self.suite, self.components.join(" "))
    }

    /// Whether it is one of Debian's own: archives of others seldom call a part of theirs "main" and a suite just so.
    fn is_of(&self, suite: &str) -> bool {
        let ours = [suite.to_owned(), format!("{suite}-updates"), format!("{suite}-security")];
        self.components.iter().any(|part| part == "main") && ours.contains(&self.suite)
    }
}

/// Lines for the sources.list of a new root of `suite`; none when nothing is known of where to get it.
///
/// A machine of another release knows the archive all the same: its address is the same for all.
pub(crate) fn sources_for(suite: &str, known: &[AptSource]) -> Vec<String> {
    let of_suite: Vec<&AptSource> = known.iter().filter(|source| source.is_of(suite)).collect();
    if !of_suite.is_empty() {
        return of_suite.into_iter().map(AptSource::line).collect();
    }
    let host = known
        .iter()
        .find(|source| known.iter().any(|other| other.suite == format!("{}-updates", source.suite)));
    let Some(host) = host else { return Vec::new() };
    known
        .iter()
        .filter(|source| source.is_of(&host.suite))
        .map(|source| {
            AptSource { suite: source.suite.replacen(&host.suite, suite, 1), ..source.clone() }.line()
        })
        .collect()
}

/// The address in a line.
pub(crate) fn uri_of(line: &str) -> Option<&str> {
    line.split_whitespace().find(|word| word.contains(":/"))
}

/// What `/etc/apt` says.
pub(crate) fn read_sources(etc_apt: &Path) -> Vec<AptSource> {
    let mut sources = Vec::new();
    let parts = fs::read_dir(etc_apt.join("sources.list.d")).into_iter().flatten().flatten();
    let mut files: Vec<_> = parts.map(|entry| entry.path()).collect();
    files.sort();
    files.insert(0, etc_apt.join("sources.list"));
    for file in files {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        match file.extension().and_then(|extension| extension.to_str()) {
            Some("list") => sources.extend(text.lines().filter_map(parse_line)),
            Some("sources") => sources.extend(text.split("\n\n").flat_map(parse_stanza)),
            _ => {}
        }
    }
    sources
}

fn parse_line(line: &str) -> Option<AptSource> {
    let rest = line.trim().strip_prefix("deb")?.strip_prefix([' ', '\t'])?.trim_start();
    let (options, rest) = match rest.strip_prefix('[') {
        Some(rest) => rest.split_once(']')?,
        None => ("", rest),
    };
    let mut words = rest.split_whitespace().take_while(|word| !word.starts_with('#')).map(str::to_owned);
    Some(AptSource {
        uri: words.next()?,
        suite: words.next()?,
        components: words.collect(),
        options: options.split_whitespace().map(str::to_owned).collect(),
    })
}

/// A paragraph of `Key: words`, with lines that go on with a space.
fn parse_stanza(text: &str) -> Vec<AptSource> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let joined = lines.collect::<Vec<_>>().join("\n").replace("\n ", " ").replace("\n\t", " ");
    let field = |key: &str| -> Vec<String> {
        let value = joined.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.trim().eq_ignore_ascii_case(key).then_some(value)
        });
        value.into_iter().flat_map(str::split_whitespace).map(str::to_owned).collect()
    };
    let off = field("Enabled").first().is_some_and(|word| ["no", "false"].contains(&word.as_str()));
    if off || !field("Types").iter().any(|kind| kind == "deb") {
        return Vec::new();
    }
    // A key that is written out in the paragraph itself does not fit on a line: apt's own keyring is used.
    let signed = field("Signed-By").first().filter(|key| key.starts_with('/')).cloned();
    let options: Vec<String> = signed.map(|key| format!("signed-by={key}")).into_iter().collect();
    let components = field("Components");
    let mut sources = Vec::new();
    for uri in field("URIs") {
        for suite in field("Suites") {
            let (uri, components, options) = (uri.clone(), components.clone(), options.clone());
            sources.push(AptSource { uri, suite, components, options });
        }
    }
    sources
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANZAS: &str = "\
# A comment
Types: deb deb-src
URIs: http://archive.test/debian
Suites: bookworm bookworm-updates
Components: main
 contrib
Signed-By: /usr/share/keyrings/k.gpg

Types: deb
URIs: http://archive.test/security
Suites: bookworm-security
Components: main

Enabled: no
Types: deb
URIs: http://off.test/debian
Suites: bookworm
Components: main";

    fn known() -> Vec<AptSource> {
        let folder = tempfile::tempdir().unwrap();
        let parts = folder.path().join("sources.list.d");
        fs::create_dir(&parts).unwrap();
        fs::write(parts.join("debian.sources"), STANZAS).unwrap();
        fs::write(parts.join("other.list"), "deb [arch=amd64] https://other.test/x bookworm stable\n")
            .unwrap();
        fs::write(parts.join("off.list.disabled"), "deb http://off.test/x bookworm main\n").unwrap();
        fs::write(folder.path().join("sources.list"), "# deb http://off.test/x bookworm main\n").unwrap();
        read_sources(folder.path())
    }

    #[test]
    fn the_hosts_own_archives_are_taken() {
        assert_eq!(
            sources_for("bookworm", &known()),
            [
                "deb [signed-by=/usr/share/keyrings/k.gpg] http://archive.test/debian bookworm main contrib",
                "deb [signed-by=/usr/share/keyrings/k.gpg] http://archive.test/debian bookworm-updates main contrib",
                "deb http://archive.test/security bookworm-security main",
            ]
        );
    }

    #[test]
    fn another_release_is_in_the_same_archive() {
        let lines = sources_for("trixie", &known());
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[2], "deb http://archive.test/security trixie-security main");
        assert_eq!(uri_of(&lines[0]), Some("http://archive.test/debian"));
        assert!(sources_for("trixie", &[]).is_empty());
    }
}
