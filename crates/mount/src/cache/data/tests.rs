//! Random histories of one file against a plain vector, with cuts to a pretended server and cold reloads.

use std::collections::HashMap;

use hayloft_model::ContentHash;
use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Step {
    Write { offset: u64, len: usize, byte: u8 },
    Truncate { size: u64 },
    Punch { from: u64, len: u64 },
    Read { offset: u64, len: usize },
    Cut,
    RefusedCut,
    CutWhileWriting { offset: u64, len: usize, byte: u8 },
    DropClean,
    Reload,
}

const SPAN: u64 = 70 * BLOCK_SIZE;

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // Small offsets, block edges, and a second page.
    let offset = || prop_oneof![3 => 0..6000u64, 2 => 0..3 * BLOCK_SIZE, 1 => (63 * BLOCK_SIZE - 100)..SPAN];
    let len = || prop_oneof![3 => 1..5000usize, 1 => 1..(2 * BLOCK_SIZE as usize)];
    let step = prop_oneof![
        6 => (offset(), len(), 1..255u8).prop_map(|(offset, len, byte)| Step::Write { offset, len, byte }),
        2 => offset().prop_map(|size| Step::Truncate { size }),
        1 => Just(Step::Truncate { size: 0 }),
        2 => (offset(), len()).prop_map(|(from, len)| Step::Punch { from, len: len as u64 }),
        3 => (offset(), len()).prop_map(|(offset, len)| Step::Read { offset, len }),
        3 => Just(Step::Cut),
        1 => Just(Step::RefusedCut),
        1 => (offset(), len(), 1..255u8).prop_map(|(offset, len, byte)| Step::CutWhileWriting { offset, len, byte }),
        2 => Just(Step::DropClean),
        2 => Just(Step::Reload),
    ];
    proptest::collection::vec(step, 1..60)
}

#[derive(Default)]
struct World {
    file: FileData,
    expected: Vec<u8>,
    contents: HashMap<ContentHash, Arc<Vec<u8>>>,
    row: Content,
    row_size: u64,
    row_allocated: u64,
    pages: HashMap<u64, Vec<Option<BlockRef>>>,
    sequence: Sequence,
    names: u64,
}

impl World {
    fn retry<T>(&mut self, operation: impl Fn(&mut FileData) -> Result<T, Lacking>) -> T {
        for _ in 0..10 {
            match operation(&mut self.file) {
                Ok(result) => return result,
                Err(Lacking::Pages) => {
                    let mut pages: Vec<_> = self.pages.clone().into_iter().collect();
                    pages.sort_by_key(|(page, _)| *page);
                    self.file.add_pages(&pages);
                }
                Err(Lacking::Content(wanted)) => {
                    assert!(!wanted.is_empty());
                    for (index, stored) in wanted {
                        let data = Arc::clone(&self.contents[&stored.hash]);
                        self.file.fill(index, stored, &data);
                    }
                }
                Err(Lacking::Gone) => panic!("a file that nobody dropped is gone"),
            }
        }
        panic!("something is always lacking");
    }

    fn write(&mut self, offset: u64, len: usize, byte: u8) {
        let bytes: Vec<u8> = (0..len).map(|at| byte.wrapping_add(at as u8)).collect();
        let room = (SPAN - offset.min(SPAN)) as usize;
        let bytes = &bytes[..len.min(room)];
        if bytes.is_empty() {
            return;
        }
        self.retry(|file| file.write(offset, bytes));
        let end = offset as usize + bytes.len();
        if self.expected.len() < end {
            self.expected.resize(end, 0);
        }
        self.expected[offset as usize..end].copy_from_slice(bytes);
    }

