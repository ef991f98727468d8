//! Tiny models in every format, made on the spot.

use std::io::Write;
use std::path::Path;

use half::f16;
use plimsoll_device::DType;
use plimsoll_model::{
    Activation, AttentionSpec, MlpSpec, ModelSpec, NormSpec, Parameter, RopeSpec, SaveWriter, init,
};

/// A Llama of 2 layers: hidden 64, 4 heads of 16 with 2 for keys and values, vocabulary 96.
pub fn tiny_spec() -> ModelSpec {
    ModelSpec {
        name: "tiny".to_owned(),
        architecture: "llama".to_owned(),
        vocab_size: 96,
        hidden_size: 64,
        num_layers: 2,
        attention: AttentionSpec::plain(4, 2, 16, RopeSpec::plain(16, 10_000.0)),
        mlp: MlpSpec { intermediate_size: 128, activation: Activation::Silu, gated: true, bias: false },
        experts: None,
        norm: NormSpec::rms(1e-5),
        embedding_scale: None,
        logit_soft_cap: None,
        tie_word_embeddings: true,
        max_position_embeddings: 256,
        initializer_range: 0.02,
        part: Default::default(),
        bos_token: Some(1),
        eos_tokens: vec![2],
    }
}

/// The weights of a seed.
pub fn weights(spec: &ModelSpec, parameter: &Parameter, dtype: DType) -> Vec<u8> {
    let mut bytes = vec![0; dtype.bytes_for(parameter.elements()).unwrap() as usize];
    init::fill(parameter, parameter.all_rows(), spec, 5, dtype, &mut bytes).unwrap();
    bytes
}

pub fn f32_weights(spec: &ModelSpec, parameter: &Parameter) -> Vec<f32> {
    floats(&weights(spec, parameter, DType::F32))
}

/// Little-endian f32 as numbers.
pub fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|chunk| f32::from_le_bytes(*chunk)).collect()
}

/// A Hugging Face folder with the seed's weights.
pub fn save_tiny(folder: &Path, spec: &ModelSpec, dtype: DType) {
    let writer = SaveWriter::new(spec, dtype);
    writer.write(folder, |parameter, out| out.write_all(&weights(spec, parameter, dtype))).unwrap();
}

/// Bytes of a safetensors file with any header.
pub fn safetensors_bytes(header: &str, data: usize) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend((0..data).map(|i| i as u8));
    bytes
}

pub fn write_file(path: &Path, bytes: &[u8]) {
    std::fs::File::create(path).unwrap().write_all(bytes).unwrap();
}

