//! Memory beside the arena: an operation's family says how much it needs, kernels get no more than that, the dry device and
//! the CPU count the same, and both refuse what needs more than there is.

use plimsoll_device::{
    Adafactor, Apollo, Attention, AttentionShape, Channels, Compute, Cpu, CpuOptions, DType, Device,
    DeviceError, DeviceExt, Dry, Elementwise, Embedding, Loss, Magnitude, Norm, Op, Product, Reduction,
    Rounding, Rule, SecondMoment, Subspace, Tensor, Update, Workspace,
};
use plimsoll_memory::Tag;

use DType::{F32, U32};

/// What the operation needs for all tasks and for each, or why it is refused, on tensors of these types and sizes.
fn needs(
    tensors: &[(DType, &[u64])],
    op: impl Fn(&dyn Device, &[Tensor]) -> Result<(), DeviceError>,
) -> Result<[u64; 2], String> {
    let run = |device: &dyn Device| {
        let alloc =
            |(dtype, sizes): &(DType, &[u64])| device.alloc(*dtype, sizes, Tag::Workspace, "t").unwrap();
        op(device, &tensors.iter().map(alloc).collect::<Vec<_>>()).map_err(|error| error.to_string())
    };
    let (dry, cpu) = (Dry::new(), Cpu::new(64 << 20, CpuOptions { threads: Some(2), isa: None }).unwrap());
    let outcome = run(&dry);
    assert_eq!(outcome, run(&cpu), "the dry device and the CPU differ");
    assert_eq!(dry.workspace(), cpu.workspace(), "the dry device and the CPU count differently");
    outcome.map(|()| [dry.workspace().shared, dry.workspace().each_task])
}

fn refused(op: &str, sizes: &str, most: u64) -> Result<[u64; 2], String> {
    Err(format!("{op}: t f32{sizes} has more than {most} columns"))
}

/// All that there is.
const ALL: u64 = Workspace::MOST.shared;

fn rms_norm(rows: u64, columns: u64) -> Result<[u64; 2], String> {
    let (x, weight) = ([rows, columns], [columns]);
    needs(&[(F32, &x), (F32, &weight), (F32, &[rows]), (F32, &x), (F32, &weight)], |device, t| {
        device.run(Norm::RmsNormBackward {
            x: &t[0],
            weight: &t[1],
            weight_offset: 0.0,
            rstd: &t[2],
            dout: &t[0],
            dx: &t[3],
            dweight: Some(&t[4]),
            accumulate_weight: false,
        })
    })
}

fn layer_norm(rows: u64, columns: u64) -> Result<[u64; 2], String> {
    let (x, weight) = ([rows, columns], [columns]);
    let vectors = [(F32, &weight[..]); 3];
    let operands = [(F32, &x[..]), (F32, &x), (F32, &[rows]), (F32, &[rows])];
    needs(&[&operands[..], &vectors].concat(), |device, t| {
        device.run(Norm::LayerNormBackward {
            x: &t[0],
            weight: &t[4],
            mean: &t[2],
            rstd: &t[3],
            dout: &t[0],
            dx: &t[1],
            dweight: Some(&t[5]),
            dbias: Some(&t[6]),
            accumulate_weight: false,
        })
    })
}

fn column_dots(rows: u64, columns: u64) -> Result<[u64; 2], String> {
    let (x, vector) = ([rows, columns], [columns]);
    needs(&[(F32, &x), (F32, &vector), (F32, &vector)], |device, t| {
        device.run(Magnitude::ColumnDots {
            a: &t[0],
            b: &t[0],
            divisors: &t[1],
            offsets: None,
            out: &t[2],
            accumulate: false,
        })
    })
}

#[test]
fn sums_over_rows() {
    // At most 32 pieces of at least 16 rows.
    assert_eq!(rms_norm(1, 64), Ok([64 * 4, 0]));
    assert_eq!(rms_norm(40, 64), Ok([3 * 64 * 4, 0]));
    assert_eq!(rms_norm(1000, 64), Ok([32 * 64 * 4, 0]));
    assert_eq!(layer_norm(40, 100), Ok([3 * 2 * 100 * 4, 0]));
    assert_eq!(column_dots(40, 100), Ok([3 * 100 * 4, 0]));
    // As many pieces as there is room for, and one at least.
    assert_eq!(rms_norm(40, 100_000), Ok([2 * 100_000 * 4, 0]));
    assert_eq!(rms_norm(3, 1 << 18), Ok([ALL, 0]));
    assert_eq!(rms_norm(1, (1 << 18) + 1), refused("rms_norm_backward", "[262145]", 1 << 18));
    assert_eq!(layer_norm(3, 1 << 17), Ok([ALL, 0]));
    assert_eq!(layer_norm(1, (1 << 17) + 1), refused("layer_norm_backward", "[131073]", 1 << 17));
    assert_eq!(column_dots(3, 1 << 18), Ok([ALL, 0]));
    assert_eq!(column_dots(1, (1 << 18) + 1), refused("column_dots", "[262145]", 1 << 18));
    // Biases of more columns are taken by turns.
    let bias = |rows, columns| {
        needs(&[(F32, &[rows, columns]), (F32, &[columns])], |device, t| {
            device.run(Product::BiasBackward { dout: &t[0], dbias: &t[1], accumulate: false })
        })
    };
    assert_eq!(bias(40, 100), Ok([3 * 100 * 4, 0]));
    assert_eq!(bias(20, 300_000), Ok([ALL, 0]));
}

