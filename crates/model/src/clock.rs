//! How clocks follow each other: a server's time its system's clock, a client's time that of the server. Nothing is read here: what
//! the clocks say is an argument, in nanoseconds.

/// A time that is ahead of the clock by at most this is one of a host whose clock is a little off: times wait for it. One that is
/// ahead by more comes from a clock that was wrong.
pub const LEAD_MAX: i64 = 5_000_000_000;

/// Up to this the system's clock is followed little by little.
const SLEW_MAX: i64 = 500_000_000;
/// How much faster or slower than real time that makes it: a part of so many.
const SLEW_PART: i64 = 10;
/// How long a clock that was set has to keep to its new time before it is followed.
const FOLLOWED_AFTER: i64 = 20_000_000_000;
/// The same when it is back where it was before it was followed the last time.
const RETURNS_AFTER: i64 = 3_000_000_000;

/// A server's time. It goes with a clock that nobody can set, and follows the system's clock: small differences little by little, and a
/// clock that was set when it has kept to that for a while.
#[derive(Clone, Copy, Debug)]
pub struct SteadyClock {
    /// From the clock that nobody sets to the time.
    offset: i64,
    /// The offset before the last step.
    before: i64,
    /// What the system's clock says instead, and since when.
    wanted: Option<(i64, i64)>,
    looked: i64,
}

impl SteadyClock {
    /// Begins with what the system's clock says.
    pub fn new(steady: i64, system: i64) -> SteadyClock {
        let offset = system - steady;
        SteadyClock { offset, before: offset, wanted: None, looked: steady }
    }

    /// The time, when the two clocks say this. To be asked every few seconds, or a clock that is set looks as if it had been just now.
    pub fn now(&mut self, steady: i64, system: i64) -> i64 {
        let offset = system - steady;
        let away = offset - self.offset;
        if away.abs() <= SLEW_MAX {
            let most = (steady - self.looked).max(0) / SLEW_PART;
            self.offset += away.clamp(-most, most);
            self.wanted = None;
        } else {
            let kept = self.wanted.filter(|(wanted, _)| (offset - wanted).abs() <= SLEW_MAX);
            let (wanted, since) = kept.unwrap_or((offset, steady));
            let returns = (offset - self.before).abs() <= SLEW_MAX;
            let patience = if returns { RETURNS_AFTER } else { FOLLOWED_AFTER };
            if steady - since >= patience {
                (self.before, self.offset, self.wanted) = (self.offset, offset, None);
            } else {
                self.wanted = Some((wanted, since));
            }
        }
        self.looked = steady;
        self.offset + steady
    }
}

/// A client's idea of the server's time, by a clock that nobody can set. It is the host's own time as long as nothing that the server
/// said contradicts that: then no file has a time that is ahead of its host's clock, which programs take for a wrong clock.
#[derive(Clone, Copy, Debug)]
pub struct DistantClock {
    offset: i64,
    /// What the server's words leave open: the least and the most that the offset can be.
    possible: Option<(i64, i64)>,
}

impl DistantClock {
    /// Before there is word from the server: by the system's clock.
    pub fn new(steady: i64, system: i64) -> DistantClock {
        DistantClock { offset: system - steady, possible: None }
    }

    /// The server said `server` at some moment between `sent` and `received`, when this host's own clock was `own` ahead of the one that
    /// nobody can set. Where the own one cannot be right, what is known already is changed as little as possible: a slow answer moves
    /// nothing that a fast one has shown.
    pub fn hear(&mut self, server: i64, sent: i64, received: i64, own: i64) {
        let (least, most) = (server - received, server - sent.min(received));
        let known = self.possible.map(|(low, high)| (low.max(least), high.min(most)));
        let (low, high) = known.filter(|(low, high)| low <= high).unwrap_or((least, most));
        self.offset = match self.possible {
            _ if (low..=high).contains(&own) => own,
            Some(_) => self.offset.clamp(low, high),
            None => low + (high - low) / 2,
        };
        self.possible = Some((low, high));
    }

    /// The time.
    pub fn now(&self, steady: i64) -> i64 {
        self.offset + steady
    }
}

/// Times that are told one after the other: each is later than the one before, unless the clock has been set back by more than
/// [`LEAD_MAX`].
#[derive(Clone, Copy, Debug, Default)]
pub struct GrowingTime {
    last: i64,
}

