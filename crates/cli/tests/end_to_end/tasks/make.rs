//! `hayloft make`: GNU make, its recipes on other hosts.

use std::fs;
use std::process::Command;

use crate::setup::agents::Site;
use crate::setup::farm::{hayloft, kill, run, wait_until};

const ALLOWED: [&str; 3] = ["--slots", "4", "--allow-root"];

/// Of everything that makefiles do with their recipes.
const MAKEFILE: &str = r#"
X = $(shell echo of-a-recipe)
Y := $(shell echo while-reading)
SHELL = /bin/bash
all: one two oneshell python quoted
one:
	@echo "$(X) $(Y) $(SHELL) $$BASH_VERSION" > $@.out
	+@echo "with + $(MAKELEVEL) $$MAKELEVEL" >> $@.out
	@test -d . && echo "dear" >> $@.out && readlink /proc/self/ns/mnt > $@.ns
two:
	@$(MAKE) -s -f sub.mk sub
quoted:
	@printf '%s|' 'a  b' "it's" \
	  "\"q\"" '$$HOME' `echo back` > $@.out; cd / && pwd > $(CURDIR)/$@.pwd
oneshell:
	@$(MAKE) -s -f one.mk
python: SHELL = /usr/bin/python3
python:
	@open("python.out", "w").write("yes\n")
"#;
const SUB: &str = "sub: a b\na b:\n\t@test -d . && echo $@ $$MAKELEVEL > sub-$@.out && readlink /proc/self/ns/mnt > sub-$@.ns\n";
const ONE: &str = ".ONESHELL:\n.SHELLFLAGS = -ec\nall:\n\t@x=5\n\tcat > shell.out <<'EOF'\n\tthere $$x\n\tEOF\n\techo $$x >> shell.out\n";

fn write(dir: &std::path::Path) {
    fs::create_dir(dir).unwrap();
    fs::write(dir.join("Makefile"), MAKEFILE).unwrap();
    fs::write(dir.join("sub.mk"), SUB).unwrap();
    fs::write(dir.join("one.mk"), ONE).unwrap();
}

fn outputs(dir: &std::path::Path) -> Vec<(String, String)> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<(String, String)> = files
        .filter(|path| path.extension().is_some_and(|extension| extension == "out"))
        .map(|path| {
            (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read_to_string(&path).unwrap())
        })
        .collect();
    all.sort();
    all
}

/// As if all that is known of this project's recipes were that they take little.
fn take_for_cheap(project: &std::path::Path) {
    let history = project.join(".hayloft-history");
    let known = fs::read_to_string(&history).unwrap();
    let cheap: String =
        known.lines().map(|line| format!("{} 1\n", line.split_once(' ').unwrap().0)).collect();
    fs::write(&history, cheap).unwrap();
}

#[test]
fn make_does_the_same_with_recipes_on_other_hosts() {
    let site = Site::new(2, &ALLOWED);
    for name in ["plain", "farm", "alone"] {
        write(&site.dir().join(name));
    }
    run(Command::new("make").args(["-j3"]).current_dir(site.dir().join("plain")).env_remove("MAKEFLAGS"));
    let mut make = site.command(&["make", "--summary", "-j"], &["all"]);
    let output = make.current_dir(site.dir().join("farm")).env_remove("MAKEFLAGS").output().unwrap();
    let err = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{err}");
    let plain = outputs(&site.dir().join("plain"));
    assert_eq!(plain.len(), 6, "{plain:?}");
    assert_eq!(outputs(&site.dir().join("farm")), plain);
    // Recipes ran elsewhere, those of a sub-make too.
    let own = fs::read_link("/proc/self/ns/mnt").unwrap();
    for name in ["one.ns", "sub-a.ns", "sub-b.ns"] {
        let there = fs::read_to_string(site.dir().join("farm").join(name)).unwrap();
        assert_ne!(there.trim(), own.to_str().unwrap(), "{name}: {err}");
    }
    let here = site.dir().join("alone");
    run(hayloft(["make", "-j3", "--", "all"]).current_dir(&here).env_remove("MAKEFLAGS"));
    assert_eq!(outputs(&here), plain);
    // What took little time before runs here.
    take_for_cheap(&site.dir().join("farm"));
    let again = run(&mut {
        let mut make = site.command(&["make", "-j"], &["one"]);
        make.current_dir(site.dir().join("farm")).env_remove("MAKEFLAGS");
        make
    });
    assert_eq!(again, "");
    assert_eq!(fs::read_to_string(site.dir().join("farm/one.ns")).unwrap().trim(), own.to_str().unwrap());
}

