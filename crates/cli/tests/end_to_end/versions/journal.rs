//! What differs is found without reading the trees.

use std::fs;

use serde_json::Value;

use super::live::{Tree, snapshot, tells_what_differs, tree};
use crate::setup::farm::{Farm, run};

const FILES: u64 = 3000;

/// How many rows are read to tell what differs between two versions, which is right.
fn rows_read(farm: &Farm, (from, old): (&str, &Tree), (to, new): (&str, &Tree)) -> u64 {
    tells_what_differs(farm, (from, old), (to, new));
    let told: Value = serde_json::from_str(&run(&mut farm.ask(["diff", from, to, "--json"]))).unwrap();
    told["rows_read"].as_u64().unwrap()
}

/// Also when their table files have nothing in common any more, since all that each of them has was written anew.
#[test]
fn what_differs_is_told_from_what_was_written_since_two_versions_parted() {
    let (mut farm, mount) = Farm::mounted("v");
    for file in 0..FILES {
        let dir = mount.join(&format!("d{}", file / 100));
        if file % 100 == 0 {
            fs::create_dir(&dir).unwrap();
        }
        fs::write(dir.join(file.to_string()), format!("file {file}")).unwrap();
    }
    snapshot(&farm, "v@base");
    let base = tree(mount.path());
    run(&mut farm.ask(["fork", "v@base", "w"]));
    let fork = farm.mount("w", "");
    fs::write(mount.join("d3/301"), "here").unwrap();
    fs::rename(mount.join("d4"), mount.join("moved")).unwrap();
    fs::write(fork.join("d6/601"), "there").unwrap();
    fs::remove_file(fork.join("d7/701")).unwrap();
    fs::create_dir(fork.join("new")).unwrap();
    fs::write(fork.join("new/file"), vec![7; 200_000]).unwrap();
    for volume in ["v", "w"] {
        snapshot(&farm, &format!("{volume}@before"));
        run(&mut farm.volume(["sweep", volume]));
    }
    farm.kill_server();
    farm.start_server();
    fs::write(mount.join("d3/302"), "later").unwrap();
    fs::write(fork.join("d3/303"), "later").unwrap();
    let (here, there) = (tree(mount.path()), tree(fork.path()));
    for (from, to) in [
        (("v@base", &base), ("v", &here)),
        (("v@base", &base), ("w", &there)),
        (("v", &here), ("w", &there)),
        (("w", &there), ("v", &here)),
    ] {
        let read = rows_read(&farm, from, to);
        assert!(read < FILES / 10, "{read} rows were read for {} and {}", from.0, to.0);
    }
    // After a way back the volume goes on from there.
    run(&mut farm.ask(["rollback", "v@base", "--keep-as", "kept"]));
    fs::write(mount.join("d3/304"), "anew").unwrap();
    let back = tree(mount.path());
    for (from, to) in [(("v@kept", &here), ("v", &back)), (("v", &back), ("w", &there))] {
        let read = rows_read(&farm, from, to);
        assert!(read < FILES / 10, "{read} rows were read for {} and {}", from.0, to.0);
    }
}
