//! `hayloft snapshot sign`: signatures of snapshots' names are made by ssh-keygen(1), so that agents and hardware keys work.

use std::io::Write;
use std::process::{Command, Stdio};

use anyhow::Context;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::{SignSnapshot, SnapshotInfo};

use crate::exit::{Exit, failure};
use crate::server::admin::Admin;
use crate::server::signers::{NAMESPACE, message};
use crate::server::snapshots;
use crate::versions::args::SignArgs;
use crate::versions::commands;

/// Signs a snapshot's name and gives the server the signature.
///
/// # Errors
/// ssh-keygen is not there or does not sign; what the server refuses.
pub(super) fn sign(admin: &mut Admin, args: &SignArgs) -> anyhow::Result<SnapshotInfo> {
    let of = Some(args.snapshot.clone());
    let named = commands::name_tree(admin, &args.snapshot, true)?;
    let entered = named.snapshot.unwrap_or_default().tree;
    if entered != named.tree {
        let shown = snapshots::shown(&args.snapshot);
        let said = format!("{shown} is not what it was: its name was {entered}, and is {} now", named.tree);
        return Err(failure(Exit::Damaged, said));
    }
    let mut child = Command::new("ssh-keygen")
        .args(["-Y", "sign", "-n", NAMESPACE, "-f"])
        .arg(&args.key)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|_| failure(Exit::Missing, "there is no ssh-keygen here: install openssh-client"))?;
    let written = child.stdin.take().context("a pipe to ssh-keygen")?.write_all(&message(&entered));
    let output = child.wait_with_output()?;
    if !output.status.success() || written.is_err() {
        let said = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
        return Err(failure(Exit::Failed, format!("ssh-keygen does not sign: {said}")));
    }
    let signature = String::from_utf8(output.stdout).context("ssh-keygen gave no text")?;
    snapshots::one(admin, Ask::SignSnapshot(SignSnapshot { of, tree: entered, signature }))
}
