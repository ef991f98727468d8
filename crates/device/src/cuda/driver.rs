//! The driver's library: its functions, the cards that it finds, and its errors in words.
//!
//! Names and numbers: NVIDIA's CUDA Driver API reference, <https://docs.nvidia.com/cuda/cuda-driver-api/>.

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use plimsoll_memory::{ByteSize, Library, LibraryError};

/// The name under which drivers install the library.
const LIBRARY: &str = "libcuda.so.1";
/// The first version of CUDA whose drivers take the kernels: PTX 7.8.
pub const LEAST_DRIVER: u32 = 11_080;
/// The compute capability that the kernels are made for: tenths.
pub const LEAST_CAPABILITY: u32 = 75;

pub(super) type Code = c_int;
pub(super) type Handle = *mut c_void;
/// An address on a card.
pub(super) type Address = u64;

const SUCCESS: Code = 0;
const OUT_OF_MEMORY: Code = 2;
const NO_DEVICE: Code = 100;
const NOT_READY: Code = 600;
/// Errors after which a context is of no use: a misaligned or illegal address, a launch that failed or timed out, a card that is
/// lost or gone, an error of its memory, and what has no name.
const FATAL: [Code; 11] = [46, 214, 700, 702, 710, 714, 715, 716, 717, 719, 999];

const MULTIPROCESSORS: c_int = 16;
const CAPABILITY_MAJOR: c_int = 75;
const CAPABILITY_MINOR: c_int = 76;

/// What an NVIDIA card, or its driver, fails with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// There is no driver.
    #[error(
        "there is no NVIDIA driver: {0}; install the driver of the card, or compute on the CPU, with `--device cpu`"
    )]
    NoDriver(String),
    /// The driver lacks a function, or is of a version that lacks what the kernels need.
    #[error(
        "the NVIDIA driver is too old: {0}; CUDA {major}.{minor} is needed, driver 520 or later",
        major = LEAST_DRIVER / 1000,
        minor = LEAST_DRIVER % 1000 / 10
    )]
    DriverTooOld(String),
    /// There is a driver, but no card.
    #[error("the NVIDIA driver finds no card")]
    NoCard,
    /// There is no card of that number.
    #[error("there is no card {index}: the driver finds {count}, numbered from 0")]
    NoSuchCard {
        /// The number asked for.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// The card is older than any that the kernels are made for.
    #[error(
        "{name} has compute capability {major}.{minor}; {least} is needed: Turing (2018) or later",
        major = capability / 10,
        minor = capability % 10,
        least = Capability(LEAST_CAPABILITY)
    )]
    CardTooOld {
        /// The card.
        name: String,
        /// In tenths.
        capability: u32,
    },
    /// The card has not so much memory left.
    #[error(
        "the card has no {} left: {} of {} are free; other programs may hold some",
        ByteSize(*.bytes), ByteSize(*.free), ByteSize(*.total)
    )]
    OutOfMemory {
        /// Bytes asked for.
        bytes: u64,
        /// Bytes that were free.
        free: u64,
        /// All that the card has.
        total: u64,
    },
    /// The card is of no use to this process any more.
    #[error("the card was lost at {call}: {reason}; what was saved before is whole, start again from there")]
    Lost {
        /// The driver's function.
        call: &'static str,
        /// The driver's words.
        reason: String,
    },
    /// A call was refused.
    #[error("{call} failed: {reason}")]
    Refused {
        /// The driver's function.
        call: &'static str,
        /// The driver's words.
        reason: String,
    },
    /// There is no NCCL.
    #[error(
        "there is no NCCL: {0}; install it (`libnccl2` on Debian and Ubuntu, `nvidia-nccl-cu12` of PyPI or conda)"
    )]
    NoNccl(String),
    /// An operation has no kernel yet.
    #[error("{op} does not run on NVIDIA cards yet{}; use `--device cpu`", .reason.map_or(String::new(), |r| format!(" ({r})")))]
    NotYet {
        /// The operation.
        op: &'static str,
        /// Where only some of its shapes do not.
        reason: Option<&'static str>,
    },
}

/// A compute capability in tenths.
struct Capability(u32);

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 10, self.0 % 10)
    }
}

