//! What is run inside to install packages and run hooks: a shell script, and what it tells.

use std::fmt::Write;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use crate::modules::recipe::{HookKind, Installed, Recipe};
use crate::modules::words::Package;

/// Where a layer's hooks are seen while they are run.
pub const HOOKS: &str = "/run/hayloft-hooks";

/// What a script says that it does, when it is to learn what packages there are.
pub const READ_LISTS: &str = "read the lists of packages";

/// What a line that is for us begins with.
const OURS: &str = "::hayloft:";

/// The package manager of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manager {
    /// dpkg's.
    Apt,
    /// rpm's.
    Dnf,
}

impl Manager {
    /// That of a tree of layers, topmost first.
    pub fn of(layers: &[&Path]) -> Option<Manager> {
        let has = |path: &str| is_seen(layers, Path::new(path));
        if has("usr/bin/apt-get") && has("var/lib/dpkg/status") {
            Some(Manager::Apt)
        } else {
            has("usr/bin/dnf").then_some(Manager::Dnf)
        }
    }

    /// Folders that are memory of their own while it runs: lists and downloads that belong to no layer.
    pub fn scratch(self) -> &'static [&'static str] {
        match self {
            Manager::Apt => &["/var/lib/apt/lists", "/var/cache/apt"],
            Manager::Dnf => &["/var/cache/dnf", "/var/cache/libdnf5"],
        }
    }

    /// Where it is written where packages come from.
    pub fn sources(self) -> &'static [&'static str] {
        match self {
            Manager::Apt => &["etc/apt/sources.list", "etc/apt/sources.list.d"],
            Manager::Dnf => &["etc/yum.repos.d"],
        }
    }

    fn list(self) -> String {
        match self {
            Manager::Apt => format!(
                "dpkg-query -W -f \"{OURS}$1 \\${{db:Status-Status}}|\\${{Package}}|\\${{Version}}|\\${{Architecture}}\\n\""
            ),
            Manager::Dnf => format!(
                "rpm -qa --qf \"{OURS}$1 installed|%{{NAME}}|%{{EPOCHNUM}}:%{{VERSION}}-%{{RELEASE}}|%{{ARCH}}\\n\" | LC_ALL=C sort"
            ),
        }
    }

    fn install(self, packages: &[Package]) -> String {
        let names = quoted(packages);
        match self {
            Manager::Apt => format!(
                "step \"{READ_LISTS}\"\napt-get -q -o APT::Update::Error-Mode=any update\nstep \"install\"\napt-get -qy -o Dpkg::Use-Pty=0 -o Dpkg::Options::=--force-confold --no-install-recommends install {names}\n"
            ),
            Manager::Dnf => {
                format!("step \"install\"\ndnf -y --setopt=install_weak_deps=0 install {names}\n")
            }
        }
    }

    fn remove(self, packages: &[Package]) -> String {
        let names = quoted(packages);
        let (is_there, remove) = match self {
            Manager::Apt => ("dpkg-query -W", "apt-get -qy -o Dpkg::Use-Pty=0 purge"),
            Manager::Dnf => ("rpm -q", "dnf -y remove"),
        };
        format!(
            "step \"remove\"\nfor name in {names}; do\n  {is_there} \"$name\" >/dev/null 2>&1 || {{ tell absent \"$name\"; exit 96; }}\ndone\n{remove} {names}\n"
        )
    }
}

/// Whether a path is in layers, topmost first, and none above has removed it or a folder that it is in.
fn is_seen(layers: &[&Path], path: &Path) -> bool {
    for layer in layers {
        for step in path.ancestors().filter(|step| !step.as_os_str().is_empty()) {
            let Ok(meta) = layer.join(step).symlink_metadata() else { continue };
            if meta.file_type().is_char_device() && meta.rdev() == 0 {
                return false;
            }
            if step == path {
                return true;
            }
        }
    }
    false
}

fn quoted(packages: &[Package]) -> String {
    packages.iter().map(|package| format!("'{package}'")).collect::<Vec<_>>().join(" ")
}

