//! `hayloft farm agent`.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use hayloft_farm::agent::{self, AgentConfig, AgentError, Policy};
use hayloft_farm::broker::BrokerError;
use hayloft_farm::execution::SPAWNER_ARGUMENT;
use hayloft_farm::{scale, small};
use tokio::sync::mpsc;

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::farm::args::AgentArgs;
use crate::farm::settings;
use crate::{notify, signals, sys};

/// Offers this host's slots until a signal comes.
///
/// # Errors
/// When the broker lets nobody in, or tasks cannot be started.
pub(crate) fn run(args: AgentArgs, config: &Config, config_file: Option<&Path>) -> anyhow::Result<u8> {
    crate::server::serve::init_log("info");
    if args.die_with_parent {
        sys::die_with_parent()?;
    }
    let broker = settings::broker_needed(&args.broker, config)?;
    let slots = args.slots.unwrap_or_else(|| settings::slots(config)).max(1);
    let host = args.name.unwrap_or_else(settings::host_name);
    let mut mounts = Vec::new();
    for mount in &args.mount {
        let path = mount.canonicalize().with_context(|| format!("--mount {}", mount.display()))?;
        mounts.push(path);
    }
    let mut labels = args.label;
    labels.extend(std::env::var("SLURM_JOB_ID").ok().map(|job| scale::job_label(&job)));
    let small = std::env::current_exe().ok().and_then(|own| small::beside(&own));
    let mut spawner = Command::new(small.as_deref().unwrap_or(Path::new("/proc/self/exe")));
    spawner.arg(SPAWNER_ARGUMENT);
    let agent = AgentConfig {
        broker,
        host: host.clone(),
        slots,
        memory: args.memory.unwrap_or_else(host_memory),
        labels,
        mounts,
        policy: Policy { map: args.user_map, allows_root: args.allow_root },
        lease: Duration::from_secs(args.lease),
        grace: Duration::from_secs(args.grace),
        spawner,
        arguments: config_file.map_or_else(Vec::new, |file| {
            vec!["--config".into(), std::path::absolute(file).unwrap_or_else(|_| file.into()).into()]
        }),
    };
    let (to_stop, stop) = mpsc::unbounded_channel();
    signals::on_ending(move |_| {
        let _ = to_stop.send(());
    })
    .context("cannot catch signals")?;
    // One thread has time for all of a host's tasks, and no other one has to be woken for each message.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(agent::run(agent, stop, || {
        let mut out = std::io::stdout();
        let _ = writeln!(out, "offering {slots} slots as {host}").and_then(|()| out.flush());
        notify::ready();
    }));
    runtime.shutdown_background();
    match done {
        Ok(()) => Ok(0),
        Err(AgentError::Broker(error @ BrokerError::Unreachable { .. })) => {
            Err(failure(Exit::Unreachable, error.to_string()))
        }
        Err(AgentError::Broker(error @ (BrokerError::Address(_) | BrokerError::Credentials(..)))) => {
            Err(failure(Exit::Usage, error.to_string()))
        }
        Err(error) => Err(error.into()),
    }
}

fn host_memory() -> u64 {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.unwrap_or(1 << 20) << 10
}
