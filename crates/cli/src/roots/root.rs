//! `hayloft root`.

use std::path::Path;
use std::time::{Duration, SystemTime};

use hayloft_root::{Error, RootInfo, RootState, Roots, Task};
use serde_json::{Value, json};

use crate::config::{Config, RunConfig};
use crate::exit::{Exit, failure};
use crate::roots::generations;
use crate::roots::layers;
use crate::roots::modules::{self, Setting};
use crate::roots::publish;
use crate::roots::root_args::{EnterArgs, RootArgs, RootVerb};
use crate::roots::run::exit_code_of;
use crate::roots::spec::{UMASK, environment};
use crate::server::serve;
use crate::sys;
use crate::units::{show_duration, show_size, show_utc};

/// Runs the command.
///
/// # Errors
/// When there is no such root, or something in the way.
pub(crate) fn run(args: RootArgs, config: &Config, config_file: Option<&Path>) -> anyhow::Result<u8> {
    serve::init_log("warn");
    let roots = roots(args.state_dir.as_deref(), &config.run)?;
    let setting = Setting { config, config_file, state_dir: args.state_dir.as_deref() };
    match args.verb {
        RootVerb::List(list_args) => {
            sys::default_sigpipe();
            let layers_dir = || layers::layers_dir(&list_args.layers_dir, config);
            match (list_args.layers, &list_args.modules) {
                (true, _) => layers::list(&layers_dir(), list_args.json),
                (_, Some(named)) => modules::list(named, &layers_dir(), setting, list_args.json),
                _ => list(&roots, list_args.json),
            }
        }
        RootVerb::Show(show_args) => {
            sys::default_sigpipe();
            let info = roots.load(&show_args.name).map_err(root_failure)?;
            show(&info, show_args.json)
        }
        RootVerb::Enter(enter_args) => enter(&roots, &enter_args),
        RootVerb::Create(create_args) if !create_args.enable.is_empty() || create_args.on.is_some() => {
            modules::create(&create_args, setting)
        }
        RootVerb::Create(create_args) => layers::run_create(&create_args, config),
        RootVerb::Layer(layer_args) => modules::layer(&layer_args, setting),
        RootVerb::Switch(switch_args) => modules::switch(&switch_args, setting),
        RootVerb::History(history_args) => {
            sys::default_sigpipe();
            generations::history(&history_args, setting)
        }
        RootVerb::Rollback(rollback_args) => generations::rollback(&rollback_args, setting),
        RootVerb::Prune(prune_args) => generations::prune(&prune_args, setting),
        RootVerb::Rebuild(rebuild_args) => generations::rebuild(&rebuild_args, setting),
        RootVerb::Diff(diff_args) => {
            sys::default_sigpipe();
            layers::run_diff(&diff_args, &roots)
        }
        RootVerb::Publish(publish_args) => publish::run(&publish_args, &roots, config_file),
        RootVerb::Rm(rm_args) if rm_args.layer => {
            let layers_dir = layers::layers_dir(&rm_args.layers_dir, config);
            layers::with_users(|| remove(&rm_args.names, |name| layers::remove(&layers_dir, name, &roots)))
        }
        RootVerb::Rm(rm_args) => remove(&rm_args.names, |name| {
            hayloft_root::remove(&roots, name, rm_args.force).map_err(root_failure)
        }),
    }
}

/// Removes all that can be removed; the first error is the command's.
fn remove(names: &[String], one: impl Fn(&str) -> anyhow::Result<()>) -> anyhow::Result<u8> {
    let mut failed = None;
    for error in names.iter().filter_map(|name| one(name).err()) {
        match failed {
            None => failed = Some(error),
            Some(_) => eprintln!("hayloft: {error:#}"),
        }
    }
    failed.map_or(Ok(0), Err)
}

/// The roots in the folder that a flag, the configuration or the default says.
///
/// # Errors
/// When nothing says where.
pub(crate) fn roots(flag: Option<&Path>, config: &RunConfig) -> anyhow::Result<Roots> {
    match flag.or(config.state_dir.as_deref()) {
        Some(folder) => Ok(Roots::new(std::path::absolute(folder)?)),
        None => Roots::of_this_user().map_err(root_failure),
    }
}

