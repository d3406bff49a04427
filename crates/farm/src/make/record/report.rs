//! What recipes have read and written, beside what rules say.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::rules::{Graph, Rule};
use crate::protocol::Files;

/// A file that a rule reads and another one writes, though nothing says that this comes before.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Undeclared {
    /// The file.
    pub file: PathBuf,
    /// The rule that reads it, by its target.
    pub read_by: PathBuf,
    /// The rule that writes it.
    pub written_by: PathBuf,
}

/// A file that several rules write.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Shared {
    /// The file.
    pub file: PathBuf,
    /// The rules, by their targets.
    pub written_by: Vec<PathBuf>,
}

/// What a build has read and written.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Recipes of which that is known, by rule and where it was started: several lines of one are one.
    pub recipes: u64,
    /// Dependencies that no rule names.
    pub undeclared: Vec<Undeclared>,
    /// False: what rules name is not known, so undeclared dependencies are not either.
    pub rules_known: bool,
    /// Files that more than one rule has written.
    pub written_twice: Vec<Shared>,
    /// Files outside of the volume that were read, and by how many recipes.
    pub outside_read: BTreeMap<PathBuf, u64>,
    /// Files outside of the volume that were written and left there.
    pub outside_written: BTreeMap<PathBuf, u64>,
    /// Files that were opened and could not be named.
    pub lost: u64,
}

impl Report {
    /// Of recipes, by the rules that they belong to, on a volume that is mounted there.
    pub(super) fn of(recipes: &BTreeMap<Vec<Rule>, Files>, graph: &Graph, volume: &Path) -> Report {
        let mut writers: BTreeMap<&Path, Vec<&[Rule]>> = BTreeMap::new();
        let mut report =
            Report { recipes: recipes.len() as u64, rules_known: !graph.is_empty(), ..Report::default() };
        for (chain, files) in recipes {
            report.lost += files.lost;
            for file in files.written.iter().filter(|file| file.starts_with(volume)) {
                writers.entry(file).or_default().push(chain);
            }
            for file in files.written.iter().filter(|file| !file.starts_with(volume)) {
                *report.outside_written.entry(file.clone()).or_default() += 1;
            }
            for file in files.only_read(volume, false) {
                *report.outside_read.entry(file.clone()).or_default() += 1;
            }
        }
        let target = |chain: &[Rule]| chain.last().map(Rule::file).unwrap_or_default();
        for (file, chains) in writers.iter().filter(|(_, chains)| chains.len() > 1) {
            let written_by: BTreeSet<PathBuf> = chains.iter().map(|chain| target(chain)).collect();
            let written_by = written_by.into_iter().collect();
            report.written_twice.push(Shared { file: file.to_path_buf(), written_by });
        }
        if report.rules_known {
            let mut order = Order { graph, before: BTreeMap::new() };
            for (chain, files) in recipes {
                for file in files.only_read(volume, true) {
                    let others = writers.get(file.as_path()).into_iter().flatten();
                    let unordered = others.filter(|other| !order.is_said(chain, other, file));
                    let found = unordered.map(|other| Undeclared {
                        file: file.clone(),
                        read_by: target(chain),
                        written_by: target(other),
                    });
                    report.undeclared.extend(found);
                }
            }
            report.undeclared.sort();
            report.undeclared.dedup();
        }
        report
    }
}

struct Order<'a> {
    graph: &'a Graph,
    before: BTreeMap<PathBuf, BTreeSet<&'a Path>>,
}

