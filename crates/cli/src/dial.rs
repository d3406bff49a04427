//! How this command reaches servers: with which certificate, or without.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use hayloft_transport::{DEFAULT_FOLDER, Dial, unix_path};

use crate::config::Config;
use crate::sys;

static DIAL: OnceLock<Dial> = OnceLock::new();

/// Decides it, once for the process: a flag or variable wins over the file.
pub(crate) fn decide(cert: Option<&Path>, insecure: bool, config: &Config) {
    let credentials = cert.map(Path::to_owned).or_else(|| config.cert.clone()).unwrap_or_else(default_folder);
    let credentials = std::path::absolute(&credentials).unwrap_or(credentials);
    let _ = DIAL.set(Dial { credentials, insecure: insecure || config.insecure.unwrap_or(false) });
}

/// What was decided.
pub(crate) fn ours() -> Dial {
    DIAL.get().cloned().unwrap_or_else(|| Dial { credentials: default_folder(), insecure: false })
}

/// The server and the volume in `HOST:PORT/VOLUME` or `unix:/PATH/VOLUME`.
pub(crate) fn split_volume(source: &str) -> Option<(&str, &str)> {
    let (server, volume) = source.rsplit_once('/')?;
    let is_server = match unix_path(server) {
        Some(path) => path.is_absolute() && path.file_name().is_some(),
        None => server.contains(':') && !server.contains('/'),
    };
    (is_server && !volume.is_empty()).then_some((server, volume))
}

/// Whether a text is the address of a server, `HOST:PORT` or `unix:/PATH`.
pub(crate) fn is_address(text: &str) -> bool {
    let has_port = || text.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    unix_path(text).is_some_and(Path::is_absolute) || (has_port() && !text.contains('/'))
}

/// The machine's folder; for ordinary users one of their own, if there is one.
fn default_folder() -> PathBuf {
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    let own = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).or_else(home);
    let own =
        own.map(|folder| folder.join("hayloft/tls")).filter(|folder| !sys::is_root() && folder.exists());
    own.unwrap_or_else(|| DEFAULT_FOLDER.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_of_servers() {
        for (source, server, volume) in [
            ("127.0.0.1:7440/builds", "127.0.0.1:7440", "builds"),
            ("[::1]:7440/b", "[::1]:7440", "b"),
            ("unix:/run/hayloft-server/socket/builds", "unix:/run/hayloft-server/socket", "builds"),
        ] {
            assert_eq!(split_volume(source), Some((server, volume)));
            assert!(is_address(server) && !is_address(source) || source.starts_with("unix:"), "{source}");
        }
        for none in ["builds", "/srv/builds", "host/builds", "h:1/a/b", "h:1/", "unix:builds", "unix:/builds"]
        {
            assert_eq!(split_volume(none), None, "{none}");
        }
    }
}
