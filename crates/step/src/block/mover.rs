//! Activations that wait for the backward pass on a lower tier. A tensor is copied into a buffer of whole pages and sent
//! from there; it comes back into a buffer ahead of its use.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use plimsoll_device::{DType, Device, DeviceExt, Elementwise, Rounding, Shape, Tensor};
use plimsoll_disk::{ALIGNMENT, Direction, Home, LowerTiers};
use plimsoll_memory::{Tag, Tier};

use crate::StepError;
use crate::tier::{Parcel, Source, Transit, Transits, buffer};

/// Buffers on their way out at most: memory does not depend on how fast a disk is.
const LEAVING: usize = 2;

/// Moves activations to a lower tier and back.
pub(crate) struct Mover<'a> {
    transits: Transits<'a>,
    tier: Tier,
    /// Stands for what is away.
    nothing: Tensor,
    /// With their homes, which are nobody else's before they have arrived.
    leaving: RefCell<VecDeque<(Transit, Option<Arc<Home>>)>>,
}

/// A tensor that is away.
pub(crate) struct Stored {
    parcel: Parcel<()>,
    coming: Option<Transit>,
}

impl<'a> Mover<'a> {
    /// Nothing is away yet.
    pub fn new(device: &'a dyn Device, tiers: &Arc<LowerTiers>, tier: Tier) -> Result<Self, StepError> {
        let nothing = device.alloc(DType::U8, &[1], Tag::Staging, "away")?;
        let transits = Transits::new(device, tiers, tier == Tier::Disk)?;
        Ok(Mover { transits, tier, nothing, leaving: RefCell::default() })
    }

    /// Whether a tensor is large enough to be worth its way: smaller ones would take a page all the same.
    pub fn takes(&self, tensor: &Tensor) -> bool {
        tensor.bytes() >= ALIGNMENT
    }

    /// What stands in the place of a tensor that is away.
    pub fn nothing(&self) -> Tensor {
        self.nothing.clone()
    }

    /// A buffer and a tensor in it, to be written and sent.
    pub fn new_tensor(&self, dtype: DType, shape: Shape) -> Result<(Tensor, Tensor), StepError> {
        let mut parcel = Parcel::new();
        parcel.add((), dtype, shape.dims());
        let buffer = buffer(self.transits.device, parcel.bytes(), Tag::Staging, "activation")?;
        let view = tensor_in(&parcel, &buffer)?;
        Ok((buffer, view))
    }

    /// Sends a copy of a tensor.
    pub fn send_copy(&self, x: &Tensor) -> Result<Stored, StepError> {
        let (buffer, out) = self.new_tensor(x.dtype(), x.shape())?;
        self.transits.device.run(Elementwise::Cast { x, out: &out, rounding: Rounding::Nearest })?;
        self.send(buffer, out)
    }

    /// Sends a buffer with the tensor in it.
    pub fn send(&self, buffer: Tensor, tensor: Tensor) -> Result<Stored, StepError> {
        let mut parcel = Parcel::new();
        parcel.add((), tensor.dtype(), tensor.shape().dims());
        drop(tensor);
        while self.leaving.borrow().len() >= LEAVING {
            self.wait_for_one()?;
        }
        parcel.settle(&self.transits.tiers, self.tier, Tag::Activations, "activation")?;
        let moving = self.transits.begin(&parcel, Direction::WriteBack, Source::Buffer(buffer))?;
        self.leaving.borrow_mut().push_back((moving, parcel.home().cloned()));
        Ok(Stored { parcel, coming: None })
    }

    fn wait_for_one(&self) -> Result<(), StepError> {
        let first = self.leaving.borrow_mut().pop_front();
        first.map_or(Ok(()), |(moving, _)| self.arrived(moving).map(|_| ()))
    }

    /// Waits until everything that was sent has arrived.
    pub fn settle(&self) -> Result<(), StepError> {
        while !self.leaving.borrow().is_empty() {
            self.wait_for_one()?;
        }
        Ok(())
    }

    fn arrived(&self, moving: Transit) -> Result<Tensor, StepError> {
        let (tensor, outcome) = self.transits.wait(moving)?;
        outcome?;
        Ok(tensor)
    }

    /// Begins to bring a tensor back.
    pub fn fetch(&self, stored: &mut Stored) -> Result<(), StepError> {
        if stored.coming.is_none() {
            self.settle()?;
            let buffer = buffer(self.transits.device, stored.parcel.bytes(), Tag::Staging, "activation")?;
            let source = Source::Buffer(buffer);
            stored.coming = Some(self.transits.begin(&stored.parcel, Direction::Prefetch, source)?);
        }
        Ok(())
    }

    /// A tensor again, waiting for it where it is not there yet.
    pub fn take(&self, mut stored: Stored) -> Result<Tensor, StepError> {
        self.fetch(&mut stored)?;
        match stored.coming {
            Some(moving) => tensor_in(&stored.parcel, &self.arrived(moving)?),
            None => Ok(self.nothing()),
        }
    }
}

/// The tensor of a parcel in its buffer.
fn tensor_in(parcel: &Parcel<()>, buffer: &Tensor) -> Result<Tensor, StepError> {
    let view = parcel.views(buffer).and_then(|views| views.into_iter().next());
    let (_, tensor) = view.ok_or(StepError::Invariant { what: "an activation is larger than its buffer" })?;
    Ok(tensor)
}
