//! What a host does about snapshots, and when the volume has got another tree.

use super::*;

impl World {
    /// The server wants all that there is to be shipped.
    pub(super) fn ship_for(&mut self, at: usize, number: u64) {
        let until = self.flush(at);
        self.clients[at].ships.push((number, until));
        self.tell_shipped(at);
    }

    pub(super) fn tell_shipped(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let accepted = client.accepted;
        let (done, rest) =
            std::mem::take(&mut client.ships).into_iter().partition(|(_, until)| *until <= accepted);
        client.ships = rest;
        let done: Vec<(u64, Sequence)> = done;
        done.into_iter().for_each(|(number, _)| self.say(at, ToServer::Shipped(number)));
    }

    /// The volume has another tree: everything is forgotten, and what was not shipped is kept apart.
    pub(super) fn leave_tree(&mut self, at: usize, last: Sequence) {
        trace!(self, "c{at} lets go of a tree that was replaced");
        if let Some(connection) = self.clients[at].connection.take() {
            self.connections.remove(&connection);
        }
        let assumes = self.is_broken(Rule::TakeForArrived);
        let client = &mut self.clients[at];
        let session = client.session;
        let from = client.on_its_way().filter(|sequence| *sequence > last.0);
        let told = if assumes { client.on_its_way().map_or(last, Sequence) } else { last };
        let wanted = self.reference.unsent_names(session, from);
        let kept = self.clients[at].kept_apart(told);
        if let Some((_, place)) =
            wanted.into_iter().map(|place| (session, place)).find(|(_, place)| !kept.contains(place))
        {
            self.fail(format!(
                "c{at} has not kept what it has done to {place:?} of a tree that was replaced"
            ));
        }
        self.come_back(at, Some(told));
    }
}

impl Client {
    /// Names that it has changed, and that have not arrived with this batch. The changes stay to be cut.
    fn kept_apart(&mut self, last: Sequence) -> BTreeSet<(u64, u8)> {
        if let Some((Some(cut), _)) = self.in_flight.take_if(|(_, batch)| batch.sequence > last) {
            self.tree.undo_cut(cut);
        }
        let cut = self.tree.cut(Sequence(u64::MAX), false);
        let names = cut.batch.records.iter().filter_map(|record| match record {
            Record::PutDentry(dir, name, _) | Record::DeleteDentry(dir, name) => {
                Some((dir.0, name.as_bytes()[0]))
            }
            _ => None,
        });
        let names = names.collect();
        self.tree.undo_cut(cut);
        names
    }
}