/// Declares functions of a library that are called, each with its name there, or an older one, and what it gives: a code where nothing
/// is said.
macro_rules! functions {
    ($(#[$doc:meta])* $functions:ident {
        $($function:ident = $name:literal $(or $older:literal)? ($($parameter:ty),*) $(-> $result:ty)?;)*
    }) => {
        $(#[$doc])*
        pub(in crate::cuda) struct $functions {
            $(pub $function: unsafe extern "C" fn($($parameter),*) -> functions!(@result $($result)?),)*
        }

        impl $functions {
            pub fn of(library: &::plimsoll_memory::Library) -> Result<$functions, ::plimsoll_memory::LibraryError> {
                // SAFETY: each type is that of the function in the reference.
                unsafe {
                    Ok($functions {
                        $($function: library.function($name)$(.or_else(|_| library.function($older)))??,)*
                    })
                }
            }
        }
    };
    (@result) => { ::std::ffi::c_int };
    (@result $result:ty) => { $result };
}
pub(super) use functions;

functions! { Functions {
    init = c"cuInit" (c_uint);
    version = c"cuDriverGetVersion" (*mut c_int);
    device_count = c"cuDeviceGetCount" (*mut c_int);
    device = c"cuDeviceGet" (*mut c_int, c_int);
    device_name = c"cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_memory = c"cuDeviceTotalMem_v2" (*mut usize, c_int);
    device_bus = c"cuDeviceGetPCIBusId" (*mut c_char, c_int, c_int);
    device_attribute = c"cuDeviceGetAttribute" (*mut c_int, c_int, c_int);
    retain = c"cuDevicePrimaryCtxRetain" (*mut Handle, c_int);
    release = c"cuDevicePrimaryCtxRelease_v2" (c_int);
    set_current = c"cuCtxSetCurrent" (Handle);
    memory = c"cuMemGetInfo_v2" (*mut usize, *mut usize);
    alloc = c"cuMemAlloc_v2" (*mut Address, usize);
    free = c"cuMemFree_v2" (Address);
    pin = c"cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    unpin = c"cuMemHostUnregister" (*mut c_void);
    copy_in = c"cuMemcpyHtoDAsync_v2" (Address, *const c_void, usize, Handle);
    copy_out = c"cuMemcpyDtoHAsync_v2" (*mut c_void, Address, usize, Handle);
    stream_create = c"cuStreamCreate" (*mut Handle, c_uint);
    stream_destroy = c"cuStreamDestroy_v2" (Handle);
    stream_finish = c"cuStreamSynchronize" (Handle);
    stream_query = c"cuStreamQuery" (Handle);
    stream_wait = c"cuStreamWaitEvent" (Handle, Handle, c_uint);
    event_create = c"cuEventCreate" (*mut Handle, c_uint);
    event_destroy = c"cuEventDestroy_v2" (Handle);
    event_record = c"cuEventRecord" (Handle, Handle);
    module_load = c"cuModuleLoadData" (*mut Handle, *const c_void);
    module_unload = c"cuModuleUnload" (Handle);
    module_function = c"cuModuleGetFunction" (*mut Handle, Handle, *const c_char);
    module_global = c"cuModuleGetGlobal_v2" (*mut Address, *mut usize, Handle, *const c_char);
    set_attribute = c"cuFuncSetAttribute" (Handle, c_int, c_int);
    launch = c"cuLaunchKernel" (
        Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void
    );
    error_string = c"cuGetErrorString" (Code, *mut *const c_char);
} }

/// `cuTensorMapEncodeTiled`, which drivers have from CUDA 12.0 on.
pub(super) type EncodeTiled = unsafe extern "C" fn(
    *mut c_void,
    c_int,
    c_uint,
    Address,
    *const u64,
    *const u64,
    *const c_uint,
    *const c_uint,
    c_int,
    c_int,
    c_int,
    c_int,
) -> Code;

/// A kernel as graphs take it: `CUDA_KERNEL_NODE_PARAMS` of its second version, with which the first one begins.
#[repr(C)]
pub(super) struct KernelNode {
    pub function: Handle,
    pub blocks: [c_uint; 3],
    pub threads: [c_uint; 3],
    pub shared_bytes: c_uint,
    pub parameters: *mut *mut c_void,
    pub extra: *mut *mut c_void,
    /// In the place of the function, and the context where it is not the thread's: null.
    pub kernel: Handle,
    pub context: Handle,
}

functions! {
    /// What graphs are made and launched with. Drivers from CUDA 12.0 on take nodes of the second version; older ones take something longer
    /// that begins like theirs.
    GraphFunctions {
        create = c"cuGraphCreate" (*mut Handle, c_uint);
        add = c"cuGraphAddKernelNode_v2" or c"cuGraphAddKernelNode"
            (*mut Handle, Handle, *const Handle, usize, *const KernelNode);
        instantiate = c"cuGraphInstantiateWithFlags" (*mut Handle, Handle, c_ulonglong);
        set = c"cuGraphExecKernelNodeSetParams_v2" or c"cuGraphExecKernelNodeSetParams" (Handle, Handle, *const KernelNode);
        launch = c"cuGraphLaunch" (Handle, Handle);
        destroy_executable = c"cuGraphExecDestroy" (Handle);
        destroy = c"cuGraphDestroy" (Handle);
    }
}

/// A card, as the driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Its number, from 0.
    pub index: u32,
    /// What it is called.
    pub name: String,
    /// Its compute capability, in tenths.
    pub capability: u32,
    /// Bytes of its memory.
    pub memory: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Where it is plugged in: `0000:3b:00.0`.
    pub bus: String,
}

