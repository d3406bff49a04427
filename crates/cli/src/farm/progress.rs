//! What `hayloft make` tells of itself: a line while it runs, and at the end where the time went.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use hayloft_farm::dispatch::Status;
use hayloft_farm::make::{Explained, Session};
use hayloft_farm::protocol::STATUS;
use hayloft_farm::submit::Submitter;
use prost::Message;
use tokio::runtime::Handle;

/// How much of a recipe is shown.
const RECIPE_CHARS: usize = 60;

/// A line on the terminal, once a second, that the next output overwrites.
pub(super) fn show(session: &Arc<Session>, farm: Option<Submitter>, runtime: Handle) {
    let session = Arc::clone(session);
    let start = Instant::now();
    std::thread::spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(1));
            let share = farm.as_ref().and_then(|submitter| runtime.block_on(share(submitter)));
            let _ = write!(std::io::stderr(), "{}\x1b[K\r", line(&session, share, start.elapsed()));
        }
    });
}

/// Slots that the build has, and may have.
async fn share(submitter: &Submitter) -> Option<(u32, f64)> {
    let json = String::decode(submitter.broker().ask(STATUS).await?).ok()?;
    let status: Status = serde_json::from_str(&json).ok()?;
    let own = submitter.build();
    let is_own = |build: &&hayloft_farm::dispatch::BuildStatus| {
        (&build.user, &build.build, build.batch) == (&own.user, &own.name, own.batch)
    };
    status.builds.iter().find(is_own).map(|build| (build.slots, build.share))
}

fn line(session: &Session, share: Option<(u32, f64)>, since: Duration) -> String {
    let tally = &session.tally;
    let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
    let (there, here, now) = (count(&tally.there), count(&tally.here), count(&tally.now));
    let mut line =
        format!("[{} s: {} done ({there} on {} hosts)", since.as_secs(), there + here, tally.hosts());
    match share {
        Some((slots, share)) => {
            line += &format!(", {now} there now, {slots} slots of a share of {share:.0}");
            if let Some(left) = session.left() {
                line += &format!(", about {:.0} s left", left.as_secs_f64() / f64::from(slots.max(1)));
            }
        }
        None => line += &format!(", {now} there now"),
    }
    line + "]"
}

/// Where the time of the slowest recipes went, as a table.
pub(super) fn explained(slowest: &[Explained]) -> String {
    let mut text = format!(
        "{:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  {:<12} RECIPE\n",
        "SECONDS", "SLOT", "BROKER", "LOST", "RAN", "CPU", "WAITED", "HOST"
    );
    for Explained { recipe, times } in slowest {
        let host = if times.host.is_empty() { "here" } else { &times.host };
        // Of what ran here nobody has counted the processor's time.
        let of_cpu = |time: Duration| match times.host.is_empty() {
            true => "-".to_owned(),
            false => format!("{:.3}", time.as_secs_f64()),
        };
        let seconds = |time: Duration| format!("{:.3}", time.as_secs_f64());
        let recipe: String =
            recipe.chars().map(|c| if c.is_control() { ' ' } else { c }).take(RECIPE_CHARS).collect();
        text += &format!(
            "{:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8}  {host:<12} {recipe}\n",
            seconds(times.whole),
            seconds(times.slot),
            seconds(times.broker),
            seconds(times.lost()),
            seconds(times.ran),
            of_cpu(times.cpu),
            of_cpu(times.waited()),
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use hayloft_farm::submit::Times;

    use super::*;

    #[test]
    fn a_recipes_time_is_divided() {
        let ms = Duration::from_millis;
        let times = Times {
            whole: ms(10_000),
            slot: ms(1_000),
            broker: ms(20),
            ran: ms(6_000),
            cpu: ms(5_500),
            peak: 0,
            host: "h1".into(),
            record: None,
        };
        let there = Explained { recipe: "cc -c\n\tx.c".into(), times };
        let here = Times { whole: ms(30), ran: ms(30), ..Times::default() };
        let text = explained(&[there, Explained { recipe: "echo".into(), times: here }]);
        let words: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(
            words[1],
            ["10.000", "1.000", "0.020", "2.980", "6.000", "5.500", "0.500", "h1", "cc", "-c", "x.c"]
        );
        assert_eq!(words[2], ["0.030", "0.000", "0.000", "0.000", "0.030", "-", "-", "here", "echo"]);
    }
}
