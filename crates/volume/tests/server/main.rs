//! A running server, as its clients see it. One program for all of them: each would compile the server's engine anew.

mod at_rest;
mod attacks;
mod batches;
mod beside;
mod common;
mod ends;
mod entries;
mod faults;
mod gone;
mod history;
mod integrity;
mod journal;
mod limits;
mod measure;
mod packed;
mod patience;
mod points;
mod protocol;
mod reading;
mod replay;
mod rooms;
mod scale;
mod sharing;
mod small;
mod space;
mod versions;
