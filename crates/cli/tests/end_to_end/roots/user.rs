//! Roots of an ordinary user, in a user namespace.

use std::os::unix::fs::{PermissionsExt, chown};
use std::process::Command;

use crate::setup::farm::{HAYLOFT, copy_program, run, run_failing};
use crate::setup::root_box::{RootBox, small_layer};

/// A user who is nobody in particular.
const USER: u32 = 54_321;

/// A process of that user's that is in no root.
struct Outside(std::process::Child);

impl Drop for Outside {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `hayloft run` of a script by that user. The program is copied to where he may run it.
fn by_user<const N: usize>(roots: &RootBox, args: [&str; N]) -> Command {
    let program = roots.dir().join("hayloft");
    if !program.exists() {
        std::fs::set_permissions(roots.dir(), std::fs::Permissions::from_mode(0o755)).unwrap();
        copy_program(HAYLOFT, &program);
        std::fs::create_dir(roots.state()).unwrap();
        chown(roots.state(), Some(USER), Some(USER)).unwrap();
    }
    let mut command = Command::new("setpriv");
    command.args(["--reuid", &USER.to_string(), "--regid", &USER.to_string(), "--clear-groups"]);
    command.arg(program).args(args).current_dir("/");
    command.env("HAYLOFT_CONFIG", "/dev/null").env("HAYLOFT_STATE_DIR", roots.state());
    command
}

#[test]
fn an_ordinary_user_has_roots_too() {
    let roots = RootBox::new();
    let layer = small_layer(roots.dir());
    // What is not his own in a layer he may read, and no more.
    run(Command::new("chown").args(["-hR", &USER.to_string()]).arg(&layer));
    let layer = layer.to_str().unwrap();
    let script =
        "id -u; echo x >/etc/passwd; rm /sbin; mkdir /new; ls /proc | grep -c '^[0-9]'; echo >/dev/null
        touch /usr/x 2>/dev/null || echo no; unshare -m true 2>/dev/null || echo no; hostname";
    let base = ["run", "--root", layer, "--bind", "/usr:/usr", "--", "sh", "-c", script];
    let out = run(&mut by_user(&roots, base));
    assert!(out.starts_with("0\n") && out.ends_with("no\nno\nhayloft\n"), "{out}");
    let keep = [
        "run",
        "--keep",
        "--name",
        "u",
        "--root",
        layer,
        "--bind",
        "/usr:/usr",
        "--",
        "sh",
        "-c",
        "echo y >/y",
    ];
    run(&mut by_user(&roots, keep));
    assert_eq!(run(&mut by_user(&roots, ["root", "enter", "u", "--", "cat", "/y"])), "y\n");
    run(&mut by_user(&roots, ["root", "rm", "u"]));
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn an_ordinary_users_root_has_so_many_processes_and_no_more() {
    let roots = RootBox::new();
    let layer = small_layer(roots.dir());
    let program = roots.dir().join("attempt");
    copy_program(std::env::current_exe().unwrap(), &program);
    let bind = format!("{}:/attempt", program.display());
    let mut command = by_user(&roots, ["run", "--processes", "40", "--root", layer.to_str().unwrap()]);
    command.args(["--bind", "/usr:/usr", "--bind", &bind, "--env", "ATTEMPT=processes", "--"]);
    command.args(["/attempt", "--exact", "roots::isolation::inside", "--ignored", "--nocapture"]);
    let made = crate::roots::isolation::made(&run(&mut command));
    assert!((20..=38).contains(&made), "{made}");
    // What runs outside does not count, nor what runs in another root.
    let flags = ["--processes", "8", "--root", layer.to_str().unwrap(), "--bind", "/usr:/usr", "--", "true"];
    let others: Vec<_> = (0..10)
        .map(|_| {
            let mut command = Command::new("setpriv");
            command.args(["--reuid", &USER.to_string(), "--clear-groups", "sleep", "4721.1"]);
            Outside(command.spawn().unwrap())
        })
        .collect();
    run(by_user(&roots, ["run"]).args(flags));
    drop(others);
}

#[test]
fn what_an_ordinary_user_cannot_have_is_said() {
    let roots = RootBox::new();
    let layer = small_layer(roots.dir());
    let layer = layer.to_str().unwrap();
    let image = roots.dir().join("image");
    std::fs::write(&image, b"hsqs".repeat(512)).unwrap();
    for (flags, sentence) in [
        (["--env", "A=b"], "name a folder without (--root DIR)"),
        (["--memory", "64M"], "--memory needs the memory controller"),
        (["--root", image.to_str().unwrap()], "only root may mount the image"),
    ] {
        let mut command = by_user(&roots, ["run"]);
        let (code, said) = run_failing(command.args(flags).args(["--", "true"]));
        assert!(code == 125 && said.contains(sentence), "{flags:?}: {said}");
    }
    let user = ["run", "--user", "builder", "--root", layer, "--bind", "/usr:/usr", "--", "true"];
    let (code, said) = run_failing(&mut by_user(&roots, user));
    assert!(code == 125 && said.contains("/etc/subuid"), "{said}");
}

#[test]
fn what_an_ordinary_user_has_open_for_reading_cannot_be_written() {
    let roots = RootBox::new();
    let layer = small_layer(roots.dir());
    let file = roots.dir().join("in.txt");
    std::fs::write(&file, "original\n").unwrap();
    chown(&file, Some(USER), Some(USER)).unwrap();
    let script = "cat; echo changed >/proc/self/fd/0; cat /none";
    let base = ["run", "--root", layer.to_str().unwrap(), "--bind", "/usr:/usr", "--", "sh", "-c", script];
    let output = by_user(&roots, base).stdin(std::fs::File::open(&file).unwrap()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "original\n", "{output:?}");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "original\n");
}