/// A text as a shell takes it, whatever is in it.
fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// The script that does to a root what the recipe says. Hooks are in [`HOOKS`], by their numbers.
pub fn script(recipe: &Recipe, manager: Option<Manager>) -> String {
    let mut script = format!(
        "set -eu\nexport DEBIAN_FRONTEND=noninteractive\n\
         tell() {{ printf '{OURS}%s\\n' \"$*\"; }}\nstep() {{ tell step \"$1\"; }}\n\
         id_then=$(cat /etc/machine-id 2>/dev/null || :)\n"
    );
    if let Some(manager) = manager {
        let _ = write!(script, "list() {{ {}; }}\nlist before\n", manager.list());
    }
    // No service is started by what is installed.
    script.push_str(
        "policy=/usr/sbin/policy-rc.d\n\
         if [ -d /usr/sbin ] && [ ! -e $policy ]; then printf '#!/bin/sh\\nexit 101\\n' >$policy; chmod 755 $policy; else policy=; fi\n",
    );
    let install = recipe.all_packages();
    if let Some(manager) = manager {
        if !install.is_empty() {
            script.push_str(&manager.install(&install));
        }
        if !recipe.remove.is_empty() {
            script.push_str(&manager.remove(&recipe.remove));
        }
    }
    for (at, hook) in recipe.hooks.iter().enumerate() {
        let shown = hook.file.display();
        let _ = writeln!(script, "step {}", quote(&format!("run the hook {shown} of {}", hook.module)));
        let choice = recipe.modules.iter().find(|enabled| enabled.module == hook.module);
        let (stream, profiles) = choice.map_or(Default::default(), |enabled| {
            let profiles: Vec<&str> = enabled.profiles.iter().map(|profile| profile.as_str()).collect();
            (enabled.stream.to_string(), profiles.join(" "))
        });
        let variables = format!(
            "HAYLOFT_MODULE={} HAYLOFT_STREAM={} HAYLOFT_PROFILES={}",
            quote(hook.module.as_str()),
            quote(&stream),
            quote(&profiles)
        );
        let _ = match hook.kind {
            HookKind::Script => writeln!(script, "{variables} {HOOKS}/{at}"),
            HookKind::Ansible => writeln!(
                script,
                "command -v ansible-playbook >/dev/null || {{ tell lacks-ansible; exit 97; }}\n\
                 {variables} HOME=/tmp ANSIBLE_HOME=/tmp/.ansible ANSIBLE_REMOTE_TEMP=/tmp/.ansible ANSIBLE_PYTHON_INTERPRETER=auto_silent ansible-playbook -i localhost, -c local {HOOKS}/{at}"
            ),
        };
    }
    script.push_str("step \"clean up\"\n[ -z \"$policy\" ] || rm -f $policy\n");
    if let Some(manager) = manager {
        script.push_str("list after\n");
        if manager == Manager::Apt {
            script.push_str(
                "rm -f /var/lib/dpkg/*-old /var/cache/debconf/*-old /var/log/dpkg.log /var/log/bootstrap.log /var/log/alternatives.log \
                 /var/log/fontconfig.log /var/log/apt/*.log /var/log/apt/eipp.log.xz\n",
            );
        } else {
            script.push_str("rm -f /var/log/dnf*.log /var/log/hawkey.log\n");
        }
    }
    // What differs each time, and belongs to a running machine.
    script.push_str(
        "rm -f /var/cache/ldconfig/aux-cache\n\
         if [ \"$(cat /etc/machine-id 2>/dev/null || :)\" != \"$id_then\" ]; then echo uninitialized >/etc/machine-id; fi\n\
         step \"write the layer\"\n",
    );
    script
}

/// What a script has told so far.
#[derive(Debug, Default)]
pub struct Told {
    /// What it does.
    pub step: String,
    /// Packages that were there.
    pub before: Vec<Installed>,
    /// Packages that are there now.
    pub after: Vec<Installed>,
    /// A package that is to be removed, and is not there.
    pub absent: Option<String>,
    /// There is a play, and no Ansible.
    pub lacks_ansible: bool,
    /// A package that its package manager does not know.
    pub unknown: Option<String>,
    /// There was no room for something.
    pub is_full: bool,
}

impl Told {
    /// Takes a line. Gives what to show of it.
    pub fn line<'l>(&mut self, line: &'l str) -> Option<&'l str> {
        let Some(ours) = line.strip_prefix(OURS) else {
            self.look_for_trouble(line);
            return Some(line);
        };
        let (word, rest) = ours.split_once(' ').unwrap_or((ours, ""));
        match word {
            "step" => {
                rest.clone_into(&mut self.step);
                return Some(rest);
            }
            "before" => self.before.extend(installed(rest)),
            "after" => self.after.extend(installed(rest)),
            "absent" => self.absent = Some(rest.to_owned()),
            "lacks-ansible" => self.lacks_ansible = true,
            _ => return Some(line),
        }
        None
    }

    /// Packages that are there now and were not, or in another version.
    pub fn added(&self) -> Vec<Installed> {
        let mut added: Vec<_> =
            self.after.iter().filter(|package| !self.before.contains(package)).cloned().collect();
        added.sort();
        added
    }

    fn look_for_trouble(&mut self, line: &str) {
        let quoted = |text: &str| text.split('\'').nth(1).map(str::to_owned);
        if let Some(name) = line.strip_prefix("E: Unable to locate package ") {
            self.unknown = Some(name.trim().to_owned());
        } else if line.starts_with("E: Package '") && line.contains("has no installation candidate") {
            self.unknown = quoted(line);
        } else if line.starts_with("E: Version '") && line.contains("was not found") {
            self.unknown = line.split('\'').nth(3).map(str::to_owned);
        } else if let Some(name) = line.trim().strip_prefix("No match for argument: ") {
            self.unknown = Some(name.trim().to_owned());
        }
        self.is_full |=
            line.contains("No space left on device") || line.contains("You don't have enough free space");
    }
}

