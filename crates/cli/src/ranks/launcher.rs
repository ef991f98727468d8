//! Starting the ranks of a run with mpirun, and waiting for their end.

use std::ffi::OsString;
use std::io::IsTerminal;
#[cfg(unix)]
use std::io::{ErrorKind, Read, Write};
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

#[cfg(unix)]
use rustix::process::{Pid, Signal, kill_process};
#[cfg(unix)]
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
#[cfg(unix)]
use signal_hook::iterator::Signals;

use super::{Lines, Stopping, TOLD, launched, without_mpi};
use crate::failure::Failure;
use crate::output::errln;
#[cfg(unix)]
use crate::signals::heard;

/// How long mpirun may take to end behind the last rank.
#[cfg(unix)]
const TIME_TO_END: Duration = Duration::from_secs(5);
/// How often it is looked whether it has.
#[cfg(unix)]
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often ranks are told to stop that do not.
#[cfg(unix)]
const TELL_EVERY: Duration = Duration::from_millis(250);

/// The flag by which a launcher tells that somebody types.
const TYPED: &str = "--typed";

/// The flag by which it tells ranks that save that they are its own.
const LAUNCHED: &str = "--launched";

/// Starts `--ranks` processes of this program, unless a launcher has done so. Gives their exit code when they have ended.
pub fn launch(ranks: Option<u32>, lines: Lines, stopping: Stopping) -> Result<Option<u8>, Failure> {
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
