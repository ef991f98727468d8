//! Feed-forward parts.

use plimsoll_model::Activation;

use super::layers::{Linear, Maker};
use crate::eager::{Tensor, Torch, Unary};
use crate::run::Stack;

/// Its linears.
enum Linears {
    /// `down(act(gate(x)) * up(x))`
    Gated { gate: Box<Linear>, up: Box<Linear>, down: Box<Linear> },
    /// The same with one product for gate and up (Phi-3).
    Joint { gate_up: Box<Linear>, down: Box<Linear> },
    /// `proj(act(fc(x)))` (GPT-2).
    Plain { up: Box<Linear>, down: Box<Linear> },
}

/// A feed-forward part.
pub(crate) struct Mlp {
    linears: Linears,
    activation: Activation,
    gpt2: bool,
}

impl Mlp {
    pub fn new(maker: &Maker<'_>) -> Mlp {
        Mlp::of_width(maker, maker.run.model.mlp.intermediate_size)
    }

    /// Of another inner width than the model's, as experts have.
    pub fn of_width(maker: &Maker<'_>, inner: u64) -> Mlp {
        let model = &maker.run.model;
        let (hidden, bias) = (model.hidden_size, model.mlp.bias);
        let gpt2 = model.architecture == "gpt2";
        let linear = |name, shape| Box::new(maker.linear(name, shape, bias));
        let conv1d = |name, shape| Box::new(maker.conv1d(name, shape));
        let linears = if gpt2 {
            Linears::Plain { up: conv1d("c_fc", [hidden, inner]), down: conv1d("c_proj", [inner, hidden]) }
        } else if model.architecture == "phi3" && maker.run.stack != Stack::Litgpt {
            let gate_up = linear("gate_up_proj", [hidden, 2 * inner]);
            Linears::Joint { gate_up, down: linear("down_proj", [inner, hidden]) }
        } else if model.mlp.gated {
            let (gate, up) = (linear("gate_proj", [hidden, inner]), linear("up_proj", [hidden, inner]));
            Linears::Gated { gate, up, down: linear("down_proj", [inner, hidden]) }
        } else {
            Linears::Plain {
                up: linear("up_proj", [hidden, inner]),
                down: linear("down_proj", [inner, hidden]),
            }
        };
        Mlp { linears, activation: model.mlp.activation, gpt2 }
    }

    pub fn linears(&mut self) -> Vec<&mut Linear> {
        match &mut self.linears {
            Linears::Gated { gate, up, down } => vec![gate, up, down],
            Linears::Joint { gate_up, down } => vec![gate_up, down],
            Linears::Plain { up, down } => vec![up, down],
        }
    }

    /// Its linears, in the order of `linears`.
    pub fn all(&self) -> Vec<&Linear> {
        match &self.linears {
            Linears::Gated { gate, up, down } => vec![gate, up, down],
            Linears::Joint { gate_up, down } => vec![gate_up, down],
            Linears::Plain { up, down } => vec![up, down],
        }
    }

    pub fn trained(&self) -> Vec<Tensor> {
        self.all().into_iter().flat_map(Linear::trained).collect()
    }

    pub fn forward(&self, torch: &Torch, x: &Tensor, liger: bool) -> Tensor {
        match &self.linears {
            Linears::Gated { gate, up, down } if liger => {
                let (gate, up) = (gate.forward(torch, x), up.forward(torch, x));
                let product = torch.liger_silu_mul(&gate, &up);
                drop((gate, up));
                down.forward(torch, &product)
            }
            Linears::Gated { gate, up, down } => {
                let gate = gate.forward(torch, x);
                let active = self.activate(torch, gate);
                let up = up.forward(torch, x);
                let product = torch.mul(&active, &up);
                drop((active, up));
                down.forward(torch, &product)
            }
            Linears::Joint { gate_up, down } => {
                let joined = gate_up.forward(torch, x);
                let half = joined.shape().last() / 2;
                let mut parts = torch.split(&joined, &[half, half]);
                drop(joined);
                let (mut up, gate) = (parts.remove(1), parts.remove(0));
                let active = self.activate(torch, gate.clone());
                up = torch.mul(&up, &active);
                drop(active);
                down.forward(torch, &up)
            }
            Linears::Plain { up, down } => {
                let inner = up.forward(torch, x);
                let active = self.activate(torch, inner);
                down.forward(torch, &active)
            }
        }
    }

    /// GPT-2's `gelu_new` is written out: `0.5 * x * (1 + tanh(c * (x + 0.044715 * x^3)))`; the others are one kernel each.
    fn activate(&self, torch: &Torch, x: Tensor) -> Tensor {
        match self.activation {
            // gpt-oss's, which has no program: as much as the SiLU in it.
            Activation::Silu | Activation::ClampedSwiglu { .. } => torch.unary(Unary::Silu, &x),
            Activation::GeluTanh if self.gpt2 => torch.gelu_new(&x),
            Activation::Gelu | Activation::GeluTanh => torch.unary(Unary::Gelu, &x),
        }
    }
}
