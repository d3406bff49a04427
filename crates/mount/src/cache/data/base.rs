//! Pages that the kernel writes back after others may have changed the file: only what was stored into them is written.

use std::sync::Arc;

use hayloft_model::{BLOCK_SIZE, PAGE_BLOCKS, blocks_of};

use super::{FileData, Lacking};

/// Bytes of a page of the kernel.
pub(crate) const PAGE: u64 = 4096;

/// What a part of a file was at some time.
#[derive(Debug)]
pub(crate) enum Base {
    Blocks {
        /// In order of their index; none: it was not in memory. What lacks is a hole.
        blocks: Vec<(u64, Option<Arc<Vec<u8>>>)>,
        /// Nothing is known of blocks from here on.
        end: u64,
    },
    /// What was written last, from an offset in the file on.
    Written { offset: u64, bytes: Vec<u8> },
}

impl Base {
    /// Of a file that is all in its row.
    pub(crate) fn inline(bytes: &[u8]) -> Base {
        Base::Blocks { blocks: vec![(0, Some(Arc::new(bytes.to_vec())))], end: u64::MAX }
    }

    /// What it takes.
    pub(crate) fn bytes(&self) -> u64 {
        match self {
            Base::Blocks { blocks, .. } => {
                blocks.iter().flat_map(|(_, data)| data).map(|data| data.len() as u64).sum()
            }
            Base::Written { bytes, .. } => bytes.len() as u64,
        }
    }

    /// A part of a page, at an offset in the file; `None`: it is not known.
    fn read(&self, offset: u64, len: usize) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        let (data, start) = match self {
            Base::Written { offset: start, bytes } => (bytes, *start),
            Base::Blocks { blocks, end } => {
                let index = offset / BLOCK_SIZE;
                match blocks.binary_search_by_key(&index, |(index, _)| *index) {
                    Ok(at) => (&**blocks[at].1.as_ref()?, index * BLOCK_SIZE),
                    Err(_) => return (index < *end).then_some(bytes),
                }
            }
        };
        let data = data.get(offset.checked_sub(start)? as usize..).unwrap_or_default();
        let there = len.min(data.len());
        bytes[..there].copy_from_slice(&data[..there]);
        Some(bytes)
    }
}

impl FileData {
    /// What these bytes of the file are; `None`: it has left memory.
    pub(crate) fn base(&self, offset: u64, len: u64) -> Option<Base> {
        let (first, last) = (offset / BLOCK_SIZE, blocks_of(offset.saturating_add(len)));
        if self.is_gone() {
            return None;
        }
        let at = self.find(first).unwrap_or_else(|at| at);
        let of_range = self.blocks[at..].iter().take_while(|(index, _)| *index < last);
        let of_block = |(index, block): &(u64, super::Block)| match (&block.data, block.stored) {
            (None, None) => None,
            (data, _) => Some((*index, data.clone())),
        };
        let end = if self.pages_lacking { PAGE_BLOCKS } else { u64::MAX };
        Some(Base::Blocks { blocks: of_range.filter_map(of_block).collect(), end })
    }

