//! Files that another host gives to somebody else.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use crate::setup::farm::{Farm, python, run};

/// The owner has the file open while it is given away; a second call comes from who has the capability.
const TRIES: &str = r#"
import os, sys
path, uid = sys.argv[1], int(sys.argv[2])
fd = os.open(path, os.O_RDWR)
os.write(1, b'open\n')
sys.stdin.readline()
def by(uid, does):
    if os.fork() == 0:
        os.setgroups([]); os.setgid(uid); os.setuid(uid)
        try: does(); os._exit(0)
        except PermissionError: os._exit(1)
    return os.waitstatus_to_exitcode(os.wait()[1])
for does in (lambda: os.fchmod(fd, 0o4755), lambda: os.fchown(fd, -1, uid), lambda: os.utime(fd, (1, 1))):
    print(by(uid, does), end=' ')
os.utime(fd)
print(by(0, lambda: os.fchmod(fd, 0o640)), flush=True)
"#;

#[test]
fn who_was_the_owner_of_an_open_file_may_not_do_what_the_owner_may() {
    use std::io::{BufRead, BufReader, Write};
    use std::process::Stdio;
    let (_farm, mounts) = Farm::shared(2);
    let (path, there) = (mounts[0].join("file"), mounts[1].join("file"));
    fs::write(&path, "text").unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    chown(&path, Some(1001), Some(1001)).unwrap();
    let mut command = python(TRIES);
    command.arg(&path).arg("1001").stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut tries = command.spawn().unwrap();
    let mut said = BufReader::new(tries.stdout.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert_eq!(line, "open\n");
    chown(&there, Some(0), Some(0)).unwrap();
    tries.stdin.take().unwrap().write_all(b"\n").unwrap();
    line.clear();
    said.read_line(&mut line).unwrap();
    assert!(tries.wait().unwrap().success());
    assert_eq!(line, "1 1 1 0\n", "refused three times, and what root does is done");
    let found = fs::metadata(&there).unwrap();
    assert_eq!((found.mode() & 0o7777, found.uid(), found.gid()), (0o640, 0, 0));
    assert_eq!(run(python("import os, sys; print(os.stat(sys.argv[1]).st_mtime > 1)").arg(&path)), "True\n");
}
