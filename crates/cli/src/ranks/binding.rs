//! Whether the launcher holds ranks to fewer cores than they have to share: Open MPI binds each of up to two ranks to one core, and says
//! nothing of it.

use plimsoll_parallel::Communicator;
use plimsoll_plan::hardware::{Cpu, core_list, field};

use super::SIZES;
use crate::failure::Failure;

/// Scripts between a launcher and a rank, at most.
const MOST_SCRIPTS: usize = 16;

/// What to know of the cores of a rank.
#[derive(Clone, Copy)]
struct Cores {
    /// Those that it may run on, once the ranks of this machine have shared out what they have.
    own: usize,
    /// Those that its launcher may run on.
    of_launcher: usize,
    /// Processor time that the container may use, in cores.
    quota: Option<f64>,
    /// Ranks of this machine.
    ranks: u32,
    /// Cores of a rank that the launcher was asked for.
    asked: Option<usize>,
}

impl Cores {
    /// Whether the launcher has bound the rank to fewer than its share.
    fn are_too_few(&self) -> bool {
        let usable = self.quota.map_or(self.of_launcher, |quota| self.of_launcher.min(quota as usize));
        let share = (usable / self.ranks.max(1) as usize).max(1);
        self.own < self.asked.map_or(share, |asked| asked.min(share))
    }
}

/// What to tell the user of ranks that are bound to fewer cores than their share: on the first rank, of all of them. A rank that is told
/// its `threads` has what it wants.
///
/// # Errors
/// A rank is gone.
pub fn note(
    ranks: &dyn Communicator,
    here: u32,
    cpu: &Cpu,
    threads: Option<usize>,
) -> Result<Option<String>, Failure> {
    let variable = SIZES.into_iter().find(|name| std::env::var_os(name).is_some());
    let cores = variable.filter(|_| threads.is_none()).and_then(|variable| {
        // In a job of SLURM Open MPI's launcher does not look at it.
        let asked = std::env::var("SLURM_CPUS_PER_TASK").ok().filter(|_| !variable.starts_with("OMPI"));
        Some(Cores {
            own: cpu.allowed_cores?,
            of_launcher: cores_of_launcher(variable, &|path| std::fs::read(path).ok())?,
            quota: cpu.quota_cores,
            ranks: here,
            asked: asked.and_then(|cores| cores.parse().ok()),
        })
    });
    let own = match cores.filter(Cores::are_too_few) {
        Some(cores) => [cores.own as f64, cores.of_launcher as f64],
        None => [0.0, 0.0],
    };
    let all = ranks.gather_numbers(&own)?;
    Ok(words(&all).filter(|_| ranks.rank() == 0))
}

/// The note on what all ranks tell: the cores of each that has too few, and those of its launcher.
fn words(all: &[Vec<f64>]) -> Option<String> {
    let bound = all.iter().enumerate().filter_map(|(rank, told)| match told[..] {
        [own, of_launcher] if own > 0.0 => Some((rank, own, of_launcher)),
        _ => None,
    });
    let bound: Vec<(usize, f64, f64)> = bound.collect();
    let (rank, own, of_launcher) = *bound.first()?;
    let others = match bound.len() - 1 {
        0 => String::new(),
        1 => ", and another rank to fewer than its share".to_owned(),
        others => format!(", and {others} other ranks to fewer than their share"),
    };
    Some(format!(
        "rank {rank} is bound to {own} of {of_launcher} cores by the launcher{others}: `mpirun --bind-to none` (srun: \
         `--cpus-per-task`) lets a rank use its share"
    ))
}