impl GrowingTime {
    /// The time to tell when the clock says `now`.
    pub fn next(&mut self, now: i64) -> i64 {
        let waits = (0..=LEAD_MAX).contains(&(self.last - now));
        self.last = if waits { self.last + 1 } else { now };
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: i64 = 1_000_000_000;
    const HOUR: i64 = 3600 * SECOND;

    /// Looks every tenth of a second for so many seconds, while the system's clock is off by `error`. Gives how far the time is off
    /// at the end.
    fn look(clock: &mut SteadyClock, at: &mut i64, seconds: i64, error: i64) -> i64 {
        let mut now = 0;
        for _ in 0..seconds * 10 {
            *at += SECOND / 10;
            now = clock.now(*at, *at + error);
        }
        now - *at
    }

    #[test]
    fn a_clock_that_is_wrong_for_a_moment_changes_nothing() {
        let (mut clock, mut at) = (SteadyClock::new(7, 7), 7);
        for error in [HOUR, -HOUR, 2 * SECOND] {
            assert_eq!(look(&mut clock, &mut at, 10, error), 0);
            assert_eq!(look(&mut clock, &mut at, 1, 0), 0);
        }
    }

    #[test]
    fn a_clock_that_stays_is_followed_and_a_return_soon() {
        let (mut clock, mut at) = (SteadyClock::new(0, 0), 0);
        assert_eq!(look(&mut clock, &mut at, 21, HOUR), HOUR);
        assert_eq!(look(&mut clock, &mut at, 4, 0), 0);
        assert_eq!(look(&mut clock, &mut at, 21, -HOUR), -HOUR);
        assert_eq!(look(&mut clock, &mut at, 4, 0), 0);
    }

    #[test]
    fn small_differences_are_followed_without_a_step() {
        let (mut clock, mut at) = (SteadyClock::new(0, 0), 0);
        let mut last = 0;
        for _ in 0..100 {
            at += SECOND / 10;
            let now = clock.now(at, at - SECOND / 2);
            assert!(now - last >= SECOND / 12, "{now} after {last}");
            last = now;
        }
        assert_eq!(last - at, -SECOND / 2);
    }

    #[test]
    fn a_client_is_where_the_server_is_after_a_word() {
        let mut clock = DistantClock::new(0, 5 * HOUR);
        clock.hear(HOUR, 0, 200, 5 * HOUR);
        assert_eq!(clock.now(1000), HOUR + 900);
        // A slow answer says less than what is known.
        clock.hear(HOUR + SECOND / 2, 0, SECOND, 5 * HOUR);
        assert_eq!(clock.now(1000), HOUR + 900);
        clock.hear(2 * HOUR, 10_000, 10_200, 5 * HOUR);
        assert!((clock.now(10_100) - 2 * HOUR).abs() <= 100);
    }

    #[test]
    fn a_client_goes_by_its_own_clock_where_the_server_may_say_the_same() {
        let mut clock = DistantClock::new(0, HOUR);
        clock.hear(HOUR + 30, 0, 200, HOUR);
        assert_eq!(clock.now(1000), HOUR + 1000);
        // An answer that leaves less open shows that the own clock is behind, and a slow one after it changes nothing in that.
        clock.hear(HOUR + 1150, 1000, 1100, HOUR);
        assert_eq!(clock.now(2000), HOUR + 2050);
        clock.hear(HOUR + 3000, 2000, 4000, HOUR);
        assert_eq!(clock.now(5000), HOUR + 5050);
        // The server's clock, or the own one, has been put right.
        clock.hear(HOUR + 6000, 6000, 6100, HOUR);
        assert_eq!(clock.now(7000), HOUR + 7000);
    }

    proptest! {
        #[test]
        fn times_grow_unless_the_clock_is_set_far_back(steps in proptest::collection::vec(-2 * LEAD_MAX..2 * LEAD_MAX, 1..100)) {
            let (mut times, mut now, mut last) = (GrowingTime::default(), HOUR, 0);
            for step in steps {
                now += step;
                let told = times.next(now);
                prop_assert!(told > last || last - now > LEAD_MAX, "{told} after {last} at {now}");
                prop_assert!(told >= now && told - now <= LEAD_MAX + 1);
                last = told;
            }
        }

        #[test]
        fn a_word_is_never_contradicted(words in proptest::collection::vec((0..HOUR, 0..SECOND, 0..SECOND, 0..HOUR), 1..50)) {
            let (mut clock, mut at) = (DistantClock::new(0, 0), 0);
            for (server, pause, took, own) in words {
                let sent = at + pause;
                at = sent + took;
                clock.hear(server, sent, at, own);
                prop_assert!(clock.now(sent) <= server && server <= clock.now(at));
            }
        }
    }
}
