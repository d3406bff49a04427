//! A volume gets another tree while others ask about it, and while names become those of others.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use hayloft_model::{Content, FileKind};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    CreateSnapshot, CreateVolume, DeleteSnapshot, DeleteVolume, Diff, Failed, FailureCode, Fork, Hello,
    ListSnapshots, ListVolumes, NameTree, Promote, Rollback, SHIPS, SetQuota, ShowVolume, Version,
    VolumeInfo,
};

use crate::common::*;

fn version(snapshot: &str) -> Option<Version> {
    Some(Version { volume: "vol".into(), snapshot: snapshot.into() })
}

fn snapshot(client: &mut Client, name: &str) -> Result<Answer, Failed> {
    let ask = CreateSnapshot { of: version(name), note: String::new(), as_stored: true };
    client.ask(Ask::CreateSnapshot(ask))
}

/// The id of a new fork.
fn fork(client: &mut Client, name: &str) -> String {
    let ask = Fork { of: version("s"), name: name.into(), as_stored: true };
    let Answer::Volumes(made) = client.ask(Ask::Fork(ask)).unwrap() else { panic!("no fork") };
    made.volumes[0].id.clone()
}

fn show(client: &mut Client, name: &str) -> VolumeInfo {
    let ask = ShowVolume { name: name.into(), reclaimable: false, ..ShowVolume::default() };
    let Answer::Volumes(found) = client.ask(Ask::ShowVolume(ask)).unwrap() else { panic!("no volume") };
    found.volumes[0].clone()
}

fn delete(client: &mut Client, name: &str) {
    let ask = DeleteVolume { name: name.into(), snapshots: false };
    client.ask(Ask::DeleteVolume(ask)).unwrap();
}

/// Ends what others do, however its own thread goes on.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn what_is_asked_while_the_tree_is_exchanged_is_answered() {
    let (_folder, running) = started();
    let mut admin = Client::connect(running.address);
    snapshot(&mut admin, "s").unwrap();
    let over = AtomicBool::new(false);
    let asked = std::thread::scope(|scope| {
        let ask_on = |what: fn(u64) -> Vec<Ask>| {
            let (mut client, over) = (Client::connect(running.address), &over);
            scope.spawn(move || {
                let mut count = 0;
                while !over.load(Relaxed) {
                    for ask in what(count) {
                        let shown = format!("{ask:?}");
                        client.ask(ask).unwrap_or_else(|failed| panic!("{shown}: {failed:?}"));
                        count += 1;
                    }
                }
                count
            })
        };
        let askers = [
            ask_on(|_| vec![Ask::NameTree(NameTree { of: version(""), anew: true })]),
            ask_on(|_| vec![Ask::Diff(Diff { from: version("s"), to: version(""), ..Diff::default() })]),
            ask_on(|count| {
                let of = || version(&format!("mine-{count}"));
                vec![
                    Ask::CreateSnapshot(CreateSnapshot { of: of(), ..CreateSnapshot::default() }),
                    Ask::DeleteSnapshot(DeleteSnapshot { of: of() }),
                ]
            }),
        ];
        for round in 0..40 {
            let ask = Rollback { to: version("s"), keep_as: format!("kept-{round}") };
            let done = admin.ask(Ask::Rollback(ask));
            if done.is_err() {
                over.store(true, Relaxed);
            }
            done.unwrap();
        }
        over.store(true, Relaxed);
        askers.map(|asker| asker.join().unwrap())
    });
    assert!(asked.iter().all(|count| *count > 0), "{asked:?}");
    let Answer::Snapshots(left) = admin.ask(Ask::ListSnapshots(ListSnapshots { of: version("") })).unwrap()
    else {
        panic!("no snapshots")
    };
    let is_other = |name: &str| !name.starts_with("kept-");
    let left = left.snapshots.iter().filter(|info| is_other(&info.of.as_ref().unwrap().snapshot));
    assert_eq!(left.count(), 1);
    running.shutdown();
}

