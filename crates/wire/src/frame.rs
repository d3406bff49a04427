//! Framing: a length, checks, and a message.
//!
//! The header is three numbers of 32 bits, little endian: the length of the message with the highest bit set; CRC-32C of the message;
//! CRC-32C of the frame's number in its direction of the connection (64 bits, from 0, not sent) and of the two before. So what is
//! flipped, cut out, doubled or put elsewhere is noticed, and a length is known to be right before anybody waits for so many
//! bytes. The bit tells it from the framing of protocol 7 and earlier, which had the length alone.

use bytes::{Buf, Bytes, BytesMut};
use prost::Message;

use crate::FRAME_MAX;

/// Bytes before each message.
pub const HEADER: usize = 12;

/// Bytes before a message in protocol 7 and earlier.
const PLAIN_HEADER: usize = 4;

/// In the first number of a header: checks follow.
const CHECKED: u32 = 1 << 31;

/// What is wrong with incoming bytes: end the connection.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The length is over the limit.
    #[error("a frame of {len} bytes is over the limit of {limit}")]
    TooLarge {
        /// What the header says.
        len: usize,
        /// Most that is taken.
        limit: usize,
    },
    /// The header has no checks: see [`take_plain`].
    #[error("a frame without a checksum: the other side is of an earlier version, or no Hayloft program")]
    Plain,
    /// What has arrived is not what was sent.
    #[error(
        "frame {number} is damaged, or not the one that was sent: something between the two changes what they say"
    )]
    Damaged {
        /// Which one, from 0.
        number: u64,
    },
    /// A message of so many parts that it would take far more memory than its bytes.
    #[error("a message of more than {limit} parts")]
    TooMany {
        /// Most that are taken.
        limit: usize,
    },
    /// The bytes are no message, seen before they are decoded.
    #[error("a message without a form")]
    Shapeless,
    /// The bytes are no message.
    #[error("an unreadable message")]
    Undecodable(#[from] prost::DecodeError),
}

impl FrameError {
    /// Whether it was changed on its way, and is right when it is sent again.
    pub fn is_damage(&self) -> bool {
        matches!(self, FrameError::Damaged { .. })
    }
}

/// Appends `message` as a frame to `buffer`, which is to be sealed before it is sent: see [`Sealer`].
pub fn encode<M: Message>(message: &M, buffer: &mut Vec<u8>) {
    let len = message.encoded_len();
    let start = buffer.len();
    buffer.reserve(HEADER + len);
    buffer.extend_from_slice(&(len as u32 | CHECKED).to_le_bytes());
    buffer.extend_from_slice(&[0; HEADER - 4]);
    message.encode(buffer).expect("a Vec grows as needed");
    let check = crc32c::crc32c(&buffer[start + HEADER..]);
    buffer[start + 4..start + 8].copy_from_slice(&check.to_le_bytes());
}

/// Appends `message` in the framing of protocol 7 and earlier, for whoever speaks it.
pub fn encode_plain<M: Message>(message: &M, buffer: &mut Vec<u8>) {
    buffer.extend_from_slice(&(message.encoded_len() as u32).to_le_bytes());
    message.encode(buffer).expect("a Vec grows as needed");
}

/// The check of a header: of the frame's number, and of the header's first eight bytes.
fn seal_of(number: u64, header: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&number.to_le_bytes()), &header[..8])
}

fn number_at(header: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(header[at..at + 4].try_into().expect("four bytes"))
}

/// The sending end of a connection: counts its frames.
#[derive(Debug, Default)]
pub struct Sealer {
    next: u64,
}

impl Sealer {
    /// Completes frames that [`encode`] has made. They are sent as a whole, in the order of the calls.
    pub fn seal(&mut self, frames: &mut [u8]) {
        let mut rest = frames;
        while !rest.is_empty() {
            let len = (number_at(rest, 0) & !CHECKED) as usize;
            let seal = seal_of(self.next, rest);
            rest[8..HEADER].copy_from_slice(&seal.to_le_bytes());
            self.next += 1;
            rest = &mut rest[HEADER + len..];
        }
    }
}

/// The receiving end of a connection: counts its frames, and looks at their checks.
#[derive(Debug)]
pub struct Opener {
    next: u64,
    limit: usize,
}

impl Default for Opener {
    fn default() -> Opener {
        Opener { next: 0, limit: FRAME_MAX }
    }
}

impl Opener {
    /// One that takes messages of at most so many bytes.
    pub fn with_limit(limit: usize) -> Opener {
        Opener { next: 0, limit }
    }

