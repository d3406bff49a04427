//! Memory that the server does not need any more goes back to the host.

use std::sync::Weak;
use std::time::Duration;

use crate::server::Shared;

/// How often it is looked at.
const TICK: Duration = Duration::from_millis(500);
/// At one of so many of these while nothing is asked, and while something is: whoever looks has to walk through all that is free.
const TICKS_QUIET: u32 = 10;
const TICKS_IN_USE: u32 = 60;
/// Fewer requests than these since the last look are none: keep-alives of clients.
const QUIET: u64 = 100;
/// From so much on it is looked at each time: what all bounds together let the server take is little more.
const LARGE: u64 = 256 << 20;
/// Free bytes that are worth looking for while nothing is asked, while something is, and when the server is large.
const WORTH: u64 = 16 << 20;
const WORTH_IN_USE: u64 = 128 << 20;
const WORTH_LARGE: u64 = 16 << 20;

/// Looks at it as long as the server runs. On a thread of its own: those that may block are busy when it matters.
pub(crate) fn in_background(shared: Weak<Shared>) {
    // What stayed the last time, since something lies beside it.
    let (mut requests, mut stays, mut ticks) = (0, 0, 0_u32);
    loop {
        std::thread::sleep(TICK);
        let Some(shared) = shared.upgrade() else { return };
        ticks = ticks.wrapping_add(1);
        let mut worth = None;
        if ticks.is_multiple_of(TICKS_QUIET) {
            let so_far = shared.stats.requests();
            let is_quiet = so_far - std::mem::replace(&mut requests, so_far) < QUIET;
            worth = match is_quiet {
                true => Some(WORTH),
                false => ticks.is_multiple_of(TICKS_IN_USE).then_some(WORTH_IN_USE),
            };
        }
        drop(shared);
        let own = hayloft_memory::resident().own;
        let Some(worth) = worth.or((own > LARGE).then_some(WORTH_LARGE)) else { continue };
        let free = own.saturating_sub(hayloft_memory::in_use());
        if free < stays + worth {
            stays = stays.min(free);
            continue;
        }
        hayloft_memory::give_back();
        stays = hayloft_memory::resident().own.saturating_sub(hayloft_memory::in_use());
    }
}
