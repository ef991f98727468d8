//! The graph that autograd records: nodes, what they save, and where gradients go.

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use super::Torch;
use super::checkpoint::{Holder, Segment};
use super::shape::Dims;
use super::tensor::{History, Leaf, Tensor};
use crate::run::TorchType;

/// Gradients of a node's outputs, or of its inputs.
pub(super) type Grads = Vec<Option<Tensor>>;

/// A node's formula, with what it saved. It runs once; what it saved is freed behind it.
pub(super) type Backward = Box<dyn Fn(&Torch, &[Option<Tensor>]) -> Grads>;

/// Where a gradient goes: an output of a node, in the order of the forward pass.
#[derive(Clone, Debug)]
pub(super) struct Edge {
    pub node: Rc<Node>,
    pub output: usize,
}

/// What a node does.
pub(super) enum Work {
    /// Its formula; taken when it runs.
    Formula(RefCell<Option<Backward>>),
    /// `AccumulateGrad`, which keeps its variable.
    Accumulate { leaf: Rc<Leaf>, _variable: Tensor },
}

/// Attributes of a function's context.
#[derive(Default)]
pub(super) enum Attributes {
    /// None that keep memory.
    #[default]
    None,
    /// What a checkpoint runs.
    Segment { _segment: Segment },
    /// A tensor that was not given to `save_for_backward`.
    Tensor { _tensor: Tensor },
}

/// A function's node.
pub(super) struct Node {
    pub name: &'static str,
    /// Later functions run first; `AccumulateGrad` before all.
    pub sequence: u64,
    /// For each input where its gradient goes, if it needs one.
    pub next: RefCell<Vec<Option<Edge>>>,
    /// Size and type of each output, which its gradient must have.
    pub outputs: RefCell<Vec<(Dims, TorchType)>>,
    pub work: Work,
    /// What a function written in Python keeps as long as its node lives, beside what it saved.
    pub attributes: RefCell<Attributes>,
    /// The module that it belongs to.
    pub scope: Rc<str>,
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.sequence)
    }
}

/// A chain of nodes can be as long as a model is deep: it is taken apart in a loop, not in a recursion.
impl Drop for Node {
    fn drop(&mut self) {
        let mut edges = std::mem::take(&mut *self.next.borrow_mut());
        while let Some(edge) = edges.pop() {
            let Some(Edge { node, .. }) = edge else { continue };
            if let Some(node) = Rc::into_inner(node) {
                edges.append(&mut node.next.borrow_mut());
            }
        }
    }
}

/// A tensor that a node keeps for its formula (`SavedVariable`).
pub(super) enum Saved {
    /// As it is.
    Kept(Kept),
    /// To be computed again.
    Packed(Rc<Holder>),
}

impl Saved {
    /// The tensor, as the formula gets it.
    pub fn unpack(&self, torch: &Torch) -> Tensor {
        match self {
            Saved::Kept(kept) => kept.0.clone(),
            Saved::Packed(holder) => holder.unpack(torch),
        }
    }
}

/// A tensor without its history; its storage counts as kept for the backward pass.
#[derive(Debug)]
pub(super) struct Kept(pub Tensor);

impl Kept {
    pub fn new(tensor: &Tensor) -> Kept {
        tensor.storage.keep();
        Kept(tensor.detach())
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.0.storage.release();
    }
}

impl Torch {
    /// Whether a function of these inputs is recorded.
    pub(super) fn records(&self, inputs: &[&Tensor]) -> bool {
        self.grad_enabled() && inputs.iter().any(|input| input.requires_grad())
    }

    /// Saves a tensor for the formula of the node that is being made.
    pub(super) fn save(&self, tensor: &Tensor) -> Saved {
        self.note_saved(tensor);
        self.pack(tensor)
    }

    /// Makes `out` the result of a recorded function; the formula is asked for only where one of the inputs needs a
    /// gradient, and is told which do.
    pub(super) fn recorded(
        &self,
        name: &'static str,
        inputs: &[&Tensor],
        out: Tensor,
        formula: impl FnOnce(&[bool]) -> Backward,
    ) -> Tensor {
        let mut outs = self.recorded_many(name, inputs, vec![out], formula);
        outs.remove(0)
    }

    /// The same where the formula keeps arguments only: they are saved before the result exists, and a recomputation that
    /// needs nothing behind them ends there.
    pub(super) fn recorded_first(
        &self,
        name: &'static str,
        inputs: &[&Tensor],
        formula: impl FnOnce(&[bool]) -> Backward,
        out: impl FnOnce() -> Tensor,
    ) -> Tensor {
        if !self.records(inputs) {
            return out().detach();
        }
        let needs: Vec<bool> = inputs.iter().map(|input| input.requires_grad()).collect();
        let formula = formula(&needs);
        self.recorded(name, inputs, out(), |_| formula)
    }

    /// The same with several outputs.
    pub(super) fn recorded_many(
        &self,
        name: &'static str,
        inputs: &[&Tensor],
        mut outs: Vec<Tensor>,
        formula: impl FnOnce(&[bool]) -> Backward,
    ) -> Vec<Tensor> {
        if !self.records(inputs) {
            outs.iter_mut().for_each(|out| out.history = History::None);
            return outs;
        }
        let needs: Vec<bool> = inputs.iter().map(|input| input.requires_grad()).collect();
        let next = inputs.iter().map(|input| self.gradient_edge(input)).collect();
        let sequence = self.next_sequence();
        let work = Work::Formula(RefCell::new(Some(formula(&needs))));
        let outputs = RefCell::new(outs.iter().map(|out| (out.shape, out.dtype)).collect());
        let node = Rc::new(Node {
            name,
            sequence,
            next: RefCell::new(next),
            attributes: RefCell::default(),
            outputs,
            work,
            scope: self.scope(),
        });
        for (output, out) in outs.iter_mut().enumerate() {
            out.history = History::Made(Edge { node: Rc::clone(&node), output });
        }
        outs
    }

    /// Where the gradient of a tensor goes.
    pub(super) fn gradient_edge(&self, tensor: &Tensor) -> Option<Edge> {
        match &tensor.history {
            History::None => None,
            History::Made(edge) => Some(edge.clone()),
            History::Leaf(leaf) => {
                let living = leaf.accumulator.borrow().upgrade();
                let node = living.unwrap_or_else(|| {
                    let node = Rc::new(Node {
                        name: "AccumulateGrad",
                        sequence: u64::MAX,
                        next: RefCell::default(),
                        outputs: RefCell::new(vec![(tensor.shape, tensor.dtype)]),
                        attributes: RefCell::default(),
                        work: Work::Accumulate { leaf: Rc::clone(leaf), _variable: tensor.detach() },
                        scope: self.scope(),
                    });
                    *leaf.accumulator.borrow_mut() = Rc::downgrade(&node);
                    node
                });
                Some(Edge { node, output: 0 })
            }
        }
    }
}
