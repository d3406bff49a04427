//! What differs between two trees that were read.

use std::cmp::Ordering;

use crate::name::{Body, Kind};
use crate::walk::{Entry, Walked};

/// A path at which two trees differ.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Difference {
    /// Where, relative to the tops.
    pub path: Vec<u8>,
    /// How.
    pub how: How,
}

/// How trees differ at a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum How {
    /// It is in the second one only.
    Added,
    /// It is in the first one only.
    Missing,
    /// In both, but with another: `type`, `content`, `mode`, `owner`, `xattrs`, `device`.
    Changed(Vec<&'static str>),
}

/// What is wanted is the first one, and what is there the second one.
pub fn compare(wanted: &Walked, found: &Walked) -> Vec<Difference> {
    let (mut wanted, mut found) = (wanted.entries.iter().peekable(), found.entries.iter().peekable());
    let mut differences = Vec::new();
    loop {
        let order = match (wanted.peek(), found.peek()) {
            (None, None) => return differences,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(wanted), Some(found)) => wanted.path.cmp(&found.path),
        };
        let one = if order.is_le() { wanted.next() } else { None };
        let other = if order.is_ge() { found.next() } else { None };
        let how = match (one, other) {
            (Some(wanted), Some(found)) if wanted.node == found.node => continue,
            (Some(wanted), Some(found)) => match changed(wanted, found) {
                // A directory in which something differs.
                words if words.is_empty() => continue,
                words => How::Changed(words),
            },
            (Some(_), None) => How::Missing,
            (None, _) => How::Added,
        };
        let path = one.or(other).map(|entry| entry.path.clone()).unwrap_or_default();
        differences.push(Difference { path, how });
    }
}

fn changed(wanted: &Entry, found: &Entry) -> Vec<&'static str> {
    let (one, other) = (&wanted.attributes, &found.attributes);
    const PERMISSIONS: u32 = 0o7777;
    let is_special = Kind::of(one.mode) == Kind::Special;
    let content = match (&wanted.body, &found.body) {
        (Body::Directory(_), _) | (_, Body::Directory(_)) => false,
        (one, other) => one != other,
    };
    let words = [
        (one.mode & !PERMISSIONS != other.mode & !PERMISSIONS, "type"),
        (content, "content"),
        (one.mode & PERMISSIONS != other.mode & PERMISSIONS, "mode"),
        ((one.uid, one.gid) != (other.uid, other.gid), "owner"),
        (one.xattrs != other.xattrs, "xattrs"),
        (is_special && one.rdev != other.rdev, "device"),
    ];
    words.into_iter().filter(|(is_so, _)| *is_so).map(|(_, word)| word).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::walk::{Progress, walk};

    #[test]
    fn each_path_that_differs_is_named_with_how() {
        let [one, two] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        for top in [one.path(), two.path()] {
            fs::create_dir_all(top.join("dir/same")).unwrap();
            fs::write(top.join("dir/content"), "a").unwrap();
            fs::write(top.join("dir/mode"), "a").unwrap();
            fs::write(top.join("dir-beside"), "a").unwrap();
        }
        fs::write(one.path().join("gone"), "").unwrap();
        fs::write(two.path().join("dir/same/new"), "").unwrap();
        fs::write(two.path().join("dir/content"), "b").unwrap();
        fs::set_permissions(two.path().join("dir/mode"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::remove_file(two.path().join("dir-beside")).unwrap();
        fs::create_dir(two.path().join("dir-beside")).unwrap();
        let [one, two] = [one, two].map(|dir| walk(dir.path(), &Progress::default()).unwrap());
        let said: Vec<String> = compare(&one, &two)
            .iter()
            .map(|found| format!("{} {:?}", String::from_utf8_lossy(&found.path), found.how))
            .collect();
        assert_eq!(
            said,
            [
                "dir-beside Changed([\"type\", \"content\", \"mode\"])",
                "dir/content Changed([\"content\"])",
                "dir/mode Changed([\"mode\"])",
                "dir/same/new Added",
                "gone Missing",
            ]
        );
        assert!(compare(&one, &one).is_empty());
    }
}
