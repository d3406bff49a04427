//! `hayloft make --record`: what recipes read and write, beside what rules say.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::setup::agents::Site;

const ALLOWED: [&str; 3] = ["--slots", "4", "--allow-root"];

/// `bad.o` and `sub/x` read `gen.h` without saying so; others say it in one way or another.
const MAKEFILE: &str = "\
WAIT = until test -e gen.h; do sleep 0.1; done
all: bad.o good.o far.o quo'ted late sub one two
gen.h: gen.txt
\t@sleep 0.3; cat gen.txt > gen.tmp && mv gen.tmp $@
bad.o: bad.c
\t@$(WAIT); cat bad.c gen.h /etc/passwd > $@
good.o: bad.c gen.h
\t@cat $^ > $@
far.o: bad.c | headers
\t@cat gen.h > $@
headers: gen.h
late: late.stamp
\t@cat side.h > $@
late.stamp:
\t@echo side > side.h; echo > $@
quo'ted: gen.h
\t@cat gen.h > \"$@\"; echo x > scratch; cat scratch; rm scratch
sub:
\t@$(MAKE) -s -C sub x
one two: gen.h
\t@echo $@ >> both.log; echo > $@
.PHONY: sub
";
const SUB: &str = "x:\n\t@until test -e ../gen.h; do sleep 0.1; done; cat ../gen.h > x\n";

fn write(dir: &Path) {
    fs::create_dir_all(dir.join("sub")).unwrap();
    let files =
        [("Makefile", MAKEFILE), ("sub/Makefile", SUB), ("gen.txt", "int x;\n"), ("bad.c", "int y;\n")];
    files.iter().for_each(|(name, text)| fs::write(dir.join(name), text).unwrap());
}

fn record(site: &Site, flag: &str) -> (Value, String) {
    let mut make = site.command(&["make", "--record-to", "report.json", "-j8", flag], &["all"]);
    let output = make.current_dir(site.dir().join("p")).env_remove("MAKEFLAGS").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    let report = fs::read_to_string(site.dir().join("p/report.json")).unwrap();
    (serde_json::from_str(&report).unwrap(), said)
}

#[test]
fn dependencies_that_no_rule_names_are_told_with_caches_cold_and_warm() {
    let site = Site::new(2, &ALLOWED);
    write(&site.dir().join("p"));
    let at = |name: &str| site.dir().join("p").join(name).to_str().unwrap().to_owned();
    for flag in ["-k", "-B"] {
        let (report, said) = record(&site, flag);
        assert_eq!(
            report["undeclared"],
            json!([
                { "file": at("gen.h"), "read_by": at("bad.o"), "written_by": at("gen.h") },
                { "file": at("gen.h"), "read_by": at("sub/x"), "written_by": at("gen.h") },
            ]),
            "{said}"
        );
        let shared = json!([{ "file": at("both.log"), "written_by": [at("one"), at("two")] }]);
        assert_eq!(report["written_twice"], shared, "{said}");
        assert!(report["outside_read"]["/etc/passwd"] == 1, "{report}");
        assert_eq!((&report["outside_written"], &report["lost"]), (&json!({}), &json!(0)), "{report}");
        assert_eq!(report["recipes"], 10, "{report}");
        assert!(said.contains("bad.o reads gen.h, which gen.h writes"), "{said}");
    }
    assert!(!site.dir().join("p/scratch").exists() && site.dir().join("p/quo'ted").exists());
}

#[test]
fn what_cannot_be_recorded_is_said() {
    let site = Site::new(1, &ALLOWED);
    fs::write(site.dir().join("Makefile"), "all:\n\t@cat Makefile\n").unwrap();
    let mut make = site.command(&["make", "--record", "--root", "x", "-j2"], &["all"]);
    assert_eq!(make.output().unwrap().status.code(), Some(125));
    // Without -j nothing runs on the farm.
    let output = site.command(&["make", "--record"], &["all"]).env_remove("MAKEFLAGS").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("none ran on the farm"), "{said}");
}
