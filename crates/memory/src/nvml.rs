//! GPU memory as NVIDIA's driver counts it: NVML, loaded when it is first asked for.
//!
//! A machine without the driver has no NVML; that is an error in words, never a failure to start. Names and layouts: NVIDIA's NVML
//! API reference, <https://docs.nvidia.com/deploy/nvml-api/>. What the numbers mean for a run is left to the monitor.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::Path;

use crate::library::{Library, LibraryError};

/// The name under which drivers install the library.
const LIBRARY: &str = "libnvidia-ml.so.1";
const SUCCESS: c_int = 0;
const ERROR_INSUFFICIENT_SIZE: c_int = 7;
/// What NVML says of a process whose memory it does not know: `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;
/// Processes of a device that are asked for at most.
const MOST_PROCESSES: usize = 4096;

/// Why NVML says nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvmlError {
    /// There is no library.
    #[error(
        "NVIDIA's driver library could not be loaded: {0}; GPU memory is known where the NVIDIA driver is installed"
    )]
    NoLibrary(String),
    /// The library lacks a function.
    #[error("NVIDIA's driver library has no {0}; the driver is too old: 510 or later is needed")]
    NoFunction(String),
    /// A call was refused.
    #[error("{call} failed: {reason}")]
    Refused {
        /// The function.
        call: &'static str,
        /// The driver's own words.
        reason: String,
    },
}

impl From<LibraryError> for NvmlError {
    fn from(error: LibraryError) -> NvmlError {
        match error {
            LibraryError::NotLoaded(why) => NvmlError::NoLibrary(why),
            LibraryError::NoFunction(name) => NvmlError::NoFunction(name),
        }
    }
}

/// Memory of a GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuMemory {
    /// All of it.
    pub total: u64,
    /// What is in use, the driver's own share included.
    pub used: u64,
}

/// A process that computes on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuProcess {
    /// Its id, in the namespace of the driver: in a container it may be another than there.
    pub pid: u32,
    /// Bytes that it holds; `None` where the driver does not say.
    pub bytes: Option<u64>,
}

