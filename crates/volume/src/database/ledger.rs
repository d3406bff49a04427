//! The ledger of a volume: which files of its database's log, and which manifests, have become durable, written beside the
//! database. SlateDB takes what it finds for all that there is: of a log whose last file is gone or empty it believes that
//! it ended earlier. The ledger says where it has to end (ADR 0023).
//!
//! Each opening of a volume has a ledger of its own, an object that grows ([`hayloft_store::Trail`]). A line is added when
//! a file is durable, before anybody hears that what is in it is so: what the ledger has must be there, unless all of it
//! has gone to table files since. A file that no line is about is none of its business.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Buf;
use hayloft_store::{Store, StoreError, Trail};
use object_store::path::Path;
use object_store::{ObjectMeta, PutPayload};
use parking_lot::Mutex;
use slatedb::admin::AdminBuilder;
use tokio::sync::Notify;

use crate::database;
use crate::database::registry::random;
use crate::error::VolumeError;

/// Bytes of a line.
const LINE: usize = 40;

/// A ledger with more lines than this is written anew, without those about what has gone to table files.
const LINES_MAX: usize = 16_384;

/// How often to look again when a file is gone: another server may be writing the volume still.
const LOOKS: usize = 5;

/// What a line is about.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Kind {
    Log = 1,
    Manifest = 2,
    Compactions = 3,
}

impl Kind {
    fn of_code(code: u64) -> Option<Kind> {
        [Kind::Log, Kind::Manifest, Kind::Compactions].into_iter().find(|kind| *kind as u64 == code)
    }

    fn folder(self) -> &'static str {
        match self {
            Kind::Log => "wal",
            Kind::Manifest => "manifest",
            Kind::Compactions => "compactions",
        }
    }

    fn file(self, volume_id: &str, number: u64) -> String {
        let ending = match self {
            Kind::Log => "sst",
            Kind::Manifest | Kind::Compactions => self.folder(),
        };
        format!("{}/{}/{number:020}.{ending}", database::path(volume_id), self.folder())
    }
}

/// An object as it was written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Written {
    size: u64,
    /// The first bytes of its BLAKE3 hash; 0: not known.
    hash: u64,
}

type Lines = BTreeMap<(Kind, u64), Written>;

fn line(kind: Kind, number: u64, written: Written) -> [u8; LINE] {
    let mut line = [0; LINE];
    for (at, part) in [kind as u64, number, written.size, written.hash].into_iter().enumerate() {
        line[8 * at..8 * at + 8].copy_from_slice(&part.to_le_bytes());
    }
    let check = begin_of(&blake3::hash(&line[..LINE - 8]));
    line[LINE - 8..].copy_from_slice(&check.to_le_bytes());
    line
}

fn bytes_of(lines: &Lines) -> Vec<u8> {
    lines.iter().flat_map(|((kind, number), written)| line(*kind, *number, *written)).collect()
}

/// Reads lines up to the first one that is damaged, which may be what a power cut has left.
fn read_lines(mut ledger: &[u8], lines: &mut Lines) {
    while ledger.len() >= LINE {
        let (head, check) = ledger[..LINE].split_at(LINE - 8);
        if check != begin_of(&blake3::hash(head)).to_le_bytes() {
            return;
        }
        let [kind, number, size, hash] = std::array::from_fn(|_| ledger.get_u64_le());
        ledger.advance(8);
        if let Some(kind) = Kind::of_code(kind) {
            lines.insert((kind, number), Written { size, hash });
        }
    }
}

fn begin_of(hash: &blake3::Hash) -> u64 {
    u64::from_le_bytes(*hash.as_bytes().first_chunk().expect("hashes have 32 bytes"))
}

fn hash_of<'a>(store: &Store, parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
    let mut hasher = store.note_hasher();
    for part in parts {
        hasher.update(part);
    }
    // 0 means that nothing is known.
    begin_of(&hasher.finalize()).max(1)
}

