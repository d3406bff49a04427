//! tmp
use crate::Common;
use anyhow::Result;
use clap::Args;
#[derive(Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) common: Common,
}
pub(crate) fn run(_: &Options) -> Result<()> {
    Ok(())
}
