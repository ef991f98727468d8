//! Where tensors become slices of the device's memory.

use std::marker::PhantomData;

use half::{bf16, f16};

use super::kernels::{Floats, FloatsMut, Input};
use super::matmul::{Dithered, Operand, Output};
use crate::{DType, Rounding, Tensor};

/// The memory behind an arena, for the time of one operation.
#[derive(Clone, Copy)]
pub(super) struct Slices<'a> {
    base: *mut u8,
    life: PhantomData<&'a mut [u8]>,
}

impl<'a> Slices<'a> {
    /// # Safety
    /// `base` is the first of as many bytes as the arena has, aligned to its blocks, and nobody else uses those of the
    /// tensors asked for during `'a`. Every tensor asked for lives in the arena. A tensor that is written is asked for once to write, and no
    /// other tensor that is asked for shares a byte with it.
    pub unsafe fn new(base: *mut u8) -> Slices<'a> {
        Slices { base, life: PhantomData }
    }

    /// The tensor's first byte.
    fn start(self, tensor: &Tensor) -> *mut u8 {
        // SAFETY: the offset lies in the arena, which lies in the address space, so that it fits a usize.
        unsafe { self.base.add(tensor.range().start as usize) }
    }

    fn slice<T>(self, tensor: &Tensor) -> &'a [T] {
        debug_assert_eq!(tensor.dtype().block_bytes(), size_of::<T>() as u64);
        // SAFETY: the tensor's bytes lie in the arena, where any bytes are a valid `T` (a plain number); blocks and
        // rows keep the type's alignment; nobody writes them meanwhile, says `new`.
        unsafe { std::slice::from_raw_parts(self.start(tensor).cast(), tensor.elements() as usize) }
    }

    fn slice_mut<T>(self, tensor: &Tensor) -> &'a mut [T] {
        debug_assert_eq!(tensor.dtype().block_bytes(), size_of::<T>() as u64);
        // SAFETY: as in `slice`, and nobody else reads them either, says `new`.
        unsafe { std::slice::from_raw_parts_mut(self.start(tensor).cast(), tensor.elements() as usize) }
    }

    /// A tensor's bytes, of any type.
    pub fn bytes(self, tensor: &Tensor) -> &'a [u8] {
        // SAFETY: as in `slice`.
        unsafe { std::slice::from_raw_parts(self.start(tensor), tensor.bytes() as usize) }
    }

    /// A tensor's bytes, of any type, to write.
    pub fn bytes_mut(self, tensor: &Tensor) -> &'a mut [u8] {
        // SAFETY: as in `slice_mut`.
        unsafe { std::slice::from_raw_parts_mut(self.start(tensor), tensor.bytes() as usize) }
    }

    pub fn u32s(self, tensor: &Tensor) -> &'a [u32] {
        self.slice(tensor)
    }

    pub fn u32s_mut(self, tensor: &Tensor) -> &'a mut [u32] {
        self.slice_mut(tensor)
    }

    pub fn i8s(self, tensor: &Tensor) -> &'a [i8] {
        self.slice(tensor)
    }

    pub fn i8s_mut(self, tensor: &Tensor) -> &'a mut [i8] {
        self.slice_mut(tensor)
    }

    pub fn u8s_mut(self, tensor: &Tensor) -> &'a mut [u8] {
        self.slice_mut(tensor)
    }

    pub fn f64s(self, tensor: &Tensor) -> &'a [f64] {
        self.slice(tensor)
    }

    pub fn f64s_mut(self, tensor: &Tensor) -> &'a mut [f64] {
        self.slice_mut(tensor)
    }

    pub fn f32s(self, tensor: &Tensor) -> &'a [f32] {
        self.slice(tensor)
    }

    pub fn f32s_mut(self, tensor: &Tensor) -> &'a mut [f32] {
        self.slice_mut(tensor)
    }

    /// A float tensor to read. The checks of operations have refused the other types.
    pub fn floats(self, tensor: &Tensor) -> Floats<'a> {
        match tensor.dtype() {
            DType::F32 => Floats::F32(self.slice(tensor)),
            DType::Bf16 => Floats::Bf16(self.slice::<bf16>(tensor)),
            DType::F16 => Floats::F16(self.slice::<f16>(tensor)),
            _ => Floats::F32(&[]),
        }
    }

    /// A float tensor to write. The checks of operations have refused the other types.
    pub fn floats_mut(self, tensor: &Tensor) -> FloatsMut<'a> {
        match tensor.dtype() {
            DType::F32 => FloatsMut::F32(self.slice_mut(tensor)),
            DType::Bf16 => FloatsMut::Bf16(self.slice_mut::<bf16>(tensor)),
            DType::F16 => FloatsMut::F16(self.slice_mut::<f16>(tensor)),
            _ => FloatsMut::F32(&mut []),
        }
    }

    /// A float tensor to read that may be the memory of one of `outputs`.
    pub fn input(self, tensor: &Tensor, outputs: &[&Tensor]) -> Input<'a> {
        match outputs.iter().position(|out| out.same_memory(tensor)) {
            Some(output) => Input::InPlace(output),
            None => Input::Apart(self.floats(tensor)),
        }
    }

    /// A tensor as a matrix of its rows.
    pub fn matrix(self, tensor: &Tensor) -> Operand {
        let (rows, columns) = (tensor.rows() as usize, tensor.columns() as usize);
        let data = self.start(tensor).cast_const();
        Operand { data, dtype: tensor.dtype(), rows, columns, row_stride: columns, column_stride: 1 }
    }

    /// The transposed matrix.
    pub fn transposed(self, tensor: &Tensor) -> Operand {
        self.matrix(tensor).transposed()
    }

    /// A tensor as a matrix to write.
    pub fn output(self, tensor: &Tensor) -> Output {
        let (rows, columns) = (tensor.rows() as usize, tensor.columns() as usize);
        let (data, dtype) = (self.start(tensor), tensor.dtype());
        Output { data, dtype, rows, columns, row_stride: columns, dither: None }
    }

    /// The same, to be added to with this rounding.
    pub fn sums(self, tensor: &Tensor, rounding: Rounding) -> Output {
        let output = self.output(tensor);
        match rounding {
            Rounding::Nearest => output,
            Rounding::Stochastic { seed, first } => {
                Output { dither: Some(Dithered { seed, first, base: output.data.addr() }), ..output }
            }
        }
    }
}
