//! Changes of directories that the kernel has under several numbers (see [`crate::kernel::nodes`]).
//!
//! The kernel knows of a change by this host where it has asked for it. By its other numbers it goes on with what it has
//! of the directory: it is told, before the call returns, as of a change by another host. So is what a call changes of which the
//! kernel was not told (see [`crate::kernel::moved`]).

use std::sync::atomic::Ordering;
use std::sync::mpsc::channel;
use std::time::Duration;

use hayloft_fuse::{Operation, Request};
use hayloft_model::{Ino, Name};

use super::{VolumeFs, changes};
use crate::kernel::Word;
use crate::kernel::nodes::NodeId;

/// How long a call waits until the kernel has heard of it: another one may wait for this one's locks with the word.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a call is about to change, that the kernel has under other numbers as well.
#[derive(Default)]
pub(super) struct Twins {
    /// The numbers that the call was asked by: it has their locks.
    used: Vec<NodeId>,
    inos: Vec<Ino>,
    names: Vec<(Ino, Name)>,
    /// Who renames something to what it was not told of, and that.
    hidden: Option<(u32, Ino)>,
}

impl VolumeFs {
    /// What a request concerns that the kernel has under other numbers as well, if anything. Names there are handed out for
    /// one use from now on.
    pub(super) fn twins(&self, request: &Request<'_>) -> Option<Twins> {
        if !changes(&request.op) {
            return None;
        }
        let hidden = self.hidden(request);
        let others = self.other_numbers(request);
        if hidden.is_none() {
            return others;
        }
        Some(Twins { hidden, ..others.unwrap_or_default() })
    }

    fn hidden(&self, request: &Request<'_>) -> Option<(u32, Ino)> {
        let is_rename = matches!(request.op, Operation::Rename { .. });
        if !is_rename || !self.client.any_hidden.load(Ordering::Acquire) {
            return None;
        }
        Some((request.pid, self.client.core().moved.hidden(request.pid)?))
    }

    fn other_numbers(&self, request: &Request<'_>) -> Option<Twins> {
        if !self.client.any_moved.load(Ordering::Acquire) {
            return None;
        }
        let change = self.change_of(request)?;
        let mut used = vec![NodeId(request.nodeid)];
        if let Operation::Rename { new_parent, .. } = request.op {
            used.push(NodeId(new_parent));
        }
        let names: Vec<(Ino, Name)> =
            change.places().into_iter().map(|(dir, name)| (dir, name.clone())).collect();
        let mut core = self.client.core();
        let mut inos: Vec<Ino> = used.iter().map(|number| number.ino()).collect();
        for (dir, name) in &names {
            let named = core.tree.leads_to(*dir, name.as_bytes());
            inos.extend(named.map(|dentry| dentry.ino));
        }
        let mut numbers =
            inos.iter().filter(|ino| core.nodes.has_moved(**ino)).flat_map(|ino| core.nodes.numbers(*ino));
        if numbers.all(|number| used.contains(&number)) {
            return None;
        }
        drop(numbers);
        for number in &used {
            core.spare(number.ino());
        }
        Some(Twins { used, inos, names, hidden: None })
    }

    /// Tells the kernel what has changed.
    pub(super) fn tell_twins(&self, twins: Twins) {
        let mut core = self.client.core();
        let mut word = core.word_for_others(twins.inos, twins.names, &twins.used);
        if let (Word::Stale { attributes, .. }, Some((tid, ino))) = (&mut word, twins.hidden) {
            attributes.extend(core.nodes.each(vec![ino]));
            self.client.any_hidden.store(core.moved.reveal(tid), Ordering::Release);
        }
        drop(core);
        self.client.tell_kernel(word);
        let (done, heard) = channel();
        self.client.tell_kernel(Word::Heard(done));
        let _ = heard.recv_timeout(PATIENCE);
    }
}
