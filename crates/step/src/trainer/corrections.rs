//! Balance without a loss (Wang et al. 2024; DeepSeek-V3): behind each step, what a router adds to the score of an expert for the choice
//! grows by a fixed speed where the expert was chosen less often than the mean of its layer, and shrinks where it was chosen more
//! often. What counts are the tokens of the whole step, on all ranks.

use plimsoll_device::{Collective, DType, DeviceExt, Routing, Tensor};
use plimsoll_memory::{Phase, Tag};
use plimsoll_model::{BlockId, Role};
use plimsoll_parallel::{Collectives, Communicator};

use super::Trainer;
use crate::StepError;
use crate::store::load_parts;

impl Trainer<'_> {
    /// Adjusts the corrections of all layers, if they are to be adjusted and the step was taken.
    pub(super) fn adjust_corrections(&self) -> Result<(), StepError> {
        let (device, speed) = (self.device, self.settings.routers.correction_speed);
        if speed <= 0.0 {
            return Ok(());
        }
        let resident = self.weights.resident();
        for (layer, load) in resident.counted() {
            let own = resident.gather(BlockId::Layer(layer))?;
            let Some(correction) = own.find(Role::RouterCorrection) else { continue };
            device.enter(Phase::Optimizer, Some(layer));
            let counts = &self.counts_of_all(load_parts(load)?.0)?;
            let flag = self.numbers.control().flag;
            let speed = speed as f32;
            device.execute(Routing::AdjustCorrection { counts, speed, correction }.into(), flag)?;
        }
        Ok(())
    }

    /// The sum of what all ranks have counted that take other micro-batches, or other places of their sequences.
    fn counts_of_all(&self, own: Tensor) -> Result<Tensor, StepError> {
        let with_other_experts = self.products.as_ref().filter(|ranks| ranks.shares_experts_alone());
        let apart = with_other_experts.map(|products| products.ranks());
        [Some(&*self.replicas), apart].into_iter().flatten().try_fold(own, |own, ranks| {
            if ranks.is_alone() {
                return Ok(own);
            }
            self.sum_of_counts(&own, ranks)
        })
    }

    fn sum_of_counts(&self, own: &Tensor, ranks: &dyn Communicator) -> Result<Tensor, StepError> {
        let device = self.device;
        let alloc = |name| device.alloc(DType::U32, own.shape().dims(), Tag::Communication, name);
        let (total, received) = (alloc("experts.total")?, alloc("experts.received")?);
        device.run(Routing::Copy { x: own, out: &total })?;
        for (to, from) in ranks.rounds() {
            let (send, receive) = (Some((to, own)), Some((from, &received)));
            ranks.send_receive(device, Collective::AllReduce, send, receive)?;
            device.run(Routing::AddCounts { counts: &received, out: &total })?;
        }
        Ok(total)
    }
}
