//! What the kernel holds of the volume, and how it is told that it is no longer so.
//!
//! The kernel may keep names without a time limit where the client hears of every change. To drop a name takes the
//! directory's lock, which a local call may hold that waits for the server, which may wait for this very word. So
//! words are spoken by threads that hold no lock of ours, and one that does not come through is replaced by raising
//! the epoch, which needs no lock (`docs/sharing.md`).

pub(crate) mod bases;
pub(crate) mod births;
pub(crate) mod foreword;
pub(crate) mod late;
pub(crate) mod moved;
pub(crate) mod names;
pub(crate) mod nodes;
pub(crate) mod offsets;
pub(crate) mod pages;
mod pruning;
pub(crate) mod sizes;
pub(crate) mod speaker;
pub(crate) mod split_names;
pub(crate) mod words;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};

use hayloft_fuse::Control;
use hayloft_model::tree::Stale;
use hayloft_model::{Ino, Name};

use crate::core::{Client, Core};
use crate::kernel::bases::Former;
use crate::kernel::nodes::{Left, NodeId};
use crate::kernel::pruning::Pruning;
use crate::kernel::speaker::{Leaving, Speaker};
use crate::kernel::words::{Inodes, Words};

impl Core {
    /// The word about what is stale.
    pub(crate) fn word(&mut self, stale: Stale, more: Vec<(Ino, Name)>, ack: Option<(u64, u64)>) -> Word {
        let known = |ino: &Ino| self.is_handed_out(*ino);
        let attributes = stale.attributes.into_iter().filter(known).collect();
        let data = stale.data.into_iter().filter(known).collect();
        let mut dirs: Vec<Ino> = stale.names.iter().map(|(dir, _)| *dir).filter(|dir| known(dir)).collect();
        dirs.dedup();
        let mut names = self.expire(stale.names, &dirs);
        names.extend(more);
        let (attributes, data) = (self.nodes.each(attributes), self.nodes.each(data));
        let names = self.nodes.each_name(names);
        let bases = self.bases.take_untold();
        Word::Stale { names, attributes, data, in_use: stale.in_use, ack, bases }
    }

    /// The word about what a call has changed, for those who have it by other numbers than these: their locks it has itself.
    pub(crate) fn word_for_others(
        &mut self,
        inos: Vec<Ino>,
        names: Vec<(Ino, Name)>,
        used: &[NodeId],
    ) -> Word {
        let is_other = |number: &Ino| !used.contains(&NodeId(number.0));
        // By the caller's own number the kernel goes on keeping what it has.
        let names = names.into_iter().filter(|(dir, name)| self.may_hold(*dir, name)).collect();
        let names = self.nodes.each_name(names).into_iter().filter(|(dir, _)| is_other(dir)).collect();
        let inos: Vec<Ino> = self.nodes.each(inos).into_iter().filter(is_other).collect();
        Word::Stale {
            names,
            attributes: inos.clone(),
            data: inos,
            in_use: Vec::new(),
            ack: None,
            bases: Vec::new(),
        }
    }
}

/// Something to tell the kernel. Inodes are meant by the numbers by which it knows them, see [`crate::kernel::nodes`].
#[derive(Debug)]
pub(crate) enum Word {
    /// This is no longer so; afterwards the event is acknowledged on its connection.
    Stale {
        names: Vec<(Ino, Name)>,
        attributes: Vec<Ino>,
        data: Vec<Ino>,
        in_use: Vec<Ino>,
        /// Connection and event.
        ack: Option<(u64, u64)>,
        /// What the data was.
        bases: Vec<Arc<Former>>,
    },
    /// Pages that were written back beside what others had changed, and go as soon as that is answered.
    Unlike(Arc<Former>),
    /// Nothing can be relied upon.
    Everything,
    /// These have to go before the sender goes on: what is to be dropped when they are gone.
    ExpireNow(Vec<(Ino, Name)>, Sender<()>),
    /// To be dropped when all that was said before was heard.
    Heard(Sender<()>),
    /// These have no name any more: what nobody uses of them can go.
    Nameless(Vec<Ino>),
    /// Directories that were there have been moved away: their entries can go, as soon as nobody has the locks.
    Left(Vec<Left>),
    /// The mount is gone.
    End,
}

/// Tells the kernel, in order, until the end.
pub(crate) fn run(client: &Arc<Client>, control: &Control, to_say: &Receiver<Word>) {
    let mut speaker = Speaker::new(control.notifier());
    let mut words = Words::new(client, control);
    let mut leaving = Leaving::new(control.notifier());
    let pruning = Pruning::default();
    for word in to_say {
        match word {
            Word::Stale { names, attributes, data, in_use, ack, bases } => {
                if !names.is_empty() || !data.is_empty() {
                    // Answers that were made before something changed are not to arrive after the word.
                    client.settle(control);
                }
                match ack {
                    _ if names.is_empty() => {}
                    // A connection, or a session, is lost where nothing is changed: who has a directory's lock looks into
                    // it, and waits for the next one. Its names go when that is answered; an epoch would break overlays.
                    None if client.options.read_only => speaker.expire_in_time(client, control, names),
                    _ => speaker.expire(client, names),
                }
                words.say(&mut speaker, Inodes { attributes, data, in_use, ack, bases });
            }
            Word::Unlike(former) => speaker.drop_unlike(former),
            Word::Everything => {
                let (known, names) = {
                    let mut core = client.core();
                    let mut names = core.tree.all_known_names();
                    names.extend(core.take_all_absent());
                    (core.nodes.each(core.tree.known()), core.nodes.each_name(names))
                };
                client.settle(control);
                words.say(&mut speaker, Inodes { attributes: known.clone(), ..Inodes::default() });
                speaker.expire_in_time(client, control, names);
                words.say(&mut speaker, Inodes { data: known, ..Inodes::default() });
            }
            Word::ExpireNow(names, done) => {
                client.settle(control);
                speaker.expire(client, names);
                drop(done);
            }
            Word::Heard(done) => words.when_heard(&done),
            Word::Nameless(numbers) => pruning.begin(control, numbers),
            Word::Left(left) => {
                let core = client.core();
                let left = left.into_iter().filter(|left| core.nodes.is_left(left));
                left.for_each(|left| leaving.drop_entry(left.parent, left.name));
            }
            Word::End => return,
        }
    }
}
