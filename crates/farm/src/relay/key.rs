//! Which relay a task goes to: one that would say the same of it.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};

use prost::Message;

use crate::broker::BrokerOptions;
use crate::protocol::BuildMessage;
use crate::small;
use crate::submit::own_folder;

/// The first argument by which this program becomes a relay.
pub const ARGUMENT: &str = "farm-relay";
/// Where a relay is told which one it is.
const VARIABLE: &str = "HAYLOFT_RELAY";

/// All that the tasks of a relay have in common.
#[derive(Clone, PartialEq, Message)]
pub struct Key {
    #[prost(string, tag = "1")]
    url: String,
    #[prost(string, tag = "2")]
    ca: String,
    #[prost(string, tag = "3")]
    certificate: String,
    #[prost(string, tag = "4")]
    key: String,
    #[prost(string, tag = "5")]
    credentials: String,
    #[prost(message, optional, tag = "6")]
    build: Option<BuildMessage>,
    #[prost(string, tag = "7")]
    host: String,
    /// What the program is built from.
    #[prost(string, tag = "8")]
    version: String,
    /// In which namespaces and below which root broker and files are found.
    #[prost(uint64, repeated, tag = "9")]
    namespaces: Vec<u64>,
}

impl Key {
    /// For tasks of a build, submitted by this process.
    ///
    /// # Errors
    /// When a path is no text, or /proc is not there.
    pub fn new(broker: &BrokerOptions, build: BuildMessage, host: &str) -> io::Result<Key> {
        let text = |path: Option<&Path>| match path.map(std::path::absolute).transpose()? {
            None => Ok(String::new()),
            Some(path) => {
                path.into_os_string().into_string().map_err(|_| io::Error::other("a path is no text"))
            }
        };
        let pair = broker.certificate.as_ref();
        Ok(Key {
            url: broker.url.clone(),
            ca: text(broker.ca.as_deref())?,
            certificate: text(pair.map(|pair| &*pair.0))?,
            key: text(pair.map(|pair| &*pair.1))?,
            credentials: text(broker.credentials.as_deref())?,
            build: Some(build),
            host: host.to_owned(),
            version: small::BUILD.to_owned(),
            namespaces: namespaces()?,
        })
    }

    pub(super) fn broker(&self) -> BrokerOptions {
        let path = |text: &String| (!text.is_empty()).then(|| PathBuf::from(text));
        BrokerOptions {
            url: self.url.clone(),
            ca: path(&self.ca),
            certificate: path(&self.certificate).zip(path(&self.key)),
            credentials: path(&self.credentials),
        }
    }

    pub(super) fn build(&self) -> BuildMessage {
        self.build.clone().unwrap_or_default()
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    /// Where its relay listens.
    pub(super) fn socket(&self) -> io::Result<PathBuf> {
        let mut hasher = DefaultHasher::new();
        self.encode_to_vec().hash(&mut hasher);
        Ok(own_folder("relay")?.join(format!("{:016x}", hasher.finish())))
    }

    /// For the environment of a relay: others cannot read it there.
    pub(super) fn variable(&self) -> (&'static str, String) {
        (VARIABLE, self.encode_to_vec().iter().map(|byte| format!("{byte:02x}")).collect())
    }

    pub(super) fn of_environment() -> io::Result<Key> {
        let text = std::env::var(VARIABLE).map_err(io::Error::other)?;
        let byte = |at: usize| text.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok());
        let bytes: Option<Vec<u8>> = (0..text.len()).step_by(2).map(byte).collect();
        let bytes = bytes.ok_or_else(|| io::Error::other("a relay is started by `hayloft task` alone"))?;
        Key::decode(&*bytes).map_err(io::Error::other)
    }
}

/// What names and addresses mean to this process: its namespaces, and the root of its files. Makes system calls only: see
/// [`small`](crate::small).
pub(super) fn namespaces() -> io::Result<Vec<u64>> {
    let kinds = [c"/proc/self/ns/net", c"/proc/self/ns/mnt", c"/proc/self/ns/pid", c"/proc/self/ns/user"];
    let root = rustix::fs::stat(c"/")?;
    let mut all = vec![root.st_dev, root.st_ino];
    for kind in kinds {
        all.push(rustix::fs::stat(kind)?.st_ino);
    }
    Ok(all)
}
