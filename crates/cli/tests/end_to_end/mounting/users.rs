//! Ordinary users: they mount with the defaults, and make layers whose files belong to their subordinate users.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::setup::farm::{Farm, HAYLOFT, copy_program, run, run_failing, wait_until};
use crate::setup::small_debian::SmallDebian;

/// An ordinary user with a home, and with a copy of the program in it.
struct User {
    name: String,
    uid: u32,
    home: TempDir,
}

impl User {
    /// Adds a user; with a range of subordinate users and groups, or without.
    fn new(tag: &str, with_range: bool) -> User {
        let home = tempfile::Builder::new().prefix("hayloft-user-").tempdir_in("/var/tmp").unwrap();
        let name = format!("hayloft-{tag}-{}", std::process::id());
        let count = if with_range { 65_536 } else { 0 };
        let ranges = ["SUB_UID_COUNT", "SUB_GID_COUNT"].map(|key| format!("{key}={count}"));
        let mut add = Command::new("useradd");
        add.args(["--key", &ranges[0], "--key", &ranges[1], "--no-create-home", "--home-dir"]);
        add.arg(home.path()).arg(&name);
        // Others may be adding users in this moment.
        wait_until("a user is added", Duration::from_secs(60), || add.output().unwrap().status.success());
        let uid = run(Command::new("id").args(["-u", &name])).trim().parse().unwrap();
        let user = User { name, uid, home };
        copy_program(HAYLOFT, user.program());
        // As a login has it: nobody else gets in.
        fs::set_permissions(user.home.path(), fs::Permissions::from_mode(0o700)).unwrap();
        chown(user.home.path(), Some(user.uid), Some(user.uid)).unwrap();
        user
    }

    fn program(&self) -> PathBuf {
        self.home.path().join("hayloft")
    }

    fn layers(&self) -> PathBuf {
        self.home.path().join(".local/share/hayloft/layers")
    }

    /// What there is in the folder of the user's layers.
    fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.layers()).into_iter().flatten();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    /// A program as this user runs it, after a login.
    fn by(&self, program: &Path) -> Command {
        let mut command = Command::new("setpriv");
        let uid = self.uid.to_string();
        command.args(["--reuid", &uid, "--regid", &uid, "--init-groups", "--reset-env"]).arg(program);
        command.current_dir(self.home.path()).stdin(Stdio::null());
        command
    }

    /// `hayloft` as this user runs it, where `mmdebstrap` is the program of [`User::bootstrap`].
    fn hayloft<const N: usize>(&self, args: [&str; N]) -> Command {
        let mut command = self.by(Path::new("env"));
        let path = format!("PATH={}:/usr/local/bin:/usr/bin:/bin", self.home.path().join("bin").display());
        let state = format!("HAYLOFT_STATE_DIR={}", self.home.path().join("state").display());
        command.args([&path, &state, "HAYLOFT_CONFIG=/dev/null"]).arg(self.program()).args(args);
        command
    }

    /// A program by the name of mmdebstrap: it makes a tree with files of other users, some closed to all else, as `$tree`.
    fn bootstrap(&self, then: &str) {
        let folder = self.home.path().join("bin");
        fs::create_dir_all(&folder).unwrap();
        let program = folder.join("mmdebstrap");
        let script = format!(
            "#!/bin/sh\nset -e\nfor word; do case \"$word\" in */tree) tree=$word;; esac; done
            mkdir -p \"$tree/etc\" \"$tree/usr\" \"$tree/var/cache/closed/below\"
            for name in bin lib lib64; do ln -s usr/$name \"$tree/$name\"; done
            echo host >\"$tree/etc/hostname\"; echo mail >\"$tree/var/mail\"; chown 8:8 \"$tree/var/mail\"
            echo x >\"$tree/var/cache/closed/below/file\"; chown -R 42:65534 \"$tree/var/cache/closed\"
            chmod -R go= \"$tree/var/cache/closed\"; chown 1:1 \"$tree/etc\"\n{then}\n"
        );
        fs::write(&program, script).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
}

impl Drop for User {
    fn drop(&mut self) {
        let mut remove = Command::new("userdel");
        remove.arg("--force").arg(&self.name);
        (0..100).any(|_| {
            std::thread::sleep(Duration::from_millis(100));
            remove.output().is_ok_and(|output| output.status.success())
        });
    }
}

