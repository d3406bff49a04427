//! One task, from its submission to its end: attempts, until one of them tells how it has ended.

use std::time::{Duration, Instant};

use bytes::Bytes;
use prost::Message;
use tokio::sync::mpsc;

use super::streams::{Sink, Source};
use super::submitter::{Inner, News};
use super::{Order, Outcome, Task, Times};
use crate::protocol::{
    Data, End, Ended, Granted, NeedMessage, Part, Reminder, Spec, Start, StartPart, Stream, Taken, agent,
    client,
};

/// How often what was not answered is said again.
const AGAIN: Duration = Duration::from_millis(250);
/// An agent that was silent for its lease has ended its tasks after so much more.
const AFTER_LEASE: Duration = Duration::from_millis(500);
/// So often a task is started anew when its hosts are lost.
const LOST_MAX: u32 = 5;
/// So often when hosts are short of memory.
const SHORT_MAX: u32 = 3;
/// So often when hosts have no room for temporary files; after that it is taken to have failed by itself if its last host has room.
const ROOM_MAX: u32 = 2;
/// So much later, and later each time.
const AFTER_SHORTAGE: Duration = Duration::from_secs(1);
/// What failed for want of memory asks for so much at least, bytes.
const LITTLE_MEMORY: u64 = 64 << 20;
/// Longest part of a start; messages of a broker are limited to 1 MiB.
const START_PART: usize = 512 << 10;
/// A task that was to end is waited for this long.
const END_WAIT: Duration = Duration::from_millis(900);

/// How an attempt ended.
enum Over {
    With(Outcome),
    /// The agent does not run it; another one may.
    Elsewhere(String, String),
    /// It may run anywhere. Counts as lost unless it was never started.
    Anywhere(String, bool),
    /// Its host was short of memory; so much it had there, bytes.
    NoMemory(String, u64),
    /// Its host had no room for temporary files.
    NoRoom(String, String),
}

enum Phase {
    Waiting,
    Starting { agent: String, starts: u32 },
    Running { agent: String },
}

struct Attempt<'a> {
    inner: &'a Inner,
    number: u64,
    phase: Phase,
    spec: &'a Spec,
    need: &'a NeedMessage,
    source: &'a mut Source,
    sinks: &'a mut [Sink; 2],
    ended: Option<Ended>,
    may_run_here: bool,
    /// When the task was to end at once.
    ending: Option<Instant>,
    /// The signal that it was to end by.
    signal: i32,
    /// Where its time goes.
    times: &'a mut Times,
    /// When this try began, or had a slot.
    since: Instant,
}

/// A try that is forgotten ends.
impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let is_heard = self.ended.is_some();
        if let Phase::Starting { agent, .. } | Phase::Running { agent } = &self.phase {
            if !is_heard {
                self.inner.say_to_agent(agent, self.number, agent::Body::End(true));
            }
            self.inner.has_heard(agent, self.number);
        }
        self.inner.over(self.number, !is_heard);
    }
}

