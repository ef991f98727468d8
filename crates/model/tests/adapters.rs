//! Adapters that PEFT wrote, merged into their base, against what PEFT merges (`docs/bench/quantised_models.py` makes the
//! files); and adapters that are damaged or belong elsewhere.

use std::path::{Path, PathBuf};

use plimsoll_device::DType;
use plimsoll_model::adapter::{AdapterBias, AdapterSet, AdapterStart, MergeSet, TargetModules};
use plimsoll_model::{
    Adapted, Adapter, AdapterConfig, AdapterLayout, LoraPart, ModelFiles, Parameter, Role, RowSource,
    SafetensorsFile, Target, Transcoder,
};
use proptest::prelude::*;
use serde_json::Value;

fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/quantised")
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().unwrap())).collect()
}

fn read(files: &ModelFiles, parameter: &Parameter) -> Vec<f32> {
    let mut bytes = vec![0; 4 * parameter.elements() as usize];
    files.weights().read_into(parameter, DType::F32, &mut bytes).unwrap();
    floats(&bytes)
}

/// Into folders and GGUF files.
#[test]
fn adapters_are_merged_as_by_peft() {
    let place = tempfile::tempdir().unwrap();
    for kind in ["lora", "patterns", "dora", "embedding", "saved_norms", "expression", "gpt2", "gpt2_dora"] {
        let folder = data().join("adapters").join(kind);
        let base = if kind.starts_with("gpt2") { "adapters/gpt2_base" } else { "base" };
        let base = ModelFiles::open(&data().join(base)).unwrap();
        let adapter = Adapter::open(&folder, base.spec()).unwrap();
        assert!(adapter.config().unknown.is_empty(), "{kind}: {:?}", adapter.config().unknown);
        let expected: Value =
            serde_json::from_slice(&std::fs::read(folder.join("expected.json")).unwrap()).unwrap();
        let again = tempfile::tempdir().unwrap();
        adapter.save(again.path()).unwrap();
        let again = Adapter::open(again.path(), base.spec()).unwrap();
        assert_eq!(again.low_rank(), adapter.low_rank(), "{kind}");
        assert_eq!(again.replaced(), adapter.replaced(), "{kind}");

        let set = MergeSet::open(&[(&folder, 1.0)], base.spec()).unwrap();
        let merged = set.merged(base.weights());
        let (written, gguf) = (place.path().join(kind), place.path().join(format!("{kind}.gguf")));
        Transcoder::new(base.spec(), &merged, &mut |_, _| {})
            .write_folder(&written, Target::HuggingFace(DType::F32))
            .unwrap();
        let file = SafetensorsFile::open(&written.join("model.safetensors")).unwrap();
        for tensor in file.tensors() {
            let values = floats(file.bytes(&tensor.name).unwrap());
            let expected = expected[&tensor.name].as_array().unwrap();
            for (value, expected) in values.iter().zip(expected) {
                let expected = expected.as_f64().unwrap() as f32;
                let what = format!("{kind} {}: {value}, not {expected}", tensor.name);
                assert!((value - expected).abs() <= 2e-6 * (1.0 + expected.abs()), "{what}");
            }
        }
        Transcoder::new(base.spec(), &merged, &mut |_, _| {}).write_gguf(&gguf, DType::F32, None).unwrap();
        let (written, gguf) = (ModelFiles::open(&written).unwrap(), ModelFiles::open(&gguf).unwrap());
        for parameter in base.spec().parameters() {
            let [one, other] = [&written, &gguf].map(|files| read(files, &parameter));
            assert_eq!(one, other, "{kind} {}", parameter.name);
        }
    }
}

/// A copy of the adapter `lora` with its files changed.
fn broken(change: impl FnOnce(&mut Value, &mut Vec<u8>)) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let from = data().join("adapters/lora");
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(from.join("adapter_config.json")).unwrap()).unwrap();
    let mut weights = std::fs::read(from.join("adapter_model.safetensors")).unwrap();
    change(&mut config, &mut weights);
    std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
    std::fs::write(folder.path().join("adapter_model.safetensors"), weights).unwrap();
    folder
}

fn error(folder: &Path, base: &str) -> String {
    let base = ModelFiles::open(&data().join(base)).unwrap();
    Adapter::open(folder, base.spec()).unwrap_err().to_string()
}

fn replace(bytes: &mut [u8], from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
}

