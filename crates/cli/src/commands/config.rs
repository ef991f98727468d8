//! `plimsoll config`: every key with its type, default and help.

use crate::args::ConfigArgs;
use crate::failure::Failure;
use crate::output::outln;

pub fn run(args: &ConfigArgs) -> Result<(), Failure> {
    let keys = plimsoll_plan::config::keys();
    if args.json {
        outln!("{}", serde_json::to_string_pretty(&keys)?)?;
    } else {
        for key in keys {
            outln!("{key}")?;
        }
    }
    Ok(())
}
