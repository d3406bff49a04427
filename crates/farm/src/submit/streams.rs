//! A task's streams at its submitter. They outlive an attempt: what was written already is not written again, and what was
//! read is given to the next one from its beginning.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::protocol::{CHUNK, Incoming, Outgoing, Part, Stream, Taken};

/// How much input is kept for another attempt.
const KEPT: usize = 8 << 20;
/// How much output is taken before that is said.
const SAY_TAKEN: u64 = 64 << 10;

/// Where output goes.
#[derive(Debug)]
pub(super) struct Sink {
    stream: Stream,
    file: Arc<File>,
    incoming: Incoming,
    /// Bytes of earlier attempts that were written, and that come again.
    skip: u64,
    delivered: u64,
    queue: VecDeque<Bytes>,
    writing: Option<JoinHandle<(io::Result<()>, usize)>>,
    is_closed: bool,
    said: u64,
}

impl Sink {
    pub(super) fn new(stream: Stream, file: File) -> Sink {
        Sink {
            stream,
            file: Arc::new(file),
            incoming: Incoming::default(),
            skip: 0,
            delivered: 0,
            queue: VecDeque::new(),
            writing: None,
            is_closed: false,
            said: 0,
        }
    }

    /// Another attempt begins. What is being written of the one before is written to its end first.
    pub(super) async fn again(&mut self) {
        while self.writing.is_some() {
            self.written().await;
        }
        self.incoming = Incoming::default();
        self.skip = self.delivered;
        self.said = 0;
    }

    /// Takes what has come; something to say back if so.
    pub(super) fn receive(&mut self, part: &Part) -> Option<Taken> {
        let Some(mut bytes) = self.incoming.receive(part) else { return Some(self.taken()) };
        let skipped = (bytes.len() as u64).min(self.skip) as usize;
        self.skip -= skipped as u64;
        let _ = bytes.split_to(skipped);
        self.incoming.take(skipped);
        if self.is_closed {
            self.incoming.take(bytes.len());
        } else if !bytes.is_empty() {
            // Counted now: whether it was written or not, another attempt must not write it again.
            self.delivered += bytes.len() as u64;
            self.queue.push_back(bytes);
            self.begin();
        }
        self.say_if_due()
    }

    fn begin(&mut self) {
        if self.writing.is_none()
            && let Some(bytes) = self.queue.pop_front()
        {
            let file = Arc::clone(&self.file);
            self.writing =
                Some(tokio::task::spawn_blocking(move || ((&*file).write_all(&bytes), bytes.len())));
        }
    }

    /// Waits for the end of what is being written; something to say back if so.
    pub(super) async fn written(&mut self) -> Option<Taken> {
        let Some(writing) = &mut self.writing else { return std::future::pending().await };
        let (result, count) =
            writing.await.unwrap_or_else(|_| (Err(io::Error::other("writing panicked")), 0));
        self.writing = None;
        self.incoming.take(count);
        if result.is_err() {
            // Nobody reads it any more, or the disk is full: the task has the same happen to it as on a pipe without a reader.
            self.is_closed = true;
            let queued: usize = self.queue.drain(..).map(|bytes| bytes.len()).sum();
            self.incoming.take(queued);
            return Some(self.taken());
        }
        self.begin();
        self.say_if_due()
    }

    fn say_if_due(&mut self) -> Option<Taken> {
        (self.incoming.says() >= self.said + SAY_TAKEN).then(|| self.taken())
    }

    /// Whether [`Sink::reminder`] would say something.
    pub(super) fn has_reminder(&self) -> bool {
        self.incoming.says() > self.said
    }

    /// What is said when nothing else was.
    pub(super) fn reminder(&mut self) -> Option<Taken> {
        self.has_reminder().then(|| self.taken())
    }

    fn taken(&mut self) -> Taken {
        self.said = self.incoming.says();
        Taken { stream: self.stream as i32, offset: self.said, closed: self.is_closed }
    }

    /// Whether a stream of this length has come, and is written.
    pub(super) fn has_all(&self, length: u64) -> bool {
        let has_come = self.is_closed || self.incoming.length() >= length;
        has_come && self.writing.is_none() && self.queue.is_empty()
    }
}

/// Where input comes from.
#[derive(Debug)]
pub(super) struct Source {
    file: Option<File>,
    chunks: Option<mpsc::Receiver<Bytes>>,
    kept: Vec<Bytes>,
    kept_bytes: usize,
    /// More was read than is kept.
    is_cut: bool,
    /// Chunks of `kept` that this attempt was given.
    at: usize,
    has_ended: bool,
    out: Outgoing,
}

impl Source {
    pub(super) fn new(file: Option<File>) -> Source {
        Source {
            file,
            chunks: None,
            kept: Vec::new(),
            kept_bytes: 0,
            is_cut: false,
            at: 0,
            has_ended: false,
            out: Outgoing::default(),
        }
    }

    /// Another attempt begins; false when it cannot have all of the input.
    pub(super) fn again(&mut self) -> bool {
        self.at = 0;
        self.out = Outgoing::default();
        !self.is_cut
    }

    /// The next part to send. Waits for ever when there is none, or no room.
    pub(super) async fn next(&mut self) -> Option<Part> {
        if self.out.room() < CHUNK || self.out.is_closed() {
            return std::future::pending().await;
        }
        if let Some(bytes) = self.kept.get(self.at).filter(|_| !self.is_cut) {
            self.at += 1;
            return self.out.push(bytes.clone());
        }
        if self.has_ended {
            return self.out.end();
        }
        if let Some(file) = self.file.take() {
            self.chunks = Some(read(file));
        }
        let Some(chunks) = &mut self.chunks else { return std::future::pending().await };
        match chunks.recv().await {
            None => {
                self.has_ended = true;
                self.out.end()
            }
            Some(bytes) => {
                self.kept_bytes += bytes.len();
                self.is_cut |= self.kept_bytes > KEPT;
                if self.is_cut {
                    self.kept.clear();
                } else {
                    self.kept.push(bytes.clone());
                    self.at += 1;
                }
                self.out.push(bytes)
            }
        }
    }

    pub(super) fn taken(&mut self, taken: &Taken) {
        self.out.taken(taken.offset);
        if taken.closed {
            self.out.close();
        }
    }

    /// Whether something was sent that was not taken yet.
    pub(super) fn is_under_way(&self) -> bool {
        self.out.is_under_way()
    }

    /// What was not taken for a while.
    pub(super) fn resend(&mut self) -> Vec<Part> {
        self.out.again()
    }
}

/// Reads a file on a thread of its own: it may be a terminal or a pipe that nobody writes to.
fn read(mut file: File) -> mpsc::Receiver<Bytes> {
    let (sender, chunks) = mpsc::channel(1);
    std::thread::spawn(move || {
        let mut buffer = vec![0; CHUNK];
        loop {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    if sender.blocking_send(Bytes::copy_from_slice(&buffer[..count])).is_err() {
                        break;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
    });
    chunks
}
