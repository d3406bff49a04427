//! The agent among the others: beats, who dispatches, and the messages of all of them.
//!
//! One agent dispatches, and says so with each beat. When nobody does for a while all say that they are there, and the oldest takes
//! over: of many agents that have one who dispatches none hears the others. Two may dispatch for a moment, when a broker's messages are
//! late: a host is then given more tasks than it has slots, starts as many as it has, and the rest is given anew. The younger gives up.

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use async_nats::{Message as Mail, Subscriber};
use futures::StreamExt;
use hayloft_schedule::Config;
use prost::Message;
use tokio::sync::mpsc;

use super::ending::Ending;
use super::host::HostTasks;
use super::mounts::Mounts;
use super::{AgentConfig, AgentError};
use crate::broker::Broker;
use crate::dispatch::{Dispatch, Say};
use crate::execution::{Event, Spawner};
use crate::protocol::{
    AGENTS, AgentBeat, AgentSeen, Alive, BEAT, BEGUN, DISPATCH, SEEN, SILENCE, STATUS, ToAgent, ToClient,
    ToDispatcher, agent, agent_subject, client, client_subject, dispatch, new_id, unheard_subject,
};

/// How often leases are looked at.
const TICK: Duration = Duration::from_millis(100);
/// How often the host's mounts are looked at, in beats.
const MOUNTS_BEATS: u64 = 8;

/// So long nobody is heard to dispatch before all say that they are there, and so long again until the oldest takes over.
const NOBODY: Duration = BEAT.saturating_mul(2);

struct Office {
    dispatch: Dispatch,
    agents: Subscriber,
    requests: Subscriber,
    status: Subscriber,
}

struct Agent {
    config: AgentConfig,
    tasks: HostTasks,
    mounts: Mounts,
    broker: Broker,
    begun: Instant,
    started: u64,
    beat: u64,
    labels: Vec<String>,
    /// Other agents that say that they are there: when each was started, and heard.
    others: BTreeMap<String, (u64, Instant)>,
    /// When another one was heard that dispatches.
    dispatcher: Option<(String, Instant)>,
    /// Since when nobody dispatches.
    nobody_since: Option<Instant>,
    office: Option<Office>,
    ending: Ending,
}

/// Runs an agent until `stop` says so, as often as a signal comes, and nothing runs any more. `ready` is called when it has the broker.
///
/// # Errors
/// See [`AgentError`].
pub async fn run(
    mut config: AgentConfig,
    mut stop: mpsc::UnboundedReceiver<()>,
    ready: impl FnOnce(),
) -> Result<(), AgentError> {
    let command = std::mem::replace(&mut config.spawner, std::process::Command::new("false"));
    let (spawner, events) = Spawner::begin(command).await.map_err(AgentError::Spawner)?;
    if !spawner.namespaces {
        tracing::info!(
            "without root: tasks get no namespaces, and run where this host has the volume mounted"
        );
    }
    let (to_ended, mut ended) = mpsc::unbounded_channel::<Option<Event>>();
    let failed = to_ended.clone();
    tokio::spawn(async move {
        while let Some(event) = events.next().await {
            if to_ended.send(Some(event)).is_err() {
                break;
            }
        }
        let _ = to_ended.send(None);
    });
    let id = new_id(&config.host);
    let broker = Broker::connect(&config.broker, &format!("agent {}", config.host), true).await?;
    let mut seen = broker.hear(SEEN).await?;
    let mut begun = broker.hear(BEGUN).await?;
    let mut own = broker.hear(agent_subject(&id)).await?;
    let mut unheard = broker.hear(unheard_subject(&id, "*")).await?;
    let started = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
    let tasks = HostTasks::new(id, &config, broker.clone(), spawner, failed);
    let (mounts, mut mounts_say) = Mounts::new(config.mounts.clone());
    let mut agent = Agent {
        config,
        tasks,
        mounts,
        broker,
        begun: Instant::now(),
        started,
        beat: 0,
        labels: Vec::new(),
        others: BTreeMap::new(),
        dispatcher: None,
        nobody_since: None,
        office: None,
        ending: Ending::default(),
    };
    agent.mounts.first(&mut mounts_say).await;
    agent.know_mounts();
    let mut beats = tokio::time::interval(BEAT);
    beats.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut ticks = tokio::time::interval(TICK);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut ready = Some(ready);
    loop {
        tokio::select! {
            _ = ticks.tick() => {
                agent.tasks.enforce();
                if ready.is_some() && agent.broker.is_connected() && let Some(ready) = ready.take() {
                    // Nobody dispatches yet in a farm that begins with this agent.
                    let is_first = agent.broker.ask(STATUS).await.is_none();
                    if is_first {
                        agent.take_office().await?;
                    }
                    ready();
                }
                for event in agent.ending.released() {
                    agent.over(event);
                }
                if agent.ending.is_time() {
                    agent.tasks.end_all();
                }
                if agent.ending.is_over(agent.tasks.is_idle(), agent.tasks.is_done()) {
                    return agent.leave().await;
                }
            }
            _ = beats.tick() => agent.beat().await?,
            Some(mail) = seen.next() => agent.hear_seen(&mail),
            Some(_) = begun.next() => agent.beat().await?,
            Some(mail) = own.next() => {
                match ToAgent::decode(mail.payload) {
                    Ok(ToAgent { body: Some(agent::Body::Drain(_)), .. }) => agent.drain().await?,
                    Ok(message) => agent.tasks.receive(message),
                    Err(_) => {}
                }
            }
            Some(mail) = unheard.next() => {
                agent.tasks.unheard(mail.subject.as_str().rsplit('.').next().unwrap_or_default());
            }
            Some(answer) = mounts_say.recv() => {
                agent.mounts.hear(answer);
                agent.know_mounts();
            }
            event = ended.recv() => match event {
                Some(Some(event)) => agent.ended(event),
                _ if agent.ending.has_begun() => return agent.leave().await,
                _ => return Err(AgentError::SpawnerEnded),
            },
            (mail, from) = next(agent.office.as_mut()) => match from {
                From::Agent => agent.hear_agent(mail),
                From::Submitter => agent.hear_request(&mail),
                From::Asker => agent.tell_status(&mail),
            },
            Some(()) = stop.recv() => {
                agent.drain().await?;
                if agent.ending.signal(agent.config.grace) {
                    agent.tasks.end_all();
                }
            }
        }
        agent.schedule();
    }
}

