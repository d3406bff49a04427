//! Words for people that one side has from the other: they end up on terminals, and are kept.

/// Most bytes of a snapshot's note.
pub const NOTE_MAX: usize = 4096;

/// Whether a character would do something to a terminal, or end a line there.
pub fn is_unfit(of: char) -> bool {
    // Also what turns the direction of writing, and the ends of lines of Unicode.
    of.is_control() || matches!(of, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// The words as they can be shown, with `instead` for each character that cannot, and at most so many bytes of them.
pub fn fit(words: &str, most: usize, instead: &str) -> String {
    let end = words.char_indices().map(|(at, of)| at + of.len_utf8()).take_while(|end| *end <= most).last();
    words[..end.unwrap_or(0)].replace(is_unfit, instead)
}
