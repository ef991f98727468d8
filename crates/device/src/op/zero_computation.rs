//! Experts without matrices (MoE++, Jin et al. 2024): the zero expert gives nothing, the copy expert its input x, and the constant
//! expert a x + b v with a vector v of its own, where a and b are the softmax of two products with the token.
//!
//! What all such experts of a token make is a factor on x, and one on the vector of each constant expert: sums over few numbers. Places
//! are those of [`Routing`](super::Routing); N tokens, k experts for each, C constant experts.

use super::{Family, MAX_EXPERTS, MAX_EXPERTS_PER_TOKEN};
use crate::Tensor;
use crate::check::Description;

/// Which experts of a choice are without matrices: zero experts come first, then those that copy, then constant ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ZeroExperts {
    /// The number of the first of them.
    pub first: u64,
    /// Experts that give nothing.
    pub zero: u64,
    /// Experts that give their input.
    pub copy: u64,
    /// Experts with a vector of their own.
    pub constant: u64,
}

/// A part of what experts without matrices do.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum ZeroComputation<'a> {
    /// `inputs[n]` = the factor on token n, and `vectors[n, c]` that on the vector of constant expert c. choice u32 `[N, k]`, of which
    /// other experts and [`NOWHERE`](super::NOWHERE) count for nothing; weights f32 `[N, k]`; gates f32 `[N, 2 C]`, for each constant
    /// expert the logit of its input and that of its vector; inputs f32 `[N, 1]`, vectors f32 `[N, C]`.
    Factors {
        choice: &'a Tensor,
        weights: &'a Tensor,
        gates: Option<&'a Tensor>,
        experts: ZeroExperts,
        inputs: &'a Tensor,
        vectors: Option<&'a Tensor>,
    },
    /// dweights of the places of such experts, which are overwritten, and dgates, from dinputs and dvectors.
    FactorsBackward {
        choice: &'a Tensor,
        weights: &'a Tensor,
        gates: Option<&'a Tensor>,
        experts: ZeroExperts,
        dinputs: &'a Tensor,
        dvectors: Option<&'a Tensor>,
        dweights: &'a Tensor,
        dgates: Option<&'a Tensor>,
    },
    /// `out[n] += x[n] * factors[n]`; x, out `[N, H]`, factors f32 `[N, 1]`.
    AddScaled { x: &'a Tensor, factors: &'a Tensor, out: &'a Tensor },
}

impl<'a> Family<'a> for ZeroComputation<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            ZeroComputation::Factors { choice, weights, gates, experts, inputs, vectors } => {
                Description::new("zero_computation", [choice, weights], [inputs])
                    .reading(gates)
                    .writing(vectors)
                    .of_tokens(choice, weights, experts)
                    .gates(choice, gates, experts)
                    .factors(choice, inputs, vectors, experts)
            }
            ZeroComputation::FactorsBackward {
                choice,
                weights,
                gates,
                experts,
                dinputs,
                dvectors,
                dweights,
                dgates,
            } => Description::new("zero_computation_backward", [choice, weights, dinputs], [])
                .reading(gates.into_iter().chain(dvectors))
                .writing(dgates)
                .changing([dweights])
                .of_tokens(choice, weights, experts)
                .gates(choice, gates, experts)
                .gates(choice, dgates, experts)
                .factors(choice, dinputs, dvectors, experts)
                .f32s([dweights])
                .same_size(weights, [dweights]),
            ZeroComputation::AddScaled { x, factors, out } => {
                Description::new("add_scaled_rows", [x, factors], [])
                    .changing([out])
                    .floats([x, out])
                    .same_size(x, [out])
                    .f32s([factors])
                    .size(factors, x.rows(), 1)
            }
        }
    }
}

impl Description<'_> {
    fn of_tokens(self, choice: &Tensor, weights: &Tensor, experts: ZeroExperts) -> Self {
        let ZeroExperts { first, zero, copy, constant } = experts;
        let count = [zero, copy, constant].into_iter().try_fold(first, u64::checked_add);
        self.u32(choice)
            .f32s([weights])
            .same_size(choice, [weights])
            .that(choice.columns() <= MAX_EXPERTS_PER_TOKEN, || format!("{choice:?} has too many experts"))
            .that(count.is_some_and(|count| count <= MAX_EXPERTS), || format!("{experts:?} are too many"))
    }

    fn gates(self, choice: &Tensor, gates: Option<&Tensor>, experts: ZeroExperts) -> Self {
        let constant = experts.constant.min(MAX_EXPERTS);
        self.that(gates.is_some() == (constant > 0), || format!("{experts:?} have other gates"))
            .each(gates, |op, gates| op.f32s([gates]).size(gates, choice.rows(), 2 * constant))
    }

    fn factors(
        self,
        choice: &Tensor,
        inputs: &Tensor,
        vectors: Option<&Tensor>,
        experts: ZeroExperts,
    ) -> Self {
        self.f32s([inputs])
            .size(inputs, choice.rows(), 1)
            .that(vectors.is_some() == (experts.constant > 0), || format!("{experts:?} have other vectors"))
            .each(vectors, |op, vectors| op.f32s([vectors]).size(vectors, choice.rows(), experts.constant))
    }
}
