//! The kernels of a card: programs as they are shipped, of which the driver compiles one kernel after the other, each when it is first
//! launched.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_int};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use super::CudaError;
use super::context::{Context, Stream};
use super::driver::Handle;
use super::lower::MOST_SHARED_BYTES;

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`.
const MOST_SHARED: c_int = 8;

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
    pub fn function(&self, name: &'static str) -> Result<Handle, CudaError> {
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
        let mut module = null_mut();
        self.context.enter()?;
        // SAFETY: writes one handle; the text ends with a zero.
        let code = unsafe { (functions.module_load)(&mut module, image.as_ptr().cast()) };
        driver.check("cuModuleLoadData", code)?;
        let function = self.prepare(name, module, *much_shared).inspect_err(|_| {
            // SAFETY: it was loaded once.
            unsafe { (functions.module_unload)(module) };
        })?;
        all.insert(name, Loaded { module, function });
        Ok(function)
    }

    /// Finds the kernel of a module that was just loaded, and gives it the tables.
    fn prepare(&self, name: &str, module: Handle, much_shared: bool) -> Result<Handle, CudaError> {
        let (driver, functions) = (&self.context.driver, self.context.driver.functions());
        let (mut function, text) = (null_mut(), CString::new(name).unwrap_or_default());
        // SAFETY: writes one handle; the name ends with a zero.
        let code = unsafe { (functions.module_function)(&mut function, module, text.as_ptr()) };
        driver.check("cuModuleGetFunction", code)?;
        if much_shared {
            // SAFETY: the handle is the driver's.
            let code =
                unsafe { (functions.set_attribute)(function, MOST_SHARED, MOST_SHARED_BYTES as c_int) };
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
        stream.finish()?;
        Ok(function)
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
