//! A stream of bytes over messages that may be lost, come twice, or late: a window of bytes under way, sent again from the
//! first one that was not taken. Pure; what to send is returned.

use std::collections::VecDeque;

use bytes::Bytes;

/// Most bytes of a stream that were sent and not taken yet: what a slow reader costs, at each end.
pub const WINDOW: u64 = 256 << 10;
/// Most bytes of a message.
pub const CHUNK: usize = 64 << 10;

/// A part of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// Where it begins.
    pub offset: u64,
    /// The bytes.
    pub bytes: Bytes,
    /// Nothing follows.
    pub last: bool,
}

/// The side that sends.
#[derive(Debug, Default)]
pub struct Outgoing {
    /// Parts that were sent and not taken.
    under_way: VecDeque<Part>,
    /// The offset of the next byte.
    next: u64,
    taken: u64,
    is_ended: bool,
    /// The other side reads no more.
    is_closed: bool,
    /// Nothing was taken since the last call of [`Outgoing::again`].
    is_still: bool,
}

impl Outgoing {
    /// How many more bytes may be sent now.
    pub fn room(&self) -> usize {
        if self.is_ended { 0 } else { WINDOW.saturating_sub(self.next - self.taken) as usize }
    }

    /// The next part of the stream; nothing when the other side reads no more.
    pub fn push(&mut self, bytes: Bytes) -> Option<Part> {
        self.add(Part { offset: self.next, bytes, last: false })
    }

    /// The end of the stream.
    pub fn end(&mut self) -> Option<Part> {
        if self.is_ended {
            return None;
        }
        self.is_ended = true;
        self.add(Part { offset: self.next, bytes: Bytes::new(), last: true })
    }

    fn add(&mut self, part: Part) -> Option<Part> {
        if self.is_closed {
            return None;
        }
        self.next += part.bytes.len() as u64;
        self.under_way.push_back(part.clone());
        Some(part)
    }

    /// The other side has taken everything before an offset. Its end counts as one more byte.
    pub fn taken(&mut self, offset: u64) {
        if offset <= self.taken {
            return;
        }
        self.is_still = false;
        self.taken = offset.min(self.next);
        let length = |part: &Part| part.bytes.len() as u64 + u64::from(part.last);
        while self.under_way.front().is_some_and(|part| part.offset + length(part) <= offset) {
            self.under_way.pop_front();
        }
    }

    /// The other side reads no more.
    pub fn close(&mut self) {
        self.is_closed = true;
        self.under_way.clear();
    }

    /// Whether the other side reads no more.
    pub fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Whether something was sent that was not taken yet.
    pub fn is_under_way(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// What is to be sent again, when nothing was taken since this was called last.
    pub fn again(&mut self) -> Vec<Part> {
        let was_still = std::mem::replace(&mut self.is_still, true);
        if was_still { self.under_way.iter().cloned().collect() } else { Vec::new() }
    }

    /// How many bytes the stream has so far.
    pub fn length(&self) -> u64 {
        self.next
    }

    /// Whether the other side has all of it, or wants no more.
    pub fn is_done(&self) -> bool {
        self.is_closed || (self.is_ended && self.under_way.is_empty())
    }
}

/// The side that receives.
#[derive(Debug, Default)]
pub struct Incoming {
    /// The offset of the next byte that is wanted.
    next: u64,
    /// Given on, and taken by its reader; with the end one more.
    taken: u64,
    has_end: bool,
}

impl Incoming {
    /// A part has come: its bytes if they are the next ones. False: what is taken should be said again.
    pub fn receive(&mut self, part: &Part) -> Option<Bytes> {
        if part.offset != self.next || self.has_end || self.next - self.taken.min(self.next) > WINDOW {
            return None;
        }
        self.next += part.bytes.len() as u64;
        self.has_end = part.last;
        Some(part.bytes.clone())
    }

    /// So many bytes were taken by the reader; the offset to say.
    pub fn take(&mut self, count: usize) -> u64 {
        self.taken += count as u64;
        self.says()
    }

    /// What is to be said as taken.
    pub fn says(&self) -> u64 {
        self.taken + u64::from(self.has_end && self.taken == self.next)
    }

    /// Whether the end has come, and everything before it.
    pub fn has_end(&self) -> bool {
        self.has_end
    }

    /// How much has come.
    pub fn length(&self) -> u64 {
        self.next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Messages are lost, doubled and delayed; the reader gets the bytes once and in order, and no more than a window is
        /// under way.
        #[test]
        fn what_is_sent_arrives(
            sizes in prop::collection::vec(1..CHUNK, 0..40),
            fates in prop::collection::vec(0..4u8, 1..50),
        ) {
            let mut fates = fates.into_iter().cycle();
            let (mut out, mut incoming) = (Outgoing::default(), Incoming::default());
            let mut sizes = VecDeque::from(sizes);
            let (mut sent, mut got) = (Vec::new(), Vec::new());
            let mut wire: VecDeque<Part> = VecDeque::new();
            let mut is_over = false;
            let mut rounds = 0;
            while !out.is_done() {
                rounds += 1;
                if rounds > 10_000 {
                    // Fates that lose everything would never end: from now on nothing is lost.
                    fates = vec![1].into_iter().cycle();
                }
                while let Some(size) = sizes.front().copied().filter(|size| *size <= out.room()) {
                    sizes.pop_front();
                    let bytes = Bytes::from(vec![(sizes.len() % 251) as u8; size]);
                    sent.extend_from_slice(&bytes);
                    wire.extend(out.push(bytes));
                }
                if sizes.is_empty() && !is_over {
                    is_over = true;
                    wire.extend(out.end());
                }
                prop_assert!(out.length() - incoming.taken.min(out.length()) <= WINDOW);
                // Said again in every round, what is only delayed would fill all memory.
                if wire.is_empty() {
                    wire.extend(out.again());
                }
                if let Some(part) = wire.pop_front() {
                    match fates.next() {
                        Some(0) => continue,
                        Some(2) => wire.push_back(part.clone()),
                        Some(3) => {
                            wire.push_back(part);
                            continue;
                        }
                        _ => {}
                    }
                    if let Some(bytes) = incoming.receive(&part) {
                        got.extend_from_slice(&bytes);
                        incoming.take(bytes.len());
                    }
                    if fates.next() != Some(0) {
                        out.taken(incoming.says());
                    }
                }
            }
            prop_assert!(incoming.has_end());
            prop_assert!(got == sent);
        }
    }

    #[test]
    fn a_closed_stream_takes_nothing() {
        let mut out = Outgoing::default();
        assert!(out.push(Bytes::from_static(b"x")).is_some());
        out.close();
        assert!(out.push(Bytes::from_static(b"y")).is_none() && out.end().is_none());
        assert!(out.is_done() && out.again().is_empty());
    }
}
