//! What routers decide for some tokens, and what other visits of theirs need of it.
//!
//! In training a choice is kept from the first forward pass of a layer to its backward pass, whatever else is dropped: what is computed
//! again goes to the same experts, even where activations come back from 8-bit codes. Logits that a later layer reads are kept alike; in
//! inference those of the last layer alone.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use plimsoll_device::{Device, Tensor};

use crate::StepError;
use crate::router_losses::RouterLosses;

/// The decisions for some tokens.
#[derive(Default)]
pub(crate) struct Routes {
    /// u32 `[N, k]` of each layer that has been visited and not yet gone back through.
    choices: RefCell<BTreeMap<u32, Tensor>>,
    /// f32 `[N, E]`: what routers said, where a later one reads it.
    logits: RefCell<BTreeMap<u32, Tensor>>,
    /// The gradients of those that a later layer has sent.
    gradients: RefCell<BTreeMap<u32, Tensor>>,
    /// What training does with routers; `None` where nothing goes backward.
    training: Option<ForTraining>,
}

/// What training does with the routers of a micro-batch.
#[derive(Clone, Default)]
pub(crate) struct ForTraining {
    pub losses: Option<Rc<RouterLosses>>,
    pub jitter: Option<Jitter>,
    /// Places that experts take, in even shares.
    pub capacity: Option<f64>,
}

/// What shakes the input of routers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Jitter {
    pub noise: f32,
    pub seed: u64,
    /// The first token, of a chunk of a sequence.
    pub first_row: u64,
}

impl Routes {
    /// Of tokens of a micro-batch, which go backward as well where they are trained on.
    pub fn new(training: Option<ForTraining>) -> Routes {
        Routes { training, ..Routes::default() }
    }

    /// What training does, where there is any.
    pub fn training(&self) -> Option<&ForTraining> {
        self.training.as_ref()
    }

    /// The choice of a layer, where it has been made.
    pub fn choice(&self, layer: u32) -> Option<Tensor> {
        self.choices.borrow().get(&layer).cloned()
    }

    /// Keeps the first choice of a layer, made from these logits, for the backward pass, if there is to be one.
    pub fn keep(
        &self,
        device: &dyn Device,
        layer: u32,
        logits: &Tensor,
        choice: &Tensor,
    ) -> Result<bool, StepError> {
        let Some(training) = &self.training else { return Ok(false) };
        self.choices.borrow_mut().insert(layer, choice.clone());
        training.losses.as_ref().map_or(Ok(()), |losses| losses.add(device, logits, choice))?;
        Ok(true)
    }

    /// The logits of a layer, where they are kept.
    pub fn logits(&self, layer: u32) -> Option<Tensor> {
        self.logits.borrow().get(&layer).cloned()
    }

    /// Keeps the logits of a layer for one that reads them, and for its own backward pass.
    pub fn keep_logits(&self, layer: u32, logits: &Tensor) {
        let mut all = self.logits.borrow_mut();
        if self.training.is_none() {
            all.clear();
        }
        all.insert(layer, logits.clone());
    }

    /// Sends a layer the gradient of its logits.
    pub fn send_gradient(&self, layer: u32, dlogits: Tensor) {
        self.gradients.borrow_mut().insert(layer, dlogits);
    }

    /// What a later layer has sent.
    pub fn take_gradient(&self, layer: u32) -> Option<Tensor> {
        self.gradients.borrow_mut().remove(&layer)
    }

    /// What a layer has decided is needed no more.
    pub fn forget(&self, layer: u32) {
        self.choices.borrow_mut().remove(&layer);
        self.logits.borrow_mut().remove(&layer);
    }
}
