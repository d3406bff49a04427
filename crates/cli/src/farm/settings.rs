//! What flags and the configuration file say of the farm.

use std::os::unix::ffi::OsStringExt;

use anyhow::Context;
use hayloft_farm::broker::BrokerOptions;
use hayloft_farm::place::Place;
use hayloft_farm::protocol::{BuildMessage, NeedMessage};
use hayloft_farm::submit;

use crate::config::Config;
use crate::exit::{Exit, failure};
use crate::farm::args::{BrokerArgs, NeedArgs};
use crate::sys;

/// The broker, if one is named.
pub(crate) fn broker(args: &BrokerArgs, config: &Config) -> anyhow::Result<Option<BrokerOptions>> {
    let farm = &config.farm;
    let Some(url) = args.broker.clone().or_else(|| farm.broker.clone()).filter(|url| !url.is_empty()) else {
        return Ok(None);
    };
    let certificate = args.broker_certificate.clone().or_else(|| farm.certificate.clone());
    let key = args.broker_key.clone().or_else(|| farm.key.clone());
    let certificate = match (certificate, key) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        _ => return Err(failure(Exit::Usage, "a certificate and its key belong together: name both")),
    };
    Ok(Some(BrokerOptions {
        url,
        ca: args.broker_ca.clone().or_else(|| farm.ca.clone()),
        certificate,
        credentials: args.broker_credentials.clone().or_else(|| farm.credentials.clone()),
    }))
}

/// The broker; an error when none is named.
pub(crate) fn broker_needed(args: &BrokerArgs, config: &Config) -> anyhow::Result<BrokerOptions> {
    broker(args, config)?.ok_or_else(|| {
        failure(
            Exit::Usage,
            "no broker is named: --broker nats://HOST:4222, HAYLOFT_BROKER, or broker in [farm]",
        )
    })
}

/// Slots of this host.
pub(crate) fn slots(config: &Config) -> u32 {
    let cores = || std::thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    config.farm.slots.filter(|slots| *slots > 0).unwrap_or_else(cores)
}

/// This host's name.
pub(crate) fn host_name() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned()
}

/// The build that tasks belong to.
pub(crate) fn build(args: &NeedArgs) -> BuildMessage {
    let uid = sys::user_and_group().0;
    let name = submit::user_name(uid);
    let user = if name.is_empty() { uid.to_string() } else { name };
    let name = args.build.clone().unwrap_or_else(|| submit::build_name(&user, &host_name()));
    BuildMessage { name, user, batch: args.batch, weight: args.weight.max(1) }
}

/// The layers of the root that tasks run in: names as they are, paths as they are on the volume of this place.
///
/// # Errors
/// When a path is on no volume, or another one.
pub(crate) fn layers(args: &NeedArgs, place: &Place) -> anyhow::Result<Vec<Vec<u8>>> {
    let layer = |text: &String| {
        if !text.contains('/') {
            return Ok(text.clone().into_bytes());
        }
        let path = std::fs::canonicalize(text).with_context(|| format!("the layer {text}"))?;
        let found = Place::of(path.parent().unwrap_or(&path)).context("the table of mounts")?;
        if found.is_none_or(|found| found.mount.point != place.mount.point) {
            let message = format!(
                "the layer {text} is not on the volume of the current folder, where hosts would find it"
            );
            return Err(failure(Exit::Usage, message));
        }
        Ok(path.into_os_string().into_vec())
    };
    args.layers.iter().map(layer).collect()
}

/// What a task needs.
pub(crate) fn need(args: &NeedArgs, slots: u32) -> NeedMessage {
    NeedMessage {
        cores: slots.max(1),
        memory: args.mem.unwrap_or(0),
        labels: args.label.clone(),
        not: Vec::new(),
    }
}
