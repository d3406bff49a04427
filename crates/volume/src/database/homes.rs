//! Where the packs of a volume lie: those that it has put in its own folder, those that a fork has from its origin in that one's.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::database::tables::{PackId, PackRow};

/// The folders of a volume's packs.
pub(crate) struct Homes {
    own: String,
    /// The first of the family: rows of its packs do not say where these are.
    first: String,
    /// Packs that are not in the own folder. A leaf.
    elsewhere: RwLock<HashMap<PackId, Arc<str>>>,
}

impl Homes {
    /// Of a volume without packs.
    pub(crate) fn new(own: &str, first: &str) -> Homes {
        Homes { own: own.to_owned(), first: first.to_owned(), elsewhere: RwLock::default() }
    }

    /// The first of the family; the volume itself if it was never forked from another one.
    pub(crate) fn first(&self) -> &str {
        &self.first
    }

    /// Whether its rows began as those of another volume.
    pub(crate) fn is_clone(&self) -> bool {
        self.own != self.first
    }

    /// The volume's packs are these.
    pub(crate) fn learn<'a>(&self, packs: impl Iterator<Item = (PackId, &'a PackRow)>) {
        let mut elsewhere = self.elsewhere.write();
        elsewhere.clear();
        for (pack, row) in packs {
            let home = row.home.as_deref().unwrap_or(&self.first);
            if home != self.own {
                elsewhere.insert(pack, home.into());
            }
        }
    }

    /// The row of a pack that this volume has put.
    pub(crate) fn row(&self, size: u64) -> PackRow {
        PackRow { size, home: self.is_clone().then(|| self.own.clone()) }
    }

    /// Whether the pack lies in the own folder.
    pub(crate) fn is_own(&self, pack: PackId) -> bool {
        !self.elsewhere.read().contains_key(&pack)
    }

    /// Where a pack is.
    pub(crate) fn path(&self, pack: PackId) -> String {
        match self.elsewhere.read().get(&pack) {
            Some(home) => pack.path(home),
            None => pack.path(&self.own),
        }
    }

    /// The packs in folders of others, of those that are meant.
    pub(crate) fn paths_elsewhere(&self, is_meant: impl Fn(&str) -> bool) -> Vec<String> {
        let elsewhere = self.elsewhere.read();
        elsewhere.iter().filter(|(_, home)| is_meant(home)).map(|(pack, home)| pack.path(home)).collect()
    }

    /// All folders in which packs of the volume lie.
    pub(crate) fn folders(&self) -> Vec<String> {
        let mut folders: Vec<String> = self.elsewhere.read().values().map(|home| folder(home)).collect();
        folders.push(folder(&self.own));
        folders.sort_unstable();
        folders.dedup();
        folders
    }
}

/// The folder of the packs that a volume has put.
pub(crate) fn folder(volume_id: &str) -> String {
    format!("packs/{volume_id}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packs_are_where_their_rows_say() {
        let homes = Homes::new("b", "a");
        let own = homes.row(7);
        assert_eq!(PackRow::decode(&own.encode()), Some(own.clone()));
        let (old, between) =
            (PackRow { size: 5, home: None }, PackRow { size: 6, home: Some("m".to_owned()) });
        assert_eq!(PackRow::decode(&old.encode()), Some(old.clone()));
        assert_eq!(PackRow::decode(b"short"), None);
        homes.learn([(PackId(1), &old), (PackId(2), &own), (PackId(3), &between)].into_iter());
        assert_eq!(homes.path(PackId(1)), PackId(1).path("a"));
        assert_eq!(homes.path(PackId(2)), PackId(2).path("b"));
        assert_eq!(homes.path(PackId(3)), PackId(3).path("m"));
        assert_eq!(homes.path(PackId(4)), PackId(4).path("b"), "one that is just being put");
        assert!(!homes.is_own(PackId(1)) && homes.is_own(PackId(2)));
        assert_eq!(homes.paths_elsewhere(|home| home == "m"), [PackId(3).path("m")]);
        assert_eq!(homes.folders(), ["packs/a", "packs/b", "packs/m"]);
        assert_eq!(Homes::new("a", "a").row(7).home, None, "as servers write it that know of no families");
    }
}
