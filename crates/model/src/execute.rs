//! Executing a change that was requested, on rows that are fetched one by one: what a server does for its clients.

use std::collections::{HashMap, HashSet};

use crate::grants::Object;
use crate::tree::Tree;
use crate::{
    Change, Dentry, FileKind, Ino, InoRange, InodeRow, Missing, Name, Record, Sequence, Timestamp, TreeError,
    Usage, UsageDelta,
};

/// What an execution has to be given next.
#[derive(Clone, PartialEq, Debug)]
pub enum Wants {
    /// An inode's row: [`Execution::give_inode`].
    Inode(Ino),
    /// Those of these names that the directory has: [`Execution::give_names`].
    Names(Ino, Vec<Name>),
    /// Any one name that the directory has: [`Execution::give_names`].
    AnyName(Ino),
    /// Inode numbers: [`Execution::give_numbers`].
    Numbers,
}

/// What a change does.
#[derive(Clone, PartialEq, Debug)]
pub struct Executed {
    /// The inode that was made.
    pub made: Option<Ino>,
    /// The rows that change.
    pub records: Vec<Record>,
    /// How the usage changes.
    pub usage: UsageDelta,
    /// Everything of which the row or names change, as it was before: nobody may own any of it meanwhile.
    pub objects: Vec<Object>,
    /// What was made: its maker owns it.
    pub births: Vec<Object>,
    /// Inodes that have no name any more. Their rows are put, for whoever has them in use.
    pub unnamed: Vec<Ino>,
}

/// Why a change is not done, and what that is true of: nobody may own any of it meanwhile, as of [`Executed::objects`]. The change's own
/// directories are not named.
pub type Refused = (TreeError, Option<Object>);

/// A change under way.
#[derive(Debug)]
pub struct Execution {
    change: Change,
    tree: Tree,
    rows: HashMap<Ino, Object>,
    absent: HashSet<Ino>,
    /// A directory of which it matters whether it has names.
    emptied: Option<Ino>,
}

impl Execution {
    /// Begins with nothing known but how full the volume is, and may be.
    pub fn new(change: Change, usage: Usage, quota: Usage) -> Execution {
        let tree = Tree::new(usage, quota);
        Execution { change, tree, rows: HashMap::new(), absent: HashSet::new(), emptied: None }
    }

    /// The row that was wanted; `None` when there is none.
    pub fn give_inode(&mut self, ino: Ino, row: Option<InodeRow>) {
        match row {
            Some(row) => {
                self.rows.insert(ino, Object::of(ino, &row));
                self.tree.add_inode(ino, row);
                // As if in use: what loses its last name is not deleted yet.
                self.tree.remember(ino);
            }
            None => drop(self.absent.insert(ino)),
        }
    }

    /// The names that were wanted, as far as there are any.
    pub fn give_names(&mut self, dir: Ino, names: impl IntoIterator<Item = (Name, Dentry)>) {
        self.tree.add_listing(dir, names.into_iter().map(|(name, dentry)| (name, dentry, None)));
    }

    /// Numbers for new inodes.
    pub fn give_numbers(&mut self, range: InoRange) {
        self.tree.add_numbers(range);
    }

    /// Goes on; with what is still wanted, or with the result. After a result it is used up.
    ///
    /// # Errors
    /// What has to be given first.
    pub fn run(&mut self, now: Timestamp) -> Result<Result<Executed, Refused>, Wants> {
        match self.change.apply(&mut self.tree, now) {
            Ok(made) => Ok(Ok(self.executed(made))),
            Err(TreeError::Missing(Missing::Inode(ino))) if self.absent.contains(&ino) => {
                Ok(Err((TreeError::Stale, None)))
            }
            Err(TreeError::Missing(Missing::Inode(ino))) => Err(Wants::Inode(ino)),
            Err(TreeError::Missing(Missing::Directory(dir))) => {
                let names: Vec<Name> = self
                    .change
                    .places()
                    .into_iter()
                    .filter(|(place, _)| *place == dir)
                    .map(|(_, name)| name.clone())
                    .collect();
                if names.is_empty() {
                    self.emptied = Some(dir);
                    return Err(Wants::AnyName(dir));
                }
                Err(Wants::Names(dir, names))
            }
            Err(TreeError::Missing(Missing::Numbers)) => Err(Wants::Numbers),
            Err(error @ TreeError::NotEmpty) => Ok(Err((error, self.emptied.map(Object::Directory)))),
            Err(error) => Ok(Err((error, None))),
        }
    }

