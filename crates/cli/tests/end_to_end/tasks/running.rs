//! `hayloft task`: commands on other hosts as if they ran here.

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::setup::agents::Site;
use crate::setup::farm::{hayloft, kill, run, wait_until};

const ALLOWED: [&str; 3] = ["--slots", "4", "--allow-root"];

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_task_finds_there_what_it_would_find_here() {
    let site = Site::new(2, &ALLOWED);
    fs::create_dir(site.dir().join("a b")).unwrap();
    fs::write(site.dir().join("a b/in"), "here").unwrap();
    let script = "pwd; cat in \"$PWD/in\"; echo; umask; id -u; echo \"$WORD\"; echo to-error >&2; readlink /proc/self/ns/mnt; \
                  cat; echo made > out; stat -c %a out; exit 7";
    let mut task = site.task(script);
    task.current_dir(site.dir().join("a b")).env("WORD", "x  'y'\n\u{e4}");
    let mut with_umask = Command::new("sh");
    with_umask.args(["-c", "umask 027; exec \"$0\" \"$@\""]).arg(task.get_program()).args(task.get_args());
    for (name, value) in task.get_envs() {
        match value {
            Some(value) => with_umask.env(name, value),
            None => with_umask.env_remove(name),
        };
    }
    with_umask.current_dir(site.dir().join("a b"));
    with_umask.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = with_umask.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"from input").unwrap();
    let output = child.wait_with_output().unwrap();
    let (out, err) = texts(&output);
    assert_eq!(output.status.code(), Some(7), "{out}{err}");
    let here = site.dir().join("a b");
    let own = fs::read_link("/proc/self/ns/mnt").unwrap();
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines[0], here.to_str().unwrap());
    assert_eq!(&lines[1..4], ["herehere", "0027", "0"]);
    assert_eq!(&lines[4..6], ["x  'y'", "\u{e4}"]);
    assert_ne!(lines[6], own.to_str().unwrap(), "it ran here");
    assert_eq!(lines[7], "from input640");
    assert_eq!(err, "to-error\n");
    assert_eq!(fs::read_to_string(here.join("out")).unwrap(), "made\n");
    assert_eq!(fs::metadata(here.join("out")).unwrap().permissions().mode() & 0o777, 0o640);
}

#[test]
fn all_that_a_task_has_written_is_seen_here_when_it_has_ended() {
    let site = Site::new(2, &ALLOWED);
    for round in 0..20 {
        let script =
            format!("mkdir d{round}; echo {round} > d{round}/f; echo more >> log; rm -f d{}/f", round - 1);
        run(&mut site.task(&script));
        assert_eq!(fs::read_to_string(site.dir().join(format!("d{round}/f"))).unwrap(), format!("{round}\n"));
        assert_eq!(fs::metadata(site.dir().join("log")).unwrap().len(), 5 * (round + 1) as u64);
        assert!(round == 0 || !site.dir().join(format!("d{}/f", round - 1)).exists());
    }
}

