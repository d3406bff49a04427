//! `hayloft make`: GNU make, its recipes on the farm.

use std::ffi::OsString;
use std::io::IsTerminal;
use std::os::unix::net::UnixListener;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Context;
use hayloft_farm::dispatch::Status;
use hayloft_farm::make::record::Graph;
use hayloft_farm::make::{Hook, How, InRoot, Session, arguments, recipe};
use hayloft_farm::place::Place;
use hayloft_farm::protocol::STATUS;
use hayloft_farm::submit::Submitter;
use prost::Message;

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::farm::args::MakeArgs;
use crate::farm::here::{Child, Ended};
use crate::farm::task::PASSED;
use crate::farm::{progress, recorded, settings};
use crate::{signals, sys};

/// Runs make; gives its exit code.
///
/// # Errors
/// When make could not be run: with [`Exit::Run`].
pub(crate) fn run(args: &MakeArgs, config: &Config) -> anyhow::Result<u8> {
    crate::server::serve::init_log("error");
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let directory = std::env::current_dir().context("the current folder")?;
    let place = Place::of(&directory).ok().flatten();
    let slots = settings::slots(config);
    let mut jobs = slots;
    let records = args.record || args.record_to.is_some();
    let only_there = records || !args.need.layers.is_empty();
    if only_there {
        settings::broker_needed(&args.broker, config)?;
    }
    let root = match &place {
        Some(place) => InRoot { layers: settings::layers(&args.need, place)?, isolated: args.need.isolate },
        None if only_there => {
            return Err(failure(Exit::Run, format!("{} is not on a mounted volume", directory.display())));
        }
        None => InRoot::default(),
    };
    let farm = match settings::broker(&args.broker, config)? {
        None => None,
        Some(_) if place.is_none() => {
            eprintln!("hayloft: runs here: {} is not on a mounted volume", directory.display());
            None
        }
        Some(broker) => {
            let connect = async {
                let host = settings::host_name();
                let submitter =
                    Submitter::connect(&broker, settings::build(&args.need), &host, only_there).await?;
                let bytes = submitter.broker().ask(STATUS).await;
                let json = bytes.and_then(|bytes| String::decode(bytes).ok()).unwrap_or_default();
                let status: Status = serde_json::from_str(&json).unwrap_or_default();
                anyhow::Ok((submitter, status.hosts.iter().map(|host| host.slots).sum::<u32>()))
            };
            match runtime.block_on(connect) {
                Ok((submitter, there)) => {
                    jobs += there;
                    Some(submitter)
                }
                Err(error) => {
                    eprintln!("hayloft: runs here: {error:#}");
                    None
                }
            }
        }
    };
    let hook = Hook::make(&std::env::current_exe().context("this program's own path")?, !only_there, records)
        .context("files for make in /tmp")?;
    let need = settings::need(&args.need, 1);
    let user = sys::user_and_group();
    let how = How { root, records };
    let session = Session::new(&directory, slots, farm.clone(), runtime.handle().clone(), need, user, how);
    let session = Arc::new(session);
    let socket = UnixListener::bind(hook.socket()).and_then(|socket| session.serve(socket));
    socket.context("a socket in /tmp")?;
    let mut make = Command::new("make");
    if version()?.is_some_and(|version| version >= (4, 4)) {
        // Of the other kind nobody sees whether a recipe was given it.
        make.arg("--jobserver-style=pipe");
    }
    make.args(arguments::with_jobs(&args.arguments, jobs as usize));
    let mut makefiles = OsString::from(hook.makefile());
    if let Some(others) = std::env::var_os("MAKEFILES") {
        makefiles.push(" ");
        makefiles.push(others);
    }
    make.env("MAKEFILES", makefiles).env(recipe::SOCKET, hook.socket());
    let child = Arc::new(Child::default());
    let passes = Arc::clone(&child);
    signals::on(&PASSED, move |signal| {
        let _ = passes.signal(signal);
    })
    .context("cannot catch signals")?;
    if std::io::stderr().is_terminal() && farm.is_some() {
        progress::show(&session, farm.clone(), runtime.handle().clone());
    }
    // Before the build: what compilers write of what they have read is not said by rules until the next one.
    let graph = if records { recorded::graph(&args.arguments) } else { Graph::default() };
    let start = Instant::now();
    let ended = child.run(&mut make).map_err(|error| failure(Exit::Run, format!("make: {error}")))?;
    if let Some(submitter) = &farm {
        runtime.block_on(submitter.leave());
    }
    session.finish();
    if args.summary {
        let count = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        let (there, here) = (count(&session.tally.there), count(&session.tally.here));
        let seconds = start.elapsed().as_secs_f64();
        eprintln!("hayloft make: {there} recipes on the farm, {here} here, in {seconds:.1} s");
    }
    if args.explain {
        eprint!("{}", progress::explained(&session.tally.slowest()));
    }
    if let Some(place) = place.filter(|_| records) {
        let report = session.report(&graph, &place.mount.point);
        eprint!("{}", recorded::text(&report, &directory));
        if let Some(file) = &args.record_to {
            recorded::write(&report, file)?;
        }
    }
    runtime.shutdown_background();
    drop(hook);
    Ok(match ended {
        Ended::Code(code) => code,
        Ended::Signal(signal) => {
            sys::end_by(signal);
            128u8.wrapping_add(signal as u8)
        }
    })
}

/// GNU make's version; None if it says none.
fn version() -> anyhow::Result<Option<(u32, u32)>> {
    let output = Command::new("make").arg("--version").output();
    let output = output.map_err(|error| failure(Exit::Run, format!("make: {error} (install GNU make)")))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let version = text.strip_prefix("GNU Make ").and_then(|rest| rest.split_whitespace().next());
    let Some(version) = version else {
        return Err(failure(Exit::Run, "make is not GNU make, whose recipes this runs"));
    };
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    Ok(parts.next().map(|major| (major, parts.next().unwrap_or(0))))
}