#[test]
fn options_of_make_and_exit_codes_are_its_own() {
    let site = Site::new(1, &ALLOWED);
    let text = "all: a b\na:\n\t@false; exit 3\nb:\n\t@test -d . && echo b > b.out\n";
    fs::write(site.dir().join("Makefile"), text).unwrap();
    let make = |arguments: &[&str]| {
        let mut make = site.command(&["make"], &[]);
        make.args(arguments).env_remove("MAKEFLAGS").output().unwrap()
    };
    let output = make(&["-k", "-j4", "-O"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("Error 3"));
    assert_eq!(fs::read_to_string(site.dir().join("b.out")).unwrap(), "b\n");
    let output = make(&["-n", "-j4", "b"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("echo b > b.out"));
    assert_eq!(make(&["-q", "b"]).status.code(), Some(1));
    assert_eq!(make(&["no-such-target"]).status.code(), Some(2));
}

/// What make runs without a shell is not what a shell makes of it: shells have an `echo` of their own.
#[test]
fn lines_of_plain_words_are_run_as_by_plain_make() {
    const LINES: &str = r#"
all:
	echo -e one
	@echo 'a\tb'
	@echo "a\tb"
	@echo '(a\tb)'
	@echo a\tb
	@printf '%s|' x 'y z' ''
	@env printf '%s\n' -e there
	@cd . && echo -e shell
	-./Makefile
	-no-such-program
	@test -d . -a ! -e x
"#;
    let site = Site::new(1, &ALLOWED);
    fs::write(site.dir().join("Makefile"), LINES).unwrap();
    let mut plain = Command::new("make");
    let plain = plain.args(["-j2", "all"]).current_dir(site.dir()).env_remove("MAKEFLAGS").output().unwrap();
    // At first nothing is known of these lines, then that they take little.
    for round in 0..2 {
        let mut make = site.command(&["make", "-j2"], &["all"]);
        let farm = make.env_remove("MAKEFLAGS").output().unwrap();
        let texts = |output: &std::process::Output| {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let errors: Vec<String> =
                said.lines().filter(|line| line.contains("(ignored)")).map(str::to_owned).collect();
            (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned(), errors)
        };
        assert_eq!(texts(&farm), texts(&plain), "{round} {farm:?}");
        take_for_cheap(site.dir());
    }
}

#[test]
fn a_signal_ends_make_and_all_its_recipes_everywhere() {
    let site = Site::new(2, &ALLOWED);
    let recipe = |at: usize| format!("t{at}:\n\t@test -d . && echo up > up{at}; sleep 654{at}\n");
    let all: String = (0..4).map(recipe).collect();
    fs::write(site.dir().join("Makefile"), format!("all: t0 t1 t2 t3\n{all}")).unwrap();
    let mut make = site.command(&["make", "-j4"], &["all"]).env_remove("MAKEFLAGS").spawn().unwrap();
    let is_up = |at: usize| site.dir().join(format!("up{at}")).exists();
    wait_until("all run", std::time::Duration::from_secs(60), || (0..4).all(is_up));
    kill(make.id(), libc::SIGTERM);
    assert!(!make.wait().unwrap().success());
    wait_until("all have ended", std::time::Duration::from_secs(60), || {
        !Command::new("pgrep").args(["-f", "^sleep 654[0-3]$"]).output().unwrap().status.success()
    });
}
