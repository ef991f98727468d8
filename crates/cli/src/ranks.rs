//! The ranks that train together: started by this program, by mpirun or by SLURM.

mod binding;
mod launcher;

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use plimsoll_parallel::{Collectives, Communicator, Solo};
use plimsoll_plan::config::Started;
use plimsoll_plan::hardware::host;
use plimsoll_train::FileIdentity;

use crate::failure::Failure;
use crate::output::errln;

pub use binding::note as note_of_binding;
pub use launcher::end_with_parent;
use launcher::launch;

/// The exit code of a process that the word to stop ended: 128 and the number of SIGUSR1.
pub const TOLD: u8 = 138;

/// The variables by which launchers tell a process how many ranks there are.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// This process among the ranks.
pub enum Joined {
    Alone(Solo),
    #[cfg(feature = "mpi")]
    Mpi(plimsoll_mpi::MpiRanks),
}

impl Joined {
    /// What the step speaks to.
    pub fn communicator(&self) -> &dyn Communicator {
        match self {
            Joined::Alone(solo) => solo,
            #[cfg(feature = "mpi")]
            Joined::Mpi(ranks) => ranks.communicator(),
        }
    }

    /// Says what went wrong on this rank, and ends all of them. Of a process that is alone nothing is said or ended here.
    #[cfg_attr(not(feature = "mpi"), expect(unused_variables))]
    pub fn end_all(&self, failure: &Failure) {
        match self {
            Joined::Alone(_) => {}
            #[cfg(feature = "mpi")]
            Joined::Mpi(ranks) => mpi::end_all(ranks, failure),
        }
    }
}

/// How many ranks a launcher has started, if one has started this process.
fn launched() -> Option<u32> {
    SIZES.iter().find_map(|name| std::env::var(name).ok()?.parse().ok())
}

/// Whether a launcher has started this process with others.
pub fn has_others() -> bool {
    launched().is_some_and(|ranks| ranks > 1)
}

/// Whether this process is to start the ranks and is none of them.
pub fn starts(ranks: Option<u32>) -> bool {
    ranks.is_some_and(|ranks| ranks > 1) && launched().is_none()
}

/// Joins the other ranks, where a launcher has started this process.
pub fn join() -> Result<Joined, Failure> {
    match launched() {
        #[cfg(feature = "mpi")]
        Some(_) => mpi::join(),
        #[cfg(not(feature = "mpi"))]
        Some(ranks) if ranks > 1 => Err(without_mpi(ranks)),
        _ => Ok(Joined::Alone(Solo)),
    }
}

/// What ranks that are started here read.
#[derive(Clone, Copy, PartialEq)]
pub enum Lines {
    /// Nothing that concerns the program.
    Unread,
    /// The first rank reads the lines of standard input.
    OfFirst,
}

/// What ranks that are started here do when they are told to stop.
#[derive(Clone, Copy, PartialEq)]
pub enum Stopping {
    /// They end: there is nothing to save.
    AtOnce,
    /// They save and end. Until they listen they may not hear it, so that they are told again and again.
    Saving,
    /// They end what they are doing, and go on.
    Interrupted,
}

/// Does something on each of so many ranks, which are started first where they are not there. What goes wrong on one ends all.
pub fn on_each(
    stopping: Stopping,
    ranks: Option<u32>,
    work: impl FnOnce(&dyn Communicator) -> Result<(), Failure>,
) -> Result<(), Failure> {
    on_each_with(Lines::Unread, stopping, ranks, work)
}

/// The same of ranks that read something.
pub fn on_each_with(
    lines: Lines,
    stopping: Stopping,
    ranks: Option<u32>,
    work: impl FnOnce(&dyn Communicator) -> Result<(), Failure>,
) -> Result<(), Failure> {
    if let Some(exit_code) = launch(ranks, lines, stopping)? {
        // The ranks have said what there is to say.
        return if exit_code == 0 { Ok(()) } else { Err(Failure::stopped(exit_code)) };
    }
    let joined = join()?;
    let outcome = same_program(joined.communicator()).and_then(|()| work(joined.communicator()));
    if let Err(failure) = &outcome
        && !failure.is_silent()
    {
        joined.end_all(failure);
    }
    outcome
}

fn without_mpi(ranks: u32) -> Failure {
    Failure::usage(format!(
        "{ranks} ranks need MPI, and this program was built without it; build it with `cargo build --release --features mpi` (docs/ranks.md)"
    ))
}

