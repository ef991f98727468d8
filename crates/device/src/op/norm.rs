//! RMSNorm and LayerNorm.

use super::Family;
use crate::Tensor;
use crate::check::Description;

/// A norm over every row, or its backward pass.
#[allow(missing_docs)]
#[derive(Clone, Copy, Debug)]
pub enum Norm<'a> {
    /// RMSNorm (Zhang and Sennrich 2019): out = x * rstd * (weight_offset + weight), rstd = 1 / sqrt(mean(x^2) + epsilon).
    /// x, out `[N, H]`; weight `[H]`; rstd f32 `[N]`.
    RmsNorm {
        x: &'a Tensor,
        weight: &'a Tensor,
        weight_offset: f32,
        epsilon: f32,
        out: &'a Tensor,
        rstd: &'a Tensor,
    },
    /// dx += ..., dweight += ... (or = where `accumulate_weight` is false). Without a dweight none is written.
    RmsNormBackward {
        x: &'a Tensor,
        weight: &'a Tensor,
        weight_offset: f32,
        rstd: &'a Tensor,
        dout: &'a Tensor,
        dx: &'a Tensor,
        dweight: Option<&'a Tensor>,
        accumulate_weight: bool,
    },
    /// LayerNorm (Ba et al. 2016): out = (x - mean) * rstd * weight + bias; mean, rstd f32 `[N]`.
    LayerNorm {
        x: &'a Tensor,
        weight: &'a Tensor,
        bias: &'a Tensor,
        epsilon: f32,
        out: &'a Tensor,
        mean: &'a Tensor,
        rstd: &'a Tensor,
    },
    /// dx += ..., dweight and dbias as `accumulate_weight` says, where they are wanted.
    LayerNormBackward {
        x: &'a Tensor,
        weight: &'a Tensor,
        mean: &'a Tensor,
        rstd: &'a Tensor,
        dout: &'a Tensor,
        dx: &'a Tensor,
        dweight: Option<&'a Tensor>,
        dbias: Option<&'a Tensor>,
        accumulate_weight: bool,
    },
}

impl<'a> Family<'a> for Norm<'a> {
    fn describe(&self) -> Description<'a> {
        match *self {
            Norm::RmsNorm { x, weight, out, rstd, .. } => {
                Description::new("rms_norm", [x, weight], [out, rstd]).norm(x, [out], [weight], [rstd])
            }
            // The gradients of weight and bias are summed over the rows.
            Norm::RmsNormBackward { x, weight, rstd, dout, dx, dweight, .. } => {
                Description::new("rms_norm_backward", [x, weight, rstd, dout], [dx])
                    .writing(dweight)
                    .norm(x, [dout, dx], [weight].into_iter().chain(dweight), [rstd])
                    .row_sums(x.rows(), weight, 1)
            }
            Norm::LayerNorm { x, weight, bias, out, mean, rstd, .. } => Description::new(
                "layer_norm",
                [x, weight, bias],
                [out, mean, rstd],
            )
            .norm(x, [out], [weight, bias], [mean, rstd]),
            Norm::LayerNormBackward { x, weight, mean, rstd, dout, dx, dweight, dbias, .. } => {
                let vectors = [weight].into_iter().chain(dweight).chain(dbias);
                Description::new("layer_norm_backward", [x, weight, mean, rstd, dout], [dx])
                    .writing(dweight)
                    .writing(dbias)
                    .norm(x, [dout, dx], vectors, [mean, rstd])
                    .row_sums(x.rows(), weight, 2)
            }
        }
    }
}

impl Description<'_> {
    /// Rows of x and of tensors like it, vectors as long as a row, and an f32 number for each row.
    fn norm<'t, const L: usize, const R: usize>(
        self,
        x: &'t Tensor,
        like_x: [&'t Tensor; L],
        vectors: impl IntoIterator<Item = &'t Tensor, IntoIter: Clone>,
        of_rows: [&'t Tensor; R],
    ) -> Self {
        let vectors = vectors.into_iter();
        self.floats([x].into_iter().chain(like_x).chain(vectors.clone()))
            .same_size(x, like_x)
            .vectors(vectors, x.columns())
            .f32_vectors(of_rows, x.rows())
    }
}
