//! The relay itself.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;

use super::key::Key;
use super::wire::{self, Again, Hand, Told};
use crate::place::Places;
use crate::protocol::NeedMessage;
use crate::submit::{self, Order, Outcome, Submitter, Task};

/// How long a relay stays without tasks.
const IDLE: Duration = Duration::from_secs(3);
/// Whoever has found a socket before it was removed has connected by then.
const LAST: Duration = Duration::from_millis(200);
/// After an error of accept(2), too many open files mostly, the next try is so much later.
const PAUSE: Duration = Duration::from_millis(20);
/// So many command lines are known; tasks of others are handed over whole each time.
const LIKES_MAX: usize = 64;

/// What tasks of one command line have in common.
#[derive(Debug, Clone)]
struct Like {
    need: NeedMessage,
    user: (u32, u32),
    may_run_here: bool,
}

#[derive(Debug)]
struct Relay {
    key: Key,
    /// The folder of sockets.
    folder: PathBuf,
    submitter: tokio::sync::Mutex<Option<Submitter>>,
    places: Places,
    live: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// When a task came or was there last.
    last: Instant,
    /// Where tasks come: its own socket, and those of command lines that are known. None when it ends.
    sockets: Option<BTreeSet<PathBuf>>,
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
    let state = State { last: Instant::now(), sockets: Some(BTreeSet::from([socket.clone()])) };
    let relay = Arc::new(Relay {
        key,
        folder: socket.parent().map(Path::to_owned).unwrap_or_default(),
        submitter: tokio::sync::Mutex::default(),
        places: Places::default(),
        live: AtomicUsize::new(0),
        state: Mutex::new(state),
    });
    relay.listen(listener, None)?;
    loop {
        let since = relay.state().last.elapsed();
        if relay.live.load(Ordering::SeqCst) > 0 {
            relay.state().last = Instant::now();
            tokio::time::sleep(IDLE).await;
        } else if since < IDLE {
            tokio::time::sleep(IDLE - since).await;
        } else {
            break;
        }
    }
    loop {
        let sockets = relay.state().sockets.take();
        sockets.into_iter().flatten().for_each(|socket| drop(std::fs::remove_file(socket)));
        tokio::time::sleep(LAST).await;
        let since = relay.state().last.elapsed();
        if relay.live.load(Ordering::SeqCst) == 0 && since >= LAST {
            break;
        }
    }
    if let Some(submitter) = relay.submitter.lock().await.take() {
        submitter.leave().await;
    }
    Ok(())
}

impl Relay {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes tasks from a socket, as long as this process lives.
    fn listen(
        self: &Arc<Self>,
        listener: std::os::unix::net::UnixListener,
        like: Option<Like>,
    ) -> io::Result<()> {
        listener.set_nonblocking(true)?;
        let listener = UnixListener::from_std(listener)?;
        let relay = Arc::clone(self);
        tokio::spawn(async move {
            loop {
                let Ok((stream, _)) = listener.accept().await else {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                };
                relay.live.fetch_add(1, Ordering::SeqCst);
                let (relay, like) = (Arc::clone(&relay), like.clone());
                tokio::spawn(async move {
                    // A process that has gone wants to hear nothing.
                    let _ = match like {
                        None => relay.attend(stream).await,
                        Some(like) => relay.attend_like(stream, like).await,
                    };
                    relay.state().last = Instant::now();
                    relay.live.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Ok(())
    }

    /// Takes tasks of the same command line as this one from a socket of this name.
    fn know(self: &Arc<Self>, name: &str, like: Like) -> io::Result<()> {
        let socket = self.folder.join(name);
        let fresh = socket.with_extension(format!("{}.new", std::process::id()));
        let mut state = self.state();
        let Some(sockets) = &mut state.sockets else { return Ok(()) };
        if sockets.contains(&socket) || sockets.len() > LIKES_MAX {
            return Ok(());
        }
        let listener = std::os::unix::net::UnixListener::bind(&fresh)?;
        self.listen(listener, Some(like))?;
        std::fs::rename(&fresh, &socket)?;
        sockets.insert(socket);
        Ok(())
    }

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

    async fn attend(self: &Arc<Self>, mut stream: UnixStream) -> io::Result<()> {
        let hand: Hand = wire::heard(&mut stream).await?;
        let [input, output, error] = wire::descriptors_heard(&stream).await?.map(File::from);
        stream.write_all(&wire::frame(&Told { is_taken: true, ..Told::default() })).await?;
        let (spec, need) = (hand.spec.unwrap_or_default(), hand.need.unwrap_or_default());
        let may_run_here = hand.may_run_here;
        if !hand.again.is_empty() {
            let like = Like { need: need.clone(), user: (spec.uid, spec.gid), may_run_here };
            // Without it they come here.
            let _ = self.know(&hand.again, like);
        }
        let input = hand.has_input.then_some(input);
        let error = (!hand.merged).then_some(error);
        let (may_do_with_less, expected) = (false, Duration::ZERO);
        let task = Task { spec, need, input, output, error, may_run_here, may_do_with_less, expected };
        self.see_through(stream, task).await
    }

    async fn attend_like(&self, mut stream: UnixStream, like: Like) -> io::Result<()> {
        let (again, standard): (Again, [OwnedFd; 3]) = match wire::heard_with_descriptors(&mut stream).await {
            Ok(heard) => heard,
            // It may be handed over in another way.
            Err(error) => {
                let outcome = Outcome::Nowhere(error.to_string());
                return stream.write_all(&wire::frame(&Told::from(outcome))).await;
            }
        };
        let directory = PathBuf::from(OsString::from_vec(again.directory));
        let Like { need, user, may_run_here } = like;
        let reason = match self.places.of(directory.clone()).await {
            Ok(Some(place)) => {
                let command = again.command.into_iter().map(OsString::from_vec).collect();
                let environment = submit::without_job_server(again.environment);
                let spec = submit::spec(command, environment, &place, again.umask, user);
                let task = Task::on(spec, need, standard.map(File::from), may_run_here);
                return self.see_through(stream, task).await;
            }
            Ok(None) => submit::not_on_a_volume(&directory),
            Err(error) => format!("the current folder: {error}"),
        };
        let outcome = if may_run_here { Outcome::Nowhere(reason) } else { Outcome::FarmFailed(reason) };
        stream.write_all(&wire::frame(&Told::from(outcome))).await
    }

    async fn see_through(&self, stream: UnixStream, task: Task) -> io::Result<()> {
        let may_run_here = task.may_run_here;
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
        let outcome = match self.submitter(!may_run_here).await {
            Err(reason) if may_run_here => Outcome::Nowhere(reason),
            Err(reason) => Outcome::FarmFailed(reason),
            Ok(submitter) => submitter.run(task, &mut obeys).await.0,
        };
        signals.abort();
        writer.write_all(&wire::frame(&Told::from(outcome))).await
    }
}
