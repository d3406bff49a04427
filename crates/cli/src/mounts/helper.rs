//! `mount.hayloft` and `umount.hayloft`: called under these names, the program speaks the command line
//! that mount(8) and umount(8) use with their helpers, so that `mount -t hayloft` and fstab(5) work.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::config::Config;
use crate::dial;
use crate::exit::{Exit, exit_of, failure};
use crate::mounts::args::{MountArgs, UmountArgs};
use crate::mounts::mount;
use crate::mounts::remount;
use crate::mounts::umount;

/// "mount failure" among the exit codes of mount(8).
const MOUNT_FAILED: u8 = 32;
/// "incorrect invocation or permissions".
const WRONG_CALL: u8 = 1;

/// Which helper we are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// For mount(8).
    Mount,
    /// For umount(8).
    Umount,
}

/// The helper that this program was called as, if any.
pub(crate) fn role(argv: &[OsString]) -> Option<Role> {
    match Path::new(argv.first()?).file_name()?.to_str()? {
        "mount.hayloft" | "mount.fuse.hayloft" | "mount.fuseblk.hayloft" => Some(Role::Mount),
        "umount.hayloft" | "umount.fuse.hayloft" | "umount.fuseblk.hayloft" => Some(Role::Umount),
        _ => None,
    }
}

/// Does the helper's work.
pub(crate) fn run(role: Role, args: &[OsString]) -> ExitCode {
    let outcome = Call::parse(args).and_then(|call| {
        let path_in = |variable| std::env::var_os(variable).map(PathBuf::from);
        let config = || {
            let config = Config::load(path_in("HAYLOFT_CONFIG").as_deref())?;
            let insecure = std::env::var("HAYLOFT_INSECURE").is_ok_and(|value| {
                !["", "0", "n", "no", "f", "false", "off"].contains(&value.to_lowercase().as_str())
            });
            dial::decide(path_in("HAYLOFT_CERT").as_deref(), insecure, &config);
            anyhow::Ok(config)
        };
        match role {
            Role::Mount if call.fake => Ok(0),
            Role::Mount if remount::is_asked(&call.options) => {
                let args = call.mount()?;
                remount::run(&args.dir, &args.options)
            }
            Role::Mount => mount::run_silently(call.mount()?, &config()?),
            Role::Umount => umount::run(&call.umount()?),
        }
    });
    match outcome {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("hayloft: {error:#}");
            let usage = exit_of(&error) == Exit::Usage;
            ExitCode::from(if usage { WRONG_CALL } else { MOUNT_FAILED })
        }
    }
}

/// `mount.hayloft SOURCE DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`, see mount(8), "EXTERNAL HELPERS".
#[derive(Debug, Default, PartialEq)]
struct Call {
    operands: Vec<OsString>,
    options: Vec<String>,
    fake: bool,
    force: bool,
    lazy: bool,
}

impl Call {
    fn parse(args: &[OsString]) -> anyhow::Result<Call> {
        let mut call = Call::default();
        let mut args = args.iter();
        while let Some(arg) = args.next() {
            let text = arg.to_string_lossy();
            match text.strip_prefix('-') {
                Some("o") => {
                    let options = args.next().ok_or_else(|| failure(Exit::Usage, "-o without options"))?;
                    call.options.push(options.to_string_lossy().into_owned());
                }
                Some("t" | "N") => {
                    args.next();
                }
                Some(flags) if !flags.is_empty() && flags.chars().all(|flag| "sfnvlr".contains(flag)) => {
                    call.fake |= flags.contains('f');
                    call.force |= flags.contains('f');
                    call.lazy |= flags.contains('l');
                }
                Some(_) => return Err(failure(Exit::Usage, format!("unknown option {text}"))),
                None => call.operands.push(arg.clone()),
            }
        }
        Ok(call)
    }

    fn mount(self) -> anyhow::Result<MountArgs> {
        let [source, dir] = self.operands.as_slice() else {
            return Err(failure(Exit::Usage, "usage: mount.hayloft HOST:PORT/VOLUME DIR [-o OPTIONS]"));
        };
        Ok(MountArgs {
            source: source.to_string_lossy().into_owned(),
            dir: dir.into(),
            options: self.options,
            foreground: false,
            cache_dir: std::env::var_os("HAYLOFT_CACHE_DIR").map(PathBuf::from),
            log_dir: std::env::var_os("HAYLOFT_LOG_DIR").map(PathBuf::from),
            detached: false,
            die_with_parent: false,
        })
    }

    fn umount(self) -> anyhow::Result<UmountArgs> {
        match self.operands.as_slice() {
            [dir] => {
                let (force, lazy) = (self.force, self.lazy && !self.force);
                Ok(UmountArgs { dir: dir.into(), force, lazy, timeout: None })
            }
            _ => Err(failure(Exit::Usage, "usage: umount.hayloft DIR [-fl]")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(args: &[&str]) -> anyhow::Result<Call> {
        Call::parse(&args.iter().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn names_of_helpers() {
        assert_eq!(role(&["/sbin/mount.hayloft".into()]), Some(Role::Mount));
        assert_eq!(role(&["umount.fuse.hayloft".into()]), Some(Role::Umount));
        assert_eq!(role(&["/sbin/umount.fuseblk.hayloft".into()]), Some(Role::Umount));
        assert_eq!(role(&["/usr/bin/hayloft".into()]), None);
    }

    #[test]
    fn calls_of_mount_and_umount() {
        let args = call(&["h:1/v", "/mnt", "-n", "-o", "rw,commit=3"]).unwrap().mount().unwrap();
        assert_eq!((args.source.as_str(), args.options), ("h:1/v", vec!["rw,commit=3".to_owned()]));
        let args = call(&["/mnt", "-l", "-t", "fuse.hayloft"]).unwrap().umount().unwrap();
        assert!(args.lazy && !args.force);
        assert!(call(&["h:1/v", "-q"]).is_err());
        assert!(call(&["h:1/v"]).unwrap().mount().is_err());
    }
}
