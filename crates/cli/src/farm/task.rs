//! `hayloft task`.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use hayloft_farm::broker::BrokerOptions;
use hayloft_farm::place::Place;
use hayloft_farm::protocol::Spec;
use hayloft_farm::relay::{self, Handed, Key};
use hayloft_farm::small::Environment;
use hayloft_farm::submit::{self, IN_TASK, Outcome, Task};

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::farm::args::{BrokerArgs, TaskArgs};
use crate::farm::here::{self, Child, Ended};
use crate::farm::settings;
use crate::{signals, sys};

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
                    return Err(failure(Exit::Run, submit::farm_failed(&reason)));
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
        let reason = submit::not_on_a_volume(&directory);
        return Ok(if only_there { Outcome::FarmFailed(reason) } else { Outcome::Nowhere(reason) });
    };
    let umask = submit::umask();
    let user = sys::user_and_group();
    let environment = submit::without_job_server(submit::environment());
    let spec = submit::spec(args.command.clone(), environment, &place, umask, user);
    let layers = settings::layers(&args.need, &place)?;
    let spec = Spec { layers, isolated: args.need.isolate, ..spec };
    let null = |_| File::options().read(true).write(true).open("/dev/null");
    let standard = [0, 1, 2].map(|number| sys::standard(number).or_else(null));
    let [input, output, error] = standard;
    let need = settings::need(&args.need, args.slots);
    let task = Task::on(spec, need, [input?, output?, error?], !only_there);
    let key = Key::new(broker, settings::build(&args.need), &settings::host_name());
    let task = Handed::new(task, again(args))?;
    let start = |mut relay: Command| sys::in_own_session(&mut relay).spawn().map(drop);
    relay::run(&key.context("a process that submits")?, &task, start, |stream| signals.pass_to(stream))
        .context("a process that submits")
}

/// Where tasks of the same command line are taken from now on; None when that says another thing in another folder.
fn again(args: &TaskArgs) -> Option<String> {
    let BrokerArgs { broker: _, broker_ca, broker_certificate, broker_key, broker_credentials } =
        &args.broker;
    let files = [broker_ca, broker_certificate, broker_key, broker_credentials];
    let is_anywhere = files.into_iter().flatten().all(|file| file.is_absolute());
    let is_config = |flag: &&OsString| flag.as_encoded_bytes().starts_with(b"--config");
    let arguments: Vec<OsString> = std::env::args_os().collect();
    let (flags, _) = relay::again::split(arguments.get(2..).filter(|_| arguments[1] == "task")?)?;
    let config = std::env::var_os("HAYLOFT_CONFIG").is_none_or(|config| Path::new(&config).is_absolute());
    let may =
        is_anywhere && config && args.need.layers.is_empty() && !flags.iter().any(|flag| is_config(&flag));
    relay::again::name(flags, &Environment::of_process()).ok().filter(|_| may)
}
