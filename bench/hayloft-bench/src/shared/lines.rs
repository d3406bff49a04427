//! From the calls of all workers to the tables.

use std::fmt::Write as _;

use serde::Serialize;

use crate::report::{aligned, median, significant};

/// The calls of one kind in one round, all workers together.
#[derive(Clone, Serialize)]
pub(super) struct Line {
    pub(super) part: &'static str,
    pub(super) call: &'static str,
    pub(super) calls: usize,
    pub(super) per_second: f64,
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
    pub(super) max_ms: f64,
    /// Processor time of the server for each call of any kind in this part, microseconds.
    pub(super) server_us: Option<f64>,
}

impl Line {
    /// `times`: of each call, at least one. `seconds`: how long those who made these calls were at it.
    pub(super) fn new(part: &'static str, call: &'static str, mut times: Vec<f64>, seconds: f64) -> Self {
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize] * 1e3;
        Line {
            part,
            call,
            calls: times.len(),
            per_second: times.len() as f64 / seconds,
            p50_ms: at(0.5),
            p99_ms: at(0.99),
            max_ms: at(1.0),
            server_us: None,
        }
    }
}

/// One call of one part on one target, in all rounds in which it was made.
struct Rounds<'a>(Vec<&'a Line>);

impl<'a> Rounds<'a> {
    fn of(rounds: &'a [Vec<Line>], part: &str, call: &str) -> Self {
        Rounds(rounds.iter().flatten().filter(|line| line.part == part && line.call == call).collect())
    }

    fn values(&self, value: impl Fn(&Line) -> f64) -> impl Iterator<Item = f64> {
        self.0.iter().map(move |line| value(line))
    }

    /// Nothing when nobody has made the call, as happens in a short run.
    fn median(&self, value: impl Fn(&Line) -> f64) -> Option<f64> {
        (!self.0.is_empty()).then(|| median(self.values(value).collect()))
    }

    fn per_second(&self) -> Option<f64> {
        self.median(|line| line.per_second)
    }

    /// What the table has behind the names.
    fn row(&self, baseline: Option<f64>) -> Vec<String> {
        let Some(speed) = self.per_second() else { return vec!["-".to_owned(); 6] };
        let ratio = baseline.map_or_else(|| "-".to_owned(), |baseline| ratio(speed / baseline));
        let [slowest, fastest] = [f64::min as fn(f64, f64) -> f64, f64::max]
            .map(|pick| self.values(|line| line.per_second).reduce(pick).unwrap_or(speed));
        let latency = |ms: Option<f64>| ms.map_or_else(String::new, |ms| format!("{ms:.2}"));
        vec![
            format!("{} ({ratio})", significant(speed)),
            format!("{} - {}", significant(slowest), significant(fastest)),
            latency(self.median(|line| line.p50_ms)),
            latency(self.median(|line| line.p99_ms)),
            format!("{:.1}", self.values(|line| line.max_ms).fold(0.0, f64::max)),
            self.0.iter().map(|line| line.calls).sum::<usize>().to_string(),
        ]
    }
}

/// What a local file system does in memory may be a hundred times as fast.
fn ratio(ratio: f64) -> String {
    if ratio < 0.1 { format!("{ratio:.4}") } else { format!("{ratio:.2}") }
}

