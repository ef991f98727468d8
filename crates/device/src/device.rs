//! The seam between the step program and what it runs on.

use plimsoll_memory::{ALIGNMENT, Arena, FarMemory, Loan, OutOfMemory, Phase, Region, Tag};

use crate::repeat::count;
use crate::{CudaError, DType, Dry, Due, Iterations, Op, Shape, Tensor, Transferred};

/// What a device can fail with.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The arena is full.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The OS gave no memory.
    #[error(transparent)]
    Reservation(#[from] plimsoll_memory::ReservationError),
    /// A GPU or its driver failed, or has no kernel for an operation.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A tensor of that size cannot be.
    #[error("{name}: a tensor of shape {shape:?} and type {dtype} cannot be made")]
    ImpossibleTensor {
        /// The tensor's name.
        name: &'static str,
        /// The sizes asked for.
        shape: Vec<u64>,
        /// The element type asked for.
        dtype: DType,
    },
    /// An operation was given tensors that do not fit together: a programming error.
    #[error("{op}: {reason}")]
    Mismatch {
        /// The operation.
        op: &'static str,
        /// Which tensors, and why not.
        reason: String,
    },
}

/// What [`Device::lend`] gives.
#[derive(Debug)]
pub enum Lent {
    /// The tensor's memory.
    Memory(Loan),
    /// The tensor again, from a device without memory.
    Nothing(Tensor),
}

/// Bytes that are written to a device with memory of its own, or read from it, at once.
pub const TRANSFER_BYTES: u64 = 4 << 20;

/// What a plan has to know of the device that it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTraits {
    /// Whether the arena is host memory, which a disk reads into and writes from; else bytes are copied in and out.
    pub unified: bool,
    /// Tensors begin at multiples of so many bytes in the arena.
    pub alignment: u64,
    /// Whether operations are kernels of an NVIDIA GPU: those that have none are refused when a step is planned.
    pub cuda: bool,
}

impl DeviceTraits {
    /// The CPU's.
    pub const CPU: DeviceTraits = DeviceTraits { unified: true, alignment: ALIGNMENT, cuda: false };

    /// How many bytes of a tensor of `bytes` bytes are best written or read at once: all where the arena is host memory; else no
    /// more than [`TRANSFER_BYTES`], since they go through a buffer of that size.
    pub fn transfer_bytes(self, bytes: u64) -> u64 {
        if self.unified { bytes } else { bytes.min(TRANSFER_BYTES) }
    }
}

/// Something that carries out the operations of a step in memory of its own.
pub trait Device {
    /// What it is: a plan for it is made by a dry device of the same traits.
    fn traits(&self) -> DeviceTraits {
        DeviceTraits::CPU
    }

    /// Host memory for the tier below, of the kind that this device copies from and to best.
    ///
    /// # Errors
    /// The system gives none.
    fn host_memory(&self, bytes: u64) -> Result<Region, DeviceError> {
        Ok(Region::new(bytes)?)
    }

    /// The arena that all tensors of this device live in.
    fn arena(&self) -> &Arena;

    /// Labels what follows with a phase of the work and a layer.
    fn enter(&self, phase: Phase, layer: Option<u32>) {
        self.arena().enter(phase, layer);
    }

