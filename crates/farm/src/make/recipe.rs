//! The process that make starts for a recipe: this program, or the [small one](crate::small). It makes system calls only, as said there.

use std::ffi::OsString;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;

use hayloft_process::{self as process, Program};

use super::wire::{self, Answer, Ask, Done, Hand, PASSED};
use super::{direct, record};
use crate::small::{self, Ending, Environment};
use crate::submit;

/// The first argument by which this program becomes a recipe's process.
pub const ARGUMENT: &str = "farm-recipe";
/// Exit code when the recipe was not run.
const NOT_RUN: i32 = 125;
/// Names the session's socket.
pub const SOCKET: &str = "HAYLOFT_FARM_SOCKET";
/// Before the recipe: the argument that follows names the target of its rule, with an `@` before it.
pub const OF_RULE: &str = "--of-rule";
/// The rules whose recipes have started the make that this one is of.
const RULES: &str = "HAYLOFT_FARM_RULES";

/// What is to be done with a recipe.
#[derive(Debug)]
enum Way {
    /// This process becomes it, after a message on standard error.
    Here(String),
    /// It has ended on the farm.
    Ended(Ending),
}

/// Serves make as the process of a recipe: how that ends. Does not return where this process becomes the recipe.
pub fn serve(command: &[OsString], mut environment: Environment) -> Ending {
    let (rules, command) = rules(command, &environment);
    let direct = direct::words(command, environment.get("IFS"));
    match run(command, direct.as_deref(), &rules, &environment) {
        Ok(Way::Here(message)) => {
            if !message.is_empty() {
                Ending { code: 0, signal: 0, message }.leave();
            }
            if !rules.is_empty() {
                environment.set(RULES, &rules);
            }
            let command = direct.as_deref().unwrap_or(command);
            // This program, and what it has said, may have been without that signal.
            process::take_broken_pipes();
            let error = match Program::new(&small::bytes(command), &environment.0) {
                Ok(program) => program.exec(),
                Err(error) => error,
            };
            let message = format!("hayloft: {}: {error}\n", command[0].to_string_lossy());
            Ending { code: 127, signal: 0, message }
        }
        Ok(Way::Ended(ending)) => ending,
        Err(error) => {
            let message = format!("hayloft: the recipe was not run, `hayloft make` is gone: {error}\n");
            Ending { code: NOT_RUN, signal: 0, message }
        }
    }
}

/// The rules that a recipe belongs to, its own is the last one, and the recipe itself; no rules where these are not asked for.
fn rules<'a>(command: &'a [OsString], environment: &Environment) -> (Vec<u8>, &'a [OsString]) {
    let [flag, target, recipe @ ..] = command else { return (Vec::new(), command) };
    if flag != OF_RULE || recipe.is_empty() {
        return (Vec::new(), command);
    }
    let mut rules = environment.get(RULES).unwrap_or_default().as_bytes().to_vec();
    let directory = OsString::from_vec(small::current_folder().unwrap_or_default());
    record::rules::link(&mut rules, Path::new(&directory), &unquoted(&target.as_bytes()[1..]));
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

/// Has a recipe run where the session says; `direct` is what it is without a shell.
///
/// # Errors
/// When the session is gone: the recipe has not run, or not to its end.
fn run(
    command: &[OsString],
    direct: Option<&[OsString]>,
    rules: &[u8],
    environment: &Environment,
) -> io::Result<Way> {
    let here = || Ok(Way::Here(String::new()));
    let Some(socket) = environment.get(SOCKET) else { return here() };
    if environment.get(submit::IN_TASK).is_some() || !is_plain_recipe(environment) {
        return here();
    }
    small::hold_standard_descriptors();
    let mut stream = wire::connect(Path::new(socket))?;
    let directory = small::current_folder()?;
    let text = command.last().map(|text| text.as_bytes().to_vec()).unwrap_or_default();
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    wire::send(&mut stream, &Ask { text, directory, pid, rules: rules.to_vec() })?;
    let answer: Answer = wire::receive(&mut stream)?;
    if answer.here {
        return here();
    }
    let (signals, before) = process::signals_by_descriptor(&PASSED)?;
    let hand = Hand {
        command: small::bytes(direct.unwrap_or(command)),
        environment: environment.0.clone(),
        umask: submit::umask(),
    };
    wire::send(&mut stream, &hand)?;
    wire::send_descriptors(&stream, &[rustix::stdio::stdout(), rustix::stdio::stderr()])?;
    let (done, _): (io::Result<Done>, _) = wire::receive_and_pass(&mut stream, signals.as_fd(), false);
    let Done { code, signal, message, here } = done?;
    if here {
        process::restore_signals(&before);
        return Ok(Way::Here(message));
    }
    // make says the same of a program that is not there and of one that cannot be run.
    let is_not_run = direct.is_some() && !message.is_empty() && code == 126;
    Ok(Way::Ended(Ending { code: if is_not_run { 127 } else { code }, signal, message }))
}

/// Whether this is a recipe that make shares no job server with, and no `$(shell)`. Without a job server nothing runs beside it: nothing is
/// won elsewhere, and a sub-make looks like any other recipe.
fn is_plain_recipe(environment: &Environment) -> bool {
    let flags = environment.get("MAKEFLAGS").unwrap_or_default();
    let Some(server) = job_server(flags.as_bytes()) else { return false };
    // Such a recipe may not have them: make has closed them, or names none.
    let has_server = server.iter().all(|fd| rustix::fs::stat(format!("/proc/self/fd/{fd}")).is_ok());
    !has_server && !has_level_of_its_make(environment)
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
fn has_level_of_its_make(environment: &Environment) -> bool {
    let own = environment.get("MAKELEVEL").unwrap_or_default();
    let parent = rustix::process::getppid().map_or(0, |pid| pid.as_raw_nonzero().get());
    let theirs = small::content(&format!("/proc/{parent}/environ"));
    let level = theirs.split(|byte| *byte == 0).find_map(|variable| variable.strip_prefix(b"MAKELEVEL="));
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
