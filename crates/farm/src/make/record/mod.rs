//! What the recipes of a build have read and written, and what rules say of it.

mod report;
pub(super) mod rules;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

pub use report::{Report, Shared, Undeclared};
pub use rules::{Graph, Rule};

use crate::protocol::{Files, Record};

/// What is known so far.
#[derive(Debug, Default)]
pub(super) struct Recording(Mutex<BTreeMap<Vec<Rule>, Files>>);

impl Recording {
    /// A recipe's line, of the rules of this text, has opened this.
    pub(super) fn add(&self, rules: &[u8], record: Record) {
        let mut recipes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recipes.entry(rules::chain(rules)).or_default().add(record.into());
    }

    pub(super) fn report(&self, graph: &Graph, volume: &Path) -> Report {
        Report::of(&self.0.lock().unwrap_or_else(PoisonError::into_inner), graph, volume)
    }
}
