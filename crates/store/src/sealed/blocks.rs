//! An object in encrypted blocks, so that a part of it can be read without the rest.
//!
//! ```text
//! block: object's id (16, random) | up to 16 KiB, encrypted | tag (16)
//! ```
//! The nonce of a block is the id and the block's number; its associated data are the object's path, and whether it is the last
//! one. So a block opens only at its place, of its object, and an object that was cut short does not open at its end. An empty
//! object is one empty block.
//!
//! XChaCha20-Poly1305 is ChaCha20-Poly1305 by a key that HChaCha20 makes of the key and the first 16 bytes of the nonce: here of the
//! id, so once for an object. The rest is ring's, which is twice as fast as portable code.

use bytes::Bytes;
use chacha20::{R20, hchacha};
use object_store::PutPayload;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

/// Bytes of content in a block.
pub(super) const BLOCK: u64 = 16 << 10;
const ID: usize = 16;
const TAG: usize = 16;
/// Bytes that a block has beside its content.
const MORE: u64 = (ID + TAG) as u64;
/// Bytes of a whole block.
pub(super) const SEALED_BLOCK: u64 = BLOCK + MORE;

/// Bytes that are given to the store below in one part: some 256 KiB. One part of many MiB costs a disk's store more than all of
/// the encryption, since the kernel then looks for pieces of memory of its page cache that are as large.
const PART: usize = 16 * SEALED_BLOCK as usize;

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

/// The key of all objects.
#[derive(Clone)]
pub(super) struct Cipher([u8; 32]);

impl std::fmt::Debug for Cipher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cipher")
    }
}

impl Cipher {
    pub(super) fn new(key: [u8; 32]) -> Cipher {
        Cipher(key)
    }

    /// What blocks with this id are encrypted with.
    fn of(&self, id: &Id) -> LessSafeKey {
        let key = hchacha::<R20>(&self.0.into(), &(*id).into());
        LessSafeKey::new(
            UnboundKey::new(&CHACHA20_POLY1305, &key).expect("the key is as long as it has to be"),
        )
    }
}

/// Encrypts and opens the blocks of one object.
pub(super) struct Blocks<'a> {
    cipher: &'a Cipher,
    /// What the last block was encrypted with.
    key: Option<(Id, LessSafeKey)>,
    /// The path, and whether it is the last block.
    data: Vec<u8>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(cipher: &'a Cipher, path: &str) -> Blocks<'a> {
        let mut data = path.as_bytes().to_vec();
        data.push(0);
        Blocks { cipher, key: None, data }
    }

    /// The key of a block, and what its place says.
    fn place(&mut self, id: &Id, is_last: bool) -> (&LessSafeKey, Aad<&[u8]>) {
        *self.data.last_mut().expect("one byte") = is_last.into();
        if self.key.as_ref().is_none_or(|(of, _)| of != id) {
            self.key = Some((*id, self.cipher.of(id)));
        }
        let (_, key) = self.key.as_ref().expect("it was just made");
        (key, Aad::from(&self.data))
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
        let (key, place) = self.place(id, is_last);
        let sealed = key.seal_in_place_separate_tag(nonce(number), place, &mut out[start..]);
        out.extend_from_slice(sealed.expect("a block is not too long").as_ref());
    }

    /// Appends the content of a block to `out`; `false`: it is none, or of another place.
    pub(super) fn open(&mut self, number: u64, is_last: bool, sealed: &[u8], out: &mut Vec<u8>) -> bool {
        let Some((id, rest)) = sealed.split_first_chunk::<ID>() else { return false };
        if rest.len() < TAG {
            return false;
        }
        let start = out.len();
        out.extend_from_slice(rest);
        let (key, place) = self.place(id, is_last);
        let opened = key.open_in_place(nonce(number), place, &mut out[start..]).map(|content| content.len());
        out.truncate(start + opened.unwrap_or(0));
        opened.is_ok()
    }
}

/// What blocks are written to: parts of an object.
pub(super) struct Parts {
    done: Vec<Bytes>,
    part: Vec<u8>,
    /// Bytes that are still to come, with `part`.
    left: usize,
}

impl Parts {
    /// For so many bytes of blocks.
    pub(super) fn new(len: u64) -> Parts {
        Parts { done: Vec::new(), part: Vec::new(), left: len as usize }
    }

    /// Where the next block goes.
    pub(super) fn next(&mut self) -> &mut Vec<u8> {
        if self.part.len() >= PART {
            self.left -= self.part.len();
            self.done.push(std::mem::take(&mut self.part).into());
        }
        if self.part.capacity() == 0 {
            self.part.reserve_exact(self.left.min(PART));
        }
        &mut self.part
    }

    /// All of it.
    pub(super) fn payload(self) -> PutPayload {
        self.done.into_iter().chain([self.part.into()]).collect()
    }
}

/// What is left of the nonce: the number, behind four bytes of nought.
fn nonce(number: u64) -> Nonce {
    let mut nonce = [0; 12];
    nonce[4..].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(nonce)
}

#[cfg(test)]
mod tests {
    use chacha20poly1305::aead::{Aead, Payload};
    use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};

    use super::*;
    use crate::StoreKey;

    #[test]
    fn sizes_are_told_from_each_other() {
        for len in [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK, 10 * BLOCK + 7] {
            assert_eq!(content_len(sealed_len(len)), len);
        }
        assert_eq!((content_len(0), content_len(MORE - 1)), (0, 0));
    }

    /// What earlier versions have stored is read, and what is stored is what the format says.
    #[test]
    fn blocks_are_those_of_xchacha20_poly1305() {
        let (key, id, number) = ([7; 32], [3; ID], 258_u64);
        let whole = XChaCha20Poly1305::new(&key.into());
        let nonce: Vec<u8> = id.into_iter().chain(number.to_le_bytes()).collect();
        let payload = Payload { msg: b"content", aad: b"packs/a\x01" };
        let expected = whole.encrypt(&XNonce::try_from(&nonce[..]).unwrap(), payload).unwrap();
        let mut out = Vec::new();
        Blocks::new(&Cipher::new(key), "packs/a")
            .seal(&id, number, true, &mut out, |out| out.extend(b"content"));
        assert_eq!((&out[..ID], &out[ID..]), (&id[..], &expected[..]));
    }

    #[test]
    fn parts_are_of_one_size_and_take_what_they_need() {
        for blocks in [1, 15, 16, 17, 40] {
            let mut parts = Parts::new(blocks * SEALED_BLOCK);
            (0..blocks).for_each(|at| parts.next().extend([at as u8; SEALED_BLOCK as usize]));
            assert!(parts.part.capacity() <= parts.part.len());
            let payload = parts.payload();
            let sizes: Vec<usize> = payload.iter().map(Bytes::len).collect();
            assert_eq!(sizes.iter().sum::<usize>() as u64, blocks * SEALED_BLOCK);
            assert!(sizes.iter().rev().skip(1).all(|size| *size == PART) && sizes[0] <= PART, "{sizes:?}");
            let numbers = payload.iter().flatten().step_by(SEALED_BLOCK as usize).map(|at| u64::from(*at));
            assert!(numbers.eq(0..blocks));
        }
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
