//! Layers of modules and packages: `hayloft root create --enable`, `root layer`, `root switch`, `root list --modules`.

use std::path::Path;

use hayloft_layer::{
    Catalogue, Choice, CreateOptions, Draft, LayerInfo, LayersDir, Package, Recipe, Word, input, make_first,
    select,
};
use serde_json::{Value, json};

use crate::config::Config;
use crate::dial;
use crate::exit::{Exit, failure};
use crate::mountinfo;
use crate::roots::compose::{Maker, Order, copy_hooks, write_hooks};
use crate::roots::layer_args::RootCreateArgs;
use crate::roots::layers::{Progress, as_failure, as_needed_for, layers_dir, with_users};
use crate::roots::live;
use crate::roots::module_args::{LayerCommandArgs, LayerVerb, MakingArgs, PackageArgs, SwitchArgs};
use crate::units::{show_count, show_size};

/// What the commands here are run with.
#[derive(Clone, Copy)]
pub(crate) struct Setting<'a> {
    pub config: &'a Config,
    pub config_file: Option<&'a Path>,
    pub state_dir: Option<&'a Path>,
}

impl Setting<'_> {
    fn maker<'a>(&'a self, layers: &'a LayersDir) -> Maker<'a> {
        Maker { layers, state_dir: self.state_dir, config_file: self.config_file }
    }
}

/// Reads the catalogue that a flag, the configuration or an older generation names.
fn catalogue(args: &MakingArgs, config: &Config, recorded: Option<&Path>) -> anyhow::Result<Catalogue> {
    let named = args.catalogue.clone().or_else(|| config.run.modules.clone());
    let Some(named) = named.or_else(|| recorded.map(|path| path.to_string_lossy().into_owned())) else {
        let said = "no catalogue of modules is named: --modules DIR, HAYLOFT_MODULES, or run.modules of the configuration";
        return Err(failure(Exit::Usage, said));
    };
    read_catalogue(&named)
}

/// Reads a catalogue in a folder, or in a volume that is mounted.
///
/// # Errors
/// When there is none, or it is not as it has to be.
pub(crate) fn read_catalogue(named: &str) -> anyhow::Result<Catalogue> {
    if named.starts_with(['/', '.']) || dial::split_volume(named).is_none() {
        let path = std::path::absolute(named)?;
        return Catalogue::read(&path).map_err(as_failure);
    }
    let mounts = mountinfo::all()?;
    let there = mounts.into_iter().rev().find(|entry| entry.is_ours() && entry.volume() == named);
    let entry = there.ok_or_else(|| {
        failure(
            Exit::NoVolume,
            format!("the volume {named} is not mounted on this host: hayloft mount {named} DIR"),
        )
    })?;
    Catalogue::read(&entry.mount_point).map_err(as_failure)
}

/// Puts into a recipe what streams need, with their hooks in the folder of the generation.
fn take_streams(
    layers: &LayersDir,
    recipe: &mut Recipe,
    catalogue: &Catalogue,
    folder: &Path,
) -> anyhow::Result<()> {
    let selection = select(catalogue, &recipe.asked).map_err(as_failure)?;
    recipe.layers = selection
        .layers
        .iter()
        .map(|layer| input(layer, layers, &|_, _| {}).map_err(as_failure))
        .collect::<anyhow::Result<_>>()?;
    recipe.hooks = write_hooks(catalogue, &selection, folder)?;
    recipe.catalogue = Some(catalogue.folder().to_owned());
    recipe.packages = selection.packages;
    recipe.modules = selection.enabled;
    Ok(())
}

fn add_repositories(recipe: &mut Recipe, args: &MakingArgs) -> anyhow::Result<()> {
    for folder in &args.repositories {
        let folder = std::path::absolute(folder)?;
        if !folder.is_dir() {
            return Err(failure(Exit::NoVolume, format!("there is no folder {}", folder.display())));
        }
        if !recipe.repositories.contains(&folder) {
            recipe.repositories.push(folder);
        }
    }
    Ok(())
}

/// Removes what killed commands have left.
pub(crate) fn sweep(layers: &LayersDir) -> anyhow::Result<()> {
    with_users(|| layers.sweep().map(|()| 0).map_err(as_failure)).map(drop)
}

