//! What a session had changed, and not shipped, when it was ended: the one that takes its place brings it as one batch,
//! which is applied if nobody has changed since what it is about.

use std::collections::HashMap;
use std::sync::Arc;

use hayloft_model::grants::Request;
use hayloft_model::{Ino, InodeRow, Record, SessionId, estates};
use hayloft_wire::RecordMessage;

use crate::error::VolumeError;
use crate::sharing::objects::row_of;
use crate::sharing::pass::Pass;
use crate::volume::Volume;

impl Volume {
    /// Waits until nobody else holds what these records are about: the session owns it until
    /// [`Volume::restored`].
    pub(crate) async fn reclaim(
        self: &Arc<Self>,
        session: SessionId,
        messages: &[RecordMessage],
    ) -> Result<Pass, VolumeError> {
        let records = records_of(messages)?;
        let rows = self.subjects_of(&records).await?;
        let (directories, strays) = estates::objects(&records, |ino| rows.get(&ino).cloned());
        for stray in strays {
            let mut pass = self.request(session, Request::Own(stray))?;
            pass.ready().await?;
            pass.finish();
        }
        let mut pass = self.request(session, Request::Reclaim(directories))?;
        pass.ready().await?;
        Ok(pass)
    }

    /// Refuses records about anything that `old` did not own at its end, or that was changed since. The caller has the
    /// turn.
    pub(crate) async fn check_estate(
        &self,
        old: SessionId,
        messages: &[RecordMessage],
    ) -> Result<(), VolumeError> {
        let records = records_of(messages)?;
        let rows = self.subjects_of(&records).await?;
        let sharing = self.sharing.lock();
        match sharing.estates.contradicted(old, &records, |ino| rows.get(&ino).cloned()) {
            Some(ino) => Err(VolumeError::Contradicted(ino)),
            None => Ok(()),
        }
    }

    /// The batch was applied, or refused: the session owns nothing of it.
    pub(crate) fn restored(&self, session: SessionId, pass: Pass) {
        let mut sharing = self.sharing.lock();
        if sharing.grants.knows(session) {
            // Nothing was claimed, so nothing can be refused.
            let _ = sharing.grants.claim(session, &[]);
        }
        drop(sharing);
        pass.finish();
    }

    /// The rows that are stored of what records are about.
    async fn subjects_of(&self, records: &[Record]) -> Result<HashMap<Ino, InodeRow>, VolumeError> {
        let snapshot = self.db()?.snapshot()?;
        let mut rows = HashMap::new();
        for ino in estates::subjects(records) {
            rows.extend(row_of(&snapshot, ino).await?.map(|(_, row)| (ino, row)));
        }
        Ok(rows)
    }
}

fn records_of(messages: &[RecordMessage]) -> Result<Vec<Record>, VolumeError> {
    Ok(messages.iter().map(Record::try_from).collect::<Result<_, _>>()?)
}
