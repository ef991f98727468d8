//! A card in use: its context, memory, streams and events. Each gives back what it took.
//!
//! Contexts belong to threads: whatever a thread asks of the driver, it enters the context first.

use std::ffi::{c_int, c_uint};
use std::ptr::null_mut;
use std::sync::Arc;

use super::driver::{Address, Driver, Handle, is_not_ready, is_out_of_memory};
use super::graphs::Ready;
use super::lower::{Boxes, MAP_BYTES};
use super::{Card, CudaError};

/// A stream that waits for no other, and an event that measures no time.
const NON_BLOCKING: c_uint = 1;
const DISABLE_TIMING: c_uint = 2;
/// Of `cuTensorMapEncodeTiled`: numbers of bf16, lines one after the other, which are placed by turns of 128 bytes; 256 bytes at a time come
/// to the second cache; zeros outside.
const BF16: c_int = 9;
const NOT_INTERLEAVED: c_int = 0;
const TURNS_OF_128_BYTES: c_int = 3;
const PROMOTE_256_BYTES: c_int = 3;
const ZEROS_OUTSIDE: c_int = 0;

/// A card's primary context.
#[derive(Debug)]
pub(super) struct Context {
    pub driver: Driver,
    pub card: Card,
    ordinal: i32,
    handle: Handle,
}

// SAFETY: the driver's functions may be called from any thread that has made the context its own, which `enter` does.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    pub fn new(driver: &Driver, index: u32) -> Result<Arc<Context>, CudaError> {
        let card = driver.card(index)?;
        let (ordinal, mut handle) = (driver.ordinal(index)?, null_mut());
        // SAFETY: writes one handle.
        driver.check("cuDevicePrimaryCtxRetain", unsafe {
            (driver.functions().retain)(&mut handle, ordinal)
        })?;
        let context = Arc::new(Context { driver: driver.clone(), card, ordinal, handle });
        context.enter()?;
        Ok(context)
    }

    /// Makes the context the calling thread's.
    pub fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the handle is the driver's and lives as long as this.
        let code = unsafe { (self.driver.functions().set_current)(self.handle) };
        self.driver.check("cuCtxSetCurrent", code)
    }

    /// Bytes that are free, and all that there are.
    pub fn memory(&self) -> Result<(u64, u64), CudaError> {
        let (mut free, mut total) = (0, 0);
        self.enter()?;
        // SAFETY: writes two numbers.
        let code = unsafe { (self.driver.functions().memory)(&mut free, &mut total) };
        self.driver.check("cuMemGetInfo", code)?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it was retained once; all that was made in it holds it.
        unsafe { (self.driver.functions().release)(self.ordinal) };
    }
}

/// Memory of a card.
#[derive(Debug)]
pub(super) struct Allocation {
    pub context: Arc<Context>,
    pub address: Address,
}

impl Allocation {
    pub fn new(context: &Arc<Context>, bytes: u64) -> Result<Allocation, CudaError> {
        let mut address = 0;
        context.enter()?;
        // Nothing cannot be had, and what is never used costs as little as the least that can be.
        let size = usize::try_from(bytes.max(1)).unwrap_or(usize::MAX);
        // SAFETY: writes one address.
        let code = unsafe { (context.driver.functions().alloc)(&mut address, size) };
        if is_out_of_memory(code) {
            let (free, total) = context.memory()?;
            return Err(CudaError::OutOfMemory { bytes, free, total });
        }
        context.driver.check("cuMemAlloc", code)?;
        Ok(Allocation { context: Arc::clone(context), address })
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        // Where the context cannot be entered, giving back is tried all the same.
        let _ = self.context.enter();
        // SAFETY: it was allocated once. The driver waits for what still uses it.
        unsafe { (self.context.driver.functions().free)(self.address) };
    }
}

/// Work in order.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    handle: Handle,
}

