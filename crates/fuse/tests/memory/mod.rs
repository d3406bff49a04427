//! A file system in memory, small but complete enough to test the transports with.

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use hayloft_fuse::{
    Attr, Entry, Errno, Failure, FileSystem, Forget, Operation, Pace, Reply, Request, SetAttr, Statfs,
    Validity,
};

/// Looking it up blocks until [`Memory::open_gate`].
pub(crate) const SLOW: &[u8] = b"slow";
/// Looking it up blocks until the caller gives up.
pub(crate) const HANGING: &[u8] = b"hanging";
/// Looking it up panics.
pub(crate) const PANICKING: &[u8] = b"panicking";

const ROOT: u64 = 1;
const DT_DIR: u32 = libc::DT_DIR as u32;
const DT_REG: u32 = libc::DT_REG as u32;

struct Inode {
    attr: Attr,
    content: Vec<u8>,
    entries: BTreeMap<Vec<u8>, u64>,
    xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

struct State {
    inodes: HashMap<u64, Inode>,
    next: u64,
}

/// The file system.
pub(crate) struct Memory {
    state: Mutex<State>,
    gate: (Mutex<bool>, Condvar),
    /// Handlers blocked in a lookup of [`SLOW`] or [`HANGING`].
    pub(crate) blocked: AtomicU64,
    /// Lookups that ended because the caller gave up.
    pub(crate) interrupted: AtomicU64,
    /// References taken back.
    pub(crate) forgotten: AtomicU64,
}

impl Memory {
    pub(crate) fn new() -> Memory {
        let mut state = State { inodes: HashMap::new(), next: ROOT };
        state.make(libc::S_IFDIR | 0o777, 0, 0);
        Memory {
            state: Mutex::new(state),
            gate: (Mutex::new(false), Condvar::new()),
            blocked: AtomicU64::new(0),
            interrupted: AtomicU64::new(0),
            forgotten: AtomicU64::new(0),
        }
    }

    pub(crate) fn open_gate(&self) {
        *self.gate.0.lock().unwrap() = true;
        self.gate.1.notify_all();
    }

    /// Blocks as the name says, on a pool thread.
    fn block(&self, name: &[u8], pace: Pace<'_>) -> Result<(), Failure> {
        let Pace::Patient(token) = pace else { return Err(Failure::Again) };
        self.blocked.fetch_add(1, Ordering::SeqCst);
        if name == SLOW {
            let gate = self.gate.0.lock().unwrap();
            drop(self.gate.1.wait_while(gate, |open| !*open).unwrap());
        } else {
            while !token.wait_timeout(Duration::from_secs(3600)) {}
            self.interrupted.fetch_add(1, Ordering::SeqCst);
        }
        self.blocked.fetch_sub(1, Ordering::SeqCst);
        if token.interrupted() { Err(Errno::EINTR.into()) } else { Err(Errno::ENOENT.into()) }
    }
}

impl State {
    fn make(&mut self, mode: u32, uid: u32, gid: u32) -> u64 {
        let ino = self.next;
        self.next += 1;
        let nlink = if mode & libc::S_IFMT == libc::S_IFDIR { 2 } else { 1 };
        let attr = Attr { ino, mode, nlink, uid, gid, blksize: 4096, ..Attr::default() };
        let inode = Inode { attr, content: Vec::new(), entries: BTreeMap::new(), xattrs: BTreeMap::new() };
        self.inodes.insert(ino, inode);
        ino
    }

    fn get(&mut self, ino: u64) -> Result<&mut Inode, Errno> {
        self.inodes.get_mut(&ino).ok_or(Errno::ESTALE)
    }

    fn entry(&mut self, ino: u64) -> Result<Entry, Errno> {
        let attr = self.get(ino)?.attr;
        let valid = Validity::FOREVER;
        Ok(Entry { nodeid: ino, generation: 0, entry_valid: valid, attr_valid: valid, attr })
    }

