//! The engine that runs a graph backwards: its order, the sums of its input buffers, and the accumulation of gradients.

use std::cmp::Ordering;
use std::collections::BinaryHeap;
use std::rc::Rc;

use rustc_hash::{FxHashMap, FxHashSet};

use super::Torch;
use super::graph::{Edge, Grads, Node, Work};
use super::tensor::{Leaf, Tensor};
use crate::estimate::Kind;

/// A node whose gradients are complete.
struct Ready {
    node: Rc<Node>,
    grads: Grads,
}

impl PartialEq for Ready {
    fn eq(&self, other: &Ready) -> bool {
        self.node.sequence == other.node.sequence
    }
}

impl Eq for Ready {}

impl PartialOrd for Ready {
    fn partial_cmp(&self, other: &Ready) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ready {
    fn cmp(&self, other: &Ready) -> Ordering {
        self.node.sequence.cmp(&other.node.sequence)
    }
}

impl Torch {
    /// `loss.backward()`
    pub fn backward(&self, root: &Tensor) {
        let ones = self.empty_as(&root.shape, root.dtype, "ones_like");
        self.backward_from(root, ones.clone());
    }

    /// `torch.autograd.backward(root, grad)`. Without a history there is nothing to do.
    pub(super) fn backward_from(&self, root: &Tensor, grad: Tensor) {
        let Some(Edge { node, output }) = self.gradient_edge(root) else { return };
        let before = self.enter_backward();
        let mut dependencies = dependencies(&node);
        let mut waiting: FxHashMap<*const Node, Grads> = FxHashMap::default();
        let mut ready = BinaryHeap::new();
        let mut grads: Grads = vec![None; node.outputs.borrow().len()];
        grads[output] = Some(grad);
        ready.push(Ready { node, grads });
        while let Some(Ready { node, grads }) = ready.pop() {
            self.set_scope(&node.scope);
            let mut outputs = self.run_node(&node, grads);
            let next = node.next.borrow();
            for (edge, output) in next.iter().zip(outputs.iter_mut()) {
                let Some(Edge { node, output: place }) = edge else { continue };
                let id = Rc::as_ptr(node);
                let left = dependencies.entry(id).or_insert(1);
                *left -= 1;
                let complete = *left == 0;
                let buffer = waiting.entry(id).or_insert_with(|| vec![None; node.outputs.borrow().len()]);
                if let Some(grad) = output.take() {
                    let sum = match buffer[*place].take() {
                        Some(before) => self.sum_in_buffer(before, grad),
                        None => grad,
                    };
                    buffer[*place] = Some(sum);
                }
                if complete && let Some(grads) = waiting.remove(&id) {
                    ready.push(Ready { node: Rc::clone(node), grads });
                }
            }
        }
        self.leave_backward(before);
    }

    /// A node's formula, then the forms that the gradients must have (`validate_outputs`).
    fn run_node(&self, node: &Rc<Node>, mut grads: Grads) -> Grads {
        match &node.work {
            Work::Accumulate { leaf, .. } => {
                if let Some(grad) = grads[0].take() {
                    self.accumulate(leaf, grad);
                }
                Vec::new()
            }
            Work::Formula(formula) => {
                let Some(formula) = formula.borrow_mut().take() else { return Vec::new() };
                if grads.iter().all(Option::is_none) {
                    return vec![None; node.next.borrow().len()];
                }
                let mut outputs = formula(self, &grads);
                for (edge, output) in node.next.borrow().iter().zip(outputs.iter_mut()) {
                    let (Some(edge), Some(grad)) = (edge, output.take()) else { continue };
                    let (shape, dtype) = edge.node.outputs.borrow()[edge.output];
                    let grad = if grad.shape == shape { grad } else { self.sum_to(&grad, &shape) };
                    *output = Some(self.to(&grad, dtype));
                }
                outputs
            }
        }
    }

    /// `InputBuffer::accumulate`: into the earlier gradient where nobody else has it; never where tensors are of a
    /// subclass, as a tracer's are.
    fn sum_in_buffer(&self, before: Tensor, grad: Tensor) -> Tensor {
        let in_place = !self.traced.get() && before.is_dense() && before.is_sole_owner();
        if in_place {
            return before;
        }
        self.add(&before, &grad)
    }

    /// `AccumulateGrad`: a gradient that nobody else has is taken, any other copied; one that exists is added to in place.
    fn accumulate(&self, leaf: &Rc<Leaf>, grad: Tensor) {
        let existing = leaf.grad.borrow().is_some();
        if !existing {
            let sole = grad.is_sole_owner() && grad.is_dense();
            let own = if sole { grad } else { self.copy(&grad, "clone") };
            *leaf.grad.borrow_mut() = Some(own.of_kind(Kind::Gradients));
        }
        let hook = leaf.hook.borrow().clone();
        let complete = hook.and_then(|hook| leaf.grad.borrow_mut().take().map(|grad| (hook, grad)));
        if let Some((hook, grad)) = complete {
            (hook.0)(self, &grad);
        }
    }
}

/// For each node how many gradients it waits for.
fn dependencies(root: &Rc<Node>) -> FxHashMap<*const Node, usize> {
    let mut counts: FxHashMap<*const Node, usize> = FxHashMap::default();
    let mut seen = FxHashSet::default();
    let mut stack = vec![Rc::clone(root)];
    while let Some(node) = stack.pop() {
        for edge in node.next.borrow().iter().flatten() {
            *counts.entry(Rc::as_ptr(&edge.node)).or_default() += 1;
            if seen.insert(Rc::as_ptr(&edge.node)) {
                stack.push(Rc::clone(&edge.node));
            }
        }
    }
    counts
}
