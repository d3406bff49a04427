//! Sessions that end while their hosts are away: mounts go on with new ones, unless the store is not the one they knew.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use crate::mounting::space::SmallDisk;
use crate::setup::farm::{
    Farm, Mount, hayloft, kill, number, python, rounds, run, run_failing, seed, sh, tree, wait_until,
};
use crate::setup::mangler::Mangler;
use crate::setup::net::{Net, SERVER};
use crate::setup::root_box::RootBox;
use crate::sharing::hosts::network;

const PATIENCE: Duration = Duration::from_secs(120);

/// A Python that does one line after another, and says what came of each.
struct Program {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Program {
    fn start() -> Program {
        let lines = "import fcntl, os, sys
for line in sys.stdin:
    try: print(eval(line), flush=True)
    except OSError as error: print(error.strerror, flush=True)";
        let mut command = Command::new("python3");
        let mut child =
            command.args(["-c", lines]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Program { child, input, output: BufReader::new(output) }
    }

    fn does(&mut self, line: &str) -> String {
        writeln!(self.input, "{line}").unwrap();
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        answer.trim_end().to_owned()
    }

    /// Opens a file as this name.
    fn opens(&mut self, name: &str, path: &Path) {
        let path = path.display();
        let said = self.does(&format!("globals().update({name}=os.open('{path}', os.O_RDWR))"));
        assert_eq!(said, "None");
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Processes that stand still.
struct Stopped(Vec<u32>);

impl Stopped {
    /// One, and all that it has started.
    fn tree(pid: u32) -> Stopped {
        let below = tree(pid);
        below.iter().rev().for_each(|pid| kill(*pid, libc::SIGSTOP));
        Stopped(below)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for pid in &self.0 {
            // SAFETY: plain numbers. The first that goes on may end others.
            unsafe { libc::kill(*pid as i32, libc::SIGCONT) };
        }
    }
}

#[test]
fn what_is_recalled_on_a_connection_that_breaks_is_not_known_any_longer_than_that() {
    let farm = Farm::new();
    farm.create("v");
    let mangler = Mangler::before(&farm.address, seed());
    let (one, two) = (farm.mount("v", ""), farm.mount_through(&mangler.address, "v", "mnt-2"));
    for round in 0..rounds(40, 400) {
        let (here, there) = (two.join(&format!("d-{round}")), one.join(&format!("d-{round}")));
        fs::create_dir(&here).unwrap();
        fs::write(here.join("old"), "old").unwrap();
        two.sync();
        // The directory is recalled, and that is the last that the other host hears.
        mangler.cut_behind_next();
        let names = |dir: &Path| {
            let names =
                fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
            names.collect::<std::collections::BTreeSet<String>>()
        };
        assert_eq!(names(&there), ["old".to_owned()].into());
        fs::write(there.join("new"), "new").unwrap();
        assert_eq!(fs::read_to_string(here.join("new")).expect("what has been made"), "new", "round {round}");
        assert_eq!(names(&here), ["new".to_owned(), "old".to_owned()].into());
    }
    assert!(number(&two.stats(), "server.reconnects") > 0);
}

fn sessions_replaced(mount: &Mount) -> u64 {
    number(&mount.stats(), "server.sessions_replaced")
}

/// Until its session is over, and another one is there.
fn goes_on(mount: &Mount, before: u64) {
    wait_until("another session", PATIENCE, || sessions_replaced(mount) > before);
}

/// Cuts the host off until others have done this, which takes what it holds from it, and joins it again.
fn cut_off(net: &Net, at: usize, mount: &Mount, meanwhile: impl FnOnce()) {
    let before = sessions_replaced(mount);
    net.cut(at);
    meanwhile();
    net.join(at);
    goes_on(mount, before);
}

#[test]
fn a_clean_host_goes_on_without_an_error_after_its_session_was_ended() {
    let (net, _farm, mounts) = network(2, "2", "commit=0.2");
    let (here, lost) = (&mounts[0], &mounts[1]);
    fs::create_dir(lost.join("dir")).unwrap();
    for name in ["kept", "changed", "removed"] {
        fs::write(lost.join("dir").join(name), name).unwrap();
    }
    lost.sync();
    let script =
        "until test -e stop; do cat dir/kept >/dev/null; ls dir >/dev/null; test -d dir; sleep 0.02; done";
    let mut looks = sh(script).current_dir(lost.path()).spawn().unwrap();
    let mut program = Program::start();
    for name in ["kept", "changed", "removed"] {
        program.opens(name, &lost.join("dir").join(name));
    }
    for round in 0..2 {
        cut_off(&net, 1, lost, || {
            fs::write(here.join("dir/changed"), format!("by others {round}")).unwrap();
            let _ = fs::remove_file(here.join("dir/removed"));
            fs::write(here.join("dir/new"), b"new").unwrap();
        });
        assert_eq!(program.does("os.pread(kept, 20, 0)"), "b'kept'");
        assert_eq!(program.does("os.pread(changed, 20, 0)"), format!("b'by others {round}'"));
        assert_eq!(program.does("os.pread(removed, 20, 0)"), "Stale file handle");
        assert_eq!(run(sh("ls dir; cat dir/new").current_dir(lost.path())), "changed\nkept\nnew\nnew");
    }
    // It changes things as before, by itself and where others are, and all of that arrives.
    fs::create_dir(lost.join("later")).unwrap();
    fs::write(lost.join("later/file"), b"later").unwrap();
    fs::write(lost.join("dir/new"), b"newer").unwrap();
    lost.sync();
    assert_eq!(run(sh("cat later/file dir/new").current_dir(here.path())), "laternewer");
    fs::write(here.join("stop"), b"").unwrap();
    assert!(looks.wait().unwrap().success(), "a program with nothing at stake had an error");
    assert!(lost.unsent().is_empty(), "{}", lost.log());
}

#[test]
fn a_root_over_a_clean_mount_goes_on_after_its_session_was_ended() {
    let (net, farm, mounts) = network(2, "2", "commit=0.2");
    let layers = farm.mount_as("v", "layers", "ro", Some(&net.host(1)));
    let layer = mounts[0].join("layer");
    fs::create_dir(&layer).unwrap();
    let make = "mkdir usr go d0 d1 d2; for name in bin lib lib64 sbin; do ln -s usr/$name $name; done
        for d in 0 1 2; do for f in 0 1 2 3 4 5 6 7 8 9; do echo $d $f >d$d/f$f; done; done";
    run(sh(make).current_dir(&layer));
    mounts[0].sync();
    let roots = RootBox::new();
    let go = roots.dir().join("go");
    fs::create_dir(&go).unwrap();
    let bind = format!("{}:/go:rw", go.display());
    let layer_seen = layers.join("layer");
    let flags = ["--root", layer_seen.to_str().unwrap(), "--bind", "/usr:/usr", "--bind", &bind];
    let look = "cd /d0; until test -e /go/stop; do find /d? -type f -exec cat {} + >/dev/null; echo >>/go/passes; done";
    let mut root = roots.start(flags, look);
    let passes = || fs::read_to_string(go.join("passes")).unwrap_or_default().len();
    let pass_on = || {
        let seen = passes();
        wait_until("a pass", PATIENCE, || passes() > seen + 1);
    };
    pass_on();
    cut_off(&net, 1, &layers, || {
        run(sh("touch top; mkdir elsewhere").current_dir(mounts[0].path()));
        fs::write(mounts[0].join("layer/added"), b"").unwrap();
    });
    pass_on();
    assert_eq!(number(&layers.stats(), "server.epochs"), 0);
    fs::write(go.join("stop"), "").unwrap();
    assert!(root.child.wait().unwrap().success(), "what was looked up before is not there any more");
}

#[test]
fn what_an_ended_session_has_not_sent_is_told_once_and_the_mount_goes_on() {
    let (net, _farm, mounts) = network(2, "2", "commit=3600");
    let (here, lost) = (&mounts[0], &mounts[1]);
    fs::create_dir(lost.join("dir")).unwrap();
    fs::write(lost.join("dir/file"), b"sent").unwrap();
    lost.sync();
    let mut program = Program::start();
    program.opens("file", &lost.join("dir/file"));
    assert_eq!(program.does("os.pwrite(file, b'lost', 0)"), "4");
    fs::write(lost.join("dir/new"), b"lost too").unwrap();
    program.opens("new", &lost.join("dir/new"));
    cut_off(&net, 1, lost, || fs::write(here.join("dir/new"), b"mine").unwrap());
    assert_eq!(program.does("os.fsync(file)"), "Input/output error");
    assert_eq!(program.does("os.fsync(file)"), "None");
    assert_eq!(program.does("os.pread(file, 9, 0)"), "b'sent'");
    assert_eq!(program.does("os.pread(new, 9, 0)"), "Stale file handle");
    assert_eq!(program.does("os.fsync(new)"), "Input/output error");
    assert_eq!(fs::read(lost.join("dir/new")).unwrap(), b"mine");
    let (_, said) = run_failing(hayloft(["sync"]).arg(lost.path()));
    assert!(said.contains("kept in"), "{said}");
    assert_eq!(lost.unsent().len(), 1, "{}", lost.log());
    let kept = &lost.unsent()[0];
    assert_eq!(fs::read(kept.join("files/dir/file")).unwrap(), b"lost");
    assert_eq!(fs::read(kept.join("files/dir/new")).unwrap(), b"lost too");
    // From then on it is as if nothing had been.
    assert_eq!(program.does("os.pwrite(file, b'more', 0)"), "4");
    lost.sync();
    assert_eq!(fs::read(here.join("dir/file")).unwrap(), b"more");
}

#[test]
fn who_waits_for_durability_when_something_is_lost_is_told_whatever_it_asked_of() {
    let (net, _farm, mounts) = network(2, "2", "commit=3600");
    let (here, lost) = (&mounts[0], &mounts[1]);
    run(sh("mkdir dir; echo sent >dir/file; echo sent >dir/other").current_dir(lost.path()));
    lost.sync();
    let mut programs: Vec<Program> = (0..3).map(|_| Program::start()).collect();
    // The kernel lets one fsync of an inode through at a time: of those two the second comes when the first one has been told.
    for (program, at) in programs.iter_mut().zip(["dir/other", "dir", "dir"]) {
        let opens = format!("globals().update(at=os.open({:?}, 0))", lost.join(at));
        assert_eq!(program.does(&opens), "None");
    }
    fs::write(lost.join("dir/file"), b"lost").unwrap();
    let before = sessions_replaced(lost);
    net.cut(1);
    fs::write(here.join("dir/file"), b"mine").unwrap();
    std::thread::scope(|scope| {
        let syncs: Vec<_> =
            programs.iter_mut().map(|program| scope.spawn(|| program.does("os.fsync(at)"))).collect();
        std::thread::sleep(Duration::from_millis(500));
        net.join(1);
        for sync in syncs {
            assert_eq!(sync.join().unwrap(), "Input/output error");
        }
    });
    goes_on(lost, before);
    for program in &mut programs {
        assert_eq!(program.does("os.fsync(at)"), "None");
    }
    assert_eq!(fs::read(lost.join("dir/file")).unwrap(), b"mine");
}

#[test]
fn a_loss_is_told_to_who_asks_next_when_the_first_one_has_given_up() {
    let (net, farm, mounts) = network(2, "2", "commit=3600");
    let (here, lost) = (&mounts[0], &mounts[1]);
    fs::create_dir(lost.join("dir")).unwrap();
    fs::write(lost.join("dir/file"), b"sent").unwrap();
    lost.sync();
    let (mut program, mut gives_up) = (Program::start(), Program::start());
    for program in [&mut program, &mut gives_up] {
        program.opens("file", &lost.join("dir/file"));
    }
    assert_eq!(program.does("os.pwrite(file, b'lost', 0)"), "4");
    cut_off(&net, 1, lost, || fs::write(here.join("dir/file"), b"mine").unwrap());
    wait_until("what is lost is kept", PATIENCE, || lost.log().contains("are kept in"));
    // It waits for this.
    assert_eq!(gives_up.does("os.pwrite(file, b'more', 0)"), "4");
    farm.signal_server(libc::SIGSTOP);
    writeln!(gives_up.input, "os.fsync(file)").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    drop(gives_up);
    farm.signal_server(libc::SIGCONT);
    assert_eq!(program.does("os.fsync(file)"), "Input/output error");
    assert_eq!(program.does("os.fsync(file)"), "None");
}

#[test]
fn a_loss_is_told_to_each_program_that_has_written_by_a_descriptor_of_its_own() {
    let (net, _farm, mounts) = network(2, "2", "commit=3600");
    let (here, lost) = (&mounts[0], &mounts[1]);
    fs::create_dir(lost.join("dir")).unwrap();
    fs::write(lost.join("dir/file"), b"sent").unwrap();
    lost.sync();
    let mut programs = [(); 3].map(|()| Program::start());
    for (program, text) in programs.iter_mut().zip(["'lost'", "'gone'", "''"]) {
        program.opens("file", &lost.join("dir/file"));
        program.does(&format!("os.write(file, {text}.encode())"));
    }
    cut_off(&net, 1, lost, || fs::write(here.join("dir/file"), b"mine").unwrap());
    wait_until("what is lost is kept", PATIENCE, || lost.log().contains("are kept in"));
    for program in &mut programs {
        assert_eq!(program.does("os.fsync(file)"), "Input/output error");
        // Those that have waited beside it are told for a moment in any case.
        std::thread::sleep(Duration::from_millis(300));
    }
    for program in &mut programs {
        assert_eq!(program.does("os.fsync(file)"), "None", "each is told once");
    }
    // Who comes later has lost nothing.
    let mut program = Program::start();
    program.opens("file", &lost.join("dir/file"));
    assert_eq!(program.does("os.fsync(file)"), "None");
}

/// What a farm relies on that runs the task of a host that stands still elsewhere.
#[test]
fn what_a_killed_program_had_asked_for_is_not_done_when_its_host_goes_on() {
    const WRITES: &str = "import os, sys
while True:
    with open('out', 'w') as out: out.write('old')
    os.rename('out', sys.argv[1])
    os.rename(sys.argv[1], 'out')";
    let mut shared = None;
    for round in 0..rounds(3, 40) {
        let mounts = Farm::for_round(&mut shared, round, "");
        let (here, there) = (mounts[0].join(&format!("{round}")), mounts[1].join(&format!("{round}")));
        fs::create_dir(&here).unwrap();
        let start = |at: i32| {
            let mut writes = python(WRITES);
            writes.arg(format!("other-{at}")).current_dir(&there).stderr(Stdio::null());
            writes.spawn().unwrap()
        };
        let mut programs: Vec<Child> = (0..6).map(start).collect();
        wait_until("they write", PATIENCE, || here.join("out").exists());
        let stands_still = Stopped::tree(mounts[1].pid());
        programs.iter_mut().for_each(|program| program.kill().unwrap());
        // When the lease is over. What was opened may have another name by then: the server had heard of a last rename before.
        wait_until("it has that name", PATIENCE, || {
            fs::write(here.join("out"), "new").unwrap();
            fs::read_to_string(here.join("out")).is_ok_and(|text| text == "new")
        });
        let names = || run(sh("ls").current_dir(&here));
        let before = names();
        drop(stands_still);
        for program in &mut programs {
            program.wait().unwrap();
        }
        wait_until("it has gone on", PATIENCE, || fs::read_dir(&there).is_ok());
        assert_eq!((fs::read_to_string(here.join("out")).unwrap().as_str(), names()), ("new", before));
    }
}

#[test]
fn what_an_ended_session_has_not_sent_is_applied_if_others_have_only_looked() {
    let (net, farm, mounts) = network(2, "2", "commit=3600");
    let (here, lost) = (&mounts[0], &mounts[1]);
    run(sh("mkdir dir gone other mine; echo sent >dir/file; echo old >gone/name; echo twice >dir/a; ln dir/a other/a; \
            seq 200000 >dir/large; mkdir -p deep/er; echo moved >deep/er/file")
    .current_dir(lost.path()));
    lost.sync();
    let mut program = Program::start();
    program.opens("file", &lost.join("dir/file"));
    for round in 0..3 {
        // A directory that gets another parent is moved by the server, with everything before that.
        run(sh("mkdir -p new; mv deep/er new/er").current_dir(lost.path()));
        assert_eq!(program.does(&format!("os.pwrite(file, b'new{round}', 0)")), "4");
        run(sh("echo made >dir/made; chmod 600 dir/file; rm -rf gone; mkdir -p new/below; seq 30000 >new/below/large;
                ln -f new/below/large new/hard; echo more >>dir/large; echo thrice >>dir/a; ln -sf x new/l")
        .current_dir(lost.path()));
        cut_off(&net, 1, lost, || {
            // It has what was sent, in the caches of its kernel too, and changes something else.
            run(sh("find . >/dev/null; cat dir/file dir/large other/a >/dev/null; echo x >>mine/more; mkdir -p mine/new")
                .current_dir(here.path()));
        });
        let look = "cat dir/file dir/made dir/a other/a new/er/file; stat -c %a dir/file; cksum <new/below/large; tail -n1 dir/large; \
                    stat -c %h new/hard; readlink new/l; ls; cksum <new/hard";
        let seen_there = run(sh(look).current_dir(lost.path()));
        assert_eq!(program.does("os.fsync(file)"), "None");
        let seen = run(sh(look).current_dir(here.path()));
        assert_eq!(seen, seen_there);
        assert!(seen.starts_with(&format!("new{round}\nmade\n")), "{seen}");
        assert!(!seen.contains("gone"), "{seen}");
        run(sh("mkdir gone; mkdir -p deep; mv new/er deep/er; rm -r new").current_dir(here.path()));
    }
    assert!(lost.unsent().is_empty(), "{}", lost.log());
    run(hayloft(["sync"]).arg(lost.path()));
    drop(program);
    mounts.into_iter().for_each(Mount::unmount);
    let said = run(&mut farm.volume(["check", "v", "--content"]));
    assert!(said.contains("is sound"), "{said}");
}

#[test]
fn who_comes_back_after_a_restart_of_the_server_has_what_was_not_sent_kept() {
    let (net, mut farm, mounts) = network(2, "2", "commit=3600");
    let (here, lost) = (&mounts[0], &mounts[1]);
    fs::create_dir(lost.join("dir")).unwrap();
    lost.sync();
    fs::write(lost.join("dir/new"), b"not sent").unwrap();
    cut_off(&net, 1, lost, || {
        assert_eq!(fs::read_dir(here.join("dir")).unwrap().count(), 0);
        farm.kill_server();
        farm.start_server();
    });
    wait_until("a report", PATIENCE, || lost.unsent().iter().any(|kept| kept.join("REPORT").exists()));
    assert_eq!(fs::read(lost.unsent()[0].join("files/dir/new")).unwrap(), b"not sent");
    assert_eq!(fs::read_dir(lost.join("dir")).unwrap().count(), 0);
}

#[test]
fn what_a_server_has_lost_is_told_by_name_to_who_could_not_bring_it_back() {
    let (disk, net) = (SmallDisk::new(200), Net::new(2));
    // What is answered need not be durable for a minute.
    let server_args = ["--lease", "2", "--window", "60000"];
    let store = disk.path().join("store");
    let mut farm = Farm::at(Some(&net.server()), &format!("{SERVER}:7440"), Some(&store), &server_args);
    farm.create("v");
    let mounts = [0, 1].map(|at| farm.mount_as("v", &format!("mnt-{at}"), "commit=0.1", Some(&net.host(at))));
    let (here, lost) = (&mounts[0], &mounts[1]);
    fs::create_dir(lost.join("own")).unwrap();
    lost.sync();
    disk.freeze();
    let commits = || number(&lost.stats(), "log.commits");
    let before = commits();
    let mut file = File::create(lost.join("own/answered")).unwrap();
    file.write_all(b"answered").unwrap();
    wait_until("it is answered", PATIENCE, || {
        commits() > before && number(&lost.stats(), "log.dirty_rows") == 0
    });
    // Nobody else has heard of it.
    cut_off(&net, 1, lost, || {
        farm.signal_server(libc::SIGKILL);
        disk.thaw();
        farm.kill_server();
        farm.start_server();
        assert_eq!(fs::read_dir(here.join("own")).unwrap().count(), 0);
    });
    wait_until("it is told", PATIENCE, || lost.log().contains("(names: answered)"));
    let error = file.sync_all().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
    let (_, said) = run_failing(hayloft(["sync"]).arg(lost.path()));
    assert!(said.contains("answered"), "{said}");
    run(hayloft(["sync"]).arg(lost.path()));
    assert_eq!(fs::read_dir(lost.join("own")).unwrap().count(), 0);
}

#[test]
fn a_lost_lock_is_told_to_who_relies_on_it() {
    let (net, _farm, mounts) = network(2, "2", "commit=0.2");
    let (here, lost) = (&mounts[0], &mounts[1]);
    fs::write(lost.join("file"), b"data").unwrap();
    lost.sync();
    let mut program = Program::start();
    program.opens("file", &lost.join("file"));
    assert_eq!(program.does("fcntl.flock(file, fcntl.LOCK_EX)"), "None");
    let mut other = Program::start();
    other.opens("file", &here.join("file"));
    cut_off(&net, 1, lost, || {
        assert_eq!(other.does("fcntl.flock(file, fcntl.LOCK_EX)"), "None");
        assert_eq!(other.does("fcntl.flock(file, fcntl.LOCK_UN)"), "None");
    });
    assert_eq!(program.does("os.pread(file, 9, 0)"), "Input/output error");
    assert_eq!(program.does("os.pwrite(file, b'x', 0)"), "Input/output error");
    assert_eq!(program.does("fcntl.flock(file, fcntl.LOCK_UN)"), "None");
    assert_eq!(program.does("os.pread(file, 9, 0)"), "b'data'");
    assert_eq!(program.does("fcntl.flock(file, fcntl.LOCK_EX)"), "None");
    assert_eq!(
        other.does("fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)"),
        "Resource temporarily unavailable"
    );
}

#[test]
fn a_change_that_was_asked_for_when_the_session_ended_is_done_once() {
    let (net, _farm, mounts) = network(2, "2", "commit=0.2");
    fs::create_dir(mounts[0].join("dir")).unwrap();
    // Both change one directory all the time, so that it is done by the server.
    let write = "for at in $(seq 400); do mkdir dir/$NAME-$at; echo $at >dir/$NAME.$at; mv dir/$NAME.$at dir/$NAME=$at; done";
    let mut writers: Vec<Child> = (0..2)
        .map(|at| sh(write).env("NAME", at.to_string()).current_dir(mounts[at].path()).spawn().unwrap())
        .collect();
    let before = sessions_replaced(&mounts[1]);
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(500));
        net.cut(1);
        std::thread::sleep(Duration::from_secs(4));
        net.join(1);
        std::thread::sleep(Duration::from_millis(500));
    }
    let done: Vec<bool> = writers.iter_mut().map(|writer| writer.wait().unwrap().success()).collect();
    assert!(sessions_replaced(&mounts[1]) > before, "no session was ended");
    assert!(done[0], "the host that was there all the time");
    // What the other has lost it was told of; nothing was done twice (mkdir would say that it exists).
    assert!(done[1] || !mounts[1].unsent().is_empty(), "{}", mounts[1].log());
    let listings: Vec<String> =
        mounts.iter().map(|mount| run(sh("ls -i dir").current_dir(mount.path()))).collect();
    assert_eq!(listings[0], listings[1]);
}

/// Everything that was in the store at a time.
fn copy(farm: &Farm, to: &str) {
    run(sh("cp -a store $TO").env("TO", to).current_dir(farm.dir()));
}

fn put_back(farm: &Farm, from: &str) {
    run(sh("rm -rf store; cp -a $FROM store").env("FROM", from).current_dir(farm.dir()));
}

#[test]
fn an_older_copy_of_the_store_ends_the_mount_in_words_and_keeps_what_was_not_sent() {
    for begun_before in [true, false] {
        let mut farm = Farm::with(None, &["--lease", "2"]);
        farm.create("v");
        let early = farm.mount_as("v", "early", "commit=3600", None);
        fs::write(early.join("first"), b"first").unwrap();
        early.sync();
        farm.stop_server();
        copy(&farm, "older");
        farm.start_server();
        let late = (!begun_before).then(|| farm.mount_as("v", "late", "commit=3600", None));
        let mount = late.as_ref().unwrap_or(&early);
        for at in 0..3 {
            fs::write(mount.join(&format!("sent-{at}")), b"sent").unwrap();
            mount.sync();
        }
        fs::write(mount.join("unsent"), b"kept").unwrap();
        farm.kill_server();
        put_back(&farm, "older");
        farm.start_server();
        // The copy goes on with others, who are given the same numbers.
        let other = farm.mount_as("v", "other", "commit=0.2", None);
        fs::write(other.join("other"), b"other").unwrap();
        other.sync();
        let (_, said) = run_failing(hayloft(["sync"]).arg(mount.path()));
        assert!(said.contains("history") || said.contains("holds less"), "{said}");
        assert!(said.contains("kept in"), "{said}");
        assert!(fs::read(mount.join("sent-0")).is_err(), "it is not known what this is there");
        assert_eq!(fs::read(mount.unsent()[0].join("files/unsent")).unwrap(), b"kept");
        let path = mount.path().to_owned();
        let _ = hayloft(["umount", "--force"]).arg(&path).output().unwrap();
        wait_until("it is gone", PATIENCE, || {
            !fs::read_to_string("/proc/self/mountinfo").unwrap().contains(path.to_str().unwrap())
        });
    }
}

#[test]
fn a_mount_that_only_reads_notices_an_older_copy_of_the_store() {
    let mut farm = Farm::with(None, &["--lease", "2"]);
    farm.create("v");
    let writer = farm.mount_as("v", "writer", "commit=0.1", None);
    let reader = farm.mount_as("v", "reader", "ro", None);
    fs::write(writer.join("before"), b"before").unwrap();
    writer.sync();
    farm.stop_server();
    copy(&farm, "older");
    farm.start_server();
    fs::write(writer.join("after"), b"after").unwrap();
    writer.sync();
    assert_eq!(fs::read(reader.join("after")).unwrap(), b"after");
    farm.kill_server();
    put_back(&farm, "older");
    farm.start_server();
    wait_until("it is told", PATIENCE, || reader.log().contains("history"));
    assert!(fs::read(reader.join("after")).is_err());
    // A copy that holds all that was seen is as good as the store itself.
    let again = farm.mount_as("v", "again", "ro", None);
    assert_eq!(fs::read(again.join("before")).unwrap(), b"before");
    farm.stop_server();
    copy(&farm, "same");
    put_back(&farm, "same");
    farm.start_server();
    assert_eq!(fs::read(again.join("before")).unwrap(), b"before");
}
