//! Files that are open when the volume gets another tree: they stay what they were.

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::setup::farm::{Farm, noise, run, wait_until};

const ESTALE: Option<i32> = Some(116);
const LEN: usize = 1 << 20;

/// All of a file, past what the kernel keeps of it.
fn read(file: &File) -> std::io::Result<Vec<u8>> {
    drop_pages(file);
    let mut content = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut content, 0)?;
    Ok(content)
}

#[allow(unsafe_code)]
fn drop_pages(file: &File) {
    // SAFETY: the descriptor is open.
    let failed = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
    assert_eq!(failed, 0);
}

#[test]
fn what_is_open_stays_what_it_was_when_the_tree_is_replaced() {
    let (mut farm, mounts) = Farm::shared(2);
    let [a, b] = &mounts[..] else { panic!("two mounts") };
    let (then, now) = (noise(1, LEN), noise(2, 2 * LEN));
    fs::write(a.join("data"), &then).unwrap();
    fs::write(a.join("small"), "then").unwrap();
    fs::write(a.join("tool"), noise(3, LEN)).unwrap();
    run(&mut farm.ask(["snapshot", "create", "v@then"]));
    // The same inodes with other contents.
    fs::write(b.join("data"), &now).unwrap();
    fs::write(b.join("small"), "now").unwrap();
    fs::write(b.join("tool"), fs::read("/bin/sh").unwrap()).unwrap();
    fs::set_permissions(b.join("tool"), Permissions::from_mode(0o755)).unwrap();
    fs::write(b.join("made"), "now").unwrap();
    let mut tool = Command::new(a.join("tool"))
        .args(["-c", "while read line; do echo got $line; done"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = BufReader::new(tool.stdout.take().unwrap());
    let mut answers = |tool: &mut std::process::Child, word: &str| {
        writeln!(tool.stdin.as_mut().unwrap(), "{word}").unwrap();
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        line
    };
    assert_eq!(answers(&mut tool, "one"), "got one\n");
    let open = |name: &str| File::options().read(true).write(true).open(a.join(name)).unwrap();
    let (data, small, made) = (open("data"), open("small"), open("made"));
    let mut first = [0; 4096];
    data.read_exact_at(&mut first, 0).unwrap();
    run(&mut farm.ask(["rollback", "v@then", "--keep-as", "now"]));

    let is_then = |farm: &Farm| {
        for mount in &mounts {
            assert!(fs::read(mount.join("data")).unwrap() == then, "{}", mount.path().display());
            assert_eq!(fs::read(mount.join("small")).unwrap(), b"then");
            assert!(!mount.join("made").exists());
        }
        run(&mut farm.volume(["check", "v", "--content"]));
    };
    let is_open = |data: &File, small: &File, made: &File| {
        assert!(read(data).unwrap() == now, "an open file has other content");
        assert_eq!(read(small).unwrap(), b"now");
        assert_eq!(read(made).unwrap(), b"now");
    };
    is_then(&farm);
    is_open(&data, &small, &made);
    assert_eq!(answers(&mut tool, "two"), "got two\n");
    // Nothing of them changes any more, and nothing of the tree that has come because of them.
    let error = |result: std::io::Result<()>| result.unwrap_err().raw_os_error();
    assert_eq!(error(data.write_all_at(b"late", 0)), ESTALE);
    assert_eq!(error(small.set_len(0)), ESTALE);
    assert_eq!(error(made.set_permissions(Permissions::from_mode(0o600))), ESTALE);
    is_then(&farm);
    // The same inodes, opened anew, are those of the other tree.
    let again = open("small");
    assert_eq!(again.metadata().unwrap().ino(), small.metadata().unwrap().ino());
    assert_eq!(read(&again).unwrap(), b"then");
    again.write_all_at(b"goes on", 0).unwrap();
    assert_eq!(fs::read(b.join("small")).unwrap(), b"goes on");
    fs::hard_link(a.join("small"), a.join("linked")).unwrap();
    fs::rename(a.join("linked"), a.join("renamed")).unwrap();
    assert_eq!(fs::read(b.join("renamed")).unwrap(), b"goes on");
    fs::remove_file(b.join("renamed")).unwrap();
    fs::write(b.join("small"), "then").unwrap();
    assert_eq!(read(&again).unwrap(), b"then", "what another host writes is seen");
    is_open(&data, &small, &made);

    farm.kill_server();
    farm.start_server();
    is_open(&data, &small, &made);
    is_then(&farm);
    assert_eq!(answers(&mut tool, "three"), "got three\n");
    // And once more, forward: three trees are open at once.
    run(&mut farm.ask(["rollback", "v@now"]));
    assert!(fs::read(a.join("data")).unwrap() == now);
    assert_eq!(fs::read(b.join("made")).unwrap(), b"now");
    fs::write(b.join("small"), "later").unwrap();
    assert_eq!(read(&again).unwrap(), b"then");
    is_open(&data, &small, &made);
    assert_eq!(fs::read(a.join("small")).unwrap(), b"later");
    assert_eq!(answers(&mut tool, "four"), "got four\n");
    drop(tool.stdin.take());
    assert!(tool.wait().unwrap().success());
    drop((data, small, made, again));
    run(&mut farm.volume(["check", "v", "--content"]));
}

#[test]
fn an_open_file_does_not_hold_the_tree_that_was_replaced() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.join("file"), noise(1, LEN)).unwrap();
    run(&mut farm.ask(["snapshot", "create", "v@then"]));
    fs::write(mount.join("file"), noise(2, LEN)).unwrap();
    let file = File::open(mount.join("file")).unwrap();
    run(&mut farm.ask(["rollback", "v@then", "--keep-as", "now"]));
    assert!(read(&file).unwrap() == noise(2, LEN));
    // As soon as nobody has read for a while.
    let delete = || farm.ask(["snapshot", "delete", "v@now"]).output().unwrap().status.success();
    wait_until("the snapshot is not mounted any more", Duration::from_secs(60), delete);
    assert_eq!(read(&file).unwrap_err().raw_os_error(), ESTALE);
    // Another one of that name is another tree.
    run(&mut farm.ask(["snapshot", "create", "v@now"]));
    assert_eq!(read(&file).unwrap_err().raw_os_error(), ESTALE);
    assert!(fs::read(mount.join("file")).unwrap() == noise(1, LEN));
}
