//! Autocast and its cache (`aten/src/ATen/autocast_mode.cpp`): which operands are cast, and which casts are kept.

use std::collections::HashMap;

use super::Torch;
use super::tensor::{History, Tensor};
use crate::estimate::Kind;
use crate::run::TorchType;

/// An autocast region.
pub(super) struct Casts {
    to: TorchType,
    /// Casts of f32 leaves that need gradients, by their storage, until the outermost region ends.
    cache: HashMap<u64, Tensor>,
}

impl Casts {
    pub fn new(to: TorchType) -> Casts {
        Casts { to, cache: HashMap::new() }
    }
}

impl Torch {
    /// `with torch.autocast("cuda", dtype)`, where there is one.
    pub fn autocast<T>(&self, to: Option<TorchType>, work: impl FnOnce() -> T) -> T {
        let Some(to) = to else { return work() };
        let outer = self.casts.borrow().is_some();
        if !outer {
            *self.casts.borrow_mut() = Some(Casts::new(to));
        }
        let out = work();
        if !outer {
            self.casts.take();
        }
        out
    }

    /// Without autocast (`torch.autocast(enabled=False)`).
    pub fn without_autocast<T>(&self, work: impl FnOnce() -> T) -> T {
        let casts = self.casts.take();
        let out = work();
        self.casts.replace(casts);
        out
    }

    /// The type that products are cast to, if autocast is on.
    pub fn autocast_type(&self) -> Option<TorchType> {
        self.casts.borrow().as_ref().map(|casts| casts.to)
    }

    /// An operand of a product, in the region's type.
    pub(super) fn lower(&self, tensor: &Tensor) -> Tensor {
        let Some(to) = self.autocast_type() else { return tensor.clone() };
        if !floats(tensor.dtype) || tensor.dtype == to {
            return tensor.clone();
        }
        let leaf = matches!(tensor.history, History::Leaf(_)) && tensor.dtype == TorchType::F32;
        if !leaf {
            return self.to(tensor, to);
        }
        let id = tensor.storage.id();
        let known = self.casts.borrow().as_ref().and_then(|casts| casts.cache.get(&id).cloned());
        known.unwrap_or_else(|| {
            let cast = self.of_kind(Kind::WeightCopies, || self.to(tensor, to));
            if let Some(casts) = self.casts.borrow_mut().as_mut() {
                casts.cache.insert(id, cast.clone());
            }
            cast
        })
    }

    /// An operand of a function that autocast computes in f32.
    pub(super) fn raise(&self, tensor: &Tensor) -> Tensor {
        if self.autocast_type().is_none() || !floats(tensor.dtype) {
            return tensor.clone();
        }
        self.to(tensor, TorchType::F32)
    }
}

fn floats(dtype: TorchType) -> bool {
    matches!(dtype, TorchType::F32 | TorchType::Bf16 | TorchType::F16)
}
