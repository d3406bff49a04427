//! What the farm wants: as the agent that gives slots tells it; without any agent as submitters say it, who then wait for hosts to come.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use async_nats::Subscriber;
use futures::StreamExt;
use prost::Message;

use crate::broker::{Broker, BrokerError};
use crate::dispatch::Status;
use crate::protocol::{DISPATCH, STATUS, ToDispatcher, dispatch};

/// A submitter that was not heard for so long wants nothing.
const SILENCE: Duration = Duration::from_secs(5);

pub(super) struct Demand {
    broker: Broker,
    /// While nobody gives slots: what submitters say.
    requests: Option<Subscriber>,
    /// Slots that each of them waits for.
    wanted: BTreeMap<String, (Instant, u64)>,
}

impl Demand {
    pub(super) fn new(broker: Broker) -> Demand {
        Demand { broker, requests: None, wanted: BTreeMap::new() }
    }

    /// Hears one message of a submitter. Waits for ever while an agent hears them.
    pub(super) async fn hear(&mut self) {
        let Some(requests) = &mut self.requests else { return std::future::pending().await };
        let Some(mail) = requests.next().await else {
            self.requests = None;
            return;
        };
        // Each says all that it wants twice a second.
        if let Ok(ToDispatcher { body: Some(dispatch::Body::Beat(beat)) }) =
            ToDispatcher::decode(mail.payload)
        {
            let waits = beat.tasks.iter().filter(|task| task.agent.is_empty());
            let slots =
                waits.map(|task| task.need.as_ref().map_or(1, |need| u64::from(need.cores.max(1)))).sum();
            if beat.goes {
                self.wanted.remove(&beat.client);
            } else {
                self.wanted.insert(beat.client, (Instant::now(), slots));
            }
        }
    }

    /// The farm's state, without hosts when there are none; nothing while the broker is away.
    ///
    /// # Errors
    /// When the connection has ended for good.
    pub(super) async fn look(&mut self) -> Result<Option<Status>, BrokerError> {
        let answer = self.broker.ask(STATUS).await.and_then(|bytes| String::decode(bytes).ok());
        if let Some(status) = answer.and_then(|json| serde_json::from_str(&json).ok()) {
            self.requests = None;
            self.wanted.clear();
            return Ok(Some(status));
        }
        if !self.broker.is_connected() {
            return Ok(None);
        }
        if self.requests.is_none() {
            self.requests = Some(self.broker.hear(DISPATCH).await?);
        }
        self.wanted.retain(|_, (heard, _)| heard.elapsed() < SILENCE);
        Ok(Some(Status::default()))
    }

    /// Slots that tasks wait for.
    pub(super) fn waiting_slots(&self, status: &Status) -> u64 {
        let there: u64 = status.builds.iter().map(|build| build.waiting_slots).sum();
        there + self.wanted.values().map(|(_, slots)| slots).sum::<u64>()
    }
}
