//! The message that both transports carry, and its framing: a length (u32, little-endian), then the message.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

/// Stands for a record batch, a request, a reply or a piece of content.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct Envelope {
    #[prost(uint64, tag = "1")]
    pub(crate) sequence: u64,
    #[prost(enumeration = "Answer", tag = "2")]
    pub(crate) answer: i32,
    #[prost(bytes = "bytes", tag = "3")]
    pub(crate) payload: Bytes,
}

/// What the sender wants back.
#[derive(Clone, Copy, PartialEq, Eq, Debug, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum Answer {
    Nothing = 0,
    Ack = 1,
    Echo = 2,
}

/// The largest frame that a peer accepts.
const FRAME_BYTES_MAX: usize = 16 << 20;

/// What a peer answers to `message`, if anything.
pub(crate) fn answer_to(message: Envelope) -> Option<Envelope> {
    let payload = match message.answer() {
        Answer::Nothing => return None,
        Answer::Ack => Bytes::new(),
        Answer::Echo => message.payload,
    };
    Some(Envelope { sequence: message.sequence, answer: Answer::Nothing as i32, payload })
}

/// Appends the frame of `message`.
pub(crate) fn encode_frame(message: &Envelope, out: &mut BytesMut) {
    let len = message.encoded_len();
    out.reserve(4 + len);
    out.put_u32_le(len as u32);
    message.encode(out).expect("the buffer grows");
}

/// Takes one whole frame off the front of `input`, or nothing when more bytes are needed.
pub(crate) fn decode_frame(input: &mut BytesMut) -> std::io::Result<Option<Envelope>> {
    let Some(head) = input.first_chunk::<4>() else { return Ok(None) };
    let len = u32::from_le_bytes(*head) as usize;
    if len > FRAME_BYTES_MAX {
        return Err(std::io::Error::other(format!("a frame of {len} bytes")));
    }
    if input.len() < 4 + len {
        input.reserve(4 + len - input.len());
        return Ok(None);
    }
    input.advance(4);
    Ok(Some(Envelope::decode(input.split_to(len).freeze()).map_err(std::io::Error::other)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_being_cut_anywhere() {
        let sent: Vec<Envelope> = (0..3)
            .map(|n| Envelope { sequence: n, answer: Answer::Ack as i32, payload: vec![n as u8; 100].into() })
            .collect();
        let mut wire = BytesMut::new();
        sent.iter().for_each(|m| encode_frame(m, &mut wire));
        for cut in 0..wire.len() {
            let (mut input, mut got) = (BytesMut::new(), Vec::new());
            for part in [&wire[..cut], &wire[cut..]] {
                input.extend_from_slice(part);
                while let Some(m) = decode_frame(&mut input).unwrap() {
                    got.push(m);
                }
            }
            assert_eq!(got, sent);
        }
    }

    #[test]
    fn a_frame_over_the_limit_is_refused() {
        let mut input = BytesMut::from(&u32::MAX.to_le_bytes()[..]);
        assert!(decode_frame(&mut input).is_err());
    }
}
