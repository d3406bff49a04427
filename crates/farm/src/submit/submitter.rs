//! The connection of a submitter: what comes for its tasks, and what it says of all of them.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::StreamExt;
use prost::Message;
use tokio::sync::{Notify, mpsc};

use super::{Order, Outcome, Task, Times, attempt};
use crate::broker::{Broker, BrokerError, BrokerOptions};
use crate::protocol::{
    BEAT, BEGUN, BuildMessage, ClientBeat, DISPATCH, NeedMessage, TaskKey, ToAgent, ToClient, ToDispatcher,
    Wanted, agent, agent_subject, client, client_subject, dispatch, new_id,
};

/// When nobody has given slots for so long the farm is taken for away. Another agent takes over sooner than that.
const AWAY: Duration = Duration::from_millis(3_500);

/// That the end of a try was heard goes along with the next message to its agent, or by itself after so long: before the agent says
/// it again.
const HEARD_WAIT: Duration = Duration::from_millis(50);
/// It goes by itself when there are so many.
const HEARD_MAX: usize = 256;

/// Something for a try.
#[derive(Debug)]
pub(super) enum News {
    /// An agent or the dispatcher has said this.
    Said(String, client::Body),
    /// The broker has: nobody has heard the start.
    Unheard,
    /// The farm is away, and was for a while.
    Away,
    /// Its agent was silent for so long that it must have ended it.
    Silent,
}

#[derive(Debug)]
struct Try {
    need: NeedMessage,
    expected_ms: u32,
    /// Where it has a slot; empty while it waits.
    agent: String,
    /// How long that agent may be silent.
    silence: Duration,
    news: mpsc::UnboundedSender<News>,
}

#[derive(Debug, Default)]
struct State {
    last: u64,
    tries: BTreeMap<u64, Try>,
    /// When agents with tries were heard last.
    heard: BTreeMap<String, Instant>,
    /// Tries whose end was heard, which their agents do not know yet.
    ended: BTreeMap<String, Vec<u64>>,
    /// Since when nobody gives slots.
    nobody_since: Option<Instant>,
    /// When the broker has said so last.
    nobody_last: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub broker: Broker,
    pub id: String,
    build: BuildMessage,
    host: String,
    state: Mutex<State>,
    wake: Notify,
    /// There are ended tries of which agents do not know that.
    has_ended: Notify,
}

/// One who has tasks, with one connection for all of them.
#[derive(Debug, Clone)]
pub struct Submitter {
    inner: Arc<Inner>,
}

impl Submitter {
    /// Connects to the broker, for tasks of this build, from this host. With `waits` it need not be there yet.
    ///
    /// # Errors
    /// When the broker cannot be reached.
    pub async fn connect(
        options: &BrokerOptions,
        build: BuildMessage,
        host: &str,
        waits: bool,
    ) -> Result<Submitter, BrokerError> {
        let broker = Broker::connect(options, &format!("build {}", build.name), waits).await?;
        let id = new_id(host);
        let mut mail = broker.hear(client_subject(&id, "*")).await?;
        let mut begun = broker.hear(BEGUN).await?;
        let host = host.to_owned();
        let (state, wake, has_ended) = (Mutex::default(), Notify::new(), Notify::new());
        let inner = Arc::new(Inner { broker, id, build, host, state, wake, has_ended });
        let (hears, beats, tells) = (Arc::clone(&inner), Arc::clone(&inner), Arc::clone(&inner));
        tokio::spawn(async move {
            loop {
                tells.has_ended.notified().await;
                tokio::time::sleep(HEARD_WAIT).await;
                tells.say_all_ended();
            }
        });
        tokio::spawn(async move {
            while let Some(mail) = mail.next().await {
                let about = mail.subject.as_str().rsplit('.').next().unwrap_or_default().to_owned();
                if mail.status.is_some() {
                    hears.unheard(&about);
                } else if let Ok(message) = ToClient::decode(mail.payload) {
                    hears.receive(message);
                }
            }
        });
        tokio::spawn(async move {
            let mut timer = tokio::time::interval(BEAT);
            timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
            loop {
                tokio::select! {
                    _ = timer.tick() => {}
                    Some(_) = begun.next() => {}
                    () = beats.wake.notified() => {}
                }
                beats.beat();
            }
        });
        Ok(Submitter { inner })
    }

