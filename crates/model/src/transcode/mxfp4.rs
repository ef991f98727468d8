//! Folders of gpt-oss with experts in MXFP4, as OpenAI publishes them and transformers reads them: `_blocks` and `_scales` in the place of
//! each stack. What is stored in MXFP4 already keeps its bits.

use std::io::{self, Write};
use std::path::Path;

use plimsoll_device::DType;
use serde_json::{Value, json};

use super::Transcoder;
use crate::hf_config::{CONFIG_NAME, GENERATION_CONFIG_NAME, config_json, generation_config_json};
use crate::layout::{StoredPart, StoredTensor};
use crate::safetensors::{INDEX_NAME, NewTensor, StoredDType, write_in_order};
use crate::save::{METADATA, SaveError, SaveWriter, Staging, index, shard_names};
use crate::source::RowOrder;
use crate::source::rows::encode_stripe;

/// Values and bytes of a block.
const BLOCK: (u64, usize) = (32, 17);
/// The type of everything that is not packed.
const REST: DType = DType::Bf16;

/// A tensor of a file and what is in it.
struct Piece<'t> {
    tensor: NewTensor,
    of: &'t StoredTensor,
    content: Content,
}

/// In an order that keeps every tensor aligned.
#[derive(Clone, Copy, PartialEq, PartialOrd)]
enum Content {
    Blocks,
    Plain,
    Scales,
}

impl Transcoder<'_> {
    pub(super) fn write_mxfp4(&mut self, folder: &Path) -> Result<u64, SaveError> {
        let spec = self.spec;
        let fail = |reason: &str| SaveError::Inexpressible {
            model: spec.name.clone(),
            target: "a folder in MXFP4",
            reason: reason.to_owned(),
        };
        if spec.architecture != "gpt_oss" {
            return Err(fail("transformers reads MXFP4 of gpt-oss alone; a GGUF file can hold it"));
        }
        let inner = spec.experts.as_ref().map_or(0, |experts| experts.intermediate_size);
        if [spec.hidden_size, inner].into_iter().any(|size| !size.is_multiple_of(BLOCK.0)) {
            return Err(fail("the rows of its experts are not whole blocks of 32 values"));
        }
        let mut config: Value = serde_json::from_str(&config_json(spec, REST)?)
            .map_err(|error| fail(&format!("its configuration is no JSON: {error}")))?;
        config["quantization_config"] = json!({
            "quant_method": "mxfp4",
            "modules_to_not_convert":
                ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        });
        let writer = SaveWriter::new(spec, REST).shard_bytes(self.shard_bytes);
        let shards = writer.shards(|tensor| pieces(tensor).iter().map(bytes).sum());
        let staging = Staging::new(folder)?;
        let mut written = staging.write(CONFIG_NAME, &format!("{config:#}\n"))?;
        written += staging.write(GENERATION_CONFIG_NAME, &generation_config_json(spec))?;
        let names = shard_names(shards.len());
        let mut listed = Vec::new();
        for (name, shard) in names.iter().zip(&shards) {
            let mut all: Vec<Piece<'_>> = shard.iter().flat_map(pieces).collect();
            all.sort_by(|a, b| a.content.partial_cmp(&b.content).unwrap_or(std::cmp::Ordering::Equal));
            let order: Vec<&NewTensor> = all.iter().map(|piece| &piece.tensor).collect();
            let mut next = all.iter();
            written += write_in_order(&staging.path(name), &METADATA, &order, |_, out| match next.next() {
                Some(Piece { of, content: Content::Plain, .. }) => self.stream_stored(of, REST, out),
                Some(piece) => self.write_stack(piece, out),
                None => Ok(()),
            })?;
            listed.extend(all.into_iter().map(|piece| {
                let size = bytes(&piece);
                (piece.tensor.name, name.as_str(), size)
            }));
        }
        if names.len() > 1 {
            let tensors = listed.iter().map(|(tensor, file, bytes)| (tensor.as_str(), *file, *bytes));
            written += staging.write(INDEX_NAME, &index(tensors))?;
        }
        staging.commit(folder, &names)?;
        Ok(written)
    }

    /// The codes or the scales of a stack, an expert at a time.
    fn write_stack(&mut self, piece: &Piece<'_>, out: &mut dyn Write) -> io::Result<()> {
        let RowOrder::Transposed { step, .. } = piece.of.rows else { return Ok(()) };
        for parts in piece.of.parts.chunks(step.max(1) as usize) {
            let stored: Vec<Vec<u8>> =
                parts.iter().map(|part| self.mxfp4_rows(part)).collect::<io::Result<_>>()?;
            let columns = piece.of.columns();
            let row_bytes = DType::Mxfp4.bytes_for(columns).unwrap_or(0).max(1) as usize;
            let rows = parts.first().map_or(0, StoredPart::count) as usize;
            let mut bytes = Vec::new();
            for row in 0..rows {
                for stored in &stored {
                    let own = stored.get(row * row_bytes..(row + 1) * row_bytes).unwrap_or_default();
                    own.chunks_exact(BLOCK.1).for_each(|block| put(block, piece.content, &mut bytes));
                }
            }
            out.write_all(&bytes)?;
            if piece.content == Content::Blocks {
                self.advance(parts.iter().map(StoredPart::elements).sum());
            }
        }
        Ok(())
    }

    /// The rows of a part, in blocks as this engine keeps them.
    fn mxfp4_rows(&mut self, part: &StoredPart) -> io::Result<Vec<u8>> {
        let (dtype, rows) = (DType::Mxfp4, part.rows.clone());
        let mut bytes = vec![0; dtype.bytes_for(part.elements()).unwrap_or(0) as usize];
        if self.source.blocks(&part.parameter, rows.clone(), dtype, &mut bytes).map_err(io::Error::other)? {
            return Ok(bytes);
        }
        let mut values = vec![0.0; part.elements() as usize];
        self.source.rows(&part.parameter, rows, &mut values).map_err(io::Error::other)?;
        encode_stripe(&values, dtype, &mut bytes).map_err(io::Error::other)?;
        Ok(bytes)
    }
}

