//! The root that `hayloft run` is asked for: its layers, what is hidden in it, its bounds, its command.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use hayloft_layer::LayersDir;
use hayloft_root::{Bind, Layer, Network, Roots, Spec, Spill, Task};

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::roots::layers::{Progress, as_failure, layers_dir};
use crate::roots::root_args::{NetworkArg, OfFarmArgs, RunArgs, parse_spill};
use crate::server::signers::Signers;
use crate::sys;
use crate::units::parse_size;

/// Where swap files are made when nothing says otherwise.
const DEFAULT_SPILL_DIR: &str = "/var/lib/hayloft/spill";
/// What of the host's own tree is not shown when that is the layer: other roots' files and the store.
const HOST_MASKED: [&str; 2] = ["/var/lib/hayloft", "/run/hayloft"];
/// The mask of a command in a root.
pub(crate) const UMASK: u32 = 0o022;

/// What `hayloft run` makes of its arguments and the configuration.
pub(super) fn spec(args: &RunArgs, config: &Config, roots: &Roots) -> anyhow::Result<Spec> {
    let layers_dir = layers_dir(&args.layers_dir, config);
    let config = &config.run;
    let usage = |error: String| failure(Exit::Usage, error);
    let setting = |text: &Option<String>| text.as_deref().map(parse_size).transpose().map_err(usage);
    let spill = match (args.spill, &config.spill) {
        (Some(spill), _) => spill,
        (None, Some(text)) => parse_spill(text).map_err(usage)?,
        (None, None) => Spill::None,
    };
    let mut folders = Vec::from_iter(args.chdir.clone());
    let (mut layers, mut in_use) = (Vec::new(), Vec::new());
    for layer in &args.layers {
        for (layer, locks) in resolve(layer, &layers_dir)? {
            layers.push(layer);
            in_use.extend(locks.into_iter().map(Arc::new));
        }
    }
    let spill_dir =
        args.spill_dir.clone().or(config.spill_dir.clone()).unwrap_or_else(|| DEFAULT_SPILL_DIR.into());
    let spill_dir = std::path::absolute(spill_dir)?;
    if layers.is_empty() {
        layers.push(Layer::Folder { path: "/".into(), identity: None });
        if folders.is_empty() {
            folders.extend(std::env::current_dir());
        }
    }
    if let Some(keys) = &config.trusted_keys {
        let signers = Signers::read(keys)?;
        for layer in &layers {
            signers.require_below(layer.path())?;
        }
    }
    let mut binds = args.binds.clone();
    if matches!(args.network, NetworkArg::Host) {
        binds.splice(0..0, name_service(&layers));
    }
    // What is to be covered must be there before. What is wrong with the second is said later.
    roots.create()?;
    if matches!(spill, Spill::File(_)) && sys::is_root() {
        let _ = std::fs::create_dir_all(&spill_dir);
    }
    let mut hidden = Vec::from(HOST_MASKED.map(PathBuf::from));
    hidden.extend([roots.folder().to_owned(), layers_dir.base().to_owned(), spill_dir.clone()]);
    let masked = masked(&layers, &hidden);
    // Without layers of its own it runs where it was called, or not at all.
    if args.chdir.is_none() && !args.layers.is_empty() {
        folders.push("/".into());
    }
    Ok(Spec {
        name: args.name.clone(),
        layers,
        in_use,
        binds,
        scratch: args.scratch.clone(),
        masked,
        memory: args.memory.or(setting(&config.memory)?),
        spill,
        spill_dir,
        tmp: args.tmp,
        require_free: args.require_free.or(setting(&config.require_free)?),
        mode: args.mode,
        keep: args.keep,
        network: match args.network {
            NetworkArg::None => Network::None,
            NetworkArg::Host => Network::Host,
        },
        cpus: args.cpus,
        processes: args.processes.or(config.processes),
        fsync: args.fsync,
        task: Task {
            command: args.command.clone(),
            user: args.user.clone(),
            folders,
            env: environment(&args.env, &args.of_farm),
            new_privileges: args.setuid,
            umask: args.of_farm.umask.unwrap_or(UMASK),
            ends_all: false,
        },
    })
}

/// Where folders of the host that no root is to see are in a root of these layers.
fn masked(layers: &[Layer], hidden: &[PathBuf]) -> Vec<PathBuf> {
    let folders = layers.iter().filter_map(|layer| match layer {
        Layer::Folder { path, .. } => path.canonicalize().ok(),
        Layer::Image(_) => None,
    });
    let hidden: Vec<PathBuf> =
        hidden.iter().filter(|path| path.is_dir()).filter_map(|path| path.canonicalize().ok()).collect();
    let mut masked = Vec::new();
    for folder in folders {
        let inside = hidden.iter().filter_map(|path| path.strip_prefix(&folder).ok());
        // A layer that is one of them was asked for.
        masked.extend(inside.filter(|path| path.file_name().is_some()).map(|path| Path::new("/").join(path)));
    }
    masked.sort();
    masked.dedup();
    masked
}

