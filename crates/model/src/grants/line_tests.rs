//! Whatever happens, nobody waits who could go on.

use std::collections::BTreeMap;

use super::*;

const SESSIONS: [SessionId; 3] = [SessionId(1), SessionId(2), SessionId(3)];
const DIRS: [Ino; 2] = [Ino(20), Ino(21)];

/// Numbers that look random.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % bound
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn object(&mut self) -> Object {
        let dir = self.of(&DIRS);
        match self.below(3) {
            0 => Object::Directory(dir),
            _ => Object::File { ino: Ino(dir.0 + 10 * (1 + self.below(2) as u64)), home: dir },
        }
    }

    fn objects(&mut self) -> Vec<Object> {
        let mut objects = vec![self.object()];
        if self.below(3) == 0 {
            let more = self.object();
            if more != objects[0] {
                objects.push(more);
            }
        }
        objects
    }

    fn request(&mut self) -> Request {
        let dir = Object::Directory(self.of(&DIRS));
        match self.below(9) {
            0..=2 => Request::Read(self.objects()),
            3 | 4 => Request::Own(self.object()),
            5 => Request::List(dir),
            6 => Request::Reclaim(vec![self.object()]),
            _ => {
                let local = self.below(2) == 0;
                let by_slots = self.of(&[BySlots::Cannot, BySlots::Can, BySlots::Makes]);
                Request::Change { objects: if local { vec![dir] } else { self.objects() }, local, by_slots }
            }
        }
    }
}

/// A server's account of what is to be answered and acknowledged.
#[derive(Default)]
struct World {
    grants: Grants,
    waiting: Vec<Ticket>,
    ready: Vec<Ticket>,
    events: BTreeMap<SessionId, Vec<u64>>,
}

impl World {
    fn take_outputs(&mut self) {
        for output in self.grants.take_outputs() {
            match output {
                Output::Order { to, event, .. } => self.events.entry(to).or_default().push(event),
                Output::Ready { ticket, .. } => {
                    self.waiting.retain(|waiting| *waiting != ticket);
                    self.ready.push(ticket);
                }
                Output::Settled(_) | Output::Heard { .. } | Output::Whole(_) => {}
            }
        }
    }

    fn step(&mut self, random: &mut Random) -> String {
        let session = random.of(&SESSIONS);
        let at = random.below(usize::MAX);
        match random.below(16) {
            0..=5 => {
                let request = random.request();
                let said = format!("{session:?} {request:?}");
                let ticket = self.grants.request(session, request);
                self.waiting.push(ticket);
                said
            }
            6 => {
                let files: Vec<Ino> = [30, 31, 40, 41].map(Ino).to_vec();
                self.grants.release(session, &files);
                format!("{session:?} release")
            }
            7 | 8 if !self.ready.is_empty() => {
                let ticket = self.ready.swap_remove(at % self.ready.len());
                if random.below(2) == 0 {
                    for (to, event) in self.grants.publish(ticket, &random.objects()) {
                        self.events.entry(to).or_default().push(event);
                    }
                }
                self.grants.finish(ticket);
                format!("finish {ticket:?}")
            }
            9 | 10 if !self.ready.is_empty() || !self.waiting.is_empty() => {
                let of = if self.ready.is_empty() || at.is_multiple_of(3) {
                    &mut self.waiting
                } else {
                    &mut self.ready
                };
                if of.is_empty() {
                    return String::new();
                }
                let ticket = of.swap_remove(at % of.len());
                self.grants.cancel(ticket);
                format!("cancel {ticket:?}")
            }
            11..=13 => {
                let events = self.events.entry(session).or_default();
                if events.is_empty() {
                    return String::new();
                }
                let event = events.remove(0);
                self.grants.acknowledge(session, event);
                format!("{session:?} acknowledges {event}")
            }
            14 if at.is_multiple_of(4) => {
                self.events.remove(&session);
                self.grants.begin(session, false);
                let ended = at.is_multiple_of(8);
                if ended {
                    self.grants.end(session);
                    self.grants.begin(session, false);
                }
                let _ = self.grants.claim(session, &[]);
                format!("{session:?} begins anew, ended: {ended}")
            }
            15 => {
                self.grants.rest();
                "rest".to_owned()
            }
            _ => String::new(),
        }
    }
}

#[test]
fn nobody_waits_who_could_go_on() {
    for seed in 1..=1000 {
        let mut random = Random(seed * 0x9e37_79b9_7f4a_7c15);
        let mut world = World::default();
        world.grants.split_after(2);
        for session in SESSIONS {
            world.grants.begin(session, false);
            world.grants.knows_many_slots(session, true);
            world.grants.claim(session, &[]).expect("nothing is claimed");
        }
        let mut said = Vec::new();
        for _ in 0..200 {
            said.push(world.step(&mut random));
            world.take_outputs();
            let mut looked_at = world.grants.clone();
            looked_at.advance();
            let more = looked_at.take_outputs();
            assert!(more.is_empty(), "seed {seed}: {more:?} after\n{}", said.join("\n"));
        }
    }
}