impl Order<'_> {
    fn comes_before(&mut self, rule: &Rule, file: &Path) -> bool {
        let graph = self.graph;
        let target = rule.file();
        self.before.entry(target).or_insert_with_key(|target| graph.all_before(target)).contains(file)
    }

    /// Whether rules say which of two recipes comes first, or that this file is there before the reader.
    fn is_said(&mut self, reader: &[Rule], writer: &[Rule], file: &Path) -> bool {
        let same = reader.iter().zip(writer).take_while(|(a, b)| a == b).count();
        let (Some(a), Some(b)) = (reader.get(same), writer.get(same)) else {
            // One is a part of the other, or both are the same.
            return true;
        };
        // Makes that one recipe has started in several folders: its lines come one after the other.
        let one_by_one = same > 0 && a.directory != b.directory;
        one_by_one
            || self.comes_before(a, &b.file())
            || self.comes_before(b, &a.file())
            || reader[same..].iter().any(|rule| self.comes_before(rule, file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(directory: &str, target: &str) -> Rule {
        Rule { directory: directory.into(), target: target.into() }
    }

    fn files(read: &[&str], written: &[&str]) -> Files {
        let set = |all: &[&str]| all.iter().map(PathBuf::from).collect();
        Files { read: set(read), written: set(written), lost: 0 }
    }

    fn graph(rules: &str) -> Graph {
        Graph::read(format!("CURDIR := /v\n# Files\n{rules}").as_bytes())
    }

    fn undeclared(recipes: &[(&[Rule], Files)], rules: &str) -> Vec<String> {
        let recipes = recipes.iter().map(|(chain, files)| (chain.to_vec(), files.clone())).collect();
        let report = Report::of(&recipes, &graph(rules), Path::new("/v"));
        assert!(report.rules_known);
        let text = |one: &Undeclared| {
            format!("{} {} {}", one.file.display(), one.read_by.display(), one.written_by.display())
        };
        report.undeclared.iter().map(text).collect()
    }

    #[test]
    fn a_dependency_counts_as_named_if_any_rule_on_the_way_names_it() {
        let reader = [rule("/v", "a.o")];
        let recipes = [
            (&reader[..], files(&["/v/a.c", "/v/gen.h", "/usr/include/x.h"], &["/v/a.o"])),
            (&[rule("/v", "gen.h")], files(&["/v/gen.txt"], &["/v/gen.h"])),
        ];
        let found = ["/v/gen.h /v/a.o /v/gen.h"];
        assert_eq!(undeclared(&recipes, "all: a.o gen.h\na.o: a.c\n"), found);
        assert!(undeclared(&recipes, "a.o: a.c gen.h\n").is_empty());
        assert!(undeclared(&recipes, "a.o: a.c | headers\nheaders: gen.h\n").is_empty());
        // It is made before by way of another file of the same rule.
        let stamp = [recipes[0].clone(), (&[rule("/v", "stamp")], files(&[], &["/v/gen.h"]))];
        assert!(undeclared(&stamp, "a.o: a.c stamp\n").is_empty());
        assert_eq!(undeclared(&stamp, "a.o: a.c\nall: stamp\n"), ["/v/gen.h /v/a.o /v/stamp"]);
        // What it has written itself it may read.
        let own = [(&reader[..], files(&["/v/t"], &["/v/t"])), (&[rule("/v", "b")], files(&[], &["/v/t"]))];
        assert!(undeclared(&own, "all: a.o b\n").is_empty());
    }

    #[test]
    fn makes_within_makes_are_ordered_by_what_has_started_them() {
        let reader = [rule("/v", "lib"), rule("/v/lib", "x.o")];
        let writer = [rule("/v", "gen"), rule("/v/gen", "g.h")];
        let recipes = [
            (&reader[..], files(&["/v/gen/g.h"], &["/v/lib/x.o"])),
            (&writer[..], files(&[], &["/v/gen/g.h"])),
        ];
        assert_eq!(undeclared(&recipes, "all: lib gen\n"), ["/v/gen/g.h /v/lib/x.o /v/gen/g.h"]);
        assert!(undeclared(&recipes, "all: lib gen\nlib: gen\n").is_empty());
        // One recipe has started both, in one folder after the other.
        let reader = [rule("/v", "all"), rule("/v/lib", "x.o")];
        let writer = [rule("/v", "all"), rule("/v/gen", "g.h")];
        let recipes = [(&reader[..], recipes[0].1.clone()), (&writer[..], recipes[1].1.clone())];
        assert!(undeclared(&recipes, "all:\n").is_empty());
    }

    #[test]
    fn files_of_two_rules_and_files_from_outside_are_told() {
        let (a, b) = (vec![rule("/v", "a")], vec![rule("/v", "b")]);
        let recipes = BTreeMap::from([
            (a, files(&["/usr/x", "/v/in"], &["/v/log", "/v/a"])),
            (b, files(&["/usr/x"], &["/v/log", "/var/b"])),
        ]);
        let report = Report::of(&recipes, &Graph::default(), Path::new("/v"));
        assert!(!report.rules_known && report.undeclared.is_empty());
        assert_eq!(
            report.written_twice,
            [Shared { file: "/v/log".into(), written_by: vec!["/v/a".into(), "/v/b".into()] }]
        );
        assert_eq!(report.outside_read, BTreeMap::from([("/usr/x".into(), 2)]));
        assert_eq!(report.outside_written, BTreeMap::from([("/var/b".into(), 1)]));
    }
}
