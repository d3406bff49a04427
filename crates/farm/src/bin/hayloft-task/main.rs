//! `hayloft-task -- COMMAND` is `hayloft task -- COMMAND` by a small program: see [`hayloft_farm::small`]. `hayloft make` has make start it for
//! recipes, and an agent has it start tasks.
//!
//! What a task's process does it does before the C library begins, where it is linked such that this can be: see [`begin`]. Else it begins without
//! what the standard library does before `main`: to read all of its mappings, for a guard of the stack that nothing here needs, is a good part of
//! what so small a program costs.
#![no_main]
#![allow(unsafe_code)]

#[cfg(begins_alone)]
mod begin;
#[cfg(begins_alone)]
mod memory;

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use hayloft_farm::small::{self, Ending, Environment};
use hayloft_farm::{execution, make::recipe, relay::again};

/// What the C library calls.
// SAFETY: no other `main` is linked, and its arguments are not looked at: the standard library has them from the C library as well.
#[unsafe(no_mangle)]
extern "C" fn main(_count: i32, _arguments: *const *const u8) -> i32 {
    hayloft_process::ignore_broken_pipes();
    serve().into()
}

fn serve() -> u8 {
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    match arguments.first().and_then(|first| first.to_str()) {
        Some("--version") => {
            // Whoever runs it looks whether it belongs to him.
            let _ = writeln!(std::io::stdout(), "{}", small::BUILD);
            0
        }
        Some(execution::SPAWNER_ARGUMENT) => u8::from(execution::spawner().is_err()),
        _ if was_tried() => by_the_large_one(&arguments),
        _ => match as_a_task(&arguments, Environment::of_process()) {
            Some(ending) => ending.leave(),
            None => by_the_large_one(&arguments),
        },
    }
}

/// Whether there was more to it than what is done before the C library begins.
fn was_tried() -> bool {
    #[cfg(begins_alone)]
    return memory::was_used();
    #[cfg(not(begins_alone))]
    false
}

/// What the process of a recipe or of a task does; None where there is more to it than is done here.
fn as_a_task(arguments: &[OsString], environment: Environment) -> Option<Ending> {
    match arguments {
        [first, rest @ ..] if first == recipe::ARGUMENT && !rest.is_empty() => {
            Some(recipe::serve(rest, environment))
        }
        _ => again::serve(arguments, environment),
    }
}

/// Becomes `hayloft task`: the one beside this program, else the one that is found.
fn by_the_large_one(arguments: &[OsString]) -> u8 {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name("hayloft"));
    let large = beside.filter(|large| large.exists()).unwrap_or_else(|| PathBuf::from("hayloft"));
    let error = Command::new(&large).arg("task").args(arguments).exec();
    // Whether anybody hears it or not.
    let _ = writeln!(std::io::stderr(), "hayloft-task: {}: {error}", large.display());
    125
}
