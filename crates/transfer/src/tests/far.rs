//! Large files of another server, which cuts them there.

use std::sync::atomic::AtomicBool;

use hayloft_tree::chunk::{self, Chunk};
use parking_lot::Mutex;

use super::*;

/// A folder as another server would have it.
#[derive(Default)]
struct Elsewhere {
    top: PathBuf,
    /// It knows no such requests.
    cannot: bool,
    /// Told of a file that was cut is this instead of what is so.
    lie: Option<fn(&mut Part)>,
    /// The frames are of other bytes.
    mangles: AtomicBool,
    /// So many answers with parts of files come, then the link breaks.
    breaks_after: Option<u64>,
    chunks_told: AtomicU64,
    groups_named: AtomicU64,
    bytes_read: AtomicU64,
    answers: AtomicU64,
    asked: Mutex<Vec<String>>,
}

/// It cuts so much at a time.
const PART: u64 = 1_000_000;

impl Elsewhere {
    fn new(top: &Path) -> Elsewhere {
        Elsewhere { top: top.to_owned(), ..Elsewhere::default() }
    }

    fn read_all(&self, path: &[u8]) -> Vec<u8> {
        fs::read(self.top.join(std::str::from_utf8(path).unwrap())).unwrap()
    }

    fn take(&self) -> (u64, u64, u64) {
        let count = |count: &AtomicU64| count.swap(0, Relaxed);
        (count(&self.chunks_told), count(&self.groups_named), count(&self.bytes_read))
    }
}

impl Far for Elsewhere {
    fn cut(&self, path: &[u8], begin: u64, known: &[Tag]) -> std::io::Result<Option<Part>> {
        if self.cannot {
            return Ok(None);
        }
        self.asked.lock().push(String::from_utf8_lossy(path).into_owned());
        let bytes = self.read_all(path);
        let (mut chunks, mut end): (Vec<Chunk>, u64) = (Vec::new(), begin);
        chunk::cut(&mut &bytes[begin as usize..], |chunk| {
            if end < begin + PART {
                chunks.push((*blake3::hash(chunk).as_bytes(), chunk.len() as u32));
                end += chunk.len() as u64;
            }
        })?;
        if end < bytes.len() as u64 {
            let rest = chunks.split_off(chunk::in_whole_groups(&chunks));
            end -= rest.iter().map(|(_, len)| u64::from(*len)).sum::<u64>();
        }
        let group = |group: std::ops::Range<usize>| {
            let group = &chunks[group];
            let tag = chunk::tag(group);
            match known.contains(&tag) {
                true => Group::Known(tag),
                false => Group::New(group.to_vec()),
            }
        };
        let groups: Vec<Group> = chunk::groups(&chunks).map(group).collect();
        for group in &groups {
            match group {
                Group::Known(_) => self.groups_named.fetch_add(1, Relaxed),
                Group::New(chunks) => self.chunks_told.fetch_add(chunks.len() as u64, Relaxed),
            };
        }
        let content = read(&self.top).entries.iter().find(|entry| entry.path == path).unwrap().content_hash();
        let mut part = Part { groups, end, size: bytes.len() as u64, content };
        self.lie.inspect(|lie| lie(&mut part));
        Ok(Some(part))
    }

    fn read(&self, path: &[u8], frames: &[Vec<(u64, u32)>]) -> std::io::Result<Option<Vec<Vec<u8>>>> {
        if self.cannot {
            return Ok(None);
        }
        let answers = self.answers.fetch_add(1, Relaxed);
        if self.breaks_after.is_some_and(|most| answers >= most) {
            return Err(std::io::ErrorKind::ConnectionReset.into());
        }
        let bytes = self.read_all(path);
        let frame = |parts: &Vec<(u64, u32)>| {
            let parts = parts.iter().map(|(at, len)| &bytes[*at as usize..*at as usize + *len as usize]);
            let mut all = parts.collect::<Vec<_>>().concat();
            self.bytes_read.fetch_add(all.len() as u64, Relaxed);
            if self.mangles.load(Relaxed) {
                all[0] ^= 1;
            }
            zstd::bulk::compress(&all, 1).unwrap()
        };
        Ok(Some(frames.iter().map(frame).collect()))
    }
}

fn through(far: &Elsewhere, known: Option<&Manifest>) -> Manifest {
    Manifest::of_mount(&far.top, known, Some(far), &Progress::default()).unwrap()
}

