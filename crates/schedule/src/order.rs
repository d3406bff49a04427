//! Who is next: users with waiting tasks by what they have, and the builds of each. Nobody is looked at who is not.

use std::collections::{BTreeMap, BTreeSet};

use crate::{BuildId, Class};

/// How much somebody has for his weight, and when he was served last: the least goes first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Party {
    pub level: u128,
    pub served: u64,
}

/// A user, in one class.
#[derive(Debug, Default)]
struct User {
    party: Party,
    /// His builds with waiting tasks.
    builds: BTreeSet<(Party, BuildId)>,
}

#[derive(Debug, Default)]
struct OfClass {
    users: BTreeMap<usize, User>,
    /// Users with builds that are not passed over.
    ready: BTreeSet<(Party, usize)>,
    /// Builds with waiting tasks, those that are passed over among them.
    waiting: BTreeSet<BuildId>,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Order {
    classes: [OfClass; 2],
    /// Where each build stands.
    listed: BTreeMap<BuildId, (usize, Class, Party)>,
}

impl OfClass {
    fn change(&mut self, number: usize, change: impl FnOnce(&mut User)) {
        let user = self.users.entry(number).or_default();
        let before = (!user.builds.is_empty()).then_some(user.party);
        change(user);
        let after = (!user.builds.is_empty()).then_some(user.party);
        if before == after {
            return;
        }
        before.map(|party| self.ready.remove(&(party, number)));
        match after {
            Some(party) => {
                self.ready.insert((party, number));
            }
            None => {
                self.users.remove(&number);
            }
        }
    }
}

impl Order {
    /// A build has this, and tasks that wait; with nothing none wait.
    pub(crate) fn put(&mut self, id: BuildId, user: usize, class: Class, party: Option<Party>) {
        if party.is_some() && self.listed.get(&id).map(|listed| listed.2) == party {
            return;
        }
        self.pass_over(id);
        let of_class = &mut self.classes[class as usize];
        let Some(party) = party else {
            of_class.waiting.remove(&id);
            return;
        };
        of_class.waiting.insert(id);
        of_class.change(user, |user| {
            user.builds.insert((party, id));
        });
        self.listed.insert(id, (user, class, party));
    }

    /// A user has this.
    pub(crate) fn put_user(&mut self, number: usize, party: Party) {
        for of_class in &mut self.classes {
            if of_class.users.contains_key(&number) {
                of_class.change(number, |user| user.party = party);
            }
        }
    }

    /// A build is left out until it is put again.
    pub(crate) fn pass_over(&mut self, id: BuildId) {
        if let Some((user, class, party)) = self.listed.remove(&id) {
            self.classes[class as usize].change(user, |user| {
                user.builds.remove(&(party, id));
            });
        }
    }

    /// A build is gone.
    pub(crate) fn remove(&mut self, id: BuildId, user: usize, class: Class) {
        self.put(id, user, class, None);
    }

    /// Whether tasks of this class wait.
    pub(crate) fn waits(&self, class: Class) -> bool {
        !self.classes[class as usize].waiting.is_empty()
    }

    /// The build that is next, of this class if any is.
    pub(crate) fn next(&self, first: Class) -> Option<BuildId> {
        let other = if first == Class::Batch { Class::Interactive } else { Class::Batch };
        [first, other].into_iter().find_map(|class| {
            let of_class = &self.classes[class as usize];
            let (_, user) = of_class.ready.first()?;
            of_class.users.get(user)?.builds.first().map(|(_, build)| *build)
        })
    }
}
