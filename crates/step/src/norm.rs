//! RMSNorm or LayerNorm, whichever the block has (one with a bias is a LayerNorm).

use plimsoll_device::{DType, Device, DeviceExt, Norm as NormOp, Tensor};
use plimsoll_memory::Tag;
use plimsoll_model::{BlockId, Role};

use crate::StepError;
use crate::gradients::{Gradients, Target};

/// A norm of a gathered block.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub block: BlockId,
    pub role: Role,
    /// [H]
    pub weight: &'a Tensor,
    /// [H]; its presence makes this a LayerNorm.
    pub bias: Option<(Role, &'a Tensor)>,
    pub epsilon: f32,
    /// Added to the weight of an RMSNorm.
    pub weight_offset: f32,
}

/// A norm's output and the statistics that its backward pass needs.
#[derive(Clone)]
pub(crate) struct Normed {
    /// [N, H]
    pub out: Tensor,
    /// None where nothing was normalised.
    pub statistics: Option<Statistics>,
}

/// f32 [N] each.
#[derive(Clone)]
pub(crate) struct Statistics {
    pub mean: Option<Tensor>,
    pub rstd: Tensor,
}

impl Norm<'_> {
    /// Normalises x [N, H].
    pub fn forward(&self, device: &dyn Device, x: &Tensor) -> Result<Normed, StepError> {
        let rows = x.rows();
        let out = device.alloc(x.dtype(), x.shape().dims(), Tag::Activations, "norm")?;
        let rstd = device.alloc(DType::F32, &[rows], Tag::Activations, "norm.rstd")?;
        let Norm { weight, epsilon, weight_offset, .. } = *self;
        let mean = match self.bias {
            None => {
                device.run(NormOp::RmsNorm { x, weight, weight_offset, epsilon, out: &out, rstd: &rstd })?;
                None
            }
            Some((_, bias)) => {
                let mean = device.alloc(DType::F32, &[rows], Tag::Activations, "norm.mean")?;
                device.run(NormOp::LayerNorm {
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
        Ok(Normed { out, statistics: Some(Statistics { mean, rstd }) })
    }

    /// dx += gradient through the norm; the gradients of its weights are added to theirs.
    pub fn backward(
        &self,
        device: &dyn Device,
        gradients: &mut Gradients<'_>,
        x: &Tensor,
        statistics: &Statistics,
        dout: &Tensor,
        dx: &Tensor,
    ) -> Result<(), StepError> {
        let mut target = |role| -> Result<Option<Target>, StepError> {
            let wanted = gradients.wants(self.block, role);
            wanted.then(|| gradients.target(self.block, role)).transpose()
        };
        let dweight = target(self.role)?;
        let dbias = match self.bias {
            Some((role, _)) => target(role)?,
            None => None,
        };
        // Both are written by the same passes, and so are added to alike.
        let accumulate_weight = dweight.iter().chain(&dbias).any(|target| target.accumulate);
        let [dweight, dbias] = [&dweight, &dbias].map(|target| target.as_ref().map(|target| &target.tensor));
        let (weight, rstd) = (self.weight, &statistics.rstd);
        match (&statistics.mean, self.bias) {
            (Some(mean), Some(_)) => {
                device.run(NormOp::LayerNormBackward {
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
            _ => device.run(NormOp::RmsNormBackward {
                x,
                weight,
                weight_offset: self.weight_offset,
                rstd,
                dout,
                dx,
                dweight,
                accumulate_weight,
            })?,
        }
        Ok(())
    }
}
