//! `hayloft farm status` and `farm top`.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use hayloft_farm::broker::{Broker, BrokerError, BrokerOptions};
use hayloft_farm::dispatch::Status;
use hayloft_farm::protocol::STATUS;
use prost::Message;

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::farm::args::{StatusArgs, TopArgs};
use crate::farm::settings;
use crate::sys;
use crate::units::show_size;

/// Prints the farm's hosts and builds.
///
/// # Errors
/// When the broker or all agents are away.
pub(crate) fn status(args: &StatusArgs, config: &Config) -> anyhow::Result<u8> {
    sys::default_sigpipe();
    crate::server::serve::init_log("error");
    let broker = settings::broker_needed(&args.broker, config)?;
    let status = runtime()?.block_on(async { ask(&connect(&broker).await?).await })?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&status)?);
    } else {
        print!("{}", text(&status));
    }
    Ok(0)
}

/// Prints them again and again.
///
/// # Errors
/// When the broker is away at the beginning.
pub(crate) fn top(args: &TopArgs, config: &Config) -> anyhow::Result<u8> {
    sys::default_sigpipe();
    crate::server::serve::init_log("off");
    let broker = settings::broker_needed(&args.broker, config)?;
    let clear = if std::io::stdout().is_terminal() { "\x1b[H\x1b[2J" } else { "" };
    runtime()?.block_on(async {
        let broker = connect(&broker).await?;
        loop {
            let seen = match ask(&broker).await {
                Ok(status) => text(&status),
                Err(error) => format!("{error}\n"),
            };
            let mut out = std::io::stdout();
            writeln!(out, "{clear}{seen}")?;
            out.flush()?;
            tokio::time::sleep(Duration::from_secs(args.interval)).await;
        }
    })
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

async fn connect(options: &BrokerOptions) -> anyhow::Result<Broker> {
    Broker::connect(options, "status", false).await.map_err(|error| match error {
        BrokerError::Unreachable { .. } => failure(Exit::Unreachable, error.to_string()),
        error => failure(Exit::Usage, error.to_string()),
    })
}

async fn ask(broker: &Broker) -> anyhow::Result<Status> {
    // While another agent takes over there is no answer for some seconds.
    for _ in 0..8 {
        if let Some(bytes) = broker.ask(STATUS).await {
            let json = String::decode(bytes)?;
            return Ok(serde_json::from_str(&json)?);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    if !broker.is_connected() {
        let said = "the broker ends the connection: does it want a certificate (--broker-certificate, --broker-key) or other credentials?";
        return Err(failure(Exit::Unreachable, said));
    }
    Err(failure(Exit::Unreachable, "no agent answers: start `hayloft farm agent` on the hosts of the farm"))
}

fn text(status: &Status) -> String {
    let mut lines = vec![format!("{:<24} {:>9} {:>6} {:>8}  LABELS", "HOST", "SLOTS", "TASKS", "MEMORY")];
    for host in &status.hosts {
        let labels: Vec<&str> =
            host.labels.iter().filter(|label| !label.starts_with("volume=")).map(String::as_str).collect();
        let volumes = host.labels.len() - labels.len();
        let mark = match (host.dispatches, host.draining) {
            (_, true) => " (ending)",
            (true, _) => " (gives slots)",
            _ => "",
        };
        let slots = format!("{}/{}", host.busy, host.slots);
        let size = show_size(host.memory_bytes);
        let labels = format!("{} volumes {}{mark}", volumes, labels.join(" "));
        lines.push(format!("{:<24} {slots:>9} {:>6} {size:>8}  {labels}", host.host, host.tasks));
    }
    lines.push(String::new());
    let head = format!(
        "{:<28} {:<12} {:>8} {:>8} {:>6} {:>7}",
        "BUILD", "USER", "RUNNING", "WAITING", "SLOTS", "SHARE"
    );
    lines.push(head);
    for build in &status.builds {
        let name = if build.batch { format!("{} (batch)", build.build) } else { build.build.clone() };
        lines.push(format!(
            "{name:<28} {:<12} {:>8} {:>8} {:>6} {:>7.1}",
            build.user, build.running, build.waiting, build.slots, build.share
        ));
    }
    lines.iter().map(|line| format!("{}\n", line.trim_end())).collect()
}

#[cfg(test)]
mod tests {
    use hayloft_farm::dispatch::{BuildStatus, HostStatus};

    use super::*;

    #[test]
    fn the_table_names_hosts_and_builds() {
        let host = HostStatus {
            host: "h1".into(),
            slots: 8,
            busy: 3,
            labels: vec!["gpu".into(), "volume=x".into()],
            dispatches: true,
            ..HostStatus::default()
        };
        let build = BuildStatus { build: "b".into(), batch: true, share: 2.5, ..BuildStatus::default() };
        let text = text(&Status { hosts: vec![host], builds: vec![build], dispatches_since_ms: 0 });
        assert!(text.contains("3/8") && text.contains("1 volumes gpu (gives slots)"), "{text}");
        assert!(text.contains("b (batch)") && text.contains("2.5"), "{text}");
    }
}