/// What tells this machine from others: its system was started once; containers on it may have names of their own.
fn machine() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map(|id| id.trim().to_owned()).unwrap_or_else(|_| host().unwrap_or_default())
}

/// What tells one thing from another, as a number that f64 holds.
fn fingerprint(what: &impl Hash) -> f64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    (hasher.finish() >> 12) as f64
}

/// The ranks of each machine, of those that have `what` alike.
fn on_each_machine(ranks: &dyn Communicator, what: &impl Hash) -> Result<Vec<Vec<usize>>, Failure> {
    let own = fingerprint(&(machine(), what));
    let all = ranks.gather_numbers(&[own])?;
    let mut machines: Vec<(Vec<f64>, Vec<usize>)> = Vec::new();
    for (rank, told) in all.into_iter().enumerate() {
        match machines.iter_mut().find(|(machine, _)| *machine == told) {
            Some((_, here)) => here.push(rank),
            None => machines.push((told, vec![rank])),
        }
    }
    Ok(machines.into_iter().map(|(_, here)| here).collect())
}

/// Has a rank that is not the first say nothing but what goes wrong.
pub fn be_quiet() -> Result<(), Failure> {
    let failed = |error: std::io::Error| Failure::other(format!("standard output: {error}"));
    let nowhere = std::fs::OpenOptions::new().write(true).open("/dev/null").map_err(failed)?;
    #[cfg(unix)]
    rustix::stdio::dup2_stdout(&nowhere).map_err(|error| failed(error.into()))?;
    drop(nowhere);
    Ok(())
}

/// All ranks, for a model that is divided among them.
pub fn everybody(ranks: &dyn Communicator) -> Result<Box<dyn Communicator + '_>, Failure> {
    Ok(ranks.group((0..ranks.size()).collect())?)
}

/// The ranks that there are, counted by all of them together.
pub fn started(ranks: &dyn Communicator) -> Result<Started, Failure> {
    let machines = on_each_machine(ranks, &())?;
    let mut counts = machines.iter().map(Vec::len);
    let first = counts.next().unwrap_or(1);
    let alike = counts.all(|count| count == first);
    let of_each_machine = alike.then(|| u32::try_from(first).unwrap_or(u32::MAX));
    Ok(Started { ranks: ranks.size(), of_each_machine })
}

/// The ranks of this machine that have `what` alike, this one among them.
pub fn beside(ranks: &dyn Communicator, what: &impl Hash) -> Result<Vec<usize>, Failure> {
    let own = ranks.rank() as usize;
    let all = on_each_machine(ranks, what)?;
    Ok(all.into_iter().find(|beside| beside.contains(&own)).unwrap_or_else(|| vec![own]))
}

/// Which of the ranks of this machine this one is, from 0.
pub fn place_on_this_machine(ranks: &dyn Communicator) -> Result<u32, Failure> {
    let own = ranks.rank() as usize;
    let place = beside(ranks, &())?.iter().position(|rank| *rank == own).unwrap_or(0);
    Ok(u32::try_from(place).unwrap_or(u32::MAX))
}

/// The first rank that has `what` otherwise than this one, if any has.
pub fn first_unlike(ranks: &dyn Communicator, what: &impl Hash) -> Result<Option<usize>, Failure> {
    let unlike = ranks.first_unlike(ranks.rank(), &[fingerprint(what)])?;
    Ok(unlike.map(|(rank, _)| rank as usize))
}

/// What tells this build of the program from others of its version; nothing where it cannot be read.
fn build() -> Option<FileIdentity> {
    let path = if cfg!(target_os = "linux") { Ok("/proc/self/exe".into()) } else { std::env::current_exe() };
    FileIdentity::of_all(&[path.ok()?]).ok()?.pop()
}

