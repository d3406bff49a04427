//! Settings: a flag wins over a `HAYLOFT_*` variable (both are clap's), that over a TOML file, that over
//! the default.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::Deserialize;

use crate::exit::{Exit, failure};

/// Where a server is looked for when nothing says otherwise, and where it listens.
pub(crate) const DEFAULT_SERVER: &str = "127.0.0.1:7440";
/// Where a server keeps everything when nothing says otherwise.
pub(crate) const DEFAULT_STORE: &str = "file:///var/lib/hayloft";
/// The file for the whole machine.
const SYSTEM_FILE: &str = "/etc/hayloft/hayloft.toml";

/// A configuration file.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// Address of the server that administration talks to, `HOST:PORT`.
    pub server: Option<String>,
    /// Folder with this host's certificate.
    pub cert: Option<PathBuf>,
    /// Between hosts without TLS.
    pub insecure: Option<bool>,
    /// For `hayloft serve`.
    pub serve: ServeConfig,
    /// For `hayloft mount`.
    pub mount: MountConfig,
    /// For `hayloft run` and `hayloft root`.
    pub run: RunConfig,
    /// For `hayloft task`, `make` and `farm`.
    pub farm: FarmConfig,
}

/// The table `[serve]`.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ServeConfig {
    /// URL of the store.
    pub store: Option<String>,
    /// File with the key of the store.
    pub key_file: Option<PathBuf>,
    /// Address to listen on, `HOST:PORT`, a socket, `unix:/PATH`, or both, with a comma.
    pub listen: Option<String>,
    /// Group whose users may connect to the socket, a name or a number.
    pub socket_group: Option<String>,
    /// Memory for cached tables, a size.
    pub cache: Option<String>,
    /// Room on a local store's disk that new data never fills, a size.
    pub reserve: Option<String>,
    /// Seconds that a client may be silent.
    pub lease: Option<u64>,
    /// Milliseconds that what was answered may not be durable yet.
    pub window: Option<u64>,
    /// The audit log.
    pub audit_log: Option<PathBuf>,
    /// Bytes a second that are read to verify what is stored, a size.
    pub scrub: Option<String>,
}

/// The table `[mount]`.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct MountConfig {
    /// Mount options that every mount starts with; those of the command line come after them and win.
    pub options: Option<String>,
    /// Folder for what the client keeps on disk.
    pub cache_dir: Option<PathBuf>,
    /// Folder for the logs of detached mounts.
    pub log_dir: Option<PathBuf>,
    /// Who may have signed snapshots: others are not mounted. The format of ssh-keygen's allowed_signers.
    pub trusted_keys: Option<PathBuf>,
}

/// The table `[run]`.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct RunConfig {
    /// Folder of named layers.
    pub layers: Option<PathBuf>,
    /// Catalogue of modules: a folder, or a volume that is mounted.
    pub modules: Option<String>,
    /// Folder for the state of roots.
    pub state_dir: Option<PathBuf>,
    /// Folder for swap files.
    pub spill_dir: Option<PathBuf>,
    /// What a root may keep resident, a size.
    pub memory: Option<String>,
    /// What may spill: a size, `zram:SIZE` or `none`.
    pub spill: Option<String>,
    /// How many processes and threads a root may have.
    pub processes: Option<u64>,
    /// Who may have signed the snapshots that layers are on: others are not run. The format of ssh-keygen's allowed_signers.
    pub trusted_keys: Option<PathBuf>,
    /// Free memory without which no root starts, a size.
    pub require_free: Option<String>,
}

/// The table `[farm]`.
#[derive(Debug, Default, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct FarmConfig {
    /// Address of the broker, `nats://HOST:PORT`, several separated by commas.
    pub broker: Option<String>,
    /// Certificates of authorities, PEM.
    pub ca: Option<PathBuf>,
    /// A certificate of our own, PEM.
    pub certificate: Option<PathBuf>,
    /// Its key, PEM.
    pub key: Option<PathBuf>,
    /// Credentials of NATS.
    pub credentials: Option<PathBuf>,
    /// Slots of this host.
    pub slots: Option<u32>,
}

impl Config {
    /// Reads the file that `--config` or `HAYLOFT_CONFIG` names; without one, the machine's file and then
    /// the user's, key by key, as far as they exist.
    ///
    /// # Errors
    /// When a file cannot be read, is no TOML, or has a key that is not known.
    pub(crate) fn load(explicit: Option<&Path>) -> anyhow::Result<Config> {
        if let Some(path) = explicit {
            return read(path);
        }
        let user = user_file();
        let mut config = Config::default();
        for path in [Some(PathBuf::from(SYSTEM_FILE)), user].into_iter().flatten() {
            if path.exists() {
                config = read(&path)?.over(config);
            }
        }
        Ok(config)
    }

