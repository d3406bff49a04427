//! What it means when TLS says no.

use std::io;

use rustls::{AlertDescription, CertificateError, Error};

/// Why a connection between hosts is not to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The server does not believe this host: trying again does not help.
    Own(String),
    /// The server says that this host's certificate is out of its time.
    OutOfTime(String),
    /// The same, and by this host's clock it is not: one of the two clocks is wrong.
    Clocks(String),
    /// This host does not believe the server, or it does not speak TLS.
    Server(String),
}

impl Refusal {
    /// One sentence for a person.
    pub fn message(&self) -> &str {
        match self {
            Refusal::Own(message)
            | Refusal::OutOfTime(message)
            | Refusal::Clocks(message)
            | Refusal::Server(message) => message,
        }
    }
}

const NOT_ACCEPTED: &str = "the server does not accept this host's certificate";

/// The alert is the same for one that is not valid yet.
const OUT_OF_TIME: &str =
    "it has expired by the server's clock (`hayloft cert issue --again` where the CA is makes another one)";

const CLOCKS: &str = "it is out of its time by the server's clock, and is not by this host's: \
    one of the two clocks is wrong (`date` on both)";

impl Refusal {
    /// With what this host's clock says of its certificate.
    pub(crate) fn by_own_clock(self, is_valid: impl FnOnce() -> bool) -> Refusal {
        match self {
            Refusal::OutOfTime(_) if is_valid() => Refusal::Clocks(format!("{NOT_ACCEPTED}: {CLOCKS}")),
            other => other,
        }
    }
}

/// What an error of a connection says about certificates; `None`: nothing.
pub fn refusal(error: &io::Error) -> Option<Refusal> {
    let found = error.get_ref()?.downcast_ref::<Error>()?;
    match found {
        Error::AlertReceived(AlertDescription::CertificateExpired) => {
            Some(Refusal::OutOfTime(format!("{NOT_ACCEPTED}: {OUT_OF_TIME}")))
        }
        Error::AlertReceived(alert) => {
            of_alert(*alert).map(|said| Refusal::Own(format!("{NOT_ACCEPTED}: {said}")))
        }
        Error::InvalidCertificate(wrong) => Some(Refusal::Server(of_certificate(wrong))),
        Error::InvalidMessage(_) | Error::InappropriateMessage { .. } => {
            Some(Refusal::Server("the server does not speak TLS: was it started with --insecure?".to_owned()))
        }
        _ => None,
    }
}

fn of_alert(alert: AlertDescription) -> Option<&'static str> {
    Some(match alert {
        AlertDescription::CertificateRevoked => "it was revoked",
        AlertDescription::UnknownCA => "it is of a CA that the server does not know",
        AlertDescription::CertificateRequired => "there is none",
        AlertDescription::BadCertificate
        | AlertDescription::CertificateUnknown
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::AccessDenied
        | AlertDescription::DecryptError => "it cannot be verified",
        _ => return None,
    })
}

fn of_certificate(wrong: &CertificateError) -> String {
    match wrong {
        CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
            "the server's certificate has expired by this host's clock: is that right? \
             (`hayloft cert issue NAME --again` where the CA is makes another one)"
                .to_owned()
        }
        CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
            "the server's certificate is not valid yet: is this host's clock right?".to_owned()
        }
        CertificateError::Revoked => "the server's certificate was revoked".to_owned(),
        CertificateError::UnknownIssuer => {
            "the server's certificate is of a CA that this host does not know".to_owned()
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "the server's certificate is for other names than this one (`hayloft cert issue --again --host` adds one)"
                .to_owned()
        }
        CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
            "the certificate at the server is none of a server".to_owned()
        }
        other => format!("the server's certificate cannot be verified: {other}"),
    }
}
