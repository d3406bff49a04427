//! What a command says, on pipes of which the other end may be gone, and into files that may be on a full disk.
//!
//! `println!` and the like of the standard library panic then, in the middle of whatever is done: those of this crate go on. What is lost of a
//! command's result, not its warnings, makes its exit code one of failure, unless nobody reads it any more.

use std::fmt::Arguments;
use std::io::{self, Write};
use std::sync::Mutex;

use crate::exit::{Exit, failure};

/// Why something of the result is lost.
static LOST: Mutex<Option<io::Error>> = Mutex::new(None);

/// Writes a part of the result.
pub(crate) fn out(said: Arguments<'_>) {
    if let Err(error) = io::stdout().write_fmt(said)
        && error.kind() != io::ErrorKind::BrokenPipe
        && let Ok(mut lost) = LOST.lock()
    {
        lost.get_or_insert(error);
    }
}

/// Writes something for people.
pub(crate) fn err(said: Arguments<'_>) {
    let _ = io::stderr().write_fmt(said);
}

/// What a command ends with when it has ended so: the result has to be written.
pub(crate) fn whole(outcome: anyhow::Result<u8>) -> anyhow::Result<u8> {
    let flushed = io::stdout().flush();
    let lost = LOST.lock().ok().and_then(|mut lost| lost.take());
    match lost.or(flushed.err().filter(|error| error.kind() != io::ErrorKind::BrokenPipe)) {
        Some(error) if matches!(outcome, Ok(0)) => {
            Err(failure(Exit::Failed, format!("what it has to say cannot be written: {error}")))
        }
        _ => outcome,
    }
}

macro_rules! print {
    ($($said:tt)*) => { $crate::output::out(format_args!($($said)*)) };
}

macro_rules! println {
    () => { $crate::output::out(format_args!("\n")) };
    ($($said:tt)*) => { $crate::output::out(format_args!("{}\n", format_args!($($said)*))) };
}

macro_rules! eprint {
    ($($said:tt)*) => { $crate::output::err(format_args!($($said)*)) };
}

macro_rules! eprintln {
    () => { $crate::output::err(format_args!("\n")) };
    ($($said:tt)*) => { $crate::output::err(format_args!("{}\n", format_args!($($said)*))) };
}
