//! `transformers.BitsAndBytesConfig`: how frozen weights beside adapters are stored.

use std::collections::BTreeSet;

use plimsoll_device::DType;
use plimsoll_step::ZeroStage;

use super::ExportError;
use super::sheet::{Page, Sheet};

/// How bitsandbytes stores weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Storage {
    /// Blocks of 64 with 4-bit codes; `double`: the blocks' scales are 8-bit codes, too.
    FourBit { kind: &'static str, double: bool },
    /// Rows of 8-bit integers.
    EightBit,
}

/// The one storage of all frozen weights; `None` where none is quantised.
pub(super) fn storage(sheet: &Sheet<'_>) -> Result<Option<Storage>, ExportError> {
    let types: BTreeSet<&str> = match sheet.adapters() {
        None => return Ok(None),
        Some(adapters) => adapters.weight_types.values().map(|dtype| dtype.name()).collect(),
    };
    let types: Vec<&str> = types.into_iter().collect();
    let four = |kind, double| Ok(Some(Storage::FourBit { kind, double }));
    match types.as_slice() {
        [] => Ok(None),
        [one] if *one == DType::Nf4.name() => four("nf4", true),
        [one] if *one == DType::Fp4.name() => four("fp4", true),
        [one] if *one == DType::Nf4F32.name() => four("nf4", false),
        [one] if *one == DType::Fp4F32.name() => four("fp4", false),
        [one] if *one == DType::Int8.name() => Ok(Some(Storage::EightBit)),
        several => Err(ExportError::Quantisation { format: sheet.format, types: several.join(", ") }),
    }
}

/// The type that products are computed in, by torch's name.
pub(super) fn compute_dtype(sheet: &Sheet<'_>) -> &'static str {
    match sheet.settings().precision.activations {
        DType::Bf16 => "bfloat16",
        DType::F16 => "float16",
        _ => "float32",
    }
}

pub(super) fn document(sheet: &mut Sheet<'_>) -> Result<Page, ExportError> {
    sheet.head("Keyword arguments: from_pretrained(..., quantization_config=BitsAndBytesConfig(**json.load(open(FILE)))).");
    let storage = storage(sheet)?.ok_or(ExportError::NotQuantised { format: sheet.format })?;
    let mut page = Page::default();
    match storage {
        Storage::FourBit { kind, double } => {
            page.put("load_in_4bit", true);
            page.put("bnb_4bit_quant_type", kind);
            page.put("bnb_4bit_use_double_quant", double);
            page.put("bnb_4bit_compute_dtype", compute_dtype(sheet));
            // Ranks that share weights out share tensors of one type alone.
            if sheet.stage() == ZeroStage::Weights && sheet.ranks() > 1 {
                page.put("bnb_4bit_quant_storage", compute_dtype(sheet));
            }
        }
        Storage::EightBit => {
            page.put("load_in_8bit", true);
            sheet.note("training.quantization", "bitsandbytes makes inputs 8-bit integers, too, but for outliers; Plimsoll makes the weights floats again.");
        }
    }
    sheet.say("The embedding, the norms and the head are in the type that the model is loaded in: dtype in from_pretrained.");
    Ok(page)
}