/// Whether all ranks run this version of the program: another one may do other steps, and speak otherwise. Another build of it is
/// warned of, which may be the same program, made on each machine.
fn same_program(ranks: &dyn Communicator) -> Result<(), Failure> {
    if ranks.is_alone() {
        return Ok(());
    }
    let version = env!("CARGO_PKG_VERSION");
    // By itself and before all else: what comes next may be another exchange in another version.
    if let Some((rank, _)) = ranks.first_unlike(0, &[fingerprint(&version)])? {
        let failure = Failure::other(format!(
            "this machine has Plimsoll {version}, and rank 0 has another version: install the same one on every machine"
        ));
        if rank == ranks.rank() {
            return Err(failure);
        }
        // That rank ends all.
        ranks.barrier()?;
        return Err(failure);
    }
    let build = build().map(|file| (file.bytes, file.hash));
    let unlike = ranks.first_unlike(0, &[fingerprint(&build)])?;
    if let Some((rank, _)) = unlike
        && rank == ranks.rank()
    {
        errln!(
            "warning: rank {rank} on {} runs another build of Plimsoll {version} than rank 0; results may differ, so copy the program from the machine of rank 0",
            host().unwrap_or_default()
        );
    }
    Ok(())
}

/// A text of each rank, in their order, on the first one; nothing on the others.
pub fn texts(ranks: &dyn Communicator, own: &str) -> Result<Vec<String>, Failure> {
    let all = ranks.gather_bytes(own.as_bytes())?;
    Ok(all.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect())
}

/// Whether something is so on any rank.
pub fn any(ranks: &dyn Communicator, is_so: bool) -> Result<bool, Failure> {
    Ok(ranks.any(is_so)?)
}

/// How many of them are on this machine.
pub fn of_this_machine(ranks: &dyn Communicator) -> Result<u32, Failure> {
    Ok(u32::try_from(beside(ranks, &())?.len()).unwrap_or(u32::MAX))
}

/// How many of them a limit of memory holds together, which stands in this file of this rank's.
pub fn of_this_group(ranks: &dyn Communicator, limit: Option<PathBuf>) -> Result<u32, Failure> {
    // Files of containers are called alike.
    let spaces = ["cgroup", "mnt"].map(|space| std::fs::read_link(format!("/proc/self/ns/{space}")).ok());
    Ok(u32::try_from(beside(ranks, &(limit, spaces))?.len()).unwrap_or(u32::MAX))
}

/// A number of every rank of this machine, added up.
pub fn sum_on_this_machine(ranks: &dyn Communicator, bytes: u64) -> Result<u64, Failure> {
    let here = beside(ranks, &())?;
    let all = ranks.gather_numbers(&[bytes as f64])?;
    let of_rank = |rank: &usize| all.get(*rank).and_then(|told| told.first()).copied().unwrap_or(0.0);
    Ok(here.iter().map(of_rank).sum::<f64>() as u64)
}

#[cfg(feature = "mpi")]
mod mpi {
    use std::io::Write;

    use plimsoll_memory::{allowed_cores, cores_of_process, keep_process_to, run_on_all_cores};
    use plimsoll_mpi::{MpiError, MpiRanks};
    use plimsoll_parallel::Communicator;

    use super::{Joined, beside, host};
    use crate::failure::Failure;

    pub fn join() -> Result<Joined, Failure> {
        let failed = |error: MpiError| Failure::other(format!("MPI could not be started: {error}"));
        let ranks = MpiRanks::join().map_err(failed)?;
        share_cores(ranks.communicator())?;
        // The thread that speaks to the others was begun before.
        allowed_cores();
        let moved = ranks.communicator().on_line(|_| run_on_all_cores());
        moved.map_err(|error| failed(error.into()))?;
        Ok(Joined::Mpi(ranks))
    }

    /// Ranks of one machine that may all run on the same cores keep to cores of their own.
    fn share_cores(ranks: &dyn Communicator) -> Result<(), Failure> {
        let cores = cores_of_process();
        let own = ranks.rank() as usize;
        let beside = beside(ranks, &cores)?;
        let place = beside.iter().position(|rank| *rank == own).unwrap_or(0);
        let count = beside.len().max(1);
        if count > 1 && !cores.is_empty() {
            let first = place * cores.len() / count;
            let end = ((place + 1) * cores.len() / count).max(first + 1);
            keep_process_to(cores.get(first..end.min(cores.len())).unwrap_or(&cores));
        }
        Ok(())
    }

    pub fn end_all(ranks: &MpiRanks, failure: &Failure) {
        let rank = ranks.communicator().rank();
        // In one piece, so that what other ranks say is not in the middle of it.
        let words = format!("error: rank {rank} on {}: {failure}\n", host().unwrap_or_default());
        let _ = std::io::stderr().write_all(words.as_bytes());
        ranks.abort(i32::from(failure.exit_code()));
    }
}
