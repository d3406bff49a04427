//! Hosts that come and go with the demand: agents as jobs of Slurm.
//!
//! Pure rules ([`Rules`]) say how many jobs there are to be; [`run`] looks every two seconds at the farm and at Slurm, and does what they
//! say. It keeps nothing: which jobs are its own Slurm knows by their name, and which agent is of which job the agents say. So it may be
//! killed and started again at any time. A job goes when its agent has finished what it runs, and so has ended.

mod demand;
mod rules;
mod slurm;

use std::future::Future;
use std::time::{Duration, Instant};

pub use rules::{Decision, Job, JobAgent, Limits, Rules};
pub use slurm::{Slurm, SlurmError};

use crate::broker::{Broker, BrokerError, BrokerOptions};
use crate::dispatch::Status;
use crate::protocol::{ToAgent, agent, agent_subject};

/// How often the farm and Slurm are looked at.
const LOOK: Duration = Duration::from_secs(2);
/// By this label an agent says of which job it is.
const JOB_LABEL: &str = "slurm=";

/// The label of an agent that runs as a job of this number.
pub fn job_label(job: &str) -> String {
    format!("{JOB_LABEL}{job}")
}

/// Has as many jobs as are wanted until `stop` is there. `tells` is called with what is done.
///
/// # Errors
/// When the broker cannot be reached at the beginning.
pub async fn run(
    broker: &BrokerOptions,
    slurm: Slurm,
    limits: Limits,
    stop: impl Future<Output = ()>,
    tells: impl Fn(String),
) -> Result<(), BrokerError> {
    let broker = Broker::connect(broker, "scale", true).await?;
    let mut demand = demand::Demand::new(broker.clone());
    let mut rules = Rules::new(limits);
    let begun = Instant::now();
    let mut looks = tokio::time::interval(LOOK);
    looks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut stop = std::pin::pin!(stop);
    let mut trouble = String::new();
    loop {
        tokio::select! {
            () = &mut stop => return Ok(()),
            _ = looks.tick() => {}
            () = demand.hear() => continue,
        }
        // Without the broker, or without Slurm's answer, nothing is known: nothing is done.
        let Some(status) = demand.look().await? else { continue };
        let now_ms = begun.elapsed().as_millis() as u64;
        let done = match slurm.jobs().await {
            Ok(jobs) => {
                let jobs = with_agents(jobs, &status);
                let decision = rules.decide(now_ms, demand.waiting_slots(&status), &jobs);
                act(&broker, &slurm, &mut rules, decision, &tells).await
            }
            Err(error) => Err(error),
        };
        let said = done.err().map(|error| error.to_string()).unwrap_or_default();
        if said != trouble && !said.is_empty() {
            tells(said.clone());
        }
        trouble = said;
    }
}

/// The jobs, each with its agents.
fn with_agents(jobs: Vec<u64>, status: &Status) -> Vec<Job> {
    let of = |id: u64| {
        let label = job_label(&id.to_string());
        let its = status.hosts.iter().filter(|host| host.labels.contains(&label));
        let agents = its.map(|host| JobAgent {
            id: host.agent.clone(),
            slots: host.slots,
            busy: host.busy,
            dispatches: host.dispatches,
            draining: host.draining,
        });
        Job { id, agents: agents.collect() }
    };
    jobs.into_iter().map(of).collect()
}

async fn act(
    broker: &Broker,
    slurm: &Slurm,
    rules: &mut Rules,
    decision: Decision,
    tells: &impl Fn(String),
) -> Result<(), SlurmError> {
    for agent in &decision.drain {
        let body = Some(agent::Body::Drain(true));
        broker.say(agent_subject(agent), &ToAgent { body, ..ToAgent::default() });
        tells(format!("{agent} is not needed: it finishes what it runs, and goes"));
    }
    if !decision.cancel.is_empty() {
        rules.cancelled(&decision.cancel);
        slurm.cancel(&decision.cancel).await?;
        tells(format!("cancelled before they began: {:?}", decision.cancel));
    }
    for _ in 0..decision.submit {
        let job = slurm.submit().await?;
        rules.submitted(job);
        tells(format!("submitted job {job}"));
    }
    Ok(())
}