    /// From now on so many bytes are taken.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Frames that were taken.
    pub fn taken(&self) -> u64 {
        self.next
    }

    /// The length of the message at the front of `buffer`, as its header says; `None` when more bytes are needed.
    ///
    /// # Errors
    /// When the bytes cannot be a frame, or are not the one that was sent.
    pub fn length(&self, buffer: &[u8]) -> Result<Option<usize>, FrameError> {
        let Some(first) = buffer.first_chunk::<4>() else { return Ok(None) };
        let first = u32::from_le_bytes(*first);
        if first & CHECKED == 0 {
            return Err(if self.next == 0 { FrameError::Plain } else { self.damaged() });
        }
        if buffer.len() < HEADER {
            return Ok(None);
        }
        if number_at(buffer, 8) != seal_of(self.next, buffer) {
            return Err(self.damaged());
        }
        let (len, limit) = ((first & !CHECKED) as usize, self.limit);
        if len > limit { Err(FrameError::TooLarge { len, limit }) } else { Ok(Some(len)) }
    }

    fn damaged(&self) -> FrameError {
        FrameError::Damaged { number: self.next }
    }

    /// Whether one whole frame is at the front of `buffer`, or what can be none.
    pub fn has_next(&self, buffer: &BytesMut) -> bool {
        match self.length(buffer) {
            Ok(None) => false,
            Ok(Some(len)) => buffer.len() >= HEADER + len,
            Err(_) => true,
        }
    }

    /// Takes the bytes of one whole message off the front of `buffer`; `None` when more are needed.
    ///
    /// # Errors
    /// When they cannot be a frame, or are not the one that was sent.
    pub fn take_bytes(&mut self, buffer: &mut BytesMut) -> Result<Option<Bytes>, FrameError> {
        let Some(len) = self.length(buffer)? else { return Ok(None) };
        if buffer.len() < HEADER + len {
            return Ok(None);
        }
        if number_at(buffer, 4) != crc32c::crc32c(&buffer[HEADER..HEADER + len]) {
            return Err(self.damaged());
        }
        self.next += 1;
        buffer.advance(HEADER);
        Ok(Some(buffer.split_to(len).freeze()))
    }

    /// Takes one whole message off the front of `buffer`; `None` when more bytes are needed. Byte fields
    /// of the message share the buffer's memory.
    ///
    /// # Errors
    /// When the bytes cannot be a frame, are not the one that was sent, or no message.
    pub fn take<M: Message + Default>(&mut self, buffer: &mut BytesMut) -> Result<Option<M>, FrameError> {
        Ok(self.take_bytes(buffer)?.map(M::decode).transpose()?)
    }
}