fn folder(volume_id: &str) -> String {
    format!("volumes/{volume_id}/ledger")
}

/// Which file of a volume's log, or which of its manifests, is at a path. Through its database's store a fork also writes
/// manifests of its origin's: none of the fork's business.
fn parse(volume_id: &str, path: &Path) -> Option<(Kind, u64)> {
    let within = path.as_ref().strip_prefix(&database::path(volume_id))?.strip_prefix('/')?;
    let (folder, name) = within.split_once('/')?;
    let (number, ending) = name.split_once('.')?;
    let kind = match (folder, ending) {
        ("wal", "sst") => Kind::Log,
        ("manifest", "manifest") => Kind::Manifest,
        ("compactions", "compactions") => Kind::Compactions,
        _ => return None,
    };
    Some((kind, number.parse().ok()?))
}

/// Which manifest of a volume's database is at a path.
pub(crate) fn manifest_at(volume_id: &str, path: &Path) -> Option<u64> {
    parse(volume_id, path).filter(|(kind, _)| *kind == Kind::Manifest).map(|(_, number)| number)
}

/// What an opening of the database writes down.
pub(crate) struct Ledger {
    store: Store,
    volume_id: String,
    /// A leaf.
    state: Mutex<State>,
    /// A line could not be added: said once.
    has_failed: AtomicBool,
    /// Something is to be made durable, or the ledger is not used any more.
    added: Arc<Notify>,
}

#[derive(Default)]
struct State {
    lines: Lines,
    /// `None` while the database is being opened.
    trail: Option<Arc<Trail>>,
}

impl Ledger {
    pub(crate) fn new(store: &Store, volume_id: &str) -> Arc<Ledger> {
        Arc::new(Ledger {
            store: store.clone(),
            volume_id: volume_id.to_owned(),
            state: Mutex::default(),
            has_failed: AtomicBool::new(false),
            added: Arc::default(),
        })
    }

