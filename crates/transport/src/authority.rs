//! The small CA: a folder with its key, its certificate, an index of what it has issued, and the list of what it has revoked.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType, ExtendedKeyUsagePurpose,
    IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevocationReason, RevokedCertParams, SerialNumber,
};
use serde::{Deserialize, Serialize};
use time::{Duration, OffsetDateTime};

use crate::credentials::{
    self, Bundle, CredentialsError, believes, install_revoked, private_folder, write_private,
};

/// Where the CA is when nothing says otherwise.
pub const DEFAULT_FOLDER: &str = "/etc/hayloft/ca";

const KEY: &str = "ca-key.pem";
const CERTIFICATE: &str = "ca.pem";
const INDEX: &str = "index.json";
const REVOKED: &str = "crl.pem";
const LOCK: &str = "lock";

/// How long the CA's own certificate is valid.
const AUTHORITY_DAYS: i64 = 3650;
/// Clocks of hosts may be behind.
const SKEW: Duration = Duration::hours(1);

/// What the CA cannot do.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// There is no CA.
    #[error("there is no CA in {}: `hayloft cert init` makes one", .0.display())]
    Missing(PathBuf),
    /// There is one already.
    #[error("there is a CA in {} already: `hayloft cert issue` makes certificates with it", .0.display())]
    Exists(PathBuf),
    /// The name cannot be one.
    #[error("'{0}' cannot be the name of a certificate: 1 to 64 of A-Z a-z 0-9 . _ -")]
    Name(String),
    /// There is a valid certificate of that name.
    #[error("there is a valid certificate for {0} already (`hayloft cert list`): --again makes another one")]
    Issued(String),
    /// Nothing is known of it.
    #[error("there is no valid certificate for {0} (`hayloft cert list` shows all)")]
    Unknown(String),
    /// A file of it.
    #[error(transparent)]
    Credentials(#[from] CredentialsError),
    /// A file of it.
    #[error("cannot use {}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The index cannot be read.
    #[error("{} is damaged", path.display())]
    Index {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: serde_json::Error,
    },
    /// A certificate cannot be made.
    #[error("cannot make a certificate")]
    Certificate(#[from] rcgen::Error),
}

/// A certificate that the CA has issued.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Issued {
    /// Whom it is about.
    pub name: String,
    /// Its number, hexadecimal.
    pub serial: String,
    /// The names and addresses at which a server shows it; none for clients.
    pub hosts: Vec<String>,
    /// Seconds since the epoch.
    pub issued: i64,
    /// Seconds since the epoch.
    pub expires: i64,
    /// When it was revoked, seconds since the epoch.
    pub revoked: Option<i64>,
}

impl Issued {
    /// Whether it is believed.
    pub fn is_valid(&self) -> bool {
        self.revoked.is_none() && self.expires > now().unix_timestamp()
    }
}

/// A CA, for one command at a time.
pub struct Authority {
    folder: PathBuf,
    issued: Vec<Issued>,
    _lock: File,
}

fn now() -> OffsetDateTime {
    // Certificates count in seconds.
    let now = OffsetDateTime::now_utc();
    now.replace_nanosecond(0).unwrap_or(now)
}

fn valid(params: &mut CertificateParams, days: i64) {
    params.not_before = now() - SKEW;
    params.not_after = now() + Duration::days(days);
}

fn check_name(name: &str) -> Result<(), AuthorityError> {
    let is_fine = (1..=64).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
        && !name.starts_with(['-', '.']);
    if is_fine { Ok(()) } else { Err(AuthorityError::Name(name.to_owned())) }
}

impl Authority {
    /// Makes a CA.
    ///
    /// # Errors
    /// There is one, or it cannot be written.
    pub fn init(folder: &Path) -> Result<Authority, AuthorityError> {
        if folder.join(KEY).exists() {
            return Err(AuthorityError::Exists(folder.to_owned()));
        }
        private_folder(folder).map_err(|source| AuthorityError::File { path: folder.to_owned(), source })?;
        let lock = lock(folder)?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        // A name of its own: one of two CAs is not taken for the other.
        let number: String = random_serial()?[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, format!("Hayloft CA {number}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        valid(&mut params, AUTHORITY_DAYS);
        let certificate = params.self_signed(&key)?;
        write_private(&folder.join(CERTIFICATE), certificate.pem().as_bytes(), None)?;
        let authority = Authority { folder: folder.to_owned(), issued: Vec::new(), _lock: lock };
        authority.save()?;
        authority.write_revoked(&Issuer::from_params(&params, &key))?;
        // Last: with its key there is a CA.
        write_private(&folder.join(KEY), key.serialize_pem().as_bytes(), None)?;
        Ok(authority)
    }

    /// Opens one; waits until no other command works with it.
    ///
    /// # Errors
    /// There is none, or it cannot be read.
    pub fn open(folder: &Path) -> Result<Authority, AuthorityError> {
        let missing = match fs::metadata(folder.join(KEY)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => true,
            Err(source) => return Err(AuthorityError::File { path: folder.join(KEY), source }),
            Ok(_) => false,
        };
        if missing {
            return Err(AuthorityError::Missing(folder.to_owned()));
        }
        let lock = lock(folder)?;
        let path = folder.join(INDEX);
        let text = fs::read(&path).map_err(|source| AuthorityError::File { path: path.clone(), source })?;
        let issued =
            serde_json::from_slice(&text).map_err(|source| AuthorityError::Index { path, source })?;
        Ok(Authority { folder: folder.to_owned(), issued, _lock: lock })
    }

    /// All that was issued, oldest first.
    pub fn issued(&self) -> &[Issued] {
        &self.issued
    }

    /// Issues a certificate, for a server at these names and addresses, or for a client.
    ///
    /// # Errors
    /// The name cannot be one, or has a valid certificate already and `again` is not set; a file cannot be written.
    pub fn issue(
        &mut self,
        name: &str,
        hosts: &[String],
        days: u32,
        again: bool,
    ) -> Result<Bundle, AuthorityError> {
        check_name(name)?;
        if !again && self.issued.iter().any(|of| of.name == name && of.is_valid()) {
            return Err(AuthorityError::Issued(name.to_owned()));
        }
        let issuer = self.issuer()?;
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::new(hosts)?;
        params.distinguished_name = rcgen::DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, name);
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        if !hosts.is_empty() {
            params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth);
        }
        params.use_authority_key_identifier_extension = true;
        let serial = random_serial()?;
        params.serial_number = Some(SerialNumber::from_slice(&serial));
        valid(&mut params, days.into());
        let certificate = params.signed_by(&key, &issuer)?;
        self.issued.push(Issued {
            name: name.to_owned(),
            serial: serial.iter().map(|byte| format!("{byte:02x}")).collect(),
            hosts: hosts.to_vec(),
            issued: now().unix_timestamp(),
            expires: params.not_after.unix_timestamp(),
            revoked: None,
        });
        self.save()?;
        Ok(Bundle {
            authorities: self.read(CERTIFICATE)?,
            certificate: certificate.pem(),
            key: key.serialize_pem(),
            revoked: self.read(REVOKED)?,
        })
    }

