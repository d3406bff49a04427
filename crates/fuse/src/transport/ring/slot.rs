//! The memory of one request over io_uring.
//!
//! Layout of `fuse_uring_req_header`, 288 bytes: the header of the message (128), the structure with the
//! fixed fields (128), then `fuse_uring_ent_in_out` with the length of the payload at 16. The payload, names
//! and data in either direction, is a second piece of memory.
#![allow(unsafe_code)]

use std::io;

use crate::handling::engine::{Message, Verdict};
use crate::protocol::abi::{Fields, InHeader, PAGE_SIZE, fixed_size, out_header};
use crate::protocol::reply::{Area, Reply};
use crate::sys::Memory;

/// Size of `fuse_uring_req_header`.
const HEADER_SIZE: usize = 288;
const FIXED_AT: usize = 128;
const PAYLOAD_LEN_AT: usize = 256 + 16;
/// Where in the first page the two vectors are kept which REGISTER points to.
const VECTORS_AT: usize = 1024;

/// One slot: a page for the header, the payload behind it.
pub(super) struct Slot {
    memory: Memory,
    payload_len: usize,
}

impl Slot {
    pub(super) fn new(payload_len: usize) -> io::Result<Slot> {
        let mut memory = Memory::new(PAGE_SIZE + payload_len)?;
        let start = memory.pointer() as usize;
        let vectors = [start, HEADER_SIZE, start + PAGE_SIZE, payload_len];
        let bytes = vectors.map(usize::to_ne_bytes).concat();
        memory.as_mut()[VECTORS_AT..VECTORS_AT + bytes.len()].copy_from_slice(&bytes);
        Ok(Slot { memory, payload_len })
    }

    /// The address of the two vectors (`struct iovec`).
    pub(super) fn vectors(&self) -> u64 {
        self.memory.pointer() as u64 + VECTORS_AT as u64
    }

    /// Gives the payload's memory back to the host.
    ///
    /// # Safety
    /// The slot must hold neither a request nor an answer, and nobody else may use it meanwhile.
    pub(super) unsafe fn release(&self) {
        self.memory.release(PAGE_SIZE);
    }

    /// The request's header.
    ///
    /// # Safety
    /// The slot must hold a request that is not answered yet, and nobody else may use it meanwhile.
    pub(super) unsafe fn request(&self) -> Option<InHeader> {
        // SAFETY: the caller has the slot to itself.
        let (head, _) = unsafe { self.pieces() };
        InHeader::parse(head).ok()
    }

    /// The number of the request that was answered.
    ///
    /// # Safety
    /// The slot must hold an answer, and nobody else may use it meanwhile.
    pub(super) unsafe fn answered(&self) -> Option<u64> {
        // SAFETY: the caller has the slot to itself.
        let (head, _) = unsafe { self.pieces() };
        // `fuse_out_header.unique` and `fuse_in_header.unique` are at the same place.
        Fields(&head[8..]).u64().ok()
    }

    /// Lets `serve` answer the request in place. Returns false, with the request as it was, for
    /// [`Verdict::Again`].
    ///
    /// # Safety
    /// The slot must hold a request that is not answered yet, and nobody else may use it meanwhile.
    pub(super) unsafe fn handle(&self, serve: impl FnOnce(&Message<'_>, &mut Reply<'_>) -> Verdict) -> bool {
        // SAFETY: the caller has the slot to itself.
        let (head, payload) = unsafe { self.pieces() };
        handle(head, payload, serve)
    }

    /// # Safety
    /// Nobody else, the kernel included, may use the slot while the slices live.
    #[allow(clippy::mut_from_ref)]
    unsafe fn pieces(&self) -> (&mut [u8], &mut [u8]) {
        let start = self.memory.pointer();
        // SAFETY: the memory is PAGE_SIZE + payload_len bytes long, initialized, and the two pieces don't
        // overlap; that nobody else uses it is what the caller vouches for.
        unsafe {
            let head = std::slice::from_raw_parts_mut(start, HEADER_SIZE);
            (head, std::slice::from_raw_parts_mut(start.add(PAGE_SIZE), self.payload_len))
        }
    }
}

