//! A store that is encrypted: what it shows to who has the disk, and what a server says without its key.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::setup::farm::{Farm, run, run_failing};

/// A key file of these bytes.
fn key_file(dir: &Path, name: &str, byte: u8) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, [byte; 32]).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// All files below a folder.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        match entry.file_type().unwrap().is_dir() {
            true => found.extend(files(&entry.path())),
            false => found.push(entry.path()),
        }
    }
    found
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Content that does not shrink, so that it is stored as it is.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Writes files of all kinds, and ends mount and server in order.
fn fill(farm: &mut Farm) {
    farm.create("secret-volume");
    let mount = farm.mount("secret-volume", "");
    fs::write(mount.join("secret-name"), noise(3000)).unwrap();
    fs::write(mount.join("large"), noise(700_000)).unwrap();
    fs::write(mount.join("short"), "a short secret").unwrap();
    mount.sync();
    mount.unmount();
    farm.stop_server();
}

/// What somebody finds who reads the disk.
fn found(store: &Path) -> Vec<&'static str> {
    let noise = noise(700_000);
    let wanted: [(&str, &[u8]); 5] = [
        ("a file's name", b"secret-name"),
        ("the volume's name", b"secret-volume"),
        ("a short file", b"a short secret"),
        ("a file", &noise[1000..1040]),
        ("a large file", &noise[600_000..600_040]),
    ];
    let files = files(store);
    let contents: Vec<(String, Vec<u8>)> =
        files.iter().map(|path| (path.display().to_string(), fs::read(path).unwrap())).collect();
    assert!(contents.len() > 5);
    let is_there = |part: &[u8]| {
        contents.iter().any(|(path, content)| contains(content, part) || contains(path.as_bytes(), part))
    };
    wanted.into_iter().filter(|(_, part)| is_there(part)).map(|(what, _)| what).collect()
}

#[test]
fn who_has_the_disk_reads_nothing_of_an_encrypted_store() {
    let mut plain = Farm::new();
    fill(&mut plain);
    assert_eq!(found(&plain.dir().join("store")).len(), 5, "what is looked for is to be found in the clear");
    let dir = tempfile::tempdir().unwrap();
    let key = key_file(dir.path(), "key", 1);
    let mut farm = Farm::with(None, &["--key-file", key.to_str().unwrap()]);
    fill(&mut farm);
    assert_eq!(found(&farm.dir().join("store")), [""; 0]);
    // It is all there, also after a crash, and a check and a scrub read it.
    farm.start_server();
    let mount = farm.mount("secret-volume", "");
    assert_eq!(fs::read(mount.join("secret-name")).unwrap(), noise(3000));
    assert_eq!(fs::read(mount.join("large")).unwrap(), noise(700_000));
    fs::write(mount.join("more"), noise(100_000)).unwrap();
    mount.sync();
    farm.kill_server();
    farm.start_server();
    // It has found the new server when it can make something durable there.
    fs::write(mount.join("again"), noise(10)).unwrap();
    mount.sync();
    assert_eq!(fs::read(mount.join("more")).unwrap(), noise(100_000));
    mount.unmount();
    run(&mut farm.volume(["check", "secret-volume", "--content"]));
    run(&mut farm.hayloft(["scrub", "secret-volume", "--server", &farm.address]));
    assert!(run(&mut farm.volume(["list"])).contains("secret-volume"));
    run(&mut farm.volume(["delete", "secret-volume"]));
}

#[test]
fn a_store_is_served_with_the_key_that_it_began_with() {
    let dir = tempfile::tempdir().unwrap();
    let (one, two) = (key_file(dir.path(), "one", 1), key_file(dir.path(), "two", 2));
    let mut farm = Farm::with(None, &["--key-file", one.to_str().unwrap()]);
    farm.create("v");
    farm.stop_server();
    let store = format!("file://{}", farm.dir().join("store").display());
    let audit = dir.path().join("audit.log");
    let serve = |store: &str, key: Option<&Path>| {
        let mut command = farm.hayloft(["serve", "--store", store, "--listen", "127.0.0.1:0", "--audit-log"]);
        command.arg(&audit);
        if let Some(key) = key {
            command.arg("--key-file").arg(key);
        }
        run_failing(&mut command)
    };
    let (code, said) = serve(&store, None);
    assert!(
        code == 1 && said.contains("it is encrypted: give the file with its key (--key-file FILE)"),
        "{said}"
    );
    let (code, said) = serve(&store, Some(&two));
    assert!(code == 1 && said.contains("is not the one that it is encrypted with"), "{said}");
    let mut plain = Farm::new();
    plain.create("v");
    plain.stop_server();
    let in_the_clear = format!("file://{}", plain.dir().join("store").display());
    let (code, said) = serve(&in_the_clear, Some(&one));
    assert!(code == 1 && said.contains("it began without a key"), "{said}");
    fs::set_permissions(&one, fs::Permissions::from_mode(0o644)).unwrap();
    let (code, said) = serve(&store, Some(&one));
    assert!(code == 2 && said.contains("chmod 600"), "{code}: {said}");
    let (code, said) = serve(&store, Some(&dir.path().join("none")));
    assert!(code == 2 && said.contains("cannot read the key file"), "{code}: {said}");
    // None of it has done any harm.
    fs::set_permissions(&one, fs::Permissions::from_mode(0o600)).unwrap();
    farm.start_server();
    assert!(run(&mut farm.volume(["list"])).contains('v'));
}
