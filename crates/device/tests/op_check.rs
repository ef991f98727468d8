//! What operations refuse: the same on every device, before anything is computed.

use plimsoll_device::{
    Activation, Adafactor, Adam, Attention, AttentionShape, Channels, Codes, Compute, Cpu, CpuOptions, DType,
    Device, DeviceError, DeviceExt, Dry, Elementwise, Embedding, Glu, Lion, Loss, Norm, Op, Position,
    Product, RotatedHeads, Rounding, Rule, SecondMoment, Shape, Subspace, Tensor, Update,
};
use plimsoll_memory::Tag;

use DType::{Bf16, F16, F32, Q8_0, U8, U32};

fn tensor(device: &dyn Device, dtype: DType, sizes: &[u64]) -> Tensor {
    device.alloc(dtype, sizes, Tag::Workspace, "t").unwrap()
}

/// The complaint about the operation on tensors of these types and sizes; "" where there is none. The dry device and
/// the CPU must agree.
fn complaint(
    tensors: &[(DType, &[u64])],
    op: impl Fn(&dyn Device, &[Tensor]) -> Result<(), DeviceError>,
) -> String {
    let said = |device: &dyn Device| {
        let made: Vec<Tensor> = tensors.iter().map(|(dtype, sizes)| tensor(device, *dtype, sizes)).collect();
        op(device, &made).err().map_or(String::new(), |error| error.to_string())
    };
    let dry = said(&Dry::new());
    assert_eq!(dry, said(&cpu()), "the dry device and the CPU differ");
    dry
}

fn cpu() -> Cpu {
    Cpu::new(1 << 20, CpuOptions { threads: Some(1), isa: None }).unwrap()
}

#[test]
fn types() {
    let add = |a, b, out| {
        complaint(&[(a, &[4]), (b, &[4]), (out, &[4])], |device, t| {
            device.run(Elementwise::Add { a: &t[0], b: &t[1], out: &t[2] })
        })
    };
    assert_eq!(add(F32, Bf16, F32), "");
    assert_eq!(add(F32, U32, F32), "add: t u32[4] is not f32, bf16 or f16");
    assert_eq!(add(F16, F32, F32), "");

    let cast = |x, out| {
        complaint(&[(x, &[32]), (out, &[32])], |device, t| {
            device.run(Elementwise::Cast { x: &t[0], out: &t[1], rounding: Rounding::Nearest })
        })
    };
    assert_eq!(cast(F16, Bf16), "");
    assert_eq!(cast(U32, U32), "");
    assert_eq!(cast(U8, U8), "");
    assert_eq!(cast(U8, U32), "cast: t u8[32] and t u32[32]: integers are cast only to themselves");
    assert_eq!(cast(U32, F32), "cast: t u32[32] and t f32[32]: integers are cast only to themselves");
    assert_eq!(cast(Q8_0, F32), "cast: t q8_0[32] to t f32[32]: codes are not cast");

    let tokens = complaint(&[(F32, &[2]), (F32, &[5, 4]), (F32, &[2, 4])], |device, t| {
        device.run(Embedding::Lookup { tokens: &t[0], table: &t[1], out: &t[2] })
    });
    assert_eq!(tokens, "embedding: t f32[2] is not u32");
    let logits = complaint(&[(Bf16, &[2, 4]), (U32, &[2]), (F32, &[2])], |device, t| {
        device.run(Loss::CrossEntropy {
            logits: &t[0],
            targets: &t[1],
            weights: None,
            losses: &t[2],
            soft_cap: None,
            gradient_scale: None,
        })
    });
    assert_eq!(logits, "cross_entropy: t bf16[2, 4] is not f32");
}

