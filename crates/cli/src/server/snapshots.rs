//! Snapshots as people name them, and what the server tells of them.

use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{SnapshotInfo, Version};

use crate::server::admin::Admin;

/// `VOLUME` or `VOLUME@NAME`.
pub(crate) fn parse_version(text: &str) -> Result<Version, String> {
    let (volume, snapshot) = text.split_once('@').unwrap_or((text, ""));
    if volume.is_empty() || text.contains('/') || text.ends_with('@') {
        return Err("write VOLUME or VOLUME@NAME, and where the server is with --server HOST:PORT".to_owned());
    }
    Ok(Version { volume: volume.to_owned(), snapshot: snapshot.to_owned() })
}

/// `VOLUME@NAME`.
pub(crate) fn parse_snapshot(text: &str) -> Result<Version, String> {
    let version = parse_version(text)
        .map_err(|_| "write VOLUME@NAME, and where the server is with --server HOST:PORT")?;
    if version.snapshot.is_empty() {
        return Err("write VOLUME@NAME: the name of a snapshot is missing".to_owned());
    }
    Ok(version)
}

/// As people write it.
pub(crate) fn shown(version: &Version) -> String {
    match version.snapshot.as_str() {
        "" => version.volume.clone(),
        snapshot => format!("{}@{snapshot}", version.volume),
    }
}

/// Asks for something that is answered with snapshots.
pub(crate) fn several(admin: &mut Admin, ask: Ask) -> anyhow::Result<Vec<SnapshotInfo>> {
    match admin.ask(ask)? {
        Answer::Snapshots(answer) => Ok(answer.snapshots),
        _ => Err(admin.unexpected()),
    }
}

/// Asks for something that is answered with one snapshot.
pub(crate) fn one(admin: &mut Admin, ask: Ask) -> anyhow::Result<SnapshotInfo> {
    let mut found = several(admin, ask)?;
    if found.len() == 1 { Ok(found.remove(0)) } else { Err(admin.unexpected()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_volumes_and_snapshots() {
        let version = parse_version("builds@monday").unwrap();
        assert_eq!((version.volume.as_str(), version.snapshot.as_str()), ("builds", "monday"));
        assert_eq!(parse_version("builds").unwrap().snapshot, "");
        for wrong in ["", "@monday", "builds@", "host/builds"] {
            parse_version(wrong).unwrap_err();
        }
        parse_snapshot("builds").unwrap_err();
    }
}