/// Makes what is elsewhere in an empty folder: of it, and of trees that are here.
fn bring(far: &Elsewhere, manifest: &Manifest, here: &[&TempDir], cache: &Cache) -> TempDir {
    let tree = |folder: &Path| Tree { manifest: read(folder), folder: folder.to_owned() };
    let mut seeds: Vec<Tree> = here.iter().map(|folder| tree(folder.path())).collect();
    let received = Received::from_far(far, manifest, &seeds, cache, &|_, _| {}).unwrap().unwrap();
    seeds.push(Tree { manifest: manifest.without_large(), folder: far.top.clone() });
    let to = tempdir().unwrap();
    received.apply(to.path(), None, &seeds, &|_, _| {}).unwrap();
    assert_eq!(read(to.path()).tree, manifest.tree);
    received.forget();
    to
}

#[test]
fn of_a_large_file_that_has_changed_only_what_differs_comes() {
    let from = tempdir().unwrap();
    make(from.path());
    fs::write(from.path().join("large"), noise(1000, 12_000_000)).unwrap();
    let far = Elsewhere::new(from.path());
    let (_dir, cache) = cache();
    let first = through(&far, None);
    assert_eq!(first.to_bytes(), read(from.path()).to_bytes());
    let here = bring(&far, &first, &[], &cache);
    let (told, named, bytes) = far.take();
    assert!(told > 500 && named == 0 && bytes > 12_000_000, "{told} {named} {bytes}");
    assert!(far.asked.lock().iter().all(|path| ["large", "holes"].contains(&path.as_str())));
    // A byte is inserted in the middle.
    let mut bytes = noise(1000, 12_000_000);
    bytes.insert(6_000_000, 7);
    fs::write(from.path().join("large"), &bytes).unwrap();
    let second = through(&far, Some(&first));
    assert_eq!(second.to_bytes(), read(from.path()).to_bytes());
    let there = bring(&far, &second, &[&here], &cache);
    let (told, named, bytes_read) = far.take();
    assert!(told < 200 && named > 25, "{told} chunks are told, {named} groups only named");
    assert!(bytes_read < 200_000, "{bytes_read} bytes came");
    assert_eq!(fs::read(there.path().join("large")).unwrap(), bytes);
    // And it is known wherever it is.
    fs::rename(from.path().join("large"), from.path().join("dir/large")).unwrap();
    let moved = through(&far, Some(&second));
    bring(&far, &moved, &[&there], &cache);
    assert_eq!(far.take().2, 0);
}

#[test]
fn of_who_cannot_cut_all_is_read_as_it_is() {
    let from = tempdir().unwrap();
    make(from.path());
    let far = Elsewhere { cannot: true, ..Elsewhere::new(from.path()) };
    let manifest = through(&far, None);
    assert_eq!(manifest.to_bytes(), read(from.path()).to_bytes());
    let (_dir, cache) = cache();
    assert!(Received::from_far(&far, &manifest, &[], &cache, &|_, _| {}).unwrap().is_none());
}

#[test]
fn what_does_not_fit_together_is_not_believed() {
    let from = tempdir().unwrap();
    make(from.path());
    let good = read(from.path());
    let lies: [fn(&mut Part); 6] = [
        |part| part.groups.clear(),
        |part| drop(part.groups.pop()),
        |part| part.groups.insert(0, Group::Known([3; 8])),
        |part| part.size += 1,
        |part| part.end -= 1,
        |part| part.content = [1; 32],
    ];
    for (at, lie) in lies.into_iter().enumerate() {
        let far = Elsewhere { lie: Some(lie), ..Elsewhere::new(from.path()) };
        let found = through(&far, None);
        // The last one is seen when the tree's name is compared with what it has to be.
        assert_eq!(found.tree == good.tree, at < 5, "{at}");
    }
    let far = Elsewhere { mangles: AtomicBool::new(true), ..Elsewhere::new(from.path()) };
    let (_dir, cache) = cache();
    let Err(error) = Received::from_far(&far, &good, &[], &cache, &|_, _| {}) else {
        panic!("other bytes were taken")
    };
    assert!(matches!(error, TransferError::Damaged(_)), "{error}");
}

#[test]
fn what_has_come_of_a_large_file_does_not_come_again() {
    let from = tempdir().unwrap();
    make(from.path());
    fs::write(from.path().join("large"), noise(1000, 12_000_000)).unwrap();
    let far = Elsewhere { breaks_after: Some(6), ..Elsewhere::new(from.path()) };
    let manifest = through(&far, None);
    let (_dir, cache) = cache();
    assert!(Received::from_far(&far, &manifest, &[], &cache, &|_, _| {}).is_err());
    let before = far.take().2;
    assert!(before > 4_000_000, "{before}");
    let far = Elsewhere { breaks_after: None, ..far };
    bring(&far, &manifest, &[], &cache);
    let after = far.take().2;
    assert!(after < 12_100_000 - before, "{after} bytes after {before}");
}
