//! The audit log: who has administered what, from where, and when. A line of JSON each, written before it is done.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use hayloft_transport::Peer;
use hayloft_wire::Version;
use hayloft_wire::client_message::Body;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::error::VolumeError;

/// Most refusals that are logged in [`REFUSALS_EACH`]: strangers do not fill the disk.
const REFUSALS_MAX: u32 = 100;
const REFUSALS_EACH: Duration = Duration::from_secs(60);

/// Where it is written; nowhere in tests.
pub(crate) struct Audit {
    file: Option<File>,
    /// How many refusals were logged since. A leaf.
    refusals: Mutex<(Option<Instant>, u32)>,
}

/// An act that is logged, and that is being done.
pub(crate) struct Act(Value);

impl Audit {
    /// Opens it; the file is for its owner only.
    pub(crate) fn open(path: Option<&Path>) -> io::Result<Audit> {
        let open = |path: &Path| {
            if let Some(folder) = path.parent().filter(|folder| !folder.exists()) {
                DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            }
            OpenOptions::new().create(true).append(true).mode(0o600).open(path)
        };
        Ok(Audit { file: path.map(open).transpose()?, refusals: Mutex::default() })
    }

    /// Notes that somebody is about to do something; what is not to be logged is `None`.
    ///
    /// # Errors
    /// It cannot be written: then nothing must be done.
    pub(crate) fn begin(&self, peer: &Peer, body: &Body) -> Result<Option<Act>, VolumeError> {
        let Some(mut act) = described(body) else { return Ok(None) };
        act["who"] = peer.identity.to_string().into();
        act["from"] = peer.address.to_string().into();
        self.write(&act, "begins").map_err(|error| {
            tracing::error!(%error, "the audit log cannot be written: no administration");
            VolumeError::Audit(error)
        })?;
        Ok(Some(Act(act)))
    }

    /// Notes how it went.
    pub(crate) fn end(&self, act: Option<Act>, failed: Option<&VolumeError>) {
        let Some(Act(mut act)) = act else { return };
        if let Some(error) = failed {
            act["error"] = error.to_string().into();
        }
        if let Err(error) = self.write(&act, if failed.is_some() { "failed" } else { "done" }) {
            tracing::error!(%error, %act, "the audit log cannot be written");
        }
    }

    /// Notes that somebody was not allowed to.
    pub(crate) fn refused(&self, peer: &Peer, body: &Body) {
        let Some(mut act) = described(body) else { return };
        {
            let (since, count) = &mut *self.refusals.lock();
            if since.is_none_or(|since| since.elapsed() > REFUSALS_EACH) {
                (*since, *count) = (Some(Instant::now()), 0);
            }
            *count += 1;
            if *count > REFUSALS_MAX {
                return;
            }
        }
        act["who"] = peer.identity.to_string().into();
        act["from"] = peer.address.to_string().into();
        if let Err(error) = self.write(&act, "refused") {
            tracing::error!(%error, %act, "the audit log cannot be written");
        }
    }

    fn write(&self, act: &Value, outcome: &str) -> io::Result<()> {
        let Some(mut file) = self.file.as_ref() else { return Ok(()) };
        let mut act = act.clone();
        act["outcome"] = outcome.into();
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        act["time"] = since.as_secs_f64().into();
        // One write: lines of several servers do not mix.
        file.write_all(format!("{act}\n").as_bytes())?;
        file.sync_data()
    }
}

/// A version as people write it.
fn shown(version: &Option<Version>) -> String {
    match version {
        Some(Version { volume, snapshot }) if snapshot.is_empty() => volume.clone(),
        Some(Version { volume, snapshot }) => format!("{volume}@{snapshot}"),
        None => String::new(),
    }
}

/// What is done, if it changes something that administrators decide.
fn described(body: &Body) -> Option<Value> {
    Some(match body {
        Body::CreateVolume(create) => json!({
            "act": "create", "volume": create.name, "quota_bytes": create.quota_bytes,
            "quota_inodes": create.quota_inodes, "trusted": create.trusted,
            "grants": create.grants.iter().map(|grant| format!("{}={}", grant.who, grant.right)).collect::<Vec<_>>(),
        }),
        Body::DeleteVolume(delete) => json!({"act": "delete", "volume": delete.name}),
        Body::SetQuota(set) => json!({
            "act": "quota", "volume": set.name, "quota_bytes": set.quota_bytes, "quota_inodes": set.quota_inodes,
        }),
        Body::CheckVolume(check) if check.repair => json!({"act": "repair", "volume": check.name}),
        Body::CreateSnapshot(asked) => json!({"act": "snapshot", "of": shown(&asked.of)}),
        Body::DeleteSnapshot(asked) => json!({"act": "delete snapshot", "of": shown(&asked.of)}),
        Body::Fork(asked) => json!({"act": "fork", "volume": asked.name, "of": shown(&asked.of)}),
        Body::Rollback(asked) => json!({"act": "rollback", "to": shown(&asked.to)}),
        Body::Promote(asked) => json!({"act": "promote", "volume": asked.fork}),
        Body::SignSnapshot(asked) => json!({"act": "sign", "of": shown(&asked.of), "tree": asked.tree}),
        Body::EvictClient(evict) => {
            json!({"act": "evict", "volume": evict.volume, "session": format!("{:016x}", evict.session)})
        }
        Body::SetRights(set) => {
            let grant = set.grant.clone().unwrap_or_default();
            json!({
                "act": "rights", "volume": set.name, "whose": grant.who, "right": grant.right, "networks": grant.from,
                "trusted": set.trusted,
            })
        }
        _ => return None,
    })
}