#[test]
fn adapters_of_another_model_and_damaged_ones_are_refused() {
    let lora = data().join("adapters/lora");
    assert!(error(&lora, "adapters/gpt2_base").contains("belongs to another"));
    assert!(error(&data().join("adapters/gpt2"), "base").contains("belongs to another"));
    for (key, value, told) in [
        ("peft_type", Value::from("IA3"), "IA3"),
        ("r", Value::from(0), "r: 0"),
        ("lora_alpha", Value::from("much"), "lora_alpha"),
        ("init_lora_weights", Value::from("pissa_niter_16"), "path_initial_model_for_weight_conversion"),
        ("use_dora", Value::from(true), "magnitude vector"),
        ("alpha_pattern", serde_json::json!({ "q_proj(": 3 }), "regular expression"),
    ] {
        let folder = broken(|config, _| config[key] = value);
        let error = error(folder.path(), "base");
        assert!(error.contains(told), "{key}: {error}");
    }
    let nan = broken(|_, weights| {
        let last = weights.len() - 4;
        weights[last..].copy_from_slice(&f32::NAN.to_le_bytes());
    });
    assert!(error(nan.path(), "base").contains("is NaN"), "{}", error(nan.path(), "base"));
    let short = broken(|_, weights| weights.truncate(weights.len() - 100));
    assert!(error(short.path(), "base").contains("adapter_model.safetensors"));
    let other = broken(|_, weights| replace(weights, "q_proj.lora_A", "z_proj.lora_A"));
    assert!(error(other.path(), "base").contains("z_proj"), "{}", error(other.path(), "base"));
    let half = broken(|_, weights| replace(weights, "q_proj.lora_B.weight", "q_proj.lora_B.weighs"));
    assert!(error(half.path(), "base").contains("lora_B"), "{}", error(half.path(), "base"));
    let missing = tempfile::tempdir().unwrap();
    assert!(error(missing.path(), "base").contains("adapter_config.json"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    /// Whatever the bytes are, opening and merging end with an answer.
    #[test]
    fn mutations_do_not_bring_it_down(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..6),
    ) {
        let folder = broken(|_, bytes| {
            let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize + 8;
            for (at, value, in_header) in changes {
                let at = at.index(if in_header { header } else { bytes.len() });
                bytes[at] = value;
            }
        });
        let base = ModelFiles::open(&data().join("base")).unwrap();
        if let Ok(set) = MergeSet::open(&[(folder.path(), 1.0)], base.spec()) {
            let merged = set.merged(base.weights());
            Transcoder::new(set.spec(), &merged, &mut |_, _| {})
                .write_folder(&folder.path().join("merged"), Target::HuggingFace(DType::F32))
                .unwrap();
        }
    }
}

/// Adapters on experts, a tensor for each matrix of each expert or of whole stacks, merged as PEFT merges them
/// (`docs/bench/expert_adapters.py`); whichever layout the base has, and saved again.
#[test]
fn adapters_on_experts_are_merged_as_by_peft() {
    let experts = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/experts");
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/data/experts");
    let base = ModelFiles::open(&models.join("qwen3-moe")).unwrap();
    for kind in ["stacked", "single"] {
        let folder = experts.join(kind);
        let adapter = Adapter::open(&folder, base.spec()).unwrap();
        assert!(adapter.config().unknown.is_empty(), "{kind}: {:?}", adapter.config().unknown);
        assert_eq!(adapter.low_rank().len(), 3 * 8, "{kind}");
        let again = tempfile::tempdir().unwrap();
        adapter.save(again.path()).unwrap();
        assert_eq!(Adapter::open(again.path(), base.spec()).unwrap().low_rank().len(), 3 * 8);

        let mut stacked = base.spec().clone();
        stacked.experts.as_mut().unwrap().stacked_files = true;
        let expected = SafetensorsFile::open(&folder.join("merged.safetensors")).unwrap();
        for spec in [base.spec(), &stacked] {
            let place = tempfile::tempdir().unwrap();
            let set = MergeSet::open(&[(&folder, 1.0)], spec).unwrap();
            let merged = set.merged(base.weights());
            Transcoder::new(spec, &merged, &mut |_, _| {})
                .write_folder(place.path(), Target::HuggingFace(DType::F32))
                .unwrap();
            let written = ModelFiles::open(place.path()).unwrap();
            let single = base.spec();
            for parameter in spec.parameters() {
                let [before, values] = [&base, &written].map(|files| read(files, &parameter));
                if parameter.block.layer() != Some(1) || !parameter.is_of_experts() {
                    assert_eq!(values, before, "{kind} {}", parameter.name);
                    continue;
                }
                for (name, rows) in single.hf_tensors(&parameter) {
                    let wanted = floats(expected.bytes(&name).unwrap());
                    let start = (rows.start * parameter.columns()) as usize;
                    for (value, wanted) in values[start..start + wanted.len()].iter().zip(&wanted) {
                        let what = format!("{kind} {name}: {value}, not {wanted}");
                        assert!((value - wanted).abs() <= 2e-6 * (1.0 + wanted.abs()), "{what}");
                    }
                }
            }
        }
    }
}

/// PEFT has the layer of the base within its own, and looks there for the bias; it ignores names that it does not know.
#[test]
fn biases_of_adapted_modules_stand_in_the_layers_within_them() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/data/families");
    for (family, within, beside) in [
        ("qwen2", "model.layers.1.self_attn.q_proj", None),
        ("gpt2", "transformer.h.1.attn.c_attn", Some("transformer.ln_f.bias")),
    ] {
        let base = ModelFiles::open(&models.join(family)).unwrap();
        let config = AdapterConfig { rank: 2, bias: AdapterBias::All, ..AdapterConfig::default() };
        let layout = AdapterLayout::new(&config, base.spec()).unwrap();
        let place = tempfile::tempdir().unwrap();
        layout.write(place.path(), base.spec(), |p| Ok(vec![0.5; p.elements() as usize])).unwrap();
        let check = || {
            let file = SafetensorsFile::open(&place.path().join("adapter_model.safetensors")).unwrap();
            let has = |name: &str| file.tensor(&format!("base_model.model.{name}")).is_some();
            assert!(has(&format!("{within}.base_layer.bias")) && !has(&format!("{within}.bias")), "{family}");
            assert!(beside.is_none_or(has), "{family}");
        };
        check();
        // And of one that was read and is saved again.
        let read = Adapter::open(place.path(), base.spec()).unwrap();
        read.save(place.path()).unwrap();
        check();
    }
}

