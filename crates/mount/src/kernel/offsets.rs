//! Offsets of directories, as programs see them.
//!
//! A name's place in its directory (its cookie) has up to 53 bits: of a split directory it is a number apart from those that
//! are counted (`hayloft_model::slot::FIRST_COOKIE`). Programs of 32 bits that were not built for large files end a listing
//! with EOVERFLOW at an offset of more than 31 bits. So both kinds are put below 2^31 as long as they fit there.

use hayloft_model::slot::FIRST_COOKIE as FIRST_OF_SPLIT;

/// So many places of each kind have a low offset.
const LOW: u64 = 1 << 30;

/// What others are moved by, out of the way of the low ones.
const HIGH: u64 = 1 << 53;

/// The offset of a place.
pub(crate) fn offset_of(cookie: u64) -> u64 {
    match cookie.checked_sub(FIRST_OF_SPLIT) {
        Some(number) if number < LOW => LOW + number,
        None if cookie < LOW => cookie,
        // The kernel's offsets have 63 bits, and no honest client makes such places.
        _ => (HIGH + cookie).min(i64::MAX as u64),
    }
}

/// The place that has this offset. Of offsets that were never told the next place counts that may come behind.
pub(crate) fn cookie_at(offset: u64) -> u64 {
    if offset < LOW {
        offset
    } else if offset < 2 * LOW {
        FIRST_OF_SPLIT + (offset - LOW)
    } else {
        offset.saturating_sub(HIGH).max(LOW)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_place_has_an_offset_of_its_own_and_the_first_ones_a_low_one() {
        let edges =
            [0, 1, 2, LOW - 1, LOW, 2 * LOW, FIRST_OF_SPLIT - 1, FIRST_OF_SPLIT, FIRST_OF_SPLIT + LOW];
        let last = FIRST_OF_SPLIT + (1 << 48) - 1;
        for cookie in edges.into_iter().flat_map(|edge| [edge, edge + 1]).chain([last]) {
            let offset = offset_of(cookie);
            // So no two have the same.
            assert_eq!(cookie_at(offset), cookie);
            assert!(offset <= i64::MAX as u64);
        }
        for cookie in [0, 3, LOW - 1, FIRST_OF_SPLIT, FIRST_OF_SPLIT + LOW - 1] {
            assert!(offset_of(cookie) <= i32::MAX as u64);
        }
        assert!(cookie_at(u64::MAX) > FIRST_OF_SPLIT && cookie_at(1 << 40) >= LOW);
    }
}
