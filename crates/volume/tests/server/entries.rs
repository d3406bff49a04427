//! Volumes whose entries in the registry are lost.

use std::fs;
use std::path::Path;
use std::time::Duration;

use hayloft_store::StoreKey;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    CheckVolume, CreateVolume, DeleteVolume, EvictClient, FailureCode, Fork, Hello, ListVolumes, Version,
};

use crate::at_rest::*;
use crate::common::*;

/// Takes both entries of a volume out of the registry.
fn lose_entries(store: &Path) {
    for folder in ["registry", "registry-copy"] {
        fs::remove_dir_all(store.join(folder)).unwrap();
    }
}

fn list(running: &Running) -> Vec<hayloft_wire::VolumeInfo> {
    match Client::connect(running.address).ask(Ask::ListVolumes(ListVolumes {})) {
        Ok(Answer::Volumes(list)) => list.volumes,
        other => panic!("{other:?}"),
    }
}

fn repair(running: &Running, name: &str) -> Vec<String> {
    let repair = CheckVolume { name: name.into(), content: true, repair: true, scrub: false };
    match Client::connect(running.address).ask(Ask::CheckVolume(repair)) {
        Ok(Answer::Checked(checked)) => {
            assert_eq!(checked.problems, [""; 0]);
            checked.mended
        }
        other => panic!("{other:?}"),
    }
}

fn lost_entries(key: Option<&StoreKey>) {
    let folder = tempfile::tempdir().unwrap();
    let store = folder.path();
    stopped_with(store, true, key);
    lose_entries(store);
    let running = Running::start(quick_with(store, key));
    let create = CreateVolume { name: "vol".into(), mode: 0o755, ..CreateVolume::default() };
    let delete = DeleteVolume { name: "vol".into(), ..DeleteVolume::default() };
    let ask = |body| Client::connect(running.address).ask(body).map(drop);
    let told = [
        read(&running),
        check(&running, false).map(drop),
        ask(Ask::CreateVolume(create)),
        ask(Ask::DeleteVolume(delete)),
    ];
    for told in told {
        let failed = told.unwrap_err();
        assert_eq!(code(&failed), FailureCode::AtRest, "{}", failed.message);
        assert!(failed.message.contains("hayloft volume check vol --repair"), "{}", failed.message);
    }
    let listed = list(&running);
    assert_eq!((listed.len(), listed[0].name.as_str()), (1, "vol"));
    assert!(listed[0].damage.contains("registry/vol is lost"), "{}", listed[0].damage);
    // One that was never there is none.
    let never = Client::greet(running.address, Hello { volume: "never".into(), ..hello(1) }).err().unwrap();
    assert_eq!(code(&never), FailureCode::NotFound);
    let mended = repair(&running, "vol");
    assert!(mended[0].contains("registry-copy/vol were lost"), "{mended:?}");
    read(&running).unwrap();
    assert_eq!(list(&running)[0].damage, "");
    running.shutdown();
    // The note itself is put back by the next opening.
    let volume = fs::read_dir(store.join("volumes")).unwrap().next().unwrap().unwrap().path();
    fs::remove_file(volume.join("name")).unwrap();
    let running = Running::start(quick_with(store, key));
    read(&running).unwrap();
    assert!(volume.join("name").is_file());
    // What is deleted is not lost.
    let mut admin = Client::connect(running.address);
    for session in [1, 2] {
        let _ = admin.ask(Ask::EvictClient(EvictClient { volume: "vol".into(), session }));
    }
    admin.ask(Ask::DeleteVolume(DeleteVolume { name: "vol".into(), ..DeleteVolume::default() })).unwrap();
    running.shutdown();
    let running = Running::start(quick_with(store, key));
    assert_eq!(list(&running), []);
    assert_eq!(code(&read(&running).unwrap_err()), FailureCode::NotFound);
    running.shutdown();
}

#[test]
fn a_volume_whose_entries_are_lost_is_told_and_comes_back() {
    lost_entries(None);
}

#[test]
fn a_volume_of_an_encrypted_store_comes_back_as_well() {
    lost_entries(Some(&StoreKey::new([9; 32])));
}

#[test]
fn what_a_fork_has_stays_when_its_entries_are_lost() {
    let folder = tempfile::tempdir().unwrap();
    stopped(folder.path(), true);
    let running = Running::start(quick(folder.path()));
    let of = Version { volume: "vol".into(), ..Version::default() };
    let fork = |name: &str| Ask::Fork(Fork { of: Some(of.clone()), name: name.into(), as_stored: true });
    let mut admin = Client::connect(running.address);
    let _ = admin.ask(Ask::EvictClient(EvictClient { volume: "vol".into(), session: 1 }));
    for name in ["one", "two"] {
        admin.ask(fork(name)).unwrap();
    }
    running.shutdown();
    for entry in ["registry/one", "registry-copy/one"] {
        fs::remove_file(folder.path().join(entry)).unwrap();
    }
    let running = Running::start(quick(folder.path()));
    // What nobody needs is looked for when something is deleted: the lost one is needed.
    let mut admin = Client::connect(running.address);
    admin.ask(Ask::DeleteVolume(DeleteVolume { name: "two".into(), ..DeleteVolume::default() })).unwrap();
    eventually(|| fs::read_dir(folder.path().join("volumes")).unwrap().count() == 2);
    std::thread::sleep(Duration::from_secs(1));
    let mended = repair(&running, "one");
    assert!(mended[0].contains("registry/one"), "{mended:?}");
    let (mut client, _) = Client::open(running.address, Hello { volume: "one".into(), ..hello(3) }).unwrap();
    assert_eq!(client.enter(1, 1 << 20).unwrap().dirs[0].entries.len(), files().len());
    running.shutdown();
}
