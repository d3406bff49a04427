//! `hayloft serve`.

use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use hayloft_store::StoreKey;
use hayloft_transport::{Credentials, Security, unix_path};
use hayloft_volume::{Config as ServerSettings, Server, ServerError, Socket};
use tokio::signal::unix::{SignalKind, signal};
use tracing_subscriber::EnvFilter;

use crate::config::{Config, DEFAULT_SERVER, DEFAULT_STORE};
use crate::dial;
use crate::exit::{Exit, failure};
use crate::notify;
use crate::server::args::ServeArgs;
use crate::sys;
use crate::units::parse_size;

/// Runs the command until a signal ends it.
///
/// # Errors
/// When the store does not work, or the address is taken.
pub(crate) fn run(args: ServeArgs, config: &Config) -> anyhow::Result<u8> {
    init_log("warn");
    if args.die_with_parent {
        sys::die_with_parent()?;
    }
    // What the store gets is for the server's user only.
    sys::private_umask();
    let settings = settings(args, config)?;
    hayloft_memory::set_up(hayloft_memory::Keep::Buffers);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(serve(settings))?;
    Ok(0)
}

fn settings(args: ServeArgs, config: &Config) -> anyhow::Result<ServerSettings> {
    let store = args.store.or_else(|| config.serve.store.clone()).unwrap_or_else(|| DEFAULT_STORE.to_owned());
    let listen =
        args.listen.or_else(|| config.serve.listen.clone()).unwrap_or_else(|| DEFAULT_SERVER.to_owned());
    let group = args.socket_group.or_else(|| config.serve.socket_group.clone());
    let (address, socket) = places(&listen, group.as_deref())?;
    let mut settings = ServerSettings { listen: address, socket, ..ServerSettings::of(store) };
    if let Some(path) = args.key_file.or_else(|| config.serve.key_file.clone()) {
        let key = StoreKey::load(&path);
        settings.key =
            Some(key.map_err(|error| failure(Exit::Usage, format!("{:#}", anyhow::Error::from(error))))?);
    }
    settings.security = address.map_or(Ok(Security::Local), security)?;
    settings.audit = Some(match args.audit_log.or_else(|| config.serve.audit_log.clone()) {
        Some(path) => path,
        None => default_audit_log()?,
    });
    let size = |given: Option<u64>, from_file: &Option<String>, key: &str| match (given, from_file) {
        (None, Some(text)) => {
            parse_size(text).map(Some).map_err(|error| failure(Exit::Usage, format!("serve.{key}: {error}")))
        }
        (given, _) => Ok(given),
    };
    if let Some(bytes) = size(args.cache, &config.serve.cache, "cache")? {
        settings.cache_bytes = bytes;
    }
    if let Some(bytes) = size(args.scrub, &config.serve.scrub, "scrub")? {
        settings.scrub_bytes_per_second = (bytes > 0).then_some(bytes);
    }
    settings.reserve_bytes = size(args.reserve, &config.serve.reserve, "reserve")?;
    if let Some(secs) = args.lease.or(config.serve.lease) {
        settings.lease = Duration::from_secs(secs);
    }
    if let Some(millis) = args.window.or(config.serve.window) {
        settings.window = Duration::from_millis(millis);
    }
    Ok(settings)
}

/// Where systemd wants it, else where logs are.
fn default_audit_log() -> anyhow::Result<PathBuf> {
    let folder = match std::env::var_os("LOGS_DIRECTORY") {
        Some(folder) => PathBuf::from(folder),
        None => sys::log_dir().context("no place for the audit log: set HOME or give --audit-log")?,
    };
    Ok(folder.join("audit.log"))
}

