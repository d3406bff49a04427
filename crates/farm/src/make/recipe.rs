//! The process that make starts for a recipe: this program, or the [small one](crate::small).

use std::ffi::OsString;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use hayloft_process as process;

use super::wire::{self, Answer, Ask, Done, Hand, PASSED};
use super::{direct, record};
use crate::submit;

/// The first argument by which this program becomes a recipe's process.
pub const ARGUMENT: &str = "farm-recipe";
/// Exit code when the recipe was not run.
const NOT_RUN: u8 = 125;
/// Names the session's socket.
pub const SOCKET: &str = "HAYLOFT_FARM_SOCKET";
/// Before the recipe: the argument that follows names the target of its rule, with an `@` before it.
pub const OF_RULE: &str = "--of-rule";
/// The rules whose recipes have started the make that this one is of.
const RULES: &str = "HAYLOFT_FARM_RULES";

/// What is to be done with a recipe.
#[derive(Debug)]
enum Way {
    /// This process becomes it.
    Here,
    /// It has ended on the farm: by a signal if that is not 0, else with this exit code; a message for standard error.
    Ended {
        /// The exit code.
        code: i32,
        /// The signal.
        signal: i32,
        /// The message; empty for none.
        message: String,
    },
}

/// Serves make as the process of a recipe; gives its exit code. Does not return where this process becomes the recipe, or ends by the
/// signal that has ended it.
pub fn serve(command: &[OsString]) -> u8 {
    let (rules, command) = rules(command);
    match run(command, &rules) {
        Ok(Way::Here) => {
            let direct = direct::words(command);
            let command = direct.as_deref().unwrap_or(command);
            let mut here = Command::new(&command[0]);
            if !rules.is_empty() {
                here.env(RULES, OsString::from_vec(rules));
            }
            let error = here.args(&command[1..]).exec();
            eprintln!("hayloft: {}: {error}", command[0].to_string_lossy());
            127
        }
        Ok(Way::Ended { code, signal, message }) => {
            eprint!("{message}");
            if signal == 0 {
                return code as u8;
            }
            submit::end_by(signal);
            128u8.wrapping_add(signal as u8)
        }
        Err(error) => {
            eprintln!("hayloft: the recipe was not run, `hayloft make` is gone: {error}");
            NOT_RUN
        }
    }
}

/// The rules that a recipe belongs to, its own is the last one, and the recipe itself; no rules where these are not asked for.
fn rules(command: &[OsString]) -> (Vec<u8>, &[OsString]) {
    let [flag, target, recipe @ ..] = command else { return (Vec::new(), command) };
    if flag != OF_RULE || recipe.is_empty() {
        return (Vec::new(), command);
    }
    let mut rules = std::env::var_os(RULES).unwrap_or_default().into_vec();
    let directory = std::env::current_dir().unwrap_or_default();
    record::rules::link(&mut rules, &directory, &unquoted(&target.as_bytes()[1..]));
    (rules, recipe)
}

/// A target as it was before the hook has put it into quotes.
fn unquoted(target: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(target.len());
    let mut rest = target;
    while let Some((first, after)) = rest.split_first() {
        let (byte, length) = match rest {
            [b'%', b'2', b'7', ..] => (b'\'', 3),
            [b'%', b'2', b'5', ..] => (b'%', 3),
            _ => (*first, 1),
        };
        plain.push(byte);
        rest = if length == 3 { &rest[3..] } else { after };
    }
    plain
}

/// Has a recipe run where the session says.
///
/// # Errors
/// When the session is gone: the recipe has not run, or not to its end.
fn run(command: &[OsString], rules: &[u8]) -> io::Result<Way> {
    let Some(socket) = std::env::var_os(SOCKET) else { return Ok(Way::Here) };
    if std::env::var_os(submit::IN_TASK).is_some() || !is_plain_recipe() {
        return Ok(Way::Here);
    }
    let mut stream = UnixStream::connect(Path::new(&socket))?;
    let directory = std::env::current_dir()?;
    let text = command.last().map(|text| text.as_bytes().to_vec()).unwrap_or_default();
    let directory = directory.into_os_string().into_vec();
    wire::send(&mut stream, &Ask { text, directory, pid: std::process::id() as i32, rules: rules.to_vec() })?;
    let answer: Answer = wire::receive(&mut stream)?;
    if answer.here {
        return Ok(Way::Here);
    }
    let (signals, before) = process::signals_by_descriptor(&PASSED)?;
    let direct = direct::words(command);
    let command = direct.as_deref().unwrap_or(command);
    let hand = Hand {
        command: command.iter().map(|argument| argument.as_bytes().to_vec()).collect(),
        environment: submit::environment(),
        umask: submit::umask(),
    };
    wire::send(&mut stream, &hand)?;
    let (output, error) = (io::stdout(), io::stderr());
    wire::send_descriptors(&stream, &[output.as_fd(), error.as_fd()])?;
    let done: Done = wire::receive_and_pass(&mut stream, signals.as_fd(), false)?;
    if done.here {
        process::restore_signals(&before);
        let _ = io::stderr().write_all(done.message.as_bytes());
        return Ok(Way::Here);
    }
    // make says the same of a program that is not there and of one that cannot be run.
    let is_not_run = direct.is_some() && !done.message.is_empty() && done.code == 126;
    let code = if is_not_run { 127 } else { done.code };
    Ok(Way::Ended { code, signal: done.signal, message: done.message })
}

/// Whether this is a recipe that make shares no job server with, and no `$(shell)`. Without a job server nothing runs beside it: nothing is
/// won elsewhere, and a sub-make looks like any other recipe.
fn is_plain_recipe() -> bool {
    let flags = std::env::var_os("MAKEFLAGS").unwrap_or_default();
    let Some(server) = job_server(flags.as_bytes()) else { return false };
    // Such a recipe may not have them: make has closed them, or names none.
    let has_server = server.iter().all(|fd| Path::new(&format!("/proc/self/fd/{fd}")).exists());
    !has_server && !has_level_of_its_make()
}

/// The descriptors of the job server; none where there is no server. Numbers below 0 say that this recipe has none of them.
fn job_server(flags: &[u8]) -> Option<[i32; 2]> {
    let flags = String::from_utf8_lossy(flags);
    let words = flags.split_ascii_whitespace();
    let mut auth = words.filter_map(|word| {
        word.strip_prefix("--jobserver-auth=").or_else(|| word.strip_prefix("--jobserver-fds="))
    });
    let (read, write) = auth.next_back()?.split_once(',')?;
    Some([read.parse().ok()?, write.parse().ok()?])
}

/// What make runs for `$(shell)` has the environment that make itself has; a recipe's level is one higher.
fn has_level_of_its_make() -> bool {
    let own = std::env::var_os("MAKELEVEL").unwrap_or_default();
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    let environment = std::fs::read(format!("/proc/{parent}/environ")).unwrap_or_default();
    let level =
        environment.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(b"MAKELEVEL="));
    level.unwrap_or_default() == own.as_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_as_they_were() {
        assert_eq!(unquoted(b"quo%27ted%2527%25"), b"quo'ted%27%");
        assert_eq!(unquoted(b"%2"), b"%2");
    }

    #[test]
    fn the_job_server_is_found_in_the_flags() {
        assert_eq!(job_server(b"k -j4 --jobserver-auth=3,4 -- X=1"), Some([3, 4]));
        assert_eq!(job_server(b" -j --jobserver-fds=5,6"), Some([5, 6]));
        assert_eq!(job_server(b" -j4 --jobserver-auth=-2,-2"), Some([-2, -2]));
        assert_eq!(job_server(b"k"), None);
    }
}
