//! What proves a host, and whom it believes: a folder of four files.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};
use rustls::{RootCertStore, SupportedProtocolVersion};
use x509_parser::prelude::{FromDer, X509Certificate};

use crate::peer::Shown;

/// Where credentials are looked for when nothing says otherwise.
pub const DEFAULT_FOLDER: &str = "/etc/hayloft/tls";

/// Whom to believe: certificates of CAs.
const AUTHORITIES: &str = "ca.pem";
/// The host's own certificate, and what it builds on.
const CERTIFICATE: &str = "cert.pem";
/// Its key.
const KEY: &str = "key.pem";
/// Which certificates are not to be believed any more; there need be none.
const REVOKED: &str = "crl.pem";

/// The files of a folder.
pub(crate) const FILES: [&str; 4] = [AUTHORITIES, CERTIFICATE, KEY, REVOKED];

/// The only version of TLS.
pub(crate) const VERSIONS: &[&SupportedProtocolVersion] = &[&rustls::version::TLS13];

/// Credentials that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// There are none.
    #[error(
        "there is no certificate in {}: make one where the CA is, `hayloft cert issue NAME`, and bring it here with `hayloft cert install`",
        .0.display()
    )]
    Missing(PathBuf),
    /// A file cannot be read or written.
    #[error("cannot use {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A file does not hold what it has to.
    #[error("{}: {reason}", path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// Others can read the key.
    #[error("other users can read the key {0}: `chmod 600 {0}`, and think of whether somebody has", path.display())]
    Open {
        /// The key.
        path: PathBuf,
    },
}

/// The contents of a folder of credentials, read.
pub struct Credentials {
    pub(crate) authorities: Arc<RootCertStore>,
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
    pub(crate) revoked: Vec<CertificateRevocationListDer<'static>>,
}

impl Credentials {
    /// Reads a folder.
    ///
    /// # Errors
    /// See [`CredentialsError`].
    pub fn load(folder: &Path) -> Result<Credentials, CredentialsError> {
        if !folder.join(CERTIFICATE).exists() {
            return Err(CredentialsError::Missing(folder.to_owned()));
        }
        let mut authorities = RootCertStore::empty();
        for certificate in certificates(&folder.join(AUTHORITIES))? {
            authorities.add(certificate).map_err(|error| invalid(&folder.join(AUTHORITIES), error))?;
        }
        let path = folder.join(KEY);
        let mode = fs::metadata(&path).map_err(|source| file(&path, source))?.mode();
        if mode & 0o027 != 0 {
            return Err(CredentialsError::Open { path });
        }
        let key = PrivateKeyDer::from_pem_slice(&read(&path)?)
            .map_err(|error| invalid(&path, format!("no private key: {error}")))?;
        let path = folder.join(REVOKED);
        // A link that leads nowhere is no sign that nobody was revoked.
        let has_lists = path.symlink_metadata().is_ok();
        let lists = match has_lists {
            true => CertificateRevocationListDer::pem_slice_iter(&read(&path)?)
                .collect::<Result<Vec<_>, _>>()
                .map_err(|error| invalid(&path, error))?,
            false => Vec::new(),
        };
        if lists.is_empty() && has_lists {
            // Whoever was revoked would come in again.
            return Err(invalid(&path, "there is no list of revoked certificates in it"));
        }
        Ok(Credentials {
            authorities: Arc::new(authorities),
            chain: certificates(&folder.join(CERTIFICATE))?,
            key,
            revoked: lists,
        })
    }

    /// Whether clients will believe a server with this certificate, but for its names and its CA.
    ///
    /// # Errors
    /// They will not: it was issued for a host that is none.
    pub fn check_server(&self, folder: &Path) -> Result<(), CredentialsError> {
        let own = self.chain.first().and_then(|own| X509Certificate::from_der(own).ok());
        let purposes = own.as_ref().and_then(|(_, own)| own.extended_key_usage().ok().flatten());
        match purposes.is_none_or(|purposes| purposes.value.server_auth || purposes.value.any) {
            true => Ok(()),
            false => Err(invalid(
                &folder.join(CERTIFICATE),
                "it is none of a server: where the CA is, `hayloft cert issue NAME --host NAME --host ADDRESS` makes one",
            )),
        }
    }

    /// Whether the host's own certificate is in its time, by the host's clock.
    pub(crate) fn is_valid(&self) -> bool {
        let own = self.chain.first().and_then(|own| X509Certificate::from_der(own).ok());
        own.is_some_and(|(_, own)| own.validity().is_valid())
    }

    /// When the host's own certificate ends, seconds since the epoch.
    pub fn expires(&self) -> Option<i64> {
        self.chain.first().and_then(|own| shown(own)).map(|(_, shown)| shown.expires)
    }
}

fn file(path: &Path, source: io::Error) -> CredentialsError {
    CredentialsError::File { path: path.to_owned(), source }
}

fn invalid(path: &Path, reason: impl ToString) -> CredentialsError {
    CredentialsError::Invalid { path: path.to_owned(), reason: reason.to_string() }
}

fn read(path: &Path) -> Result<Vec<u8>, CredentialsError> {
    fs::read(path).map_err(|source| file(path, source))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&read(path)?).collect();
    match found {
        Ok(found) if found.is_empty() => Err(invalid(path, "there is no certificate in it")),
        Ok(found) => Ok(found),
        Err(error) => Err(invalid(path, error)),
    }
}

