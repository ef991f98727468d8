//! A tensor: a view of a storage, and what autograd knows of it. Its clones are references to the same tensor.

use std::cell::RefCell;
use std::rc::{Rc, Weak};

use super::graph::{Edge, Node};
use super::memory::Storage;
use super::shape::Dims;
use crate::estimate::Kind;
use crate::run::TorchType;

/// What autograd knows of a tensor.
#[derive(Clone, Debug)]
pub(super) enum History {
    /// It needs no gradient.
    None,
    /// A gradient is accumulated in it.
    Leaf(Rc<Leaf>),
    /// A node of the graph made it.
    Made(Edge),
}

/// A leaf's gradient, and the node that accumulates it.
#[derive(Debug, Default)]
pub(super) struct Leaf {
    pub grad: RefCell<Option<Tensor>>,
    /// Kept alive by the graphs that use it alone.
    pub accumulator: RefCell<Weak<Node>>,
    /// Called with a gradient that has been accumulated, which is dropped behind it.
    pub hook: RefCell<Option<Hook>>,
}

/// What is called with a gradient that has been accumulated.
pub type AccumulationHook = dyn Fn(&super::Torch, &Tensor);

#[derive(Clone)]
pub(super) struct Hook(pub Rc<AccumulationHook>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

/// A tensor on the device.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub(super) storage: Rc<Storage>,
    pub(super) shape: Dims,
    pub(super) strides: Dims,
    pub(super) dtype: TorchType,
    pub(super) history: History,
}

impl Tensor {
    /// Sizes.
    pub fn shape(&self) -> Dims {
        self.shape
    }

    /// The size of a dimension.
    pub fn size(&self, at: usize) -> u64 {
        self.shape[at]
    }

    /// Type of the elements.
    pub fn dtype(&self) -> TorchType {
        self.dtype
    }

    /// Bytes of its elements.
    pub fn bytes(&self) -> u64 {
        self.shape.elements() * self.dtype.bytes()
    }

    /// The storage that it views.
    pub fn storage(&self) -> &Rc<Storage> {
        &self.storage
    }

    /// `requires_grad`
    pub fn requires_grad(&self) -> bool {
        !matches!(self.history, History::None)
    }

    /// Says what its storage is for.
    pub fn of_kind(self, kind: Kind) -> Tensor {
        self.storage.set_kind(kind);
        self
    }

    /// The tensor as a leaf that a gradient is accumulated in (`requires_grad_()`).
    pub fn as_leaf(mut self) -> Tensor {
        self.history = History::Leaf(Rc::default());
        self
    }

    /// `detach()`: the same storage, nothing of the graph.
    pub fn detach(&self) -> Tensor {
        Tensor { history: History::None, ..self.clone() }
    }

    /// The leaf's gradient.
    pub fn grad(&self) -> Option<Tensor> {
        match &self.history {
            History::Leaf(leaf) => leaf.grad.borrow().clone(),
            _ => None,
        }
    }

    /// Takes the leaf's gradient away (`zero_grad(set_to_none=True)`).
    pub fn take_grad(&self) -> Option<Tensor> {
        match &self.history {
            History::Leaf(leaf) => leaf.grad.borrow_mut().take(),
            _ => None,
        }
    }

    /// A gradient for the leaf: added in place to one that is there, which frees the new one.
    pub(crate) fn accumulate_grad(&self, grad: Tensor) {
        if let History::Leaf(leaf) = &self.history {
            leaf.grad.borrow_mut().get_or_insert(grad);
        }
    }

    /// Calls `hook` with a gradient that has been accumulated in this leaf, and then drops the gradient
    /// (`register_post_accumulate_grad_hook` with an optimizer in the hook).
    pub fn after_accumulation(&self, hook: Rc<AccumulationHook>) {
        if let History::Leaf(leaf) = &self.history {
            *leaf.hook.borrow_mut() = Some(Hook(hook));
        }
    }

    /// Whether its elements follow each other in memory in order.
    pub fn is_contiguous(&self) -> bool {
        let want = self.shape.contiguous_strides();
        self.shape.iter().zip(self.strides.iter().zip(want.iter())).all(|(size, (a, b))| *size == 1 || a == b)
    }

    /// Whether its elements fill a stretch of memory, in whatever order.
    pub fn is_dense(&self) -> bool {
        let mut order: Vec<_> =
            self.shape.iter().zip(self.strides.iter()).filter(|(size, _)| **size != 1).collect();
        order.sort_by_key(|(_, stride)| **stride);
        let mut expected = 1;
        order.iter().all(|(size, stride)| {
            let fits = **stride == expected;
            expected *= **size;
            fits
        })
    }

    /// Whether no other tensor has its storage.
    pub(super) fn is_sole_owner(&self) -> bool {
        Rc::strong_count(&self.storage) == 1
    }
}
