//! The table of a trial.

use std::time::Duration;

use serde_json::{Value, json};

use crate::server::stats;
use crate::units::{show_count, show_duration};

/// How long one step took in each place, and whether it succeeded there.
pub(super) struct Row {
    /// The step.
    pub name: &'static str,
    /// One for each place, in the order of the places: the median over the rounds.
    pub times: Vec<Duration>,
    /// The step failed, everywhere alike.
    pub failed: bool,
}

/// The median.
pub(super) fn median(times: &mut [Duration]) -> Duration {
    times.sort();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn ratio(of: Duration, to: Duration) -> Option<f64> {
    (to > Duration::ZERO).then(|| of.as_secs_f64() / to.as_secs_f64())
}

/// Times of all steps by place; the last place is Hayloft's.
pub(super) fn table(places: &[&str], rows: &[Row]) -> String {
    let width = rows.iter().map(|row| row.name.len()).max().unwrap_or(0).max("in all".len());
    let mut out = format!("  {:width$}", "");
    places.iter().for_each(|place| out.push_str(&format!("  {place:>12}")));
    let baselines = &places[..places.len() - 1];
    baselines.iter().for_each(|place| out.push_str(&format!("  {:>16}", format!("vs {place}"))));
    out.push('\n');
    let mut line = |name: &str, times: &[Duration], note: &str| {
        out.push_str(&format!("  {name:width$}"));
        times.iter().for_each(|time| out.push_str(&format!("  {:>12}", show_duration(*time))));
        if let Some((ours, others)) = times.split_last() {
            for other in others {
                let ratio = ratio(*ours, *other).map_or("-".to_owned(), |ratio| format!("x {ratio:.2}"));
                out.push_str(&format!("  {ratio:>16}"));
            }
        }
        out.push_str(note);
        out.push('\n');
    };
    for row in rows {
        line(row.name, &row.times, if row.failed { "  (fails everywhere alike)" } else { "" });
    }
    line("in all", &totals(places.len(), rows), "");
    out
}

fn totals(places: usize, rows: &[Row]) -> Vec<Duration> {
    (0..places).map(|place| rows.iter().map(|row| row.times[place]).sum()).collect()
}

/// What the mount was asked and what it asked the server, from its statistics.
pub(super) fn requests(stats: &Value) -> String {
    let sum = |figures: &[(String, u64)]| figures.iter().map(|(_, count)| count).sum::<u64>();
    let first = |figures: &[(String, u64)]| {
        let named = figures.iter().take(5).map(|(name, count)| format!("{name} {}", show_count(*count)));
        named.collect::<Vec<_>>().join(", ")
    };
    let fuse = stats::numbers(stats, "fuse.requests");
    let server = stats::numbers(stats, "server.requests");
    let server_total = stats::number(stats, "server.requests.total").unwrap_or_else(|| sum(&server));
    format!(
        "  kernel to Hayloft's client   {:>9} requests ({})\n  client to the server         {:>9} requests ({})\n",
        show_count(sum(&fuse)),
        first(&fuse),
        show_count(server_total),
        first(&server)
    )
}

/// The whole result as JSON.
pub(super) fn to_json(source: &str, places: &[&str], rows: &[Row], flush: Duration, stats: &Value) -> Value {
    let seconds = |times: &[Duration]| -> Value {
        let named =
            places.iter().zip(times).map(|(place, time)| ((*place).to_owned(), json!(time.as_secs_f64())));
        Value::Object(named.collect())
    };
    let steps: Vec<Value> = rows
        .iter()
        .map(|row| json!({ "step": row.name, "seconds": seconds(&row.times), "failed_everywhere": row.failed }))
        .collect();
    json!({
        "source": source,
        "steps": steps,
        "total_seconds": seconds(&totals(places.len(), rows)),
        "flush_seconds": flush.as_secs_f64(),
        "stats": stats,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_the_last_place() {
        let secs = |list: [u64; 3]| list.map(Duration::from_secs).to_vec();
        let rows = [
            Row { name: "make", times: secs([4, 2, 3]), failed: false },
            Row { name: "make check", times: secs([0, 1, 1]), failed: true },
        ];
        let text = table(&["disk", "tmpfs", "Hayloft"], &rows);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].contains("x 0.75") && lines[1].contains("x 1.50"), "{text}");
        assert!(lines[2].contains('-') && lines[2].ends_with("alike)"), "{text}");
        assert!(lines[3].contains("x 1.00") && lines[3].contains("x 1.33"), "{text}");
    }

    #[test]
    fn the_median_of_rounds() {
        let mut times = [3, 1, 2].map(Duration::from_secs);
        assert_eq!(median(&mut times), Duration::from_secs(2));
    }
}
