//! Makes the tree of a layer upon others: runs what its recipe says in a build root, and keeps what that has changed.

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};

use anyhow::Context;
use hayloft_layer::{
    Catalogue, Found, HOOKS, Hook, HookFile, HookKind, LayerInfo, LayersDir, Manager, READ_LISTS, Recipe,
    Selection, Told, ends_with_us, inputs, script,
};

use crate::exit::{Exit, failure};
use crate::roots::layers::{Progress, as_failure, with_users};
use crate::sys;

/// How much of what a program said is shown when it failed.
const LAST_LINES: usize = 15;
/// Where a generation's hooks are, beside its tree: each by its number.
const HOOK_FILES: &str = "hooks";

/// What all that is made has in common.
pub(crate) struct Maker<'a> {
    pub layers: &'a LayersDir,
    /// Where the state of roots is, when it was said.
    pub state_dir: Option<&'a Path>,
    /// The configuration file, when it was said.
    pub config_file: Option<&'a Path>,
}

/// What is made.
pub(crate) struct Order<'a> {
    /// The layer's name.
    pub name: &'a str,
    /// How.
    pub recipe: &'a Recipe,
    /// The tree of its first generation, when that is just being made as well.
    pub own: Option<&'a Path>,
    /// The folder of the generation, where its hooks are already.
    pub folder: &'a Path,
    /// What is known of it before it is made.
    pub info: LayerInfo,
}

impl Maker<'_> {
    /// Makes the tree, and `layer.json` beside it.
    ///
    /// # Errors
    /// When a layer below is gone, or something that is run fails; nothing but the folder has changed then.
    pub(crate) fn make(&self, order: &Order<'_>) -> anyhow::Result<LayerInfo> {
        let progress = Progress::new();
        let unpacking = |done: u64, all: u64| {
            let percent = (done * 100).checked_div(all).unwrap_or(100);
            progress.say(&format!("unpacking a layer: {percent} %"));
        };
        // Held until the layer is made.
        let below =
            inputs(self.layers, order.name, order.recipe, order.own, &unpacking).map_err(as_failure)?;
        let mut info = order.info.clone();
        info.recipe = Some(order.recipe.clone());
        if order.recipe.is_plain() {
            let tree = order.folder.join("tree");
            fs::create_dir(&tree).with_context(|| format!("cannot make {}", tree.display()))?;
        } else {
            let told = self.run(order, &below, &progress);
            progress.end();
            info.packages = told?.added();
        }
        let seal = || info.clone().seal(order.folder).map(|_| 0).map_err(as_failure);
        match with_users(seal)? {
            0 => LayerInfo::read(order.folder).map_err(as_failure),
            _ => Err(failure(Exit::Failed, format!("the layer '{}' was not made", order.name))),
        }
    }

    fn run(&self, order: &Order<'_>, below: &[Found], progress: &Progress) -> anyhow::Result<Told> {
        let paths: Vec<&Path> = below.iter().map(|found| found.path.as_path()).collect();
        let manager = Manager::of(&paths);
        let recipe = order.recipe;
        require_users(order.name)?;
        if manager.is_none() && !(recipe.all_packages().is_empty() && recipe.remove.is_empty()) {
            let said = "the layer below has no package manager that is known: apt-get with dpkg, or dnf";
            return Err(failure(Exit::Missing, format!("the layer '{}' was not made: {said}", order.name)));
        }
        let mut command = self.command(order, &paths, manager)?;
        let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
        let errors = writer.try_clone().context("cannot make a pipe")?;
        command.stdin(Stdio::null()).stdout(writer).stderr(errors);
        ends_with_us(&mut command);
        let mut child = command.spawn().context("cannot run this program again")?;
        // Its ends of the pipe are the child's alone from here on.
        drop(command);
        let (mut told, mut last) = (Told::default(), VecDeque::new());
        for line in BufReader::new(reader).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            let line = line.rsplit('\r').next().unwrap_or_default();
            let step = told.step.clone();
            let Some(shown) = told.line(line).filter(|shown| !shown.is_empty()) else { continue };
            progress.say(&format!("{}: {shown}", order.name));
            if told.step != step {
                // What went well is no part of what did not.
                last.clear();
                continue;
            }
            if last.len() == LAST_LINES {
                last.pop_front();
            }
            last.push_back(shown.to_owned());
        }
        let status = child.wait().context("cannot wait for this program")?;
        match status.success() {
            true => Ok(told),
            false => Err(failed(order, &told, status, &Vec::from(last).join("\n"))),
        }
    }

    /// `hayloft run` in the layers below, with the new tree as what is published.
    fn command(
        &self,
        order: &Order<'_>,
        below: &[&Path],
        manager: Option<Manager>,
    ) -> anyhow::Result<Command> {
        let mut command = Command::new(hayloft_root::program::path());
        // Paths of the host have no place in a text with ':'.
        command.current_dir(order.folder);
        if let Some(file) = self.config_file {
            command.arg("--config").arg(std::path::absolute(file)?);
        }
        command.arg("run");
        if let Some(dir) = self.state_dir {
            command.arg("--state-dir").arg(std::path::absolute(dir)?);
        }
        for layer in below {
            command.arg("--root").arg(layer);
        }
        command.args([
            "--publish",
            ".:tree",
            "--as-layer",
            "--with-owners",
            "--network",
            "host",
            "--chdir",
            "/",
        ]);
        for folder in manager.map(Manager::scratch).unwrap_or_default() {
            command.args(["--scratch", folder]);
        }
        for folder in &order.recipe.repositories {
            command.arg("--bind").arg(folder);
        }
        let hooks = order.folder.join(HOOK_FILES);
        if hooks.is_dir() {
            command.arg("--bind").arg(format!("{}:{HOOKS}", hooks.display()));
        }
        command.arg("--env").arg(format!("SOURCE_DATE_EPOCH={}", order.recipe.epoch));
        command.args(["--", "sh", "-c"]).arg(script(order.recipe, manager));
        Ok(command)
    }
}