/// Of whom a message for the dispatcher is.
enum From {
    Agent,
    Submitter,
    Asker,
}

/// The next message for the dispatcher, if this agent dispatches.
async fn next(office: Option<&mut Office>) -> (Mail, From) {
    if let Some(office) = office {
        tokio::select! {
            Some(mail) = office.requests.next() => return (mail, From::Submitter),
            Some(mail) = office.agents.next() => return (mail, From::Agent),
            Some(mail) = office.status.next() => return (mail, From::Asker),
            else => {}
        }
    }
    std::future::pending().await
}

impl Agent {
    fn now_ms(&self) -> u64 {
        self.begun.elapsed().as_millis() as u64
    }

    fn know_mounts(&mut self) {
        self.tasks.mounts = self.mounts.known().cloned().collect();
        let mut volumes: Vec<String> =
            self.tasks.mounts.iter().map(|mount| format!("volume={}", mount.volume)).collect();
        volumes.sort();
        volumes.dedup();
        self.labels = self.config.labels.iter().cloned().chain(volumes).collect();
    }

    async fn beat(&mut self) -> Result<(), AgentError> {
        self.beat += 1;
        if self.beat.is_multiple_of(MOUNTS_BEATS) {
            self.mounts.look();
            self.know_mounts();
        }
        self.tasks.beats(self.beat).map_err(|_| AgentError::SpawnerEnded)?;
        let beat = AgentBeat {
            agent: self.tasks.id.clone(),
            host: self.config.host.clone(),
            beat: self.beat,
            started: self.started,
            slots: self.tasks.slots,
            memory: self.tasks.memory,
            labels: self.labels.clone(),
            running: self.tasks.running(),
            draining: self.ending.has_begun(),
            dispatches: self.office.is_some(),
            lease: self.config.lease.as_millis() as u64,
            goes: false,
        };
        self.broker.say(AGENTS, &beat);
        for (client, tasks) in self.tasks.submitters() {
            let body = Some(client::Body::Beat(Alive { beat: self.beat, tasks }));
            let message = ToClient { task: 0, agent: self.tasks.id.clone(), body };
            let unheard = unheard_subject(&self.tasks.id, client);
            self.broker.say_to_somebody(client_subject(client, "m"), unheard, &message);
        }
        self.elect().await?;
        if self.office.is_some() || self.nobody_since.is_some() || self.ending.has_begun() {
            self.broker.say(SEEN, &self.seen());
        }
        let now_ms = self.now_ms();
        if let Some(office) = &mut self.office {
            let say = office.dispatch.tick(now_ms);
            self.tell(say);
        }
        Ok(())
    }

    fn seen(&self) -> AgentSeen {
        AgentSeen {
            agent: self.tasks.id.clone(),
            started: self.started,
            draining: self.ending.has_begun(),
            dispatches: self.office.is_some(),
        }
    }

    /// Whoever dispatches goes on, but for two. Without one the oldest that is heard does; without the broker nobody is heard.
    async fn elect(&mut self) -> Result<(), AgentError> {
        self.others.retain(|_, (_, heard)| heard.elapsed() < SILENCE);
        let is_heard = self.dispatcher.as_ref().is_some_and(|(_, heard)| heard.elapsed() < NOBODY);
        if is_heard || self.office.is_some() {
            self.nobody_since = None;
        } else {
            self.nobody_since.get_or_insert_with(Instant::now);
        }
        let me = (self.started, self.tasks.id.as_str());
        let is_oldest = self.others.iter().all(|(id, (started, _))| (*started, id.as_str()) > me);
        let has_listened = self.begun.elapsed() > SILENCE + BEAT
            && self.nobody_since.is_some_and(|since| since.elapsed() >= NOBODY);
        if self.office.is_some() && (self.ending.has_begun() || !is_oldest) {
            tracing::info!("another agent gives slots to tasks now");
            self.office = None;
        } else if is_oldest && has_listened && !self.ending.has_begun() && self.broker.is_connected() {
            self.take_office().await?;
        }
        Ok(())
    }