impl Card {
    /// Refuses a card that the kernels are not made for.
    ///
    /// # Errors
    /// [`CudaError::CardTooOld`].
    pub fn usable(&self) -> Result<(), CudaError> {
        if self.capability < LEAST_CAPABILITY {
            return Err(CudaError::CardTooOld { name: self.name.clone(), capability: self.capability });
        }
        Ok(())
    }
}

impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Card { index, name, memory, multiprocessors, .. } = self;
        let (memory, capability) = (ByteSize(*memory), Capability(self.capability));
        write!(
            f,
            "{index}: {name}, {memory}, {multiprocessors} multiprocessors, compute capability {capability}"
        )
    }
}

/// The driver, loaded and initialised. Clones share it.
#[derive(Clone)]
pub struct Driver(Arc<Loaded>);

struct Loaded {
    functions: Functions,
    encode_tiled: Option<EncodeTiled>,
    graphs: Result<GraphFunctions, LibraryError>,
    version: u32,
    /// Open as long as its functions are called.
    _library: Library,
}

impl Driver {
    /// Loads the driver of this machine.
    ///
    /// # Errors
    /// There is none, it is too old, or it finds no card.
    pub fn load() -> Result<Driver, CudaError> {
        Driver::open(Path::new(LIBRARY))
    }

    /// Loads a driver from a file.
    ///
    /// # Errors
    /// As of [`load`](Self::load).
    pub fn open(path: &Path) -> Result<Driver, CudaError> {
        let library =
            Library::open(&PathBuf::from(path)).map_err(|error| CudaError::NoDriver(error.to_string()))?;
        let functions =
            Functions::of(&library).map_err(|error| CudaError::DriverTooOld(error.to_string()))?;
        // SAFETY: that is the function's type in the reference.
        let encode_tiled = unsafe { library.function(c"cuTensorMapEncodeTiled") }.ok();
        let graphs = GraphFunctions::of(&library);
        let (mut version, checked) = (0, |call, code| check(&functions, call, code));
        // SAFETY: writes one number.
        checked("cuDriverGetVersion", unsafe { (functions.version)(&mut version) })?;
        let version = version.unsigned_abs();
        if version < LEAST_DRIVER {
            let has = format!("it is for CUDA {}.{}", version / 1000, version % 1000 / 10);
            return Err(CudaError::DriverTooOld(has));
        }
        // SAFETY: takes flags, which have to be 0.
        match unsafe { (functions.init)(0) } {
            NO_DEVICE => return Err(CudaError::NoCard),
            code => check(&functions, "cuInit", code)?,
        }
        Ok(Driver(Arc::new(Loaded { functions, encode_tiled, graphs, version, _library: library })))
    }

    /// The version of CUDA that the driver is for: 1000 times the major number and 10 times the minor one.
    pub fn version(&self) -> u32 {
        self.0.version
    }

