//! Snapshots, and clocks that go back.

use std::fs;
use std::path::Path;

use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{CreateSnapshot, ListSnapshots, Version};
use serde_json::Value;

use crate::common::*;

fn version(snapshot: &str) -> Option<Version> {
    Some(Version { volume: "vol".into(), snapshot: snapshot.into() })
}

fn snapshot(running: &Running, name: &str) {
    let ask = CreateSnapshot { of: version(name), note: String::new(), as_stored: true };
    Client::connect(running.address).ask(Ask::CreateSnapshot(ask)).unwrap();
}

/// Names and times of the snapshots, as they are listed.
fn listed(running: &Running) -> Vec<(String, i64)> {
    let ask = ListSnapshots { of: version("") };
    let Answer::Snapshots(found) = Client::connect(running.address).ask(Ask::ListSnapshots(ask)).unwrap()
    else {
        panic!("no snapshots")
    };
    found.snapshots.into_iter().map(|info| (info.of.unwrap().snapshot, info.created_nanos)).collect()
}

/// Lets all snapshots have been made at another time.
fn made_at(folder: &Path, nanos: i64) {
    for copy in ["snapshots", "snapshots-copy"] {
        for family in fs::read_dir(folder.join(copy)).unwrap() {
            for entry in fs::read_dir(family.unwrap().path()).unwrap() {
                let path = entry.unwrap().path();
                let mut entry: serde_json::Map<String, Value> =
                    serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
                entry.remove("checksum");
                entry.insert("created_nanos".into(), nanos.into());
                let sorted: std::collections::BTreeMap<_, _> = entry.iter().collect();
                let sum = blake3::hash(&serde_json::to_vec(&sorted).unwrap()).to_hex()[..16].to_owned();
                entry.insert("checksum".into(), sum.into());
                fs::write(path, serde_json::to_vec(&entry).unwrap()).unwrap();
            }
        }
    }
}

/// Which one is the newest decides what a receiver builds on, and what `prune` keeps.
#[test]
fn a_later_snapshot_is_newer_also_when_the_clock_has_gone_back() {
    let (folder, running) = started();
    snapshot(&running, "first");
    running.shutdown();
    // The clock was a century ahead then.
    let ahead = 4_102_444_800_000_000_000;
    made_at(folder.path(), ahead);
    let running = Running::start(config(folder.path()));
    assert_eq!(listed(&running), [("first".to_owned(), ahead)]);
    snapshot(&running, "second");
    snapshot(&running, "third");
    let found = listed(&running);
    let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["first", "second", "third"], "{found:?}");
    assert!(found.is_sorted_by_key(|(_, nanos)| *nanos), "{found:?}");
    running.shutdown();
}