    fn add(&mut self, request: &Request<'_>, name: &[u8], mode: u32) -> Result<Entry, Errno> {
        if self.get(request.nodeid)?.entries.contains_key(name) {
            return Err(Errno::EEXIST);
        }
        let ino = self.make(mode, request.uid, request.gid);
        self.get(request.nodeid)?.entries.insert(name.to_vec(), ino);
        self.entry(ino)
    }

    fn remove(&mut self, parent: u64, name: &[u8], directory: bool) -> Result<(), Errno> {
        let ino = *self.get(parent)?.entries.get(name).ok_or(Errno::ENOENT)?;
        let inode = self.get(ino)?;
        if directory && !inode.entries.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        inode.attr.nlink -= 1;
        self.get(parent)?.entries.remove(name);
        Ok(())
    }

    fn rename(&mut self, from: u64, name: &[u8], to: u64, new_name: &[u8]) -> Result<(), Errno> {
        let ino = self.get(from)?.entries.remove(name).ok_or(Errno::ENOENT)?;
        if let Some(old) = self.get(to)?.entries.insert(new_name.to_vec(), ino) {
            self.get(old)?.attr.nlink -= 1;
        }
        Ok(())
    }

    fn setattr(&mut self, ino: u64, set: &SetAttr) -> Result<Attr, Errno> {
        let inode = self.get(ino)?;
        if let Some(size) = set.size {
            inode.content.resize(size as usize, 0);
            inode.attr.size = size;
        }
        let attr = &mut inode.attr;
        attr.mode = set.mode.map_or(attr.mode, |mode| attr.mode & libc::S_IFMT | mode & 0o7777);
        attr.uid = set.uid.unwrap_or(attr.uid);
        attr.gid = set.gid.unwrap_or(attr.gid);
        Ok(*attr)
    }

    fn write(&mut self, ino: u64, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let inode = self.get(ino)?;
        let (start, end) = (offset as usize, offset as usize + data.len());
        if inode.content.len() < end {
            inode.content.resize(end, 0);
        }
        inode.content[start..end].copy_from_slice(data);
        inode.attr.size = inode.content.len() as u64;
        Ok(())
    }