/// Packages have files of many users.
fn require_users(name: &str) -> anyhow::Result<()> {
    let has_them = sys::is_root()
        || hayloft_root::with_subordinate_users(|| 0).map_err(crate::roots::root::root_failure)?.is_some();
    let what = format!("the layer '{name}'");
    if has_them { Ok(()) } else { Err(as_failure(hayloft_layer::LayerError::NeedsUsers { what })) }
}

fn failed(order: &Order<'_>, told: &Told, status: ExitStatus, last: &str) -> anyhow::Error {
    let name = order.name;
    let below = order.recipe.on.as_ref().map_or(name, |on| &on.name);
    let not_made = format!("the layer '{name}' was not made");
    if let Some(package) = &told.absent {
        return failure(
            Exit::NoVolume,
            format!("{not_made}: there is no package '{package}' in it to be removed"),
        );
    }
    if let Some(package) = &told.unknown {
        let said = format!("{not_made}: no source of packages of '{below}' has '{package}'");
        return failure(Exit::NoVolume, said);
    }
    if told.lacks_ansible {
        let said = format!(
            "{not_made}: a play is run by the layer's own ansible-playbook, and it has none: add the package ansible-core to the stream"
        );
        return failure(Exit::Missing, said);
    }
    if told.is_full {
        let said = format!(
            "{not_made}: there was no room, in the root's memory (HAYLOFT_MEMORY, HAYLOFT_SPILL) or where layers are:\n{last}"
        );
        return failure(Exit::NoSpace, said);
    }
    let how = match (status.code(), status.signal()) {
        (Some(code), _) if code > 128 => format!("ended by signal {}", code - 128),
        (Some(code), _) => format!("exit code {code}"),
        (None, signal) => format!("ended by signal {}", signal.unwrap_or_default()),
    };
    let is_here = told.step == READ_LISTS && order.recipe.repositories.is_empty() && last.contains("file:/");
    let hint = match is_here {
        true => "\na source that is a folder of this host has to be named: --repository DIR",
        false => "",
    };
    let step = if told.step.is_empty() { "the root was not made" } else { &told.step };
    failure(Exit::Failed, format!("{not_made}: {step}: {how}\n{last}{hint}"))
}

/// Writes the hooks of modules beside the tree that is to be made.
///
/// # Errors
/// When one cannot be read or written.
pub(crate) fn write_hooks(
    catalogue: &Catalogue,
    selection: &Selection,
    folder: &Path,
) -> anyhow::Result<Vec<Hook>> {
    let mut hooks = Vec::new();
    for (at, (module, hook)) in selection.hooks.iter().enumerate() {
        let content = catalogue.hook(hook).map_err(as_failure)?;
        let kind = match hook {
            HookFile::Script(_) => HookKind::Script,
            HookFile::Ansible(_) => HookKind::Ansible,
        };
        put_hook(folder, at, &content)?;
        hooks.push(Hook {
            module: module.clone(),
            kind,
            file: hook.path().to_owned(),
            hash: Hook::hash_of(&content),
        });
    }
    Ok(hooks)
}

/// Copies the hooks of another generation. Gives those whose content is another than its recipe says.
///
/// # Errors
/// When one cannot be read or written.
pub(crate) fn copy_hooks(from: &Path, recipe: &Recipe, folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut changed = Vec::new();
    for (at, hook) in recipe.hooks.iter().enumerate() {
        let path = from.join(HOOK_FILES).join(at.to_string());
        let content = fs::read(&path).with_context(|| format!("cannot read the hook {}", path.display()))?;
        if Hook::hash_of(&content) != hook.hash {
            changed.push(hook.file.clone());
        }
        put_hook(folder, at, &content)?;
    }
    Ok(changed)
}

fn put_hook(folder: &Path, at: usize, content: &[u8]) -> anyhow::Result<()> {
    let hooks = folder.join(HOOK_FILES);
    fs::create_dir_all(&hooks).with_context(|| format!("cannot make {}", hooks.display()))?;
    let path = hooks.join(at.to_string());
    fs::write(&path, content)
        .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot write {}", path.display()))
}