    /// An object was written through the database's store, and is durable.
    pub(crate) fn note(&self, path: &Path, payload: &PutPayload) {
        let Some((kind, number)) = parse(&self.volume_id, path) else { return };
        let size = payload.content_length() as u64;
        let written = Written { size, hash: hash_of(&self.store, payload.iter().map(|part| part.as_ref())) };
        let mut state = self.state.lock();
        state.lines.insert((kind, number), written);
        let Some(trail) = &state.trail else { return };
        if let Err(error) = trail.add(&line(kind, number, written))
            && !self.has_failed.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(%error, path = trail.path(), "the end of the log cannot be noted: its loss would go unnoticed");
        }
        self.added.notify_one();
    }

    /// Begins the ledger of an opening when the database is open, with what there is then. Those of earlier openings go.
    pub(crate) async fn begin(self: &Arc<Self>, replay_after: u64) -> Result<(), StoreError> {
        let old = self.store.list(&folder(&self.volume_id)).await?;
        hayloft_crash::point("ledger.database-open");
        self.rewrite(replay_after, true).await?;
        let own = self.state.lock().trail.as_ref().map(|trail| trail.path().to_owned());
        for object in old.iter().filter(|object| Some(object.location.as_ref()) != own.as_deref()) {
            self.store.delete(object.location.as_ref()).await?;
            hayloft_crash::point("ledger.old-deleted");
        }
        tokio::spawn(keep_durable(Arc::downgrade(self)));
        Ok(())
    }

    /// Writes it anew, with what is in the log still.
    async fn rewrite(&self, replay_after: u64, look: bool) -> Result<(), StoreError> {
        let found = if look { self.files(Kind::Log).await? } else { BTreeMap::new() };
        let path = format!("{}/{:016x}", folder(&self.volume_id), random());
        let begin = {
            let mut state = self.state.lock();
            for (number, size) in found {
                state.lines.entry((Kind::Log, number)).or_insert(Written { size, hash: 0 });
            }
            let last = |kind| state.lines.keys().filter(|(of, _)| *of == kind).max().copied();
            let newest = [last(Kind::Manifest), last(Kind::Compactions)];
            state.lines.retain(|key, _| match key {
                (Kind::Log, number) => *number > replay_after,
                (Kind::Manifest | Kind::Compactions, _) => newest.contains(&Some(*key)),
            });
            // What comes from now on until the trail is there is added to it below.
            bytes_of(&state.lines)
        };
        let known = begin.len() / LINE;
        let trail = Arc::new(self.store.trail(&path, begin).await?);
        hayloft_crash::point("ledger.rewritten");
        let mut state = self.state.lock();
        if state.lines.len() > known {
            // Lines may come twice: the last one counts.
            let _ = trail.add(&bytes_of(&state.lines));
            self.added.notify_one();
        }
        state.trail = Some(trail);
        Ok(())
    }

    /// Makes durable what was noted.
    pub(crate) async fn sync(&self) {
        let trail = self.state.lock().trail.clone();
        let Some(trail) = trail else { return };
        if let Err(error) = trail.sync().await {
            tracing::debug!(%error, "the ledger is behind");
            self.added.notify_one();
        }
    }

    /// When it has become long, it is written anew.
    pub(crate) async fn shorten(&self, replay_after: u64) {
        let old = {
            let state = self.state.lock();
            state.trail.clone().filter(|_| state.lines.len() > LINES_MAX)
        };
        let Some(old) = old else { return };
        let shortened = async {
            self.rewrite(replay_after, false).await?;
            self.store.delete(old.path()).await
        };
        if let Err(error) = shortened.await {
            tracing::debug!(%error, "the ledger stays long");
        }
    }

    fn lag(&self) -> Option<Duration> {
        self.state.lock().trail.as_ref().map(|trail| trail.lag())
    }

    async fn files(&self, kind: Kind) -> Result<BTreeMap<u64, u64>, StoreError> {
        files(&self.store, &self.volume_id, kind).await
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.added.notify_one();
    }
}

/// Syncs a ledger a moment after each addition, as long as it is used. It sleeps while nothing is added.
async fn keep_durable(ledger: Weak<Ledger>) {
    while let Some(added) = ledger.upgrade().map(|ledger| Arc::clone(&ledger.added)) {
        added.notified().await;
        let Some(lag) = ledger.upgrade().and_then(|ledger| ledger.lag()) else { continue };
        tokio::time::sleep(lag).await;
        if let Some(ledger) = ledger.upgrade() {
            ledger.sync().await;
        }
    }
}

async fn files(store: &Store, volume_id: &str, kind: Kind) -> Result<BTreeMap<u64, u64>, StoreError> {
    let objects = store.list(&format!("{}/{}", database::path(volume_id), kind.folder())).await?;
    let number = |object: &ObjectMeta| parse(volume_id, &object.location).filter(|(found, _)| *found == kind);
    Ok(objects.iter().filter_map(|object| Some((number(object)?.1, object.size))).collect())
}

/// The newest manifest of a volume's database from that of a number on: there is one.
///
/// # Errors
/// There is none to be seen, or the store cannot be read now.
pub(crate) async fn newest_manifest_from(
    store: &Store,
    volume_id: &str,
    number: u64,
) -> Result<u64, StoreError> {
    let folder = format!("{}/{}", database::path(volume_id), Kind::Manifest.folder());
    let before = Kind::Manifest.file(volume_id, number.saturating_sub(1));
    let newest = store.list_after(&folder, &before).await?;
    // A folder that is not there is listed as an empty one.
    newest
        .iter()
        .filter_map(|object| manifest_at(volume_id, &object.location))
        .max()
        .ok_or_else(|| StoreError::NotFound { path: Kind::Manifest.file(volume_id, number) })
}

