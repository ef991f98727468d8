//! Quantising on the device, before a rank's share is cut: what the packed matrices leave there.

use crate::eager::{Tensor, Torch};
use crate::estimate::Kind;
use crate::model::{BLOCK, NESTED_BLOCK};
use crate::run::TorchType;

/// `quantize_4bit` of matrices with so many elements: each comes to the device as it is stored, its packed codes go to the host, from where
/// the wrapper takes them, and its scales stay: FSDP and DeepSpeed share parameters and no attributes of parameters. The cache is
/// emptied behind the last (fsdp_qlora's `train.py`, `prepare_model_for_kbit_training`); segments that scales lie in stay.
pub(super) fn quantise(torch: &Torch, matrices: &[u64], double: bool, stored: TorchType) -> Vec<Tensor> {
    let empty = |elements: u64, dtype| torch.empty(&[elements], dtype, "quantize_4bit");
    let mut kept = Vec::new();
    torch.of_kind(Kind::Weights, || {
        for elements in matrices {
            let matrix = torch.empty(&[*elements], stored, "_to_copy");
            let blocks = elements.div_ceil(BLOCK);
            let scales = empty(blocks, TorchType::F32);
            let packed = empty(elements.div_ceil(2), TorchType::U8);
            kept.push(empty(16, TorchType::F32));
            if double {
                // The offset, the scales of scales, and the scales in 8 bits, whose code all share; those in f32 are dropped behind them.
                kept.push(empty(1, TorchType::F32));
                kept.push(empty(blocks.div_ceil(NESTED_BLOCK), TorchType::F32));
                kept.push(empty(blocks, TorchType::U8));
            } else {
                kept.push(scales);
            }
            drop((matrix, packed));
        }
    });
    torch.memory().empty_cache();
    kept
}
