//! Recipes for which make starts no shell.
//!
//! A line of plain words make runs itself, when the shell is the default one: `echo -e x` is then the program of that name, not what the shell
//! has built in, and no shell has to be started. With `.SHELLFLAGS` of our own it leaves every line to the shell. So what it would have done is
//! done here, by its own rules (`construct_command_argv_internal` in job.c of GNU make 4.3 and 4.4).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// Characters that make leaves to the shell; and line ends, which it does not leave in all cases.
const OF_SHELLS: &[u8] = b"#;\"*?[]&|<>(){}$`^~!\n";

/// Commands that make leaves to the shell.
const BUILT_IN: [&str; 37] = [
    ".", ":", "alias", "bg", "break", "case", "cd", "command", "continue", "eval", "exec", "exit", "export",
    "fc", "fg", "for", "getopts", "hash", "if", "jobs", "login", "logout", "read", "readonly", "return",
    "set", "shift", "test", "times", "trap", "type", "ulimit", "umask", "unalias", "unset", "wait", "while",
];

/// What make would run without a shell for this command: the shell, its flags and a recipe, with this value of `IFS`. None where the shell is
/// needed.
pub(super) fn words(command: &[OsString], ifs: Option<&OsStr>) -> Option<Vec<OsString>> {
    let [shell, flags, recipe] = command else { return None };
    let is_default = shell == "/bin/sh" && (flags == "-c" || flags == "-ec");
    let is_blank = |ifs: &OsStr| ifs.as_bytes().iter().all(|byte| b" \t\n".contains(byte));
    let divides_as_ever = ifs.is_none_or(is_blank);
    if is_default && divides_as_ever { split(recipe.as_bytes()) } else { None }
}

fn split(recipe: &[u8]) -> Option<Vec<OsString>> {
    let mut words: Vec<OsString> = Vec::new();
    // What has come of a word; none between words.
    let mut word: Option<Vec<u8>> = None;
    let mut bytes = recipe.iter().copied();
    while let Some(byte) = bytes.next() {
        match byte {
            b' ' | b'\t' => words.extend(word.take().map(OsString::from_vec)),
            b'\'' => {
                let word = word.get_or_insert_default();
                loop {
                    match bytes.next()? {
                        b'\'' => break,
                        byte => word.push(byte),
                    }
                }
            }
            b'\\' => {
                let next = bytes.next();
                if next == Some(b'\n') {
                    return None;
                }
                word.get_or_insert_default().extend(next);
            }
            // A variable for the command.
            b'=' if words.is_empty() => return None,
            byte if OF_SHELLS.contains(&byte) => return None,
            byte => word.get_or_insert_default().push(byte),
        }
    }
    words.extend(word.map(OsString::from_vec));
    let first = words.first()?;
    (!BUILT_IN.iter().any(|name| first == name)).then_some(words)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::testing::write_program;

    #[test]
    fn plain_words_need_no_shell_that_is_the_default_one() {
        let is_plain = |shell: &str, flags: &str, recipe: &str| {
            words(&[shell.into(), flags.into(), recipe.into()], None).is_some()
        };
        assert!(is_plain("/bin/sh", "-c", "cc -c x.c") && is_plain("/bin/sh", "-ec", "cc -c x.c"));
        assert!(!is_plain("/bin/bash", "-c", "cc -c x.c") && !is_plain("/bin/sh", "-xc", "cc -c x.c"));
        for recipe in ["cd x", "test -e x", ": x", "X=1", "X=1 cc", "cc 'x", "", " "] {
            assert!(!is_plain("/bin/sh", "-c", recipe), "{recipe}");
        }
    }

    /// A program of the name of something that shells have built in tells who has run it.
    #[test]
    fn make_that_is_installed_divides_in_the_same_way() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("printf");
        write_program(&program, "#!/bin/sh\necho program\nfor word; do printf '<%s>\\n' \"$word\"; done\n");
        let path = format!("{}:{}", dir.path().display(), std::env::var("PATH").unwrap());
        let recipes = [
            "printf a b",
            "printf 'a b;$c' c\t d ",
            "printf a\\ b \\'",
            "printf '' x ''",
            "printf a=b",
            "printf a'b'c",
            "printf 'a\\tb'",
            "X=y printf a",
            "X='a b' printf x",
            "printf \"a\"",
            "printf a*",
            "printf ~",
            "printf x#y",
            "printf 'a' # b",
            "printf x;true",
            "'printf' x",
            "pri\\ntf x",
            "printf {a,b}",
            "printf %s a!b",
        ];
        for recipe in recipes {
            std::fs::write(dir.path().join("Makefile"), format!("all:\n\t@{}\n", recipe.replace('$', "$$")))
                .unwrap();
            let mut make = Command::new("make");
            make.current_dir(dir.path()).env("PATH", &path).env_remove("MAKEFLAGS").env_remove("MAKELEVEL");
            let said = String::from_utf8(make.output().unwrap().stdout).unwrap();
            let by_program = |words: Vec<OsString>| {
                let lines = words[1..].iter().map(|word| format!("<{}>\n", word.to_str().unwrap()));
                format!("program\n{}", lines.collect::<String>())
            };
            match split(recipe.as_bytes()) {
                Some(words) => assert_eq!(said, by_program(words), "{recipe}"),
                None => assert!(!said.starts_with("program"), "{recipe}: {said}"),
            }
        }
    }
}
