//! Crash points of what makes, replaces and deletes versions of a tree. See [`crate::faults::crash_points`].

use std::fs;
use std::os::unix::fs::MetadataExt;

use crate::faults::crash_points::{arm, at, await_death, sound};
use crate::setup::farm::{Farm, noise, run};
use crate::versions::live::{is_given_back, seen, tree};

/// Points, and the command that passes them.
pub(crate) const VERSIONING: [(&str, &[&str]); 14] = [
    ("snapshot.entered", &["snapshot", "create", "v@new"]),
    ("snapshot.checkpoint", &["snapshot", "create", "v@new"]),
    ("snapshot.marked", &["snapshot", "delete", "v@mounted"]),
    ("family.second-removed", &["snapshot", "delete", "v@mounted"]),
    ("leftovers.database-deleted", &["snapshot", "delete", "v@mounted"]),
    ("snapshot.checkpoint-deleted", &["snapshot", "delete", "v@mounted"]),
    ("fork.entered", &["fork", "v@kept", "new"]),
    ("clone.entered", &["fork", "v@kept", "new"]),
    ("clone.made", &["fork", "v@kept", "new"]),
    ("replace.ready", &["rollback", "v@kept", "--keep-as", "was"]),
    ("replace.ready", &["promote", "gone", "--keep-as", "was"]),
    ("replace.registered", &["promote", "gone", "--keep-as", "was"]),
    // What is left after these goes behind them.
    ("leftovers.pack-deleted", &["volume", "delete", "gone"]),
    ("leftovers.table-deleted", &["snapshot", "delete", "v@forth"]),
];

#[test]
fn a_server_dies_while_versions_are_made_replaced_and_deleted() {
    for (point, command) in VERSIONING {
        eprintln!("{point}");
        let mut farm = Farm::new();
        farm.create("v");
        let mounts = farm.mounts("v", 2, "");
        let write = |name: &str, seed: u64| fs::write(mounts[0].join(name), noise(seed, 300_000)).unwrap();
        write("file", 1);
        run(&mut farm.ask(["snapshot", "create", "v@kept"]));
        let kept = tree(mounts[0].path());
        write("file", 2);
        write("more", 3);
        run(&mut farm.ask(["snapshot", "create", "v@mounted"]));
        assert_eq!(seen(&farm, "v@mounted", "mounted"), tree(mounts[1].path()));
        run(&mut farm.ask(["fork", "v", "gone"]));
        let gone = farm.mount("gone", "");
        fs::write(gone.join("own"), noise(4, 300_000)).unwrap();
        let of_gone = tree(gone.path());
        gone.unmount();
        // A database that snapshots need and no volume, with tables that only its last state has.
        run(&mut farm.ask(["rollback", "v@kept", "--keep-as", "back"]));
        run(&mut farm.ask(["snapshot", "create", "v@between"]));
        write("between", 6);
        run(&mut farm.ask(["rollback", "v@back", "--keep-as", "forth"]));
        write("last", 5);
        let was = tree(mounts[1].path());

        arm(&mut farm, &at(point, 1));
        assert_eq!(tree(mounts[1].path()), was);
        let mut asked = crate::setup::farm::hayloft(command);
        let done = asked.args(["--server", &farm.address]).output().unwrap();
        await_death(&mut farm, point);
        farm.set_env(&[]);
        farm.start_server();
        let now = if point == "replace.registered" { &of_gone } else { &was };
        assert_eq!((&tree(mounts[0].path()), &tree(mounts[1].path())), (now, now), "{point}");
        assert_eq!(seen(&farm, "v@kept", "kept"), kept, "{point}");
        if (point, command[0]) == ("replace.ready", "promote") {
            // It was to go on with the volume's inode numbers, which the volume has kept.
            let fork = farm.mount_as("gone", "still", "", None);
            fs::write(fork.join("in-fork"), "").unwrap();
            fs::write(mounts[0].join("in-volume"), "").unwrap();
            let numbers = [fork.join("in-fork"), mounts[0].join("in-volume")];
            let [one, other] = numbers.map(|path| fs::metadata(path).unwrap().ino());
            assert!(one.abs_diff(other) > 1000, "{one} {other}");
            fork.unmount();
        }
        if !done.status.success() {
            let mut again = crate::setup::farm::hayloft(command);
            let again = again.args(["--server", &farm.address]).output().unwrap();
            let said = String::from_utf8_lossy(&again.stderr);
            // What counts was done before it died, or what the tree was is kept already.
            let is_done = said.contains("there is no ") || point == "replace.ready";
            assert!(again.status.success() || is_done, "{point}: {said}");
        }
        if command[0] == "fork" {
            assert_eq!(seen(&farm, "new", "new"), kept, "{point}");
        }
        sound(&farm);
        mounts.into_iter().for_each(crate::setup::farm::Mount::unmount);
        for name in ["v", "gone", "new"] {
            let deleted = farm.volume(["delete", name, "--snapshots"]).output().unwrap();
            let said = String::from_utf8_lossy(&deleted.stderr).into_owned();
            assert!(deleted.status.success() || said.contains("there is no volume"), "{point}: {said}");
        }
        is_given_back(&farm.dir().join("store"));
    }
}
