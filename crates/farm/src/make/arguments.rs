//! The arguments of make: how many jobs.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Options of one letter that take a value: what follows the letter belongs to it.
const WITH_VALUE: &[u8] = b"CEfIloOW";

/// Gives `-j` without a number this one: without any number make starts no job server, by which sub-makes share what there is.
pub fn with_jobs(arguments: &[OsString], jobs: usize) -> Vec<OsString> {
    let is_number = |argument: Option<&OsString>| {
        argument.is_some_and(|argument| {
            let bytes = argument.as_bytes();
            !bytes.is_empty() && bytes.iter().all(u8::is_ascii_digit)
        })
    };
    let mut all = Vec::new();
    let mut is_over = false;
    for (at, argument) in arguments.iter().enumerate() {
        is_over |= argument == OsStr::new("--");
        let bytes = argument.as_bytes();
        let is_jobs = bytes == b"--jobs" || ends_in_j(bytes);
        if is_over || !is_jobs || is_number(arguments.get(at + 1)) {
            all.push(argument.clone());
        } else if bytes == b"--jobs" {
            all.push(format!("--jobs={jobs}").into());
        } else {
            all.push(OsString::from_vec([bytes, jobs.to_string().as_bytes()].concat()));
        }
    }
    all
}

/// The arguments of a make that runs one job at a time.
pub fn without_jobs(arguments: &[OsString]) -> Vec<OsString> {
    let with = with_jobs(arguments, 1);
    let is_over = with.iter().position(|argument| argument == OsStr::new("--")).unwrap_or(with.len());
    let mut all = with[..is_over].to_vec();
    all.push("-j1".into());
    all.extend_from_slice(&with[is_over..]);
    all
}

/// Whether these are options of one letter, the last of which is `j`.
fn ends_in_j(argument: &[u8]) -> bool {
    let Some((b'j', letters)) = argument.strip_prefix(b"-").and_then(<[u8]>::split_last) else {
        return false;
    };
    letters.iter().all(|letter| letter.is_ascii_alphabetic() && !WITH_VALUE.contains(letter))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_j_without_a_number_gets_one() {
        let with = |text: &str| {
            let arguments: Vec<OsString> = text.split(' ').map(OsString::from).collect();
            with_jobs(&arguments, 9).join(OsStr::new(" ")).into_string().unwrap()
        };
        assert_eq!(with("-j -- all"), "-j9 -- all");
        assert_eq!(with("-kj all"), "-kj9 all");
        assert_eq!(with("-j 4 all"), "-j 4 all");
        assert_eq!(with("-j4 all"), "-j4 all");
        assert_eq!(with("--jobs --jobs=3"), "--jobs=9 --jobs=3");
        assert_eq!(with("-fj -C x -- -j"), "-fj -C x -- -j");
        let one = without_jobs(&["-j".into(), "-k".into(), "--".into(), "all".into()]);
        assert_eq!(one.join(OsStr::new(" ")), "-j1 -k -j1 -- all");
    }
}
