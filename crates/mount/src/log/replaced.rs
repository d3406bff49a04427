//! Trees in whose place the volume got another one while files of them were open here (`docs/adr/0047`).
//!
//! The server keeps such a tree as a snapshot. That is mounted inside of this process, without a mount point, when a file of it is
//! read, and given up when nobody has read for a while: it can be deleted then, and who reads on gets ESTALE.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use hayloft_model::InoRange;
use hayloft_model::tree::Tree;
use parking_lot::Mutex;

use crate::core::{Client, Core};
use crate::error::MountError;
use crate::host::clock::Clock;
use crate::options::MountOptions;
use crate::stats::Stats;

/// How long a tree stays at hand that nobody reads from.
const IDLE: Duration = Duration::from_secs(10);
/// How often it is looked for that.
const LOOK: Duration = Duration::from_secs(1);

/// A tree that was replaced.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Kept {
    /// The snapshot that has it, `VOLUME@NAME`.
    pub(crate) name: String,
    /// What the volume's id begins with where that is mounted: another snapshot may get its name.
    pub(crate) id: u64,
}

struct Open {
    client: Arc<Client>,
    used: Instant,
}

/// What reads a tree, while somebody does.
type AtHand = Arc<Mutex<Option<Open>>>;

/// Trees of which the kernel has files, by the numbers that they have here.
#[derive(Default)]
pub(crate) struct Replaced {
    trees: Mutex<HashMap<u32, (Kept, AtHand)>>,
}

impl Replaced {
    /// A tree was replaced.
    pub(crate) fn add(&self, tree: u32, kept: Kept) {
        self.trees.lock().insert(tree, (kept, Arc::default()));
    }

    /// The kernel has nothing of it any more.
    pub(crate) fn end(&self, tree: u32) {
        // Whoever looks after it sees that it is idle.
        self.trees.lock().remove(&tree);
    }

    /// Gives all up that are at hand.
    pub(crate) fn close(&self) {
        let trees: Vec<_> = self.trees.lock().drain().map(|(_, (_, open))| open).collect();
        for open in trees {
            let open = open.lock().take();
            open.into_iter().for_each(|open| open.client.link.close());
        }
    }

    /// What reads from a tree.
    ///
    /// # Errors
    /// The snapshot is gone, or the server does not answer.
    pub(crate) fn open(&self, client: &Client, tree: u32) -> Result<Arc<Client>, MountError> {
        let gone = || MountError::Session("the kernel has nothing of that tree any more".to_owned());
        let (kept, open) = self.trees.lock().get(&tree).cloned().ok_or_else(gone)?;
        let mut at_hand = open.lock();
        if let Some(open) = at_hand.as_mut().filter(|open| open.client.link.ended().is_none()) {
            open.used = Instant::now();
            return Ok(Arc::clone(&open.client));
        }
        let reader = read(client, &kept)?;
        *at_hand = Some(Open { client: Arc::clone(&reader), used: Instant::now() });
        drop(at_hand);
        tracing::info!(snapshot = kept.name, "files that are open are read from the tree that was replaced");
        look_after(open).map_err(|error| MountError::Session(error.to_string()))?;
        Ok(reader)
    }
}

impl std::fmt::Debug for Replaced {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_map().entries(self.trees.lock().iter().map(|(tree, (kept, _))| (tree, kept))).finish()
    }
}

/// Gives a tree up when nobody has read from it for a while.
fn look_after(open: AtHand) -> std::io::Result<()> {
    let look = move || {
        loop {
            std::thread::sleep(LOOK);
            let mut at_hand = open.lock();
            if at_hand.as_ref().is_none_or(|open| open.used.elapsed() > IDLE) {
                let idle = at_hand.take();
                drop(at_hand);
                idle.into_iter().for_each(|open| open.client.link.close());
                return;
            }
        }
    };
    std::thread::Builder::new().name("hayloft-replaced".to_owned()).spawn(look).map(drop)
}

/// A client that only reads, for nobody's kernel.
fn read(client: &Client, kept: &Kept) -> Result<Arc<Client>, MountError> {
    let (stats, clock) = (Arc::new(Stats::default()), Arc::new(Clock::default()));
    let opened = client.link.open_other(&kept.name, Arc::clone(&stats), Arc::clone(&clock))?;
    let welcome = opened.welcome;
    let refused =
        |message: &str| MountError::Refused { address: kept.name.clone(), message: message.to_owned() };
    if hayloft_wire::id_begin(&welcome.volume_id) != kept.id {
        opened.link.close();
        let address = "a server where another snapshot has its name".to_owned();
        return Err(MountError::NoSuchVolume { volume: kept.name.clone(), address });
    }
    let status = welcome.status.ok_or_else(|| refused("it began the session without a status"))?;
    let mut tree = Tree::new(status.used(), hayloft_model::Usage::default());
    if let Some(range) = &welcome.inos {
        let range = InoRange::try_from(range).map_err(|_| refused("it gave no numbers"))?;
        tree.add_numbers(range);
    }
    tree.share();
    let core = Core { tree, ..Core::default() };
    let options = MountOptions { read_only: true, ..client.options.clone() };
    // Nobody listens: there is no kernel to be told, and nothing that could be recalled.
    let speech = (channel().0, channel().0);
    let rescue = client.rescue.clone();
    let reader = Arc::new(Client::new(core, opened.link, clock, stats, options, status, rescue, speech));
    let _ = reader.volume_id.set(welcome.volume_id);
    let receiver: Arc<dyn crate::session::link::Receiver> = Arc::clone(&reader) as _;
    reader
        .link
        .start(opened.reader, receiver)
        .map_err(|source| MountError::Unreachable { address: kept.name.clone(), source })?;
    Ok(reader)
}
