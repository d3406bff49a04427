//! A try that runs here: its streams, and the word of its end until that is heard.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use tokio::net::unix::pipe;
use tokio::sync::mpsc;

use super::shortage::Short;
use crate::broker::Broker;
use crate::execution::Report;
use crate::protocol::{
    CHUNK, Data, End, Ended, Incoming, Outgoing, Part, Record, Reminder, Stream, Taken, TaskKey, ToClient,
    client, client_subject,
};

/// How often what was not heard is said again.
const AGAIN: Duration = Duration::from_millis(500);
/// A task that says nothing for so long is said to run; with input for it at once, which then comes.
const RUNS: Duration = Duration::from_millis(100);
/// How much input is taken before that is said.
const SAY_TAKEN: u64 = 64 << 10;

/// What a task's thread of control is told.
#[derive(Debug)]
pub(super) enum Told {
    /// Standard input.
    Data(Data),
    /// Output was taken.
    Taken(Taken),
    /// Its processes have ended; without a report they were killed. What it has opened, if that is known.
    Over(Option<Report>, Option<Record>),
    /// The same of one that has failed while the host was short of something.
    Short(Report, Short),
    /// The submitter has started it again: it has not heard that it runs.
    StartedAgain,
    /// The submitter has heard of its end, or is gone.
    Forget,
}

/// The ends of a task's streams.
#[derive(Debug)]
pub(super) struct Pipes {
    pub input: Option<OwnedFd>,
    pub output: OwnedFd,
    /// Not there when it is the same as output.
    pub error: Option<OwnedFd>,
}

/// The task's ends of its streams, and ours.
pub(super) fn pipes(has_input: bool, is_merged: bool) -> io::Result<([OwnedFd; 3], Pipes)> {
    let (theirs_in, input) = if has_input {
        let (reader, writer) = io::pipe()?;
        (OwnedFd::from(reader), Some(OwnedFd::from(writer)))
    } else {
        (File::open("/dev/null")?.into(), None)
    };
    let (output, theirs_out) = io::pipe()?;
    let theirs_out = OwnedFd::from(theirs_out);
    let (error, theirs_err) = if is_merged {
        (None, theirs_out.try_clone()?)
    } else {
        let (reader, writer) = io::pipe()?;
        (Some(OwnedFd::from(reader)), OwnedFd::from(writer))
    };
    Ok(([theirs_in, theirs_out, theirs_err], Pipes { input, output: output.into(), error }))
}

struct Output {
    stream: Stream,
    pipe: Option<pipe::Receiver>,
    out: Outgoing,
}

struct Input {
    pipe: Option<pipe::Sender>,
    incoming: Incoming,
    waiting: VecDeque<Bytes>,
    said: u64,
}

struct Task {
    key: TaskKey,
    agent: String,
    broker: Broker,
    subject: String,
    outputs: [Output; 2],
    input: Input,
    over: Option<Ended>,
    /// Its end was said when both streams had ended.
    is_said: bool,
    /// Something was said of it: so it runs.
    is_heard_of: Cell<bool>,
}

/// Sees a task through until its end was heard, or nobody is there to hear it.
pub(super) async fn attend(
    key: TaskKey,
    agent: String,
    broker: Broker,
    pipes: Pipes,
    mut told: mpsc::UnboundedReceiver<Told>,
) {
    let subject = client_subject(&key.client, "m");
    let reader = |fd: Option<OwnedFd>| fd.and_then(|fd| pipe::Receiver::from_owned_fd(fd).ok());
    let output = |stream, fd| Output { stream, pipe: reader(fd), out: Outgoing::default() };
    let input = pipes.input.and_then(|fd| pipe::Sender::from_owned_fd(fd).ok());
    let mut task = Task {
        key,
        agent,
        broker,
        subject,
        outputs: [output(Stream::Output, Some(pipes.output)), output(Stream::Error, pipes.error)],
        input: Input { pipe: input, incoming: Incoming::default(), waiting: VecDeque::new(), said: 0 },
        over: None,
        is_said: false,
        is_heard_of: Cell::new(false),
    };
    let begun = Instant::now();
    if task.input.pipe.is_some() {
        task.say(client::Body::Started(true));
    }
    let mut runs = std::pin::pin!(tokio::time::sleep(RUNS));
    let mut again = Reminder::every(AGAIN);
    loop {
        again.want(task.is_due());
        let [output, error] = &task.outputs;
        tokio::select! {
            biased;
            message = told.recv() => match message {
                Some(Told::Forget) | None => return,
                Some(Told::Over(report, record)) => {
                    task.over = Some(Ended { record, ..ended(report, begun.elapsed()) });
                }
                Some(Told::Short(report, short)) => {
                    let (end, reason) = match short {
                        Short::Memory => {
                            (End::NoMemory, "its host was short of memory: the kernel has ended processes there")
                        }
                        Short::Room => (End::NoRoom, "its host had no room for temporary files"),
                    };
                    let (end, reason) = (end as i32, reason.to_owned());
                    task.over = Some(Ended { end, reason, ..ended(Some(report), begun.elapsed()) });
                }
                Some(message) => task.told(message),
            },
            () = readable(output) => task.read(0),
            () = readable(error) => task.read(1),
            () = writable(&task.input) => task.write(),
            () = again.due() => task.again(),
            () = &mut runs, if !task.is_heard_of.get() => task.say(client::Body::Started(true)),
        }
        task.say_end(false);
    }
}

