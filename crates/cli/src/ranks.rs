//! The ranks that train together: started by this program, by mpirun or by SLURM.

mod binding;

use std::ffi::OsString;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::IsTerminal;
#[cfg(unix)]
use std::io::{ErrorKind, Read, Write};
use std::path::PathBuf;
#[cfg(unix)]
use std::process::Child;
use std::process::{Command, ExitStatus, Stdio};
#[cfg(unix)]
use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicI32, Ordering},
};
#[cfg(unix)]
use std::time::{Duration, Instant};

use plimsoll_parallel::{Collectives, CommunicationError, Communicator, Solo};
use plimsoll_plan::config::Started;
use plimsoll_train::FileIdentity;
#[cfg(unix)]
use rustix::process::{Pid, Signal, kill_process};
#[cfg(unix)]
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
#[cfg(unix)]
use signal_hook::iterator::Signals;

use crate::failure::Failure;
use crate::output::errln;
#[cfg(unix)]
use crate::signals::heard;

pub use binding::note as note_of_binding;

/// How long mpirun may take to end behind the last rank.
#[cfg(unix)]
const TIME_TO_END: Duration = Duration::from_secs(5);
/// How often it is looked whether it has.
#[cfg(unix)]
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often ranks are told to stop that do not.
#[cfg(unix)]
const TELL_EVERY: Duration = Duration::from_millis(250);

/// The exit code of a process that the word to stop ended: 128 and the number of SIGUSR1.
pub const TOLD: u8 = 138;

/// The flag by which a launcher tells that somebody types.
const TYPED: &str = "--typed";

/// The flag by which it tells ranks that save that they are its own.
const LAUNCHED: &str = "--launched";

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

/// Starts `--ranks` processes of this program, unless a launcher has done so. Gives their exit code when they have ended.
fn launch(ranks: Option<u32>, lines: Lines, stopping: Stopping) -> Result<Option<u8>, Failure> {
    let Some(ranks) = ranks else { return Ok(None) };
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
    let program = std::env::current_exe().map_err(|error| Failure::other(error.to_string()))?;
    let mut mpirun = Command::new(&program);
    let own = std::process::id().to_string();
    mpirun.args(["end-with-parent", &own, "--", "mpirun", "-n", &ranks.to_string()]);
    if String::from_utf8_lossy(&version.stdout).contains("Open MPI") {
        // Ranks share out the cores themselves, and may be more than the cores.
        mpirun.args(["--oversubscribe", "--bind-to", "none"]);
        #[cfg(unix)]
        if rustix::process::geteuid().is_root() {
            mpirun.arg("--allow-run-as-root");
        }
    }
    mpirun.arg(program).args(std::env::args_os().skip(1));
    if stopping == Stopping::Saving {
        mpirun.arg(LAUNCHED);
    }
    if lines == Lines::OfFirst {
        // mpirun is in no terminal's foreground, where alone it would read.
        mpirun.stdin(Stdio::piped());
        if std::io::stdin().is_terminal() {
            mpirun.arg(TYPED);
        }
    }
    run(mpirun, stopping).map(Some).map_err(|error| Failure::other(format!("mpirun: {error}")))
}

/// Becomes another program, which ends where the process ends that started this one, `parent`, however that happens.
pub fn end_with_parent(parent: u32, command: &[OsString]) -> Result<(), Failure> {
    let Some((program, arguments)) = command.split_first() else {
        return Err(Failure::usage("end-with-parent: name a command"));
    };
    let mut command = Command::new(program);
    command.args(arguments);
    let failed = |error: std::io::Error| Failure::other(format!("{}: {error}", program.display()));
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(Signal::TERM))
        .map_err(|error| failed(error.into()))?;
    // It may have ended before.
    #[cfg(unix)]
    if std::os::unix::process::parent_id() != parent {
        return Err(Failure::other("the process that starts the ranks has ended"));
    }
    #[cfg(not(unix))]
    let _ = parent;
    #[cfg(unix)]
    return Err(failed(std::os::unix::process::CommandExt::exec(&mut command)));
    #[cfg(not(unix))]
    match exit_code(command.status().map_err(failed)?) {
        0 => Ok(()),
        code => Err(Failure::stopped(code)),
    }
}