    /// Revokes all valid certificates of a name, or the one of a serial number; gives them.
    ///
    /// # Errors
    /// There is none; the list cannot be written.
    pub fn revoke(&mut self, name: &str) -> Result<Vec<Issued>, AuthorityError> {
        let issuer = self.issuer()?;
        let mut revoked = Vec::new();
        let is_meant = |of: &&mut Issued| of.revoked.is_none() && (of.name == name || of.serial == name);
        for issued in self.issued.iter_mut().filter(is_meant) {
            issued.revoked = Some(now().unix_timestamp());
            revoked.push(issued.clone());
        }
        if revoked.is_empty() {
            return Err(AuthorityError::Unknown(name.to_owned()));
        }
        self.save()?;
        self.write_revoked(&issuer)?;
        Ok(revoked)
    }

    /// Puts the list of revoked certificates into a folder of credentials, if that believes this CA. `false`: it does not,
    /// or there is none.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn tell_revoked(&self, folder: &Path) -> Result<bool, AuthorityError> {
        if !believes(folder, &self.read(CERTIFICATE)?) {
            return Ok(false);
        }
        install_revoked(folder, &self.read(REVOKED)?)?;
        Ok(true)
    }

    /// The file with the list of revoked certificates.
    pub fn revoked_path(&self) -> PathBuf {
        self.folder.join(REVOKED)
    }

    fn read(&self, name: &str) -> Result<String, AuthorityError> {
        let path = self.folder.join(name);
        fs::read_to_string(&path).map_err(|source| AuthorityError::File { path, source })
    }

    fn issuer(&self) -> Result<Issuer<'static, KeyPair>, AuthorityError> {
        let key = KeyPair::from_pem(&self.read(KEY)?)?;
        Ok(Issuer::from_ca_cert_pem(&self.read(CERTIFICATE)?, key)?)
    }

    fn save(&self) -> Result<(), AuthorityError> {
        let text = serde_json::to_vec_pretty(&self.issued).expect("plain data");
        Ok(write_private(&self.folder.join(INDEX), &text, None)?)
    }

    fn write_revoked<S: rcgen::SigningKey>(&self, issuer: &Issuer<'_, S>) -> Result<(), AuthorityError> {
        let revoked = self.issued.iter().filter_map(|of| Some((of, of.revoked?)));
        let mut revoked_certs = Vec::new();
        for (of, at) in revoked {
            revoked_certs.push(RevokedCertParams {
                serial_number: SerialNumber::from_slice(&bytes_of(&of.serial)),
                revocation_time: OffsetDateTime::from_unix_timestamp(at).unwrap_or_else(|_| now()),
                reason_code: Some(RevocationReason::Unspecified),
                invalidity_date: None,
            });
        }
        // Grows, and says when it was made.
        let number = now().unix_timestamp_nanos().unsigned_abs().to_be_bytes();
        let params = CertificateRevocationListParams {
            this_update: now() - SKEW,
            next_update: now() + Duration::days(AUTHORITY_DAYS),
            crl_number: SerialNumber::from_slice(&number[8..]),
            issuing_distribution_point: None,
            revoked_certs,
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = params.signed_by(issuer)?.pem()?;
        Ok(write_private(&self.folder.join(REVOKED), list.as_bytes(), None)?)
    }
}

fn lock(folder: &Path) -> Result<File, AuthorityError> {
    let path = folder.join(LOCK);
    let lock = || {
        let file = File::options().create(true).truncate(false).write(true).mode(0o600).open(&path)?;
        file.lock()?;
        Ok(file)
    };
    lock().map_err(|source| AuthorityError::File { path: path.clone(), source })
}

/// A number that nobody guesses and that is never given twice: 127 bits.
fn random_serial() -> Result<[u8; 16], AuthorityError> {
    let mut serial = [0; 16];
    let random = credentials::provider().secure_random;
    random.fill(&mut serial).map_err(|_| rcgen::Error::RingUnspecified)?;
    // Positive, and of full length.
    serial[0] = serial[0] & 0x7f | 0x40;
    Ok(serial)
}

fn bytes_of(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2);
    digits.filter_map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}