    /// Carries out one operation; [`DeviceExt::run`] takes a family's as it is. With a flag, an f32 `[1]`, it writes nothing
    /// where that is 0: the host need not know.
    fn execute(&self, op: Op<'_>, unless_zero: Option<&Tensor>) -> Result<(), DeviceError>;

    /// Lets `fill` write the tensor's bytes. A device without memory does not call it.
    fn write(&self, out: &Tensor, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), DeviceError>;

    /// Lets `look` read the tensor's bytes. A device without memory does not call it.
    fn read(&self, x: &Tensor, look: &mut dyn FnMut(&[u8])) -> Result<(), DeviceError>;

    /// Lets `exchange` read the bytes of one tensor and write those of another, which overlap nowhere. A device without memory
    /// does not call it.
    fn read_and_write(
        &self,
        x: &Tensor,
        out: &Tensor,
        exchange: &mut dyn FnMut(&[u8], &mut [u8]),
    ) -> Result<(), DeviceError> {
        let mut copy = Vec::new();
        self.read(x, &mut |bytes| copy.extend_from_slice(bytes))?;
        self.write(out, &mut |bytes| exchange(&copy, bytes))
    }

    /// Takes a tensor's memory out of the device's hands, so that another thread can fill it while the device works on
    /// others. It stays taken in the arena; [`reclaim`](Self::reclaim) makes a tensor of it again.
    ///
    /// # Errors
    /// The tensor belongs to another device, or others have views of its memory: then it is given up.
    fn lend(&self, tensor: Tensor) -> Result<Lent, DeviceError>;

    /// The whole block of memory that was lent as a tensor of [`DType::U8`].
    ///
    /// # Errors
    /// The memory is not this device's, or parts of it are still elsewhere.
    fn reclaim(&self, memory: Loan) -> Result<Tensor, DeviceError>;

    /// The memory of a tensor, for what reaches it without the host; what was begun with it comes first, and nothing else may be begun
    /// before that is done. `None` of a device whose memory nothing but the host reaches.
    ///
    /// # Errors
    /// The tensor belongs to another device.
    fn reach(&self, _: &Tensor) -> Result<Option<Box<dyn FarMemory>>, DeviceError> {
        Ok(None)
    }

    /// Begins a move between tiers, when what it follows behind is done, on the time lines of a dry run that has them.
    fn transfer(&self, _: Transferred, _behind: Due) -> Due {
        Due::default()
    }

    /// Waits until a move is done, on the time lines of a dry run that has them.
    fn wait(&self, _: Due) {}

    /// Whether nothing is behind the tensors: what is written into them is not asked for.
    fn is_dry(&self) -> bool {
        false
    }

    /// The dry device that iterations are counted on as soon as they repeat, where that is done: see [`DeviceExt::repeat`].
    fn counts_repeats(&self) -> Option<&Dry> {
        None
    }

    /// A new tensor; its contents are whatever was there.
    fn alloc(
        &self,
        dtype: DType,
        sizes: &[u64],
        tag: Tag,
        name: &'static str,
    ) -> Result<Tensor, DeviceError> {
        let fail = || DeviceError::ImpossibleTensor { name, shape: sizes.to_vec(), dtype };
        let shape = Shape::new(sizes).ok_or_else(fail)?;
        let bytes = dtype.bytes_for(shape.elements()).ok_or_else(fail)?;
        let block = self.arena().alloc(bytes, tag, name)?;
        Tensor::new(block, dtype, shape).ok_or_else(fail)
    }

    /// Copies an f32 tensor out. Zeros from a device without memory.
    fn read_f32(&self, x: &Tensor) -> Result<Vec<f32>, DeviceError> {
        if x.dtype() != DType::F32 {
            return Err(DeviceError::Mismatch { op: "read_f32", reason: format!("{x:?} is not f32") });
        }
        let mut values = vec![0.0; x.elements() as usize];
        self.read(x, &mut |bytes| bytemuck::cast_slice_mut(&mut values).copy_from_slice(bytes))?;
        Ok(values)
    }

    /// Copies a u32 tensor out.
    fn read_u32(&self, x: &Tensor) -> Result<Vec<u32>, DeviceError> {
        if x.dtype() != DType::U32 {
            return Err(DeviceError::Mismatch { op: "read_u32", reason: format!("{x:?} is not u32") });
        }
        let mut values = vec![0; x.elements() as usize];
        self.read(x, &mut |bytes| bytemuck::cast_slice_mut(&mut values).copy_from_slice(bytes))?;
        Ok(values)
    }

    /// Copies token ids or positions in.
    fn write_u32(&self, out: &Tensor, values: &[u32]) -> Result<(), DeviceError> {
        if out.dtype() != DType::U32 || out.elements() != values.len() as u64 {
            let reason = format!("{out:?} cannot take {} u32 values", values.len());
            return Err(DeviceError::Mismatch { op: "write_u32", reason });
        }
        self.write(out, &mut |bytes| bytes.copy_from_slice(bytemuck::cast_slice(values)))
    }

    /// Copies f32 values in.
    fn write_f32(&self, out: &Tensor, values: &[f32]) -> Result<(), DeviceError> {
        if out.dtype() != DType::F32 || out.elements() != values.len() as u64 {
            let reason = format!("{out:?} cannot take {} f32 values", values.len());
            return Err(DeviceError::Mismatch { op: "write_f32", reason });
        }
        self.write(out, &mut |bytes| bytes.copy_from_slice(bytemuck::cast_slice(values)))
    }
}

/// What every device can be asked for that no object can say by itself.
pub trait DeviceExt: Device {
    /// Carries out one operation, of any family.
    fn run<'a>(&self, op: impl Into<Op<'a>>) -> Result<(), DeviceError> {
        self.execute(op.into(), None)
    }

    /// The same, but nothing where a flag on the device, an f32 `[1]`, is 0.
    fn run_unless_zero<'a>(&self, flag: &Tensor, op: impl Into<Op<'a>>) -> Result<(), DeviceError> {
        self.execute(op.into(), Some(flag))
    }

    /// Runs `times` iterations that do the same on other data. A device without memory runs them only until they repeat and
    /// counts the others.
    fn repeat<I: Iterations>(&self, times: u64, mut iterations: I) -> Result<(), I::Error> {
        if let Some(dry) = self.counts_repeats() {
            return count(dry, times, iterations);
        }
        for index in 0..times {
            iterations.run(index)?;
        }
        Ok(())
    }
}

impl<D: Device + ?Sized> DeviceExt for D {}
