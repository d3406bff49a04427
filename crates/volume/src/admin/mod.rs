//! Administration: volumes are made, shown, changed, checked, swept and deleted.

pub(crate) mod check;
mod listings;
pub(crate) mod memory;
pub(crate) mod mend;
pub(crate) mod scrub;
pub(crate) mod stats;
mod versions;

use std::sync::Arc;

use hayloft_model::SessionId;
use hayloft_transport::Peer;
use hayloft_wire::client_message::Body;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    ClientInfo, Clients, CreateVolume, DeleteVolume, Done, EvictClient, GrantMessage, SessionInfo, SetRights,
    StatsAnswer, VolumeInfo, VolumeStatus, Volumes,
};
use slatedb::{CloseReason, ErrorKind};

use crate::database::family;
use crate::database::named;
use crate::database::registry::{self, Registered};
use crate::error::{VolumeError, chain};
use crate::rights::{Grant, Right, denied};
use crate::server::Shared;
use crate::versions::{snapshot, volume_of};
use crate::volume::Volume;

/// Whether a request is for connections without a session.
pub(crate) fn is_admin(body: &Body) -> bool {
    versions::needed(body).is_some()
        || matches!(
            body,
            Body::CreateVolume(_)
                | Body::ListVolumes(_)
                | Body::ShowVolume(_)
                | Body::DeleteVolume(_)
                | Body::SweepVolume(_)
                | Body::Stats(_)
                | Body::SetQuota(_)
                | Body::CheckVolume(_)
                | Body::ListClients(_)
                | Body::EvictClient(_)
                | Body::SetRights(_)
        )
}

/// Does what a peer asks for, if it may; what changes something is in the audit log.
pub(crate) async fn answer(shared: &Arc<Shared>, peer: &Peer, body: Body) -> Result<Answer, VolumeError> {
    if let Err(error) = allow(shared, peer, &body).await {
        if matches!(error, VolumeError::Denied(_)) {
            shared.audit.refused(peer, &body);
        }
        return Err(error);
    }
    let act = shared.audit.begin(peer, &body)?;
    let done = perform_at_last(shared, peer, body).await;
    shared.audit.end(act, done.as_ref().err());
    done
}

/// So often a volume may be closed while something is done with it.
const TRIES: u32 = 100;

/// Does it once more when the volume was closed meanwhile, since it has got another tree, or was deleted.
async fn perform_at_last(shared: &Arc<Shared>, peer: &Peer, body: Body) -> Result<Answer, VolumeError> {
    for _ in 1..TRIES {
        match perform(shared, peer, body.clone()).await {
            Err(error) if is_of_closed(&error) && !shared.is_stopping() => {}
            done => return done,
        }
    }
    perform(shared, peer, body).await
}

/// Whether it was said since a volume was closed in order.
fn is_of_closed(error: &VolumeError) -> bool {
    match error {
        VolumeError::ShuttingDown => true,
        VolumeError::Database(error) => matches!(error.kind(), ErrorKind::Closed(CloseReason::Clean)),
        _ => false,
    }
}

