//! A link with a round-trip time: a TCP proxy that hands everything on a while after it has come, and counts it.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;

use crate::sys;

#[derive(Args)]
pub(crate) struct Options {
    /// Address to listen on; port 0: any free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Round-trip time that it adds, milliseconds
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 0.0, value_parser = milliseconds)]
    rtt: f64,
    /// A file that says at any time how many bytes have come from there, and how many have gone there
    #[arg(long, value_name = "FILE")]
    count: Option<PathBuf>,
    /// Where connections go on to
    #[arg(value_name = "HOST:PORT")]
    to: SocketAddr,
}

/// Pieces on their way in one direction: what a link of 10 Gbit/s holds in 10 ms is less.
const PIECES: usize = 4096;
const PIECE: usize = 64 * 1024;
/// Bytes that have come one way.
type Count = Arc<AtomicU64>;
/// How often to look for Ctrl-C.
const POLL: Duration = Duration::from_millis(50);

fn milliseconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(ms) if (0.0..=10_000.0).contains(&ms) => Ok(ms),
        _ => Err("expected 0 to 10000".into()),
    }
}

/// Hands connections on until it is interrupted.
pub(crate) fn run(options: &Options) -> Result<()> {
    let listener = TcpListener::bind(options.listen).with_context(|| format!("{}", options.listen))?;
    listener.set_nonblocking(true)?;
    println!("delaying {} by {} ms on {}", options.to, options.rtt, listener.local_addr()?);
    let one_way = Duration::from_secs_f64(options.rtt / 2e3);
    let (come, gone): (Count, Count) = Default::default();
    let mut told = String::new();
    loop {
        sys::check_interrupted()?;
        let now = format!("{} {}\n", come.load(Relaxed), gone.load(Relaxed));
        if let Some(path) = options.count.as_ref().filter(|_| now != told) {
            std::fs::write(path, &now).with_context(|| path.display().to_string())?;
            told = now;
        }
        match listener.accept() {
            Ok((client, _)) => {
                // Whoever cannot be handed on is hung up on.
                if let Err(error) = hand_on(&client, options.to, one_way, (&come, &gone)) {
                    eprintln!("hayloft-bench: {}: {error}", options.to);
                    let _ = client.shutdown(Shutdown::Both);
                }
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => std::thread::sleep(POLL),
            Err(error) => return Err(error.into()),
        }
    }
}

fn hand_on(
    client: &TcpStream,
    to: SocketAddr,
    one_way: Duration,
    (come, gone): (&Count, &Count),
) -> std::io::Result<()> {
    client.set_nonblocking(false)?;
    let server = TcpStream::connect(to)?;
    for socket in [client, &server] {
        socket.set_nodelay(true)?;
    }
    direction(client.try_clone()?, server.try_clone()?, one_way, Arc::clone(gone));
    direction(server, client.try_clone()?, one_way, Arc::clone(come));
    Ok(())
}

/// Two threads: one takes what comes and notes when, the other gives it when it is due.
fn direction(mut from: TcpStream, to: TcpStream, one_way: Duration, bytes: Count) {
    let (sender, due) = sync_channel::<(Instant, Vec<u8>)>(PIECES);
    std::thread::spawn(move || {
        let mut piece = vec![0; PIECE];
        while let Ok(count @ 1..) = from.read(&mut piece) {
            bytes.fetch_add(count as u64, Relaxed);
            if sender.send((Instant::now() + one_way, piece[..count].to_vec())).is_err() {
                break;
            }
        }
    });
    std::thread::spawn(move || deliver(to, &due));
}

fn deliver(mut to: TcpStream, due: &Receiver<(Instant, Vec<u8>)>) {
    for (at, piece) in due {
        std::thread::sleep(at.saturating_duration_since(Instant::now()));
        if to.write_all(&piece).is_err() {
            break;
        }
    }
    // The other side notices, and its end comes back the same way.
    let _ = to.shutdown(Shutdown::Both);
}
