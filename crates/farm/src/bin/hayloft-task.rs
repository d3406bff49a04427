//! `hayloft-task -- COMMAND` is `hayloft task -- COMMAND` by a small program: see [`hayloft_farm::small`]. `hayloft make` has make start it for
//! recipes, and an agent has it start tasks.
//!
//! It begins without what the standard library does before `main`: to read all of its mappings, for a guard of the stack that nothing here needs, is
//! a good part of what so small a program costs.
#![no_main]
#![allow(unsafe_code)]

use std::ffi::OsString;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use hayloft_farm::{execution, make::recipe, relay::again, small};

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
        Some(recipe::ARGUMENT) if arguments.len() > 1 => recipe::serve(&arguments[1..]),
        Some(execution::SPAWNER_ARGUMENT) => u8::from(execution::spawner().is_err()),
        _ => again::serve(&arguments).unwrap_or_else(|| by_the_large_one(&arguments)),
    }
}

/// Becomes `hayloft task`: the one beside this program, else the one that is found.
fn by_the_large_one(arguments: &[OsString]) -> u8 {
    let beside = std::env::current_exe().ok().map(|own| own.with_file_name("hayloft"));
    let large = beside.filter(|large| large.exists()).unwrap_or_else(|| PathBuf::from("hayloft"));
    let error = Command::new(&large).arg("task").args(arguments).exec();
    eprintln!("hayloft-task: {}: {error}", large.display());
    125
}
