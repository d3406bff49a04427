//! End-to-end tests: the built binary, real servers, real mounts. They need root.
//!
//! With `HAYLOFT_E2E_PLAIN=DIR` the POSIX tests run in a plain folder there instead of a mount: what they
//! expect must hold on a local file system first.
#![allow(unsafe_code, missing_docs)]

mod agents;
mod caching;
mod calls;
mod clients;
mod clocks;
mod coherence;
mod contention;
mod costs;
mod crash;
mod damage;
mod farm;
mod hosts;
mod keeper;
mod kinds;
mod leaving;
mod lifecycle;
mod listings;
mod locks;
mod memory;
mod model;
mod moves;
mod net;
mod posix_dirs;
mod posix_files;
mod posix_rights;
mod posix_xattr;
mod rejoin;
mod root_box;
mod root_layers;
mod roots;
mod roots_crash;
mod roots_isolation;
mod roots_memory;
mod roots_terminal;
mod roots_user;
mod roots_views;
mod security;
mod server_loss;
mod shared_files;
mod shared_locks;
mod signals;
mod space;
mod split;
mod syncfs;
mod tasks;
mod tasks_faults;
mod trial;
mod unsent;
mod users;
mod views;
mod watchdog;
mod words;
