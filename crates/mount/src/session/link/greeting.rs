//! The first words on a connection, and why there are none.

use std::io;
use std::time::{Duration, Instant};

use hayloft_transport::{ConnectError, Receiving, Sending, refusal};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{ClientMessage, Failed, FailureCode, Hello, ServerMessage, Spoken, Welcome, agree, frame};

use socket2::{Socket, TcpKeepalive};

use crate::error::MountError;
use crate::host::clock::Clock;
use crate::session::reader::Reader;
use crate::session::writer::Writer;
use crate::stats::Stats;

/// How long a server may take for a hello, and for a claim: with a store that is slow or away it has to be asked again.
pub(super) const GREETING_TIMEOUT: Duration = Duration::from_secs(30);

/// A server that knows nothing of a connection any more is found out after so long without a word.
const HALF_OPEN: Duration = Duration::from_secs(3);

/// How long an answer may take from now on, `None`: any time. While one is waited for the kernel asks the server's whether it knows the
/// connection at all: it may have given it up when its packets were lost, and this side has nothing to send by which it would be told.
pub(super) fn await_answers(socket: &Socket, limit: Option<Duration>) -> io::Result<()> {
    let asks = TcpKeepalive::new().with_time(HALF_OPEN).with_interval(HALF_OPEN);
    // A socket of this host has nothing of the kind.
    let _ = socket.set_tcp_keepalive(&asks).and_then(|()| socket.set_keepalive(limit.is_some()));
    socket.set_read_timeout(limit)
}

/// Why a server does not let who wants to mount.
pub(super) fn refused(address: &str, volume: &str, failed: &Failed) -> MountError {
    match failed.code() {
        FailureCode::NotFound => {
            MountError::NoSuchVolume { volume: volume.to_string(), address: address.to_string() }
        }
        FailureCode::Denied => {
            MountError::Distrusted { address: address.to_string(), message: failed.message.clone() }
        }
        _ => MountError::Refused { address: address.to_string(), message: failed.message.clone() },
    }
}

/// Whether the other side has closed the connection without a word.
pub(super) fn is_closed(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), UnexpectedEof | ConnectionReset | ConnectionAborted | BrokenPipe)
}

/// Why there is no connection to the server, for who wants to mount.
pub(super) fn not_connected(address: &str, error: ConnectError) -> MountError {
    let address = address.to_string();
    match error {
        ConnectError::Address(source) | ConnectError::Unreachable(source) => {
            MountError::Unreachable { address, source }
        }
        ConnectError::Credentials(source) => MountError::Credentials { address, source },
        ConnectError::Refused(refusal) => {
            MountError::Distrusted { address, message: refusal.message().to_owned() }
        }
    }
}

/// The error with what caused it, in one line.
pub(super) fn with_cause(error: &ConnectError) -> String {
    let cause = std::error::Error::source(error).map(ToString::to_string);
    cause.map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}

/// How long nothing may arrive at the server of what is sent: one that waits for its store, or has very many connections to accept, takes nothing for a
/// while, and is there all the same. (Within this host there is nothing to set.)
const SENDING_TIMEOUT: Duration = Duration::from_secs(60);

/// What a server says to a hello.
pub(super) enum Greeting {
    Welcome(Box<(Writer, Reader, Welcome)>),
    Refused(Failed),
}

/// Says hello, and waits for what the server says.
pub(super) fn greet(
    (sending, receiving): (Sending, Receiving),
    hello: &Hello,
    stats: &Stats,
    clock: &Clock,
) -> Result<Greeting, ConnectError> {
    let failed = |error: io::Error| match refusal(&error) {
        Some(refusal) => ConnectError::Refused(refusal),
        None => ConnectError::Unreachable(error),
    };
    let _ = sending.socket().set_tcp_user_timeout(Some(SENDING_TIMEOUT));
    let ask = Ask::Hello(hello.clone());
    stats.count_request(&ask);
    let mut bytes = Vec::new();
    frame::encode(&ClientMessage { request: u64::MAX, body: Some(ask) }, &mut bytes);
    let sent = Instant::now();
    await_answers(&sending.socket(), Some(GREETING_TIMEOUT)).map_err(failed)?;
    let mut writer = Writer::new(sending);
    let written = writer.write_all(&mut bytes);
    let mut reader = Reader::new(receiving);
    // Also when nothing can be written: a server that does not want this host has said why.
    let message: Option<ServerMessage> = match (reader.next(stats).map_err(io::Error::from), written) {
        (Ok(None), Err(error)) => return Err(failed(error)),
        (read, _) => read.map_err(failed)?,
    };
    await_answers(&reader.socket(), None).map_err(failed)?;
    match message.and_then(|message| message.body) {
        Some(Answer::Welcome(welcome)) => {
            if let Err(mismatch) = agree(&Spoken::ours(), &welcome.spoken()) {
                let code = FailureCode::Protocol as i32;
                return Ok(Greeting::Refused(Failed {
                    code,
                    message: mismatch.to_string(),
                    ..Failed::default()
                }));
            }
            clock.hear(welcome.server_time_nanos, sent);
            Ok(Greeting::Welcome(Box::new((writer, reader, welcome))))
        }
        Some(Answer::Failed(failed)) => Ok(Greeting::Refused(failed)),
        Some(_) => Err(failed(io::Error::new(io::ErrorKind::InvalidData, "the answer is not Hayloft's"))),
        None => Err(failed(io::Error::new(
            io::ErrorKind::UnexpectedEof,
            "it closed the connection (does it listen for other hosts, is it of the same version? its log says why)",
        ))),
    }
}
