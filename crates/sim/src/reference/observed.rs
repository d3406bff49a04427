//! What may be seen of something: that depends on when the observation began.

use super::*;

impl Reference {
    /// Values that an observation between `call` and `now` may be of.
    pub(super) fn visible(&self, register: Register, call: u64) -> impl Iterator<Item = Value> + '_ {
        let all = self.history.get(&register).map_or(&[][..], Vec::as_slice);
        let mut done = false;
        let mut versions = all.iter().rev();
        let mut initial = Some(match register {
            Register::Name(..) => Value::Name(None),
            Register::Data(_) => Value::Data(Vec::new()),
            Register::Attributes(_) => Value::Nothing,
        });
        std::iter::from_fn(move || {
            if done {
                return None;
            }
            let Some(version) = versions.next() else {
                done = true;
                return initial.take();
            };
            let returned = match version.op {
                0 => Some(version.from),
                op => self.operations.get(&op).and_then(|op| op.returned),
            };
            // Whoever begins after that must not see what was before.
            done = returned.is_some_and(|returned| returned < call);
            Some(version.value.clone())
        })
    }

    /// Whether an observation that began at `call`, and is made now, is right.
    pub(crate) fn observed(&self, register: Register, value: &Value, call: u64) -> Verdict {
        let value = &self.plain(register, value);
        if self.visible(register, call).any(|seen| seen == *value) {
            return Ok(());
        }
        let all = self.history.get(&register).map_or(&[][..], Vec::as_slice);
        let last: Vec<String> = all
            .iter()
            .rev()
            .take(4)
            .map(|version| {
                let op = self.operations.get(&version.op);
                let returned = op.and_then(|op| op.returned);
                format!("{:?} by op {} at {}, returned {returned:?}", version.value, version.op, version.from)
            })
            .collect();
        Err(format!("{register:?} was seen as {value:?} since {call}; latest first: {}", last.join("; ")))
    }

    /// Inodes that a name may have led to since `call`.
    pub(crate) fn could_be(&self, dir: u64, name: u8, call: u64) -> Vec<Option<u64>> {
        self.visible(Register::Name(dir, name), call)
            .map(|value| if let Value::Name(to) = value { to } else { None })
            .collect()
    }

    /// Whether a directory may have been below another, or that itself, since `call`.
    pub(crate) fn could_be_below(&self, dir: u64, top: u64, call: u64) -> bool {
        let (mut todo, mut seen) = (vec![dir], BTreeSet::new());
        while let Some(dir) = todo.pop() {
            if dir == top {
                return true;
            }
            if seen.insert(dir) {
                todo.extend(self.history.keys().filter_map(|register| match *register {
                    Register::Name(above, name) => {
                        self.could_be(above, name, call).contains(&Some(dir)).then_some(above)
                    }
                    _ => None,
                }));
            }
        }
        false
    }

    pub(crate) fn could_be_unlinked(&self, ino: u64, call: u64) -> bool {
        self.visible(Register::Attributes(ino), call)
            .any(|value| matches!(value, Value::Attributes(Attributes { nlink: 0, .. })))
    }

    pub(crate) fn could_have_names(&self, dir: u64, call: u64) -> bool {
        (0..=u8::MAX).any(|name| self.could_be(dir, name, call).iter().any(Option::is_some))
    }
}
