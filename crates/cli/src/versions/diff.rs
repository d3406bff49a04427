//! `hayloft diff`.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Diff, Difference, Differences, Version, difference};
use serde_json::{Value, json};

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::server::admin::Admin;
use crate::units::{show_count, show_size};
use crate::versions::args::DiffArgs;
use crate::versions::mounted::Mounted;

/// What has changed, with the words for it.
const BITS: [(u32, &str); 6] = [
    (difference::CONTENT, "content"),
    (difference::MODE, "mode"),
    (difference::OWNER, "owner"),
    (difference::XATTRS, "xattrs"),
    (difference::TYPE, "type"),
    (difference::LINKS, "links"),
];

/// How a path has come to differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Added,
    Removed,
    Changed,
    Renamed,
}

impl How {
    fn of(difference: &Difference) -> How {
        match (&difference.old_path, &difference.new_path) {
            (None, _) => How::Added,
            (_, None) => How::Removed,
            _ if difference.changed & difference::RENAMED != 0 => How::Renamed,
            _ => How::Changed,
        }
    }

    fn letter(self) -> char {
        match self {
            How::Added => 'A',
            How::Removed => 'D',
            How::Changed => 'M',
            How::Renamed => 'R',
        }
    }

    fn word(self) -> &'static str {
        match self {
            How::Added => "added",
            How::Removed => "removed",
            How::Changed => "changed",
            How::Renamed => "renamed",
        }
    }
}

/// What differs between two versions, in a folder or in all, and how many rows were read for it.
///
/// # Errors
/// They are not of one family; what the server refuses.
pub(crate) fn differences(
    admin: &mut Admin,
    from: &Version,
    to: &Version,
    below: Vec<u8>,
) -> anyhow::Result<(Vec<Difference>, u64)> {
    let ask = Diff { from: Some(from.clone()), to: Some(to.clone()), below: below.into(), times: false };
    let (found, rows_read, _) = asked(admin, ask)?;
    Ok((found, rows_read))
}

/// What differs, and whether the second version came of the first one, if the server knows.
pub(crate) struct Told {
    pub(crate) differences: Vec<Difference>,
    pub(crate) descends: Option<bool>,
}

/// As [`differences`], and also what has only been modified at another time. `None`: the server cannot tell that.
///
/// # Errors
/// As there.
pub(crate) fn with_times(admin: &mut Admin, from: &Version, to: &Version) -> anyhow::Result<Option<Told>> {
    let ask = Diff { from: Some(from.clone()), to: Some(to.clone()), times: true, ..Diff::default() };
    let (differences, _, last) = asked(admin, ask)?;
    Ok(last.times.then_some(Told { differences, descends: last.descends }))
}

/// What differs, how many rows were read, and what else is said.
fn asked(admin: &mut Admin, ask: Diff) -> anyhow::Result<(Vec<Difference>, u64, Differences)> {
    let (mut found, mut rows_read) = (Vec::new(), 0);
    let mut answer = admin.ask(Ask::Diff(ask))?;
    loop {
        let Answer::Differences(mut part) = answer else { return Err(admin.unexpected()) };
        found.append(&mut part.differences);
        rows_read += part.rows_read;
        if !part.more {
            return Ok((found, rows_read, part));
        }
        answer = admin.next_part()?;
    }
}

/// Runs the command.
///
/// # Errors
/// What the server refuses; an unreachable server; versions that cannot be mounted, for `--patch`.
pub(crate) fn run(args: &DiffArgs, config: &Config) -> anyhow::Result<u8> {
    let server = args.at.server(config);
    let now = || Version { volume: args.from.volume.clone(), snapshot: String::new() };
    let to = args.to.clone().unwrap_or_else(now);
    let mut admin = Admin::connect(server)?;
    let below = args.below.as_deref().unwrap_or(Path::new("")).components();
    let below: PathBuf = below.filter(|part| matches!(part, Component::Normal(_))).collect();
    let below = below.into_os_string().into_encoded_bytes();
    let (found, rows_read) = differences(&mut admin, &args.from, &to, below)?;
    let mut out = BufWriter::new(io::stdout().lock());
    let written = if args.at.json {
        writeln!(
            out,
            "{}",
            json!({ "differences": found.iter().map(to_json).collect::<Vec<_>>(), "rows_read": rows_read })
        )
    } else if args.stat {
        stat(&mut out, &found)
    } else if args.patch {
        let sides = Mounted::all(server, [&args.from, &to], "ro")?;
        return patch(&mut out, &found, &sides).map(|()| 0);
    } else {
        found.iter().try_for_each(|difference| writeln!(out, "{}", line(difference)))
    };
    match written.and_then(|()| out.flush()) {
        // Whoever reads it has had enough.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(0),
        written => Ok(written.map(|()| 0)?),
    }
}

/// A path on a line: what would end it, or change a terminal, is escaped.
pub(crate) fn shown(path: &[u8]) -> String {
    match path {
        [] => ".".to_owned(),
        path if path.iter().any(|byte| *byte < b' ' || *byte == 127)
            || std::str::from_utf8(path).is_err() =>
        {
            path.escape_ascii().to_string()
        }
        path => String::from_utf8_lossy(path).into_owned(),
    }
}

