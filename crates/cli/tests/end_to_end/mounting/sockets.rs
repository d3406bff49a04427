//! A server at a socket of its host.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::Command;

use crate::setup::farm::{Farm, HAYLOFT, copy_program, run, run_failing};

/// A user and a group who are nobody in particular.
const USER: u32 = 54_322;
const GROUP: u32 = 54_323;

/// `hayloft` of that user, in that group.
fn by_user(dir: &Path, args: &[&str]) -> Command {
    let program = dir.join("hayloft");
    if !program.exists() {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
        copy_program(HAYLOFT, &program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &USER.to_string(), "--regid", &GROUP.to_string(), "--clear-groups"]);
    command.arg(program).args(args).current_dir("/").env("HAYLOFT_CONFIG", "/dev/null");
    command
}

fn socket_of(dir: &tempfile::TempDir) -> (std::path::PathBuf, String) {
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let path = dir.path().join("socket");
    let address = format!("unix:{}", path.display());
    (path, address)
}

#[test]
fn a_mount_by_a_socket_works_and_goes_on_with_the_next_server() {
    let dir = tempfile::tempdir().unwrap();
    let (path, address) = socket_of(&dir);
    let mut farm = Farm::at(None, &address, None, &[]);
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o600);
    farm.create("v");
    let mount = farm.mount("v", "");
    fs::write(mount.join("kept"), "before").unwrap();
    fs::File::open(mount.join("kept")).unwrap().sync_all().unwrap();
    assert_eq!(farm.clients("v").len(), 1);
    assert!(farm.stats().is_object());
    let source = format!("{address}/v");
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(mounts.lines().any(|line| line.contains(&source)), "{mounts}");
    // The socket of a server that was killed is no obstacle.
    farm.kill_server();
    assert!(path.exists());
    farm.start_server();
    fs::write(mount.join("later"), "after").unwrap();
    fs::File::open(mount.join("later")).unwrap().sync_all().unwrap();
    assert_eq!(fs::read_to_string(mount.join("kept")).unwrap(), "before");
    mount.unmount();
    farm.stop_server();
    assert!(!path.exists(), "nobody waits for what nobody answers");
    let (code, said) = run_failing(&mut farm.volume(["list"]));
    assert!(code == 3 && said.contains(&address), "{code}: {said}");
}

#[test]
fn a_socket_is_for_whom_it_is_opened_and_the_user_counts_there() {
    let dir = tempfile::tempdir().unwrap();
    let (path, address) = socket_of(&dir);
    let mut farm = Farm::at(None, &address, None, &[]);
    farm.create("v");
    let show = ["volume", "--server", &address, "show", "v"];
    let (code, said) = run_failing(&mut by_user(farm.dir(), &show));
    assert!(code == 3 && said.contains("Permission denied"), "{code}: {said}");
    farm.stop_server();
    // The same store, for a group.
    let store = farm.dir().join("store");
    let group = GROUP.to_string();
    let farm = Farm::at(None, &address, Some(&store), &["--socket-group", &group]);
    let meta = fs::metadata(&path).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.gid()), (0o660, GROUP));
    // Who comes in has no right yet: it is his number that is asked for one.
    let (code, said) = run_failing(&mut by_user(farm.dir(), &show));
    assert!(code == 6 && said.contains(&format!("uid:{USER}")), "{code}: {said}");
    run(&mut farm.volume(["grant", "v", &format!("uid:{USER}"), "read"]));
    assert!(run(&mut by_user(farm.dir(), &show)).contains('v'));
    let (code, said) =
        run_failing(&mut by_user(farm.dir(), &["volume", "--server", &address, "delete", "v"]));
    assert!(code == 6, "{code}: {said}");
}

#[test]
fn a_server_listens_at_an_address_and_a_socket() {
    let dir = tempfile::tempdir().unwrap();
    let (path, address) = socket_of(&dir);
    let farm = Farm::at(None, &format!("127.0.0.1:0,{address}"), None, &[]);
    let (tcp, unix) = farm.address.split_once(',').unwrap();
    assert_eq!(unix, address);
    run(farm.hayloft(["volume", "create", "v"]).args(["--server", tcp]));
    let one = farm.mount_through(tcp, "v", "mnt-tcp");
    let two = farm.mount_through(unix, "v", "mnt-unix");
    fs::write(one.join("a"), "1").unwrap();
    assert_eq!(fs::read_to_string(two.join("a")).unwrap(), "1");
    drop((one, two));
    assert!(path.exists());
    let wrong = [
        ("unix:relative", "write an absolute path"),
        ("nonsense", "unix:/PATH"),
        (&*format!("{address},{address}"), "one socket at most"),
    ];
    for (listen, sentence) in wrong {
        let (code, said) = run_failing(&mut farm.hayloft(["serve", "--listen", listen]));
        assert!(code == 2 && said.contains(sentence), "{listen}: {code}: {said}");
    }
    let store = format!("file://{}", dir.path().join("other").display());
    let audit = dir.path().join("audit.log");
    let mut other = farm.hayloft(["serve", "--store", &store, "--listen", unix, "--audit-log"]);
    let (code, said) = run_failing(other.arg(audit));
    assert!(code == 5 && said.contains("another server listens there"), "{code}: {said}");
}
