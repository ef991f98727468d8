//! The ranks that a launcher has started, as they see their machines.

use plimsoll_memory::ByteSize;
use plimsoll_parallel::Communicator;
use plimsoll_plan::ProcessLimits;
use plimsoll_plan::hardware::{Hardware, host};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::args::DoctorArgs;
use crate::failure::Failure;
use crate::output::{errln, out, outln};
use crate::{ranks, row, table};

/// What a rank tells the first one.
#[derive(Serialize, Deserialize)]
struct Told {
    rank: u32,
    host: String,
    /// Cores that the rank may use.
    cores: Option<usize>,
    /// Cores of its machine.
    cores_of_machine: Option<usize>,
    /// Memory that is free there.
    free_bytes: Option<u64>,
    /// The program's version.
    version: String,
}

/// One rank: the first one shows what all tell it.
pub fn run(args: &DoctorArgs, communicator: &dyn Communicator) -> Result<(), Failure> {
    let cpu = Hardware::detect().cpu;
    let own = Told {
        rank: communicator.rank(),
        host: host().unwrap_or_default(),
        cores: cpu.allowed_cores,
        cores_of_machine: cpu.logical_cores,
        free_bytes: ProcessLimits::detect().available,
        version: env!("CARGO_PKG_VERSION").to_owned(),
    };
    let all = ranks::texts(communicator, &serde_json::to_string(&own)?)?;
    let here = ranks::of_this_machine(communicator)?;
    if let Some(note) = ranks::note_of_binding(communicator, here, &cpu, None)? {
        errln!("note: {note}");
    }
    if communicator.rank() > 0 {
        return Ok(());
    }
    let all = all.iter().map(|told| serde_json::from_str(told)).collect::<Result<Vec<Told>, _>>()?;
    match args.json {
        true => outln!("{}", serde_json::to_string_pretty(&json!({ "ranks": all }))?),
        false => out!("{}", table_of(&all)),
    }
}

fn table_of(all: &[Told]) -> String {
    let number = |cores: Option<usize>| cores.map_or("?".to_owned(), |cores| cores.to_string());
    let mut rows = vec![row!["rank", "host", "cores", "memory free", "version"]];
    for told in all {
        let cores = format!("{} of {}", number(told.cores), number(told.cores_of_machine));
        let free = told.free_bytes.map_or("?".to_owned(), |bytes| ByteSize(bytes).to_string());
        rows.push(row![told.rank, told.host, cores, free, told.version]);
    }
    table::render(&rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rank_is_a_row() {
        let first = Told {
            rank: 0,
            host: "first".to_owned(),
            cores: Some(1),
            cores_of_machine: Some(64),
            free_bytes: Some(3 << 30),
            version: "0.1.0".to_owned(),
        };
        let second =
            Told { rank: 1, host: "second".to_owned(), cores: None, free_bytes: None, ..again(&first) };
        let table = table_of(&[first, second]);
        let words: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(words[1], ["0", "first", "1", "of", "64", "3.00", "GiB", "0.1.0"]);
        assert_eq!(words[2], ["1", "second", "?", "of", "64", "?", "0.1.0"]);
    }

    fn again(told: &Told) -> Told {
        serde_json::from_str(&serde_json::to_string(told).unwrap()).unwrap()
    }
}