/// Who may come from other hosts.
fn security(listen: SocketAddr) -> anyhow::Result<Security> {
    let dial = dial::ours();
    if listen.ip().to_canonical().is_loopback() {
        return Ok(Security::Local);
    }
    if dial.insecure {
        tracing::warn!(%listen, "--insecure: whoever reaches this port reads, changes and deletes every volume");
        return Ok(Security::Insecure);
    }
    let folder = dial.credentials.display();
    if !dial.credentials.join("cert.pem").exists() {
        let elsewhere = match dial.credentials == Path::new(hayloft_transport::DEFAULT_FOLDER) {
            true => String::new(),
            false => format!(" --cert {folder}"),
        };
        return Err(failure(
            Exit::Usage,
            format!(
                "refusing to listen at {listen}, where other hosts reach it, without certificates in {folder}. Make them here, and for each build host:\n  hayloft cert init{elsewhere}\n  hayloft cert issue HOST | ssh HOST hayloft cert install\n(--insecure: in the clear, for everybody who reaches the port.)"
            ),
        ));
    }
    // What else is wrong with them is said when they are used.
    if let Ok(credentials) = Credentials::load(&dial.credentials) {
        let checked = credentials.check_server(&dial.credentials);
        checked.map_err(|error| failure(Exit::Failed, format!("cannot use the certificates: {error}")))?;
    }
    Ok(Security::Tls(dial.credentials))
}

/// What `--listen` says: an address, a socket, or both.
fn places(listen: &str, group: Option<&str>) -> anyhow::Result<(Option<SocketAddr>, Option<Socket>)> {
    let wrong = |what: &str, why: &str| failure(Exit::Usage, format!("cannot listen on '{what}': {why}"));
    let (mut address, mut socket) = (None, None);
    for place in listen.split(',') {
        let more = match unix_path(place) {
            Some(path) if !path.is_absolute() || path.file_name().is_none() => {
                return Err(wrong(place, "write an absolute path, as in unix:/run/hayloft-server/socket"));
            }
            Some(path) => socket
                .replace(Socket { path: path.to_owned(), group: group.map(group_number).transpose()? })
                .is_some(),
            None => {
                let form = "write HOST:PORT, as in 0.0.0.0:7440, or unix:/PATH";
                let mut found = place.to_socket_addrs().map_err(|_| wrong(place, form))?;
                address.replace(found.next().ok_or_else(|| wrong(place, form))?).is_some()
            }
        };
        if more {
            return Err(wrong(listen, "one address and one socket at most"));
        }
    }
    match (group, &socket) {
        (Some(group), None) => Err(failure(
            Exit::Usage,
            format!("the group {group} is for a socket: add unix:/PATH to --listen"),
        )),
        _ => Ok((address, socket)),
    }
}

fn group_number(group: &str) -> anyhow::Result<u32> {
    let number = group.parse().ok().or_else(|| sys::group_number(group));
    number.ok_or_else(|| failure(Exit::Usage, format!("there is no group {group} on this host")))
}

async fn serve(settings: ServerSettings) -> anyhow::Result<()> {
    let store = settings.store.clone();
    let (has_address, socket) = (settings.listen.is_some(), settings.socket.clone());
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for signals")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for signals")?;
    let server = Server::start(settings).await.map_err(start_failure)?;
    let mut places = Vec::from_iter(has_address.then(|| server.address().to_string()));
    places.extend(socket.map(|socket| format!("unix:{}", socket.path.display())));
    println!("serving {store} on {}", places.join(","));
    notify::ready();
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    server.shutdown().await?;
    Ok(())
}

/// The error with a code that says more.
fn start_failure(error: ServerError) -> anyhow::Error {
    let kind = match &error {
        ServerError::Listen { source, .. } => Some(source.kind()),
        ServerError::Audit { source, .. } => Some(source.kind()),
        ServerError::Open { .. }
        | ServerError::Credentials(_)
        | ServerError::Store(_)
        | ServerError::Close { .. } => None,
    };
    let exit = match kind {
        Some(std::io::ErrorKind::AddrInUse) => Exit::Busy,
        Some(std::io::ErrorKind::PermissionDenied) => Exit::Denied,
        _ => Exit::Failed,
    };
    failure(exit, format!("{:#}", anyhow::Error::from(error)))
}

/// Sends events to standard error, those of `level` and worse; `HAYLOFT_LOG` says otherwise, as in
/// `hayloft_mount=debug`.
pub(crate) fn init_log(level: &str) {
    let filter = EnvFilter::try_from_env("HAYLOFT_LOG").unwrap_or_else(|_| EnvFilter::new(level));
    // A second call in one process keeps the first one's.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
}
