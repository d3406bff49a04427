//! Memory that the server does not need any more goes back to the host.

use std::sync::Arc;
use std::time::Duration;

use crate::server::Shared;

/// How often it is looked at.
const TICK: Duration = Duration::from_secs(5);
/// While something is asked, at one of so many of these: whoever looks has to walk through all that is free.
const TICKS_IN_USE: u32 = 6;
/// Fewer requests than these between two looks are none: keep-alives of clients.
const QUIET: u64 = 100;
/// Free bytes that are worth looking for while nothing is asked, and while something is.
const WORTH: u64 = 16 << 20;
const WORTH_IN_USE: u64 = 128 << 20;

/// Runs as long as the server.
pub(crate) async fn in_background(shared: Arc<Shared>) {
    // What stayed the last time, since something lies beside it.
    let (mut requests, mut stays, mut ticks) = (0, 0, 0_u32);
    loop {
        tokio::time::sleep(TICK).await;
        let so_far = shared.stats.requests();
        let is_quiet = so_far - std::mem::replace(&mut requests, so_far) < QUIET;
        ticks = ticks.wrapping_add(1);
        if !is_quiet && !ticks.is_multiple_of(TICKS_IN_USE) {
            continue;
        }
        let worth = if is_quiet { WORTH } else { WORTH_IN_USE };
        let looked = tokio::task::spawn_blocking(move || {
            let free = || hayloft_memory::resident().own.saturating_sub(hayloft_memory::in_use());
            if free() < stays + worth {
                return stays.min(free());
            }
            hayloft_memory::give_back();
            free()
        });
        stays = looked.await.unwrap_or(stays);
    }
}
