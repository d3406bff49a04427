//! The connection to the broker.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_nats::connection::State;
use async_nats::{Client, ConnectOptions, ServerAddr, Subscriber};
use bytes::Bytes;
use prost::Message;
use tokio::sync::mpsc;

/// Messages that wait to be sent; what finds no room is dropped, and said again by whoever needs an answer.
const OUTBOX: usize = 8192;
/// A subject that nobody listens to.
const NOBODY: &str = "hayloft.1.nobody";

/// Where the broker is, and how to get in.
#[derive(Debug, Clone, Default)]
pub struct BrokerOptions {
    /// `nats://HOST:PORT` or `tls://HOST:PORT`, several of one cluster separated by commas.
    pub url: String,
    /// Certificates of authorities, PEM, instead of the system's.
    pub ca: Option<PathBuf>,
    /// Our own certificate and its key, PEM.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// Credentials of NATS: a JWT with its key, as `nsc` writes them, or a user's key alone.
    pub credentials: Option<PathBuf>,
}

/// Why there is no connection to a broker.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The address is none: correct it.
    #[error("'{0}' is no broker's address: write nats://HOST:PORT, several separated by commas")]
    Address(String),
    /// A file with credentials cannot be used: correct its path, or the file.
    #[error("credentials {0}: {1}")]
    Credentials(PathBuf, #[source] std::io::Error),
    /// Nobody answers, or not to us: start the broker, or give credentials.
    #[error("the broker {url} cannot be reached: {source}")]
    Unreachable {
        /// Its address.
        url: String,
        /// What the client says.
        source: async_nats::ConnectError,
    },
    /// The connection has ended.
    #[error("no messages from the broker: {0}")]
    Subscribe(#[from] async_nats::SubscribeError),
}

/// A connection that is made again by itself when it breaks.
#[derive(Debug, Clone)]
pub struct Broker {
    client: Client,
    outbox: mpsc::Sender<Letter>,
    /// Letters that the client has not got yet.
    waiting: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct Letter {
    subject: String,
    reply: Option<String>,
    bytes: Bytes,
}

/// A user's key (a seed of nkeys), if that is all that a file of credentials has beside comments.
fn key_alone(credentials: &str) -> Option<&str> {
    let mut lines =
        credentials.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let key = lines.next().filter(|line| line.starts_with("SU"))?;
    lines.next().is_none().then_some(key)
}

impl Broker {
    /// Connects. `waits`: a broker that is not there yet is no error.
    ///
    /// # Errors
    /// See [`BrokerError`].
    pub async fn connect(options: &BrokerOptions, name: &str, waits: bool) -> Result<Broker, BrokerError> {
        let bad = || BrokerError::Address(options.url.clone());
        let addresses: Vec<ServerAddr> = options
            .url
            .split(',')
            .map(|url| url.trim().parse())
            .collect::<Result<_, _>>()
            .map_err(|_| bad())?;
        let mut connect = ConnectOptions::new()
            .name(format!("hayloft {name}"))
            .connection_timeout(Duration::from_secs(2))
            .ping_interval(Duration::from_secs(2))
            .subscription_capacity(64 << 10)
            .reconnect_delay_callback(|attempts| {
                Duration::from_millis(match attempts {
                    // The very first one counts as well.
                    0..4 => 0,
                    4..8 => 50,
                    _ => 250,
                })
            });
        // The client takes no notice of what an address says of that.
        let known = addresses.iter().find_map(|address| Some((address.username()?, address.password()?)));
        if let Some((user, password)) = known {
            connect = connect.user_and_password(user.to_owned(), password.to_owned());
        }
        if let Some(ca) = &options.ca {
            connect = connect.add_root_certificates(ca.clone()).require_tls(true);
        }
        if let Some((certificate, key)) = &options.certificate {
            connect = connect.add_client_certificate(certificate.clone(), key.clone()).require_tls(true);
        }
        if let Some(file) = &options.credentials {
            let bad = |error| BrokerError::Credentials(file.clone(), error);
            let text = std::fs::read_to_string(file).map_err(bad)?;
            connect = match key_alone(&text) {
                Some(key) => connect.nkey(key.to_owned()),
                None => connect.credentials(&text).map_err(bad)?,
            };
        }
        let client = match connect.clone().connect(&addresses[..]).await {
            Err(_) if waits => connect.retry_on_initial_connect().connect(&addresses[..]).await,
            connected => connected,
        };
        let client =
            client.map_err(|source| BrokerError::Unreachable { url: options.url.clone(), source })?;
        let (outbox, mut letters) = mpsc::channel::<Letter>(OUTBOX);
        let (sender, waiting) = (client.clone(), Arc::new(AtomicUsize::new(0)));
        let left = Arc::clone(&waiting);
        tokio::spawn(async move {
            while let Some(letter) = letters.recv().await {
                // What is queued while nobody is there would come late and all at once.
                if sender.connection_state() == State::Connected {
                    let _ = match letter.reply {
                        Some(reply) => sender.publish_with_reply(letter.subject, reply, letter.bytes).await,
                        None => sender.publish(letter.subject, letter.bytes).await,
                    };
                }
                left.fetch_sub(1, Ordering::AcqRel);
            }
        });
        Ok(Broker { client, outbox, waiting })
    }

    /// Says something, if the broker is there and there is room for it.
    pub fn say(&self, subject: impl Into<String>, message: &impl Message) {
        self.send(subject.into(), None, message);
    }

    /// The same; the broker says at `reply` if nobody listens.
    pub fn say_to_somebody(&self, subject: impl Into<String>, reply: String, message: &impl Message) {
        self.send(subject.into(), Some(reply), message);
    }

    fn send(&self, subject: String, reply: Option<String>, message: &impl Message) {
        self.waiting.fetch_add(1, Ordering::AcqRel);
        let letter = Letter { subject, reply, bytes: message.encode_to_vec().into() };
        if self.outbox.try_send(letter).is_err() {
            self.waiting.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Hears everything that is said at a subject from now on.
    ///
    /// # Errors
    /// When the connection has ended for good.
    pub async fn hear(&self, subject: impl Into<String>) -> Result<Subscriber, BrokerError> {
        Ok(self.client.subscribe(subject.into()).await?)
    }

    /// Whether the broker is there at the moment.
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Asks something and waits for the answer; None when nobody gives one.
    pub async fn ask(&self, subject: &str) -> Option<Bytes> {
        let request = async_nats::Request::new().timeout(Some(Duration::from_secs(2)));
        self.client.send_request(subject.to_owned(), request).await.ok().map(|message| message.payload)
    }

    /// Waits until the broker has everything that was said, for a moment at most.
    pub async fn flush(&self) {
        let all = async {
            while self.waiting.load(Ordering::Acquire) > 0 {
                tokio::task::yield_now().await;
            }
            // Nobody listens there, which the broker says after all that came before.
            self.ask(NOBODY).await;
        };
        let _ = tokio::time::timeout(Duration::from_millis(500), all).await;
    }
}
