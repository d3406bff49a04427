//! What was answered and not durable when a server, or its database, failed: clients bring it back with their claims, and the
//! server itself what it still has. ADR 0017.

use std::collections::BTreeMap;
use std::sync::Arc;

use hayloft_model::{Ino, SessionId, UsageDelta};
use hayloft_wire::{Changed, Entry, InodeRowMessage, NotedRow, WrittenEntry};
use prost::Message;

use crate::database::rows::Rows;
use crate::database::tables::{self, BroughtRow, EndedRow, SessionRow, VolumeRow};
use crate::database::{self, Db};
use crate::error::VolumeError;
use crate::order::Ordered;
use crate::order::entry;
use crate::sharing::Progress;
use crate::volume::Volume;

/// What several entries say beside rows that can be put as they are.
#[derive(Default)]
struct Again {
    usage: UsageDelta,
    /// The last batches.
    sequences: BTreeMap<SessionId, u64>,
    orphans: BTreeMap<(SessionId, Ino), bool>,
    outcomes: BTreeMap<(SessionId, u64), Option<Changed>>,
}

impl Volume {
    /// A session brings what it keeps of other openings: it is durable when this returns. What was durable, or has come
    /// before, is left out.
    pub(crate) async fn bring_back(
        self: &Arc<Self>,
        session: SessionId,
        entries: &[Entry],
    ) -> Result<(), VolumeError> {
        let may_bring = self.state.lock().sessions.get(&session).is_some_and(|found| found.may_bring);
        if entries.is_empty() && !may_bring {
            return Ok(());
        }
        // Also without entries: what others have brought, and the claim is answered with, has to be durable.
        let turn = self.turn.lock().await;
        let db = self.db()?;
        if !may_bring {
            tracing::warn!(volume = self.name, %session, "brings what others may have looked for since: refused");
            return Ok(());
        }
        let (key, mut brought) = (self.order.seal_key(), self.state.lock().brought.clone());
        brought.retain(|opening| self.ended_opening(opening).is_some());
        let mut new = Vec::new();
        for sealed in entries {
            let Some((at, durable)) = self.ended_opening(sealed.opening) else { continue };
            let Some(written) = entry::open(&key, sealed) else {
                tracing::warn!(volume = self.name, %session, mark = sealed.mark, "brings what this volume did not seal");
                continue;
            };
            if sealed.mark > durable && brought.note(sealed.opening, sealed.mark) {
                new.push(((at, sealed.mark), written));
            }
        }
        new.sort_by_key(|(place, _)| *place);
        let place = if new.is_empty() {
            self.order.last(db)
        } else {
            tracing::info!(volume = self.name, %session, entries = new.len(), "changes are brought back");
            let mut batch = Rows::new();
            batch.put(tables::BROUGHT, BroughtRow::from(&brought).encode_to_vec());
            let entries = new.into_iter().map(|(_, written)| written).collect();
            let place = self.write_again(&db, batch, entries).await?;
            self.state.lock().brought = brought;
            hayloft_crash::point("replay.written");
            place
        };
        drop(turn);
        self.durable(&place).await?;
        hayloft_crash::point("replay.durable");
        Ok(())
    }

    /// The database was opened again in this server, which has all that it has answered. If another server had it open
    /// meanwhile, clients bring that what is missing.
    pub(crate) async fn redo_own(self: &Arc<Self>, db: &Db, was_taken: bool) -> Result<(), VolumeError> {
        let entries = self.order.entries(self.mark());
        if was_taken || entries.is_empty() {
            self.order.forget_entries();
            return Ok(());
        }
        tracing::info!(volume = self.name, entries = entries.len(), "changes are written once more");
        let key = self.order.seal_key();
        let written = entries.iter().filter_map(|sealed| entry::open(&key, sealed)).collect();
        let place = self.write_again(db, Rows::new(), written).await?;
        hayloft_crash::point("replay.redone");
        self.durable(&place).await
    }

