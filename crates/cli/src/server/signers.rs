//! Keys whose signatures of snapshots' names count here, in the format of ssh-keygen(1).

use std::path::Path;

use anyhow::Context;
use hayloft_layer::mount_over;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::{ListSnapshots, SnapshotInfo};
use ssh_key::{PublicKey, SshSig};

use crate::dial;
use crate::exit::{Exit, failure};
use crate::mountinfo;
use crate::server::admin::Admin;
use crate::server::snapshots::{self, parse_snapshot};

/// What the signatures are for: one for something else does not count.
pub(crate) const NAMESPACE: &str = "hayloft-tree";

/// What is signed: the name and the end of the line, as `echo NAME | ssh-keygen -Y sign -n hayloft-tree` does.
pub(crate) fn message(tree: &str) -> Vec<u8> {
    format!("{tree}\n").into_bytes()
}

/// Who may sign.
pub(crate) struct Signers(Vec<(String, PublicKey)>);

impl Signers {
    /// Reads a file in the format of ssh-keygen's ALLOWED SIGNERS: principals, options, and the key.
    ///
    /// # Errors
    /// It cannot be read, or a line of it is none.
    pub(crate) fn read(path: &Path) -> anyhow::Result<Signers> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| failure(Exit::Usage, format!("cannot read {}: {error}", path.display())))?;
        Signers::parse(&text).map_err(|error| failure(Exit::Usage, format!("{}: {error}", path.display())))
    }

    fn parse(text: &str) -> Result<Signers, String> {
        let mut signers = Vec::new();
        for (at, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let wrong = |what: &str| format!("line {}: {what}", at + 1);
            let (who, rest) = line.split_once(char::is_whitespace).ok_or_else(|| wrong("no key"))?;
            let is_key = |word: &str| ["ssh-", "ecdsa-", "sk-"].iter().any(|begin| word.starts_with(begin));
            let rest = rest.trim_start();
            let key = match rest.split_whitespace().next() {
                Some(first) if is_key(first) => rest,
                Some(option) => {
                    let is_ours = option == format!("namespaces=\"{NAMESPACE}\"");
                    if !is_ours {
                        return Err(wrong(&format!(
                            "option {option}: only namespaces=\"{NAMESPACE}\" is understood here"
                        )));
                    }
                    rest[option.len()..].trim_start()
                }
                None => return Err(wrong("no key")),
            };
            let key = PublicKey::from_openssh(key)
                .map_err(|error| wrong(&format!("no public key that is understood: {error}")))?;
            signers.push((who.to_owned(), key));
        }
        Ok(Signers(signers))
    }

    /// Who of them has signed it.
    pub(crate) fn signer(&self, tree: &str, signatures: &[String]) -> Option<&str> {
        let signed: Vec<SshSig> = signatures.iter().filter_map(|text| SshSig::from_pem(text).ok()).collect();
        let has_signed = |key: &PublicKey| {
            signed.iter().any(|signature| key.verify(NAMESPACE, &message(tree), signature).is_ok())
        };
        self.0.iter().find(|(_, key)| has_signed(key)).map(|(who, _)| who.as_str())
    }

    /// Refuses a path that is not in a mounted snapshot that one of them has signed.
    ///
    /// # Errors
    /// It is none; the server of its mount does not answer.
    pub(crate) fn require_below(&self, path: &Path) -> anyhow::Result<()> {
        let path = path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?;
        let mount = mount_over(mountinfo::all()?, &path, |entry| &entry.mount_point);
        let source = mount.as_ref().filter(|entry| entry.is_ours()).map(|entry| entry.source.as_str());
        let snapshot = source.and_then(dial::split_volume).filter(|(_, name)| name.contains('@'));
        let Some((server, name)) = snapshot else {
            let said = format!(
                "{} is not in a mounted snapshot, and only signed ones are trusted here (trusted_keys in the configuration)",
                path.display()
            );
            return Err(failure(Exit::Denied, said));
        };
        self.require_of(&mut Admin::connect(server)?, name)
    }

    /// Refuses a snapshot, `VOLUME@NAME`, that none of them has signed.
    ///
    /// # Errors
    /// Nobody of them has; it is no name of one; what the server refuses.
    pub(crate) fn require_of(&self, admin: &mut Admin, name: &str) -> anyhow::Result<()> {
        let of = parse_snapshot(name).map_err(|said| failure(Exit::Usage, said))?;
        let info = snapshots::one(admin, Ask::ListSnapshots(ListSnapshots { of: Some(of) }))?;
        self.require(&info).map(drop)
    }

    /// Who has signed a snapshot.
    ///
    /// # Errors
    /// Nobody of them.
    pub(crate) fn require(&self, info: &SnapshotInfo) -> anyhow::Result<&str> {
        self.signer(&info.tree, &info.signatures).ok_or_else(|| {
            let name = snapshots::shown(&info.of.clone().unwrap_or_default());
            let why = match info.signatures.is_empty() {
                true => "nobody has signed it",
                false => "none of its signatures is of a key that is trusted here",
            };
            failure(
                Exit::Denied,
                format!("{name}: {why}; sign it with `hayloft snapshot sign {name} --key FILE`"),
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILM+rvN+ot98qgEN796jTiQfZfG1KaT0PtFDJ/XFSqti";

    #[test]
    fn signers_are_read_as_ssh_keygen_reads_them() {
        let text =
            format!("# us\n\nrelease@farm {KEY} a comment\nsecond@farm namespaces=\"{NAMESPACE}\" {KEY}\n");
        let signers = Signers::parse(&text).unwrap();
        assert_eq!(
            signers.0.iter().map(|(who, _)| who.as_str()).collect::<Vec<_>>(),
            ["release@farm", "second@farm"]
        );
        for wrong in [
            "release@farm".to_owned(),
            "release@farm ssh-ed25519 AAAA".to_owned(),
            format!("release@farm valid-after=\"20200101\" {KEY}"),
        ] {
            assert!(Signers::parse(&wrong).is_err_and(|said| said.starts_with("line 1: ")), "{wrong}");
        }
        assert_eq!(signers.signer("tree1-00", &["nonsense".to_owned()]), None);
    }
}
