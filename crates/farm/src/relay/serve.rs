//! The relay itself.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Mutex, mpsc};

use super::key::Key;
use super::wire::{self, Hand, Told};
use crate::submit::{Order, Outcome, Submitter, Task};

/// How long a relay stays without tasks.
const IDLE: Duration = Duration::from_secs(3);
/// Whoever has found the socket before it was removed has connected by then.
const LAST: Duration = Duration::from_millis(200);

#[derive(Debug)]
struct Relay {
    key: Key,
    submitter: Mutex<Option<Submitter>>,
    live: AtomicUsize,
}

/// Serves the socket that is standard input until nobody has had a task for a while.
///
/// # Errors
/// When this program was not started as a relay.
pub fn serve() -> io::Result<()> {
    // Descriptors of who has started it, a job server's among them, are not kept open.
    hayloft_process::close_all_but(&mut []);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(serve_all());
    // A thread may wait for input that never comes.
    runtime.shutdown_background();
    served
}

async fn serve_all() -> io::Result<()> {
    let key = Key::of_environment()?;
    let socket = key.socket()?;
    let listener = std::os::unix::net::UnixListener::from(rustix::io::dup(rustix::stdio::stdin())?);
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    let relay = Arc::new(Relay { key, submitter: Mutex::default(), live: AtomicUsize::new(0) });
    let mut left = Instant::now();
    let mut is_found = true;
    loop {
        let wait = if is_found { IDLE } else { LAST };
        match tokio::time::timeout(wait.saturating_sub(left.elapsed()), listener.accept()).await {
            Ok(Ok((stream, _))) => {
                relay.live.fetch_add(1, Ordering::SeqCst);
                let relay = Arc::clone(&relay);
                tokio::spawn(async move {
                    // A process that has gone wants to hear nothing.
                    let _ = relay.attend(stream).await;
                    relay.live.fetch_sub(1, Ordering::SeqCst);
                });
                left = Instant::now();
            }
            Ok(Err(error)) => return Err(error),
            Err(_) if relay.live.load(Ordering::SeqCst) > 0 => left = Instant::now(),
            Err(_) if is_found => {
                let _ = std::fs::remove_file(&socket);
                (is_found, left) = (false, Instant::now());
            }
            Err(_) => break,
        }
    }
    if let Some(submitter) = relay.submitter.lock().await.take() {
        submitter.leave().await;
    }
    Ok(())
}

impl Relay {
    /// The connection to the farm. With `waits` the broker need not be there yet.
    async fn submitter(&self, waits: bool) -> Result<Submitter, String> {
        let mut held = self.submitter.lock().await;
        if let Some(submitter) = &*held {
            return Ok(submitter.clone());
        }
        let (build, host) = (self.key.build(), self.key.host());
        let submitter = Submitter::connect(&self.key.broker(), build, host, waits).await;
        let submitter = submitter.map_err(|error| error.to_string())?;
        Ok(held.insert(submitter).clone())
    }

    async fn attend(&self, mut stream: UnixStream) -> io::Result<()> {
        let hand: Hand = wire::heard(&mut stream).await?;
        let [input, output, error] = wire::descriptors_heard(&stream).await?.map(File::from);
        stream.write_all(&wire::frame(&Told { is_taken: true, ..Told::default() })).await?;
        let (mut reader, mut writer) = stream.into_split();
        let (orders, mut obeys) = mpsc::unbounded_channel();
        let signals = tokio::spawn(async move {
            while let Ok(number @ 1..) = reader.read_u8().await {
                let _ = orders.send(Order::Signal(number.into()));
            }
            // It has said so, or it has gone.
            let _ = orders.send(Order::End);
            // No more orders are not the same as the end.
            std::future::pending::<()>().await;
        });
        let outcome = match self.submitter(!hand.may_run_here).await {
            Err(reason) if hand.may_run_here => Outcome::Nowhere(reason),
            Err(reason) => Outcome::FarmFailed(reason),
            Ok(submitter) => {
                let task = Task {
                    spec: hand.spec.unwrap_or_default(),
                    need: hand.need.unwrap_or_default(),
                    input: hand.has_input.then_some(input),
                    output,
                    error: (!hand.merged).then_some(error),
                    may_run_here: hand.may_run_here,
                };
                submitter.run(task, &mut obeys).await.0
            }
        };
        signals.abort();
        writer.write_all(&wire::frame(&Told::from(outcome))).await
    }
}