#[test]
fn shapes() {
    let activate = |x: &[u64], out: &[u64]| {
        complaint(&[(F32, x), (F32, out)], |device, t| {
            device.run(Activation::Activate { x: &t[0], out: &t[1], activation: Glu::Silu })
        })
    };
    assert_eq!(activate(&[2, 6], &[2, 6]), "");
    assert_eq!(activate(&[2, 6], &[2, 7]), "activate: t f32[2, 6] and t f32[2, 7] differ in shape");
    assert_eq!(activate(&[2, 6], &[3, 4]), "activate: t f32[2, 6] and t f32[3, 4] differ in shape");

    let norm = |weight: &[u64], rstd: &[u64]| {
        complaint(&[(F32, &[2, 6]), (F32, weight), (F32, &[2, 6]), (F32, rstd)], |device, t| {
            device.run(Norm::RmsNorm {
                x: &t[0],
                weight: &t[1],
                weight_offset: 0.0,
                epsilon: 1e-5,
                out: &t[2],
                rstd: &t[3],
            })
        })
    };
    assert_eq!(norm(&[6], &[2]), "");
    assert_eq!(norm(&[5], &[2]), "rms_norm: t f32[5] does not have 6 elements");
    assert_eq!(norm(&[6], &[3]), "rms_norm: t f32[3] does not have 2 elements");

    let embedding = |table: &[u64], out: &[u64]| {
        complaint(&[(U32, &[2]), (F32, table), (F32, out)], |device, t| {
            device.run(Embedding::Backward {
                tokens: &t[0],
                dout: &t[2],
                dtable: &t[1],
                first_row: 0,
                rounding: plimsoll_device::Rounding::Nearest,
            })
        })
    };
    assert_eq!(embedding(&[1, 4], &[3, 4]), "embedding_backward: t f32[3, 4] is not [2, 4]");
    assert_eq!(embedding(&[1, 4], &[2, 5]), "embedding_backward: t f32[2, 5] is not [2, 4]");

    let rope = |x: &[u64], angles: &[u64]| {
        complaint(&[(F32, x), (U32, &[2]), (F32, angles), (F32, angles)], |device, t| {
            device.run(Position::Rope {
                x: &t[0],
                positions: &t[1],
                cos: &t[2],
                sin: &t[3],
                heads: RotatedHeads::from_first(8),
                inverse: false,
            })
        })
    };
    assert_eq!(rope(&[2, 12], &[1, 4]), "rope: t f32[2, 12] is not whole heads of 8");
    assert_eq!(rope(&[3, 8], &[1, 4]), "rope: t u32[2] does not have 3 elements");

    let linear = |x: &[u64], weight: &[u64], out: &[u64]| {
        complaint(&[(F32, x), (F32, weight), (F32, out)], |device, t| {
            device.run(Product::Linear {
                x: &t[0],
                weight: &t[1],
                bias: None,
                out: &t[2],
                accumulate: false,
                compute: Compute::F32,
            })
        })
    };
    assert_eq!(linear(&[2, 3], &[4, 3], &[2, 4]), "");
    let message = "linear: t f32[2, 3] times t f32[3, 4] does not give t f32[2, 4]";
    assert_eq!(linear(&[2, 3], &[3, 4], &[2, 4]), message);

    let adamw = |m: &[u64]| {
        let hyper = Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0, step: 1 };
        complaint(&[(Bf16, &[4]), (F32, &[4]), (F32, m), (F32, &[4])], |device, t| {
            device.run(update(&t[0], &t[1], Rule::AdamW { m: &t[2], v: &t[3], hyper }))
        })
    };
    assert_eq!(adamw(&[3]), "adamw: t bf16[4] and t f32[3] differ in shape");
}

fn update<'a>(param: &'a Tensor, grad: &'a Tensor, rule: Rule<'a>) -> Update<'a> {
    Update { param, master: None, grad, grad_scale: None, rounding: Rounding::Nearest, rule }
}

