//! Framing: a length and a message.

use bytes::{Buf, Bytes, BytesMut};
use prost::Message;

use crate::FRAME_MAX;

/// Bytes of the length before each message.
pub const HEADER: usize = 4;

/// What is wrong with incoming bytes: end the connection.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The length is over [`FRAME_MAX`]; the peer is not a Hayloft program, or a broken one.
    #[error("a frame of {0} bytes is over the limit of {FRAME_MAX}: is the other side a Hayloft program?")]
    TooLarge(usize),
    /// The bytes are no message.
    #[error("an unreadable message")]
    Undecodable(#[from] prost::DecodeError),
}

/// Appends `message` as a frame to `buffer`.
pub fn encode<M: Message>(message: &M, buffer: &mut Vec<u8>) {
    let len = message.encoded_len();
    buffer.reserve(HEADER + len);
    buffer.extend_from_slice(&(len as u32).to_le_bytes());
    message.encode(buffer).expect("a Vec grows as needed");
}

/// The length that a header announces.
///
/// # Errors
/// [`FrameError::TooLarge`] when it is over the limit.
pub fn length(header: [u8; HEADER]) -> Result<usize, FrameError> {
    let len = u32::from_le_bytes(header) as usize;
    if len > FRAME_MAX { Err(FrameError::TooLarge(len)) } else { Ok(len) }
}

/// Whether one whole frame is at the front of `buffer`, or what can be none.
pub fn is_whole(buffer: &BytesMut) -> bool {
    let Some(header) = buffer.first_chunk::<HEADER>() else { return false };
    length(*header).map_or(true, |len| buffer.len() >= HEADER + len)
}

/// Takes one whole message off the front of `buffer`; `None` when more bytes are needed. Byte fields
/// of the message share the buffer's memory.
///
/// # Errors
/// When the bytes cannot be a frame.
pub fn take<M: Message + Default>(buffer: &mut BytesMut) -> Result<Option<M>, FrameError> {
    let Some(header) = buffer.first_chunk::<HEADER>() else { return Ok(None) };
    let len = length(*header)?;
    if buffer.len() < HEADER + len {
        buffer.reserve(HEADER + len - buffer.len());
        return Ok(None);
    }
    buffer.advance(HEADER);
    let body: Bytes = buffer.split_to(len).freeze();
    Ok(Some(M::decode(body)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ClientMessage, Enter, client_message::Body};

    #[test]
    fn frames_come_out_as_they_went_in_however_they_are_cut() {
        let messages: Vec<ClientMessage> = (0..20)
            .map(|dir| ClientMessage {
                request: dir,
                body: Some(Body::Enter(Enter { dir, budget_bytes: dir * 1000, ..Enter::default() })),
            })
            .collect();
        let mut bytes = Vec::new();
        messages.iter().for_each(|message| encode(message, &mut bytes));
        for step in [1, 3, 7, bytes.len()] {
            let mut buffer = BytesMut::new();
            let mut out = Vec::new();
            for part in bytes.chunks(step) {
                buffer.extend_from_slice(part);
                while is_whole(&buffer)
                    && let Some(message) = take::<ClientMessage>(&mut buffer).unwrap()
                {
                    out.push(message);
                }
            }
            assert_eq!(out, messages);
        }
    }

    #[test]
    fn a_length_over_the_limit_is_refused() {
        let mut buffer = BytesMut::from(&b"HTTP/1.1 200 OK"[..]);
        assert!(matches!(take::<ClientMessage>(&mut buffer), Err(FrameError::TooLarge(_))));
    }
}
