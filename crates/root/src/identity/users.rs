//! Users and groups as the root's own /etc/passwd and /etc/group name them.

use crate::error::{Error, Result};

/// Who a command runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    pub home: String,
    pub shell: String,
}

/// Finds `wanted`: a name, a number, or `USER:GROUP` of either, in the texts of passwd(5) and group(5).
/// A number needs no entry, and neither does `root`.
pub(crate) fn find(wanted: &str, passwd: &str, group: &str) -> Result<User> {
    let (name, group_name) = match wanted.split_once(':') {
        Some((name, group)) => (name, Some(group)),
        None => (wanted, None),
    };
    let entry = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|fields| {
        fields.len() >= 7 && (fields[0] == name || (name.parse::<u32>().is_ok() && fields[2] == name))
    });
    let mut user = match (entry, name.parse()) {
        (Some(fields), _) => User {
            name: fields[0].to_owned(),
            uid: number(fields[2], "/etc/passwd")?,
            gid: number(fields[3], "/etc/passwd")?,
            groups: Vec::new(),
            home: fields[5].to_owned(),
            shell: fields[6].to_owned(),
        },
        (None, Ok(uid)) => bare(name, uid),
        (None, Err(_)) if name == "root" => bare("root", 0),
        (None, Err(_)) => {
            return Err(Error::Usage(format!(
                "there is no user '{name}' in the root's /etc/passwd: give a number to do without"
            )));
        }
    };
    let groups: Vec<Vec<&str>> = group
        .lines()
        .map(|line| line.split(':').collect())
        .filter(|fields: &Vec<_>| fields.len() >= 4)
        .collect();
    for fields in &groups {
        if fields[3].split(',').any(|member| member == user.name) {
            user.groups.push(number(fields[2], "/etc/group")?);
        }
    }
    if let Some(wanted) = group_name {
        user.gid = match (groups.iter().find(|fields| fields[0] == wanted), wanted.parse()) {
            (Some(fields), _) => number(fields[2], "/etc/group")?,
            (None, Ok(gid)) => gid,
            (None, Err(_)) => {
                return Err(Error::Usage(format!("there is no group '{wanted}' in the root's /etc/group")));
            }
        };
    }
    // To setresuid(2) and setresgid(2) it means that nothing is to change.
    if [user.uid, user.gid].contains(&u32::MAX) {
        return Err(Error::Usage(format!("{} is no number of a user or a group", u32::MAX)));
    }
    user.groups.retain(|group| *group != u32::MAX);
    Ok(user)
}

fn bare(name: &str, uid: u32) -> User {
    let home = if uid == 0 { "/root" } else { "/" };
    User {
        name: name.to_owned(),
        uid,
        gid: uid,
        groups: Vec::new(),
        home: home.to_owned(),
        shell: "/bin/sh".to_owned(),
    }
}

fn number(text: &str, file: &str) -> Result<u32> {
    text.parse().map_err(|_| Error::Usage(format!("the root's {file} has '{text}' where a number belongs")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbuilder:x:1000:100:,,,:/home/b:/bin/sh\nbroken\n";
    const GROUP: &str = "root:x:0:\nusers:x:100:\nsbuild:x:120:other,builder\n";

    #[test]
    fn names_and_numbers() {
        let user = find("builder", PASSWD, GROUP).unwrap();
        assert_eq!((user.uid, user.gid, user.groups, &*user.home), (1000, 100, vec![120], "/home/b"));
        assert_eq!(find("1000", PASSWD, GROUP).unwrap().name, "builder");
        assert_eq!(find("1000:sbuild", PASSWD, GROUP).unwrap().gid, 120);
        let user = find("4711:33", PASSWD, GROUP).unwrap();
        assert_eq!((user.uid, user.gid, &*user.home), (4711, 33, "/"));
        assert_eq!(find("root", "", "").unwrap().uid, 0);
    }

    #[test]
    fn who_is_not_there() {
        assert!(matches!(find("nobody", PASSWD, GROUP), Err(Error::Usage(_))));
        assert!(matches!(find("builder:none", PASSWD, GROUP), Err(Error::Usage(_))));
        assert!(matches!(find("a", "a:x:y:0::/:/bin/sh", ""), Err(Error::Usage(_))));
        for unchanged in ["4294967295", "1000:4294967295", "4294967295:1000", "a"] {
            let passwd = "a:x:4294967295:0::/:/bin/sh";
            assert!(matches!(find(unchanged, passwd, ""), Err(Error::Usage(_))), "{unchanged}");
        }
    }
}
