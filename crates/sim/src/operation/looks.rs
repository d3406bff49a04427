//! What programs see: names along paths, attributes, data and listings, from the kernel's caches or through the client.

use super::*;

impl World {
    /// Goes along a path as far as it is not known yet.
    pub(super) fn walk(&mut self, at: usize, op: &mut Op, walk: usize) -> Flow<Result<(), TreeError>> {
        loop {
            let (path, done, cur, kind) = &op.walks[walk];
            let (cur, done) = (*cur, *done);
            let Some(next) = path.get(done).copied() else {
                // Directories come before the last name of a path.
                let wants_dir = match &op.kind {
                    Kind::Link(..) => walk == 1,
                    Kind::Make(..) | Kind::Remove(..) | Kind::Rename(..) | Kind::List(..) => true,
                    _ => false,
                };
                let fits = !wants_dir || *kind == FileKind::Directory;
                return Flow::Ready(if fits { Ok(()) } else { Err(TreeError::NotDirectory) });
            };
            if *kind != FileKind::Directory {
                return Flow::Ready(Err(TreeError::NotDirectory));
            }
            match ready!(self.look_up(at, op, cur, next, false)) {
                None => return Flow::Ready(Err(TreeError::NotFound)),
                Some((ino, kind)) => {
                    let walk = &mut op.walks[walk];
                    (walk.1, walk.2, walk.3) = (done + 1, ino, kind);
                }
            }
        }
    }

    /// The locks of the directories whose names change.
    pub(super) fn lock(&mut self, at: usize, op: &mut Op) -> Flow<()> {
        if op.locking {
            return Flow::Ready(());
        }
        let first = usize::from(matches!(op.kind, Kind::Link(..)));
        let dirs: BTreeSet<Ino> = op.walks[first..].iter().map(|walk| walk.2).collect();
        if !self.clients[at].kernel.lock_all(&dirs) {
            return Flow::Wait;
        }
        op.locked = dirs;
        op.locking = true;
        Flow::Ready(())
    }

    /// A name under the lock, looked up once.
    pub(super) fn look(&mut self, at: usize, op: &mut Op, dir: Ino, at_name: u8) -> Flow<Target> {
        if op.looked_up.is_empty() {
            let target = ready!(self.look_up(at, op, dir, at_name, true));
            op.looked_up.push(target);
        }
        Flow::Ready(op.looked_up[0])
    }

    pub(super) fn see(&mut self, at: usize, op: &Op, register: Register, value: Value, call: u64) {
        let now = self.now;
        let client = &self.clients[at];
        // What a name leads to is known when it has been looked up, all else when the call returns.
        let (since, is_left) = match register {
            Register::Name(dir, name) => (call, client.left.contains(&(Ino(dir), name))),
            _ => (op.call, false),
        };
        let mut verdict = self.reference.observed(register, &value, call);
        if !is_left {
            let session = client.session;
            verdict =
                verdict.and_then(|()| self.reference.seen(session, register, &value, (call, since), now));
        }
        self.judge(&format!("c{at} op {}", op.id), verdict);
    }

    /// Where a name leads: by the kernel's cache, or by a request.
    pub(super) fn look_up(
        &mut self,
        at: usize,
        op: &mut Op,
        dir: Ino,
        at_name: u8,
        locked: bool,
    ) -> Flow<Target> {
        let now = self.now;
        loop {
            if op.fuse.is_none() {
                if let Some(target) = self.clients[at].kernel.name(dir, at_name) {
                    let value = Value::Name(target.map(|(ino, _)| ino.0));
                    self.see(at, op, Register::Name(dir.0, at_name), value, now);
                    op.pins.extend(target.map(|(ino, _)| ino));
                    return Flow::Ready(target);
                }
                let kernel = &mut self.clients[at].kernel;
                let dentry = if locked { None } else { kernel.revalidated(dir, at_name) };
                if !locked && dentry.is_none() && !kernel.lock_shared(dir) {
                    return Flow::Wait;
                }
                op.pins.insert(dir);
                let lock = (!locked && dentry.is_none()).then_some(dir);
                let dentry = dentry.map(|number| (dir, at_name, number));
                let mut fuse = Fuse { lock, dentry, ..Fuse::new(now, kernel.moment()) };
                if dentry.is_some() || !kernel.locks_for_any() {
                    fuse.late.push((dir, at_name));
                }
                op.fuse = Some(fuse);
            }
            let answer = ready!(self.answer(at, op, |world, op| world.answer_lookup(at, op, dir, at_name)));
            let fuse = op.fuse.take().expect("just answered");
            if let (Some((.., number)), Answer::Entry(target, _, unlimited)) = (fuse.dentry, &answer) {
                let client = &mut self.clients[at];
                let is_same = client.kernel.revalidate(dir, at_name, number, *target, *unlimited);
                client.expire_left(dir);
                if !is_same {
                    // It begins anew, with the lock, and what the answer brought is forgotten.
                    if let Some((ino, _)) = target {
                        self.kernel_drops(at, op, *ino);
                    }
                    continue;
                }
            }
            let target = self.looked_up(at, op, (dir, at_name), answer, &fuse);
            if let Some(lock) = fuse.lock {
                self.clients[at].unlock(lock);
            }
            return Flow::Ready(target);
        }
    }