#[test]
fn sums_over_everything() {
    let squares = |n| {
        needs(&[(F32, &[n]), (F32, &[1])], |device, t| {
            device.run(Reduction::SumSquares { x: &t[0], out: &t[1], finite: None })
        })
    };
    assert_eq!(squares(1), Ok([184, 0]));
    assert_eq!(squares(200_000), Ok([4 * 184, 0]));

    let ratios = |channels, n| {
        needs(&[(F32, &[3, 20_000]), (F32, &[3, 20_000]), (F32, &[n])], |device, t| {
            device.run(Subspace::NormRatios { a: &t[0], b: &t[1], out: &t[2], channels, epsilon: 1e-8 })
        })
    };
    assert_eq!(ratios(Channels::Whole, 1), Ok([4 * 8, 0]));
    assert_eq!(ratios(Channels::Rows, 3), Ok([0, 0]));

    let update = |tensors: &[(DType, &[u64])], rule: &dyn for<'a> Fn(&'a [Tensor]) -> Rule<'a>| {
        let weights: [(DType, &[u64]); 2] = [(F32, &[30, 1000]), (F32, &[30, 1000])];
        needs(&[&weights[..], tensors].concat(), |device, t| {
            let (param, grad, rounding) = (&t[0], &t[1], Rounding::Nearest);
            device.run(Update { param, master: None, grad, grad_scale: None, rounding, rule: rule(&t[2..]) })
        })
    };
    // Tasks of 16 whole rows, or of 16,384 elements.
    let hyper = Adafactor {
        lr: 1e-3,
        beta2: 0.5,
        beta1: 0.0,
        epsilon: 1e-30,
        scale_by_parameter: Some(1e-3),
        clip_threshold: 1.0,
        weight_decay: 0.0,
    };
    let factored: [(DType, &[u64]); 2] = [(F32, &[30]), (F32, &[1000])];
    let adafactor = update(&factored, &|t| Rule::Adafactor {
        second: SecondMoment::Factored { rows: &t[0], columns: &t[1] },
        m: None,
        hyper,
    });
    assert_eq!(adafactor, Ok([2 * 8, 0]));
    let full = update(&[(F32, &[30, 1000])], &|t| Rule::Adafactor {
        second: SecondMoment::Full(&t[0]),
        m: None,
        hyper,
    });
    assert_eq!(full, Ok([2 * 8, 0]));
    let hyper = Apollo { lr: 1e-3, decay: 0.0, growth_limit: 1.01 };
    let apollo = update(&[(F32, &[1000]), (F32, &[1])], &|t| Rule::Apollo {
        ratios: &t[0],
        channels: Channels::Columns,
        norm: &t[1],
        hyper,
    });
    assert_eq!(apollo, Ok([2 * 8, 0]));
}

#[test]
fn places_of_tokens() {
    let embedding = |tokens| {
        needs(&[(U32, &[tokens]), (F32, &[tokens, 4]), (F32, &[5, 4])], |device, t| {
            device.run(Embedding::Backward {
                tokens: &t[0],
                dout: &t[1],
                dtable: &t[2],
                first_row: 0,
                rounding: Rounding::Nearest,
            })
        })
    };
    assert_eq!(embedding(300), Ok([300 * 8, 0]));
    // More than there is room for are taken by turns.
    assert_eq!(embedding(300_000), Ok([ALL, 0]));
}

/// Attention of one query of each of 4 heads of 8 values.
fn decoding(batch: u64, positions: u64, window: Option<u64>, documents: bool) -> Result<[u64; 2], String> {
    let shape = AttentionShape {
        batch,
        q_len: 1,
        kv_len: positions,
        kv_capacity: positions,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        scale: 1.0,
        window,
        block_sparse: None,
        soft_cap: None,
    };
    let (q, kv) = ([batch, 32], [batch * positions, 16]);
    let operands = [(F32, &q[..]), (F32, &kv), (F32, &kv), (F32, &q), (F32, &[batch, 4]), (U32, &[batch])];
    needs(&operands, |device, t| {
        device.run(Attention::Forward {
            q: &t[0],
            k: &t[1],
            v: &t[2],
            documents: documents.then_some(&t[5]),
            out: &t[3],
            lse: &t[4],
            probabilities: None,
            shape,
            compute: Compute::F32,
        })
    })
}

