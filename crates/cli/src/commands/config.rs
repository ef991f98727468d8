//! `plimsoll config`: every key with its type, default and help.

use crate::args::ConfigArgs;
use crate::failure::Failure;

pub fn run(args: &ConfigArgs) -> Result<(), Failure> {
    let keys = plimsoll_plan::config::keys();
    if args.json {
        println!("{}", serde_json::to_string_pretty(&keys)?);
    } else {
        for key in keys {
            println!("{key}");
        }
    }
    Ok(())
}
