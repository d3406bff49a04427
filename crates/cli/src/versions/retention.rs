//! Which snapshots are kept: the last one of each of so many hours, days, weeks and months.

use std::collections::BTreeSet;

/// A span of time of which one snapshot is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Span {
    Hour,
    Day,
    Week,
    Month,
}

impl Span {
    /// The number of the span that a moment lies in, seconds since the epoch, UTC.
    fn of(self, secs: i64) -> i64 {
        let days = secs.div_euclid(86_400);
        match self {
            Span::Hour => secs.div_euclid(3600),
            Span::Day => days,
            // The epoch was a Thursday; weeks begin with Monday.
            Span::Week => (days + 3).div_euclid(7),
            Span::Month => {
                let (year, month) = crate::units::year_and_month(secs);
                year * 12 + month
            }
        }
    }
}

/// What to keep, as in `24h,7d,4w,12m`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Keep(Vec<(usize, Span)>);

impl std::str::FromStr for Keep {
    type Err = String;

    fn from_str(text: &str) -> Result<Keep, String> {
        let part = |part: &str| {
            let (count, span) = part.trim().split_at_checked(part.trim().len().saturating_sub(1))?;
            let span = match span {
                "h" => Span::Hour,
                "d" => Span::Day,
                "w" => Span::Week,
                "m" => Span::Month,
                _ => return None,
            };
            Some((count.parse().ok().filter(|count| *count > 0)?, span))
        };
        let parts: Option<Vec<_>> = text.split(',').map(part).collect();
        parts.map(Keep).ok_or_else(|| {
            "write how many hours, days, weeks and months to keep one of each, as in 24h,7d,4w,12m".to_owned()
        })
    }
}

impl Keep {
    /// Which of these moments, seconds since the epoch, are not kept. Of a span the last one is; spans without a snapshot do not
    /// count. The last one of all is always kept.
    pub(crate) fn superfluous(&self, moments: &[i64]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..moments.len()).collect();
        order.sort_by_key(|at| std::cmp::Reverse((moments[*at], *at)));
        let mut kept: BTreeSet<usize> = order.first().copied().into_iter().collect();
        for (count, span) in &self.0 {
            let mut seen = Vec::new();
            for at in &order {
                let of = span.of(moments[*at]);
                if seen.last() == Some(&of) {
                    continue;
                }
                if seen.len() == *count {
                    break;
                }
                seen.push(of);
                kept.insert(*at);
            }
        }
        (0..moments.len()).filter(|at| !kept.contains(at)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 86_400;
    /// Monday, the 4th of January 2021, at midnight.
    const MONDAY: i64 = 18_631 * DAY;

    fn left(keep: &str, moments: &[i64]) -> Vec<i64> {
        let gone = keep.parse::<Keep>().unwrap().superfluous(moments);
        moments.iter().enumerate().filter(|(at, _)| !gone.contains(at)).map(|(_, moment)| *moment).collect()
    }

    #[test]
    fn the_last_one_of_each_span_is_kept() {
        let twice_a_day: Vec<i64> = (0..20).map(|half| MONDAY + half * DAY / 2).collect();
        assert_eq!(left("3d", &twice_a_day), [15, 17, 19].map(|half| MONDAY + half * DAY / 2));
        assert_eq!(left("1w,1d", &twice_a_day), [MONDAY + 19 * DAY / 2]);
        assert_eq!(left("2w", &twice_a_day), [13, 19].map(|half| MONDAY + half * DAY / 2));
        assert_eq!(left("2h", &twice_a_day), [18, 19].map(|half| MONDAY + half * DAY / 2));
        // January and February: the 27th day from MONDAY on is the 31st.
        let months = [MONDAY, MONDAY + 27 * DAY, MONDAY + 28 * DAY, MONDAY + 30 * DAY];
        assert_eq!(left("2m", &months), [MONDAY + 27 * DAY, MONDAY + 30 * DAY]);
        assert_eq!(left("9d", &[]), [0_i64; 0]);
        assert_eq!(left("1d", &[MONDAY, MONDAY]).len(), 1);
    }

    #[test]
    fn what_to_keep_is_written_in_one_way() {
        for wrong in ["", "d", "0d", "7", "7y", "7d,", "-1d", "7d 4w"] {
            wrong.parse::<Keep>().unwrap_err();
        }
        assert_eq!("7d, 4w".parse::<Keep>().unwrap(), Keep(vec![(7, Span::Day), (4, Span::Week)]));
    }
}