    fn list(&mut self, ino: u64, offset: u64, plus: bool, reply: &mut Reply<'_>) -> Result<(), Errno> {
        let mut all: Vec<(Vec<u8>, u64)> = vec![(b".".to_vec(), ino), (b"..".to_vec(), ROOT)];
        all.extend(self.get(ino)?.entries.iter().map(|(name, ino)| (name.clone(), *ino)));
        let mut directory = reply.directory();
        for (index, (name, ino)) in all.iter().enumerate().skip(offset as usize) {
            let next = index as u64 + 1;
            let mut entry = self.entry(*ino)?;
            let kind = if entry.attr.mode & libc::S_IFMT == libc::S_IFDIR { DT_DIR } else { DT_REG };
            if name.starts_with(b".") {
                entry.nodeid = 0;
            }
            let room = match plus {
                true => directory.add_plus(&entry, next, kind, name),
                false => directory.add(*ino, next, kind, name),
            };
            if !room {
                break;
            }
        }
        Ok(())
    }
}

fn sized(reply: &mut Reply<'_>, size: u32, value: &[u8]) -> Result<(), Errno> {
    match size as usize {
        0 => reply.xattr_size(value.len() as u32),
        size if size < value.len() => return Err(Errno::ERANGE),
        _ => reply.data(value),
    }
    Ok(())
}

impl FileSystem for Memory {
    fn handle(&self, request: &Request<'_>, reply: &mut Reply<'_>, pace: Pace<'_>) -> Result<(), Failure> {
        let ino = request.nodeid;
        if let Operation::Lookup { name } = request.op {
            match name {
                SLOW | HANGING => return self.block(name, pace),
                PANICKING => panic!("as asked"),
                _ => {}
            }
        }
        let mut state = self.state.lock().unwrap();
        let forever = Validity::FOREVER;
        match request.op {
            Operation::Lookup { name } => match state.get(ino)?.entries.get(name).copied() {
                Some(ino) => reply.entry(&state.entry(ino)?),
                None => reply.entry(&Entry::negative(Validity::ZERO)),
            },
            Operation::Getattr { .. } => reply.attr(&state.get(ino)?.attr, forever),
            Operation::Setattr(set) => reply.attr(&state.setattr(ino, &set)?, forever),
            Operation::Mkdir { name, mode, .. } => {
                reply.entry(&state.add(request, name, libc::S_IFDIR | mode)?);
            }
            Operation::Create { name, mode, .. } => reply.create(&state.add(request, name, mode)?, 0, 0),
            Operation::Symlink { name, target } => {
                let entry = state.add(request, name, libc::S_IFLNK | 0o777)?;
                state.write(entry.nodeid, 0, target)?;
                reply.entry(&state.entry(entry.nodeid)?);
            }
            Operation::Readlink => reply.data(&state.get(ino)?.content),
            Operation::Link { ino, new_name } => {
                state.get(ino)?.attr.nlink += 1;
                state.get(request.nodeid)?.entries.insert(new_name.to_vec(), ino);
                reply.entry(&state.entry(ino)?);
            }
            Operation::Unlink { name } => state.remove(ino, name, false)?,
            Operation::Rmdir { name } => state.remove(ino, name, true)?,
            Operation::Rename { name, new_parent, new_name, .. } => {
                state.rename(ino, name, new_parent, new_name)?;
            }
            Operation::Open { .. } | Operation::Opendir { .. } => {
                reply.open(0, hayloft_fuse::open_flags::KEEP_CACHE);
            }
            Operation::Read { offset, .. } => {
                let content = &state.get(ino)?.content;
                let tail = content.get(offset as usize..).unwrap_or_default();
                let buffer = reply.buffer();
                let len = tail.len().min(buffer.len());
                buffer[..len].copy_from_slice(&tail[..len]);
                reply.filled(len);
            }
            Operation::Write { offset, data, .. } => {
                state.write(ino, offset, data)?;
                reply.written(data.len() as u32);
            }
            Operation::Readdir { offset, .. } => state.list(ino, offset, false, reply)?,
            Operation::Readdirplus { offset, .. } => state.list(ino, offset, true, reply)?,
            Operation::Setxattr { name, value, .. } => {
                state.get(ino)?.xattrs.insert(name.to_vec(), value.to_vec());
            }
            Operation::Getxattr { name, size } => {
                let value = state.get(ino)?.xattrs.get(name).cloned().ok_or(Errno::ENODATA)?;
                sized(reply, size, &value)?;
            }
            Operation::Listxattr { size } => {
                let names: Vec<u8> =
                    state.get(ino)?.xattrs.keys().flat_map(|name| [name, &b"\0"[..]].concat()).collect();
                sized(reply, size, &names)?;
            }
            Operation::Removexattr { name } => {
                state.get(ino)?.xattrs.remove(name).ok_or(Errno::ENODATA)?;
            }
            Operation::Lseek { offset, whence, .. } => {
                let size = state.get(ino)?.attr.size;
                if offset >= size {
                    return Err(Errno::ENXIO.into());
                }
                reply.lseek(if whence as c_int == libc::SEEK_HOLE { size } else { offset });
            }
            Operation::Statfs => {
                reply.statfs(&Statfs {
                    bsize: 4096,
                    frsize: 4096,
                    blocks: 99,
                    namelen: 255,
                    ..Statfs::default()
                });
            }
            Operation::Release { .. }
            | Operation::Releasedir { .. }
            | Operation::Fsync { .. }
            | Operation::Flush { .. } => {}
            Operation::Ioctl { .. } => return Err(Errno::ENOTTY.into()),
            _ => return Err(Errno::ENOSYS.into()),
        }
        Ok(())
    }

    fn forget(&self, forgets: &[Forget]) {
        let mut state = self.state.lock().unwrap();
        for forget in forgets {
            self.forgotten.fetch_add(forget.nlookup, Ordering::SeqCst);
            if state.inodes.get(&forget.nodeid).is_some_and(|inode| inode.attr.nlink == 0) {
                state.inodes.remove(&forget.nodeid);
            }
        }
    }
}
