//! The farm: tasks that run on other hosts as if they ran here.
//!
//! An **agent** on each host offers slots ([`agent`]); who has tasks is a **submitter** ([`submit`]); of the agents one
//! **dispatches** as well ([`dispatch`]): it gives slots to tasks with the scheduler of `hayloft-schedule`. They talk by way of a
//! broker, NATS ([`broker`], [`protocol`]). A task finds its files since its host has the same volume mounted ([`place`]);
//! [`execution`] runs it and ends all of it. [`relay`] is the process that submits for all of a build on a host. [`make`] has GNU make send its recipes to all this.
//! What is started for each task is one [`small`] program.
//! [`scale`] has hosts come and go with the demand.

pub mod agent;
pub mod broker;
pub mod dispatch;
pub mod execution;
pub mod make;
pub mod place;
pub mod protocol;
pub mod relay;
pub mod scale;
pub mod small;
pub mod submit;
#[cfg(test)]
mod testing;