/// Refuses what the peer may not ask for.
async fn allow(shared: &Arc<Shared>, peer: &Peer, body: &Body) -> Result<(), VolumeError> {
    let (volume, needed): (&str, Right) = match body {
        Body::CreateVolume(_) if !shared.is_master(peer) => {
            return Err(VolumeError::Denied(format!(
                "{} may not create volumes: root on the server's host does",
                peer.identity
            )));
        }
        // What is not theirs is left out of the answers.
        Body::CreateVolume(_) | Body::ListVolumes(_) | Body::Stats(_) => return Ok(()),
        Body::ListClients(list) if list.volume.is_empty() => return Ok(()),
        Body::ListClients(list) => (&list.volume, Right::Read),
        Body::ShowVolume(asked) => (&asked.name, Right::Read),
        Body::DeleteVolume(asked) => (&asked.name, Right::Admin),
        Body::SetQuota(asked) => (&asked.name, Right::Admin),
        Body::SweepVolume(asked) => (&asked.name, Right::Admin),
        // A snapshot can be scrubbed as well.
        Body::CheckVolume(asked) if asked.scrub => (volume_of(&asked.name), Right::Admin),
        Body::CheckVolume(asked) => (&asked.name, Right::Admin),
        Body::EvictClient(asked) => (&asked.volume, Right::Admin),
        Body::SetRights(asked) => (&asked.name, Right::Admin),
        body => match versions::needed(body) {
            Some((volume, needed)) => (volume, needed),
            None => return Err(VolumeError::Invalid("not a request of administration")),
        },
    };
    let (registered, told) = match registry::read(&shared.store, volume).await {
        Err(none @ VolumeError::NoVolume(_)) => match shared.lost_volume(volume).await? {
            Some(lost) => {
                let told = lost.told();
                (lost.entry, Some(told))
            }
            None => return Err(none),
        },
        found => (found?, None),
    };
    let right = shared.right_of(peer, &registered);
    if right < needed {
        return Err(denied(peer, volume, right, needed));
    }
    // It decides for all hosts whether who may write there becomes root: no right on a volume says so much.
    let marks = matches!(body, Body::SetRights(set) if set.trusted == Some(true) && !registered.trusted);
    if marks && !shared.is_master(peer) {
        return Err(VolumeError::Denied(format!(
            "{} may not mark volume {volume} as trusted: root on the server's host does",
            peer.identity
        )));
    }
    let is_repair = matches!(body, Body::CheckVolume(check) if check.repair);
    told.filter(|_| !is_repair).map_or(Ok(()), Err)
}

/// Changes who may do what; who has lost a right is told so at once.
async fn set_rights(shared: &Arc<Shared>, set: &SetRights) -> Result<(), VolumeError> {
    let volume = shared.volume(&set.name).await?;
    let new = set.grant.as_ref().map(|grant| {
        let right = if grant.right.is_empty() { "none" } else { &grant.right };
        Ok::<_, VolumeError>((Grant::new(&grant.who, right, &grant.from)?, grant.right.is_empty()))
    });
    let new = new.transpose()?;
    let change = |entry: &mut Registered| {
        if let Some((new, is_taken)) = new {
            entry.rights.retain(|old| old.who != new.who);
            if !is_taken {
                entry.rights.push(new);
            }
        }
        entry.trusted = set.trusted.unwrap_or(entry.trusted);
    };
    let registered = shared.change_entry(&volume, change).await?;
    shared.peers.recheck(&set.name, |peer| shared.right_of(peer, &registered));
    Ok(())
}

async fn perform(shared: &Arc<Shared>, peer: &Peer, body: Body) -> Result<Answer, VolumeError> {
    Ok(match body {
        Body::CreateVolume(create) => {
            Answer::Volumes(Volumes { volumes: vec![make(shared, peer, &create).await?] })
        }
        Body::ListVolumes(_) => {
            let mut volumes = Vec::new();
            for name in readable(shared, peer).await? {
                match show(shared, peer, &name).await {
                    Ok(info) => volumes.push(info),
                    // One that is being deleted, or was just now.
                    Err(VolumeError::NoVolume(_)) => {}
                    Err(error) if error.is_at_rest() => volumes.push(damaged(name, &error)),
                    Err(error) => return Err(error),
                }
            }
            for lost in shared.lost_volumes().await? {
                if shared.right_of(peer, &lost.entry) >= Right::Read {
                    volumes.push(damaged(lost.name.clone(), &lost.told()));
                }
            }
            Answer::Volumes(Volumes { volumes })
        }
        Body::ShowVolume(asked) => {
            let mut info = show(shared, peer, &asked.name).await?;
            if !asked.brief {
                versions::add(shared, &mut info).await?;
            }
            if asked.reclaimable {
                let volume = shared.volume(&asked.name).await?;
                // All else of a damaged volume can be shown.
                let bytes = volume.reclaimable().await.inspect_err(|error| volume.note(error));
                info.reclaimable_bytes = bytes.ok();
            }
            Answer::Volumes(Volumes { volumes: vec![info] })
        }
        Body::DeleteVolume(delete) => {
            remove(shared, &delete).await?;
            Answer::Done(Done {})
        }
        Body::SetQuota(set) => {
            let volume = shared.volume(&set.name).await?;
            let change = |entry: &mut Registered| {
                (entry.quota_bytes, entry.quota_inodes) = (set.quota_bytes, set.quota_inodes);
            };
            shared.change_entry(&volume, change).await?;
            Answer::Done(Done {})
        }
        Body::SetRights(set) => {
            set_rights(shared, &set).await?;
            one(shared, peer, &set.name).await?
        }
        Body::SweepVolume(sweep) => {
            let volume = shared.volume(&sweep.name).await?;
            Answer::Swept(
                volume
                    .sweep(true)
                    .await
                    .inspect_err(|error| volume.note(error))
                    .map_err(|error| error.of(&volume.name))?,
            )
        }
        Body::CheckVolume(check) => Answer::Checked(mend::check(shared, &check).await?),
        Body::ListClients(list) => Answer::Clients(clients(shared, peer, &list.volume).await?),
        Body::EvictClient(evict) => Answer::Clients(evict_client(shared, &evict).await?),
        Body::Stats(_) => Answer::Stats(StatsAnswer { json: shared.stats_json(Some(peer)).await }),
        body => versions::perform(shared, peer, body).await?,
    })
}

