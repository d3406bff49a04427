//! End-to-end tests: the built binary, real servers, real mounts. They need root.
//!
//! With `HAYLOFT_E2E_PLAIN=DIR` the POSIX tests run in a plain folder there instead of a mount: what they
//! expect must hold on a local file system first.
#![allow(unsafe_code, missing_docs)]

mod faults;
mod mounting;
mod posix;
mod roots;
mod security;
mod setup;
mod sharing;
mod tasks;
mod versions;
