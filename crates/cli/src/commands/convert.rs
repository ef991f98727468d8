//! `plimsoll convert`: a model in another format or type, a few rows at a time.

use plimsoll_device::DType;
use plimsoll_device::cpu::quantize::can_quantize;
use plimsoll_device::cpu::quantize::four_bit::FourBit;
use plimsoll_model::gguf::ggml_type;
use plimsoll_model::{ModelError, ModelFiles, ModelSpec, Parameter, RowSource, Target, Transcoder, Upcycled};
use plimsoll_train::OutputFolder;
use serde_json::json;

use crate::args::{ConvertArgs, OutputArgs};
use crate::failure::Failure;
use crate::models;
use crate::output::outln;
use crate::progress;

/// Of the first values of routers, which are the same each time.
const ROUTER_SEED: u64 = 0;

pub fn run(args: &ConvertArgs) -> Result<(), Failure> {
    let files = models::with_weights(&args.model, "convert", args.output.json)?;
    match args.upcycle {
        None => write(&files, files.spec(), files.weights(), &args.output),
        Some(experts) => {
            let upcycled = Upcycled::new(files.spec(), files.weights(), experts, ROUTER_SEED)
                .map_err(|error| Failure::usage(format!("--upcycle {experts}: {error}")))?;
            write(&files, upcycled.spec(), &upcycled, &args.output)
        }
    }
}

/// What `--output` and `--dtype` ask for together.
fn target(args: &OutputArgs) -> Result<Target, Failure> {
    let gguf = args.output.extension().is_some_and(|extension| extension == "gguf");
    let name = args.dtype.to_lowercase();
    let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name);
    let in_gguf = |dtype: DType| ggml_type(dtype).is_some() && (dtype.is_float() || can_quantize(dtype));
    match dtype {
        Some(dtype) if gguf && in_gguf(dtype) => Ok(Target::Gguf(dtype)),
        Some(dtype) if !gguf && dtype.is_float() => Ok(Target::HuggingFace(dtype)),
        Some(DType::Int8) if !gguf => Ok(Target::EightBit),
        Some(DType::Mxfp4) if !gguf => Ok(Target::Mxfp4),
        Some(dtype) if !gguf && FourBit::of(dtype).is_some() => {
            let kind = FourBit::of(dtype).unwrap_or(FourBit::Nf4);
            Ok(Target::FourBit { kind, doubly: !dtype.has_rows() })
        }
        _ => Err(Failure::usage(format!(
            "--dtype {}: a GGUF file holds f32, bf16, f16, q8_0, q5_0, q5_1, q4_0, q4_1, q4_k, q6_k or mxfp4; a folder \
             f32, bf16, f16, nf4, nf4_f32, fp4, fp4_f32, int8 or mxfp4",
            args.dtype
        ))),
    }
}

/// Writes a model of that shape with the values of `source`, and the tokenizer of `files`.
pub fn write(
    files: &ModelFiles,
    spec: &ModelSpec,
    source: &dyn RowSource,
    args: &OutputArgs,
) -> Result<(), Failure> {
    let target = target(args)?;
    if args.output.exists() && !args.force {
        return Err(Failure::usage(format!(
            "{} is there already; choose another --output, or --force to replace it",
            args.output.display()
        )));
    }
    // Nothing is written into the folder of a run that is under way.
    let _folder = args.output.is_dir().then(|| OutputFolder::take(&args.output)).transpose()?;
    let total: u64 = spec.parameters().iter().map(Parameter::elements).sum();
    let bar = progress::counter(total / 1_000_000, "million parameters", args.json);
    let mut show = |done: u64, _: u64| bar.set_position(done / 1_000_000);
    let mut writer = Transcoder::new(spec, source, &mut show);
    if let Some(size) = args.max_shard_size {
        writer = writer.shard_bytes(size.0);
    }
    let mut notes = Vec::new();
    let bytes = match target {
        Target::Gguf(dtype) => {
            let tokenizer = unless_missing(files.tokenizer_fields(), &mut notes)?;
            writer.write_gguf(&args.output, dtype, tokenizer.as_ref())?
        }
        _ => {
            let tokenizer = unless_missing(files.tokenizer(), &mut notes)?;
            let bytes = writer.write_folder(&args.output, target)?;
            if let Some(tokenizer) = tokenizer {
                tokenizer.save(&args.output).map_err(ModelError::from)?;
            }
            bytes
        }
    };
    bar.finish_and_clear();
    if args.json {
        let document = json!({
            "output": args.output, "dtype": args.dtype, "bytes": bytes, "parameters": total, "notes": notes,
        });
        outln!("{document}")?;
    } else {
        for note in notes {
            outln!("note: {note}")?;
        }
        let bits = bytes as f64 * 8.0 / total.max(1) as f64;
        outln!(
            "{}: {} ({bits:.2} bits a parameter)",
            args.output.display(),
            plimsoll_memory::ByteSize(bytes)
        )?;
    }
    Ok(())
}

/// A tokenizer that is not there is left out with a note; one that is there is carried over or refused.
fn unless_missing<T>(
    tokenizer: Result<T, ModelError>,
    notes: &mut Vec<String>,
) -> Result<Option<T>, Failure> {
    match tokenizer {
        Ok(tokenizer) => Ok(Some(tokenizer)),
        Err(error) if error.is_missing_tokenizer() => {
            notes.push(format!("the tokenizer is left out: {error}"));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}
