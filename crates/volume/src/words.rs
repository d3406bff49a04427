//! Words of clients that are for people: they end up on terminals and in the database, and are kept for each session.

use hayloft_wire::Hello;
use hayloft_wire::words::{NOTE_MAX, fit as fit_words, is_unfit};

use crate::error::VolumeError;

/// Bytes of the name of a host, of a release, and of what tells a host from others.
const NAME_MAX: usize = 255;

/// Bytes of a path.
const PATH_MAX: usize = 4096;

/// Bytes of what a client goes on with its session by.
const TOKEN_MAX: usize = 64;

/// The words as they can be shown, and not too many of them.
fn shown(words: &str, most: usize) -> String {
    fit_words(words, most, "?")
}

/// A hello of which the words for people can be shown and kept.
///
/// # Errors
/// It has a token that no client makes.
pub(crate) fn fit(hello: Hello) -> Result<Hello, VolumeError> {
    if hello.token.len() > TOKEN_MAX {
        return Err(VolumeError::Invalid("a token of too many bytes"));
    }
    Ok(Hello {
        host_id: shown(&hello.host_id, NAME_MAX),
        host_name: shown(&hello.host_name, NAME_MAX),
        release: shown(&hello.release, NAME_MAX),
        mount_point: shown(&hello.mount_point, PATH_MAX),
        ..hello
    })
}

/// # Errors
/// The note cannot be shown, or is too long.
pub(crate) fn check_note(note: &str) -> Result<(), VolumeError> {
    match note.len() <= NOTE_MAX && !note.contains(is_unfit) {
        true => Ok(()),
        false => Err(VolumeError::Invalid("a note has at most 4,096 bytes, and no control characters")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_cut_between_characters_and_do_nothing_to_a_terminal() {
        assert_eq!(shown("build1", 255), "build1");
        assert_eq!(shown("a\u{1b}[2Jb\nc\u{202e}d", 255), "a?[2Jb?c?d");
        assert_eq!(shown("äöü", 3), "ä");
        assert_eq!(shown("", 3), "");
        assert_eq!(shown("xy", 0), "");
        assert!(check_note("before the update").is_ok() && check_note("a\rb").is_err());
        assert!(check_note(&"n".repeat(NOTE_MAX + 1)).is_err());
    }
}
