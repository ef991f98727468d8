//! The operations of a step, as values: what each reads and writes, which tensors fit, what it costs, and what memory it
//! needs beside the arena.
//!
//! Operations come in families, a file each in `op/`, which says everything that holds on every device; how a device
//! carries a family out is said with the device. This file has what families have in common, and their only list.
//!
//! Shapes: N tokens, H hidden size, O and I a linear's outputs and inputs, V vocabulary, D head size.
//! Float tensors are f32 or bf16, each by itself, unless said otherwise; kernels compute in f32.
//! "in place" lists which output may be the same memory as which input; nothing else may overlap.

mod activation;
mod attention;
mod elementwise;
mod embedding;
mod grouped_product;
mod heads;
mod loss;
mod magnitude;
mod norm;
mod pieced_attention;
mod position;
mod product;
mod quantization;
mod reduction;
mod routing;
mod sink;
mod subspace;
mod update;
mod weighted_bias;
mod workspace;
mod zero_computation;

pub use activation::{Activation, Glu};
pub use attention::{Attention, MAX_HEAD_DIM, PagedRun, page_positions};
pub(crate) use attention::{KeyPieces, MAX_POSITIONS, TILE_POSITIONS, TOGETHER_BYTES};
pub use elementwise::{Elementwise, Rounding};
pub use embedding::Embedding;
pub use grouped_product::GroupedProduct;
pub use heads::{HeadColumns, Heads};
pub use loss::{IGNORED_TARGET, Loss};
pub use magnitude::Magnitude;
pub use norm::Norm;
pub use pieced_attention::{KeyPiece, PiecedAttention, Running};
pub use position::{Position, RotatedHeads};
pub use product::{Compute, Product};
pub use quantization::Quantization;
pub use reduction::Reduction;
pub(crate) use reduction::{RUN_ELEMENTS, SUM_ELEMENTS};
pub use routing::{
    Capacity, LoadRatio, MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN, NOWHERE, Router, RouterGroups, Routing,
};
pub use sink::Sink;
pub use subspace::Subspace;
pub use update::{
    Adafactor, Adam, Apollo, BLOCK_8BIT, Channels, Codes, Lion, Rule, SecondMoment, Sgd, Update,
};
pub use weighted_bias::WeightedBias;
pub use workspace::Workspace;
pub(crate) use workspace::{MAX_PARTIAL_COLUMNS, PIECE, RowPieces, rows_per_task, task_elements};
pub use zero_computation::{ZeroComputation, ZeroExperts};

use plimsoll_memory::Arena;

use crate::check::Description;
use crate::{Cost, DType, DeviceError, Tensor};

/// Rows of a table of which a piece has a multiple, but for the last piece: what is computed from such pieces, one after
/// the other, has the bits of what is computed from the whole. That holds for products, the loss and its gradient,
/// the gradient of a table and updates that take every element by itself.
pub const PIECE_ROWS: u64 = 1024;

/// Rows of x, at most, with which a product with a weight that is contiguous along its inputs has the same bits for each row,
/// whatever the others: the passes of a decoder.
pub const FEW_ROWS: usize = 24;

/// What a family says about each of its operations. It holds for every device.
pub(crate) trait Family<'a> {
    /// Its name, what it reads, writes and may do in place, which types and shapes fit, and the memory beside the arena
    /// that it needs.
    fn describe(&self) -> Description<'a>;

    /// Its cost, given that of reading and writing all of its tensors once. The operation has been checked.
    fn cost(&self, once: Cost) -> Cost {
        once
    }
}

/// Makes [`Op`] of the families.
macro_rules! families {
    ($($(#[$doc:meta])* $family:ident,)*) => {
        /// One operation: a family's.
        #[derive(Clone, Copy, Debug)]
        pub enum Op<'a> { $($(#[$doc])* $family($family<'a>),)* }

        impl<'a> Op<'a> {
            fn family(&self) -> &dyn Family<'a> {
                match self { $(Op::$family(op) => op,)* }
            }
        }

        $(impl<'a> From<$family<'a>> for Op<'a> {
            fn from(op: $family<'a>) -> Op<'a> {
                Op::$family(op)
            }
        })*
    };
}

families! {
    /// Non-linearities of feed-forward parts.
    Activation,
    /// Attention and the cache that it reads.
    Attention,
    /// Every element by itself.
    Elementwise,
    /// Rows of a table by token.
    Embedding,
    /// Products with stacks of matrices, a matrix for each group of rows.
    GroupedProduct,
    /// Columns of heads, from one layout to another.
    Heads,
    /// Cross-entropy.
    Loss,
    /// Lengths of rows and factors of columns, for DoRA.
    Magnitude,
    /// RMSNorm and LayerNorm.
    Norm,
    /// Attention by pieces of the keys.
    PiecedAttention,
    /// Where a token stands.
    Position,
    /// Matrix products, and biases.
    Product,
    /// To and from codes.
    Quantization,
    /// Sums over everything.
    Reduction,
    /// To experts and back.
    Routing,
    /// One more score of each head, which has no value.
    Sink,
    /// What optimizers in a subspace of the gradients need.
    Subspace,
    /// A step of an optimizer.
    Update,
    /// Biases of experts behind weights.
    WeightedBias,
    /// Experts without matrices.
    ZeroComputation,
}

impl<'a> Op<'a> {
    /// The operation's name.
    pub fn name(&self) -> &'static str {
        self.family().describe().name()
    }

    /// Refuses tensors of another arena, of wrong types or shapes, outputs that overlap what they must not, and what
    /// needs more workspace than there is; and a flag that is none. Says what it needs.
    pub fn check(&self, arena: &Arena, flag: Option<&Tensor>) -> Result<Workspace, DeviceError> {
        Ok(self.described(arena, flag)?.workspace())
    }

    /// Arithmetic and bytes of this operation, which has been checked.
    pub fn cost(&self) -> Cost {
        self.family().cost(self.family().describe().once())
    }

    /// Both at once.
    pub(crate) fn check_and_cost(
        &self,
        arena: &Arena,
        flag: Option<&Tensor>,
    ) -> Result<(Workspace, Cost), DeviceError> {
        let op = self.described(arena, flag)?;
        Ok((op.workspace(), self.family().cost(op.once())))
    }

    fn described(&self, arena: &Arena, flag: Option<&Tensor>) -> Result<Description<'a>, DeviceError> {
        let mut op = self.family().describe();
        let refusal = op.refusal(arena).or_else(|| refused_flag(flag?, arena));
        refusal.map_or(Ok(op), |reason| Err(DeviceError::Mismatch { op: self.name(), reason }))
    }
}

/// Why a tensor cannot say whether an operation is carried out, if so.
fn refused_flag(flag: &Tensor, arena: &Arena) -> Option<String> {
    if !flag.is_in(arena) {
        return Some(format!("{flag:?} belongs to another arena"));
    }
    let fits = flag.dtype() == DType::F32 && flag.elements() == 1;
    (!fits).then(|| format!("{flag:?} is not f32 [1]"))
}
