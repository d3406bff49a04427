//! `hayloft run` and `hayloft root`: what a command sees, and what is left of it.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::time::Duration;

use crate::setup::farm::{Farm, kill, run, run_failing, sh, wait_until};
use crate::setup::root_box::{RootBox, processes, small_layer, wait_no_process};

#[test]
fn what_is_written_stays_in_the_root() {
    let roots = RootBox::new();
    let probe = roots.dir().join("probe");
    fs::write(&probe, "before").unwrap();
    let path = probe.display();
    let script =
        format!("cat {path}; echo after >{path}; rm -rf /usr/share/doc; cat {path}; echo x >/tmp/x; ls /tmp");
    assert_eq!(run(&mut roots.run([], &script)), "beforeafter\nx\n");
    assert_eq!(fs::read_to_string(&probe).unwrap(), "before");
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn exit_codes_and_signals_are_passed_on() {
    let roots = RootBox::new();
    for (script, code) in [("exit 7", 7), ("exit 255", 255), ("kill -TERM $$", 143), ("kill -KILL $$", 137)] {
        assert_eq!(roots.report([], script)["exit_code"], code, "{script}");
    }
    let (code, said) =
        run_failing(roots.hayloft(["run", "--", "no-such-program"]).stdin(std::process::Stdio::null()));
    assert_eq!(code, 127);
    assert!(said.contains("there is no 'no-such-program' in the root"), "{said}");
    let (code, said) = run_failing(&mut roots.hayloft(["run", "--", "/etc/passwd"]));
    assert_eq!(code, 126);
    assert!(said.contains("cannot run /etc/passwd"), "{said}");
}

#[test]
fn a_command_hears_signals_and_ends_with_its_caller() {
    let roots = RootBox::new();
    let mut started = roots.start([], "trap 'echo heard; exit 9' TERM; echo ready; sleep 4711.1 & wait");
    kill(started.child.id(), libc::SIGTERM);
    assert_eq!(started.child.wait().unwrap().code(), Some(9));
    let mut rest = String::new();
    started.out.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "heard\n");
    // One that does not want to end is ended at the second call.
    let mut started = roots.start([], "trap '' INT; echo deaf; while :; do sleep 4711.2; done");
    kill(started.child.id(), libc::SIGINT);
    std::thread::sleep(Duration::from_millis(100));
    kill(started.child.id(), libc::SIGINT);
    assert_eq!(started.child.wait().unwrap().code(), Some(130));
    wait_no_process("4711.2");
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn a_signal_at_the_wrong_moment_changes_nothing() {
    let roots = RootBox::new();
    let out = roots.dir().join("out");
    for at in 0..10 {
        let flags = ["--keep", "--name", "r", "--collect", "/file", "--output", out.to_str().unwrap()];
        let mut child = roots.run(flags, &format!("echo {at} >/file")).spawn().unwrap();
        // One that is passed on and does nothing.
        while child.try_wait().unwrap().is_none() {
            kill(child.id(), libc::SIGCONT);
        }
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert_eq!(fs::read_to_string(out.join("file")).unwrap(), format!("{at}\n"));
        assert_eq!(run(&mut roots.hayloft(["root", "enter", "r", "--", "cat", "/file"])), format!("{at}\n"));
        run(&mut roots.hayloft(["root", "rm", "r"]));
    }
}

#[test]
fn two_signals_at_once_end_the_root_in_order() {
    let roots = RootBox::new();
    let file = roots.dir().join("report.json");
    for _ in 0..5 {
        let flags = ["--json", file.to_str().unwrap()];
        let mut started = roots.start(flags, "trap '' INT TERM; echo ready; sleep 4725.1");
        // Both are there before either is passed on.
        for signal in [libc::SIGSTOP, libc::SIGTERM, libc::SIGINT, libc::SIGCONT] {
            kill(started.child.id(), signal);
        }
        let code = started.child.wait().unwrap().code();
        assert!(matches!(code, Some(130 | 143)), "{code:?}");
        let report: serde_json::Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert_eq!(report["exit_code"], code.unwrap(), "{report}");
        assert!(report["error"].is_null(), "{report}");
    }
    wait_no_process("4725.1");
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn a_start_that_waits_for_another_one_hears_signals() {
    let roots = RootBox::new();
    run(&mut roots.run([], "true"));
    let lock = fs::File::options().write(true).open(roots.state().join(".lock")).unwrap();
    lock.lock().unwrap();
    let mut child = roots.run([], "true").stderr(std::process::Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(child.try_wait().unwrap().is_none());
    kill(child.id(), libc::SIGTERM);
    wait_until("it has ended", Duration::from_secs(20), || child.try_wait().unwrap().is_some());
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(125));
    assert!(said.contains("ended by signal 15"), "{said}");
    drop(lock);
    // One that waits in peace goes on.
    lock_for_a_while(&roots);
}

/// Starts a root while the lock of all is held, and lets it go.
fn lock_for_a_while(roots: &RootBox) {
    let lock = fs::File::options().write(true).open(roots.state().join(".lock")).unwrap();
    lock.lock().unwrap();
    let mut child = roots.run([], "exit 7").spawn().unwrap();
    kill(child.id(), libc::SIGCONT);
    std::thread::sleep(Duration::from_millis(200));
    assert!(child.try_wait().unwrap().is_none());
    drop(lock);
    assert_eq!(child.wait().unwrap().code(), Some(7));
}

#[test]
fn a_signal_after_the_command_ends_what_comes_then() {
    let roots = RootBox::new();
    let farm = Farm::new();
    farm.create("v");
    let to = format!("{}/v:out", farm.address);
    let mut started =
        roots.start(["--publish", &to], "echo ready; read line || true; echo x >/file; sleep 0.3");
    farm.signal_server(libc::SIGSTOP);
    wait_until("it waits for the server", Duration::from_secs(20), || {
        processes(&format!("mount\0{}", farm.address)) > 0
    });
    let folder = mount_folder(started.child.id());
    kill(started.child.id(), libc::SIGTERM);
    let asked = std::time::Instant::now();
    assert_eq!(started.child.wait().unwrap().code(), Some(143));
    assert!(asked.elapsed() < Duration::from_secs(8), "{:?}", asked.elapsed());
    farm.signal_server(libc::SIGCONT);
    assert!(!folder.exists(), "{}", folder.display());
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

/// Where the process that this one has started is to mount.
fn mount_folder(parent: u32) -> std::path::PathBuf {
    let children = fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap();
    let lines = children.split_whitespace().filter_map(|pid| fs::read(format!("/proc/{pid}/cmdline")).ok());
    let args: Vec<String> = lines
        .flat_map(|line| String::from_utf8_lossy(&line).split('\0').map(str::to_owned).collect::<Vec<_>>())
        .collect();
    let folder = args.iter().find(|arg| arg.contains("hayloft-publish-")).unwrap();
    std::path::Path::new(folder).parent().unwrap().to_owned()
}

#[test]
fn a_number_that_was_given_anew_is_not_taken_for_the_root() {
    let roots = RootBox::new();
    run(&mut roots.run(["--keep", "--name", "k"], "true"));
    let file = roots.state().join("k/root.json");
    let before = fs::read_to_string(&file).unwrap();
    // The kernel tells in ticks of 10 ms when a process was started.
    std::thread::sleep(Duration::from_millis(30));
    let mut other = sh("exec sleep 4723.1").spawn().unwrap();
    let mut info: serde_json::Value = serde_json::from_str(&before).unwrap();
    info["pid"] = other.id().into();
    fs::write(&file, info.to_string()).unwrap();
    assert_eq!(run_failing(&mut roots.hayloft(["root", "enter", "k", "--", "true"])).0, 4);
    assert_eq!(run_failing(&mut roots.hayloft(["root", "rm", "k"])).0, 4);
    assert!(other.try_wait().unwrap().is_none(), "it lives");
    other.kill().unwrap();
    other.wait().unwrap();
    fs::write(&file, before).unwrap();
    run(&mut roots.hayloft(["root", "rm", "k"]));
}

#[test]
fn nothing_outlives_its_root() {
    let roots = RootBox::new();
    run(&mut roots.run([], "setsid sleep 4712.1 & (setsid sleep 4712.1 &) ; sleep 0.1"));
    assert_eq!(processes("4712.1"), 0);
}

#[test]
fn a_kept_root_is_entered_and_removed() {
    let roots = RootBox::new();
    let report = roots.report(["--keep", "--name", "look"], "echo made >/made; exit 3");
    assert_eq!((&report["exit_code"], &report["kept"]), (&3.into(), &true.into()));
    let info = roots.show("look");
    assert_eq!((&info["state"], &info["exit_code"]), (&"kept".into(), &3.into()));
    let upper = std::path::Path::new(info["upper"].as_str().unwrap());
    assert_eq!(fs::read_to_string(upper.join("made")).unwrap(), "made\n");
    let entered = run(&mut roots.hayloft([
        "root",
        "enter",
        "look",
        "--",
        "sh",
        "-c",
        "cat /made; echo two >/two; echo $$",
    ]));
    assert!(
        entered.starts_with("made\n") && entered.trim().len() < 12,
        "{entered}: a number of the root's own"
    );
    assert_eq!(run(&mut roots.hayloft(["root", "enter", "look", "--", "cat", "/two"])), "two\n");
    let (code, _) = run_failing(&mut roots.hayloft(["root", "enter", "look", "--", "sh", "-c", "exit 5"]));
    assert_eq!(code, 5);
    let (code, said) = run_failing(&mut roots.run(["--name", "look"], "true"));
    assert!(code == 125 && said.contains("a root 'look' exists"), "{said}");
    let groups = roots.groups();
    run(&mut roots.hayloft(["root", "rm", "look"]));
    assert!(roots.list().is_empty());
    assert_eq!(roots.leftovers(&groups), [""; 0]);
    assert_eq!(run_failing(&mut roots.hayloft(["root", "enter", "look"])).0, 4);
}

#[test]
fn a_running_root_is_listed_entered_and_guarded() {
    let roots = RootBox::new();
    let mut started = roots.start(["--name", "busy"], "echo one >/one; sleep 4713.1");
    wait_until("the file is there", Duration::from_secs(10), || {
        roots.hayloft(["root", "enter", "busy", "--", "test", "-e", "/one"]).status().unwrap().success()
    });
    assert_eq!(roots.list()[0]["state"], "running");
    let (code, said) = run_failing(&mut roots.hayloft(["root", "rm", "busy"]));
    assert!(code == 5 && said.contains("--force"), "{said}");
    run(&mut roots.hayloft(["root", "rm", "--force", "busy"]));
    assert!(!started.child.wait().unwrap().success());
    wait_no_process("4713.1");
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn layers_lie_on_each_other_and_binds_above() {
    let roots = RootBox::new();
    let layer = small_layer(roots.dir());
    let top = roots.dir().join("top");
    fs::create_dir_all(top.join("etc")).unwrap();
    fs::set_permissions(&top, fs::Permissions::from_mode(0o751)).unwrap();
    fs::write(top.join("etc/top"), "top").unwrap();
    let shared = roots.dir().join("shared");
    fs::create_dir(&shared).unwrap();
    fs::write(shared.join("in"), "in").unwrap();
    let (layer, top, shared) = (layer.to_str().unwrap(), top.to_str().unwrap(), shared.to_str().unwrap());
    let (read, write) = (format!("{shared}:/deep/in"), format!("{shared}:/out:rw"));
    let flags = [
        "--root",
        top,
        "--root",
        layer,
        "--bind",
        "/usr:/usr",
        "--bind",
        &read,
        "--bind",
        &write,
        "--scratch",
        "/build",
    ];
    let script = "cat /etc/top; id -un; stat -c %a /; cat /deep/in/in; echo out >/out/out
        ! echo no 2>/dev/null >/deep/in/no; stat -f -c %T /build /; ls -a /sys /proc/self >/dev/null; pwd";
    assert_eq!(run(&mut roots.run(flags, script)), "toproot\n751\nintmpfs\noverlayfs\n/\n");
    assert_eq!(fs::read_to_string(format!("{shared}/out")).unwrap(), "out\n");
    assert!(!std::path::Path::new(shared).join("no").exists());
    // Where something is mounted is no change of the root.
    let keep =
        ["--keep", "--name", "k", "--mode", "0700", "--root", layer, "--bind", "/usr:/usr", "--bind", &read];
    run(&mut roots.run(keep, "true"));
    let upper = roots.show("k")["upper"].as_str().unwrap().to_owned();
    assert_eq!(fs::read_dir(&upper).unwrap().count(), 0);
    assert_eq!(fs::metadata(&upper).unwrap().mode() & 0o7777, 0o700);
}

#[test]
fn users_variables_and_folders() {
    let roots = RootBox::new();
    let layer = small_layer(roots.dir());
    let layer = ["--root", layer.to_str().unwrap(), "--bind", "/usr:/usr"];
    let [a, b, c, d] = layer;
    let script = "echo $(id -u) $(id -g) $HOME $USER $A:${HAYLOFT_STATE_DIR-none}; pwd; touch /x 2>/dev/null || echo no";
    let flags = [a, b, c, d, "--user", "builder", "--env", "A=b c", "--chdir", "/tmp"];
    assert_eq!(run(&mut roots.run(flags, script)), "1234 1234 /home builder b c:none\n/tmp\nno\n");
    assert_eq!(run(&mut roots.run([a, b, c, d, "--user", "77:88"], "id -u; id -g")), "77\n88\n");
    let (code, said) = run_failing(&mut roots.run([a, b, c, d, "--user", "nobody-here"], "true"));
    assert!(code == 125 && said.contains("no user 'nobody-here'"), "{said}");
    let (code, said) = run_failing(&mut roots.run([a, b, c, d, "--chdir", "/none"], "true"));
    assert!(code == 125 && said.contains("/none"), "{said}");
    let here = run(roots.run([], "pwd").current_dir("/usr/lib"));
    assert_eq!(here, "/usr/lib\n");
}

#[test]
fn a_command_runs_where_it_was_called_or_not_at_all() {
    let roots = RootBox::new();
    let elsewhere = tempfile::tempdir_in("/tmp").unwrap();
    let (code, said) = run_failing(roots.run([], "true").current_dir(elsewhere.path()));
    assert!(code == 125 && said.contains("is not in the root") && said.contains("--chdir"), "{said}");
    let bind = elsewhere.path().to_str().unwrap();
    let pwd = run(roots.run(["--bind", bind], "pwd").current_dir(elsewhere.path()));
    assert_eq!(pwd.trim_end(), bind);
    // Layers of its own are another world.
    let layer = small_layer(roots.dir());
    let flags = ["--root", layer.to_str().unwrap(), "--bind", "/usr:/usr"];
    assert_eq!(run(roots.run(flags, "pwd").current_dir(elsewhere.path())), "/\n");
}

#[test]
fn folders_of_memory_are_for_every_user_and_everywhere() {
    let roots = RootBox::new();
    let layer = small_layer(roots.dir());
    fs::create_dir(layer.join("own")).unwrap();
    let layer = layer.to_str().unwrap();
    let host = format!("{}:/run/here/layer", roots.dir().display());
    let flags = [
        "--root",
        layer,
        "--bind",
        "/usr:/usr",
        "--scratch",
        "/build",
        "--scratch",
        "/tmp/b",
        "--scratch",
        "/own",
    ];
    let more = ["--tmp", "16M", "--bind", &host, "--user", "1234"];
    let script = "touch /build/x /tmp/b/x; test -e /run/here/layer; ! touch /own/x 2>/dev/null; stat -c %a /own; cat /etc/hosts";
    let mut command = roots.hayloft(["run"]);
    command.args(flags).args(more).args(["--", "sh", "-euc", script]);
    let said = run(&mut command);
    assert!(said.starts_with("755\n127.0.0.1\tlocalhost\n"), "{said}");
}

#[test]
fn what_is_collected_is_copied() {
    let roots = RootBox::new();
    let out = roots.dir().join("out");
    let make =
        "mkdir -p /b/tree; echo a >/b/a.deb; echo c >/b/c.deb; echo t >/b/tree/t; ln -s /etc/hostname /b/name
        ln -s /b /tmp/way; chmod 640 /b/a.deb";
    let flags = ["--collect", "/b/*.deb", "--collect", "/tmp/way/tree", "--output", out.to_str().unwrap()];
    let report = roots.report(flags, make);
    assert_eq!(report["collected"].as_array().unwrap().len(), 3);
    assert_eq!(fs::read_to_string(out.join("tree/t")).unwrap(), "t\n");
    assert_eq!(fs::metadata(out.join("a.deb")).unwrap().mode() & 0o777, 0o640);
    let (code, said) = run_failing(&mut roots.run(["--collect", "/none"], "true"));
    assert!(code == 125 && said.contains("no /none in the root"), "{said}");
    assert_eq!(run_failing(&mut roots.run(["--collect", "/none"], "exit 4")).0, 4);
    // What cannot be copied is not passed over in silence.
    let (code, said) = run_failing(&mut roots.run(["--collect", "/tmp/p"], "mkfifo /tmp/p"));
    assert!(code == 125 && said.contains("/tmp/p") && said.contains("is not collected"), "{said}");
    // Names need not be text.
    let flags = ["--collect", "/b/*", "--output", out.to_str().unwrap()];
    let report = roots.report(flags, "mkdir /b; touch /b/$(printf 'a\\377b')");
    assert_eq!(report["collected"].as_array().unwrap().len(), 1, "{report}");
    assert!(fs::symlink_metadata(out.join(OsStr::from_bytes(b"a\xffb"))).is_ok());
}

#[test]
fn a_report_that_cannot_be_written_is_told_before_the_command_runs() {
    let roots = RootBox::new();
    let mark = roots.dir().join("mark");
    fs::create_dir(&mark).unwrap();
    let bind = format!("{}:/mark:rw", mark.display());
    let flags = ["--json", "/none/report.json", "--bind", &bind];
    let (code, said) = run_failing(&mut roots.run(flags, "touch /mark/ran"));
    assert!(code == 125 && said.contains("cannot write /none/report.json"), "{said}");
    assert!(!mark.join("ran").exists());
}

#[test]
fn the_report_says_what_it_took() {
    let roots = RootBox::new();
    let report =
        roots.report(["--name", "told"], "dd if=/dev/zero of=/file bs=1M count=20 2>/dev/null; exit 3");
    assert_eq!(
        (&report["root"], &report["exit_code"], &report["kept"]),
        (&"told".into(), &3.into(), &false.into())
    );
    assert!(report["memory_peak_bytes"].as_u64().unwrap() >= 20 << 20, "{report}");
    assert!(
        report["wall_ms"].as_f64().unwrap() > 0.0 && report["start_ms"].as_f64().unwrap() > 0.0,
        "{report}"
    );
    let report = roots.report(["--root", "/none-such"], "true");
    assert_eq!((&report["exit_code"], &report["error"]["code"]), (&125.into(), &4.into()), "{report}");
}

#[test]
fn wrong_requests_are_refused_in_one_sentence() {
    let roots = RootBox::new();
    for (flags, sentence) in [
        (["--memory", "1M"], "--memory is too small"),
        (["--spill", "1G"], "--spill needs --memory"),
        (["--name", "a/b"], "'a/b' cannot name a root"),
        (["--bind", "/none-such:/x"], "cannot bind /none-such"),
        (["--bind", "/usr:/../x"], "'/../x' is no place in a root"),
        (["--scratch", "relative"], "'relative' is no place in a root"),
        (["--cpus", "0"], "--cpus takes a number"),
        (["--tmp", "0"], "--tmp takes a size above zero"),
        (["--root", "/etc/passwd"], "is no layer"),
        (["--bind", "/etc/passwd:/usr"], "/etc/passwd cannot be bound to /usr"),
    ] {
        let (code, said) = run_failing(&mut roots.run(flags, "true"));
        assert_eq!(code, 125, "{flags:?}: {said}");
        assert!(said.contains(sentence) && said.trim_end().lines().count() == 1, "{flags:?}: {said}");
    }
    // No code that a command might have.
    for flags in ["run --none-such", "run --memory=x", "run true", "try --none-such -- true"] {
        let flags: Vec<&str> = flags.split(' ').collect();
        let (code, said) = run_failing(roots.hayloft([]).args(&flags));
        assert!(code == 125 && said.contains("error: "), "{flags:?}: {code}: {said}");
    }
    let (code, said) = run_failing(&mut roots.hayloft(["run", "--config", "/none-such", "--", "true"]));
    assert!(code == 125 && said.contains("/none-such"), "{code}: {said}");
    assert_eq!(run_failing(&mut roots.hayloft(["root", "show"])).0, 2);
    let (code, said) = run_failing(&mut roots.hayloft(["run", "--", ""]));
    assert!(code == 127 && said.contains("there is no ''"), "{code}: {said}");
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn an_image_is_a_layer() {
    let roots = RootBox::new();
    let layer = small_layer(roots.dir());
    for (kind, make) in [
        ("ext4", "mkfs.ext4 -q -d \"$0\" \"$1\" 8M"),
        ("erofs", "mkfs.erofs --quiet \"$1\" \"$0\""),
        ("squashfs", "mksquashfs \"$0\" \"$1\" -quiet -no-progress"),
    ] {
        let image = roots.dir().join(format!("image.{kind}"));
        let image = image.to_str().unwrap();
        run(sh(make).arg(&layer).arg(image));
        let flags = ["--root", image, "--bind", "/usr:/usr"];
        let script = "grep -c builder /etc/passwd; echo x >>/etc/passwd; wc -l </etc/passwd";
        let lines = run(&mut roots.run(flags, script));
        assert!(lines.starts_with("1\n") && lines.lines().count() == 2, "{kind}: {lines}");
        assert_eq!(roots.leftovers(&[]), [""; 0]);
    }
}

#[test]
fn fsync_waits_only_when_that_is_asked_for() {
    let roots = RootBox::new();
    let layer = small_layer(roots.dir());
    let layer = layer.to_str().unwrap();
    for (how, is_volatile) in [("--mode=0755", true), ("--fsync", false)] {
        let flags = ["--root", layer, "--bind", "/usr:/usr", how];
        let mounts =
            run(&mut roots.run(flags, "grep ' / / ' /proc/self/mountinfo; echo x >/file; sync /file"));
        assert!(mounts.contains(" - overlay "), "{mounts}");
        assert_eq!(mounts.contains("volatile"), is_volatile, "{mounts}");
    }
}
