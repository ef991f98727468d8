//! What kernels are called with: the structures of `kernels/prelude.cuh`, laid one after the other as a compiler does.

use bytemuck::Pod;
use smallvec::SmallVec;

use super::super::{CudaError, TENSOR_CORES};
use super::WORKSPACE_BYTES;
use crate::{DType, Tensor};

/// Blocks of a kernel whose threads take elements by turns, at most: several for each multiprocessor of any card.
const MOST_BLOCKS: u64 = 8192;
/// Blocks in a row that a card takes at most.
const LAUNCH_LIMIT: u64 = i32::MAX as u64;
/// Bytes of shared memory that every card has for a block.
const SHARED_BYTES: u64 = 48 << 10;
/// The same of a card that multiplies whole tiles.
pub(in crate::cuda) const MOST_SHARED_BYTES: u64 = 227 << 10;
/// Threads of a block, and of one that multiplies whole tiles.
const THREADS: u32 = 256;
const TILE_THREADS: u32 = 384;

/// Where things lie on the card; all 0 where nobody launches.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::cuda) struct Places {
    /// The arena's first byte.
    pub arena: u64,
    /// The workspace's.
    pub workspace: u64,
    /// The flag that says whether anything is written; 0 where there is none.
    pub flag: u64,
    /// The word where a place outside its table is left.
    pub fault: u64,
    /// What is left there with the place.
    pub key: u64,
    /// The card's compute capability, in tenths, which chooses among kernels. What an operation needs and what is refused does
    /// not depend on it: a plan is the same for all cards.
    pub capability: u32,
    /// Whether there are the kernels that multiply whole tiles, and bytes of the workspace that operands are rounded in for them.
    pub whole_tiles: bool,
    pub part_bytes: u64,
    /// The card's multiprocessors.
    pub multiprocessors: u32,
}

/// Numbers of bf16 on the card of which boxes are copied, in up to four dimensions. The first one is along memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Boxes {
    pub address: u64,
    pub rank: u32,
    pub sizes: [u64; 4],
    /// Bytes from one place of the second, third and fourth dimension to the next.
    pub strides: [u64; 3],
    /// What is copied together.
    pub tile: [u32; 4],
}

impl Boxes {
    /// Of lines of `width` numbers that begin `pitch` numbers apart.
    pub fn of_part(address: u64, [width, lines]: [u64; 2], pitch: u64, [across, down]: [u32; 2]) -> Boxes {
        let (sizes, strides, tile) = ([width, lines, 1, 1], [2 * pitch, 0, 0], [across, down, 1, 1]);
        Boxes { address, rank: 2, sizes, strides, tile }
    }
}

/// Bytes of what the driver makes of such a matrix, and of what they are a multiple of.
pub(in crate::cuda) const MAP_BYTES: usize = 128;
const MAP_ALIGNMENT: usize = 64;

/// What a kernel checks: that numbers are below a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cuda) struct Check {
    pub op: &'static str,
    /// What the numbers are.
    pub what: &'static str,
    /// The table that they are places in.
    pub table: String,
}

/// A kernel over some blocks.
#[derive(Clone, Debug)]
pub(in crate::cuda) struct Launch {
    pub kernel: &'static str,
    pub blocks: [u32; 2],
    pub threads: u32,
    pub shared_bytes: u32,
    pub parameters: Vec<u8>,
    /// Where each parameter begins there. A card has its own places for them.
    pub starts: SmallVec<[u32; 24]>,
    /// Matrices of which the driver makes what a kernel copies by, and where that stands among the parameters.
    pub matrices: Vec<(usize, Boxes)>,
    /// What it checks, if anything.
    pub check: Option<Check>,
}

impl Launch {
    /// With shared memory of so many bytes.
    pub fn shared(self, bytes: u64) -> Launch {
        Launch { shared_bytes: bytes as u32, ..self }
    }

    /// With a matrix that boxes are copied of.
    pub fn with_matrix(mut self, matrix: Boxes) -> Launch {
        let at = self.parameters.len().next_multiple_of(MAP_ALIGNMENT);
        self.parameters.resize(at + MAP_BYTES, 0);
        self.starts.push(at as u32);
        self.matrices.push((at, matrix));
        Launch { threads: TILE_THREADS, ..self }
    }

