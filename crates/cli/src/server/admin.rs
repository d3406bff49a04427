//! A synchronous client for administration: one connection, one request at a time, no session.

use std::io;
use std::time::Duration;

use bytes::BytesMut;
use hayloft_transport::{ConnectError, Dial, Receiving, Sending};
use hayloft_wire::{
    ClientMessage, Failed, FailureCode, ServerMessage, client_message,
    frame::{self, Opener, Sealer},
    server_message,
};

use crate::exit::{Exit, exit_of, failure};

/// How long a server may take to accept a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// How long one may take for what it answers at once.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to a server.
pub(crate) struct Admin {
    server: String,
    sending: Sending,
    receiving: Receiving,
    sealer: Sealer,
    opener: Opener,
    buffer: BytesMut,
    last_request: u64,
}

impl Admin {
    /// Connects to `HOST:PORT`.
    ///
    /// # Errors
    /// With [`Exit::Unreachable`] when nobody answers there, [`Exit::Usage`] when it is no address.
    pub(crate) fn connect(server: &str) -> anyhow::Result<Admin> {
        Admin::connect_as(&crate::dial::ours(), server)
    }

    /// As [`Admin::connect`], with other credentials than those of the command line.
    ///
    /// # Errors
    /// As there.
    pub(crate) fn connect_as(dial: &Dial, server: &str) -> anyhow::Result<Admin> {
        let failed = |error: ConnectError| match error {
            ConnectError::Address(error) if error.kind() == io::ErrorKind::InvalidInput => failure(
                Exit::Usage,
                format!("'{server}' is no server address: write HOST:PORT or unix:/PATH"),
            ),
            ConnectError::Address(error) => {
                failure(Exit::Unreachable, format!("cannot find the host of {server}: {error}"))
            }
            ConnectError::Unreachable(error) => failure(
                Exit::Unreachable,
                format!("cannot reach the server at {server}: {error} (is `hayloft serve` running there?)"),
            ),
            ConnectError::Credentials(error) => failure(
                Exit::Denied,
                format!(
                    "cannot use the server at {server}, which is on another host: {:#}",
                    anyhow::Error::from(error)
                ),
            ),
            ConnectError::Refused(refused) => {
                failure(Exit::Denied, format!("no connection to {server}: {}", refused.message()))
            }
        };
        let (sending, receiving) = dial.connect(server, CONNECT_TIMEOUT).map_err(failed)?;
        let server = server.to_owned();
        Ok(Admin {
            server,
            sending,
            receiving,
            sealer: Sealer::default(),
            opener: Opener::default(),
            buffer: BytesMut::new(),
            last_request: 0,
        })
    }

    /// As [`Admin::ask`], for what a server answers at once: fails when it does not.
    ///
    /// # Errors
    /// As there, and when there is no answer within some seconds.
    pub(crate) fn ask_at_once(&mut self, body: client_message::Body) -> anyhow::Result<server_message::Body> {
        self.sending.socket().set_read_timeout(Some(ANSWER_TIMEOUT))?;
        self.sending.socket().set_write_timeout(Some(ANSWER_TIMEOUT))?;
        let answer = self.ask(body);
        self.sending.socket().set_read_timeout(None)?;
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
        self.sealer.seal(&mut bytes);
        // A server that does not want this host has said why: that is read in any case.
        let written = self.sending.write_all(&bytes);
        self.answer(&written)
    }

    /// The next part of the last answer.
    ///
    /// # Errors
    /// As [`Admin::ask`].
    pub(crate) fn next_part(&mut self) -> anyhow::Result<server_message::Body> {
        self.answer(&Ok(()))
    }

    fn answer(&mut self, written: &io::Result<()>) -> anyhow::Result<server_message::Body> {
        loop {
            let message = match (self.receive(), written) {
                (Err(error), Err(cause)) if exit_of(&error) != Exit::Denied => return Err(self.broken(cause)),
                (received, _) => received?,
            };
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
            let taken = self
                .opener
                .take::<ServerMessage>(&mut self.buffer)
                .map_err(|error| failure(Exit::Unreachable, format!("{} sent {error}", self.server)))?;
            if let Some(message) = taken {
                return Ok(message);
            }
            match self.receiving.read(&mut part).map_err(|error| self.broken(&error))? {
                0 => return Err(self.broken(&io::ErrorKind::UnexpectedEof.into())),
                len => self.buffer.extend_from_slice(&part[..len]),
            }
        }
    }

    fn broken(&self, error: &io::Error) -> anyhow::Error {
        if let Some(refused) = hayloft_transport::refusal(error) {
            let message = format!("no connection to {}: {}", self.server, refused.message());
            return failure(Exit::Denied, message);
        }
        let reason = match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                "it closed the connection (is it of the same version? its log says why)".to_owned()
            }
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
        FailureCode::Denied => Exit::Denied,
        FailureCode::Exists => Exit::Exists,
        FailureCode::Busy => Exit::Busy,
        FailureCode::NoSpace => Exit::NoSpace,
        FailureCode::Unavailable => Exit::Unreachable,
        FailureCode::Invalid => Exit::Usage,
        FailureCode::AtRest => Exit::Damaged,
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