#[test]
fn what_is_set_while_the_tree_is_exchanged_leads_nobody_back_to_the_old_one() {
    let (folder, running) = started();
    let mut admin = Client::connect(running.address);
    snapshot(&mut admin, "s").unwrap();
    let over = AtomicBool::new(false);
    let begun = show(&mut admin, "vol").id;
    let last = std::thread::scope(|scope| {
        let (mut client, over) = (Client::connect(running.address), &over);
        scope.spawn(move || {
            for quota in (1_000_000..).take_while(|_| !over.load(Relaxed)) {
                let ask = SetQuota { name: "vol".into(), quota_bytes: quota, quota_inodes: 0 };
                client.ask(Ask::SetQuota(ask)).unwrap();
                // Nor back to what was set before.
                assert_eq!(show(&mut client, "vol").status.unwrap().quota_bytes, quota);
            }
        });
        // Also when something fails here: the other one would ask for ever.
        let _stop = Stop(over);
        let is_kept = |round: u32| {
            let made = fork(&mut admin, "fork");
            let ask = Promote { fork: "fork".into(), keep_as: format!("kept-{round}"), ..Promote::default() };
            admin.ask(Ask::Promote(ask)).unwrap();
            // The registry's word counts when the volume is opened next.
            let entry = std::fs::read_to_string(folder.path().join("registry/vol")).unwrap();
            (entry.contains(&made), made)
        };
        let done: Vec<(bool, String)> = (0..40).map(is_kept).collect();
        assert!(done.iter().all(|(is_kept, _)| *is_kept), "{done:?}");
        done.last().unwrap().1.clone()
    });
    assert_ne!(begun, last);
    assert_eq!(show(&mut admin, "vol").id, last);
    running.shutdown();
}

#[test]
fn a_fork_that_has_got_the_name_of_the_one_that_was_meant_is_not_promoted() {
    let (_folder, running) = started();
    let mut admin = Client::connect(running.address);
    snapshot(&mut admin, "s").unwrap();
    let promote = |id: &str| Promote { fork: "fork".into(), id: id.into(), ..Promote::default() };
    let meant = fork(&mut admin, "fork");
    delete(&mut admin, "fork");
    let other = fork(&mut admin, "fork");
    let before = show(&mut admin, "vol").id;
    let failed = admin.ask(Ask::Promote(promote(&meant))).unwrap_err();
    assert!(code(&failed) == FailureCode::NotFound && failed.message.contains("another one"), "{failed:?}");
    assert_eq!((show(&mut admin, "vol").id, show(&mut admin, "fork").id), (before.clone(), other.clone()));
    // The name becomes another one's while a host is waited for; also for clients that say no id.
    for id in [other.as_str(), ""] {
        let ships = Hello { features: SHIPS, ..hello(3) };
        let (mut host, _) = Client::open(running.address, ships).unwrap();
        let mut promoting = Client::connect(running.address);
        let request = promoting.send(Ask::Promote(promote(id)));
        let Answer::Ship(asked) = host.receive(0) else { panic!("it was not told to ship") };
        delete(&mut admin, "fork");
        let new = fork(&mut admin, "fork");
        host.send(Ask::Shipped(hayloft_wire::Shipped { number: asked.number, ..Default::default() }));
        let answer = promoting.receive(request);
        assert!(
            matches!(&answer, Answer::Failed(failed) if code(failed) == FailureCode::NotFound),
            "{answer:?}"
        );
        assert_eq!((show(&mut admin, "vol").id, show(&mut admin, "fork").id), (before.clone(), new.clone()));
        host.send(Ask::Goodbye(hayloft_wire::Goodbye {}));
        drop(host);
        if id.is_empty() {
            admin.ask(Ask::Promote(promote(&new))).unwrap();
            assert_eq!(show(&mut admin, "vol").id, new);
        } else {
            // Whichever has the name, for who says no id.
            delete(&mut admin, "fork");
            fork(&mut admin, "fork");
        }
    }
    running.shutdown();
}