#[test]
fn parts_of_single_queries() {
    // Pieces of whole 128 positions, 64 at most.
    let part = 4 * (2 + 8) * 4;
    assert_eq!(decoding(1, 1, None, false), Ok([part, 0]));
    assert_eq!(decoding(1, 300, None, false), Ok([3 * part, 0]));
    assert_eq!(decoding(2, 300, None, false), Ok([3 * 2 * part, 0]));
    assert_eq!(decoding(1, 20_000, None, false), Ok([53 * part, 0]));
    assert_eq!(decoding(1, 300, Some(100), false), Ok([2 * part, 0]));
    // With documents all positions are taken by tiles.
    assert_eq!(decoding(1, 300, None, true), Ok([0, 0]));
}

#[test]
fn runs_of_logits() {
    let dry = Dry::new();
    let cross_entropy = |device: &dyn Device, columns| {
        let alloc = |dtype, sizes: &[u64]| device.alloc(dtype, sizes, Tag::Workspace, "t").unwrap();
        let (logits, targets, losses) = (alloc(F32, &[1, columns]), alloc(U32, &[1]), alloc(F32, &[1]));
        let op = Loss::CrossEntropy {
            logits: &logits,
            targets: &targets,
            weights: None,
            losses: &losses,
            soft_cap: None,
            gradient_scale: Some(1.0),
        };
        let needed = Op::from(op).check(device.arena(), None).map_err(|error| error.to_string())?;
        Ok([needed.shared, needed.each_task])
    };
    assert_eq!(cross_entropy(&dry, 2500), Ok([0, 3 * 8]));
    let most = Workspace::MOST.each_task / 8 * 1024;
    assert_eq!(most, 201_326_592);
    assert_eq!(cross_entropy(&dry, most), Ok([0, Workspace::MOST.each_task]));
    assert_eq!(cross_entropy(&dry, most + 1), refused("cross_entropy", "[1, 201326593]", most));
}

/// The widest heads, forward and backward.
#[test]
fn heads() {
    let attention = |head_dim: u64, backward: bool| {
        let shape = AttentionShape {
            batch: 1,
            q_len: 2,
            kv_len: 2,
            kv_capacity: 2,
            heads: 1,
            kv_heads: 1,
            head_dim,
            scale: 1.0,
            window: None,
            block_sparse: None,
            soft_cap: None,
        };
        let rows = [2, head_dim];
        let operands = [[(F32, &rows[..]); 8].as_slice(), &[(F32, &[1, 1, 2][..]); 2]].concat();
        needs(&operands, |device, t| {
            let (q, k, v, out, lse, compute) = (&t[0], &t[1], &t[2], &t[3], &t[8], Compute::F32);
            let (documents, probabilities) = (None, None);
            if !backward {
                return device.run(Attention::Forward {
                    q,
                    k,
                    v,
                    documents,
                    out,
                    lse,
                    probabilities,
                    shape,
                    compute,
                });
            }
            device.run(Attention::Backward {
                q,
                k,
                v,
                documents,
                out,
                lse,
                probabilities,
                dout: &t[4],
                delta: &t[9],
                sums: None,
                dq: &t[5],
                dk: &t[6],
                dv: &t[7],
                shape,
                compute,
            })
        })
    };
    for (backward, name) in [(false, "attention"), (true, "attention_backward")] {
        assert_eq!(attention(576, backward), Ok([0, 0]));
        let message = format!("{name}: heads of 577 values are wider than 576");
        assert_eq!(attention(577, backward), Err(message));
    }
}

/// The most of all operations counts.
#[test]
fn the_largest_counts() {
    let dry = Dry::new();
    let alloc = |dtype, sizes: &[u64]| dry.alloc(dtype, sizes, Tag::Workspace, "t").unwrap();
    let (x, sum) = (alloc(F32, &[200_000]), alloc(F32, &[1]));
    for out in [&x, &sum] {
        dry.run(Elementwise::Fill { out, value: 1.0 }).unwrap();
    }
    assert_eq!(dry.workspace(), Workspace::default());
    for x in [&x, &sum] {
        let out = &alloc(F32, &[1]);
        dry.run(Reduction::SumSquares { x, out, finite: None }).unwrap();
    }
    assert_eq!(dry.workspace(), Workspace { shared: 4 * 184, each_task: 0 });
}