    /// Writes what differs of `bytes` from what their pages were, as far as that is known (`bases`, the first one of the page at
    /// `offset`). Returns whether that leaves what was there of others.
    pub(crate) fn merge(
        &mut self,
        offset: u64,
        bytes: &[u8],
        bases: &[Option<Arc<Base>>],
    ) -> Result<bool, Lacking> {
        let mut merged = bytes.to_vec();
        let first = offset / PAGE;
        let mut at = offset;
        while at < offset + bytes.len() as u64 {
            let stop = ((at / PAGE + 1) * PAGE).min(offset + bytes.len() as u64);
            let part = (at - offset) as usize..(stop - offset) as usize;
            let base = bases.get((at / PAGE - first) as usize).and_then(Option::as_ref);
            if let Some(base) = base.and_then(|base| base.read(at, part.len())) {
                let mut now = vec![0; part.len()];
                self.read(at, &mut now, 0)?;
                let stored = bytes[part.clone()].iter().zip(&base).zip(&now);
                for (merged, ((stored, base), now)) in merged[part].iter_mut().zip(stored) {
                    *merged = if stored == base { *now } else { *stored };
                }
            }
            at = stop;
        }
        self.write(offset, &merged)?;
        Ok(merged != bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SIZE: usize = 3 * BLOCK_SIZE as usize;

    fn file(bytes: &[u8]) -> FileData {
        let mut file = FileData::from_row(0, 0, &hayloft_model::Content::None);
        file.write(0, bytes).unwrap();
        file
    }

    fn stores() -> impl Strategy<Value = Vec<(usize, u8)>> {
        proptest::collection::vec((0..SIZE, 1..255u8), 0..20)
    }

    proptest! {
        /// Two hosts store into the same pages, each at places of its own.
        #[test]
        fn what_others_have_stored_beside_it_stays(
            here in stores(),
            there in stores(),
            from in 0..SIZE as u64 / PAGE,
            count in 1..20u64,
        ) {
            let before: Vec<u8> = (0..SIZE).map(|at| (at / 4096) as u8).collect();
            let mut data = file(&before);
            let (offset, len) = (from * PAGE, (count * PAGE).min(SIZE as u64 - from * PAGE) as usize);
            let base = Arc::new(data.base(offset, len as u64).unwrap());
            let whole = Arc::new(data.base(0, u64::MAX).unwrap());
            let mut expected = before.clone();
            for (at, byte) in &there {
                data.write(*at as u64, &[*byte]).unwrap();
                expected[*at] = *byte;
            }
            let range = offset as usize..offset as usize + len;
            let mut stored = before[range.clone()].to_vec();
            for (at, byte) in here.iter().filter(|(at, _)| range.contains(at)) {
                stored[at - range.start] = *byte;
            }
            for (at, byte) in range.clone().zip(&stored).filter(|(at, byte)| before[*at] != **byte) {
                expected[at] = *byte;
            }
            let pages = len.div_ceil(PAGE as usize);
            let bases: Vec<_> = (0..pages).map(|at| Some(if at % 2 == 0 { &base } else { &whole }).cloned()).collect();
            data.merge(offset, &stored, &bases).unwrap();
            let mut now = vec![0; SIZE];
            data.read(0, &mut now, 0).unwrap();
            let wrong: Vec<usize> = (0..SIZE).filter(|at| now[*at] != expected[*at]).collect();
            prop_assert!(wrong.is_empty(), "{wrong:?}");
        }
    }

    #[test]
    fn a_page_whose_base_is_not_known_is_written_whole() {
        let mut data = file(&[1; 8192]);
        let base = Arc::new(data.base(0, 8192).unwrap());
        data.write(0, &[2; 8192]).unwrap();
        let mut stored = vec![1; 8192];
        (stored[10], stored[5000]) = (3, 3);
        data.merge(0, &stored, &[None, Some(base)]).unwrap();
        let mut now = vec![0; 8192];
        data.read(0, &mut now, 0).unwrap();
        assert_eq!((now[9], now[10], now[4999], now[5000]), (1, 3, 2, 3));
    }

    #[test]
    fn of_a_hole_the_base_is_zero_and_of_what_is_not_in_memory_there_is_none() {
        let data = FileData::from_row(8192, 0, &hayloft_model::Content::None);
        assert_eq!(data.base(0, 8192).unwrap().read(4096, 3), Some(vec![0; 3]));
        let reference = hayloft_model::BlockRef { hash: hayloft_model::ContentHash([7; 32]), len: 100 };
        let content = hayloft_model::Content::Blocks(vec![Some(reference)]);
        assert_eq!(FileData::from_row(100, 100, &content).base(0, 100).unwrap().read(0, 10), None);
        assert!(FileData::gone().base(0, 100).is_none());
        assert_eq!(Base::inline(b"abc").read(1, 4), Some(b"bc\0\0".to_vec()));
    }
}