/// By target, then round. One row for each call on each target; beside it the speed relative to the first target.
pub(super) fn table(targets: &[&str], measured: &[Vec<Vec<Line>>]) -> String {
    let head =
        ["part: call", "on", "calls a second", "slowest - fastest", "p50, ms", "p99, ms", "max, ms", "calls"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for (part, call) in kinds(measured) {
        let baseline = Rounds::of(&measured[0], part, call).per_second();
        for (target, rounds) in targets.iter().zip(measured) {
            let mut row = vec![format!("{part}: {call}"), (*target).to_owned()];
            row.extend(Rounds::of(rounds, part, call).row(baseline));
            rows.push(row);
        }
    }
    aligned(&rows)
}

/// All that was called, in the order in which it came.
fn kinds(measured: &[Vec<Vec<Line>>]) -> Vec<(&'static str, &'static str)> {
    let mut kinds = Vec::new();
    for line in measured.iter().flatten().flatten() {
        if !kinds.contains(&(line.part, line.call)) {
            kinds.push((line.part, line.call));
        }
    }
    kinds
}

/// What creating loses when others look, on each target by itself.
pub(super) fn watched(targets: &[&str], measured: &[Vec<Vec<Line>>]) -> String {
    let mut out = String::new();
    for (target, rounds) in targets.iter().zip(measured) {
        let speed = |part| Rounds::of(rounds, part, "create").per_second();
        if let (Some(alone), Some(watched)) = (speed("alone"), speed("watched")) {
            let _ = writeln!(
                out,
                "{target}: watched, {:.2} of the files that are created alone",
                watched / alone
            );
        }
    }
    out
}

/// What those who work pay for others who have only looked, on each target by itself.
pub(super) fn crowd(targets: &[&str], measured: &[Vec<Vec<Line>>]) -> String {
    let mut out = String::new();
    for (target, rounds) in targets.iter().zip(measured) {
        let of = |part| Rounds::of(rounds, part, "create");
        let (unseen, crowd) = (of("unseen"), of("crowd"));
        let (Some(alone), Some(speed)) = (unseen.per_second(), crowd.per_second()) else { continue };
        let _ = write!(out, "{target}: crowd, {:.2} of the files that are created unseen", speed / alone);
        let server = |rounds: &Rounds<'_>| rounds.median(|line| line.server_us.unwrap_or(f64::NAN));
        if let (Some(alone), Some(used)) = (server(&unseen), server(&crowd))
            && used.is_finite()
        {
            let _ = write!(out, "; the server's processor, us an operation: {used:.0}, unseen {alone:.0}");
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(part: &'static str, call: &'static str, per_second: f64) -> Line {
        Line {
            part,
            call,
            calls: 10,
            per_second,
            p50_ms: 1.0,
            p99_ms: 2.0,
            max_ms: 3.0,
            server_us: Some(per_second),
        }
    }

    #[test]
    fn figures_are_of_all_calls_of_a_kind() {
        let line = Line::new("hard", "create", vec![0.004, 0.001, 0.002, 0.003], 2.0);
        assert_eq!((line.calls, line.per_second), (4, 2.0));
        assert_eq!((line.p50_ms, line.p99_ms, line.max_ms), (2.0, 3.0, 4.0));
    }

    #[test]
    fn the_table_has_medians_of_rounds_and_ratios_to_the_first_target() {
        let rounds = |factor: f64| {
            [100.0, 300.0, 200.0].map(|speed| vec![line("easy", "create", speed * factor)]).to_vec()
        };
        let mut measured = vec![rounds(1.0), rounds(0.5)];
        measured[0][2].push(line("hand", "await", 5.0));
        let table = table(&["base", "slow"], &measured);
        let row = |name: &str, call: &str| {
            let row = table.lines().find(|row| row.contains(name) && row.contains(call)).unwrap();
            row.split('|').map(str::trim).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(row("base", "create")[3..5], ["200 (1.00)", "100 - 300"]);
        assert_eq!(row("slow", "create")[3..9], ["100 (0.50)", "50.0 - 150", "1.00", "2.00", "3.0", "30"]);
        assert_eq!(row("base", "await")[3], "5.00 (1.00)");
        assert_eq!(row("slow", "await")[3], "-");
        assert_eq!([0.004321, 0.5].map(ratio), ["0.0043", "0.50"]);
    }

    #[test]
    fn a_crowd_is_compared_with_who_is_not_seen() {
        let measured = vec![vec![vec![line("unseen", "create", 80.0), line("crowd", "create", 60.0)]]];
        assert_eq!(
            crowd(&["base"], &measured),
            "base: crowd, 0.75 of the files that are created unseen; the server's processor, us an operation: 60, unseen 80\n"
        );
        assert_eq!(crowd(&["base"], &[vec![vec![line("easy", "create", 1.0)]]]), "");
    }

    #[test]
    fn watched_is_compared_with_alone() {
        let measured = vec![vec![vec![line("alone", "create", 100.0), line("watched", "create", 60.0)]]];
        assert!(watched(&["base"], &measured).starts_with("base: watched, 0.60"));
        assert_eq!(watched(&["base"], &[vec![vec![line("easy", "create", 1.0)]]]), "");
    }
}