    async fn take_office(&mut self) -> Result<(), AgentError> {
        tracing::info!("this agent gives slots to tasks from now on");
        let agents = self.broker.hear(AGENTS).await?;
        let requests = self.broker.hear(DISPATCH).await?;
        let status = self.broker.hear(STATUS).await?;
        let dispatch = Dispatch::new(Config::default(), self.now_ms());
        self.office = Some(Office { dispatch, agents, requests, status });
        self.nobody_since = None;
        self.broker.flush().await;
        self.broker.say(BEGUN, &());
        Ok(())
    }

    fn hear_seen(&mut self, mail: &Mail) {
        let Ok(seen) = AgentSeen::decode(mail.payload.clone()) else { return };
        if seen.agent == self.tasks.id {
            return;
        }
        if seen.draining {
            self.others.remove(&seen.agent);
            self.dispatcher.take_if(|(id, _)| *id == seen.agent);
            return;
        }
        if seen.dispatches {
            self.dispatcher = Some((seen.agent.clone(), Instant::now()));
        }
        self.others.insert(seen.agent, (seen.started, Instant::now()));
    }

    fn hear_agent(&mut self, mail: Mail) {
        let now_ms = self.now_ms();
        if let (Some(office), Ok(beat)) = (&mut self.office, AgentBeat::decode(mail.payload)) {
            office.dispatch.agent(beat, now_ms);
        }
    }

    fn hear_request(&mut self, mail: &Mail) {
        let now_ms = self.now_ms();
        let Some(office) = &mut self.office else { return };
        let Ok(request) = ToDispatcher::decode(mail.payload.clone()) else { return };
        let say = match request.body {
            Some(dispatch::Body::Beat(beat)) => office.dispatch.client(beat, true, now_ms),
            Some(dispatch::Body::Submit(beat)) => office.dispatch.client(beat, false, now_ms),
            Some(dispatch::Body::Over(key)) => {
                office.dispatch.over(&key);
                Vec::new()
            }
            None => Vec::new(),
        };
        self.tell(say);
    }

    fn schedule(&mut self) {
        let now_ms = self.now_ms();
        if let Some(office) = &mut self.office {
            let say = office.dispatch.schedule(now_ms);
            self.tell(say);
        }
    }

    fn tell(&self, all: Vec<Say>) {
        for say in all {
            let (key, agent, body) = match say {
                Say::Granted(key, agent, granted) => (key, agent, client::Body::Granted(granted)),
                Say::Hopeless(key, reason) => (key, String::new(), client::Body::Hopeless(reason)),
            };
            let message = ToClient { task: key.task, agent, body: Some(body) };
            self.broker.say(client_subject(&key.client, "m"), &message);
        }
    }

    fn tell_status(&self, mail: &Mail) {
        let now_ms = self.now_ms();
        if let (Some(office), Some(reply)) = (&self.office, &mail.reply) {
            let status = office.dispatch.status(now_ms);
            let json = serde_json::to_string(&status).unwrap_or_default();
            self.broker.say(reply.to_string(), &json);
        }
    }

    /// Takes nothing new; others are told so before anything comes back from here.
    async fn drain(&mut self) -> Result<(), AgentError> {
        if self.ending.begin() {
            self.tasks.refuse();
            self.office = None;
            self.beat().await?;
        }
        Ok(())
    }

    fn ended(&mut self, event: Event) {
        if let Some(event) = self.ending.judge(event) {
            self.over(event);
        }
    }

    fn over(&mut self, event: Event) {
        let report = event.report;
        if let Some(key) = self.tasks.ended(event.task, report) {
            let body = Some(dispatch::Body::Over(key.clone()));
            // The dispatcher within this process needs no message.
            match &mut self.office {
                Some(office) => office.dispatch.over(&key),
                None => self.broker.say(DISPATCH, &ToDispatcher { body }),
            }
        }
    }

    /// Everybody is told that nothing runs here any more.
    async fn leave(mut self) -> Result<(), AgentError> {
        self.office = None;
        // The ends of the last tasks are said by then.
        tokio::time::sleep(Duration::from_millis(50)).await;
        let beat = AgentBeat {
            agent: self.tasks.id.clone(),
            host: self.config.host.clone(),
            beat: self.beat + 1,
            goes: true,
            ..AgentBeat::default()
        };
        self.broker.say(AGENTS, &beat);
        self.broker.say(SEEN, &self.seen());
        self.broker.flush().await;
        Ok(())
    }
}
