//! A card in use: its context, memory, streams, events and kernels. Each gives back what it took.
//!
//! Contexts belong to threads: whatever a thread asks of the driver, it enters the context first.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use smallvec::SmallVec;

use super::driver::{Address, Driver, Handle, is_out_of_memory};
use super::lower::{Boxes, Launch, MAP_BYTES, MOST_SHARED_BYTES};
use super::{Card, CudaError};

/// A stream that waits for no other, and an event that measures no time.
const NON_BLOCKING: c_uint = 1;
const DISABLE_TIMING: c_uint = 2;
/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MOST_SHARED: c_int = 8;
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
    pub unsafe fn launch(&self, kernels: &Kernels, launch: &Launch) -> Result<(), CudaError> {
        let function = kernels.function(launch.kernel)?;
        self.context.enter()?;
        let at = |start: &u32| launch.parameters.get(*start as usize..).unwrap_or_default().as_ptr();
        let starts = launch.starts.iter().map(|start| at(start).cast_mut().cast());
        // The driver knows how many there are; without a GPU, the end is looked for.
        let mut parameters: SmallVec<[*mut c_void; 25]> = starts.chain([null_mut()]).collect();
        let [across, down] = launch.blocks;
        // SAFETY: the driver copies the parameters, which the caller vouches for, before it returns.
        let code = unsafe {
            (self.context.driver.functions().launch)(
                function,
                across,
                down,
                1,
                launch.threads,
                1,
                1,
                launch.shared_bytes,
                self.handle,
                parameters.as_mut_ptr(),
                null_mut(),
            )
        };
        self.context.driver.check("cuLaunchKernel", code)
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

/// A program, the names of its kernels, and whether these need more shared memory than every card has.
pub(super) struct Program {
    pub ptx: &'static str,
    pub kernels: &'static [&'static str],
    pub much_shared: bool,
}

/// What a kernel begins with in a program.
const ENTRY: &str = "\n.visible .entry ";
/// The constants that every kernel knows.
const TABLES: &CStr = c"tables";
/// Bytes of a card that all kernels take together, at most: 5 MB of instructions, in pages of 2 MiB.
const KERNEL_BYTES: u64 = 16 << 20;

/// A kernel's text: what comes before all kernels of its program, and its own.
#[derive(Clone, Copy, Debug)]
struct Source {
    head: &'static str,
    body: &'static str,
    much_shared: bool,
}

impl Program {
    /// The kernels by name.
    fn sources(&self) -> impl Iterator<Item = (&'static str, Source)> {
        let Program { ptx, kernels, much_shared } = *self;
        let mut parts = ptx.split(ENTRY);
        let head = parts.next().unwrap_or_default();
        parts.filter_map(move |body| {
            let (written, _) = body.split_once('(')?;
            let name = kernels.iter().find(|name| **name == written)?;
            Some((*name, Source { head, body, much_shared }))
        })
    }
}

/// A kernel that the driver has compiled, and the module that it is alone in.
#[derive(Debug)]
struct Loaded {
    module: Handle,
    function: Handle,
}

/// The kernels. The driver compiles one when it is first launched, and keeps the result on the disk: compiling all of them takes most of a
/// minute, since it compiles one at a time, and a run needs a few of them.
#[derive(Debug)]
pub(super) struct Kernels {
    context: Arc<Context>,
    sources: HashMap<&'static str, Source>,
    tables: Vec<u8>,
    loaded: Mutex<HashMap<&'static str, Loaded>>,
}

impl Kernels {
    /// Those of some programs, which know these tables.
    pub fn new(context: &Arc<Context>, programs: &[Program], tables: Vec<u8>) -> Kernels {
        let sources = programs.iter().flat_map(Program::sources).collect();
        Kernels { context: Arc::clone(context), sources, tables, loaded: Mutex::default() }
    }

