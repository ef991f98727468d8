//! Experts without matrices (MoE++, Jin et al. 2024): zero, copy and constant ones. Beside the rows of the others, a token has a factor
//! on its input, and one on the vector of each constant expert; nothing of theirs is kept but the normed input.

use plimsoll_device::{DType, DeviceExt, Routing, Tensor, ZeroComputation, ZeroExperts};
use plimsoll_memory::Tag;
use plimsoll_model::Role;

use super::{Experts, Routed};
use crate::StepError;
use crate::gradients::Gradients;

/// What experts without matrices make of tokens.
struct Factors {
    experts: ZeroExperts,
    /// f32 `[N, 1]`: on the input.
    inputs: Tensor,
    /// Of constant experts, where there are any.
    constant: Option<Constant>,
}

struct Constant {
    /// f32 `[N, 2 C]`: the logits of input and vector.
    gates: Tensor,
    /// f32 `[N, C]`: the factors on vectors.
    vectors: Tensor,
}

impl Experts<'_, '_> {
    fn of_tokens(&self, tokens: u64, columns: u64, name: &'static str) -> Result<Tensor, StepError> {
        Ok(self.ctx.device.alloc(DType::F32, &[tokens, columns], Tag::Activations, name)?)
    }

    fn factors(&self, routed: &Routed, normed: &Tensor) -> Result<Option<Factors>, StepError> {
        let Some(experts) = self.spec.zero_experts() else { return Ok(None) };
        let (tokens, device) = (normed.rows(), self.ctx.device);
        let constant = match experts.constant {
            0 => None,
            count => {
                let gates = self.of_tokens(tokens, 2 * count, "constant.gates")?;
                self.weights.linear(Role::ConstantGate, None)?.forward(self.ctx, normed, &gates, false)?;
                Some(Constant { gates, vectors: self.of_tokens(tokens, count, "constant.factors")? })
            }
        };
        let inputs = self.of_tokens(tokens, 1, "copy.factors")?;
        let gates = constant.as_ref().map(|constant| &constant.gates);
        let vectors = constant.as_ref().map(|constant| &constant.vectors);
        let (choice, weights) = (routed.sent(), &routed.weights);
        device.run(ZeroComputation::Factors { choice, weights, gates, experts, inputs: &inputs, vectors })?;
        Ok(Some(Factors { experts, inputs, constant }))
    }

    /// out += what such experts make of x.
    pub(super) fn add_zero_computation(
        &self,
        routed: &Routed,
        normed: &Tensor,
        out: &Tensor,
    ) -> Result<(), StepError> {
        let Some(Factors { inputs, constant, .. }) = self.factors(routed, normed)? else { return Ok(()) };
        self.ctx.device.run(ZeroComputation::AddScaled { x: normed, factors: &inputs, out })?;
        match constant {
            Some(constant) => {
                let vectors = self.weights.linear(Role::ConstantVectors, None)?;
                vectors.add_rows(self.ctx, &constant.vectors, out)
            }
            None => Ok(()),
        }
    }

    /// dnormed += what comes through them, and dweights of their places; adds to the gradients of constant experts.
    pub(super) fn zero_computation_backward(
        &self,
        routed: &Routed,
        normed: &Tensor,
        dout: &Tensor,
        dweights: &Tensor,
        dnormed: &Tensor,
        gradients: &mut Gradients<'_>,
    ) -> Result<(), StepError> {
        let Some(Factors { experts, inputs, constant }) = self.factors(routed, normed)? else {
            return Ok(());
        };
        let (ctx, device, tokens) = (self.ctx, self.ctx.device, normed.rows());
        let dinputs = &self.of_tokens(tokens, 1, "dcopy.factors")?;
        device.run(Routing::RowDots { a: dout, b: normed, places: None, out: dinputs })?;
        let dconstant = match &constant {
            None => None,
            Some(Constant { vectors, .. }) => {
                let linear = self.weights.linear(Role::ConstantVectors, None)?;
                let dvectors = self.of_tokens(tokens, experts.constant, "dconstant.factors")?;
                linear.forward(ctx, dout, &dvectors, false)?;
                linear.add_row_gradients(ctx, gradients, vectors, dout)?;
                Some((dvectors, self.of_tokens(tokens, 2 * experts.constant, "dconstant.gates")?))
            }
        };
        device.run(ZeroComputation::FactorsBackward {
            choice: routed.sent(),
            weights: &routed.weights,
            gates: constant.as_ref().map(|constant| &constant.gates),
            experts,
            dinputs,
            dvectors: dconstant.as_ref().map(|(dvectors, _)| dvectors),
            dweights,
            dgates: dconstant.as_ref().map(|(_, dgates)| dgates),
        })?;
        if let Some((_, dgates)) = &dconstant {
            let gate = self.weights.linear(Role::ConstantGate, None)?;
            let through = gate.backward_weight(ctx, gradients, dgates, normed)?;
            gate.backward_input(ctx, through, dgates, dnormed, true)?;
        }
        Ok(device.run(ZeroComputation::AddScaled { x: dout, factors: &inputs, out: dnormed })?)
    }
}
