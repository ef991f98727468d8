//! RMSNorm or LayerNorm, whichever the block has (one with a bias is a LayerNorm).

use plimsoll_device::{DType, Device, Op, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, Role};

use crate::StepError;
use crate::gradients::Gradients;

/// A norm of a gathered block.
pub(crate) struct Norm<'a> {
    pub block: BlockId,
    pub role: Role,
    /// [H]
    pub weight: &'a Tensor,
    pub bias_role: Role,
    /// [H]; its presence makes this a LayerNorm.
    pub bias: Option<&'a Tensor>,
    pub epsilon: f32,
}

/// A norm's output and the statistics that its backward pass needs.
#[derive(Clone)]
pub(crate) struct Normed {
    /// [N, H]
    pub out: Tensor,
    pub statistics: Statistics,
}

/// f32 [N] each.
#[derive(Clone)]
pub(crate) struct Statistics {
    pub mean: Option<Tensor>,
    pub rstd: Tensor,
}

impl Norm<'_> {
    /// Normalises x [N, H].
    pub fn forward<D: Device>(&self, device: &D, x: &Tensor) -> Result<Normed, StepError> {
        let rows = x.rows();
        let out = device.alloc(x.dtype(), &[rows, x.columns()], Tag::Activations, "norm")?;
        let rstd = device.alloc(DType::F32, &[rows], Tag::Activations, "norm.rstd")?;
        let (weight, epsilon) = (self.weight, self.epsilon);
        let mean = match self.bias {
            None => {
                device.run(Op::RmsNorm { x, weight, epsilon, out: &out, rstd: &rstd })?;
                None
            }
            Some(bias) => {
                let mean = device.alloc(DType::F32, &[rows], Tag::Activations, "norm.mean")?;
                device.run(Op::LayerNorm {
                    x,
                    weight,
                    bias,
                    epsilon,
                    out: &out,
                    mean: &mean,
                    rstd: &rstd,
                })?;
                Some(mean)
            }
        };
        Ok(Normed { out, statistics: Statistics { mean, rstd } })
    }

    /// dx += gradient through the norm; the gradients of its weights are added to theirs.
    pub fn backward<D: Device>(
        &self,
        device: &D,
        gradients: &mut Gradients,
        x: &Tensor,
        statistics: &Statistics,
        dout: &Tensor,
        dx: &Tensor,
    ) -> Result<(), StepError> {
        let (dweight, accumulate_weight) = gradients.target(self.block, self.role)?;
        let (weight, rstd, dweight) = (self.weight, &statistics.rstd, &dweight);
        match &statistics.mean {
            None => {
                device.run(Op::RmsNormBackward { x, weight, rstd, dout, dx, dweight, accumulate_weight })?
            }
            Some(mean) => {
                let (dbias, _) = gradients.target(self.block, self.bias_role)?;
                let dbias = &dbias;
                device.run(Op::LayerNormBackward {
                    x,
                    weight,
                    mean,
                    rstd,
                    dout,
                    dx,
                    dweight,
                    dbias,
                    accumulate_weight,
                })?;
            }
        }
        Ok(())
    }
}