fn installed(text: &str) -> Option<Installed> {
    let parts: Vec<&str> = text.split('|').collect();
    match parts[..] {
        ["installed", name, version, arch] => {
            Some(Installed { name: name.to_owned(), version: version.to_owned(), arch: arch.to_owned() })
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::recipe::Hook;

    #[test]
    fn a_script_says_what_it_does_and_quotes_what_it_is_given() {
        let hook = |file: &str, kind| Hook {
            module: "gcc".parse().unwrap(),
            kind,
            file: file.into(),
            hash: String::new(),
        };
        let recipe = Recipe {
            packages: vec!["gcc".parse().unwrap()],
            install: vec!["gdb".parse().unwrap(), "gcc".parse().unwrap()],
            hooks: vec![hook("it's; rm -r \"$HOME\"", HookKind::Script), hook("play.yml", HookKind::Ansible)],
            ..Recipe::default()
        };
        let text = script(&recipe, Some(Manager::Apt));
        assert!(text.contains("install 'gcc' 'gdb'\n"), "{text}");
        assert!(text.contains("step 'run the hook it'\\''s; rm -r \"$HOME\" of gcc'\n"), "{text}");
        assert!(text.contains(" /run/hayloft-hooks/0\n"), "{text}");
        for text in [text, script(&recipe, Some(Manager::Dnf)), script(&recipe, None)] {
            let status = std::process::Command::new("sh").args(["-n", "-c", &text]).status().unwrap();
            assert!(status.success(), "{text}");
        }
    }

    #[test]
    fn what_a_layer_above_has_removed_is_not_there() {
        let dir = tempfile::tempdir().unwrap();
        let [above, below] = ["above", "below"].map(|name| dir.path().join(name));
        for file in ["usr/bin/apt-get", "usr/bin/dnf", "var/lib/dpkg/status"] {
            std::fs::create_dir_all(below.join(file).parent().unwrap()).unwrap();
            std::fs::write(below.join(file), "").unwrap();
        }
        std::fs::create_dir_all(above.join("var/lib")).unwrap();
        assert_eq!(Manager::of(&[&above, &below]), Some(Manager::Apt));
        let gone = above.join("var/lib/dpkg");
        let kind = rustix::fs::FileType::CharacterDevice;
        rustix::fs::mknodat(rustix::fs::CWD, &gone, kind, rustix::fs::Mode::empty(), 0).unwrap();
        assert_eq!(Manager::of(&[&above, &below]), Some(Manager::Dnf));
        assert_eq!(Manager::of(&[&above]), None);
    }

    #[test]
    fn what_is_told_is_taken_and_the_rest_shown() {
        let mut told = Told::default();
        assert_eq!(told.line("::hayloft:step install"), Some("install"));
        for line in [
            "::hayloft:before installed|a|1|all",
            "::hayloft:before installed|b|1|all",
            "::hayloft:before config-files|c|1|all",
            "::hayloft:after installed|a|1|all",
            "::hayloft:after installed|b|2|all",
            "::hayloft:after installed|c|1|all",
        ] {
            assert_eq!(told.line(line), None);
        }
        let added: Vec<String> = told.added().iter().map(|p| format!("{} {}", p.name, p.version)).collect();
        assert_eq!((told.step.as_str(), added), ("install", vec!["b 2".to_owned(), "c 1".to_owned()]));
        for (line, name) in [
            ("E: Unable to locate package gcx", "gcx"),
            ("E: Package 'vim' has no installation candidate", "vim"),
            ("E: Version '9' for 'gdb' was not found", "gdb"),
            ("No match for argument: gcx", "gcx"),
        ] {
            let mut told = Told::default();
            assert_eq!(told.line(line), Some(line));
            assert_eq!(told.unknown.as_deref(), Some(name));
        }
    }
}
