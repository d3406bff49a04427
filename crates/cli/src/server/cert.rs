//! `hayloft cert`: the small CA.

use std::collections::BTreeSet;
use std::io::{IsTerminal, Read};
use std::path::Path;

use anyhow::Context;
use hayloft_transport::authority::{Authority, AuthorityError, Issued};
use hayloft_transport::{Bundle, CredentialsError, write_new};

use crate::exit::{Exit, failure};
use crate::server::cert_args::{CertArgs, CertVerb, InitArgs, InstallArgs, IssueArgs};
use crate::units::show_utc;

/// Days before its end at which a certificate is to be made anew.
const SOON: i64 = 14;

/// Runs the command; `tls` is the folder of this host's credentials.
///
/// # Errors
/// One sentence that says what to do.
pub(crate) fn run(args: &CertArgs, tls: &Path) -> anyhow::Result<u8> {
    match &args.verb {
        CertVerb::Init(init) => make(&args.ca, init, tls),
        CertVerb::Issue(issue) => issue_one(&args.ca, issue),
        CertVerb::Install(install) => install_one(install, tls),
        CertVerb::Revoke(revoke) => revoke_one(&args.ca, &revoke.name, tls),
        CertVerb::List(list) => show(&args.ca, list.json),
    }
    .map(|()| 0)
}

fn failed(error: AuthorityError) -> anyhow::Error {
    let exit = match &error {
        AuthorityError::Exists(_) | AuthorityError::Issued(_) => Exit::Exists,
        AuthorityError::Name(_) | AuthorityError::Unknown(_) | AuthorityError::Missing(_) => Exit::Usage,
        AuthorityError::File { source, .. }
        | AuthorityError::Credentials(CredentialsError::File { source, .. })
            if source.kind() == std::io::ErrorKind::PermissionDenied =>
        {
            Exit::Denied
        }
        _ => Exit::Failed,
    };
    failure(exit, format!("{:#}", anyhow::Error::from(error)))
}

fn make(ca: &Path, args: &InitArgs, tls: &Path) -> anyhow::Result<()> {
    let owner = args.owner.as_deref().map(user).transpose()?;
    if tls.join("cert.pem").exists() {
        let said = format!("there are certificates in {} already", tls.display());
        return Err(failure(Exit::Exists, said));
    }
    let mut authority = Authority::init(ca).map_err(failed)?;
    let name = host_name();
    let hosts = if args.host.is_empty() { own_hosts(&name) } else { args.host.clone() };
    let bundle = authority.issue(&name, &hosts, args.days, false).map_err(failed)?;
    bundle.install(tls, owner)?;
    println!("made a CA in {}, and a certificate for {name} in {}", ca.display(), tls.display());
    println!("  it is good for: {}", hosts.join(" "));
    println!("for each other host: hayloft cert issue HOST | ssh HOST hayloft cert install");
    Ok(())
}

fn issue_one(ca: &Path, args: &IssueArgs) -> anyhow::Result<()> {
    if args.to.is_none() && std::io::stdout().is_terminal() {
        let said = "a private key is not for a terminal: `| ssh HOST hayloft cert install`, or --to FILE";
        return Err(failure(Exit::Usage, said));
    }
    if let Some(to) = args.to.as_deref().filter(|to| to.exists()) {
        return Err(failure(Exit::Exists, format!("{} exists already", to.display())));
    }
    let mut authority = Authority::open(ca).map_err(failed)?;
    let bundle = authority.issue(&args.name, &args.host, args.days, args.again).map_err(failed)?;
    match &args.to {
        Some(to) => {
            write_new(to, &bundle.to_text())?;
            println!("wrote {}: `hayloft cert install` there, and remove it", to.display());
        }
        None => print!("{}", bundle.to_text()),
    }
    Ok(())
}

fn install_one(args: &InstallArgs, tls: &Path) -> anyhow::Result<()> {
    let owner = args.owner.as_deref().map(user).transpose()?;
    let mut text = String::new();
    match &args.file {
        Some(path) => {
            text =
                std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        }
        None => {
            std::io::stdin().read_to_string(&mut text).context("cannot read standard input")?;
        }
    }
    let bundle = Bundle::parse(&text).ok_or_else(|| {
        failure(Exit::Usage, "this is not what `hayloft cert issue` prints: did that command fail?")
    })?;
    bundle.install(tls, owner)?;
    println!("installed a certificate in {}", tls.display());
    Ok(())
}

fn revoke_one(ca: &Path, name: &str, tls: &Path) -> anyhow::Result<()> {
    let mut authority = Authority::open(ca).map_err(failed)?;
    for issued in authority.revoke(name).map_err(failed)? {
        println!("revoked {} ({})", issued.name, issued.serial);
    }
    let list = authority.revoked_path();
    match authority.tell_revoked(tls).map_err(failed)? {
        true => println!("a server on this host knows it within seconds; others need {}", list.display()),
        false => println!("copy {} into /etc/hayloft/tls of each server", list.display()),
    }
    Ok(())
}

fn show(ca: &Path, json: bool) -> anyhow::Result<()> {
    let authority = Authority::open(ca).map_err(failed)?;
    if json {
        println!("{}", serde_json::to_string_pretty(authority.issued())?);
        return Ok(());
    }
    println!("{:20}  {:32}  {:23}  {:12}  FOR", "NAME", "NUMBER", "VALID UNTIL", "STATE");
    for issued in authority.issued() {
        let hosts = if issued.hosts.is_empty() { "client".to_owned() } else { issued.hosts.join(" ") };
        let until = show_utc(issued.expires);
        println!("{:20}  {:32}  {until:23}  {:12}  {hosts}", issued.name, issued.serial, state(issued));
    }
    Ok(())
}

fn state(issued: &Issued) -> String {
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |now| now.as_secs());
    let days = (issued.expires - now as i64) / 86_400;
    match issued {
        Issued { revoked: Some(_), .. } => "revoked".to_owned(),
        issued if !issued.is_valid() => "expired".to_owned(),
        _ if days < SOON => format!("{days} days left"),
        _ => "valid".to_owned(),
    }
}

fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    name.trim().to_owned()
}

/// The names and addresses of this host.
fn own_hosts(name: &str) -> Vec<String> {
    let mut hosts: BTreeSet<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).into();
    if !name.is_empty() {
        hosts.insert(name.to_owned());
    }
    let addresses = if_addrs::get_if_addrs().unwrap_or_default();
    hosts.extend(addresses.iter().filter(|of| !of.is_link_local()).map(|of| of.ip().to_string()));
    hosts.into_iter().collect()
}

/// Number and group of a user.
fn user(name: &str) -> anyhow::Result<(u32, u32)> {
    let text = std::fs::read_to_string("/etc/passwd").context("cannot read /etc/passwd")?;
    let found =
        text.lines().map(|line| line.split(':').collect::<Vec<_>>()).find(|of| of.first() == Some(&name));
    let numbers = found.and_then(|of| Some((of.get(2)?.parse().ok()?, of.get(3)?.parse().ok()?)));
    numbers.ok_or_else(|| failure(Exit::Usage, format!("there is no user {name} in /etc/passwd")))
}