/// How a try has ended, by what its first process has said.
fn ended(report: Option<Report>, ran: Duration) -> Ended {
    let ran = ran.as_millis() as u64;
    let (cpu, peak) = report.as_ref().map_or((0, 0), |report| (report.cpu, report.peak));
    let how =
        |end, number, reason| Ended { end: end as i32, number, reason, ran, cpu, peak, ..Ended::default() };
    match report {
        None => how(End::Lost, 0, "its host has ended it".to_owned()),
        Some(report) if !report.failure.is_empty() => {
            let number = if report.errno == libc::ENOENT { 127 } else { 126 };
            how(if report.is_own { End::NotRun } else { End::Lost }, number, report.failure)
        }
        Some(report) if report.signal != 0 => how(End::Signalled, report.signal, String::new()),
        Some(report) => how(End::Exited, report.code, String::new()),
    }
}

async fn readable(output: &Output) {
    match &output.pipe {
        Some(pipe) if output.out.room() > 0 => drop(pipe.readable().await),
        _ => std::future::pending().await,
    }
}

async fn writable(input: &Input) {
    match &input.pipe {
        Some(pipe) if !input.waiting.is_empty() => drop(pipe.writable().await),
        _ => std::future::pending().await,
    }
}

impl Task {
    fn say(&self, body: client::Body) {
        self.is_heard_of.set(true);
        let message = ToClient { task: self.key.task, agent: self.agent.clone(), body: Some(body) };
        self.broker.say(self.subject.clone(), &message);
    }

    fn say_part(&self, stream: Stream, part: Part) {
        let Part { offset, bytes, last } = part;
        self.say(client::Body::Data(Data { stream: stream as i32, offset, bytes, last }));
    }

    fn told(&mut self, message: Told) {
        match message {
            Told::Data(data) => {
                let part = Part { offset: data.offset, bytes: data.bytes, last: data.last };
                match self.input.incoming.receive(&part) {
                    Some(bytes) if !bytes.is_empty() => self.input.waiting.push_back(bytes),
                    Some(_) => {}
                    None => self.say_taken(),
                }
                self.write();
            }
            Told::Taken(taken) => {
                let at = usize::from(taken.stream == Stream::Error as i32);
                self.outputs[at].out.taken(taken.offset);
                if taken.closed {
                    self.outputs[at].out.close();
                    self.outputs[at].pipe = None;
                }
            }
            Told::StartedAgain => self.say(client::Body::Started(true)),
            Told::Over(..) | Told::Short(..) | Told::Forget => {}
        }
    }

    /// Takes what a stream of the task has.
    fn read(&mut self, at: usize) {
        let output = &mut self.outputs[at];
        let Some(pipe) = &output.pipe else { return };
        let mut bytes = BytesMut::zeroed(output.out.room().min(CHUNK));
        match pipe.try_read(&mut bytes) {
            Ok(0) => output.pipe = None,
            Ok(count) => {
                bytes.truncate(count);
                let stream = output.stream;
                if let Some(part) = output.out.push(bytes.freeze()) {
                    self.say_part(stream, part);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(_) => output.pipe = None,
        }
    }

    /// Gives the task what has come for it.
    fn write(&mut self) {
        let input = &mut self.input;
        while let (Some(pipe), Some(bytes)) = (&input.pipe, input.waiting.front_mut()) {
            match pipe.try_write(bytes) {
                Ok(count) => {
                    let _ = bytes.split_to(count);
                    input.incoming.take(count);
                    if bytes.is_empty() {
                        input.waiting.pop_front();
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // Nobody reads it any more.
                Err(_) => input.pipe = None,
            }
        }
        if input.waiting.is_empty() && input.incoming.has_end() {
            input.pipe = None;
        }
        let says = input.incoming.says();
        if says >= input.said + SAY_TAKEN || (input.pipe.is_none() && input.said != u64::MAX) {
            self.say_taken();
            self.input.said = if self.input.pipe.is_none() { u64::MAX } else { says };
        }
    }

    fn say_taken(&self) {
        let taken = Taken {
            stream: Stream::Input as i32,
            offset: self.input.incoming.says(),
            closed: self.input.pipe.is_none(),
        };
        self.say(client::Body::Taken(taken));
    }

    /// Whether something may have to be said again. A task that runs and says nothing needs no timer.
    fn is_due(&self) -> bool {
        let is_under_way = self.outputs.iter().any(|output| output.out.is_under_way());
        is_under_way || self.over.is_some() || self.input.incoming.length() > 0
    }

    fn again(&mut self) {
        for at in 0..2 {
            let stream = self.outputs[at].stream;
            let parts = self.outputs[at].out.again();
            parts.into_iter().for_each(|part| self.say_part(stream, part));
        }
        if self.over.is_none() && self.input.incoming.length() > 0 {
            self.say_taken();
        }
        self.say_end(true);
    }

    /// Says how it has ended, once all that it has written was said.
    fn say_end(&mut self, again: bool) {
        let has_all = self.outputs.iter().all(|output| output.pipe.is_none());
        if let Some(over) = &self.over
            && has_all
            && (again || !self.is_said)
        {
            let length = |at: usize| self.outputs[at].out.length();
            let over = Ended { output: length(0), error: length(1), ..over.clone() };
            self.say(client::Body::Ended(over));
            self.is_said = true;
        }
    }
}