const CREATE: [&str; 7] = ["root", "create", "b", "--from", "debian:x", "--mirror", "http://localhost"];

#[test]
fn an_ordinary_user_makes_uses_and_removes_layers_of_packages() {
    let user = User::new("layers", true);
    user.bootstrap("");
    run(&mut user.hayloft(CREATE));
    let tree = user.layers().join("b/tree");
    assert!(!tree.join("etc/hostname").exists(), "what is this host's own is not in it");
    let owner = fs::metadata(tree.join("var/mail")).unwrap().uid();
    assert!(owner != 0 && owner != user.uid, "{owner}");
    let script = "stat -c %u:%g /var/mail /var/cache/closed /etc; cat /var/cache/closed/below/file";
    let seen = run(&mut user.hayloft([
        "run",
        "--root",
        "b",
        "--bind",
        "/usr:/usr",
        "--",
        "/usr/bin/sh",
        "-c",
        script,
    ]));
    assert_eq!(seen, "8:8\n42:65534\n1:1\nx\n");
    // Replaced by one of its kind, and by a copy of a folder.
    run(user.hayloft(CREATE).arg("--force"));
    assert_eq!(user.left(), ["b"]);
    let plain = format!("dir:{}", user.home.path().join("bin").display());
    run(&mut user.hayloft(["root", "create", "b", "--force", "--from", &plain]));
    assert_eq!(user.left(), ["b"]);
    assert_eq!(fs::metadata(tree.join("mmdebstrap")).unwrap().uid(), user.uid);
    run(user.hayloft(CREATE).arg("--force"));
    run(&mut user.hayloft(["root", "rm", "--layer", "b"]));
    assert_eq!(user.left(), [""; 0]);
}

#[test]
fn an_ordinary_user_puts_packages_upon_a_layer() {
    let user = User::new("packages", true);
    let debian = SmallDebian::new(user.home.path());
    let postinst = "printf '#!/bin/sh\\nchown 7:7 /usr/share/owned\\nchmod 600 /usr/share/owned\\n' >DEBIAN/postinst; chmod 755 DEBIAN/postinst";
    debian.package("owned", "1", postinst);
    debian.package("other", "1", "");
    run(&mut user.hayloft(["root", "create", "small", "--from", &format!("dir:{}", debian.base.display())]));
    let install = |args: &[&str]| {
        run(user.hayloft(["root", "layer"]).args(args).arg("--repository").arg(&debian.repository));
    };
    install(&["tools", "--on", "small", "install", "owned"]);
    let file = user.layers().join("tools/generations/1/tree/usr/share/owned");
    let owner = fs::metadata(&file).unwrap().uid();
    assert!(owner != 0 && owner != user.uid, "{owner}");
    let look = |root: &[&str]| run(user.hayloft(["root", "enter", "look", "--"]).args(root));
    run(&mut user.hayloft(["run", "--keep", "--name", "look", "--root", "tools", "--", "ls"]));
    assert!(look(&["ls", "-ln", "/usr/share/owned"]).contains(" 7 7 "));
    install(&["tools", "install", "other", "--live"]);
    assert_eq!(look(&["cat", "/usr/share/other", "/usr/share/owned"]), "other 1\nowned 1\n");
    run(&mut user.hayloft(["root", "rollback", "tools", "--live"]));
    assert_eq!(look(&["ls", "/usr/share"]), "dpkg\nowned\n");
    run(&mut user.hayloft(["root", "rebuild", "tools"]));
    run(&mut user.hayloft(["root", "rm", "look"]));
    run(&mut user.hayloft(["root", "prune", "tools", "--keep", "1"]));
    run(&mut user.hayloft(["root", "rm", "--layer", "tools"]));
    assert_eq!(user.left(), ["small"]);
    // Without others' files there is nothing to be had from packages.
    let alone = User::new("no-packages", false);
    alone.bootstrap("");
    let base = format!("dir:{}", alone.home.path().join("bin").display());
    run(&mut alone.hayloft(["root", "create", "small", "--from", &base]));
    let (code, said) =
        run_failing(&mut alone.hayloft(["root", "layer", "x", "--on", "small", "install", "y"]));
    assert!(code == 7 && said.contains("/etc/subuid") && said.lines().count() == 1, "{code}: {said}");
    assert_eq!(alone.left(), ["small"]);
}

