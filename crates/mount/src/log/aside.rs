//! Data that there is no room for, of files that others need: it is kept on this host, and the files go back to what the
//! server has of them. As on a local file system whose disk could not take what was in memory (`docs/adr` says why).

use std::collections::HashMap;
use std::sync::Arc;

use hayloft_model::Ino;

use crate::cache::data::{Blocks, File};
use crate::core::Client;
use crate::kernel::Word;
use crate::log::rescue::{self, Aside};

impl Client {
    /// Sets aside what there is no room for. `false`: there is nothing, or it cannot be kept here.
    pub(crate) fn set_aside(&self) -> bool {
        let aside = self.without_room();
        if aside.is_empty() {
            return false;
        }
        let kept = match rescue::keep_aside(&self.rescue.0, &self.rescue.1, &aside) {
            Ok(kept) => kept,
            Err(error) => {
                let folder = self.rescue.0.display();
                tracing::error!(%error, "what there is no room for cannot be set aside in {folder} either");
                return false;
            }
        };
        tracing::error!(
            "there is no room for data of {} files that others need: it is kept in {} (see REPORT there)",
            kept.names,
            kept.folder.display()
        );
        let mut core = self.core();
        let mut changed: Vec<Ino> = Vec::new();
        for Aside { ino, blocks, .. } in &aside {
            let Some(file) = core.files.get(ino).map(Arc::clone) else { continue };
            if let Some((size, allocated)) = self.budget.with(&file, |data| data.give_up(blocks))
                && core.tree.cut_down(*ino, size, allocated, self.clock.now()).is_ok()
            {
                changed.push(*ino);
            }
        }
        core.lost.extend(&changed);
        drop(core);
        let is_any = !changed.is_empty();
        let (names, in_use, data) = (Vec::new(), Vec::new(), changed.clone());
        self.tell_kernel(Word::Stale {
            names,
            attributes: changed,
            data,
            in_use,
            ack: None,
            bases: Vec::new(),
        });
        is_any
    }

    /// All data that needs room and has none, with the paths of its files.
    fn without_room(&self) -> Vec<Aside> {
        let core = self.core();
        let of_file = |(ino, file): (&Ino, &Arc<File>)| {
            let blocks = file.data.lock().homeless();
            (!blocks.is_empty()).then_some((*ino, blocks))
        };
        let found: HashMap<Ino, Blocks> = core.files.iter().filter_map(of_file).collect();
        let mut paths = core.tree.paths(&core.ways, |ino| found.contains_key(&ino));
        let mode_of = |ino| core.tree.inode(ino).map_or(0o600, |row| row.mode);
        let of_found = |(ino, blocks): (Ino, Blocks)| Aside {
            ino,
            path: paths.remove(&ino),
            mode: mode_of(ino),
            blocks,
        };
        found.into_iter().map(of_found).collect()
    }

    /// Whether data of a file was set aside and nobody has been told yet.
    pub(crate) fn take_lost(&self, ino: Ino) -> bool {
        self.core().lost.remove(&ino)
    }
}