/// That ranks were told to stop.
#[cfg(unix)]
struct Stopped {
    /// The exit code of a program that ends because of the signal.
    by_signal: u8,
    /// Whether they were ended, rather than told to.
    were_ended: bool,
    /// Whether they end because they were told.
    ends: bool,
}

#[cfg(unix)]
impl Stopped {
    /// The exit code of all, where mpirun has ended with `code`: that of the signal, unless something else went wrong.
    fn exit_code(&self, code: u8) -> u8 {
        // What does not listen yet is ended by the word to stop: a rank, or mpirun itself.
        let by_word = code == TOLD;
        let has_saved = code == 0 && self.ends;
        if has_saved || by_word || self.were_ended { self.by_signal } else { code }
    }
}

/// The exit code of a process as shells have it.
fn exit_code(status: ExitStatus) -> u8 {
    #[cfg(unix)]
    let by_signal = std::os::unix::process::ExitStatusExt::signal(&status).map(|signal| 128 + signal);
    #[cfg(not(unix))]
    let by_signal = None;
    let code = status.code().or(by_signal).and_then(|code| u8::try_from(code).ok());
    code.unwrap_or(crate::failure::OTHER)
}

/// Runs mpirun to its end. The first signal that asks for an end is told to the ranks; another Ctrl-C ends them at once.
/// Gives the exit code of all.
#[cfg(unix)]
fn run(mut mpirun: Command, stopping: Stopping) -> std::io::Result<u8> {
    use std::os::unix::process::CommandExt;

    // A terminal's Ctrl-C would reach mpirun, too, which ends the ranks before they have saved.
    let mut signals = Signals::new(heard([SIGINT, SIGTERM, SIGHUP]))?;
    if !std::io::stdout().is_terminal() {
        // mpirun ends the ranks where nobody reads what they say.
        mpirun.stdout(Stdio::piped());
    }
    let mut child = mpirun.process_group(0).spawn()?;
    let unheard = Arc::new(AtomicBool::new(false));
    let said = child.stdout.take().map(|said| {
        let unheard = Arc::clone(&unheard);
        std::thread::spawn(move || pass_on(said, std::io::stdout(), &unheard))
    });
    // A run leaves a model where nobody reads what it says; others have nothing else to leave.
    let is_in_vain = || stopping != Stopping::Saving && unheard.load(Ordering::SeqCst);
    if let Some(mut lines) = child.stdin.take() {
        // It ends with the input, or with this process.
        std::thread::spawn(move || std::io::copy(&mut std::io::stdin().lock(), &mut lines));
    }
    let launcher = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
    let (handle, first) = (signals.handle(), Arc::new(AtomicI32::new(0)));
    let ended = Arc::new(AtomicBool::new(stopping == Stopping::AtOnce));
    let (noted, ends) = (Arc::clone(&first), Arc::clone(&ended));
    let listener = std::thread::spawn(move || {
        for signal in signals.forever() {
            let is_first = noted.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst).is_ok();
            // Shells and launchers send other signals twice.
            let is_last = !is_first && signal == SIGINT;
            let is_end = ends.fetch_or(is_last, Ordering::SeqCst) || is_last;
            if let Some(launcher) = launcher {
                // Where mpirun has ended there is nobody to tell.
                let _ = kill_process(launcher, if is_end { Signal::TERM } else { Signal::USR1 });
            }
        }
    });
    let (mut told, mut is_left) = (Instant::now(), false);
    let remind = || {
        if is_in_vain()
            && !is_left
            && let Some(launcher) = launcher
        {
            is_left = true;
            let _ = kill_process(launcher, Signal::TERM);
        }
        let is_asked = stopping == Stopping::Saving && first.load(Ordering::SeqCst) != 0;
        if is_asked
            && !ended.load(Ordering::SeqCst)
            && told.elapsed() > TELL_EVERY
            && let Some(launcher) = launcher
        {
            told = Instant::now();
            let _ = kill_process(launcher, Signal::USR1);
        }
    };
    let status = wait(&mut child, remind);
    let passed = said.and_then(|said| {
        let (since, is_over) = (Instant::now(), !matches!(status, Ok(Some(_))));
        // What mpirun says ends with it; whoever reads may be slow, but is not waited for by those who want an end.
        while !said.is_finished() {
            if (is_over || first.load(Ordering::SeqCst) != 0) && since.elapsed() > TIME_TO_END {
                return None;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        said.join().ok()
    });
    handle.close();
    // It ends with its handle.
    let _ = listener.join();
    let stopped = match first.load(Ordering::SeqCst) {
        0 => None,
        signal => u8::try_from(128 + signal).ok(),
    };
    let (were_ended, ends) = (ended.load(Ordering::SeqCst), stopping != Stopping::Interrupted);
    let stopped = stopped.map(|by_signal| Stopped { by_signal, were_ended, ends });
    let code = match status? {
        Some(status) => match (exit_code(status), passed) {
            _ if is_in_vain() => 0,
            (0, Some(Err(error))) => {
                errln!("error: could not write to standard output: {error}");
                crate::failure::OTHER
            }
            (code, _) => code,
        },
        // Its ranks were told while they joined each other.
        None if stopped.is_some() => TOLD,
        None => {
            let words = "a rank was killed and mpirun did not end with the others; --resume goes on from what was saved";
            return Err(std::io::Error::other(words));
        }
    };
    Ok(stopped.map_or(code, |stopped| stopped.exit_code(code)))
}

/// Writes what is read, each piece at once, to its end. Where whoever read has seen enough that is `unheard`, and the rest is read all the
/// same: mpirun would end with words of its own.
///
/// # Errors
/// It could not be written, for another reason than that nobody reads it.
#[cfg(unix)]
fn pass_on(mut from: impl Read, mut to: impl Write, unheard: &AtomicBool) -> std::io::Result<()> {
    let mut piece = vec![0; 1 << 16];
    let mut written = Ok(());
    loop {
        let length = match from.read(&mut piece) {
            Err(error) if error.kind() == ErrorKind::Interrupted => continue,
            read => read?,
        };
        let Some(piece) = piece.get(..length).filter(|piece| !piece.is_empty()) else { break };
        if written.is_ok() {
            written = to.write_all(piece).and_then(|()| to.flush());
            let is_left = written.as_ref().is_err_and(|error| error.kind() == ErrorKind::BrokenPipe);
            unheard.store(is_left, Ordering::SeqCst);
        }
    }
    if unheard.load(Ordering::SeqCst) { Ok(()) } else { written }
}

/// Waits until mpirun has ended, and does something meanwhile. Open MPI may hang where a rank was killed while it joined the others: mpirun
/// is ended then, and there is no status.
#[cfg(unix)]
fn wait(mpirun: &mut Child, mut meanwhile: impl FnMut()) -> std::io::Result<Option<ExitStatus>> {
    let (mut had_ranks, mut without) = (false, None::<Instant>);
    loop {
        if let Some(status) = mpirun.try_wait()? {
            return Ok(Some(status));
        }
        let ranks = has_living_children(mpirun.id());
        had_ranks |= ranks == Some(true);
        without = match had_ranks && ranks == Some(false) {
            true => without.or_else(|| Some(Instant::now())),
            false => None,
        };
        if without.is_some_and(|since| since.elapsed() > TIME_TO_END) {
            mpirun.kill()?;
            mpirun.wait()?;
            return Ok(None);
        }
        // mpirun that has no ranks any more is ending, and would be ended by a word.
        if !had_ranks || ranks == Some(true) {
            meanwhile();
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Whether a process has children that have not ended; `None` where the system does not say.
#[cfg(unix)]
fn has_living_children(id: u32) -> Option<bool> {
    let children = std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).ok()?;
    let lives = |child: &str| {
        let status = std::fs::read_to_string(format!("/proc/{child}/status")).unwrap_or_default();
        let state = status.lines().find_map(|line| line.strip_prefix("State:"));
        state.is_some_and(|state| !state.trim_start().starts_with('Z'))
    };
    Some(children.split_whitespace().any(lives))
}

#[cfg(not(unix))]
fn run(mut mpirun: Command, _stopping: Stopping) -> std::io::Result<u8> {
    Ok(exit_code(mpirun.status()?))
}

fn without_mpi(ranks: u32) -> Failure {
    Failure::usage(format!(
        "{ranks} ranks need MPI, and this program was built without it; build it with `cargo build --release --features mpi` (docs/ranks.md)"
    ))
}

/// The name of this machine.
pub fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    name.map(|name| name.trim().to_owned()).unwrap_or_default()
}

/// What tells this machine from others: its system was started once; containers on it may have names of their own.
fn machine() -> String {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    id.map(|id| id.trim().to_owned()).unwrap_or_else(|_| host())
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
    let all = ranks.gather_numbers(&[own]).map_err(|error| Failure::other(error.to_string()))?;
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
    ranks.group((0..ranks.size()).collect()).map_err(|error| Failure::other(error.to_string()))
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
    let unlike = ranks.first_unlike(ranks.rank(), &[fingerprint(what)]);
    let unlike = unlike.map_err(|error| Failure::other(error.to_string()))?;
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
    let failed = |error: CommunicationError| Failure::other(error.to_string());
    let version = env!("CARGO_PKG_VERSION");
    // By itself and before all else: what comes next may be another exchange in another version.
    if let Some((rank, _)) = ranks.first_unlike(0, &[fingerprint(&version)]).map_err(failed)? {
        let failure = Failure::other(format!(
            "this machine has Plimsoll {version}, and rank 0 has another version: install the same one on every machine"
        ));
        if rank == ranks.rank() {
            return Err(failure);
        }
        // That rank ends all.
        ranks.gather_numbers(&[]).map_err(failed)?;
        return Err(failure);
    }
    let build = build().map(|file| (file.bytes, file.hash));
    let unlike = ranks.first_unlike(0, &[fingerprint(&build)]).map_err(failed)?;
    if let Some((rank, _)) = unlike
        && rank == ranks.rank()
    {
        errln!(
            "warning: rank {rank} on {} runs another build of Plimsoll {version} than rank 0; results may differ, so copy the program from the machine of rank 0",
            host()
        );
    }
    Ok(())
}

/// A text of each rank, in their order, on the first one; nothing on the others.
pub fn texts(ranks: &dyn Communicator, own: &str) -> Result<Vec<String>, Failure> {
    let all = ranks.gather_bytes(own.as_bytes()).map_err(|error| Failure::other(error.to_string()))?;
    Ok(all.iter().map(|text| String::from_utf8_lossy(text).into_owned()).collect())
}

/// Whether something is so on any rank.
pub fn any(ranks: &dyn Communicator, is_so: bool) -> Result<bool, Failure> {
    ranks.any(is_so).map_err(|error| Failure::other(error.to_string()))
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
    let all = ranks.gather_numbers(&[bytes as f64]).map_err(|error| Failure::other(error.to_string()))?;
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
        let words = format!("error: rank {rank} on {}: {failure}\n", host());
        let _ = std::io::stderr().write_all(words.as_bytes());
        ranks.abort(i32::from(failure.exit_code()));
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    /// Takes one piece, and then refuses for a reason.
    struct Refusing(usize, ErrorKind);

    impl Write for Refusing {
        fn write(&mut self, piece: &[u8]) -> std::io::Result<usize> {
            self.0 += 1;
            if self.0 > 1 { Err(self.1.into()) } else { Ok(piece.len()) }
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn what_ranks_say_is_read_to_its_end_whoever_reads_it() {
        for (reason, is_wrong) in [(ErrorKind::BrokenPipe, false), (ErrorKind::StorageFull, true)] {
            let (mut said, mut to) = (&[b'x'; 1 << 18][..], Refusing(0, reason));
            let unheard = AtomicBool::new(false);
            assert_eq!(pass_on(&mut said, &mut to, &unheard).is_err(), is_wrong, "{reason}");
            assert_eq!(unheard.into_inner(), !is_wrong, "{reason}");
            assert_eq!((said.len(), to.0), (0, 2), "{reason}");
        }
        let (mut all, unheard) = (Vec::new(), AtomicBool::new(false));
        pass_on(&b"a line\nand more"[..], &mut all, &unheard).unwrap();
        assert!(!unheard.into_inner());
        assert_eq!(all, b"a line\nand more");
    }
}