    /// Bytes of the card that kernels may take that are not there yet.
    pub fn bytes_to_come(&self) -> u64 {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner).len() as u64;
        KERNEL_BYTES - KERNEL_BYTES * loaded / (self.sources.len() as u64).max(1)
    }

    /// The kernel of that name, compiled if it is not yet.
    fn function(&self, name: &'static str) -> Result<Handle, CudaError> {
        let mut all = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(loaded) = all.get(name) {
            return Ok(loaded.function);
        }
        let source = self.sources.get(name).ok_or(CudaError::NotYet { op: name, reason: None })?;
        let (driver, functions) = (&self.context.driver, self.context.driver.functions());
        let Source { head, body, much_shared } = source;
        let image = CString::new(format!("{head}{ENTRY}{body}")).map_err(|_| {
            let reason = format!("{name} holds a zero");
            CudaError::Refused { call: "cuModuleLoadData", reason }
        })?;
        let (mut module, mut function) = (null_mut(), null_mut());
        self.context.enter()?;
        // SAFETY: writes one handle; the text ends with a zero.
        let code = unsafe { (functions.module_load)(&mut module, image.as_ptr().cast()) };
        driver.check("cuModuleLoadData", code)?;
        let prepared = self.prepare(name, module, *much_shared, &mut function);
        if let Err(error) = prepared {
            // SAFETY: it was loaded once.
            unsafe { (functions.module_unload)(module) };
            return Err(error);
        }
        all.insert(name, Loaded { module, function });
        Ok(function)
    }

    /// Finds the kernel of a module that was just loaded, and gives it the tables.
    fn prepare(
        &self,
        name: &str,
        module: Handle,
        much_shared: bool,
        function: &mut Handle,
    ) -> Result<(), CudaError> {
        let (driver, functions) = (&self.context.driver, self.context.driver.functions());
        let text = CString::new(name).unwrap_or_default();
        // SAFETY: writes one handle; the name ends with a zero.
        let code = unsafe { (functions.module_function)(function, module, text.as_ptr()) };
        driver.check("cuModuleGetFunction", code)?;
        if much_shared {
            // SAFETY: the handle is the driver's.
            let code =
                unsafe { (functions.set_attribute)(*function, MOST_SHARED, MOST_SHARED_BYTES as c_int) };
            driver.check("cuFuncSetAttribute", code)?;
        }
        let (mut address, mut size) = (0, 0);
        // SAFETY: writes an address and a number; the name ends with a zero.
        let code = unsafe { (functions.module_global)(&mut address, &mut size, module, TABLES.as_ptr()) };
        driver.check("cuModuleGetGlobal", code)?;
        if size != self.tables.len() {
            let reason = format!("the tables of {name} have {size} bytes, not {}", self.tables.len());
            return Err(CudaError::Refused { call: "cuModuleGetGlobal", reason });
        }
        let stream = Stream::new(&self.context)?;
        // SAFETY: nobody writes the tables, and the stream is waited for.
        unsafe { stream.copy_in(address, &self.tables)? };
        stream.finish()
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // Where the context cannot be entered, giving back is tried all the same.
        let _ = self.context.enter();
        for loaded in self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner).values() {
            // SAFETY: it was loaded once.
            unsafe { (self.context.driver.functions().module_unload)(loaded.module) };
        }
    }
}

// SAFETY: handles of functions may be used from any thread that is in the context.
unsafe impl Send for Kernels {}
// SAFETY: as above.
unsafe impl Sync for Kernels {}

#[cfg(test)]
mod tests {
    use super::super::{PTX, PTX_80, PTX_90, lower};
    use super::*;

    #[test]
    fn each_kernel_has_its_text() {
        let all: [(&str, &[&str]); 3] =
            [(PTX, &lower::KERNELS), (PTX_80, &lower::KERNELS_80), (PTX_90, &lower::KERNELS_90)];
        for (ptx, kernels) in all {
            let program = Program { ptx, kernels, much_shared: false };
            let mut found: Vec<(&str, Source)> = program.sources().collect();
            found.sort_unstable_by_key(|(name, _)| *name);
            assert!(found.iter().map(|(name, _)| *name).eq(kernels.iter().copied()));
            assert!(found.iter().all(|(_, source)| source.head.contains(".version")));
            assert!(found.iter().all(|(_, source)| source.head.contains(" tables[")));
        }
    }
}
