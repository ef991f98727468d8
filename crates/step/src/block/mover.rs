//! Activations that wait for the backward pass on a lower tier. A tensor is copied into a buffer of whole pages and sent
//! from there; it comes back into a buffer ahead of its use.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use plimsoll_device::{DType, Device, DeviceExt, Due, Elementwise, Lent, Rounding, Shape, Tensor};
use plimsoll_disk::{ALIGNMENT, Home, LowerTiers, Transfer};
use plimsoll_memory::{Tag, Tier};

use crate::StepError;
use crate::tier::{Direction, aligned_view, buffer, count};

/// Buffers on their way out at most: memory does not depend on how fast a disk is.
const LEAVING: usize = 2;

/// Moves activations to a lower tier and back.
pub(crate) struct Mover<'a, D: Device> {
    device: &'a D,
    tiers: Arc<LowerTiers>,
    tier: Tier,
    /// Stands for what is away.
    nothing: Tensor,
    /// With their homes, which are nobody else's before they have arrived.
    leaving: RefCell<VecDeque<(Moving, Arc<Home>)>>,
}

/// A tensor that is away.
pub(crate) struct Stored {
    home: Arc<Home>,
    dtype: DType,
    shape: Shape,
    coming: Option<Moving>,
}

/// A buffer on its way.
enum Moving {
    Under(Transfer),
    /// On a device without memory.
    Dry(Tensor, Due),
}

impl<'a, D: Device> Mover<'a, D> {
    /// Nothing is away yet.
    pub fn new(device: &'a D, tiers: &Arc<LowerTiers>, tier: Tier) -> Result<Self, StepError> {
        let nothing = device.alloc(DType::U8, &[1], Tag::Staging, "away")?;
        let (tiers, leaving) = (Arc::clone(tiers), RefCell::default());
        Ok(Mover { device, tiers, tier, nothing, leaving })
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
        let bytes = dtype.bytes_for(shape.elements()).unwrap_or(0);
        let buffer = buffer(self.device, bytes, Tag::Staging, "activation")?;
        let view = self.view(&buffer, dtype, shape)?;
        Ok((buffer, view))
    }

    fn view(&self, buffer: &Tensor, dtype: DType, shape: Shape) -> Result<Tensor, StepError> {
        let mismatch = || plimsoll_device::DeviceError::Mismatch {
            op: "view",
            reason: format!("{buffer:?} cannot hold {shape:?} {dtype}"),
        };
        Ok(aligned_view(buffer, 0, dtype, shape.dims()).ok_or_else(mismatch)?)
    }

    /// Sends a copy of a tensor.
    pub fn send_copy(&self, x: &Tensor) -> Result<Stored, StepError> {
        let (buffer, out) = self.new_tensor(x.dtype(), x.shape())?;
        self.device.run(Elementwise::Cast { x, out: &out, rounding: Rounding::Nearest })?;
        self.send(buffer, out)
    }

    /// Sends a buffer with the tensor in it.
    pub fn send(&self, buffer: Tensor, tensor: Tensor) -> Result<Stored, StepError> {
        let (dtype, shape, bytes) = (tensor.dtype(), tensor.shape(), tensor.bytes());
        drop(tensor);
        while self.leaving.borrow().len() >= LEAVING {
            self.wait_for_one()?;
        }
        let home = Arc::new(self.tiers.take(self.tier, bytes, Tag::Activations, "activation")?);
        let moving = match self.device.lend(buffer)? {
            Lent::Memory(memory) => Moving::Under(self.tiers.send(&home, memory)),
            Lent::Nothing(tensor) => {
                let due = self.count(&home, bytes, Direction::WriteBack);
                Moving::Dry(tensor, due)
            }
        };
        self.leaving.borrow_mut().push_back((moving, Arc::clone(&home)));
        Ok(Stored { home, dtype, shape, coming: None })
    }

    /// Counts a move, in a dry run. One to or from the host is made at once.
    fn count(&self, home: &Home, bytes: u64, direction: Direction) -> Due {
        let moved = count(&self.tiers, home, bytes, direction);
        let Some(clock) = self.device.clock() else { return Due::default() };
        let due = clock.transfer(moved);
        if !home.is_on_disk() {
            clock.wait(due);
        }
        due
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

    fn arrived(&self, moving: Moving) -> Result<Tensor, StepError> {
        match moving {
            Moving::Dry(tensor, due) => {
                if let Some(clock) = self.device.clock() {
                    clock.wait(due);
                }
                Ok(tensor)
            }
            Moving::Under(transfer) => {
                let finished = transfer.wait();
                let tensor = self.device.reclaim(finished.region)?;
                finished.outcome?;
                Ok(tensor)
            }
        }
    }

    /// Begins to bring a tensor back.
    pub fn fetch(&self, stored: &mut Stored) -> Result<(), StepError> {
        if stored.coming.is_some() {
            return Ok(());
        }
        self.settle()?;
        let bytes = stored.home.bytes();
        let buffer = buffer(self.device, bytes, Tag::Staging, "activation")?;
        stored.coming = Some(match self.device.lend(buffer)? {
            Lent::Memory(memory) => Moving::Under(self.tiers.bring(&stored.home, memory)),
            Lent::Nothing(tensor) => {
                let due = self.count(&stored.home, bytes, Direction::Prefetch);
                Moving::Dry(tensor, due)
            }
        });
        Ok(())
    }

    /// A tensor again, waiting for it where it is not there yet.
    pub fn take(&self, mut stored: Stored) -> Result<Tensor, StepError> {
        self.fetch(&mut stored)?;
        let Stored { dtype, shape, coming, .. } = stored;
        match coming {
            Some(moving) => self.view(&self.arrived(moving)?, dtype, shape),
            None => Ok(self.nothing()),
        }
    }
}