#[test]
fn optimizers() {
    let hyper = Lion { lr: 1e-3, beta1: 0.9, beta2: 0.99, weight_decay: 0.0 };
    let lion_8bit = |codes, absmax: &[u64]| {
        complaint(&[(F32, &[257]), (F32, &[257]), (codes, &[257]), (F32, absmax)], |device, t| {
            device.run(update(
                &t[0],
                &t[1],
                Rule::Lion8bit { m: Codes { codes: &t[2], absmax: &t[3] }, hyper },
            ))
        })
    };
    assert_eq!(lion_8bit(U8, &[2]), "");
    assert_eq!(lion_8bit(F32, &[2]), "lion_8bit: t f32[257] is not u8");
    assert_eq!(lion_8bit(U8, &[1]), "lion_8bit: t f32[1] does not have 2 elements");

    let adam = Adam { lr: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0, step: 1 };
    let adam_mini = |runs: &[u64]| {
        complaint(&[(F32, &[6]), (F32, &[6]), (F32, &[6]), (F32, runs)], |device, t| {
            device.run(update(&t[0], &t[1], Rule::AdamMini { m: &t[2], v: &t[3], hyper: adam }))
        })
    };
    assert_eq!(adam_mini(&[3]), "");
    assert_eq!(adam_mini(&[4]), "adam_mini: t f32[6] does not fall into 4 equal runs");

    let adafactor = |rows: &[u64]| {
        complaint(&[(F32, &[2, 3]), (F32, &[2, 3]), (F32, rows), (F32, &[3])], |device, t| {
            let hyper = Adafactor {
                lr: 1e-3,
                beta2: 0.5,
                beta1: 0.0,
                epsilon: 1e-30,
                scale_by_parameter: None,
                clip_threshold: 1.0,
                weight_decay: 0.0,
            };
            let second = SecondMoment::Factored { rows: &t[2], columns: &t[3] };
            device.run(update(&t[0], &t[1], Rule::Adafactor { second, m: None, hyper }))
        })
    };
    assert_eq!(adafactor(&[2]), "");
    assert_eq!(adafactor(&[3]), "adafactor: t f32[3] does not have 2 elements");

    let eigen = |out: &[u64]| {
        complaint(&[(F32, &[3, 3]), (F32, &[3, 3]), (F32, out)], |device, t| {
            device.run(Subspace::Eigenvectors { matrix: &t[0], vectors: &t[1], out: &t[2] })
        })
    };
    assert_eq!(eigen(&[3, 2]), "");
    assert_eq!(eigen(&[3, 4]), "eigenvectors: t f32[3, 4] is not columns of t f32[3, 3]");
    let ratios = |out: &[u64]| {
        complaint(&[(F32, &[2, 3]), (F32, &[2, 3]), (F32, out)], |device, t| {
            device.run(Subspace::NormRatios {
                a: &t[0],
                b: &t[1],
                out: &t[2],
                channels: Channels::Columns,
                epsilon: 1e-8,
            })
        })
    };
    assert_eq!(ratios(&[3]), "");
    assert_eq!(ratios(&[2]), "norm_ratios: t f32[2] does not have 3 elements");
}

#[test]
fn attention() {
    let shape = AttentionShape {
        batch: 1,
        q_len: 2,
        kv_len: 2,
        kv_capacity: 2,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        scale: 1.0,
        window: None,
        block_sparse: None,
        soft_cap: None,
    };
    let attention = |shape: AttentionShape, kv: &[u64]| {
        complaint(
            &[(F32, &[2, 32]), (F32, kv), (F32, kv), (F32, &[2, 32]), (F32, &[1, 4, 2])],
            |device, t| {
                device.run(Attention::Forward {
                    q: &t[0],
                    k: &t[1],
                    v: &t[2],
                    documents: None,
                    probabilities: None,
                    out: &t[3],
                    lse: &t[4],
                    shape,
                    compute: Compute::F32,
                })
            },
        )
    };
    assert_eq!(attention(shape, &[2, 16]), "");
    assert_eq!(attention(shape, &[2, 32]), "attention: t f32[2, 32] is not [2, 16]");
    let impossible = AttentionShape { kv_heads: 3, ..shape };
    assert_eq!(attention(impossible, &[2, 24]), format!("attention: {impossible:?} is impossible"));
    let impossible = AttentionShape { q_len: 2, kv_len: 1, kv_capacity: 1, ..shape };
    assert_eq!(attention(impossible, &[1, 16]), format!("attention: {impossible:?} is impossible"));
    let wide = AttentionShape { head_dim: 577, ..shape };
    assert_eq!(attention(wide, &[2, 16]), "attention: heads of 577 values are wider than 576");
}

