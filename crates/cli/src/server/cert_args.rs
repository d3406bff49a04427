//! The command line of `hayloft cert`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// `hayloft cert`.
#[derive(Debug, Args)]
#[command(subcommand_required = true, arg_required_else_help = true, disable_help_subcommand = true)]
#[command(after_help = "\
Between hosts both sides of a connection prove who they are. This is the small CA for those who have none; with one of your
own, put ca.pem, cert.pem, key.pem and, if there is one, crl.pem into /etc/hayloft/tls.

Examples:
  hayloft cert init                                           on the server: a CA, and the server's certificate
  hayloft cert issue build1 | ssh build1 hayloft cert install a certificate for a build host, brought there
  hayloft cert list
  hayloft cert revoke build1")]
pub(crate) struct CertArgs {
    /// Folder of the CA
    #[arg(long, global = true, value_name = "DIR", default_value = hayloft_transport::authority::DEFAULT_FOLDER)]
    pub ca: PathBuf,
    /// What to do.
    #[command(subcommand)]
    pub verb: CertVerb,
}

/// The verbs of `hayloft cert`.
#[derive(Debug, Subcommand)]
pub(crate) enum CertVerb {
    /// Make a CA, and a certificate for the server on this host
    #[command(after_help = "\
Examples:
  hayloft cert init
  hayloft cert init --host farm1.example.org --host 10.0.0.1
  hayloft cert init --owner hayloft          (the server runs as the user hayloft)")]
    Init(InitArgs),
    /// Print a certificate and its key, for `hayloft cert install` on another host
    #[command(after_help = "\
Examples:
  hayloft cert issue build1 | ssh build1 hayloft cert install
  hayloft cert issue build1 --to build1.pem --days 30
  hayloft cert issue farm2 --host farm2 --host 10.0.0.2 --to farm2.pem      (for another server)")]
    Issue(IssueArgs),
    /// Install what `hayloft cert issue` printed on this host
    #[command(after_help = "\
Examples:
  hayloft cert install < build1.pem
  hayloft cert install build1.pem")]
    Install(InstallArgs),
    /// Revoke certificates: servers see it within seconds, and end connections
    #[command(after_help = "\
Examples:
  hayloft cert revoke build1
  hayloft cert revoke 5f0c1d2e3a4b5c6d5f0c1d2e3a4b5c6d       (one certificate, by its number)")]
    Revoke(RevokeArgs),
    /// List what was issued, and until when it is valid
    #[command(after_help = "\
Examples:
  hayloft cert list
  hayloft cert list --json")]
    List(ListArgs),
}

/// `hayloft cert init`.
#[derive(Debug, Args)]
pub(crate) struct InitArgs {
    /// A name or address under which hosts reach the server; may be given several times [default: this host's name and addresses]
    #[arg(long, value_name = "NAME|ADDRESS")]
    pub host: Vec<String>,
    /// How long the certificate is valid
    #[arg(long, value_name = "DAYS", default_value = "365", value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub days: u32,
    /// The user that the server runs as [default: who runs this command]
    #[arg(long, value_name = "USER")]
    pub owner: Option<String>,
}

/// `hayloft cert issue`.
#[derive(Debug, Args)]
pub(crate) struct IssueArgs {
    /// Whom it is for: rights are given to this name
    pub name: String,
    /// For a server: a name or address under which hosts reach it; may be given several times
    #[arg(long, value_name = "NAME|ADDRESS")]
    pub host: Vec<String>,
    /// How long it is valid
    #[arg(long, value_name = "DAYS", default_value = "365", value_parser = clap::value_parser!(u32).range(1..=3650))]
    pub days: u32,
    /// Write it to this file, which must not exist, instead of printing it
    #[arg(long, value_name = "FILE")]
    pub to: Option<PathBuf>,
    /// Also when there is a valid one for that name
    #[arg(long)]
    pub again: bool,
}

/// `hayloft cert install`.
#[derive(Debug, Args)]
pub(crate) struct InstallArgs {
    /// What `hayloft cert issue` printed [default: standard input]
    pub file: Option<PathBuf>,
    /// The user that uses it [default: who runs this command]
    #[arg(long, value_name = "USER")]
    pub owner: Option<String>,
}

/// `hayloft cert revoke`.
#[derive(Debug, Args)]
pub(crate) struct RevokeArgs {
    /// The name: all its certificates; or the number of one
    pub name: String,
}

/// `hayloft cert list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
