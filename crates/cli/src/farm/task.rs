//! `hayloft task`.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use hayloft_farm::broker::BrokerOptions;
use hayloft_farm::place::Place;
use hayloft_farm::protocol::Spec;
use hayloft_farm::relay::{self, Handed, Key};
use hayloft_farm::submit::{self, Outcome, Task};

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::farm::args::TaskArgs;
use crate::farm::here::{self, Child, Ended};
use crate::farm::settings;
use crate::{signals, sys};

/// Set for what runs as a task: what is submitted from within runs there and then, in the slot that the task has.
pub(crate) const IN_TASK: &str = "HAYLOFT_IN_TASK";

/// Signals that are passed on.
pub(crate) const PASSED: [i32; 7] =
    [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGUSR1, libc::SIGUSR2, libc::SIGWINCH];

/// Where signals go.
#[derive(Default)]
struct Signals {
    /// To the task, once it was handed over.
    stream: Mutex<Option<UnixStream>>,
    child: Child,
    /// The task is the farm's.
    is_away: AtomicBool,
    /// The last signal that asks for an end.
    ending: AtomicI32,
}

impl Signals {
    fn pass_on(&self, signal: i32) {
        let is_end = signals::ENDING.contains(&signal) || signal == libc::SIGQUIT;
        if self.is_away.load(Ordering::SeqCst) {
            // Who says it twice means it.
            let before = if is_end { self.ending.swap(signal, Ordering::SeqCst) } else { 0 };
            let stream = self.stream.lock().unwrap_or_else(PoisonError::into_inner);
            match &*stream {
                Some(stream) => {
                    let number = if before != 0 { 0 } else { signal as u8 };
                    let _ = (&mut &*stream).write_all(&[number]);
                }
                None if is_end => sys::end_by(signal),
                None => {}
            }
        } else if !self.child.signal(signal) && is_end {
            // It waits for a slot.
            sys::end_by(signal);
        }
    }

    fn pass_to(&self, stream: UnixStream) {
        *self.stream.lock().unwrap_or_else(PoisonError::into_inner) = Some(stream);
    }
}

/// Runs the command; gives its exit code. Does not return when a signal has ended the command: it ends this process as well.
///
/// # Errors
/// When the farm has failed: with [`Exit::Run`].
pub(crate) fn run(args: &TaskArgs, config: &Config) -> anyhow::Result<u8> {
    crate::server::serve::init_log("error");
    let ended = run_somewhere(args, config)?;
    Ok(match ended {
        Ended::Code(code) => code,
        Ended::Signal(signal) => {
            sys::end_by(signal);
            128u8.wrapping_add(signal as u8)
        }
    })
}

fn run_somewhere(args: &TaskArgs, config: &Config) -> anyhow::Result<Ended> {
    let broker = if args.here { None } else { settings::broker(&args.broker, config)? };
    let only_there = args.farm || !args.need.layers.is_empty();
    if only_there && broker.is_none() {
        settings::broker_needed(&args.broker, config)?;
    }
    if std::env::var_os(IN_TASK).is_some() {
        let error = sys::exec(&args.command);
        eprintln!("hayloft: {}: {error}", args.command[0].to_string_lossy());
        return Ok(Ended::Code(if error.kind() == std::io::ErrorKind::NotFound { 127 } else { 126 }));
    }
    let signals = Arc::new(Signals::default());
    let passes = Arc::clone(&signals);
    signals::on(&PASSED, move |signal| passes.pass_on(signal)).context("cannot catch signals")?;
    let reason = match broker {
        None => None,
        Some(broker) => {
            signals.is_away.store(true, Ordering::SeqCst);
            let outcome = on_the_farm(args, &broker, &signals);
            signals.is_away.store(false, Ordering::SeqCst);
            match outcome? {
                Outcome::Exited(code) => return Ok(Ended::Code(code as u8)),
                Outcome::Signalled(signal) => return Ok(Ended::Signal(signal)),
                Outcome::NotRun(code, reason) => {
                    eprintln!("hayloft: {reason}");
                    return Ok(Ended::Code(code as u8));
                }
                Outcome::FarmFailed(reason) => {
                    return Err(failure(
                        Exit::Run,
                        format!("the farm has failed, not the command: {reason}"),
                    ));
                }
                Outcome::Nowhere(reason) => Some(reason),
            }
        }
    };
    if let Some(reason) = reason {
        eprintln!("hayloft: runs here: {reason}");
    }
    here::run(&args.command, settings::slots(config), &signals.child)
}

/// Runs it on the farm, if that can be.
fn on_the_farm(args: &TaskArgs, broker: &BrokerOptions, signals: &Signals) -> anyhow::Result<Outcome> {
    let only_there = args.farm || !args.need.layers.is_empty();
    let directory = std::env::current_dir().context("the current folder")?;
    let place = Place::of(&directory).context("the current folder")?;
    let Some(place) = place else {
        let reason = format!("{} is not on a mounted volume", directory.display());
        return Ok(if only_there { Outcome::FarmFailed(reason) } else { Outcome::Nowhere(reason) });
    };
    let umask = submit::umask()?;
    let user = sys::user_and_group();
    let environment = submit::without_job_server(submit::environment());
    let spec = submit::spec(args.command.clone(), environment, &place, umask, user);
    let layers = settings::layers(&args.need, &place)?;
    let spec = Spec { layers, isolated: args.need.isolate, ..spec };
    let (output, error) = (sys::standard(1), sys::standard(2));
    let is_merged = match (&output, &error) {
        (Ok(output), Ok(error)) => {
            submit::is_one_stream(output, error)
                && !output.metadata().is_ok_and(|found| found.file_type().is_socket())
        }
        _ => false,
    };
    let null = || File::options().write(true).open("/dev/null");
    let task = Task {
        spec,
        need: settings::need(&args.need, args.slots),
        input: sys::standard(0).ok().filter(|input| !is_null(input)),
        output: output.or_else(|_| null())?,
        error: if is_merged { None } else { Some(error.or_else(|_| null())?) },
        may_run_here: !only_there,
    };
    let key = Key::new(broker, settings::build(&args.need), &settings::host_name());
    let task = Handed::new(task)?;
    let start = |mut relay: Command| sys::in_own_session(&mut relay).spawn().map(drop);
    relay::run(&key.context("a process that submits")?, &task, start, |stream| signals.pass_to(stream))
        .context("a process that submits")
}

/// Whether nothing can be read from it.
pub(crate) fn is_null(file: &File) -> bool {
    let null = std::fs::metadata("/dev/null").map(|null| null.rdev());
    file.metadata()
        .is_ok_and(|meta| meta.file_type().is_char_device() && null.is_ok_and(|null| null == meta.rdev()))
}