    /// Writes entries once more, in this order.
    async fn write_again(
        self: &Arc<Self>,
        db: &Db,
        mut batch: Rows,
        entries: Vec<WrittenEntry>,
    ) -> Result<Ordered, VolumeError> {
        let mut again = Again::default();
        let mut unnamed = BTreeMap::new();
        for entry in entries {
            again.usage.bytes += entry.bytes;
            again.usage.inodes += entry.inodes;
            let last = again.sequences.entry(SessionId(entry.session)).or_default();
            *last = (*last).max(entry.sequence);
            for NotedRow { key, value } in entry.rows {
                let numbers = tables::number_in(&key).zip(tables::second_number_in(&key));
                match (key.first(), numbers) {
                    (Some(&tables::ORPHANS), Some((session, ino))) => {
                        again.orphans.insert((SessionId(session), Ino(ino)), value.is_some());
                        continue;
                    }
                    (Some(&tables::CHANGES), Some((session, request))) => {
                        let outcome =
                            value.map(|row| database::decode(row, "outcome of a change")).transpose()?;
                        again.outcomes.insert((SessionId(session), request), outcome);
                        continue;
                    }
                    (Some(&tables::INODES), _) => {
                        let row = value.clone().map(|row| database::decode::<InodeRowMessage>(row, "inode"));
                        let is_unnamed = row.transpose()?.filter(|row| row.nlink == 0);
                        let ino = Ino(tables::number_in(&key).unwrap_or_default());
                        unnamed.insert(ino, is_unnamed.map(|row| row.allocated));
                    }
                    _ => {}
                }
                match value {
                    Some(value) => batch.put(key, value),
                    None => batch.delete(key),
                }
            }
        }
        let unnamed: Vec<Ino> = unnamed.into_iter().filter_map(|(ino, row)| row.map(|_| ino)).collect();
        self.put_sessions_again(&mut batch, &mut again, &unnamed);
        let place = self.order(db, batch).await?;
        self.noted_again(again);
        Ok(place)
    }

    /// Adds rows of sessions, and of the volume, which are not simply put once more.
    fn put_sessions_again(&self, batch: &mut Rows, again: &mut Again, unnamed: &[Ino]) {
        let (sharing, state) = (self.sharing.lock(), self.state.lock());
        let usage = state.usage.after(again.usage);
        let row = VolumeRow { bytes: usage.bytes, inodes: usage.inodes, ..state.volume_row() };
        batch.put(tables::VOLUME, row.encode_to_vec());
        for (id, last) in &again.sequences {
            if let Some(found) = state.sessions.get(id).filter(|found| found.row.last_sequence < *last) {
                let row = SessionRow { last_sequence: *last, ..found.row.clone() };
                batch.put(tables::session(*id), row.encode_to_vec());
            }
            if let Some(found) = state.ended.get(id).filter(|found| found.last_sequence < *last) {
                let row = EndedRow { last_sequence: *last, ..found.clone() };
                batch.put(tables::ended(*id), row.encode_to_vec());
            }
        }
        again.outcomes.retain(|(id, _), _| state.sessions.contains_key(id) || state.ended.contains_key(id));
        for ((id, request), outcome) in &again.outcomes {
            match outcome {
                Some(outcome) => batch.put(tables::change(*id, *request), outcome.encode_to_vec()),
                None => batch.delete(tables::change(*id, *request)),
            }
        }
        // What a session had open that has ended may be open at those who have not said yet what they use.
        let heirs = sharing.grants.unclaimed();
        for ino in unnamed {
            let is_held = |id: &SessionId| again.orphans.get(&(*id, *ino)).copied().unwrap_or(false);
            if !state.sessions.keys().any(is_held) {
                again.orphans.extend(heirs.iter().map(|heir| ((*heir, *ino), true)));
            }
        }
        again.orphans.retain(|(id, _), _| state.sessions.contains_key(id));
        for ((id, ino), is_held) in &again.orphans {
            match is_held {
                true => batch.put(tables::orphan(*id, *ino), vec![1]),
                false => batch.delete(tables::orphan(*id, *ino)),
            }
        }
    }

    /// It has its place.
    fn noted_again(&self, again: Again) {
        let (mut sharing, mut state) = (self.sharing.lock(), self.state.lock());
        state.usage = state.usage.after(again.usage);
        for (id, last) in again.sequences {
            if let Some(found) = state.sessions.get_mut(&id) {
                found.row.last_sequence = found.row.last_sequence.max(last);
            }
            if let Some(found) = state.ended.get_mut(&id) {
                found.last_sequence = found.last_sequence.max(last);
            }
        }
        for ((id, ino), is_held) in again.orphans {
            if let Some(found) = state.sessions.get_mut(&id) {
                if is_held {
                    found.orphans.insert(ino)
                } else {
                    found.orphans.remove(&ino)
                };
            }
        }
        for (key, outcome) in again.outcomes {
            match outcome {
                Some(outcome) => drop(sharing.changes.insert(key, Progress::Done(outcome))),
                None => drop(sharing.changes.remove(&key)),
            }
        }
        // What ended sessions had not shipped may be contradicted by it.
        sharing.estates = Default::default();
    }
}
