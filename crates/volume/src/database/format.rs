//! The version of what a store holds of a volume: its rows, packs, ledgers and the entry of the registry.
//!
//! The number is in the volume's entry. A server opens what it knows: its own format, and older ones, which it raises to its own
//! first, since older servers must not touch the volume from then on. A newer one is refused, unread.
//!
//! | format | since | what is new |
//! |---|---|---|
//! | 0 | | entries without a number |
//! | 1 | protocol 7 | the number |
//! | 2 | snapshots | others of its family may use its tables and packs; only volumes that have, or are, such |
//! | 3 | runs of numbers | a fork gives inode numbers of its origin's first; only forks, and volumes that have been forked |

use hayloft_store::Store;

use crate::database::registry::{self, Registered};
use crate::error::VolumeError;

/// The format that this server writes.
pub(crate) const FORMAT: u32 = 1;

/// That of volumes with snapshots and forks: a server that does not know of these would delete what they need.
pub(crate) const FAMILIES: u32 = 2;

/// That of forks which give numbers of their origin's, and of their origins: a server that does not know of these would give numbers
/// twice, or pass over a fork that it does not know when it gives another one a window.
pub(crate) const RUNS: u32 = 3;

/// The newest format that this server reads.
pub(crate) const KNOWN: u32 = RUNS;

/// Raises a volume that nobody has open to [`FORMAT`], a step at a time.
///
/// # Errors
/// When the store fails; then the volume has the format that it had.
pub(crate) async fn raise(
    store: &Store,
    name: &str,
    mut entry: Registered,
) -> Result<Registered, VolumeError> {
    let before = entry.format;
    while entry.format < FORMAT {
        // A step that rewrites rows does so here, and has to bear being repeated: the number comes last.
        let raised = Registered { format: entry.format + 1, ..entry };
        registry::update(store, name, &raised).await?;
        entry = raised;
    }
    if before < FORMAT {
        tracing::info!(
            volume = name,
            before,
            now = FORMAT,
            "the volume's format was raised: older servers do not open it any more"
        );
    }
    Ok(entry)
}
