//! What is known is not asked again; what is unknown comes in few requests.

use std::fs;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;

use crate::setup::farm::{Farm, Mount, number, run, sh, wait_until};

/// Makes a source tree of so many small files.
pub(crate) fn tree(dir: &Path, files: usize) {
    for at in 0..files {
        let folder = dir.join(format!("part-{}/sub-{}", at / 400, at / 40 % 10));
        if at % 40 == 0 {
            fs::create_dir_all(&folder).unwrap();
        }
        // 0.2 to 12 KiB, as in source trees.
        fs::write(
            folder.join(format!("file-{at}.c")),
            vec![b'a' + (at % 26) as u8; 200 + at * 7919 % 12_000],
        )
        .unwrap();
    }
}

/// find, stat and read, names that are not there among them.
pub(crate) const PASS: &str = "find . -type f | wc -l >/dev/null
    find . -exec stat -c %i {} + >/dev/null
    find . -type f -exec cat {} + >/dev/null
    for name in part-0 part-0/sub-1; do ! test -e $name/missing.h; done";

pub(crate) fn lookups(stats: &Value) -> u64 {
    number(stats, "fuse.requests.LOOKUP")
}

/// A tree of which the mount has nothing yet.
fn cold_tree() -> (Farm, Mount) {
    let (farm, mount) = Farm::mounted("v");
    tree(mount.path(), 1200);
    mount.unmount();
    let mount = farm.mount("v", "");
    (farm, mount)
}

/// Runs something twice; the second time sends nothing to the server and no LOOKUP to the client.
fn second_is_silent(mount: &Mount, mut pass: impl FnMut()) {
    pass();
    let before = mount.stats();
    pass();
    let after = mount.stats();
    let server = number(&after, "server.requests.total") - number(&before, "server.requests.total");
    let kinds = (&before["server"]["requests"], &after["server"]["requests"]);
    assert_eq!(server, 0, "requests to the server: {kinds:?}");
    assert_eq!(lookups(&after) - lookups(&before), 0, "{} {}", before["fuse"], after["fuse"]);
}

#[test]
fn a_second_pass_sends_nothing() {
    let (_farm, mount) = cold_tree();
    second_is_silent(&mount, || drop(run(sh(PASS).current_dir(mount.path()))));
}

#[test]
fn contents_come_ahead_of_need_when_files_are_read_and_not_for_a_walk() {
    let (farm, mount) = cold_tree();
    let blocks = |key: &str| number(&mount.stats(), key);
    assert_eq!(run(sh("find . -type f -size +0 | wc -l").current_dir(mount.path())).trim(), "1200");
    assert_eq!(blocks("cache.blocks_prefetched"), 0);
    mount.unmount();
    let mount = farm.mount("v", "");
    let blocks = |key: &str| number(&mount.stats(), key);
    run(sh("cat part-0/sub-0/*.c part-1/sub-0/*.c >/dev/null").current_dir(mount.path()));
    let ahead = blocks("cache.blocks_prefetched");
    run(sh("cat part-1/sub-1/*.c part-2/sub-0/*.c >/dev/null").current_dir(mount.path()));
    assert!(ahead > 0 && blocks("cache.block_misses") < 20, "{}", mount.stats()["cache"]);
}

#[test]
fn a_second_pass_sends_nothing_in_a_chroot_with_a_bind_mount() {
    let (farm, mount) = cold_tree();
    let script = format!(
        "mkdir -p {dir}/root; mount --bind / {dir}/root; mount --bind {mnt} {dir}/root/mnt
        exec chroot {dir}/root sh -euc 'cd /mnt; {PASS}'",
        dir = farm.dir().display(),
        mnt = mount.path().display()
    );
    let pass = || {
        let mut command = std::process::Command::new("unshare");
        run(command.args(["--mount", "--propagation", "private", "sh", "-euc", &script]));
    };
    second_is_silent(&mount, pass);
}

#[test]
fn a_cold_tar_takes_a_request_for_20_files_at_most() {
    let (farm, mount) = Farm::mounted("v");
    tree(mount.path(), 20_000);
    let size = run(sh("tar cf - . | wc -c").current_dir(mount.path()));
    mount.unmount();
    let mount = farm.mount("v", "");
    let before = number(&mount.stats(), "server.requests.total");
    assert_eq!(run(sh("tar cf - . | wc -c").current_dir(mount.path())), size);
    let stats = mount.stats();
    let requests = number(&stats, "server.requests.total") - before;
    assert!(requests < 1000, "{requests} requests: {}", stats["server"]);
}