/// A GGUF file under construction.
#[derive(Clone, Default)]
pub struct Gguf {
    entries: Vec<Vec<u8>>,
    tensors: Vec<(String, Vec<u64>, u32, Vec<u8>)>,
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

impl Gguf {
    pub fn raw(mut self, key: &str, kind: u32, value: &[u8]) -> Gguf {
        self.entries.push([&string(key)[..], &kind.to_le_bytes(), value].concat());
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Gguf {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub fn f32(self, key: &str, value: f32) -> Gguf {
        self.raw(key, 6, &value.to_le_bytes())
    }

    pub fn text(self, key: &str, value: &str) -> Gguf {
        self.raw(key, 8, &string(value))
    }

    pub fn texts(self, key: &str, values: &[&str]) -> Gguf {
        self.array(key, 8, values.iter().map(|value| string(value)))
    }

    /// A list whose elements have the type number `element`, each as its bytes.
    pub fn array(self, key: &str, element: u32, values: impl IntoIterator<Item = impl AsRef<[u8]>>) -> Gguf {
        let (mut count, mut body) = (0u64, Vec::new());
        for value in values {
            count += 1;
            body.extend_from_slice(value.as_ref());
        }
        self.raw(key, 9, &[&element.to_le_bytes()[..], &count.to_le_bytes(), &body].concat())
    }

    /// `dims` with the fastest first, as the format has them; `kind` is ggml's number of the type.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, data: Vec<u8>) -> Gguf {
        self.tensors.push((name.to_owned(), dims.to_vec(), kind, data));
        self
    }

    /// Without the entries of that key.
    pub fn without(mut self, key: &str) -> Gguf {
        let start = string(key);
        self.entries.retain(|entry| !entry.starts_with(&start));
        self
    }

    /// Without that tensor.
    pub fn without_tensor(mut self, name: &str) -> Gguf {
        self.tensors.retain(|(known, ..)| known != name);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(3u32.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.entries.len() as u64).to_le_bytes());
        file.extend(self.entries.concat());
        let mut offset = 0u64;
        for (name, dims, kind, data) in &self.tensors {
            file.extend(string(name));
            file.extend((dims.len() as u32).to_le_bytes());
            file.extend(dims.iter().flat_map(|dim| dim.to_le_bytes()));
            file.extend(kind.to_le_bytes());
            file.extend(offset.to_le_bytes());
            offset += (data.len() as u64).next_multiple_of(32);
        }
        file.resize(file.len().next_multiple_of(32), 0);
        for (.., data) in &self.tensors {
            file.extend(data);
            file.resize(file.len().next_multiple_of(32), 0);
        }
        file
    }
}

/// How the test GGUF stores its matrices: F32, or Q8_0.
#[derive(Clone, Copy, PartialEq)]
pub enum Stored {
    F32,
    Q8_0,
}

/// The seed's weights as a converter to GGUF would store them: names changed, rows of q and k interleaved.
pub fn tiny_gguf(spec: &ModelSpec, stored: Stored) -> Gguf {
    let mut file = Gguf::default()
        .text("general.architecture", "llama")
        .u32("llama.block_count", spec.num_layers)
        .u32("llama.context_length", 256)
        .u32("llama.embedding_length", 64)
        .u32("llama.feed_forward_length", 128)
        .u32("llama.attention.head_count", 4)
        .u32("llama.attention.head_count_kv", 2)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .f32("llama.rope.freq_base", 10_000.0)
        .u32("tokenizer.ggml.bos_token_id", 1)
        .u32("tokenizer.ggml.eos_token_id", 2)
        .texts("general.languages", &["en", "de"]);
    for parameter in spec.parameters() {
        let mut values = f32_weights(spec, &parameter);
        if parameter.name.contains("q_proj") || parameter.name.contains("k_proj") {
            values = interleave(
                &values,
                spec.attention.head_dim as usize,
                values.len() / parameter.shape[0] as usize,
            );
        }
        let dims: Vec<u64> = parameter.shape.iter().rev().copied().collect();
        let (kind, data) = match stored {
            Stored::Q8_0 if dims.len() == 2 => (8, quantize_q8_0(&values)),
            _ => (0, bytemuck::cast_slice(&values).to_vec()),
        };
        file = file.tensor(&gguf_name(&parameter.name), &dims, kind, data);
    }
    file
}

pub fn gguf_name(name: &str) -> String {
    [
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("lm_head", "output"),
        ("model.layers", "blk"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
    ]
    .iter()
    .fold(name.to_owned(), |name, (from, to)| name.replace(from, to))
}

/// Head by head: reshape(2, head_dim / 2), swap the two axes, reshape back.
fn interleave(values: &[f32], head_dim: usize, columns: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for head in values.chunks(head_dim * columns) {
        for i in 0..head_dim / 2 {
            for a in 0..2 {
                let row = a * head_dim / 2 + i;
                out.extend_from_slice(&head[row * columns..(row + 1) * columns]);
            }
        }
    }
    out
}

fn quantize_q8_0(values: &[f32]) -> Vec<u8> {
    let mut out = Vec::new();
    for block in values.chunks(32) {
        let scale = f16::from_f32(block.iter().fold(0.0f32, |most, x| most.max(x.abs())) / 127.0);
        out.extend(scale.to_le_bytes());
        out.extend(block.iter().map(|x| (x / scale.to_f32()).round() as i8 as u8));
    }
    out
}