#[test]
fn streams_are_whole_whatever_their_size() {
    let site = Site::new(1, &ALLOWED);
    let bytes: Vec<u8> = (0..9_000_000u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    let path = site.mounts[1].path().with_extension("in");
    fs::write(&path, &bytes).unwrap();
    let mut task = site.task("tee /dev/fd/2");
    let output = task.stdin(fs::File::open(&path).unwrap()).output().unwrap();
    assert!(output.status.success());
    assert!(output.stdout == bytes && output.stderr == bytes);
    // One stream for both keeps their order.
    let script = "for i in $(seq 2000); do echo o$i; echo e$i >&2; done";
    let out = fs::File::create(&path).unwrap();
    assert!(site.task(script).stderr(out.try_clone().unwrap()).stdout(out).status().unwrap().success());
    let lines: String = (1..=2000).map(|at| format!("o{at}\ne{at}\n")).collect();
    assert_eq!(fs::read_to_string(&path).unwrap(), lines);
    // A reader that goes ends who writes, as on a pipe.
    let script = "\"$0\" \"$@\" | head -n 1";
    let task = site.command(&["task", "--farm"], &["yes"]);
    let mut pipe = Command::new("sh");
    pipe.args(["-c", script]).arg(task.get_program()).args(task.get_args());
    pipe.current_dir(site.dir()).env("HAYLOFT_BROKER", site.broker.url()).env("HAYLOFT_CONFIG", "/dev/null");
    assert_eq!(run(&mut pipe), "y\n");
    // More than a message of the broker holds.
    let mut task = site.task("echo ${#A} ${#K}");
    for name in ["A", "B", "C", "D", "E", "F", "G", "H", "I", "J", "K"] {
        task.env(name, "x".repeat(110_000));
    }
    assert_eq!(run(&mut task), "110000 110000\n");
}

#[test]
fn how_a_task_ends_is_told() {
    let site = Site::new(1, &ALLOWED);
    assert_eq!(site.task("kill -SEGV $$").status().unwrap().signal(), Some(libc::SIGSEGV));
    let output = site.command(&["task", "--farm"], &["no-such-program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(127));
    assert!(texts(&output).1.contains("no-such-program"));
    assert_eq!(site.command(&["task", "--farm"], &["/etc/passwd"]).status().unwrap().code(), Some(126));
    fs::write(site.dir().join("script"), "echo no interpreter is named").unwrap();
    fs::set_permissions(site.dir().join("script"), fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(run(&mut site.command(&["task"], &["./script"])), "no interpreter is named\n");
}

/// By each program that stands for a task, and for each of two tasks of one command line: the second one looks nothing up.
#[test]
fn standard_streams_that_are_closed_are_empty_and_nothing_else_takes_their_place() {
    let site = Site::new(1, &ALLOWED);
    let small = Path::new(env!("CARGO_BIN_EXE_hayloft")).with_file_name("hayloft-task");
    let task = site.task("cat; echo $?; echo to-error >&2; exit 7");
    for (program, skipped) in [(task.get_program(), 0), (small.as_os_str(), 1)] {
        let program = Path::new(program);
        if !program.exists() {
            // It is of another package.
            continue;
        }
        for closed in ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"].into_iter().flat_map(|closed| [closed; 2]) {
            let mut shell = Command::new("timeout");
            shell.args(["30", "sh", "-c", &format!("exec \"$0\" \"$@\" {closed}")]).arg(program);
            shell.args(task.get_args().skip(skipped)).stdin(Stdio::null());
            for (name, value) in task.get_envs().filter_map(|(name, value)| Some((name, value?))) {
                shell.env(name, value);
            }
            let output = shell.current_dir(site.dir()).output().unwrap();
            let (out, err) = texts(&output);
            assert_eq!(output.status.code(), Some(7), "{closed}: {out}{err}");
            assert_eq!(out, if closed.contains('1') { "" } else { "0\n" }, "{closed}");
            assert_eq!(err, if closed.contains('2') { "" } else { "to-error\n" }, "{closed}");
        }
    }
}

#[test]
fn a_task_by_a_command_line_that_is_known_is_as_the_first_one_until_settings_change() {
    let site = Site::new(1, &ALLOWED);
    let config = site.mounts[1].path().with_extension("toml");
    fs::write(&config, "[farm]\nslots = 2\n").unwrap();
    let script = "pwd; umask; echo $WORD; cat; echo to-error >&2; exit $CODE";
    let task = |folder: &str, umask: &str, word: &str| {
        fs::create_dir_all(site.dir().join(folder)).unwrap();
        let task = site.task(script);
        let mut with_umask = Command::new("sh");
        with_umask.args(["-c", &format!("echo in-{word} | (umask {umask}; exec \"$0\" \"$@\")")]);
        with_umask.arg(task.get_program()).args(task.get_args()).current_dir(site.dir().join(folder));
        with_umask.env("HAYLOFT_BROKER", site.broker.url()).env("HAYLOFT_CONFIG", &config);
        with_umask.env("WORD", word).env("CODE", umask.trim_start_matches('0')).output().unwrap()
    };
    let finds = |folder: &str, umask: &str, word: &str| {
        let output = task(folder, umask, word);
        let here = site.dir().join(folder);
        let expected = format!("{}\n{umask}\n{word}\nin-{word}\n", here.display());
        assert_eq!(texts(&output), (expected, "to-error\n".to_owned()));
        assert_eq!(output.status.code(), Some(umask.trim_start_matches('0').parse().unwrap()));
    };
    finds("a", "0022", "one");
    // Whoever reads it now finds it wrong.
    let changed = fs::metadata(&config).unwrap().modified().unwrap();
    fs::write(&config, "[fram]\nslots = 2\n").unwrap();
    fs::File::options().write(true).open(&config).unwrap().set_modified(changed).unwrap();
    finds("b", "0027", "two");
    finds("a", "0077", "three");
    fs::File::options()
        .write(true)
        .open(&config)
        .unwrap()
        .set_modified(changed + Duration::from_secs(1))
        .unwrap();
    let output = task("a", "0022", "four");
    assert!(!output.status.success() && texts(&output).1.contains("fram"), "{output:?}");
    // A folder that is not on a volume: the task runs here, or not at all.
    let elsewhere = |flags: &[&str]| {
        let mut task = site.command(flags, &["sh", "-c", "readlink /proc/self/ns/mnt"]);
        task.current_dir("/").output().unwrap()
    };
    let own = fs::read_link("/proc/self/ns/mnt").unwrap();
    for flags in [&["task"][..], &["task", "--farm"]] {
        run(&mut site.command(flags, &["true"]));
        let (out, err) = texts(&elsewhere(flags));
        assert!(err.contains("/ is not on a mounted volume"), "{err}");
        assert_eq!(out.trim() == own.to_str().unwrap(), flags.len() == 1, "{out}{err}");
    }
}

#[test]
fn signals_reach_a_task_and_end_all_of_it() {
    let site = Site::new(1, &ALLOWED);
    let script = "trap 'echo got >> log; exit 9' USR1; setsid sleep 4321 & echo up > ready; while :; do sleep 0.1; done";
    let mut task = site.task(script).stderr(Stdio::null()).spawn().unwrap();
    wait_until("it runs", Duration::from_secs(60), || site.dir().join("ready").exists());
    kill(task.id(), libc::SIGUSR1);
    assert_eq!(task.wait().unwrap().code(), Some(9));
    assert_eq!(fs::read_to_string(site.dir().join("log")).unwrap(), "got\n");
    // What it left has ended with it.
    assert!(
        !Command::new("pgrep").args(["-f", "^sleep 4321$"]).stdout(Stdio::null()).status().unwrap().success()
    );
    let mut task = site.task("echo $$ > pid; exec sleep 5432").spawn().unwrap();
    wait_until("it runs", Duration::from_secs(60), || site.dir().join("pid").exists());
    kill(task.id(), libc::SIGINT);
    assert_eq!(task.wait().unwrap().signal(), Some(libc::SIGINT));
    assert!(
        !Command::new("pgrep").args(["-f", "^sleep 5432$"]).stdout(Stdio::null()).status().unwrap().success()
    );
    // One that does not mind is ended by the second.
    let mut task = site.task("trap '' TERM; echo up > deaf; sleep 600").spawn().unwrap();
    wait_until("it runs", Duration::from_secs(60), || site.dir().join("deaf").exists());
    kill(task.id(), libc::SIGTERM);
    std::thread::sleep(Duration::from_millis(300));
    assert!(task.try_wait().unwrap().is_none());
    kill(task.id(), libc::SIGTERM);
    assert!(!task.wait().unwrap().success());
}

#[test]
fn a_task_finds_nothing_of_the_one_before_in_namespaces_that_it_has_from_it() {
    let site = Site::new(1, &ALLOWED);
    let script = "readlink /proc/self/ns/pid; cat /proc/[1-9]*/comm; ! mountpoint -q /mnt || echo mounted; ";
    let namespace = |out: &str| out.lines().next().unwrap().to_owned();
    let mut before = String::new();
    // What others mount on this machine meanwhile makes an end to namespaces.
    wait_until("a task has the namespaces of the one before", Duration::from_secs(60), || {
        let out = run(&mut site.task(&format!("{script} (setsid sleep 4567 &)")));
        assert!(!out.contains("sleep"), "what another task has left is there: {out}");
        let is_same = namespace(&out) == before;
        before = namespace(&out);
        is_same
    });
    for _ in 0..3 {
        let mounts = run(&mut site.task(&format!("{script} mount -t tmpfs none /mnt")));
        let next = run(&mut site.task(script));
        assert!(
            !mounts.contains("mounted") && !next.contains("mounted"),
            "what another task has mounted is there"
        );
    }
}

#[test]
fn without_a_farm_a_task_runs_here_in_a_slot() {
    let (_farm, mount) = crate::setup::farm::Farm::mounted("v");
    let mut task = hayloft(["task", "--", "sh", "-c", "echo here; echo $0 >&2; kill -USR2 $$"]);
    let output = task.current_dir(mount.path()).output().unwrap();
    assert_eq!((texts(&output).0.as_str(), output.status.signal()), ("here\n", Some(libc::SIGUSR2)));
    let output = hayloft(["task", "--farm", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(texts(&output).1.contains("--broker"));
    // A broker that is not there: once it was looked for, it runs here, and says why.
    let mut task = hayloft(["task", "--broker", "nats://127.0.0.1:9", "--", "echo", "here"]);
    let output = task.current_dir(mount.path()).output().unwrap();
    assert_eq!((texts(&output).0.as_str(), output.status.code()), ("here\n", Some(0)));
    assert!(texts(&output).1.contains("runs here: "));
    assert_eq!(hayloft(["task", "--no-such-flag"]).output().unwrap().status.code(), Some(125));
}

#[test]
fn tasks_of_root_are_refused_unless_that_is_allowed_or_mapped() {
    let mut site = Site::new(1, &[]);
    let output = site.task("true").output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(texts(&output).1.contains("refused"), "{}", texts(&output).1);
    // Where it may, it runs here.
    let output = site.command(&["task"], &["echo", "here"]).output().unwrap();
    assert_eq!(texts(&output).0, "here\n");
    site.agents.drain(..).for_each(crate::setup::agents::Agent::stop);
    fs::set_permissions(site.dir(), fs::Permissions::from_mode(0o777)).unwrap();
    site.add(1, &["--user-map", "*=nobody"]);
    run(&mut site.task("id -un > who"));
    assert_eq!(fs::read_to_string(site.dir().join("who")).unwrap(), "nobody\n");
    assert_ne!(fs::metadata(site.dir().join("who")).unwrap().uid(), 0);
}

#[test]
fn slots_memory_and_labels_are_kept() {
    let mut site = Site::new(1, &["--slots", "2", "--allow-root", "--memory", "1G"]);
    site.add(1, &["--slots", "2", "--allow-root", "--label", "big"]);
    site.wait_for(2);
    run(&mut site.command(&["task", "--farm", "--label", "big"], &["sh", "-c", "echo x > labelled"]));
    let output = site.command(&["task", "--farm", "--label", "none"], &["true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    let script = "echo + >> running; sleep 0.3; echo - >> running";
    let labelled = ["task", "--farm", "--label", "big"];
    let tasks: Vec<_> =
        (0..6).map(|_| site.command(&labelled, &["sh", "-c", script]).spawn().unwrap()).collect();
    for mut task in tasks {
        assert!(task.wait().unwrap().success());
    }
    let (mut now, mut most) = (0, 0);
    for line in fs::read_to_string(site.dir().join("running")).unwrap().lines() {
        now += if line == "+" { 1 } else { -1 };
        most = most.max(now);
    }
    assert_eq!((now, most), (0, 2));
    let mut large =
        site.command(&["task", "--farm", "--mem", "900M", "--slots", "2"], &["sleep", "1"]).spawn().unwrap();
    wait_until("it is seen", Duration::from_secs(60), || {
        site.status()["builds"].as_array().unwrap().iter().any(|build| build["slots"] == 2)
    });
    assert!(large.wait().unwrap().success());
}
