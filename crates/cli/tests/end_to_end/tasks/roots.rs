//! Tasks in build roots: `--root`.

use std::fs;
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use tempfile::TempDir;

use crate::setup::agents::Site;
use crate::setup::farm::{hayloft, kill, run, sh, wait_until};
use crate::setup::root_box::{processes, wait_no_process};

/// Copies a shell and a few programs, with the libraries that they need.
const LAYER: &str = r#"mkdir -p "$0/usr/bin" "$0/etc"
    for name in bin lib lib64; do ln -s usr/$name "$0/$name"; done
    for program in sh cat sleep id ls grep mkdir; do
        cp "$(readlink -f "/usr/bin/$program")" "$0/usr/bin/$program"
        for file in $(ldd "/usr/bin/$program" | grep -o '/[^ ]*'); do
            to=$0/usr/${file#/usr}
            mkdir -p "${to%/*}"
            cp -L "$file" "$to"
        done
    done
    echo root:x:0:0::/root:/bin/sh >"$0/etc/passwd"
    echo 'of the layer' >"$0/only-here""#;

/// A farm of one host whose roots are in a state folder of its own, with a layer on its volume and the same one by name.
struct InRoots {
    site: Site,
    dir: TempDir,
}

impl InRoots {
    fn new() -> InRoots {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        let top = dir.path().display().to_string();
        let config = dir.path().join("config.toml");
        fs::write(&config, format!("[run]\nstate_dir = \"{top}/state\"\nlayers = \"{top}/layers\"\n"))
            .unwrap();
        let args = ["--slots", "4", "--allow-root", "--config", config.to_str().unwrap()];
        let site = Site::new(1, &args);
        run(sh(LAYER).arg(dir.path().join("layer")));
        let copy = |to: &Path| run(Command::new("cp").arg("-a").arg(dir.path().join("layer")).arg(to));
        copy(&site.dir().join("layer"));
        fs::create_dir_all(dir.path().join("layers/tools")).unwrap();
        copy(&dir.path().join("layers/tools/tree"));
        InRoots { site, dir }
    }

    fn task(&self, flags: &[&str], script: &str) -> Command {
        let mut before = vec!["task", "--root", "./layer"];
        before.extend(flags);
        let mut task = self.site.command(&before, &["sh", "-c", script]);
        task.stdin(Stdio::null());
        task
    }

    fn output(&self, flags: &[&str], script: &str) -> Output {
        self.task(flags, script).output().unwrap()
    }

    fn roots(&self) -> usize {
        let mut list = hayloft(["root", "list", "--json"]);
        let list = run(list.env("HAYLOFT_STATE_DIR", self.dir.path().join("state")));
        serde_json::from_str::<Vec<serde_json::Value>>(&list).unwrap().len()
    }
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn a_task_in_a_root_finds_the_layer_and_all_that_tasks_find() {
    let farm = InRoots::new();
    for flags in [&[][..], &["--isolate"]] {
        let script = "cat /only-here; pwd; cat; umask; id -u; echo \"$WORD\"; echo to-error >&2; echo made > out; \
                      ls /usr/bin/cc 2>/dev/null; ls /proc | grep -c '^[0-9]'; exit 7";
        let mut task = farm.task(flags, script);
        task.env("WORD", "x  'y'").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = task.spawn().unwrap();
        child.stdin.take().unwrap().write_all(b"from input\n").unwrap();
        let output = child.wait_with_output().unwrap();
        let (out, err) = texts(&output);
        assert_eq!((output.status.code(), &*err), (Some(7), "to-error\n"), "{out}");
        let lines: Vec<&str> = out.lines().collect();
        let here = farm.site.dir().to_str().unwrap();
        assert_eq!(&lines[..6], ["of the layer", here, "from input", "0022", "0", "x  'y'"]);
        // No other process is seen: the shell, ls, grep and the one above them.
        assert!(lines[6].parse::<u32>().unwrap() <= 5, "{out}");
        assert_eq!(fs::read_to_string(farm.site.dir().join("out")).unwrap(), "made\n");
        let none = farm.site.command(&["task", "--root", "./layer"], &["/no/such/program"]).output().unwrap();
        assert_eq!(none.status.code(), Some(127), "{none:?}");
    }
}

#[test]
fn tasks_of_a_build_share_a_root_unless_each_wants_its_own() {
    let farm = InRoots::new();
    assert!(farm.output(&["--build", "one"], "echo x > /tmp/left; echo y > /usr/left").status.success());
    let left = |flags: &[&str]| texts(&farm.output(flags, "cat /tmp/left /usr/left")).0;
    assert_eq!(left(&["--build", "one"]), "x\ny\n");
    assert_eq!(left(&["--build", "two"]), "");
    assert_eq!(left(&["--build", "one", "--isolate"]), "");
    assert!(!farm.site.dir().join("layer/usr/left").exists());
    assert_eq!(farm.roots(), 2);
    let by_name = farm.site.command(&["task", "--root", "tools"], &["cat", "/only-here"]).output().unwrap();
    assert_eq!(texts(&by_name).0, "of the layer\n");
}

#[test]
fn what_a_task_in_a_root_leaves_running_ends_with_it_and_signals_reach_it() {
    let farm = InRoots::new();
    for (round, flags) in [&[][..], &["--isolate"]].into_iter().enumerate() {
        let seconds = format!("{}", 7_654_001 + round);
        let output = farm.output(flags, &format!("sleep {seconds} & exit 3"));
        assert_eq!(output.status.code(), Some(3), "{output:?}");
        assert_eq!(processes(&seconds), 0);
        let script = format!("echo > begun{round}; exec sleep {seconds}");
        let mut child = farm.task(flags, &script).spawn().unwrap();
        let begun = farm.site.dir().join(format!("begun{round}"));
        wait_until("it runs", Duration::from_secs(60), || begun.exists());
        kill(child.id(), libc::SIGTERM);
        assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGTERM));
        wait_no_process(&format!("sleep\x00{seconds}"));
    }
}

