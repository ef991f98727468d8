//! The ranks that train together: started by this program, by mpirun or by SLURM.

use std::process::Command;

use plimsoll_parallel::{Communicator, Solo};

use crate::args::TrainArgs;
use crate::failure::Failure;

/// The variables by which launchers tell a process how many ranks there are.
const SIZES: [&str; 3] = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"];

/// This process among the ranks.
pub enum Joined {
    Alone(Solo),
    #[cfg(feature = "mpi")]
    Mpi(plimsoll_parallel::Wired<plimsoll_parallel::Mpi>),
}

impl Joined {
    /// What the step speaks to.
    pub fn communicator(&self) -> &dyn Communicator {
        match self {
            Joined::Alone(solo) => solo,
            #[cfg(feature = "mpi")]
            Joined::Mpi(wired) => wired,
        }
    }

    /// Says what went wrong on this rank, and ends all of them. Of a process that is alone nothing is said or ended here.
    #[cfg_attr(not(feature = "mpi"), expect(unused_variables))]
    pub fn end_all(&self, failure: &Failure) {
        match self {
            Joined::Alone(_) => {}
            #[cfg(feature = "mpi")]
            Joined::Mpi(wired) => mpi::end_all(wired, failure),
        }
    }
}

/// How many ranks a launcher has started, if one has started this process.
fn launched() -> Option<u32> {
    SIZES.iter().find_map(|name| std::env::var(name).ok()?.parse().ok())
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

/// Starts `--ranks` processes of this program, unless a launcher has done so. Gives their exit code when they have ended.
pub fn launch(args: &TrainArgs) -> Result<Option<u8>, Failure> {
    let Some(ranks) = args.ranks else { return Ok(None) };
    match launched() {
        Some(there) if there != ranks => {
            return Err(Failure::usage(format!(
                "--ranks {ranks}, but {there} ranks were started; leave --ranks away under mpirun and srun"
            )));
        }
        None if ranks > 1 => {}
        _ => return Ok(None),
    }
    if cfg!(not(feature = "mpi")) {
        return Err(without_mpi(ranks));
    }
    let version = Command::new("mpirun").arg("--version").output();
    let Ok(version) = version else {
        return Err(Failure::other(
            "mpirun is not there; install MPI (`apt-get install openmpi-bin` on Debian and Ubuntu), or start the ranks with srun",
        ));
    };
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["-n", &ranks.to_string()]);
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        // Ranks share out the cores themselves, may be more than the cores, and save before they stop.
        mpirun.args(["--oversubscribe", "--bind-to", "none", "--mca", "odls_base_sigkill_timeout", "60"]);
        #[cfg(unix)]
        if plimsoll_memory::is_root() {
            mpirun.arg("--allow-run-as-root");
        }
    }
    let program = std::env::current_exe().map_err(|error| Failure::other(error.to_string()))?;
    let status = mpirun.arg(program).args(std::env::args_os().skip(1)).status();
    let status = status.map_err(|error| Failure::other(format!("mpirun could not be started: {error}")))?;
    Ok(Some(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(crate::failure::OTHER)))
}

#[cfg(not(feature = "mpi"))]
fn without_mpi(ranks: u32) -> Failure {
    Failure::usage(format!(
        "{ranks} ranks need MPI, and this program was built without it; build it with `cargo build --release --features mpi` (docs/ranks.md)"
    ))
}

#[cfg(feature = "mpi")]
fn without_mpi(_: u32) -> Failure {
    Failure::other("MPI could not be started")
}

#[cfg(feature = "mpi")]
mod mpi {
    use std::hash::{DefaultHasher, Hash, Hasher};
    use std::io::Write;

    use plimsoll_memory::{cores_of_process, keep_process_to};
    use plimsoll_parallel::{Communicator, Mpi, Wired};

    use super::{Joined, without_mpi};
    use crate::failure::Failure;

    pub fn join() -> Result<Joined, Failure> {
        let ranks = Wired::new(Mpi::start().ok_or_else(|| without_mpi(0))?);
        share_cores(&ranks)?;
        Ok(Joined::Mpi(ranks))
    }

    /// Ranks of one machine that may all run on the same cores keep to cores of their own.
    fn share_cores(ranks: &dyn Communicator) -> Result<(), Failure> {
        let cores = cores_of_process();
        let mut hasher = DefaultHasher::new();
        (host(), &cores).hash(&mut hasher);
        // A number that f64 holds.
        let own = (hasher.finish() >> 12) as f64;
        let all = ranks.gather_numbers(&[own]).map_err(|error| Failure::other(error.to_string()))?;
        let beside: Vec<usize> =
            (0..all.len()).filter(|rank| all.get(*rank).is_some_and(|told| told[..] == [own])).collect();
        let place = beside.iter().position(|rank| *rank == ranks.rank() as usize).unwrap_or(0);
        let count = beside.len().max(1);
        if count > 1 && !cores.is_empty() {
            let first = place * cores.len() / count;
            let end = ((place + 1) * cores.len() / count).max(first + 1);
            keep_process_to(cores.get(first..end.min(cores.len())).unwrap_or(&cores));
        }
        Ok(())
    }

    /// The name of this machine.
    fn host() -> String {
        std::fs::read_to_string("/proc/sys/kernel/hostname")
            .map(|name| name.trim().to_owned())
            .unwrap_or_default()
    }

    pub fn end_all(ranks: &Wired<Mpi>, failure: &Failure) {
        let words = format!("error: rank {} on {}: {failure}", ranks.rank(), host());
        let _ = writeln!(std::io::stderr(), "{words}");
        ranks.transport().abort(i32::from(failure.exit_code()));
    }
}