/// Pieces of logits are whole runs of 1024 columns, the last of what is left.
#[test]
fn pieces() {
    let runs_of = |logits: &[u64], first_column, runs: &[u64]| {
        let tensors = [(F32, logits), (U32, &[2][..]), (F32, runs), (F32, &[2])];
        let runs_of = complaint(&tensors, |device, t| {
            device.run(Loss::LogitRuns {
                logits: &t[0],
                first_column,
                targets: &t[1],
                soft_cap: None,
                runs: &t[2],
                target_logits: &t[3],
            })
        });
        let gradient = complaint(&tensors, |device, t| {
            device.run(Loss::GradientOfRuns {
                logits: &t[0],
                first_column,
                targets: &t[1],
                weights: None,
                runs: &t[2],
                soft_cap: None,
                gradient_scale: 1.0,
            })
        });
        assert_eq!(runs_of.replace("logit_runs", ""), gradient.replace("gradient_of_runs", ""));
        runs_of
    };
    assert_eq!(runs_of(&[2, 1024], 0, &[2, 6]), "");
    assert_eq!(runs_of(&[2, 2048], 1024, &[2, 6]), "");
    assert_eq!(runs_of(&[2, 1500], 1024, &[2, 6]), "");
    let message = |sizes: &str, first: u64| {
        format!(
            "logit_runs: t f32{sizes} from column {first} on is not whole runs of 1024 of those of t f32[2, 6]"
        )
    };
    assert_eq!(runs_of(&[2, 1500], 0, &[2, 6]), message("[2, 1500]", 0));
    assert_eq!(runs_of(&[2, 1024], 1000, &[2, 6]), message("[2, 1024]", 1000));
    assert_eq!(runs_of(&[2, 2049], 1024, &[2, 6]), message("[2, 2049]", 1024));
    assert_eq!(runs_of(&[2, 1], u64::MAX - 1023, &[2, 6]), message("[2, 1]", u64::MAX - 1023));
    assert_eq!(runs_of(&[3, 1024], 0, &[2, 6]), "logit_runs: t f32[3, 1024] and t f32[2, 6] differ in rows");
    let pairs = "logit_runs: t f32[2, 5] is not pairs of largest logits and sums";
    assert_eq!(runs_of(&[2, 1024], 0, &[2, 5]), pairs);

    let loss = |losses: &[u64]| {
        complaint(&[(F32, &[2, 6]), (F32, &[2]), (U32, &[2]), (F32, losses)], |device, t| {
            device.run(Loss::LossOfRuns {
                runs: &t[0],
                target_logits: &t[1],
                targets: &t[2],
                weights: None,
                losses: &t[3],
            })
        })
    };
    assert_eq!(loss(&[2]), "");
    assert_eq!(loss(&[3]), "loss_of_runs: t f32[3] does not have 2 elements");

    let table = |first_row| {
        complaint(&[(U32, &[2]), (F32, &[2, 4]), (F32, &[5, 4])], |device, t| {
            device.run(Embedding::Backward {
                tokens: &t[0],
                dout: &t[1],
                dtable: &t[2],
                first_row,
                rounding: Rounding::Nearest,
            })
        })
    };
    assert_eq!(table((1 << 32) - 5), "");
    for first_row in [(1 << 32) - 4, u64::MAX] {
        let message = "there are rows that no token can have";
        assert_eq!(
            table(first_row),
            format!("embedding_backward: t f32[5, 4]: from row {first_row} on {message}")
        );
    }
}

