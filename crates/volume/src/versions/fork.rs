//! Forks: volumes whose trees begin as that of another one, and share what is stored of it.

use std::sync::Arc;

use crate::database::family::{self, Snapshot};
use crate::database::format::RUNS;
use crate::database::numbers;
use crate::database::registry::{self, Registered};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::versions::snapshot::{self, Wanted};
use crate::versions::{clone, leftovers};
use crate::volume::Volume;

/// Makes a volume that begins as a version of another one; an empty `of` is the present one.
pub(crate) async fn fork(
    shared: &Arc<Shared>,
    (volume, of): (&str, &str),
    name: &str,
    by: &str,
    as_stored: bool,
) -> Result<(), VolumeError> {
    registry::check_name(name)?;
    let origin = shared.volume(volume).await?;
    if registry::read(&shared.store, name).await.is_ok_and(|found| !found.deleting) {
        return Err(VolumeError::VolumeExists(name.to_owned()));
    }
    if !of.is_empty() {
        let entry = origin.registered.lock().clone();
        let found = snapshot::find(shared, &entry, volume, of).await?;
        return from_snapshot(shared, &origin, &found, name, found.shown()).await;
    }
    // A snapshot of which nobody hears: it is there as long as the fork is not.
    let point = format!("fork-{}", registry::random_id());
    let wanted = Wanted { name: &point, note: "", by, as_stored, passing: true };
    let found = snapshot::create(shared, &origin, &wanted).await?;
    let made = from_snapshot(shared, &origin, &found, name, volume.to_owned()).await;
    let entry = origin.registered.lock().clone();
    if let Err(error) = snapshot::delete(shared, &entry, volume, &point).await {
        tracing::warn!(snapshot = found.shown(), %error, "it was made for a fork, and stays until it is deleted");
    }
    made
}

async fn from_snapshot(
    shared: &Arc<Shared>,
    origin: &Arc<Volume>,
    snapshot: &Snapshot,
    name: &str,
    shown: String,
) -> Result<(), VolumeError> {
    // Before the lock: to open a volume anew may need that.
    let run = run_of(shared, origin).await?;
    let _structure = shared.structure.lock().await;
    let family = origin.homes.first();
    let mut place = shared.hold(name).await;
    let numbers_from = numbers::window_after(windows_of(shared, family).await?)?;
    let like = origin.registered.lock().clone();
    let created = Registered::new(like.quota_bytes, like.quota_inodes, like.root);
    let registered = Registered {
        family: Some(family.to_owned()),
        origin: Some(shown),
        numbers_from,
        run,
        rights: like.rights,
        trusted: like.trusted,
        // Its tree may have numbers of these windows.
        numbers_past: like.numbers_past.max(like.numbers_from),
        format: RUNS,
        ..created
    };
    let checkpoint = snapshot.checkpoint.ok_or_else(|| VolumeError::SnapshotUnfinished(snapshot.shown()))?;
    let begun = Registered { deleting: true, ..registered.clone() };
    if let Ok(left) = registry::read(&shared.store, name).await
        && left.deleting
    {
        registry::erase(&shared.store, name, &left).await?;
    }
    shared.is_not_lost(name).await?;
    registry::create(&shared.store, name, &begun).await?;
    hayloft_crash::point("fork.entered");
    let made = async {
        clone::make(&shared.store, family, (&snapshot.database, checkpoint), &registered.id).await?;
        let volume = Volume::open(Arc::clone(shared), name, registered.clone(), false).await?;
        registry::update(&shared.store, name, &registered).await?;
        Ok::<_, VolumeError>(volume)
    };
    match made.await {
        Ok(volume) => {
            *place = Some(volume);
            tracing::info!(volume = name, of = snapshot.shown(), "forked");
            Ok(())
        }
        Err(error) => {
            let undone = async {
                registry::remove(&shared.store, name, &registered.id).await?;
                leftovers::delete_database(&shared.store, &registered.id).await?;
                family::leave(&shared.store, family, &registered.id).await
            };
            if let Err(error) = undone.await {
                tracing::warn!(volume = name, %error, "what was begun of a fork goes later");
                shared.leftovers.look_at(family);
            }
            Err(error)
        }
    }
}

/// Inode numbers of the origin's for a fork. The origin may have got another tree meanwhile: then they are those of the volume
/// that goes on with its numbers.
async fn run_of(shared: &Arc<Shared>, origin: &Arc<Volume>) -> Result<Option<(u64, u64)>, VolumeError> {
    let (mut present, family) = (Arc::clone(origin), origin.homes.first());
    while present.homes.first() == family {
        let given = async {
            // A server that does not know of runs would not see the fork either, whose window is not to be another one's.
            if present.registered.lock().format < RUNS {
                shared.change_entry(&present, |entry| entry.format = entry.format.max(RUNS)).await?;
            }
            present.give_run().await
        };
        match given.await {
            Err(_) if !present.is_usable() => present = shared.volume(&origin.name).await?,
            done => return done,
        }
    }
    Ok(None)
}

/// The windows of inode numbers that the volumes of a family have used.
async fn windows_of(shared: &Shared, family: &str) -> Result<Vec<u64>, VolumeError> {
    let mut windows = vec![0];
    for name in registry::names(&shared.store).await? {
        match registry::read(&shared.store, &name).await {
            Ok(entry) if entry.family() == family => windows.extend([entry.numbers_from, entry.numbers_past]),
            Ok(_) | Err(VolumeError::NoVolume(_)) => {}
            // It may be one of the family.
            Err(error) => return Err(error.of(&name)),
        }
    }
    let lost = shared.lost_volumes().await?.into_iter().map(|lost| lost.entry);
    let lost = lost.filter(|entry| entry.family() == family);
    windows.extend(lost.flat_map(|entry| [entry.numbers_from, entry.numbers_past]));
    Ok(windows)
}
