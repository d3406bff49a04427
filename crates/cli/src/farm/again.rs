//! `hayloft task` for a command line that was seen before, served before `main`: without what the standard library sets up for a program that
//! goes on, which costs as much as all that is done here.
#![allow(unsafe_code)]

use std::ffi::OsString;

use hayloft_farm::relay::again;
use hayloft_farm::small::Environment;

use crate::mounts::helper;

/// What is in this section the C library runs before `main`.
// SAFETY: what it runs does what such functions may; arguments that it gives are not looked at.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static BEGIN: extern "C" fn() = begin;

/// Does not return when a task was served. With a C library that does not give the standard library its arguments by now it does nothing.
#[cfg_attr(test, allow(dead_code))]
extern "C" fn begin() {
    let argv: Vec<OsString> = std::env::args_os().collect();
    if argv.len() > 2
        && argv[1] == "task"
        && helper::role(&argv).is_none()
        && let Some(ending) = again::serve(&argv[2..], Environment::of_process())
    {
        crate::sys::exit_now(ending.leave());
    }
}