#[test]
fn without_a_root_a_task_is_not_run_and_that_is_the_farms_failure() {
    let farm = InRoots::new();
    let none = farm.site.command(&["task", "--root", "no-such-layer"], &["true"]).output().unwrap();
    assert_eq!(none.status.code(), Some(125), "{none:?}");
    assert!(texts(&none).1.contains("no-such-layer"), "{none:?}");
    let outside = farm.dir.path().join("layer");
    let outside = ["task", "--root", outside.to_str().unwrap()];
    let elsewhere = farm.site.command(&outside, &["true"]).output().unwrap();
    assert_eq!(elsewhere.status.code(), Some(125));
    assert!(texts(&elsewhere).1.contains("is not on the volume"), "{elsewhere:?}");
    // What it may keep in memory is what it has asked for.
    let full = farm.output(&["--isolate", "--mem", "64M"], "cat /dev/zero > /tmp/big");
    assert!(texts(&full).1.contains("No space left"), "{full:?}");
}

#[test]
fn the_roots_of_an_agent_go_with_it() {
    let mut farm = InRoots::new();
    let mut task = farm.task(&[], "echo > begun; exec sleep 7654010").spawn().unwrap();
    wait_until("it runs", Duration::from_secs(60), || farm.site.dir().join("begun").exists());
    assert_eq!(farm.roots(), 1);
    farm.site.agents.remove(0).kill();
    wait_no_process("sleep\x007654010");
    wait_until("the root is gone", Duration::from_secs(60), || farm.roots() == 0);
    task.kill().unwrap();
    task.wait().unwrap();
}

#[test]
fn recipes_run_in_the_root_of_the_build() {
    let farm = InRoots::new();
    let dir = farm.site.dir();
    let makefile =
        "all: a b\na b:\n\tcat /only-here > $@; echo x >> /tmp/count\ncount: all\n\tcat /tmp/count\n";
    fs::write(dir.join("Makefile"), makefile).unwrap();
    let mut make = hayloft(["make", "--root", "./layer", "-j4", "count"]);
    let output = make.current_dir(dir).env("HAYLOFT_BROKER", farm.site.broker.url()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    assert!(texts(&output).0.ends_with("x\nx\n"), "{output:?}");
    assert_eq!(fs::read_to_string(dir.join("a")).unwrap(), "of the layer\n");
}
