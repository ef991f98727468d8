//! Weights brought from files as they are needed are those that are read whole, whatever the files hold.

use std::cell::RefCell;

use plimsoll_device::DType;
use plimsoll_disk::{ALIGNMENT, DiskError, SpillSettings};
use plimsoll_memory::Region;
use plimsoll_model::{
    BlockId, ModelError, ModelFiles, ModelSpec, Parameter, Role, Staging, StreamPlan, WeightReader,
    WeightStream,
};

use crate::support::{Stored, save_tiny, tiny_gguf, tiny_spec, write_file};

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Failed(String);

impl From<DiskError> for Failed {
    fn from(error: DiskError) -> Failed {
        Failed(error.to_string())
    }
}

impl From<ModelError> for Failed {
    fn from(error: ModelError) -> Failed {
        Failed(error.to_string())
    }
}

fn open(
    files: &ModelFiles,
    plan: &StreamPlan,
    staging: &Staging,
    budget: Option<u64>,
) -> Result<(WeightStream, Vec<String>), Failed> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let settings = SpillSettings { folder: folder.path().to_owned(), budget, direct: true };
    let filled = RefCell::new(Vec::new());
    let stream = WeightStream::open::<Failed>(plan, staging, &settings, |p, rows, dtype, out| {
        if rows.start == 0 {
            filled.borrow_mut().push(p.name.clone());
        }
        Ok(files.weights().read_rows_into(p, rows, dtype, out)?)
    })?;
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "a spill file has no name");
    Ok((stream, filled.into_inner()))
}

/// Every staged block and table against the same weights read whole; what was spilled for that, by name.
fn check(files: &ModelFiles, types: &dyn Fn(&Parameter) -> DType) -> Vec<String> {
    let spec = files.spec();
    let plan = StreamPlan::new(spec, files.weights(), types, &|_| false);
    let staging = plan.staging(0, false, 2);
    let (mut stream, mut spilled) = open(files, &plan, &staging, None).unwrap();
    let expected = |p: &Parameter, dtype: DType| {
        let mut bytes = vec![0; dtype.bytes_for(p.elements()).unwrap() as usize];
        files.weights().read_into(p, dtype, &mut bytes).unwrap();
        bytes
    };
    for p in spec.parameters() {
        let matrix = p.shape.len() == 2 && p.role != Role::PositionEmbedding;
        assert_eq!(staging.holds(p.block, p.role), matrix, "{}", p.name);
    }
    // Buffers of the planned size, which begin anywhere.
    for (i, staged) in staging.blocks.iter().enumerate() {
        let memory = Region::new(staging.buffer_bytes() + ALIGNMENT + 64).unwrap().split_at(64 * i % 128).1;
        let length = memory.len();
        stream.begin(staged.key(), memory);
        let (memory, outcome) = stream.finish(staged.key()).unwrap();
        outcome.unwrap();
        assert_eq!(memory.len(), length);
        let pages = &memory.bytes()[memory.skip_to(ALIGNMENT as usize)..];
        for tensor in &staged.tensors {
            let expected = expected(&tensor.parameter, tensor.dtype);
            let start = tensor.offset as usize;
            assert!(tensor.offset.is_multiple_of(tensor.dtype.alignment()));
            assert!(pages[start..start + expected.len()] == expected, "{}", tensor.parameter.name);
        }
        assert!(stream.finish(staged.key()).is_none());
    }
    for (table, dtype) in &staging.tables {
        let whole = expected(table, *dtype);
        let row = whole.len() / table.rows() as usize;
        let wanted: Vec<u32> = (0..30).map(|i| i * 37 % table.rows() as u32).collect();
        let mut out = vec![0; row * wanted.len()];
        stream.read_rows(table.role, &wanted, &mut out).unwrap();
        for (id, found) in wanted.iter().zip(out.chunks(row)) {
            assert!(found == &whole[*id as usize * row..][..row], "{} {id}", table.name);
        }
        let beyond = stream.read_rows(table.role, &[0, table.rows() as u32], &mut vec![0; 2 * row]);
        assert!(matches!(beyond, Err(DiskError::EndOfFile { .. })));
        assert!(stream.read_rows(Role::LmHead, &[0], &mut out).is_err());
    }
    assert_eq!(stream.spill().is_some(), !spilled.is_empty());
    assert_eq!(stream.spill().map_or(0, |spill| spill.used()), plan.spill_bytes(&staging));
    assert!(stream.buffer_bytes() <= plan.overhead_bytes());
    spilled.sort_unstable();
    spilled
}

