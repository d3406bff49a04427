//! `hayloft farm slurm`.

use std::ffi::OsString;
use std::time::Duration;

use anyhow::Context;
use hayloft_farm::scale::{self, Limits, Slurm};
use tokio::sync::mpsc;

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::farm::args::SlurmArgs;
use crate::farm::settings;
use crate::{notify, signals};

/// Has as many jobs as builds want until a signal comes.
///
/// # Errors
/// When the broker's address is none, or its credentials cannot be read.
pub(crate) fn run(args: SlurmArgs, config: &Config) -> anyhow::Result<u8> {
    crate::server::serve::init_log("info");
    if args.max < args.min {
        return Err(failure(Exit::Usage, "--max is less than --min"));
    }
    let broker = settings::broker_needed(&args.broker, config)?;
    let millis = |seconds: u64| Duration::from_secs(seconds).as_millis() as u64;
    let limits = Limits {
        least: args.min,
        most: args.max,
        slots: args.slots,
        grow_ms: millis(args.grow_after),
        shrink_ms: millis(args.shrink_after),
    };
    let environment = vec![
        ("HAYLOFT_BROKER".to_owned(), OsString::from(&broker.url)),
        ("HAYLOFT_SLOTS".to_owned(), args.slots.to_string().into()),
    ];
    let slurm = Slurm { name: args.name, batch: args.batch, environment };
    let (to_stop, mut stop) = mpsc::unbounded_channel();
    signals::on_ending(move |_| {
        let _ = to_stop.send(());
    })
    .context("cannot catch signals")?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    notify::ready();
    let done = runtime.block_on(scale::run(
        &broker,
        slurm,
        limits,
        async move {
            let _ = stop.recv().await;
        },
        |said| tracing::info!("{said}"),
    ));
    runtime.shutdown_background();
    done.map_err(|error| failure(Exit::Usage, error.to_string()))?;
    Ok(0)
}
