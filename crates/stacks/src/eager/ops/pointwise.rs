//! Element-wise functions, reductions and casts. Formulas: `derivatives.yaml`, `FunctionsManual.cpp`.

use crate::eager::Torch;
use crate::eager::graph::{Backward, Saved};
use crate::eager::shape::Dims;
use crate::eager::tensor::Tensor;
use crate::run::TorchType;

/// Functions of one argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unary {
    /// `x * sigmoid(x)`; keeps its argument.
    Silu,
    /// GELU of either form; keeps its argument.
    Gelu,
    /// `tanh(x)`; keeps its result.
    Tanh,
    /// `sigmoid(x)`; keeps its result.
    Sigmoid,
}

/// The type of a result of two operands.
fn promoted(a: &Tensor, b: &Tensor) -> TorchType {
    let rank = |dtype| match dtype {
        TorchType::F32 => 3,
        TorchType::Bf16 | TorchType::F16 => 2,
        TorchType::I64 => 1,
        _ => 0,
    };
    match (a.shape.len(), b.shape.len()) {
        (0, 1..) if rank(a.dtype) >= 2 && rank(b.dtype) >= 2 => b.dtype,
        (1.., 0) if rank(a.dtype) >= 2 && rank(b.dtype) >= 2 => a.dtype,
        _ if rank(a.dtype) >= rank(b.dtype) => a.dtype,
        _ => b.dtype,
    }
}

impl Torch {
    /// The result of an element-wise function: in the order in memory of its first dense operand of that shape, as
    /// `TensorIterator` has it.
    fn elementwise(&self, operands: &[&Tensor], dtype: TorchType, operation: &'static str) -> Tensor {
        let shape =
            operands.iter().skip(1).fold(operands[0].shape, |shape, next| shape.broadcast(&next.shape));
        let strides = iterated_strides(&shape, operands);
        self.empty_strided(&shape, &strides, dtype, operation)
    }

    /// `a + b`
    pub fn add(&self, a: &Tensor, b: &Tensor) -> Tensor {
        let out = self.elementwise(&[a, b], promoted(a, b), "add");
        self.recorded("AddBackward", &[a, b], out, |needs| {
            let needs = needs.to_vec();
            Box::new(move |_, grads| needs.iter().map(|need| grads[0].clone().filter(|_| *need)).collect())
        })
    }

    /// `a * b`
    pub fn mul(&self, a: &Tensor, b: &Tensor) -> Tensor {
        let out = || self.elementwise(&[a, b], promoted(a, b), "mul");
        let formula = |needs: &[bool]| -> Backward {
            let other_of_a = needs[0].then(|| self.save(b));
            let other_of_b = needs[1].then(|| self.save(a));
            Box::new(move |torch, grads| {
                let unpacked = |saved: &Option<Saved>| saved.as_ref().map(|saved| saved.unpack(torch));
                let (of_a, of_b) = (unpacked(&other_of_a), unpacked(&other_of_b));
                let times = |other: &Option<Tensor>| Some(torch.mul(grads[0].as_ref()?, other.as_ref()?));
                vec![times(&of_a), times(&of_b)]
            })
        };
        self.recorded_first("MulBackward", &[a, b], formula, out)
    }

    /// `a * number`, and whatever else makes one tensor of one and keeps nothing: its gradient is made alike.
    pub fn scale(&self, a: &Tensor) -> Tensor {
        let out = self.elementwise(&[a], a.dtype, "mul");
        self.recorded("MulBackward", &[a], out, |_| {
            Box::new(|torch, grads| vec![grads[0].as_ref().map(|grad| torch.scale(grad))])
        })
    }

    /// `-x`
    pub fn negative(&self, x: &Tensor) -> Tensor {
        let out = self.elementwise(&[x], x.dtype, "neg");
        self.recorded("NegBackward", &[x], out, |_| {
            Box::new(|torch, grads| vec![grads[0].as_ref().map(|grad| torch.negative(grad))])
        })
    }

    /// `gelu_new`, as transformers writes it out: `0.5 * x * (1 + tanh(c * (x + 0.044715 * x.pow(3))))`.
    pub fn gelu_new(&self, x: &Tensor) -> Tensor {
        let half = self.scale(x);
        let sum = {
            let cube = self.power(x);
            let scaled = self.scale(&cube);
            drop(cube);
            self.add(x, &scaled)
        };
        let inner = self.scale(&sum);
        drop(sum);
        let tanh = self.unary(Unary::Tanh, &inner);
        drop(inner);
        let shifted = self.shift(&tanh);
        drop(tanh);
        self.mul(&half, &shifted)
    }

    /// `a + number`
    pub fn shift(&self, a: &Tensor) -> Tensor {
        let out = self.elementwise(&[a], a.dtype, "add");
        self.recorded("AddBackward", &[a], out, |_| Box::new(|_, grads| grads.to_vec()))
    }

    /// A new tensor of the form of `a`, which no gradient passes: `cos`, comparisons.
    pub fn map(&self, a: &Tensor, dtype: TorchType, operation: &'static str) -> Tensor {
        self.elementwise(&[a], dtype, operation)
    }

