//! The log of births and deaths of a case of the oracle, as `docs/bench/torch_oracle.py CASE --log` prints PyTorch's.
//!
//! `cargo run --release -p plimsoll-stacks --example oracle_log -- FIXTURE.json CASE`

mod case;

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [fixture, name] = &arguments[..] else { return Err("oracle_log FIXTURE.json CASE".into()) };
    let fixture: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(fixture)?)?;
    let trace = plimsoll_stacks::trace(&case::run_of(&fixture, name)?)?;
    let mut live = 0;
    let mut marks = trace.marks.iter().peekable();
    for (place, event) in trace.events.iter().enumerate() {
        while let Some((phase, _)) = marks.next_if(|(_, at)| *at <= place) {
            println!("--- {phase}");
        }
        if event.hidden {
            continue;
        }
        live += event.bytes;
        let operation = if event.bytes < 0 { "free" } else { event.operation };
        println!("{operation:40} {:6} {:12} {live:12}", event.storage, event.bytes);
    }
    for (shape, dtype) in &trace.saved {
        println!("saved {shape:?} {dtype:?}");
    }
    Ok(())
}