// SAFETY: streams may be used from any thread that is in their context.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver orders what several threads put on one.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn new(context: &Arc<Context>) -> Result<Stream, CudaError> {
        let mut handle = null_mut();
        context.enter()?;
        // SAFETY: writes one handle.
        let code = unsafe { (context.driver.functions().stream_create)(&mut handle, NON_BLOCKING) };
        context.driver.check("cuStreamCreate", code)?;
        Ok(Stream { context: Arc::clone(context), handle })
    }

    /// Waits until all that was put on it is done.
    pub fn finish(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the handle is the driver's.
        let code = unsafe { (self.context.driver.functions().stream_finish)(self.handle) };
        self.context.driver.check("cuStreamSynchronize", code)
    }

    /// Whether all that was put on it is done.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.context.enter()?;
        // SAFETY: the handle is the driver's.
        let code = unsafe { (self.context.driver.functions().stream_query)(self.handle) };
        if is_not_ready(code) {
            return Ok(false);
        }
        self.context.driver.check("cuStreamQuery", code).map(|()| true)
    }

    /// The driver's own name of it, for a library that puts work on it.
    pub fn handle(&self) -> Handle {
        self.handle
    }

    /// Has what follows on it begin when what the other one has so far is done.
    pub fn wait_for(&self, other: &Stream) -> Result<(), CudaError> {
        let (driver, functions) = (&self.context.driver, self.context.driver.functions());
        let event = Event::new(&self.context)?;
        // SAFETY: the handles are the driver's.
        driver.check("cuEventRecord", unsafe { (functions.event_record)(event.handle, other.handle) })?;
        // SAFETY: as above; the driver keeps what it needs of an event that is given back.
        driver.check("cuStreamWaitEvent", unsafe { (functions.stream_wait)(self.handle, event.handle, 0) })
    }

    /// Begins a copy to the card.
    ///
    /// # Safety
    /// Nobody writes the bytes before the stream has come so far.
    pub unsafe fn copy_in(&self, to: Address, from: &[u8]) -> Result<(), CudaError> {
        if from.is_empty() {
            return Ok(());
        }
        self.context.enter()?;
        let from_bytes = from.as_ptr().cast();
        // SAFETY: the bytes are there, says the caller.
        let code =
            unsafe { (self.context.driver.functions().copy_in)(to, from_bytes, from.len(), self.handle) };
        self.context.driver.check("cuMemcpyHtoDAsync", code)
    }

    /// Begins a copy from the card.
    ///
    /// # Safety
    /// Nobody reads or writes the bytes before the stream has come so far.
    pub unsafe fn copy_out(&self, to: &mut [u8], from: Address) -> Result<(), CudaError> {
        if to.is_empty() {
            return Ok(());
        }
        self.context.enter()?;
        let to_bytes = to.as_mut_ptr().cast();
        // SAFETY: the bytes are there, says the caller.
        let code =
            unsafe { (self.context.driver.functions().copy_out)(to_bytes, from, to.len(), self.handle) };
        self.context.driver.check("cuMemcpyDtoHAsync", code)
    }

    /// Begins a kernel.
    ///
    /// # Safety
    /// The addresses among the parameters are of memory that is not given back before the stream has come so far.
    pub unsafe fn launch(&self, ready: &Ready) -> Result<(), CudaError> {
        self.context.enter()?;
        let mut parameters = ready.places();
        let [across, down] = ready.blocks;
        // SAFETY: the driver copies the parameters, which the caller vouches for, before it returns.
        let code = unsafe {
            (self.context.driver.functions().launch)(
                ready.function as Handle,
                across,
                down,
                1,
                ready.threads,
                1,
                1,
                ready.shared_bytes,
                self.handle,
                parameters.as_mut_ptr(),
                null_mut(),
            )
        };
        self.context.driver.check("cuLaunchKernel", code)
    }

    /// Begins the kernels of a graph that was made executable.
    ///
    /// # Safety
    /// As of `launch`.
    pub unsafe fn launch_graph(&self, executable: Handle) -> Result<(), CudaError> {
        let functions = self.context.driver.graphs()?;
        self.context.enter()?;
        // SAFETY: the handles are the driver's; the caller vouches for the parameters.
        let code = unsafe { (functions.launch)(executable, self.handle) };
        self.context.driver.check("cuGraphLaunch", code)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Where the context cannot be entered, giving back is tried all the same.
        let _ = self.context.enter();
        // SAFETY: it was created once. What is on it is done all the same.
        unsafe { (self.context.driver.functions().stream_destroy)(self.handle) };
    }
}

/// A place in a stream.
struct Event<'a> {
    context: &'a Context,
    handle: Handle,
}

impl Event<'_> {
    fn new(context: &Context) -> Result<Event<'_>, CudaError> {
        let mut handle = null_mut();
        context.enter()?;
        // SAFETY: writes one handle.
        let code = unsafe { (context.driver.functions().event_create)(&mut handle, DISABLE_TIMING) };
        context.driver.check("cuEventCreate", code)?;
        Ok(Event { context, handle })
    }
}

impl Drop for Event<'_> {
    fn drop(&mut self) {
        // SAFETY: it was created once.
        unsafe { (self.context.driver.functions().event_destroy)(self.handle) };
    }
}

/// What a kernel copies boxes of a matrix by, as the driver encodes it.
#[repr(C, align(64))]
pub(super) struct TensorMap(pub [u8; MAP_BYTES]);

impl Context {
    /// Encodes what boxes are copied of.
    pub fn encode(&self, boxes: Boxes) -> Result<TensorMap, CudaError> {
        let Some(encode) = self.driver.encode_tiled() else {
            return Err(CudaError::DriverTooOld("it lacks cuTensorMapEncodeTiled".to_owned()));
        };
        let mut map = TensorMap([0; MAP_BYTES]);
        let steps = [1; 4];
        // SAFETY: writes the map; all arrays have as many numbers as four dimensions need.
        let code = unsafe {
            encode(
                (&raw mut map).cast(),
                BF16,
                boxes.rank,
                boxes.address,
                boxes.sizes.as_ptr(),
                boxes.strides.as_ptr(),
                boxes.tile.as_ptr(),
                steps.as_ptr(),
                NOT_INTERLEAVED,
                TURNS_OF_128_BYTES,
                PROMOTE_256_BYTES,
                ZEROS_OUTSIDE,
            )
        };
        self.driver.check("cuTensorMapEncodeTiled", code)?;
        Ok(map)
    }
}
