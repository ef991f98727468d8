//! NCCL: what cards of several ranks send to each other without the host. It is loaded where ranks have cards.
//!
//! Only its sends and receives are used. Sums are made by whoever owns them, in an order of their own, so NCCL changes no bit.
//! Names and numbers: NVIDIA's NCCL user guide, <https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html>.

use std::any::Any;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, PoisonError};

use plimsoll_memory::{FarMemory, Library, LibraryError, Looks};

use super::CudaError;
use super::context::Stream;
use super::device::{OnCard, OpenCard};
use super::driver::{Address, Handle, functions};

/// The name under which the library is installed.
const LIBRARY: &str = "libnccl.so.2";
/// Where it lies below a folder of Python packages.
const OF_PACKAGE: &str = "site-packages/nvidia/nccl/lib";
/// The first version that sends and receives.
const LEAST_VERSION: c_int = 2_700;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// `ncclUint8`.
const BYTES: c_int = 1;

/// Bytes between two places of the workspace.
const APART: u64 = 256;

/// What ranks find each other by: the first makes it, and tells it to the others.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// Its bytes, for the others.
    pub fn to_bytes(self) -> Vec<u8> {
        self.0.to_vec()
    }

    /// What the first rank has told, if it is one.
    pub fn of_bytes(bytes: &[u8]) -> Option<UniqueId> {
        bytes.try_into().ok().map(UniqueId)
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId")
    }
}

functions! { Functions {
    version = c"ncclGetVersion" (*mut c_int);
    unique_id = c"ncclGetUniqueId" (*mut UniqueId);
    join = c"ncclCommInitRank" (*mut Handle, c_int, UniqueId, c_int);
    destroy = c"ncclCommDestroy" (Handle);
    abort = c"ncclCommAbort" (Handle);
    failed = c"ncclCommGetAsyncError" (Handle, *mut c_int);
    group_start = c"ncclGroupStart" ();
    group_end = c"ncclGroupEnd" ();
    send = c"ncclSend" (*const c_void, usize, c_int, c_int, Handle, Handle);
    receive = c"ncclRecv" (*mut c_void, usize, c_int, c_int, Handle, Handle);
    words = c"ncclGetErrorString" (c_int) -> *const c_char;
} }

/// The library, loaded. Clones share it.
#[derive(Clone)]
pub struct Nccl(Arc<Loaded>);

struct Loaded {
    functions: Functions,
    version: c_int,
    /// Never closed: threads of its own may still be in it.
    _library: ManuallyDrop<Library>,
}

impl Nccl {
    /// Loads it from where the system, an active conda environment or an active Python environment has it.
    ///
    /// # Errors
    /// [`CudaError::NoNccl`]: it is nowhere, or too old.
    pub fn load() -> Result<Nccl, CudaError> {
        let of_system = Nccl::open(Path::new(LIBRARY));
        of_system.or_else(|error| {
            let elsewhere = in_environments().into_iter().find(|path| path.exists());
            elsewhere.map_or(Err(error), |path| Nccl::open(&path))
        })
    }

    /// Loads it from a file.
    ///
    /// # Errors
    /// As of [`load`](Self::load).
    pub fn open(path: &Path) -> Result<Nccl, CudaError> {
        let missing = |error: LibraryError| CudaError::NoNccl(error.to_string());
        let library = Library::open(path).map_err(missing)?;
        let functions = Functions::of(&library).map_err(missing)?;
        let mut version = 0;
        // SAFETY: writes one number.
        check(&functions, "ncclGetVersion", unsafe { (functions.version)(&mut version) })?;
        let nccl = Nccl(Arc::new(Loaded { functions, version, _library: ManuallyDrop::new(library) }));
        if version < LEAST_VERSION {
            return Err(CudaError::NoNccl(format!("{nccl} sends and receives nothing, 2.7 does")));
        }
        Ok(nccl)
    }

    /// Its version: 1000 times the major number and 100 times the minor one up to 2.8, 10,000 and 100 times since.
    pub fn version(&self) -> u32 {
        self.0.version.unsigned_abs()
    }

    /// What ranks may find each other by.
    ///
    /// # Errors
    /// [`CudaError::Refused`] with the library's words.
    pub fn unique_id(&self) -> Result<UniqueId, CudaError> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: writes 128 bytes.
        self.check("ncclGetUniqueId", unsafe { (self.functions().unique_id)(&mut id) })?;
        Ok(id)
    }

    fn functions(&self) -> &Functions {
        &self.0.functions
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), CudaError> {
        check(self.functions(), call, code)
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Nccl").field(&self.0.version).finish()
    }
}

