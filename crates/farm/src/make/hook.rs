//! What make is told: to run recipes by way of a script, while `SHELL` stays what the makefiles say.
//!
//! make reads the files of `MAKEFILES` before all others. What `GPATH` says it expands when it has read all makefiles, and before it
//! runs the first recipe: then `.SHELLFLAGS` is changed, for shells of the usual kind, so that the shell is given the script with
//! all that it was to be given itself. Makefiles that set `GPATH` themselves have recipes run as ever.

use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::{history, recipe};
use crate::small;

/// The files; gone when dropped.
#[derive(Debug)]
pub struct Hook {
    dir: PathBuf,
}

impl Hook {
    /// Makes the files. `program` with [`recipe::ARGUMENT`] is how recipes are run, of the [small program](small) where that is beside it; with
    /// `skips` not those that are seen to do little; with `names_rules` each is told which rule it is of.
    ///
    /// # Errors
    /// When `/tmp` cannot be written to.
    pub fn make(program: &Path, skips: bool, names_rules: bool) -> io::Result<Hook> {
        // Its path stands in a makefile and in a command: nothing that needs quotes.
        let dir = PathBuf::from(format!("/tmp/hayloft-make-{}", std::process::id()));
        match std::fs::remove_dir_all(&dir) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        std::os::unix::fs::DirBuilderExt::mode(&mut std::fs::DirBuilder::new(), 0o700).create(&dir)?;
        let hook = Hook { dir };
        let quoted = |program: &Path| program.display().to_string().replace('\'', "'\"'\"'");
        let small = small::beside(program);
        let runs = format!("'{}' {}", quoted(small.as_deref().unwrap_or(program)), recipe::ARGUMENT);
        let skip = match skips {
            true => format!("for text; do :; done\n{}", history::trivial_in_shell()),
            false => String::new(),
        };
        let of_rule = if names_rules { recipe::OF_RULE } else { "" };
        let script = format!("{skip}exec {runs} {of_rule} \"$@\"\n");
        let mut file = std::fs::File::create(hook.script())?;
        file.write_all(script.as_bytes())?;
        file.set_permissions(std::fs::Permissions::from_mode(0o755))?;
        let script = hook.script();
        let script = script.display();
        // Automatic variables are those of the recipe. With a quote in it make would start a shell for it, between itself and the script.
        let rule = if names_rules { " '@$$(subst ',%27,$$(subst %,%25,$$@))'" } else { "" };
        let makefile = format!(
            "GPATH = $(eval HAYLOFT_SHELLFLAGS := $$(.SHELLFLAGS))$(eval override .SHELLFLAGS = \
             $$(if $$(filter sh %/sh bash %/bash dash %/dash ksh %/ksh,$$(firstword $$(SHELL))),\
             {script}{rule} $$(SHELL) $$(HAYLOFT_SHELLFLAGS),$$(HAYLOFT_SHELLFLAGS)))\nMAKEFILE_LIST :=\n"
        );
        std::fs::write(hook.makefile(), makefile)?;
        Ok(hook)
    }

    fn script(&self) -> PathBuf {
        self.dir.join("recipe")
    }

    /// For `MAKEFILES`.
    pub fn makefile(&self) -> PathBuf {
        self.dir.join("hook.mk")
    }

    /// Where the session listens.
    pub fn socket(&self) -> PathBuf {
        self.dir.join("socket")
    }
}

impl Drop for Hook {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}