fn words(difference: &Difference) -> Vec<&'static str> {
    BITS.into_iter().filter(|(bit, _)| difference.changed & bit != 0).map(|(_, word)| word).collect()
}

fn line(difference: &Difference) -> String {
    let path = |path: &Option<prost::bytes::Bytes>| shown(path.as_deref().unwrap_or_default());
    let how = How::of(difference);
    let names = match how {
        How::Renamed => format!("{} -> {}", path(&difference.old_path), path(&difference.new_path)),
        How::Removed => path(&difference.old_path),
        How::Added | How::Changed => path(&difference.new_path),
    };
    match words(difference) {
        words if words.is_empty() => format!("{} {names}", how.letter()),
        words => format!("{} {names} ({})", how.letter(), words.join(", ")),
    }
}

fn to_json(difference: &Difference) -> Value {
    let path = |path: &Option<prost::bytes::Bytes>| {
        path.as_deref().map(|path| String::from_utf8_lossy(path).into_owned())
    };
    let side = |path: Option<String>, mode: u32, size: u64| {
        path.map(|path| json!({ "path": path, "mode": format!("{mode:o}"), "size": size }))
    };
    json!({
        "kind": How::of(difference).word(),
        "old": side(path(&difference.old_path), difference.old_mode, difference.old_size),
        "new": side(path(&difference.new_path), difference.new_mode, difference.new_size),
        "changed": words(difference),
    })
}

fn stat(out: &mut impl Write, found: &[Difference]) -> io::Result<()> {
    for how in [How::Added, How::Removed, How::Changed, How::Renamed] {
        let of_it = || found.iter().filter(|difference| How::of(difference) == how);
        let (old, new) = of_it()
            .fold((0, 0), |(old, new), difference| (old + difference.old_size, new + difference.new_size));
        let count = of_it().count() as u64;
        let bytes = match how {
            How::Added => format!("{} of content", show_size(new)),
            How::Removed => format!("{} of content", show_size(old)),
            _ => format!("{} of content before, {} after", show_size(old), show_size(new)),
        };
        writeln!(out, "{:8} {:>10}  ({bytes})", how.word(), show_count(count))?;
    }
    Ok(())
}

/// Text files as diff(1) shows them; all else in a line.
fn patch(out: &mut impl Write, found: &[Difference], sides: &[Mounted]) -> anyhow::Result<()> {
    let is_file = |mode: u32| mode & 0o170_000 == 0o100_000;
    for difference in found {
        let (old, new) = (difference.old_path.as_deref(), difference.new_path.as_deref());
        let is_text = [(old, difference.old_mode), (new, difference.new_mode)]
            .into_iter()
            .all(|(path, mode)| path.is_none() || is_file(mode));
        let same = old.is_some() && new.is_some() && difference.changed & difference::CONTENT == 0;
        writeln!(out, "{}", line(difference))?;
        if !is_text || same {
            continue;
        }
        let side = |at: usize, path: Option<&[u8]>| -> io::Result<(File, String)> {
            Ok(match path {
                Some(path) => {
                    let file = hayloft_tree::file_below(sides[at].path(), path)?;
                    (file, format!("{}/{}", sides[at].label(), shown(path)))
                }
                None => (File::open("/dev/null")?, "/dev/null".to_owned()),
            })
        };
        let ((old, old_label), (new, new_label)) = (side(0, old)?, side(1, new)?);
        // Paths may be longer than a program can open.
        let [old, new] =
            [&old, &new].map(|file| format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()));
        out.flush()?;
        let told = Command::new("diff")
            .args(["-u", "--label", &old_label, "--label", &new_label])
            .args([&old, &new])
            .output()
            .map_err(|_| {
                failure(Exit::Missing, "there is no diff program here: install diffutils".to_owned())
            })?;
        out.write_all(&told.stdout)?;
        if told.status.code() == Some(2) {
            return Err(failure(Exit::Failed, String::from_utf8_lossy(&told.stderr).trim_end().to_owned()));
        }
    }
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_says_how_a_path_differs() {
        let path = |path: &'static str| Some(prost::bytes::Bytes::from_static(path.as_bytes()));
        let of =
            |old, new, changed| Difference { old_path: old, new_path: new, changed, ..Difference::default() };
        for (difference, wanted) in [
            (of(None, path("a"), 0), "A a"),
            (of(path("a"), None, 0), "D a"),
            (of(path("a"), path("a"), difference::CONTENT | difference::MODE), "M a (content, mode)"),
            (of(path("a"), path("b"), difference::RENAMED), "R a -> b"),
            (of(path("a/x"), path("b/x"), difference::CONTENT), "M b/x (content)"),
            (of(path(""), path(""), difference::OWNER), "M . (owner)"),
            (of(None, path("a\nb"), 0), "A a\\nb"),
        ] {
            assert_eq!(line(&difference), wanted);
        }
    }
}
