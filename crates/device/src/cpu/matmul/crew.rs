//! Who works on a product, and with what memory: all threads of a pool, or the calling thread alone.

use super::SCRATCH_BYTES;
use super::blocked::STRIP_BYTES;
use crate::cpu::Pool;
use crate::cpu::pool::Session;

/// A piece of memory that is plain bytes to its users.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memory {
    /// 64-byte aligned.
    pub start: *mut u8,
    pub bytes: usize,
}

// SAFETY: an address and a size; those who write there say in each place why nobody else does.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// The threads that work on a product.
pub(super) trait Crew {
    fn threads(&self) -> usize;

    /// Memory that all tasks share.
    fn common(&mut self) -> Memory;

    /// Runs `body(task, own)` for every task, `own` being memory that no other task uses meanwhile. Tasks begin in
    /// order.
    fn run(&mut self, tasks: usize, body: &(dyn Fn(usize, Memory) + Sync));

    /// Runs `body(task, follows)` for every task; those that a thread runs mostly follow each other, and `follows` says
    /// whether this one does.
    fn run_side_by_side(&mut self, tasks: usize, body: &(dyn Fn(usize, bool) + Sync));
}

/// All threads of a pool.
pub(super) struct Everybody<'a>(pub Session<'a>);

impl Crew for Everybody<'_> {
    fn threads(&self) -> usize {
        self.0.threads()
    }

    fn common(&mut self) -> Memory {
        Memory { start: self.0.common(), bytes: Pool::COMMON_BYTES }
    }

    fn run(&mut self, tasks: usize, body: &(dyn Fn(usize, Memory) + Sync)) {
        self.0.run(tasks, &|task, worker| {
            body(task, Memory { start: worker.scratch.as_mut_ptr(), bytes: worker.scratch.len() });
        });
    }

    fn run_side_by_side(&mut self, tasks: usize, body: &(dyn Fn(usize, bool) + Sync)) {
        self.0.run_side_by_side(tasks, &|task, worker| body(task, worker.follows));
    }
}

/// The calling thread alone, with a buffer of which a part stands for the common memory.
pub(super) struct Alone {
    common: Memory,
    own: Memory,
}

impl Alone {
    pub fn new(scratch: &mut [u8]) -> Alone {
        assert!(scratch.len() >= SCRATCH_BYTES, "{} bytes of scratch are too few", scratch.len());
        let skip = scratch.as_ptr().align_offset(64);
        let start = scratch.as_mut_ptr().wrapping_add(skip);
        Alone {
            common: Memory {
                start: start.wrapping_add(STRIP_BYTES),
                bytes: scratch.len() - skip - STRIP_BYTES,
            },
            own: Memory { start, bytes: STRIP_BYTES },
        }
    }
}

impl Crew for Alone {
    fn threads(&self) -> usize {
        1
    }

    fn common(&mut self) -> Memory {
        self.common
    }

    fn run(&mut self, tasks: usize, body: &(dyn Fn(usize, Memory) + Sync)) {
        for task in 0..tasks {
            body(task, self.own);
        }
    }

    fn run_side_by_side(&mut self, tasks: usize, body: &(dyn Fn(usize, bool) + Sync)) {
        for task in 0..tasks {
            body(task, task > 0);
        }
    }
}