/// Every element of a trained bias comes back in its place: of parts of a fused tensor, and of each expert of a stack.
#[test]
fn trained_biases_are_read_as_they_were_written() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/data");
    // A family that stores matrices transposed, square ones too.
    let whole = ["attn.c_proj", "c_fc", "wte"].map(str::to_owned).to_vec();
    for (model, modules_to_save) in [
        ("families/qwen2", Vec::new()),
        ("families/gpt2", Vec::new()),
        ("families/gpt2", whole),
        ("experts/gpt-oss", Vec::new()),
    ] {
        let base = ModelFiles::open(&models.join(model)).unwrap();
        let spec = base.spec();
        let target_modules = TargetModules::Pattern(".*(c_attn|q_proj)".to_owned());
        let (rank, bias) = (2, AdapterBias::All);
        let config =
            AdapterConfig { rank, bias, modules_to_save, target_modules, ..AdapterConfig::default() };
        let layout = AdapterLayout::new(&config, spec).unwrap();
        let values = |p: &Parameter| -> Vec<f32> {
            let first = p.name.bytes().map(f32::from).sum::<f32>();
            (0..p.elements()).map(|i| first + i as f32 / 1024.0).collect()
        };
        let place = tempfile::tempdir().unwrap();
        layout.write(place.path(), spec, |p| Ok(values(p))).unwrap();
        let folders = [(place.path(), 1.0)];
        let (set, merging) =
            (AdapterSet::open(&folders, spec).unwrap(), MergeSet::open(&folders, spec).unwrap());
        let merged = merging.merged(base.weights());
        let mut biases = 0;
        for p in spec.parameters().iter().filter(|p| layout.trains_base(p.block, p.role)) {
            biases += 1;
            assert!(set.replaces(spec, p), "{model} {}", p.name);
            let (wanted, columns) = (values(p), p.columns() as usize);
            for rows in [p.all_rows(), p.rows() / 2..p.rows()] {
                let wanted = &wanted[rows.start as usize * columns..rows.end as usize * columns];
                let mut read = vec![0; 4 * wanted.len()];
                set.read_rows_into(spec, base.weights(), p, rows.clone(), DType::F32, &mut read).unwrap();
                assert_eq!(floats(&read), wanted, "{model} {}", p.name);
                let mut read = vec![0.0; wanted.len()];
                merged.rows(p, rows, &mut read).unwrap();
                assert_eq!(read, wanted, "{model} {}", p.name);
            }
        }
        assert!(biases > 4, "{model}: {biases}");
    }
}

