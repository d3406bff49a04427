//! Random histories of changes, snapshots, forks, ways back and killed servers.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::live::{PATIENCE, Tree, is_given_back, is_sound, seen, snapshot, tells_what_differs, tree};
use crate::setup::farm::{Farm, Mount, run, seed, wait_until};

/// A generator of choices that can be repeated.
struct Choices(u64);

impl Choices {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

fn change_something(choices: &mut Choices, mount: &Mount) {
    let name = |choices: &mut Choices| mount.join(&format!("d{}/f{}", choices.below(3), choices.below(12)));
    for dir in 0..3 {
        let _ = fs::create_dir(mount.join(&format!("d{dir}")));
    }
    let (path, other) = (name(choices), name(choices));
    match choices.below(8) {
        0..=2 => {
            let size = [0, 10, 3000, 70_000, 400_000][choices.below(5) as usize];
            fs::write(&path, vec![choices.below(256) as u8; size]).unwrap();
        }
        3 => drop(fs::remove_file(&path)),
        4 => drop(fs::rename(&path, &other)),
        5 => drop(fs::hard_link(&path, &other)),
        6 => drop(fs::set_permissions(&path, fs::Permissions::from_mode(0o600 + choices.below(64) as u32))),
        _ => {
            if let Ok(mut content) = fs::read(&path) {
                content.extend_from_slice(b"appended");
                fs::write(&path, content).unwrap();
            }
        }
    }
}

/// Random changes, snapshots, forks, ways back, deletions, sweeps and killed servers, against copies of what there was.
#[test]
fn whatever_is_made_deleted_and_killed_versions_are_what_they_were() {
    let seed = seed();
    println!("seed {seed}");
    let mut choices = Choices(seed | 1);
    let mut farm = Farm::new();
    farm.create("v0");
    let mut volumes: BTreeMap<String, Mount> = [("v0".to_owned(), farm.mount("v0", ""))].into();
    let mut snapshots: BTreeMap<String, Tree> = BTreeMap::new();
    let mut next = 1;
    for step in 0..crate::setup::farm::rounds(60, 1000) {
        let volume = volumes.keys().nth(choices.below(volumes.len() as u64) as usize).unwrap().clone();
        for _ in 0..choices.below(12) {
            change_something(&mut choices, &volumes[&volume]);
        }
        let some = snapshots.keys().nth(choices.below(snapshots.len().max(1) as u64) as usize).cloned();
        next += 1;
        let what = choices.below(13);
        println!("step {step}: {what} with {volume}, {some:?}");
        match (what, some) {
            (0..=2, _) => {
                let name = format!("{volume}@s{next}");
                snapshots.insert(name.clone(), tree(volumes[&volume].path()));
                snapshot(&farm, &name);
            }
            (3, _) if volumes.len() < 5 => {
                let name = format!("v{next}");
                let was = tree(volumes[&volume].path());
                run(&mut farm.ask(["fork", &volume, &name]));
                let mount = farm.mount(&name, "");
                assert_eq!(tree(mount.path()), was, "a fork of {volume}");
                volumes.insert(name, mount);
            }
            (4, Some(of)) if volumes.len() < 5 => {
                let name = format!("v{next}");
                run(&mut farm.ask(["fork", &of, &name]));
                let mount = farm.mount(&name, "");
                assert_eq!(tree(mount.path()), snapshots[&of], "a fork of {of}");
                volumes.insert(name, mount);
            }
            (5, Some(of)) => {
                let volume = of.split('@').next().unwrap().to_owned();
                let keep = format!("k{next}");
                let was = tree(volumes[&volume].path());
                run(&mut farm.ask(["rollback", &of, "--keep-as", &keep]));
                assert_eq!(tree(volumes[&volume].path()), snapshots[&of], "back to {of}");
                snapshots.insert(format!("{volume}@{keep}"), was);
            }
            (6, Some(of)) => {
                run(&mut farm.ask(["snapshot", "delete", &of]));
                snapshots.remove(&of);
            }
            (7, _) if volumes.len() > 2 => {
                volumes.remove(&volume).unwrap().unmount();
                // Of a mount that was left while a killed server came back its session may be known still.
                wait_until("the volume is deleted", PATIENCE, || {
                    farm.volume(["delete", &volume, "--snapshots"]).output().unwrap().status.success()
                });
                snapshots.retain(|name, _| !name.starts_with(&format!("{volume}@")));
            }
            (8, _) => drop(run(&mut farm.volume(["sweep", &volume]))),
            (9, _) => {
                farm.kill_server();
                farm.start_server();
            }
            (11, Some(of)) => {
                // Of the same volume or of another one: all are of one family.
                let other =
                    snapshots.keys().nth(choices.below(snapshots.len() as u64) as usize).unwrap().clone();
                tells_what_differs(&farm, (&of, &snapshots[&of]), (&other, &snapshots[&other]));
            }
            // The first time from what has changed since another one was named, then from all rows, each time against what is read.
            (12, Some(of)) => drop(run(&mut farm.ask(["verify", &of, "--deep"]))),
            (10, Some(of)) => assert_eq!(seen(&farm, &of, &format!("view{next}")), snapshots[&of], "{of}"),
            _ => {}
        }
    }
    for volume in volumes.keys() {
        let now = tree(volumes[volume].path());
        for (of, was) in &snapshots {
            tells_what_differs(&farm, (of, was), (volume, &now));
        }
    }
    for (name, was) in &snapshots {
        assert_eq!(&seen(&farm, name, &format!("last-{}", name.replace('@', "-"))), was, "{name}");
    }
    for volume in volumes.keys() {
        is_sound(&farm, volume);
    }
    let names: Vec<String> = volumes.keys().cloned().collect();
    volumes.into_values().for_each(Mount::unmount);
    for name in names {
        run(&mut farm.volume(["delete", &name, "--snapshots"]));
    }
    is_given_back(&farm.dir().join("store"));
}
