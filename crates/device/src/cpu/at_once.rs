//! Work that is cut into parts, on threads of its own: what is done beside a pool's kernels, such as quantising weights on
//! their way in, or planning.

use std::sync::{Mutex, PoisonError};
use std::thread::{Builder, scope};

use plimsoll_memory::{current_core, run_beside};

/// What `work` makes of each part, in the parts' order, by `threads` at a time of which the calling thread is one. A thread that
/// is done takes the next part. Where the system refuses a thread, the others do its work.
///
/// The threads may use every other core of the process, however few the calling thread keeps to.
///
/// # Panics
/// As `work` does.
pub fn at_once<I, R>(parts: I, threads: usize, work: impl Fn(I::Item) -> R + Sync) -> Vec<R>
where
    I: IntoIterator<IntoIter: ExactSizeIterator + Send>,
    R: Send,
{
    let parts = parts.into_iter();
    let count = parts.len();
    let parts = Mutex::new(parts.enumerate());
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let some = || {
        let mut done = Vec::new();
        while let Some((place, part)) = next() {
            done.push((place, work(part)));
        }
        done
    };
    let own_core = current_core();
    let mut done = scope(|scope| {
        let beside = || {
            run_beside(own_core);
            some()
        };
        let others: Vec<_> =
            (1..threads.min(count)).filter_map(|_| Builder::new().spawn_scoped(scope, beside).ok()).collect();
        let mut done = some();
        for other in others {
            match other.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_unstable_by_key(|(place, _)| *place);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_done_once_and_results_are_in_order() {
        for threads in [0, 1, 2, 7] {
            let mut values: Vec<u32> = (0..1001).collect();
            let sums = at_once(values.chunks_mut(10), threads, |part| {
                part.iter_mut().for_each(|value| *value += 1);
                part.iter().sum::<u32>()
            });
            assert!(values.iter().copied().eq(1..1002));
            let expected: Vec<u32> = values.chunks(10).map(|part| part.iter().sum()).collect();
            assert_eq!(sums, expected);
        }
        assert!(at_once([0; 0], 3, |part: i32| part).is_empty());
    }
}