/// Adapters that are trained on experts: stacks of A and B, written as PEFT reads them, and read again.
#[test]
fn adapters_on_experts_are_stacks_that_are_written_one_by_one() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../train/tests/data/experts");
    let families = [
        ("qwen3-moe", "model.layers.1.mlp.experts.3.up_proj"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w3"),
        ("qwen3-moe-stacked", "model.layers.1.mlp.experts.3.up_proj"),
    ];
    for ((family, name), use_dora) in families.into_iter().flat_map(|f| [(f, false), (f, true)]) {
        let base = ModelFiles::open(&models.join(family)).unwrap();
        let experts = base.spec().experts.clone().unwrap();
        let config = AdapterConfig { rank: 2, use_dora, ..AdapterConfig::default() };
        let layout = AdapterLayout::new(&config, base.spec()).unwrap();
        assert!(
            !layout
                .parameters()
                .iter()
                .any(|p| matches!(p.role, Role::Lora(_, of) if of.role() == Role::Router))
        );
        assert_eq!(layout.has_lengths_of_experts(), use_dora);
        let up = |part| {
            let role = Role::Lora(part, Adapted::UpProj);
            layout.parameters().iter().find(|p| p.role == role && p.block.layer() == Some(1)).unwrap()
        };
        assert_eq!(up(LoraPart::A).shape, [experts.count, 2, 24], "{family}");
        assert_eq!(up(LoraPart::B).shape, [experts.count, experts.intermediate_size, 2], "{family}");

        let value = |p: &Parameter| -> Vec<f32> {
            (0..p.elements()).map(|i| (i % 97) as f32 + p.name.len() as f32 / 64.0).collect()
        };
        let place = tempfile::tempdir().unwrap();
        layout.write(place.path(), base.spec(), |p| Ok(value(p))).unwrap();
        let file = SafetensorsFile::open(&place.path().join("adapter_model.safetensors")).unwrap();
        let b = floats(file.bytes(&format!("base_model.model.{name}.lora_B.weight")).unwrap());
        let each = 2 * experts.intermediate_size as usize;
        assert_eq!(b, value(up(LoraPart::B))[3 * each..4 * each], "{family}");
        let lengths = file.tensor(&format!("base_model.model.{name}.lora_magnitude_vector"));
        assert_eq!(lengths.is_some(), use_dora, "{family}");
        if let Some(lengths) = lengths {
            let inner = experts.intermediate_size;
            assert_eq!(lengths.shape, [inner]);
            let values = floats(file.bytes(&lengths.name).unwrap());
            let all = value(up(LoraPart::Magnitude));
            assert_eq!(values, all[3 * inner as usize..4 * inner as usize], "{family}");
        }

        // What was written is what a run that goes on loads, and what inference loads.
        let known = AdapterSet::for_layout(place.path(), base.spec(), &layout).unwrap();
        let opened = AdapterSet::open(&[(place.path(), 1.0)], base.spec()).unwrap();
        for (set, scaled) in [(&known, false), (&opened, true)] {
            for p in set.layout().parameters() {
                let mut bytes = vec![0; 4 * p.elements() as usize];
                set.read_rows_into(base.spec(), base.weights(), p, p.all_rows(), DType::F32, &mut bytes)
                    .unwrap();
                let factor = match p.role {
                    Role::Lora(LoraPart::B, _) if scaled => layout.modules()[0].scale,
                    _ => 1.0,
                };
                let wanted: Vec<f32> = value(p).iter().map(|x| x * factor).collect();
                assert_eq!(floats(&bytes), wanted, "{family} {}", p.name);
            }
        }
        if use_dora {
            continue;
        }
        // Two of them are one of twice the rank.
        let both = AdapterSet::open(&[(place.path(), 1.0), (place.path(), 0.5)], base.spec()).unwrap();
        assert!(both.layout().modules().iter().all(|module| module.rank == 4));
        for (config, words) in [
            (
                AdapterConfig { start: AdapterStart::Pissa { power_iterations: None }, ..config.clone() },
                "PiSSA of experts is not supported",
            ),
            (
                AdapterConfig {
                    target_modules: TargetModules::Pattern(r".*experts\.0\..*".into()),
                    ..config.clone()
                },
                "all of them or none",
            ),
        ] {
            let error = AdapterLayout::new(&config, base.spec()).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
