//! Who may do what.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;

use crate::setup::calls;
use crate::setup::farm::{Place, sh};

/// Runs a script as user and group 1000 with a supplementary group; whether it succeeded.
fn as_user(place: &Place, groups: &str, script: &str) -> bool {
    let groups = if groups.is_empty() { "--clear-groups".to_owned() } else { format!("--groups {groups}") };
    let script = format!("setpriv --reuid 1000 --regid 1000 {groups} sh -euc '{script}'");
    sh(&script).current_dir(place.path()).stderr(std::process::Stdio::null()).status().unwrap().success()
}

/// A place that others can reach.
fn open_place() -> Place {
    let place = Place::new();
    calls::chmod(place.path(), 0o755);
    calls::chmod(place.path().parent().unwrap(), 0o755);
    place
}

fn mode(place: &Place, name: &str) -> u32 {
    fs::metadata(place.join(name)).unwrap().mode() & 0o7777
}

#[test]
fn a_write_by_others_clears_setuid_and_setgid() {
    let place = open_place();
    for name in ["write", "truncate", "root"] {
        fs::write(place.join(name), b"x").unwrap();
        calls::chmod(&place.join(name), 0o6777);
    }
    assert!(as_user(&place, "", "echo more >> write"));
    assert_eq!(mode(&place, "write"), 0o777);
    assert!(as_user(&place, "", "truncate -s 0 truncate"));
    assert_eq!(mode(&place, "truncate"), 0o777);
    fs::write(place.join("root"), b"by root").unwrap();
    assert_eq!(mode(&place, "root"), 0o6777);
    // A change of owner clears them as well.
    calls::chown(&place.join("root"), 1000, 1000);
    assert_eq!(mode(&place, "root"), 0o777);
}

/// The permission bits, without asking for anything that would have the kernel look at the file anew.
fn mode_alone(path: &std::path::Path) -> u32 {
    let path = calls::c_path(path);
    // SAFETY: all zeroes is a value of it, and both pointers are valid.
    unsafe {
        let mut stat: libc::statx = std::mem::zeroed();
        assert_eq!(libc::statx(libc::AT_FDCWD, path.as_ptr(), 0, libc::STATX_MODE, &raw mut stat), 0);
        u32::from(stat.stx_mode) & 0o7777
    }
}

#[test]
fn who_rewrites_a_program_takes_its_setuid_away_at_once() {
    let place = open_place();
    let writes = [
        ("direct", "dd if=/dev/zero of=direct bs=4096 count=1 conv=notrunc oflag=direct"),
        ("cached", "dd if=/dev/zero of=cached bs=4096 count=1 conv=notrunc"),
        ("part", "dd if=/dev/zero of=part bs=100 seek=7 count=1 conv=notrunc"),
        ("append", "dd if=/dev/zero of=append bs=100 count=1 conv=notrunc oflag=append"),
        ("allocated", "fallocate -l 1000000 allocated"),
        ("punched", "fallocate -p -o 0 -l 4096 punched"),
        ("cut", "truncate -s 100 cut"),
    ];
    for (name, write) in writes {
        let program = place.join(name);
        fs::copy("/usr/bin/id", &program).unwrap();
        let by_others = || {
            let output = std::process::Command::new("setpriv")
                .args(["--reuid=2000", "--regid=2000", "--clear-groups"])
                .arg(&program)
                .arg("-u")
                .output()
                .unwrap();
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        };
        calls::chown(&program, 1000, 1000);
        calls::chmod(&program, 0o6755);
        assert_eq!((mode_alone(&program), by_others().as_str()), (0o6755, "1000"));
        assert!(as_user(&place, "", write), "{write}");
        assert_eq!(mode_alone(&program), 0o755, "{name}");
        // What it is now does not run, but not with the rights of its owner for certain.
        assert_ne!(by_others(), "1000", "{name}");
        assert_eq!(mode(&place, name), 0o755, "{name}");
        // Whoever may keep them keeps them.
        calls::chmod(&program, 0o6755);
        fs::OpenOptions::new().append(true).open(&program).unwrap().write_all(b"x").unwrap();
        assert_eq!((mode_alone(&program), mode(&place, name)), (0o6755, 0o6755));
    }
}

#[test]
fn a_sticky_directory_protects_what_others_made() {
    let place = open_place();
    let tmp = place.join("tmp");
    fs::create_dir(&tmp).unwrap();
    calls::chmod(&tmp, 0o1777);
    fs::write(tmp.join("of-root"), b"x").unwrap();
    assert!(as_user(&place, "", "touch tmp/mine; mv tmp/mine tmp/still-mine; rm tmp/still-mine"));
    assert!(!as_user(&place, "", "rm -f tmp/of-root"));
    assert!(!as_user(&place, "", "mv tmp/of-root tmp/x"));
    assert!(tmp.join("of-root").exists());
}

#[test]
fn a_setgid_directory_hands_its_group_down() {
    let mut place = open_place();
    fs::create_dir(place.join("team")).unwrap();
    calls::chown(&place.join("team"), 0, 2000);
    calls::chmod(&place.join("team"), 0o2777);
    assert!(as_user(&place, "", "touch team/file; mkdir team/dir; touch team/dir/deep"));
    place.remount();
    for (name, setgid) in [("team/file", 0), ("team/dir", 0o2000), ("team/dir/deep", 0)] {
        let info = fs::metadata(place.join(name)).unwrap();
        assert_eq!((info.uid(), info.gid(), info.mode() & 0o2000), (1000, 2000, setgid), "{name}");
    }
}

#[test]
fn rights_of_supplementary_groups() {
    let place = open_place();
    fs::write(place.join("shared"), b"x").unwrap();
    calls::chown(&place.join("shared"), 0, 2000);
    calls::chmod(&place.join("shared"), 0o660);
    assert!(!as_user(&place, "", "cat shared"));
    assert!(as_user(&place, "2000", "cat shared; echo y >> shared"));
    assert!(!as_user(&place, "2000", "chmod 666 shared"));
    // Without the group, the setgid bit of one's own file goes with a chmod.
    fs::write(place.join("own"), b"x").unwrap();
    calls::chown(&place.join("own"), 1000, 2000);
    assert!(as_user(&place, "", "chmod 2755 own"));
    assert_eq!(mode(&place, "own"), 0o755);
    assert!(as_user(&place, "2000", "chmod 2755 own"));
    assert_eq!(mode(&place, "own"), 0o2755);
}

#[test]
fn rights_of_owner_group_and_others() {
    let place = open_place();
    fs::write(place.join("private"), b"x").unwrap();
    calls::chmod(&place.join("private"), 0o600);
    assert!(!as_user(&place, "", "cat private"));
    assert!(!as_user(&place, "", "touch new"));
    fs::create_dir(place.join("home")).unwrap();
    calls::chown(&place.join("home"), 1000, 1000);
    assert!(as_user(&place, "", "umask 027; echo x > home/file; mkdir home/dir"));
    assert_eq!((mode(&place, "home/file"), mode(&place, "home/dir")), (0o640, 0o750));
    assert!(!as_user(&place, "", "chown 0 home/file"));
    assert!(as_user(&place, "", "chmod 0 home/file; ! cat home/file; chmod 600 home/file; cat home/file"));
    calls::chmod(&place.join("home"), 0o500);
    assert!(!as_user(&place, "", "touch home/new"));
    assert!(as_user(&place, "", "mv home/file home/file2 || true; ls home/file"));
}
