//! The hosts of a volume come, go, are listed, are thrown out, and die.

use std::fs;
use std::io::Write;

use serde_json::Value;

use crate::faults::crash::disturbed;
use crate::setup::farm::{Farm, Mount, run, run_failing};
use crate::setup::model::{Tree, find_prefix, read_tree};

fn of<'a>(clients: &'a [Value], mount: &Mount) -> &'a Value {
    clients.iter().find(|client| client["pid"] == mount.pid()).expect("every mount is listed")
}

#[test]
fn clients_lists_every_mount_with_what_it_holds() {
    let (farm, mut mounts) = Farm::shared(3);
    fs::create_dir_all(mounts[0].join("mine/deep")).unwrap();
    fs::write(mounts[0].join("mine/deep/file"), b"x").unwrap();
    mounts[0].sync();
    fs::read_dir(mounts[1].join("mine")).unwrap().count();
    let clients = farm.clients("v");
    assert_eq!(clients.len(), 3, "{clients:?}");
    for mount in &mounts {
        let client = of(&clients, mount);
        assert_eq!(client["volume"], "v");
        assert_eq!(client["mount_point"].as_str().unwrap(), mount.path().to_str().unwrap());
        assert_eq!((&client["connected"], &client["read_only"]), (&true.into(), &false.into()));
        assert_eq!(client["session"].as_str().map(str::len), Some(16), "{client}");
        for key in ["silent_ms", "own_directories", "read_directories", "own_files", "locks"] {
            assert!(client[key].is_u64(), "{key} is missing in {client}");
        }
    }
    assert!(of(&clients, &mounts[0])["own_directories"].as_u64() >= Some(1), "{clients:?}");
    assert!(of(&clients, &mounts[1])["read_directories"].as_u64() >= Some(1), "{clients:?}");
    let sessions: std::collections::HashSet<&str> =
        clients.iter().map(|client| client["session"].as_str().unwrap()).collect();
    assert_eq!(sessions.len(), 3);
    // For people, and of all volumes.
    farm.create("w");
    let other = farm.mount("w", "ro");
    let table = run(&mut farm.hayloft(["clients", &farm.address]));
    for mount in mounts.iter().chain([&other]) {
        assert!(table.contains(mount.path().to_str().unwrap()), "{table}");
    }
    assert_eq!(farm.clients("w")[0]["read_only"], true);
    mounts.pop().unwrap().unmount();
    assert_eq!(farm.clients("v").len(), 2);
    let (code, said) = run_failing(&mut farm.hayloft(["clients", &farm.address, "--volume", "none"]));
    assert_eq!(code, 4, "{said}");
}

#[test]
fn an_evicted_mount_is_in_nobodys_way_and_keeps_what_it_could_not_send() {
    let (farm, mounts) = Farm::shared_with(2, "commit=3600", &[]);
    let (one, two) = (&mounts[0], &mounts[1]);
    fs::create_dir(one.join("dir")).unwrap();
    fs::write(one.join("dir/sent"), b"sent").unwrap();
    one.sync();
    fs::write(one.join("dir/unsent"), b"never").unwrap();
    let (code, said) = run_failing(&mut farm.hayloft(["evict", &farm.address, "v", "999999"]));
    assert!(code != 0 && said.contains("999999"), "{said}");
    farm.evict("v", one);
    let clients = farm.clients("v");
    assert!(clients.iter().all(|client| client["pid"] != one.pid()), "{clients:?}");
    assert_eq!(fs::read(two.join("dir/sent")).unwrap(), b"sent");
    assert!(!two.join("dir/unsent").exists());
    fs::write(two.join("dir/unsent"), b"mine").unwrap();
    // It has to be told that its changes are nowhere.
    let (_, said) = run_failing(crate::setup::farm::hayloft(["sync"]).arg(one.path()));
    assert!(said.contains("kept in"), "{said}");
    let kept = one.unsent();
    assert_eq!(kept.len(), 1, "{}", one.log());
    let report = fs::read_to_string(kept[0].join("REPORT")).unwrap();
    assert!(report.contains("dir/unsent") && !report.contains("dir/sent"), "{report}");
    assert_eq!(fs::read(kept[0].join("files/dir/unsent")).unwrap(), b"never");
    // The volume is as the other left it, and the host may come again.
    let again = farm.mount("v", "");
    assert_eq!(fs::read(again.join("dir/unsent")).unwrap(), b"mine");
}

#[test]
fn a_killed_mount_leaves_the_others_a_prefix() {
    let (farm, mut mounts) = Farm::shared_with(2, "commit=0.2", &["--lease", "2"]);
    let mut tree = Tree::new();
    for round in 0..crate::setup::farm::rounds(3, 40) as u64 {
        let dying = mounts.pop().unwrap();
        let pause = |ms| std::thread::sleep(std::time::Duration::from_millis(ms));
        // What another host has seen cannot be lost any more.
        let first = disturbed(&dying, &tree, 500 + round, || pause(300));
        assert_eq!(read_tree(mounts[0].path()), first.tree);
        let second = disturbed(&dying, &first.tree, 600 + round, || {
            pause(100 + round * 97 % 900);
            crate::setup::farm::kill(dying.pid(), libc::SIGKILL);
        });
        dying.kill();
        let found = read_tree(mounts[0].path());
        let kept = find_prefix(&first.tree, &second.ops, second.durable, &found);
        eprintln!("{} changes, {} durable, {kept} kept", second.ops.len(), second.durable);
        // The survivor may change everything that the dead one held.
        let third = disturbed(&mounts[0], &found, 700 + round, || pause(300));
        tree = third.tree;
        let next = farm.mount_as("v", &format!("mnt-v-next-{round}"), "commit=0.2", None);
        assert_eq!(read_tree(next.path()), tree);
        mounts.push(next);
    }
    drop(mounts);
    let said = run(&mut farm.volume(["check", "v", "--content"]));
    assert!(said.contains("is sound"), "{said}");
}

#[test]
fn what_another_host_has_fsynced_outlives_its_writer() {
    let (_farm, mut mounts) = Farm::shared_with(2, "commit=60", &["--lease", "2"]);
    let (one, two) = (mounts.remove(0), mounts.remove(0));
    let open = |mount: &Mount, name: &str| {
        fs::OpenOptions::new().create(true).append(true).open(mount.join(name)).unwrap()
    };
    // Who makes it durable has it open from before, or opens it when it has been written to, or has never looked at it since.
    for (round, name) in ["open", "opened", "again"].into_iter().enumerate() {
        let mut writer = open(&one, name);
        let mut syncer = open(&two, name);
        syncer.write_all(b"first ").unwrap();
        syncer.sync_all().unwrap();
        writer.write_all(b"second").unwrap();
        if round == 1 {
            syncer = open(&two, name);
        }
        syncer.sync_all().unwrap();
        if round == 2 {
            writer.write_all(b" third").unwrap();
            syncer.sync_data().unwrap();
        }
    }
    one.kill();
    for (name, expected) in
        [("open", "first second"), ("opened", "first second"), ("again", "first second third")]
    {
        assert_eq!(fs::read_to_string(two.join(name)).unwrap(), expected, "{name}");
    }
}
