//! `hayloft stats`.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use hayloft_mount::control;
use hayloft_wire::StatsRequest;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use serde_json::Value;

use crate::dial;
use crate::exit::{Exit, failure};
use crate::mountinfo;
use crate::server::admin::Admin;
use crate::server::args::StatsArgs;
use crate::sys;
use crate::units::{show_count, show_size};

/// Runs the command.
///
/// # Errors
/// When the target is no Hayloft mount and no server, or does not answer.
pub(crate) fn run(args: &StatsArgs) -> anyhow::Result<u8> {
    sys::default_sigpipe();
    let mut target = Target::find(&args.target)?;
    let mut before: Option<(BTreeMap<String, Value>, Instant)> = None;
    loop {
        let stats = target.ask()?;
        let now = Instant::now();
        let flat = flatten(&stats);
        if args.json {
            println!(
                "{}",
                if args.watch { stats.to_string() } else { serde_json::to_string_pretty(&stats)? }
            );
        } else {
            let since = before.as_ref().map(|(flat, at)| (flat, now - *at));
            if args.watch {
                // Clears the screen, so that the table stands still.
                print!("\x1b[H\x1b[2J");
            }
            print!("{}", table(&flat, since));
        }
        if !args.watch {
            return Ok(0);
        }
        before = Some((flat, now));
        std::thread::sleep(Duration::from_secs(args.interval));
    }
}

/// Whose statistics.
enum Target {
    Mount(std::path::PathBuf),
    Server(Box<Admin>),
}

impl Target {
    fn find(target: &str) -> anyhow::Result<Target> {
        let path = Path::new(target);
        match dial::is_address(target) && !path.exists() {
            true => Ok(Target::Server(Box::new(Admin::connect(target)?))),
            false => Ok(Target::Mount(mountinfo::ours(path)?.mount_point)),
        }
    }

    fn ask(&mut self) -> anyhow::Result<Value> {
        match self {
            Target::Mount(dir) => of_mount(dir),
            Target::Server(admin) => of_server(admin),
        }
    }
}

/// The statistics of the mount on `dir`.
///
/// # Errors
/// When its process does not answer.
pub(crate) fn of_mount(dir: &Path) -> anyhow::Result<Value> {
    let target = mountinfo::ours(dir)?.target();
    control::stats(&target).map_err(|error| failure(Exit::Failed, error.to_string()))
}

/// The statistics of a server.
///
/// # Errors
/// When the connection breaks.
pub(crate) fn of_server(admin: &mut Admin) -> anyhow::Result<Value> {
    match admin.ask_at_once(Ask::Stats(StatsRequest {}))? {
        Answer::Stats(answer) => Ok(serde_json::from_str(&answer.json)?),
        _ => Err(admin.unexpected()),
    }
}

/// The figure under a key such as `fuse.requests.LOOKUP`.
pub(crate) fn number(stats: &Value, key: &str) -> Option<u64> {
    key.split('.').try_fold(stats, |value, part| value.get(part))?.as_u64()
}

/// All figures under a key such as `fuse.requests`, largest first, without their sum `total`.
pub(crate) fn numbers(stats: &Value, key: &str) -> Vec<(String, u64)> {
    let group = key.split('.').try_fold(stats, |value, part| value.get(part)).and_then(Value::as_object);
    let mut figures: Vec<(String, u64)> = group
        .into_iter()
        .flatten()
        .filter(|(name, _)| *name != "total")
        .filter_map(|(name, value)| Some((name.clone(), value.as_u64()?)))
        .filter(|(_, count)| *count > 0)
        .collect();
    figures.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    figures
}

/// Every leaf under its full key.
fn flatten(stats: &Value) -> BTreeMap<String, Value> {
    fn walk(prefix: &str, value: &Value, into: &mut BTreeMap<String, Value>) {
        let key = |part: &str| if prefix.is_empty() { part.to_owned() } else { format!("{prefix}.{part}") };
        match value {
            Value::Object(fields) if fields.contains_key("p50") => {
                into.insert(prefix.to_owned(), Value::String(quantiles(fields)));
            }
            Value::Object(fields) => fields.iter().for_each(|(name, value)| walk(&key(name), value, into)),
            Value::Array(items) => {
                items.iter().enumerate().for_each(|(at, item)| walk(&key(&at.to_string()), item, into))
            }
            leaf => {
                into.insert(prefix.to_owned(), leaf.clone());
            }
        }
    }
    let mut flat = BTreeMap::new();
    walk("", stats, &mut flat);
    flat
}

/// A distribution in one line.
fn quantiles(fields: &serde_json::Map<String, Value>) -> String {
    let shown = ["p50", "p90", "p99", "max"].iter().filter_map(|name| {
        let value = fields.get(*name)?;
        Some(format!("{name} {}", value.as_u64().map_or_else(|| value.to_string(), show_count)))
    });
    shown.collect::<Vec<_>>().join("  ")
}

/// One line a figure, a blank line between groups; with an earlier state also the change per second.
fn table(flat: &BTreeMap<String, Value>, since: Option<(&BTreeMap<String, Value>, Duration)>) -> String {
    // A figure that stayed zero says nothing.
    let shown = flat.iter().filter(|(_, value)| value.as_f64() != Some(0.0) && !value.is_null());
    let width = shown.clone().map(|(key, _)| key.len()).max().unwrap_or(0);
    let mut out = String::new();
    let mut group = "";
    for (key, value) in shown {
        let this = key.split('.').next().unwrap_or_default();
        if !group.is_empty() && group != this {
            out.push('\n');
        }
        group = this;
        out.push_str(&format!("{key:width$}  {:>16}", show(key, value)));
        if let Some((before, elapsed)) = since
            && let (Some(now), Some(then)) =
                (value.as_f64(), before.get(key).map_or(Some(0.0), Value::as_f64))
            && now > then
        {
            out.push_str(&format!("  {:>12.1}/s", (now - then) / elapsed.as_secs_f64()));
        }
        out.push('\n');
    }
    out
}

fn show(key: &str, value: &Value) -> String {
    let last = key.rsplit('.').next().unwrap_or_default();
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_u64() {
            Some(bytes) if last == "bytes" || last.ends_with("_bytes") || last.starts_with("bytes_") => {
                show_size(bytes)
            }
            Some(plain) if matches!(last, "pid" | "session" | "version") => plain.to_string(),
            Some(count) => show_count(count),
            None => number.to_string(),
        },
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn figures_by_key() {
        let stats = json!({ "fuse": { "requests": { "LOOKUP": 3, "OPEN": 7, "READ": 0, "total": 10 } } });
        assert_eq!(number(&stats, "fuse.requests.LOOKUP"), Some(3));
        assert_eq!(number(&stats, "fuse.requests.NONE"), None);
        assert_eq!(numbers(&stats, "fuse.requests"), [("OPEN".to_owned(), 7), ("LOOKUP".to_owned(), 3)]);
    }

    #[test]
    fn a_table_groups_and_tells_the_change() {
        let before = flatten(&json!({ "a": { "count": 1000 }, "b": { "dirty_bytes": 0 } }));
        let now = flatten(&json!({ "a": { "count": 3000 }, "b": { "dirty_bytes": 2048, "zero": 0 } }));
        let text = table(&now, Some((&before, Duration::from_secs(2))));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines[0].contains("3,000") && lines[0].ends_with("1000.0/s"), "{text}");
        assert_eq!(lines[1], "");
        assert!(lines[2].contains("2.0 KiB"), "{text}");
    }
}
