//! Administration: volumes are made, shown, changed, checked, swept and deleted.

pub(crate) mod check;
pub(crate) mod memory;
pub(crate) mod stats;

use std::sync::Arc;

use hayloft_model::SessionId;
use hayloft_wire::client_message::Body;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{
    ClientInfo, Clients, CreateVolume, Done, EvictClient, SessionInfo, StatsAnswer, VolumeInfo, VolumeStatus,
    Volumes,
};

use crate::database::registry::{self, Registered};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::volume::Volume;

/// Whether a request is for connections without a session.
pub(crate) fn is_admin(body: &Body) -> bool {
    matches!(
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
    )
}

pub(crate) async fn answer(shared: &Arc<Shared>, body: Body) -> Result<Answer, VolumeError> {
    Ok(match body {
        Body::CreateVolume(create) => {
            Answer::Volumes(Volumes { volumes: vec![make(shared, &create).await?] })
        }
        Body::ListVolumes(_) => {
            let mut volumes = Vec::new();
            for name in registry::names(&shared.store).await? {
                match show(shared, &name).await {
                    Ok(info) => volumes.push(info),
                    // One that is being deleted, or was just now.
                    Err(VolumeError::NoVolume(_)) => {}
                    Err(error) => return Err(error),
                }
            }
            Answer::Volumes(Volumes { volumes })
        }
        Body::ShowVolume(asked) => {
            Answer::Volumes(Volumes { volumes: vec![show(shared, &asked.name).await?] })
        }
        Body::DeleteVolume(delete) => {
            remove(shared, &delete.name).await?;
            Answer::Done(Done {})
        }
        Body::SetQuota(set) => {
            let volume = shared.volume(&set.name).await?;
            let registered = Registered {
                quota_bytes: set.quota_bytes,
                quota_inodes: set.quota_inodes,
                ..volume.registered.lock().clone()
            };
            registry::update(&shared.store, &set.name, &registered).await?;
            *volume.registered.lock() = registered;
            Answer::Done(Done {})
        }
        Body::SweepVolume(sweep) => {
            let volume = shared.volume(&sweep.name).await?;
            Answer::Swept(volume.sweep(true).await.inspect_err(|error| volume.note(error))?)
        }
        Body::CheckVolume(check) => {
            let volume = shared.volume(&check.name).await?;
            Answer::Checked(volume.check(check.content).await.inspect_err(|error| volume.note(error))?)
        }
        Body::ListClients(list) => Answer::Clients(clients(shared, &list.volume).await?),
        Body::EvictClient(evict) => Answer::Clients(evict_client(shared, &evict).await?),
        Body::Stats(_) => Answer::Stats(StatsAnswer { json: shared.stats_json().await }),
        _ => return Err(VolumeError::Invalid("not a request of administration")),
    })
}

/// The sessions of a volume, or of all.
async fn clients(shared: &Arc<Shared>, volume: &str) -> Result<Clients, VolumeError> {
    if !volume.is_empty() {
        return Ok(Clients { clients: shared.volume(volume).await?.clients() });
    }
    let mut clients = Vec::new();
    for name in registry::names(&shared.store).await? {
        match shared.volume(&name).await {
            Ok(volume) => clients.extend(volume.clients()),
            // One that is being deleted, or was just now.
            Err(VolumeError::NoVolume(_)) => {}
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

async fn make(shared: &Arc<Shared>, create: &CreateVolume) -> Result<VolumeInfo, VolumeError> {
    registry::check_name(&create.name)?;
    shared.reserve.admit(1 << 20)?;
    let root = (create.mode, create.uid, create.gid);
    let registered = Registered::new(create.quota_bytes, create.quota_inodes, root);
    registry::create(&shared.store, &create.name, &registered).await?;
    show(shared, &create.name).await
}

async fn show(shared: &Arc<Shared>, name: &str) -> Result<VolumeInfo, VolumeError> {
    Ok(info(&*shared.volume(name).await?))
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
    }
}

/// Deletes a volume: first nobody can open it any more, then its objects go, then its name.
async fn remove(shared: &Arc<Shared>, name: &str) -> Result<(), VolumeError> {
    let registered = registry::read(&shared.store, name).await?;
    if !registered.deleting {
        // Opened, so that sessions found in its tables count.
        let volume = shared.volume(name).await?;
        volume.refuse_when_mounted()?;
    }
    let mut place = shared.hold(name).await;
    if let Some(volume) = &*place {
        volume.refuse_when_mounted()?;
    }
    registry::update(&shared.store, name, &Registered { deleting: true, ..registered.clone() }).await?;
    if let Some(volume) = place.take()
        && let Err(error) = volume.close().await
    {
        tracing::warn!(volume = name, %error, "the database of a volume to delete does not close");
    }
    shared.store.delete_below(&format!("packs/{}", registered.id)).await?;
    shared.store.delete_below(&format!("volumes/{}", registered.id)).await?;
    registry::remove(&shared.store, name).await?;
    tracing::info!(volume = name, id = registered.id, "deleted");
    Ok(())
}
