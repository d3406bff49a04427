//! Changes that can never be applied are kept on the client's disk and reported by name.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use crate::setup::farm::{Farm, hayloft, run};

#[test]
fn changes_of_an_ended_session_are_kept_by_name() {
    let mut farm = Farm::new();
    farm.create("v");
    let (point, state) = (farm.dir().join("mnt"), farm.dir().join("state"));
    fs::create_dir(&point).unwrap();
    let mut client = hayloft(["mount", &format!("{}/v", farm.address), "--foreground", "-o", "commit=3600"])
        .arg("--cache-dir")
        .arg(&state)
        .arg(&point)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(client.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.starts_with("mounted "), "{line}");
    fs::write(point.join("old"), b"durable").unwrap();
    run(hayloft(["sync"]).arg(&point));
    fs::remove_file(point.join("old")).unwrap();
    fs::create_dir_all(point.join("deep/er")).unwrap();
    let large: Vec<u8> = (0..300_000u32).map(|at| at as u8).collect();
    fs::write(point.join("deep/er/large"), &large).unwrap();
    fs::write(point.join("small"), b"small").unwrap();
    fs::set_permissions(point.join("small"), fs::Permissions::from_mode(0o4600)).unwrap();
    // A server that knows nothing of the session: its store was lost.
    farm.kill_server();
    fs::remove_dir_all(farm.dir().join("store")).unwrap();
    farm.start_server();
    farm.create("v");
    let sync = hayloft(["sync"]).arg(&point).output().unwrap();
    let said = String::from_utf8_lossy(&sync.stderr).into_owned();
    assert!(!sync.status.success() && said.contains("kept in"), "{said}");
    assert!(fs::write(point.join("more"), b"x").is_err(), "nothing more is taken that would be lost");
    let kept = fs::read_dir(state.join("unsent")).unwrap().next().unwrap().unwrap().path();
    let report = fs::read_to_string(kept.join("REPORT")).unwrap();
    for expected in ["changed   small", "changed   deep/er/large", "removed   /old"] {
        assert!(report.contains(expected), "{report}");
    }
    assert_eq!(fs::read(kept.join("files/deep/er/large")).unwrap(), large);
    assert_eq!(fs::read(kept.join("files/small")).unwrap(), b"small");
    // What was private stays private, and nothing becomes a program of root's.
    let mode = |path: &str| fs::metadata(kept.join(path)).unwrap().permissions().mode() & 0o7777;
    assert_eq!(
        (mode("files/small"), mode("files/deep/er/large"), mode(""), mode("REPORT")),
        (0o600, 0o644, 0o700, 0o600)
    );
    let _ = client.kill();
    let _ = client.wait();
    let _ = Command::new("umount").arg("-l").arg(&point).status();
}
