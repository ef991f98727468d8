//! The dimensions of well-known models, from their published `config.json`, so that plans can be made with no file at
//! hand. Dense decoders that one block of [`ModelSpec`] expresses in full; weights are not here.

use crate::spec::{Activation, AttentionSpec, MlpSpec, ModelSpec, NormSpec, RopeSpec};

/// One model: sizes as `config.json` has them.
struct Entry {
    name: &'static str,
    vocab: u64,
    hidden: u64,
    inner: u64,
    layers: u32,
    heads: u64,
    kv_heads: u64,
    context: u64,
    theta: f64,
    traits: u8,
}

/// Head tied to the embedding.
const TIED: u8 = 1;
/// Biases on q, k and v.
const QKV_BIAS: u8 = 2;
/// Heads of 128, whatever hidden / heads is.
const HEAD_128: u8 = 4;
/// Heads of 256.
const HEAD_256: u8 = 8;

#[allow(clippy::too_many_arguments)]
const fn entry(
    name: &'static str,
    [vocab, hidden, inner, layers]: [u64; 4],
    [heads, kv_heads]: [u64; 2],
    context: u64,
    theta: f64,
    traits: u8,
) -> Entry {
    Entry { name, vocab, hidden, inner, layers: layers as u32, heads, kv_heads, context, theta, traits }
}

