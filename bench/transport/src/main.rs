//! Measures on loopback what a session stream costs over gRPC (tonic) and over framed TCP.
//!
//! Both carry the same prost messages, through the same bounded queues, between the same runtimes. Each is
//! measured twice: with an asynchronous client, and with a client whose callers are plain threads (as a
//! mount's FUSE threads are). See `docs/adr/0002-session-transport.md`.

mod cpu;
mod framed;
mod grpc;
mod message;
mod report;
mod session;

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use session::Session;

/// What one measurement sends.
pub(crate) struct Workload {
    pub(crate) name: &'static str,
    pub(crate) messages: u64,
    pub(crate) shape: Shape,
    pub(crate) payload_bytes: usize,
}

/// Which cores the two ends run on. Left to the scheduler, both happen, and a median means nothing.
#[derive(Clone, Copy)]
pub(crate) enum Placement {
    /// The client on one core, the server on another: what two hosts do.
    Apart,
    /// Both on one core: no time is spent on waking another core, only on work.
    Together,
}

impl Placement {
    pub(crate) const ALL: [Placement; 2] = [Placement::Apart, Placement::Together];

    pub(crate) fn label(self) -> &'static str {
        match self {
            Placement::Apart => "a core each",
            Placement::Together => "both ends on one core",
        }
    }

    const CLIENT_CORE: usize = 0;

    fn server_core(self) -> usize {
        match self {
            Placement::Apart => 1,
            Placement::Together => Self::CLIENT_CORE,
        }
    }
}

/// How messages and replies follow each other.
#[derive(Clone, Copy)]
pub(crate) enum Shape {
    /// One message, its reply, the next message.
    PingPong,
    /// Messages in a row; the peer acknowledges every `ack_every`th, at most `window` are unacknowledged.
    Pipelined { ack_every: u64, window: u64 },
}

const WORKLOADS: [Workload; 3] = [
    Workload {
        name: "request and reply, 64 B each way",
        messages: 10_000,
        shape: Shape::PingPong,
        payload_bytes: 64,
    },
    Workload {
        name: "pipelined, 1 KiB, an ack per 64",
        messages: 200_000,
        shape: Shape::Pipelined { ack_every: 64, window: 1024 },
        payload_bytes: 1024,
    },
    Workload {
        name: "content upload, 64 KiB, an ack per 4",
        messages: 12_000,
        shape: Shape::Pipelined { ack_every: 4, window: 64 },
        payload_bytes: 64 << 10,
    },
];

/// A transport under a kind of client. A gRPC row is compared with the framed row before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Transport {
    FramedAsync,
    GrpcAsync,
    /// As a mount's request threads would use it: the caller writes, a reading thread wakes the caller.
    FramedThread,
    /// The same callers, with a thread for the runtime: reached by a queue, it wakes the caller.
    GrpcThread,
}

pub(crate) const TRANSPORTS: [Transport; 4] =
    [Transport::FramedAsync, Transport::GrpcAsync, Transport::FramedThread, Transport::GrpcThread];

impl Transport {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Transport::FramedAsync => "framed TCP, tokio on both sides",
            Transport::GrpcAsync => "gRPC, tokio on both sides",
            Transport::FramedThread => "framed TCP, client called from a thread",
            Transport::GrpcThread => "gRPC, client called from a thread",
        }
    }

    fn connect(self, framed: SocketAddr, grpc: SocketAddr) -> std::io::Result<Box<dyn Session>> {
        Ok(match self {
            Transport::FramedAsync => Box::new(framed::connect_async(framed)?),
            Transport::FramedThread => Box::new(framed::connect_thread(framed)?),
            Transport::GrpcAsync => Box::new(grpc::connect_async(grpc)?),
            Transport::GrpcThread => Box::new(grpc::connect_thread(grpc)?),
        })
    }
}

/// Wall and processor time of one run of one workload.
#[derive(Clone, Copy)]
pub(crate) struct Sample {
    pub(crate) elapsed: Duration,
    /// User and system time of the whole process, so of both ends of the connection.
    pub(crate) cpu: Duration,
}

fn main() -> std::io::Result<()> {
    let Some((rounds, scale)) = parse_args() else {
        eprintln!("usage: transport [--rounds N] [--scale F]\n\nexample: transport --rounds 9");
        std::process::exit(2);
    };
    let servers = [Servers::start(Placement::Apart)?, Servers::start(Placement::Together)?];
    cpu::pin_this_thread(Placement::CLIENT_CORE)?;

    // Indexed by workload, then placement, then transport.
    let mut samples = vec![vec![vec![Vec::new(); TRANSPORTS.len()]; servers.len()]; WORKLOADS.len()];
    for round in 0..rounds {
        for (w, workload) in WORKLOADS.iter().enumerate() {
            let messages = ((workload.messages as f64 * scale) as u64).max(256);
            for (s, servers) in servers.iter().enumerate() {
                for step in 0..TRANSPORTS.len() {
                    // Each round starts with another transport, so that none always runs after the same one.
                    let t = (step + round) % TRANSPORTS.len();
                    samples[w][s][t].push(measure(TRANSPORTS[t], servers, workload, messages)?);
                }
            }
        }
        eprintln!("round {} of {rounds}", round + 1);
    }
    report::print(&WORKLOADS, &samples);
    servers.into_iter().for_each(|s| s.runtime.shutdown_background());
    Ok(())
}

/// The server ends of both transports, on one core.
struct Servers {
    runtime: tokio::runtime::Runtime,
    framed: SocketAddr,
    grpc: SocketAddr,
}

impl Servers {
    fn start(placement: Placement) -> std::io::Result<Self> {
        let core = placement.server_core();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .on_thread_start(move || cpu::pin_this_thread(core).expect("a second core"))
            .enable_all()
            .build()?;
        let (framed, grpc) = (TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?);
        let servers = Servers { framed: framed.local_addr()?, grpc: grpc.local_addr()?, runtime };
        servers.runtime.spawn(framed::serve(framed)?);
        servers.runtime.spawn(grpc::serve(grpc)?);
        Ok(servers)
    }
}

fn measure(
    transport: Transport,
    servers: &Servers,
    workload: &Workload,
    messages: u64,
) -> std::io::Result<Sample> {
    let mut session = transport.connect(servers.framed, servers.grpc)?;
    session.run(workload, messages / 10);
    let (cpu_before, started) = (cpu::of_process(), Instant::now());
    session.run(workload, messages);
    let elapsed = started.elapsed();
    let cpu = cpu::of_process() - cpu_before;
    Ok(Sample { elapsed: elapsed.div_f64(messages as f64), cpu: cpu.div_f64(messages as f64) })
}

fn parse_args() -> Option<(usize, f64)> {
    let (mut rounds, mut scale) = (9, 1.0);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--rounds" => rounds = args.next()?.parse().ok().filter(|n| *n > 0)?,
            "--scale" => scale = args.next()?.parse().ok().filter(|f| *f > 0.0)?,
            _ => return None,
        }
    }
    Some((rounds, scale))
}
