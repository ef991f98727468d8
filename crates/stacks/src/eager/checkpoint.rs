//! Gradient checkpointing, as `torch/utils/checkpoint.py` does it.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use super::graph::{Attributes, Kept, Saved};
use super::tensor::{History, Tensor};
use super::{Surroundings, Torch};

/// A part of a model as a function of the residual stream.
pub(crate) type Segment = Rc<dyn Fn(&Torch, &Tensor) -> Tensor>;

/// What stands for a saved tensor that will be computed again.
pub(super) struct Holder {
    frame: Rc<Frame>,
    tensor: RefCell<Option<Kept>>,
}

impl Holder {
    /// The tensor, computed again with all others of its segment where this is the first one asked for. It is given away.
    pub fn unpack(&self, torch: &Torch) -> Tensor {
        if !self.frame.recomputed.replace(true) {
            torch.recompute(&self.frame);
        }
        let kept = self.tensor.borrow_mut().take();
        match kept {
            Some(kept) => kept.0.clone(),
            // A formula may ask twice; PyTorch refuses that, none of ours does.
            None => unreachable!("a tensor of a checkpointed segment is asked for once"),
        }
    }
}

/// A segment of the non-reentrant form.
pub(super) struct Frame {
    segment: Segment,
    input: Kept,
    input_needs_grad: bool,
    surroundings: Surroundings,
    holders: RefCell<Vec<Weak<Holder>>>,
    recomputed: Cell<bool>,
}

/// What happens to tensors that nodes save.
#[derive(Clone)]
pub(super) enum Packing {
    /// They are replaced by holders.
    Hold(Rc<Frame>),
    /// They are put into the holders, in order; behind the last one nothing is computed.
    Fill { frame: Rc<Frame>, next: Rc<Cell<usize>> },
}

impl Torch {
    pub(super) fn pack(&self, tensor: &Tensor) -> Saved {
        match self.packing() {
            None => Saved::Kept(Kept::new(tensor)),
            Some(Packing::Hold(frame)) => {
                let holder = Rc::new(Holder { frame: Rc::clone(&frame), tensor: RefCell::default() });
                frame.holders.borrow_mut().push(Rc::downgrade(&holder));
                Saved::Packed(holder)
            }
            Some(Packing::Fill { frame, next }) => {
                let holders = frame.holders.borrow();
                let holder = holders.get(next.replace(next.get() + 1)).and_then(Weak::upgrade);
                if let Some(holder) = holder {
                    *holder.tensor.borrow_mut() = Some(Kept::new(tensor));
                }
                if next.get() >= holders.len() {
                    self.stop();
                }
                Saved::Kept(Kept::new(tensor))
            }
        }
    }

    /// `checkpoint(segment, input, use_reentrant=False)`
    pub fn checkpoint(&self, segment: Segment, input: &Tensor) -> Tensor {
        let frame = Rc::new(Frame {
            segment: Rc::clone(&segment),
            input: Kept::new(input),
            input_needs_grad: input.requires_grad(),
            surroundings: self.surroundings(),
            holders: RefCell::default(),
            recomputed: Cell::new(false),
        });
        let outer = self.set_packing(Some(Packing::Hold(frame)));
        let out = segment(self, input);
        self.set_packing(outer);
        out
    }

    fn recompute(&self, frame: &Rc<Frame>) {
        let input = frame.input.0.clone();
        let input = if frame.input_needs_grad { input.as_leaf() } else { input };
        let packing = Packing::Fill { frame: Rc::clone(frame), next: Rc::default() };
        let outer = self.set_packing(Some(packing));
        self.again(&frame.surroundings, || (frame.segment)(self, &input));
        self.set_packing(outer);
    }

    /// `checkpoint(segment, input, use_reentrant=True)`; with `offloaded`, as Unsloth has it, the input waits in pinned host
    /// memory.
    pub fn checkpoint_reentrant(&self, segment: Segment, input: &Tensor, offloaded: bool) -> Tensor {
        let out = self.no_grad(|| segment(self, input));
        let attribute = Rc::clone(&segment);
        let out = self.recorded("CheckpointFunction", &[input], out.detach(), |_| {
            let (shape, dtype, bytes) = (input.shape, input.dtype, input.bytes().cast_signed());
            let kept = (!offloaded).then(|| self.save(input));
            if offloaded {
                self.memory().host(bytes);
            }
            let surroundings = self.surroundings();
            Box::new(move |torch, grads| {
                let input = match &kept {
                    Some(kept) => kept.unpack(torch),
                    None => {
                        torch.memory().host(-bytes);
                        torch.empty_as(&shape, dtype, "_to_copy")
                    }
                };
                let detached = input.detach().as_leaf();
                drop(input);
                let out = torch.again(&surroundings, || segment(torch, &detached));
                if let Some(grad) = &grads[0] {
                    torch.backward_from(&out, grad.clone());
                }
                vec![detached.take_grad()]
            })
        });
        if let History::Made(edge) = &out.history {
            *edge.node.attributes.borrow_mut() = Attributes::Segment { _segment: attribute };
        }
        out
    }
}