    /// With one number for each thread of a block.
    pub fn scratch<T>(self) -> Launch {
        self.shared(256 * size_of::<T>() as u64)
    }

    /// With another parameter.
    pub fn with<T: Pod>(mut self, parameter: T) -> Launch {
        self.parameters.resize(self.parameters.len().next_multiple_of(align_of::<T>()), 0);
        self.starts.push(self.parameters.len() as u32);
        self.parameters.extend_from_slice(bytemuck::bytes_of(&parameter));
        self
    }
}

/// Declares structures without gaps that kernels know.
macro_rules! plain {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        pub struct $name { $(pub $field: $type),* }

        const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$type>())*, "a structure with a gap");
        // SAFETY: a structure of plain numbers in C's order, without gaps, as asserted.
        unsafe impl bytemuck::Zeroable for $name {}
        // SAFETY: as above.
        unsafe impl bytemuck::Pod for $name {}
    )*};
}
pub(super) use plain;

plain! {
    /// A tensor: where it begins, and its type.
    View { at: u64, dtype: u32, unused: u32 }
    /// How a result becomes narrower.
    Rounding { seed: u64, first: u64, stochastic: u32, unused: u32 }
}

impl View {
    /// In the place of a tensor that there is not.
    pub const NONE: View = View { at: 0, dtype: 0, unused: 0 };
}

impl From<crate::Rounding> for Rounding {
    fn from(rounding: crate::Rounding) -> Rounding {
        match rounding {
            crate::Rounding::Nearest => Rounding { seed: 0, first: 0, stochastic: 0, unused: 0 },
            crate::Rounding::Stochastic { seed, first } => Rounding { seed, first, stochastic: 1, unused: 0 },
        }
    }
}

/// The number that a type has in the kernels.
fn type_number(dtype: DType) -> u32 {
    DType::ALL.iter().position(|known| *known == dtype).map_or(u32::MAX, |at| at as u32)
}

/// Blocks for so many elements.
pub(super) fn vector_blocks(elements: u64) -> [u32; 2] {
    [elements.div_ceil(256).clamp(1, MOST_BLOCKS) as u32, 1]
}

/// Blocks for so many elements, of which a thread takes eight at once where they are floats and aligned.
pub(super) fn wide_blocks(elements: u64) -> [u32; 2] {
    vector_blocks(elements.div_ceil(8))
}

/// Blocks for so many rows, of which a block has one at a time.
pub(super) fn row_blocks(rows: u64) -> [u32; 2] {
    [rows.clamp(1, 64 * MOST_BLOCKS) as u32, 1]
}

/// Takes the kernels of one operation.
pub(super) struct Emit<'e> {
    op: &'static str,
    places: Places,
    launch: &'e mut dyn FnMut(Launch) -> Result<(), CudaError>,
}