#[rustfmt::skip]
const MODELS: &[Entry] = &[
    entry("huggingfacetb/smollm-135m",           [ 49152,   576,  1536,  30], [  9,  3],   2048, 1e4, TIED),
    entry("huggingfacetb/smollm-360m",           [ 49152,   960,  2560,  32], [ 15,  5],   2048, 1e4, TIED),
    entry("huggingfacetb/smollm-1.7b",           [ 49152,  2048,  8192,  24], [ 32, 32],   2048, 1e4, TIED),
    entry("huggingfacetb/smollm2-135m",          [ 49152,   576,  1536,  30], [  9,  3],   8192, 1e5, TIED),
    entry("huggingfacetb/smollm2-360m",          [ 49152,   960,  2560,  32], [ 15,  5],   8192, 1e5, TIED),
    entry("huggingfacetb/smollm2-1.7b",          [ 49152,  2048,  8192,  24], [ 32, 32],   8192, 1.3e5, TIED),
    entry("tinyllama/tinyllama-1.1b",            [ 32000,  2048,  5632,  22], [ 32,  4],   2048, 1e4, 0),
    entry("meta-llama/llama-1-7b",               [ 32000,  4096, 11008,  32], [ 32, 32],   2048, 1e4, 0),
    entry("meta-llama/llama-1-13b",              [ 32000,  5120, 13824,  40], [ 40, 40],   2048, 1e4, 0),
    entry("meta-llama/llama-1-30b",              [ 32000,  6656, 17920,  60], [ 52, 52],   2048, 1e4, 0),
    entry("meta-llama/llama-1-65b",              [ 32000,  8192, 22016,  80], [ 64, 64],   2048, 1e4, 0),
    entry("meta-llama/llama-2-7b",               [ 32000,  4096, 11008,  32], [ 32, 32],   4096, 1e4, 0),
    entry("meta-llama/llama-2-13b",              [ 32000,  5120, 13824,  40], [ 40, 40],   4096, 1e4, 0),
    entry("meta-llama/llama-2-70b",              [ 32000,  8192, 28672,  80], [ 64,  8],   4096, 1e4, 0),
    entry("meta-llama/meta-llama-3-8b",          [128256,  4096, 14336,  32], [ 32,  8],   8192, 5e5, 0),
    entry("meta-llama/meta-llama-3-70b",         [128256,  8192, 28672,  80], [ 64,  8],   8192, 5e5, 0),
    entry("meta-llama/llama-3.1-8b",             [128256,  4096, 14336,  32], [ 32,  8], 131072, 5e5, 0),
    entry("meta-llama/llama-3.1-70b",            [128256,  8192, 28672,  80], [ 64,  8], 131072, 5e5, 0),
    entry("meta-llama/llama-3.1-405b",           [128256, 16384, 53248, 126], [128,  8], 131072, 5e5, 0),
    entry("meta-llama/llama-3.2-1b",             [128256,  2048,  8192,  16], [ 32,  8], 131072, 5e5, TIED),
    entry("meta-llama/llama-3.2-3b",             [128256,  3072,  8192,  28], [ 24,  8], 131072, 5e5, TIED),
    entry("meta-llama/llama-3.3-70b",            [128256,  8192, 28672,  80], [ 64,  8], 131072, 5e5, 0),
    entry("codellama/codellama-7b",              [ 32016,  4096, 11008,  32], [ 32, 32],  16384, 1e6, 0),
    entry("codellama/codellama-13b",             [ 32016,  5120, 13824,  40], [ 40, 40],  16384, 1e6, 0),
    entry("codellama/codellama-34b",             [ 32000,  8192, 22016,  48], [ 64,  8],  16384, 1e6, 0),
    entry("lmsys/vicuna-7b-v1.5",                [ 32000,  4096, 11008,  32], [ 32, 32],   4096, 1e4, 0),
    entry("lmsys/vicuna-13b-v1.5",               [ 32000,  5120, 13824,  40], [ 40, 40],   4096, 1e4, 0),
    entry("openlm-research/open_llama_3b",       [ 32000,  3200,  8640,  26], [ 32, 32],   2048, 1e4, 0),
    entry("mistralai/mistral-7b-v0.1",           [ 32000,  4096, 14336,  32], [ 32,  8],  32768, 1e4, 0),
    entry("mistralai/mistral-7b-v0.3",           [ 32768,  4096, 14336,  32], [ 32,  8],  32768, 1e6, 0),
    entry("mistralai/mistral-nemo-12b",          [131072,  5120, 14336,  40], [ 32,  8], 131072, 1e6, HEAD_128),
    entry("mistralai/mistral-small-24b",         [131072,  5120, 32768,  40], [ 32,  8],  32768, 1e8, HEAD_128),
    entry("mistralai/mistral-large-123b",        [ 32768, 12288, 28672,  88], [ 96,  8], 131072, 1e6, 0),
    entry("qwen/qwen2-0.5b",                     [151936,   896,  4864,  24], [ 14,  2], 131072, 1e6, TIED | QKV_BIAS),
    entry("qwen/qwen2-1.5b",                     [151936,  1536,  8960,  28], [ 12,  2], 131072, 1e6, TIED | QKV_BIAS),
    entry("qwen/qwen2-7b",                       [152064,  3584, 18944,  28], [ 28,  4], 131072, 1e6, QKV_BIAS),
    entry("qwen/qwen2-72b",                      [152064,  8192, 29568,  80], [ 64,  8], 131072, 1e6, QKV_BIAS),
    entry("qwen/qwen2.5-0.5b",                   [151936,   896,  4864,  24], [ 14,  2],  32768, 1e6, TIED | QKV_BIAS),
    entry("qwen/qwen2.5-1.5b",                   [151936,  1536,  8960,  28], [ 12,  2],  32768, 1e6, TIED | QKV_BIAS),
    entry("qwen/qwen2.5-3b",                     [151936,  2048, 11008,  36], [ 16,  2],  32768, 1e6, TIED | QKV_BIAS),
    entry("qwen/qwen2.5-7b",                     [152064,  3584, 18944,  28], [ 28,  4], 131072, 1e6, QKV_BIAS),
    entry("qwen/qwen2.5-14b",                    [152064,  5120, 13824,  48], [ 40,  8], 131072, 1e6, QKV_BIAS),
    entry("qwen/qwen2.5-32b",                    [152064,  5120, 27648,  64], [ 40,  8], 131072, 1e6, QKV_BIAS),
    entry("qwen/qwen2.5-72b",                    [152064,  8192, 29568,  80], [ 64,  8], 131072, 1e6, QKV_BIAS),
    entry("01-ai/yi-6b",                         [ 64000,  4096, 11008,  32], [ 32,  4],   4096, 5e6, 0),
    entry("01-ai/yi-9b",                         [ 64000,  4096, 11008,  48], [ 32,  4],   4096, 1e4, 0),
    entry("01-ai/yi-34b",                        [ 64000,  7168, 20480,  60], [ 56,  8],   4096, 5e6, 0),
    entry("deepseek-ai/deepseek-llm-7b",         [102400,  4096, 11008,  30], [ 32, 32],   4096, 1e4, 0),
    entry("deepseek-ai/deepseek-llm-67b",        [102400,  8192, 22016,  95], [ 64,  8],   4096, 1e4, 0),
    entry("deepseek-ai/deepseek-coder-1.3b",     [ 32256,  2048,  5504,  24], [ 16, 16],  16384, 1e5, 0),
    entry("deepseek-ai/deepseek-coder-6.7b",     [ 32256,  4096, 11008,  32], [ 32, 32],  16384, 1e5, 0),
    entry("deepseek-ai/deepseek-coder-33b",      [ 32256,  7168, 19200,  62], [ 56,  8],  16384, 1e5, 0),
    entry("tiiuae/falcon3-1b",                   [131072,  2048,  8192,  18], [  8,  4],   4096, 1e6, HEAD_256),
    entry("tiiuae/falcon3-7b",                   [131072,  3072, 23040,  28], [ 12,  4],  32768, 1e6, HEAD_256),
    entry("tiiuae/falcon3-10b",                  [131072,  3072, 23040,  40], [ 12,  4],  32768, 1e6, HEAD_256),
    entry("microsoft/phi-3-mini",                [ 32064,  3072,  8192,  32], [ 32, 32],   4096, 1e4, 0),
    entry("microsoft/phi-3-medium",              [ 32064,  5120, 17920,  40], [ 40, 10],   4096, 1e4, 0),
    entry("upstage/solar-10.7b",                 [ 32000,  4096, 14336,  48], [ 32,  8],   4096, 1e4, 0),
];

