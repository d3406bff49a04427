//! The memory of a root: bounds, spill, and what is refused early.

use crate::setup::farm::{kill, run, run_failing};
use crate::setup::root_box::RootBox;

#[test]
fn a_root_grows_to_four_times_its_memory() {
    let roots = RootBox::new();
    let script = "dd if=/dev/urandom of=/big bs=1M count=256 2>/dev/null; a=$(cksum </big); b=$(cksum </big)
        [ \"$a\" = \"$b\" ]; cp /big /tmp/part; cmp /big /tmp/part; df --output=avail / /tmp | sort -u | wc -l";
    let report = roots.report(["--memory", "64M", "--spill", "640M"], script);
    assert_eq!(report["exit_code"], 0, "{report}");
    assert!(report["memory_peak_bytes"].as_u64().unwrap() <= 64 << 20, "{report}");
    assert!(report["spilled_bytes"].as_u64().unwrap() >= 190 << 20, "{report}");
    assert_eq!(report["out_of_memory_kills"], 0, "{report}");
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn compressed_memory_takes_the_spill_as_well() {
    if !std::path::Path::new("/sys/class/zram-control").exists() {
        eprintln!("skipped: this kernel has no zram");
        return;
    }
    let roots = RootBox::new();
    let script = "yes hayloft | head -c 128M >/big; [ $(wc -c </big) = 134217728 ]; grep -c zram /proc/swaps";
    let report = roots.report(["--memory", "64M", "--spill", "zram:256M"], script);
    assert_eq!((&report["exit_code"], &report["out_of_memory_kills"]), (&0.into(), &0.into()), "{report}");
}

#[test]
fn without_spill_a_full_root_says_so_and_nobody_is_killed() {
    let roots = RootBox::new();
    let script = "dd if=/dev/zero of=/big bs=1M 2>&1 | grep -c 'No space left'
        dd if=/dev/zero of=/tmp/more bs=1M 2>&1 | grep -c 'No space left'; rm /big; echo fits >/big; cat /big";
    let file = roots.dir().join("report.json");
    let flags = ["--memory", "64M", "--json", file.to_str().unwrap()];
    assert_eq!(run(&mut roots.run(flags, script)), "1\n1\nfits\n");
    let report: serde_json::Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(
        (&report["out_of_memory_kills"], &report["spilled_bytes"]),
        (&0.into(), &0.into()),
        "{report}"
    );
}

#[test]
fn a_greedy_process_dies_in_its_root_alone() {
    let roots = RootBox::new();
    let other = roots.start(["--name", "other"], "sleep 4714.1");
    // tail keeps a line in memory until it ends, and this one does not.
    let report = roots.report(["--memory", "32M"], "tail /dev/zero || exit 9");
    assert_eq!(report["exit_code"], 9, "{report}");
    assert!(report["out_of_memory_kills"].as_u64().unwrap() >= 1, "{report}");
    assert_eq!(roots.list().len(), 1);
    drop(other);
}

#[test]
fn tmp_has_a_size_of_its_own_when_asked() {
    let roots = RootBox::new();
    let script = "df --output=size -m /tmp / | tail -n +2 | tr -d ' '";
    assert_eq!(run(&mut roots.run(["--memory", "64M", "--tmp", "10M"], script)), "10\n38\n");
}

#[test]
fn a_root_that_does_not_fit_is_refused_early() {
    let roots = RootBox::new();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:")).unwrap();
    let available: u64 = line.trim().trim_end_matches(" kB").parse().unwrap();
    let half = format!("{}K", available / 2);
    run(&mut roots.run(["--require-free", &half], "true"));
    let other = roots.start(["--memory", &format!("{}K", available / 4 * 3)], "sleep 4714.2");
    let (code, said) = run_failing(&mut roots.run(["--require-free", &half], "true"));
    assert_eq!(code, 125);
    assert!(said.contains("one other root may still claim"), "{said}");
    drop(other);
    run(&mut roots.run(["--require-free", &half], "true"));
}

#[test]
fn processors_are_bounded() {
    let roots = RootBox::new();
    let report = roots.report(["--cpus", "0.2"], "timeout 2 sh -c 'while :; do :; done' || true");
    let used = report["cpu_user_ms"].as_f64().unwrap() + report["cpu_system_ms"].as_f64().unwrap();
    assert!(used < 0.5 * report["wall_ms"].as_f64().unwrap(), "{report}");
}

#[test]
fn spill_to_memory_is_refused() {
    let roots = RootBox::new();
    let flags = ["--memory", "64M", "--spill", "64M", "--spill-dir", "/dev/shm"];
    let (code, said) = run_failing(&mut roots.run(flags, "true"));
    assert!(code == 125 && said.contains("is in memory"), "{said}");
    assert_eq!(roots.leftovers(&[]), [""; 0]);
}

#[test]
fn swap_files_are_found_again_by_whatever_path_they_were_made() {
    let roots = RootBox::new();
    std::fs::create_dir(roots.dir().join("real")).unwrap();
    std::os::unix::fs::symlink("real", roots.dir().join("link")).unwrap();
    for folder in ["relative", "link/below", "./real/../link"] {
        let flags = ["--memory", "64M", "--spill", "64M", "--spill-dir", folder];
        run(roots.run(flags, "true").current_dir(roots.dir()));
        let swaps = std::fs::read_to_string("/proc/swaps").unwrap();
        assert_eq!(roots.leftovers(&[]), [""; 0], "{folder}: {swaps}");
    }
    let left = run(crate::setup::farm::sh("find \"$0\" -name '*.swap'").arg(roots.dir()));
    assert_eq!(left, "");
}

#[test]
fn empty_files_in_tmp_fill_it_and_nobody_is_killed() {
    let roots = RootBox::new();
    let script = "cd /tmp; seq 100000 | xargs touch 2>&1 | grep -c 'No space left' >/count
        cd /var; seq 100000 | xargs touch 2>&1 | grep -c 'No space left' >>/count; [ $(wc -l </count) = 2 ]";
    let report = roots.report(["--memory", "64M", "--tmp", "16M"], script);
    assert_eq!((&report["exit_code"], &report["out_of_memory_kills"]), (&0.into(), &0.into()), "{report}");
}

/// What other roots may still claim, in MiB, as a root that does not fit says it.
fn claimed(roots: &RootBox) -> u64 {
    let (code, said) = run_failing(&mut roots.run(["--require-free", "1000T"], "true"));
    let number = said.split("may still claim ").nth(1).and_then(|text| text.split(' ').next());
    number.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("{code}: {said}"))
}

#[test]
fn pages_of_files_that_a_root_has_read_are_no_part_of_its_own() {
    let roots = RootBox::new();
    let file = roots.dir().join("file");
    run(crate::setup::farm::sh(
        "head -c 300M /dev/zero >\"$0\"; sync \"$0\"; dd if=\"$0\" iflag=nocache count=0 2>&1",
    )
    .arg(&file));
    let script = format!("cat {} >/dev/null; echo ready; sleep 4726.1", file.display());
    let _other = roots.start(["--memory", "512M"], &script);
    assert!(claimed(&roots) > 450, "{}", claimed(&roots));
}

#[test]
fn tmp_is_claimed_as_well() {
    let roots = RootBox::new();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap();
    let half = line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 2 / 1024;
    for tmp in ["64M".to_owned(), format!("{}M", half - 64)] {
        let _other = roots.start(["--tmp", &tmp], "sleep 4726.2");
        assert!(claimed(&roots).abs_diff(half) <= 8, "{tmp}: {}, not {half}", claimed(&roots));
    }
}

/// Bytes that lie on a root's swap device.
fn swapped(roots: &RootBox, name: &str) -> u64 {
    let device = roots.show(name)["spill"]["device"].as_str().unwrap().to_owned();
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap();
    let line = swaps.lines().find(|line| line.split_whitespace().next() == Some(&device)).unwrap();
    line.split_whitespace().nth(3).unwrap().parse::<u64>().unwrap() * 1024
}

#[test]
fn a_name_is_free_when_its_root_has_ended_though_its_swap_stays() {
    let roots = RootBox::new();
    let flags = |name| ["--name", name, "--memory", "64M", "--spill", "300M"];
    let swap_files = || std::fs::read_dir(roots.spill()).unwrap().count();
    // The kernel fills the device that has been there for longest: for a while that may be another test's.
    for _ in 0..50 {
        let mut first = roots.start(flags("a"), "sleep 4727.1");
        let mut second = roots.start(flags("b"), "head -c 200M /dev/urandom >/big; echo ready; sleep 4727.2");
        let is_on_first = swapped(&roots, "a") > 80 << 20;
        kill(first.child.id(), libc::SIGTERM);
        first.child.wait().unwrap();
        if is_on_first {
            assert_eq!((swap_files(), roots.list().len()), (2, 1));
            for _ in 0..2 {
                run(&mut roots.run(flags("a"), "true"));
                assert_eq!(roots.list().len(), 1);
            }
        }
        kill(second.child.id(), libc::SIGTERM);
        second.child.wait().unwrap();
        run(&mut roots.run([], "true"));
        assert_eq!(roots.leftovers(&[]), [""; 0]);
        if is_on_first {
            return;
        }
    }
    panic!("never were a root's pages on another one's device");
}

#[test]
fn swap_files_are_never_seen() {
    let roots = RootBox::new();
    std::fs::create_dir(roots.dir().join("real")).unwrap();
    std::os::unix::fs::symlink("real", roots.dir().join("link")).unwrap();
    // On a file system of its own: a layer must not be part of another one.
    let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
    let layer = crate::setup::root_box::small_layer(elsewhere.path());
    let layer = layer.to_str().unwrap();
    let script = format!("find {}/real {0}/state -type f; echo looked", roots.dir().display());
    for (at, root) in
        [("none", &[][..]), ("slash", &["--root", "/"]), ("both", &["--root", layer, "--root", "/."])]
    {
        let folder = roots.dir().join("link").join(at);
        let mut command = roots.hayloft(["run", "--memory", "64M", "--spill", "64M", "--spill-dir"]);
        command.arg(folder).args(root).args(["--", "sh", "-euc", &script]);
        assert_eq!(run(&mut command), "looked\n", "{at}");
    }
    // The tree that a layer is part of does not matter.
    let folder = roots.dir().join("real/part");
    let mut command = roots.hayloft(["run", "--memory", "64M", "--spill", "64M", "--spill-dir"]);
    command.arg(folder).args(["--bind", "/usr:/usr", "--root", layer, "--root"]).arg(roots.dir());
    command.args(["--", "sh", "-euc", "find /real /state -type f; echo looked"]);
    assert_eq!(run(&mut command), "looked\n");
}
