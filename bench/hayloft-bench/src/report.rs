//! Medians over rounds, ratios to the baseline, and the raw measurements.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::machine::Machine;
use crate::target::Target;

/// In what a phase is shown. Measured is always the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Unit {
    MegabytesPerSecond,
    FilesPerSecond,
    Seconds,
}

/// What a phase has to do with the total.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Role {
    /// Part of the total.
    Counted,
    /// Shown with its ratio, but no part of the total.
    Apart,
    /// As [`Role::Apart`], and not compared: the baseline has nothing of the kind to do.
    NotCompared,
}

/// A timed part of a workload.
#[derive(Clone, Serialize)]
pub(crate) struct Phase {
    pub(crate) name: &'static str,
    pub(crate) unit: Unit,
    pub(crate) role: Role,
}

/// One phase of one round on one target.
#[derive(Clone, Copy, Default, Debug, Serialize)]
pub(crate) struct Measurement {
    pub(crate) seconds: f64,
    /// The part of `seconds` that this program spent on making or checking content.
    pub(crate) own_seconds: f64,
    pub(crate) bytes: u64,
    pub(crate) files: u64,
}

impl Measurement {
    /// What the file system took. The rest is the same everywhere, and would make a slow one look less so.
    fn net_seconds(&self) -> f64 {
        self.seconds - self.own_seconds
    }
}

/// Everything that a run found out.
#[derive(Serialize)]
pub(crate) struct Run<W: Serialize> {
    pub(crate) workload: W,
    pub(crate) machine: Machine,
    pub(crate) phases: Vec<Phase>,
    /// Heading of the total of the phases that count; none where it is one phase.
    pub(crate) total: Option<&'static str>,
    pub(crate) targets: Vec<Target>,
    /// By target, then round, then phase.
    pub(crate) measurements: Vec<Vec<Vec<Measurement>>>,
}

impl<W: Serialize> Run<W> {
    /// Room for the measurements of `targets`.
    pub(crate) fn new(
        workload: W,
        phases: Vec<Phase>,
        total: Option<&'static str>,
        targets: Vec<Target>,
    ) -> Self {
        let measurements = vec![Vec::new(); targets.len()];
        Run { workload, machine: Machine::describe(), phases, total, targets, measurements }
    }

    /// The tables for people.
    pub(crate) fn tables(&self) -> String {
        let rounds = self.measurements[0].len();
        let m = &self.machine;
        let mut out = format!(
            "\nLinux {}, {} x {}, {} MiB, {}; load at the start {:.2}\n",
            m.kernel, m.cores, m.processor, m.memory_mib, m.date, m.load
        );
        let _ = writeln!(
            out,
            "Medians of {rounds} round{}; in brackets the speed relative to {} (more is faster).\n",
            if rounds == 1 { "" } else { "s" },
            self.targets[0].name
        );
        out += &self.table(|target, phase| {
            let median = median(self.seconds(target, phase));
            let shown = self.shown(target, phase, median);
            if phase.is_some_and(|p| self.phases[p].role == Role::NotCompared) {
                return shown;
            }
            format!("{shown} ({:.2})", self.median_of(0, phase) / median)
        });
        if rounds > 1 {
            out += "\nSlowest and fastest round.\n\n";
            out += &self.table(|target, phase| {
                let mut seconds = self.seconds(target, phase);
                seconds.sort_by(f64::total_cmp);
                let slowest = self.shown(target, phase, seconds[rounds - 1]);
                format!("{slowest} - {}", self.shown(target, phase, seconds[0]))
            });
        }
        out
    }

    /// The part of each phase that this program itself took, in the baseline, where it is largest.
    pub(crate) fn own_share(&self) -> String {
        let share = |phase: usize| {
            let of = |f: fn(&Measurement) -> f64| median(self.values(0, Some(phase), f));
            100.0 * of(|m| m.own_seconds) / of(|m| m.seconds)
        };
        let shares: Vec<String> = (0..self.phases.len())
            .map(|p| (self.phases[p].name, share(p)))
            .filter(|(_, share)| *share >= 0.05)
            .map(|(name, share)| format!("{name} {share:.1} %"))
            .collect();
        format!(
            "Taken off: the time for making and checking content; on {}: {}\n",
            self.targets[0].name,
            shares.join(", ")
        )
    }

    /// Writes everything, raw, for whoever wants to compute something else.
    pub(crate) fn write_json(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(path, text).with_context(|| path.display().to_string())
    }

    /// One row per target, one column per phase, and the time of all phases that count.
    fn table(&self, cell: impl Fn(usize, Option<usize>) -> String) -> String {
        let phases = (0..self.phases.len()).map(Some);
        let columns: Vec<Option<usize>> = phases.chain(self.total.map(|_| None)).collect();
        let heading = |column: &Option<usize>| match column {
            None => format!("{}, s", self.total.unwrap_or_default()),
            Some(p) => match self.phases[*p].unit {
                Unit::MegabytesPerSecond => format!("{}, MB/s", self.phases[*p].name),
                Unit::FilesPerSecond => format!("{}, files/s", self.phases[*p].name),
                Unit::Seconds => format!("{}, s", self.phases[*p].name),
            },
        };
        let mut rows = vec![vec![String::new()]];
        rows[0].extend(columns.iter().map(heading));
        for (t, target) in self.targets.iter().enumerate() {
            let mut row = vec![format!("{} [{}]", target.name, target.file_system)];
            row.extend(columns.iter().map(|column| cell(t, *column)));
            rows.push(row);
        }
        aligned(&rows)
    }