impl fmt::Display for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let version = self.version();
        let major = if version < 10_000 { 1_000 } else { 10_000 };
        write!(f, "NCCL {}.{}.{}", version / major, version % major / 100, version % 100)
    }
}

/// Where environments of conda and Python keep it, of those that are active.
fn in_environments() -> Vec<PathBuf> {
    let root = |name| std::env::var_os(name).map(PathBuf::from);
    let conda = root("CONDA_PREFIX");
    let mut found: Vec<PathBuf> = conda.iter().map(|root| root.join("lib").join(LIBRARY)).collect();
    for root in conda.into_iter().chain(root("VIRTUAL_ENV")) {
        let pythons = std::fs::read_dir(root.join("lib")).into_iter().flatten().flatten();
        let is_python = |name: &Path| name.to_string_lossy().starts_with("python");
        let mut pythons: Vec<PathBuf> = pythons
            .map(|entry| entry.path())
            .filter(|path| path.file_name().is_some_and(|name| is_python(Path::new(name))))
            .collect();
        pythons.sort();
        found.extend(pythons.into_iter().map(|python| python.join(OF_PACKAGE).join(LIBRARY)));
    }
    found
}

fn check(functions: &Functions, call: &'static str, code: c_int) -> Result<(), CudaError> {
    if code == SUCCESS {
        return Ok(());
    }
    // SAFETY: takes any number, and gives a text that is never given back, or null.
    let text = unsafe { (functions.words)(code) };
    let reason = match text.is_null() {
        true => format!("error {code}"),
        // SAFETY: not null, and the library's texts end with a zero.
        false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
    };
    Err(CudaError::Refused { call, reason })
}

/// Some bytes of memory that is in the hands of who copies it.
pub type FarSpan<'m> = (&'m dyn FarMemory, Range<u64>);

