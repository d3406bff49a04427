//! Commands of which nobody reads what they say any more, or whose output has no room.

use std::fs::{self, File};
use std::process::{Command, Stdio};

use crate::setup::farm::{Farm, noise, run};

/// The writing end of a pipe that nobody reads.
fn closed() -> Stdio {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    writer.into()
}

/// How a command ends that can say nothing.
fn ends(command: &mut Command) -> Option<i32> {
    command.stdin(Stdio::null()).stdout(closed()).stderr(closed()).status().unwrap().code()
}

#[test]
fn commands_do_what_they_have_to_also_when_nobody_hears_of_it() {
    let (farm, mount) = Farm::mounted("v");
    fs::write(mount.join("file"), noise(3, 300_000)).unwrap();
    assert_eq!(ends(&mut farm.ask(["snapshot", "create", "v@one"])), Some(0));
    assert_eq!(ends(&mut farm.ask(["snapshot", "create", "v@one"])), Some(9), "it is there");
    assert_eq!(ends(&mut farm.ask(["snapshot", "create", "none@one"])), Some(4));
    let path = |name: &str| farm.dir().join(name).display().to_string();
    let (mirror, cache, into) = (path("mirror"), path("cache"), path("into"));
    assert_eq!(ends(&mut farm.ask(["send", "v@one", "--to", &mirror, "--cache", &cache])), Some(0));
    assert_eq!(ends(&mut farm.ask(["receive", &mirror, "v", "--into", &into, "--cache", &cache])), Some(0));
    assert_eq!(fs::read(farm.dir().join("into/file")).unwrap(), noise(3, 300_000));
    assert_eq!(ends(&mut farm.ask(["fork", "v@one", "w"])), Some(0));
    assert_eq!(ends(&mut farm.ask(["diff", "v@one", "w"])), Some(0));
    assert_eq!(ends(&mut farm.ask(["merge", "w", "--cache", &cache])), Some(0));
    assert_eq!(ends(&mut farm.ask(["verify", "v@one"])), Some(0));
    assert_eq!(ends(&mut farm.volume(["list"])), Some(0));
    assert!(run(&mut farm.volume(["list"])).contains('w'));
}

/// Whoever keeps what a command says has to hear that it is not all there.
#[test]
fn a_result_that_cannot_be_written_is_no_success() {
    let (farm, _mount) = Farm::mounted("v");
    let full = || File::options().write(true).open("/dev/full").unwrap();
    let ended = |command: &mut Command| {
        let ended = command.stdout(full()).output().unwrap();
        (ended.status.code(), String::from_utf8_lossy(&ended.stderr).into_owned())
    };
    for command in [&mut farm.volume(["list", "--json"]), &mut farm.ask(["snapshot", "list", "v", "--json"])]
    {
        let (code, said) = ended(command);
        assert!(code == Some(1) && said.contains("cannot be written"), "{command:?}: {code:?} {said}");
    }
}
