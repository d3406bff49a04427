//! An object in encrypted blocks, so that a part of it can be read without the rest.
//!
//! ```text
//! block: object's id (16, random) | up to 16 KiB, encrypted | tag (16)
//! ```
//! The nonce of a block is the id and the block's number; its associated data are the object's path, and whether it is the last
//! one. So a block opens only at its place, of its object, and an object that was cut short does not open at its end. An empty
//! object is one empty block.

use chacha20poly1305::aead::AeadInOut;
use chacha20poly1305::{Tag, XChaCha20Poly1305, XNonce};

/// Bytes of content in a block.
pub(super) const BLOCK: u64 = 16 << 10;
const ID: usize = 16;
const TAG: usize = 16;
/// Bytes that a block has beside its content.
const MORE: u64 = (ID + TAG) as u64;
/// Bytes of a whole block.
pub(super) const SEALED_BLOCK: u64 = BLOCK + MORE;

/// Random, of one object as it was written once.
pub(super) type Id = [u8; ID];

/// Size of the object that `len` bytes of content become.
pub(super) fn sealed_len(len: u64) -> u64 {
    len + len.div_ceil(BLOCK).max(1) * MORE
}

/// Size of the content of an object of `sealed` bytes; what can be none has as good as nothing.
pub(super) fn content_len(sealed: u64) -> u64 {
    sealed.saturating_sub(sealed.div_ceil(SEALED_BLOCK) * MORE)
}

/// Encrypts and opens the blocks of one object.
pub(super) struct Blocks<'a> {
    cipher: &'a XChaCha20Poly1305,
    /// The path, and whether it is the last block.
    data: Vec<u8>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(cipher: &'a XChaCha20Poly1305, path: &str) -> Blocks<'a> {
        let mut data = path.as_bytes().to_vec();
        data.push(0);
        Blocks { cipher, data }
    }

    fn data(&mut self, is_last: bool) -> &[u8] {
        *self.data.last_mut().expect("one byte") = is_last.into();
        &self.data
    }

    /// Appends a block to `out`: its content is what `fill` appends.
    pub(super) fn seal(
        &mut self,
        id: &Id,
        number: u64,
        is_last: bool,
        out: &mut Vec<u8>,
        fill: impl FnOnce(&mut Vec<u8>),
    ) {
        out.extend_from_slice(id);
        let start = out.len();
        fill(out);
        let cipher = self.cipher;
        let sealed =
            cipher.encrypt_inout_detached(&nonce(id, number), self.data(is_last), (&mut out[start..]).into());
        out.extend_from_slice(&sealed.expect("a block is not too long"));
    }

    /// Appends the content of a block to `out`; `false`: it is none, or of another place.
    pub(super) fn open(&mut self, number: u64, is_last: bool, sealed: &[u8], out: &mut Vec<u8>) -> bool {
        let Some((id, rest)) = sealed.split_first_chunk::<ID>() else { return false };
        let Some((content, tag)) = rest.split_last_chunk::<TAG>() else { return false };
        let start = out.len();
        out.extend_from_slice(content);
        let (cipher, tag) = (self.cipher, Tag::from(*tag));
        let part = (&mut out[start..]).into();
        let opened = cipher.decrypt_inout_detached(&nonce(id, number), self.data(is_last), part, &tag);
        if opened.is_err() {
            out.truncate(start);
        }
        opened.is_ok()
    }
}

fn nonce(id: &Id, number: u64) -> XNonce {
    let mut nonce = [0; ID + 8];
    nonce[..ID].copy_from_slice(id);
    nonce[ID..].copy_from_slice(&number.to_le_bytes());
    nonce.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::StoreKey;

    #[test]
    fn sizes_are_told_from_each_other() {
        for len in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK, 10 * BLOCK + 7] {
            assert_eq!(content_len(sealed_len(len)), len);
        }
        assert_eq!((content_len(0), content_len(MORE - 1)), (0, 0));
    }

    #[test]
    fn a_block_opens_at_its_place_alone() {
        let (key, other) = (StoreKey::new([7; 32]).objects(), StoreKey::new([8; 32]).objects());
        let mut out = Vec::new();
        Blocks::new(&key, "packs/a").seal(&[1; ID], 3, false, &mut out, |out| out.extend(b"content"));
        assert_eq!(out.len() as u64, sealed_len(7));
        assert!(!out.windows(7).any(|part| part == b"content"));
        let open = |key, path, number, is_last, sealed: &[u8]| {
            let mut content = Vec::new();
            Blocks::new(key, path).open(number, is_last, sealed, &mut content).then_some(content)
        };
        assert_eq!(open(&key, "packs/a", 3, false, &out).unwrap(), b"content");
        assert!(open(&key, "packs/b", 3, false, &out).is_none(), "of another object");
        assert!(open(&key, "packs/a", 4, false, &out).is_none(), "at another place");
        assert!(open(&key, "packs/a", 3, true, &out).is_none(), "as the end");
        assert!(open(&other, "packs/a", 3, false, &out).is_none(), "by another key");
        for at in 0..out.len() {
            let mut flipped = out.clone();
            flipped[at] ^= 1;
            assert!(open(&key, "packs/a", 3, false, &flipped).is_none(), "byte {at}");
            assert!(open(&key, "packs/a", 3, false, &out[..at]).is_none(), "{at} bytes");
        }
    }
}
