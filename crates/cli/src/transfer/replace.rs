//! Gives a volume another tree at once: a fork is made what it has to be, and takes the volume's place.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use hayloft_tree::TreeName;
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{Diff, Fork, Promote, SnapshotInfo, Version};

use crate::exit::{Exit, exit_of, failure};
use crate::server::admin::Admin;
use crate::server::volume;
use crate::transfer::name;
use crate::versions::commands;
use crate::versions::mounted::Mounted;

/// Forks `begin`, has `make` make it what it has to be, and puts it in the volume's place if it is `tree` then and `still` agrees. Returns
/// the snapshot of what the volume was.
///
/// # Errors
/// What `make` or `still` says, what the server refuses: then the volume is as it was.
pub(super) fn replace(
    admin: &mut Admin,
    server: &str,
    begin: &Version,
    tree: TreeName,
    make: impl FnOnce(&Path) -> anyhow::Result<()>,
    still: impl FnOnce(&mut Admin) -> anyhow::Result<()>,
) -> anyhow::Result<SnapshotInfo> {
    let incoming = format!("{}.incoming", begin.volume);
    // One that was left behind by a command that was killed.
    delete(admin, &incoming)?;
    let replaced = try_to_replace(admin, server, begin, &incoming, tree, make, still);
    replaced.inspect_err(|_| {
        // What failed may have been this connection.
        let _ = Admin::connect(server)
            .map_err(drop)
            .and_then(|mut admin| delete(&mut admin, &incoming).map_err(drop));
    })
}

fn try_to_replace(
    admin: &mut Admin,
    server: &str,
    begin: &Version,
    incoming: &str,
    tree: TreeName,
    make: impl FnOnce(&Path) -> anyhow::Result<()>,
    still: impl FnOnce(&mut Admin) -> anyhow::Result<()>,
) -> anyhow::Result<SnapshotInfo> {
    admin.ask(Ask::Fork(Fork { of: Some(begin.clone()), name: incoming.to_owned(), as_stored: false }))?;
    let fork = Version { volume: incoming.to_owned(), snapshot: String::new() };
    let mounted = Mounted::writable(server, &fork)?;
    make(mounted.path())?;
    mounted.leave().context("the new tree is not in the store")?;
    let found = name(admin, &fork)?;
    if found != tree {
        let said = format!("the new tree is {found}, and has to be {tree}: what came is not what was sent");
        return Err(failure(Exit::Damaged, said));
    }
    still(admin)?;
    let promote = Promote { fork: incoming.to_owned(), keep_as: String::new() };
    commands::one(admin, Ask::Promote(promote))
}

/// Deletes a fork, if it is there. The mount of a command that was killed goes by itself.
fn delete(admin: &mut Admin, fork: &str) -> anyhow::Result<()> {
    const TRIES: u32 = 300;
    let mut tried = 0;
    loop {
        match volume::delete_volume(admin, fork, false) {
            Err(error) if exit_of(&error) == Exit::NoVolume => return Ok(()),
            Err(error) if exit_of(&error) == Exit::Busy && tried < TRIES => {
                tried += 1;
                std::thread::sleep(Duration::from_millis(100));
            }
            done => return done,
        }
    }
}

/// In how many paths two versions differ.
///
/// # Errors
/// They are not of one family; what the server refuses.
pub(super) fn differences(admin: &mut Admin, from: &Version, to: &Version) -> anyhow::Result<u64> {
    let diff = Diff { from: Some(from.clone()), to: Some(to.clone()), below: Vec::new().into() };
    let mut answer = admin.ask(Ask::Diff(diff))?;
    let mut count = 0;
    loop {
        let Answer::Differences(part) = answer else { return Err(admin.unexpected()) };
        count += part.differences.len() as u64;
        if !part.more {
            return Ok(count);
        }
        answer = admin.next_part()?;
    }
}