/// All pieces together cost what whole rows do, and their runs.
#[test]
fn costs_of_pieces() {
    let dry = Dry::new();
    let [logits, piece, last] = [[2, 2500], [2, 2048], [2, 452]].map(|sizes| tensor(&dry, F32, &sizes));
    let (targets, target_logits) = (tensor(&dry, U32, &[2]), tensor(&dry, F32, &[2]));
    let (runs, losses) = (tensor(&dry, F32, &[2, 6]), tensor(&dry, F32, &[2]));
    let cost = |ops: &[Loss<'_>]| {
        ops.iter().for_each(|op| dry.run(*op).unwrap());
        dry.take_tally()
    };
    let of_piece = |logits, first_column| {
        let (targets, runs, target_logits, soft_cap) = (&targets, &runs, &target_logits, None);
        Loss::LogitRuns { logits, first_column, targets, soft_cap, runs, target_logits }
    };
    let gradient_of_piece = |logits, first_column| {
        let (targets, runs, weights, soft_cap) = (&targets, &runs, None, None);
        Loss::GradientOfRuns { logits, first_column, targets, weights, runs, soft_cap, gradient_scale: 1.0 }
    };
    let pieces = cost(&[of_piece(&piece, 0), of_piece(&last, 2048)]);
    assert_eq!((pieces.exps, pieces.bytes), (5000, logits.bytes() + runs.bytes() + 2 * 16));
    let pieces = cost(&[gradient_of_piece(&piece, 0), gradient_of_piece(&last, 2048)]);
    assert_eq!((pieces.exps, pieces.bytes), (5000, 2 * logits.bytes() + 2 * (runs.bytes() + 8)));
    let (runs, targets, losses) = (&runs, &targets, &losses);
    let loss =
        cost(&[Loss::LossOfRuns { runs, target_logits: &target_logits, targets, weights: None, losses }]);
    assert_eq!((loss.exps, loss.bytes), (6, runs.bytes() + 3 * 8));
}

#[test]
fn overlaps() {
    let cpu = cpu();
    let said = |op: Op<'_>| cpu.run(op).err().map_or(String::new(), |error| error.to_string());
    let (x, y) = (tensor(&cpu, F32, &[8, 4]), tensor(&cpu, F32, &[8, 4]));
    let rows = |tensor: &Tensor, rows| tensor.slice_rows(rows).unwrap();
    let rounding = Rounding::Nearest;

    // The same memory where that is allowed, and not where it is not.
    assert_eq!(said(Elementwise::Add { a: &x, b: &y, out: &x }.into()), "");
    assert_eq!(said(Elementwise::Add { a: &x, b: &x, out: &x }.into()), "");
    let copy = said(Elementwise::Cast { x: &x, out: &x, rounding }.into());
    assert_eq!(copy, "cast: output t f32[8, 4] overlaps input t f32[8, 4]");
    // A part of the memory is never allowed.
    let (upper, lower) = (rows(&x, 0..5), rows(&x, 3..8));
    let add = said(Elementwise::Add { a: &upper, b: &rows(&y, 0..5), out: &lower }.into());
    assert_eq!(add, "add: output t f32[5, 4] overlaps input t f32[5, 4]");
    assert_eq!(said(Elementwise::Cast { x: &rows(&x, 0..4), out: &rows(&x, 4..8), rounding }.into()), "");
    // The same bytes as another type: half as many elements.
    let narrow = tensor(&cpu, Bf16, &[8, 4]);
    assert_eq!(said(Elementwise::Cast { x: &x, out: &narrow, rounding }.into()), "");

    let statistics = [tensor(&cpu, F32, &[8]), tensor(&cpu, F32, &[8])];
    let weight = tensor(&cpu, F32, &[4]);
    let layer_norm = said(
        Norm::LayerNorm {
            x: &x,
            weight: &weight,
            bias: &weight,
            epsilon: 1e-5,
            out: &y,
            mean: &statistics[0],
            rstd: &statistics[0],
        }
        .into(),
    );
    assert_eq!(layer_norm, "layer_norm: outputs t f32[8] and t f32[8] overlap");
    let gate = tensor(&cpu, F32, &[8, 4]);
    let activation = Glu::Silu;
    let backward = |dgate, dup| {
        said(Activation::GatedBackward { gate: &gate, up: &x, dout: &y, dgate, dup, activation }.into())
    };
    assert_eq!(backward(&gate, &x), "");
    assert_eq!(backward(&y, &x), "");
    assert_eq!(backward(&gate, &y), "");
    assert_eq!(backward(&y, &y), "gated_backward: outputs t f32[8, 4] and t f32[8, 4] overlap");
    let crossed = "gated_backward: output t f32[8, 4] overlaps input t f32[8, 4]";
    assert_eq!(backward(&x, &gate), crossed);
}