/// Takes one whole message in the framing of protocol 7 and earlier off the front of `buffer`; `None` when more bytes are needed.
///
/// # Errors
/// When the bytes cannot be one of at most `limit` bytes.
pub fn take_plain<M: Message + Default>(
    buffer: &mut BytesMut,
    limit: usize,
) -> Result<Option<M>, FrameError> {
    let Some(header) = buffer.first_chunk::<PLAIN_HEADER>() else { return Ok(None) };
    let len = u32::from_le_bytes(*header) as usize;
    if len > limit {
        return Err(FrameError::TooLarge { len, limit });
    }
    if buffer.len() < PLAIN_HEADER + len {
        return Ok(None);
    }
    buffer.advance(PLAIN_HEADER);
    Ok(Some(M::decode(buffer.split_to(len))?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{ClientMessage, Enter, client_message::Body};

    fn messages() -> Vec<ClientMessage> {
        let enter = |dir| Enter { dir, budget_bytes: dir * 1000, ..Enter::default() };
        (0..20).map(|dir| ClientMessage { request: dir, body: Some(Body::Enter(enter(dir))) }).collect()
    }

    fn sealed(messages: &[ClientMessage]) -> Vec<u8> {
        let (mut bytes, mut sealer) = (Vec::new(), Sealer::default());
        // Some are gathered, as they are at the server.
        for part in messages.chunks(3) {
            let mut frames = Vec::new();
            part.iter().for_each(|message| encode(message, &mut frames));
            sealer.seal(&mut frames);
            bytes.append(&mut frames);
        }
        bytes
    }

    /// The messages in these bytes, up to where something is wrong with them; whether that was the case.
    fn opened(bytes: &[u8], step: usize) -> (Vec<ClientMessage>, bool) {
        let (mut buffer, mut opener, mut out) = (BytesMut::new(), Opener::default(), Vec::new());
        for part in bytes.chunks(step) {
            buffer.extend_from_slice(part);
            while opener.has_next(&buffer) {
                match opener.take::<ClientMessage>(&mut buffer) {
                    Ok(message) => out.push(message.expect("a whole one")),
                    Err(_) => return (out, true),
                }
            }
        }
        (out, false)
    }

    #[test]
    fn frames_come_out_as_they_went_in_however_they_are_cut() {
        let bytes = sealed(&messages());
        for step in [1, 3, 7, bytes.len()] {
            assert_eq!(opened(&bytes, step), (messages(), false));
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed_where_it_is() {
        let bytes = sealed(&messages()[..4]);
        for bit in 0..bytes.len() * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let (out, is_told) = opened(&flipped, flipped.len());
            assert!(is_told, "bit {bit}");
            assert_eq!(out[..], messages()[..out.len()], "bit {bit}");
        }
    }

    #[test]
    fn what_is_no_frame_is_refused_by_its_header() {
        let mut buffer = BytesMut::from(&b"HTTP/1.1 200 OK"[..]);
        assert!(matches!(Opener::default().take::<ClientMessage>(&mut buffer), Err(FrameError::Plain)));
        let mut frame = sealed(&messages()[5..6]);
        frame.truncate(HEADER);
        let opened = Opener::with_limit(2).length(&frame);
        assert!(matches!(opened, Err(FrameError::TooLarge { limit: 2, .. })), "{opened:?}");
    }

    #[test]
    fn the_framing_of_earlier_versions_is_understood() {
        let mut plain = Vec::new();
        encode_plain(&messages()[3], &mut plain);
        let mut buffer = BytesMut::from(&plain[..]);
        assert!(matches!(Opener::default().length(&buffer), Err(FrameError::Plain)));
        assert_eq!(take_plain::<ClientMessage>(&mut buffer, 100).unwrap(), Some(messages()[3].clone()));
        let mut buffer = BytesMut::from(&plain[..]);
        assert!(matches!(take_plain::<ClientMessage>(&mut buffer, 1), Err(FrameError::TooLarge { .. })));
    }

    /// A part of the stream, and what becomes of it.
    #[derive(Clone, Debug)]
    enum Harm {
        Cut(usize, usize),
        Double(usize, usize),
        Move(usize, usize, usize),
        Overwrite(usize, Vec<u8>),
    }

    fn harm() -> impl Strategy<Value = Harm> {
        prop_oneof![
            (0..600_usize, 1..200_usize).prop_map(|(at, len)| Harm::Cut(at, len)),
            (0..600_usize, 1..200_usize).prop_map(|(at, len)| Harm::Double(at, len)),
            (0..600_usize, 1..200_usize, 0..600_usize).prop_map(|(at, len, to)| Harm::Move(at, len, to)),
            (0..600_usize, prop::collection::vec(any::<u8>(), 1..40))
                .prop_map(|(at, with)| Harm::Overwrite(at, with)),
        ]
    }

    fn harmed(mut bytes: Vec<u8>, harm: &Harm) -> Vec<u8> {
        let part = |bytes: &[u8], at: usize, len: usize| {
            let at = at.min(bytes.len());
            at..(at + len).min(bytes.len())
        };
        match harm {
            Harm::Cut(at, len) => drop(bytes.drain(part(&bytes, *at, *len))),
            Harm::Double(at, len) => {
                let range = part(&bytes, *at, *len);
                let copy = bytes[range.clone()].to_vec();
                bytes.splice(range.end..range.end, copy);
            }
            Harm::Move(at, len, to) => {
                let range = part(&bytes, *at, *len);
                let moved: Vec<u8> = bytes.drain(range).collect();
                let to = (*to).min(bytes.len());
                bytes.splice(to..to, moved);
            }
            Harm::Overwrite(at, with) => {
                let range = part(&bytes, *at, with.len());
                bytes.splice(range, with.iter().copied());
            }
        }
        bytes
    }

    proptest! {
        #[test]
        fn whatever_happens_to_the_stream_only_what_was_sent_comes_out(
            harms in prop::collection::vec(harm(), 1..4),
            step in 1..300_usize,
        ) {
            let bytes = harms.iter().fold(sealed(&messages()), harmed);
            let (out, _) = opened(&bytes, step);
            prop_assert!(out.len() <= messages().len());
            prop_assert_eq!(&out[..], &messages()[..out.len()]);
        }
    }
}