fn handle(
    head: &mut [u8],
    payload: &mut [u8],
    serve: impl FnOnce(&Message<'_>, &mut Reply<'_>) -> Verdict,
) -> bool {
    let len = Fields(&head[PAYLOAD_LEN_AT..]).u32().map_or(0, |len| len as usize).min(payload.len());
    let Ok(header) = InHeader::parse(head) else { return true };
    let fixed = &head[FIXED_AT..FIXED_AT + fixed_size(header.opcode)];
    let message = Message { header, fixed, rest: &[] };
    let capacity = message.capacity(payload.len());
    let (error, answer_len) = if capacity == 0 {
        // Names and data stay where they are; the answer comes into their place afterwards.
        let mut reply = Reply::new(header.opcode, 0, Area::Owned(Vec::new()));
        let error = match serve(&Message { rest: &payload[..len], ..message }, &mut reply) {
            Verdict::Answer(error) => error,
            Verdict::Again => return false,
        };
        let (fixed, _) = reply.parts();
        payload[..fixed.len()].copy_from_slice(fixed);
        (error, fixed.len())
    } else {
        // The answer is written into the payload, so what is there (a name, rarely) moves out first.
        let rest = payload[..len].to_vec();
        let mut reply = Reply::new(header.opcode, capacity, Area::Shared(payload));
        match serve(&Message { rest: &rest, ..message }, &mut reply) {
            Verdict::Answer(error) => (error, reply.join()),
            Verdict::Again => {
                payload[..len].copy_from_slice(&rest);
                return false;
            }
        }
    };
    let answer_len = if error == 0 { answer_len } else { 0 };
    let out = out_header(header.unique, error, answer_len);
    head[..out.len()].copy_from_slice(&out);
    head[PAYLOAD_LEN_AT..PAYLOAD_LEN_AT + 4].copy_from_slice(&(answer_len as u32).to_ne_bytes());
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::abi::opcode;

    fn request(opcode: u32, fixed: &[u8], rest: &[u8]) -> (Vec<u8>, Vec<u8>) {
        let mut head = vec![0; HEADER_SIZE];
        head[4..8].copy_from_slice(&opcode.to_ne_bytes());
        head[8..16].copy_from_slice(&77u64.to_ne_bytes());
        head[FIXED_AT..FIXED_AT + fixed.len()].copy_from_slice(fixed);
        head[PAYLOAD_LEN_AT..PAYLOAD_LEN_AT + 4].copy_from_slice(&(rest.len() as u32).to_ne_bytes());
        let mut payload = rest.to_vec();
        payload.resize(8192, 0xee);
        (head, payload)
    }

    fn outcome(head: &[u8]) -> (u32, i32, u64, u32) {
        let mut fields = Fields(head);
        let (len, error, unique) = (fields.u32().unwrap(), fields.u32().unwrap(), fields.u64().unwrap());
        (len, error as i32, unique, Fields(&head[PAYLOAD_LEN_AT..]).u32().unwrap())
    }

    #[test]
    fn small_answers_take_the_place_of_the_name() {
        let (mut head, mut payload) = request(opcode::LOOKUP, &[], b"name\0");
        assert!(handle(&mut head, &mut payload, |message, reply| {
            assert_eq!(message.rest, b"name\0");
            reply.lseek(0x0102);
            Verdict::Answer(0)
        }));
        assert_eq!(outcome(&head), (24, 0, 77, 8));
        assert_eq!(payload[..8], 0x0102u64.to_ne_bytes());
    }

    #[test]
    fn content_is_written_in_place_and_requests_survive_being_deferred() {
        let (mut head, mut payload) = request(opcode::GETXATTR, &[16, 0, 0, 0, 0, 0, 0, 0], b"user.a\0");
        assert!(!handle(&mut head, &mut payload, |_, reply| {
            reply.data(b"overwritten");
            Verdict::Again
        }));
        assert!(handle(&mut head, &mut payload, |message, reply| {
            reply.buffer()[..5].copy_from_slice(b"value");
            reply.filled(5);
            assert_eq!(message.rest, b"user.a\0");
            Verdict::Answer(0)
        }));
        assert_eq!(outcome(&head), (21, 0, 77, 5));
        assert_eq!(&payload[..5], b"value");
    }

    #[test]
    fn errors_have_no_content_and_ioctls_have_both_pieces() {
        let (mut head, mut payload) = request(opcode::MKDIR, &[0; 8], b"name\0");
        assert!(handle(&mut head, &mut payload, |_, reply| {
            reply.lseek(1);
            Verdict::Answer(-libc::EEXIST)
        }));
        assert_eq!(outcome(&head), (16, -libc::EEXIST, 77, 0));
        let mut fixed = [0; 32];
        fixed[28] = 4;
        let (mut head, mut payload) = request(opcode::IOCTL, &fixed, &[]);
        assert!(handle(&mut head, &mut payload, |_, reply| {
            reply.ioctl(9, b"data");
            Verdict::Answer(0)
        }));
        assert_eq!(outcome(&head), (36, 0, 77, 20));
        assert_eq!((payload[0], &payload[16..20]), (9, &b"data"[..]));
    }
}
