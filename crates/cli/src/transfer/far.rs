//! A server that is asked where files of its snapshots are cut, and for parts of them.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

use hayloft_transfer::{Far, Group, Part, Tag};
use hayloft_wire::client_message::Body as Ask;
use hayloft_wire::server_message::Body as Answer;
use hayloft_wire::{CutFile, CutGroup, FrameOf, ReadParts, Version};

use crate::exit::{Exit, exit_of};
use crate::server::admin::Admin;

/// A snapshot of a server.
pub(super) struct FarSnapshot {
    server: String,
    of: Version,
    /// Connections that nobody uses now.
    idle: Mutex<Vec<Admin>>,
    /// It is of a version that does not know these requests.
    cannot: AtomicBool,
    received: AtomicU64,
}

impl FarSnapshot {
    pub(super) fn new(server: &str, of: &Version) -> FarSnapshot {
        FarSnapshot {
            server: server.to_owned(),
            of: of.clone(),
            idle: Mutex::default(),
            cannot: AtomicBool::new(false),
            received: AtomicU64::new(0),
        }
    }

    /// Bytes of what was answered.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Relaxed)
    }

    /// `None`: it knows no such request, or refuses it.
    fn ask(&self, body: Ask) -> io::Result<Option<Answer>> {
        if self.cannot.load(Relaxed) {
            return Ok(None);
        }
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let free = idle().pop();
        let asked = free.map_or_else(|| Admin::connect(&self.server), Ok).and_then(|mut admin| {
            let answer = admin.ask(body);
            idle().push(admin);
            answer
        });
        match asked {
            Ok(answer) => {
                let bytes = match &answer {
                    Answer::Cuts(cuts) => prost::Message::encoded_len(cuts),
                    Answer::FileParts(parts) => prost::Message::encoded_len(parts),
                    _ => 0,
                };
                self.received.fetch_add(bytes as u64, Relaxed);
                Ok(Some(answer))
            }
            Err(error) if exit_of(&error) == Exit::Usage => {
                self.cannot.store(true, Relaxed);
                Ok(None)
            }
            Err(error) => Err(io::Error::other(error.to_string())),
        }
    }
}

/// What it says of a group; `None`: what nobody would say.
fn group(told: &CutGroup) -> Option<Group> {
    if !told.tag.is_empty() {
        return Some(Group::Known(Tag::try_from(told.tag.as_ref()).ok()?));
    }
    let (names, rest) = told.names.as_chunks::<32>();
    let is_even = rest.is_empty() && names.len() == told.lengths.len();
    is_even.then(|| Group::New(names.iter().copied().zip(told.lengths.iter().copied()).collect()))
}

impl Far for FarSnapshot {
    fn cut(&self, path: &[u8], begin: u64, known: &[Tag]) -> io::Result<Option<Part>> {
        let (of, path) = (Some(self.of.clone()), path.to_vec().into());
        let ask = CutFile { of, path, begin, known: known.concat().into() };
        let Some(Answer::Cuts(cuts)) = self.ask(Ask::CutFile(ask))? else { return Ok(None) };
        let groups: Option<Vec<Group>> = cuts.groups.iter().map(group).collect();
        let part = |groups| {
            let content = cuts.content.as_ref().try_into().ok()?;
            Some(Part { groups, end: cuts.end, size: cuts.size, content })
        };
        Ok(groups.and_then(part))
    }

    fn read(&self, path: &[u8], frames: &[Vec<(u64, u32)>]) -> io::Result<Option<Vec<Vec<u8>>>> {
        let frame = |parts: &Vec<(u64, u32)>| {
            let (offsets, lengths) = parts.iter().copied().unzip();
            FrameOf { offsets, lengths }
        };
        let (of, path) = (Some(self.of.clone()), path.to_vec().into());
        let ask = ReadParts { of, path, frames: frames.iter().map(frame).collect() };
        let Some(Answer::FileParts(parts)) = self.ask(Ask::ReadParts(ask))? else { return Ok(None) };
        Ok(Some(parts.frames.iter().map(|frame| frame.to_vec()).collect()))
    }
}