/// What goes on between a rank and others at once: to whom which bytes, and from whom into which.
#[derive(Debug)]
pub struct FarMessage<'m> {
    /// What is sent.
    pub send: Option<(u32, FarSpan<'m>)>,
    /// What is received.
    pub receive: Option<(u32, FarSpan<'m>)>,
}

/// A card that reaches those of all other ranks.
pub struct CardLink {
    nccl: Nccl,
    /// Held while messages are under way: the library takes one call at a time. None once messages were given up.
    communicator: Mutex<Option<Handle>>,
    card: Arc<OpenCard>,
    rank: u32,
    size: u32,
}

// SAFETY: any thread may call the library with a communicator, one at a time.
unsafe impl Send for CardLink {}
// SAFETY: as above; the mutex sees to it.
unsafe impl Sync for CardLink {}

impl CardLink {
    /// Joins the others, who do the same with the same id, and says something to each: what the library keeps for each of them is taken
    /// then. `waiting` is called again and again meanwhile.
    ///
    /// # Errors
    /// The library or the driver refuses.
    pub fn join(
        nccl: &Nccl,
        card: &Arc<OpenCard>,
        id: UniqueId,
        (rank, size): (u32, u32),
        waiting: &mut dyn FnMut(),
    ) -> Result<CardLink, CudaError> {
        let mut communicator = null_mut();
        card.context.enter()?;
        // SAFETY: writes one handle; the context of the card is this thread's.
        let code = unsafe { (nccl.functions().join)(&mut communicator, size as c_int, id, rank as c_int) };
        nccl.check("ncclCommInitRank", code)?;
        let link = CardLink {
            nccl: nccl.clone(),
            communicator: Mutex::new(Some(communicator)),
            card: Arc::clone(card),
            rank,
            size,
        };
        let (workspace, bytes) = card.workspace();
        let stream = Stream::new(&card.context)?;
        let others = (0..size).filter(|other| *other != rank);
        let place = |other: u32| (other, workspace + (1 + u64::from(other)) * APART % bytes, 1);
        let messages =
            others.map(|other| Addressed { send: Some((other, workspace, 1)), receive: Some(place(other)) });
        link.carry_out(&messages.collect::<Vec<_>>(), &stream, waiting)?;
        Ok(link)
    }

    /// This rank's number.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Sends and receives, all at once, and waits for it; `waiting` is called again and again meanwhile. All ranks do this in the same
    /// order.
    ///
    /// # Errors
    /// The memory is no card's, the bytes do not lie within, or a rank is gone: nothing more can be sent then.
    pub fn exchange(&self, messages: &[FarMessage<'_>], waiting: &mut dyn FnMut()) -> Result<(), CudaError> {
        let mut stream = None;
        let mut addressed = |side: &Option<(u32, FarSpan<'_>)>| {
            let Some((rank, (memory, bytes))) = side else { return Ok(None) };
            let on_card = (*memory as &dyn Any).downcast_ref::<OnCard>().ok_or("the memory is no card's")?;
            let length = bytes.end.saturating_sub(bytes.start);
            let address =
                on_card.address(bytes.start, length).map_err(|_| "bytes lie outside of their buffer")?;
            stream.get_or_insert_with(|| Arc::clone(&on_card.streams));
            Ok::<_, &str>(Some((*rank, address, length)))
        };
        let refused = |reason: &str| CudaError::Refused { call: "ncclSend", reason: reason.to_owned() };
        let each = messages.iter().map(|message| {
            Ok(Addressed { send: addressed(&message.send)?, receive: addressed(&message.receive)? })
        });
        let each = each.collect::<Result<Vec<Addressed>, &str>>().map_err(refused)?;
        match stream {
            Some(streams) => self.carry_out(&each, &streams.between, waiting),
            None => Ok(()),
        }
    }

    fn carry_out(
        &self,
        messages: &[Addressed],
        stream: &Stream,
        waiting: &mut dyn FnMut(),
    ) -> Result<(), CudaError> {
        let mut held = self.communicator.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(communicator) = *held else {
            let reason = "an exchange before it failed".to_owned();
            return Err(CudaError::Refused { call: "ncclGroupStart", reason });
        };
        let begun = self.begin(communicator, messages, stream);
        let outcome = begun.and_then(|()| self.wait(communicator, stream, waiting));
        if outcome.is_err() {
            // What waits for others on the card is ended, or its memory could not be given back.
            *held = None;
            // SAFETY: it was made once, and nobody calls with it any more.
            unsafe { (self.nccl.functions().abort)(communicator) };
        }
        outcome
    }

    /// Puts messages on a stream.
    fn begin(&self, communicator: Handle, messages: &[Addressed], stream: &Stream) -> Result<(), CudaError> {
        let (functions, stream) = (self.nccl.functions(), stream.handle());
        self.card.context.enter()?;
        // SAFETY: takes nothing.
        self.nccl.check("ncclGroupStart", unsafe { (functions.group_start)() })?;
        let sides = messages.iter().try_for_each(|Addressed { send, receive }| {
            if let Some((rank, address, bytes)) = *send {
                let (from, bytes) = (address as *const c_void, bytes as usize);
                // SAFETY: the bytes are the card's, and whoever has them in hand waits for the stream.
                let code =
                    unsafe { (functions.send)(from, bytes, BYTES, rank as c_int, communicator, stream) };
                self.nccl.check("ncclSend", code)?;
            }
            if let Some((rank, address, bytes)) = *receive {
                let (into, bytes) = (address as *mut c_void, bytes as usize);
                // SAFETY: as above.
                let code =
                    unsafe { (functions.receive)(into, bytes, BYTES, rank as c_int, communicator, stream) };
                self.nccl.check("ncclRecv", code)?;
            }
            Ok(())
        });
        // A group that was begun is ended whatever became of its messages.
        // SAFETY: as above.
        let ended = self.nccl.check("ncclGroupEnd", unsafe { (functions.group_end)() });
        sides.and(ended)
    }

    /// Waits until a stream is done. A rank that is gone is seen meanwhile.
    fn wait(
        &self,
        communicator: Handle,
        stream: &Stream,
        waiting: &mut dyn FnMut(),
    ) -> Result<(), CudaError> {
        let (looks, functions) = (Looks::begin(), self.nccl.functions());
        while !stream.is_done()? {
            let mut failed = SUCCESS;
            // SAFETY: writes one number.
            let code = unsafe { (functions.failed)(communicator, &mut failed) };
            self.nccl.check("ncclCommGetAsyncError", code)?;
            if failed != IN_PROGRESS {
                self.nccl.check("ncclSend", failed)?;
            }
            waiting();
            looks.pause();
        }
        Ok(())
    }
}

impl fmt::Debug for CardLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CardLink").field("rank", &self.rank).field("size", &self.size).finish_non_exhaustive()
    }
}

impl Drop for CardLink {
    fn drop(&mut self) {
        // Where the context cannot be entered, giving back is tried all the same.
        let _ = self.card.context.enter();
        let held = self.communicator.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(communicator) = held.take() {
            // SAFETY: it was made once, and nobody calls with it any more.
            unsafe { (self.nccl.functions().destroy)(communicator) };
        }
    }
}

/// A message between addresses of cards: the other rank, the address, and how many bytes.
struct Addressed {
    send: Option<(u32, Address, u64)>,
    receive: Option<(u32, Address, u64)>,
}
