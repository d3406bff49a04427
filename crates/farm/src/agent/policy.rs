//! As whom tasks run on this host.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::execution::sys::{self, User};

/// What an agent does for which users.
#[derive(Debug, Clone, Default)]
pub struct Policy {
    /// Tasks of the first user run as the second; `*` is everybody who has no entry of his own.
    pub map: Vec<(String, String)>,
    /// Tasks may run as root.
    pub allows_root: bool,
}

/// As whom a task runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RunAs {
    /// As the agent itself.
    Agent,
    /// As another user of this host.
    User(User),
}

impl Policy {
    /// As whom a task of this user runs; else why it does not.
    pub(crate) fn run_as(&self, name: &str, uid: u32) -> Result<RunAs, String> {
        let entry =
            |wanted: &str| self.map.iter().find(|(from, _)| from == wanted).map(|(_, to)| to.as_str());
        let mapped = entry(name).or_else(|| entry("*"));
        let to = mapped.unwrap_or(name);
        if to.is_empty() {
            return Err(format!("the user with the number {uid} has no name on the submitting host"));
        }
        let user = user(to).ok_or_else(|| format!("there is no user {to} on this host"))?;
        if mapped.is_none() && user.uid != uid {
            return Err(format!("{name} has the number {uid} there and {} here", user.uid));
        }
        if user.uid == 0 && !self.allows_root {
            return Err(
                "tasks of root are refused (hayloft farm agent --allow-root, or --user-map root=USER)".into(),
            );
        }
        let own = rustix::process::geteuid().as_raw();
        match own {
            _ if own == user.uid => Ok(RunAs::Agent),
            0 => Ok(RunAs::User(user)),
            _ => Err(format!("the agent does not run as root, and so cannot run tasks as {to}")),
        }
    }
}

/// How long a user is taken for what he was: system tables are slow to ask, and tasks are many.
const KNOWN: Duration = Duration::from_secs(2);

fn user(name: &str) -> Option<User> {
    static LAST: Mutex<Option<(String, Instant, User)>> = Mutex::new(None);
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    match &*last {
        Some((known, at, user)) if known == name && at.elapsed() < KNOWN => Some(user.clone()),
        _ => Some(last.insert((name.to_owned(), Instant::now(), sys::user(name)?)).2.clone()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_refused_unless_it_is_allowed_or_mapped() {
        let policy = Policy::default();
        assert!(policy.run_as("root", 0).unwrap_err().contains("refused"));
        assert!(Policy { allows_root: true, ..Policy::default() }.run_as("root", 0).is_ok_and(|as_whom| {
            matches!(as_whom, RunAs::Agent) || rustix::process::geteuid().as_raw() != 0
        }));
        let mapped = Policy { map: vec![("*".into(), "nobody".into())], allows_root: false };
        if rustix::process::geteuid().is_root() {
            assert!(matches!(mapped.run_as("root", 0), Ok(RunAs::User(user)) if user.uid != 0));
        }
        let to_root = Policy { map: vec![("daemon".into(), "root".into())], allows_root: false };
        assert!(to_root.run_as("daemon", 1).is_err());
    }

    #[test]
    fn a_name_that_is_another_user_here_is_refused() {
        let policy = Policy { allows_root: true, ..Policy::default() };
        assert!(policy.run_as("daemon", 54_321).unwrap_err().contains("54321"));
        assert!(policy.run_as("no such user", 54_321).unwrap_err().contains("no user"));
        assert!(policy.run_as("", 54_321).unwrap_err().contains("no name"));
    }
}
