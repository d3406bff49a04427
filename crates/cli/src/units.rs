//! Sizes, durations and counts as people write and read them.

use std::time::Duration;

const SUFFIXES: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];

/// Reads a size: a whole number of bytes, or one with the suffix K, M, G or T (powers of 1024; `KiB`
/// and `KB` mean the same as `K`).
///
/// # Errors
/// One sentence that says what is wrong.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let suffix = text[digits.len()..].to_ascii_uppercase();
    let number: u64 =
        digits.parse().map_err(|_| format!("'{text}' is no size: write 4096, 64K, 512M, 20G or 1T"))?;
    let shift = match suffix.as_str() {
        "" | "B" => 0,
        other => {
            let letter = other.strip_suffix("IB").or(other.strip_suffix('B')).unwrap_or(other);
            SUFFIXES
                .iter()
                .find(|(name, _)| letter == name.to_string())
                .map(|(_, shift)| *shift)
                .ok_or_else(|| format!("'{text}' has an unknown suffix: K, M, G and T are known"))?
        }
    };
    number.checked_mul(1 << shift).ok_or_else(|| format!("'{text}' is too large"))
}

/// A size for people: `17 B`, `1.5 MiB`.
pub(crate) fn show_size(bytes: u64) -> String {
    let (letter, shift) = match SUFFIXES.iter().rev().find(|(_, shift)| bytes >> shift > 0) {
        Some((letter, shift)) => (letter, shift),
        None => return format!("{bytes} B"),
    };
    let value = bytes as f64 / (1u64 << shift) as f64;
    if value < 10.0 { format!("{value:.1} {letter}iB") } else { format!("{value:.0} {letter}iB") }
}

/// A count with thousands separated: `12,345`.
pub(crate) fn show_count(count: u64) -> String {
    let digits = count.to_string();
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A time for people: `0.42 s`, `2 min 5 s`.
pub(crate) fn show_duration(duration: Duration) -> String {
    let secs = duration.as_secs_f64();
    match secs {
        secs if secs < 10.0 => format!("{secs:.2} s"),
        secs if secs < 120.0 => format!("{secs:.1} s"),
        secs => format!("{} min {} s", secs as u64 / 60, secs as u64 % 60),
    }
}

/// A moment as `2025-01-31 12:00:00 UTC`.
pub(crate) fn show_utc(secs: i64) -> String {
    let (year, month, day) = date_of(secs);
    let of_day = secs.rem_euclid(86_400);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// The year and the month, 1 to 12, of a moment, UTC.
pub(crate) fn year_and_month(secs: i64) -> (i64, i64) {
    let (year, month, _) = date_of(secs);
    (year, month)
}

/// Year, month and day of a moment (proleptic Gregorian calendar, after H. Hinnant's `civil_from_days`).
fn date_of(secs: i64) -> (i64, i64, i64) {
    let days = secs.div_euclid(86_400);
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, day)
}

/// Permission bits, octal.
pub(crate) fn parse_mode(text: &str) -> Result<u32, String> {
    match u32::from_str_radix(text, 8) {
        Ok(mode) if mode <= 0o7777 => Ok(mode),
        _ => Err(format!("'{text}' are no permission bits: write them in octal, as in 0755")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("64K", 65_536),
            ("3MiB", 3 << 20),
            ("20g", 20 << 30),
            ("1TB", 1 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "-1", "1.5G", "10 X", "99999999999T", "1KK"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn figures_read_well() {
        assert_eq!(show_size(17), "17 B");
        assert_eq!(show_size(1536 << 10), "1.5 MiB");
        assert_eq!(show_size(700 << 20), "700 MiB");
        assert_eq!(show_count(999), "999");
        assert_eq!(show_count(1_234_567), "1,234,567");
        assert_eq!(show_duration(Duration::from_millis(420)), "0.42 s");
        assert_eq!(show_duration(Duration::from_secs(125)), "2 min 5 s");
    }

    #[test]
    fn moments_are_utc() {
        assert_eq!(show_utc(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(show_utc(951_782_400), "2000-02-29 00:00:00 UTC");
        assert_eq!(show_utc(1_735_689_599), "2024-12-31 23:59:59 UTC");
    }

    #[test]
    fn permission_bits() {
        assert_eq!(parse_mode("1777"), Ok(0o1777));
        assert!(parse_mode("0o755").is_err());
    }
}