/// Endings that say what a model was tuned for; its dimensions are the same.
const SUFFIXES: &[&str] = &["-instruct", "-chat", "-base", "-it", "-hf", "-v1.0", "-v1.1", "-v0.2"];

impl Entry {
    fn short_name(&self) -> &'static str {
        self.name.rsplit('/').next().unwrap_or(self.name)
    }

    fn spec(&self) -> ModelSpec {
        let has = |flag| self.traits & flag != 0;
        let head_dim = match () {
            () if has(HEAD_128) => 128,
            () if has(HEAD_256) => 256,
            () => self.hidden / self.heads,
        };
        ModelSpec {
            name: self.short_name().to_owned(),
            architecture: if has(QKV_BIAS) { "qwen2" } else { "llama" }.to_owned(),
            vocab_size: self.vocab,
            hidden_size: self.hidden,
            num_layers: self.layers,
            attention: AttentionSpec {
                qkv_bias: has(QKV_BIAS),
                ..AttentionSpec::plain(
                    self.heads,
                    self.kv_heads,
                    head_dim,
                    RopeSpec::plain(head_dim, self.theta),
                )
            },
            mlp: MlpSpec {
                intermediate_size: self.inner,
                activation: Activation::Silu,
                gated: true,
                bias: false,
            },
            norm: NormSpec::rms(1e-5),
            embedding_scale: None,
            logit_soft_cap: None,
            tie_word_embeddings: has(TIED),
            max_position_embeddings: self.context,
            initializer_range: 0.02,
            bos_token: None,
            eos_tokens: Vec::new(),
        }
    }
}

/// The names of all models, `organisation/model`, in lower case.
pub fn names() -> impl Iterator<Item = &'static str> {
    MODELS.iter().map(|entry| entry.name)
}