#[test]
fn a_layer_of_an_ordinary_user_that_fails_or_is_killed_leaves_nothing() {
    let user = User::new("fails", true);
    user.bootstrap("echo E: no such suite >&2; exit 9");
    let (code, said) = run_failing(&mut user.hayloft(CREATE));
    assert!(code == 1 && said.contains("no such suite"), "{code}: {said}");
    assert_eq!(user.left(), [""; 0]);
    user.bootstrap("echo $$ >~/pid; sleep 60");
    let mut create = user.hayloft(CREATE).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let pid = user.home.path().join("pid");
    wait_until("the tree is there", Duration::from_secs(20), || {
        fs::read_to_string(&pid).is_ok_and(|pid| pid.ends_with('\n'))
    });
    create.kill().unwrap();
    create.wait().unwrap();
    let pid = fs::read_to_string(&pid).unwrap();
    wait_until("what it has started has ended", Duration::from_secs(20), || {
        !Path::new("/proc").join(pid.trim()).exists()
    });
    let plain = format!("dir:{}", user.home.path().join("bin").display());
    run(&mut user.hayloft(["root", "create", "other", "--from", &plain]));
    assert_eq!(user.left(), ["other"]);
}

#[test]
fn an_ordinary_user_without_subordinate_users_is_told_what_is_missing() {
    let user = User::new("alone", false);
    user.bootstrap("");
    let (code, said) = run_failing(&mut user.hayloft(CREATE));
    assert!(code == 7 && said.contains("/etc/subuid") && said.contains("uidmap"), "{code}: {said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert_eq!(user.left(), [""; 0]);
}

#[test]
fn an_ordinary_user_mounts_with_the_defaults() {
    let farm = Farm::new();
    let user = User::new("mounts", false);
    let owner = format!("{0}:{0}", user.uid);
    run(&mut farm.volume(["create", "v", "--owner", &owner]));
    fs::set_permissions(farm.dir(), fs::Permissions::from_mode(0o755)).unwrap();
    // Where no device manager runs, only root may open the device: let everybody, in a mount namespace.
    let device = farm.dir().join("fuse");
    let script = "
        cd ~; mkdir mnt; H=./hayloft; export HAYLOFT_CONFIG=/dev/null
        $H mount $SOURCE ~/mnt
        cp -r /usr/share/doc/base-files mnt/; mkdir mnt/bin; cp /bin/true mnt/bin/; mnt/bin/true
        chmod 4755 mnt/bin/true; ln mnt/bin/true mnt/link; mv mnt/base-files mnt/moved
        flock mnt/link true; touch -d 2001-01-01 mnt/link; grep \" $HOME/mnt \" /proc/self/mountinfo | grep -q ' rw,nosuid,nodev'
        $H sync mnt; $H stats mnt >/dev/null; $H umount mnt; test -z \"$(ls mnt)\"
        $H mount $SOURCE ~/mnt -o ro; test -f mnt/moved/copyright; ! touch mnt/x 2>/dev/null; fusermount3 -u mnt
        cat .local/state/hayloft/mount-*.log >&2
    ";
    let all = format!(
        "mknod {0} c 10 229; chmod 666 {0}; mount --bind {0} /dev/fuse; exec \"$@\"",
        device.display()
    );
    let mut command = Command::new("unshare");
    command.args(["--mount", "sh", "-euc", &all, "sh", "setpriv", "--reuid", &user.name, "--regid"]);
    command.args([&user.name, "--init-groups", "--reset-env", "env"]);
    command.arg(format!("SOURCE={}/v", farm.address)).args(["sh", "-euc", script]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}{said}", String::from_utf8_lossy(&output.stdout));
    // Only what differs for such a user is in its log.
    let differs = ["CAP_SYS_PTRACE", "cannot be ended from outside"];
    let is_known = |line: &str| differs.iter().any(|known| line.contains(known));
    assert!(said.lines().all(is_known) && !said.contains("ERROR"), "{said}");
}
