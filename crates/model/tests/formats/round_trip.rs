//! Any valid file is read back as it was written.

use std::collections::BTreeMap;

use plimsoll_device::DType;
use plimsoll_model::gguf::{GgufFile, ValueType};
use plimsoll_model::{
    Activation, ModelFiles, ModelSpec, NewTensor, RopeScaling, SafetensorsFile, SaveWriter, StoredDType,
    init, write_tensors,
};
use proptest::prelude::*;

use crate::support::{Gguf, tiny_spec, weights, write_file};

/// Bytes that differ from place to place.
fn pattern(size: u64, seed: usize) -> Vec<u8> {
    (0..size as usize).map(|i| (i * 31 + seed * 7 + i / 256) as u8).collect()
}

/// Names as odd as a header can hold.
fn name() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z.0-9]{1,12}", "\\PC{1,20}", any::<String>()]
        .prop_filter("a name", |name| name != "__metadata__" && !name.is_empty() && name.len() < 1000)
}

fn stored_dtype() -> impl Strategy<Value = StoredDType> {
    let names = ["BOOL", "U8", "F8_E4M3", "I16", "F16", "BF16", "F32", "U32", "F64", "I64", "C64"];
    prop::sample::select(names.map(|name| StoredDType::parse(name).unwrap()).to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn safetensors(
        tensors in prop::collection::btree_map(name(), (stored_dtype(), prop::collection::vec(0u64..7, 0..5)), 0..9),
        metadata in prop::collection::btree_map(name(), any::<String>(), 0..4),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("any.safetensors");
        let list: Vec<NewTensor> = tensors
            .into_iter()
            .map(|(name, (dtype, shape))| NewTensor { name, dtype, shape })
            .collect();
        let pairs: Vec<(&str, &str)> = metadata.iter().map(|(key, value)| (key.as_str(), value.as_str())).collect();
        let data = |tensor: &NewTensor| {
            pattern(tensor.dtype.bytes_for(&tensor.shape).unwrap(), tensor.name.len())
        };
        write_tensors(&path, &pairs, &list, |tensor, out| out.write_all(&data(tensor))).unwrap();

        let file = SafetensorsFile::open(&path).unwrap();
        prop_assert_eq!(file.tensors().len(), list.len());
        let read: BTreeMap<String, String> = file.metadata().iter().cloned().collect();
        prop_assert_eq!(read, metadata);
        for tensor in &list {
            let stored = file.tensor(&tensor.name).unwrap();
            prop_assert_eq!((stored.dtype, &stored.shape), (tensor.dtype, &tensor.shape));
            prop_assert_eq!(file.bytes(&tensor.name).unwrap(), data(tensor));
        }
    }

    #[test]
    fn gguf(
        texts in prop::collection::btree_map(name(), any::<String>(), 0..5),
        lists in prop::collection::vec(prop::collection::vec(any::<String>(), 0..5), 0..3),
        integers in prop::collection::vec(any::<u64>(), 0..4),
        signed in prop::collection::vec(any::<i32>(), 0..9),
        floats in prop::collection::vec(any::<f32>().prop_filter("no NaN", |x| !x.is_nan()), 0..9),
        tensors in prop::collection::vec(prop::collection::vec(1u64..7, 0..5), 0..6),
    ) {
        let mut file = Gguf::default();
        for (key, value) in &texts {
            file = file.text(&format!("text.{key}"), value);
        }
        for (i, list) in lists.iter().enumerate() {
            let list: Vec<&str> = list.iter().map(String::as_str).collect();
            file = file.texts(&format!("list.{i}"), &list);
        }
        for (i, value) in integers.iter().enumerate() {
            file = file.raw(&format!("integer.{i}"), 10, &value.to_le_bytes());
        }
        file = file.array("signed", 5, signed.iter().map(|n| n.to_le_bytes()));
        file = file.array("floats", 6, floats.iter().map(|x| x.to_le_bytes()));
        for (i, dims) in tensors.iter().enumerate() {
            file = file.tensor(&format!("t{i}"), dims, 0, pattern(4 * dims.iter().product::<u64>(), i));
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("any.gguf");
        write_file(&path, &file.bytes());

        let read = GgufFile::open(&path).unwrap();
        let metadata = read.metadata();
        prop_assert_eq!(metadata.entries().len(), texts.len() + lists.len() + integers.len() + 2);
        for (key, value) in &texts {
            prop_assert_eq!(metadata.str(&format!("text.{key}")).unwrap(), Some(value.as_str()));
        }
        for (i, list) in lists.iter().enumerate() {
            let read: Vec<String> = metadata.strings(&format!("list.{i}")).unwrap().unwrap().into_iter().map(str::to_owned).collect();
            prop_assert_eq!(&read, list);
        }
        for (i, value) in integers.iter().enumerate() {
            prop_assert_eq!(metadata.u64(&format!("integer.{i}")).unwrap(), Some(*value));
        }
        prop_assert_eq!(metadata.get("signed").unwrap().kind, ValueType::Array);
        prop_assert_eq!(metadata.integers("signed").unwrap().unwrap(), signed.iter().map(|n| i64::from(*n)).collect::<Vec<_>>());
        prop_assert_eq!(metadata.f32s("floats").unwrap().unwrap(), floats);
        for (i, dims) in tensors.iter().enumerate() {
            let tensor = read.tensor(&format!("t{i}")).unwrap();
            prop_assert_eq!(tensor.shape.iter().rev().collect::<Vec<_>>(), dims.iter().collect::<Vec<_>>());
            prop_assert_eq!(read.bytes(tensor), pattern(4 * dims.iter().product::<u64>(), i));
        }
    }

}

proptest! {
    // Every case writes and syncs several files.
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn models(spec in model(), dtype in prop::sample::select(vec![DType::F32, DType::Bf16, DType::F16]), shard in 500u64..50_000) {
        let folder = tempfile::tempdir().unwrap();
        let writer = SaveWriter::new(&spec, dtype).shard_bytes(shard);
        writer.write(folder.path(), |parameter, out| out.write_all(&weights(&spec, parameter, dtype))).unwrap();
        let files = ModelFiles::open(folder.path()).unwrap();
        prop_assert_eq!(&ModelSpec { name: spec.name.clone(), ..files.spec().clone() }, &spec);
        for parameter in spec.parameters() {
            let expected = weights(&spec, &parameter, dtype);
            let mut read = vec![0; expected.len()];
            files.weights().read_into(&parameter, dtype, &mut read).unwrap();
            prop_assert_eq!(read, expected, "{}", parameter.name);
        }
    }
}

/// First values are made by several threads where there are many: those of a row do not depend on which rows come with it.
#[test]
fn first_values_of_rows_are_those_of_the_whole_parameter() {
    let spec = ModelSpec { vocab_size: 20_011, ..tiny_spec() };
    let embedding = &spec.parameters()[0];
    for dtype in [DType::F32, DType::Bf16] {
        let whole = weights(&spec, embedding, dtype);
        let row = dtype.bytes_for(embedding.columns()).unwrap() as usize;
        for rows in [0..1, 4_095..4_097, 10_000..10_100, 20_010..20_011] {
            let place = rows.start as usize * row..rows.end as usize * row;
            let mut some = vec![0; place.len()];
            init::fill(embedding, rows, &spec, 5, dtype, &mut some).unwrap();
            assert_eq!(some, whole[place]);
        }
        assert!(whole.chunks(row).is_sorted_by(|a, b| a != b), "two neighbours are the same row");
    }
}

/// Any small model of the family.
fn model() -> impl Strategy<Value = ModelSpec> {
    let sizes = (1u64..20, 1u64..20, 1u64..20, 1u32..4);
    let heads = (1u64..4, 1u64..4, 1u64..5);
    let switches = (any::<bool>(), any::<bool>(), any::<bool>());
    let activation = prop::sample::select(vec![Activation::Silu, Activation::Gelu, Activation::GeluTanh]);
    let scaling = prop_oneof![
        Just(RopeScaling::None),
        (1.0f64..64.0).prop_map(|factor| RopeScaling::Linear { factor }),
        (1.0f64..64.0).prop_map(|factor| RopeScaling::Llama3 {
            factor,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 8192.0,
        }),
    ];
    (sizes, heads, switches, activation, scaling, 1e-8f64..1e-3).prop_map(
        |(sizes, heads, switches, activation, scaling, epsilon)| {
            let mut spec = tiny_spec();
            (spec.vocab_size, spec.hidden_size, spec.mlp.intermediate_size, spec.num_layers) = sizes;
            spec.attention.kv_heads = heads.0;
            spec.attention.heads = heads.0 * heads.1;
            spec.attention.head_dim = 2 * heads.2;
            spec.attention.rope.as_mut().unwrap().dims = 2 * heads.2;
            spec.attention.rope.as_mut().unwrap().scaling = scaling;
            (spec.attention.qkv_bias, spec.mlp.bias, spec.tie_word_embeddings) = switches;
            spec.attention.output_bias = spec.attention.qkv_bias;
            spec.mlp.activation = activation;
            spec.norm.epsilon = epsilon;
            spec.bos_token = None;
            spec.eos_tokens = vec![0];
            spec
        },
    )
}