    /// Sees a task through: what has become of it, and where its time went.
    pub async fn run(&self, task: Task, orders: &mut mpsc::UnboundedReceiver<Order>) -> (Outcome, Times) {
        let begun = Instant::now();
        let mut times = Times::default();
        let outcome = attempt::see_through(&self.inner, task, orders, &mut times).await;
        times.whole = begun.elapsed();
        (outcome, times)
    }

    /// The build that its tasks belong to.
    pub fn build(&self) -> BuildMessage {
        self.inner.build()
    }

    /// Its connection.
    pub fn broker(&self) -> &Broker {
        &self.inner.broker
    }

    /// Why the farm is away, if it is, and was for a while.
    pub fn away(&self) -> Option<String> {
        self.inner.away()
    }

    /// Everybody forgets this submitter; what still runs of it ends.
    pub async fn leave(&self) {
        self.inner.say_all_ended();
        let beat = ClientBeat { goes: true, ..self.inner.client_beat(Vec::new()) };
        let body = Some(dispatch::Body::Beat(beat));
        self.inner.broker.say(DISPATCH, &ToDispatcher { body });
        self.inner.broker.flush().await;
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn client_beat(&self, tasks: Vec<Wanted>) -> ClientBeat {
        ClientBeat {
            client: self.id.clone(),
            build: Some(self.build.clone()),
            tasks,
            goes: false,
            host: self.host.clone(),
        }
    }

    pub(super) fn build(&self) -> BuildMessage {
        self.build.clone()
    }

    /// A new try: its number, and what comes for it.
    pub(super) fn begin(
        &self,
        need: &NeedMessage,
        expected: Duration,
    ) -> (u64, mpsc::UnboundedReceiver<News>) {
        let (news, hears) = mpsc::unbounded_channel();
        let expected_ms = u32::try_from(expected.as_millis()).unwrap_or(u32::MAX);
        let mut state = self.state();
        state.last += 1;
        let number = state.last;
        let one =
            Try { need: need.clone(), expected_ms, agent: String::new(), silence: Duration::ZERO, news };
        state.tries.insert(number, one);
        drop(state);
        let wanted = Wanted { task: number, need: Some(need.clone()), agent: String::new(), expected_ms };
        let body = Some(dispatch::Body::Submit(self.client_beat(vec![wanted])));
        let reply = client_subject(&self.id, "d");
        self.broker.say_to_somebody(DISPATCH, reply, &ToDispatcher { body });
        (number, hears)
    }

    /// A try has a slot there; it is lost when that agent is silent for so long.
    pub(super) fn placed(&self, number: u64, agent: &str, silence: Duration) {
        let mut state = self.state();
        state.heard.insert(agent.to_owned(), Instant::now());
        if let Some(one) = state.tries.get_mut(&number) {
            one.agent = agent.to_owned();
            one.silence = silence;
        }
    }

    /// A try is over. Who gives slots is told unless the agent does it.
    pub(super) fn over(&self, number: u64, tells: bool) {
        let mut state = self.state();
        state.tries.remove(&number);
        let used: Vec<String> = state.tries.values().map(|one| one.agent.clone()).collect();
        state.heard.retain(|agent, _| used.contains(agent));
        drop(state);
        if tells {
            self.say_over(number);
        }
    }

    fn say_over(&self, number: u64) {
        let key = TaskKey { client: self.id.clone(), task: number };
        self.broker.say(DISPATCH, &ToDispatcher { body: Some(dispatch::Body::Over(key)) });
    }

    fn to_agent(&self, agent: &str, number: u64, body: Option<agent::Body>) -> ToAgent {
        let heard = self.state().ended.remove(agent).unwrap_or_default();
        ToAgent { client: self.id.clone(), task: number, body, heard }
    }

    pub(super) fn say_to_agent(&self, agent: &str, number: u64, body: agent::Body) {
        self.broker.say(agent_subject(agent), &self.to_agent(agent, number, Some(body)));
    }

    /// The end of a try was heard.
    pub(super) fn has_heard(&self, agent: &str, number: u64) {
        let mut state = self.state();
        let ended = state.ended.entry(agent.to_owned()).or_default();
        ended.push(number);
        let are_many = ended.len() >= HEARD_MAX;
        drop(state);
        if are_many {
            self.say_ended(agent);
        } else {
            self.has_ended.notify_one();
        }
    }

    fn say_ended(&self, agent: &str) {
        self.broker.say(agent_subject(agent), &self.to_agent(agent, 0, None));
    }

    fn say_all_ended(&self) {
        let agents: Vec<String> = self.state().ended.keys().cloned().collect();
        agents.iter().for_each(|agent| self.say_ended(agent));
    }

    /// The same; the try is told if there is no such agent.
    pub(super) fn say_start(&self, agent: &str, number: u64, body: agent::Body) {
        let reply = client_subject(&self.id, &number.to_string());
        self.broker.say_to_somebody(agent_subject(agent), reply, &self.to_agent(agent, number, Some(body)));
    }

    pub(super) fn away(&self) -> Option<String> {
        let since = self.state().nobody_since?;
        (since.elapsed() > AWAY).then(|| match self.broker.is_connected() {
            true => "no agent is there".to_owned(),
            false => "the broker is away".to_owned(),
        })
    }

    fn beat(&self) {
        let mut state = self.state();
        let is_nobody =
            !self.broker.is_connected() || state.nobody_last.is_some_and(|at| at.elapsed() < BEAT * 3);
        match (is_nobody, state.nobody_since) {
            (false, _) => state.nobody_since = None,
            (true, None) => state.nobody_since = Some(Instant::now()),
            (true, Some(_)) => {}
        }
        let wanted = |(task, one): (&u64, &Try)| Wanted {
            task: *task,
            need: Some(one.need.clone()),
            agent: one.agent.clone(),
            expected_ms: one.expected_ms,
        };
        let tasks = state.tries.iter().map(wanted).collect();
        let is_away = state.nobody_since.is_some_and(|since| since.elapsed() > AWAY);
        for one in state.tries.values() {
            let is_silent = || state.heard.get(&one.agent).is_none_or(|heard| heard.elapsed() > one.silence);
            match one.agent.is_empty() {
                true if is_away => drop(one.news.send(News::Away)),
                false if is_silent() => drop(one.news.send(News::Silent)),
                _ => {}
            }
        }
        drop(state);
        let body = Some(dispatch::Body::Beat(self.client_beat(tasks)));
        let reply = client_subject(&self.id, "d");
        self.broker.say_to_somebody(DISPATCH, reply, &ToDispatcher { body });
    }

    /// The broker says that nobody has heard something.
    fn unheard(&self, about: &str) {
        let mut state = self.state();
        if about == "d" {
            let now = Instant::now();
            state.nobody_last = Some(now);
            state.nobody_since.get_or_insert(now);
        } else if let Some(one) = about.parse().ok().and_then(|number: u64| state.tries.get(&number)) {
            let _ = one.news.send(News::Unheard);
        }
    }

    fn receive(&self, message: ToClient) {
        let Some(body) = message.body else { return };
        let mut state = self.state();
        if let client::Body::Beat(alive) = &body {
            state.heard.insert(message.agent.clone(), Instant::now());
            // What it runs for us and we do not know, it is to end. What we think it runs and it does not know is told so.
            let strays: Vec<u64> =
                alive.tasks.iter().filter(|task| !state.tries.contains_key(task)).copied().collect();
            let its = state.tries.iter().filter(|(_, one)| one.agent == message.agent);
            for one in its.filter(|(number, _)| !alive.tasks.contains(number)) {
                let _ = one.1.news.send(News::Said(message.agent.clone(), body.clone()));
            }
            drop(state);
            self.say_to_agent(&message.agent, 0, agent::Body::Echo(alive.beat));
            for stray in strays {
                self.say_to_agent(&message.agent, stray, agent::Body::End(true));
                self.has_heard(&message.agent, stray);
            }
            return;
        }
        match state.tries.get(&message.task) {
            Some(one) => drop(one.news.send(News::Said(message.agent, body))),
            None => {
                drop(state);
                match body {
                    client::Body::Granted(_) => self.say_over(message.task),
                    client::Body::Ended(_) => self.has_heard(&message.agent, message.task),
                    _ => {}
                }
            }
        }
    }
}