    fn cut(&mut self, meanwhile: impl FnOnce(&mut World)) {
        self.sequence = self.sequence.next();
        let sequence = self.sequence;
        let (size, allocated) = (self.file.size, self.file.allocated);
        let mut cut = self.file.cut(sequence);
        meanwhile(self);
        for (index, data) in &cut.blocks {
            self.names += 1;
            let mut hash = [0; 32];
            hash[..8].copy_from_slice(&self.names.to_le_bytes());
            let stored = BlockRef { hash: ContentHash(hash), len: data.len() as u32 };
            self.contents.insert(stored.hash, Arc::clone(data));
            let page = cut
                .pages
                .iter_mut()
                .find(|(page, _)| page == &(index / PAGE_BLOCKS))
                .expect("its page is cut");
            page.1[(index % PAGE_BLOCKS) as usize] = Some(stored);
            self.file.named(*index, stored, sequence, None);
        }
        let indexes: Vec<u64> = cut.blocks.iter().map(|(index, _)| *index).collect();
        self.file.durable(&indexes, sequence);
        if let Some(end) = cut.pages_end {
            self.pages.retain(|page, _| *page < end);
        }
        for (page, refs) in cut.pages {
            match page {
                0 => self.row = Content::Blocks(refs),
                page => drop(self.pages.insert(page, refs)),
            }
        }
        if let Some(inline) = cut.inline {
            assert!(inline.len() as u64 <= INLINE_MAX);
            self.row = Content::Inline(inline);
        }
        (self.row_size, self.row_allocated) = (size, allocated);
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Write { offset, len, byte } => self.write(offset, len, byte),
            Step::Truncate { size } => {
                self.retry(|file| file.truncate(size));
                self.expected.resize(size as usize, 0);
            }
            Step::Punch { from, len } => {
                self.retry(|file| file.punch(from, from + len));
                let to = self.expected.len().min((from + len) as usize);
                if (from as usize) < to {
                    self.expected[from as usize..to].fill(0);
                }
            }
            Step::Read { offset, len } => self.read(offset, len),
            Step::Cut => self.cut(|_| {}),
            Step::RefusedCut => {
                self.sequence = self.sequence.next();
                let cut = self.file.cut(self.sequence);
                self.file.undo_cut(&cut, self.sequence);
            }
            Step::CutWhileWriting { offset, len, byte } => self.cut(|world| world.write(offset, len, byte)),
            Step::DropClean => {
                for index in 0..SPAN / BLOCK_SIZE {
                    self.file.drop_clean(index, self.sequence);
                    self.file.drop_clean(index, self.sequence);
                }
            }
            Step::Reload => {
                self.cut(|_| {});
                assert!(self.file.is_clean(self.sequence));
                self.file = FileData::from_row(self.row_size, self.row_allocated, &self.row);
            }
        }
        let file = &self.file;
        assert_eq!(file.size as usize, self.expected.len());
        assert_eq!(file.allocated, self.expected_allocation());
        let cached = |block: &Block| if block.cached { block.len() } else { 0 };
        assert_eq!(file.cached_bytes, file.blocks.iter().map(|(_, block)| cached(block)).sum::<u64>());
        assert_eq!(file.dirty_bytes, file.blocks.iter().map(|(_, block)| block.dirty_len()).sum::<u64>());
    }

    /// What is in memory, and what page rows at the server have when they are not.
    fn expected_allocation(&self) -> u64 {
        let below: u64 = match self.file.pages_lacking {
            true => self.pages.values().flatten().flatten().map(|stored| u64::from(stored.len)).sum(),
            false => 0,
        };
        below + self.file.blocks.iter().map(|(_, block)| block.len()).sum::<u64>()
    }

    fn read(&mut self, offset: u64, len: usize) {
        let mut out = vec![7; len];
        let mut buffer = out.clone();
        let count = {
            let cell = std::cell::RefCell::new(&mut buffer);
            self.retry(|file| file.read(offset, &mut cell.borrow_mut(), 4))
        };
        out.copy_from_slice(&buffer);
        let start = self.expected.len().min(offset as usize);
        let end = self.expected.len().min(offset as usize + len);
        assert_eq!(count, end - start);
        assert!(out[..count] == self.expected[start..end], "wrong bytes at {offset}+{len}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, ..ProptestConfig::default() })]
    #[test]
    fn a_file_holds_what_was_written(steps in steps()) {
        let mut world = World { row: Content::None, ..World::default() };
        for step in steps {
            world.step(step);
        }
        world.read(0, SPAN as usize + 10);
        world.step(Step::Reload);
        world.read(0, SPAN as usize + 10);
    }
}

#[test]
fn holes_and_data_are_found() {
    let mut file = FileData::default();
    file.truncate(10 * BLOCK_SIZE).unwrap();
    file.write(2 * BLOCK_SIZE, &[1; 100]).unwrap();
    file.write(5 * BLOCK_SIZE, &vec![1; 2 * BLOCK_SIZE as usize]).unwrap();
    assert_eq!(file.seek(0, true), Ok(Some(2 * BLOCK_SIZE)));
    assert_eq!(file.seek(2 * BLOCK_SIZE, false), Ok(Some(2 * BLOCK_SIZE + 100)));
    assert_eq!(file.seek(2 * BLOCK_SIZE + 100, true), Ok(Some(5 * BLOCK_SIZE)));
    assert_eq!(file.seek(5 * BLOCK_SIZE, false), Ok(Some(7 * BLOCK_SIZE)));
    assert_eq!(file.seek(7 * BLOCK_SIZE, true), Ok(None));
    assert_eq!(file.seek(10 * BLOCK_SIZE, false), Ok(None));
    let mut full = FileData::default();
    full.write(0, &[1; 10]).unwrap();
    assert_eq!(full.seek(3, false), Ok(Some(10)));
}

#[test]
fn rows_carry_small_files_whole() {
    let mut file = FileData::default();
    file.write(0, b"small").unwrap();
    let cut = file.cut(Sequence(1));
    assert_eq!((cut.inline.as_deref(), cut.blocks.len()), (Some(&b"small"[..]), 0));
    file.write(5, &[9; INLINE_MAX as usize]).unwrap();
    let cut = file.cut(Sequence(2));
    assert_eq!((cut.inline, cut.blocks.len(), cut.pages.len()), (None, 1, 1));
}

#[test]
fn a_file_stays_in_memory_until_its_cut_is_durable() {
    let stored = |byte| Some(BlockRef { hash: ContentHash([byte; 32]), len: BLOCK_SIZE as u32 });
    let row = Content::Blocks((0..16).map(stored).collect());
    for change in
        [|file: &mut FileData| file.truncate(0), |file: &mut FileData| file.punch(0, 5 * BLOCK_SIZE)]
    {
        let mut file = FileData::from_row(16 * BLOCK_SIZE, 16 * BLOCK_SIZE, &row);
        assert!(file.is_all_stored(Sequence(4)));
        change(&mut file).unwrap();
        file.cut(Sequence(5));
        assert!(!file.is_all_stored(Sequence(4)), "the row still names what was removed");
        assert!(file.is_clean(Sequence(5)));
    }
}

#[test]
fn growth_counts_only_what_is_not_there() {
    let mut file = FileData::default();
    file.write(0, &[1; 100]).unwrap();
    file.write(3 * BLOCK_SIZE, &vec![1; BLOCK_SIZE as usize]).unwrap();
    assert_eq!(file.growth(0, 100), Ok(0));
    assert_eq!(file.growth(50, 100), Ok(50));
    assert_eq!(file.growth(0, 1 << 62), Ok((1 << 62) - 100 - BLOCK_SIZE));
    let row = Content::Blocks(vec![None; PAGE_BLOCKS as usize]);
    let paged = FileData::from_row(2 * PAGE_BLOCKS * BLOCK_SIZE, 77, &row);
    assert_eq!(paged.growth(PAGE_BLOCKS * BLOCK_SIZE, 10), Err(Lacking::Pages));
    assert_eq!(paged.allocated(), 77);
}

#[test]
fn what_there_is_no_room_for_goes_and_what_is_stored_stays() {
    let name = |byte, len| BlockRef { hash: ContentHash([byte; 32]), len };
    let block = BLOCK_SIZE as usize;
    let row = Content::Blocks(vec![Some(name(1, BLOCK_SIZE as u32)), None, Some(name(3, 500))]);
    let size = 2 * BLOCK_SIZE + 500;
    let refuse = |file: &mut FileData| {
        let cut = file.cut(Sequence(5));
        cut.blocks.iter().for_each(|(index, data)| {
            file.named(*index, name(99, data.len() as u32), Sequence(5), None);
        });
        file.undo_cut(&cut, Sequence(5));
    };
    let stored =
        |file: &FileData| file.blocks.iter().map(|(index, block)| (*index, block.stored)).collect::<Vec<_>>();
    // What was stored is stored still; what was not, in its middle, is a hole, and beyond it nothing.
    let mut file = FileData::from_row(size, size - BLOCK_SIZE, &row);
    file.write(0, &vec![7; 3 * block]).unwrap();
    file.write(4 * BLOCK_SIZE, &[7; 10]).unwrap();
    refuse(&mut file);
    let lost = file.homeless();
    assert_eq!(lost.iter().map(|(index, _)| *index).collect::<Vec<_>>(), [0, 1, 2, 4]);
    assert_eq!(file.give_up(&lost), Some((size, BLOCK_SIZE + 500)));
    assert_eq!(stored(&file), [(0, Some(name(1, BLOCK_SIZE as u32))), (2, Some(name(3, 500)))]);
    assert_eq!((file.size, file.allocated(), file.dirty_bytes()), (size, BLOCK_SIZE + 500, 0));
    let cut = file.cut(Sequence(5));
    assert!(cut.blocks.is_empty() && cut.inline.is_none());
    assert_eq!(cut.pages, [(0, vec![Some(name(1, BLOCK_SIZE as u32)), None, Some(name(3, 500))])]);
    // What has changed since it was looked at is not given up.
    file.write(0, &vec![8; block]).unwrap();
    let lost = file.homeless();
    file.write(0, &[9; 10]).unwrap();
    assert_eq!(file.give_up(&lost), None);
    // A file of which nothing is stored keeps what fits its row; one that is in its row loses nothing.
    let mut file = FileData::from_row(3, 3, &Content::Inline(Bytes::from_static(b"hay")));
    file.write(3, &vec![7; 2 * block]).unwrap();
    refuse(&mut file);
    let lost = file.homeless();
    assert!(file.give_up(&lost).is_some());
    assert_eq!((file.size, file.allocated(), file.dirty_bytes()), (INLINE_MAX, INLINE_MAX, INLINE_MAX));
    assert!(file.homeless().is_empty());
    assert_eq!(&file.cut(Sequence(5)).inline.unwrap()[..5], b"hay\x07\x07");
}

#[test]
fn a_cut_has_what_there_was_when_it_was_made_whenever_it_is_collected() {
    let budget = crate::cache::budget::Budget::default();
    let file = File::new(FileData::from_row(0, 0, &Content::Inline(Bytes::new())));
    let write = |offset, bytes: &[u8]| budget.with(&file, |data| data.write(offset, bytes)).unwrap();
    write(0, b"before");
    file.data.lock().cut_later(Sequence(1));
    write(0, b"after!");
    let cut = budget.with(&file, |data| data.collect_cut(Sequence(1)));
    assert_eq!(cut.inline.as_deref(), Some(&b"before"[..]));
    // What came behind it is in the next one, also if the file leaves memory meanwhile.
    file.data.lock().cut_later(Sequence(2));
    let left = budget.take(&file);
    assert_eq!(
        budget.with(&file, |data| data.collect_cut(Sequence(2))).inline.as_deref(),
        Some(&b"after!"[..])
    );
    assert!(left.dirty_bytes() == 0 && file.data.lock().is_gone());
    assert_eq!(budget.unshipped(), 0);
}
