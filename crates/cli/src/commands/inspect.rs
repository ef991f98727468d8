//! `plimsoll inspect`: what files hold, whatever they are.

mod gather;
mod report;
mod text;

use crate::args::InspectArgs;
use crate::failure::Failure;
use crate::models::{self, Need};
use crate::output::{out, outln};

pub fn run(args: &InspectArgs) -> Result<(), Failure> {
    let mut report = match models::locate(&args.path, Need::Files, args.json)? {
        Some(path) => gather::files(&path)?,
        None => gather::catalogue(&args.path)?,
    };
    if !args.tensors {
        report.stored_tensors = None;
    }
    if args.json {
        outln!("{}", serde_json::to_string_pretty(&report)?)
    } else {
        out!("{}", text::render(&report, args.template))
    }
}