    fn executed(&mut self, made: Option<Ino>) -> Executed {
        let batch = self.tree.cut(Sequence(0), true).batch;
        let mut objects: Vec<Object> = Vec::new();
        let mut births = Vec::new();
        for record in &batch.records {
            let Record::PutInode(ino, row) = record else { continue };
            match self.rows.get(ino) {
                Some(object) => objects.push(*object),
                None if row.kind() == FileKind::Directory => births.push(Object::Directory(*ino)),
                None => births.push(Object::File { ino: *ino, home: row.parent }),
            }
        }
        Executed { made, objects, births, unnamed: batch.orphans, usage: batch.usage, records: batch.records }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::NewNode;
    use crate::{Rows, tree::FIRST_COOKIE};

    fn time(secs: i64) -> Timestamp {
        Timestamp { secs, nanos: 0 }
    }

    fn run(rows: &mut Rows, change: Change) -> Result<Executed, TreeError> {
        let mut execution = Execution::new(change, Usage::default(), Usage::default());
        let mut next = rows.inodes.keys().map(|ino| ino.0).max().unwrap_or(1) + 100;
        let result = loop {
            match execution.run(time(9)) {
                Ok(result) => break result,
                Err(Wants::Inode(ino)) => execution.give_inode(ino, rows.inodes.get(&ino).cloned()),
                Err(Wants::Names(dir, names)) => {
                    let found = rows.listing(dir).into_iter().filter(|(name, _)| names.contains(name));
                    execution.give_names(dir, found);
                }
                Err(Wants::AnyName(dir)) => execution.give_names(dir, rows.listing(dir).into_iter().take(1)),
                Err(Wants::Numbers) => {
                    execution.give_numbers(InoRange { next, end: next + 1 });
                    next += 1;
                }
            }
        };
        if let Ok(executed) = &result {
            executed.records.iter().for_each(|record| rows.apply(record));
        }
        result.map_err(|(error, _)| error)
    }

    fn name(name: &str) -> Name {
        Name::new(name.as_bytes())
    }

    fn file(dir: Ino, at: &str) -> Change {
        let new = NewNode { mode: FileKind::Regular.bits() | 0o644, ..NewNode::default() };
        Change::Create(dir, name(at), new)
    }

    fn directory(dir: Ino, at: &str) -> Change {
        let new = NewNode { mode: FileKind::Directory.bits() | 0o755, ..NewNode::default() };
        Change::Create(dir, name(at), new)
    }

    fn volume() -> Rows {
        let mut tree = Tree::default();
        tree.add_inode(
            Ino::ROOT,
            InodeRow {
                mode: FileKind::Directory.bits() | 0o755,
                uid: 0,
                gid: 0,
                nlink: 2,
                rdev: 0,
                size: 0,
                allocated: 0,
                atime: time(1),
                mtime: time(1),
                ctime: time(1),
                btime: time(1),
                parent: Ino::ROOT,
                next_cookie: FIRST_COOKIE,
                unnamed: false,
                xattrs: Default::default(),
                content: Default::default(),
            },
        );
        let mut rows = Rows::default();
        let row = tree.inode(Ino::ROOT).expect("just added").clone();
        rows.apply(&Record::PutInode(Ino::ROOT, Box::new(row)));
        rows
    }

    #[test]
    fn changes_are_executed_on_single_rows() {
        let mut rows = volume();
        let dir = run(&mut rows, directory(Ino::ROOT, "dir")).expect("made").made.expect("an inode");
        let made = run(&mut rows, file(dir, "a")).expect("made");
        let ino = made.made.expect("an inode");
        assert_eq!(made.births, [Object::File { ino, home: dir }]);
        assert_eq!(made.objects, [Object::Directory(dir)]);
        assert_eq!(run(&mut rows, file(dir, "a")), Err(TreeError::Exists));
        assert_eq!(run(&mut rows, Change::Rmdir(Ino::ROOT, name("dir"))), Err(TreeError::NotEmpty));
        let moved = Change::Rename((dir, name("a")), (Ino::ROOT, name("b")), Default::default());
        let moved = run(&mut rows, moved).expect("moved");
        assert!(moved.objects.contains(&Object::File { ino, home: dir }));
        assert_eq!(rows.inodes[&ino].parent, Ino::ROOT);
        let removed = run(&mut rows, Change::Unlink(Ino::ROOT, name("b"))).expect("removed");
        assert_eq!(removed.unnamed, [ino]);
        assert_eq!(rows.inodes[&ino].nlink, 0);
        run(&mut rows, Change::Rmdir(Ino::ROOT, name("dir"))).expect("empty now");
        assert_eq!(rows.listing(Ino::ROOT), []);
        assert_eq!(rows.inodes[&Ino::ROOT].nlink, 2);
    }

    #[test]
    fn a_directory_does_not_move_below_itself() {
        let mut rows = volume();
        let outer = run(&mut rows, directory(Ino::ROOT, "outer")).expect("made").made.expect("an inode");
        let inner = run(&mut rows, directory(outer, "inner")).expect("made").made.expect("an inode");
        let cycle = Change::Rename((Ino::ROOT, name("outer")), (inner, name("below")), Default::default());
        assert_eq!(run(&mut rows, cycle), Err(TreeError::Invalid));
    }
}
