//! How this command reaches servers: with which certificate, or without.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use hayloft_transport::{DEFAULT_FOLDER, Dial};

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

/// The machine's folder; for ordinary users one of their own, if there is one.
fn default_folder() -> PathBuf {
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config"));
    let own = std::env::var_os("XDG_CONFIG_HOME").map(PathBuf::from).or_else(home);
    let own =
        own.map(|folder| folder.join("hayloft/tls")).filter(|folder| !sys::is_root() && folder.exists());
    own.unwrap_or_else(|| DEFAULT_FOLDER.into())
}
