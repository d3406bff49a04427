//! What a recipe's process and the session say to each other.

use prost::Message;

pub(super) use crate::relay::wire::{
    PASSED, connect, descriptors_heard, frame, heard, receive, receive_and_pass, send, send_descriptors,
};

/// A recipe asks where it is to run.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Ask {
    /// The last argument: what make has of the recipe.
    #[prost(bytes = "vec", tag = "1")]
    pub text: Vec<u8>,
    /// Its working directory.
    #[prost(bytes = "vec", tag = "2")]
    pub directory: Vec<u8>,
    /// Its process.
    #[prost(int32, tag = "3")]
    pub pid: i32,
    /// The rules that it belongs to, if what it opens is to be recorded: its own, and those that have started its make.
    #[prost(bytes = "vec", tag = "4")]
    pub rules: Vec<u8>,
}

/// Where it is to run.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Answer {
    /// Here; else on the farm.
    #[prost(bool, tag = "1")]
    pub here: bool,
}

/// All of it; with standard output and standard error.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Hand {
    /// Program and arguments.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub command: Vec<Vec<u8>>,
    /// `NAME=VALUE` each.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub environment: Vec<Vec<u8>>,
    /// File mode creation mask.
    #[prost(uint32, tag = "3")]
    pub umask: u32,
}

/// How it has ended.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Done {
    /// The exit code.
    #[prost(int32, tag = "1")]
    pub code: i32,
    /// The signal that has ended it; 0 for none.
    #[prost(int32, tag = "2")]
    pub signal: i32,
    /// What is to be said on standard error.
    #[prost(string, tag = "3")]
    pub message: String,
    /// It was not started, and is to run here after all.
    #[prost(bool, tag = "4")]
    pub here: bool,
}