impl<'e> Emit<'e> {
    pub fn new(
        op: &'static str,
        places: Places,
        launch: &'e mut dyn FnMut(Launch) -> Result<(), CudaError>,
    ) -> Emit<'e> {
        Emit { op, places, launch }
    }

    /// The operation, which cannot be, or not in this shape.
    pub fn not_yet(&self, reason: Option<&'static str>) -> CudaError {
        CudaError::NotYet { op: self.op, reason }
    }

    /// Whether there are the kernels for tensor cores.
    pub fn has_tensor_cores(&self) -> bool {
        self.places.capability >= TENSOR_CORES
    }

    /// Whether there are the kernels that multiply whole tiles.
    pub fn has_whole_tiles(&self) -> bool {
        self.places.whole_tiles
    }

    /// Bytes of the workspace that operands are rounded in.
    pub fn part_bytes(&self) -> u64 {
        self.places.part_bytes
    }

    /// Blocks for so many tiles that blocks take by turns, one at a time on a multiprocessor.
    pub fn tile_blocks(&self, tiles: u64) -> [u32; 2] {
        [tiles.clamp(1, u64::from(self.places.multiprocessors.max(1))) as u32, 1]
    }

    /// So many blocks of `KERNEL_FOUR`, but no more than a card has at once: what each prepares for itself is prepared once, and what is
    /// left is taken by turns.
    pub fn at_once(&self, blocks: u64) -> [u32; 2] {
        [blocks.clamp(1, 4 * self.multiprocessors()) as u32, 1]
    }

    /// The card's multiprocessors; 1 where nobody launches.
    pub fn multiprocessors(&self) -> u64 {
        u64::from(self.places.multiprocessors.max(1))
    }

    /// A kernel; the flag is every kernel's first parameter.
    pub fn kernel(&self, kernel: &'static str, blocks: [u32; 2]) -> Launch {
        let (threads, shared_bytes) = (THREADS, 0);
        let (parameters, starts, matrices, check) = (Vec::new(), SmallVec::new(), Vec::new(), None);
        let launch = Launch { kernel, blocks, threads, shared_bytes, parameters, starts, matrices, check };
        launch.with(self.places.flag)
    }

    pub fn launch(&mut self, launch: Launch) -> Result<(), CudaError> {
        let most = if launch.matrices.is_empty() { SHARED_BYTES } else { MOST_SHARED_BYTES };
        if u64::from(launch.shared_bytes) > most {
            return Err(self.not_yet(Some("a row needs more shared memory than a block has")));
        }
        (self.launch)(launch)
    }

    /// So many blocks, if a card takes as many.
    pub fn blocks(&self, count: u64) -> Result<u32, CudaError> {
        match count <= LAUNCH_LIMIT {
            true => Ok(count.max(1) as u32),
            false => Err(self.not_yet(Some("there are more parts than a card takes at once"))),
        }
    }

    /// Where a tensor begins; 0 for none.
    pub fn address<'t>(&self, tensor: impl Into<Option<&'t Tensor>>) -> u64 {
        tensor.into().map_or(0, |tensor| self.places.arena.wrapping_add(tensor.range().start))
    }

    pub fn view(&self, tensor: &Tensor) -> View {
        View { at: self.address(tensor), dtype: type_number(tensor.dtype()), unused: 0 }
    }

    /// A vector of floats from one of its numbers on.
    pub fn view_from(&self, tensor: &Tensor, first: u64) -> View {
        let bytes = tensor.dtype().bytes_for(first).unwrap_or(0);
        View { at: self.address(tensor).wrapping_add(bytes), ..self.view(tensor) }
    }

    /// Numbers in f32 from the workspace's byte of that number on.
    pub fn workspace_f32(&self, offset: u64) -> View {
        View { at: self.workspace(offset), dtype: type_number(DType::F32), unused: 0 }
    }

    /// The workspace's byte of that number.
    pub fn workspace(&self, offset: u64) -> u64 {
        self.places.workspace.wrapping_add(offset)
    }

    /// Refuses to need more of the workspace than there is.
    pub fn needs(&self, bytes: u64) -> Result<(), CudaError> {
        self.needs_for("its partial sums need more workspace than there is", bytes)
    }

    /// The same with words for what does not fit.
    pub fn needs_for(&self, reason: &'static str, bytes: u64) -> Result<(), CudaError> {
        if bytes <= WORKSPACE_BYTES { Ok(()) } else { Err(self.not_yet(Some(reason))) }
    }

    /// Has it checked that the numbers are places in a table of so many.
    pub fn check(
        &mut self,
        what: &'static str,
        numbers: &Tensor,
        limit: u64,
        table: &Tensor,
        passes_ignored: bool,
    ) -> Result<(), CudaError> {
        let n = numbers.elements();
        if n == 0 {
            return Ok(());
        }
        let check = self.kernel("check_places", vector_blocks(n)).with(self.address(numbers)).with(n);
        let check = check.with(limit).with(u32::from(passes_ignored)).with(self.places.fault);
        let check = check.with(self.places.key);
        let described = Check { op: self.op, what, table: format!("{table:?}") };
        self.launch(Launch { check: Some(described), ..check })
    }
}