pub(super) async fn see_through(
    inner: &Inner,
    task: Task,
    orders: &mut mpsc::UnboundedReceiver<Order>,
    times: &mut Times,
) -> Outcome {
    let Task { mut spec, mut need, input, output, error, may_run_here, mut may_do_with_less, expected } =
        task;
    spec.has_input = input.is_some();
    spec.merged = error.is_none();
    need.labels.push(format!("volume={}", spec.volume));
    let mut source = Source::new(input);
    // Nothing comes for the second one when both are the same.
    let error = match error.map_or_else(|| output.try_clone(), Ok) {
        Ok(error) => error,
        Err(error) => return Outcome::FarmFailed(format!("standard error: {error}")),
    };
    let mut sinks = [Sink::new(Stream::Output, output), Sink::new(Stream::Error, error)];
    let (mut lost, mut short, mut full, mut reasons) = (0, 0, 0, Vec::new());
    loop {
        let (number, news) = inner.begin(&need, expected);
        let attempt = Attempt {
            inner,
            number,
            phase: Phase::Waiting,
            spec: &spec,
            need: &need,
            source: &mut source,
            sinks: &mut sinks,
            ended: None,
            may_run_here: may_run_here && lost == 0,
            ending: None,
            signal: 0,
            times: &mut *times,
            since: Instant::now(),
        };
        match attempt.run(news, orders).await {
            Over::With(Outcome::Nowhere(_)) if may_do_with_less && need.memory > 0 => {
                (need.memory, may_do_with_less) = (0, false);
            }
            Over::With(Outcome::Nowhere(reason)) if !reasons.is_empty() => {
                reasons.dedup();
                let reasons = format!("{reason}; {}", reasons.join("; "));
                return if may_run_here && lost == 0 {
                    Outcome::Nowhere(reasons)
                } else {
                    Outcome::FarmFailed(reasons)
                };
            }
            Over::With(Outcome::Nowhere(reason)) if !may_run_here || lost > 0 => {
                return Outcome::FarmFailed(reason);
            }
            Over::With(outcome) => return outcome,
            Over::Elsewhere(agent, reason) => {
                tracing::info!("not at {agent}: {reason}");
                need.not.push(agent);
                reasons.push(reason);
            }
            Over::NoMemory(reason, had) => {
                lost += 1;
                short += 1;
                if short > SHORT_MAX {
                    return Outcome::FarmFailed(format!("started {lost} times; {reason}"));
                }
                need.memory = (need.memory.max(had) * 2).max(LITTLE_MEMORY);
                tracing::info!("once more, with {} MiB: {reason}", need.memory >> 20);
                reasons.push(reason);
                // Those that have taken it end by and by.
                tokio::time::sleep(AFTER_SHORTAGE * short).await;
            }
            Over::NoRoom(agent, reason) => {
                lost += 1;
                full += 1;
                if full > ROOM_MAX {
                    return Outcome::FarmFailed(format!("started {lost} times; {reason}"));
                }
                tracing::info!("not again at {agent}: {reason}");
                need.not.push(agent);
                reasons.push(reason);
            }
            Over::Anywhere(reason, was_started) => {
                tracing::info!("once more: {reason}");
                lost += u32::from(was_started);
                if lost > LOST_MAX {
                    return Outcome::FarmFailed(format!("started {lost} times; {reason}"));
                }
                if !was_started {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
        for sink in &mut sinks {
            sink.again().await;
        }
        if !source.again() {
            return Outcome::FarmFailed(
                "its host was lost, and it had read more input than is kept".to_owned(),
            );
        }
    }
}

impl Attempt<'_> {
    async fn run(
        mut self,
        mut news: mpsc::UnboundedReceiver<News>,
        orders: &mut mpsc::UnboundedReceiver<Order>,
    ) -> Over {
        let mut again = Reminder::every(AGAIN);
        let mut has_orders = true;
        loop {
            again.want(self.is_due());
            let [output, error] = &mut *self.sinks;
            let runs = matches!(self.phase, Phase::Running { .. }) && self.spec.has_input;
            let over = tokio::select! {
                Some(news) = news.recv() => self.hear(news),
                order = orders.recv(), if has_orders => {
                    has_orders = order.is_some();
                    order.and_then(|order| self.obey(order))
                }
                part = self.source.next(), if runs => {
                    part.into_iter().for_each(|part| self.send(part));
                    None
                }
                taken = output.written() => {
                    self.say_taken(taken);
                    None
                }
                taken = error.written() => {
                    self.say_taken(taken);
                    None
                }
                () = again.due() => self.again(),
            };
            if let Some(over) = over.or_else(|| self.outcome()) {
                return over;
            }
        }
    }

    fn agent(&self) -> Option<&str> {
        match &self.phase {
            Phase::Waiting => None,
            Phase::Starting { agent, .. } | Phase::Running { agent } => Some(agent),
        }
    }

    fn tell(&self, body: agent::Body) {
        if let Some(agent) = self.agent() {
            self.inner.say_to_agent(agent, self.number, body);
        }
    }

    fn send(&self, part: Part) {
        let Part { offset, bytes, last } = part;
        self.tell(agent::Body::Data(Data { stream: Stream::Input as i32, offset, bytes, last }));
    }

    fn say_taken(&self, taken: Option<Taken>) {
        taken.into_iter().for_each(|taken| self.tell(agent::Body::Taken(taken)));
    }

    fn hear(&mut self, news: News) -> Option<Over> {
        let (from, body) = match news {
            News::Unheard => {
                let is_first = matches!(self.phase, Phase::Starting { starts: 1, .. });
                return is_first.then(|| Over::Anywhere("its agent is gone".to_owned(), false));
            }
            News::Away => return self.given_up(),
            News::Silent => {
                return Some(Over::Anywhere("its host was not heard for too long".to_owned(), true));
            }
            News::Said(from, body) => (from, body),
        };
        match body {
            client::Body::Granted(granted) => {
                self.granted(&from, &granted);
                return None;
            }
            client::Body::Hopeless(reason) => {
                let waits = matches!(self.phase, Phase::Waiting);
                return waits.then_some(Over::With(Outcome::Nowhere(reason)));
            }
            _ if self.agent() != Some(&from) => return None,
            _ => {}
        }
        if let Phase::Starting { agent, .. } = &self.phase
            && !matches!(body, client::Body::Beat(_))
        {
            self.phase = Phase::Running { agent: agent.clone() };
        }
        match body {
            client::Body::Data(data) => {
                let part = Part { offset: data.offset, bytes: data.bytes, last: data.last };
                let taken = self.sinks[usize::from(data.stream == Stream::Error as i32)].receive(&part);
                self.say_taken(taken);
            }
            client::Body::Taken(taken) => self.source.taken(&taken),
            client::Body::Ended(ended) => {
                let reason = ended.reason.clone();
                match End::try_from(ended.end) {
                    Ok(End::Refused) => return Some(Over::Elsewhere(from, reason)),
                    Ok(End::Busy) => return Some(Over::Anywhere(reason, false)),
                    // Whoever asked for its end has it.
                    Ok(End::Lost | End::NoMemory | End::NoRoom) if self.ending.is_some() => {
                        self.ended = Some(ended);
                        return Some(Over::With(Outcome::Signalled(self.signal)));
                    }
                    Ok(End::Lost) => {
                        self.ended = Some(ended);
                        return Some(Over::Anywhere(reason, true));
                    }
                    Ok(End::NoMemory) => {
                        let had = ended.peak;
                        self.ended = Some(ended);
                        return Some(Over::NoMemory(reason, had));
                    }
                    Ok(End::NoRoom) => {
                        self.ended = Some(ended);
                        return Some(Over::NoRoom(from, reason));
                    }
                    _ => self.ended = Some(ended),
                }
            }
            client::Body::Beat(alive) => {
                if matches!(self.phase, Phase::Running { .. })
                    && self.ended.is_none()
                    && !alive.tasks.contains(&self.number)
                {
                    return Some(Over::Anywhere("its agent has ended it".to_owned(), true));
                }
            }
            client::Body::Started(_) | client::Body::Granted(_) | client::Body::Hopeless(_) => {}
        }
        None
    }

    fn granted(&mut self, agent: &str, granted: &Granted) {
        if !matches!(self.phase, Phase::Waiting) {
            return;
        }
        self.inner.placed(self.number, agent, Duration::from_millis(granted.lease) + AFTER_LEASE);
        self.times.slot += self.since.elapsed();
        self.since = Instant::now();
        self.times.host.clone_from(&granted.host);
        self.phase = Phase::Starting { agent: agent.to_owned(), starts: 1 };
        self.start(agent, granted.beat);
    }

    fn start(&self, agent: &str, beat: u64) {
        let start = Start {
            spec: Some(self.spec.clone()),
            build: Some(self.inner.build()),
            need: Some(self.need.clone()),
            beat,
        };
        let bytes = Bytes::from(start.encode_to_vec());
        let count = bytes.len().div_ceil(START_PART);
        for at in 0..count {
            let part = bytes.slice(at * START_PART..bytes.len().min((at + 1) * START_PART));
            let part = StartPart { at: at as u32, count: count as u32, bytes: part };
            let body = agent::Body::Start(part);
            if at + 1 == count {
                self.inner.say_start(agent, self.number, body);
            } else {
                self.inner.say_to_agent(agent, self.number, body);
            }
        }
    }

    fn obey(&mut self, order: Order) -> Option<Over> {
        let ends = |signal| {
            [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT, libc::SIGKILL].contains(&signal)
        };
        match (order, &self.phase) {
            (Order::Signal(signal), Phase::Waiting) => {
                ends(signal).then_some(Over::With(Outcome::Signalled(signal)))
            }
            (Order::End, Phase::Waiting) => Some(Over::With(Outcome::Signalled(libc::SIGKILL))),
            (Order::Signal(signal), _) => {
                self.tell(agent::Body::Signal(signal));
                None
            }
            (Order::End, _) => {
                self.signal = libc::SIGKILL;
                self.ending.get_or_insert_with(Instant::now);
                self.tell(agent::Body::End(true));
                None
            }
        }
    }

    /// The farm is away: the task is given back if it may run here and waits.
    fn given_up(&self) -> Option<Over> {
        let may = self.may_run_here && matches!(self.phase, Phase::Waiting);
        self.inner.away().filter(|_| may).map(|reason| Over::With(Outcome::Nowhere(reason)))
    }

    /// Whether something may have to be said again.
    fn is_due(&self) -> bool {
        matches!(self.phase, Phase::Starting { .. })
            || self.ending.is_some()
            || self.source.is_under_way()
            || self.sinks.iter().any(Sink::has_reminder)
    }

    /// Says what was not answered again.
    fn again(&mut self) -> Option<Over> {
        if self.ending.is_some_and(|since| since.elapsed() > END_WAIT) {
            return Some(Over::With(Outcome::Signalled(self.signal)));
        }
        if let Phase::Starting { agent, starts } = &mut self.phase {
            *starts += 1;
            // Each is as good as the first: without a beat that was heard the agent takes it only if it has it already.
            let agent = agent.clone();
            self.start(&agent, 0);
        }
        if self.ending.is_some() {
            self.tell(agent::Body::End(true));
        }
        let parts = self.source.resend();
        parts.into_iter().for_each(|part| self.send(part));
        for at in 0..2 {
            let taken = self.sinks[at].reminder();
            self.say_taken(taken);
        }
        None
    }

    /// How it has ended, when that and all of its output is here.
    fn outcome(&mut self) -> Option<Over> {
        let ended = self.ended.as_ref()?;
        if !self.sinks[0].has_all(ended.output) || !self.sinks[1].has_all(ended.error) {
            return None;
        }
        self.times.ran = Duration::from_millis(ended.ran);
        self.times.cpu = Duration::from_millis(ended.cpu);
        self.times.peak = ended.peak;
        self.times.record.clone_from(&ended.record);
        self.times.broker = self.since.elapsed().saturating_sub(self.times.ran);
        Some(Over::With(match End::try_from(ended.end) {
            Ok(End::Signalled) => Outcome::Signalled(ended.number),
            Ok(End::NotRun) => Outcome::NotRun(ended.number, ended.reason.clone()),
            _ => Outcome::Exited(ended.number),
        }))
    }
}