#[repr(C)]
struct RawMemory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t` of the calls whose names end in `_v3`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawProcess {
    pid: c_uint,
    used: u64,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

type Handle = *mut c_void;

/// The functions that are called.
struct Functions {
    shutdown: unsafe extern "C" fn() -> c_int,
    error: unsafe extern "C" fn(c_int) -> *const c_char,
    count: unsafe extern "C" fn(*mut c_uint) -> c_int,
    handle: unsafe extern "C" fn(c_uint, *mut Handle) -> c_int,
    memory: unsafe extern "C" fn(Handle, *mut RawMemory) -> c_int,
    processes: unsafe extern "C" fn(Handle, *mut c_uint, *mut RawProcess) -> c_int,
}

/// NVML, loaded and initialised; it is shut down and unloaded when this value is dropped.
pub struct Nvml {
    functions: Functions,
    library: Library,
}

impl Nvml {
    /// Loads and initialises the driver's library.
    ///
    /// # Errors
    /// [`NvmlError`] where there is no driver, or one that does not answer.
    pub fn load() -> Result<Nvml, NvmlError> {
        Nvml::open(Path::new(LIBRARY))
    }

    fn open(name: &Path) -> Result<Nvml, NvmlError> {
        type Init = unsafe extern "C" fn() -> c_int;
        let library = Library::open(name)?;
        // SAFETY: each type is that of the function in the reference.
        let (init, functions) = unsafe {
            let init: Init = library.function(c"nvmlInit_v2")?;
            let functions = Functions {
                shutdown: library.function(c"nvmlShutdown")?,
                error: library.function(c"nvmlErrorString")?,
                count: library.function(c"nvmlDeviceGetCount_v2")?,
                handle: library.function(c"nvmlDeviceGetHandleByIndex_v2")?,
                memory: library.function(c"nvmlDeviceGetMemoryInfo")?,
                processes: library.function(c"nvmlDeviceGetComputeRunningProcesses_v3")?,
            };
            (init, functions)
        };
        // SAFETY: takes nothing; may be called once for each shutdown.
        let code = unsafe { init() };
        if code != SUCCESS {
            return Err(refused(&functions, "nvmlInit", code));
        }
        Ok(Nvml { functions, library })
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), NvmlError> {
        if code == SUCCESS { Ok(()) } else { Err(refused(&self.functions, call, code)) }
    }

    /// How many GPUs there are.
    ///
    /// # Errors
    /// [`NvmlError::Refused`] with the driver's words.
    pub fn devices(&self) -> Result<u32, NvmlError> {
        let mut count = 0;
        // SAFETY: writes one number.
        self.check("nvmlDeviceGetCount", unsafe { (self.functions.count)(&mut count) })?;
        Ok(count)
    }

    fn handle(&self, index: u32) -> Result<Handle, NvmlError> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one handle.
        self.check("nvmlDeviceGetHandleByIndex", unsafe { (self.functions.handle)(index, &mut handle) })?;
        Ok(handle)
    }

    /// The memory of a GPU.
    ///
    /// # Errors
    /// [`NvmlError::Refused`] with the driver's words, where there is no such GPU for example.
    pub fn memory(&self, index: u32) -> Result<GpuMemory, NvmlError> {
        let handle = self.handle(index)?;
        let mut memory = RawMemory { total: 0, free: 0, used: 0 };
        // SAFETY: the handle is the driver's; three numbers are written.
        self.check("nvmlDeviceGetMemoryInfo", unsafe { (self.functions.memory)(handle, &mut memory) })?;
        Ok(GpuMemory { total: memory.total, used: memory.used })
    }

    /// The processes that compute on a GPU.
    ///
    /// # Errors
    /// [`NvmlError::Refused`] with the driver's words.
    pub fn processes(&self, index: u32) -> Result<Vec<GpuProcess>, NvmlError> {
        let handle = self.handle(index)?;
        let none = RawProcess { pid: 0, used: 0, gpu_instance: 0, compute_instance: 0 };
        let mut room = 32;
        loop {
            let mut list = vec![none; room];
            let mut count = c_uint::try_from(room).unwrap_or(c_uint::MAX);
            // SAFETY: the handle is the driver's; at most `count` entries are written, for which there is room.
            let code = unsafe { (self.functions.processes)(handle, &mut count, list.as_mut_ptr()) };
            if code == ERROR_INSUFFICIENT_SIZE && room < MOST_PROCESSES {
                // Others may start meanwhile.
                room = (2 * room).max(count as usize).min(MOST_PROCESSES);
                continue;
            }
            self.check("nvmlDeviceGetComputeRunningProcesses", code)?;
            list.truncate(count as usize);
            let known = |bytes: u64| (bytes != NOT_AVAILABLE).then_some(bytes);
            return Ok(list.iter().map(|p| GpuProcess { pid: p.pid, bytes: known(p.used) }).collect());
        }
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: it was initialised once; the library is still open.
        unsafe { (self.functions.shutdown)() };
    }
}

impl std::fmt::Debug for Nvml {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Nvml").field(&self.library).finish()
    }
}

fn refused(functions: &Functions, call: &'static str, code: c_int) -> NvmlError {
    // SAFETY: takes any number and gives a text that is never given back.
    let text = unsafe { (functions.error)(code) };
    let reason = match text.is_null() {
        true => format!("error {code}"),
        // SAFETY: not null, and NVML's texts end with a zero.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    };
    NvmlError::Refused { call, reason }
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use super::*;

    /// A driver of one GPU and forty processes, one of them of unknown size.
    const MOCK: &str = r#"
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned int pid; unsigned long long used; unsigned int gpu, compute; } process;
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 2 ? "Invalid Argument" : 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **out) { static int one; *out = &one; return index ? 2 : 0; }
int nvmlDeviceGetMemoryInfo(void *d, memory *m) { m->total = 24ULL << 30; m->used = 7ULL << 30; m->free = 17ULL << 30; return 0; }
#ifndef OLD
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned int *count, process *list) {
    unsigned int room = *count, i;
    *count = 40;
    if (room < 40) return 7;
    for (i = 0; i < 40; i++) { list[i].pid = 100 + i; list[i].used = i ? i << 20 : ~0ULL; }
    return 0;
}
#endif
"#;

    /// The mock as a library, if there is a compiler.
    fn mock(folder: &Path, flags: &[&str]) -> Option<PathBuf> {
        let (source, library) = (folder.join("mock.c"), folder.join("mock.so"));
        std::fs::write(&source, MOCK).unwrap();
        let mut cc = Command::new("cc");
        let made = cc.args(["-shared", "-fPIC", "-o"]).arg(&library).arg(&source).args(flags).status();
        made.is_ok_and(|made| made.success()).then_some(library)
    }

    #[test]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn a_driver_is_asked_by_its_own_layout() {
        let folder = tempfile::tempdir().unwrap();
        let Some(library) = mock(folder.path(), &[]) else { return };
        let nvml = Nvml::open(&library).unwrap();
        assert_eq!(nvml.devices(), Ok(1));
        assert_eq!(nvml.memory(0), Ok(GpuMemory { total: 24 << 30, used: 7 << 30 }));
        let processes = nvml.processes(0).unwrap();
        assert_eq!(processes.len(), 40);
        assert_eq!(processes[0], GpuProcess { pid: 100, bytes: None });
        assert_eq!(processes[39], GpuProcess { pid: 139, bytes: Some(39 << 20) });
        let error = nvml.memory(3).unwrap_err().to_string();
        assert_eq!(error, "nvmlDeviceGetHandleByIndex failed: Invalid Argument");
    }

    #[test]
    #[cfg_attr(miri, ignore = "loads a library")]
    fn a_driver_that_lacks_something_is_named() {
        let error = Nvml::open(Path::new("/no/such/driver.so")).unwrap_err().to_string();
        assert!(error.contains("/no/such/driver.so") && error.contains("NVIDIA driver"), "{error}");
        let folder = tempfile::tempdir().unwrap();
        let Some(library) = mock(folder.path(), &["-DOLD"]) else { return };
        let error = Nvml::open(&library).unwrap_err().to_string();
        assert!(error.contains("nvmlDeviceGetComputeRunningProcesses_v3"), "{error}");
    }
}
