//! Folders of gpt-oss with experts in MXFP4, as OpenAI publishes them and transformers reads them: `_blocks` and `_scales` in the place of
//! each stack. What is stored in MXFP4 already keeps its bits.

use std::io::{self, Write};
use std::path::Path;

use plimsoll_device::DType;
use serde_json::json;

use super::folder::{Folder, Piece, REST};
use super::{Transcoder, of_tensor};
use crate::layout::{StoredPart, StoredTensor};
use crate::safetensors::StoredDType;
use crate::save::{SaveError, SaveWriter};
use crate::source::RowOrder;
use crate::source::rows::encode_stripe;

/// Values and bytes of a block.
const BLOCK: (u64, usize) = (32, 17);
const TARGET: &str = "a folder in MXFP4";

/// In an order that keeps every tensor aligned.
#[derive(Clone, Copy, PartialEq)]
enum Content {
    Blocks,
    Plain,
    Scales,
}

impl Transcoder<'_> {
    pub(super) fn write_mxfp4(&mut self, folder: &Path) -> Result<u64, SaveError> {
        let spec = self.spec;
        let fail = |reason: &str| Folder::refusal(spec, TARGET, reason);
        if spec.architecture != "gpt_oss" {
            return Err(fail("transformers reads MXFP4 of gpt-oss alone; a GGUF file can hold it"));
        }
        let inner = spec.experts.as_ref().map_or(0, |experts| experts.intermediate_size);
        if [spec.hidden_size, inner].into_iter().any(|size| !size.is_multiple_of(BLOCK.0)) {
            return Err(fail("the rows of its experts are not whole blocks of 32 values"));
        }
        let shards = SaveWriter::new(spec, REST)
            .shard_bytes(self.shard_bytes)
            .shards(|tensor| pieces(tensor).iter().map(Piece::bytes).sum());
        let quantization = json!({
            "quant_method": "mxfp4",
            "modules_to_not_convert":
                ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
        });
        let folder = Folder { path: folder, spec, target: TARGET, quantization, shards: &shards };
        self.write_pieces(
            &folder,
            pieces,
            |content| *content as u8,
            |transcoder, piece, out| match piece.content {
                Content::Plain => transcoder.stream_stored(piece.of, REST, out),
                Content::Blocks | Content::Scales => transcoder.write_stack(piece, out),
            },
        )
    }

    /// The codes or the scales of a stack, an expert at a time.
    fn write_stack(&mut self, piece: &Piece<'_, Content>, out: &mut dyn Write) -> io::Result<()> {
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
        encode_stripe(&values, dtype, &mut bytes).map_err(of_tensor(&part.parameter.name))?;
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

/// The tensors of a file that hold one of the layout's.
fn pieces(tensor: &StoredTensor) -> Vec<Piece<'_, Content>> {
    let piece = |name, dtype, shape, content| Piece::new(tensor, name, dtype, shape, content);
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