    fn values(&self, target: usize, phase: Option<usize>, f: fn(&Measurement) -> f64) -> Vec<f64> {
        let of_round = |round: &Vec<Measurement>| match phase {
            Some(p) => f(&round[p]),
            None => {
                let counted = round.iter().zip(&self.phases).filter(|(_, phase)| phase.role == Role::Counted);
                counted.map(|(m, _)| f(m)).sum()
            }
        };
        self.measurements[target].iter().map(of_round).collect()
    }

    fn seconds(&self, target: usize, phase: Option<usize>) -> Vec<f64> {
        self.values(target, phase, Measurement::net_seconds)
    }

    fn median_of(&self, target: usize, phase: Option<usize>) -> f64 {
        median(self.seconds(target, phase))
    }

    fn shown(&self, target: usize, phase: Option<usize>, seconds: f64) -> String {
        let unit = phase.map_or(Unit::Seconds, |p| self.phases[p].unit);
        let Measurement { bytes, files, .. } = self.measurements[target][0][phase.unwrap_or(0)];
        match unit {
            Unit::MegabytesPerSecond => significant(bytes as f64 / 1e6 / seconds),
            Unit::FilesPerSecond => significant(files as f64 / seconds),
            Unit::Seconds => significant(seconds),
        }
    }
}

/// The middle value, or the mean of the two.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

/// Three significant digits, thousands separated.
pub(crate) fn significant(value: f64) -> String {
    if value < 1.0 {
        return if value < 0.01 { format!("{value:.5}") } else { format!("{value:.3}") };
    }
    if value < 1000.0 {
        let digits = value.log10().floor() as usize;
        return format!("{value:.*}", 2 - digits.min(2));
    }
    let unit = 10f64.powi(value.log10().floor() as i32 - 2);
    let digits = format!("{:.0}", (value / unit).round() * unit);
    let mut out = String::new();
    for (n, digit) in digits.chars().enumerate() {
        if n > 0 && (digits.len() - n) % 3 == 0 {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A Markdown table whose columns line up.
pub(crate) fn aligned(rows: &[Vec<String>]) -> String {
    let widths: Vec<usize> =
        (0..rows[0].len()).map(|c| rows.iter().map(|r| r[c].len()).max().unwrap_or(0)).collect();
    let mut out = String::new();
    for (n, row) in rows.iter().enumerate() {
        for (c, cell) in row.iter().enumerate() {
            let width = widths[c];
            let _ = if c == 0 { write!(out, "| {cell:<width$} ") } else { write!(out, "| {cell:>width$} ") };
        }
        out += "|\n";
        if n == 0 {
            for (c, width) in widths.iter().enumerate() {
                out += &format!("|{}{}", "-".repeat(width + 1), if c == 0 { "-" } else { ":" });
            }
            out += "|\n";
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run() -> Run<()> {
        let phases = vec![
            Phase { name: "create", unit: Unit::MegabytesPerSecond, role: Role::Counted },
            Phase { name: "delete", unit: Unit::Seconds, role: Role::Counted },
            Phase { name: "sync", unit: Unit::Seconds, role: Role::NotCompared },
        ];
        let targets = ["base=/a", "slow=/b"].map(|t| t.parse().unwrap()).to_vec();
        let mut run = Run::new((), phases, Some("all"), targets);
        for (t, factor) in [(0, 1.0), (1, 2.0)] {
            for seconds in [3.0, 1.0, 2.0] {
                let m = |s: f64| Measurement {
                    seconds: s * factor + 0.1,
                    own_seconds: 0.1,
                    bytes: 4_000_000,
                    files: 1,
                };
                run.measurements[t].push(vec![m(seconds), m(0.25), m(9.0)]);
            }
        }
        run
    }

    #[test]
    fn tables_hold_medians_and_ratios() {
        let tables = run().tables();
        let row = |name: &str| {
            let line = tables.lines().find(|l| l.contains(name)).unwrap();
            line.split('|').map(str::trim).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(row("| base")[2..6], ["2.00 (1.00)", "0.250 (1.00)", "9.00", "2.25 (1.00)"]);
        assert_eq!(row("| slow")[2..6], ["1.00 (0.50)", "0.500 (0.50)", "18.0", "4.50 (0.50)"]);
        assert!(tables.contains("1.33 - 4.00"), "{tables}");
    }

    #[test]
    fn own_share_is_of_the_baseline() {
        assert!(run().own_share().contains("create 4.8 %"), "{}", run().own_share());
    }

    #[test]
    fn figures_have_three_digits() {
        let shown =
            [0.0012345, 0.12345, 1.2345, 12.345, 123.45, 1234.5, 99_999.0, 1_234_567.0].map(significant);
        assert_eq!(shown, ["0.00123", "0.123", "1.23", "12.3", "123", "1,230", "100,000", "1,230,000"]);
    }

    #[test]
    fn the_median_of_an_even_number_is_between() {
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}