/// The exit code that belongs to an error, and the error with its cause in one sentence.
pub(crate) fn root_failure(error: Error) -> anyhow::Error {
    let exit = match &error {
        Error::Usage(_) => Exit::Usage,
        Error::NotFound(_) => Exit::NoVolume,
        Error::Busy(_) | Error::Replaced(_) => Exit::Busy,
        Error::Denied(_) => Exit::Denied,
        Error::Missing(_) => Exit::Missing,
        Error::NoRoom(_) => Exit::NoSpace,
        Error::NoCommand(_) | Error::CannotRun(_) | Error::Failed(_) | Error::System { .. } => Exit::Failed,
    };
    failure(exit, format!("{:#}", anyhow::Error::from(error)))
}

fn list(roots: &Roots, as_json: bool) -> anyhow::Result<u8> {
    let all = roots.list().map_err(root_failure)?;
    if as_json {
        let all: Vec<Value> = all.iter().map(to_json).collect();
        println!("{}", serde_json::to_string_pretty(&all)?);
        return Ok(0);
    }
    println!("{:24} {:8} {:>10} {:>10} {:>8}  COMMAND", "NAME", "STATE", "AGE", "FILES", "PID");
    for info in &all {
        println!(
            "{:24} {:8} {:>10} {:>10} {:>8}  {}",
            info.name,
            state(info.state),
            show_duration(age(info)),
            files(info).map_or_else(|| "-".to_owned(), show_size),
            info.pid,
            info.command.join(" ")
        );
    }
    Ok(0)
}

fn show(info: &RootInfo, as_json: bool) -> anyhow::Result<u8> {
    if as_json {
        println!("{}", serde_json::to_string_pretty(&to_json(info))?);
        return Ok(0);
    }
    let size = |bytes: Option<u64>| bytes.map_or_else(|| "no bound".to_owned(), show_size);
    println!("name      {}", info.name);
    println!("state     {}", state(info.state));
    println!("made      {}", show_utc(info.created));
    println!("command   {}", info.command.join(" "));
    if let Some(code) = info.exit_code {
        println!("exit code {code}");
    }
    for layer in &info.layers {
        println!("layer     {}", layer.display());
    }
    println!("upper     {}", info.upper.display());
    println!("tree      {}", info.merged.display());
    println!("files     {}", files(info).map_or_else(|| "-".to_owned(), show_size));
    println!("memory    {}", size(info.memory));
    if let Some(processes) = info.processes {
        println!("processes {processes}{}", if info.processes_per_user { " for each user" } else { "" });
    }
    if let Some(spill) = &info.spill {
        println!("spill     {} on {}", show_size(spill.size), spill.device.display());
    }
    println!("pid       {}", info.pid);
    Ok(0)
}

fn state(state: RootState) -> &'static str {
    match state {
        RootState::Running => "running",
        RootState::Kept => "kept",
        RootState::Ended => "ended",
    }
}

fn age(info: &RootInfo) -> Duration {
    let made = SystemTime::UNIX_EPOCH + Duration::from_secs(info.created.max(0) as u64);
    SystemTime::now().duration_since(made).unwrap_or_default()
}

/// Bytes of the files that a root holds in memory or spill.
fn files(info: &RootInfo) -> Option<u64> {
    sys::used_bytes(&info.upper).ok()
}

fn to_json(info: &RootInfo) -> Value {
    let mut value = json!(info);
    value["files_bytes"] = json!(files(info));
    value
}

fn enter(roots: &Roots, args: &EnterArgs) -> anyhow::Result<u8> {
    hayloft_root::program::protect().map_err(root_failure)?;
    let command = match args.command.is_empty() {
        true => vec!["sh".into()],
        false => args.command.clone(),
    };
    let task = Task {
        command,
        user: args.user.clone(),
        folders: vec![args.chdir.clone()],
        env: environment(&args.env, &args.of_farm),
        new_privileges: args.setuid,
        umask: args.of_farm.umask.unwrap_or(UMASK),
        ends_all: args.of_farm.failure_to.is_some(),
    };
    match hayloft_root::enter(roots, &args.name, &task) {
        Ok(end) => {
            args.of_farm.end_as(end.signal.map(i64::from));
            Ok(u8::try_from(end.exit_code).unwrap_or(u8::MAX))
        }
        Err(error @ (Error::NoCommand(_) | Error::CannotRun(_))) => {
            args.of_farm.tell(&error.to_string());
            Ok(exit_code_of(&error))
        }
        Err(error) if args.of_farm.failure_to.is_some() => {
            args.of_farm.tell(&format!("{:#}", root_failure(error)));
            Ok(Exit::Run.code())
        }
        Err(error) => Err(root_failure(error)),
    }
}