/// Runs `hayloft root create` of a layer that modules are enabled in, or that is made upon another one.
///
/// # Errors
/// When it cannot be made; then there is nothing of it.
pub(crate) fn create(args: &RootCreateArgs, setting: Setting<'_>) -> anyhow::Result<u8> {
    let layers = layers_dir(&args.making.layers, setting.config);
    // What is wrong with it is said before anything is made.
    let catalogue = match args.enable.is_empty() {
        true => None,
        false => {
            let catalogue = catalogue(&args.making, setting.config, None)?;
            select(&catalogue, &args.enable).map_err(as_failure)?;
            Some(catalogue)
        }
    };
    sweep(&layers)?;
    let draft = layers.draft(&args.name).map_err(as_failure)?;
    if draft.exists() {
        match args.force {
            true => layers.refuse_if_below(&args.name).map_err(as_failure)?,
            false => return Err(as_failure(hayloft_layer::LayerError::Exists(args.name.clone()))),
        }
    }
    let mut recipe = Recipe { asked: args.enable.clone(), ..Recipe::default() };
    add_repositories(&mut recipe, &args.making)?;
    let (number, base) = match (&args.from, &args.on) {
        (Some(from), _) => {
            let made = as_needed_for(from, || {
                let progress = Progress::new();
                let say = |text: &str| progress.say(text);
                let options =
                    CreateOptions { replace: false, mirror: args.mirror.as_deref(), progress: Some(&say) };
                let made = make_first(draft.top(), from, None, &options);
                progress.end();
                made.map(|_| 0).map_err(as_failure)
            })?;
            if made != 0 {
                return Ok(made);
            }
            (2, from.clone())
        }
        (None, Some(on)) => {
            recipe.on = Some(input(on, &layers, &|_, _| {}).map_err(as_failure)?);
            (1, on.clone())
        }
        (None, None) => return Err(failure(Exit::Usage, "name what it is made from: --from or --on")),
    };
    let folder = draft.folder(number).map_err(as_failure)?;
    if let Some(catalogue) = &catalogue {
        take_streams(&layers, &mut recipe, catalogue, &folder)?;
    }
    let choices: Vec<String> = recipe.asked.iter().map(Choice::to_string).collect();
    let why = match choices.is_empty() {
        true => format!("create {}", args.name),
        false => format!("enable {}", choices.join(",")),
    };
    let info = described(&mut recipe, &base, why);
    let own = draft.top().join("tree");
    let own = recipe.on.is_none().then_some(own.as_path());
    let order = Order { name: &args.name, recipe: &recipe, own, folder: &folder, info };
    let info = setting.maker(&layers).make(&order)?;
    draft.put(args.force).map_err(as_failure)?;
    sweep(&layers)?;
    tell(&layers, &args.name, number, &info, args.making.json)
}

/// What is said of a generation before it is made.
fn described(recipe: &mut Recipe, base: &str, why: String) -> LayerInfo {
    let upon = recipe.to_string();
    let from = if upon.is_empty() { base.to_owned() } else { format!("{base} + {upon}") };
    let info = LayerInfo { why: Some(why), ..LayerInfo::new(&from) };
    recipe.epoch = info.created;
    info
}

fn tell(
    layers: &LayersDir,
    name: &str,
    generation: u64,
    info: &LayerInfo,
    as_json: bool,
) -> anyhow::Result<u8> {
    if as_json {
        let mut value = generation_json(generation, info);
        value["name"] = json!(name);
        value["layer_tree"] = json!(layers.generation_tree(name, generation).ok());
        println!("{value}");
        return Ok(0);
    }
    let (files, bytes) = (show_count(info.files), show_size(info.bytes));
    println!(
        "generation {generation} of the layer {name}: {}, {}, {files} files, {bytes}",
        info.from,
        match info.packages.len() {
            1 => "1 package".to_owned(),
            some => format!("{} packages", show_count(some as u64)),
        }
    );
    Ok(0)
}

/// A generation as JSON.
pub(crate) fn generation_json(number: u64, info: &LayerInfo) -> Value {
    let mut value = json!(info);
    value["generation"] = json!(number);
    value
}

/// A generation that follows the one that a layer has.
struct Next<'a> {
    layers: &'a LayersDir,
    draft: Draft<'a>,
    name: &'a str,
    number: u64,
    folder: std::path::PathBuf,
    recipe: Recipe,
    /// The hooks are those of this generation.
    hooks_of: Option<u64>,
}