/// What there is to show of a volume that cannot be opened.
fn damaged(name: String, error: &VolumeError) -> VolumeInfo {
    VolumeInfo { name, damage: chain(error), ..VolumeInfo::default() }
}

/// The answer that is one volume.
async fn one(shared: &Arc<Shared>, peer: &Peer, name: &str) -> Result<Answer, VolumeError> {
    Ok(Answer::Volumes(Volumes { volumes: vec![show(shared, peer, name).await?] }))
}

/// The volumes that a peer may know of.
async fn readable(shared: &Arc<Shared>, peer: &Peer) -> Result<Vec<String>, VolumeError> {
    let mut names = registry::names(&shared.store).await?;
    if !shared.is_master(peer) {
        let all = std::mem::take(&mut names);
        for name in all {
            let found = registry::read(&shared.store, &name).await;
            if found.is_ok_and(|of| shared.right_of(peer, &of) >= Right::Read) {
                names.push(name);
            }
        }
    }
    Ok(names)
}

/// The sessions of a volume, or of all.
async fn clients(shared: &Arc<Shared>, peer: &Peer, volume: &str) -> Result<Clients, VolumeError> {
    if !volume.is_empty() {
        return Ok(Clients { clients: shared.volume(volume).await?.clients() });
    }
    let mut clients = Vec::new();
    for name in readable(shared, peer).await? {
        match shared.volume(&name).await {
            Ok(volume) => clients.extend(volume.clients()),
            // One that is being deleted, or was just now.
            Err(VolumeError::NoVolume(_)) => {}
            // Nobody has it mounted; the list of volumes says what it is.
            Err(error) if error.is_at_rest() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(Clients { clients })
}

async fn evict_client(shared: &Arc<Shared>, evict: &EvictClient) -> Result<Clients, VolumeError> {
    let volume = shared.volume(&evict.volume).await?;
    let mut clients = volume.clients();
    clients.retain(|client| client.session == evict.session);
    let session = SessionId(evict.session);
    if clients.is_empty() {
        return Err(VolumeError::NoSession(session));
    }
    volume.evict(session).await.inspect_err(|error| volume.note(error))?;
    Ok(Clients { clients })
}

async fn make(shared: &Arc<Shared>, peer: &Peer, create: &CreateVolume) -> Result<VolumeInfo, VolumeError> {
    registry::check_name(&create.name)?;
    shared.reserve.admit(1 << 20)?;
    let root = (create.mode, create.uid, create.gid);
    let grant = |grant: &GrantMessage| Grant::new(&grant.who, &grant.right, &grant.from);
    let rights = create.grants.iter().map(grant).collect::<Result<Vec<_>, _>>()?;
    let new = Registered::new(create.quota_bytes, create.quota_inodes, root);
    let registered = Registered { rights, trusted: create.trusted, ..new };
    shared.make_volume(&create.name, registered).await?;
    show(shared, peer, &create.name).await
}

async fn show(shared: &Arc<Shared>, peer: &Peer, name: &str) -> Result<VolumeInfo, VolumeError> {
    let volume = shared.volume(name).await?;
    let registered = volume.registered.lock().clone();
    let mut info = info(&volume);
    info.trusted = registered.trusted;
    info.origin = registered.origin.clone().unwrap_or_default();
    if shared.right_of(peer, &registered) == Right::Admin {
        let shown = |grant: Grant| GrantMessage {
            who: grant.who,
            right: grant.right.to_string(),
            from: grant.from.iter().map(ToString::to_string).collect(),
        };
        info.grants = registered.rights.into_iter().map(shown).collect();
    }
    Ok(info)
}

fn info(volume: &Volume) -> VolumeInfo {
    let status: VolumeStatus = volume.status();
    let created_secs = volume.registered.lock().created_secs;
    let client = |session: SessionInfo| ClientInfo {
        session: session.session,
        host_name: session.host_name,
        pid: session.pid,
        mount_point: session.mount_point,
        connected: session.connected,
        grants: session.own_directories + session.read_directories,
        last_sequence: session.last_sequence,
    };
    let clients = volume.clients().into_iter().map(client).collect();
    VolumeInfo {
        name: volume.name.clone(),
        id: volume.id.clone(),
        created_secs,
        status: Some(status),
        clients,
        ..VolumeInfo::default()
    }
}

/// Deletes a volume: first nobody can open it any more, then its objects go, then its name. What others of its family need
/// stays as long as they do.
async fn remove(shared: &Arc<Shared>, delete: &DeleteVolume) -> Result<(), VolumeError> {
    let name = delete.name.as_str();
    let registered = registry::read(&shared.store, name).await?;
    if let Some(other) = named::is_of_another(&shared.store, name, &registered.id).await? {
        tracing::warn!(
            volume = name,
            other,
            "an entry that is a copy of another volume's is taken away, and nothing else"
        );
        return registry::remove(&shared.store, name, &registered.id).await;
    }
    if !registered.deleting {
        let snapshots = snapshot::list(shared, &registered, name).await?;
        if !snapshots.is_empty() && !delete.snapshots {
            return Err(VolumeError::HasSnapshots { volume: name.to_owned(), count: snapshots.len() });
        }
        // Opened, so that sessions found in its tables count. What is damaged nobody can use; it can go.
        match shared.volume(name).await {
            Ok(volume) => volume.refuse_when_mounted()?,
            Err(error) if error.is_at_rest() => {
                tracing::warn!(volume = name, %error, "a damaged volume is deleted");
            }
            Err(error) => return Err(error),
        }
    }
    for snapshot in family::snapshots(&shared.store, registered.family()).await? {
        if snapshot.volume == name {
            snapshot::delete(shared, &registered, name, &snapshot.name).await?;
        }
    }
    let _structure = shared.structure.lock().await;
    let mut place = shared.hold(name).await;
    if let Some(volume) = &*place {
        volume.refuse_when_mounted()?;
    }
    if registry::read(&shared.store, name).await?.id != registered.id {
        // It has got another tree while others were waited for.
        return Err(VolumeError::ShuttingDown);
    }
    registry::update(&shared.store, name, &Registered { deleting: true, ..registered.clone() }).await?;
    if let Some(volume) = place.take()
        && let Err(error) = volume.close().await
    {
        tracing::warn!(volume = name, %error, "the database of a volume to delete does not close");
    }
    hayloft_crash::point("delete.marked");
    registry::erase(&shared.store, name, &registered).await?;
    shared.leftovers.look_at(registered.family());
    tracing::info!(volume = name, id = registered.id, "deleted");
    Ok(())
}
