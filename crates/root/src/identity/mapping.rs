//! Who is who in the user namespace of an ordinary user's root.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::error::{Result, Trying};

/// Maps the users of a new namespace: root is who called, and the others, when /etc/subuid and /etc/subgid give this
/// user ranges, are those.
///
/// # Errors
/// When the namespace is gone.
pub(crate) fn map_user(pid: i32) -> Result<()> {
    if map_ranges(pid) {
        return Ok(());
    }
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let what = || "map the user into the new user namespace".to_owned();
    let folder = Path::new("/proc").join(pid.to_string());
    fs::write(folder.join("uid_map"), format!("0 {uid} 1")).trying(what)?;
    // Without it an ordinary user cannot map a group (user_namespaces(7)).
    fs::write(folder.join("setgroups"), "deny").trying(what)?;
    fs::write(folder.join("gid_map"), format!("0 {gid} 1")).trying(what)
}

/// The same, only with ranges; false when there are none. Only the setuid programs newuidmap(1) and newgidmap(1) may set
/// ranges, hence they are run.
pub(crate) fn map_ranges(pid: i32) -> bool {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    ranges(uid).is_some_and(|(users, groups)| {
        set_range("newuidmap", pid, uid, users) && set_range("newgidmap", pid, gid, groups)
    })
}

/// Whether this user has other users, and may be them.
pub(crate) fn has_ranges() -> bool {
    ranges(rustix::process::geteuid().as_raw()).is_some()
}

/// The ranges of a user's other users and groups.
fn ranges(uid: u32) -> Option<((u32, u32), (u32, u32))> {
    let users = range("/etc/subuid", uid).filter(|_| has_program("newuidmap"));
    let groups = range("/etc/subgid", uid).filter(|_| has_program("newgidmap"));
    users.zip(groups)
}

fn set_range(program: &str, pid: i32, own: u32, (first, count): (u32, u32)) -> bool {
    let mut command = Command::new(program);
    command.args([pid.to_string(), "0".to_owned(), own.to_string(), "1".to_owned()]);
    command.args(["1".to_owned(), first.to_string(), count.to_string()]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

fn has_program(name: &str) -> bool {
    std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(name).is_file()))
}

/// The first range of a user in the text of subuid(5) or subgid(5).
fn range(file: &str, uid: u32) -> Option<(u32, u32)> {
    let name = fs::read_to_string("/etc/passwd").ok().and_then(|text| {
        let entry = text.lines().find(|line| line.split(':').nth(2) == Some(&*uid.to_string()))?;
        Some(entry.split(':').next()?.to_owned())
    });
    range_in(&fs::read_to_string(file).ok()?, uid, name.as_deref())
}

fn range_in(text: &str, uid: u32, name: Option<&str>) -> Option<(u32, u32)> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let who = fields.next()?;
        (who == uid.to_string() || Some(who) == name).then_some(())?;
        Some((fields.next()?.parse().ok()?, fields.next()?.trim().parse().ok()?))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_by_name_or_number() {
        let text = "other:100000:65536\nme:165536:65536\n1001:300000:10\n";
        assert_eq!(range_in(text, 1000, Some("me")), Some((165_536, 65_536)));
        assert_eq!(range_in(text, 1001, None), Some((300_000, 10)));
        assert_eq!(range_in(text, 1002, Some("nobody")), None);
    }
}