    /// The cards.
    ///
    /// # Errors
    /// [`CudaError::Refused`] with the driver's words.
    pub fn cards(&self) -> Result<Vec<Card>, CudaError> {
        let mut count = 0;
        // SAFETY: writes one number.
        self.check("cuDeviceGetCount", unsafe { (self.functions().device_count)(&mut count) })?;
        (0..count.unsigned_abs()).map(|index| self.describe(index)).collect()
    }

    /// A card that can be used.
    ///
    /// # Errors
    /// There is none of that number, or it is too old.
    pub fn card(&self, index: u32) -> Result<Card, CudaError> {
        let cards = self.cards()?;
        let count = cards.len() as u32;
        let missing = if count == 0 { CudaError::NoCard } else { CudaError::NoSuchCard { index, count } };
        let card = cards.into_iter().nth(index as usize).ok_or(missing)?;
        card.usable()?;
        Ok(card)
    }

    /// The driver's own number of a card.
    pub(super) fn ordinal(&self, index: u32) -> Result<c_int, CudaError> {
        let mut device = 0;
        // SAFETY: writes one number.
        self.check("cuDeviceGet", unsafe { (self.functions().device)(&mut device, index as c_int) })?;
        Ok(device)
    }

    fn describe(&self, index: u32) -> Result<Card, CudaError> {
        let (device, functions) = (self.ordinal(index)?, self.functions());
        let (mut name, mut memory) = ([0 as c_char; 256], 0usize);
        // SAFETY: at most 256 bytes are written, the last one a zero.
        self.check("cuDeviceGetName", unsafe { (functions.device_name)(name.as_mut_ptr(), 256, device) })?;
        // SAFETY: writes one number.
        self.check("cuDeviceTotalMem", unsafe { (functions.device_memory)(&mut memory, device) })?;
        let attribute = |which| {
            let mut value = 0;
            // SAFETY: writes one number.
            let code = unsafe { (functions.device_attribute)(&mut value, which, device) };
            self.check("cuDeviceGetAttribute", code).map(|()| value.unsigned_abs())
        };
        let mut bus = [0 as c_char; 256];
        // SAFETY: at most 256 bytes are written, the last one a zero.
        self.check("cuDeviceGetPCIBusId", unsafe { (functions.device_bus)(bus.as_mut_ptr(), 256, device) })?;
        let [name, bus] = [name, bus].map(|mut text| {
            text[255] = 0;
            // SAFETY: it ends with a zero within the array.
            unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned()
        });
        let capability = 10 * attribute(CAPABILITY_MAJOR)? + attribute(CAPABILITY_MINOR)?;
        let multiprocessors = attribute(MULTIPROCESSORS)?;
        Ok(Card { index, name, capability, memory: memory as u64, multiprocessors, bus })
    }

    /// What makes of a matrix what kernels copy by, where the driver has it.
    pub(super) fn encode_tiled(&self) -> Option<EncodeTiled> {
        self.0.encode_tiled
    }

    /// What graphs are made with.
    ///
    /// # Errors
    /// The driver lacks it.
    pub(super) fn graphs(&self) -> Result<&GraphFunctions, CudaError> {
        self.0.graphs.as_ref().map_err(|error| CudaError::DriverTooOld(error.to_string()))
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.0.functions
    }

    pub(super) fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        check(self.functions(), call, code)
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Driver").field(&self.0.version).finish()
    }
}

/// Whether a stream has still something to do.
pub(super) fn is_not_ready(code: Code) -> bool {
    code == NOT_READY
}

/// Whether an allocation failed for want of memory.
pub(super) fn is_out_of_memory(code: Code) -> bool {
    code == OUT_OF_MEMORY
}

fn check(functions: &Functions, call: &'static str, code: Code) -> Result<(), CudaError> {
    if code == SUCCESS {
        return Ok(());
    }
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: writes the address of a text that is never given back, or null.
    let known = unsafe { (functions.error_string)(code, &mut text) } == SUCCESS && !text.is_null();
    let reason = match known {
        // SAFETY: not null, and the driver's texts end with a zero.
        true => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        false => format!("error {code}"),
    };
    Err(match FATAL.contains(&code) {
        true => CudaError::Lost { call, reason },
        false => CudaError::Refused { call, reason },
    })
}
