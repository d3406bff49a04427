//! gRPC by tonic: one bidirectional stream. The service and its client are written by hand, as generated
//! code would be, so that no `protoc` is needed.

use std::convert::Infallible;
use std::net::{SocketAddr, TcpListener};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::body::Body;
use tonic::codec::{BufferSettings, Codec};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::codegen::{Service, http};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;

use crate::message::{self, Envelope};
use crate::session::{AsyncReceiver, AsyncSession, QUEUE_MESSAGES, ThreadSession};

/// Large enough that flow control never stops a loopback connection.
const STREAM_WINDOW_BYTES: u32 = 8 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// A 64 KiB message in one HTTP/2 frame; the protocol's default cuts it in five.
const FRAME_BYTES_MAX: u32 = 256 << 10;

/// A whole large message in one buffer: tonic's default grows it by 8 KiB at a time and hands it on at 32 KiB.
const BUFFER_BYTES: usize = 128 << 10;

/// [`ProstCodec`] with larger buffers.
#[derive(Clone, Copy, Default)]
struct WideCodec;

impl Codec for WideCodec {
    type Encode = Envelope;
    type Decode = Envelope;
    type Encoder = <ProstCodec<Envelope, Envelope> as Codec>::Encoder;
    type Decoder = <ProstCodec<Envelope, Envelope> as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<Envelope, Envelope>::raw_encoder(BufferSettings::new(BUFFER_BYTES, BUFFER_BYTES / 2))
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<Envelope, Envelope>::raw_decoder(BufferSettings::new(BUFFER_BYTES, BUFFER_BYTES / 2))
    }
}

type Answers = Pin<Box<dyn tokio_stream::Stream<Item = Result<Envelope, Status>> + Send>>;

/// What generated code calls the method handler.
#[derive(Clone)]
struct Handler;

impl Service<Request<Streaming<Envelope>>> for Handler {
    type Response = Response<Answers>;
    type Error = Status;
    type Future = std::future::Ready<Result<Self::Response, Status>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Streaming<Envelope>>) -> Self::Future {
        let mut messages = request.into_inner();
        let (sender, receiver) = mpsc::channel(QUEUE_MESSAGES);
        tokio::spawn(async move {
            while let Ok(Some(message)) = messages.message().await {
                if let Some(answer) = message::answer_to(message)
                    && sender.send(answer).await.is_err()
                {
                    return;
                }
            }
        });
        let answers: Answers = Box::pin(ReceiverStream::new(receiver).map(Ok));
        std::future::ready(Ok(Response::new(answers)))
    }
}

/// What generated code calls the service.
#[derive(Clone)]
struct SessionService;

impl Service<http::Request<Body>> for SessionService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(WideCodec);
            Ok(grpc.streaming(Handler, request).await)
        })
    }
}

/// Answers every connection to `listener`.
pub(crate) fn serve(listener: TcpListener) -> std::io::Result<impl Future<Output = ()> + Send> {
    listener.set_nonblocking(true)?;
    Ok(async move {
        let listener = tokio::net::TcpListener::from_std(listener).expect("a listening socket");
        let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
        Server::builder()
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .max_frame_size(FRAME_BYTES_MAX)
            .serve_with_incoming(SessionService, incoming)
            .await
            .expect("serving");
    })
}

impl AsyncReceiver for Streaming<Envelope> {
    async fn receive(&mut self) -> Envelope {
        self.message().await.expect("the connection stays open").expect("the stream stays open")
    }
}

async fn open(
    addr: SocketAddr,
) -> Result<(mpsc::Sender<Envelope>, Streaming<Envelope>), Box<dyn std::error::Error + Send + Sync>> {
    let channel: Channel = Endpoint::from_shared(format!("http://{addr}"))?
        .tcp_nodelay(true)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_frame_size(FRAME_BYTES_MAX)
        .connect()
        .await?;
    let mut grpc = tonic::client::Grpc::new(channel);
    grpc.ready().await?;
    let (to_peer, queue) = mpsc::channel(QUEUE_MESSAGES);
    let path = PathAndQuery::from_static("/hayloft.Session/Open");
    let codec = WideCodec;
    let response = grpc.streaming(Request::new(ReceiverStream::new(queue)), path, codec).await?;
    Ok((to_peer, response.into_inner()))
}

/// A client on a runtime of one thread.
pub(crate) fn connect_async(addr: SocketAddr) -> std::io::Result<AsyncSession<Streaming<Envelope>>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (to_peer, from_peer) = runtime.block_on(open(addr)).map_err(std::io::Error::other)?;
    Ok(AsyncSession { runtime, to_peer, from_peer })
}

/// A client whose runtime is a thread of its own, reached through queues.
pub(crate) fn connect_thread(addr: SocketAddr) -> std::io::Result<Thread> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let (to_peer, mut stream) = runtime.block_on(open(addr)).map_err(std::io::Error::other)?;
    let (sender, from_peer) = std::sync::mpsc::channel();
    runtime.spawn(async move {
        while let Ok(Some(message)) = stream.message().await {
            if sender.send(message).is_err() {
                return;
            }
        }
    });
    Ok(Thread { to_peer, from_peer, _runtime: runtime })
}

/// See [`connect_thread`].
pub(crate) struct Thread {
    to_peer: mpsc::Sender<Envelope>,
    from_peer: std::sync::mpsc::Receiver<Envelope>,
    _runtime: tokio::runtime::Runtime,
}

impl ThreadSession for Thread {
    fn send(&mut self, message: Envelope) {
        self.to_peer.blocking_send(message).expect("the connection stays open");
    }

    fn receive(&mut self) -> Envelope {
        self.from_peer.recv().expect("the connection stays open")
    }
}