    /// The kernel has no use for the inode that an answer has brought.
    fn kernel_drops(&mut self, at: usize, op: &mut Op, ino: Ino) {
        let kernel = &mut self.clients[at].kernel;
        let known = kernel.known.get_mut(&ino).filter(|known| **known > 1);
        if let Some(known) = known {
            *known -= 1;
            self.clients[at].tree.forget(ino, 1);
        } else {
            op.pins.remove(&ino);
            self.kernel_forgets(at, ino);
        }
    }

    /// Whether who was answered may come to that when it has been taken back with the session.
    pub(super) fn comes_too_late(&self, at: usize) -> bool {
        self.clients[at].kernel.follows() && self.clients[at].lapsed
    }

    /// The kernel learns where a name leads.
    pub(super) fn looked_up(
        &mut self,
        at: usize,
        op: &mut Op,
        (dir, at_name): (Ino, u8),
        answer: Answer,
        fuse: &Fuse,
    ) -> Target {
        // Else the directory is gone.
        let Answer::Entry(target, attributes, unlimited) = answer else { return None };
        let is_judged = !self.comes_too_late(at);
        if is_judged {
            let value = Value::Name(target.map(|(ino, _)| ino.0));
            self.see(at, op, Register::Name(dir.0, at_name), value, fuse.call);
        }
        let kernel = &mut self.clients[at].kernel;
        if fuse.dentry.is_none() {
            kernel.put_name(dir, at_name, target, unlimited, fuse.moment);
        }
        if let (Some((ino, _)), Some(attributes)) = (target, attributes) {
            kernel.put_attributes(ino, attributes, fuse.moment);
            op.pins.insert(ino);
            if is_judged {
                self.see(at, op, Register::Attributes(ino.0), Value::Attributes(attributes), fuse.call);
            }
        }
        target
    }

    pub(super) fn stat(&mut self, at: usize, op: &mut Op, ino: Ino) -> Flow<Result<(), TreeError>> {
        let now = self.now;
        if op.fuse.is_none()
            && let Some(attributes) = self.clients[at].kernel.attributes(ino)
        {
            self.see(at, op, Register::Attributes(ino.0), Value::Attributes(attributes), now);
            return Flow::Ready(Ok(()));
        }
        self.act(at, op, Act::Attributes(ino))
    }

    pub(super) fn read(&mut self, at: usize, op: &mut Op, ino: Ino) -> Flow<Result<(), TreeError>> {
        let now = self.now;
        if op.fuse.is_none()
            && let Some(data) = self.clients[at].kernel.data(ino)
        {
            let data = data.clone();
            self.see(at, op, Register::Data(ino.0), Value::Data(data), now);
            return Flow::Ready(Ok(()));
        }
        self.act(at, op, Act::Read(ino))
    }

    pub(super) fn list(&mut self, at: usize, op: &mut Op, dir: Ino) -> Flow<Result<(), TreeError>> {
        let now = self.now;
        if op.fuse.is_none() && self.clients[at].kernel.is_locked_alone(dir) {
            // Who lists has the lock as well.
            return Flow::Wait;
        }
        if op.fuse.is_none()
            && op.listed.is_none()
            && let Some(list) = self.clients[at].kernel.listing(dir)
        {
            let list = list.clone();
            self.see_list(at, op, dir, &list, now);
            return Flow::Ready(Ok(()));
        }
        loop {
            let from = op.listed.as_ref().map_or(0, |(_, cookie, _)| *cookie);
            let done = ready!(self.act(at, op, Act::List(dir, from)));
            if done.is_err() || op.listed.is_none() {
                return Flow::Ready(done);
            }
        }
    }

    pub(super) fn see_list(&mut self, at: usize, op: &Op, dir: Ino, list: &[(u8, Ino)], call: u64) {
        for at_name in *b"abcd" {
            let found: Vec<_> = list.iter().filter(|(name, _)| *name == at_name).collect();
            // What was removed and made anew meanwhile may come with both.
            if found.len() > 1 && !self.reference.could_be(dir.0, at_name, call).contains(&None) {
                self.fail(format!("c{at} op {}: {} comes twice in {dir}: {list:?}", op.id, at_name as char));
            }
            if found.is_empty() {
                self.see(at, op, Register::Name(dir.0, at_name), Value::Name(None), call);
            }
            for (_, ino) in found {
                self.see(at, op, Register::Name(dir.0, at_name), Value::Name(Some(ino.0)), call);
            }
        }
    }
}
