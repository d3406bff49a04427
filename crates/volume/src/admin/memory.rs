//! Memory that the server does not need any more goes back to the host.

use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use tokio::runtime::Handle;

use crate::server::Shared;

/// How often it is looked at.
const TICK: Duration = Duration::from_millis(250);
/// At one of so many of these while nothing is asked, and while something is: to give back takes a walk through all that is free.
const TICKS_QUIET: u32 = 20;
const TICKS_IN_USE: u32 = 120;
/// Fewer requests than these since the last look are none: keep-alives of clients.
const QUIET: u64 = 100;
/// From so much on it is looked at each time: what all bounds together let the server take is little more.
const LARGE: u64 = 256 << 20;
/// Free bytes that are worth looking for while nothing is asked, while something is, and when the server is large.
const WORTH: u64 = 16 << 20;
const WORTH_IN_USE: u64 = 128 << 20;
const WORTH_LARGE: u64 = 16 << 20;
/// From so much on it is looked at more often: what one table file takes while it is written comes within less than a tick.
const VERY_LARGE: u64 = 352 << 20;
const TICK_VERY_LARGE: Duration = Duration::from_millis(50);

/// A server that has so much of its own, and has given so much of it to connections, drops the blocks of its cache, if they take so much: they
/// are in the store, and connections that misbehave are not to make it larger than it was meant to be.
const BLOCKS_GO: u64 = 288 << 20;
const BLOCKS_GO_TAKEN: usize = 96 << 20;
const BLOCKS_WORTH: u64 = 16 << 20;

/// How many free bytes are worth looking for at this tick, of a server that has so much of its own. `None`: it is not looked at.
fn worth(ticks: u32, is_quiet: impl FnOnce() -> bool, own: u64) -> Option<u64> {
    let in_turn = ticks.is_multiple_of(TICKS_QUIET).then(|| match is_quiet() {
        true => Some(WORTH),
        false => ticks.is_multiple_of(TICKS_IN_USE).then_some(WORTH_IN_USE),
    });
    if own > LARGE { Some(WORTH_LARGE) } else { in_turn.flatten() }
}

/// Whether the blocks of the cache have to go.
fn do_blocks_go(own: u64, taken: usize, blocks: u64) -> bool {
    own > BLOCKS_GO && taken > BLOCKS_GO_TAKEN && blocks > BLOCKS_WORTH
}

/// Looks at it as long as the server runs. On a thread of its own: those that may block are busy when it matters. The memory is the
/// process's: of several servers in one, the first looks after it.
pub(crate) fn in_background(shared: Weak<Shared>, runtime: &Handle) {
    static IS_LOOKED_AFTER: AtomicBool = AtomicBool::new(false);
    if IS_LOOKED_AFTER.swap(true, Relaxed) {
        return;
    }
    // What stayed the last time, since something lies beside it.
    let (mut requests, mut stays, mut ticks) = (0, 0, 0_u32);
    let mut tick = TICK;
    loop {
        std::thread::sleep(tick);
        let Some(shared) = shared.upgrade() else { return IS_LOOKED_AFTER.store(false, Relaxed) };
        ticks = ticks.wrapping_add(1);
        let is_quiet = || {
            let so_far = shared.stats.requests();
            so_far - std::mem::replace(&mut requests, so_far) < QUIET
        };
        let own = hayloft_memory::resident().own;
        let worth = worth(ticks, is_quiet, own);
        tick = if own > VERY_LARGE { TICK_VERY_LARGE } else { TICK };
        if do_blocks_go(own, shared.room.taken(), shared.cache.block_bytes()) {
            runtime.block_on(shared.cache.drop_blocks());
        }
        drop(shared);
        let Some(worth) = worth else { continue };
        let free = own.saturating_sub(hayloft_memory::in_use());
        if free < stays + worth {
            stays = stays.min(free);
            continue;
        }
        hayloft_memory::give_back();
        stays = hayloft_memory::resident().own.saturating_sub(hayloft_memory::in_use());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_go_when_connections_have_made_the_server_large() {
        assert!(do_blocks_go(BLOCKS_GO + 1, BLOCKS_GO_TAKEN + 1, BLOCKS_WORTH + 1));
        for (own, taken, blocks) in [
            (BLOCKS_GO, BLOCKS_GO_TAKEN + 1, u64::MAX),
            (u64::MAX, BLOCKS_GO_TAKEN, u64::MAX),
            (u64::MAX, usize::MAX, BLOCKS_WORTH),
        ] {
            assert!(!do_blocks_go(own, taken, blocks), "{own} {taken} {blocks}");
        }
    }

    #[test]
    fn a_large_server_looks_for_little_at_each_tick_and_a_small_one_now_and_then() {
        for ticks in 0..2 * TICKS_IN_USE {
            assert_eq!(worth(ticks, || false, LARGE + 1), Some(WORTH_LARGE), "{ticks}");
            let in_use = ticks.is_multiple_of(TICKS_IN_USE).then_some(WORTH_IN_USE);
            assert_eq!(worth(ticks, || false, LARGE), in_use, "{ticks}");
            assert_eq!(
                worth(ticks, || true, LARGE),
                ticks.is_multiple_of(TICKS_QUIET).then_some(WORTH),
                "{ticks}"
            );
        }
    }
}
