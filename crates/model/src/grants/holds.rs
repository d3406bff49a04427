//! Who gets and loses what.

use crate::grants::{Awaited, Grant, Grants, Holding, NOT_TOLD, Object, Peer, STRAY, STREAK_MAX, Stage};
use crate::{Ino, SessionId};

impl Grants {
    /// A session has done what an event told it.
    pub fn acknowledge(&mut self, session: SessionId, event: u64) {
        let Some(peer) = self.peers.get_mut(&session) else { return };
        let Some(awaited) = peer.awaited.remove(&event) else { return };
        match awaited {
            Awaited::Recall { object, keep_read, .. } => {
                if peer.recalls.remove(&object.ino()).is_some() {
                    self.recall_is_over(session, object.ino(), event);
                }
                self.recalled(session, object, keep_read);
            }
            Awaited::Drop(ticket) => {
                if let Some(Stage::Dropping(left)) =
                    self.requests.get_mut(&ticket).map(|waiting| &mut waiting.stage)
                {
                    left.remove(&session);
                }
            }
            Awaited::Published(ticket) => {
                if let Some(waiting) = self.requests.get_mut(&ticket) {
                    waiting.published.remove(&session);
                    if let Stage::Settling(left) = &mut waiting.stage {
                        left.remove(&session);
                    }
                }
                // What it claimed is free since it was carried out.
                return self.settle(ticket);
            }
        }
        self.advance();
    }

    pub(super) fn recalled(&mut self, session: SessionId, object: Object, keep_read: bool) {
        let ino = object.ino();
        if !keep_read {
            self.let_go_of_slots(session, ino);
            self.leave_split(ino);
        }
        let Some(holding) = self.objects.get_mut(&ino) else { return };
        let owned = holding.owner == Some(session);
        if owned {
            holding.owner = None;
        }
        if matches!(object, Object::Directory(_)) {
            if !keep_read {
                holding.readers.remove(&session);
            } else if owned {
                holding.readers.insert(session);
            }
            if owned && holding.patience.is_some() {
                holding.patience = holding.patience.map(|patience| (patience * 2).min(STREAK_MAX));
            }
            holding.streak = None;
        } else if keep_read && owned {
            // What it keeps of a file is covered by the home from now on.
            let home = holding.home.filter(|home| *home != STRAY);
            if let Some(home) = home {
                let holding = self.objects.entry(home).or_default();
                if holding.owner.is_none() {
                    holding.readers.insert(session);
                }
            }
        }
        self.unlist_file(ino);
        self.drop_idle(ino);
    }

    pub(super) fn unlist_file(&mut self, ino: Ino) {
        let home = self.objects.get(&ino).filter(|holding| holding.owner.is_none()).and_then(|of| of.home);
        if let Some(home) = home
            && let Some(files) = self.files.get_mut(&home)
        {
            files.remove(&ino);
            if files.is_empty() {
                self.files.remove(&home);
            }
        }
    }

    pub(super) fn drop_idle(&mut self, ino: Ino) {
        if self.objects.get(&ino).is_some_and(Holding::is_idle) {
            self.objects.remove(&ino);
            self.leave_split(ino.or_directory());
        }
    }

    /// A session brings an object that it owns without having asked: it made it. `false` when somebody else holds
    /// it.
    pub fn adopt(&mut self, session: SessionId, object: Object) -> bool {
        if !self.peers.contains_key(&session) {
            return false;
        }
        let holding = self.objects.entry(object.ino()).or_default();
        let others = holding.owner.is_some_and(|owner| owner != session)
            || holding.readers.iter().any(|reader| *reader != session);
        if others {
            return false;
        }
        self.splits.restore(object.ino());
        // What it is just being told of again it may not know yet.
        let told = if holding.owner == Some(session) { holding.told } else { 0 };
        self.give(session, object);
        self.told(object.ino(), told);
        true
    }

    /// This event tells the owner of an object that it is.
    pub fn told(&mut self, ino: Ino, event: u64) {
        if let Some(holding) = self.objects.get_mut(&ino) {
            holding.told = event;
        }
    }

    /// A session has given files back that it owned by themselves, without having been asked: what it had changed of them is
    /// stored. `seen` is the last event that it had applied then. What it was told again meanwhile, what is recalled from
    /// it, and what it asks for, is left as it is: these are recalled when they are needed.
    pub fn give_back(&mut self, session: SessionId, files: &[Ino], seen: u64) {
        let is_asked = |ino: Ino| {
            let mut own = self.requests.values().filter(|waiting| waiting.session == session);
            own.any(|waiting| {
                !matches!(waiting.stage, Stage::Settling(_))
                    && waiting.request.objects().iter().any(|object| object.ino() == ino)
            })
        };
        let given = |ino: &Ino| {
            let holding = self.objects.get(ino).filter(|holding| holding.owner == Some(session))?;
            let home = holding.home?;
            let object = Object::File { ino: *ino, home };
            // Who is giving its home up as well is no reader of that any more when it has.
            let is_recalled = |peer: &Peer| peer.is_recalled(*ino) || peer.is_recalled(home);
            let is_recalled = self.peers.get(&session).is_none_or(is_recalled);
            let is_given = holding.told <= seen && !is_recalled && !is_asked(*ino);
            (is_given && self.may_keep(session, object)).then_some(object)
        };
        let given: Vec<Object> = files.iter().filter_map(given).collect();
        given.iter().for_each(|object| self.recalled(session, *object, true));
        self.advance();
    }

    pub(super) fn give(&mut self, session: SessionId, object: Object) {
        let holding = self.objects.entry(object.ino()).or_default();
        holding.told = NOT_TOLD;
        holding.owner = Some(session);
        holding.readers.clear();
        holding.streak = None;
        self.splits.holds(object.ino());
        if let Object::File { ino, home } = object {
            if let Some(before) = holding.home.replace(home).filter(|before| *before != home)
                && let Some(files) = self.files.get_mut(&before)
            {
                files.remove(&ino);
            }
            self.files.entry(home).or_default().insert(ino);
        }
    }

    pub(super) fn register_reader(&mut self, session: SessionId, dir: Ino) -> Grant {
        let alone = self.peers.len() == 1 && self.peers.get(&session).is_some_and(|peer| !peer.read_only);
        if let Some(held @ Grant::Own) = self.held(session, dir) {
            return held;
        }
        // Of files there may be very many.
        let takes = alone && !self.is_split(dir) && self.foreign_file(session, dir).is_none();
        let holding = self.objects.entry(dir).or_default();
        if holding.owner == Some(session) {
            return Grant::Read;
        }
        if takes {
            self.give(session, Object::Directory(dir));
            return Grant::Own;
        }
        holding.readers.insert(session);
        Grant::Read
    }

    /// A file at home in a directory that another session owns by itself.
    pub(super) fn foreign_file(&self, session: SessionId, dir: Ino) -> Option<(SessionId, Ino)> {
        self.owned_files(dir).find(|(owner, _)| *owner != session)
    }

    /// Files at home in a directory that somebody owns by themselves, and who.
    pub(super) fn owned_files(&self, dir: Ino) -> impl Iterator<Item = (SessionId, Ino)> + '_ {
        let files = self.files.get(&dir).into_iter().flatten();
        files.filter_map(|file| Some((self.owner(*file)?, *file)))
    }

    /// The inode is deleted: nobody holds it.
    pub fn forget(&mut self, ino: Ino) {
        if let Some(holding) = self.objects.get_mut(&ino) {
            holding.owner = None;
            self.unlist_file(ino);
            self.objects.remove(&ino);
        }
    }
}
