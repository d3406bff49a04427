//! Changes whose callers were ended before the server had answered.
//!
//! Whether such a change is done is not known. It is asked for until that is certain, as if somebody waited, since what it
//! made is this host's until it is given up. The kernel has not heard of the change by an answer, so it is told of it
//! like of one that another host has made.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hayloft_model::Change;
use hayloft_model::tree::Stale;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;

use crate::core::Client;

impl Client {
    /// Takes over a change that was asked for under this number.
    pub(crate) fn take_over(self: &Arc<Self>, change: Change, ask: Ask, number: u64) {
        self.abandoned.fetch_add(1, Ordering::AcqRel);
        // It may be done already; from now on every change of this host is told as well.
        self.tell_of(&change);
        let client = Arc::clone(self);
        let work = move || {
            let answers = client.ask_change(&ask, number, None);
            client.link.end_change(number);
            if let Ok(answers) = answers
                && let Some(Answer::Changed(changed)) = answers.into_iter().next()
            {
                client.give_up_made(&change, changed.ino);
            }
            client.abandoned.fetch_sub(1, Ordering::AcqRel);
        };
        let spawned = std::thread::Builder::new().name("hayloft-change".to_string()).spawn(work);
        if let Err(error) = spawned {
            // What it makes stays known as in use until the mount ends.
            tracing::warn!(%error, "no thread to see a change through whose caller was ended");
        }
    }

    fn tell_of(&self, change: &Change) {
        let dirs = change.directories();
        let names: Vec<_> = change.places().into_iter().map(|(dir, name)| (dir, name.clone())).collect();
        let mut core = self.core();
        let mut attributes: Vec<_> = dirs.iter().copied().chain(change.inode()).collect();
        for (dir, name) in &names {
            attributes.extend(core.tree.leads_to(*dir, name.as_bytes()).map(|dentry| dentry.ino));
        }
        let stale = Stale { names, attributes, data: dirs, ..Stale::default() };
        let word = core.word(stale, Vec::new(), None);
        drop(core);
        self.tell_kernel(word);
    }

    fn give_up_made(&self, change: &Change, made: u64) {
        let mut core = self.core();
        let made = (made != 0).then_some(hayloft_model::Ino(made));
        made.or(change.inode()).into_iter().for_each(|ino| core.give_up_made(ino));
        self.drop_ended(&mut core);
        self.changed(core.tree.dirty_rows());
        let released = core.tree.has_released();
        drop(core);
        if released {
            self.let_go();
        }
    }
}
