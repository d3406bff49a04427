//! What lies in a store beside a volume's own: what a fork has of its origin, and what others leave in the registry's folders.

use std::fs;

use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    CheckVolume, CreateSnapshot, DeleteVolume, EvictClient, FailureCode, Fork, Hello, ListVolumes, Version,
};

use crate::at_rest::{Harm, check, objects, quick, read, stopped};
use crate::common::*;

#[test]
fn scrubbing_of_a_fork_or_a_snapshot_reads_what_it_has_of_its_origin_there() {
    let folder = tempfile::tempdir().unwrap();
    stopped(folder.path(), true);
    let running = Running::start(quick(folder.path()));
    let mut admin = Client::connect(running.address);
    let of = || Some(Version { volume: "vol".into(), snapshot: "s".into() });
    let snapshot = CreateSnapshot { of: of(), as_stored: true, ..CreateSnapshot::default() };
    admin.ask(Ask::CreateSnapshot(snapshot)).unwrap();
    admin.ask(Ask::Fork(Fork { of: of(), name: "fork".into(), as_stored: true })).unwrap();
    let mut scrub = |name: &str| {
        let scrub = CheckVolume { name: name.to_owned(), scrub: true, ..CheckVolume::default() };
        match admin.ask(Ask::CheckVolume(scrub)).unwrap() {
            Answer::Checked(checked) => checked.problems,
            other => panic!("{other:?}"),
        }
    };
    for name in ["fork", "vol@s"] {
        assert_eq!(scrub(name), [""; 0], "{name}");
    }
    let table = objects(folder.path())["volumes/db/compacted"][0].clone();
    Harm::Flipped(5).to(&table);
    let file = table.file_name().unwrap().to_string_lossy().into_owned();
    for name in ["fork", "vol@s"] {
        let problems = scrub(name);
        assert!(problems.iter().any(|problem| problem.contains(&file)), "{name}: {problems:?}");
    }
    Harm::Flipped(5).to(&table);
    // When the origin is gone, nobody else reads the content that both had.
    Client::connect(running.address)
        .ask(Ask::EvictClient(EvictClient { volume: "vol".into(), session: 1 }))
        .unwrap();
    Client::connect(running.address)
        .ask(Ask::DeleteVolume(DeleteVolume { name: "vol".into(), snapshots: true }))
        .unwrap();
    assert_eq!(scrub("fork"), [""; 0]);
    let pack = objects(folder.path())["packs"][0].clone();
    Harm::Flipped(5).to(&pack);
    let file = pack.file_name().unwrap().to_string_lossy().into_owned();
    let problems = scrub("fork");
    assert!(problems.iter().any(|problem| problem.contains(&file)), "{problems:?}");
    running.crash();
}

#[test]
fn what_is_left_beside_the_entries_of_the_registry_is_no_volume() {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path().join("store");
    stopped(&store, true);
    let registry = store.join("registry");
    let entries = || fs::read_dir(&registry).unwrap().map(|entry| entry.unwrap().path());
    let volume = entries().next().unwrap();
    for name in [".nfs0000000000000001", ".vol.swp", "vol~", "vol (copy)"] {
        fs::write(registry.join(name), b"junk").unwrap();
        fs::write(store.join("registry-copy").join(name), b"junk").unwrap();
    }
    fs::copy(&volume, registry.join("vol.bak")).unwrap();
    let running = Running::start(quick(&store));
    let mut admin = Client::connect(running.address);
    let listed = |admin: &mut Client| match admin.ask(Ask::ListVolumes(ListVolumes {})).unwrap() {
        Answer::Volumes(found) => found.volumes,
        other => panic!("{other:?}"),
    };
    let found = listed(&mut admin);
    assert_eq!(found.iter().map(|volume| volume.name.as_str()).collect::<Vec<_>>(), ["vol", "vol.bak"]);
    assert!(found[0].damage.is_empty() && found[1].damage.contains("is a copy of registry/vol"), "{found:?}");
    read(&running).unwrap();
    let Err(failed) = Client::open(running.address, Hello { volume: "vol.bak".into(), ..hello(99) }) else {
        panic!("a copy is opened");
    };
    assert_eq!(code(&failed), FailureCode::AtRest);
    // It goes, and the volume stays.
    admin.ask(Ask::DeleteVolume(DeleteVolume { name: "vol.bak".into(), snapshots: false })).unwrap();
    assert_eq!(listed(&mut admin).len(), 1);
    assert_eq!(check(&running, true).unwrap(), Vec::<String>::new());
    read(&running).unwrap();
    running.shutdown();
    assert!(!registry.join("vol.bak").exists() && volume.exists());
}