/// What is wrong with an object, and which.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Damage {
    pub(crate) object: String,
    pub(crate) what: String,
}

impl std::fmt::Display for Damage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.object, self.what)
    }
}

/// What earlier openings have written down.
async fn read(store: &Store, volume_id: &str) -> Result<Lines, StoreError> {
    let mut lines = Lines::new();
    for object in store.list(&folder(volume_id)).await? {
        match store.get(object.location.as_ref()).await {
            Ok(ledger) => read_lines(&ledger, &mut lines),
            // Of a server that opens the volume at this moment.
            Err(StoreError::NotFound { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(lines)
}

/// Compares a volume's database with what was written down, before it is opened. `None`: as far as that says, all is there.
///
/// # Errors
/// The store cannot be read now.
pub(crate) async fn compare(store: &Store, volume_id: &str) -> Result<Option<Damage>, VolumeError> {
    drop_damaged_compactions(store, volume_id).await?;
    let mut looks = 0;
    loop {
        let damages = differences(store, volume_id, false).await?;
        looks += 1;
        // Another server may have the volume still, and delete what it does not need any more.
        if damages.is_empty() || looks == LOOKS {
            let is_gone = damages.is_empty() && files(store, volume_id, Kind::Manifest).await?.is_empty();
            return Ok(damages.into_iter().next().or(is_gone.then(|| nothing_left(volume_id))));
        }
    }
}

/// A database without a manifest would be taken for a new one.
fn nothing_left(volume_id: &str) -> Damage {
    let object = format!("{}/{}", database::path(volume_id), Kind::Manifest.folder());
    Damage { object, what: "has no manifest that is whole: put the folder back from a copy".to_owned() }
}

/// What compactions are under way is written down so that they can go on; without it they begin anew.
async fn drop_damaged_compactions(store: &Store, volume_id: &str) -> Result<(), StoreError> {
    let lines = read(store, volume_id).await?;
    let found = files(store, volume_id, Kind::Compactions).await?;
    let written = lines.range((Kind::Compactions, 0)..).next_back();
    let Some(((kind, number), written)) = written else { return Ok(()) };
    let newest = found.last_key_value().map(|(newest, _)| *newest);
    if newest.is_some_and(|newest| newest > *number) {
        return Ok(());
    }
    let object = kind.file(volume_id, *number);
    let damage = difference(store, object, found.get(number).copied(), *written, true).await?;
    let Some(damage) = damage else { return Ok(()) };
    tracing::warn!(%damage, "compactions that were under way begin anew");
    for number in found.keys() {
        store.delete(&kind.file(volume_id, *number)).await?;
    }
    Ok(())
}

/// As [`compare`], all that is found; with `content` every byte is read.
pub(crate) async fn differences(
    store: &Store,
    volume_id: &str,
    content: bool,
) -> Result<Vec<Damage>, VolumeError> {
    let lines = read(store, volume_id).await?;
    let mut damages = Vec::new();
    let manifests = files(store, volume_id, Kind::Manifest).await?;
    let newest = manifests.last_key_value().map(|(number, _)| *number);
    let written = lines.range((Kind::Manifest, 0)..(Kind::Compactions, 0)).next_back();
    if let Some(((_, number), written)) = written
        && newest.is_none_or(|newest| newest <= *number)
    {
        let object = Kind::Manifest.file(volume_id, *number);
        let size = manifests.get(number).copied();
        damages.extend(difference(store, object, size, *written, true).await?);
    }
    if !damages.is_empty() {
        return Ok(damages);
    }
    let Some(replay_after) = replay_after(store, volume_id, newest, &mut damages).await? else {
        return Ok(damages);
    };
    let found = files(store, volume_id, Kind::Log).await?;
    for ((kind, number), written) in lines.range((Kind::Log, replay_after + 1)..(Kind::Manifest, 0)) {
        let object = kind.file(volume_id, *number);
        let size = found.get(number).copied();
        damages.extend(difference(store, object, size, *written, content).await?);
    }
    Ok(damages)
}

/// Goes on without what is damaged of the log and the manifests, which is kept below `damaged`; says what that was.
///
/// # Errors
/// The store cannot be read or written now.
pub(crate) async fn accept(store: &Store, volume_id: &str) -> Result<Vec<String>, VolumeError> {
    let mut accepted = Vec::new();
    let mut damages = differences(store, volume_id, true).await?;
    loop {
        let had = accepted.len();
        let manifests = files(store, volume_id, Kind::Manifest).await?;
        let is_damaged = |number: &u64| {
            let object = Kind::Manifest.file(volume_id, *number);
            damages.iter().any(|damage| damage.object == object)
        };
        if manifests.keys().all(is_damaged) {
            return Err(VolumeError::AtRest(nothing_left(volume_id)));
        }
        for damage in &damages {
            let object = &damage.object;
            let Some((kind, _)) = parse(volume_id, &Path::from(object.as_str())) else { continue };
            let file = object.rsplit('/').next().unwrap_or(object);
            let kept = format!("volumes/{volume_id}/damaged/{file}");
            match store.get(object).await {
                // What a repair has emptied that was interrupted is kept already.
                Ok(content) if content.is_empty() => {}
                Ok(content) => store.put(&kept, content).await?,
                Err(StoreError::NotFound { .. } | StoreError::Damaged { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            hayloft_crash::point("mend.kept");
            let lost = match kind {
                // An empty file of the log is one without changes.
                Kind::Log => {
                    store.put(object, bytes::Bytes::new()).await?;
                    "the changes in it are lost"
                }
                _ => {
                    store.delete(object).await?;
                    "the one before it counts"
                }
            };
            accepted.push(format!("{damage}: {lost}"));
        }
        hayloft_crash::point("mend.accepted");
        for object in store.list(&folder(volume_id)).await? {
            store.delete(object.location.as_ref()).await?;
        }
        // Without a ledger: a manifest that cannot be read at all.
        damages = differences(store, volume_id, true).await?;
        if damages.is_empty() || accepted.len() == had {
            return Ok(accepted);
        }
    }
}

/// The last file of the log of which everything is in table files.
async fn replay_after(
    store: &Store,
    volume_id: &str,
    newest: Option<u64>,
    damages: &mut Vec<Damage>,
) -> Result<Option<u64>, VolumeError> {
    let Some(newest) = newest else { return Ok(None) };
    let admin = AdminBuilder::new(database::path(volume_id), store.objects()).build();
    match admin.read_manifest(Some(newest)).await {
        Ok(manifest) => Ok(manifest.map(|manifest| manifest.replay_after_wal_id())),
        Err(error)
            if error.kind() == slatedb::ErrorKind::Unavailable && !StoreError::caused_by_damage(&error) =>
        {
            Err(error.into())
        }
        Err(error) => {
            let object = Kind::Manifest.file(volume_id, newest);
            damages.push(Damage { object, what: format!("cannot be read: {error}") });
            Ok(None)
        }
    }
}

async fn difference(
    store: &Store,
    object: String,
    size: Option<u64>,
    written: Written,
    content: bool,
) -> Result<Option<Damage>, StoreError> {
    let what = match size {
        None => "is gone".to_owned(),
        Some(size) if size != written.size => {
            format!("has {size} bytes of {}", written.size)
        }
        Some(_) if content && written.hash != 0 => match store.get(&object).await {
            Ok(bytes) if hash_of(store, [bytes.as_ref()]) == written.hash => return Ok(None),
            Ok(_) | Err(StoreError::Damaged { .. }) => "is not what was written".to_owned(),
            // It is not needed any more.
            Err(StoreError::NotFound { .. }) => return Ok(None),
            Err(error) => return Err(error),
        },
        Some(_) => return Ok(None),
    };
    Ok(Some(Damage { object, what }))
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
