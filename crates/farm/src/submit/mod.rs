//! Submitters: they have tasks, say what these need, and see them through, whatever becomes of agents and brokers meanwhile.
//!
//! A submitter alone decides about its tasks. It has one started again only when the agent that had it has said that it does
//! not run there, or must have ended it: an agent ends tasks whose submitter it does not hear for its lease, counted from when
//! it sent the last word that the submitter answered. The submitter counts from when that word came, which is later.

mod attempt;
mod here;
mod spec;
mod streams;
mod submitter;

use std::fs::File;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, setrlimit};

pub use here::{Slot, Slots};
pub(crate) use here::{own_folder, own_folder_in};
pub use spec::{IN_TASK, build_name, environment, spec, umask, user_name, without_job_server};
pub use submitter::Submitter;

use crate::protocol::{NeedMessage, Record, Spec};

/// A task.
#[derive(Debug)]
pub struct Task {
    /// What runs, where.
    pub spec: Spec,
    /// What it needs of a host.
    pub need: NeedMessage,
    /// Standard input; none where there is nothing to read.
    pub input: Option<File>,
    /// Standard output.
    pub output: File,
    /// Standard error; none where it is the same as standard output.
    pub error: Option<File>,
    /// When the farm is away it is given back instead of waited for.
    pub may_run_here: bool,
    /// Its memory was learnt, not asked for: it runs without where nobody has so much.
    pub may_do_with_less: bool,
    /// How long it is expected to take; zero when that is not known. Of a build's tasks the longest go first.
    pub expected: Duration,
}

impl Task {
    /// A task on these standard streams: input, output and error.
    pub fn on(spec: Spec, need: NeedMessage, [input, output, error]: [File; 3], may_run_here: bool) -> Task {
        let is_merged = is_one_stream(&output, &error)
            && !output.metadata().is_ok_and(|found| found.file_type().is_socket());
        Task {
            spec,
            need,
            input: (!is_null(&input)).then_some(input),
            output,
            error: (!is_merged).then_some(error),
            may_run_here,
            may_do_with_less: false,
            expected: Duration::ZERO,
        }
    }
}

/// Why a task does not run on the farm that is to run in this folder.
pub fn not_on_a_volume(directory: &Path) -> String {
    format!("{} is not on a mounted volume", directory.display())
}

/// What is said when the farm has failed, for this reason.
pub fn farm_failed(reason: &str) -> String {
    format!("the farm has failed, not the command: {reason}")
}

/// Whether nothing can be read from it.
fn is_null(file: &File) -> bool {
    let null = std::fs::metadata("/dev/null").map(|null| null.rdev());
    file.metadata()
        .is_ok_and(|meta| meta.file_type().is_char_device() && null.is_ok_and(|null| null == meta.rdev()))
}

/// Ends this process by a signal, as what it stands for has ended. A core of this process would be of no use to anybody. Returns if the
/// signal does not end it.
pub(crate) fn end_by(signal: i32) {
    let none = Rlimit { current: Some(0), maximum: Some(0) };
    let _ = setrlimit(Resource::Core, none);
    hayloft_process::reset_signals();
    let _ = hayloft_process::kill(std::process::id() as i32, signal);
    std::thread::sleep(Duration::from_millis(100));
}

/// Whether two descriptors are one and the same stream, such that the order of what is written to them is seen.
pub fn is_one_stream(a: &File, b: &File) -> bool {
    let (Ok(a), Ok(b)) = (a.metadata(), b.metadata()) else { return false };
    (a.dev(), a.ino(), a.rdev()) == (b.dev(), b.ino(), b.rdev())
}

/// Where the time of a task went, and what is known of it otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Times {
    /// From its submission to its end.
    pub whole: Duration,
    /// Until it had a slot, all tries together.
    pub slot: Duration,
    /// From there to its end as it was heard here, less what it ran: messages, and what its host takes to begin and to end it.
    pub broker: Duration,
    /// What it ran on its host.
    pub ran: Duration,
    /// Processor time of that.
    pub cpu: Duration,
    /// Most memory that any of its processes had resident there, bytes.
    pub peak: u64,
    /// Its last host.
    pub host: String,
    /// What it has opened there, if that was to be recorded.
    pub record: Option<Record>,
}

impl Times {
    /// Tries that came to nothing.
    pub fn lost(&self) -> Duration {
        self.whole.saturating_sub(self.slot + self.broker + self.ran)
    }

    /// What it ran without a processor: it waited for files, for one of its processes, or for others on that host.
    pub fn waited(&self) -> Duration {
        self.ran.saturating_sub(self.cpu)
    }
}

/// What is asked of a task that waits or runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// A signal for its process group. Before it runs, a signal ends it.
    Signal(i32),
    /// All of it ends now.
    End,
}

/// What has become of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It has exited with this code.
    Exited(i32),
    /// This signal has ended it.
    Signalled(i32),
    /// It could not be run, there or elsewhere: this exit code, for this reason.
    NotRun(i32, String),
    /// The farm has failed, for this reason; the task itself may be right.
    FarmFailed(String),
    /// It was not started, for this reason, and may run here.
    Nowhere(String),
}