/// Requests of a kind that the mount has made.
fn asked(mount: &Mount, what: &str) -> u64 {
    number(&mount.stats(), &format!("server.requests.{what}"))
}

#[test]
fn listings_for_a_walk_come_in_parts_that_grow() {
    let (farm, mount) = Farm::mounted("v");
    for at in 0..40_000 {
        let dir = mount.path().join(format!("part-{}", at / 200));
        if at % 200 == 0 {
            fs::create_dir(&dir).unwrap();
        }
        fs::File::create(dir.join(format!("a-file-with-a-name-of-usual-length-for-objects-{at}.o"))).unwrap();
    }
    mount.unmount();
    let mount = farm.mount("v", "");
    assert_eq!(run(sh("find . -type f -printf '%s\\n' | wc -l").current_dir(mount.path())).trim(), "40000");
    // In parts of half a MiB it was 10.
    let listings = asked(&mount, "ENTER");
    assert!(listings <= 6, "{listings} requests");
}

#[test]
fn contents_for_a_walk_come_in_parts_that_grow() {
    const FILES: usize = 4000;
    let (farm, mount) = Farm::mounted("v");
    let content = |at: usize| -> Vec<u8> {
        (0..20_000_usize).map(|n| (n * 31 + at * 7 + n * at % 251) as u8).collect()
    };
    let path = |mount: &Mount, at: usize| mount.path().join(format!("part-{}/{at}.o", at / 100));
    for at in 0..FILES {
        let path = path(&mount, at);
        if at % 100 == 0 {
            fs::create_dir(path.parent().unwrap()).unwrap();
        }
        fs::write(path, content(at)).unwrap();
    }
    mount.unmount();
    let mount = farm.mount("v", "");
    run(sh("find . -printf %s >/dev/null").current_dir(mount.path()));
    for at in 0..FILES {
        assert!(fs::read(path(&mount, at)).unwrap() == content(at), "{at}");
    }
    // In parts of 64 blocks it was 63.
    let contents = asked(&mount, "FETCH_CONTENT");
    assert!((1..=40).contains(&contents), "{contents} requests");
}

#[test]
fn much_that_has_changed_is_shipped_in_parts_before_its_time() {
    let farm = Farm::new();
    farm.create("v");
    let mount = farm.mount("v", "commit=3600");
    for n in 0..30_000 {
        fs::File::create(mount.join(&format!("file-{n}"))).unwrap();
    }
    wait_until("the last full part is shipped", Duration::from_secs(60), || {
        number(&mount.stats(), "log.dirty_rows") <= (16 << 10)
    });
    let commits = number(&mount.stats(), "log.commits");
    assert!(commits >= 2, "{commits}");
}

#[test]
fn what_lives_within_the_window_never_reaches_the_server() {
    let farm = Farm::new();
    farm.create("v");
    let mount = farm.mount("v", "commit=600");
    mount.sync();
    let before = mount.stats();
    for at in 0..1000 {
        let name = mount.path().join(format!("tmp-{at}"));
        fs::write(&name, vec![at as u8; 5000]).unwrap();
        fs::rename(&name, mount.path().join("conftest")).unwrap();
        fs::remove_file(mount.path().join("conftest")).unwrap();
    }
    mount.sync();
    let after = mount.stats();
    let grown = |key: &str| number(&after, key) - number(&before, key);
    assert_eq!(grown("server.requests.CONTENT"), 0, "{}", after["server"]);
    assert_eq!(grown("log.content_bytes_shipped"), 0);
    // The directory itself has changed: its times, its next cookie.
    assert!(grown("log.records_shipped") <= 2, "{}", after["log"]);
}

#[test]
fn a_close_writes_back_what_was_stored_through_a_map() {
    let (_farm, mount) = Farm::mounted("v");
    let script = r#"
import mmap, os, sys
for flags in (os.O_CREAT, 0):
    file = os.open(sys.argv[1] + "/mapped", os.O_RDWR | flags)
    os.ftruncate(file, 8192)
    map = mmap.mmap(file, 8192)
    map[4096:4100] = b"abcd"
    # Python's map has a descriptor of its own.
    os.close(file)
    map.close()
"#;
    // Once for the file that is made, once for one that is opened.
    run(std::process::Command::new("python3").args(["-c", script]).arg(mount.path()));
    assert_eq!(number(&mount.stats(), "fuse.requests.WRITE"), 2);
}