    fn parse(text: &str) -> Result<Config, toml::de::Error> {
        toml::from_str(text)
    }

    /// These settings, and those of `below` where nothing is set here.
    fn over(self, below: Config) -> Config {
        Config {
            server: self.server.or(below.server),
            cert: self.cert.or(below.cert),
            insecure: self.insecure.or(below.insecure),
            serve: ServeConfig {
                store: self.serve.store.or(below.serve.store),
                key_file: self.serve.key_file.or(below.serve.key_file),
                listen: self.serve.listen.or(below.serve.listen),
                socket_group: self.serve.socket_group.or(below.serve.socket_group),
                cache: self.serve.cache.or(below.serve.cache),
                reserve: self.serve.reserve.or(below.serve.reserve),
                lease: self.serve.lease.or(below.serve.lease),
                window: self.serve.window.or(below.serve.window),
                audit_log: self.serve.audit_log.or(below.serve.audit_log),
                scrub: self.serve.scrub.or(below.serve.scrub),
            },
            mount: MountConfig {
                options: self.mount.options.or(below.mount.options),
                cache_dir: self.mount.cache_dir.or(below.mount.cache_dir),
                log_dir: self.mount.log_dir.or(below.mount.log_dir),
                trusted_keys: self.mount.trusted_keys.or(below.mount.trusted_keys),
            },
            run: RunConfig {
                layers: self.run.layers.or(below.run.layers),
                modules: self.run.modules.or(below.run.modules),
                state_dir: self.run.state_dir.or(below.run.state_dir),
                spill_dir: self.run.spill_dir.or(below.run.spill_dir),
                memory: self.run.memory.or(below.run.memory),
                spill: self.run.spill.or(below.run.spill),
                processes: self.run.processes.or(below.run.processes),
                trusted_keys: self.run.trusted_keys.or(below.run.trusted_keys),
                require_free: self.run.require_free.or(below.run.require_free),
            },
            farm: FarmConfig {
                broker: self.farm.broker.or(below.farm.broker),
                ca: self.farm.ca.or(below.farm.ca),
                certificate: self.farm.certificate.or(below.farm.certificate),
                key: self.farm.key.or(below.farm.key),
                credentials: self.farm.credentials.or(below.farm.credentials),
                slots: self.farm.slots.or(below.farm.slots),
            },
        }
    }
}

fn read(path: &Path) -> anyhow::Result<Config> {
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("cannot read the configuration file {}", path.display()))?;
    Config::parse(&text).map_err(|error| {
        failure(
            Exit::Usage,
            format!("the configuration file {}: {}", path.display(), error.to_string().trim_end()),
        )
    })
}

fn user_file() -> Option<PathBuf> {
    let folder = match std::env::var_os("XDG_CONFIG_HOME") {
        Some(folder) => PathBuf::from(folder),
        None => PathBuf::from(std::env::var_os("HOME")?).join(".config"),
    };
    Some(folder.join("hayloft/hayloft.toml"))
}

#[cfg(test)]
mod tests {
    use super::*;

    proptest::proptest! {
        #[test]
        fn whatever_is_written_is_taken_or_refused(
            text in r#"(\[(serve|mount|run|farm)\]\n|(server|listen|slots|lease|options|broker|insecure) ?= ?|"\PC{0,5}"|[0-9]{1,22}|-1|true|\n|\[|\]|\{|\PC){0,15}"#,
        ) {
            let _ = Config::parse(&text);
        }
    }

    #[test]
    fn an_unknown_key_is_named() {
        let error = Config::parse("[serve]\nstroe = \"file:///x\"").unwrap_err().to_string();
        assert!(error.contains("stroe"), "{error}");
        let error = Config::parse("sever = \"x:1\"").unwrap_err().to_string();
        assert!(error.contains("sever"), "{error}");
    }

    #[test]
    fn the_upper_file_wins_key_by_key() {
        let upper = Config::parse("[serve]\nlisten = \"a:1\"").unwrap();
        let lower =
            Config::parse("server = \"s:1\"\n[serve]\nlisten = \"b:1\"\nstore = \"file:///s\"").unwrap();
        let config = upper.over(lower);
        assert_eq!(config.server.as_deref(), Some("s:1"));
        assert_eq!(config.serve.listen.as_deref(), Some("a:1"));
        assert_eq!(config.serve.store.as_deref(), Some("file:///s"));
    }
}
