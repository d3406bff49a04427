//! Inodes without a name of which the kernel lets go. It keeps what it has once looked up until it is short of memory, and as long as a
//! kernel has a file its content stays in the store: what one host has made, and another one removes, would stay there.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use hayloft_fuse::Control;
use hayloft_model::Ino;

/// Has the kernel let go of inodes, beside all else: it may have to wait for pages of them.
#[derive(Default)]
pub(super) struct Pruning {
    under_way: Arc<AtomicBool>,
}

impl Pruning {
    /// What comes while it is under way is told again.
    pub(super) fn begin(&self, control: &Control, numbers: Vec<Ino>) {
        if self.under_way.swap(true, Ordering::AcqRel) {
            return;
        }
        let (notifier, under_way) = (control.notifier(), Arc::clone(&self.under_way));
        let prune = move || {
            // A directory after what was below it, which has a higher number mostly: until then it is in use.
            let numbers: Vec<u64> = numbers.into_iter().rev().map(|number| number.0).collect();
            if let Err(error) = notifier.prune(&numbers) {
                tracing::debug!(%error, "the kernel keeps what has no name");
            }
            under_way.store(false, Ordering::Release);
        };
        if std::thread::Builder::new().name("hayloft-prune".to_string()).spawn(prune).is_err() {
            self.under_way.store(false, Ordering::Release);
        }
    }
}
