//! The way back to a client: a bounded queue and a task that writes it out.

use hayloft_wire::{Failed, ServerMessage, frame, server_message::Body};
use tokio::io::AsyncWriteExt;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::mpsc;

use crate::error::VolumeError;

/// Answers that wait to be written; who has another one waits. Answers are cut at about 1 MiB, so this
/// also bounds the memory.
const QUEUE: usize = 32;

/// Answers are gathered up to this many bytes before they are written.
const GATHER: usize = 256 * 1024;

/// Where answers go. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Replies {
    queue: mpsc::Sender<ServerMessage>,
}

impl Replies {
    /// The queue, and the task that writes it out until all clones are gone or the client is.
    pub(crate) fn start(mut socket: OwnedWriteHalf) -> (Replies, tokio::task::JoinHandle<()>) {
        let (queue, mut waiting) = mpsc::channel::<ServerMessage>(QUEUE);
        let writer = tokio::spawn(async move {
            let mut bytes = Vec::new();
            while let Some(message) = waiting.recv().await {
                bytes.clear();
                frame::encode(&message, &mut bytes);
                while bytes.len() < GATHER
                    && let Ok(message) = waiting.try_recv()
                {
                    frame::encode(&message, &mut bytes);
                }
                if socket.write_all(&bytes).await.is_err() {
                    return;
                }
                if bytes.capacity() > 8 * GATHER {
                    bytes = Vec::new();
                }
            }
        });
        (Replies { queue }, writer)
    }

    /// Queues an answer. When the client is gone it is dropped: the client will ask again.
    pub(crate) async fn send(&self, request: u64, body: Body) {
        let _ = self.queue.send(ServerMessage { request, body: Some(body) }).await;
    }

    /// Queues the answer to a request, or why there is none.
    pub(crate) async fn answer(&self, request: u64, answer: Result<Body, VolumeError>) {
        match answer {
            Ok(body) => self.send(request, body).await,
            Err(error) => {
                tracing::debug!(request, error = %error, "refused or failed");
                self.send(request, Body::Failed(Failed::from(&error))).await;
            }
        }
    }
}