/// With the host's network its way to resolve names, unless a layer has a link there: that leads to what
/// a service in the root would have to fill.
fn name_service(layers: &[Layer]) -> Option<Bind> {
    let file = Path::new("/etc/resolv.conf");
    let linked = layers.iter().any(|layer| match layer {
        Layer::Folder { path, .. } => path.join("etc/resolv.conf").is_symlink(),
        Layer::Image(_) => true,
    });
    (file.is_file() && !linked).then(|| Bind { source: file.into(), target: file.into(), writable: false })
}

/// The layers that a text names, topmost first: the name of one that may be upon others, or the path of a folder, an archive or an
/// image; each with what is locked as long as it is used.
fn resolve(text: &str, layers: &LayersDir) -> anyhow::Result<Vec<(Layer, Vec<File>)>> {
    let progress = Progress::new();
    let unpacking = |done: u64, all: u64| {
        progress.say(&format!("unpacking {text}: {} %", (done * 100).checked_div(all).unwrap_or(100)));
    };
    let found = hayloft_layer::resolve_all(text, layers, &unpacking);
    progress.end();
    let as_layer = |found: hayloft_layer::Found| {
        let hayloft_layer::Found { path, in_use, identity } = found;
        (if path.is_dir() { Layer::Folder { path, identity } } else { Layer::Image(path) }, in_use)
    };
    Ok(found.map_err(as_failure)?.into_iter().map(as_layer).collect())
}

/// The variables of `--env`, after a few that programs expect.
pub(crate) fn environment(given: &[OsString], of_farm: &OfFarmArgs) -> Vec<(OsString, OsString)> {
    if let Some(prefix) = &of_farm.env_prefix {
        let own = |name: OsString| {
            Some(OsString::from_vec(name.as_bytes().strip_prefix(prefix.as_bytes())?.to_vec()))
        };
        return std::env::vars_os().filter_map(|(name, value)| Some((own(name)?, value))).collect();
    }
    let mut env: Vec<(OsString, OsString)> = vec![("LANG".into(), "C.UTF-8".into())];
    env.extend(std::env::var_os("TERM").map(|term| ("TERM".into(), term)));
    for variable in given {
        match variable.as_bytes().iter().position(|byte| *byte == b'=') {
            Some(at) => {
                let (key, value) = variable.as_bytes().split_at(at);
                env.push((OsString::from_vec(key.to_vec()), OsString::from_vec(value[1..].to_vec())));
            }
            None => env.extend(std::env::var_os(variable).map(|value| (variable.clone(), value))),
        }
    }
    env
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_split_at_the_first_sign() {
        let given = ["A=b=c".into(), "EMPTY=".into(), "HAYLOFT_TEST_NOT_THERE".into()];
        let env = environment(&given, &OfFarmArgs::default());
        assert!(env.contains(&("A".into(), "b=c".into())) && env.contains(&("EMPTY".into(), "".into())));
        assert!(!env.iter().any(|(key, _)| key == "HAYLOFT_TEST_NOT_THERE"));
    }

    #[test]
    fn what_no_root_sees_is_found_in_each_layer() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().canonicalize().unwrap();
        std::fs::create_dir_all(top.join("real/swap")).unwrap();
        std::os::unix::fs::symlink("real", top.join("link")).unwrap();
        let hidden = [top.join("link/swap"), top.join("none")];
        let of = |layers: &[&Path]| {
            let layers: Vec<Layer> = layers
                .iter()
                .map(|path| Layer::Folder { path: path.to_path_buf(), identity: None })
                .collect();
            masked(&layers, &hidden)
        };
        assert_eq!(of(&[Path::new("/")]), [top.join("real/swap")]);
        assert_eq!(of(&[&top, Path::new("/.")]), [Path::new("/real/swap"), &top.join("real/swap")]);
        assert_eq!(of(&[&top.join("link")]), [Path::new("/swap")]);
        assert!(of(&[&top.join("real/swap"), Path::new("/usr")]).is_empty());
    }

    #[test]
    fn a_layer_is_a_name_before_it_is_a_path() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("bookworm/tree")).unwrap();
        let layers = LayersDir::new(dir.path());
        let first = |text: &str| resolve(text, &layers).unwrap().remove(0).0.path().to_owned();
        assert_eq!(first("bookworm"), dir.path().join("bookworm/tree"));
        assert_eq!(first("/usr"), Path::new("/usr"));
        for none in ["none", "./none"] {
            assert_eq!(crate::exit::exit_of(&resolve(none, &layers).unwrap_err()), Exit::NoVolume);
        }
    }
}