    /// `x.pow(n)`, n not 0 or 1; autocast computes it in f32.
    pub fn power(&self, x: &Tensor) -> Tensor {
        let x = &self.raise(x);
        let out = self.elementwise(&[x], x.dtype, "pow");
        self.recorded("PowBackward", &[x], out, |_| {
            let x = self.save(x);
            Box::new(move |torch, grads| {
                let x = x.unpack(torch);
                let grad = grads[0].as_ref();
                vec![grad.map(|grad| torch.mul(grad, &torch.scale(&torch.map(&x, x.dtype, "pow"))))]
            })
        })
    }

    /// `x.pow(2)`
    pub fn square(&self, x: &Tensor) -> Tensor {
        self.power(x)
    }

    /// `torch.rsqrt(x)`; autocast computes it in f32.
    pub fn rsqrt(&self, x: &Tensor) -> Tensor {
        let x = &self.raise(x);
        let out = self.elementwise(&[x], x.dtype, "rsqrt");
        let result = out.detach();
        self.recorded("RsqrtBackward", &[x], out, |_| {
            let result = self.save(&result);
            Box::new(move |torch, grads| {
                let result = result.unpack(torch);
                let grad = grads[0].as_ref();
                vec![grad.map(|grad| {
                    let cube = torch.map(&result, result.dtype, "pow");
                    torch.mul(&torch.scale(grad), &cube)
                })]
            })
        })
    }

    /// `x.mean(-1, keepdim=True)`
    pub fn mean_last(&self, x: &Tensor) -> Tensor {
        let before = x.shape;
        let last = before.len() - 1;
        let out = self.empty_as(&before.with(last, 1), x.dtype, "mean");
        self.recorded("MeanBackward", &[x], out, |_| {
            Box::new(move |torch, grads| {
                let spread = |grad: &Tensor| torch.scale(&torch.expand(grad, last, before[last]));
                vec![grads[0].as_ref().map(spread)]
            })
        })
    }

    /// A function of one argument.
    pub fn unary(&self, function: Unary, x: &Tensor) -> Tensor {
        let (name, operation, backward) = match function {
            Unary::Silu => ("SiluBackward", "silu", "silu_backward"),
            Unary::Gelu => ("GeluBackward", "gelu", "gelu_backward"),
            Unary::Tanh => ("TanhBackward", "tanh", "tanh_backward"),
            Unary::Sigmoid => ("SigmoidBackward", "sigmoid", "sigmoid_backward"),
        };
        let out = self.elementwise(&[x], x.dtype, operation);
        let keeps_result = matches!(function, Unary::Tanh | Unary::Sigmoid);
        let kept = if keeps_result { out.detach() } else { x.detach() };
        self.recorded(name, &[x], out, |_| {
            let kept = self.save(&kept);
            Box::new(move |torch, grads| {
                let kept = kept.unpack(torch);
                vec![grads[0].as_ref().map(|grad| torch.elementwise(&[grad, &kept], grad.dtype, backward))]
            })
        })
    }

    /// `dropout(x, p)` with p above 0, in one kernel: keeps its mask of a byte for each element.
    pub fn dropout(&self, x: &Tensor) -> Tensor {
        let out = self.elementwise(&[x], x.dtype, "native_dropout");
        let mask = self.map(x, TorchType::Bool, "native_dropout");
        self.recorded("NativeDropoutBackward", &[x], out, |_| {
            let mask = self.save(&mask);
            Box::new(move |torch, grads| {
                let _mask = mask.unpack(torch);
                let masked = |grad: &Tensor| torch.map(grad, grad.dtype, "native_dropout_backward");
                vec![grads[0].as_ref().map(masked)]
            })
        })
    }

    /// `x.to(dtype)`: `x` itself where it has that type.
    pub fn to(&self, x: &Tensor, dtype: TorchType) -> Tensor {
        if x.dtype == dtype {
            return x.clone();
        }
        let out = self.elementwise(&[x], dtype, "_to_copy");
        let before = x.dtype;
        self.recorded("ToCopyBackward", &[x], out, |_| {
            Box::new(move |torch, grads| vec![grads[0].as_ref().map(|grad| torch.to(grad, before))])
        })
    }

    /// The sum over what was broadcast, in the shape that a gradient must have.
    pub(crate) fn sum_to(&self, x: &Tensor, shape: &Dims) -> Tensor {
        if x.shape.elements() == shape.elements() {
            return self.reshape(x, shape);
        }
        self.empty_as(shape, x.dtype, "sum")
    }
}

/// Strides of an element-wise result: those of the first operand of that very shape where that is dense, else by the
/// order of the first operand's strides.
fn iterated_strides(shape: &Dims, operands: &[&Tensor]) -> Dims {
    let whole = operands.iter().find(|operand| operand.shape == *shape && operand.is_dense());
    if let Some(first) = operands.first().filter(|first| first.shape == *shape && first.is_dense()) {
        return first.strides;
    }
    let like = whole.or_else(|| operands.iter().find(|operand| operand.shape == *shape));
    let Some(like) = like else { return shape.contiguous_strides() };
    let mut order: Vec<usize> = (0..shape.len()).collect();
    order.sort_by_key(|at| (std::cmp::Reverse(like.strides[*at]), *at));
    let mut strides = *shape;
    let mut stride = 1;
    for at in order.into_iter().rev() {
        strides = strides.with(at, stride);
        stride *= shape[at].max(1);
    }
    strides
}