impl<'a> Next<'a> {
    /// Begins it when nobody else makes one, with the recipe of the newest, or of a layer that is to be upon `on`.
    fn begin(layers: &'a LayersDir, name: &'a str, on: Option<&str>) -> anyhow::Result<Next<'a>> {
        let draft = layers.draft(name).map_err(as_failure)?;
        let current = draft.exists().then(|| layers.current(name)).transpose().map_err(as_failure)?;
        let info = current.map(|current| layers.generation(name, current)).transpose().map_err(as_failure)?;
        let mut recipe = info.and_then(|info| info.recipe).unwrap_or_default();
        match (current, on) {
            (None, None) => {
                return Err(failure(
                    Exit::NoVolume,
                    format!(
                        "there is no layer '{name}' in {}: --on LAYER makes one upon that",
                        layers.base().display()
                    ),
                ));
            }
            (Some(_), Some(_)) if recipe.on.is_none() => {
                let said = format!(
                    "the layer '{name}' is upon its own first generation, not upon another layer: leave --on out"
                );
                return Err(failure(Exit::Usage, said));
            }
            (_, Some(on)) if on == name => {
                return Err(failure(Exit::Usage, "a layer is not made upon itself"));
            }
            (_, Some(on)) => recipe.on = Some(input(on, layers, &|_, _| {}).map_err(as_failure)?),
            (Some(_), None) => {}
        }
        let (number, folder) = draft.next_generation().map_err(as_failure)?;
        Ok(Next { layers, draft, name, number, folder, recipe, hooks_of: current })
    }

    /// Makes it, and it is what the layer is.
    fn finish(mut self, why: String, setting: Setting<'_>, as_json: bool) -> anyhow::Result<u8> {
        if let Some(current) = self.hooks_of {
            let from = self.layers.generation_files(self.name, current);
            copy_hooks(&from, &self.recipe, &self.folder)?;
        }
        let base = match &self.recipe.on {
            Some(on) => on.name.clone(),
            None => self.layers.generation(self.name, 1).map_err(as_failure)?.from,
        };
        let info = described(&mut self.recipe, &base, why);
        let order = Order { name: self.name, recipe: &self.recipe, own: None, folder: &self.folder, info };
        let info = setting.maker(self.layers).make(&order)?;
        let number = self.draft.commit(self.number).map_err(as_failure)?;
        tell(self.layers, self.name, number, &info, as_json)
    }
}

/// Runs `hayloft root layer`.
///
/// # Errors
/// When it cannot be made; the layer is as it was.
pub(crate) fn layer(args: &LayerCommandArgs, setting: Setting<'_>) -> anyhow::Result<u8> {
    match &args.verb {
        LayerVerb::Live(live_args) => live::run(&args.name, live_args, setting),
        LayerVerb::Install(package_args) => change(args, package_args, setting, |recipe, packages| {
            let is_asked = |package: &Package| packages.iter().any(|other| other.name() == package.name());
            recipe.remove.retain(|package| !is_asked(package));
            recipe.install.retain(|package| !is_asked(package));
            recipe.install.extend_from_slice(packages);
            recipe.install.sort();
            recipe.install.dedup();
            Ok("install")
        }),
        LayerVerb::Remove(package_args) => change(args, package_args, setting, |recipe, packages| {
            for package in packages {
                remove(recipe, package)?;
            }
            Ok("remove")
        }),
    }
}

fn remove(recipe: &mut Recipe, package: &Package) -> anyhow::Result<()> {
    if recipe.packages.contains(package) {
        let said = format!(
            "'{package}' is a package of {}: hayloft root switch chooses another stream, --off takes one away",
            recipe.modules.iter().map(|enabled| enabled.choice().to_string()).collect::<Vec<_>>().join(", ")
        );
        return Err(failure(Exit::Usage, said));
    }
    let asked = recipe.install.len();
    recipe.install.retain(|other| other.name() != package.name());
    if recipe.install.len() == asked && !recipe.remove.contains(package) {
        recipe.remove.push(package.clone());
    }
    Ok(())
}

fn change(
    args: &LayerCommandArgs,
    packages: &PackageArgs,
    setting: Setting<'_>,
    how: impl FnOnce(&mut Recipe, &[Package]) -> anyhow::Result<&'static str>,
) -> anyhow::Result<u8> {
    let layers = layers_dir(&packages.making.layers, setting.config);
    sweep(&layers)?;
    let mut next = Next::begin(&layers, &args.name, args.on.as_deref())?;
    let verb = how(&mut next.recipe, &packages.packages)?;
    add_repositories(&mut next.recipe, &packages.making)?;
    let names: Vec<&str> = packages.packages.iter().map(Package::as_str).collect();
    let why = format!("{verb} {}", names.join(" ")).trim_end().to_owned();
    next.finish(why, setting, packages.making.json)?;
    sweep(&layers)?;
    match packages.live {
        true => live::after(&args.name, packages.making.json, setting, &layers),
        false => Ok(0),
    }
}

