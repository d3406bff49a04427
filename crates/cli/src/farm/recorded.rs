//! `hayloft make --record`: what is told of it at the end.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use hayloft_farm::make::arguments;
use hayloft_farm::make::record::{Graph, Report};

use crate::exit::{Exit, failure};

/// Most lines of each kind; the file has all.
const LINES: usize = 40;

/// What rules say, by a make that does nothing and prints its data. Nothing when that has failed.
pub(super) fn graph(given: &[OsString]) -> Graph {
    let mut make = Command::new("make");
    make.arg("-pnk").args(arguments::without_jobs(given)).stdin(Stdio::null()).stderr(Stdio::null());
    make.output().map(|output| Graph::read(&output.stdout)).unwrap_or_default()
}

/// The report, with paths as they are from this folder.
pub(super) fn text(report: &Report, directory: &Path) -> String {
    let short = |path: &Path| path.strip_prefix(directory).unwrap_or(path).display().to_string();
    let mut text = format!("hayloft make: {} recipes were recorded", report.recipes);
    match (report.recipes, report.rules_known) {
        (0, _) => text += ": none ran on the farm (give make -j)\n",
        (_, false) => text += "; make -pnk tells no rules, so undeclared dependencies are not known\n",
        (_, true) => {
            text += &format!(", {} undeclared dependencies\n", report.undeclared.len());
        }
    }
    let undeclared = report.undeclared.iter().map(|one| {
        let (reader, file, writer) = (short(&one.read_by), short(&one.file), short(&one.written_by));
        format!("  {reader} reads {file}, which {writer} writes, and no rule says so\n")
    });
    lines(&mut text, undeclared);
    let twice = report.written_twice.iter().map(|one| {
        let rules: Vec<String> = one.written_by.iter().map(|rule| short(rule)).collect();
        format!("  {} is written by more than one rule: {}\n", short(&one.file), rules.join(", "))
    });
    lines(&mut text, twice);
    if !report.outside_read.is_empty() {
        text += &format!("  read outside of the volume: {}\n", folders(&report.outside_read));
    }
    let written = report.outside_written.keys();
    lines(&mut text, written.map(|file| format!("  written outside of the volume: {}\n", file.display())));
    if report.lost > 0 {
        text += &format!("  {} files that were opened, or all of some recipes, are not known\n", report.lost);
    }
    text
}

fn lines(text: &mut String, all: impl ExactSizeIterator<Item = String>) {
    let more = all.len().saturating_sub(LINES);
    text.extend(all.take(LINES));
    if more > 0 {
        *text += &format!("  and {more} more (--record-to FILE has them)\n");
    }
}

/// How many files of which folders.
fn folders(files: &BTreeMap<PathBuf, u64>) -> String {
    let mut counts: BTreeMap<PathBuf, usize> = BTreeMap::new();
    for file in files.keys() {
        // `/usr/include`, not each folder in it.
        let folder = file.parent().unwrap_or(file).components().take(3).collect();
        *counts.entry(folder).or_default() += 1;
    }
    let all: Vec<String> =
        counts.iter().map(|(folder, count)| format!("{} {count}", folder.display())).collect();
    all.join(", ")
}

/// Writes all of it to a file.
///
/// # Errors
/// When that cannot be written.
pub(super) fn write(report: &Report, file: &Path) -> anyhow::Result<()> {
    let json = serde_json::to_string_pretty(report)?;
    std::fs::write(file, json + "\n")
        .map_err(|error| failure(Exit::Failed, format!("--record-to {}: {error}", file.display())))
}

#[cfg(test)]
mod tests {
    use hayloft_farm::make::record::{Shared, Undeclared};

    use super::*;

    #[test]
    fn a_report_names_files_and_rules() {
        let mut report = Report { recipes: 2, rules_known: true, ..Report::default() };
        report.undeclared.push(Undeclared {
            file: "/v/p/gen.h".into(),
            read_by: "/v/p/a.o".into(),
            written_by: "/v/other/gen".into(),
        });
        let rules = (0..50).map(|at| Shared { file: format!("/v/p/{at}").into(), written_by: Vec::new() });
        report.written_twice.extend(rules);
        report.outside_read =
            ["/usr/include/x/y.h", "/usr/include/z.h", "/etc/a"].map(|file| (file.into(), 1)).into();
        let text = text(&report, Path::new("/v/p"));
        assert!(text.contains("a.o reads gen.h, which /v/other/gen writes"), "{text}");
        assert!(text.contains("and 10 more"), "{text}");
        assert!(text.contains("volume: /etc 1, /usr/include 2\n"), "{text}");
    }
}
