//! Norms on the CPU.

use super::KernelCall;
use crate::Norm;
use crate::cpu::kernels::layer_norm::{layer_norm, layer_norm_backward};
use crate::cpu::kernels::rms_norm::{Weight, rms_norm, rms_norm_backward};

pub(super) fn run(op: Norm<'_>, job: KernelCall<'_>) {
    let (exec, t) = (job.exec, job.t);
    match op {
        Norm::RmsNorm { x, weight, weight_offset, epsilon, out, rstd } => {
            let weight = Weight { values: t.floats(weight), offset: weight_offset };
            rms_norm(exec, t.floats(x), weight, epsilon, t.floats_mut(out), t.f32s_mut(rstd));
        }
        Norm::RmsNormBackward { x, weight, weight_offset, rstd, dout, dx, dweight, accumulate_weight } => {
            rms_norm_backward(
                exec,
                t.floats(x),
                Weight { values: t.floats(weight), offset: weight_offset },
                t.f32s(rstd),
                t.floats(dout),
                t.floats_mut(dx),
                dweight.map(|dweight| t.floats_mut(dweight)),
                accumulate_weight,
                job.workspace(),
            );
        }
        Norm::LayerNorm { x, weight, bias, epsilon, out, mean, rstd } => {
            let [x, weight, bias] = [x, weight, bias].map(|tensor| t.floats(tensor));
            let (out, mean, rstd) = (t.floats_mut(out), t.f32s_mut(mean), t.f32s_mut(rstd));
            layer_norm(exec, x, weight, bias, epsilon, out, mean, rstd);
        }
        Norm::LayerNormBackward { x, weight, mean, rstd, dout, dx, dweight, dbias, accumulate_weight } => {
            layer_norm_backward(
                exec,
                t.floats(x),
                t.floats(weight),
                [t.f32s(mean), t.f32s(rstd)],
                t.floats(dout),
                t.floats_mut(dx),
                [dweight, dbias].map(|gradient| gradient.map(|gradient| t.floats_mut(gradient))),
                accumulate_weight,
                job.workspace(),
            );
        }
    }
}