fn untied() -> ModelSpec {
    ModelSpec { tie_word_embeddings: false, ..tiny_spec() }
}

#[test]
fn what_is_stored_as_it_is_needed_is_read_from_the_model() {
    let folder = tempfile::tempdir().unwrap();
    for spec in [tiny_spec(), untied()] {
        save_tiny(folder.path(), &spec, DType::Bf16);
        let files = ModelFiles::open(folder.path()).unwrap();
        assert!(check(&files, &|_| DType::Bf16).is_empty());
        let all = check(&files, &|_| DType::F32);
        assert_eq!(all.len(), spec.parameters().iter().filter(|p| p.shape.len() == 2).count());
        let quantized = check(&files, &|p| if p.role.is_block_matrix() { DType::Nf4 } else { DType::Bf16 });
        assert_eq!(quantized.len(), 7 * 2);
    }
}

#[test]
fn a_table_is_spilled_part_by_part() {
    let folder = tempfile::tempdir().unwrap();
    let spec = ModelSpec { vocab_size: 60_013, ..untied() };
    save_tiny(folder.path(), &spec, DType::F16);
    let files = ModelFiles::open(folder.path()).unwrap();
    for dtype in [DType::F32, DType::Bf16] {
        let table = spec.parameters().into_iter().find(Parameter::is_table).unwrap();
        assert!(table.parts(dtype, ALIGNMENT).count() > 1);
        assert!(check(&files, &|_| dtype).contains(&table.name));
    }
}

#[test]
fn rows_in_another_order_are_spilled_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tiny.gguf");
    for spec in [tiny_spec(), untied()] {
        write_file(&path, &tiny_gguf(&spec, Stored::Q8_0).bytes());
        let files = ModelFiles::open(&path).unwrap();
        let spilled = check(&files, &|p| files.weights().inference_dtype(p, DType::F32));
        assert_eq!(spilled.len(), 2 * 2);
        assert!(spilled.iter().all(|name| name.contains("q_proj") || name.contains("k_proj")), "{spilled:?}");
    }
}

#[test]
fn a_disk_budget_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    save_tiny(folder.path(), &tiny_spec(), DType::Bf16);
    let files = ModelFiles::open(folder.path()).unwrap();
    let plan = StreamPlan::new(files.spec(), files.weights(), &|_| DType::F32, &|_| false);
    let staging = plan.staging(0, false, 2);
    let needed = plan.spill_bytes(&staging);
    assert!(open(&files, &plan, &staging, Some(needed)).is_ok());
    let error = open(&files, &plan, &staging, Some(needed - 1)).unwrap_err().to_string();
    assert!(error.contains("raise the disk budget"), "{error}");
}

#[test]
fn layers_that_stay_are_spread_and_the_head_stays_if_asked() {
    let folder = tempfile::tempdir().unwrap();
    let spec = ModelSpec { num_layers: 10, ..tiny_spec() };
    save_tiny(folder.path(), &spec, DType::F32);
    let files = ModelFiles::open(folder.path()).unwrap();
    let changed = |p: &Parameter| p.block == BlockId::Layer(3);
    let plan = StreamPlan::new(files.spec(), files.weights(), &|_| DType::F32, &changed);
    let layers = |resident, head| -> Vec<BlockId> {
        plan.staging(resident, head, 2).blocks.iter().map(|staged| staged.block).collect()
    };
    assert_eq!(layers(10, true), []);
    assert_eq!(layers(10, false), [BlockId::Embedding]);
    let half: Vec<BlockId> = [0, 2, 4, 6, 8].into_iter().map(BlockId::Layer).collect();
    assert_eq!(layers(5, true), half);
    assert_eq!((plan.staging(9, true, 2).buffers, plan.staging(10, true, 2).buffers), (1, 0));
    let bytes = |resident| plan.staging(resident, true, 2).bytes_per_pass();
    assert!((0..10).all(|resident| bytes(resident) > bytes(resident + 1)));
    // What an adapter replaces is not what the file has.
    assert!(plan.spill_bytes(&plan.staging(0, true, 2)) > 0);
    assert_eq!(plan.spill_bytes(&plan.staging(10, true, 2)), 0);
}
