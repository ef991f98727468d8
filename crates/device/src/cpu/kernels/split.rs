//! Handing out disjoint parts of outputs to tasks: the one place where kernels share memory to write.

use std::marker::PhantomData;

use super::Exec;
use super::storage::FloatsMut;
use crate::cpu::pool::Worker;

/// Something to write of which each task gets a part of its own.
pub(super) trait Split: Sync {
    type Part;

    /// The part of task number `task`.
    ///
    /// # Safety
    /// No part may be taken again while it is in use.
    unsafe fn part(&self, task: usize) -> Self::Part;
}

/// Runs `body(task, part, worker)` for every task in `0..tasks`.
pub(super) fn for_each_part<S: Split>(
    exec: Exec<'_>,
    tasks: usize,
    outputs: S,
    body: impl Fn(usize, S::Part, &mut Worker<'_>) + Sync,
) {
    exec.pool.run(tasks, &|task, worker| {
        // SAFETY: the pool runs each task once.
        let part = unsafe { outputs.part(task) };
        body(task, part, worker);
    });
}

/// A slice that falls into parts of `width` elements, the last one perhaps shorter.
pub(super) struct Shared<'a, T> {
    data: *mut T,
    len: usize,
    width: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a `&mut [T]` whose disjoint parts go to different threads, as `Split::part` demands.
unsafe impl<T: Send> Sync for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub fn new(slice: &'a mut [T], width: usize) -> Shared<'a, T> {
        Shared { data: slice.as_mut_ptr(), len: slice.len(), width, life: PhantomData }
    }
}

impl<'a, T: Send> Split for Shared<'a, T> {
    type Part = &'a mut [T];

    unsafe fn part(&self, task: usize) -> &'a mut [T] {
        let start = self.len.min(task * self.width);
        let end = self.len.min(start + self.width);
        // SAFETY: the range lies inside the slice that this value borrows for its life, ranges of different tasks
        // are disjoint, and the caller vouches that this one is not in use.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), end - start) }
    }
}

/// Stored floats whose parts are handed out.
pub(super) enum SharedFloats<'a> {
    F32(Shared<'a, f32>),
    Bf16(Shared<'a, half::bf16>),
    F16(Shared<'a, half::f16>),
}

impl<'a> SharedFloats<'a> {
    pub fn new(floats: FloatsMut<'a>, width: usize) -> SharedFloats<'a> {
        match floats {
            FloatsMut::F32(x) => SharedFloats::F32(Shared::new(x, width)),
            FloatsMut::Bf16(x) => SharedFloats::Bf16(Shared::new(x, width)),
            FloatsMut::F16(x) => SharedFloats::F16(Shared::new(x, width)),
        }
    }
}

impl<'a> Split for SharedFloats<'a> {
    type Part = FloatsMut<'a>;

    unsafe fn part(&self, task: usize) -> FloatsMut<'a> {
        // SAFETY: the caller's promise is passed on.
        unsafe {
            match self {
                SharedFloats::F32(x) => FloatsMut::F32(x.part(task)),
                SharedFloats::Bf16(x) => FloatsMut::Bf16(x.part(task)),
                SharedFloats::F16(x) => FloatsMut::F16(x.part(task)),
            }
        }
    }
}

impl<S: Split, const N: usize> Split for [S; N] {
    type Part = [S::Part; N];

    unsafe fn part(&self, task: usize) -> Self::Part {
        // SAFETY: the caller's promise is passed on.
        self.each_ref().map(|s| unsafe { s.part(task) })
    }
}

impl<A: Split, B: Split> Split for (A, B) {
    type Part = (A::Part, B::Part);

    unsafe fn part(&self, task: usize) -> Self::Part {
        // SAFETY: the caller's promise is passed on.
        unsafe { (self.0.part(task), self.1.part(task)) }
    }
}

impl<S: Split> Split for Option<S> {
    type Part = Option<S::Part>;

    unsafe fn part(&self, task: usize) -> Self::Part {
        // SAFETY: the caller's promise is passed on.
        self.as_ref().map(|s| unsafe { s.part(task) })
    }
}
