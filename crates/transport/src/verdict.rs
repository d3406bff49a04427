//! What it means when TLS says no.

use std::io;

use rustls::{AlertDescription, CertificateError, Error};

/// Why a connection between hosts is not to be.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Refusal {
    /// The server does not believe this host: trying again does not help.
    Own(String),
    /// This host does not believe the server, or it does not speak TLS.
    Server(String),
}

impl Refusal {
    /// One sentence for a person.
    pub fn message(&self) -> &str {
        match self {
            Refusal::Own(message) | Refusal::Server(message) => message,
        }
    }
}

/// What an error of a connection says about certificates; `None`: nothing.
pub fn refusal(error: &io::Error) -> Option<Refusal> {
    let found = error.get_ref()?.downcast_ref::<Error>()?;
    match found {
        Error::AlertReceived(alert) => of_alert(*alert)
            .map(|said| Refusal::Own(format!("the server does not accept this host's certificate: {said}"))),
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
        AlertDescription::CertificateExpired => {
            "it has expired (`hayloft cert issue --again` where the CA is makes another one)"
        }
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
            "the server's certificate has expired".to_owned()
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
