//! The members of a volume's family, as this server knows them.

use std::collections::{HashMap, HashSet};

use crate::database::Db;
use crate::database::family::{self, Held};
use crate::database::{named, registry};
use crate::error::VolumeError;
use crate::server::Shared;
use crate::volume::Volume;

impl Shared {
    /// Ids of databases of the family that a volume's name leads to, or would if its entries in the registry were not lost.
    pub(crate) async fn living(&self, family: &str) -> Result<HashSet<String>, VolumeError> {
        let mut living = HashSet::new();
        for name in registry::names(&self.store).await? {
            match registry::read(&self.store, &name).await {
                Ok(entry) if entry.family() == family => {
                    living.insert(entry.id);
                }
                Ok(_) | Err(VolumeError::NoVolume(_)) => {}
                Err(error) => return Err(error),
            }
        }
        // One whose entries in the registry are lost is there all the same.
        for id in family::members(&self.store, family).await? {
            if !living.contains(&id) && named::is_there(&self.store, &id).await? {
                living.insert(id);
            }
        }
        Ok(living)
    }

    /// Which packs others of a volume's family may need.
    pub(crate) async fn held_by_others(&self, volume: &Volume) -> Result<Held, VolumeError> {
        self.held(volume.homes.first(), &volume.id).await
    }

    /// Which packs of a member others of the family may need.
    pub(crate) async fn held(&self, family: &str, id: &str) -> Result<Held, VolumeError> {
        let members = family::members(&self.store, family).await?;
        if members.is_empty() {
            return Ok(Held::These(HashSet::new()));
        }
        let living = self.living(family).await?;
        let retired: HashSet<String> = members.into_iter().filter(|id| !living.contains(id)).collect();
        let mut open: HashMap<String, Db> = HashMap::new();
        for volume in self.open_volumes().await {
            if volume.homes.first() == family
                && let Ok(db) = volume.db()
            {
                open.insert(volume.id.clone(), db);
            }
        }
        family::held(&self.store, &self.remembered, family, (id, &retired), &open).await
    }
}
