//! Slurm's commands.

use std::ffi::OsString;
use std::process::{Command, Stdio};
use std::time::Duration;

/// A command of Slurm that takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(60);

/// Slurm, and what a job of an agent is.
#[derive(Debug, Clone)]
pub struct Slurm {
    /// By this name its jobs are told from others of the same user.
    pub name: String,
    /// Arguments of sbatch(1): options, and the script that becomes the agent.
    pub batch: Vec<OsString>,
    /// Variables of the job, for the agent: its broker, its slots.
    pub environment: Vec<(String, OsString)>,
}

/// Why a command of Slurm was of no use; it is tried again.
#[derive(Debug, thiserror::Error)]
pub enum SlurmError {
    /// It cannot be run: install Slurm's commands on this host.
    #[error("{0} cannot be run: {1}")]
    NotRun(&'static str, #[source] std::io::Error),
    /// It says this.
    #[error("{0}: {1}")]
    Failed(&'static str, String),
}

impl Slurm {
    /// Jobs of ours that wait or run.
    ///
    /// # Errors
    /// When Slurm does not say.
    pub async fn jobs(&self) -> Result<Vec<u64>, SlurmError> {
        let mut command = Command::new("squeue");
        command.args(["--me", "--noheader", "--format=%A", "--states=PENDING,CONFIGURING,RUNNING,SUSPENDED"]);
        command.arg(format!("--name={}", self.name));
        let output = said("squeue", command).await?;
        Ok(output.split_whitespace().filter_map(|id| id.parse().ok()).collect())
    }

    /// Submits a job; its number.
    ///
    /// # Errors
    /// When Slurm does not take it.
    pub async fn submit(&self) -> Result<u64, SlurmError> {
        let mut command = Command::new("sbatch");
        command.arg("--parsable").arg(format!("--job-name={}", self.name)).args(&self.batch);
        command.envs(self.environment.iter().map(|(name, value)| (name, value)));
        let output = said("sbatch", command).await?;
        // NUMBER, or NUMBER;CLUSTER.
        let number = output.trim().split(';').next().and_then(|number| number.parse().ok());
        number.ok_or_else(|| SlurmError::Failed("sbatch", format!("no job's number: {output}")))
    }

    /// Cancels jobs.
    ///
    /// # Errors
    /// When Slurm does not do it.
    pub async fn cancel(&self, jobs: &[u64]) -> Result<(), SlurmError> {
        let mut command = Command::new("scancel");
        command.args(jobs.iter().map(u64::to_string));
        said("scancel", command).await.map(drop)
    }
}

async fn said(name: &'static str, mut command: Command) -> Result<String, SlurmError> {
    let run = tokio::task::spawn_blocking(move || command.stdin(Stdio::null()).output());
    let output = match tokio::time::timeout(PATIENCE, run).await {
        Ok(Ok(output)) => output.map_err(|error| SlurmError::NotRun(name, error))?,
        _ => return Err(SlurmError::Failed(name, "no answer".to_owned())),
    };
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let error = String::from_utf8_lossy(&output.stderr);
    Err(SlurmError::Failed(name, error.trim().to_owned()))
}