/// Going back is always possible; a fork's own quota is of no account where its tree goes.
#[test]
fn a_volume_keeps_its_quota_whatever_tree_it_gets() {
    let (_folder, running) = started();
    let mut admin = Client::connect(running.address);
    let make = |session: u64, name: &str, ino: u64| {
        let (mut host, _) = Client::open(running.address, hello(session)).unwrap();
        let at = 3 + ino - 100;
        let block = host.content(&noise(ino, 1000));
        let content = Content::Blocks(vec![Some(block)]);
        let records = [
            put(1, directory(1, 0, at + 1)),
            link(1, name, ino, FileKind::Regular, at),
            put(ino, file(content, 1000)),
        ];
        let done = host.commit(1, &records, (1000, 1));
        host.send(Ask::Goodbye(hayloft_wire::Goodbye {}));
        done
    };
    let quota = |admin: &mut Client, name: &str, quota_bytes: u64, quota_inodes: u64| {
        admin.ask(Ask::SetQuota(SetQuota { name: name.into(), quota_bytes, quota_inodes })).unwrap();
    };
    let is = |admin: &mut Client| {
        let status = show(admin, "vol").status.unwrap();
        (status.used_bytes, status.used_inodes, status.quota_bytes, status.quota_inodes)
    };
    make(1, "one", 100).unwrap();
    snapshot(&mut admin, "s").unwrap();
    fork(&mut admin, "fork");
    quota(&mut admin, "fork", 1 << 40, 1 << 20);
    quota(&mut admin, "vol", 500, 7);
    admin.ask(Ask::Rollback(Rollback { to: version("s"), ..Rollback::default() })).unwrap();
    assert_eq!(is(&mut admin), (1000, 1, 500, 7));
    admin.ask(Ask::Promote(Promote { fork: "fork".into(), ..Promote::default() })).unwrap();
    assert_eq!(is(&mut admin), (1000, 1, 500, 7));
    assert_eq!(code(&make(2, "two", 101).unwrap_err()), FailureCode::NoSpace);
    // A new fork has the quota of the volume as it is.
    fork(&mut admin, "fork");
    let status = show(&mut admin, "fork").status.unwrap();
    assert_eq!((status.quota_bytes, status.quota_inodes), (500, 7));
    running.shutdown();
}

#[test]
fn a_volume_that_gets_another_tree_while_it_is_deleted_goes_whole_or_stays() {
    let (_folder, running) = started();
    let mut admin = Client::connect(running.address);
    for round in 0..24 {
        let create = CreateVolume { name: "w".into(), mode: 0o755, ..CreateVolume::default() };
        admin.ask(Ask::CreateVolume(create)).unwrap();
        let of = Some(Version { volume: "w".into(), snapshot: "s".into() });
        let keep = CreateSnapshot { of: of.clone(), note: String::new(), as_stored: true };
        admin.ask(Ask::CreateSnapshot(keep)).unwrap();
        let mut other = Client::connect(running.address);
        let delete = || DeleteVolume { name: "w".into(), snapshots: true };
        let deleted = std::thread::scope(|scope| {
            let rollback = Rollback { to: of, keep_as: format!("kept-{round}") };
            scope.spawn(move || other.ask(Ask::Rollback(rollback)));
            std::thread::sleep(std::time::Duration::from_millis(3 * round));
            admin.ask(Ask::DeleteVolume(delete()))
        });
        if let Err(failed) = deleted {
            assert_eq!(show(&mut admin, "w").name, "w", "round {round}: {failed:?}");
            admin.ask(Ask::DeleteVolume(delete())).unwrap();
        }
        let Answer::Volumes(left) = admin.ask(Ask::ListVolumes(ListVolumes {})).unwrap() else {
            panic!("no list")
        };
        let names: Vec<&str> = left.volumes.iter().map(|info| info.name.as_str()).collect();
        assert_eq!(names, ["vol"], "round {round}");
    }
    running.shutdown();
}
