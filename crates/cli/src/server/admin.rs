//! A synchronous client for administration: one connection, one request at a time, no session.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

use bytes::BytesMut;
use hayloft_wire::{
    ClientMessage, Failed, FailureCode, ServerMessage, client_message, frame, server_message,
};

use crate::exit::{Exit, failure};

/// How long a server may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long one may take for what it answers at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to a server.
pub(crate) struct Admin {
    server: String,
    stream: TcpStream,
    buffer: BytesMut,
    last_request: u64,
}

impl Admin {
    /// Connects to `HOST:PORT`.
    ///
    /// # Errors
    /// With [`Exit::Unreachable`] when nobody answers there, [`Exit::Usage`] when it is no address.
    pub(crate) fn connect(server: &str) -> anyhow::Result<Admin> {
        let addresses = server.to_socket_addrs().map_err(|error| match error.kind() {
            io::ErrorKind::InvalidInput => {
                failure(Exit::Usage, format!("'{server}' is no server address: write HOST:PORT"))
            }
            _ => failure(Exit::Unreachable, format!("cannot find the host of {server}: {error}")),
        })?;
        let mut last = None;
        for address in addresses {
            match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    let server = server.to_owned();
                    return Ok(Admin { server, stream, buffer: BytesMut::new(), last_request: 0 });
                }
                Err(error) => last = Some(error),
            }
        }
        let reason = last.map_or("the name has no address".to_owned(), |error| error.to_string());
        Err(failure(
            Exit::Unreachable,
            format!("cannot reach the server at {server}: {reason} (is `hayloft serve` running there?)"),
        ))
    }

    /// As [`Admin::ask`], for what a server answers at once: fails when it does not.
    ///
    /// # Errors
    /// As there, and when there is no answer within some seconds.
    pub(crate) fn ask_at_once(&mut self, body: client_message::Body) -> anyhow::Result<server_message::Body> {
        self.stream.set_read_timeout(Some(ANSWER_TIMEOUT))?;
        self.stream.set_write_timeout(Some(ANSWER_TIMEOUT))?;
        let answer = self.ask(body);
        self.stream.set_read_timeout(None)?;
        answer
    }

    /// Sends one request and waits for its answer.
    ///
    /// # Errors
    /// When the server refuses, with the code that fits; when the connection breaks.
    pub(crate) fn ask(&mut self, body: client_message::Body) -> anyhow::Result<server_message::Body> {
        self.last_request += 1;
        let mut bytes = Vec::new();
        frame::encode(&ClientMessage { request: self.last_request, body: Some(body) }, &mut bytes);
        self.stream.write_all(&bytes).map_err(|error| self.broken(&error))?;
        loop {
            let message = self.receive()?;
            match message.body {
                Some(server_message::Body::Failed(failed)) => return Err(refusal(&failed)),
                Some(body) if message.request == self.last_request => return Ok(body),
                _ => {}
            }
        }
    }

    fn receive(&mut self) -> anyhow::Result<ServerMessage> {
        let mut part = [0; 64 << 10];
        loop {
            let taken = frame::take::<ServerMessage>(&mut self.buffer)
                .map_err(|error| failure(Exit::Unreachable, format!("{} sent {error}", self.server)))?;
            if let Some(message) = taken {
                return Ok(message);
            }
            match self.stream.read(&mut part).map_err(|error| self.broken(&error))? {
                0 => return Err(self.broken(&io::ErrorKind::UnexpectedEof.into())),
                len => self.buffer.extend_from_slice(&part[..len]),
            }
        }
    }

    fn broken(&self, error: &io::Error) -> anyhow::Error {
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
            io::ErrorKind::WouldBlock => format!("it does not answer within {} s", ANSWER_TIMEOUT.as_secs()),
            _ => error.to_string(),
        };
        failure(Exit::Unreachable, format!("lost the server at {}: {reason}", self.server))
    }

    /// The error for an answer of a kind that does not fit the question.
    pub(crate) fn unexpected(&self) -> anyhow::Error {
        failure(
            Exit::Failed,
            format!("the server at {} answered with something else than asked", self.server),
        )
    }
}

/// The error for a refusal.
fn refusal(failed: &Failed) -> anyhow::Error {
    let exit = match failed.code() {
        FailureCode::NotFound => Exit::NoVolume,
        FailureCode::Exists => Exit::Exists,
        FailureCode::Busy => Exit::Busy,
        FailureCode::NoSpace => Exit::NoSpace,
        FailureCode::Unavailable => Exit::Unreachable,
        FailureCode::Invalid => Exit::Usage,
        FailureCode::Unspecified
        | FailureCode::SessionEnded
        | FailureCode::Evicted
        | FailureCode::OtherHistory
        | FailureCode::Protocol
        | FailureCode::Store
        | FailureCode::Uncertain
        | FailureCode::Damaged
        | FailureCode::Contradicted => Exit::Failed,
    };
    failure(exit, failed.message.clone())
}