/// The model of that name: with or without its organisation, in any case, with or without an ending such as `-Instruct`.
///
/// # Errors
/// There is none: names that are like it.
pub fn find(name: &str) -> Result<ModelSpec, Vec<String>> {
    let mut wanted = name.trim().to_ascii_lowercase();
    loop {
        if let Some(entry) =
            MODELS.iter().find(|e| e.name == wanted || plain(e.short_name()) == plain(&wanted))
        {
            return Ok(entry.spec());
        }
        match SUFFIXES.iter().find_map(|suffix| wanted.strip_suffix(suffix)) {
            Some(shorter) => wanted = shorter.to_owned(),
            None => break,
        }
    }
    let wanted = plain(wanted.rsplit('/').next().unwrap_or(&wanted));
    let mut ranked: Vec<(usize, &str)> =
        MODELS.iter().map(|e| (distance(&plain(e.short_name()), &wanted), e.short_name())).collect();
    ranked.sort();
    Err(ranked.into_iter().take(3).filter(|(d, _)| *d <= 4).map(|(_, name)| name.to_owned()).collect())
}

/// A name without what people leave out: `meta-` before llama, and all marks.
fn plain(name: &str) -> String {
    name.strip_prefix("meta-llama-")
        .map_or(name.to_owned(), |rest| format!("llama-{rest}"))
        .chars()
        .filter(char::is_ascii_alphanumeric)
        .collect()
}

/// Levenshtein's distance.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = before + usize::from(x != y);
            before = row[j + 1];
            row[j + 1] = replaced.min(before + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_a_possible_model_of_about_the_size_in_its_name() {
        assert!(MODELS.len() >= 45);
        for entry in MODELS {
            let spec = entry.spec();
            spec.check().unwrap();
            let size = entry
                .name
                .split(['-', '_'])
                .filter_map(|part| {
                    let scale = match part.as_bytes().last()? {
                        b'b' => 1e9,
                        b'm' => 1e6,
                        _ => return None,
                    };
                    Some(part[..part.len() - 1].parse::<f64>().ok()? * scale)
                })
                .next_back();
            if let Some(size) = size {
                let ratio = spec.parameter_count() as f64 / size;
                assert!(
                    (0.85..1.7).contains(&ratio),
                    "{}: {} parameters",
                    entry.name,
                    spec.parameter_count()
                );
            }
        }
    }

    #[test]
    fn published_parameter_counts_are_met_exactly() {
        for (name, count) in [
            ("smollm2-135m", 134_515_008),
            ("smollm2-360m", 361_821_120),
            ("smollm2-1.7b", 1_711_376_384),
            ("tinyllama-1.1b", 1_100_048_384),
            ("llama-2-7b", 6_738_415_616),
            ("llama-2-13b", 13_015_864_320),
            ("llama-2-70b", 68_976_648_192),
            ("llama-3.1-8b", 8_030_261_248),
            ("llama-3.1-70b", 70_553_706_496),
            ("llama-3.1-405b", 405_853_388_800),
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.2-3b", 3_212_749_824),
            ("mistral-7b-v0.1", 7_241_732_096),
            ("mistral-nemo-12b", 12_247_782_400),
            ("qwen2.5-0.5b", 494_032_768),
            ("qwen2.5-1.5b", 1_543_714_304),
            ("qwen2.5-3b", 3_085_938_688),
            ("qwen2.5-7b", 7_615_616_512),
            ("qwen2.5-14b", 14_770_033_664),
            ("qwen2.5-32b", 32_763_876_352),
            ("qwen2.5-72b", 72_706_203_648),
            ("phi-3-mini", 3_821_079_552),
        ] {
            assert_eq!(find(name).unwrap().parameter_count(), count, "{name}");
        }
    }

    #[test]
    fn names_are_found_however_they_are_written() {
        for name in ["smollm2-135m", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M", "smollm2_135m"] {
            assert_eq!(find(name).unwrap().hidden_size, 576, "{name}");
        }
        assert_eq!(find("meta-llama/Llama-3.1-8B-Instruct").unwrap().vocab_size, 128_256);
        assert_eq!(find("llama-3-8b").unwrap().max_position_embeddings, 8192);
        assert_eq!(find("smollm2-153m").unwrap_err()[0], "smollm2-135m");
        assert!(find("something else altogether").unwrap_err().is_empty());
    }
}
