//! What the process takes beside its arenas: program, threads, tokenizer.
//!
//! A plan is made by one process and carried out by another, at another time, and the resident set of a process drifts: the system maps
//! as much of a program as it has at hand, and a heap keeps what it once needed. So what is counted is stated, from what determines it,
//! and is the same in every process. What a process has measured counts only where it is more.

use plimsoll_device::cpu::Pool;

use crate::session::resident_bytes;

/// Program, libraries, heap, and the batch, metrics and checkpoints of a run: 24 to 28 MiB were measured, in runs of every kind.
const PROGRAM: u64 = 34 << 20;

/// The same where a model only answers: 20 to 23 MiB were measured.
const PROGRAM_THAT_ANSWERS: u64 = 26 << 20;

/// What MPI adds to that in a process that is one of several ranks, beyond what others have to spare: 2 to 4 MiB were measured.
const OF_RANK: u64 = 4 << 20;

/// What a thread has touched of its stack and heap.
const OF_THREAD: u64 = 64 << 10;

/// A token of a tokenizer, its merges, and its share of words that were encoded before: 350 bytes were measured.
const OF_TOKEN: u64 = 352;

/// The same where only prompts are encoded: 180 bytes were measured.
const OF_TOKEN_TO_ANSWER: u64 = 224;

/// What a token takes beside that while the tokenizer is saved: 120 bytes were measured.
const OF_TOKEN_SAVED: u64 = 128;

/// Pages of the program, stacks and threads' heaps that the work itself will be the first to touch: at most 3 MiB were
/// measured, whatever the model and the number of threads.
const FIRST_TOUCHED: u64 = 4 << 20;

/// What reading data and encoding it leaves in memory: 1.2 to 1.7 MiB were measured.
const OF_DATA: u64 = 2 << 20;

/// Where what was measured counts, it is rounded up to so much for the next process.
const GRAIN: u64 = 8 << 20;

/// How far the process has come that counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The tokenizer is in memory, if there is one. Another process will read the data and carry out the plan.
    Planning,
    /// The same of a model that another process will have answer: there is no data.
    PlanningAnswers,
    /// Everything but the arena is in memory.
    Ready,
}

/// What a process with these threads and a tokenizer of so many tokens takes beside its arenas.
pub fn overhead_bytes(pool: &Pool, tokens: u64, progress: Progress, is_rank: bool) -> u64 {
    let program = match progress {
        Progress::Planning | Progress::Ready => PROGRAM,
        Progress::PlanningAnswers => PROGRAM_THAT_ANSWERS,
    };
    let program = program + if is_rank { OF_RANK } else { 0 };
    let stated = stated_bytes(program, pool).saturating_add(tokenizer_bytes(tokens, progress));
    let measured = measured_bytes(pool).saturating_add(match progress {
        Progress::Planning | Progress::Ready => tokens.saturating_mul(OF_TOKEN_SAVED),
        Progress::PlanningAnswers => 0,
    });
    counted(stated, measured, progress)
}

/// The same on a machine that is described by a file, which has it without a tokenizer.
pub fn overhead_without_tokenizer(pool: &Pool) -> u64 {
    stated_bytes(PROGRAM, pool)
}

/// What a tokenizer of so many tokens adds to that.
pub fn tokenizer_bytes(tokens: u64, progress: Progress) -> u64 {
    tokens.saturating_mul(match progress {
        Progress::Planning | Progress::Ready => OF_TOKEN,
        Progress::PlanningAnswers => OF_TOKEN_TO_ANSWER,
    })
}

fn stated_bytes(program: u64, pool: &Pool) -> u64 {
    let threads = (pool.threads() as u64).saturating_mul(OF_THREAD);
    [pool.bytes(), threads].into_iter().fold(program, u64::saturating_add)
}

/// What is stated, or what was measured where that is more.
fn counted(stated: u64, measured: u64, progress: Progress) -> u64 {
    let expected = match progress {
        Progress::Ready => return stated.max(measured),
        Progress::Planning => measured.saturating_add(OF_DATA),
        Progress::PlanningAnswers => measured,
    };
    match expected > stated {
        true => expected.checked_next_multiple_of(GRAIN).unwrap_or(u64::MAX),
        false => stated,
    }
}

/// What this process has now and is certain to take.
pub fn measured_bytes(pool: &Pool) -> u64 {
    resident_bytes().saturating_add(pool.untouched_bytes()).saturating_add(FIRST_TOUCHED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_is_the_same_however_much_the_process_has_touched() {
        let pool = Pool::new(2, 1 << 20).unwrap();
        let before = overhead_bytes(&pool, 1 << 20, Progress::Planning, false);
        assert_eq!(before, PROGRAM + pool.bytes() + 2 * OF_THREAD + (OF_TOKEN << 20));
        let touched = std::hint::black_box(vec![1u8; 64 << 20]);
        pool.run(8, &|_, worker| worker.scratch.fill(1));
        assert_eq!(overhead_bytes(&pool, 1 << 20, Progress::Ready, false), before);
        drop(touched);
    }

    #[test]
    fn what_was_measured_counts_where_it_is_more_and_a_plan_leaves_room_for_the_run() {
        let stated = (37 << 20) + 5;
        for measured in [1 << 20, 33 << 20, (35 << 20) + 5] {
            for progress in [Progress::Planning, Progress::Ready] {
                assert_eq!(counted(stated, measured, progress), stated, "{measured}");
            }
        }
        for measured in [36 << 20, 40 << 20, 101 << 20] {
            let planned = counted(stated, measured, Progress::Planning);
            assert!(planned.is_multiple_of(GRAIN) && planned >= stated);
            assert!(counted(stated, measured + OF_DATA, Progress::Ready) <= planned, "{measured}");
        }
    }
}