/// The cryptography of all connections: ring, the faster cipher first.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    let mut provider = rustls::crypto::ring::default_provider();
    let fastest = rustls::CipherSuite::TLS13_AES_128_GCM_SHA256;
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != fastest);
    Arc::new(provider)
}

/// The name that a certificate is about, and what is needed to look after it. The name is the subject's common name, else
/// the first DNS name.
pub(crate) fn shown(certificate: &CertificateDer<'_>) -> Option<(String, Shown)> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let common = parsed.subject().iter_common_name().find_map(|name| name.as_str().ok()).map(str::to_owned);
    let dns = || {
        let names = parsed.subject_alternative_name().ok()??;
        names.value.general_names.iter().find_map(|name| match name {
            x509_parser::extensions::GeneralName::DNSName(name) => Some((*name).to_owned()),
            _ => None,
        })
    };
    let name = common.filter(|name| !name.is_empty()).or_else(dns)?;
    let (issuer, serial) = (parsed.issuer().as_raw().to_vec(), parsed.raw_serial().to_vec());
    Some((name, Shown { issuer, serial, expires: parsed.validity().not_after.timestamp() }))
}

/// All that a host needs, as one text to carry there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bundle {
    /// Certificates of CAs, PEM.
    pub authorities: String,
    /// The host's certificate, PEM.
    pub certificate: String,
    /// Its key, PEM.
    pub key: String,
    /// The list of revoked certificates, PEM.
    pub revoked: String,
}

/// Before each part of a bundle; PEM allows text between its blocks.
const PART: &str = "# hayloft ";

impl Bundle {
    /// As one text.
    pub fn to_text(&self) -> String {
        let parts = [&self.authorities, &self.certificate, &self.key, &self.revoked];
        FILES.iter().zip(parts).map(|(name, text)| format!("{PART}{name}\n{}\n", text.trim_end())).collect()
    }

    /// The reverse of [`Bundle::to_text`]; `None` for a text that is none.
    pub fn parse(text: &str) -> Option<Bundle> {
        let part = |name: &str| {
            let (_, rest) = text.split_once(&format!("{PART}{name}\n"))?;
            let end = rest.find(PART).unwrap_or(rest.len());
            Some(rest[..end].to_owned()).filter(|part| part.contains("-----BEGIN "))
        };
        Some(Bundle {
            authorities: part(AUTHORITIES)?,
            certificate: part(CERTIFICATE)?,
            key: part(KEY)?,
            revoked: part(REVOKED)?,
        })
    }

    /// Writes a folder of credentials, over the one that may be there: files for their owner only.
    ///
    /// # Errors
    /// When it cannot be written, or its content cannot be used.
    pub fn install(&self, folder: &Path, owner: Option<(u32, u32)>) -> Result<(), CredentialsError> {
        private_folder(folder).map_err(|source| file(folder, source))?;
        let parts = [&self.authorities, &self.certificate, &self.key, &self.revoked];
        // The certificate comes last: without one there are no credentials.
        for (name, text) in [0, 2, 3, 1].map(|at| (FILES[at], parts[at])) {
            write_private(&folder.join(name), text.as_bytes(), owner)?;
        }
        if let Some((uid, gid)) = owner {
            std::os::unix::fs::chown(folder, Some(uid), Some(gid)).map_err(|source| file(folder, source))?;
        }
        Credentials::load(folder).map(drop)
    }
}

/// Puts a new list of revoked certificates into a folder of credentials, with the owner of the one before.
pub(crate) fn install_revoked(folder: &Path, list: &str) -> Result<(), CredentialsError> {
    let path = folder.join(REVOKED);
    let of = fs::metadata(&path).or_else(|_| fs::metadata(folder)).map_err(|source| file(&path, source))?;
    write_private(&path, list.as_bytes(), Some((of.uid(), of.gid())))
}

/// Whether a folder of credentials believes this CA.
pub(crate) fn believes(folder: &Path, authority: &str) -> bool {
    let found = |text: &[u8]| CertificateDer::pem_slice_iter(text).filter_map(Result::ok).collect::<Vec<_>>();
    let ours = found(authority.as_bytes());
    fs::read(folder.join(AUTHORITIES)).is_ok_and(|text| found(&text).iter().any(|of| ours.contains(of)))
}

/// Makes a folder that only its owner enters, and those above it as usual.
pub(crate) fn private_folder(folder: &Path) -> io::Result<()> {
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::set_permissions(folder, Permissions::from_mode(0o700))
        }
        made => made,
    }
}

/// Writes a file for its owner only, whole or not at all.
pub(crate) fn write_private(
    path: &Path,
    text: &[u8],
    owner: Option<(u32, u32)>,
) -> Result<(), CredentialsError> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let write = || {
        // 0600 from the start.
        let mut new = tempfile::NamedTempFile::new_in(folder)?;
        new.write_all(text)?;
        new.as_file().sync_all()?;
        if let Some((uid, gid)) = owner {
            std::os::unix::fs::fchown(new.as_file(), Some(uid), Some(gid))?;
        }
        new.persist(path)?;
        fs::File::open(folder)?.sync_all()
    };
    write().map_err(|source| file(path, source))
}

/// Writes a new file for its owner only.
///
/// # Errors
/// When there is a file of that name, or it cannot be written.
pub fn write_new(path: &Path, text: &str) -> Result<(), CredentialsError> {
    let write = || {
        let mut new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        new.write_all(text.as_bytes())?;
        new.sync_all()
    };
    write().map_err(|source| file(path, source))
}