/// Appends the scale of a block, or its codes: two that follow each other in a byte, the first in the lower half.
fn put(block: &[u8], content: Content, out: &mut Vec<u8>) {
    let Some((scale, codes)) = block.split_first() else { return };
    if content == Content::Scales {
        return out.push(*scale);
    }
    let code = |place: usize| match codes.get(place % 16) {
        Some(byte) if place < 16 => byte & 15,
        Some(byte) => byte >> 4,
        None => 0,
    };
    out.extend((0..16).map(|i| code(2 * i) | code(2 * i + 1) << 4));
}

fn bytes(piece: &Piece<'_>) -> u64 {
    piece.tensor.dtype.bytes_for(&piece.tensor.shape).unwrap_or(0)
}

/// The tensors of a file that hold one of the layout's.
fn pieces(tensor: &StoredTensor) -> Vec<Piece<'_>> {
    let piece = |name: String, dtype, shape: Vec<u64>, content| Piece {
        tensor: NewTensor { name, dtype, shape },
        of: tensor,
        content,
    };
    let (RowOrder::Transposed { total, .. }, Some(count)) = (tensor.rows, tensor.stack) else {
        return vec![piece(tensor.name.clone(), StoredDType::BF16, tensor.shape(), Content::Plain)];
    };
    let blocks = tensor.columns() / BLOCK.0;
    let name = |suffix: &str| format!("{}_{suffix}", tensor.name);
    vec![
        piece(name("blocks"), StoredDType::U8, vec![count, total, blocks, 16], Content::Blocks),
        piece(name("scales"), StoredDType::U8, vec![count, total, blocks], Content::Scales),
    ]
}
