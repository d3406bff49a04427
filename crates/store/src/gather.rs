//! Small parts of what is written, put together: a store on a disk makes a system call for each.

use bytes::{Bytes, BytesMut};
use object_store::PutPayload;

/// Parts from this size on stay as they are.
const LARGE: usize = 128 << 10;
/// What small ones are gathered in.
const BUFFER: usize = 1 << 20;

/// The same bytes in fewer parts.
pub(crate) fn gathered(payload: PutPayload) -> PutPayload {
    let is_small = |part: &Bytes| part.len() < LARGE;
    if payload.iter().filter(|part| is_small(part)).count() < 3 {
        return payload;
    }
    let mut parts: Vec<Bytes> = Vec::new();
    let (mut buffer, mut left) = (BytesMut::new(), payload.content_length());
    for part in payload {
        left -= part.len();
        if !is_small(&part) {
            parts.extend((!buffer.is_empty()).then(|| buffer.split().freeze()));
            parts.push(part);
            continue;
        }
        if buffer.capacity() - buffer.len() < part.len() {
            parts.extend((!buffer.is_empty()).then(|| buffer.split().freeze()));
            buffer.reserve(BUFFER.min(part.len() + left));
        }
        buffer.extend_from_slice(&part);
    }
    parts.extend((!buffer.is_empty()).then(|| buffer.freeze()));
    parts.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_gathered_in_order() {
        let sizes = [1, 0, 70_000, LARGE, 3, LARGE - 1, 900_000, 5, 5].into_iter().chain([4000; 600]);
        let parts: Vec<Bytes> = sizes
            .enumerate()
            .map(|(at, size)| (0..size).map(|byte| (at + byte) as u8).collect::<Vec<u8>>().into())
            .collect();
        let all = parts.concat();
        let payload: PutPayload = parts.iter().cloned().collect();
        let gathered = gathered(payload);
        assert_eq!(gathered.iter().flatten().copied().collect::<Vec<u8>>(), all);
        assert!(gathered.iter().count() < 12, "{}", gathered.iter().count());
        // Large ones are not copied.
        assert!(gathered.iter().any(|part| part.as_ptr() == parts[3].as_ptr()));
    }

    #[test]
    fn few_parts_stay_as_they_are() {
        let part = Bytes::from(vec![1; 100]);
        let payload: PutPayload = [part.clone(), part.clone()].into_iter().collect();
        assert!(gathered(payload).iter().all(|of| of.as_ptr() == part.as_ptr()));
    }
}
