//! Framed TCP: the server on tokio, the client on tokio or on a plain thread.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};

use bytes::BytesMut;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::mpsc;

use crate::message::{self, Envelope};
use crate::session::{AsyncReceiver, AsyncSession, QUEUE_MESSAGES, ThreadSession};

/// A write is made when this much has been gathered or when nothing more is waiting.
const WRITE_BYTES: usize = 64 << 10;
/// Room offered to one read.
const READ_BYTES: usize = 128 << 10;

/// Answers every connection to `listener`.
pub(crate) fn serve(listener: TcpListener) -> std::io::Result<impl Future<Output = ()> + Send> {
    listener.set_nonblocking(true)?;
    Ok(async move {
        let listener = tokio::net::TcpListener::from_std(listener).expect("a listening socket");
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream));
        }
    })
}

async fn answer(stream: tokio::net::TcpStream) {
    stream.set_nodelay(true).expect("a TCP socket");
    let (read, write) = stream.into_split();
    let (sender, receiver) = mpsc::channel(QUEUE_MESSAGES);
    tokio::spawn(write_queue(receiver, write));
    let mut reader = Reader { read, input: BytesMut::new() };
    while let Some(message) = reader.next().await {
        if let Some(answer) = message::answer_to(message)
            && sender.send(answer).await.is_err()
        {
            return;
        }
    }
}

/// Writes what comes out of the queue, gathering what is there already.
async fn write_queue(mut queue: mpsc::Receiver<Envelope>, mut write: OwnedWriteHalf) {
    let mut out = BytesMut::with_capacity(2 * WRITE_BYTES);
    while let Some(first) = queue.recv().await {
        message::encode_frame(&first, &mut out);
        while out.len() < WRITE_BYTES
            && let Ok(next) = queue.try_recv()
        {
            message::encode_frame(&next, &mut out);
        }
        if write.write_all(&out).await.is_err() {
            return;
        }
        out.clear();
    }
}

/// Cuts a byte stream into messages.
pub(crate) struct Reader {
    read: OwnedReadHalf,
    input: BytesMut,
}

impl Reader {
    async fn next(&mut self) -> Option<Envelope> {
        loop {
            if let Some(message) = message::decode_frame(&mut self.input).expect("a well-formed frame") {
                return Some(message);
            }
            self.input.reserve(READ_BYTES);
            if self.read.read_buf(&mut self.input).await.ok()? == 0 {
                return None;
            }
        }
    }
}

impl AsyncReceiver for Reader {
    async fn receive(&mut self) -> Envelope {
        self.next().await.expect("the connection stays open")
    }
}

/// A client on a runtime of one thread.
pub(crate) fn connect_async(addr: SocketAddr) -> std::io::Result<AsyncSession<Reader>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let stream = runtime.block_on(tokio::net::TcpStream::connect(addr))?;
    stream.set_nodelay(true)?;
    let (read, write) = stream.into_split();
    let (to_peer, queue) = mpsc::channel(QUEUE_MESSAGES);
    runtime.spawn(write_queue(queue, write));
    Ok(AsyncSession { runtime, to_peer, from_peer: Reader { read, input: BytesMut::new() } })
}

/// A client without a runtime: the caller writes, a thread reads and hands on, since in a mount many callers
/// share the connection.
pub(crate) fn connect_thread(addr: SocketAddr) -> std::io::Result<Thread> {
    let stream = TcpStream::connect(addr)?;
    stream.set_nodelay(true)?;
    let read = stream.try_clone()?;
    let (sender, from_peer) = std::sync::mpsc::channel();
    let reader = std::thread::spawn(move || hand_on(read, &sender));
    Ok(Thread { stream, out: BytesMut::with_capacity(2 * WRITE_BYTES), from_peer, reader: Some(reader) })
}

/// Reads messages until the connection is shut.
fn hand_on(mut stream: TcpStream, to_caller: &std::sync::mpsc::Sender<Envelope>) {
    let (mut input, mut chunk) = (BytesMut::new(), vec![0; READ_BYTES]);
    loop {
        while let Some(message) = message::decode_frame(&mut input).expect("a well-formed frame") {
            if to_caller.send(message).is_err() {
                return;
            }
        }
        match stream.read(&mut chunk).expect("the connection stays open") {
            0 => return,
            len => input.extend_from_slice(&chunk[..len]),
        }
    }
}

/// See [`connect_thread`].
pub(crate) struct Thread {
    stream: TcpStream,
    out: BytesMut,
    from_peer: std::sync::mpsc::Receiver<Envelope>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Thread {
    fn flush(&mut self) {
        self.stream.write_all(&self.out).expect("the connection stays open");
        self.out.clear();
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        // Ends the reader, so that no thread of one measurement is left in the next.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        let _ = self.reader.take().map(std::thread::JoinHandle::join);
    }
}

impl ThreadSession for Thread {
    fn send(&mut self, message: Envelope) {
        message::encode_frame(&message, &mut self.out);
        if self.out.len() >= WRITE_BYTES {
            self.flush();
        }
    }

    fn receive(&mut self) -> Envelope {
        if !self.out.is_empty() {
            self.flush();
        }
        self.from_peer.recv().expect("the connection stays open")
    }
}