/// Runs `hayloft root switch`.
///
/// # Errors
/// When there is no such layer or stream, or it cannot be made; the layer is as it was.
pub(crate) fn switch(args: &SwitchArgs, setting: Setting<'_>) -> anyhow::Result<u8> {
    let layers = layers_dir(&args.making.layers, setting.config);
    sweep(&layers)?;
    let mut next = Next::begin(&layers, &args.name, None)?;
    let recipe = &mut next.recipe;
    for module in &args.off {
        if !recipe.asked.iter().any(|choice| choice.module == *module) {
            let by = recipe.modules.iter().find(|enabled| enabled.module == *module);
            let said = match by.and_then(|enabled| enabled.required_by.as_ref()) {
                Some(by) => {
                    format!("'{module}' is in the layer '{}' since '{by}' requires it", args.name)
                }
                None => format!("the module '{module}' is not in the layer '{}'", args.name),
            };
            return Err(failure(Exit::Usage, said));
        }
        recipe.asked.retain(|choice| choice.module != *module);
    }
    replace_choices(&mut recipe.asked, &args.choices);
    add_repositories(recipe, &args.making)?;
    let catalogue = catalogue(&args.making, setting.config, recipe.catalogue.as_deref())?;
    next.hooks_of = None;
    take_streams(&layers, &mut next.recipe, &catalogue, &next.folder)?;
    let choices = args.choices.iter().map(Choice::to_string);
    let off = args.off.iter().map(|module: &Word| format!("--off {module}"));
    let why = format!("switch {}", choices.chain(off).collect::<Vec<_>>().join(" "));
    next.finish(why, setting, args.making.json)?;
    sweep(&layers)?;
    match args.live {
        true => live::after(&args.name, args.making.json, setting, &layers),
        false => Ok(0),
    }
}

/// New choices take the place of those of the same modules.
fn replace_choices(asked: &mut Vec<Choice>, new: &[Choice]) {
    asked.retain(|choice| !new.iter().any(|other| other.module == choice.module));
    asked.extend_from_slice(new);
}

/// Runs `hayloft root list --modules`.
///
/// # Errors
/// When the catalogue or the layers cannot be read.
pub(crate) fn list(
    named: &str,
    layers: &LayersDir,
    setting: Setting<'_>,
    as_json: bool,
) -> anyhow::Result<u8> {
    let args = MakingArgs {
        catalogue: match named.is_empty() {
            true => std::env::var("HAYLOFT_MODULES").ok(),
            false => Some(named.to_owned()),
        },
        ..MakingArgs::default()
    };
    let catalogue = catalogue(&args, setting.config, None)?;
    let all = layers.list().map_err(as_failure)?;
    let enabled = |module: &Word, stream: &Word| -> Vec<(&str, String)> {
        let of = |info: &LayerInfo| {
            let recipe = info.recipe.as_ref()?;
            let found = recipe.modules.iter().find(|one| one.module == *module && one.stream == *stream)?;
            Some(found.profiles.iter().map(Word::as_str).collect::<Vec<_>>().join("/"))
        };
        all.iter().filter_map(|(name, info)| Some((name.as_str(), of(info)?))).collect()
    };
    if as_json {
        let modules: Vec<Value> = catalogue
            .modules()
            .map(|(name, module)| {
                let streams = module.streams.iter().map(|(stream, needs)| {
                    let layers: Vec<Value> = enabled(name, stream)
                        .into_iter()
                        .map(|(layer, profiles)| {
                            let profiles: Vec<&str> = profiles.split('/').filter(|text| !text.is_empty()).collect();
                            json!({ "layer": layer, "profiles": profiles })
                        })
                        .collect();
                    json!({
                        "stream": stream,
                        "default": module.default.as_ref().is_some_and(|default| default.get_ref() == stream),
                        "packages": needs.packages,
                        "layers": needs.layers,
                        "requires": needs.requires,
                        "profiles": needs.profiles.iter().map(|(profile, needs)| json!({
                            "profile": profile, "packages": needs.packages, "layers": needs.layers,
                        })).collect::<Vec<_>>(),
                        "enabled_in": layers,
                    })
                });
                json!({ "module": name, "description": module.description, "streams": streams.collect::<Vec<_>>() })
            })
            .collect();
        println!("{}", serde_json::to_string_pretty(&modules)?);
        return Ok(0);
    }
    println!("{:16} {:12} {:24} {:24} DESCRIPTION", "MODULE", "STREAM", "PROFILES", "ENABLED IN");
    for (name, module) in catalogue.modules() {
        for (stream, needs) in &module.streams {
            let is_default = module.default.as_ref().is_some_and(|default| default.get_ref() == stream);
            let profiles: Vec<&str> = needs.profiles.keys().map(Word::as_str).collect();
            let enabled: Vec<String> = enabled(name, stream)
                .into_iter()
                .map(
                    |(layer, profiles)| {
                        if profiles.is_empty() { layer.to_owned() } else { format!("{layer} ({profiles})") }
                    },
                )
                .collect();
            let or_none = |texts: &[String]| if texts.is_empty() { "-".to_owned() } else { texts.join(", ") };
            let profiles = if profiles.is_empty() { "-".to_owned() } else { profiles.join(", ") };
            let stream = format!("{stream}{}", if is_default { " [d]" } else { "" });
            println!(
                "{:16} {stream:12} {profiles:24} {:24} {}",
                name.as_str(),
                or_none(&enabled),
                module.description
            );
        }
    }
    Ok(0)
}