#[test]
fn other_arenas() {
    let (here, there) = (cpu(), cpu());
    let (x, y) = (tensor(&here, F32, &[4]), tensor(&there, F32, &[4]));
    let op = Elementwise::Cast { x: &x, out: &y, rounding: Rounding::Nearest };
    assert_eq!(here.run(op).unwrap_err().to_string(), "cast: t f32[4] belongs to another arena");
    assert_eq!(
        here.read(&y, &mut |_| {}).unwrap_err().to_string(),
        "read: t f32[4] belongs to another arena"
    );
    assert_eq!(
        here.write(&y, &mut |_| {}).unwrap_err().to_string(),
        "write: t f32[4] belongs to another arena"
    );
}

#[test]
fn memory_that_is_lent_out() {
    let cpu = cpu();
    let x = tensor(&cpu, F32, &[4]);
    let fill = Elementwise::Fill { out: &x, value: 1.0 };
    let refused = |result: Result<(), DeviceError>, op| {
        let message = format!("{op}: called from inside this device's `read` or `write`");
        assert_eq!(result.unwrap_err().to_string(), message);
    };
    cpu.write(&x, &mut |_| {
        refused(cpu.run(fill), "fill");
        refused(cpu.read(&x, &mut |_| {}), "read");
        refused(cpu.write(&x, &mut |_| {}), "write");
    })
    .unwrap();
    cpu.read(&x, &mut |_| {
        refused(cpu.run(fill), "fill");
        refused(cpu.write(&x, &mut |_| {}), "write");
        cpu.read(&x, &mut |_| {}).unwrap();
    })
    .unwrap();
    cpu.run(fill).unwrap();
    assert_eq!(cpu.read_f32(&x).unwrap(), [1.0; 4]);
}

#[test]
fn tensors_that_cannot_be() {
    let cpu = cpu();
    let alloc = |dtype, sizes: &[u64]| cpu.alloc(dtype, sizes, Tag::Weights, "w").unwrap_err().to_string();
    let message = "w: a tensor of shape [4611686018427387904, 8] and type f32 cannot be made";
    assert_eq!(alloc(F32, &[1 << 62, 8]), message);
    assert_eq!(alloc(Q8_0, &[33]), "w: a tensor of shape [33] and type q8_0 cannot be made");
    assert_eq!(
        alloc(F32, &[1, 1, 1, 1, 1]),
        "w: a tensor of shape [1, 1, 1, 1, 1] and type f32 cannot be made"
    );
    assert!(alloc(F32, &[1 << 20]).starts_with("device memory is used up: w (weights) asks for"));
    assert_eq!(Shape::new(&[2, 3]).unwrap().elements(), 6);
}

#[test]
fn more_columns_than_sums_have_room_for() {
    let cpu = Cpu::new(8 << 20, CpuOptions { threads: Some(1), isa: None }).unwrap();
    let (row, vector) = (tensor(&cpu, F32, &[1, 270_000]), || tensor(&cpu, F32, &[270_000]));
    let (dx, weight, dweight) = (tensor(&cpu, F32, &[1, 270_000]), vector(), vector());
    let rstd = tensor(&cpu, F32, &[1]);
    let op = Norm::RmsNormBackward {
        x: &row,
        weight: &weight,
        weight_offset: 0.0,
        rstd: &rstd,
        dout: &row,
        dx: &dx,
        dweight: Some(&dweight),
        accumulate_weight: false,
    };
    let message = "rms_norm_backward: t f32[270000] has more than 262144 columns";
    assert_eq!(cpu.run(op).unwrap_err().to_string(), message);
}