/// How many cores the launcher of this process may run on: the nearest process above it that was not told the number of ranks, as
/// scripts in between were. `None` where the system does not say.
fn cores_of_launcher(variable: &str, read: &dyn Fn(&str) -> Option<Vec<u8>>) -> Option<usize> {
    let status = |id: &str| Some(String::from_utf8_lossy(&read(&format!("/proc/{id}/status"))?).into_owned());
    let was_told = |id: &str| {
        // That of another user cannot be read.
        let variables = read(&format!("/proc/{id}/environ")).unwrap_or_default();
        let name =
            |one: &[u8]| one.strip_prefix(variable.as_bytes()).is_some_and(|rest| rest.starts_with(b"="));
        variables.split(|byte| *byte == 0).any(name)
    };
    let mut id = "self".to_owned();
    for _ in 0..=MOST_SCRIPTS {
        id = field(&status(&id)?, "PPid")?.to_owned();
        if !was_told(&id) {
            let cores = core_list(field(&status(&id)?, "Cpus_allowed_list")?).len();
            return (cores > 0).then_some(cores);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_is_bound_where_it_has_less_than_its_share_of_what_the_launcher_has() {
        let cores = Cores { own: 1, of_launcher: 64, quota: None, ranks: 1, asked: None };
        let two = Cores { ranks: 2, ..cores };
        for (what, cores, is_bound) in [
            ("a machine for each rank, bound to a core", cores, true),
            ("a core of two hardware threads", Cores { own: 2, ..cores }, true),
            ("not bound", Cores { own: 64, ..cores }, false),
            ("two ranks that share out the cores", Cores { own: 32, ..two }, false),
            ("three, which do not divide them", Cores { own: 21, ranks: 3, ..cores }, false),
            ("two ranks, each bound to a core", two, true),
            ("as many ranks as cores", Cores { ranks: 64, ..cores }, false),
            ("more ranks than cores", Cores { ranks: 65, ..cores }, false),
            ("a set of cores, of a container or by taskset", Cores { of_launcher: 1, ..cores }, false),
            ("a container's time", Cores { quota: Some(2.5), ..two }, false),
            ("a container's time that is more", Cores { quota: Some(8.0), ..two }, true),
            ("less than a core", Cores { quota: Some(0.5), ..two }, false),
            ("as many as were asked for", Cores { own: 4, asked: Some(4), ..two }, false),
            ("fewer than were asked for", Cores { asked: Some(4), ..two }, true),
        ] {
            assert_eq!(cores.are_too_few(), is_bound, "{what}");
        }
    }

    #[test]
    fn ranks_that_are_bound_are_told_of_in_one_note() {
        let (free, bound) = (vec![0.0, 0.0], vec![1.0, 64.0]);
        assert_eq!(words(&[free.clone(), free.clone()]), None);
        let remedy = "`mpirun --bind-to none` (srun: `--cpus-per-task`) lets a rank use its share";
        let one = words(&[free, bound.clone()]).unwrap();
        assert_eq!(one, format!("rank 1 is bound to 1 of 64 cores by the launcher: {remedy}"));
        let all = words(&[bound.clone(), bound.clone(), bound]).unwrap();
        assert!(all.contains("rank 0 is bound") && all.contains("and 2 other ranks to fewer"), "{all}");
    }

    #[test]
    fn the_launcher_is_above_the_scripts_that_it_has_started() {
        let read = |path: &str| {
            let text = match path {
                "/proc/self/status" => "Name:\tplimsoll\nPPid:\t30\nCpus_allowed_list:\t5\n",
                "/proc/30/environ" => "A=1\0OMPI_COMM_WORLD_SIZE=2\0",
                "/proc/30/status" => "Name:\tsh\nPPid:\t20\nCpus_allowed_list:\t5\n",
                "/proc/20/environ" => "OMPI_COMM_WORLD_SIZES=2\0SLURM_STEP_NUM_TASKS=1\0",
                "/proc/20/status" => "Name:\torted\nPPid:\t10\nCpus_allowed_list:\t0-3,8,10-11\n",
                _ => return None,
            };
            Some(text.as_bytes().to_vec())
        };
        assert_eq!(cores_of_launcher("OMPI_COMM_WORLD_SIZE", &read), Some(7));
        // Of another launcher's ranks the script is above this one.
        assert_eq!(cores_of_launcher("PMI_SIZE", &read), Some(1));
        // What the system does not tell is not guessed.
        assert_eq!(cores_of_launcher("OMPI_COMM_WORLD_SIZE", &|_| None), None);
    }
}
