//! Volumes whose entries in the registry are lost: who asks for one is told so, and nobody makes another one of its name.

use std::time::{Duration, Instant};

use crate::database::named::{self, Lost};
use crate::error::VolumeError;
use crate::server::Shared;

/// Who asks for volumes that are not there makes the server look for lost ones, which reads a little of each volume: not more often than this.
const LOOK: Duration = Duration::from_secs(5);

/// What was found when it was looked last.
#[derive(Default)]
pub(crate) struct LostNames {
    found: tokio::sync::Mutex<Option<(Instant, Vec<Lost>)>>,
}

impl Shared {
    /// All lost volumes, as they were some seconds ago at most.
    pub(crate) async fn lost_volumes(&self) -> Result<Vec<Lost>, VolumeError> {
        let mut found = self.lost.found.lock().await;
        if let Some((at, lost)) = &*found
            && at.elapsed() < LOOK
        {
            return Ok(lost.clone());
        }
        let lost = named::lost(&self.store).await?;
        *found = Some((Instant::now(), lost.clone()));
        Ok(lost)
    }

    /// The lost volume of that name.
    pub(crate) async fn lost_volume(&self, name: &str) -> Result<Option<Lost>, VolumeError> {
        Ok(self.lost_volumes().await?.into_iter().rfind(|lost| lost.name == name))
    }

    /// Brings the entries of a lost volume back; `None`: it is not lost.
    pub(crate) async fn restore_lost(&self, name: &str) -> Result<Option<String>, VolumeError> {
        let Some(lost) = self.lost_volume(name).await? else { return Ok(None) };
        let restored = named::restore(&self.store, &lost).await?;
        *self.lost.found.lock().await = None;
        Ok(Some(restored))
    }

    /// Refuses the name of a lost volume for another one.
    pub(crate) async fn is_not_lost(&self, name: &str) -> Result<(), VolumeError> {
        self.lost_volume(name).await?.map_or(Ok(()), |lost| Err(lost.told()))
    }

    /// Of a volume that the registry does not know: that it is there all the same, if it is.
    pub(crate) async fn told(&self, error: VolumeError) -> VolumeError {
        let VolumeError::NoVolume(name) = &error else { return error };
        match self.lost_volume(name).await {
            Ok(Some(lost)) => lost.told(),
            _ => error,
        }
    }
}
